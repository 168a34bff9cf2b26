"""Positive controls: beside every attack that found nothing, the same attack on a case that it must win.

Without one, "found nothing" may mean that the federation is safe, or that the attack had too little effort, or can't
cope with this model. A control decides which.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from fedaudit.attacks import Attack, Finding
from fedaudit.attacks.base import own_failures
from fedaudit.evaluation import evaluate
from fedaudit.evaluation.finding_types import FindingType, known_type, type_of
from fedaudit.evaluation.images import visible
from fedaudit.evaluation.limits import TIME_IS_UP
from fedaudit.evaluation.statistics import SURE
from fedaudit.evaluation.verdicts import by_victims, share_of
from fedaudit.pipeline.control_cases import (
    FEW,
    Case,
    memorised,
    memorised_by_client,
    memorised_by_one,
    one_client,
    one_example,
    reference,
    with_and_without,
    without_noise,
)
from fedaudit.pipeline.power import KnownClients, Power, power_of, undefended, work_of
from fedaudit.pipeline.trials import Means, Trial, run_trials
from fedaudit.results import LEAKS, AttackSummary, ControlResult, Curve, FindingResult, Timing
from fedaudit.scenario.scenario import Scenario
from fedaudit.simulation.protocols import protocol_of
from fedaudit.simulation.simulator import Recording
from fedaudit.simulation.spec import FederationSpec
from fedaudit.transcript.observation import Observation, observe
from fedaudit.transcript.update import UpdateKind
from fedaudit.utils.errors import BadInput, NotApplicable, OutOfTime
from fedaudit.utils.machine import interrupted

_SHARE = 0.25  # of the attacks' time, which controls may take together; one may always be run
_PROGRESS = 0.05
# By the kind of control: what makes its case, and why that may make none.
_RECIPES: dict[str, tuple[Callable[[Recording, int | None], Case | None], str]] = {
    "client": (lambda recording, _: one_client(recording), ""),
    "records": (memorised, "there are no records to learn by heart"),
    "sources": (memorised_by_client, "there are no records of two clients to learn by heart"),
    "one source": (memorised_by_one, "there are no records of two clients to learn by heart"),
    "property": (
        lambda recording, _: with_and_without(recording),
        "too few examples are known with the property and without",
    ),
    "canaries": (lambda recording, _: without_noise(recording), "there are no canaries"),
}


class Known(NamedTuple):
    """What an attack got out of known examples under the audited conditions, as a control's result."""

    result: ControlResult
    files: dict[str, Tensor]
    power: Power | None = None  # of attacks whose examples come out one by one


@dataclass
class Controls:
    """The controls of an audit.

    Attributes:
        results: in the order in which they were run.
        image_files: of the images in them.
        of: (federation, attack) to the position of its control in ``results``.
        sizes: of those results whose case is a single step, how many examples an update of it is over.
        powers: (federation, attack) to the attack's power there, where it was measured.
        cases: (federation, recipe) to what was made by it: attacks share it.
    """

    results: list[ControlResult] = field(default_factory=list)
    image_files: dict[str, Tensor] = field(default_factory=dict)
    of: dict[tuple[str, str], int] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    powers: dict[tuple[str, str], Power] = field(default_factory=dict)
    cases: dict[tuple[str, str], Case | None] = field(default_factory=dict)

    def add(self, result: ControlResult, owners: Sequence[AttackSummary], size: int | None = None) -> None:
        """Add a control that belongs to ``owners``, in place of any that they have."""
        self.results.append(result)
        if size is not None:
            self.sizes[len(self.results) - 1] = size
        for owner in owners:
            self.of[owner.federation, owner.attack] = len(self.results) - 1

    def drop(self, places: Collection[tuple[str, str]]) -> None:
        """Forget the controls of these attacks on these federations."""
        gone = {i for place, i in self.of.items() if place in places}
        self.of = {place: i for place, i in self.of.items() if place not in places}
        left = [i for i in range(len(self.results)) if i not in gone - set(self.of.values())]
        self.results = [self.results[i] for i in left]
        self.sizes = {left.index(i): size for i, size in self.sizes.items() if i in left}
        self.of = {place: left.index(i) for place, i in self.of.items()}

    def keep(self, federation: str, known: Known) -> None:
        """Add what an attack got out of known examples, in place of any control that it has there."""
        place = federation, known.result.attack
        self.drop([place] if place in self.of else [])
        self.of[place] = len(self.results)
        self.results.append(known.result)
        self.image_files |= known.files
        if known.power is not None:
            self.powers[place] = known.power


