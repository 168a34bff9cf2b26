"""Limits that a user or a team sets, and whether an audit keeps them: fail, pass, or not tested."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedaudit.attacks import ATTACKS, Attack
from fedaudit.evaluation.finding_types import FINDING_TYPES, FindingType, known_type, metric, type_of
from fedaudit.evaluation.images import SCORES, best_tries, visible
from fedaudit.evaluation.scores import grouped
from fedaudit.modalities import example_kind
from fedaudit.results import (
    LEAKS,
    AttackSummary,
    CeilingResult,
    FindingResult,
    MarginResult,
    Threshold,
    Verdict,
    overall,
)
from fedaudit.utils import plain_yaml
from fedaudit.utils.errors import BadInput, unknown_name

TIME_IS_UP = "not run: the time that this audit was given (--max-minutes) was spent"
NOT_YET = "not run: the audit was stopped before it, or is still at work"
POWERLESS = "not run: at small effort it recovered no known example under the same conditions"
POLICY_FILE = "fedaudit.yaml"
CEILING = "ceiling"  # in its own unit
MARGIN = "margin"  # the one metric of which less is worse


_NO_CEILING = "no ceiling was computed: set evaluation.ceiling=true, or run fedaudit ceiling"
_OPEN = ("present, not extracted", "inconclusive")
_NO_MARGIN = "no margin was measured: no attack on single updates' images was run with controls and enough iterations"
_EXPECTED = "fail_above: {metric: number}, fail_below: {margin: number} or fail_on: a verdict"
_KEYS = ("fail_above", "fail_on", "fail_below")


@dataclass(frozen=True)
class Limits:
    """What an audit must keep.

    Attributes:
        fail_above: metric to the value above which the audit fails.
        fail_on: the verdict on which it fails, and on all worse ones; None: on none.
        fail_below: ``margin`` to the factor below which the audit fails: by so many times an update must have more
            examples than the largest that an attack on images has power over.
    """

    fail_above: Mapping[str, float] = field(default_factory=dict)
    fail_on: Verdict | None = None
    fail_below: Mapping[str, float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.fail_above) or bool(self.fail_below) or self.fail_on is not None

    def check(self) -> Limits:
        """Return these limits, or refuse those for what doesn't exist, or of which less is more leakage.

        Raises:
            BadInput: naming the ones that do.
        """
        limits = self.fail_above
        if not isinstance(limits, Mapping):
            raise BadInput(f"limits are a mapping of metrics to numbers, such as {{'psnr': 20}}, not {limits!r}")
        for name, limit in limits.items():
            if name not in limitable():
                if metric(name) is None:
                    raise BadInput(unknown_name("metric of a limit", name, limitable()))
                raise BadInput(f"of '{name}' less is more leakage; metrics for limits: {', '.join(limitable())}")
            if isinstance(limit, bool) or not isinstance(limit, int | float) or not math.isfinite(limit):
                raise BadInput(f"the limit for '{name}' is {limit!r}; give a number")
        if not isinstance(self.fail_below, Mapping):
            raise BadInput(f"fail_below is a mapping such as {{'margin': 4}}, not {self.fail_below!r}")
        for name, limit in self.fail_below.items():
            if name != MARGIN:
                raise BadInput(unknown_name("metric of fail_below", name, [MARGIN]))
            if isinstance(limit, bool) or not isinstance(limit, int | float) or not math.isfinite(limit):
                raise BadInput(f"the limit for '{name}' is {limit!r}; give a number")
        if self.fail_on is not None and self.fail_on not in LEAKS:
            raise BadInput(f"fail_on: {unknown_name('verdict', str(self.fail_on), list(LEAKS))}")
        return self


def read_policy(path: Path) -> Limits:
    """Read a team's limits: YAML with ``fail_above`` and ``fail_below`` (metric: number) and ``fail_on``.

    Raises:
        BadInput: the file can't be read, or says something else.
    """
    values = plain_yaml.read(path, f"the policy '{path}'")
    if not isinstance(values, dict) or not values:
        raise BadInput(f"the policy '{path}': expected {_EXPECTED}")
    for key in values:
        if key not in _KEYS:
            raise BadInput(f"the policy '{path}': {unknown_name('key', str(key), list(_KEYS))}")
    try:
        limits = Limits(values.get("fail_above") or {}, values.get("fail_on"), values.get("fail_below") or {}).check()
    except BadInput as error:
        raise BadInput(f"the policy '{path}': {error}") from None
    if not limits:  # a gate without a limit would let everything through
        raise BadInput(f"the policy '{path}' sets no limit; give {_EXPECTED}")
    return limits


def limitable() -> list[str]:
    """Return the metrics that a user may set a limit for: those where more is more leakage."""
    ATTACKS.names()  # other packages' kinds of findings come with their attacks
    kinds = FINDING_TYPES.values()
    limits = [name for kind in kinds for name in kind.limits]
    own = [*limits, *(m.name for kind in kinds for m in kind.metrics if m.higher_is_better), CEILING]
    return list(dict.fromkeys(own))


def check_limits(
    limits: Limits,
    findings: Sequence[FindingResult],
    summaries: Sequence[AttackSummary],
    kind: str = "image",
    margins: Sequence[MarginResult] = (),
    ceilings: Sequence[CeilingResult] = (),
) -> list[Threshold]:
    """Return for every limit whether it is kept.

    A limit passes only where it was tested on every federation that was attacked: measured, by an attack that found
    something or won its control. A low number from an attack that could find nothing proves nothing. Where nothing that
    was run could exceed it, the reason names attacks on examples of this ``kind`` that could.
    """
    rows = [
        _ceiling(limit, summaries, ceilings) if name == CEILING else _above(name, limit, findings, summaries, kind)
        for name, limit in limits.fail_above.items()
    ]
    rows = [*rows, _on(limits.fail_on, summaries, kind)] if limits.fail_on else rows
    rows += [_below(limit, summaries, margins, findings) for limit in limits.fail_below.values()]
    late = sum(f.reason in (TIME_IS_UP, NOT_YET, POWERLESS) for f in findings)
    reason = f"{late} of {len(findings)} runs of attacks were not done: the time that was given was spent"
    return [
        row.model_copy(update={"outcome": "not tested", "reason": reason}) if late and row.outcome == "pass" else row
        for row in rows
    ]


def _above(
    name: str, limit: float, findings: Sequence[FindingResult], summaries: Sequence[AttackSummary], kind: str
) -> Threshold:
    done = [f for f in findings if f.status == "done"]
    measured = _measured(name, done)
    worst, federation, attack = max(measured, default=(None, "", ""))
    row: dict[str, Any] = {
        "metric": name,
        "limit": limit,
        "worst": worst,
        "where": f"{attack} on {federation}" if worst is not None else None,
        "exceeded": False,
    }
    others = _others(kind, lambda found: name in found.limits or name in [m.name for m in found.metrics])
    if worst is None:
        row["measured_by"] = "another attack" if others else "nothing"
    if worst is not None and worst > limit:
        return Threshold(**{**row, "exceeded": True, "outcome": "fail"})
    by_federation = {f: {a for _, g, a in measured if g == f} for f in dict.fromkeys(s.federation for s in summaries)}
    for federation, attacks in by_federation.items():
        own = [s for s in summaries if s.federation == federation and s.attack in attacks]
        here = [f for f in done if f.federation == federation]
        told = (kind.untold([f for f in here if type_of(f) is kind], name, limit) for kind in FINDING_TYPES.values())
        reason = next((reason for reason in told if reason is not None), None)
        if reason is None:
            reason = _untested(own) or (_too_little(own) if name in SCORES else "")
            if not attacks:
                reason += _in_words(kind, others)
        if reason:
            return Threshold(**row, reason=f"{federation}: {reason}")
    if not by_federation:
        return Threshold(**row, reason="nothing was attacked")
    visible = [s for s in summaries if s.verdict == "recovered" and name in SCORES]
    note = f"kept, though {visible[0].attack} on {visible[0].federation} recovered visibly" if visible else None
    return Threshold(**row, outcome="pass", reason=note)


def _ceiling(limit: float, summaries: Sequence[AttackSummary], ceilings: Sequence[CeilingResult]) -> Threshold:
    """Return whether no federation's updates determine more of their examples, whoever attacks."""
    known = {c.federation: c for c in ceilings}
    row: dict[str, Any] = {"metric": CEILING, "limit": limit, "where": None, "exceeded": False}
    worst: tuple[float, str] | None = None
    for federation in dict.fromkeys([*(s.federation for s in summaries), *known]):
        own = known.get(federation)
        if own is None or own.low is None or own.high is None:
            return Threshold(**row, reason=f"{federation}: {own.text if own else _NO_CEILING}")
        if own.unit == "share of cells" and not 0 <= limit <= 1:
            return Threshold(**row, reason=f"{federation}: of tables it is a share of cells, so a limit is from 0 to 1")
        ends = [(e.value if e.low is None else e.low, e.value if e.high is None else e.high) for e in own.examples]
        low = max([own.low, *(e for e, _ in ends if e is not None)])  # an update doesn't determine all alike
        told = [e for _, e in ends if e is not None]
        high = max([own.high, low] if len(told) < len(ends) else [low, *told])
        if low > limit:
            where = f"the most exposed example of {federation}"
            return Threshold(**{**row, "worst": low, "where": where, "exceeded": True, "outcome": "fail"})
        if not told or len(told) < len(ends):
            why = "probes of all examples at once don't tell of single ones"
            between = f"it is between {own.low:.3g} and {own.high:.3g} on average"
            return Threshold(**row, reason=f"{federation}: {why}; {between}")
        if high > limit:
            why = f"it is between {low:.3g} and {high:.3g} of the most exposed example, and more probes tell no closer"
            return Threshold(**row, reason=f"{federation}: {why}")
        worst = max(worst or (high, ""), (high, f"the most exposed example of {federation}"))
    if worst is None:
        return Threshold(**row, reason=_NO_CEILING)
    return Threshold(**{**row, "worst": worst[0], "where": worst[1]}, outcome="pass")


