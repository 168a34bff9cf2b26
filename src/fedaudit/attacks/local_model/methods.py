"""Local model reconstruction (Xu & Neglia 2021): a client's own model, from its messages."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import linear, relu

from fedaudit.attacks.base import Attack, Case, Progress, register
from fedaudit.attacks.findings import LocalModelFinding
from fedaudit.attacks.local_model.affine import Zero, zero_of_affine_map
from fedaudit.modalities import example_kind
from fedaudit.transcript.observation import Observation
from fedaudit.utils.errors import NotApplicable
from fedaudit.utils.validation import Count, Fraction, Positive

Mapping = Literal["network", "linear"]

_REPORT_EVERY = 50


@dataclass(frozen=True)
class MappingNetwork:
    """A fitted mapping network G, on coordinates of the weights sent: their own, or whitened ones.

    Attributes:
        parameters: of the two layers: (h, k), (h,), (p, h), (p,).
        mean: (p,) where the coordinates are zero: at the mean of the weights sent where they are whitened.
        basis: (p, k): the identity; whitened, the directions in which they spread, as long as the standard deviation.
        error: Σ‖G(θ) − Δθ‖² relative to Σ‖Δθ − mean‖² over the rounds: 0 is a perfect fit, 1 no better than the mean.
    """

    parameters: tuple[Tensor, ...]
    mean: Tensor
    basis: Tensor
    error: float

    def coordinates(self, weights: Tensor) -> Tensor:
        """Return the (n, k) coordinates of (n, p) ``weights``."""
        return (weights - self.mean) @ self.basis / self.basis.square().sum(dim=0)


def fit_mapping(
    sent: Tensor,
    moved: Tensor,
    *,
    hidden: int,
    whitened: bool,
    span: float,
    iterations: int,
    learning_rate: float,
    generator: torch.Generator,
    progress: Callable[[int], None] | None = None,
) -> MappingNetwork:
    """Minimise Σ‖G(w, θ) − Δθ‖² over w by Adam (Xu & Neglia 2021, Eq. 6), of θ and Δθ (n, p).

    Args:
        whitened: G takes the principal coordinates of the weights sent, each of standard deviation 1; else θ as it is.
        span: where whitened, leave out directions in which they spread less than this, relative to the widest.
    """
    p = sent.shape[1]
    mean, basis = _whitening(sent, span) if whitened else (sent.new_zeros(p), torch.eye(p).to(sent))
    inputs, k = (sent - mean) @ basis / basis.square().sum(dim=0), basis.shape[1]
    scale = moved.square().mean().sqrt()
    targets = moved / scale
    shapes = [((hidden, k), k), ((hidden,), k), ((p, hidden), hidden), ((p,), hidden)]
    weights = [
        ((2 * torch.rand(shape, generator=generator) - 1) * fan_in**-0.5).to(sent.device).requires_grad_()
        for shape, fan_in in shapes
    ]
    optimiser = torch.optim.Adam(weights, lr=learning_rate)
    for iteration in range(iterations):
        optimiser.zero_grad(set_to_none=True)
        (_apply(weights, inputs) - targets).square().sum(dim=1).mean().backward()
        optimiser.step()
        if progress and (iteration + 1) % _REPORT_EVERY == 0:
            progress(iteration + 1)
    parameters = tuple(w.detach() for w in weights)
    left = (_apply(parameters, inputs) - targets).square().sum()
    whole = (targets - targets.mean(dim=0)).square().sum().clamp_min(1e-30)
    return MappingNetwork(parameters, mean, basis, float(left / whole))


def _whitening(sent: Tensor, span: float) -> tuple[Tensor, Tensor]:
    mean = sent.mean(dim=0)
    _, spread, directions = torch.linalg.svd(sent - mean, full_matrices=False)
    k = max(1, int((spread > max(span, torch.finfo(sent.dtype).eps) * spread[0]).sum()))
    return mean, directions[:k].T * spread[:k] / len(sent) ** 0.5


def seek_zero(
    learned: MappingNetwork,
    start: Tensor,
    *,
    iterations: int,
    learning_rate: float,
    progress: Callable[[int], None] | None = None,
) -> tuple[Tensor, float]:
    """Minimise ‖G(ŵ, θ)‖² over θ (p,) by Adam from ``start`` (Xu & Neglia 2021, Eq. 7).

    Returned are the (p,) iterate of least ‖G‖², and that, relative to the mean of ‖Δθ‖² over the rounds.
    """
    point = learned.coordinates(start[None]).requires_grad_()
    best, least = point.detach().clone(), float("inf")
    optimiser = torch.optim.Adam([point], lr=learning_rate)
    for iteration in range(iterations + 1):
        optimiser.zero_grad(set_to_none=True)
        objective = _apply(learned.parameters, point).square().sum()
        value = float(objective.detach())
        if value < least:
            best, least = point.detach().clone(), value
        if iteration == iterations:
            break
        objective.backward()
        optimiser.step()
        if progress and (iteration + 1) % _REPORT_EVERY == 0:
            progress(iteration + 1)
    return learned.basis @ best[0] + learned.mean, least / len(start)


def _apply(parameters: tuple[Tensor, ...] | list[Tensor], inputs: Tensor) -> Tensor:
    first, first_bias, second, second_bias = parameters
    return linear(relu(linear(inputs, first, first_bias)), second, second_bias)


@dataclass(frozen=True)
class ExchangedModels:
    """What travelled between one client and the server, one row a round.

    Attributes:
        sent: (n, p) float64: θ, the weights that the server sent.
        moved: (n, p) float64: Δθ = θ − θ_c; for gradient updates the gradient, which vanishes where Δθ does.
        noise: standard deviation of what is known to be noise in ``moved``: rounding, or a defence's.
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    sent: Tensor
    moved: Tensor
    noise: float

    @property
    def returned(self) -> Tensor:
        """(p,) the last model that the client returned, θ_c; for a gradient update, the weights that it was sent."""
        return self.sent[-1] - self.moved[-1]

    def state(self, vector: Tensor) -> dict[str, Tensor]:
        """Return (p,) ``vector`` as parameters by name, in float32."""
        pieces = vector.split([math.prod(shape) for shape in self.shapes])
        return {n: v.view(s).float() for n, v, s in zip(self.names, pieces, self.shapes, strict=True)}


