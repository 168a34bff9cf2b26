"""Label inference: which labels a batch had, from the gradient of the last layer and the global model alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
from pydantic import AfterValidator
from torch import Tensor, nn

from fedaudit.attacks.victim import Victim
from fedaudit.models import Layer
from fedaudit.task.info import TaskInfo
from fedaudit.task.training import bce_with_logits, class_logits
from fedaudit.utils.errors import NotApplicable, unknown_name
from fedaudit.utils.registry import Registry

_NOTHING = 1e-6  # of the largest entry: below it an entry's sign is rounding error
_MISLED = 0.02  # of all labels
_NOT_BY_SIZE = ("idlg", "yin", "signs")  # inferences that go by signs and order alone
_PROBES = 64  # dummy images for what the model expects on average


@dataclass(frozen=True)
class Evidence:
    """What a label inference uses: a classifier's last layer, p = softmax(W·h + b).

    Attributes:
        rows: (classes, features) gradient of W: the mean over the batch of (p − y)·hᵀ.
        bias: (classes,) gradient of b, the mean of p − y; None where the layer has no bias.
        weight, offset: (classes, features) W and (classes,) b of the global model; None where they aren't known.
        probe: returns (n, classes) probabilities and (n, features) features h of the global model on n dummy images.
        signs: whether of the gradients only the signs are known, as after Adam's steps.
        label_smoothing, class_weights: of the loss, as in ``torch.nn.functional.cross_entropy``.
        public: returns probabilities and features as ``probe``, of public examples, and their (n,) labels; None where
            the adversary holds none.
    """

    rows: Tensor
    bias: Tensor | None
    probe: Callable[[], tuple[Tensor, Tensor]]
    signs: bool = False
    label_smoothing: float = 0.0
    class_weights: tuple[float, ...] | None = None
    weight: Tensor | None = None
    offset: Tensor | None = None
    public: Callable[[], tuple[Tensor, Tensor, Tensor]] | None = None


# From the evidence and the number K of examples to (K,) labels: ascending, with duplicates, unless it says otherwise.
LabelInference = Callable[[Evidence, int], Tensor]

LABEL_INFERENCES: Registry[LabelInference] = Registry("label inference")


def check_label_inference(name: str) -> str:
    """Return ``name`` if it is a label inference.

    Raises:
        ValueError: it isn't; the message says what is.
    """
    known = ["auto", *LABEL_INFERENCES.names()]
    if name not in known:
        raise ValueError(unknown_name("label inference", name, known))
    return name


LabelMethod = Annotated[str, AfterValidator(check_label_inference)]


@LABEL_INFERENCES.register("idlg", "sign of the last layer's gradient rows; one example", paper="Zhao et al. 2020")
def idlg(evidence: Evidence, num_examples: int) -> Tensor:
    """Infer the label of a single example (iDLG, Zhao et al. 2020, Eq. 4).

    The gradient's row of class i is (p_i − y_i)·h: with three classes or more the true one is the only class whose
    row points against all others. The row with the least sum of inner products is taken, which needs no sign of the
    features h. With two classes the rows are opposite to each other, and the more negative one is taken: right where
    the features aren't negative on average (after a ReLU or a sigmoid).

    Raises:
        NotApplicable: there are several examples.
    """
    if num_examples != 1:
        raise NotApplicable(
            f"label inference 'idlg' works for one example, the update has {num_examples}; use label_inference=yin"
        )
    rows = evidence.rows.double()
    if len(rows) == 2:
        return rows.sum(dim=1).argmin().view(1)
    products = rows @ rows.T
    return (products.sum(dim=1) - products.diagonal()).argmin().view(1)


@LABEL_INFERENCES.register(
    "yin", "most negative entries of the last layer's gradient; no label twice", paper="Yin et al. 2021"
)
def yin(evidence: Evidence, num_examples: int) -> Tensor:
    """Infer the labels of a batch without duplicates (GradInversion, Yin et al. 2021, Eq. 8).

    Takes the K classes whose gradient row has the most negative minimum over the features, the surest first. Exact for
    K = 1 with features that aren't negative (after a ReLU or a sigmoid).

    Raises:
        NotApplicable: there are more examples than classes.
    """
    if num_examples > len(evidence.rows):
        raise NotApplicable(
            f"label inference 'yin' finds each class at most once: {num_examples} examples, {len(evidence.rows)} "
            "classes; use label_inference=geng or bias-corrected, grant the labels (threat.knows_labels=true), or "
            "lower batch_size or local_steps"
        )
    return evidence.rows.amin(dim=1).argsort(stable=True)[:num_examples]


@LABEL_INFERENCES.register(
    "geng", "counts of every class, with duplicates, from the last layer's weights", paper="Geng et al. 2021"
)
def geng(evidence: Evidence, num_examples: int) -> Tensor:
    """Infer how often each class occurs (Geng et al. 2021, zero-shot label restoration).

    The sum of row i is the mean of (p_i − y_i)·Σh. With p and Σh replaced by their means over dummy images,
    n_i = K·(p̄_i − Σ row_i / Σh̄). Departures: the dummies are Gaussian noise, fed once; the counts are rounded to whole
    numbers that sum to K by the largest remainders.

    Raises:
        NotApplicable: the features of dummy images sum to zero.
    """
    probabilities, features = evidence.probe()
    scale = features.double().sum(dim=1).mean()
    if not bool(scale.abs() > 1e-12):
        raise NotApplicable(
            "label inference 'geng' divides by the mean sum of the last layer's inputs, which is zero here; "
            "use label_inference=bias-corrected"
        )
    shares = probabilities.double().mean(dim=0) - evidence.rows.double().sum(dim=1) / scale
    return rounded(of_labels(shares, evidence), num_examples)


@LABEL_INFERENCES.register(
    "bias-corrected", "counts of every class, with duplicates, from the last layer's bias", paper="this project"
)
def bias_corrected(evidence: Evidence, num_examples: int) -> Tensor:
    """Infer how often each class occurs from the gradient of the bias, which no feature blurs.

    The bias's gradient is the mean of p − y, so n_i = K·(p̄_i − b_i): exact but for p̄, the batch's mean probabilities.
    They are taken over dummy images. Where the features aren't negative the rows of W tell more: a row with a negative
    entry belongs to a class that occurs (as in Yin et al. 2021), which is then counted once at least. Where some n_i
    are clearly negative the dummies mislead, as they do on trained networks: all classes are taken as equally likely,
    and those without such a row as absent. Our own combination: Wainakh et al. 2021 correct the rows of W by an offset
    that comes from dummies.

    Raises:
        NotApplicable: the last layer has no bias.
    """
    if evidence.bias is None:
        raise NotApplicable(
            "label inference 'bias-corrected' needs a bias in the last layer; use label_inference=geng or yin"
        )
    probabilities, _ = evidence.probe()
    expected, bias = probabilities.double().mean(dim=0), evidence.bias.double()
    present = present_by_rows(evidence, num_examples)
    shares = expected - bias
    if bool(shares.clamp_max(0).sum() < -_MISLED):
        shares = (1 / len(bias) - bias).masked_fill(~present & bool(present.any()), 0)
    return rounded(of_labels(shares, evidence), num_examples, least=present)


@LABEL_INFERENCES.register(
    "signs", "the classes with a negative gradient; how often each occurs stays open", paper="this project"
)
def signs(evidence: Evidence, num_examples: int) -> Tensor:
    """Infer which classes occur from signs alone, all that Adam's step leaves of large gradients.

    The bias's gradient is the mean of p − y: negative for a class that occurs more often than the model expects. Where
    there is no bias, the inner product of W's rows with the mean features of dummy images stands for it. Where that
    doesn't make up for all examples, rows of W tell, too: where the features aren't negative a class with a negative
    entry occurs (Yin et al. 2021). How often each class occurs nothing tells: equally often.

    Raises:
        NotApplicable: no class has a negative gradient.
    """
    _, features = evidence.probe()
    rows = evidence.rows.double()
    lowest = torch.zeros(len(rows)) if bool((features < 0).any()) else rows.amin(dim=1).cpu()
    sums = rows @ features.double().mean(dim=0) if evidence.bias is None else evidence.bias
    present = sums.cpu() < 0
    by_rows = (lowest < 0) & ~present
    surest = lowest.masked_fill(~by_rows, torch.inf).argsort(stable=True)[: max(0, num_examples - int(present.sum()))]
    present[surest] |= by_rows[surest]
    if not bool(present.any()):
        raise NotApplicable(
            "labels can't be inferred: no class has a negative gradient in the last layer; grant the labels "
            "(threat.knows_labels=true)"
        )
    return rounded(present.double().to(rows.device), num_examples)


def present_by_rows(evidence: Evidence, num_examples: int) -> Tensor:
    """Return (classes,) which classes occur: where features aren't negative, those with a negative entry in their row.

    Yin et al. 2021. Of more than ``num_examples`` the most negative are taken; none where features may be negative.
    """
    _, features = evidence.probe()
    lowest = evidence.rows.amin(dim=1)
    present = torch.zeros_like(lowest, dtype=torch.bool)
    if not bool((features < 0).any()):
        surest = lowest.argsort(stable=True)[:num_examples]
        present[surest] = lowest[surest] < -_NOTHING * evidence.rows.abs().max()
    return present


def of_labels(shares: Tensor, evidence: Evidence, *, smoothed: bool = True) -> Tensor:
    """Return how often each class occurs, given the share that it has of the smoothed and weighted targets."""
    smoothing = evidence.label_smoothing if smoothed else 0.0
    if smoothing:
        shares = (shares - smoothing / len(shares)) / max(1 - smoothing, _NOTHING)
    if evidence.class_weights is not None:
        weights = shares.new_tensor(evidence.class_weights)
        shares = torch.where(weights > 0, shares / weights, 0)
    return shares


def rounded(shares: Tensor, total: int, least: Tensor | None = None) -> Tensor:
    """Return ``total`` labels whose counts come nearest to ``shares``, those in ``least`` once at least."""
    wanted = total * shares.clamp_min(0) / shares.clamp_min(0).sum().clamp_min(1e-30)
    fixed = torch.zeros_like(wanted) if least is None else least.to(wanted)
    counts = torch.maximum(wanted.floor(), fixed)
    while counts.sum() > total:
        counts[(counts - wanted).masked_fill(counts <= fixed, -torch.inf).argmax()] -= 1
    missing = total - int(counts.sum())
    counts[(wanted - counts).argsort(descending=True, stable=True)[:missing]] += 1
    return torch.repeat_interleave(torch.arange(len(shares), device=shares.device), counts.long())


def evidence_of(
    victim: Victim,
    layers: Sequence[Layer],
    gradient: dict[str, Tensor],
    task_info: TaskInfo,
    *,
    signs: bool,
    public: tuple[Tensor, Tensor] | None = None,
) -> Evidence:
    """Return the evidence that ``gradient`` gives of the classifier of ``task_info``, with its loss's options.

    Args:
        victim, layers, gradient: as of :func:`last_layer`.
        task_info: of a classifier.
        signs: whether only the signs of the gradient are known.
        public: as of :func:`last_layer`.

    Raises:
        NotApplicable: as :func:`last_layer`.
    """
    assert task_info.num_classes is not None
    vocabulary = task_info.tokens.vocabulary if task_info.tokens else None
    return dataclasses.replace(
        last_layer(victim, layers, gradient, task_info.num_classes, task_info.input_shape, public, vocabulary),
        signs=signs,
        label_smoothing=task_info.label_smoothing,
        class_weights=task_info.class_weights,
    )


def last_layer(
    victim: Victim,
    layers: Sequence[Layer],
    gradient: dict[str, Tensor],
    num_classes: int,
    input_shape: tuple[int, ...],
    public: tuple[Tensor, Tensor] | None = None,
    vocabulary: int | None = None,
) -> Evidence:
    """Return the evidence that ``gradient`` gives of the classifier.

    Args:
        victim: the model, in the mode of the client's training.
        layers: of the model, in forward order.
        gradient: by parameter name; for a FedAvg update −ΔW in units of the gradient.
        num_classes: of the model; a layer with the one row of class 1 against class 0 stands for two classes.
        input_shape: (C, H, W).
        public: normalised public examples (n, C, H, W) and their (n,) labels, if the adversary holds any.
        vocabulary: of text; None for examples of real values.

    Raises:
        NotApplicable: the model doesn't end in a fully connected layer with one row a class, or its gradient wasn't
            sent.
    """
    outputs = 1 if victim.loss is bce_with_logits else num_classes
    for layer in reversed(layers):
        names = [n for n in layer.parameters if layer.kind == "linear" and n in gradient and gradient[n].ndim == 2]
        if names and len(gradient[names[0]]) == outputs:
            bias = next((gradient[n] for n in layer.parameters if n in gradient and gradient[n].ndim == 1), None)
            classifier = victim.module.get_submodule(layer.name)
            rows, state = gradient[names[0]], {**victim.constants, **victim.parameters}
            own = [state[name] for name in layer.parameters if name in state]
            weight = next((t for t in own if t.ndim == 2), None)
            offset = next((t for t in own if t.ndim == 1), None)
            if outputs == 1:  # the logits 0 and z: p − y of class 0 is minus that of class 1
                rows, bias = torch.cat([-rows, rows]), None if bias is None else torch.cat([-bias, bias])
                weight = None if weight is None else torch.cat([0 * weight, weight])
                offset = None if offset is None else torch.cat([0 * offset, offset])
            return Evidence(
                rows,
                bias,
                partial(_probe, victim, classifier, input_shape, vocabulary),
                weight=weight,
                offset=offset,
                public=None if public is None else partial(_public, victim, classifier, *public),
            )
        if names:
            break
    raise NotApplicable(
        f"labels can't be inferred: the model has no fully connected layer with {outputs} outputs at its end, "
        "or its gradient wasn't sent; grant the labels (threat.knows_labels=true)"
    )


def _probe(
    victim: Victim, classifier: nn.Module, input_shape: tuple[int, ...], vocabulary: int | None
) -> tuple[Tensor, Tensor]:
    """Return the probabilities and features of Gaussian noise, or of random tokens, always the same."""
    source, shape = torch.Generator().manual_seed(0), (_PROBES, *input_shape)
    noise = torch.randint(vocabulary, shape, generator=source) if vocabulary else torch.randn(shape, generator=source)
    return _seen(victim, classifier, noise)


def _public(victim: Victim, classifier: nn.Module, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    probabilities, features = _seen(victim, classifier, inputs)
    return probabilities, features, labels.to(features.device)


def _seen(victim: Victim, classifier: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the global model's probabilities of ``inputs``, and what its last layer takes."""
    features: list[Tensor] = []
    handle = classifier.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0].detach()))
    device = next(iter(victim.parameters.values())).device
    try:
        with torch.no_grad():
            outputs = victim.outputs(inputs.to(device))
    finally:
        handle.remove()
    return class_logits(outputs).softmax(dim=1), features[0].flatten(1)