def run_controls(
    summaries: Sequence[AttackSummary],
    findings: Sequence[FindingResult],
    scenario: Scenario,
    recordings: Sequence[Recording],
    means: Means,
    trials: Sequence[Trial] = (),
    found: Controls | None = None,
) -> Controls:
    """Run a control for every attack that found nothing; those that ``found`` has are taken from there.

    First choice: the same federation without its defences, if it is in this audit and the same attack got the worst out
    of it that it can; that costs nothing. Else, for images, known examples under the very same conditions: the attack's
    power there. Where nobody can repeat the clients' training with other examples, and for other kinds, the easiest
    case of the audited model, once for all federations, and where that is lost, of the reference network. Easy cases
    together take a quarter of the attacks' time at most, but one always runs. Time is counted in iterations, not by the
    clock: a busy machine runs the same controls.
    """
    found = Controls() if found is None else found
    asked = [s for s in summaries if s.verdict == "not demonstrated" and (s.federation, s.attack) not in found.of]
    attacks = scenario.attacks
    runs = {name: (spec, defences.undefended) for name, spec, defences in scenario.runs()}
    open_ones: dict[str, list[AttackSummary]] = {}
    by_name = {recording.transcript.name: recording for recording in recordings}
    for summary in asked:
        if winner := _winner(summary, summaries, runs):
            text = f"{summary.attack} found something from {winner.federation}, which has no defence"
            found.add(
                ControlResult(
                    attack=summary.attack,
                    model="same",
                    federation=winner.federation,
                    case="the same federation without its defences",
                    won=True,
                    text=text,
                ),
                [summary],
            )
        elif known := _of_summary(summary, findings, trials, by_name[summary.federation], scenario, means):
            found.keep(summary.federation, known)
        else:
            open_ones.setdefault(summary.attack, []).append(summary)
    allowed = _SHARE * sum(work_of(a, f.num_examples) for a in attacks for f in findings if _ran(a, f))
    if means.deadline is not None:
        allowed = math.inf  # it is the clock that counts
    spent = 0.0
    for model in ("same", "reference"):
        cases: dict[str, tuple[Case, list[Trial]]] = {}
        for attack in attacks:
            owners = open_ones.get(attack.name, [])
            if not owners:
                continue
            made: tuple[Case, list[Trial]] | str = "a quarter of the attacks' time was spent on other controls"
            if not spent or spent + work_of(attack, 1) <= allowed:
                made = _trials(
                    attack, model, owners[0], by_name[owners[0].federation], scenario, found.cases, means.deadline
                )
            if isinstance(made, str):
                if model == "same":
                    found.add(_none(attack.name, made), open_ones.pop(attack.name))
                continue
            cases[attack.name] = made
            spent += len(made[1]) * work_of(attack, 1)
        if not cases:
            continue
        flat = [trial for _, own in cases.values() for trial in own]
        finished = iter(run_trials(flat, means, f"{len(cases)} positive controls"))
        for name, (case, own) in cases.items():
            result, files = _result(name, case, [next(finished) for _ in own], scenario.seed)
            found.add(result, open_ones[name], case.size)
            found.image_files |= files
            if result.won or result.won is None:
                open_ones.pop(name)
    return found


def _of_summary(
    summary: AttackSummary,
    findings: Sequence[FindingResult],
    trials: Sequence[Trial],
    recording: Recording,
    scenario: Scenario,
    means: Means,
) -> Known | None:
    """Return what the attack of a summary gets out of known examples, see :func:`by_known`."""
    place = summary.federation, summary.attack
    ran = [t for t in trials if (t.observation.federation, t.attack.name) == place and isinstance(t.outcome, Finding)]
    done = [f for f in findings if (f.federation, f.attack) == place and f.status == "done"]
    runs = [(trial.attack, trial.observation) for trial in ran]
    return by_known(type_of(summary), runs, len(by_victims(done)), recording, scenario, means)


