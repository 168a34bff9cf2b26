"""CAFE: the parties' data, from the aggregated gradients of a vertical federation."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedaudit.attacks.base import Attack, Case, Progress, register
from fedaudit.attacks.findings import ImageFinding
from fedaudit.models import VerticalModel, layer_groups
from fedaudit.transcript.observation import Observation
from fedaudit.transcript.vertical import VerticalRecord
from fedaudit.utils.errors import NotApplicable
from fedaudit.utils.validation import Count, NonNegative, Positive

_REPORTS = 50
_RIDGE = 1e-10  # of the largest eigenvalue: below, a direction of the inputs isn't in the gradients


@dataclass(frozen=True)
class _FirstLayer:
    """A party's first linear layer, named within its network; its weight (u, d) and bias (u,) in the whole model."""

    name: str
    parameters: tuple[str, str]


@register
class CAFE(Attack):
    """CAFE (Jin et al. 2021, Algorithms 1 to 3, one after the other): images of all parties from aggregated gradients.

    The server knows which examples are in a batch, so that every round says something about the same unknowns. For each
    party, with u = W·h + b its first fully connected layer:

    1. The gradient of b is the sum over the batch of the gradients v_n = ∂L/∂u_n. Over all rounds that is a linear
       system in the v of all examples (Algorithm 1).
    2. The gradient of W is the sum of v_n·h_nᵀ: with v known, a linear system in the inputs h (Algorithm 2).
    3. The images are found by minimising ‖h(x) − ĥ‖² + ``gradient_weight``·‖∇L(x) − ∇L‖² + ``tv_weight``·max(TV − τ, 0)
       (Algorithm 3), with Adam; the gradients of one round's batch at a time, TV of each party's share.

    Departures: 1 and 2 are solved by least squares, whose minimum the paper approaches by gradient steps. The labels
    are the server's own, where the paper also looks for them. Weights and threshold are those of the published code,
    relative to the first term, but for ``tv_weight``: a tenth of its, because with the whole the total variation keeps
    the images from what the first term determines. Where the model learns between the rounds v and h move; h(x) is then
    compared at the model of the middle round.

    Args:
        iterations: of Adam.
        learning_rate: of Adam on pixels in [0, 1], from which it falls to zero (cosine).
        gradient_weight: of the gradients' distance.
        gradient_every: that term counts once in so many iterations; it takes six times as long as the others.
        tv_weight: of the total variation (sum of absolute differences of neighbours, on pixels in [0, 1]).
        tv_limit: τ, below which total variation costs nothing.
    """

    name = "cafe"
    summary = "images of all parties of a vertical federation, from the gradients of large batches"
    paper = "Jin et al. 2021 (CAFE: Catastrophic Data Leakage in Vertical Federated Learning)"
    threat_model = "server, passive"
    needs = (
        "a vertical federation, protocol aggregated-gradients, of images",
        "parties' networks with a fully connected layer with a bias",
        "as many rounds as examples, in batches that differ",
    )
    default_scope = "federation"
    examples = ("image",)
    finds = ImageFinding
    reads = VerticalRecord
    on_sums = "refused: it is for vertical federations, where there are none"

    iterations: Count = 400
    learning_rate: Positive = 0.1
    gradient_weight: NonNegative = 10.0
    gradient_every: Count = 10
    tv_weight: NonNegative = 0.01
    tv_limit: NonNegative = 25.0

    @classmethod
    def fits(cls, case: Case) -> bool:
        return case.threat.adversary == "server" and not case.cut

    def check(self, observation: Observation) -> None:
        """Raise where the gradients don't determine what is sought."""
        super().check(observation)
        record = observation.sent
        assert isinstance(record, VerticalRecord)
        if not record.updates:
            raise NotApplicable(
                f"{self.name} needs the gradients of the parties' networks, which only a server reads where they are "
                "aggregated; set threat.adversary=server and federations[].vertical.protocol: aggregated-gradients"
            )
        if record.labels is None:
            raise NotApplicable(f"{self.name} is run by the server, who has the labels; set threat.adversary=server")
        _first_layers(observation)
        rank, sought = int(torch.linalg.matrix_rank(membership(record))), len(record.used)
        if rank < sought:
            more = 5 * max(sought, len(record.batches)) // 4 + 1
            raise NotApplicable(
                f"{self.name} needs as many rounds with different batches as there are examples: the batches of "
                f"{len(record.batches)} rounds determine {rank} of {sought}; raise rounds to {more}, "
                "or lower examples or batch_size"
            )

    def _run(
        self, observation: Observation, generator: torch.Generator, device: str, progress: Progress
    ) -> ImageFinding:
        record, info = observation.sent, observation.task_info
        assert isinstance(record, VerticalRecord)
        assert record.labels is not None
        used, member = record.used, membership(record)
        place = torch.full((record.examples,), -1).index_put((used,), torch.arange(len(used)))
        layers = _first_layers(observation)
        inputs = [layer_inputs(record, one.parameters, member, place).to(device, torch.float32) for one in layers]
        module = copy.deepcopy(observation.module).to(device).eval()
        assert isinstance(module, VerticalModel)
        middle = len(record.batches) // 2
        state = {name: t.to(device) for name, t in record.weights_of(middle).items()}
        module.load_state_dict(state)
        images = torch.rand((len(used), *info.input_shape), generator=generator).to(device).requires_grad_()
        labels = record.labels[used].to(device)
        low, high = info.example_kind.bounds or (0.0, 1.0)
        adam = torch.optim.Adam([images], lr=self.learning_rate)
        value = torch.zeros(())
        for step in range(self.iterations):
            for group in adam.param_groups:
                group["lr"] = self.learning_rate * 0.5 * (1 + math.cos(math.pi * step / self.iterations))
            shares = module.features(info.normalise(images))
            value = images.new_zeros(())
            for party, layer, share, known in zip(module.parties, layers, shares, inputs, strict=True):
                value = value + (_before(party, layer.name, share) - known).square().sum()
            if self.tv_weight:
                value = value + self.tv_weight * sum(
                    (_variation(share) - self.tv_limit).clamp_min(0).sum() for share in module.features(images)
                )
            (grad,) = torch.autograd.grad(value, images)
            if self.gradient_weight and step % self.gradient_every == 0:
                distance, more = self._by_gradient(observation, module, images, labels, place, step)
                value, grad = value + self.gradient_weight * distance, grad + self.gradient_weight * more
            images.grad = grad
            adam.step()
            with torch.no_grad():
                images.clamp_(low, high)
            if step % _REPORTS == 0:
                progress(step, self.iterations)
        progress(self.iterations, self.iterations)
        return ImageFinding(
            images=images.detach().cpu(),
            labels=labels.cpu(),
            label_source="the server's own",
            objective=float(value.detach()),
            iterations=self.iterations,
        )

    def _by_gradient(
        self, observation: Observation, module: VerticalModel, images: Tensor, labels: Tensor, place: Tensor, step: int
    ) -> tuple[Tensor, Tensor]:
        """Return how far the gradients of one round's batch are from the observed ones, and the images' derivative."""
        record = observation.sent
        assert isinstance(record, VerticalRecord)
        index = step // self.gradient_every % len(record.batches)
        rows = place[record.batches[index]].to(images.device)
        batch = images.detach()[rows].requires_grad_()
        state = {name: t.detach().requires_grad_() for name, t in module.named_parameters()}
        buffers = dict(module.named_buffers())
        outputs = functional_call(module, {**state, **buffers}, (observation.task_info.normalise(batch),))
        loss = observation.loss(outputs, labels[rows])
        grads = torch.autograd.grad(loss, list(state.values()), create_graph=True)
        distance = torch.stack(
            [
                (g - record.updates[name][index].to(g.device)).square().sum()
                for name, g in zip(state, grads, strict=True)
            ]
        ).sum()
        (own,) = torch.autograd.grad(distance, batch)
        return distance.detach(), torch.zeros_like(images).index_put((rows,), own)


