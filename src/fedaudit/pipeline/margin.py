"""The margin: how much easier conditions would have to be for an attack to recover images.

Where an attack has no power under the audited conditions, it is run on known examples under easier ones, down a ladder,
to the nearest in which it has. No victim's update has a part in it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedaudit.attacks import Attack, Finding, ImageFinding
from fedaudit.attacks.base import MOST_EXAMPLES, MOST_STEPS
from fedaudit.attacks.inversion.calibration import CalibrationFinding
from fedaudit.attacks.inversion.own_updates import distinct
from fedaudit.evaluation.finding_types import known_type
from fedaudit.models import has_batch_norm, initialise
from fedaudit.pipeline.controls import Controls
from fedaudit.pipeline.power import KnownClients, Power, Refused, least_work, power_of, undefended, work_of
from fedaudit.pipeline.trials import Means, Trial
from fedaudit.results import LEAKS, AttackSummary, MarginResult, MarginStep
from fedaudit.scenario.scenario import Scenario
from fedaudit.simulation.simulator import Recording
from fedaudit.task.training import TrainingConfig
from fedaudit.transcript.observation import Message, Observation
from fedaudit.transcript.truth import Truth
from fedaudit.transcript.update import Update
from fedaudit.utils.errors import NotApplicable, OutOfTime
from fedaudit.utils.seeds import generator

FEWEST_ITERATIONS = 100  # an attack with fewer has no power anywhere, and there is nothing to measure
MOST_WORK = 4  # times the attack on the clients' updates, that power and margin cost together
UNTOLD = "no margin was measured: "  # before the reason
_LEAST_RUNS = 24  # on single images, that they may always cost: a bisection's
_SPENT = "power and margin may cost four times as much as the attack itself, and did"
_PICTURES = 6  # of known examples, that are kept
_UNTRAINED = "the network untrained"


@dataclass(frozen=True)
class Step:
    """One rung of the ladder: conditions that are easier than those of the rung before.

    Attributes:
        observation: of one update under these conditions; its numbers mean nothing.
        examples: different ones that the update is over.
        uses: of them, with repetition.
        batch: of a step.
        steps: of local training.
        changes: what else is easier than for the clients, in words.
    """

    observation: Observation
    examples: int
    uses: int
    batch: int
    steps: int
    changes: tuple[str, ...]

    @property
    def things(self) -> str:
        """What the examples are called, in the plural."""
        return self.observation.task_info.example_kind.plural

    def __str__(self) -> str:
        """Return the conditions in words."""
        images = f"{self.examples} {self.things}" if self.examples > 1 else f"single {self.things}"
        steps = f" in {self.steps} steps" if self.steps > 1 else ""
        return ", ".join([f"updates over {images}{steps}", *self.changes])


def ladder(observation: Observation, seed: int) -> list[Step]:
    """Return the conditions of one update, and easier and easier ones down to a single image of an untrained network.

    Defences go first; then steps are halved, then batches; then labels are granted; BatchNorm takes its running
    statistics; in the end the network is untrained. Each rung keeps what the one before has made easier.
    """
    message = observation.single()
    update, training = message.update, message.update.training
    steps = training.local_steps if training else 1
    batch = -(-update.num_examples // steps)
    found = [Step(observation, distinct(observation), update.num_examples, batch, steps, ())]

    def down(changed: Observation, batch: int, steps: int, change: str = "") -> None:
        changes = (*found[-1].changes, change) if change else found[-1].changes
        found.append(Step(changed, distinct(changed), changed.single().update.num_examples, batch, steps, changes))

    def last() -> Observation:
        return found[-1].observation

    if update.sanitised is not None:
        down(undefended(last()), batch, steps, "no defence")
    while steps > 1 or batch > 1:
        steps, batch = (steps // 2, batch) if steps > 1 else (1, batch // 2)
        down(resized(last(), steps, batch), batch, steps)
    if update.labels is None and observation.task_info.num_classes is not None:
        known = torch.zeros(last().single().update.num_examples, dtype=torch.int64)
        down(_with(last(), labels=known), batch, steps, "labels known")
    if observation.task_info.batch_norm == "train" and has_batch_norm(observation.module):
        info = replace(observation.task_info, batch_norm="eval")
        down(replace(last(), task_info=info), batch, steps, "BatchNorm in eval mode")
    module = copy.deepcopy(observation.module)
    module.load_state_dict(message.weights)
    try:
        initialise(module, "default", generator(seed, "untrained"))
    except Exception:  # a user's own layers, which nobody here can draw anew
        return found
    weights = {name: value.detach().clone() for name, value in module.state_dict().items()}
    own = replace(last().single(), weights=weights)
    down(replace(last(), weights=(weights,), messages=(own,)), batch, steps, _UNTRAINED)
    return found


def nearest(steps: Sequence[Step], has_power: Callable[[int], bool], first: int) -> int | None:
    """Return the hardest step from ``first`` on in which an attack has power, by bisection; None: it has it in none.

    ``steps`` begin with the hardest, and ``has_power`` is asked of few positions.
    """
    ends = [len(steps) - 1]
    if steps[-1].changes[-1:] == (_UNTRAINED,):  # which may be harder than the clients', if these began in another way
        ends.append(len(steps) - 2)
    high = next((end for end in ends if end >= first and has_power(end)), None)
    if high is None:
        return None
    low = first
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if has_power(middle) else (middle + 1, high)
    return high


def _with(observation: Observation, **changes: object) -> Observation:
    """Return the observation with another update."""
    message = observation.single()
    update: Update = dataclasses.replace(message.update, **changes)  # type: ignore[arg-type]
    own: Message = replace(message, update=update)
    return replace(observation, messages=(own,))


def resized(observation: Observation, steps: int, batch: int) -> Observation:
    """Return the observation of an update of ``steps`` steps, with ``batch`` examples in each."""
    update = observation.single().update
    training: TrainingConfig | None = None
    if update.training is not None:
        old = update.training
        training = replace(
            old,
            local_steps=steps,
            batch_sizes=(batch,) * steps,
            learning_rates=old.learning_rates[:steps] if steps <= len(old.learning_rates) else (),
            passes=(),
            data_size=None if old.data_size is None else max(batch, old.data_size),
        )
    labels = None if update.labels is None else update.labels[:1].expand(steps * batch, *update.labels.shape[1:])
    return _with(observation, num_examples=steps * batch, training=training, labels=labels)


class _Spent(Exception):
    """All effort is spent."""


def margin_of(
    attack: Attack,
    observation: Observation,
    truth: Truth,
    means: Means,
    *,
    seed: int,
    device: str,
    known: Power | None,
    work: float,
) -> tuple[MarginResult, dict[str, Tensor]] | str:
    """Return the nearest conditions in which an attack has power, and the images of known examples that show it.

    The reason, where none could be tried. The easiest conditions are always tried; once the effort is spent, the
    nearest that were tried are told, and which weren't.

    Args:
        attack: that found nothing; it is calibrated under each condition, if it is to be.
        known: its power under the audited conditions, where that was measured.
        work: that this and the margin may cost together, in iterations on one example.
    """
    steps = ladder(observation, seed)
    tried: dict[int, Power] = {} if known is None else {0: known}
    failed: dict[int, NotApplicable] = {}

    def has_power(place: int) -> bool:
        if place not in tried and place not in failed:
            spent = sum(power.work for power in tried.values())
            if len(tried) > (known is not None) and spent + least_work(attack, steps[place].observation) > work:
                raise _Spent
            name = f"{observation.federation}-margin-{place}"
            try:
                means.check()
                seen = steps[place].observation
                tried[place] = power_of(
                    KnownClients([(attack, seen)], truth, seed=seed, device=device, name=name), means
                )
            except OutOfTime:
                raise
            except NotApplicable as error:
                failed[place] = error
        return place in tried and tried[place].enough

    small = (i for i, step in enumerate(steps) if step.uses <= MOST_EXAMPLES and step.steps <= MOST_STEPS)
    first = next(small, len(steps))
    try:
        place = nearest(steps, has_power, max(first, int(known is not None)))
    except (OutOfTime, _Spent) as error:
        late = isinstance(error, OutOfTime)
        if late and not any(i for i in tried):
            return str(error)
        place = min((i for i, power in tried.items() if power.enough), default=None)
        end = len(steps) if place is None else place
        hardest = max((i for i, power in tried.items() if i < end and not power.enough), default=-1)
        why = NotApplicable(str(error).removeprefix("not run: ") if late else _SPENT)
        failed |= {i: why for i in range(max(first, hardest + 1), end) if i not in tried | failed}
    if not tried:
        return str(next(iter(failed.values()), "no easier conditions are known"))
    here = steps[0]
    factor, more = _factor(here, None if place is None else steps[place])
    untold = [str(e) for i, e in failed.items() if place is not None and i < place and not isinstance(e, Refused)]
    if untold:  # perhaps the attack has power there
        factor, more = None, False
    rows = [
        MarginStep(
            text=str(step),
            examples=step.examples,
            batch=step.batch,
            steps=step.steps,
            changes=list(step.changes),
            recovered=tried[i].recovered if i in tried else None,
            images=tried[i].images if i in tried else None,
            psnr=tried[i].psnr if i in tried else None,
            power=tried[i].enough if i in tried else None,
            reason=str(failed[i]) if i in failed else None,
        )
        for i, step in enumerate(steps)
    ]
    shown = tried[place] if place is not None else None
    result = MarginResult(
        attack=attack.name,
        federation=observation.federation,
        steps=rows,
        nearest=place,
        factor=factor,
        more=more,
        text=_in_words(attack, steps, place, shown or tried.get(len(steps) - 1), untold),
        pictures=shown.results[:_PICTURES] if shown else [],
    )
    files = {} if shown is None else {n: f for n, f in shown.files.items() if n in _names(result)}
    return result, files


def _names(result: MarginResult) -> set[str]:
    return {name for image in result.pictures for name in (image.true_image, image.reconstruction)}


def _factor(here: Step, there: Step | None) -> tuple[float | None, bool]:
    """Return by how many times there are fewer examples, and whether the margin is more: not even one comes out."""
    if there is None or "no defence" in there.changes:
        return None, False
    if not there.changes:
        return here.examples / there.examples, False
    return float(here.examples), True


def _in_words(
    attack: Attack, steps: Sequence[Step], nearest: int | None, shown: Power | None, untold: Sequence[str]
) -> str:
    things = steps[0].things
    if nearest is None or shown is None:
        seen = f" ({shown.recovered} of {shown.images} there)" if shown else ""
        return (
            f"{attack.name} recovers too few known examples in all conditions that were tried, down to single {things} "
            f"of an untrained network{seen}: with this effort it can't tell"
        )
    came_out = f"{shown.recovered} of {shown.images} {shown.source}, {shown.psnr:.1f} dB"
    between = f"; conditions between them couldn't be tried: {untold[0]}" if untold else ""
    return f"{things} come out of {steps[nearest]} ({came_out}); the clients send {steps[0]}{between}"


def run_margins(
    summaries: Sequence[AttackSummary],
    trials: Sequence[Trial],
    recordings: Sequence[Recording],
    scenario: Scenario,
    controls: Controls,
    means: Means,
    wrong: Mapping[str, str],
) -> tuple[list[MarginResult], dict[str, Tensor]]:
    """Return the margins of federations whose images no attack recovered, nor had the power to, and their images.

    One a federation, of the attack that fits its victims, or has most effort; and of closed forms, which cost nothing,
    where they are nearer. Where it can't be told, it says why. ``summaries`` are judged by controls; ``wrong`` says of
    federations why their recorded training isn't what was done.
    """
    found: list[MarginResult] = []
    files: dict[str, Tensor] = {}
    only_tried = {name for name, _, defences in scenario.runs() if not defences.undefended}
    for recording in recordings:
        name = recording.transcript.name
        own = [s for s in summaries if known_type(s.kind).margin and s.federation == name]
        if any(s.verdict in LEAKS for s in own) or (scenario.evaluation.compare_defences and name in only_tried):
            continue
        if any(s.verdict == "not demonstrated" for s in own):
            found += [_untold(s, _BY_DEFENCE) for s in own if _by_undefended(s, controls)][:1]
            continue
        able = _able(name, trials, scenario.attacks)
        if not able:
            continue
        if name in wrong:
            found.append(_untold(able[0][1], wrong[name], able[0][0]))
            continue
        best: MarginResult | None = None
        pictures: dict[str, Tensor] = {}
        for number, (attack, observation) in enumerate(able):
            if number and hasattr(attack, "iterations"):
                continue
            known = controls.powers.get((name, attack.name))
            measured = margin_of(
                attack,
                observation,
                recording.truth,
                means,
                seed=scenario.seed,
                device=scenario.device,
                known=known,
                work=max(MOST_WORK * _work(name, attack, trials), work_of(attack, 1, _LEAST_RUNS)),
            )
            result, images = (_untold(observation, measured, attack), {}) if isinstance(measured, str) else measured
            if best is None or _nearer(result, best):
                best, pictures = result, images
        if best is not None:
            found.append(best)
            files |= pictures
    return found, files


_BY_DEFENCE = "without its defences images come out: it is the defence that stops this attack"


def _by_undefended(summary: AttackSummary, controls: Controls) -> bool:
    if summary.control is None:
        return False
    control = controls.results[summary.control]
    return control.federation is not None or control.without_defence


def _able(federation: str, trials: Sequence[Trial], attacks: Sequence[Attack]) -> list[tuple[Attack, Observation]]:
    """Return each attack on single updates' images with one of them: those that fit their victims, then by effort."""
    found: dict[str, tuple[Attack, Observation]] = {}
    for attack in attacks:
        for trial in trials:
            seen = trial.observation
            if trial.attack.name != attack.name or seen.federation != federation or len(seen.messages) != 1:
                continue
            info = seen.task_info
            suited = (not attack.examples or info.kind in attack.examples) and len(info.input_shape) > 1
            weak = hasattr(attack, "iterations") and attack.effort() < FEWEST_ITERATIONS
            if suited and not weak and attack.finds is ImageFinding and attack.scope() == "update":
                found.setdefault(attack.name, (attack, seen))
    return sorted(found.values(), key=lambda run: (run[0].calibration(run[1]) is None, -run[0].effort()))


