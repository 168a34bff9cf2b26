"""Label inference of multi-label tasks: which labels a batch had, how often each, and which of them together.

Our own method, of ideas of others. Each example adds δ·hᵀ to the last layer's gradient, with its features h and
δ = p − y·a, which is negative exactly where a label is 1: for one example that is the sign rule of iDLG (Zhao et al.
2020, Eq. 4). The sum of δ, the bias's gradient, gives each label's count, as Yin et al. 2021 and Geng et al. 2021 count
classes, once the batch's mean probabilities are known. As SPEAR (Dimitrov et al. 2024) does with a layer's active
neurons, the label sets that can be in the batch are enumerated: their δ lie in the span of the gradient's columns. Of
these the likeliest multiset is searched for, by four things together: how far each δ is from the span, given how much
probabilities vary between examples; how rare the set is, given the counts; that the counts come out; and that the
gradient's own second moments, but for the direction of the sum, are those of the δ, as they are where features vary
independently around their mean (the likelihood of a Wishart matrix, but for its scale). The last tells label sets also
of batches larger than there are labels, where the span tells nothing.

All this takes the mean features for each example's. How well that fits the counts tell (:func:`off_whole`): where they
aren't near whole numbers, as of trained networks, no sets are claimed, and the counts alone are returned.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedaudit.attacks.labels.inference import dummies, last_layer, seen_of
from fedaudit.attacks.local_training import is_adaptive
from fedaudit.attacks.victim import Victim
from fedaudit.models import Layer
from fedaudit.task.info import TaskInfo
from fedaudit.task.training import BCE, MSE
from fedaudit.transcript.update import Update
from fedaudit.utils.errors import NotApplicable

_MOST = 1 << 16  # label sets that are tried
_LARGEST = 32  # batch whose label sets are looked for
_MANY = 64  # labels, beyond which sets of two or three labels alone could be tried: too few of those that there are
_ABOVE = 1.1  # times noise's largest singular value: what is less is noise
_STARTS = 6  # of the search, each from another multiset
_SWEEPS = 30  # of one search, at most
_KEPT = 3000  # label sets that a search goes through, those that fit best
_RANK = 1e-6  # of the largest singular value: what is less is rounding
_WIDER = (1.0, 4.0, 16.0, 64.0)  # times the dummies' deviations, which are tried
_LEAST = 3e-4  # deviation of an example's probabilities from their mean, at least
_OFF = 0.25  # variance of a count, at least
_FITS = 0.05  # mean distance of the counts from whole numbers, the most at which label sets are looked for
_RARE = 0.02  # least and largest prior probability of a label


@dataclass(frozen=True)
class SetEvidence:
    """What is known of the last layer of a multi-label network, z = W·h + b, and of its gradient over n examples.

    Each example adds δ = p(z) − y·a(z) to the gradient of z, times a constant that is taken off here. For binary
    cross-entropy p = σ(z) and a = p + w·(1 − p), with the weight w of a label that is 1; for squares p = z, a = 1.

    Attributes:
        rows: (k, features) float64 sum over the examples of δ·hᵀ.
        bias: (k,) float64 sum of δ.
        weight, offset: (k, features) W and (k,) b of the global model, float64; b is 0 where there is none.
        positive: (k,) w.
        probe: returns (m, k) logits and (m, features) features of dummy or public inputs.
        signs: whether of the gradients only the signs are known, as after Adam's steps.
        noise: deviation of the noise in each entry of ``rows`` and ``bias``, where it is known; else 0.
    """

    rows: Tensor
    bias: Tensor | None
    weight: Tensor
    offset: Tensor
    positive: Tensor
    linear: bool
    probe: Callable[[], tuple[Tensor, Tensor]]
    signs: bool = False
    noise: float = 0.0

    def answers(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return p and a, (..., k) each, of features (..., d)."""
        return self.of_logits(features @ self.weight.T + self.offset)

    def of_logits(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return p and a of logits (..., k)."""
        if self.linear:
            return logits, torch.ones_like(logits)
        chances = logits.sigmoid()
        return chances, chances + self.positive * (1 - chances)


def set_evidence_of(
    victim: Victim,
    layers: Sequence[Layer],
    gradient: dict[str, Tensor],
    task_info: TaskInfo,
    update: Update,
    n: int,
    public: Tensor | None = None,
) -> SetEvidence:
    """Return the evidence of ``gradient``, of one batch of n that ``update`` stands for, by dummies or ``public``."""
    if task_info.loss not in (BCE, MSE):
        raise NotApplicable(f"several labels are inferred from the losses {BCE} and {MSE}, not from one of your own")
    k = task_info.num_targets
    last = last_layer(victim, layers, gradient, k)
    linear = task_info.loss == MSE
    scale = n * (1 / update.batch_size if task_info.summed else k) / (1 + linear)
    training, done = update.training, update.sanitised
    steps = training.learning_rate * training.local_steps if update.kind == "weights" and training else 1.0
    assert last.weight is not None
    weight = last.weight.detach().double().cpu()
    none = torch.zeros(k, dtype=torch.float64)

    def probe() -> tuple[Tensor, Tensor]:
        logits, features = seen_of(victim, last.module, dummies(task_info) if public is None else public)
        return logits.double().cpu(), features.double().cpu()

    return SetEvidence(
        scale * last.rows.double().cpu(),
        None if last.bias is None else scale * last.bias.double().cpu(),
        weight,
        none if last.offset is None else last.offset.detach().double().cpu(),
        none + 1 if task_info.class_weights is None else torch.tensor(task_info.class_weights).double(),
        linear,
        probe,
        is_adaptive(update),
        scale * done.noise / steps if done is not None else 0.0,
    )


def infer_label_sets(evidence: SetEvidence, n: int) -> tuple[Tensor, Tensor, str]:
    """Return (n, k) label sets in no order, (k,) estimated counts of the labels, and how they were inferred."""
    if not torch.any(evidence.rows):
        raise NotApplicable("labels can't be inferred: the last layer's gradient is zero")
    if n == 1:
        labels = _of_one(evidence)
        return labels[None], labels, "sign"
    _, seen = evidence.probe()
    if evidence.signs:
        counts = _by_signs(evidence, n, seen)
        return dealt(counts, n), counts, "signs"
    mean, sums = _mean_features(evidence, seen)
    chances, pull = evidence.answers(mean)
    counts = ((n * chances - sums) / pull).clamp(0, n)
    sets = _together(evidence, n, sums, counts, chances, pull)
    if sets is None:
        return dealt(counts, n), counts, "counts"
    return sets, counts, "span"


def _of_one(evidence: SetEvidence) -> Tensor:
    """Return (k,) the labels of a single example: those whose δ is negative (as iDLG, Zhao et al. 2020, Eq. 4)."""
    if evidence.bias is not None:
        delta = evidence.bias
    else:  # the rows are multiples of one feature vector, whose sign that of dummies tells
        _, seen = evidence.probe()
        delta = evidence.rows @ seen.mean(dim=0)
    if evidence.linear and evidence.bias is not None:  # z − y: the logits follow from the features, a quotient
        features = delta @ evidence.rows / (delta @ delta)
        return (evidence.answers(features)[0] - delta > 0.5).double()
    return (delta < 0).double()


def _by_signs(evidence: SetEvidence, n: int, seen: Tensor) -> Tensor:
    """Return (k,) counts in the middle of what a sign leaves open: above what the model expects, or below it."""
    chances, pull = evidence.answers(seen)
    expected = (n * (chances / pull).mean(dim=0)).clamp(0, n)
    sums = evidence.rows @ seen.mean(dim=0) if evidence.bias is None else evidence.bias
    return torch.where(sums < 0, (n + expected) / 2, expected / 2)


def _mean_features(evidence: SetEvidence, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Return (d,) the batch's mean features, and (k,) the sum of δ, which the rows tell where there is no bias.

    With a bias the features are the least-squares solution of rows = bias·hᵀ: as if all examples had the same. Where
    that is far from all dummies, or there is no bias, they are the dummies' mean.
    """
    usual = seen.mean(dim=0)
    if evidence.bias is None:
        return usual, evidence.rows @ usual / (usual @ usual).clamp_min(torch.finfo(torch.float64).tiny)
    bias = evidence.bias
    return bias @ evidence.rows / (bias @ bias).clamp_min(torch.finfo(torch.float64).tiny), bias


def _together(
    evidence: SetEvidence, n: int, sums: Tensor, counts: Tensor, chances: Tensor, pull: Tensor
) -> Tensor | None:
    """Return (n, k) label sets, by the span of the gradient's columns; None where they can't be told."""
    rows, k = evidence.rows, len(evidence.rows)
    if n > _LARGEST or k > _MANY or off_whole(counts) > _FITS:
        return None
    joined = rows if evidence.bias is None else torch.cat([rows, evidence.bias[:, None]], dim=1)
    left, sizes, _ = torch.linalg.svd(joined, full_matrices=True)
    noise = evidence.noise * sum(math.sqrt(side) for side in joined.shape)
    rank = min(n, int((sizes > max(_RANK * float(sizes[0]), _ABOVE * noise)).sum()))
    if rank < 2 or (noise and rank < min(n, k)):
        return None
    logits, seen = evidence.probe()
    own = torch.cov(evidence.of_logits(logits)[0].T) + _LEAST**2 * torch.eye(k, dtype=torch.float64)
    search = _Search(_possible(k), left[:, :rank], left[:, rank:], rows, sums, counts, n, _dimensions(seen))
    runs = [search.run(chances, pull, wider**2 * own) for wider in _WIDER]
    return max(runs, key=lambda run: run[1])[0]


def off_whole(counts: Tensor) -> float:
    """Return how far (k,) estimated counts are from whole numbers, the mean over the labels; by luck it is 0.25.

    For a label that c of the examples have, with the probabilities p_i, the estimate is c + n·p(h̄) − Σ p_i (where a is
    1). Its error is what the one mean h̄ of the features misses of the δ, which the search goes by; and as c is whole,
    that shows without the truth.
    """
    return float((counts - counts.round()).abs().mean())


def _dimensions(features: Tensor) -> float:
    """Return in how many directions features (m, d) vary: (Σλ)²/Σλ² over the eigenvalues of their covariance."""
    centred = features - features.mean(dim=0)
    gram = centred @ centred.T
    return float(gram.trace().square() / gram.square().sum().clamp_min(1e-300))


@dataclass(frozen=True)
class _Search:
    """The search for n label sets whose δ span what the gradient's columns do.

    Attributes:
        sets: (m, k) that are possible.
        inside, outside: (k, n) and (k, k − n) orthonormal: the span and what is orthogonal to it.
        rows: (k, features) sum of δ·hᵀ; ``sums`` (k,) of δ.
        dimensions: in which features vary.
    """

    sets: Tensor
    inside: Tensor
    outside: Tensor
    rows: Tensor
    sums: Tensor
    counts: Tensor
    n: int
    dimensions: float

    def run(self, chances: Tensor, pull: Tensor, spread: Tensor) -> tuple[Tensor, float]:
        """Return the n sets that are likeliest, given (k,) p and a, and covariance of p."""
        n, free, dims = self.n, self.outside.shape[1], self.dimensions
        share = (self.counts / n).clamp(_RARE, 1 - _RARE)
        prior = self.sets @ share.log() + (1 - self.sets) @ (1 - share).log()
        deltas = chances - self.sets * pull
        chol = torch.linalg.cholesky(self.outside.T @ spread @ self.outside)
        off = torch.linalg.solve_triangular(chol, (deltas @ self.outside).T, upper=False)
        fit = prior - off.square().sum(dim=0) / 2 - chol.diagonal().log().sum()
        kept = fit.topk(min(_KEPT, len(fit))).indices
        sets, fit, parts = self.sets[kept], fit[kept], deltas[kept] @ self.inside
        loose = n * self.inside.T @ spread @ self.inside
        mean = self.inside.T @ self.sums
        apart = torch.linalg.svd(mean[:, None], full_matrices=True)[0][:, 1:]  # of the span, orthogonal to the sum
        own = apart.T @ self.inside.T @ self.rows
        seen, relative, slack = own @ own.T, parts @ apart, apart.T @ loose @ apart
        variance = n * spread.diagonal() / pull.square() + _OFF
        rng = torch.Generator().manual_seed(0)
        best, most = sets[:n], -math.inf
        for start in range(_STARTS):
            noise = -torch.empty_like(fit).uniform_(1e-12, 1, generator=rng).log().neg().log() if start else 0.0
            chosen = (fit + noise).topk(min(n, len(fit))).indices
            chosen = chosen[torch.arange(n) % len(chosen)]
            value = -math.inf
            for _ in range(_SWEEPS):
                before = value
                for i in range(n):
                    others = torch.cat([chosen[:i], chosen[i + 1 :]])
                    size, fresh, _ = _with_one(parts[others].T @ parts[others] + loose, parts, None)
                    vary, fresher, trace = _with_one(relative[others].T @ relative[others] + slack, relative, seen)
                    missed = self.counts - sets[others].sum(dim=0) - sets
                    gain = fit - (missed.square() / variance).sum(dim=1) / 2 + free / 2 * (size + fresh)
                    gain = gain - dims / 2 * (vary + fresher + relative.shape[1] * trace.clamp_min(1e-300).log())
                    chosen[i] = int(gain.argmax())
                    value = float(gain.max() + fit[others].sum())
                if value <= before + 1e-9:
                    break
            if value > most:
                best, most = sets[chosen], value
        return best, most


def _with_one(gram: Tensor, parts: Tensor, seen: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return of K = gram + a·aᵀ, a of ``parts`` (m, r), log det gram, what each a adds to it, the trace of seen·K⁻¹."""
    inverse = torch.linalg.inv(gram)
    turned = parts @ inverse
    grown = 1 + (turned * parts).sum(dim=1)
    trace = gram.new_zeros(())
    if seen is not None:
        trace = (seen * inverse).sum() - ((turned @ seen) * turned).sum(dim=1) / grown
    return torch.linalg.slogdet(gram)[1], grown.log(), trace


def _possible(k: int) -> Tensor:
    """Return (m, k) float64 all sets of k labels; where k is large those with few, as many as can be tried."""
    rows: list[tuple[int, ...]] = []
    for size in range(k + 1):
        if rows and len(rows) + math.comb(k, size) > _MOST:
            break
        rows += itertools.combinations(range(k), size)
    sets = torch.zeros(len(rows), k, dtype=torch.float64)
    for i, row in enumerate(rows):
        sets[i, list(row)] = 1
    return sets


def dealt(counts: Tensor, n: int) -> Tensor:
    """Return (n, k) label sets with these counts, rounded; each label goes to the examples with the fewest so far."""
    sets = torch.zeros(n, len(counts), dtype=torch.float64)
    for label in counts.argsort(descending=True, stable=True).tolist():
        order = sets.sum(dim=1).argsort(stable=True)
        sets[order[: round(float(counts[label]))], label] = 1
    return sets
