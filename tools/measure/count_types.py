"""Count the types that a reader meets between the YAML file and one step of AGIC: python -m tools.measure.count_types.

The default audit's FedAvg federation is audited by AGIC for one iteration. A type counts if it is ours (a class or a
capitalised alias, no private one), and a function that ran on the way has it in its signature or is its method. Names
are followed through imports to where they are defined: two types of one name are two, one under two names is one.
Data sets' readers and helpers don't count: they lie beside the way.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import fedaudit
import fedaudit.cli  # what importing runs doesn't count

ROOT = Path(fedaudit.__file__).parent
LEFT_OUT = ("data/", "cli/", "utils/")

Place = tuple[str, str]  # a module and a name in it


class Module(NamedTuple):
    """What a module's names stand for.

    Attributes:
        types: that it defines, by qualified name.
        imported: names to where they come from.
        functions: first line to the function.
    """

    types: set[str]
    imported: dict[str, Place]
    functions: dict[int, ast.FunctionDef]


def main() -> None:
    """Audit and print the types, each with its module."""
    from fedaudit.pipeline.run import run_audit
    from fedaudit.scenario.scenario import load_scenario

    ran: set[tuple[Path, int, str]] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            ran.add((path, frame.f_code.co_firstlineno, frame.f_code.co_qualname))
        if event == "return" and path.name == "reconstruct.py" and frame.f_code.co_qualname == "reconstruct":
            sys.setprofile(None)  # the step was taken

    federation = "{name: f, algorithm: fedavg, clients: 1, examples: 4, local_steps: 4}"
    sys.setprofile(note)
    run_audit(load_scenario(None, ["attacks=[{name: agic, iterations: 1}]", f"federations=[{federation}]"]))
    modules = {_name(path): _read(path) for path in ROOT.rglob("*.py")}
    met: set[Place] = set()
    for path, line, qualified in ran:
        if path.relative_to(ROOT).as_posix().startswith(LEFT_OUT):
            continue
        names = {qualified.rpartition(".")[0]}
        if (function := modules[_name(path)].functions.get(line)) is not None:
            arguments = function.args
            every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
            written = [a.annotation for a in every if a and a.annotation]
            written += [function.returns] if function.returns else []
            names |= {ast.unparse(n) for w in written for n in ast.walk(w) if isinstance(n, ast.Name | ast.Attribute)}
        found = {_defined(modules, _name(path), name) for name in names}
        met |= {place for place in found if place and not place[1].startswith("_")}
    print(f"{len(met)} types: {', '.join(f'{name} ({module})' for module, name in sorted(met))}")


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _read(path: Path) -> Module:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    read = Module(set(), {}, {})
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            read.functions[(node.decorator_list[0] if node.decorator_list else node).lineno] = node
        elif isinstance(node, ast.ImportFrom):
            read.imported.update({a.asname or a.name: (node.module or "", a.name) for a in node.names})
    for top in tree.body:
        if isinstance(top, ast.ClassDef):
            read.types.add(top.name)
        elif isinstance(top, ast.Assign) and isinstance(top.targets[0], ast.Name):
            name = top.targets[0].id
            read.types.update({name} if name[0].isupper() and not name.isupper() else ())
    return read


def _defined(modules: dict[str, Module], module: str, name: str) -> Place | None:
    """Return where the type that is called so in ``module`` is defined; None where it isn't ours."""
    if module not in modules or not name:
        return None
    if name in modules[module].types:
        return module, name
    first, _, rest = name.partition(".")
    if first not in modules[module].imported:
        return None
    origin, original = modules[module].imported[first]
    return _defined(modules, f"{origin}.{original}", rest) if rest else _defined(modules, origin, original)


if __name__ == "__main__":
    main()