def by_known(
    kind: FindingType,
    runs: Sequence[tuple[Attack, Observation]],
    victims: int,
    recording: Recording,
    scenario: Scenario,
    means: Means,
) -> Known | None:
    """Return what an attack gets out of known examples in updates that are made under the same conditions.

    If that is too little, and clients defend themselves: what it gets without the defence alone. None where nobody can
    repeat the clients' training, or nothing is known of findings of its kind.

    Args:
        runs: the attack, and each observation that it is for.
        victims: how many clients it was run on.
    """
    if not (kind.known.each or kind.known.clients) or recording.transcript.sent.no_updates or not runs:
        return None
    attack, federation = runs[0][0].name, runs[0][1].federation

    def tried(runs: Sequence[tuple[Attack, Observation]], bare: bool) -> Known | None:
        name = f"{federation}-power-{'undefended-' * bare}{attack}"
        try:
            means.check()
            whole = not kind.known.each
            made = KnownClients(
                runs, recording.truth, seed=scenario.seed, device=scenario.device, name=name, mixed=whole
            )
            if kind.known.each:
                power = power_of(made, means)
                return Known(of_power(attack, power), power.files, power)
            own, truth = made.drawn(min(victims, kind.known.clients))
        except NotApplicable:
            return None
        own = run_trials(own, means, f"known examples under the same conditions: {name}")
        case = Case(dataclasses.replace(recording, truth=truth), "same", _same_conditions(made.source), alike=True)
        result, _ = _result(attack, case, own, scenario.seed)
        return None if result.won is None else Known(result, {})

    known = tried(runs, bare=False)
    if known is None or known.result.won:
        return known
    unlike = [(a, undefended(o)) for a, o in runs if all(m.update.sanitised is not None for m in o.messages)]
    bare = tried(unlike, bare=True) if unlike else None
    if bare is None:
        return known
    power = known.power
    if power is not None and bare.power is not None:
        power = dataclasses.replace(power, work=power.work + bare.power.work)
    if not bare.result.won:
        return known._replace(power=power)
    return Known(_of_defence(known, bare), known.files | bare.files, power)


def _same_conditions(source: str) -> str:
    return f"{source} in updates made under the same conditions"


def of_power(attack: str, power: Power, effort: str = "") -> ControlResult:
    """Return an attack's power as a control's result; ``effort``: with how little of its own it was measured."""
    text = f"{attack}{effort and f', with {effort},'} recovered {power.recovered} of {power.images} {power.source}"
    return ControlResult(
        attack=attack,
        model="same",
        federation=None,
        case=_same_conditions(power.source),
        won=power.enough,
        text=f"{text}: {'it has power here' if power.enough else 'too few for it to have power here'}",
        power=share_of(f"{power.source} came out visibly", power.recovered, power.images, power.things),
        images=power.results,
        timing=Timing(seconds=sum(result.timing.seconds for result in power.done if result.timing)),
    )


def _of_defence(known: Known, bare: Known) -> ControlResult:
    """Return as a control's result that the defence takes from an attack what it gets without it."""
    result, timing = bare.result, bare.result.timing
    text = f"{result.text}; with the defence it doesn't: the defence stops it"
    if known.power is not None and bare.power is not None:
        timing = Timing(seconds=sum(one.result.timing.seconds for one in (known, bare) if one.result.timing))
        text = (
            f"{result.attack} recovered {bare.power.recovered} of {bare.power.images} {bare.power.source} without the "
            f"defence, and {known.power.recovered} of {known.power.images} with it: it has power here, and the defence "
            "stops it"
        )
    case = f"{result.case}, but without the defence"
    return result.model_copy(update={"case": case, "text": text, "without_defence": True, "timing": timing})


def _winner(
    summary: AttackSummary, summaries: Sequence[AttackSummary], runs: Mapping[str, tuple[FederationSpec, bool]]
) -> AttackSummary | None:
    """Return the same attack on the same federation without its defences, if it got the worst out of it that it can.

    Another federation is no control: batch size, local steps, BatchNorm or the model's state make it easier or harder.
    """
    for other in summaries:
        if (other.attack, other.update_kind) != (summary.attack, summary.update_kind):
            continue
        if other.federation not in runs or summary.federation not in runs:
            continue
        (spec, undefended), (own, _) = runs[other.federation], runs[summary.federation]
        alike = undefended and other.federation != summary.federation and _alike(spec, own)
        if alike and other.verdict == type_of(other).worst:
            return other
    return None


