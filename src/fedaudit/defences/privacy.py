"""Differential privacy: clipping, Gaussian noise, and what of it the account counts."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from fedaudit.defences.aggregation import Aggregator
from fedaudit.defences.client_defences import ClientContext, ClientDefence, changed, norm
from fedaudit.epsilon.accounting import Account, TakingPart
from fedaudit.task.training import LocalPlan, Loss, TrainingConfig
from fedaudit.transcript.update import ClientDefenceInfo, PrivateSteps, Update, UpdateKind
from fedaudit.utils.errors import BadInput
from fedaudit.utils.registry import register
from fedaudit.utils.validation import Number, Positive

Level = Literal["client", "sample"]
Where = Literal["local", "central"]
Sampling = Literal["drawn", "poisson"]


@register
class DifferentialPrivacy(ClientDefence):
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
    over a number that isn't secret. See :class:`~fedaudit.epsilon.accounting.Account` for sampling and composition.

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

    secret = True

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
        """Refuse central noise where the server does not add it to a plain mean, or examples take several steps."""
        if self.where == "central" and aggregator.averages != "equally":
            raise BadInput(
                f"central noise of dp is made for the aggregator 'mean', not '{aggregator.name}'; use mean, or local"
            )
        if self.where == "central" and self.level == "sample" and not plan.sends_gradient:
            raise BadInput("sample-level dp with central noise is for fedsgd; use local")

    def check_alone(self, given: Collection[str], clients: int | None) -> int | None:  # noqa: ARG002
        """Return how many rounds the budget allows; None where there is no budget.

        Raises:
            BadInput: clip or noise are left as they are; noise isn't a client's to add; the budget is for no round.
        """
        if missing := [name for name in ("clip", "noise") if name not in given]:
            raise BadInput(
                f"dp needs {' and '.join(missing)}, which nobody can choose for you: clip near your updates' norm "
                "(ClientDefenceMod('none') logs it), noise in units of clip"
            )
        if self.level != "client" or self.where != "local":
            raise BadInput(
                f"dp with level: {self.level}, where: {self.where} works inside of the training or on the server; "
                "a mod can do level: client, where: local"
            )
        if self.epsilon is None:
            return None
        rounds = account(self, clients=1, per_round=1, steps=1, batch=1, fewest=1).rounds(self.epsilon)
        if not rounds:
            raise BadInput(
                f"dp: noise {self.noise:g} spends more than epsilon {self.epsilon:g} in one round; raise noise, or set "
                "epsilon to null to clip and add noise without a budget"
            )
        return rounds

    def account(self, who: TakingPart) -> Account:
        """Return the account by add/remove adjacency, see :func:`account`."""
        return account(
            self,
            clients=len(who.examples),
            per_round=who.per_round,
            steps=who.steps,
            batch=who.batch,
            fewest=min(who.examples),
            epoch=who.epoch,
        )

    def budget(self) -> float | None:
        """Return ``epsilon``."""
        return self.epsilon

    def adds_noise(self) -> bool:
        """Return whether clients add it."""
        return self.where == "local"

    def __call__(
        self,
        update: Update,
        context: ClientContext,  # noqa: ARG002
        generator: torch.Generator | None,
    ) -> Update:
        """Return the update clipped and, at the client's level and in its hands, with noise.

        Without a generator the operating system draws the noise, as it must wherever the protection is real.
        """
        tensors, scale = update.tensors, 0.0
        clip: float | None = self.clip
        if self.level == "client":
            length = norm(tensors.values())
            shrink = min(1.0, self.clip / length) if length else 1.0
            scale = self.noise * self.clip if self.where == "local" else 0.0
            tensors = {name: shrink * t + scale * gaussian(t, generator) for name, t in tensors.items()}
        elif self.where == "local" and update.training is not None:
            training = update.training
            steps = [self.noise * self.clip / size for size in training.batch_sizes]
            scale = sum(s**2 for s in steps) ** 0.5
            if update.kind == "weights":
                scale *= training.learning_rate  # each step's noise is multiplied by it; momentum would add more
                clip = None if training.momentum else training.learning_rate * len(steps) * self.clip
        return replace(changed(update, tensors, ClientDefenceInfo("dp", noise=scale, clip=clip)), buffers={})

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
            loss: mean over a batch.
            batch: (inputs, targets).
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
            add_clipped(total, grads, self.clip)
        scale = self.noise * self.clip if self.where == "local" else 0.0
        return [(t + scale * gaussian(t, generator)) / len(inputs) for t in total]


def add_clipped(total: Sequence[Tensor], grads: Sequence[Tensor], clip: float, layers: Sequence[float] = ()) -> None:
    """Add one example's gradient to a sum in place, clipped to ``clip``, or each tensor to its own of ``layers``."""
    lengths = [norm([grad]) for grad in grads] if layers else [norm(grads)] * len(grads)
    for sum_, grad, length, most in zip(total, grads, lengths, layers or [clip] * len(grads), strict=True):
        sum_.add_(grad, alpha=min(1.0, most / length) if length else 1.0)


