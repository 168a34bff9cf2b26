"""A reconstructed local model against the one that the client would really have trained alone."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.special import betainc
from scipy.stats import t as student
from torch import Tensor, nn

from fedaudit.attacks import LocalModelFinding, NotApplicable
from fedaudit.attacks.base import own_failures
from fedaudit.evaluation.finding_types import FINDING_TYPES, Evaluation, FindingType, Metric, done, evaluate, refused
from fedaudit.evaluation.statistics import SURE, sign_test
from fedaudit.evaluation.verdicts import by_leaks, leaks
from fedaudit.results import Chart, FindingResult, Line, MetricResult
from fedaudit.task.training import class_logits
from fedaudit.transcript.observation import Observation
from fedaudit.transcript.truth import Truth
from fedaudit.utils.finite import all_finite
from fedaudit.utils.seeds import generator

GAP_CLOSED = Metric(
    "gap_closed",
    "share of the loss, on the client's data, between the last model it returned and its own optimum, that the "
    "reconstructed model makes up",
)
LOCAL_ACCURACY = Metric(
    "local_accuracy",
    "accuracy on the client's own data; without the attack: the last returned model",
    ends=(0, 1),
)
OVER_GLOBAL = Metric("accuracy_over_global", "accuracy on the client's data less that of the last global model")
DISTANCE = Metric(
    "relative_distance",
    "distance to the client's own optimum, relative to its norm; without the attack: of the last returned model",
    higher_is_better=False,
)
MAPPING_ERROR = Metric(
    "mapping_error", "share of the updates' variation that the learned mapping doesn't explain", higher_is_better=False
)

_CAPTION = (
    "How far a client's models lie from the global one that it was sent, round by round: the model that it returned, "
    "the one that it would have trained alone (only the auditor knows it), and what the attack made of the messages. "
    "Where the last two lines meet, the eavesdropper has the client's own model."
)
_HALF = 0.5  # of the gap in loss, at least, for a regression
_STEPS = 200
_FEW_STEPS = 50  # for anybody's models, which are many
_CONVERGED = 1e-6  # of the gradient's norm, relative to where it began: below, the optimum is taken as found
_SMALL = 1e-9
_LEAST = 1e-300  # a loss that is 0 has a logarithm, too
_PERHAPS = 0.5  # p-values below which it is worth the time to train anybody's models, too
_MODELS = 10  # of anybody's, of each of two sorts
_ALL = 512  # examples at most that the second sort is of, or four times the client's
_NOBODY = (
    "there are no examples of other people to train models on, so that nothing tells the client's own model from "
    "anybody's: give candidates"
)


@dataclass(frozen=True)
class Local:
    """A client's (n, ...) normalised data and (n,) or (n, 1) targets, and what a model is worth on them, in float64.

    Attributes:
        loss: mean over all of the client's examples.
        buffers: of the last round.
    """

    module: nn.Module
    loss: object
    inputs: Tensor
    targets: Tensor
    buffers: dict[str, Tensor]

    def output(self, state: dict[str, Tensor]) -> Tensor:
        """Return the model's outputs with the parameters ``state``."""
        outputs: Tensor = torch.func.functional_call(self.module, {**self.buffers, **state}, (self.inputs,))
        return outputs

    def value(self, state: dict[str, Tensor]) -> Tensor:
        """Return the loss with the parameters ``state``."""
        return self.loss(self.output(state), self.targets)  # type: ignore[operator, no-any-return]

    def calibrated(self, state: dict[str, Tensor], *, logits: bool) -> float:
        """Return the loss where outputs that are ``logits`` are scaled as serves the client best, by 1/16 to 16."""
        with torch.no_grad():
            output, powers = self.output(state), range(-4, 5) if logits else (0,)
            return min(float(self.loss(2.0**power * output, self.targets)) for power in powers)  # type: ignore[operator]

    def hits(self, state: dict[str, Tensor]) -> Tensor:
        """Return a mask (n,) of the client's examples that the model classifies correctly."""
        with torch.no_grad():
            return class_logits(self.output(state)).argmax(dim=1) == self.targets

    def accuracy(self, state: dict[str, Tensor]) -> float:
        """Return the share of the client's examples that the model classifies correctly."""
        return float(self.hits(state).double().mean())


