"""An attack that fits its victim: settings chosen on updates of one's own examples, made under the very same facts.

What works on an untrained network fails on a trained one, in batches, under noise. An adversary can check that: it has
the model, the facts of the training and images of its own, so it can attack updates of its *own* images first. It
knows their truth, so it may choose by what comes out. The victim's truth has no part in it.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedaudit.attacks.base import Attack, Progress, silent
from fedaudit.attacks.findings import Finding, ImageFinding
from fedaudit.defences import CLIENT_DEFENCES
from fedaudit.defences.censor import orthogonal_to
from fedaudit.models import has_batch_norm, set_training_mode
from fedaudit.simulation.local_training import gradient, local_randomness
from fedaudit.simulation.replay import replay
from fedaudit.task.info import TaskInfo
from fedaudit.task.training import class_logits
from fedaudit.task.transforms import transformed
from fedaudit.transcript.observation import Message, Observation
from fedaudit.transcript.update import Update
from fedaudit.utils.errors import BadInput, NotApplicable, OutOfTime
from fedaudit.utils.fingerprint import tensor_digest

CAP = 60.0  # dB: above, images are equal to the eye, and one of them would decide a mean
MOST = 6  # runs' iterations that a calibration has, at most, however many updates it serves
_FEWEST = 60  # iterations below which settings can't be told apart
_OWN_UPDATES = 2  # at most, that settings are tried on
_OWN_IMAGES = 4  # of them together, about

# What is tried, the attack's own settings first, then in the order in which a small budget takes them: each line is one
# candidate. A strong denoiser with more or less total variation, with and without subspaces, values or signs of the
# gradient, layers weighed alike. What an attack doesn't have is left out of a line, and a line that then says nothing
# new is left out.
SPACE: tuple[Mapping[str, Any], ...] = (
    {},
    {"total_variation": 1e-2, "denoising": 3.0},
    {"total_variation": 1e-2, "denoising": 3.0, "subspace": 0.0},
    {"total_variation": 1e-2, "signed": False},
    {"total_variation": 1e-3, "denoising": 10.0, "subspace": 0.0},
    {"total_variation": 1e-2, "denoising": 10.0},
    {"total_variation": 1e-3},
    {"total_variation": 5e-2, "denoising": 3.0},
    {"total_variation": 1e-2, "denoising": 10.0, "subspace": 0.0},
    {"total_variation": 1e-3, "denoising": 3.0, "signed": False},
    {"total_variation": 1e-4, "denoising": 0.3},
    {"total_variation": 1e-2, "moving": 0.0, "denoising": 10.0},
    {"total_variation": 5e-2, "signed": False, "denoising": 0.3, "subspace": 0.0},
    {"total_variation": 0.2, "denoising": 3.0, "subspace": 0.0},
    {"total_variation": 1e-2, "beta": 1.0, "denoising": 3.0, "subspace": 0.0},
    {"total_variation": 5e-2, "denoising": 10.0},
)


@dataclass(frozen=True)
class Own:
    """A client of the adversary's own examples, (n, ...), images in [0, 1], and what it would see of it.

    ``orders``: of each of its updates, which examples it used, (num_examples,) in the order of use.
    """

    observation: Observation
    inputs: Tensor
    labels: Tensor
    orders: tuple[Tensor, ...]

    @property
    def used(self) -> Tensor:
        """Those of the inputs that an update used, each once."""
        return self.inputs[torch.cat(self.orders).unique()]


@dataclass(frozen=True)
class Rung:
    """What came of settings in one rung of successive halving.

    Attributes:
        settings: what differs from the attack's own.
        psnr: dB, the mean over own images, each capped at 60; None where the attack diverged.
    """

    settings: dict[str, Any]
    iterations: int
    updates: int
    psnr: float | None


@dataclass(frozen=True, kw_only=True)
class CalibrationFinding(Finding, kind="calibration"):
    """What an attack found out about itself.

    Attributes:
        settings: that it chose, as far as they differ from its own.
        source: whose images these were, in the plural: ``fedaudit's photographs``.
        failed: why it chose nothing; else empty.
    """

    settings: dict[str, Any]
    rungs: tuple[Rung, ...]
    images: int
    source: str
    failed: str = ""

    @property
    def best(self) -> Rung:
        """What was chosen, in the longest runs."""
        return self.rungs[-1]

    @property
    def own(self) -> Rung:
        """The attack's own settings, in the longest runs that they had."""
        return next(rung for rung in reversed(self.rungs) if not rung.settings)

    def __str__(self) -> str:
        """Return in a sentence what was chosen, and on what."""
        if self.failed:
            return f"not calibrated, its own settings are kept: {self.failed}"
        chosen = ", ".join(f"{name}: {str(value).lower()}" for name, value in self.settings.items())
        images = f"{self.images} of {self.source}"
        tried = f"{len({str(rung.settings) for rung in self.rungs})} settings, {self.iterations:,} iterations in all"
        if not self.settings:
            return f"calibrated on {images} under the same conditions ({tried}): its own settings are kept"
        against = "" if self.own.psnr is None else f", its own {self.own.psnr:.1f}"
        return (
            f"calibrated on {images} under the same conditions ({tried}): {chosen} "
            f"({self.best.psnr:.1f} dB there after {self.best.iterations:,} iterations{against})"
        )


