"""What attacks make of training that isn't plain SGD: one table, for checks, for findings' notes and for the docs.

And what an update by Adam or AdamW tells of the gradient: its size where epsilon shows, else its sign.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedaudit.task.info import TaskInfo
from fedaudit.task.training import UNMODELLED, ParameterGroup, TrainingConfig
from fedaudit.transcript.observation import Message
from fedaudit.transcript.update import Update, UpdateKind
from fedaudit.utils.errors import NotApplicable

# How an attack uses an update: a column of the table. An attack may use it in two ways, as one that optimises images
# and infers their labels first; one that only looks at the model that training left uses it in none.
Way = Literal[
    "one step",
    "simulation",
    "one batch",
    "r-gap",
    "spear",
    "labels",
    "span",
    "rows",
    "local-model",
    "local-model-exact",
]


@dataclass(frozen=True)
class Answer:
    """What a way does with a word of real training that it doesn't model: how it approximates, or the remedy."""

    kind: Literal["approximates", "refuses"]
    text: str


@dataclass(frozen=True)
class Row:
    """A word of real training: what clients do, and the answers of the ways that don't model it."""

    what: str
    answers: dict[Way, Answer]


def _about(text: str) -> Answer:
    return Answer("approximates", text)


def _not(text: str) -> Answer:
    return Answer("refuses", text)


WITHOUT_DROPOUT = (
    "the client trained with dropout, whose masks the adversary doesn't know: attacked without dropout, "
    "which is their expectation"
)
_BY_DIRECTION = "train by SGD, Adam or AdamW, or run agic, which needs the direction alone"
_OPTIMISES = "run an attack that optimises (invg, agic)"
_ANY = "local-model is for any training"
_IN_ONE = "its steps are taken as one batch's gradient, in which earlier steps weigh more than the last"
_ADAM_ONE = (
    "gradients are recovered from the update where Adam's epsilon shows in it; elsewhere their signs are matched and "
    "a lower bound of their size"
)
_ADAM_MANY = "Adam's steps are replayed, smoothed where a gradient changes its sign"
_ADAM_IN_ONE = "all steps are taken as one batch's, of whose gradient the update tells the signs"
_ADAM_LABELS = "the signs of the last layer's gradient tell which classes occur, not how often each does"
_PRECISION = "the attack computes in float32"
_COUNTS = "the last layer's gradient was clipped, so that counts of labels lean to its direction alone"
_FRESH = "attacked as if it began anew"
_AS_KNOWN = "attacked with what is recorded"
_ONE_INPUT = _not("how the model is called isn't known; call it with tensors (n, …) of real values")
_RECORD = _not("record the training (optimiser, rates, batch sizes) with the update")
_BY_ANSWERS = _not("describe it by a torch.nn.Module (model, in the file of --model)")
_NO_SPAN = _not(
    "what is sent element by element doesn't span the inputs any more; train by SGD, or run token-presence (text) or "
    "loss-threshold (records)"
)
_ROWS_DECAY = _about("decay moves every row: only those count that moved much further")
_IMAGES: tuple[Way, ...] = ("one step", "simulation", "one batch")


def _same(answer: Answer, *ways: Way) -> dict[Way, Answer]:
    return dict.fromkeys(ways, answer)


def _adam(name: str) -> Row:
    return Row(
        f"clients train by {name}",
        {
            "one step": _about(_ADAM_ONE),
            "simulation": _about(_ADAM_MANY),
            "one batch": _about(_ADAM_IN_ONE),
            "r-gap": _not(f"its equations need the gradient itself; {_OPTIMISES}"),
            "spear": _not(f"its equations need sums of gradients; {_OPTIMISES}"),
            "labels": _about(_ADAM_LABELS),
            "span": _NO_SPAN,
            "local-model-exact": _not(f"{name}'s steps aren't affine; {_ANY}"),
        },
    )


def _unmodelled(word: str, answers: dict[Way, Answer]) -> Row:
    return Row(UNMODELLED[word], answers)


_NOBODYS = _not("a sum is nobody's own model; attack single updates (threat.sees=updates)")

