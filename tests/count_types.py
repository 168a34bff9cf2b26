"""Count the types that a reader meets between the YAML file and one step of AGIC: python -m tests.count_types.

The default audit's FedAvg federation is audited by AGIC for one iteration. A type counts if it is ours (a class or a
capitalised alias, no private one), and a function that ran on the way has it in its signature or is its method. Data
sets' readers, helpers, evaluation and report don't count: they lie beside the way.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import fedaudit
import fedaudit.cli  # what importing runs doesn't count

ROOT = Path(fedaudit.__file__).parent
LEFT_OUT = ("evaluation", "report", "data", "cli", "utils")


def main() -> None:
    """Audit and print the types."""
    from fedaudit.pipeline.run import run_audit
    from fedaudit.scenario import load_scenario

    ran: set[tuple[Path, int, str]] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            ran.add((path, frame.f_code.co_firstlineno, frame.f_code.co_qualname))

    sys.setprofile(note)
    run_audit(
        load_scenario(
            None,
            [
                "attacks=[{name: agic, iterations: 1}]",
                "federations=[{name: f, algorithm: fedavg, clients: 1, examples: 4, local_steps: 4}]",
            ],
        )
    )
    sys.setprofile(None)
    ours, functions = _read()
    met: set[str] = set()
    for path, line, name in ran:
        if path.relative_to(ROOT).parts[0] in LEFT_OUT:
            continue
        met |= {part for part in name.split(".")[:-1] if part in ours}
        if (node := functions.get((path, line))) is not None:
            annotations = [a.annotation for a in [*node.args.args, *node.args.kwonlyargs] if a.annotation]
            annotations += [node.returns] if node.returns else []
            met |= {n.id for a in annotations for n in ast.walk(a) if isinstance(n, ast.Name) and n.id in ours}
    print(f"{len(met)} types: {', '.join(sorted(met))}")


def _read() -> tuple[set[str], dict[tuple[Path, int], ast.FunctionDef]]:
    ours: set[str] = set()
    functions = {}
    for path in ROOT.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                ours.add(node.name)
            elif isinstance(node, ast.FunctionDef):
                functions[path, (node.decorator_list[0] if node.decorator_list else node).lineno] = node
        for top in tree.body:
            if isinstance(top, ast.Assign) and isinstance(top.targets[0], ast.Name):
                name = top.targets[0].id
                ours |= {name} if name[0].isupper() and not name.isupper() else set()
    return {name for name in ours if not name.startswith("_")}, functions


if __name__ == "__main__":
    main()