@dataclass(frozen=True, kw_only=True)
class Calibration(Attack):
    """The calibration of an attack on one update, as a unit of work that is kept and reused like any other.

    Args:
        inputs: (m, C, H, W) own examples in [0, 1].
        labels: (m,) of theirs; empty: drawn from what the model takes them for.
        updates: how many the result will attack: the effort is theirs together, at most.
        source: whose examples these are, in the plural.
    """

    name: ClassVar[str] = "calibration"
    threat_model: ClassVar[str] = "that of the attack"
    needs: ClassVar[tuple[str, ...]] = ()
    finds: ClassVar[type[Finding]] = CalibrationFinding

    attack: Attack
    inputs: Tensor
    labels: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    updates: int = 1
    source: str = "own images"

    def check(self, observation: Observation) -> None:
        """Refuse what the attack refuses, or what nobody can repeat."""
        self.attack.check(observation)
        check_repeatable(observation)

    def settings(self) -> dict[str, Any]:
        """Return what the finding depends on beside the observation."""
        digests = [tensor_digest(tensor).hex() for tensor in (self.inputs, self.labels)]
        return {"attack": {"name": self.attack.name, **self.attack.settings()}, "own": digests, "effort": self.effort()}

    def effort(self) -> int:
        """Return the iterations of all runs together, about."""
        return self.attack.effort() * min(self.updates, MOST)

    def _run(
        self, observation: Observation, generator: torch.Generator, device: str, progress: Progress
    ) -> CalibrationFinding:
        inputs, labels = self.inputs, self.labels
        if not len(labels):
            labels = likely_labels(observation, inputs, generator)
        try:
            rungs, images = halving(
                self.attack,
                observation,
                (inputs, labels),
                generator=generator,
                device=device,
                iterations=self.effort(),
                progress=progress,
            )
        except OutOfTime:
            raise
        except NotApplicable as error:  # that, too, is kept
            return CalibrationFinding(settings={}, rungs=(), images=0, source=self.source, failed=str(error))
        return CalibrationFinding(
            settings=rungs[-1].settings,
            rungs=tuple(rungs),
            images=images,
            source=self.source,
            iterations=sum(rung.iterations * rung.updates for rung in rungs),
        )


