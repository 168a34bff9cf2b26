"""Closed forms behind a first layer: one example, a batch of a one-layer model, a ViT's patches, its attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedaudit.attacks.analytic.first_layer import (
    ClosedForm,
    Recovered,
    comparable,
    first_layer,
    in_range,
    layer_product,
    own_labels,
    own_targets,
    rounding_of,
)
from fedaudit.attacks.analytic.patches import CERTIFIED, LEFT_OVER, attended, attends, patch_embedding, patches_of
from fedaudit.attacks.base import SEARCHED, Case, Progress, register
from fedaudit.attacks.findings import Finding, RowFinding
from fedaudit.attacks.victim import as_trained
from fedaudit.transcript.observation import Observation
from fedaudit.utils.errors import NotApplicable

_OWN = 0.02  # relative distance up to which an example's own gradient is the observed one
_STEPS, _DAMPING, _STILL = 2000, 0.5, 1e-12  # of the fixed point
_DIVERGED = 1e6


@register
class ExactLinear(ClosedForm):
    """Closed forms behind a first fully connected layer: no optimiser, and known to be right.

    - One example (Phong et al. 2018; Geiping et al. 2020, Proposition 3.1): ∂L/∂W_i = ∂L/∂b_i · x, so x is the ratio of
      the two in any row; here of all rows, by least squares. For any model that begins with such a layer, whatever
      follows it.
      Rows of a regression, too: the target follows from the derivative of the squared error.
    - A batch with labels that all differ, fewer than there are classes, in a one-layer model with cross-entropy: the
      rows are Σ_i (p_ic − y_ic)·x_i / b, class by class. Where p is small, the row of a class is its example's; here p
      is solved for, too: the inputs give the probabilities p, and these the inputs, by least squares, until both agree.
    - One image before a ViT's patch embedding: the gradient of the position embedding is ∂L/∂z of each patch (the
      observation that APRIL builds on, Lu et al. 2022), and that of the embedding is Σ_p ∂L/∂z_p · x_pᵀ, which is
      linear in the patches x_p. This needs more channels than patches.
    - One image before a first attention that receives embedded patches and positions as they are, without LayerNorm or
      a shortcut (APRIL's closed form, Theorem 1): the gradients of query, key and value and of the position embedding
      give what the attention receives, and a linear embedding, whatever its layers, the image. It is taken where the
      form above isn't: patches that no convolution cuts out, or an embedding that isn't trained. It needs more channels
      than tokens.

    An answer is certified, without the truth, where it explains the layer's gradient up to its noise, there are more
    equations than unknowns, its own gradient is the observed one (of one example, where that can be computed), and its
    estimated error is below an eighth of a grey level: of 1/255 of the range of values; where there is no
    range, as of signals, of a standard deviation, or of the example's own root mean square where that is less.
    """

    name = "exact-linear"
    summary = "closed form: a fully connected layer first, a ViT's patches, or its first attention"
    paper = "Phong et al. 2018; Geiping et al. 2020; Lu et al. 2022 (APRIL)"
    examples: ClassVar[tuple[str, ...]] = SEARCHED
    needs = (
        "images, volumes, signals, or examples of several inputs, and a classifier",
        "one example in an update and a model that begins with a fully connected layer with a bias, or with a ViT's "
        "patch embedding or an attention; or a batch of different labels and a model of one layer",
    )

    @classmethod
    def fits(cls, case: Case) -> bool:
        return case.solves(cls.examples) and case.examples == 1

    def _prepare(self, observation: Observation) -> Callable[[], Recovered]:
        """Return what the form that fits gives."""
        message, task_info = observation.single(), observation.task_info
        module = as_trained(observation.module, task_info, message.weights)
        embedding = patch_embedding(module, task_info)
        if embedding is not None and (embedding.weight in message.update.tensors or not attends(module, task_info)):
            found = patches_of(module, observation, self.name)
            return lambda: found
        try:
            layer = first_layer(module, task_info.input_shape)
        except NotApplicable:
            if not attends(module, task_info):
                raise
            return attended(module, observation, self.name)
        product = layer_product(message, layer, self.name)
        if distinct(observation) == 1:
            return partial(recover, module, observation, self.name)
        if layer.module.out_features != task_info.num_classes or layer.relu or not _alone(module, layer.module):
            raise NotApplicable(
                f"{self.name} takes batches of one-layer models only, and this update has {distinct(observation)} "
                "examples; run spear where a ReLU follows the first layer, or audit batch_size: 1"
            )
        if observation.loss is not nn.functional.cross_entropy:
            raise NotApplicable(f"{self.name} solves for a batch's probabilities, and needs plain cross-entropy for it")
        if message.update.kind == "weights" and (
            message.update.training is None or message.update.training.local_steps > 1
        ):
            raise NotApplicable(f"{self.name} takes a batch of one known local step; audit local_steps: 1")
        if message.update.num_examples >= min(task_info.num_classes, product.shape[1]):
            raise NotApplicable(
                f"{self.name} needs fewer examples in a batch than classes: {message.update.num_examples} of "
                f"{task_info.num_classes}; run an attack that optimises (invg, agic)"
            )
        return partial(recover, module, observation, self.name)

    def _run(self, observation: Observation, _generator: object, _device: str, progress: Progress) -> Finding:
        found = self._prepare(observation)()
        progress(1, 1)
        return self._returned(observation, *found)


def distinct(observation: Observation) -> int:
    """Return how many different examples an update is of, at most."""
    update = observation.single().update
    if update.training is not None and update.training.data_size is not None and not update.members:
        return min(update.training.data_size, update.num_examples)
    return update.num_examples


def recover(module: nn.Module, observation: Observation, attack: str) -> Recovered:
    """Return the examples of an update that the check has let through, their numbers in the order of the data."""
    layer = first_layer(module, observation.task_info.input_shape)
    product = layer_product(observation.single(), layer, attack)
    if distinct(observation) > 1:
        inputs, labels, left_over, error = _of_one_layer(product, layer.module, observation)
        sure = (error * in_range(observation.task_info, inputs) <= CERTIFIED) & (left_over <= LEFT_OVER)
        notes = [f"the batch's probabilities and inputs agree up to {left_over:.1g} of the gradient"]
    else:
        column = product[:, -1]
        row = column @ product / column.square().sum().clamp(min=1e-300)
        rest = product - column[:, None] * row
        left_over = float(rest.norm() / product.norm())
        free = max(1, rest.numel() - rest.shape[1] - rest.shape[0])
        # where rounding took all away, nothing is left over either
        noise = (rest.norm() / free**0.5).clamp(min=rounding_of(observation.single(), layer))
        error = noise / column.norm() * (1 + row.square().mean()).sqrt() * torch.ones(1)
        inputs = row[None, :-1]
        own = own_labels if observation.task_info.num_classes is not None else own_targets
        labels, distance = own(module, observation, layer, inputs, column[None])
        sure = error * in_range(observation.task_info, inputs) <= CERTIFIED
        sure &= torch.tensor(left_over <= LEFT_OVER and len(product) > 1)
        training = observation.single().update.training
        if comparable(module, observation) and (training is None or training.local_steps == 1):
            sure &= distance <= _OWN
        notes = [f"one example explains the layer's gradient up to {left_over:.1g} of it"]
    if not bool(sure.all()):
        notes.append("not certified: noise, a defence or other examples are in the update")
    examples = torch.zeros_like(inputs)
    examples[:, layer.places] = inputs
    return Recovered(examples, labels, sure & torch.isfinite(inputs).all(dim=1), tuple(notes))


def _alone(module: nn.Module, layer: nn.Linear) -> bool:
    """Return whether the model has no parameters but the layer's."""
    own = {id(p) for p in layer.parameters()}
    return all(id(p) in own for p in module.parameters())


def _of_one_layer(product: Tensor, layer: nn.Linear, observation: Observation) -> tuple[Tensor, Tensor, float, Tensor]:
    """Return inputs (b, n), labels (b,), the share left unexplained and each input's estimated error (b,).

    The classes whose bias' gradient is most negative count as the batch's, each once.
    """
    count = observation.single().update.num_examples
    granted = observation.single().update.labels
    labels = product[:, -1].argsort()[:count] if granted is None else granted.long()
    truth = nn.functional.one_hot(labels, len(product)).to(product.dtype)
    weight, bias = layer.weight.detach(), layer.bias.detach()
    mean = (product[:, -1] + truth.mean(dim=0)).clamp(min=1e-6)
    chances = (mean / mean.sum()).expand(count, -1).clone()
    mixed = (chances - truth).T / count
    solution = torch.zeros(count, product.shape[1], dtype=product.dtype)
    for step in range(_STEPS):
        mixed = (chances - truth).T / count
        solution = torch.linalg.pinv(mixed) @ product
        inputs = solution[:, :-1]
        if not bool(torch.isfinite(inputs).all()) or float(inputs.abs().max()) > _DIVERGED:
            break
        following = torch.softmax(inputs @ weight.T + bias, dim=1)
        moved = float((following - chances).abs().max())
        chances = chances + (_DAMPING if step else 1.0) * (following - chances)
        if moved < _STILL:
            break
    inputs = solution[:, :-1].nan_to_num()
    whole = torch.cat([inputs, torch.ones(count, 1, dtype=inputs.dtype)], dim=1)
    rest = product - mixed @ whole
    spread = rest.norm() / max(1, rest.numel() - inputs.numel()) ** 0.5
    error = spread * torch.linalg.pinv(mixed).norm(dim=1)
    return inputs, labels, float(rest.norm() / product.norm()), error


@register
class ExactLinearRows(ExactLinear):
    """The closed forms on rows of a table; see :class:`ExactLinear`.

    Only certified rows are returned, where there are any.
    """

    name = "exact-linear-rows"
    summary = "closed form for rows, where the model begins with a fully connected layer"
    paper = "Phong et al. 2018; Geiping et al. 2020"
    examples = ("table",)
    finds = RowFinding
    recovers = "rows of a table"
    needs = (
        "rows",
        "one example in an update and a model that begins with a fully connected layer with a bias; or a batch of "
        "different labels and a classifier of one layer",
    )
    needs_classes = False

    @classmethod
    def fits(cls, case: Case) -> bool:
        return super().fits(case) or (
            case.searchable and case.kind in cls.examples and case.examples == 1 < case.neurons
        )
