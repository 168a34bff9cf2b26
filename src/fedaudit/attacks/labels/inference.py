"""Label inference: which labels a batch had, from the gradient of the last layer and the global model alone."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

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
_ROUNDS_OF_WEIGHTS = 10
_PROBES = 64  # dummy images for what the model expects on average


@dataclass(frozen=True)
class Evidence:
    """What a label inference uses: a classifier's last layer, p = softmax(W·h + b).

    Attributes:
        rows: (classes, features) gradient of W: the mean over the batch of (p − y)·hᵀ.
        weight, offset: (classes, features) W and (classes,) b of the global model; None where they aren't known.
        probe: returns (n, classes) probabilities and (n, features) features h of the global model on n dummy images.
        signs: whether of the gradients only the signs are known, as after Adam's steps.
        label_smoothing, class_weights: of the loss, as in ``torch.nn.functional.cross_entropy``.
        summed: with class weights, rows and bias are the sum of the weighted terms over the number of examples, not
            over their weights' sum.
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
    summed: bool = False
    public: Callable[[], tuple[Tensor, Tensor, Tensor]] | None = None


# From the evidence and the number K of examples to (K,) labels: ascending, with duplicates, unless it says otherwise.
LabelInference = Callable[[Evidence, int], Tensor]

LABEL_INFERENCES: Registry[LabelInference] = Registry("label inference")


def check_label_inference(name: str) -> str:
    """Return ``name`` if it is a label inference; else a ValueError says what is."""
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
    features h. With two classes the rows are opposite to each other, and the bias' gradient p − y tells: it is negative
    for the true one alone. Without a bias the more negative row is taken: right where the features aren't negative on
    average (after a ReLU or a sigmoid).

    Raises:
        NotApplicable: there are several examples.
    """
    if num_examples != 1:
        raise NotApplicable(
            f"label inference 'idlg' works for one example, the update has {num_examples}; use label_inference=yin"
        )
    rows = evidence.rows.double()
    if len(rows) == 2 and evidence.bias is not None and bool(evidence.bias.any()):
        return evidence.bias.argmin().view(1)
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
    signs: bool = False,
    batch_size: float = 1.0,
    public: tuple[Tensor, Tensor] | None = None,
) -> Evidence:
    """Return the evidence that ``gradient``, of a FedAvg update −ΔW in its units, gives of a classifier, by its loss.

    A layer with the one row of class 1 against class 0 stands for two classes.

    Args:
        batch_size: by which the gradient of a loss that is a sum is divided; of a mean it doesn't count.
        public: normalised public examples (n, C, H, W) and their (n,) labels.
    """
    num_classes = task_info.num_classes
    assert num_classes is not None
    outputs = 1 if victim.loss is bce_with_logits else num_classes
    if task_info.summed:
        gradient = {name: value / batch_size for name, value in gradient.items()}
    last = last_layer(victim, layers, gradient, outputs)
    rows, bias, weight, offset = last.rows, last.bias, last.weight, last.offset
    if outputs == 1:  # the logits 0 and z: p − y of class 0 is minus that of class 1
        rows, bias = torch.cat([-rows, rows]), None if bias is None else torch.cat([-bias, bias])
        weight = None if weight is None else torch.cat([0 * weight, weight])
        offset = None if offset is None else torch.cat([0 * offset, offset])

    def probe() -> tuple[Tensor, Tensor]:
        logits, features = seen_of(victim, last.module, dummies(task_info))
        return class_logits(logits).softmax(dim=1), features

    def known() -> tuple[Tensor, Tensor, Tensor]:
        assert public is not None
        logits, features = seen_of(victim, last.module, public[0])
        return class_logits(logits).softmax(dim=1), features, public[1].to(features.device)

    return Evidence(
        rows,
        bias,
        probe,
        signs,
        task_info.label_smoothing,
        task_info.class_weights,
        weight=weight,
        offset=offset,
        summed=task_info.summed,
        public=None if public is None else known,
    )


class LastLayer(NamedTuple):
    """A network's last linear layer, its gradient, (outputs, features) and (outputs,), and the global model's own."""

    module: nn.Module
    rows: Tensor
    bias: Tensor | None
    weight: Tensor | None
    offset: Tensor | None


def last_layer(victim: Victim, layers: Sequence[Layer], gradient: dict[str, Tensor], outputs: int) -> LastLayer:
    """Return the last fully connected layer; NotApplicable unless it gives the outputs and its gradient was sent."""
    for layer in reversed(layers):
        names = [n for n in layer.parameters if layer.kind == "linear" and n in gradient and gradient[n].ndim == 2]
        if names and len(gradient[names[0]]) == outputs:
            bias = next((gradient[n] for n in layer.parameters if n in gradient and gradient[n].ndim == 1), None)
            state = {**victim.constants, **victim.parameters}
            own = [state[name] for name in layer.parameters if name in state]
            weight = next((t for t in own if t.ndim == 2), None)
            offset = next((t for t in own if t.ndim == 1), None)
            return LastLayer(victim.module.get_submodule(layer.name), gradient[names[0]], bias, weight, offset)
        if names:
            break
    ends = [layer for layer in layers if layer.kind == "linear" and layer.parameters]
    why = f"the model has no fully connected layer with {outputs} outputs at its end"
    if ends and not any(name in gradient for name in ends[-1].parameters):
        why = f"the last layer ('{ends[-1].name}') isn't in the update: it stays with the client, or is held back"
    raise NotApplicable(f"labels can't be inferred: {why}; grant the labels (threat.knows_labels=true)")


def dummies(task_info: TaskInfo) -> Tensor:
    """Return dummy inputs as the model sees them, always the same: Gaussian noise, or random tokens."""
    vocabulary = task_info.tokens.vocabulary if task_info.tokens else None
    source, shape = torch.Generator().manual_seed(0), (_PROBES, *task_info.input_shape)
    return torch.randint(vocabulary, shape, generator=source) if vocabulary else torch.randn(shape, generator=source)


def seen_of(victim: Victim, classifier: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the global model's outputs (n, k) of ``inputs``, and the features (n, d) that its last layer takes."""
    features: list[Tensor] = []
    handle = classifier.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0].detach()))
    device = next(iter(victim.parameters.values())).device
    try:
        with torch.no_grad():
            outputs = victim.outputs(inputs.to(device))
    finally:
        handle.remove()
    return outputs, features[0].flatten(1)


