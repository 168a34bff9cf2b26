"""What a result comes to, in sentences: the headline, comparisons, limits and controls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedaudit.evaluation.finding_types import known_type, metric
from fedaudit.evaluation.limits import NOT_YET, TIME_IS_UP
from fedaudit.modalities import example_kind
from fedaudit.report.frontier import defence_tables, strongest
from fedaudit.report.wording import count, counted, noun, number, sentence, shared, short, words_of
from fedaudit.results import (
    LEAKS,
    AttackSummary,
    AuditResult,
    Comparison,
    ControlResult,
    Evidence,
    Interval,
    MarginResult,
    Threshold,
    Verdict,
    overall,
)
from fedaudit.simulation.protocols import protocol_by

UPDATES = {"gradient": "gradient updates", "weights": "weight updates"}
SEVERITY: dict[str, int] = {  # of a verdict, as the page's colours and symbols know it
    "recovered": 3,
    "identifiable": 2,
    "inferred": 2,
    "not demonstrated": 1,
    "inconclusive": 0,
    "present, not extracted": 0,
    "not applicable": 0,
    "not attacked": 0,
}


@dataclass(frozen=True)
class Headline:
    """The answer.

    Attributes:
        title: a sentence, which says no more than the verdict.
        setting: diagnostic or deployment, and why, in a sentence; empty where that isn't known.
        tested: on what, with what effort.
        detail: what else there is to say of other federations, and of what the verdict isn't.
        verdict: of the whole audit.
        cautions: what weakens it.
    """

    title: str
    setting: str
    tested: str
    detail: str
    verdict: Verdict
    cautions: tuple[str, ...] = ()


def headline(result: AuditResult) -> Headline:
    """Return what leaks, to whom, how badly: the worst leak, else what is still open, else what wasn't demonstrated."""
    used = result.in_use()  # a defence that is only tried gives no answer, and fails nobody
    ran = [s for s in result.summaries if s.verdict != "not applicable" and s.federation in used]
    margin = next((m for m in result.margins if m.federation in used and m.nearest is not None), None)
    if result.ceilings_alone:
        first, *more = result.ceilings[0].text.split("; ")
        others = [f"{c.federation}: {sentence(c.text)}" for c in result.ceilings[1:]]
        how = "Computed with the truth, which no attacker has; no attack was run."
        return Headline(sentence(first), "", how, " ".join([*map(sentence, more), *others]), "not applicable")
    if not ran:
        if margin is not None:
            lines = [f"Not tried: {'; '.join(result.not_asked)}."] if result.not_asked else []
            told = [(s.attack, s.federation, s.verdict_text) for s in result.summaries if s.federation in used]
            lines += [sentence(f"{whom}: {text}") for whom, text, _ in shared(told)]
            setting = setting_text(result, next(s for s in result.summaries if s.federation in used))
            return Headline(_so_far(margin, result), setting, "", " ".join(lines), "inconclusive")
        late = [f for f in result.findings if f.federation in used and f.reason in (TIME_IS_UP, NOT_YET)]
        if not result.summaries:
            detail = "The scenario named no attack, or nothing was observed."
        elif late:
            detail = (
                f"{len(late)} runs of attacks weren't done when the time that was given was over: give more "
                "(--max-minutes), or attack fewer updates (--clients 1)."
            )
        else:
            detail = "Every attack was refused before it began; the reasons are listed below."
        return Headline("No attack could be run, so this audit gives no answer.", "", "", detail, "not applicable")
    groups: dict[tuple[str, str | None], list[AttackSummary]] = {}
    for summary in ran:
        groups.setdefault((summary.federation, summary.kind), []).append(summary)
    verdicts = {key: overall(group) for key, group in groups.items()}
    order = (*LEAKS, "present, not extracted", "inconclusive", "not demonstrated")
    verdict = min(verdicts.values(), key=order.index)
    chief = strongest(result, [s for key, g in groups.items() if verdicts[key] == verdict for s in g])
    assert chief is not None  # one ran
    about_margins = known_type(chief.kind).margin
    title = chief.headline or f"{result.adversary.who}, by {chief.attack}: {verdict}. {chief.verdict_text.rstrip('.')}."
    elsewhere = []
    for name in dict.fromkeys(s.federation for s in ran):
        rest: dict[Verdict, list[str]] = {}
        for (federation, kind), one in verdicts.items():
            if federation == name and (name, kind) != _key(chief):
                rest.setdefault(one, []).append((kind or "").replace("-", " "))
        if rest:
            update = next(UPDATES[f.update_kind] for f in result.federations if f.name == name)
            line = ", ".join(f"{' and '.join(kinds)} {one}" for one, kinds in rest.items())
            elsewhere.append(f"{name} ({update}): {line}")
    if margin is not None and verdict not in LEAKS and (verdict == "inconclusive" or not about_margins):
        title = _so_far(margin, result)  # the answer to the first question, not to the smallest
    if tables := defence_tables(result):
        elsewhere = []
    text = f"Elsewhere: {'; '.join(elsewhere)}." if elsewhere else ""
    if verdict == "inconclusive":
        said = [advice for advice in chief.advice if margin is None or advice != margin.text]  # the title does
        text = f"{_sentences(said)} {text}".strip()
    text = " ".join([text, *(f"{table.federation}: {table.recommendation}" for table in tables)]).strip()
    if margin is not None and verdict in LEAKS and not about_margins:
        text = f"{sentence(margin.text)} {text}".strip()
    if result.not_asked:
        text = f"Not tried: {'; '.join(result.not_asked)}. {text}".strip()
    if verdict not in LEAKS:
        text = f"{text} This is no proof of safety: see “What was not tested”.".strip()
    cautions = tuple(dict.fromkeys(c for s in ran if _key(s) == _key(chief) for c in s.cautions))
    return Headline(title, setting_text(result, chief), tested(result, chief), text, verdict, cautions)


