"""The ceiling in an audit: how much the attacked updates determine, whoever attacks, and what it makes of verdicts."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedaudit.attacks.inversion.own_updates import own_client
from fedaudit.ceiling import Ceiling, Message, Prior, ceiling_of, message_of, names_of, prior_of, products
from fedaudit.ceiling.estimate import BUDGET, HALF, PRECISIONS, STEPS, decibels
from fedaudit.epsilon.certificate import in_words
from fedaudit.evaluation.finding_types import known_type
from fedaudit.evaluation.limits import POWERLESS
from fedaudit.evaluation.rows import cells_within, of_categories
from fedaudit.evaluation.scores import by_category, by_class, in_groups
from fedaudit.modalities.columns import cells
from fedaudit.modalities.prior import LEAST
from fedaudit.pipeline.margin import resized
from fedaudit.pipeline.trials import Means, Trial
from fedaudit.results import (
    LEAKS,
    AttackSummary,
    CeilingChange,
    CeilingExample,
    CeilingPicture,
    CeilingPoint,
    CeilingResult,
    GroupWorst,
    Worst,
)
from fedaudit.results.epsilon import CertificateRecord
from fedaudit.scenario.scenario import Scenario
from fedaudit.simulation.simulator import Recording
from fedaudit.transcript.observation import Observation
from fedaudit.transcript.truth import Truth
from fedaudit.utils.errors import NotApplicable, OutOfTime
from fedaudit.utils.machine import interrupted
from fedaudit.utils.progress import Display, Report
from fedaudit.utils.seeds import derive_seed, generator

_SHARE = 0.2  # of the attacks' work, that ceilings may take where nobody asked for them
_PASSES = 2.0  # of an attack's iteration, that a product with J and Jᵀ costs
_ALONE, _QUICK = 180.0, 2.0  # budgets of seconds for columns: where ceilings alone are asked for, and of changes
UPDATES = 3  # of a federation, that are looked at
_SHOWN = 3  # examples with pictures
TOLD = (1e-5, 1e-3)  # precisions of which other examples are drawn, beside the message's own
_CLOSE = 1.0  # dB, between what is told at least and at most, below which single examples are told, too
_DRAWS = 16  # of what is left open, that cells are counted over
MATCHED = 1e-4  # precision at which changes are compared: what an attack may well reach
_TWICE = 2.0  # as often as by luck, that anybody may pick the right one of some candidates, for noise to leave little
AS_IS = "nothing is changed"
_ROUNDED = {
    "numbers are rounded to float16": 2.0**-12,
    "numbers are rounded to 8 bits": 2.0**-8,
}  # and how exact that is
_LAYERS = 4  # largest tensors, of which it is asked what their absence brings


@dataclasses.dataclass(frozen=True)
class Looked:
    """One update's ceiling, in the units of readers.

    Attributes:
        each: (k,) the mean squared error of every example, in units of which 1 is the range.
        scale: by which squared errors of the prior's units are multiplied, on average.
    """

    ceiling: Ceiling
    key: tuple[int, int]
    each: Tensor
    scale: float


def run_ceilings(
    trials: Sequence[Trial],
    summaries: Sequence[AttackSummary],
    recordings: Sequence[Recording],
    scenario: Scenario,
    means: Means,
    wrong: Mapping[str, str],
) -> tuple[list[CeilingResult], dict[str, Tensor]]:
    """Return the ceilings of federations whose images or rows no attack recovered, and their pictures.

    Of all, where the scenario asks for ceilings; elsewhere where they take less than a fifth of the attacks' work.
    """
    found: list[CeilingResult] = []
    files: dict[str, Tensor] = {}
    asked = scenario.evaluation.ceiling
    for recording in recordings:
        name = recording.transcript.name
        own = [t for t in trials if known_type(t.attack.finds.kind).ceiling and t.observation.federation == name]
        leaks = any(s.verdict in LEAKS and known_type(s.kind).ceiling and s.federation == name for s in summaries)
        seen = {(m.round, m.client): t.observation for t in own if len(t.observation.messages) == 1
                for m in t.observation.messages}  # fmt: skip
        beside = recording.transcript.sent
        if asked is False or not seen or (leaks and asked is None) or beside.no_updates or beside.by_client():
            continue
        first, budget = [*seen.values()][:UPDATES], BUDGET
        if asked is None:
            spent = sum(t.work for t in own if not isinstance(t.outcome, NotApplicable) or _set_aside(t))
            first, budget = _affordable(first, recording.truth, _SHARE * spent)
        if not first:
            continue
        if name in wrong:
            found.append(none(name, wrong[name]))
            continue
        limit = limit_of(scenario)
        result, pictures = ceiling_on(
            recording.truth, first, seed=scenario.seed, means=means, budget=budget, limit=limit
        )
        found.append(result)
        files |= pictures
    return found, files


def limit_of(scenario: Scenario) -> float | None:
    """Return of which ceiling it is asked whether it is above."""
    asked = scenario.evaluation.ceiling
    return None if asked is None or isinstance(asked, bool) else float(asked)


def _set_aside(trial: Trial) -> bool:
    return isinstance(trial.outcome, OutOfTime) or str(trial.outcome) == POWERLESS


def _affordable(seen: Sequence[Observation], truth: Truth, work: float) -> tuple[list[Observation], float]:
    """Return the first updates whose ceilings take no more work, with the budget for columns: none, if that decides."""
    for budget in (BUDGET, 0.0):
        kept, left = list[Observation](), work
        for observation in seen:
            if (inputs := truth.inputs.get(_key(observation))) is None:
                continue
            each, size, seconds = _PASSES * observation.single().update.num_examples, inputs.numel(), 0.0
            if each * products(size, math.inf, 0.0) > left:
                break
            with suppress(NotApplicable):
                message = told_of(observation, truth)
                size, seconds = message.examples.numel(), message.seconds
            left -= each * products(size, seconds, budget)
            if left < 0:
                break
            kept.append(observation)
        if kept:
            return kept, budget
    return [], 0.0


def none(federation: str, reason: str) -> CeilingResult:
    """Return that there is no ceiling, and why."""
    return CeilingResult(federation=federation, text=f"no ceiling was computed: {reason}", reason=reason)


def ceiling_on(
    truth: Truth,
    observations: Sequence[Observation],
    *,
    seed: int,
    means: Means,
    changes: bool = False,
    budget: float | None = None,
    limit: float | None = None,
) -> tuple[CeilingResult, dict[str, Tensor]]:
    """Return the ceiling of some updates of one federation, and pictures; why there is none, as a result.

    Args:
        truth: what the clients trained on.
        observations: one an update.
        changes: whether it is computed what changes of the federation bring.
        budget: see :func:`.by_columns`, for each update; None: more with changes, which are asked for alone. Where the
            time that is left may not suffice, it is small.
        limit: see :func:`limit_of`.
    """
    budget = budget if budget is not None else _ALONE if changes else BUDGET
    if means.deadline is not None and 2 * budget * len(observations) > means.deadline - time.time():
        budget = _QUICK
    looked: list[Looked] = []
    federation, reason = observations[0].federation, ""
    for number, observation in enumerate(observations, start=1):
        try:
            means.check()
            with interrupted(means.deadline, OutOfTime):
                message = told_of(observation, truth)
                if looked and _dear(message):
                    break
                size = products(message.examples.numel(), message.seconds, budget)
                report = means.display.stage(f"ceiling of update {number} of {len(observations)} of {federation}", size)
                units = _ranges(observation, truth).square()
                of_cells = len(truth.candidates.shape) == 2
                mark = None if limit is None or of_cells else 10 ** (-limit / 10) * float(units.mean())
                compute = partial(ceiling_of, budget=budget, limit=mark, report=_counted(report))
                looked.append(look(observation, truth, seed=seed, compute=compute, message=message))
        except NotApplicable as error:
            reason = reason or str(error)
    if not looked:
        return none(federation, reason), {}
    result, files = _result(looked, observations[0], truth, seed)
    if changes:
        try:
            with interrupted(means.deadline, OutOfTime):
                told = _changes(observations[0], truth, looked[0], result, seed, means.display)
        except OutOfTime:
            told = []
        result = result.model_copy(update={"changes": told})
    return result, files


def _counted(report: Report) -> Report:
    done = itertools.count(1)
    return lambda _: report(next(done))


def _key(observation: Observation) -> tuple[int, int]:
    message = observation.single()
    return message.round, message.client


def quickly(message: Message, prior: Prior, **rest: Any) -> Ceiling:
    """Return a ceiling as :func:`.ceiling_of` does, by one probe: of changes; NotApplicable: they are too dear."""
    if _dear(message):
        raise NotApplicable("of such a network that takes too long")
    return ceiling_of(message, prior, probes=1, steps=20, most=20, budget=_QUICK, **rest)


def told_of(observation: Observation, truth: Truth) -> Message:
    """Return what an update is a function of.

    Raises:
        NotApplicable: see :func:`.message_of`; or its truth isn't known.
    """
    key = _key(observation)
    if key not in truth.inputs:
        raise NotApplicable("what the client trained on isn't known; of such an update only the counting bound is")
    return message_of(observation, truth.inputs[key], truth.labels[key])


def _dear(message: Message) -> bool:
    return STEPS * message.seconds > _ALONE


def look(
    observation: Observation,
    truth: Truth,
    *,
    seed: int,
    compute: Callable[..., Ceiling] = ceiling_of,
    message: Message | None = None,
) -> Looked:
    """Return the ceiling of one update; ``message``: what :func:`told_of` returns of it, whose errors it raises."""
    key, kind = _key(observation), observation.task_info.example_kind
    message = message or told_of(observation, truth)
    victims = torch.cat([*truth.inputs.values()])
    prior = prior_of(kind, truth.candidates, victims)
    found = compute(message, prior, seed=derive_seed(seed, "ceiling", *map(str, key)))
    units = _ranges(observation, truth)
    each = found.each() / units.square()
    plain = float(found.each().mean())
    scale = float(each.mean()) / plain if plain else 1.0
    return Looked(found, key, each.flatten(1).mean(dim=1), scale)


def _ranges(observation: Observation, truth: Truth) -> Tensor:
    """Return by what numbers are divided so that they are compared: 1, or of signals each channel's range."""
    kind, shape = observation.task_info.example_kind, truth.candidates.shape[1:]
    if kind.bounds is not None or len(shape) < 2:
        return torch.ones(1, *[1] * len(shape), dtype=torch.float64)
    every = truth.candidates.double().transpose(0, 1).flatten(1)
    reach = (every.amax(dim=1) - every.amin(dim=1)).clamp(min=1e-12)
    return reach.view(1, -1, *[1] * (len(shape) - 1))