def halving(
    attack: Attack,
    observation: Observation,
    examples: tuple[Tensor, Tensor],
    *,
    generator: torch.Generator,
    device: str = "cpu",
    iterations: int,
    progress: Progress = silent,
) -> tuple[list[Rung], int]:
    """Return what came of settings on own updates, and the number of own images; the chosen settings come last.

    By successive halving (Jamieson and Talwalkar 2016) and a duel. All candidates run for few iterations on the same
    own updates from the same starts; the better half goes on with runs twice as long, until one is left. Short runs
    prefer strong priors, which long ones may not need: so the last one meets the attack's own settings once more, in
    runs as long as the attack's, where the effort pays for these, and else in runs that take half of it. A candidate
    that diverges is out. ``examples``: (m, C, H, W) in [0, 1] and (m,) labels; ``iterations``: of all runs together,
    about.
    """
    each, whole, info = distinct(observation), attack.effort(), observation.task_info
    most = max(1, min(_OWN_UPDATES, _OWN_IMAGES // each, len(examples[0]) // each))
    duels = max(1, min(most, iterations // (3 * whole)))
    last = min(whole, max(1, iterations // 4 // duels))
    left, updates = iterations - 2 * duels * last, most
    space = candidates(attack)
    count = min(len(space), 16)
    while count > 2 and left // (_rungs(count) * count * updates) < _FEWEST:
        updates, count = (updates - 1, count) if updates > 1 else (1, count // 2)
    first = max(1, left // (_rungs(count) * count * updates))
    own = own_updates(observation, examples, max(updates, duels), generator)
    states = [torch.Generator().manual_seed(generator.initial_seed() + 1 + i).get_state() for i in range(len(own))]
    done = 0

    def tried(settings: Mapping[str, Any], length: int, count: int) -> Rung:
        nonlocal done
        short = attack.with_settings({**settings, "iterations": length, "restarts": 1})
        values: list[float] | None = []
        for one, state in zip(own[:count], states, strict=False):
            start = torch.Generator()
            start.set_state(state)
            try:
                found = short(
                    one.observation,
                    generator=start,
                    device=device,
                    progress=lambda so_far, of, before=done: progress(  # type: ignore[misc]
                        min(before + length * so_far // of, iterations), iterations
                    ),
                )
                values = None if values is None else values + _psnr(found, one.used, info)
            except OutOfTime:
                raise
            except NotApplicable:
                values = None
            done += length
        return Rung(dict(settings), length, count, sum(values) / len(values) if values else None)

    found, length = list[Rung](), first
    standing = space[:count]
    while len(standing) > 1:
        scored = sorted((tried(settings, length, updates) for settings in standing), key=_quality)
        found += scored
        standing = [rung.settings for rung in scored[::-1] if rung.psnr is not None][: len(standing) // 2]
        length *= 2
    finalists = [{}, *(settings for settings in standing if settings)]
    if len(finalists) == 1 and len(found) > 1:  # its own settings won already; the best of the others tries once more
        finalists.append(next(rung.settings for rung in found[::-1] if rung.settings))
    found += sorted((tried(settings, last, duels) for settings in finalists), key=_quality)
    if found[-1].psnr is None:
        raise NotApplicable(f"{attack.name} diverges on updates of one's own, whatever its settings")
    return found, max(updates, duels) * each


def _quality(rung: Rung) -> float:
    return -math.inf if rung.psnr is None else rung.psnr


def candidates(attack: Attack) -> list[dict[str, Any]]:
    """Return the lines of :data:`SPACE` as far as the attack has such settings, each once, its own settings first."""
    known, found = attack.settings(), list[dict[str, Any]]()
    for line in SPACE:
        own = {name: value for name, value in line.items() if name in known and known[name] != value}
        if own not in found:
            found.append(own)
    return found


def _rungs(count: int) -> int:
    return max(1, math.ceil(math.log2(count)))


def _psnr(finding: Finding, true: Tensor, task_info: TaskInfo) -> list[float]:
    """Return :func:`psnr_of` what was found; where examples have no bounds, of them as the model sees them."""
    pair = _images(finding), true
    return psnr_of(*(pair if task_info.example_kind.bounds is not None else map(task_info.normalise, pair)))


def _images(finding: Finding) -> Tensor:
    if not isinstance(finding, ImageFinding):
        raise BadInput(f"{finding.attack} finds no images: there is nothing to calibrate it by")
    return finding.images


# --- own updates ------------------------------------------------------------------------------------------------------


def distinct(observation: Observation) -> int:
    """Return over how many different examples a client's updates are: over epochs, the same ones are used again.

    Where nobody says how many the client holds, each update is over others of its own; rounds over the same.
    """
    updates = [message.update for message in observation.messages]
    told = max((update.training.data_size or 0 for update in updates if update.training), default=0)
    if told:
        return min(told, sum(update.num_examples for update in updates))
    return max(update.num_examples for update in updates)


def check_repeatable(observation: Observation) -> None:
    """Raise NotApplicable unless one update can be made of own examples as the observed one was made."""
    message = observation.single()
    update, training = message.update, message.update.training
    if update.members and update.kind == "weights":
        raise NotApplicable("a sum of several clients' local training can't be repeated with examples of one's own")
    if message.client_weights:
        raise NotApplicable("the clients of this sum were sent different weights")
    if update.kind == "weights" and training is None:
        raise NotApplicable("how the clients train isn't known, so it can't be repeated with examples of one's own")
    known = update.sanitised
    whole = {name for name, p in observation.module.named_parameters() if p.requires_grad} <= update.tensors.keys()
    told = known is not None and (
        known.sparse or known.signs or known.noise or known.clip or known.orthogonal or known.transform
    )
    if known is not None and whole and not told:
        raise NotApplicable(f"what the defence '{known.name}' does to an update isn't known, so it can't be repeated")
    if known is not None and known.noise and known.clip is None and not known.unclipped:
        raise NotApplicable("how long an update is without its noise isn't known (its clip), so it can't be repeated")
    if update.members and observation.task_info.batch_norm == "train" and has_batch_norm(observation.module):
        raise NotApplicable("clients of a sum normalise their own batches each, and which is whose isn't known")
    if training is not None and training.unmodelled:
        raise NotApplicable("the clients' training can't be repeated: it has parts that nothing here models")


def own_update(
    observation: Observation, inputs: Tensor, labels: Tensor, order: Tensor, generator: torch.Generator
) -> Observation:
    """Return an update of own examples, (m, ...), images in [0, 1], made as the one of ``observation`` was.

    The same model, mode of BatchNorm and dropout, batches, steps, epochs, rates and optimiser; then the defence, as far
    as everybody knows it: the parameters that arrived, as many numbers of each, signs, the same clip, noise as strong.
    ``order`` (num_examples,): which examples it uses, in the order of use.
    """
    check_repeatable(observation)
    message, task_info = observation.single(), observation.task_info
    update, training = message.update, message.update.training
    seen = task_info.normalise(inputs)
    if update.sanitised is not None and update.sanitised.transform is not None:
        seen = transformed(update.sanitised.transform, seen, task_info)
    if update.kind == "gradient":
        module = model_of(observation)
        try:
            with local_randomness(0):
                tensors = gradient(module, observation.loss, (seen[order], labels[order]))
        except BadInput as error:
            raise NotApplicable(str(error)) from error
        after = module.state_dict()
    else:
        assert training is not None  # check_repeatable saw to it
        sizes = [one.examples for step in training.passes for one in step] or list(training.batch_sizes)
        clipped = update.sanitised.private if update.sanitised is not None else None
        if clipped is not None:  # noise comes afterwards, all at once
            clipped = dataclasses.replace(clipped, noise=0.0, empty=())
        try:
            after = replay(
                observation.module,
                observation.loss,
                message.weights,
                [(seen[rows], labels[rows]) for rows in order.split(sizes)],
                training,
                batch_norm=task_info.batch_norm,
                dropout=task_info.dropout,
                private=clipped,
            )
        except BadInput as error:
            raise NotApplicable(str(error)) from error
        trained = [name for name, p in observation.module.named_parameters() if p.requires_grad]
        tensors = {name: after[name] - message.weights[name] for name in trained}
    if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
        raise NotApplicable("training like the clients' diverges on own examples")
    made = dataclasses.replace(
        update,
        tensors=_defended(tensors, update, generator),
        labels=None if update.labels is None else labels[order].view_as(update.labels),
        buffers={name: after[name].detach().clone() for name in update.buffers},
    )
    return dataclasses.replace(observation, messages=(dataclasses.replace(message, update=made),))


def own_client(observation: Observation, examples: tuple[Tensor, Tensor], generator: torch.Generator) -> Own:
    """Return a client of the first own examples, with as many updates as ``observation``'s, made in the same way.

    As clients do, it goes through them, (m, ...) with labels (m,), again and again, in new orders.
    """
    count, total = distinct(observation), sum(message.update.num_examples for message in observation.messages)
    if len(examples[0]) < count:
        raise NotApplicable(f"a client like this one used {count} examples, and there are {len(examples[0])} own ones")
    inputs, labels = (part[:count] for part in examples)
    walk = torch.cat([torch.randperm(count, generator=generator) for _ in range(math.ceil(total / count))])
    orders = walk[:total].split([message.update.num_examples for message in observation.messages])
    messages: list[Message] = []
    for single, order in zip(observation.split(), orders, strict=True):
        messages += own_update(single, inputs, labels, order, generator).messages
    return Own(dataclasses.replace(observation, messages=tuple(messages)), inputs, labels, orders)


def own_updates(
    observation: Observation, examples: tuple[Tensor, Tensor], count: int, generator: torch.Generator
) -> list[Own]:
    """Return ``count`` own clients, each with other examples while there are enough."""
    inputs, labels = examples
    shuffled = torch.randperm(len(inputs), generator=generator)
    size = distinct(observation)
    rows = [shuffled.roll(-i * size)[:size] for i in range(count)]
    return [own_client(observation, (inputs[own], labels[own]), generator) for own in rows]


def likely_labels(observation: Observation, inputs: Tensor, generator: torch.Generator) -> Tensor:
    """Return (m, ...) targets, as a data set has them, for examples (m, C, ...) that have none.

    Classes and labels are drawn from what the model takes the examples for: a trained network is sure of its clients'
    labels, an untrained one isn't, and gradients depend on that. Real values are drawn from a standard normal
    distribution, as data sets have them. A mask is its example's brightness, cut so that every class has as many
    pixels: its borders are the example's.
    """
    info = observation.task_info
    task = info.task_kind
    if task.real:
        return torch.randn(len(inputs), info.num_targets, generator=generator)
    if task.dense:
        ranks = inputs.mean(dim=1).flatten(1).argsort(dim=1, stable=True).argsort(dim=1)
        return (ranks * info.target_values // ranks.shape[1]).view(len(inputs), *info.target_shape)
    module = model_of(observation, "eval")
    with torch.no_grad():
        outputs = torch.cat([module(part) for part in info.normalise(inputs).split(256)])
    if not bool(outputs.isfinite().all()):
        raise NotApplicable("the model's outputs aren't finite")
    if task.label_sets:
        return torch.bernoulli(outputs.sigmoid(), generator=generator)
    if not task.one_class:
        return task.hard(outputs)
    chances = class_logits(outputs).softmax(dim=1)
    return torch.multinomial(chances.double(), 1, generator=generator)[:, 0]


def psnr_of(images: Tensor, true: Tensor) -> list[float]:
    """Return the PSNR in dB of n true images in [0, 1], matched to k ≥ n so that squared errors are least."""
    errors = torch.cdist(true.flatten(1).double(), images.flatten(1).double()).square() / true[0].numel()
    rows, columns = linear_sum_assignment(errors.numpy())
    return [min(CAP, -10 * math.log10(max(float(errors[r, c]), 1e-12))) for r, c in zip(rows, columns, strict=True)]


def model_of(observation: Observation, batch_norm: Literal["eval"] | None = None) -> torch.nn.Module:
    """Return the model that was sent, as the client ran it, or with BatchNorm in another mode and without dropout."""
    module = copy.deepcopy(observation.module).cpu()
    module.load_state_dict(observation.single().weights)
    info = observation.task_info
    set_training_mode(module, batch_norm or info.batch_norm, dropout=info.dropout and batch_norm is None)
    return module


def _defended(tensors: Mapping[str, Tensor], update: Update, generator: torch.Generator) -> dict[str, Tensor]:
    """Return what a defence leaves of an own update, as far as the victim's update and its description tell."""
    known = update.sanitised
    found = {name: tensors[name] for name in update.tensors}
    if known is None:
        return found
    if known.sparse and not known.noise and _anywhere(known.name):
        found = {name: value.where(update.tensors[name] != 0, 0) for name, value in found.items()}
    elif known.sparse:
        found = {name: _largest(value, int(update.tensors[name].count_nonzero())) for name, value in found.items()}
    if known.orthogonal:
        drawn = {name: torch.randn(value.shape, generator=generator) for name, value in found.items()}
        found = {name: orthogonal_to(value, drawn[name]) for name, value in found.items()}
    if known.signs:
        return {name: value.sign() for name, value in found.items()}
    if known.clip is not None:  # where there is noise, too: check_repeatable saw to it
        own = math.sqrt(sum(float(value.double().square().sum()) for value in found.values()))
        shrink = min(1.0, known.clip / own) if own else 1.0
        found = {name: shrink * value for name, value in found.items()}
    if known.noise:
        noise = {name: torch.randn(value.shape, generator=generator) for name, value in found.items()}
        each = dict(known.noises)
        found = {name: value + each.get(name, known.noise) * noise[name] for name, value in found.items()}
    return found


def _anywhere(name: str) -> bool:
    """Whether what a defence holds back isn't simply what is smallest, so that its own places tell more."""
    return name in CLIENT_DEFENCES and CLIENT_DEFENCES[name].value.unsent == 0


def _largest(tensor: Tensor, count: int) -> Tensor:
    """Return the tensor with all but its ``count`` largest numbers zero."""
    flat = tensor.flatten()
    kept = torch.zeros_like(flat)
    rows = flat.abs().topk(count).indices
    kept[rows] = flat[rows]
    return kept.view_as(tensor)
