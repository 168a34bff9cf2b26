"""Open registries: a name, one line about it, and the thing itself; filled by decorators, ours and other packages'."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, ClassVar, Generic, Self, TypeVar, dataclass_transform, overload

from pydantic import BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic_core import CoreSchema, core_schema

from fedaudit.utils.distributions import lacking, misfit
from fedaudit.utils.errors import BadInput, unknown_name
from fedaudit.utils.renamed import GROUPS, PLUGINS, of_plugin
from fedaudit.utils.validation import NamedSpec, explain, from_name, safe_name

T = TypeVar("T")
U = TypeVar("U")

# Settings are checked when a plug-in is made, and unknown ones are refused. One whose name is a word of Python's
# (``lambda_``) is written without the underscore in scenarios.
SETTINGS = ConfigDict(
    extra="forbid",
    arbitrary_types_allowed=True,
    alias_generator=lambda name: name.removesuffix("_"),
    populate_by_name=True,
)


@dataclass(frozen=True)
class Entry(Generic[T]):
    """One registered thing: its name, a one-line summary, the thing, what else its kind declares, and its package."""

    name: str
    summary: str
    value: T
    info: dict[str, Any] = field(default_factory=dict)
    package: str = "fedaudit"


class Registry(Generic[T]):
    """Names of one kind. ``register`` is a decorator; an unknown name is answered with the nearest one.

    Args:
        kind: what its entries are, in words, for messages.
        group: of the entry points by which installed packages add theirs; they are loaded when the registry is first
            looked into. None: it has none.
    """

    def __init__(self, kind: str, group: str | None = None) -> None:
        self.kind = kind
        self.group = group
        self._entries: dict[str, Entry[T]] = {}
        self._distributions: dict[str, str] = {}
        self._loaded = False

    def register(self, name: str, summary: str, *, module: str | None = None, **info: Any) -> Callable[[U], U]:
        """Return a decorator that adds what it decorates under ``name``.

        Args:
            name: in scenarios.
            summary: one line for ``fedaudit list``.
            module: of the package that it is of; by default the thing's own.
            info: what else ``fedaudit list --json`` says of it.

        Raises:
            ValueError: the name is taken.
        """
        if name in self._entries:
            raise ValueError(f"{self.kind} '{name}' is registered twice")

        def add(value: U) -> U:
            made = value.func if isinstance(value, functools.partial) else value
            package = (module or made.__module__).partition(".")[0]
            self._entries[name] = Entry(name, summary, value, info, package)  # type: ignore[arg-type]
            return value

        return add

    def __getitem__(self, name: str) -> Entry[T]:
        self._load()
        try:
            return self._entries[name if name in self._entries else of_plugin(self.group, name)]
        except KeyError:
            elsewhere = lacking(self.group, name)
            told = f"{self.kind} '{name}' {elsewhere}" if elsewhere else unknown_name(self.kind, name, self._entries)
            raise BadInput(told) from None

    def __contains__(self, name: object) -> bool:
        self._load()
        return name in self._entries or PLUGINS.get(self.group or "", {}).get(str(name)) in self._entries

    def __iter__(self) -> Iterator[Entry[T]]:
        self._load()
        return iter(self._entries.values())

    def names(self) -> list[str]:
        """Return the registered names, in the order in which they were added."""
        self._load()
        return list(self._entries)

    def distribution(self, entry: Entry[T]) -> str:
        """Return the name of the distribution that added an entry, as pip knows it."""
        self._load()
        return self._distributions.get(entry.package, entry.package)

    def _load(self) -> None:
        """Import what installed packages add, once. One that fails is named in a line and left out."""
        if self._loaded or self.group is None:
            return
        self._loaded = True  # first, since what is imported may look into the registry
        from importlib.metadata import entry_points

        points = [*entry_points(group=self.group), *entry_points(group=GROUPS.get(self.group, ""))]
        for point in points:
            package = point.dist.name if point.dist else point.value
            self._distributions[point.module.partition(".")[0]] = package
            if why := misfit(package):
                _warn(f"{why}; what it has is left out")
                continue
            try:
                point.load()
            except (Exception, SystemExit) as error:
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                _warn(f"the package '{package}' can't add its {self.kind} '{point.name}': {reason}")


@functools.cache
def _warn(line: str) -> None:
    """Say it once, and not in workers again."""
    if multiprocessing.parent_process() is None:
        logging.getLogger("fedaudit").warning("fedaudit: warning: %s", line)


class Plugin:
    """What can be added by name: a class whose fields are its settings.

    A subclass is a keyword-only dataclass, made and checked by :func:`register`. What it keeps from round to round, if
    anything, are fields with ``field(init=False, default=…)``: tensors and plain values, in dicts, lists and tuples.

    Class attributes:
        registry: which one it goes into; set by the base of each kind.
        name: in scenarios.
        summary: one line for ``fedaudit list``.
        paper: its source.
    """

    registry: ClassVar[Registry[Any]]
    name: ClassVar[str]
    summary: ClassVar[str]
    paper: ClassVar[str] = ""

    @classmethod
    def info(cls) -> dict[str, Any]:
        """Return what ``fedaudit list --json`` says beside name and summary."""
        return {"paper": cls.paper}

    def settings(self) -> dict[str, Any]:
        """Return all settings by their names in scenarios, JSON-serialisable."""
        return {_word(f.name): getattr(self, f.name) for f in fields(self) if f.init}  # type: ignore[arg-type]

    def written(self) -> dict[str, Any]:
        """Return its name and all settings, as a scenario has them."""
        return {"name": self.name, **self.settings()}

    def changed(self) -> dict[str, Any]:
        """Return the settings that aren't the defaults."""
        try:
            usual = type(self)().settings()
        except BadInput:  # one has no default
            usual = {}
        return {name: value for name, value in self.settings().items() if name not in usual or value != usual[name]}

    def anew(self) -> Self:
        """Return another with the same settings that remembers nothing."""
        return replace(self)  # type: ignore[type-var]

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.written() == other.written()

    __hash__ = object.__hash__

    def state_dict(self) -> dict[str, Any]:
        """Return what changes from round to round, for a checkpoint; not a copy."""
        return {f.name: getattr(self, f.name) for f in fields(self) if not f.init}  # type: ignore[arg-type]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a copy of what :meth:`state_dict` returned."""
        for name, value in copy.deepcopy(dict(state)).items():
            setattr(self, name, value)