# word -> row. What isn't listed in a row is modelled.
TABLE: dict[str, Row] = {
    "sum": Row(
        "only the sum of several clients' updates is known",
        {
            "r-gap": _not(f"its equations are one example's, and a sum is over several; {_OPTIMISES}"),
            **_same(_NOBODYS, "local-model", "local-model-exact"),
        },
    ),
    "steps of a sum": Row(
        "the same, of several local steps",
        _same(
            _about(
                "the clients of the sum are taken for one, whose batches are theirs together: their models, which "
                "drift apart, for one model"
            ),
            "simulation",
            "one batch",
        ),
    ),
    "momentum": Row("clients train with momentum", _same(_about(_IN_ONE), "one batch")),
    "nesterov": Row("clients train with Nesterov's momentum", _same(_about(_IN_ONE), "one batch")),
    "dampening": Row("clients train with dampened momentum", _same(_about(_IN_ONE), "one batch")),
    "weight decay": Row(
        "clients train with weight decay",
        {"one batch": _about("it stays in what is taken for the gradient"), "rows": _ROWS_DECAY},
    ),
    "proximal term": Row(
        "clients train with FedProx's term", _same(_about("it stays in what is taken for the gradient"), "one batch")
    ),
    "rates": Row(
        "the learning rate changes within an update",
        _same(_about("its steps are taken as one batch's gradient, weighted by their rates"), "one batch"),
    ),
    "groups": Row("the optimiser treats groups of parameters differently", {}),
    "accumulation": Row(
        "clients accumulate gradients over several passes a step",
        _same(_about("all passes are taken as one batch"), "one batch"),
    ),
    "clip_norm": Row(
        "clients clip the norm of their gradients",
        {
            "one batch": _about("by how much a step was shortened isn't known: all count as if they weren't"),
            "r-gap": _about("the gradient's direction is known, its length isn't"),
            "labels": _about(_COUNTS),
            "local-model-exact": _not(f"clipping isn't affine; {_ANY}"),
        },
    ),
    "private steps": Row(
        "clients clip each example's gradient",
        {
            **_same(_about("how much each example was shortened isn't known: all count alike"), *_IMAGES),
            "r-gap": _about("the gradient's direction is known, its length isn't"),
            "labels": _about("each example's part of the last layer's gradient was clipped, so that counts lean"),
            "local-model-exact": _not(f"clipping isn't affine; {_ANY}"),
        },
    ),
    "private noise": Row(
        "clients train by DP-SGD (per-example clipping and noise)",
        {
            **_same(_about("distances know how strong the noise is, and no more"), *_IMAGES),
            "r-gap": _not(f"its equations need the gradient itself; {_OPTIMISES}"),
            "spear": _not(f"its equations need the gradient itself; {_OPTIMISES}"),
            "labels": _about("each example's part of the last layer's gradient was clipped, and has noise"),
            "local-model-exact": _not(f"the noise of every step is in it; {_ANY}"),
        },
    ),
    "clip_value": Row(
        "clients clip each element of their gradients",
        {
            "one batch": _about("the clipped gradient is taken for the gradient"),
            "r-gap": _not(f"its equations need the gradient itself; {_OPTIMISES}"),
            "spear": _not(f"its equations need sums of gradients; {_OPTIMISES}"),
            "labels": _about(_COUNTS),
            "span": _NO_SPAN,
            "local-model-exact": _not(f"clipping isn't affine; {_ANY}"),
        },
    ),
    "adam": _adam("Adam"),
    "adamw": _adam("AdamW"),
    "precision": Row(
        "clients compute in mixed precision",
        _same(_about(_PRECISION), *_IMAGES, "r-gap", "spear", "labels", "span", "local-model-exact"),
    ),
    "dropout": Row(
        "clients train with dropout",
        {
            **_same(_about(WITHOUT_DROPOUT), *_IMAGES, "labels", "span"),
            "r-gap": _not(f"its equations don't hold behind unknown masks; {_OPTIMISES}"),
            "spear": _about("an example's own gradient isn't compared: its masks aren't known"),
            "local-model": _about("the mapping that is learnt is a mean over masks"),
            "local-model-exact": _not(f"masks aren't the same in every round; {_ANY}"),
        },
    ),
    "batch norm": Row(
        "clients train with their batch's statistics in BatchNorm",
        {
            "one batch": _about("the statistics are taken over all examples at once"),
            "r-gap": _not(f"its equations don't hold across a batch; {_OPTIMISES}"),
            "spear": _about("an example's own gradient isn't compared: the others' statistics are in it"),
        },
    ),
    "label smoothing": Row(
        "clients smooth labels",
        _same(
            _about("counts are corrected for it; idlg and yin take it for none, which holds while it is small"),
            "labels",
        ),
    ),
    "class weights": Row(
        "clients weigh classes",
        {
            "one batch": _about("all examples are weighed in one batch, not in each step's own"),
            "labels": _about("counts are divided by the weights; idlg and yin need no correction"),
        },
    ),
    "own loss": Row(
        "clients minimise a loss of their own",
        {"labels": _about("labels are inferred as if it were the mean cross-entropy")},
    ),
    "optimiser": _unmodelled(
        "optimiser",
        {
            **_same(_not(_BY_DIRECTION), "one step", "simulation"),
            **_same(
                _about("the update is taken for one batch's gradient, times a number"), "one batch", "labels", "span"
            ),
            "r-gap": _not(f"its equations need the gradient itself; {_OPTIMISES}"),
            "spear": _not(f"its equations need sums of gradients; {_OPTIMISES}"),
            "local-model-exact": _not(f"its steps may not be affine; {_ANY}"),
        },
    ),
    "optimiser-state": _unmodelled(
        "optimiser-state",
        {
            **_same(_about(_FRESH), *_IMAGES, "labels", "span", "local-model"),
            "r-gap": _not(f"its equations need one example's gradient alone; {_OPTIMISES}"),
            "spear": _not(f"earlier rounds' examples are in the update, too; {_OPTIMISES}"),
            "local-model-exact": _not(f"an update isn't a function of the weights sent; {_ANY}"),
        },
    ),
    "optimiser-settings": _unmodelled(
        "optimiser-settings",
        {
            **_same(_about(_AS_KNOWN), *_IMAGES, "labels", "span", "local-model"),
            "r-gap": _not(f"its equations need the gradient itself; {_OPTIMISES}"),
            "spear": _not(f"its equations need sums of gradients; {_OPTIMISES}"),
            "local-model-exact": _not(f"an update isn't a function of the weights sent; {_ANY}"),
        },
    ),
    "gradients-changed": _unmodelled(
        "gradients-changed",
        {
            **_same(_about("the changed gradients are taken for the gradients"), *_IMAGES, "labels", "span"),
            "r-gap": _not(f"its equations need the gradient itself; {_OPTIMISES}"),
            "spear": _not(f"its equations need sums of gradients; {_OPTIMISES}"),
            "local-model-exact": _not(f"the change may not be affine; {_ANY}"),
        },
    ),
    "several-inputs": _unmodelled("several-inputs", _same(_ONE_INPUT, *_IMAGES, "r-gap", "spear", "labels", "span")),
    "several-losses": _unmodelled(
        "several-losses",
        {
            **_same(
                _about("all of the gradient is taken for that of the loss that is known"), *_IMAGES, "spear", "labels"
            ),
            "r-gap": _not(f"its equations need one loss's gradient alone; {_OPTIMISES}"),
        },
    ),
    "loss": _unmodelled(
        "loss", _same(_about("attacked with the loss that was given"), *_IMAGES, "r-gap", "spear", "labels")
    ),
    "no-gradient": _unmodelled(
        "no-gradient",
        _same(_BY_ANSWERS, *_IMAGES, "r-gap", "spear", "labels", "span", "rows", "local-model", "local-model-exact"),
    ),
    "nothing-seen": _unmodelled("nothing-seen", _same(_RECORD, *_IMAGES, "r-gap", "spear", "labels")),
}