def _below(
    limit: float,
    summaries: Sequence[AttackSummary],
    margins: Sequence[MarginResult],
    findings: Sequence[FindingResult],
) -> Threshold:
    """Return whether every federation's margin is as large; an attack that recovers its images leaves one of 1."""
    known = {m.federation: m for m in margins}
    row: dict[str, Any] = {"metric": MARGIN, "limit": limit, "where": None, "exceeded": False, "below": True}
    worst: tuple[float, str] | None = None
    for federation in dict.fromkeys(s.federation for s in summaries):
        powerful = [
            s
            for s in summaries
            if s.federation == federation
            and known_type(s.kind).margin
            and (s.verdict in (*LEAKS, "not demonstrated") or s.had_power)
        ]
        margin = known.get(federation)
        out = sum(map(visible, best_tries([i for f in findings if f.federation == federation for i in f.images])))
        leaks = any(s.verdict in LEAKS for s in powerful)
        if out and not powerful:
            why = f"{out} images came out visibly, which luck may explain: attack more"
            return Threshold(**row, reason=f"{federation}: {why}")
        if powerful and (leaks or margin is None):
            found, more, by = 1.0, False, powerful[0].attack
        elif margin is not None and margin.factor is not None:
            found, more, by = margin.factor, margin.more, margin.attack
        else:
            why = margin.text if margin is not None else _NO_MARGIN
            return Threshold(**row, reason=f"{federation}: {why}")
        if found < limit and not more:
            return Threshold(
                **{**row, "worst": found, "where": f"{by} on {federation}", "exceeded": True, "outcome": "fail"}
            )
        if found < limit:
            why = f"it is more than {found:g}, and how much more can't be told: {known[federation].text}"
            return Threshold(**{**row, "worst": found, "where": f"{by} on {federation}"}, reason=f"{federation}: {why}")
        if worst is None or found < worst[0]:
            worst = found, f"{by} on {federation}"
    if worst is None:
        return Threshold(**row, reason="nothing was attacked")
    return Threshold(**{**row, "worst": worst[0], "where": worst[1]}, outcome="pass")