@evaluate.register
def evaluate_local_model(
    finding: LocalModelFinding,
    observation: Observation,
    truth: Truth,
    *,
    seed: int,
) -> Evaluation:
    """Compare a reconstructed model with the client's own optimum, the last model it returned, and the global model.

    The optimum is the least loss over all examples that the client's updates used, found by L-BFGS in float64 from the
    last returned model; for networks it is a local one. Where no finite optimum is reached (classes that can be told
    apart without error), there is no distance to it, and its loss is the least that was reached.

    What anybody's own model does for the client is no leak: ten models of as many held-out examples, of the client's
    classes, and ten of a bootstrap sample of all of them are trained in the same way. Of a classifier's losses on the
    client's examples, logits scaled as serves these best, and of a regression's distances to the optimum, the
    logarithms are taken; that the reconstructed model is another one of these is excluded by Student's test of one
    value against a sample, for both tens. The p-value is the largest of these two's and the test's against what was
    sent. A user's own loss that fails in float64 gets no evaluation.
    """
    if not all_finite(finding.state.values()):
        return refused(finding, observation)
    try:
        with own_failures(finding.attack, observation):
            return _compared(finding, observation, truth, seed)
    except NotApplicable as error:
        return refused(finding, observation, str(error))


def _compared(finding: LocalModelFinding, observation: Observation, truth: Truth, seed: int) -> Evaluation:
    last = observation.messages[-1]
    names = list(finding.state)
    double = {n: t.double() if t.is_floating_point() else t for n, t in last.weights.items()}
    sent = {n: double[n] for n in names}
    moved = last.update.tensors if observation.update_kind == "weights" else {}
    returned = {n: sent[n] + moved[n].double() if n in moved else sent[n] for n in names}
    rebuilt = {n: t.double() for n, t in finding.state.items()}
    local = _local(observation, truth, last.client, {n: t for n, t in double.items() if n not in names})
    optimum, converged = least_loss(local, returned)
    metrics: list[MetricResult] = []
    states = {"own": optimum, "rebuilt": rebuilt, "returned": returned, "sent": sent}
    with torch.no_grad():
        losses = {name: float(local.value(state)) for name, state in states.items() if name != "sent"}
    gap = losses["returned"] - losses["own"]
    left = losses["rebuilt"] - losses["own"]
    closed = 1 - left / gap if gap > _SMALL * max(1.0, losses["own"]) else None
    better = closed is not None and closed >= _HALF
    p_value, notes = 1.0, list[str]()
    if observation.task_info.num_classes is not None:
        hits = {name: local.hits(state) for name, state in states.items() if name != "own"}
        accuracies = {name: float(hit.double().mean()) for name, hit in hits.items()}
        metrics.append(LOCAL_ACCURACY.of(accuracies["rebuilt"], accuracies["returned"]))
        metrics.append(OVER_GLOBAL.of(accuracies["rebuilt"] - accuracies["sent"]))
        better = accuracies["rebuilt"] > max(accuracies["returned"], accuracies["sent"])
        others = max((hits["returned"], hits["sent"]), key=lambda h: int(h.sum()))
        p_value = sign_test(int((hits["rebuilt"] & ~others).sum()), int((~hits["rebuilt"] & others).sum()))
        if p_value < _PERHAPS:
            logits = observation.task_info.loss != "custom"  # a user's own may take probabilities
            best = local.calibrated(rebuilt, logits=logits)
            for ten in _anybodys(local, truth, observation, returned, seed) or [[]]:
                theirs = [local.calibrated(state, logits=logits) for state in ten]
                p_value = max(p_value, as_good_by_luck(best, theirs))
                notes = notes if ten else [_NOBODY]
    if closed is not None:
        metrics.append(GAP_CLOSED.of(closed, 0.0))
    if converged:
        own = _flat(optimum)
        norm = max(float(own.norm()), 1e-30)
        apart = [float((_flat(s) - own).norm()) / norm for s in (rebuilt, returned)]
        metrics.append(DISTANCE.of(apart[0], apart[1]))
        if observation.task_info.num_classes is None:
            nearer = apart[0] * norm < min(float((v - own).norm()) for v in _exchanged(observation, names))
            p_value = as_near_by_luck(apart[0] / max(apart[1], 1e-30), len(own)) if nearer else 1.0
            if p_value < _PERHAPS:
                for ten in _anybodys(local, truth, observation, returned, seed) or [[]]:
                    theirs = [float((_flat(state) - own).norm()) / norm for state in ten]
                    p_value = max(p_value, as_good_by_luck(apart[0], theirs))
                    notes = notes if ten else [_NOBODY]
    if finding.mapping_error is not None:
        metrics.append(MAPPING_ERROR.of(finding.mapping_error))
    result = done(
        finding,
        observation,
        notes,
        metrics=metrics,
        is_leak=leaks(better, p_value),
        p_value=p_value,
        charts=[_chart(observation, rebuilt, optimum if converged else None)],
    )
    return Evaluation(result)


