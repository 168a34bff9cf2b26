"""What the optimisation-based attacks share: from an observation to the optimiser loop and back to a finding."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

import torch
from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import Tensor

from fedaudit.attacks.base import ATTACK_CONFIG, ATTACKS, GRIDS, Attack, Progress, make_attack, silent
from fedaudit.attacks.findings import ImageFinding, Trace
from fedaudit.attacks.inversion.calibration import LEARNED, Calibration, CalibrationFinding, inverted
from fedaudit.attacks.inversion.contrast import pinned
from fedaudit.attacks.inversion.engines.guarded import make_engine
from fedaudit.attacks.inversion.engines.reference import one_gradient, reference
from fedaudit.attacks.inversion.inverter import Inverter, descend
from fedaudit.attacks.inversion.local_epochs import agreed, same_set, search_epochs, spread
from fedaudit.attacks.inversion.objectives import (
    DISTANCES,
    Distance,
    Objective,
    adaptive_distance,
    distance_to,
    layer_weights,
)
from fedaudit.attacks.inversion.priors import smoothness
from fedaudit.attacks.inversion.reconstruct import reconstruct, with_priors
from fedaudit.attacks.labels.inference import LabelMethod, evidence_of, infer_labels
from fedaudit.attacks.local_training import Way, before_optimiser, image_way, is_adaptive, nothing_between, whole_epochs
from fedaudit.attacks.victim import (
    WITHOUT_DROPOUT,
    Statistics,
    Victim,
    load_victim,
    need_signal,
    need_training,
    one_batch_gradient,
)
from fedaudit.models import Layer, from_bottleneck_on, has_batch_norm
from fedaudit.simulation.local_training import local_randomness
from fedaudit.task.info import TaskInfo
from fedaudit.task.training import LOSSES, TrainingConfig
from fedaudit.transcript.observation import Message, Observation
from fedaudit.transcript.update import Update
from fedaudit.utils.errors import BadInput, NotApplicable
from fedaudit.utils.fingerprint import tensor_digest
from fedaudit.utils.validation import Count, Fraction, NonNegative, Positive, from_name

# How a method uses a FedAvg update: local training replayed; all mini-batches as one; the same full batch in every
# step; only if there was a single step.
FedAvgWay = Literal["simulation", "one-batch", "full-batch", "single-step"]
OptimiserName = Literal["adam", "l-bfgs"]
Schedule = Literal["constant", "steps", "linear", "cosine"]
Start = Literal["noise", "patterned", "learned"]
StatisticsChoice = Literal["auto", "batch", "running"]
QUICK = {"iterations": 1000}  # what a first audit takes; the attacks' own default is ten times as many
_FEWEST = 50  # iterations by which the statistics are decided, where there are twice as many


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """One observed update made ready for the optimiser.

    Attributes:
        task_info: what everybody knows.
        message: the update, and the global model that it was made from.
        victim: the model as the client ran it.
        layers: of the model, in forward order.
        gradient: the observed gradient by name; for a FedAvg update its one-batch approximation ΔW / (−μ·T).
        labels: (n,) that the attack works with.
        label_source: ``given``, the inference's name, or ``optimised``.
        epochs: of which each has images of its own, so that the labels are those of all epochs, one after another.
        notes: what the user should know; the engines add to them while they run.
    """

    task_info: TaskInfo
    message: Message
    victim: Victim
    layers: list[Layer]
    gradient: dict[str, Tensor]
    labels: Tensor
    label_source: str
    epochs: int = 1
    notes: list[str] = field(default_factory=list)

    @property
    def update(self) -> Update:
        """The update alone."""
        return self.message.update

    @property
    def pixel_range(self) -> tuple[Tensor, Tensor]:
        """Normalised black and white, (1, C, ...) each; infinite where examples have no bounds."""
        return self.task_info.pixel_range(torch.zeros((1, *self.task_info.input_shape), device=self.labels.device))


@checked_dataclass(frozen=True, kw_only=True, config=ATTACK_CONFIG)
class GradientInversion(Attack):
    """Template of the attacks that optimise dummy images, volumes or signals until their gradient is the observed one.

    A method is a subclass that sets defaults; the hyper-parameters here are common to all.

    Args:
        iterations: of the optimiser, in each restart.
        optimiser: ``adam`` or ``l-bfgs``.
        learning_rate: in normalised pixels.
        start: the first dummy images: Gaussian ``noise``, or a small piece of it repeated like tiles, ``patterned``
            (Wei et al. 2020); or what an inverter answers that was ``learned`` on updates of own examples, which
            calibration does: see :mod:`fedaudit.attacks.inversion.inverter`.
        pull: weight of the prior that keeps images near that answer.
        interpolation: where local steps are taken for one batch, the place between the model that was sent, 0, and the
            one that came back, 1, at which the batch's gradient is taken (surrogate model extension, Zhu et al. 2023;
            there it is learnt from 0.5 on, here calibration tries 0.5).
        total_variation: weight of the prior.
        separate: where local epochs are simulated, the share of the iterations in which each has images of its own;
            then they are matched and averaged, and shared by all epochs.
        same_set: weight of the prior that these images are the same in all epochs, in whatever order (Dimitrov et al.
            2022).
        signed: give the optimiser the sign of the gradient only.
        schedule: of the learning rate: ``constant``; ``steps``, ×0.1 after 3/8, 5/8 and 7/8 of the iterations;
            ``linear``, to zero; ``cosine``, to zero after a short linear start.
        clamp: keep pixels in their valid range.
        average: share of the iterations, the last ones, whose mean image is the result; 0 for the last image.
        restarts: from new noise; the one of least objective is kept.
        label_inference: ``auto``, ``idlg``, ``yin``, ``geng``, ``bias-corrected``, ``signs``, ``ilrg``,
            ``ilrg-pooled``, ``llg`` or ``llg-star``; not used where labels are granted.
        beta: β, what the last convolution weighs in the distance; the first one weighs 1 (AGIC, Eq. 7).
        shape: of the weights from 1 to β: ``linear`` (Eq. 7), ``logarithmic``, ``exponential`` (Table I).
        relu_modifier: the 1/(1 − p) of Eq. 8.
        others: what biases and normalisations weigh: ``preceding``, ``one`` or ``zero``.
        engine: ``auto``, ``reference``, ``first-order`` or ``compiled``.
        aware: use what is known of the clients' defence; False takes the update for an undefended one, whose layers
            that didn't arrive are zero.
        statistics: which BatchNorm takes where clients train with those of their batch: those of the dummy ``batch``,
            the ``running`` ones, or ``auto``: a tenth of the iterations with each decides which explains the update
            better.
        pin_contrast: give the images in the end the brightness and contrast that BatchNorm's buffers tell, where these
            come back from clients that train with the statistics of their batch: see :func:`.pinned`.
        largest: update that is attacked, in examples; beyond, an audit only measures how far away a leak is; None: any.
        calibrate: before the attack turns to a federation's updates, an audit tries settings on updates of examples of
            the adversary's own, made under the same conditions, and takes those that recover most: see
            :mod:`fedaudit.attacks.inversion.calibration`. It takes as many iterations as the attack on all updates that
            it serves, and six times as many as on one, at most.
        learned: digest of the inverter that it begins with, which calibration fills in.
    """

    threat_model = "server or eavesdropper, passive"
    examples: ClassVar[tuple[str, ...]] = GRIDS
    distance: ClassVar[str]
    fedavg: ClassVar[FedAvgWay]
    most_examples: ClassVar[int | None] = None  # in an update; None: any number
    only_single: ClassVar[str | None] = None  # why it can't be run over several updates at once; None: it can
    only_by_labels: ClassVar[bool] = False  # whether images are sought of known labels only
    inverts: ClassVar[bool] = True  # whether a search may begin with what an inverter answers
    needs_classes = True

    iterations: Count = 10_000
    optimiser: OptimiserName = "adam"
    learning_rate: Annotated[Positive, Field(le=1e36)] = 0.1  # above, float32 overflows inside of Adam
    start: Start = "noise"
    pull: NonNegative = 0.01
    interpolation: Annotated[float, Field(ge=0, le=1)] = 0.0
    total_variation: NonNegative = 0.0
    separate: Fraction = 0.6
    same_set: NonNegative = 0.0
    signed: bool = False
    schedule: Schedule = "constant"
    clamp: bool = False
    average: Fraction = 0.0
    restarts: Count = 1
    label_inference: LabelMethod = "auto"
    beta: Positive = 1.0
    shape: Literal["linear", "logarithmic", "exponential"] = "linear"
    relu_modifier: bool = False
    others: Literal["preceding", "one", "zero"] = "preceding"
    engine: Annotated[
        Literal["auto", "reference", "first-order", "compiled"],
        BeforeValidator(lambda name: "first-order" if name == "frozen" else name),  # its former name
    ] = "auto"
    aware: bool = True
    statistics: StatisticsChoice = "auto"
    pin_contrast: bool = False
    largest: Count | None = None
    calibrate: bool = False
    learned: str = ""
    inverter: Any = field(init=False, default=None, repr=False, compare=False)  # an Inverter

    def calibration(self, observation: Observation) -> tuple[Attack, Observation] | None:
        """Return itself and its update, if it is to be calibrated."""
        return (self, observation) if self.calibrate else None

    def with_settings(self, settings: Mapping[str, Any], inverter: Inverter | None = None) -> Self:
        """Return the attack with other settings, which isn't to be calibrated any more; and what it begins with."""
        ready = self._changed(**{**settings, "calibrate": False})
        if inverter is None or ready.start != "learned":
            return ready
        ready = dataclasses.replace(ready, learned=tensor_digest(inverter.weights).hex()[:16])
        object.__setattr__(ready, "inverter", inverter)
        return ready

    def _changed(self, **settings: Any) -> Self:
        """Return the attack with other settings and the same inverter."""
        changed = dataclasses.replace(self, **settings)
        object.__setattr__(changed, "inverter", self.inverter)
        return changed

    def calibrated(
        self,
        observation: Observation,
        examples: Tensor,
        labels: Tensor | None = None,
        *,
        seed: int = 0,
        updates: int = 1,
        device: str = "cpu",
        progress: Progress | None = None,
    ) -> Self:
        """Return the attack with the settings that recover most of one's own examples under the same conditions.

        Args:
            observation: of one of the updates that are going to be attacked.
            examples: (m, C, H, W) one's own images in [0, 1], none of them a victim's; at least as many as the update
                has different ones.
            labels: (m,) of theirs; None: drawn from what the model takes them for.
            seed: of the own updates and of the first dummy images.
            updates: that are going to be attacked with the settings.
            device: where to compute.
            progress: called with (done, total) iterations, now and then.

        Raises:
            NotApplicable: nobody can repeat such training; there are too few examples; the attack doesn't apply.
        """
        labels = torch.zeros(0, dtype=torch.int64) if labels is None else labels
        own = Calibration(attack=self, inputs=examples, labels=labels, updates=updates)
        found = own(observation, seed=seed, device=device, progress=progress)
        assert isinstance(found, CalibrationFinding)
        if found.failed and self.start == LEARNED:  # without an inverter it is nothing
            raise NotApplicable(found.failed)
        return self.with_settings(found.settings, **inverted(found.inverter))

    def check(self, observation: Observation) -> None:
        """Raise unless the update is of images and everything that is needed is known.

        Raises:
            NotApplicable: with the reason and the remedy.
        """
        message = observation.single()
        task_info = observation.task_info
        super().check(observation)
        if min(task_info.input_shape[1:], default=2) < 2:
            kind, sides = task_info.example_kind, " by ".join("2" * (len(task_info.input_shape) - 1))
            raise NotApplicable(f"{self.name} needs {kind.plural} of at least {sides} {kind.element}s")
        training = message.update.training
        if self.needs_training_config(message.update):
            need_training(self.name, observation)
        if message.update.kind == "weights" and training is not None:
            self._check_local_training(training)
        if self.most_examples is not None and message.update.num_examples > self.most_examples:
            raise NotApplicable(
                f"{self.name} recovers one example, this update was made over {message.update.num_examples}; "
                "use invg or agic"
            )
        if self.largest is not None and message.update.num_examples > self.largest:
            raise NotApplicable(
                f"not tried: an update is over {message.update.num_examples:,} examples, more than {self.name} is to "
                f"be run on (largest: {self.largest})"
            )
        need_signal(message.update)
        if self.start == "learned" and self.inverter is None and not self.calibrate:
            raise NotApplicable(
                "no inverter was learnt; set calibrate=true, and give the adversary examples of its own "
                "(threat.knows_public_data: true, and threat.public_examples)"
            )

    def joint(self, observation: Observation) -> bool:
        """Return whether targets are optimised beside the images, as in DLG: they aren't classes to infer."""
        return observation.task_info.num_classes is None and observation.single().update.labels is None

    def check_targets(self, observation: Observation) -> None:
        """Raise where targets have to be optimised and can't be."""
        task_info, update = observation.task_info, observation.single().update
        if not self.joint(observation):
            return
        epochs = whole_epochs(update.num_examples, update.training, None)[1]
        why = ""
        if self.only_by_labels:
            why = f"{self.name} looks for images of known labels"
        elif task_info.loss not in LOSSES:
            why = "the loss is a user's own, and may not take targets that aren't whole"
        elif epochs > 1 and image_way(self.fedavg, observation.single()) == "simulation":
            why = "the update is of several epochs"
        elif is_adaptive(update):
            why = "the update is Adam's"
        if why:
            what, beside = task_info.asked, task_info.example_kind.plural
            raise NotApplicable(
                f"{what} can't be sought beside the {beside}: {why}; simulate it with threat.knows_labels=true"
            )

    def needs_training_config(self, update: Update) -> bool:  # noqa: ARG002 (subclasses use it)
        """Whether a FedAvg update can't be used without learning rate and local steps."""
        return True

    def _check_local_training(self, training: TrainingConfig) -> None:
        if self.fedavg == "single-step" and training.local_steps > 1:
            raise NotApplicable(
                f"{self.name} has no answer to {training.local_steps} local steps; use invg (by simulation) or agic "
                "(as one batch)"
            )
        if self.fedavg == "full-batch" and training.local_steps > 1:
            sizes = set(training.batch_sizes)
            if training.data_size is None or sizes != {training.data_size}:
                raise NotApplicable(
                    f"{self.name} divides a FedAvg update by its local steps, which holds if each of them used all of "
                    f"the client's {training.data_size or ''} examples; these batches have {min(sizes)}; "
                    "use agic or invg"
                )

    def ways(self, observation: Observation, message: Message) -> Sequence[Way]:
        """Return how images are found, and labels, where they are inferred."""
        way = image_way(self.fedavg, message)
        inferred = message.update.labels is None and observation.task_info.num_classes is not None
        return (way, "labels") if inferred else (way,)

    def priors(self, prepared: Prepared) -> list[tuple[float, Objective]]:  # noqa: ARG002 (subclasses use it)
        """Return what is minimised beside the distance, with its weights."""
        return [(self.total_variation, smoothness)]

    def weights(self, prepared: Prepared) -> dict[str, float]:
        """Return the weight of every tensor in the distance: α of Eq. 8 of Xu et al. 2022."""
        return layer_weights(
            prepared.layers,
            prepared.gradient,
            end=self.beta,
            shape=self.shape,
            relu_modifier=self.relu_modifier,
            others=self.others,
        )

    def notes(self, prepared: Prepared) -> list[str]:
        """Return what the user should know about this run."""
        said = [WITHOUT_DROPOUT] if prepared.victim.dropout else []
        parts = prepared.task_info.packed_inputs
        if parts is not None:
            said.append(
                f"all inputs ({parts}) are searched for in the units in which the model is given them, with nothing "
                "that is known of images (no total variation): one far from mean 0 and deviation 1 is hardly found, so "
                "standardise each before the model"
            )
        return said

    def _run(
        self, observation: Observation, generator: torch.Generator, device: str, progress: Progress
    ) -> ImageFinding:
        before = 0

        def trying(done: int, _: int) -> None:
            nonlocal before
            before = done
            progress(done, done + self.iterations * self.restarts)

        attack, notes = self.decided(observation, generator, device, trying)
        found = attack.recover(observation, generator, device, lambda done, of: progress(before + done, before + of))
        return dataclasses.replace(found, notes=(*notes, *found.notes))

    def decided(
        self, observation: Observation, generator: torch.Generator, device: str, progress: Progress = silent
    ) -> tuple[GradientInversion, list[str]]:
        """Return this attack with ``statistics`` decided where that is left open, and what the user should know.

        With each of the two the attack runs for a tenth of its iterations from the same start; what it minimises is
        then evaluated on both results in the same way, with BatchNorm in the mode of the client's training. The truth
        has no part in it.

        Args:
            generator: of the first dummy images; it isn't advanced.
            progress: called with (done, total) iterations of both.
        """
        mixed = observation.task_info.batch_norm == "train" and has_batch_norm(observation.module)
        if self.statistics != "auto" or not mixed:
            return self, []
        few = min(max(self.iterations // 10, _FEWEST), max(1, self.iterations // 2))
        values: dict[Statistics, float] = {}
        objective: Objective | None = None
        for i, statistics in enumerate(get_args(Statistics)):
            short = self._changed(statistics=statistics, iterations=few, restarts=1)
            prepared = short.prepare(observation, device)
            own = short.objective(prepared)
            objective = objective or own  # of the first: the batch's statistics, as the client's training took them
            start = torch.Generator(generator.device).set_state(generator.get_state())
            try:
                variables, _ = short.minimise(own, prepared, len(prepared.labels), start, _shifted(progress, i, 2))
                values[statistics] = float(objective(*variables)[0])
            except NotApplicable:
                values[statistics] = math.inf
        best: Statistics = "running" if values["running"] < values["batch"] else "batch"
        took = {"batch": "those of the dummy images", "running": "the running ones"}
        other: Statistics = "batch" if best == "running" else "running"
        note = (
            "the client trained with its batch's own statistics in BatchNorm, which the attack doesn't have: attacked "
            f"with {took[best]} (statistics: {best}), which after {few} iterations explained the update better than "
            f"{took[other]} (objective {values[best]:.3g} against {values[other]:.3g})"
        )
        return self._changed(statistics=best), [note]

    def recover(
        self, observation: Observation, generator: torch.Generator, device: str, progress: Progress
    ) -> ImageFinding:
        """Return the images; arguments as of :meth:`Attack.__call__`, with ``statistics`` decided.

        Raises:
            NotApplicable: it turned out on the way.
        """
        prepared = self.prepare(observation, device)
        variables, trace = self.found(prepared, generator, progress)
        labels = self.labels(variables, prepared)
        if self.pin_contrast:
            variables[0] = pinned(variables[0], prepared.victim, prepared.message)
        images = agreed(torch.cat([variables[0][None], trace.snapshots]), labels, prepared.epochs)
        rows = torch.arange(len(labels)).repeat(prepared.update.num_examples // len(labels))  # an example for each use
        pixels = to_pixels(images, prepared.task_info)[:, rows]
        return ImageFinding(
            images=pixels[0],
            labels=labels.cpu()[rows],
            label_source=prepared.label_source,
            objective=trace.objective[-1],
            iterations=self.effort(),
            trace=dataclasses.replace(trace, snapshots=pixels[1:]),
            notes=(*self.notes(prepared), *prepared.notes),
        )

    def found(self, prepared: Prepared, generator: torch.Generator, progress: Progress) -> tuple[list[Tensor], Trace]:
        """Return what :meth:`minimise` does of the update."""
        return self.minimise(self.objective(prepared), prepared, len(prepared.labels), generator, progress)

    def minimise(
        self, objective: Objective, prepared: Prepared, count: int, generator: torch.Generator, progress: Progress
    ) -> tuple[list[Tensor], Trace]:
        """Minimise from Gaussian noise, ``restarts`` times, and keep the run of least objective.

        Args:
            objective: of one batch of dummy images.
            prepared: the update that it belongs to, or one of several.
            progress: called with (done, total) over all restarts.

        Returns:
            The variables, the (count, C, H, W) normalised images first, and the images' trace.

        Raises:
            NotApplicable: the optimisation diverged.
        """
        best: tuple[list[Tensor], Trace] | None = None
        whole = self.side_by_side(objective, count)
        for restart in range(self.restarts):
            with local_randomness(generator.initial_seed()):  # a user's module may draw from the global generator
                run = self.search(whole, prepared, count, generator, _shifted(progress, restart, self.restarts))
            if math.isfinite(run[1].objective[-1]) and (best is None or run[1].objective[-1] < best[1].objective[-1]):
                best = run
        if best is None or not bool(torch.isfinite(best[1].snapshots).all()):
            raise NotApplicable(f"the optimisation diverged at learning_rate {self.learning_rate:g}; lower it")
        variables, trace = best
        rows = self.choose(variables[0], objective, count)
        return [variables[0][rows], *variables[1:]], dataclasses.replace(trace, snapshots=trace.snapshots[:, rows])

    def search(
        self, objective: Objective, prepared: Prepared, count: int, generator: torch.Generator, progress: Progress
    ) -> tuple[list[Tensor], Trace]:
        """Return what one restart finds, of all batches that are optimised side by side, and its trace."""
        if self.inverter is not None:
            return self.from_answer(objective, prepared, generator, progress)
        initial = [v.to(prepared.labels.device) for v in self.initial(prepared, count, generator)]
        settings = self.optimisation()
        if prepared.epochs == 1 or count != len(prepared.labels):  # of several updates at once
            return reconstruct(objective, initial, prepared.pixel_range, generator, progress, **settings)
        of, settings["separate"] = (prepared.labels, prepared.epochs, prepared.pixel_range), self.separate
        return search_epochs(objective, initial[0], *of, generator, progress, **settings)

    def from_answer(
        self, objective: Objective, prepared: Prepared, generator: torch.Generator, progress: Progress
    ) -> tuple[list[Tensor], Trace]:
        """Return what a descent finds from the inverter's answer."""
        info = prepared.task_info
        answer = info.normalise(self.inverter.answer(prepared.update, prepared.labels.cpu(), info))
        answer = answer.to(prepared.labels.device)
        settings = {**self.optimisation(), "signed": False, "clamp": False}
        return descend(objective, answer, self.inverter, info, generator, progress, pull=self.pull, **settings)

    def prepare(self, observation: Observation, device: str) -> Prepared:
        """Make the one update of ``observation`` ready; see :func:`prepare`.

        Of whole local epochs each example is sought once where they are taken for one batch; where they are simulated,
        once an epoch.
        """
        message = observation.single()
        update = message.update
        count, epochs = whole_epochs(update.num_examples, update.training, update.labels)
        way, joint = image_way(self.fedavg, message), self.joint(observation)
        inferred = update.labels is None and not joint
        prepared = prepare(
            observation,
            None if joint else self.label_inference,
            device,
            num_examples=count if way == "one batch" or inferred else None,
            aware=self.aware,
            statistics=self.statistics,
        )
        if self.interpolation and (why := nothing_between(self.fedavg, message)):
            prepared.notes.append(f"interpolation isn't used: {why}")
        elif self.interpolation:
            between = _between(message, self.interpolation)
            victim, layers = load_victim(observation, between, device, statistics=self.statistics)
            return dataclasses.replace(prepared, victim=victim, layers=layers)
        if way != "simulation" or epochs == 1:
            return prepared
        labels = spread(prepared.labels, update.training).repeat(epochs) if inferred else prepared.labels
        prepared.notes.append(f"{epochs} local epochs: each one's {count} images were matched and averaged")
        return dataclasses.replace(prepared, labels=labels, epochs=epochs)

    def initial(self, prepared: Prepared, count: int, generator: torch.Generator) -> list[Tensor]:
        """Return the first value of what is optimised, the dummy images first; noise for targets, too."""
        info = prepared.task_info
        if self.start == "patterned":
            found = [_patterned(count, info.input_shape, generator)]
        else:
            found = [torch.randn((count, *info.input_shape), generator=generator)]
        if prepared.label_source == "optimised":
            found.append(torch.randn((count, *info.output_shape), generator=generator))
        return found

    def objective(self, prepared: Prepared) -> Objective:
        """Return what is minimised, of one batch of dummy images."""
        alike = [(self.same_set, same_set(prepared.epochs))] if prepared.epochs > 1 else []
        return with_priors(self.make_engine(prepared), [*self.priors(prepared), *alike])

    def side_by_side(self, objective: Objective, count: int) -> Objective:  # noqa: ARG002 (subclasses use it)
        """Return ``objective``, of one batch of ``count``, as that of all batches that are optimised side by side."""
        return objective

    def choose(self, images: Tensor, objective: Objective, count: int) -> Tensor:  # noqa: ARG002
        """Return which ``count`` of the optimised images are the result."""
        return torch.arange(count)

    def labels(self, variables: list[Tensor], prepared: Prepared) -> Tensor:
        """Return the labels of the result."""
        if prepared.label_source == "optimised":
            return prepared.task_info.task_kind.hard(variables[1])
        return prepared.labels

    def optimisation(self) -> dict[str, Any]:
        """Return the settings of :func:`reconstruct`."""
        names = ("iterations", "learning_rate", "optimiser", "signed", "schedule", "clamp", "average")
        return {name: getattr(self, name) for name in names}

    def make_engine(self, prepared: Prepared) -> Objective:
        """Return the distance: of one batch for gradients, and for FedAvg as the method treats it."""
        distance, training = self.matched(prepared)
        if prepared.label_source == "optimised":  # no fast engine knows targets that change
            return reference(prepared.victim, None, training, distance, task=prepared.task_info.task_kind)
        steps = self.iterations * self.restarts * (1 if self.optimiser == "adam" else 20)
        return make_engine(self.engine, prepared.victim, prepared.labels, training, distance, steps, prepared.notes)

    def matched(self, prepared: Prepared) -> tuple[Distance, TrainingConfig]:
        """Return the distance, and the training whose pseudo-gradient it is of; see :func:`matched`.

        Of a network with a variational bottleneck (PRECODE) only what comes before it is matched: behind it gradients
        are mostly noise, and before it hardly.
        """
        weights = self.weights(prepared)
        if self.aware:
            weights |= dict.fromkeys(from_bottleneck_on(prepared.victim.module) & weights.keys(), 0.0)
        return matched(prepared, weights, self.distance, self.fedavg, aware=self.aware)


@checked_dataclass(frozen=True, kw_only=True, config=ATTACK_CONFIG)
class Composed(Attack):
    """What the attacks share that run a method which optimises images on observations that they make.

    Args:
        attack: the method: its name and settings.
    """

    examples = GradientInversion.examples
    inverts = True
    over: ClassVar[str]  # what the method is run over, in words
    several: ClassVar[bool] = False  # updates at once

    attack: Annotated[dict[str, Any], BeforeValidator(from_name)] = field(default_factory=lambda: {"name": "agic"})

    def __post_init__(self) -> None:
        _ = self.method  # a wrong one is found now

    @cached_property
    def method(self) -> GradientInversion:
        """The method that is run; BadInput if it can't be."""
        settings = dict(self.attack)
        name = settings.pop("name", None)
        if not isinstance(name, str):
            raise BadInput(f"attack '{self.name}': attack: give the name of the method, and its settings")
        made = make_attack(name, settings)
        reason = "it doesn't optimise images"
        if isinstance(made, GradientInversion):
            if not (self.several and made.only_single):
                return made
            reason = made.only_single
        known = (e.value for e in ATTACKS)
        fitting = [c.name for c in known if issubclass(c, GradientInversion) and not (self.several and c.only_single)]
        raise BadInput(
            f"attack '{self.name}': attack: '{name}' can't be run over {self.over}, because {reason}; "
            f"known: {', '.join(fitting)}"
        )

    def single(self, observation: Observation) -> Observation:
        """Return one update of those that the method is run on, for its calibration."""
        return observation.split()[0]

    def calibration(self, observation: Observation) -> tuple[Attack, Observation] | None:
        """Return the method and one of its updates, if it is to be calibrated."""
        return self.method.calibration(self.single(observation))

    def with_settings(self, settings: Mapping[str, Any], inverter: Inverter | None = None) -> Self:
        """Return the same with other settings of the method."""
        method = self.method.with_settings(settings, inverter)
        ready = dataclasses.replace(self, attack=method.written())
        ready.__dict__["method"] = method  # with its inverter
        return ready

    @property
    def iterations(self) -> int:
        """What a run of the method costs, for the progress display."""
        return self.method.iterations

    def settings(self) -> dict[str, Any]:
        """Return the hyper-parameters with all of the method's, JSON-serialisable."""
        return {**super().settings(), "attack": self.method.written()}


def matched(
    prepared: Prepared, weights: dict[str, float], name: str, fedavg: FedAvgWay, *, aware: bool
) -> tuple[Distance, TrainingConfig]:
    """Return the distance ``name`` to an update, and the training whose pseudo-gradient it is of.

    That is a batch's gradient, with what accumulation and clipping make of it where it is known; or the client's local
    training, replayed. Adam's update has its own distance, whatever the name.
    """
    update, training = prepared.update, prepared.update.training
    names = list(prepared.victim.parameters)
    way = image_way(fedavg, prepared.message)
    target, replayed = prepared.gradient, one_gradient(len(prepared.labels))
    if training is not None and way != "one batch":
        if update.kind == "gradient" or (is_adaptive(update) and way == "one step"):
            replayed = before_optimiser(training, update.kind)
            target = {name: t.to(prepared.labels.device) for name, t in update.tensors.items()}
        else:
            target = {name: -t.to(prepared.labels.device) for name, t in update.tensors.items()}
            replayed = training
        if (
            name == "squared-l2" and update.kind == "weights"
        ):  # of gradients, not of pseudo-gradients: else it shrinks with the learning rate squared
            total = sum(training.learning_rates) or training.learning_rate * training.local_steps
            weights = {name: total**-2 * weight for name, weight in weights.items()}
    if is_adaptive(update) and not (update.sanitised and update.sanitised.signs):
        return adaptive_distance(name, way, prepared.message, names, target, weights), replayed
    if aware:
        return distance_to(name, update, names, target, weights), replayed
    plain = DISTANCES[name]([target[n] for n in names], [weights[n] for n in names])
    return plain, replayed


def prepare(
    observation: Observation,
    label_inference: str | None,
    device: str,
    *,
    num_examples: int | None = None,
    aware: bool = True,
    statistics: str = "batch",
) -> Prepared:
    """Make the one update of ``observation`` ready: the model as the client ran it, the gradient, the labels.

    Args:
        label_inference: a name, or ``auto``; None where the attack optimises the targets itself.
        num_examples: to look for, if not the update's own number; granted labels are cut to it.
        aware: False takes parameters that didn't arrive for zero.
        statistics: that BatchNorm takes, see :func:`fedaudit.attacks.victim.load_victim`.

    Raises:
        NotApplicable: the labels are neither granted nor inferable.
        BadInput: no such label inference.
    """
    task_info = observation.task_info
    message = observation.single() if aware else _undefended(observation.single())
    update = message.update
    wanted = num_examples or update.num_examples
    victim, layers = load_victim(observation, message, device, statistics=statistics)
    gradient = one_batch_gradient(update, device, message.weights)
    if label_inference is None:
        labels, source = task_info.blank(wanted)[1].to(device), "optimised"
    elif update.labels is not None:
        labels, source = update.labels[:wanted].to(device), "given"
    else:
        assert task_info.num_classes is not None  # check() saw to it
        evidence = evidence_of(
            victim, layers, gradient, task_info, signs=is_adaptive(update), batch_size=update.batch_size
        )
        labels, source = infer_labels(label_inference, evidence, wanted)
    return Prepared(
        task_info=task_info,
        message=message,
        victim=victim,
        layers=layers,
        gradient=gradient,
        labels=labels,
        label_source=source,
    )


def to_pixels(images: Tensor, task_info: TaskInfo) -> Tensor:
    """Return (k, n, C, ...) normalised images, volumes or signals as a data set has them, within bounds, on the CPU."""
    pixels = task_info.denormalise(images.flatten(0, 1))
    if task_info.example_kind.bounds is not None:
        pixels = pixels.clamp(*task_info.example_kind.bounds)
    return pixels.view(images.shape).cpu()


def _between(message: Message, place: float) -> Message:
    """Return the message with the weights at that place between what was sent and what came back."""
    moved = {name: message.weights[name] + place * change for name, change in message.update.tensors.items()}
    return dataclasses.replace(message, weights={**message.weights, **moved})


def _undefended(message: Message) -> Message:
    """Return the message with zeros in place of every parameter that it hasn't."""
    update = message.update
    sent = {name: update.tensors.get(name, torch.zeros_like(t)) for name, t in message.weights.items()}
    known = update.sanitised and dataclasses.replace(update.sanitised, transform=None)
    return dataclasses.replace(message, update=dataclasses.replace(update, tensors=sent, sanitised=known))


def _patterned(count: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return images that repeat a piece of noise, a quarter as long each way (CPL, Wei et al. 2020, Section 4.2)."""
    channels, *sides = shape
    piece = torch.randn((count, channels, *(max(1, side // 4) for side in sides)), generator=generator)
    tiled = piece.repeat(1, 1, *(-(-side // own) for side, own in zip(sides, piece.shape[2:], strict=True)))
    for axis, side in enumerate(sides, start=2):
        tiled = tiled.narrow(axis, 0, side)
    return tiled.contiguous()


def _shifted(progress: Progress, restart: int, restarts: int) -> Progress:
    return lambda done, total: progress(restart * total + done, restarts * total)