P = TypeVar("P", bound=Plugin)
C = TypeVar("C", bound=type)  # Plugin's subclasses; no tighter, since a pydantic dataclass is typed as something else


@overload
def register(cls: C, /) -> C: ...
@overload
def register(*, frozen: bool = True) -> Callable[[C], C]: ...
@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field, Field))
def register(cls: C | None = None, /, *, frozen: bool = True) -> C | Callable[[C], C]:
    """Make a plug-in's class a validated, keyword-only dataclass and add it to the registry of its kind.

    The same decorator for attacks, aggregators, client-side defences and behaviours: ``@register`` above the class, or
    ``@register(frozen=False)`` where it keeps state from round to round. A class that is a dataclass already stays so.

    Raises:
        TypeError: it is no plug-in.
        ValueError: the name is taken or can't be used, or the class lacks one.
    """

    def add(plugin: C) -> C:
        if not issubclass(plugin, Plugin) or not hasattr(plugin, "registry"):
            raise TypeError(f"{plugin.__name__} is neither an Attack, an Aggregator, a ClientDefence nor a Behaviour")
        for attribute in ("name", "summary"):
            if not isinstance(getattr(plugin, attribute, None), str):
                raise ValueError(f"{plugin.__name__} has no {attribute}: give it a class attribute '{attribute}'")
        made: Any = plugin
        if "__dataclass_fields__" not in vars(plugin):
            made = checked_dataclass(plugin, kw_only=True, frozen=frozen, eq=frozen, config=SETTINGS)
        made = _told_in_a_line(made)
        registered: C = plugin.registry.register(safe_name(plugin.name), plugin.summary, **plugin.info())(made)
        return registered

    return add if cls is None else add(cls)


def _told_in_a_line(plugin: Any) -> Any:
    """Return the class, which raises BadInput in place of pydantic's errors, and whose help shows its settings."""
    init, kind, name = plugin.__init__, plugin.registry.kind, plugin.name

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **settings: Any) -> None:
        try:
            init(self, *args, **settings)
        except ValidationError as error:
            known = settings_of(type(self))
            if not known and settings:
                raise BadInput(f"{kind} '{name}' has no settings; leave '{next(iter(settings))}' out") from None
            raise BadInput(f"{kind} '{name}': {explain(error, known=known)}") from None
        except UnicodeEncodeError:  # pydantic's, where it looks for a truth value
            raise BadInput(f"{kind} '{name}': a setting has a character that isn't one, half of a pair") from None

    shown = inspect.signature(plugin)
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    __init__.__signature__ = shown.replace(parameters=[own, *shown.parameters.values()])  # type: ignore[attr-defined]
    __init__.__module__, __init__.__doc__ = plugin.__module__, "Check the settings; BadInput says what is wrong."
    plugin.__init__ = __init__
    return plugin


def settings_of(plugin: type[Plugin]) -> list[str]:
    """Return the names of a plug-in's settings, as scenarios write them."""
    return [_word(f.name) for f in fields(plugin) if f.init]  # type: ignore[arg-type]


def make(registry: Registry[type[P]], name: str, settings: Mapping[str, Any] | None = None) -> P:
    """Return the plug-in ``name`` with ``settings``.

    Raises:
        BadInput: no such name or setting, or a value that isn't allowed.
    """
    return registry[name].value(**(settings or {}))


def listed(given: Any, what: str) -> list[str | Mapping[str, Any] | Plugin]:
    """Return the plug-ins of the setting ``what`` as a list: objects, names, or mappings of a name and settings."""
    single = isinstance(given, str | Mapping | Plugin) or not isinstance(given, Iterable)
    found = [given] if single else list(given)
    for one in found:
        if not isinstance(one, str | Mapping | Plugin):
            shown = f"the class {one.__name__}: give {one.__name__}()" if isinstance(one, type) else repr(one)[:80]
            raise BadInput(f"{what} has {shown}; each is an object, a name, or a mapping of name and settings")
    return found


class _ByName:
    """How a plug-in is a field of a scenario: made once from a name, or a name and settings, and written as these."""

    def __get_pydantic_core_schema__(self, kind: type[Plugin], handler: GetCoreSchemaHandler) -> CoreSchema:
        def made(value: Any, named: Callable[[Any], NamedSpec]) -> Plugin:
            if isinstance(value, kind):
                if getattr(value, "name", None) not in kind.registry:
                    raise BadInput(f"{type(value).__name__} isn't registered: decorate the class with @register")
                return value
            spec = named(value)
            plugin: Plugin = make(kind.registry, spec.name, spec.settings())
            return plugin

        return core_schema.no_info_wrap_validator_function(
            made,
            handler.generate_schema(Annotated[NamedSpec, BeforeValidator(from_name)]),
            serialization=core_schema.plain_serializer_function_ser_schema(kind.written),
        )


# ``PluginField[Attack]``: an attack, or its name, or a mapping of its name and settings.
PluginField = Annotated[P, _ByName()]


def _word(field_name: str) -> str:
    return field_name.removesuffix("_")
