"""A scenario as it is written: its YAML with ``--set`` applied, not yet checked. Imports nothing that takes long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedaudit.utils import plain_yaml, renamed
from fedaudit.utils.bounds import YAML
from fedaudit.utils.errors import OWN_MODEL, BadInput, unknown_name


def describe_source(path: Path | None, overrides: list[str] | None = None) -> str:
    """Return where a scenario was read, for messages."""
    return (f"the scenario '{path}'" if path else "the default scenario") + " with overrides" * bool(overrides)


def read_scenario(path: Path | None, overrides: list[str] | None = None, seed: int | None = None) -> dict[str, Any]:
    """Return what the file (the embedded default if ``path`` is None) says, with ``key=value`` overrides applied."""
    where = describe_source(path)
    if path is not None and path.suffix == ".py":
        raise BadInput(f"{where} is a Python program, and no YAML; {OWN_MODEL}")
    values = plain_yaml.read(path or Path(__file__).parent / "default.yaml", where)
    if not isinstance(values, dict):
        raise BadInput(f"{where}: expected a mapping of keys such as data, model, federations, attacks")
    for override in overrides or []:
        values = apply_override(values, override)
    return values if seed is None else {**values, "seed": seed}


def parse_setting(text: str) -> tuple[str, Any]:
    """Split ``key=value``; the value is read as YAML, so that numbers, lists and null mean what they look like."""
    key, equals, raw = text.partition("=")
    if not equals or not key.strip():
        raise BadInput(f"overrides: {text}: expected key=value, for example federations.fedavg.local_steps=8")
    return key.strip(), plain_yaml.loads(raw, f"overrides: {text}: the value")


def apply_override(values: dict[str, Any], text: str) -> dict[str, Any]:
    """Return ``values`` with one ``dotted.key=value`` set; items of a list go by index or by their name.

    Raises:
        BadInput: the key leads nowhere.
    """
    key, value = parse_setting(text)
    if key.count(".") >= (YAML.depth or 0):
        raise BadInput(f"overrides: {key[:40]}…: more than {YAML.depth} levels deep")
    try:
        made = renamed.of_scenario({**values})
    except ValueError as error:
        raise BadInput(f"overrides: {error}") from None
    return dict(_set(made, renamed.of_path(key.split(".")), value, key))


_SHORT = ("aggregator", "client_defence", "malicious")  # keys whose value may be a plain name


def _set(node: Any, path: list[str], value: Any, key: str) -> Any:
    if not path:
        return value
    head, rest = path[0], path[1:]
    if isinstance(node, list):
        from fedaudit.utils.validation import from_name  # it imports pydantic

        named = [from_name(item) for item in node]
        names = [str(item.get("name", i)) if isinstance(item, dict) else str(i) for i, item in enumerate(named)]
        if head in names:
            position = names.index(head)
        elif head.isascii() and head.isdigit() and len(head) < 10 and int(head) < len(node):
            position = int(head)
        else:
            raise BadInput(f"overrides: {key}: {unknown_name('item', head, names)}")
        return [_set(item, rest, value, key) if i == position else item for i, item in enumerate(named)]
    if node is None:
        node = {}
    if not isinstance(node, dict):
        raise BadInput(f"overrides: {key}: '{head}' can't be set inside of a plain value")
    from fedaudit.utils.validation import from_name  # it imports pydantic

    inner = from_name(node.get(head)) if head in _SHORT and rest else node.get(head)
    return {**node, head: _set(inner, rest, value, key)}