def of_private_steps(private: PrivateSteps, training: TrainingConfig | None, kind: UpdateKind) -> ClientDefenceInfo:
    """Return what everybody knows of an update whose training clipped examples' gradients and added noise.

    SGD's momentum carries each step's noise on. A step of Adam is about its rate in each number, and where there is
    noise, it is noise that decides its sign; how long an update of Adam or with weight decay is nobody can say.
    """
    taken = private.in_order(training)
    if training is not None and training.optimiser != "sgd":
        noise = math.sqrt(sum(rate**2 for rate, _ in taken)) if private.noise else 0.0
        return ClientDefenceInfo("dp-sgd", noise=noise, unclipped=True, private=private)
    weights, carried, momentum = list[float](), 0.0, training.momentum if training else 0.0
    for rate, _ in reversed(taken):
        carried = rate + momentum * carried
        weights.append(carried if kind == "weights" else 1.0)
    scale = private.clip / private.divisor
    examples = [sum(one.examples for one in passes) for _, passes in reversed(taken)]
    longest = scale * sum(weight * n for weight, n in zip(weights, examples, strict=True))
    known = longest > 0 and (training is None or not (training.weight_decay or training.groups))
    return ClientDefenceInfo(
        "dp-sgd",
        noise=private.noise * scale * math.hypot(*weights),
        clip=longest if known else None,
        unclipped=not known,
        private=private,
    )


def refuse_batch_norm(mixes: bool) -> None:
    """Raise BadInput if BatchNorm mixes the examples of a batch, each of whose gradients is to be clipped."""
    if mixes:
        raise BadInput(
            "sample-level dp can't clip one example's gradient where BatchNorm mixes the examples of a batch: "
            "use model.batch_norm: eval, or level: client"
        )


def central_noise(dp: DifferentialPrivacy, clients: int, batch: int) -> float:
    """Return the standard deviation of the noise in the mean of ``clients`` updates, of the smallest ``batch``."""
    if dp.where != "central":
        return 0.0
    share = clients * (batch if dp.level == "sample" else 1)
    return dp.noise * dp.clip / share


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


def gaussian(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return standard normal numbers, as many as ``like`` has; without a generator from the operating system."""
    if generator is not None:
        return torch.randn(like.shape, generator=generator, dtype=like.dtype).to(like.device)
    noise: Tensor = torch.special.ndtri(secret_uniform(like.numel()))
    return noise.view(like.shape).to(like)


def secret_uniform(count: int) -> Tensor:
    """Return (count,) numbers between 0 and 1 in float64, from the operating system."""
    # torch's generator takes 32 bits of its seed, and its state can be told from the noise on a weight that didn't move
    bits = torch.frombuffer(bytearray(os.urandom(8 * count)), dtype=torch.int64)
    return ((bits & (2**52 - 1)).double() + 0.5) / 2**52  # exact, and never 0 or 1
