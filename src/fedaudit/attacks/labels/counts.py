"""How often each class occurs, at any batch size: iLRG, LLG and its variants, and what this project adds to iLRG."""

from __future__ import annotations

import heapq

import torch
from torch import Tensor

from fedaudit.attacks.labels.inference import LABEL_INFERENCES, Evidence, of_labels, present_by_rows, rounded
from fedaudit.utils.errors import NotApplicable

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
            "label inference 'llg-plus' needs public examples with labels: grant the attack 'labels' threat.records, "
            "threat.knows_public_data and threat.public_examples, or use label_inference=llg-star"
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
    """Return gradients and values of the last layer in float64.

    Raises:
        NotApplicable: there is no bias, or no values.
    """
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
