"""Compare the numbers of two versions of fedaudit on this machine: python -m tools.same_numbers OLD [NEW].

OLD and NEW are folders with a checkout each (NEW: this one). The default audit and every scenario beside this file are
audited with both, and the results compared, bit for bit: every number, every image, every name in ``results.json`` that
OLD wrote. Texts for readers may differ, and what depends on the clock or the machine; new keys are allowed and listed.
With --keep FOLDER OLD's results are kept there and used again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

# What depends on the clock or the machine, or says which version wrote it.
SKIPPED = {"timing", "environment", "fedaudit_version", "digests"}
# Texts for readers: they may be worded anew. Names and units stay. Verdicts, and what they rest on, belong to a schema
# version: version 2 gave them other definitions.
TEXTS = frozenset(
    (
        *("summary", "verdict_text", "notes", "description", "defences", "reason", "knows", "does_not_know", "trained"),
        *(
            "verdict_rules",
            "out_of_scope",
            "lpips_missing",
            "repeat",
            "title",
            "caption",
            "x_label",
            "y_label",
            "paper",
        ),
        *("schema_version", "verdict", "is_leak", "outcome"),
        "why_stopped",
    )
)
# Values of settings that have another name now: of which key, the old name, the new one.
RENAMED = {
    ("engine", "frozen", "first-order"),
    ("name", "rebuilt by the attack", "reconstructed by the attack"),
    ("name", "drawn", "generated"),
}


def main() -> int:
    """Run both versions on every scenario and say where they differ; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.same_numbers", description="Compare two versions' numbers.")
    parser.add_argument("old", type=Path, help="folder with a checkout")
    parser.add_argument("new", type=Path, nargs="?", default=HERE.parents[1], help="another; default: this one")
    parser.add_argument("--keep", type=Path, help="folder for OLD's results, which are used again")
    options = parser.parse_args()
    failed = False
    for scenario in [None, *sorted(HERE.glob("*.yaml"))]:
        name = scenario.stem if scenario else "the default audit"
        with tempfile.TemporaryDirectory() as folder:
            before = (options.keep.resolve() if options.keep else Path(folder)) / name.replace(" ", "-")
            if not (before / "results.json").is_file():
                audit(options.old.resolve(), scenario, before)
            audit(options.new.resolve(), scenario, Path(folder) / "new")
            differences, added = compare(before, Path(folder) / "new")
        failed |= bool(differences)
        print(f"{name}: {'DIFFERS' if differences else 'same numbers'}", *differences[:20], sep="\n  ", flush=True)
        if added:
            print(f"  new keys: {', '.join(sorted(added))}")
    return int(failed)


def audit(checkout: Path, scenario: Path | None, out: Path) -> None:
    """Audit ``scenario`` with the version in ``checkout``."""
    out.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "fedaudit", "audit", *([str(scenario)] if scenario else []), "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
    build = [sys.executable, "-m", "fedaudit", "doctor", "--build"]  # an older version builds on its own: no such flag
    subprocess.run(build, env=environment, cwd=out.parent, capture_output=True, check=False)
    ran = subprocess.run([*command, "--workers", "2"], env=environment, cwd=out.parent, capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(f"{checkout}: {' '.join(command)} failed:\n{ran.stderr}")


def compare(old: Path, new: Path) -> tuple[list[str], set[str]]:
    """Return where the numbers, names or images in ``new`` differ from ``old``'s, and which keys are new."""
    added: set[str] = set()
    before, after = (json.loads((folder / "results.json").read_text()) for folder in (old, new))
    differences = list(_differences(before, after, "", added))
    for path in sorted((old / "images").rglob("*.png")):
        other = new / path.relative_to(old)
        if not other.is_file() or _digest(other) != _digest(path):
            differences.append(f"{path.relative_to(old)}: another image")
    return differences, added


def _differences(old: Any, new: Any, where: str, added: set[str]) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        added |= {f"{where}.{key}".lstrip(".") for key in new.keys() - old.keys()}
        for key in old.keys() - SKIPPED - TEXTS:
            if key not in new:
                yield f"{where}.{key}: gone"
            elif (key, str(old[key]), str(new[key])) in RENAMED:
                continue
            else:
                yield from _differences(old[key], new[key], f"{where}.{key}".lstrip("."), added)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for i, (a, b) in enumerate(zip(old, new, strict=True)):
            yield from _differences(a, b, f"{where}[{i}]", added)
    elif old != new and not (old != old and new != new):  # NaN is the same as NaN
        yield f"{where}: {old!r} -> {new!r}"


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
