"""Run a Flower app in this process, unchanged: no Ray, no SuperLink, one client after the other."""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.metadata
import importlib.util
import itertools
import logging
import numbers
import re
import sys
import threading
import time
import tomllib
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid

from fedaudit.adapters.flower.app_file import NODES, Config, flat, read_app
from fedaudit.adapters.flower.messages import is_training, server_round
from fedaudit.adapters.own_modules import lies_in
from fedaudit.defences.client_defences import ClientDefence
from fedaudit.utils.errors import BadInput
from fedaudit.utils.machine import interrupted

Call = Callable[[Message, Context], Message]
Watch = Callable[[int, Message, Context, Call], Message]  # the round from 0, and what a mod of Flower's gets

FIRST_NODE = 1000  # a node's id is this and its partition's
SERVER, RUN, TASK = 1, 1, 1  # ids; a SuperLink's is 1
_ASKED = 10  # most times that a ServerApp asks for the nodes, which are always the same, before it sends something
_AT_LEAST = 10.0  # seconds that an app has, however little time is given: its first client must have answered
CLIENT_APP_RAISED = 2  # Flower's code of that error
KNOWN = ((1, 41), (1, 43))  # the versions whose private parts are as below


class _DroppedOut(BaseException):
    """A client waits longer than the server does."""


class Enough(BaseException):
    """The rounds that were asked for are done, or nothing more is wanted: it ends the app's ServerApp."""


class Late(Enough):
    """The time that an app has is over."""


@dataclass
class App:
    """A Flower app, loaded: its two halves, its config, and its own number of nodes if it says one."""

    name: str
    folder: Path
    server: Any
    client: Any
    config: Config
    nodes: int | None


@dataclass
class Run:
    """What a run of an app was like: rounds of training, answers that weren't errors, a line for each client error.

    ``dropped``: a line for each answer that the server, which had a timeout, didn't wait for.
    """

    rounds: int = 0
    replies: int = 0
    failures: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    stopped: bool = False
    nodes: int = 0


@contextlib.contextmanager
def loaded(folder: Path | str) -> Iterator[App]:
    """Import the app in ``folder``, as its pyproject.toml names its parts; its modules are forgotten at the end."""
    folder = Path(folder).resolve()
    written = read_app(folder)
    components = written.get("components", {})
    refs = [components.get(part) for part in ("serverapp", "clientapp")]
    if not all(isinstance(ref, str) and re.fullmatch(r"[\w.]+:[\w.]+", ref) for ref in refs):
        raise BadInput(
            f"{folder / 'pyproject.toml'}: [tool.flwr.app.components] needs serverapp and clientapp, as 'module:name'"
        )
    path, kept = list(sys.path), {}
    for root in {ref.partition(":")[0].partition(".")[0] for ref in refs}:  # another app may have modules of this name
        for name in [name for name in sys.modules if name.partition(".")[0] == root]:
            kept[name] = sys.modules.pop(name)
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        server, client = (_load(ref, folder) for ref in refs)
        yield App(written["name"], folder, server, client, flat(written.get("config", {})), written["nodes"])
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - before:
            if lies_in(sys.modules[name], folder):
                del sys.modules[name]
        sys.modules.update(kept)


