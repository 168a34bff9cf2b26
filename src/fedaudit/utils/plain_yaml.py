"""The YAML that scenarios are written in: data only, no surprises, nothing that can blow up."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from fedaudit.utils.bounds import NUMBER, YAML, read_bytes, shown
from fedaudit.utils.errors import BadInput

_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)[eE][-+]?[0-9]+$")  # YAML 1.1 reads 1e-4 as text
_INT, _REAL = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_WHOLE = re.compile(r"[-+]?(?:0b[01_]+|0[0-7_]+|0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$")
_DECIMAL = re.compile(
    r"(?:[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+][0-9]+)?|[-+]?\.[0-9][0-9_]*(?:[eE][-+][0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_CORE = {f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "seq", "map")}


class _Loader(yaml.SafeLoader):
    """Refuses aliases (a few lines can stand for gigabytes), great depth, and repeated keys.

    Plain values are numbers, true, false, null or texts, as in YAML 1.2: a date or 12:30 is a text.
    """

    depth = 0
    values = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        mark = self.peek_event().start_mark
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(problem="aliases (*name) aren't allowed; write the value out", problem_mark=mark)
        if self.depth >= (YAML.depth or 0):
            raise yaml.MarkedYAMLError(problem=f"more than {YAML.depth} levels deep", problem_mark=mark)
        self.values += 1
        if self.values > (YAML.items or 0):
            raise yaml.MarkedYAMLError(problem=f"more than {YAML.items:,} keys and values", problem_mark=mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[str] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                problem = f"the key '{shown(key.value)}' is given twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen |= {key.value} if isinstance(key, yaml.ScalarNode) else set()
        return super().construct_mapping(node, deep)

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        mark = node.start_mark
        if node.tag not in _CORE and node.tag in self.yaml_constructors:
            raise yaml.MarkedYAMLError(problem=f"the tag {node.tag[:80]!r} isn't read", problem_mark=mark)
        if node.tag.endswith((":int", ":float")) and len(node.value) > NUMBER:
            raise yaml.MarkedYAMLError(problem=f"a number of more than {NUMBER} characters", problem_mark=mark)
        try:
            return super().construct_object(node, deep)
        except (yaml.YAMLError, RecursionError):
            raise
        except Exception as error:  # of what a tag says is a number, and isn't, PyYAML raises whatever comes
            problem = f"{str(node.value)[:40]!r} is no {node.tag.rpartition(':')[2][:40]}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark) from error


class _Dumper(yaml.SafeDumper):
    """Quotes what the loader would read as a number, and writes out what stands in two places."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 (the loader reads none at all)
        return True


# Of YAML 1.1's plain values go: dates, sexagesimal numbers (12:30), and the keys << and = with a meaning of their own.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag in _CORE - {_INT, _REAL}]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_INT, _WHOLE, list("-+0123456789"))
_Loader.add_implicit_resolver(_REAL, _DECIMAL, list("-+.0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def loads(text: str, where: str) -> Any:
    """Return what the YAML ``text`` says; ``where`` names it in errors.

    Raises:
        BadInput: it isn't YAML, or has aliases, keys given twice, or great depth.
    """
    if len(text) > YAML.file:
        raise BadInput(f"{where} is longer than {YAML.file:,} characters")
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        at = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise BadInput(
            f"{where} is not YAML that can be used{at}: {getattr(error, 'problem', None) or error}"
        ) from None


def read(path: Path, where: str) -> Any:
    """Return what the YAML file ``path`` says.

    Raises:
        BadInput: as :func:`loads`; or the file can't be read, isn't UTF-8 text, or is larger than ``YAML`` allows.
    """
    try:
        return loads(read_bytes(path, YAML).decode("utf-8-sig"), where)
    except OSError as error:
        raise BadInput(f"can't read {shown(where)}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise BadInput(f"{where} is not UTF-8 text, so it can't be a scenario") from None


def dumps(values: Any) -> str:
    """Return ``values`` as YAML; :func:`loads` gives equal ones."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