def _result(
    looked: Sequence[Looked], observation: Observation, truth: Truth, seed: int
) -> tuple[CeilingResult, dict[str, Tensor]]:
    kind = observation.task_info.example_kind
    prior, n = looked[0].ceiling.prior, len(looked)
    of_cells = len(truth.candidates.shape) == 2

    def value(error: float, one: Looked) -> float:
        return _cells(one, error, observation, truth, seed) if of_cells else error * one.scale

    def told(values: Sequence[float]) -> float:
        mean = sum(values) / len(values)
        return mean if of_cells else decibels(mean)

    def at(precision: float | None) -> tuple[float, float]:
        errors = [one.ceiling.error(precision) for one in looked]
        return (
            told([value(e.high, one) for e, one in zip(errors, looked, strict=True)]),
            told([value(e.low, one) for e, one in zip(errors, looked, strict=True)]),
        )

    low, high = at(None)
    guess = told([value(prior.variance, one) for one in looked])
    bare = [one.ceiling.error() for one in looked]
    left = (
        sum(e.low for e in bare) / n / prior.variance,
        min(1.0, sum(e.high + e.spread for e in bare) / n / prior.variance),
    )
    opened = [one.ceiling.open() for one in looked]
    every = torch.cat([one.ceiling.each().flatten(1).mean(dim=1) for one in looked]) / prior.variance
    little = left[0] > HALF and float(every.min()) > HALF and all(one.ceiling.message.sure for one in looked)
    verdict = "high" if left[1] <= HALF else "low" if little else None
    precision = sum(one.ceiling.matched for one in looked) / n
    curve = [CeilingPoint(precision=p, low=a, high=b) for p in PRECISIONS for a, b in [at(p)]]
    examples, files = _examples(looked, observation, truth, of_cells=of_cells, seed=seed)
    unit = "share of cells" if of_cells else "dB"
    result = CeilingResult(
        federation=observation.federation,
        updates=n,
        unit=unit,
        low=low,
        high=max(high, low),
        guess=guess,
        left=left[0],
        left_at_most=left[1],
        exact=all(one.ceiling.exact for one in looked),
        open=sum(o.low for o in opened) / n,
        open_at_most=min(1.0, sum(o.high for o in opened) / n),
        unknowns=round(sum(one.ceiling.message.examples.numel() for one in looked) / n),
        numbers=round(sum(one.ceiling.message.numbers for one in looked) / n),
        lost=min(one.ceiling.lost for one in looked),
        precision=precision,
        why=looked[0].ceiling.message.why,
        prior=prior.words,
        curve=curve,
        examples=examples,
        worst=_worst(
            examples,
            len(every),
            (low + max(high, low)) / 2,
            unit,
            kind.plural,
            _groups(looked, examples, observation, truth),
        ),
        verdict=verdict,
        text="",
    )
    return result.model_copy(update={"text": _in_words(result, kind.plural)}), files