def exchanged(observation: Observation, rounds: int | None = None) -> ExchangedModels:
    """Return one client's messages as vectors, from the (first ``rounds``) rounds in which it sent every parameter."""
    observation.need_messages()
    messages = observation.messages
    if len({m.client for m in messages}) > 1:
        raise NotApplicable("a local model is one client's, and these are messages of several; use Observation.split()")
    names = tuple(name for name, p in observation.module.named_parameters() if p.requires_grad)
    messages = tuple(m for m in messages if all(name in m.update.tensors for name in names))
    if not messages:
        raise NotApplicable(
            "the client never sends all of its parameters (a defence holds some back), and a local model is "
            "reconstructed from whole updates"
        )
    messages = messages[:rounds]
    sent = torch.stack([torch.cat([m.weights[n].flatten().double() for n in names]) for m in messages])
    moved = torch.stack([torch.cat([m.update.tensors[n].flatten().double() for n in names]) for m in messages])
    if not (torch.isfinite(sent).all() and torch.isfinite(moved).all()):
        raise NotApplicable("the messages hold values that are not finite")
    moved = moved if observation.update_kind == "gradient" else -moved
    eps = torch.finfo(messages[0].update.tensors[names[0]].dtype).eps
    noises = [m.update.sanitised.noise for m in messages if m.update.sanitised]
    largest = moved if observation.update_kind == "gradient" else sent
    return ExchangedModels(
        names=names,
        shapes=tuple(messages[0].update.tensors[n].shape for n in names),
        sent=sent,
        moved=moved,
        noise=max([eps * float(largest.square().mean().sqrt()), *noises]),
    )