def _alike(one: FederationSpec, other: FederationSpec) -> bool:
    """Return whether two federations are the same but for their name."""
    return one.model_copy(update={"name": other.name}) == other


def _each(summary: AttackSummary) -> bool:
    """Return whether such an attack's examples come out one by one, visibly."""
    return type_of(summary).known.each


def _ran(attack: Attack, finding: FindingResult) -> bool:
    return finding.attack == attack.name and finding.status == "done"


def _trials(
    attack: Attack,
    model: str,
    summary: AttackSummary,
    recording: Recording,
    scenario: Scenario,
    cases: dict[tuple[str, str], Case | None],
    deadline: float | None,
) -> tuple[Case, list[Trial]] | str:
    """Return the control's case and the trials on it, or why there is none: there is no time left for it, too."""
    try:
        with interrupted(deadline, OutOfTime):
            return _made(attack, model, summary, recording, scenario, cases, None if deadline is None else FEW)
    except OutOfTime:
        return TIME_IS_UP


def _made(
    attack: Attack,
    model: str,
    summary: AttackSummary,
    recording: Recording,
    scenario: Scenario,
    cases: dict[tuple[str, str], Case | None],
    few: int | None,
) -> tuple[Case, list[Trial]] | str:
    protocol, recipe = protocol_of(recording.transcript), attack.control or type_of(summary).control
    if not protocol.updates:
        recipe = protocol.described  # of all of its attacks
    spec = next((spec for name, spec, _ in scenario.runs() if name == recording.transcript.name), None)
    if recipe is None or (model == "reference" and recipe != "example"):
        return "an attack of its kind has no easier case: compare with a federation without defences"
    count = type_of(summary).easy_updates if model == "same" else 1
    reason = ""
    began = time.perf_counter()
    kinds: tuple[UpdateKind, ...] = ("gradient", "weights")
    for kind in kinds:
        try:
            case, why_none = None, ""
            easy = protocol.easy_case(recording, spec, images=_each(summary))
            if isinstance(easy, str):
                return easy
            if easy is not None:
                case = Case(easy.recording, "same", easy.text)
            elif recipe in _RECIPES:
                make_case, why_none = _RECIPES[recipe]
                place = recording.transcript.name, recipe
                if place not in cases:
                    cases[place] = make_case(recording, few)
                case = cases[place]
            elif model == "same":
                label = attack.only_class(observe(recording.transcript, scenario.threat.whole))
                case = one_example(recording, kind, count, label)
            else:
                case = reference(kind)
            if case is None:
                return why_none
            seen = observe(case.recording.transcript, scenario.threat.whole).split(attack.scope())
            for observation in seen:
                with own_failures(attack.name, observation):
                    attack.check(observation)
        except OutOfTime:
            raise
        except (NotApplicable, BadInput) as error:
            reason = f"it can't be run on one example: {error}"
            continue
        case = dataclasses.replace(case, seconds=time.perf_counter() - began)
        return case, [Trial(attack, observation, scenario.seed, scenario.device) for observation in seen]
    return reason


def _result(attack: str, case: Case, trials: Sequence[Trial], seed: int) -> tuple[ControlResult, dict[str, Tensor]]:
    """Return what came of a control, and its images."""
    done: list[FindingResult] = []
    files: dict[str, Tensor] = {}
    for trial in trials:
        if isinstance(trial.outcome, Finding):
            evaluated = evaluate(trial.outcome, trial.observation, case.recording.truth, seed=seed)
            done.append(evaluated.result)
            files |= evaluated.image_files
    done = [result for result in done if result.status == "done"]
    if not done:
        reasons = [str(t.outcome) for t in trials if not isinstance(t.outcome, Finding)]
        return _none(attack, reasons[0] if reasons else "it found nothing to evaluate"), {}
    judged = type_of(done[0]).verdict(done)
    images = [image for result in done for image in result.images]
    won = judged.verdict == "recovered" if done[0].images else judged.verdict in LEAKS
    close = " (too little to exclude luck)" if not won and any(map(visible, images)) else ""
    text = f"{attack} {'won' if won else 'lost'} it{close}: {judged.text}"
    return ControlResult(
        attack=attack,
        model=case.model,
        federation=None,
        case=case.text,
        won=won,
        text=text,
        power=judged.evidence if case.alike else None,
        images=images,
        metrics=[metric for result in done for metric in result.metrics],
        timing=Timing(seconds=case.seconds + sum(r.timing.seconds for r in done if r.timing)),
    ), files


