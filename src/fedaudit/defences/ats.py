"""ATS: clients train on transformed images, by a policy whose gradients tell little of them and teach enough."""

from __future__ import annotations

import copy
from dataclasses import field
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from fedaudit.defences.client_defences import ClientContext, ClientDefence, OwnExamples, changed
from fedaudit.task.info import TaskInfo
from fedaudit.task.training import Loss
from fedaudit.task.transforms import STRENGTHS, TRANSFORMS, parsed, transformed
from fedaudit.transcript.update import ClientDefenceInfo, Update
from fedaudit.utils.registry import register
from fedaudit.utils.validation import Count, Whole

_STEPS = 20  # K of S_pri
_TINY = 1e-5  # ε of S_acc


@register(frozen=False)
class ATS(ClientDefence):
    """Trains on images that a policy transformed (Gao et al. 2021, automatic transformation search).

    In each of a client's rounds one of ``policies`` is drawn, for all of its examples; the update is sent as it comes.
    The default is what the paper found for CIFAR-100 on ResNet-20, 3-1-7 + 43-18-18 of its library, by name.

    With ``search`` the client looks for two policies in its first round, on up to ``images`` of its own: of so many
    random policies of three transformations, those whose accuracy score is below the median are left out, and the two
    of least privacy score S_pri are taken. S_pri is the mean over j < K = 20 of the cosine between the
    gradient of T(x) and that of ((K − j)·noise + j·T(x))/K: small where gradients say little about how near an image
    is. S_acc is −Σ log(σ + ε) + 1/(σ + ε) over the eigenvalues σ of the correlation of the Jacobians of the
    summed outputs: large where the network, untrained, tells the images apart.

    Departures: both scores are of the model that the client received, where the paper has a partly trained and an
    untrained one; the threshold on S_acc is the median, for its own, −85, is for 100 images of one data set; a policy
    is drawn for a round, not for an image; a library of twelve kinds (:data:`.TRANSFORMS`), whose signs are fixed. An
    attack is told which policy was drawn: of two, it could try both.

    Args:
        policies: one is drawn in each round; each as ``translate-x:9, contrast:6, translate-y:2``.
        search: policies that are tried instead; 0 takes those that are given.
        images: of the client's first batches, by which they are scored.

    Raises:
        BadInput: no such transformation or magnitude.
    """

    name = "ats"
    summary = "ATS: trains on images transformed by policies that are given or searched for; promises no ε"
    paper = "Gao et al. 2021 (ATS)"
    augments = True
    needs_examples = True

    policies: Annotated[list[str], Field(min_length=1)] = field(
        default_factory=lambda: ["translate-x:9, contrast:6, translate-y:2", "translate-y:3, contrast:7, contrast:7"]
    )
    search: Whole = 0
    images: Count = 16

    found: list[str] = field(default_factory=list, init=False)
    drawn: str = field(default="", init=False)  # of this round

    def __post_init__(self) -> None:
        for policy in self.policies:
            parsed(policy)

    def augment(self, own: OwnExamples, task_info: TaskInfo, generator: torch.Generator) -> list[tuple[Tensor, Tensor]]:
        """Return the transformed batches.

        Raises:
            BadInput: the examples aren't images.
        """
        if not self.found:
            self.found = self._search(own, task_info, generator) if self.search else list(self.policies)
        self.drawn = self.found[int(torch.randint(len(self.found), (), generator=generator))]
        return [(transformed(self.drawn, inputs, task_info), targets) for inputs, targets in own.batches]

    def __call__(self, update: Update, context: ClientContext, generator: torch.Generator) -> Update:  # noqa: ARG002
        """Return the update as it is, with the policy that everybody is told."""
        return changed(update, dict(update.tensors), ClientDefenceInfo(self.name, transform=self.drawn))

    def _search(self, own: OwnExamples, task_info: TaskInfo, generator: torch.Generator) -> list[str]:
        model = copy.deepcopy(own.model).eval()
        inputs, targets = (torch.cat(list(part))[: self.images] for part in zip(*own.batches, strict=True))
        scored = []
        for policy in dict.fromkeys(random_policy(generator) for _ in range(self.search)):
            seen = transformed(policy, inputs, task_info).detach()
            noise = torch.rand(seen.shape, generator=generator).to(seen)
            privacy = privacy_score(model, own.loss, seen, targets, task_info.normalise(noise))
            scored.append((accuracy_score(model, seen), privacy, policy))
        scored.sort(reverse=True)
        best = sorted(scored[: max(1, (len(scored) + 1) // 2)], key=lambda one: one[1])
        return [policy for _, _, policy in best[:2]]


def random_policy(generator: torch.Generator) -> str:
    """Return a policy of three transformations."""
    names, steps = list(TRANSFORMS), []
    for _ in range(3):
        which = int(torch.randint(len(names), (), generator=generator))
        steps.append(f"{names[which]}:{int(torch.randint(STRENGTHS, (), generator=generator))}")
    return ", ".join(steps)


def privacy_score(model: nn.Module, loss: Loss, images: Tensor, targets: Tensor, noise: Tensor) -> float:
    """Return S_pri, the mean cosine of gradients over images and steps; less is more private.

    Args:
        images: (n, C, H, W) T(x), normalised.
        noise: (n, C, H, W) where each way to T(x) begins.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]

    def gradient(image: Tensor, target: Tensor) -> Tensor:
        value = loss(model(image), target)
        grads = torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
        return torch.cat([g.reshape(-1) for g in grads])

    total = 0.0
    for image, target, start in zip(images.split(1), targets.split(1), noise.split(1), strict=True):
        end = gradient(image, target)
        for j in range(_STEPS):
            own = gradient(start + j / _STEPS * (image - start), target)
            total += float(torch.cosine_similarity(own, end, dim=0))
    return total / (_STEPS * len(images))


def accuracy_score(model: nn.Module, images: Tensor) -> float:
    """Return S_acc, from the Jacobians' correlation on normalised images T(x) (n, C, H, W); more is more accurate."""
    leaf = images.detach().clone().requires_grad_()
    (jacobian,) = torch.autograd.grad(model(leaf).sum(), leaf)
    rows = jacobian.flatten(1).double()
    rows = rows - rows.mean(dim=1, keepdim=True)
    rows = rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-30)
    values = torch.linalg.eigvalsh(rows @ rows.T).clamp(min=0) + _TINY
    return -float((values.log() + 1 / values).sum())