def words(message: Message, task_info: TaskInfo) -> Iterator[str]:
    """Yield the words of the table that hold for an update, as far as the adversary knows how it was made.

    Not dropout and BatchNorm: the model says for itself whether it has any.
    """
    if task_info.label_smoothing:
        yield "label smoothing"
    if task_info.class_weights is not None:
        yield "class weights"
    if task_info.loss == "custom":
        yield "own loss"
    training = message.update.training
    done = message.update.sanitised
    if done is not None and done.private is not None:
        yield "private noise" if done.private.noise else "private steps"
    if message.update.members:
        yield "sum"
        if training is None or training.local_steps > 1:
            yield "steps of a sum"
    if training is None:
        return
    accumulated = any(len(step) > 1 for step in training.passes)
    several = training.local_steps > 1
    local = {
        "momentum": several and _momentum(training),
        "nesterov": several and training.nesterov and _momentum(training),
        "dampening": several and training.dampening > 0 and _momentum(training),
        "weight decay": training.weight_decay > 0 or any(g.weight_decay for g in training.groups),
        "proximal term": several and training.proximal_mu > 0,
        "rates": len(set(training.rates)) > 1,
        "groups": bool(training.groups),
        "adam": training.optimiser == "adam",
        "adamw": training.optimiser == "adamw",
        "optimiser": (training.optimiser == "other" or "optimiser" in training.unmodelled)
        and "no-gradient" not in training.unmodelled,
    }
    if message.update.kind == "weights":  # a gradient has left before the optimiser sees it
        yield from (word for word, holds in local.items() if holds)
    always = {
        "accumulation": accumulated,
        "clip_norm": training.clip_norm is not None,
        "clip_value": training.clip_value is not None,
        "precision": training.rounds,
    }
    yield from (word for word, holds in always.items() if holds)
    of_optimiser = ("optimiser", "optimiser-state", "optimiser-settings")
    yield from (word for word in training.unmodelled if word not in of_optimiser)
    if message.update.kind == "weights":
        yield from (word for word in of_optimiser[1:] if word in training.unmodelled)