def is_linear(module: nn.Module, state: dict[str, Tensor], input_shape: tuple[int, ...]) -> bool:
    """Return whether the outputs of ``module`` are a linear function of its parameters, by trying it on one input."""
    start = torch.Generator().manual_seed(0)
    inputs = torch.randn((2, *input_shape), generator=start).double()
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    fixed = {n: t.double() if t.is_floating_point() else t for n, t in state.items()}
    random = [{n: torch.randn(fixed[n].shape, generator=start, dtype=torch.float64) for n in names} for _ in range(2)]
    mixed = {n: 3 * random[0][n] - 2 * random[1][n] for n in names}
    with torch.no_grad():
        one, two, both = (torch.func.functional_call(module, {**fixed, **d}, (inputs,)) for d in (*random, mixed))
    return bool(torch.allclose(both, 3 * one - 2 * two, rtol=1e-8, atol=1e-8))


_PAPER = "Xu & Neglia 2021 (What else is leaked when eavesdropping federated learning?)"
_THREAT = "eavesdropper or server, passive"
_TRUSTED = 1e-3  # a zero of which more than this is left, or an update of which more than this isn't affine, is refused
_SYMMETRIC = 0.05
_FEWEST = 3  # rounds from which it is worth a try


class _LocalModelAttack(Attack):
    """What the attacks on local models share: they receive all messages of one client."""

    threat_model = _THREAT
    paper = _PAPER
    default_scope = "client"
    recovers = "local models"
    finds = LocalModelFinding


@register
class LastUpdate(_LocalModelAttack):
    """The last model that the client returned: the paper's baseline (Section 4), which takes no reconstruction."""

    name = "last-update"
    summary = "the last model that the client returned, as it is: the baseline"
    needs = ("one update of the client's weights",)

    def check(self, observation: Observation) -> None:
        """Raise unless the client returned weights."""
        super().check(observation)
        exchanged(observation)
        if observation.update_kind != "weights":
            raise NotApplicable("clients return gradients here and no model; use a federation of fedavg or fedprox")

    def _run(self, observation: Observation, *_: object) -> LocalModelFinding:
        seen = exchanged(observation)
        return LocalModelFinding(state=seen.state(seen.returned), rounds_used=1)


