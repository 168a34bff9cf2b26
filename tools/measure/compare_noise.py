"""How often does noise alone make ``fedaudit compare`` exit 1? And does it find a defence that was removed?

    python -m tools.measure.compare_noise 100

simulates small federations once, attacks what travelled again and again with other seeds, and compares: each rerun with
the one before it, and all with all. ``--power`` also removes a defence, and counts how often that is found.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import fedaudit
from fedaudit.report.compare import compare_audits
from fedaudit.results import AuditResult
from fedaudit.simulation.simulator import Recording

# Single examples, batches, and one batch alone; so few iterations that an attack is in the middle of its way, where the
# random start decides most.
FEDERATIONS: list[dict[str, Any]] = [
    {"name": "single", "algorithm": "fedsgd", "clients": 6, "examples": 6, "batch_size": 1},
    {"name": "batches", "algorithm": "fedsgd", "clients": 3, "examples": 9, "batch_size": 3},
    {"name": "one-batch", "algorithm": "fedsgd", "clients": 1, "examples": 4, "batch_size": 4},
]
ATTACKS: list[dict[str, Any]] = [
    {"name": "invg", "iterations": 25, "engine": "reference"},
    {"name": "dlg-adam", "iterations": 25, "engine": "reference"},
    {"name": "labels"},
]


def recordings(**changes: Any) -> list[Recording]:
    """Simulate the federations, once."""
    scenario = {
        "version": 1,
        "name": "noise",
        "data": {"name": "digits"},
        "model": {"name": "lenet", "initialisation": "uniform"},
        "federations": FEDERATIONS,
        "attacks": ATTACKS,
        **changes,
    }
    return [fedaudit.simulate(scenario, federation=f["name"], progress=False) for f in FEDERATIONS]


def rerun(recorded: Sequence[Recording], seed: int, attacks: Sequence[dict[str, Any]] = ATTACKS) -> AuditResult:
    """Attack all federations with random draws of ``seed``; return one result over them."""
    parts = []
    for recording in recorded:
        done = fedaudit.audit_transcript(recording, attacks, seed=seed, controls=False, progress=False)
        parts.append(done.result)
    lists = ("federations", "findings", "summaries")
    joined = {name: [item for part in parts for item in getattr(part, name)] for name in lists}
    return parts[0].model_copy(update=joined)


def regressions(pairs: Iterable[tuple[AuditResult, AuditResult]]) -> list[list[str]]:
    """Return for every pair what ``compare`` calls worse."""
    found = []
    for old, new in pairs:
        rows = compare_audits(old, new).rows
        found.append([f"{r.attack} on {r.federation} ({r.reason})" for r in rows if r.outcome == "worse"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reruns", type=int, nargs="?", default=100)
    parser.add_argument("--power", action="store_true")
    asked = parser.parse_args()
    recorded = recordings()
    results = []
    for seed in range(asked.reruns + 1):
        results.append(rerun(recorded, seed))
        if seed % 10 == 0:
            print(f"{seed} reruns", flush=True)
    verdicts: dict[str, set[str]] = {}
    for result in results:
        for s in result.summaries:
            verdicts.setdefault(f"{s.attack} on {s.federation}", set()).add(s.verdict)
    for name, seen in verdicts.items():
        print(f"{name}: {', '.join(sorted(seen))}")
    after = regressions(itertools.pairwise(results))
    print(f"each with the one before: {sum(map(bool, after))} of {len(after)} exit with 1: {[r for r in after if r]}")
    first = regressions((results[0], other) for other in results[1:])
    print(f"each with the first: {sum(map(bool, first))} of {len(first)} exit with 1")
    every = regressions((a, b) for a in results for b in results if a is not b)
    print(f"each with each: {sum(map(bool, every))} of {len(every)} exit with 1")
    if asked.power:
        defended = recordings(defences={"client_defence": {"name": "dp", "epsilon": None}})
        few = [rerun(defended, seed) for seed in range(10)]
        removed = regressions((old, new) for old, new in zip(few, results, strict=False))
        print(f"defence removed: {sum(map(bool, removed))} of {len(removed)} exit with 1")
        print(f"of the attacks, worse: {[len(r) for r in removed]}")
        added = regressions((new, old) for old, new in zip(few, results, strict=False))
        print(f"defence added: {sum(map(bool, added))} of {len(added)} exit with 1")


if __name__ == "__main__":
    main()