def _cells(one: Looked, error: float, observation: Observation, truth: Truth, seed: int) -> float:
    """Return the share of the cells that are right, where the numbers are off by so much."""
    each = one.ceiling.each()
    spread = (each * (error / max(float(each.mean()), 1e-300))).sqrt()
    if error >= one.ceiling.prior.variance:  # nothing but the prior
        spread = torch.full_like(each, math.sqrt(error))
    draws = generator(seed, "ceiling", "cells", *map(str, one.key))
    true = one.ceiling.message.examples
    shares = [
        cells_within(observation.task_info, truth, true, true + spread * torch.randn(true.shape, generator=draws))
        for _ in range(_DRAWS)
    ]
    return sum(shares) / len(shares)


def figure(value: float, unit: str) -> str:
    """Return a ceiling with its unit."""
    return f"{100 * value:.0f} % of the cells" if unit == "share of cells" else f"{value:.3g} dB"


def between(low: float, high: float, unit: str) -> str:
    """Return what is known of a ceiling: "or more" where its upper end isn't."""
    if figure(low, unit) == figure(high, unit) or high - low < (_CLOSE if unit == "dB" else 0.01):
        return figure(low, unit)
    return f"{figure(low, unit)} or more"


def _in_words(found: CeilingResult, things: str) -> str:
    assert found.low is not None
    assert found.high is not None
    assert found.guess is not None
    could = f"whoever attacks could rebuild {things} of these updates at {between(found.low, found.high, found.unit)}"
    text = f"{could}, where a guess has {figure(found.guess, found.unit)}; what limits it is {found.why}"
    coarse = [p for p in found.curve if p.precision in TOLD and p.precision > (found.precision or 0)]
    told = [
        f"whoever matches the update to 1 in {round(1 / p.precision):,} at {between(p.low, p.high, found.unit)}"
        for p in coarse
    ]
    if found.verdict == "low":
        text = f"these updates determine little of their {things}: {text}"
    if found.lost:
        told.append(
            f"at least {100 * found.lost:.0f} % of the directions are lost whatever the attack, for the examples are "
            f"{found.unknowns:,} numbers, and {found.numbers:,} are sent"
        )
    return "; ".join([text, *told])