def setting_text(result: AuditResult, summary: AttackSummary) -> str:
    """Return in a sentence whether a verdict is of a deployment or a diagnostic, and why; empty: it isn't known."""
    if summary.setting == "diagnostic":
        return (
            f"Diagnostic, not a deployment: {'; '.join(summary.diagnostic_because)}. It shows what can leak at worst."
        )
    if summary.setting is None:
        return ""
    record = next(f for f in result.federations if f.name == summary.federation)
    if record.recording:
        return "Deployment: the federation really ran, and was recorded."
    return f"Deployment: {protocol_by(record.algorithm).deployed}."


def _so_far(margin: MarginResult, result: AuditResult) -> str:
    """Return how far away a leak is, as a headline."""
    things = example_kind(result.data.kind or "image").plural
    return f"That training {things} come out here was not shown; {margin.text}."


def tested(result: AuditResult, summary: AttackSummary) -> str:
    """Return in a sentence on what an attack was run, and with what effort."""
    record = next(f for f in result.federations if f.name == summary.federation)
    protocol = protocol_by(record.algorithm)
    state = result.model.trained if record.rounds == 1 else f"{result.model.trained} before {record.rounds} rounds"
    state = f"{record.rounds} round{'s' * (record.rounds > 1)}" if protocol.sent.grown else state
    model = f"{result.model.name} ({state}"
    model += f", BatchNorm in {result.model.batch_norm} mode)" if result.model.batch_norm != "none" else ")"
    batch = f"batches of {count(record.batch_size)}" if record.batch_size > 1 else "single examples"
    updates = UPDATES[summary.update_kind]
    if protocol.sends:
        updates, batch = protocol.sends, f"{count(record.batch_size)} examples a client"
    if record.summed > 1:
        batch = f"{batch}, summed over {count(record.summed)} clients"
    n, of = (summary.evidence.n, summary.evidence.of) if summary.evidence else (summary.updates, "runs of the attack")
    over = counted(summary) if summary.images else f"{count(n)} {noun(n, of)}"
    settings = next((a.settings for a in result.attacks if a.name == summary.attack), {})
    effort = f" with {count(settings['iterations'])} iterations" if isinstance(settings.get("iterations"), int) else ""
    seconds = f", {summary.timing.seconds:.0f} s" if summary.timing and summary.timing.seconds >= 1 else ""
    return (
        f"Tested on {model}, {result.data.name}, {updates} over {batch} ({summary.federation}); "
        f"n = {over}; {summary.attack}{effort}{seconds}."
    )


def _sentences(texts: Sequence[str]) -> str:
    return " ".join(sentence(text) for text in texts)


def _key(summary: AttackSummary) -> tuple[str, str | None]:
    return summary.federation, summary.kind


def control_text(control: ControlResult) -> str:
    """Return a control that was run and what came of it, in a sentence."""
    return f"{control.attack}, on {control.case}: {control.text}"