def _work(federation: str, attack: Attack, trials: Sequence[Trial]) -> float:
    """Return what an attack on a federation cost, with its calibrations, in iterations on one example."""
    own = [t for t in trials if (t.observation.federation, t.attack.name) == (federation, attack.name) and t.outcome]
    fitted = {id(t.calibration): t.calibration for t in own if isinstance(t.calibration, CalibrationFinding)}
    ran = [t for t in own if isinstance(t.outcome, Finding)]
    runs = sum(work_of(t.attack, sum(m.update.num_examples for m in t.observation.messages)) for t in ran)
    return runs + sum(one.iterations or 0 for one in fitted.values())


def _nearer(one: MarginResult, other: MarginResult) -> bool:
    """Return whether a margin is of harder conditions than another."""
    return one.nearest is not None and (other.nearest is None or one.nearest < other.nearest)


def _untold(where: AttackSummary | Observation, why: str, attack: Attack | None = None) -> MarginResult:
    name = attack.name if attack else where.attack if isinstance(where, AttackSummary) else ""
    return MarginResult(attack=name, federation=where.federation, steps=[], text=f"{UNTOLD}{why}")


def with_margin(summary: AttackSummary, margins: Sequence[MarginResult]) -> AttackSummary:
    """Return the summary; that of the attack whose margin was measured says how far away a leak is."""
    of = (summary.attack, summary.federation)
    own = [m.text for m in margins if m.steps and (m.attack, m.federation) == of]
    return summary.model_copy(update={"advice": [*own, *summary.advice]}) if own else summary