def _groups(
    looked: Sequence[Looked], examples: Sequence[CeilingExample], observation: Observation, truth: Truth
) -> list[GroupWorst]:
    """Return the most exposed example of each class, and of each category of a table's columns, beside the means."""
    labels: dict[tuple[int, int, int], Tensor] = {}
    rows: dict[tuple[int, int, int], Tensor] = {}
    for one in looked:
        for used, place in enumerate(one.ceiling.message.uses.tolist()):
            labels[(*one.key, place)] = truth.labels[one.key][used]
            rows[(*one.key, place)] = truth.inputs[one.key][used]
    known = [((e.round, e.client, e.place), e.value) for e in examples if e.value is not None]
    if not known:
        return []
    values, columns = [value for _, value in known], observation.task_info.columns
    own = [labels[key] for key, _ in known]
    classes = [float(label) if label.dim() == 0 and not label.is_floating_point() else None for label in own]
    found = by_class(list(zip(classes, values, strict=True)))
    if columns:
        true = cells(torch.stack([rows[key] for key, _ in known]), columns)
        found += by_category(of_categories(true, torch.tensor(values, dtype=torch.float64), columns))
    return found


def _worst(
    examples: Sequence[CeilingExample],
    n: int,
    mean: float,
    unit: str,
    things: str,
    groups: Sequence[GroupWorst],
) -> Worst | None:
    """Return the most exposed of ``n`` examples beside all of them; None: by probes their order alone is known."""
    best = examples[0].value if examples else None
    if best is None:
        return None
    told = [f"{value:.1f} dB" if unit == "dB" else f"{100 * value:.0f} % of cells" for value in (best, mean)]
    text = f"of the most exposed of {n:,} {things} any attacker could have {told[0]}, of all {told[1]}"
    text += in_groups(groups, "dB" if unit == "dB" else "%")
    return Worst(value=best, mean=mean, n=n, text=text, by_group=list(groups))