def as_good_by_luck(value: float, others: Sequence[float]) -> float:
    """Return the probability that one more of ``others`` is as small as ``value``: Student's test of the logarithms.

    1 where one of them isn't finite, or there are fewer than two others.
    """
    if not math.isfinite(value) or len(others) < 2 or not np.isfinite(others).all():
        return 1.0
    logs = np.log(np.maximum(others, _LEAST))
    spread = float(logs.std(ddof=1)) * math.sqrt(1 + 1 / len(logs))
    if spread == 0:
        return 0.0 if math.log(max(value, _LEAST)) < logs[0] else 1.0
    return float(student.cdf((math.log(max(value, _LEAST)) - logs.mean()) / spread, len(logs) - 1))


def _anybodys(
    local: Local, truth: Truth, observation: Observation, start: dict[str, Tensor], seed: int
) -> list[list[dict[str, Tensor]]]:
    """Return ten models of as many held-out examples as the client has, of its classes, and ten of all.

    "All" are 512 at most, or four times as many as the client has, drawn with replacement. In a recording, where nobody
    held any out, other clients' examples stand for them; without these there are no models.
    """
    rows = truth.held_out()
    inputs, labels = truth.candidates[rows], truth.candidate_labels[rows]
    client = observation.messages[-1].client
    if len(inputs) < 2:
        keys = [key for key in truth.inputs if key[1] != client]
        if not keys:
            return []
        inputs, labels = (torch.cat([of[key] for key in keys]) for of in (truth.inputs, truth.labels))
    if len(inputs) < 2:
        return []
    inputs = observation.task_info.normalise(inputs).double()
    labels = labels.double() if labels.is_floating_point() else labels
    rng = generator(seed, "models of anybody's")
    everything = torch.arange(len(inputs))
    pools = [everything] * len(local.targets)
    if not labels.is_floating_point() and labels.ndim == local.targets.ndim == 1:
        of = {int(c): torch.nonzero(labels == c).flatten() for c in local.targets.unique()}
        pools = [of[int(c)] if len(of[int(c)]) else everything for c in local.targets]

    def model(rows: Tensor) -> dict[str, Tensor]:
        theirs = replace(local, inputs=inputs[rows], targets=labels[rows].view(-1, *local.targets.shape[1:]))
        return least_loss(theirs, start, _FEW_STEPS)[0]

    drawn = [torch.stack([pool[torch.randint(len(pool), (), generator=rng)] for pool in pools]) for _ in range(_MODELS)]
    most = min(len(inputs), max(_ALL, 4 * len(pools)))
    whole = [torch.randint(len(inputs), (most,), generator=rng) for _ in range(_MODELS)]
    return [[model(rows) for rows in ten] for ten in (drawn, whole)]


def as_near_by_luck(ratio: float, dimensions: int) -> float:
    """Return the probability that a random direction's best step ends as near: a cap's share of the sphere.

    ``ratio``: the distance to the target after the step, over the one before it; ``dimensions``: of the space.
    """
    if ratio >= 1 or dimensions < 2:
        return 1.0
    return float(betainc((dimensions - 1) / 2, 0.5, ratio**2) / 2)