def infer_labels(method: str, evidence: Evidence, num_examples: int) -> tuple[Tensor, str]:
    """Return labels and the name of the inference.

    ``auto`` is ``idlg`` for one example and ``ilrg-pooled`` for more, or of two classes ``bias-corrected``. Without a
    bias it is ``yin`` for as many examples as there are classes, and ``geng`` beyond. Where only signs are known it is
    ``signs`` for several examples.

    Args:
        method: a registered name or ``auto``.
        evidence: of the last layer.
        num_examples: in the update.

    Raises:
        NotApplicable: the method can't do it here.
        BadInput: no such method.
    """
    name = method
    if method == "auto":
        without = "yin" if num_examples <= len(evidence.rows) else "geng"
        by_bias = "ilrg-pooled" if len(evidence.rows) > 2 else "bias-corrected"
        counted = "signs" if evidence.signs else without if evidence.bias is None else by_bias
        name = "idlg" if num_examples == 1 else counted
    elif evidence.signs and name not in _NOT_BY_SIZE:
        raise NotApplicable(
            f"label inference '{name}' needs the gradient's size, and Adam's update tells its signs; "
            "use label_inference=signs"
        )
    inference = LABEL_INFERENCES[name].value
    if not torch.any(evidence.rows):
        raise NotApplicable("labels can't be inferred: the last layer's gradient is zero")
    return inference(evidence, num_examples), name
