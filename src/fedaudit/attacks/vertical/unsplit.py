"""UnSplit: the client's images, and a network like its own, from what it sends in split learning."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedaudit.attacks.base import Attack, Case, Progress, register
from fedaudit.attacks.findings import ImageFinding
from fedaudit.attacks.inversion.priors import total_variation
from fedaudit.models import VerticalModel, initialise
from fedaudit.task.info import TaskInfo
from fedaudit.transcript.observation import Observation
from fedaudit.transcript.vertical import VerticalRecord
from fedaudit.utils.errors import NotApplicable
from fedaudit.utils.validation import Count, NonNegative, Positive, Whole


@dataclass(frozen=True, kw_only=True)
class Descent:
    """How the two are found, in turn; see :class:`UnSplit`, whose settings these are."""

    iterations: int
    input_steps: int
    model_steps: int
    learning_rate: float
    tv_weight: float

    def __call__(
        self, surrogate: nn.Module, target: Tensor, info: TaskInfo, progress: Progress
    ) -> tuple[Tensor, float]:
        """Train ``surrogate`` to give ``target`` (m, ...); return images (m, C, H, W) in [0, 1] and the last error."""
        low, high = info.example_kind.bounds or (0.0, 1.0)
        images = torch.full((len(target), *info.input_shape), (low + high) / 2, device=target.device).requires_grad_()
        weights = [p.requires_grad_() for p in surrogate.parameters()]
        of_images = torch.optim.Adam([images], lr=self.learning_rate, amsgrad=True)
        of_weights = torch.optim.Adam(weights or [torch.zeros(1)], lr=self.learning_rate, amsgrad=True)

        def distance(candidates: Tensor) -> Tensor:
            given = torch.as_tensor(surrogate(info.normalise(candidates)))
            return (given - target).square().flatten(1).mean(dim=1)

        for done in range(self.iterations):
            for _ in range(self.input_steps):
                value = distance(images).sum() + self.tv_weight * len(images) * total_variation(images)
                (images.grad,) = torch.autograd.grad(value, images)
                of_images.step()
                with torch.no_grad():
                    images.clamp_(low, high)
            for _ in range(self.model_steps if weights else 0):
                of_weights.zero_grad()
                distance(images.detach()).mean().backward()
                of_weights.step()
            progress(done + 1, self.iterations)
        with torch.no_grad():
            return images.detach(), float(distance(images).mean())


@register
class UnSplit(Attack):
    """UnSplit (Erdoğan, Küpçü and Çiçek 2022, Algorithm 1): model inversion and stealing by coordinate descent.

    The server follows the protocol and knows the architecture of the client's part f, not its weights θ. It looks for
    images x and weights θ̃ that give what the client sent, z: by turns ``input_steps`` steps of Adam on

        x ← argmin MSE(f(θ̃, x), z) + ``tv_weight``·TV(x)    and ``model_steps`` on    θ̃ ← argmin MSE(f(θ̃, x), z).

    Departures: all examples of the federation share one θ̃, where the published code takes them one after the other with
    a network that it keeps; of each counts what was sent last, so a client that learns between the rounds blurs z.
    Pixels stay in [0, 1]. TV is the mean absolute difference of neighbouring pixels; the published code also has the
    image's L2 norm. Its 1,000 turns of 100 steps each at a rate of 0.001 are fewer here, at a larger one.

    Args:
        iterations: turns.
        input_steps: steps on the images in each.
        model_steps: steps on the weights in each.
        learning_rate: of Adam (with AMSGrad), on pixels in [0, 1] and on weights.
        tv_weight: of the total variation.
    """

    name = "unsplit"
    summary = "images of a split-learning client, and its network, from what it sends: by an honest-but-curious server"
    paper = "Erdoğan et al. 2022 (UnSplit: Data-Oblivious Model Inversion, Model Stealing, and Label Inference)"
    threat_model = "server or eavesdropper, passive"
    needs = ("split learning (algorithm: split) of images", "the architecture of the client's part")
    default_scope = "federation"
    examples = ("image",)
    finds = ImageFinding
    reads = VerticalRecord
    on_sums = "refused: it is for vertical federations, where there are none"

    iterations: Count = 100
    input_steps: Count = 10
    model_steps: Whole = 10
    learning_rate: Positive = 0.01
    tv_weight: NonNegative = 0.1

    @classmethod
    def fits(cls, case: Case) -> bool:
        return case.cut and case.threat.adversary in ("server", "eavesdropper") and case.kind in cls.examples

    def check(self, observation: Observation) -> None:
        """Raise where nothing of whole images is sent, or the adversary doesn't read it."""
        super().check(observation)
        need_split(self.name, observation)

    def _run(
        self, observation: Observation, generator: torch.Generator, device: str, progress: Progress
    ) -> ImageFinding:
        record, module = observation.sent, observation.module
        assert isinstance(record, VerticalRecord)
        assert isinstance(module, VerticalModel)
        surrogate = copy.deepcopy(module.parties[0])
        initialise(surrogate, "default", generator)
        descent = Descent(**self.settings())
        images, value = descent(
            surrogate.to(device).eval(), record.last_embeddings().to(device), observation.task_info, progress
        )
        return split_images(observation, images, value, self.iterations)


def need_split(attack: str, observation: Observation) -> None:
    """Raise NotApplicable unless a server, or an eavesdropper, reads what a split-learning client sends."""
    record = observation.sent
    assert isinstance(record, VerticalRecord)
    if record.spec.cut is None:
        raise NotApplicable(
            f"{attack} inverts what the first layers make of whole images, and these parties hold parts of them; set "
            "federations[].algorithm: split and vertical.cut"
        )
    if record.party is not None:
        raise NotApplicable(
            f"{attack} is for who doesn't have the images, and the client has; set threat.adversary=server"
        )


def split_images(observation: Observation, images: Tensor, objective: float, iterations: int) -> ImageFinding:
    """Return the finding of images (m, ...), one of each example that was used, with the labels that a server has."""
    record = observation.sent
    assert isinstance(record, VerticalRecord)
    known = record.labels is not None
    labels = record.labels[record.used] if record.labels is not None else torch.zeros(len(images), dtype=torch.int64)
    return ImageFinding(
        images=images.cpu(),
        labels=labels,
        label_source="the server's own" if known else "none",
        objective=objective,
        iterations=iterations,
    )