def least_loss(local: Local, start: dict[str, Tensor], steps: int = _STEPS) -> tuple[dict[str, Tensor], bool]:
    """Return the parameters of least loss, by L-BFGS from ``start``, and whether they are a finite optimum."""
    state = {n: t.detach().clone().requires_grad_() for n, t in start.items()}
    parameters = list(state.values())
    search = torch.optim.LBFGS(
        parameters,
        max_iter=steps,
        history_size=50,
        tolerance_grad=1e-12,
        tolerance_change=1e-16,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        search.zero_grad()
        value = local.value(state)
        value.backward()
        return value

    def slope() -> float:
        grads = torch.autograd.grad(local.value(state), parameters)
        return float(torch.cat([g.flatten() for g in grads]).norm())

    before = slope()
    search.step(closure)
    found = {n: t.detach() for n, t in state.items()}
    if not all_finite(found.values()):
        return dict(start), False
    # Where every example is classified correctly, larger weights are always better: there is no finite optimum.
    apart = not local.targets.is_floating_point() and local.accuracy(found) == 1.0
    return found, not apart and slope() <= _CONVERGED * max(before, 1e-6)


def _local(observation: Observation, truth: Truth, client: int, buffers: dict[str, Tensor]) -> Local:
    inputs, targets = truth.held_by(client)
    module = copy.deepcopy(observation.module).double().eval()  # dropout would make the loss a draw
    targets = targets.double() if targets.is_floating_point() else targets
    return Local(module, observation.loss, observation.task_info.normalise(inputs).double(), targets, buffers)


def _exchanged(observation: Observation, names: list[str]) -> list[Tensor]:
    """Return the parameters of every model that the client was sent or returned."""
    models = []
    for m in observation.messages:
        sent = {n: m.weights[n].double() for n in names}
        models.append(_flat(sent))
        if observation.update_kind == "weights":
            moved = m.update.tensors
            models.append(_flat({n: t + moved[n].double() if n in moved else t for n, t in sent.items()}))
    return models


def _chart(observation: Observation, rebuilt: dict[str, Tensor], optimum: dict[str, Tensor] | None) -> Chart:
    """Return how far the client's models lie from the global model of each round."""
    names = list(rebuilt)
    rounds = [float(m.round) for m in observation.messages]
    sent = [_flat({n: m.weights[n].double() for n in names}) for m in observation.messages]
    lines = []
    if observation.update_kind == "weights":
        steps = [
            [m.update.tensors[n].double().norm() for n in names if n in m.update.tensors] for m in observation.messages
        ]
        lines.append(Line(name="what it returned", x=rounds, y=[float(torch.stack(step).norm()) for step in steps]))
    for name, state in (("its own optimum", optimum), ("reconstructed by the attack", rebuilt)):
        if state is not None:
            lines.append(Line(name=name, x=rounds, y=[float((_flat(state) - s).norm()) for s in sent]))
    return Chart(
        title=f"client {observation.messages[0].client}",
        caption=_CAPTION,
        x_label="round",
        y_label="distance from the global model",
        lines=lines,
    )


def _flat(state: dict[str, Tensor]) -> Tensor:
    return torch.cat([t.flatten() for t in state.values()])


def _rebuilt(finding: FindingResult) -> bool:
    """Return whether a client's own model counts as rebuilt, even if luck isn't excluded."""
    found = {m.name: m for m in finding.metrics}
    if LOCAL_ACCURACY.name in found:
        accuracy, over_global = found[LOCAL_ACCURACY.name], found[OVER_GLOBAL.name]
        return accuracy.value > (accuracy.baseline or 0.0) and over_global.value > 0
    if DISTANCE.name in found and finding.p_value == 1.0:  # a model that was sent lies as near
        return False
    return GAP_CLOSED.name in found and found[GAP_CLOSED.name].value >= _HALF


FINDING_TYPES["local-model"] = FindingType(
    verdict=by_leaks(
        "{} of {} clients' own models were rebuilt",
        "{who} can rebuild a client's own model, the one that it would train alone: {text}.",
        "clients",
        _rebuilt,
    ),
    rules=(
        "A client's own model counts as rebuilt when it serves the client's data better than what was sent: for "
        "classifiers, when its accuracy on them is above that of the last model that the client returned and of the "
        "global model; for regression, when it makes up at least half of the loss between the last returned model and "
        "the client's own optimum, and lies nearer to that than any model that was sent.",
        "Own models are 'inferred' when at least one counts as rebuilt, and luck would serve the clients' examples as "
        f"much better with a probability of at most {100 * SURE:g} % (one-sided exact sign test over the examples; "
        "for regression, a step from the last returned model in a random direction, of the best length, would end as "
        "near to the optimum; clients combined by Fisher's method), and so would models of held-out examples, which "
        "are anybody's: of the client's classes and as many as it has, or all (Student's test of one value against "
        "ten, of the losses' logarithms, for regression the distances'; in recordings other clients' examples).",
    ),
    metrics=(LOCAL_ACCURACY, OVER_GLOBAL, GAP_CLOSED, DISTANCE, MAPPING_ERROR),
    question="rebuild a client's own model",
    control="client",
)
