"""The YAML that scenarios are written in: data only, no surprises, nothing that can blow up."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from fedaudit.utils.errors import BadInput

_LARGEST = 1_000_000  # bytes; a scenario has a few hundred
_DEEPEST = 50
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)[eE][-+]?[0-9]+$")  # YAML 1.1 reads 1e-4 as text


class _Loader(yaml.SafeLoader):
    """Refuses aliases (a few lines can stand for gigabytes), great depth, and keys that are given twice."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        mark = self.peek_event().start_mark
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(problem="aliases (*name) aren't allowed; write the value out", problem_mark=mark)
        if self.depth >= _DEEPEST:
            raise yaml.MarkedYAMLError(problem=f"more than {_DEEPEST} levels deep", problem_mark=mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for i, key in enumerate(keys):
            if key.value in [earlier.value for earlier in keys[:i]]:
                problem = f"the key '{key.value}' is given twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except ValueError as error:  # a date in month 13, a number of 5,000 digits
            raise yaml.MarkedYAMLError(problem=str(error), problem_mark=node.start_mark) from None


class _Dumper(yaml.SafeDumper):
    """Quotes what the loader would read as a number."""


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def loads(text: str, where: str) -> Any:
    """Return what the YAML ``text`` says; ``where`` names it in errors.

    Raises:
        BadInput: it isn't YAML, or has aliases, keys given twice, or great depth.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise BadInput(
            f"{where} is not YAML that can be used{at}: {getattr(error, 'problem', None) or error}"
        ) from None


def read(path: Path, where: str) -> Any:
    """Return what the YAML file ``path`` says.

    Raises:
        BadInput: as :func:`loads`; or the file can't be read, isn't UTF-8 text, or is larger than a megabyte.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST + 1)
        if len(content) > _LARGEST:
            raise BadInput(f"{where} is larger than {_LARGEST:,} bytes: that isn't a scenario")
        return loads(content.decode("utf-8-sig"), where)
    except OSError as error:
        raise BadInput(f"can't read {where}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise BadInput(f"{where} is not UTF-8 text, so it can't be a scenario") from None


def dumps(values: Any) -> str:
    """Return ``values`` as YAML; :func:`loads` gives equal ones."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