def membership(record: VerticalRecord) -> Tensor:
    """Return (T, m) float64, 1 where an example that was used at all is in a round's batch."""
    member = torch.zeros(len(record.batches), record.examples, dtype=torch.float64)
    member.scatter_(1, record.batches, 1.0)
    return member[:, record.used]


def output_gradients(record: VerticalRecord, bias: str, member: Tensor) -> Tensor:
    """Return (m, u) of every example its own loss's gradient w.r.t. the layer's outputs: step 1, Algorithm 1."""
    sums = record.batches.shape[1] * record.updates[bias].double()
    return torch.as_tensor(torch.linalg.lstsq(member, sums, driver="gelsd").solution)


def layer_inputs(record: VerticalRecord, names: tuple[str, str], member: Tensor, place: Tensor) -> Tensor:
    """Return (m, d) a layer's inputs by its normal equations (step 2, Algorithm 2); ``place`` (N,): examples' rows."""
    weight, bias = names
    known = output_gradients(record, bias, member)
    right = torch.zeros(len(known), record.updates[weight].shape[2], dtype=torch.float64)
    for batch, update in zip(record.batches, record.updates[weight], strict=True):
        rows = place[batch]
        right[rows] += known[rows] @ (len(rows) * update.double())
    left = (member.T @ member) * (known @ known.T)
    values, vectors = torch.linalg.eigh(left)
    inverse = torch.where(values > _RIDGE * values.max(), 1 / values.clamp_min(1e-300), 0)
    return torch.as_tensor(vectors @ (inverse[:, None] * (vectors.T @ right)))


def _first_layers(observation: Observation) -> list[_FirstLayer]:
    """Return every party's first fully connected layer; NotApplicable where one has none with a bias."""
    module = observation.module
    assert isinstance(module, VerticalModel)
    found = []
    shares = module.features(observation.task_info.blank(2)[0])
    for number, (party, share) in enumerate(zip(module.parties, shares, strict=True)):
        layers = layer_groups(party, share)
        first = next((i for i, layer in enumerate(layers) if layer.kind == "linear"), None)
        if first is None or getattr(party.get_submodule(layers[first].name), "bias", None) is None:
            raise NotApplicable(
                f"cafe needs a fully connected layer with a bias in the network of every party, and party {number}'s "
                "has none; use model.name: cafe-cnn, for example"
            )
        prefix = ".".join(["parties", str(number), *[layers[first].name] * bool(layers[first].name)])
        found.append(_FirstLayer(layers[first].name, (f"{prefix}.weight", f"{prefix}.bias")))
    return found


def _before(party: nn.Module, name: str, share: Tensor) -> Tensor:
    """Return what the party's layer ``name`` takes (n, d) of its share of the examples."""
    taken: list[Tensor] = []
    handle = party.get_submodule(name).register_forward_pre_hook(lambda _, inputs: taken.append(inputs[0]))
    try:
        party(share)
    finally:
        handle.remove()
    return taken[0].flatten(1)


def _variation(images: Tensor) -> Tensor:
    """Return (n,) the sum of absolute differences of neighbouring pixels, vertical plus horizontal."""
    down = (images[..., 1:, :] - images[..., :-1, :]).abs().flatten(1).sum(dim=1)
    return down + (images[..., 1:] - images[..., :-1]).abs().flatten(1).sum(dim=1)