def _on(level: Verdict, summaries: Sequence[AttackSummary], kind: str) -> Threshold:
    row: dict[str, Any] = {"metric": "verdict", "verdict": level, "where": None, "exceeded": False}
    failing = LEAKS[: LEAKS.index(level) + 1]
    for verdict in failing:
        for summary in summaries:
            if summary.verdict == verdict:
                where = f"{verdict}: {summary.attack} on {summary.federation}"
                return Threshold(**{**row, "where": where, "exceeded": True, "outcome": "fail"})
    able = [s for s in summaries if s.kind is None or type_of(s).worst in failing]
    if all(s.verdict == "not applicable" for s in able):
        why = f" ({able[0].verdict_text})" if able else ""
        others = _others(kind, lambda found: found.worst in failing)
        row["measured_by"] = "another attack" if others else "nothing"
        reason = f"no attack was run that could end in '{level}'{why}{_in_words(kind, others)}"
        return Threshold(**row, reason=reason)
    for federation in dict.fromkeys(s.federation for s in summaries):
        own = [s for s in able if s.federation == federation]
        kinds = dict.fromkeys(s.kind for s in own if s.verdict != "not applicable") or [None]
        for found in kinds:
            if reason := _untested([s for s in own if found in (None, s.kind)]):
                return Threshold(**row, reason=f"{federation}: {reason}")
    return Threshold(**row, outcome="pass")


