"""Geminio (Shan et al. 2025): weights trained so that the examples that match a query dominate a batch's gradient."""

from __future__ import annotations

import math
from dataclasses import field
from typing import Literal

import torch
from torch import Tensor, nn

from fedaudit.attacks import register
from fedaudit.simulation import FAILURES, ServerBehaviour, ServerStep, local_randomness, trainable
from fedaudit.task import LocalPlan, TaskInfo
from fedaudit.utils import BadInput, Count, Positive, Whole

_LEAST, _MATCHING = 64, 8  # public examples, and those of the class among them
_TINY = 1e-8  # what the authors' code adds to every loss


@register(frozen=False)
class GeminioServer(ServerBehaviour):
    """Trains the weights so that of a batch the examples that match a query have all of the loss (Shan et al. 2025).

    What is minimised, of a batch of public examples, is Σ L(F(xᵢ), yᵢ)·(1 − αᵢ) / Σ L(F(xᵢ), yᵢ), where α is the
    softmax over the batch of ``sharpness``·sᵢ and sᵢ says how well an example matches the query: the share of the loss
    that the other examples have. So these are classified well, the matching ones as badly as can be, and a client's
    gradient is nearly that of the matching ones. It has no attack of its own: ordinary inversions are run on that.

    Departures. The paper's s is the similarity of image and text by CLIP, times 100; here it is what a server can tell
    without a vision-language model: 1 for examples of a class and 0 for others, or the mean of the pixels over its
    standard deviation. The authors' code trains three new layers behind a network that was pretrained on ImageNet; here
    all weights are trained, from those that an honest server would send, and for longer. The losses' sum in the
    divisor is that code's: without it, by Σ L·(1 − α) alone, matching examples are only taken out of the training.
    ``most`` is ours: without a bound the matching examples' losses grow to hundreds, which a client notices.

    It trains once, in round ``start``, from the weights that an honest server would send, and sends the same from then
    on; before, it is honest.

    Args:
        chosen: the query: examples of a class, or bright or dark ones.
        target: the class, where the query is one.
        sharpness: what s is multiplied by.
        epochs: passes over the public examples; the authors' code has 5.
        batch: public examples of a step, as many as in that code.
        learning_rate: of Adam.
        most: of an example's loss, in nats: what is more doesn't count; None: there is no bound, as in that code.
        start: the round, from 0, in which it begins.
    """

    name = "geminio"
    summary = "weights trained so that examples that match a query dominate the gradient"
    paper = "Shan et al. 2025 (Geminio)"

    chosen: Literal["class", "bright", "dark"] = "class"
    target: Whole = 0
    sharpness: Positive = 10.0
    epochs: Count = 20
    batch: Count = 16
    learning_rate: Positive = 0.001
    most: Positive | None = None
    start: Whole = 0

    weights: dict[str, Tensor] = field(default_factory=dict, init=False)

    def check(self, model: nn.Module, task_info: TaskInfo, plan: LocalPlan) -> None:  # noqa: ARG002
        """Refuse what has no classes, or not the target; and brightness of what has none."""
        classes = task_info.num_classes
        if classes is None or task_info.outputs < classes or task_info.causal:
            raise BadInput("geminio is for classifiers; leave server out")
        if self.chosen == "class" and self.target >= classes:
            raise BadInput(f"server.target is {self.target}; the classes are 0 to {classes - 1}")
        if self.chosen != "class" and not task_info.example_kind.resizable:
            raise BadInput(f"server.chosen: {self.chosen} is for images; set chosen: class")
        if self.batch == 1:
            raise BadInput("server.batch is 1, and a loss is shared among the examples of a batch; set it to 16")

    def __call__(self, step: ServerStep) -> dict[str, Tensor]:
        """Return the trained weights, from round ``start`` on."""
        if step.round < self.start:
            return step.weights
        if not self.weights:
            try:
                self._train(step)
            except FAILURES as error:
                if isinstance(error, BadInput):
                    raise
                raise BadInput(
                    f"geminio can't train this model: {type(error).__name__}: {str(error)[:200]}; choose another model"
                ) from error
        return step.weights | self.weights

    def _train(self, step: ServerStep) -> None:
        inputs, targets = self._public(step)
        matches = self.sharpness * self._scores(inputs, targets)
        model = step.model.cpu()
        model.load_state_dict(step.weights)
        optimiser = torch.optim.Adam(trainable(model).values(), lr=self.learning_rate)
        with local_randomness(step.round), torch.enable_grad():
            for _ in range(self.epochs):
                for rows in torch.randperm(len(inputs), generator=step.generator).split(self.batch):
                    if len(rows) == 1:
                        continue  # it has all of the loss
                    outputs, wanted = model(inputs[rows]), targets[rows]
                    each = [step.loss(outputs[i : i + 1], wanted[i : i + 1]) for i in range(len(rows))]
                    losses = torch.stack(each).clamp(max=self.most or math.inf) + _TINY
                    others = (losses * (1 - matches[rows].softmax(dim=0))).sum() / losses.sum()
                    optimiser.zero_grad()
                    others.backward()
                    optimiser.step()
        self.weights.update({name: tensor.detach().clone() for name, tensor in model.state_dict().items()})

    def _public(self, step: ServerStep) -> tuple[Tensor, Tensor]:
        """Return the public examples and their classes, if they are enough."""
        inputs, targets = step.public, step.public_targets
        count = 0 if inputs is None else len(inputs)
        of_class = _MATCHING if targets is None or self.chosen != "class" else int((targets == self.target).sum())
        if inputs is None or targets is None or count < _LEAST or of_class < _MATCHING:
            among = "" if self.chosen != "class" else f", {_MATCHING} of class {self.target} among them"
            raise BadInput(
                f"geminio trains on {_LEAST} public examples or more{among}; set threat.knows_public_data: true, and "
                "threat.public_examples, to 1000 for example"
            )
        return inputs, targets

    def _scores(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return (n,) how well each example matches the query."""
        if self.chosen == "class":
            return (targets == self.target).float()
        brightness = inputs.flatten(1).mean(dim=1)
        return (1 if self.chosen == "bright" else -1) * brightness / brightness.std().clamp(min=_TINY)