def _none(attack: str, reason: str) -> ControlResult:
    return ControlResult(attack=attack, model="same", federation=None, case="none", won=None, text=reason)


class Conditions(NamedTuple):
    """What a federation's updates are over, at most, and how many of a client's, ``noisy``, have noise of their own."""

    batch: int
    steps: int
    noisy: int = 0
    defended: bool = False

    def __str__(self) -> str:
        over = f"batches of {self.batch:,}" if self.batch > 1 else "single examples"
        over += f", {self.steps:,} local steps an update" if self.steps > 1 else ""
        return f"{over}, defended" if self.defended else over


def conditions_of(recording: Recording) -> Conditions:
    """Return what the updates of a federation are over."""
    batch = steps = 1
    defended = False
    noisy: Counter[int] = Counter()
    for one in recording.transcript.rounds:
        for update in one.updates:
            noisy[update.client] += update.sanitised is not None and update.sanitised.noise > 0
            defended |= update.sanitised is not None
            training = update.training
            steps = max(steps, training.local_steps if training else 1)
            sizes = training.batch_sizes if training and training.batch_sizes else (update.num_examples,)
            batch = max(batch, *sizes)
    return Conditions(batch, steps, max(noisy.values(), default=0), defended)


def judged_by_control(
    summary: AttackSummary,
    controls: Controls | None,
    *,
    who: str,
    things: str,
    wrong: str | None,
    attack: Attack,
    conditions: Conditions,
) -> AttackSummary:
    """Return a summary with its final verdict and headline.

    "Not demonstrated" stands only where a control was won in conditions no easier than those that were tested; all else
    that found nothing is inconclusive, and so are scores that tell members the wrong way round.

    Args:
        controls: None where they were turned off.
        who: the adversary, as a sentence begins with it.
        things: the examples, in the plural.
        wrong: why the recorded local training doesn't give the federation's updates; None: it does.
    """
    place = controls.of.get((summary.federation, summary.attack)) if controls else None
    if summary.verdict == "not applicable" and controls is not None and place is not None:
        return _set_aside(summary, attack, controls.results[place], place, _inside(who), things)
    if summary.verdict in LEAKS or summary.verdict == "not applicable":
        return summary
    kind = type_of(summary)
    noisy = conditions.noisy > 1 and kind.averaged is not None and not attack.averages
    question = kind.question.replace("{things}", things)
    open_question = f"Can {_inside(who)} {question}? This audit leaves it open."
    if wrong is not None:
        return _inconclusive(summary, open_question, wrong)
    if summary.verdict == "inconclusive":
        return summary.model_copy(update={"headline": open_question})
    if controls is None or place is None:
        advice = f"positive controls were turned off, and {summary.attack} found nothing: turn them on"
        return _inconclusive(summary, open_question, advice)
    control = controls.results[place]
    base = summary.model_copy(update={"control": place})
    if reversed_by := _reversed(summary):
        return _inconclusive(base, open_question, reversed_by)
    if control.power is not None:
        counted = kind.known.found(control.power, control.case)
        if not control.won:
            remedy = _average(attack, conditions, summary) if noisy else _more_effort(attack)
            advice = f"{summary.attack} has no power here: {counted}; {remedy}"
            return _inconclusive(base, open_question, advice)
        if control.without_defence and noisy:
            return _inconclusive(base, open_question, _average(attack, conditions, summary))
        mine = kind.known.of_clients(summary.evidence) if summary.evidence else "of the clients', none"
        headline = f"{who} could not {question} with {summary.attack}: {counted}; {mine}."
        return base.model_copy(update={"headline": headline})
    if control.won and control.model == "same":
        if noisy:
            return _inconclusive(base, open_question, _average(attack, conditions, summary))
        size = controls.sizes.get(place)
        harder = _each(summary) and conditions.defended  # the case has no defence
        if size is not None and (conditions.batch > size or conditions.steps > 1 or harder):
            advice = (
                f"{summary.attack} won an easier case ({control.case}; here: {conditions}): this shows that the attack "
                "runs, not that it had a chance here. Audit the same federation without defences beside it, or with "
                "smaller batches and fewer steps: what comes out there tells"
            )
            return _inconclusive(base, open_question, advice)
        how = (
            f"it did from {control.federation}, which has no defence"
            if control.federation
            else f"it won its positive control on this model ({control.case})"
        )
        headline = f"{who} could not {question} with {summary.attack}, although {how}."
        return base.model_copy(update={"headline": headline})
    if control.won is None:
        advice = f"no positive control could be run for {summary.attack}, which found nothing: {control.text}"
    elif control.won:
        advice = (
            f"on this model {summary.attack} fails even in the easiest case, though it works on the reference network: "
            f"{_more_effort(attack)}"
        )
    else:
        advice = f"even in the easiest case {summary.attack} fails: {_more_effort(attack)}"
    return _inconclusive(base, open_question, advice)