def _others(kind: str, able: Callable[[FindingType], bool]) -> list[str]:
    """Return the passive attacks on examples of a kind that are able to, those first that an audit chooses itself."""
    suited = [
        e
        for e in ATTACKS
        if (not e.value.examples or kind in e.value.examples)
        and not e.value.reads.no_updates
        and "active" not in e.value.threat_model
        and able(FINDING_TYPES[e.value.finds.kind])
    ]
    suited.sort(key=lambda e: getattr(e.value.fits, "__func__", None) is vars(Attack)["fits"].__func__)
    return [e.name for e in suited]


def _in_words(kind: str, others: Sequence[str]) -> str:
    """Return which other attacks could, as the end of a sentence."""
    plural = example_kind(kind).plural
    return f"; on {plural} {', '.join(others[:5])} could" if others else f"; no attack on {plural} could"


def _untested(summaries: Sequence[AttackSummary]) -> str:
    """Return why these attacks on one federation test nothing; empty where they do."""
    if not summaries:
        return "nothing that was run measures it"
    if any(s.had_power for s in summaries):  # none came out, though known ones did
        return ""
    best = overall(summaries)
    if best == "not applicable":
        return f"no attack could be run ({summaries[0].verdict_text})"
    if best in _OPEN:
        open_ones = [s for s in summaries if s.verdict in _OPEN]
        return f"inconclusive: {'; '.join(open_ones[0].advice) or open_ones[0].verdict_text}"
    return ""


def _too_little(summaries: Sequence[AttackSummary]) -> str:
    """Return why images that came out only identifiable might come out better; empty where there is no such reason."""
    if overall(summaries) == "identifiable" and all(s.cautions for s in summaries):
        return f"identifiable already, and {summaries[0].cautions[0]}"
    return ""


def _measured(name: str, findings: Sequence[FindingResult]) -> list[tuple[float, str, str]]:
    """Return every value of the metric ``name`` with its federation and attack."""
    values = []
    for (federation, attack), group in grouped(findings).items():
        own = type_of(group[0]).limits.get(name)
        found = [m.value for f in group for m in f.metrics if m.name == name] + (own(group) if own else [])
        values += [(value, federation, attack) for value in found]
    return values
