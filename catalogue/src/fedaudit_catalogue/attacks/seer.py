"""SEER (Garov et al. 2024): weights trained together with a secret decoder, which takes one image out of a gradient."""

from __future__ import annotations

import math
from dataclasses import field
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedaudit.attacks import (
    ALTERED_MODELS,
    Case,
    ClosedForm,
    Finding,
    Observation,
    Progress,
    one_batch_gradient,
    register,
)
from fedaudit.simulation import FAILURES, SERVER_LOG, ServerBehaviour, ServerStep, local_randomness
from fedaudit.task import LocalPlan, Loss, TaskInfo
from fedaudit.utils import BadInput, Count, NonNegative, NotApplicable, Positive, Whole

_LOG = f"{SERVER_LOG}seer/"
_LEAST = 64  # public examples
_DRAWN = 192  # examples of a step, two thirds of them the decoder is fitted on
_FITTED = 1536  # examples that the decoder is fitted on in the end
_COUNT = 3.0  # what the decoder's last output is for an example that is chosen: as heavy as some pixels
_OTHERS = 4.0  # weight of the examples that aren't chosen, of which a batch has many
_OF_A_BATCH = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)


@register(frozen=False)
class SeerServer(ServerBehaviour):
    """Trains the weights together with a secret decoder that sees one example of a batch (Garov et al. 2024).

    The decoder maps an example's gradient linearly to the example, where it has a property, and to nothing where it
    hasn't. Being linear it takes the gradient of a batch for the sum, so what comes out is the one example with the
    property. Nothing is handcrafted: no row, kernel or neuron holds one example, and only the decoder's owner can
    separate them. The property is being brighter (or darker) than all but 1 in ``batch`` of the public examples, so
    that a batch holds one on average: exactly one in 39 % of batches of 8.

    Departures. The property is the paper's global one, by a fixed cut; its local one, the brightest of a batch, needs
    BatchNorm's statistics of the batch. The paper's decoder, two linear maps, is learned by the same descent as the
    weights, in days of GPUs; here the two are one, found by ridge regression on two thirds of a step's examples, and
    the weights descend, through its solution, on what it makes of the others: seconds, for small networks and images.
    Public examples are varied by flips and noise, and their labels are drawn at random. A last output of the decoder
    counts the examples with the property.

    It trains once, in round ``start``, from the weights that an honest server would send, and sends the same from then
    on; before, it is honest.

    Args:
        chosen: the property: bright or dark.
        batch: examples that an update is expected to be over.
        steps: of Adam, on the weights.
        learning_rate: of the first of them; it falls to nothing by a cosine.
        ridge: of the decoder, in means of the squared size of a gradient.
        noise: largest standard deviation of what is added to public examples, in those of the preprocessing.
        entries: most numbers of a gradient that the decoder reads, drawn at random, as in the paper.
        start: the round, from 0, in which it begins.
    """

    name = "seer"
    summary = "weights trained with a secret decoder that sees one example in a gradient"
    paper = "Garov et al. 2024 (Hiding in plain sight)"

    chosen: Literal["bright", "dark"] = "bright"
    batch: Count = 8
    steps: Count = 1000
    learning_rate: Positive = 0.01
    ridge: Positive = 0.01
    noise: NonNegative = 0.3
    entries: Count = 8192
    start: Whole = 0

    weights: dict[str, Tensor] = field(default_factory=dict, init=False)
    log: dict[str, Tensor] = field(default_factory=dict, init=False)

    def check(self, model: nn.Module, task_info: TaskInfo, plan: LocalPlan) -> None:  # noqa: ARG002
        """Refuse what isn't of images and classes, and networks in which an example's gradient isn't its own."""
        classes = task_info.num_classes
        if not task_info.example_kind.resizable or classes is None or task_info.outputs < classes:
            raise BadInput("seer is for images and classifiers; leave server out")
        batch_norm = any(isinstance(m, _OF_A_BATCH[0]) for m in model.modules()) and task_info.batch_norm == "train"
        if batch_norm or (task_info.dropout and any(isinstance(m, _OF_A_BATCH[1]) for m in model.modules())):
            raise BadInput(
                "seer's decoder takes examples one by one, and here their gradients depend on the batch or on masks; "
                "set federations[].batch_norm: eval, or choose a model without BatchNorm and dropout"
            )

    def __call__(self, step: ServerStep) -> dict[str, Tensor]:
        """Return the trained weights, from round ``start`` on."""
        if step.round < self.start:
            return step.weights
        if not self.weights:
            if step.public is None or len(step.public) < _LEAST:
                raise BadInput(
                    f"seer trains on {_LEAST} public examples or more; set threat.knows_public_data: true, and "
                    "threat.public_examples, to 1000 for example"
                )
            try:
                self._train(step, step.public)
            except FAILURES as error:
                if isinstance(error, BadInput):
                    raise
                raise BadInput(
                    f"seer can't train this model: {type(error).__name__}: {str(error)[:200]}; choose one that "
                    "torch.func.vmap can differentiate (mlp, lenet, convnet-small)"
                ) from error
        return step.weights | self.weights

    def adversary_log(self) -> dict[str, Tensor]:
        """Return the decoder, which entries of the gradient it reads, and how many examples there are in a batch."""
        return dict(self.log)

    def _train(self, step: ServerStep, public: Tensor) -> None:
        model, rng = step.model.cpu(), step.generator
        model.load_state_dict(step.weights)
        parameters = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters() if p.requires_grad}
        constants = {n: t for n, t in step.weights.items() if n not in parameters}
        size = sum(p.numel() for p in parameters.values())
        entries = torch.randperm(size, generator=rng)[: self.entries].sort().values
        draw = _Draw(public, step.task_info.num_classes or 1, self.batch, self.chosen, self.noise, rng)
        optimiser = torch.optim.Adam(parameters.values(), lr=self.learning_rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, self.steps)
        with local_randomness(step.round), torch.enable_grad():
            for _ in range(self.steps):
                inputs, labels, wanted = draw(_DRAWN)
                gradients = _gradients(model, step.loss, parameters, constants, inputs, labels)[:, entries]
                order = torch.randperm(_DRAWN, generator=rng)
                fitted, held = order[: 2 * _DRAWN // 3], order[2 * _DRAWN // 3 :]
                products = gradients @ gradients[fitted].T
                dual = _ridge(products[fitted], wanted[fitted], self.ridge)
                missed = (products[held] @ dual - wanted[held]).square().mean(dim=1)
                value = (missed * torch.where(wanted[held, -1] > 0, 1.0, _OTHERS)).mean()
                optimiser.zero_grad()
                value.backward()
                optimiser.step()
                schedule.step()
            parts = [draw(_DRAWN) for _ in range(_FITTED // _DRAWN)]
            rows = torch.cat(
                [_gradients(model, step.loss, parameters, constants, x, y)[:, entries].detach() for x, y, _ in parts]
            ).double()
        dual = _ridge(rows @ rows.T, torch.cat([wanted for *_, wanted in parts]).double(), self.ridge)
        self.weights.update({name: p.detach().clone() for name, p in parameters.items()})
        self.log |= {f"{_LOG}decoder": (dual.T @ rows).float(), f"{_LOG}entries": entries}


def _ridge(products: Tensor, wanted: Tensor, ridge: float) -> Tensor:
    """Return (n, k) the dual solution: what the decoder adds of each of n gradients, whose ``products`` are (n, n)."""
    eye = torch.eye(len(products), dtype=products.dtype)
    return torch.as_tensor(torch.linalg.solve(products + ridge * products.diagonal().mean() * eye, wanted))


def _gradients(
    model: nn.Module,
    loss: Loss,
    parameters: dict[str, Tensor],
    constants: dict[str, Tensor],
    inputs: Tensor,
    labels: Tensor,
) -> Tensor:
    """Return (n, numbers) every example's own gradient, differentiable."""

    def one(state: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return loss(functional_call(model, {**state, **constants}, (x[None],)), y[None])

    found = vmap(grad(one), in_dims=(None, 0, 0))(parameters, inputs, labels)
    return torch.cat([found[name].flatten(1) for name in parameters], dim=1)


class _Draw(NamedTuple):
    """Draws public examples, half of them with the property, with noise, flips and random labels."""

    public: Tensor
    classes: int
    batch: int
    chosen: str
    noise: float
    rng: torch.Generator

    def __call__(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return (count, ...) inputs, labels, and (count, numbers + 1) what the decoder is to make of each."""
        sign = 1.0 if self.chosen == "bright" else -1.0
        values = sign * self.public.flatten(1).mean(dim=1)
        cut = values.quantile(1 - 1 / self.batch)
        above, below = (torch.nonzero(of)[:, 0] for of in (values > cut, values <= cut))
        rows = torch.cat([of[torch.randint(len(of), (count // 2,), generator=self.rng)] for of in (above, below)])
        shape = (count, *[1] * (self.public.ndim - 1))
        noise = torch.randn((count, *self.public.shape[1:]), generator=self.rng)
        noise = noise - noise.flatten(1).mean(dim=1).view(shape)
        inputs = self.public[rows] + self.noise * torch.rand(shape, generator=self.rng) * noise
        inputs = torch.where(torch.rand(shape, generator=self.rng) < 0.5, inputs, inputs.flip(-1))
        labels = torch.randint(self.classes, (count,), generator=self.rng)
        has = (sign * inputs.flatten(1).mean(dim=1) > cut).float()[:, None]
        return inputs, labels, has * torch.cat([inputs.flatten(1), torch.full((count, 1), _COUNT)], dim=1)


@register
class Seer(ClosedForm):
    """Decodes the one image of a batch that ``seer``'s server trained its weights for (Garov et al. 2024).

    The sum of the batch's gradients goes through the decoder that the server trained with the weights. Its last output
    is how many examples have the property: of one, the image comes out; of several, their mean; of none, nothing that
    means anything. Of weights after local training the update is taken for one batch's gradient. The label is a guess:
    the one with which the image's own gradient explains most of what was sent.
    """

    name = "seer"
    summary = "the one image of a batch that a secret decoder sees, by weights that were trained for it"
    paper = "Garov et al. 2024 (Hiding in plain sight)"
    threat_model = "malicious server, active"
    needs = (
        "images and a classifier without BatchNorm in train mode",
        "a server that trains the weights for it (federations[].server: seer), on public examples",
    )
    standards = (*ALTERED_MODELS, "AML.T0018")
    uses = ("one batch",)

    @classmethod
    def fits(cls, case: Case) -> bool:
        return case.server == cls.name and case.classifies(cls.examples)

    def _prepare(self, observation: Observation) -> Tensor:
        """Return the sum of the examples' gradients, as the decoder reads it."""
        message, log = observation.single(), observation.adversary_log
        if f"{_LOG}decoder" not in log:
            raise NotApplicable(
                "the server has no decoder; set threat.adversary: malicious-server and federations[].server: seer"
            )
        update, names = message.update, [n for n, p in observation.module.named_parameters() if p.requires_grad]
        if update.sanitised is not None and update.sanitised.signs:
            raise NotApplicable("seer needs the sizes of an update's numbers, and only their signs were sent")
        for name in names:
            if name not in update.tensors:
                raise NotApplicable(f"the update lacks '{name}', which the decoder reads")
        if update.kind == "weights" and update.training is None:
            raise NotApplicable("seer needs to know how the client trained; set threat.knows_training: true")
        gradient = one_batch_gradient(update, "cpu", message.weights)
        whole = torch.cat([gradient[name].flatten().float() for name in names])[log[f"{_LOG}entries"]]
        if not bool(whole.any()) or not bool(torch.isfinite(whole).all()):
            raise NotApplicable("the update is zero throughout, or not finite: it carries nothing to decode")
        return whole * update.num_examples

    def _run(self, observation: Observation, _generator: torch.Generator, _device: str, progress: Progress) -> Finding:
        summed = self._prepare(observation)
        decoded = observation.adversary_log[f"{_LOG}decoder"] @ summed
        count = float(decoded[-1]) / _COUNT
        inputs = (decoded[:-1] / max(count, 0.5))[None]
        progress(1, 1)
        notes = (f"by the decoder's count {count:.2g} of the update's examples have the property that it was made for",)
        return self._returned(observation, inputs, self._label(observation, inputs, summed), None, notes)

    def _label(self, observation: Observation, inputs: Tensor, summed: Tensor) -> Tensor:
        """Return (1,) the label with which the decoded image's gradient is most like the update."""
        info, message = observation.task_info, observation.single()
        names = [n for n, p in observation.module.named_parameters() if p.requires_grad]
        parameters = {name: message.weights[name] for name in names}
        constants = {name: t for name, t in message.weights.items() if name not in parameters}
        labels = torch.arange(info.num_classes or 1)
        image = inputs.view(1, *info.input_shape).expand(len(labels), *[-1] * len(info.input_shape))
        found = _gradients(observation.module, observation.loss, parameters, constants, image, labels)
        found = found.detach()[:, observation.adversary_log[f"{_LOG}entries"]]
        missed = (found - summed).norm(dim=1).nan_to_num(nan=math.inf)
        return torch.as_tensor(missed.argmin())[None]
