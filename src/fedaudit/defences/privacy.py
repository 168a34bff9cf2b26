"""Differential privacy: clipping, Gaussian noise, and an account of what is spent."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from fedaudit.defences.aggregation import Aggregator
from fedaudit.defences.sanitising import ClientContext, Sanitiser, changed, norm
from fedaudit.task.training import LocalPlan, Loss
from fedaudit.transcript.update import SanitiserInfo, Update
from fedaudit.utils.errors import BadInput
from fedaudit.utils.registry import register
from fedaudit.utils.validation import Number, Positive

Level = Literal["client", "sample"]
Where = Literal["local", "central"]
Sampling = Literal["drawn", "poisson"]
Adjacency = Literal["add-remove", "replace"]
_MOST_ROUNDS = 10**6
# The privacy loss distribution's step, and how many steps at most it is spread over, roughly.
_FINE, _LOSSES = 1e-4, 10**5
# Rényi orders; whole ones only, for which sampled Gaussians have a closed form
_ORDERS = [*range(2, 65), 80, 96, 128, 192, 256, 512]


@register
class DifferentialPrivacy(Sanitiser):
    """Clips to ``clip`` and adds Gaussian noise of ``noise`` times that.

    *Client level* (Geyer et al. 2017, Algorithm 1): the whole update is clipped to norm S. ``central``: the server adds
    N(0, σ²S²/m²) to the mean of m updates, and so sees them without noise; ``local``: every client adds N(0, σ²S²).
    Departure: Geyer et al. clip to the median of the norms in the round; S is fixed here, as in McMahan et al. 2018.

    *Sample level* (DP-SGD, Abadi et al. 2016, Algorithm 1): in every local step each example's gradient is clipped to
    C, the sum gets N(0, σ²C²) and is divided by the batch size B. ``central`` (FedSGD only): the clients clip, the
    server adds N(0, σ²C²/(B·m)²) to the mean.

    The account is by add/remove adjacency: neighbours differ by one client or example that is there, or sends nothing
    in its place, and the sensitivity is S or C. A server that sees who took part, as under local noise, faces
    replacement, up to 2S or 2C: for that ε is the account's of σ/2. Clipping comes before averaging, and the mean is
    over a number that isn't secret. See :class:`Account` for sampling and composition.

    BatchNorm's statistics have no noise and so don't travel. The number of examples of an update does travel.

    Args:
        clip: S or C, the norm to which an update or an example's gradient is clipped.
        noise: σ, in units of ``clip``.
        level: who is protected: a ``client`` or a ``sample``.
        where: who adds the noise.
        epsilon: the budget: nobody sends after it is spent (RDP); None doesn't stop.
        delta: δ of (ε, δ).
        sampling: what the account supposes of how clients and batches are drawn: as they are ``drawn``, or by
            ``poisson`` sampling, as accountants for DP-SGD do by custom. Nobody here draws so: it understates ε.
    """

    name = "dp"
    summary = "differential privacy: clips and adds Gaussian noise, stops when the budget is spent"
    paper = "Geyer et al. 2017; McMahan et al. 2018 (client level); Abadi et al. 2016 (sample level)"

    clip: Positive = 1.0
    noise: Positive = 1.0
    level: Level = "client"
    where: Where = "local"
    epsilon: Positive | None = 8.0
    delta: Annotated[Number, Field(gt=0, lt=1)] = 1e-5
    sampling: Sampling = "drawn"

    def check(self, plan: LocalPlan, aggregator: Aggregator) -> None:
        """Refuse central noise where the server does not add it to a plain mean, or examples take several steps.

        Raises:
            BadInput: it is so.
        """
        if self.where == "central" and aggregator.averages != "equally":
            raise BadInput(
                f"central noise of dp is made for the aggregator 'mean', not '{aggregator.name}'; use mean, or local"
            )
        if self.where == "central" and self.level == "sample" and not plan.sends_gradient:
            raise BadInput("sample-level dp with central noise is for fedsgd; use local")

    def __call__(
        self,
        update: Update,
        context: ClientContext,  # noqa: ARG002
        generator: torch.Generator | None,
    ) -> Update:
        """Return the update clipped and, at the client's level and in its hands, with noise.

        Without a generator the noise comes from the operating system, as it must wherever the protection is real.
        """
        tensors, scale = update.tensors, 0.0
        if self.level == "client":
            length = norm(tensors.values())
            shrink = min(1.0, self.clip / length) if length else 1.0
            scale = self.noise * self.clip if self.where == "local" else 0.0
            tensors = {name: shrink * t + scale * _gaussian(t, generator) for name, t in tensors.items()}
        elif self.where == "local" and update.training is not None:
            training = update.training
            steps = [self.noise * self.clip / size for size in training.batch_sizes]
            scale = sum(s**2 for s in steps) ** 0.5
            if update.kind == "weights":
                scale *= training.learning_rate  # each step's noise is multiplied by it; momentum would add more
        return replace(changed(update, tensors, SanitiserInfo("dp", noise=scale)), buffers={})

    def gradients(
        self,
        model: nn.Module,
        loss: Loss,
        batch: tuple[Tensor, Tensor],
        generator: torch.Generator,
        others: Iterable[Sequence[Tensor]] = (),
    ) -> list[Tensor]:
        """Return a local step's gradient with every example's clipped, and noise where clients add it.

        Args:
            model: being trained.
            loss: mean over a batch.
            batch: (inputs, targets).
            generator: of the noise.
            others: gradients of further examples, which are clipped and summed likewise: of canaries. They don't count
                in the batch's size.

        Raises:
            BadInput: BatchNorm mixes the examples.
        """
        parts = model.modules()
        refuse_batch_norm(any(isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training for part in parts))
        parameters = [p for p in model.parameters() if p.requires_grad]
        total = [torch.zeros_like(p) for p in parameters]
        inputs, targets = batch

        def own() -> Iterator[Sequence[Tensor]]:
            for i in range(len(inputs)):
                value = loss(model(inputs[i : i + 1]), targets[i : i + 1])
                yield torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)

        for grads in chain(own(), others):
            length = norm(grads)
            shrink = min(1.0, self.clip / length) if length else 1.0
            for sum_, grad in zip(total, grads, strict=True):
                sum_.add_(grad, alpha=shrink)
        scale = self.noise * self.clip if self.where == "local" else 0.0
        return [(t + scale * _gaussian(t, generator)) / len(inputs) for t in total]


def refuse_batch_norm(mixes: bool) -> None:
    """Raise if BatchNorm mixes the examples of a batch, each of whose gradients is to be clipped.

    Raises:
        BadInput: it does.
    """
    if mixes:
        raise BadInput(
            "sample-level dp can't clip one example's gradient where BatchNorm mixes the examples of a batch: "
            "use model.batch_norm: eval, or level: client"
        )


def central_noise(dp: DifferentialPrivacy, clients: int, batch: int) -> float:
    """Return the standard deviation of the noise that the server adds to the mean of ``clients`` updates.

    Args:
        dp: with its settings.
        clients: in the mean.
        batch: examples in the smallest batch of any of them.
    """
    if dp.where != "central":
        return 0.0
    share = clients * (batch if dp.level == "sample" else 1)
    return dp.noise * dp.clip / share


@dataclass(frozen=True)
class Account:
    """What a federation's rounds cost in privacy.

    *Adjacency*: neighbours differ by one client or example that is there, or sends nothing in its place
    (``add-remove``: sensitivity is the clip, of which σ is a multiple); or sends anything else (``replace``: twice the
    clip, so σ counts half), as a server faces that sees who took part.

    Attributes:
        noise: σ, in units of the clip.
        delta: δ.
        rate: the probability that the protected one takes part in a step that is counted.
        steps: noisy steps in a round that is counted.
        every: the protected one takes part in one of so many steps, whichever it is: a pass over shuffled examples.
            Batches of a pass are disjoint, so it costs what that one step costs.
        of: (k, n), if k of n clients are drawn without replacement; else the drawing is Poisson's. Who is drawn takes
            another's place, by either adjacency, so that the sum moves by up to twice the clip (Wang, Balle and
            Kasiviswanathan 2019); where that hides less than no drawing at all, it is reckoned without.
        adjacency: see above.
    """

    noise: float
    delta: float
    rate: float
    steps: int
    every: int = 1
    of: tuple[int, int] | None = None
    adjacency: Adjacency = "add-remove"

    def spent(self, rounds: int, how: Literal["rdp", "pld"] = "rdp") -> float:
        """Return ε after ``rounds``, by Rényi accounting or the tighter privacy loss distribution."""
        if not rounds:
            return 0.0
        noise = self.noise / (1 if self.adjacency == "add-remove" else 2)
        times = math.ceil(self.steps * rounds / self.every)
        if self.of is None:
            return _spent(noise, self.delta, self.rate, times, how)
        return min(
            _spent(noise, self.delta, 1.0, times, how), _without_replacement(self.noise / 2, self.delta, self.of, times)
        )

    def rounds(self, budget: float | None) -> int:
        """Return how many rounds the budget allows."""
        if budget is None:
            return _MOST_ROUNDS
        low, high = 0, 1
        while high < _MOST_ROUNDS and self.spent(high) <= budget:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.spent(middle) <= budget else (low, middle)
        return low


def account(
    dp: DifferentialPrivacy,
    *,
    clients: int,
    per_round: int,
    steps: int,
    batch: int,
    fewest: int,
    epoch: int | None = None,
) -> Account:
    """Return the account, by add/remove adjacency, of a federation whose clients use ``dp``.

    Protected is, against the one who sees the updates (local) or only the global models (central): at the client's
    level a client as a whole, at the sample's level one example of the client that holds the fewest. The rounds that
    count are those in which the client takes part (local) or all (central), where being one of many amplifies.

    Args:
        dp: with its settings.
        clients: in all.
        per_round: taking part in a round.
        steps: local steps in a round.
        batch: examples in a step.
        fewest: examples that any client holds.
        epoch: steps that are reckoned for a pass over the examples, where rounds consist of whole passes; None where
            they don't, and a pass goes on in the next round.
    """
    central = dp.where == "central"
    if dp.sampling == "poisson":
        among = per_round / clients if central else 1.0
        if dp.level == "client":
            return Account(dp.noise, dp.delta, among, 1)
        return Account(dp.noise, dp.delta, among * min(1.0, batch / fewest), steps)
    if dp.level == "sample":
        # whoever knows which clients took part knows how many passes each has made: their drawing hides nothing
        return Account(dp.noise, dp.delta, 1.0, steps, every=epoch or math.ceil(fewest / batch))
    if central and per_round < clients:
        return Account(dp.noise, dp.delta, per_round / clients, 1, of=(per_round, clients))
    return Account(dp.noise, dp.delta, 1.0, 1)


@cache
def _spent(noise: float, delta: float, rate: float, steps: int, how: str) -> float:
    import dp_accounting  # heavy, and only where there is an account to keep
    from dp_accounting import pld, rdp

    event: Any = dp_accounting.GaussianDpEvent(noise)
    if rate < 1:
        event = dp_accounting.PoissonSampledDpEvent(rate, event)
    if how == "rdp":
        accountant: Any = rdp.RdpAccountant(_ORDERS)
        accountant.compose(event, steps)
        return float(accountant.get_epsilon(delta))
    bound = _spent(noise, delta, rate, steps, "rdp")
    # little noise spreads the losses widely: coarser steps keep their number, and so the memory, bounded
    accountant = pld.PLDAccountant(value_discretization_interval=max(_FINE, bound / _LOSSES))
    try:
        accountant.compose(event, steps)
        return float(accountant.get_epsilon(delta))
    except OverflowError:  # next to no noise: losses whose exponential no float holds; Rényi's is a bound, too
        return bound


@cache
def _without_replacement(noise: float, delta: float, of: tuple[int, int], steps: int) -> float:
    import dp_accounting
    from dp_accounting import rdp

    accountant = rdp.RdpAccountant(_ORDERS, dp_accounting.NeighboringRelation.REPLACE_ONE)
    event = dp_accounting.SampledWithoutReplacementDpEvent(of[1], of[0], dp_accounting.GaussianDpEvent(noise))
    accountant.compose(event, steps)
    return float(accountant.get_epsilon(delta))


def _gaussian(like: Tensor, generator: torch.Generator | None) -> Tensor:
    if generator is not None:
        return torch.randn(like.shape, generator=generator, dtype=like.dtype).to(like.device)
    # torch's generator takes 32 bits of its seed, and its state can be told from the noise on a weight that didn't move
    bits = torch.frombuffer(bytearray(os.urandom(8 * like.numel())), dtype=torch.int64)
    uniform = ((bits & (2**52 - 1)).double() + 0.5) / 2**52  # exact, and never 0 or 1
    noise: Tensor = torch.special.ndtri(uniform)
    return noise.view(like.shape).to(like)