def _examples(
    looked: Sequence[Looked], observation: Observation, truth: Truth, *, of_cells: bool, seed: int
) -> tuple[list[CeilingExample], dict[str, Tensor]]:
    """Return the examples, the most exposed first, with pictures of the first."""
    kind, files = observation.task_info.example_kind, dict[str, Tensor]()
    order = sorted(((float(e), one, i) for one in looked for i, e in enumerate(one.each)), key=lambda item: item[0])
    found = []
    for rank, (error, one, place) in enumerate(order):
        value: float | None = decibels(error) if _settled(one) else None  # by probes their order alone is known
        if of_cells and value is not None:
            own = one.ceiling.each()[place].sqrt()
            draws = generator(seed, "ceiling", "row", str(place))
            true = one.ceiling.message.examples[place : place + 1]
            many = true.expand(_DRAWS, -1)
            value = cells_within(
                observation.task_info, truth, many, many + own * torch.randn(many.shape, generator=draws)
            )
        row = CeilingExample(round=one.key[0], client=one.key[1], place=place, value=value)
        if one.ceiling.spectrum.error.apart:
            told = one.ceiling.spectrum.error.each(1.0)[place]
            ends = decibels(told.high * one.scale), decibels(told.low * one.scale)
            row = row.model_copy(update={"low": ends[0], "high": max(ends)})
        if rank < _SHOWN and len(kind.axes) > 1:
            row = _pictured(row, one, observation, files)
        found.append(row)
    return found, files


def _settled(one: Looked) -> bool:
    error = one.ceiling.error()
    return decibels(error.low) - decibels(error.high) < _CLOSE


def _pictured(row: CeilingExample, one: Looked, observation: Observation, files: dict[str, Tensor]) -> CeilingExample:
    kind, ceiling = observation.task_info.example_kind, one.ceiling
    stem = f"images/ceiling-{observation.federation}-{row.round}-{row.client}-{row.place}"
    own = ceiling.message.examples.float()

    def drawn(name: str, example: Tensor) -> str:
        low, high = kind.bounds or (-math.inf, math.inf)
        files[f"{stem}-{name}.png"] = kind.draw(example[None].clamp(low, high))
        return f"{stem}-{name}.png"

    left = (ceiling.each(max(TOLD[-1], ceiling.matched)) / ceiling.prior.variance).sqrt().clamp(0, 1)[row.place].float()
    low, high = kind.bounds or (float(own.min()), float(own.max()))
    precisions = [ceiling.matched, *(p for p in TOLD if p > ceiling.matched)]
    return row.model_copy(
        update={
            "true_image": drawn("true", own[row.place]),
            "open_image": drawn("open", low + left * (high - low)),
            "others": [
                CeilingPicture(
                    precision=p, path=drawn(f"other-{i}", ceiling.other(p if i else None)[row.place].float())
                )
                for i, p in enumerate(precisions)
            ],
        }
    )