def _momentum(training: TrainingConfig) -> bool:
    return training.optimiser == "sgd" and (training.momentum > 0 or any(g.momentum for g in training.groups))


def image_way(fedavg: str, message: Message) -> Way:
    """Return how an attack that optimises images uses an update.

    It replays a gradient, a single step that isn't plain SGD, and what ``simulation`` gets; it divides a single step of
    plain SGD by its rate.
    """
    training = message.update.training
    if message.update.kind == "gradient":
        return "one step"
    if training is None or (fedavg == "one-batch" and training.optimiser == "other"):
        return "one batch"
    if fedavg == "simulation" or training.optimiser == "other":
        return "one step" if training.local_steps == 1 else "simulation"
    return "one step" if training.local_steps == 1 and not training.plain_sgd else "one batch"


def nothing_between(fedavg: str, message: Message) -> str:
    """Return why an update's gradient isn't sought between the model that was sent and the one that came back."""
    update = message.update
    if update.kind == "gradient" or (update.training is not None and update.training.local_steps == 1):
        return "a gradient, or an update of one step, is that of the model that was sent"
    if image_way(fedavg, message) != "one batch":
        return "this attack replays the local steps one by one"
    if update.sanitised is not None and (update.sanitised.signs or update.sanitised.orthogonal):
        return f"after {update.sanitised.name} the update doesn't tell which model came back"
    return ""


def treatments(training: TrainingConfig, names: Iterable[str]) -> list[ParameterGroup]:
    """Return how each of the parameters ``names`` is treated: its rate as a multiple, its momentum, its decay."""
    rest = ParameterGroup((), 1.0, training.momentum, training.weight_decay)
    own = {name: group for group in training.groups for name in group.parameters}
    return [own.get(name, rest) for name in names]


def whole_epochs(num_examples: int, training: TrainingConfig | None, labels: Tensor | None = None) -> tuple[int, int]:
    """Return how many different examples an update is of, and how often it used them: its local epochs.

    Unless it is known to be of whole epochs, each ending with a batch, every use counts as an example. ``labels``
    (num_examples,), in the order of use: those of every epoch are the same.
    """
    if training is None or training.data_size is None or num_examples % training.data_size:
        return num_examples, 1
    used, ends = 0, set()
    for size in training.batch_sizes:
        used += size
        ends.add(used)
    epochs = num_examples // training.data_size
    whole = all(training.data_size * (i + 1) in ends for i in range(epochs))
    if labels is not None:
        ordered = labels.view(epochs, -1).sort(dim=1).values
        whole = whole and bool((ordered == ordered[0]).all())
    return (training.data_size, epochs) if whole else (num_examples, 1)


def before_optimiser(training: TrainingConfig, kind: UpdateKind) -> TrainingConfig:
    """Return the training whose pseudo-gradient is that of a single step, accumulated and clipped.

    For Adam it has the weight decay in it, which AdamW takes elsewhere; where a gradient is sent it hasn't.
    """
    decayed = training.optimiser == "adam" and kind == "weights"
    return TrainingConfig(
        1.0,
        1,
        training.batch_sizes,
        weight_decay=training.weight_decay * decayed,
        groups=tuple(ParameterGroup(g.parameters, weight_decay=g.weight_decay * decayed) for g in training.groups),
        passes=training.passes,
        clip_norm=training.clip_norm,
        clip_value=training.clip_value,
    )


def refuse(attack: str, ways: Sequence[Way], message: Message, task_info: TaskInfo) -> None:
    """Raise NotApplicable where the table says that ``attack``, which uses the update in ``ways``, can't."""
    for row, answer in _answers(ways, message, task_info):
        if answer.kind == "refuses":
            raise NotApplicable(f"{attack} can't be run, because {row.what}: {answer.text}")