@register
class LocalModelExact(_LocalModelAttack):
    """Exact reconstruction for least squares with full batches (Xu & Neglia 2021, Observation 1).

    Full-batch training of a linear model by squared loss moves it by Δθ = θ − θ_c = Wθ − v, whatever the learning rate
    and the number of local steps (Eq. 4); from d + 1 rounds W and v follow, and the local optimum W⁻¹v. Here d counts
    the bias. W, v and the optimum are found in float64 through one singular value decomposition, in O(d³).

    Departures: more than d + 1 rounds are used where there are any, by least squares. In plain FedAvg the models sent
    become ever more alike (they follow W's own powers), so that the system is ill-conditioned however many rounds there
    are; then the directions in which they spread too little for the rounding of the messages are left out
    (``truncate``), which is said, and if the mapping doesn't vanish in what is left the attack refuses. FedProx,
    momentum and weight decay keep the map affine, so they work too; with weight decay the model found is the optimum
    with that decay.

    Args:
        rounds: use only the first so many of the client's rounds; all if None.
        truncate: leave out directions of which the rounds say too little; without it d + 1 rounds are solved as they
            are, however ill-conditioned.
    """

    name = "local-model-exact"
    summary = "a client's own least-squares model, by linear algebra from d+1 rounds"
    needs = (
        "a linear model trained by squared loss on full batches",
        "as many rounds of one client as the model has parameters, and one",
    )
    uses = ("local-model-exact",)

    rounds: Count | None = None
    truncate: bool = True

    @classmethod
    def fits(cls, case: Case) -> bool:
        return (
            case.updates_alone
            and not case.sums
            and not case.images
            and case.num_classes is None
            and case.rounds >= _FEWEST
        )

    def check(self, observation: Observation) -> None:
        """Raise unless the model is linear, the loss squared, and there are d + 1 rounds of the client."""
        super().check(observation)
        seen = exchanged(observation)
        task_info = observation.task_info
        if task_info.loss != "mse":
            raise NotApplicable(
                f"{self.name} is for the squared loss (mse), not for {task_info.loss}; local-model is for any"
            )
        if not is_linear(observation.module, observation.messages[0].weights, task_info.input_shape):
            raise NotApplicable(
                f"{self.name} is for models that are linear in their parameters; local-model is for any"
            )
        training = [m.update.training for m in observation.messages]
        if any(f is not None and f.data_size is not None and min(f.batch_sizes) < f.data_size for f in training):
            raise NotApplicable(
                f"{self.name} needs full batches, and this client trains on mini-batches; local-model works with these"
            )
        n, p = self._used(seen)
        if n < p + 1:
            raise NotApplicable(
                f"{self.name} needs {p + 1} rounds of a client for {p} parameters, and has {n}; observe more rounds"
            )

    def _run(self, observation: Observation, *_: object) -> LocalModelFinding:
        seen = exchanged(observation)
        n, p = self._used(seen)
        zero = zero_of_affine_map(seen.sent[:n], seen.moved[:n], noise=seen.noise, truncate=self.truncate)
        self._refuse(zero, n, p)
        training = [m.update.training for m in observation.messages]
        decayed = any(f is not None and f.weight_decay > 0 for f in training)
        note = "the client trains with weight decay: the model is its optimum with that decay"
        return _found(seen, zero, n, *[note] * decayed)

    def _used(self, seen: ExchangedModels) -> tuple[int, int]:
        n, p = seen.sent.shape
        return (n if self.rounds is None else min(n, self.rounds)), p

    def _refuse(self, zero: Zero, n: int, p: int) -> None:
        if zero.spanned == p and zero.singular:
            raise NotApplicable(
                f"rank-deficient: the client's examples don't determine a model of {p} parameters (fewer examples than "
                "parameters, or columns that depend on each other)"
            )
        if zero.misfit is not None and zero.misfit > _TRUSTED:
            raise NotApplicable(
                f"{zero.misfit:.1%} of the client's updates is no affine function of the models sent: mini-batches, "
                "noise, or another loss; local-model works with these"
            )
        alike = (
            f"{n} rounds span {zero.spanned} of {p} directions, condition number {zero.condition:.1e}"
            f"{'' if zero.used == zero.spanned else f', {zero.used} usable'}"
        )
        if zero.remaining > _TRUSTED:
            raise NotApplicable(
                f"rank-deficient or ill-conditioned: the models sent are too much alike ({alike}); "
                f"{zero.remaining:.2g} of an update would be left. Observe rounds with other clients, or more of them"
            )
        full = zero.used == p and zero.asymmetry is not None
        if full and zero.misfit is None and zero.asymmetry is not None and zero.asymmetry > _SYMMETRIC:
            raise NotApplicable(
                f"the {n} rounds give a mapping that no full-batch client has (asymmetry {zero.asymmetry:.2f}): "
                f"mini-batches, or an ill-conditioned system ({alike}). One more round would tell"
            )


