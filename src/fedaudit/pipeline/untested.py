"""What an audit says nothing about, in plain words: what it didn't try, and which attacks it left out and why."""

from __future__ import annotations

from collections.abc import Sequence

from fedaudit.attacks import ATTACKS, Attack
from fedaudit.attacks.base import MOST_EXAMPLES, MOST_STEPS
from fedaudit.modalities import example_kind
from fedaudit.results import FindingResult
from fedaudit.scenario.scenario import Scenario
from fedaudit.simulation.simulator import Recording
from fedaudit.transcript.sent import Sent, Updates

_REBUILT = ("images", "rows", "sequences")  # kinds of findings that are the examples themselves
_OF_RECORDS = ("membership", "attribute", "source", "property", "extraction")
_NAMED = 3  # attacks of a group; the catalogue has the others


def not_asked(
    kind: str, scenario: Scenario, recordings: Sequence[Recording], findings: Sequence[FindingResult]
) -> list[str]:
    """Return which of the two first questions weren't tried, the examples and membership, and why.

    Also how many runs a limit on time or on clients left out.
    """
    ran = {f.kind for f in findings if f.status == "done"}
    lines = []
    if not ran & set(_REBUILT):
        why = _no_rebuilding(recordings, [a for a in scenario.attacks if a.finds.kind in _REBUILT])
        lines.append(f"no attack that rebuilds {example_kind(kind).plural} was tried: {why}")
    if "membership" not in ran:
        why = "none of the attacks that were asked for asks that"
        if scenario.threat.target_records is None:
            why = "the adversary has no records to ask about (threat.target_records)"
            if any(r.transcript.recording for r in recordings):
                why = "no examples are known that nobody trained on; give some: --records FILE"
        why = next((no for r in recordings if (no := r.transcript.sent.no_membership)), why)
        lines.append(f"nobody asked whether a given record was used: {why}")
    left_out = [f.reason for f in findings if f.reason and f.reason.startswith("not run: ")]
    lines += [
        f"{left_out.count(reason)} of {len(findings)} runs of attacks: {reason.removeprefix('not run: ')}"
        for reason in dict.fromkeys(left_out)
    ]
    return lines


def _no_rebuilding(recordings: Sequence[Recording], asked: Sequence[Attack]) -> str:
    if asked:
        return f"{', '.join(attack.name for attack in asked[:_NAMED])} could not be run"
    updates = [u for r in recordings for one in r.transcript.rounds for u in one.updates]
    examples = min((u.num_examples for u in updates), default=0)
    steps = min((u.training.local_steps for u in updates if u.training), default=1)
    if examples > MOST_EXAMPLES or steps > MOST_STEPS:
        return (
            f"an update is over {examples:,} examples and {steps:,} steps or more, and unasked they are run up to "
            f"{MOST_EXAMPLES} examples and {MOST_STEPS} steps; name one with --attack"
        )
    return "none of the attacks that were run does"


def left_out(scenario: Scenario, attacks: Sequence[Attack], kind: str) -> list[str]:
    """Return the attacks that weren't run, grouped by the reason."""
    named = {attack.name for attack in attacks}
    kinds = {attack.finds.kind for attack in attacks}
    reads = next((a.reads for a in attacks if a.reads.no_updates), Updates)
    groups: dict[str, list[str]] = {}
    for entry in ATTACKS:
        if entry.name not in named:
            groups.setdefault(_why(entry.value, scenario, kind, reads, kinds), []).append(entry.name)
    return [f"{why} ({_listed(names)})" for why, names in groups.items()]


def _why(attack: type[Attack], scenario: Scenario, kind: str, reads: type[Sent], kinds: set[str]) -> str:
    found = attack.finds.kind
    if attack.reads is not reads:
        return f"attacks on {reads.others or attack.reads.federations}"
    if attack.examples and kind not in attack.examples:
        return "attacks on other kinds of examples than these"
    if found in _OF_RECORDS and scenario.threat.target_records is None:
        return "questions about given records, or about a client's whole data: the adversary has none"
    if found == "epsilon":
        return "how much noise really protects: there are no canaries to measure it by"
    if "active" in attack.threat_model and "passive" not in attack.threat_model:
        return "attackers who don't keep to the protocol"
    if attack.default_scope != "update" and found in (*_REBUILT, "local-model"):
        return "what all messages of a client give away together"
    if found in kinds:
        return f"other attacks that recover {attack.recovers_of(kind)}"
    return "attacks that recover something else"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return f"{', '.join(names[:_NAMED])} and {more} more" if more > 0 else ", ".join(names)
