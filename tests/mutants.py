"""Do the tests notice a wrong sign, scale or bound? python -m tests.mutants [WORD ...].

Each row of mutants.yaml changes one place of a copy of the source and names the tests that must then fail. What nobody
notices is reported, and so are rows whose old text isn't in the source any more. With words, only the rows in whose
name or file one of them is are run.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Mutant:
    """A wrong program.

    Attributes:
        file: that is changed, below src/fedaudit.
        wrong: what is wrong with it.
        old: text that stands there once.
        new: what takes its place.
        tests: that must fail, below tests: files, or names in them.
    """

    file: str
    wrong: str
    old: str
    new: str
    tests: list[str]


def mutants() -> list[Mutant]:
    """Return the rows of mutants.yaml."""
    table = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    return [Mutant(file, **row) for file, rows in table.items() for row in rows]


def main() -> int:
    """Run the rows and say what nobody noticed; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Which wrong programs pass the tests?")
    parser.add_argument("words", nargs="*", help="run only the rows in whose name or file one of these is")
    words = parser.parse_args().words
    rows = [m for m in mutants() if not words or any(word in f"{m.wrong} {m.file}" for word in words)]
    left = []
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.dont_write_bytecode = True  # a change of the same length in the same second would be missed
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = f"{folder}/hypothesis"
        for slow in (
            "torch",
            "torch._dynamo",
            "scipy.stats",
            "sklearn.svm",
            "skimage.metrics",
            "torchmetrics",
            "matplotlib.pyplot",
        ):
            importlib.import_module(slow)
        named = sorted({test for mutant in rows for test in mutant.tests})
        if code := run_tests(named, source):
            print(f"pytest ends with {code} on the source as it is; see to that first: {' '.join(named)}")
            return 2
        for mutant in rows:
            said = verdict(mutant, source)
            left += [f"{mutant.wrong}: {said}"] * (said != "noticed")
            print(f"{said}: {mutant.wrong} ({mutant.file})", flush=True)
    print(f"{len(rows) - len(left)} of {len(rows)} noticed", *left, sep="\n  ")
    return int(bool(left))


def verdict(mutant: Mutant, source: Path) -> str:
    """Return what becomes of ``mutant`` in a copy of the source, which is as it was afterwards."""
    path = source / "fedaudit" / mutant.file
    text = path.read_text() if path.is_file() else ""
    if (times := text.count(mutant.old)) != 1:
        return f"STALE, its old text is there {times} times"
    path.write_text(text.replace(mutant.old, mutant.new))
    try:
        code = run_tests(mutant.tests, source)
    finally:
        path.write_text(text)
    return {0: "SURVIVES", 1: "noticed"}.get(code, f"BROKEN, pytest ends with {code}")


def run_tests(tests: list[str], source: Path) -> int:
    """Return pytest's exit code for ``tests`` on the package in ``source``."""
    child = os.fork()  # of a process that has imported what takes longest, but nothing of the package
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    os.chdir(ROOT)
    sys.path.insert(0, str(source))
    os.environ["PYTHONPATH"] = str(source)  # for the processes that tests start
    options = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", "--hypothesis-profile", "mutants"]
    code = 3
    try:
        ended = pytest.main([*options, *(f"tests/{test}" for test in tests)])
        if Path(str(sys.modules["fedaudit"].__file__)).is_relative_to(source):
            code = int(ended)
    finally:
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