# --- what verdicts become ---------------------------------------------------------------------------------------------


def with_ceiling(
    summary: AttackSummary,
    before: AttackSummary,
    ceilings: Sequence[CeilingResult],
    who: str,
    things: str,
    certificate: CertificateRecord | None = None,
) -> AttackSummary:
    """Return the summary with what the ceiling of its federation, or its noise, makes of "found nothing".

    A high one: the information is in the update, and these attacks didn't get it. A low one, or a certificate that
    rules out more: little is there to get, whatever power they had.

    Args:
        before: the summary before controls.
        certificate: what the federation's noise rules out; None: nothing.
    """
    kind = known_type(summary.kind)
    nothing = before.verdict == "not demonstrated" or (before.verdict == "not applicable" and summary.kind is not None)
    if not (kind.ceiling and nothing) or summary.verdict not in ("inconclusive", "not demonstrated"):
        return summary
    question = kind.question.replace("{things}", things)
    if certificate is not None and rules_out(certificate):
        told = in_words(certificate.candidates, certificate.held, "nobody")
        headline = f"{who} could not {question} with {summary.attack}, and the noise leaves little to find: {told}."
        if summary.verdict == "not demonstrated":  # by its power, which stays said
            headline = f"{summary.headline} The noise leaves little to find: {told}."
        return summary.model_copy(update={"verdict": "not demonstrated", "headline": headline})
    own = next((c for c in ceilings if c.federation == summary.federation), None)
    if own is None or own.verdict is None or own.low is None or own.high is None or own.guess is None:
        if summary.verdict == "inconclusive":
            return summary
        why = f" ({own.reason})" if own and own.reason else ""
        caution = f"whether the information is in the update isn't known: no ceiling was computed{why}"
        return summary.model_copy(update={"cautions": [*summary.cautions, caution]})
    if own.verdict == "high":
        told = f"{between(own.low, own.high, own.unit)} could be had, where a guess has {figure(own.guess, own.unit)}"
        headline = f"{who} could not {question} with {summary.attack}, but the information is in the update: {told}."
        power = summary.verdict == "not demonstrated"
        changes = {"verdict": "present, not extracted", "headline": headline, "had_power": power}
        return summary.model_copy(update=changes)
    told = f"{figure(own.high, own.unit)} at most, where a guess has {figure(own.guess, own.unit)}"
    seen = "the update that was looked at" if own.updates == 1 else f"the {own.updates} updates that were looked at"
    headline = (
        f"{who} could not {question} with {summary.attack}, and there is little to find in {seen}: {told}. Which of "
        "some candidates it was is another question."
    )
    return summary.model_copy(update={"verdict": "not demonstrated", "headline": headline})


def rules_out(certificate: CertificateRecord) -> bool:
    """Return whether noise leaves little: nobody picks the right one of many candidates twice as often as by luck.

    The attacked updates hold their victims, so what drawing at random hides doesn't count. A server that adds the noise
    itself sees updates without it.
    """
    n, held = certificate.candidates, certificate.held
    return not certificate.central and n >= LEAST and held is not None and held <= _TWICE / n


# --- what changes bring -----------------------------------------------------------------------------------------------