@register
class LocalModel(_LocalModelAttack):
    """The heuristic for any model and any federation (Xu & Neglia 2021, Algorithm 3).

    A mapping network G with one hidden layer of ReLUs learns Δθ = θ − θ_c from θ over the client's rounds by Adam
    (Eq. 6); then ‖G(θ̂)‖² is minimised over θ̂ by Adam (Eq. 7): where the client would no longer move, it has its own
    optimum. ``mapping: linear`` makes G linear; both problems then have closed solutions, and with full batches and
    squared loss that is ``local-model-exact`` without its refusals.

    The paper gives neither learning rates, iterations nor where θ̂ begins. Ours: Δθ is scaled, θ̂ begins at the last
    model that the client returned, and of all iterates the one of least ‖G‖² is kept, which the adversary sees.
    ``whitened`` is ours, too: G then takes θ in its principal coordinates over the rounds, each in units of its
    standard deviation. On LEAF synthetic that loses what the network has over the last returned model, so it is off.

    Args:
        mapping: ``network`` or ``linear``.
        rounds: use only the first so many of the client's rounds; all if None.
        hidden: units of the network's layer.
        fit_iterations: of Adam on Eq. 6, full batch.
        fit_learning_rate: of that.
        iterations: of Adam on Eq. 7.
        learning_rate: of that, in units of θ, or of its standard deviations where it is whitened.
        whitened: give the network whitened coordinates of θ.
        span: where it is whitened, leave out directions in which θ spreads less than this over the rounds, relative
            to the widest; 0 keeps all.
    """

    name = "local-model"
    summary = "a client's own model, by learning how it moves what it is sent"
    needs = ("several rounds of one client; the more, the better",)
    uses = ("local-model",)

    mapping: Mapping = "network"
    rounds: Count | None = None
    hidden: Annotated[Count, Field(le=100_000)] = 1000
    fit_iterations: Count = 2000
    fit_learning_rate: Positive = 1e-3
    iterations: Count = 2000
    learning_rate: Positive = 0.01
    whitened: Annotated[bool, Field(strict=True)] = False
    span: Annotated[Fraction, Field(le=0.5)] = 0.01

    @classmethod
    def fits(cls, case: Case) -> bool:
        return (
            case.updates_alone
            and not case.sums
            and not case.images
            and not example_kind(case.kind).discrete
            and case.update_kind == "weights"
            and case.rounds >= _FEWEST
        )

    def check(self, observation: Observation) -> None:
        """Raise unless there are several rounds of the client, in which it moved the model."""
        super().check(observation)
        seen = exchanged(observation, self.rounds)
        if len(seen.sent) < 3:
            raise NotApplicable(
                f"{self.name} needs at least 3 rounds of a client and has {len(seen.sent)}; observe more rounds"
            )
        if not bool(seen.moved.any()):
            raise NotApplicable("the client's updates are zero throughout: it trained nothing")

    def _run(
        self, observation: Observation, generator: torch.Generator, device: str, progress: Progress
    ) -> LocalModelFinding:
        seen = exchanged(observation, self.rounds)
        n = len(seen.sent)
        if self.mapping == "linear":
            zero = zero_of_affine_map(seen.sent, seen.moved, noise=seen.noise)
            return _found(seen, zero, n)
        total = self.fit_iterations + self.iterations
        learned = fit_mapping(
            seen.sent.float().to(device),
            seen.moved.float().to(device),
            hidden=self.hidden,
            whitened=self.whitened,
            span=self.span,
            iterations=self.fit_iterations,
            learning_rate=self.fit_learning_rate,
            generator=generator,
            progress=lambda done: progress(done, total),
        )
        point, objective = seek_zero(
            learned,
            seen.returned.float().to(device),
            iterations=self.iterations,
            learning_rate=self.learning_rate,
            progress=lambda done: progress(self.fit_iterations + done, total),
        )
        if not bool(torch.isfinite(point).all()):
            raise NotApplicable(f"the optimisation diverged at learning_rate {self.learning_rate:g}; lower it")
        return LocalModelFinding(
            state=seen.state(point.cpu().double()),
            objective=objective,
            iterations=total,
            rounds_used=n,
            mapping_error=learned.error,
        )


def _found(seen: ExchangedModels, zero: Zero, rounds: int, *notes: str) -> LocalModelFinding:
    p = seen.sent.shape[1]
    text = f"condition number of the models sent {zero.condition:.1e}, {zero.used} of {p} directions used"
    if zero.misfit is None:
        text += "; no round was left over to check the mapping by"
    return LocalModelFinding(
        state=seen.state(zero.point),
        objective=zero.remaining,
        notes=(text, *notes),
        rounds_used=rounds,
        condition=zero.condition,
        directions=zero.used,
        mapping_error=zero.misfit,
    )