def _set_aside(
    summary: AttackSummary, attack: Attack, control: ControlResult, place: int, who: str, things: str
) -> AttackSummary:
    """Return the summary of an attack that wasn't run on the clients: known examples showed that it has no power."""
    kind = known_type(attack.finds.kind)
    question = kind.question.replace("{things}", things)
    advice = (
        f"{control.text}, so it was not run on the clients' updates; it is where it is named (--attack) or "
        "there is more time (--max-minutes)"
    )
    base = summary.model_copy(update={"control": place, "kind": attack.finds.kind, "verdict_text": control.text})
    return _inconclusive(base, f"Can {who} {question}? This audit leaves it open.", advice)


def _average(attack: Attack, conditions: Conditions, summary: AttackSummary) -> str:
    """Return what to do about noise that an attack met again and again."""
    return (
        f"each of a client's {conditions.noisy:,} updates has noise of its own, and {attack.name} took them one by "
        f"one; together they have less: add the attack {type_of(summary).averaged}"
    )


def _more_effort(attack: Attack) -> str:
    """Return what to do about an attack that loses: raise what it has, or take another."""
    having = [name for name in ("iterations", "restarts") if isinstance(getattr(attack, name, None), int)]
    return f"raise its effort ({', '.join(having)}), or use another attack" if having else "use another attack"


def _reversed(summary: AttackSummary) -> str:
    """Return what to do where scores tell members from others the wrong way round; empty where they don't."""
    evidence = summary.evidence
    if not type_of(summary).ranks or evidence is None or evidence.high is None or evidence.high >= 0.5:
        return ""
    if evidence.p_value is None or evidence.p_value < 1 - SURE:
        return ""
    return (
        f"{evidence.what} {evidence.value:.2f} [{evidence.low:.2f}, {evidence.high:.2f}] is below 0.5: the "
        "scores do tell what was used for training, the wrong way round. Find out why (the records of the two sorts "
        "may differ in more than membership; noise may turn scores round), and use another attack"
    )


def cautions(attack: Attack, findings: Sequence[FindingResult]) -> list[str]:
    """Return what weakens a verdict without a leak: little effort, progress that hadn't ended, unknown facts."""
    lines = []
    for setting in ("iterations", "restarts"):
        default = getattr(type(attack), setting, None)
        value = getattr(attack, setting, None)
        if isinstance(default, int) and isinstance(value, int) and value < default:
            lines.append(f"little effort: {value:,} {setting}, where the attack's default is {default:,}")
    falling = sum(_still_falling(f.curve) for f in findings if f.curve)
    if falling:
        lines.append(f"still making progress at the end, in {falling} of {len(findings)} runs: give it more iterations")
    if any("unknown length" in note for f in findings for note in f.notes):
        lines.append("how the clients train was not known to it")
    return lines


def _still_falling(curve: Curve) -> bool:
    """Return whether the last tenth of the iterations still brought a twentieth of all progress."""
    end = 0.9 * curve.iterations[-1]
    late = [value for i, value in zip(curve.iterations, curve.objective, strict=True) if i <= end]
    if not late or not all(map(math.isfinite, curve.objective)):
        return False
    return late[-1] - curve.objective[-1] > _PROGRESS * (curve.objective[0] - curve.objective[-1])


def _inconclusive(summary: AttackSummary, headline: str, advice: str) -> AttackSummary:
    changes = {"verdict": "inconclusive", "headline": headline, "advice": [*summary.advice, advice]}
    return summary.model_copy(update=changes)


def _inside(who: str) -> str:
    """Return the adversary as it stands within a sentence."""
    return who[0].lower() + who[1:]