def notes(ways: Sequence[Way], message: Message, task_info: TaskInfo) -> list[str]:
    """Return what is approximated of the update's training, a sentence each."""
    return [
        f"approximated: {row.what}; {answer.text}"
        for row, answer in _answers(ways, message, task_info)
        if answer.kind == "approximates"
    ]


def _answers(ways: Sequence[Way], message: Message, task_info: TaskInfo) -> Iterator[tuple[Row, Answer]]:
    for word in words(message, task_info):
        row = TABLE[word]
        yield from ((row, row.answers[way]) for way in ways if way in row.answers)


_TRUST = 0.5  # relative error up to which a recovered gradient counts as known
_ARITHMETIC = 4  # roundings between a gradient and the step that Adam makes of it
_WITH_DECAY = 3  # roundings of the weights: of 1 − μλ, of what it is multiplied by, and of the difference
_ZERO = 2  # roundings below which a step is none


@dataclass(frozen=True)
class AdaptiveGradient:
    """What an update by Adam tells of the gradient: itself where ``known``, else its sign times its least size."""

    values: dict[str, Tensor]
    known: dict[str, Tensor]


def is_adaptive(update: Update) -> bool:
    """Return whether it is known that ``update`` is the work of Adam or AdamW."""
    training = update.training
    return update.kind == "weights" and training is not None and training.optimiser in ("adam", "adamw")


def mean_steps(update: Update, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return Adam's steps m̂/(√v̂ + ε) by name, weighted by their rates: between −1 and 1, for one step g/(|g| + ε).

    AdamW's decay is taken off: exactly for one step.
    """
    training = update.training
    assert training is not None  # is_adaptive() saw to it
    total = sum(training.rates)
    steps = {}
    for (name, delta), group in zip(update.tensors.items(), treatments(training, update.tensors), strict=True):
        own = -delta.double() / max(total * group.learning_rate, 1e-300)
        if training.optimiser == "adamw":
            own = own - group.weight_decay * weights[name].double()
        steps[name] = own if group.learning_rate else torch.zeros_like(own)
    return steps


def invert(update: Update, weights: Mapping[str, Tensor]) -> AdaptiveGradient:
    """Return what one step of Adam from fresh state tells of the gradient (for Adam, with its weight decay in it).

    The step is r = g/(|g| + ε), so g = ε·r/(1 − |r|). How well r is known follows from how W + ΔW and ΔW were rounded,
    to half precision perhaps, and from a defence's noise; where that would make g uncertain by more than half, only a
    lower bound of |g| is known. Where r is rounding alone, g is 0.
    """
    training = update.training
    assert training is not None  # is_adaptive() saw to it
    values, known = {}, {}
    steps = mean_steps(update, weights)
    for (name, r), group in zip(steps.items(), treatments(training, steps), strict=True):
        sent = update.tensors[name]
        rate = max(training.rates[0] * group.learning_rate, 1e-300)
        times = _WITH_DECAY if training.optimiser == "adamw" and group.weight_decay else 1
        error = times * _rounding(weights[name] + sent) * (weights[name].double().abs() + sent.double().abs()) / rate
        error = error + _rounding(sent) + _ARITHMETIC * torch.finfo(sent.dtype).eps
        error = error + (update.sanitised.noise / rate if update.sanitised else 0.0)
        error = error.clamp(min=float((r.abs() - 1).max().clamp(min=0)))  # a step of more than 1 is error alone
        most = _TRUST * training.epsilon / error
        size = training.epsilon * r.abs() / (1 - r.abs()).clamp(min=1e-300)
        certain = (r.abs() < 1) & (size < most)
        size = torch.where(r.abs() <= _ZERO * error, 0, torch.where(certain, size, most))
        values[name] = (r.sign() * size).to(sent.dtype)
        known[name] = certain
    return AdaptiveGradient(values, known)


def _rounding(tensor: Tensor) -> float:
    """Return the largest relative error of rounding to the precision that ``tensor`` shows, whatever it is held in."""
    own = torch.finfo(tensor.dtype).eps
    for shorter in (torch.bfloat16, torch.float16):
        gap = (tensor.to(shorter).to(tensor.dtype) - tensor).abs()
        if bool((gap <= 2 * own * tensor.abs()).all()):
            return torch.finfo(shorter).eps / 2
    return own / 2