def run_app(
    app: App | Path | str,
    *,
    nodes: int | None = None,
    config: Mapping[str, Any] | None = None,
    rounds: int | None = None,
    until: float | None = None,
    watch: Watch | None = None,
    quiet: bool = True,
) -> Run:
    """Run a Flower app, one client after the other, with ``partition-id`` and ``num-partitions`` as in a simulation.

    Node i of the federation has the node id 1000 + i.

    Args:
        app: its folder, the one with pyproject.toml; or one that is :func:`loaded`.
        nodes: how many; default: as many as its pyproject.toml says, else 10.
        config: instead of values of ``[tool.flwr.app.config]``.
        rounds: rounds of training after which the app is stopped; default: when it ends.
        until: seconds since 1970 after which no client is asked any more, once one has answered; None: no limit. After
            twice the time that there was until then, and ten seconds at least, the app is stopped wherever it is.
        watch: called in place of the client for every message that it gets, with the round and the client to call;
            may raise :class:`Enough`.
        quiet: keep back what Flower logs.

    Returns:
        What it was like. A client that raises is an error reply, as in a deployment, and a printed line.

    Raises:
        BadInput: it can't be loaded, a config key isn't known, or the ServerApp fails.
    """
    if not isinstance(app, App):
        with loaded(app) as found:
            return run_app(found, nodes=nodes, config=config, rounds=rounds, until=until, watch=watch, quiet=quiet)
    number = nodes or app.nodes or NODES
    if number < 1 or (rounds is not None and rounds < 1):
        raise BadInput(f"{number} nodes and {rounds} rounds: both must be 1 or more")
    fused = _fused(app, config or {})
    logger = logging.getLogger("flwr")
    level = logger.level
    with _in_a_task() as run:
        grid = _InProcessGrid(app, number, fused, run, rounds, until, watch)
        if quiet:
            logger.setLevel(logging.ERROR)
        try:
            now = time.time()
            with interrupted(None if until is None else max(2 * until - now, now + _AT_LEAST), Late):
                app.server(grid, Context(RUN, SERVER, {}, RecordDict(), dict(fused)))
        except Late:
            grid.seen.stopped = True
        except Enough:
            pass
        except Exception as error:
            failed = f": {grid.seen.failures[0]}" if grid.seen.failures and not grid.seen.replies else ""
            raise BadInput(f"the app's ServerApp failed: {_in_words(error, app.folder)}{failed}") from error
        finally:
            logger.setLevel(level)
    return grid.seen


@contextlib.contextmanager
def _patient(seconds: float | None) -> Iterator[None]:
    """Raise :class:`_DroppedOut` in place of a sleep of this thread's that is at least as long as the server waits."""
    clock: Any = time
    own, here = time.sleep, threading.get_ident()

    def sleep(length: float) -> None:
        if seconds is not None and length >= seconds and threading.get_ident() == here:
            raise _DroppedOut
        own(length)

    clock.sleep = sleep
    try:
        yield
    finally:
        clock.sleep = own