def infer_labels(method: str, evidence: Evidence, num_examples: int) -> tuple[Tensor, str]:
    """Return labels and the name of the inference.

    ``auto`` is ``idlg`` for one example and ``ilrg-pooled`` for more, or for two classes ``bias-corrected``. Without a
    bias it is ``yin`` for as many examples as there are classes, and ``geng`` beyond. Where only signs are known it is
    ``signs`` for several examples.
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
    if not evidence.summed or evidence.class_weights is None:
        return inference(evidence, num_examples), name
    weights = evidence.rows.new_tensor(evidence.class_weights)
    mean = weights.mean()
    for _ in range(_ROUNDS_OF_WEIGHTS):  # the labels give their mean weight, and that the labels
        bias = None if evidence.bias is None else evidence.bias / mean
        labels = inference(dataclasses.replace(evidence, rows=evidence.rows / mean, bias=bias), num_examples)
        mean = weights[labels].mean().clamp_min(1e-30)
    return labels, name


_SMALL = 1e-12  # of the bias's largest entry: below it the features of a class can't be told
_LARGEST = 1e10  # feature that a quotient gives
_PASSES = 10  # of features and shares in turn
_POOL = 1e-2  # weight of the classes' differences in their features
_LEAST = 1e-3  # weight of equal shares, where all classes are predicted alike
_TRUST = 20.0  # the same, for each unit by which predictions differ between classes
_LEARNT = 1e-3  # squared differences of predictions beyond which rows decide which classes are absent
_ABSENT = 0.1  # of an equal share: where classes without a negative row get less on average, they are absent


@LABEL_INFERENCES.register(
    "ilrg", "counts of every class by linear equations of the last layer", paper="Ma et al. 2023 (iLRG)"
)
def ilrg(evidence: Evidence, num_examples: int) -> Tensor:
    """Infer how often each class occurs (iLRG, Ma et al. 2023, Instance-wise Batch Label Restoration, ICLR).

    The gradient of class i's row is the mean of (p_i − y_i)·h, that of its bias of p_i − y_i: their quotient stands for
    the mean features h_i of class i, and softmax(W·h_i + b) for the probabilities P_i that its examples get. Then
    K·b_i = Σ_j n_j·(P_ji − δ_ij) and Σ n_j = K are linear in the counts n; the Moore–Penrose inverse solves them.

    Departures: in float64, as the quotients are ill-conditioned where a class occurs as often as is expected; counts
    always sum to K, by the largest remainders, where the authors' code rounds each; label smoothing and class weights
    are in the equations. Whether BatchNorm takes its batch's statistics makes no difference: the last layer's features
    are the client's own.

    Raises:
        NotApplicable: the last layer has no bias, or its weights aren't known.
    """
    rows, bias, weight, offset = _layer(evidence, "ilrg")
    least = _SMALL * bias.abs().max().clamp_min(_SMALL)
    features = (rows / torch.where(bias.abs() > least, bias, least)[:, None]).clamp(-_LARGEST, _LARGEST)
    equations, values = _equations((features @ weight.T + offset).softmax(dim=1), bias, evidence)
    shares = torch.linalg.pinv(torch.cat([torch.ones_like(bias)[None], equations])) @ torch.cat(
        [torch.ones_like(bias[:1]), values]
    )
    return _whole(shares, evidence, num_examples)


@LABEL_INFERENCES.register(
    "ilrg-pooled", "the same, with features that the classes share, and the rows' signs", paper="this project"
)
def ilrg_pooled(evidence: Evidence, num_examples: int) -> Tensor:
    """Infer how often each class occurs from iLRG's equations, which large batches don't unsettle.

    A quotient of a row and its bias says nothing where the class occurs about as often as the model expects: most
    classes do in large batches. So the features of class i are h + d_i: h is shared, and starts as the least-squares
    solution of rows = bias·hᵀ; d, penalised, solves rows_i − b_i·h = Σ_j s_j·P_ji·d_j − s_i·d_i, given the shares s.
    The shares follow from iLRG's equations, given P; both in turn. The shares are held to equal ones by a penalty that
    grows with the differences between the classes' predictions: those of an untrained network are right, a trained
    one's are a guess. Where features aren't negative a row with a negative entry belongs to a class that occurs (Yin
    et al. 2021), which counts once at least; classes without such a row are taken as absent once a
    network has learnt, or where the equations give them next to nothing.

    Raises:
        NotApplicable: the last layer has no bias, or its weights aren't known.
    """
    rows, bias, weight, offset = _layer(evidence, "ilrg-pooled")
    present = present_by_rows(evidence, num_examples)
    shared = bias @ rows / (bias @ bias).clamp_min(torch.finfo(torch.float64).tiny)
    features = shared.expand(rows.shape)
    identity = torch.eye(len(bias), dtype=bias.dtype, device=bias.device)
    equal = torch.ones_like(bias)
    if evidence.class_weights is not None:
        equal = bias.new_tensor(evidence.class_weights) + 1e-30
    shares = equal
    for step in range(_PASSES + 1):
        predictions = (features @ weight.T + offset).softmax(dim=1)
        apart = (predictions - predictions.mean(dim=0)).square().sum(dim=1).mean()
        few = step > 0 and bool(shares[~present].mean() < _ABSENT / len(bias))
        without = bool(present.any()) and not bool(present.all()) and (few or bool(apart > _LEARNT))
        prior = equal.masked_fill(~present, 0) if without else equal
        prior = prior / prior.sum()
        equations, values = _equations(predictions, bias, evidence)
        penalty = (_LEAST + _TRUST * apart) * identity
        off = torch.linalg.solve(equations.T @ equations + penalty, equations.T @ (values - equations @ prior))
        shares = (prior + off).clamp_min(0)
        shares = shares.masked_fill(~present, 0) if without else shares
        shares = shares / shares.sum().clamp_min(1e-30)
        if step == _PASSES:
            break
        mixing = (shares[:, None] * predictions).T - shares.diag()
        ridge = _POOL * (shares + 1e-9).diag() / len(bias)
        own = torch.linalg.solve(mixing.T @ mixing + ridge, mixing.T @ (rows - bias[:, None] * shared))
        mean = shares @ own
        features, shared = shared + own, shared + mean
    return _whole(shares, evidence, num_examples, least=present)


@LABEL_INFERENCES.register(
    "llg", "the sum and the sign of the last layer's rows, counted off one by one", paper="Wainakh et al. 2022 (LLG)"
)
def llg(evidence: Evidence, num_examples: int) -> Tensor:
    """Infer labels from the gradient alone (LLG, Wainakh et al. 2022, User-Level Label Leakage from Gradients, PoPETs).

    g_i is the sum of row i. Classes with a negative g_i occur; an example is worth m = Σ_{g_i < 0} g_i / K · (1 + 1/C)
    with C classes. Each of them is named once, and m taken off its g_i; then the class with the least g_i is named, and
    m taken off, until there are K. Departure: where more than K are negative, the K most negative are named.

    Raises:
        NotApplicable: no row has a negative sum.
    """
    sums = evidence.rows.double().sum(dim=1)
    if not bool((sums < 0).any()):
        raise NotApplicable(
            "label inference 'llg' finds no class with a negative gradient; use label_inference=llg-star"
        )
    impact = float(sums.clamp_max(0).sum()) / num_examples * (1 + 1 / len(sums))
    return _counted_off(sums, sums, impact, num_examples)


@LABEL_INFERENCES.register(
    "llg-star", "the same, with impact and offsets of dummy images", paper="Wainakh et al. 2022 (LLG*)"
)
def llg_star(evidence: Evidence, num_examples: int) -> Tensor:
    """Infer labels with the model's help (LLG*, Wainakh et al. 2022): impact and offsets come from dummy images.

    The impact m is the mean, over batches of one class, of what an example adds to its own class's g, times 1 + 1/C;
    the offset s_j is what others add to class j. Both follow from the dummies' features and probabilities. Departure:
    the dummies are Gaussian noise, where the paper has zeros, ones and random images.

    Raises:
        NotApplicable: the features of dummy images sum to zero.
    """
    probabilities, features = evidence.probe()
    everyone = torch.arange(len(evidence.rows), device=probabilities.device)
    each = everyone.repeat_interleave(len(features))
    return _with_help(evidence, num_examples, probabilities.repeat(len(everyone), 1), features, each, "llg-star")


@LABEL_INFERENCES.register(
    "llg-plus", "the same, with impact and offsets of public examples", paper="Wainakh et al. 2022 (LLG+)"
)
def llg_plus(evidence: Evidence, num_examples: int) -> Tensor:
    """Infer labels with public examples of the clients' kind and their labels (LLG+, Wainakh et al. 2022).

    As ``llg-star``, but the batches of one class are of public examples; classes of which there are none count as the
    others do on average.

    Raises:
        NotApplicable: the adversary holds no public examples, or their features sum to zero.
    """
    if evidence.public is None:
        raise NotApplicable(
            "label inference 'llg-plus' needs public examples with labels: grant the attack 'labels' "
            "threat.target_records, threat.knows_public_data and threat.public_examples, or use "
            "label_inference=llg-star"
        )
    probabilities, features, labels = evidence.public()
    return _with_help(evidence, num_examples, probabilities, features, labels, "llg-plus")


def _with_help(
    evidence: Evidence, num_examples: int, probabilities: Tensor, features: Tensor, labels: Tensor, name: str
) -> Tensor:
    """Return labels by impact and offset of (m, classes) probabilities, (n, features) features and (m,) labels.

    Features are repeated as often as probabilities are.
    """
    sums = evidence.rows.double().sum(dim=1)
    size = features.double().sum(dim=1).repeat(len(probabilities) // len(features))
    if not bool(size.mean().abs() > _SMALL):
        raise NotApplicable(
            f"label inference '{name}' divides by the mean sum of the last layer's inputs, which is zero here; "
            "use label_inference=ilrg"
        )
    adds = probabilities.double() * size[:, None]
    true = torch.nn.functional.one_hot(labels, len(sums)).double()
    own = (adds * true).sum(dim=1) - size
    there = true.sum(dim=0)
    of_class = (true.T @ own)[there > 0] / there[there > 0]
    impact = float(of_class.mean()) / num_examples * (1 + 1 / len(sums))
    others = 1 - true
    offset = (adds * others).sum(dim=0) / others.sum(dim=0).clamp_min(1)
    return _counted_off(sums, sums - offset, impact, num_examples)


def _counted_off(sums: Tensor, left: Tensor, impact: float, total: int) -> Tensor:
    """Return (total,) labels: those with negative ``sums`` once, then always the one of which most is ``left``."""
    sign = 1.0 if impact < 0 else -1.0  # of the features' sum, turned
    order = (sign * sums).argsort(stable=True)[: min(total, int((sign * sums < 0).sum()))]
    counts = torch.zeros(len(sums), dtype=torch.int64)
    counts[order.cpu()] += 1
    impact = max(abs(impact), 1e-30)
    heap = [(sign * value + int(n) * impact, i) for i, (value, n) in enumerate(zip(left.tolist(), counts, strict=True))]
    heapq.heapify(heap)
    for _ in range(total - int(counts.sum())):
        value, i = heap[0]
        counts[i] += 1
        heapq.heapreplace(heap, (value + impact, i))
    return torch.repeat_interleave(torch.arange(len(sums)), counts).to(sums.device)


def _layer(evidence: Evidence, name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return gradients and values of the last layer in float64; NotApplicable where there is no bias, or no values."""
    if evidence.bias is None or evidence.offset is None or evidence.weight is None:
        raise NotApplicable(
            f"label inference '{name}' needs the last layer's bias and its gradient; use label_inference=geng "
            "or llg-star"
        )
    return evidence.rows.double(), evidence.bias.double(), evidence.weight.double(), evidence.offset.double()


def _equations(predictions: Tensor, bias: Tensor, evidence: Evidence) -> tuple[Tensor, Tensor]:
    """Return A and v of A·s = v, for shares s of the classes that get (classes, classes) ``predictions``."""
    smoothing = min(evidence.label_smoothing, 1 - 1e-6)
    identity = torch.eye(len(bias), dtype=bias.dtype, device=bias.device)
    return predictions.T - (1 - smoothing) * identity, bias + smoothing / len(bias)


def _whole(shares: Tensor, evidence: Evidence, total: int, least: Tensor | None = None) -> Tensor:
    return rounded(of_labels(shares, evidence, smoothed=False), total, least=least)