def _changes(
    observation: Observation, truth: Truth, looked: Looked, result: CeilingResult, seed: int, display: Display
) -> list[CeilingChange]:
    """Return what changes of the federation lower the ceiling to, by computing it on updates that are made that way."""
    ceiling, of_cells = looked.ceiling, result.unit != "dB"
    update = observation.single().update

    def told(one: Looked, noise: float = 0.0) -> tuple[float, float]:
        found = one.ceiling.error(max(MATCHED, one.ceiling.matched))
        beside = one.ceiling.beside_noise(noise)
        errors = max(found.high, beside.high), max(found.low, beside.low)
        low, high = (_cells(one, e, observation, truth, seed) if of_cells else decibels(e * one.scale) for e in errors)
        return low, max(low, high)

    def without(*places: int) -> Looked:
        keep = [i not in places for i in range(len(names))]
        return dataclasses.replace(looked, ceiling=quickly(ceiling.message, ceiling.prior, seed=seed, keep=keep))

    def at(noise: float) -> Callable[[], tuple[float, float]]:
        return lambda: told(looked, noise)

    as_rough = not ceiling.exact and not _dear(ceiling.message)
    asked: list[tuple[str, Callable[[], tuple[float, float]]]] = [
        (AS_IS, lambda: told(without() if as_rough else looked))
    ]
    asked += [(text, at(precision)) for text, precision in _ROUNDED.items() if precision > ceiling.message.relative]
    if (enough := _enough(ceiling)) is not None:
        asked.append((f"even noise {enough:.2g} times as long as the update is added", at(enough)))
    names, parts = names_of(observation), ceiling.message.sent(ceiling.message.examples)
    for k in sorted(range(len(names)), key=lambda k: -parts[k].numel())[: _LAYERS * (len(names) > 1)]:
        asked.append((f"{names[k]} isn't sent", partial(_called, told, without, k)))
    steps = update.training.local_steps if update.training else 1
    batch = -(-update.num_examples // steps)
    made = partial(_of_own, truth=truth, looked=looked, seed=seed)
    for more, size in ((steps, 2 * batch), (steps, 4 * batch), *[(4 * steps, batch)] * (update.kind == "weights")):
        text = f"an update is over {f'{more} steps of ' if more > 1 else ''}batches of {size}"
        asked.append((text, partial(_called, told, made, resized(observation, more, size))))
    report = display.stage(f"what lowers the ceiling of {observation.federation}", len(asked))
    found: list[CeilingChange] = []
    for done, (text, compute) in enumerate(asked, start=1):
        try:
            low, high = compute()
            found.append(CeilingChange(text=text, low=low, high=high))
        except NotApplicable as error:
            found.append(CeilingChange(text=text, reason=str(error)))
        report(done)
    now, *others = found
    return [now, *sorted(others, key=lambda change: math.inf if change.low is None else change.low)]


def _called(told: Callable[[Looked], tuple[float, float]], make: Callable[..., Looked], of: Any) -> tuple[float, float]:
    return told(make(of))


def _enough(ceiling: Ceiling) -> float | None:
    """Return how long even noise must be that leaves half of what a guess leaves open; None: as much is left anyway."""
    low, high = ceiling.message.relative, 1e6
    if ceiling.error().high > HALF * ceiling.prior.variance:
        return None
    for _ in range(50):
        middle = math.sqrt(low * high)
        enough = ceiling.beside_noise(middle).low >= HALF * ceiling.prior.variance
        low, high = (low, middle) if enough else (middle, high)
    return high


def _of_own(observation: Observation, truth: Truth, looked: Looked, seed: int) -> Looked:
    """Return what an update that is made as ``observation``'s determines of the same victims, beside held-out ones."""
    kind, key = observation.task_info.example_kind, looked.key
    inputs, labels = truth.inputs[key], truth.labels[key]
    first = [int((looked.ceiling.message.uses == k).nonzero()[0]) for k in range(len(looked.each))]
    other = ~torch.isin(kind.fingerprints(truth.candidates), kind.fingerprints(torch.cat([*truth.inputs.values()])))
    examples = (
        torch.cat([inputs[first], truth.candidates[other]]),
        torch.cat([labels[first], truth.candidate_labels[other]]),
    )
    own = own_client(observation, examples, generator(seed, "ceiling", "change"))
    message, order = own.observation.single(), own.orders[0]
    made = {(message.round, message.client): own.inputs[order]}
    targets = {(message.round, message.client): own.labels[order]}
    found = look(own.observation, dataclasses.replace(truth, inputs=made, labels=targets), seed=seed, compute=quickly)
    theirs = torch.isin(kind.fingerprints(found.ceiling.message.examples.float()), kind.fingerprints(inputs))
    mean = float(found.each.mean())
    part = float(found.each[theirs].mean()) / mean if bool(theirs.any()) and mean else 1.0
    return dataclasses.replace(found, scale=found.scale * part)