def _waited_for(thread: int) -> int:
    """Return how many nodes the older API waits for in that thread, which it does for a day; 0: it doesn't."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code.co_name == "wait_for" and isinstance(number := frame.f_locals.get("num_clients"), int):
            return number
        frame = frame.f_back
    return 0


def parse_config(texts: Iterable[str]) -> Config:
    """Read ``key=value key=value …`` as ``flwr run --run-config`` does: values are TOML's.

    Raises:
        BadInput: a text isn't like that.
    """
    values: Config = {}
    for text in texts:
        pairs = re.findall(r"(\S+?)=('[^']*'|\"[^\"]*\"|\S+)", text)
        if not pairs:
            raise BadInput(f"--run-config {text}: give key=value, several in one pair of quotes")
        for key, value in pairs:
            try:
                values |= flat(tomllib.loads(f"{key} = {value}"))
            except tomllib.TOMLDecodeError:
                raise BadInput(
                    f"--run-config {key}={value}: not a value of TOML; text needs quotes of its own"
                ) from None
    return values


@contextlib.contextmanager
def _in_a_task() -> Iterator[Any]:
    """Tell Flower that this process runs a task, as 1.41 and later want before a Message is made; yield a Grid's run.

    Nothing else touches what Flower keeps private. BadInput: this version of Flower isn't known.
    """
    version = importlib.metadata.version("flwr")
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    unknown = BadInput(f"flwr {version} can't run an app in process: pip install 'flwr>=1.41,<1.43'")
    if not KNOWN[0] <= numbers < KNOWN[1]:
        raise unknown
    try:
        from flwr.supercore.run import Run as FlowerRun
        from flwr.supercore.task_identity import TaskIdentity

        run = FlowerRun.create_empty(RUN)
        before = {name: getattr(TaskIdentity, name) for name in ("_task_id", "_run_id", "_node_id")}
    except (ImportError, AttributeError):
        raise unknown from None
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = TASK, RUN, SERVER
    try:
        yield run
    finally:
        for name, value in before.items():
            setattr(TaskIdentity, name, value)


class _InProcessGrid(Grid):  # type: ignore[misc]
    """Flower's Grid, whose nodes are calls of the ClientApp."""

    def __init__(
        self,
        app: App,
        nodes: int,
        config: Config,
        run: Any,
        rounds: int | None,
        until: float | None,
        watch: Watch | None,
    ) -> None:
        self.seen = Run(nodes=nodes)
        self._app, self._run, self._rounds, self._until = app, run, rounds, until
        self._watch = watch or (lambda _index, message, context, call: call(message, context))
        self._contexts = {
            FIRST_NODE + i: Context(
                RUN, FIRST_NODE + i, {"partition-id": i, "num-partitions": nodes}, RecordDict(), dict(config)
            )
            for i in range(nodes)
        }
        self._ids = itertools.count(1)
        self._replies: dict[str, Message] = {}
        self._round: object = None
        self._thread, self._asked, self._wanted = threading.get_ident(), 0, 0
        self._patience: float | None = None
        # The older API sends from threads. Clients train one after the other, so that each is watched by itself.
        self._lock = threading.RLock()

    def set_run(self, run: Any) -> None:
        self._run = run

    @property
    def run(self) -> Any:
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> list[int]:
        if threading.get_ident() != self._thread:  # the older API's own thread asks as long as it runs
            self._wanted = max(self._wanted, _waited_for(self._thread))
            return list(range(FIRST_NODE, FIRST_NODE + max(len(self._contexts), self._wanted)))
        self._asked += 1
        self._check_nodes()
        return list(self._contexts)

    def _check_nodes(self) -> None:
        if self._asked > _ASKED or self._wanted > len(self._contexts):
            wanted = f"{self._wanted} nodes, but there are {len(self._contexts)}"
            more = f"more nodes than the {len(self._contexts)} that there are"
            raise BadInput(f"it waits for {wanted if self._wanted else more}; give more (nodes=…)")

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        with self._lock:
            self._check_nodes()
            batch = list(messages)
            self._asked = 0
            key = str(next(self._ids))
            return [self._push(message, f"{key}.{i}", key) for i, message in enumerate(batch)]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        with self._lock:
            return [self._replies.pop(key) for key in message_ids if key in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        with self._lock:
            self._patience = timeout
            try:
                return self.pull_messages(self.push_messages(messages))
            finally:
                self._patience = None

    def _push(self, message: Message, key: str, batch: str) -> str:
        """Have the client answer, and keep the answer under ``key``."""
        if self._until is not None and self.seen.replies and time.time() > self._until:
            self.seen.stopped = True
            raise Enough
        sent = copy.deepcopy(message)  # nobody can change what others hold, as if it had travelled
        sent.metadata.__dict__["_message_id"] = key
        told = server_round(sent)
        if training := is_training(sent):
            self._count(told or f"batch {batch}")
        node = sent.metadata.dst_node_id
        if node not in self._contexts:
            raise BadInput(f"the app sends a message to node {node}, which there isn't")
        try:
            index = max(0, self.seen.rounds - 1) if told is None else told - 1
            with _patient(self._patience):
                reply = self._watch(index, copy.deepcopy(sent), self._contexts[node], self._app.client)
        except _DroppedOut:
            self.seen.dropped.append(
                f"client {node} dropped out of round {self.seen.rounds}: it would sleep as long as the server waits "
                f"({self._patience:g} s), which was not waited for"
            )
            return key
        except Exception as error:
            line = f"client {node} failed in round {self.seen.rounds}: {_in_words(error, self._app.folder)}"
            self.seen.failures.append(line)
            print(line, file=sys.stderr)
            reply = Message(Error(CLIENT_APP_RAISED, line), reply_to=sent)
        else:
            self.seen.replies += training and not reply.has_error()
        reply = copy.deepcopy(reply)
        reply.metadata.__dict__["_message_id"] = f"{key}.reply"
        self._replies[key] = reply
        return key

    def _count(self, current: object) -> None:
        """Count a round of training where it is a new one, unless those that were asked for are done."""
        if current == self._round:
            return
        if self._rounds is not None and self.seen.rounds >= self._rounds:
            raise Enough
        self._round = current
        self.seen.rounds += 1


def _fused(app: App, config: Mapping[str, Any]) -> Config:
    changes = flat(config)
    if unknown := [key for key in changes if key not in app.config]:
        known = ", ".join(app.config) or "none"
        raise BadInput(f"run config has no '{unknown[0]}' in {app.folder / 'pyproject.toml'}; known: {known}")
    return {**app.config, **changes}


Mod = tuple[str, dict[str, Any]]


def mods_of(app: App | Path | str) -> tuple[str, dict[str, list[Mod]], int | None]:
    """Return an app's name, the mods that its clients' training goes through, and its planned rounds, if it says so.

    The mods are those of each function that trains, the first to work on a reply first, by the name of class or
    function, with the module where that isn't Flower's, and the settings.
    """
    if not isinstance(app, App):
        with loaded(app) as found:
            return mods_of(found)
    rounds = app.config.get("num-server-rounds")
    planned = rounds if isinstance(rounds, int) and not isinstance(rounds, bool) and rounds > 0 else None
    return app.name, chains_of(app), planned


def chains_of(app: App) -> dict[str, list[Mod]]:
    """Return the mods of each function of an app that trains, as :func:`mods_of` does."""
    trains = {name: train for name, train in app.client._registered_funcs.items() if name.startswith("train")}
    chains = {f"every node's {name}": _mods(train) for name, train in trains.items()}
    if len(chains) < 2:
        chains = {"every node": next(iter(chains.values()), list(app.client._mods))}
    return {name: [described(mod) for mod in reversed(mods)] for name, mods in chains.items()}


def _mods(train: Any) -> list[Any]:
    """Return the mods around a function that trains; Flower keeps them in closures, the outermost first."""
    found = []
    while getattr(train, "__closure__", None) and "_mod" in train.__code__.co_freevars:
        kept = dict(zip(train.__code__.co_freevars, (cell.cell_contents for cell in train.__closure__), strict=True))
        found.append(kept["_mod"])
        train = kept["_ffn"]
    return found


def mods_behind(call_next: Any) -> list[Mod]:
    """Return the mods between a mod and the client, as :func:`mods_of` does, from what the mod is given to call."""
    try:
        return [described(mod) for mod in reversed(_mods(call_next))]
    except (AttributeError, KeyError, TypeError, ValueError):  # another version of Flower's: then none is known
        return []


def described(mod: Any) -> Mod:
    """Return the class's or function's name of a mod or strategy, and its settings that are numbers or text."""
    client_defence = getattr(mod, "client_defence", None)
    if isinstance(client_defence, ClientDefence):
        return client_defence.name, client_defence.settings()
    kind = mod if hasattr(mod, "__name__") else type(mod)
    name = kind.__name__ if kind.__module__.partition(".")[0] == "flwr" else f"{kind.__module__}.{kind.__name__}"
    settings = {
        key: float(value) if isinstance(value, numbers.Real) else value
        for key, value in getattr(mod, "__dict__", {}).items()
        if isinstance(value, numbers.Real | str)
    }
    return name, settings


def _load(ref: str, folder: Path) -> Any:
    module, _, names = ref.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for name in names.split("."):
            found = getattr(found, name)
    except Exception as error:
        raise BadInput(f"{folder}: {ref} can't be imported: {_in_words(error, folder)}") from error
    return found


def _in_words(error: BaseException, folder: Path) -> str:
    """Return an error as one line, with what caused it at first, and the last place in the app's own code."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).is_relative_to(folder)]
    place = f" ({Path(frames[-1].filename).relative_to(folder)}:{frames[-1].lineno})" if frames else ""
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    why = f" by {type(root).__name__}: {root}" if root is not error else ""
    return " ".join(f"{type(error).__name__}: {error}{why}{place}".split())