def different_controls(result: AuditResult) -> list[ControlResult]:
    """Return the positive controls that were run, once each: several defences of a federation share one."""
    return [c for i, c in enumerate(result.controls) if c.won is not None and c not in result.controls[:i]]


def uncontrolled(result: AuditResult) -> list[str]:
    """Return which positive controls were not run, each reason once."""
    none = shared((c.attack, "", c.text) for c in result.controls if c.won is None)
    return [f"{whom}: no positive control was run: {text}" for whom, text, _ in none]


def comparison_text(comparison: Comparison) -> str:
    """Return a paired comparison as a sentence, always counted in favour of the first attack that it names."""
    d, unit = comparison.difference, f" {comparison.unit}".rstrip()
    if comparison.outcome == "meaningless here":
        why = comparison.reason or "neither attack found anything"
        return f"{comparison.a} and {comparison.b}: a comparison is meaningless here, {why}"
    image_files = comparison.metric == "psnr"
    signed = _signed if image_files else _signed_short
    better = "recovers better images" if image_files else f"does better by {words_of(comparison.metric)}"
    if comparison.outcome == "b is better":
        d = Interval(mean=-d.mean, median=-d.median, low=-d.high, high=-d.low, n=d.n)
    told = f"{signed(d.mean)}{unit}{d.span(signed)}, n = {count(d.n)}"
    if comparison.outcome == "b is better":
        return f"{comparison.b} {better} than {comparison.a}: {told}"
    if comparison.outcome == "a is better":
        return f"{comparison.a} {better} than {comparison.b}: {told}"
    by = " by a single pair" if d.n == 1 else ""
    return f"{comparison.a} and {comparison.b} cannot be told apart{by}: {told}"


def threshold_text(threshold: Threshold) -> str:
    """Return a limit, whether it is kept, and what was reached, in one line."""
    outcome = threshold.outcome.upper()
    if threshold.limit is None:
        line = f"{outcome}: no verdict “{threshold.verdict}” or worse"
        return f"{line} ({threshold.where or threshold.reason})" if threshold.where or threshold.reason else line
    known = metric(threshold.metric)
    unit = f" {known.unit}".rstrip() if known else ""
    name, side = words_of(threshold.metric), "least" if threshold.below else "most"
    line = f"{outcome}: {name} at {side} {threshold.limit:g}{unit}"
    if threshold.worst is not None:
        line += f": {threshold.where} reached {number(threshold.worst, 2)}{unit}"
    return f"{line}; {threshold.reason}" if threshold.reason else line


def _signed_short(value: float) -> str:
    text = short(value)
    return text if text.startswith(("−", "–")) else f"+{text}"


def _signed(value: float) -> str:
    text = number(value, 1)
    return text if text.startswith(("−", "–")) else f"+{text}"


def message_of(result: AuditResult, summary: AttackSummary) -> str:
    """Return a verdict in a sentence, with the number behind it."""
    said = summary.headline or f"{result.adversary.who}, by {summary.attack}: {summary.verdict}."
    parts = [sentence(said)]
    parts.append(sentence(f"Evidence: {evidence_text(summary.evidence)}" if summary.evidence else summary.verdict_text))
    parts += [said for said in [setting_text(result, summary)] if said]
    parts += [sentence(f"Caution: {caution}") for caution in summary.cautions]
    parts += [sentence(f"To conclude: {advice}") for advice in summary.advice if advice not in said]
    if summary.verdict == "not demonstrated":
        parts.append("This never means safe.")
    return " ".join(parts)


def evidence_text(evidence: Evidence) -> str:
    """Return the number behind a verdict: value, 95 % interval, n, what guessing gives, p."""
    text = f"{evidence.what} {short(evidence.value)}"
    if evidence.low is not None and evidence.high is not None:
        text += f" [{short(evidence.low)}, {short(evidence.high)}]"
    text += f", n = {evidence.n} {noun(evidence.n, evidence.of)}"
    if evidence.baseline is not None:
        text += f", {short(evidence.baseline)} by guessing"
    if evidence.p_value is not None:
        text += f", p = {evidence.p_value:.2g}"
    return text


def limit_name(threshold: Threshold) -> str:
    """Return what a limit is, without what was met: the same in every run."""
    if threshold.limit is None:
        return f"no verdict '{threshold.verdict}' or worse"
    return f"{threshold.metric} at {'least' if threshold.below else 'most'} {threshold.limit:g}"
