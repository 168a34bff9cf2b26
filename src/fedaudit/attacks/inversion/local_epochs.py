"""Updates of several local epochs: each example was used once in every one of them, in an order that isn't known.

Dimitrov, Balunović, Konstantinov and Vechev, Data Leakage in Federated Averaging (TMLR 2022), for images: every epoch
has dummy images of its own, a prior asks all epochs for the same set, and the epochs' images are matched and averaged.
"""

from __future__ import annotations

from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedaudit.attacks.base import Progress
from fedaudit.attacks.findings import Trace
from fedaudit.attacks.inversion.objectives import Objective
from fedaudit.attacks.inversion.reconstruct import reconstruct
from fedaudit.task.training import TrainingConfig


def spread(labels: Tensor, training: TrainingConfig | None) -> Tensor:
    """Return labels, which are known as counts only, so that each mini-batch of an epoch has its share of every one."""
    sizes: list[int] = []
    for size in training.batch_sizes if training else ():
        if sum(sizes) < len(labels):
            sizes.append(size)
    if sum(sizes) != len(labels):
        return labels
    return torch.cat([labels[start :: len(sizes)] for start in range(len(sizes))]) if len(sizes) > 1 else labels


def same_set(epochs: int) -> Objective:
    """Return the epoch-order-invariant prior of Dimitrov et al. 2022: 1/E² Σ ‖g(X_a) − g(X_b)‖² over pairs of epochs.

    g is the mean over an epoch's images, so their order doesn't matter; the squared distance is per pixel. Departure:
    no other aggregate of the paper's. The prior is of (E·n, C, H, W) images, epoch after epoch.
    """

    def prior(images: Tensor) -> tuple[Tensor, Tensor]:
        sets = images.view(epochs, -1, *images.shape[1:])
        means = sets.mean(dim=1, keepdim=True)
        apart = means - means.mean(dim=0, keepdim=True)
        scale = 2 / (epochs * images[0].numel())
        slope = (2 * scale / sets.shape[1]) * apart
        return scale * apart.square().sum(), slope.expand_as(sets).reshape(images.shape)

    return prior


def search_epochs(
    objective: Objective,
    initial: Tensor,
    labels: Tensor,
    epochs: int,
    pixel_range: tuple[Tensor, Tensor],
    generator: torch.Generator,
    progress: Progress,
    *,
    iterations: int,
    separate: float,
    **settings: Any,
) -> tuple[list[Tensor], Trace]:
    """Minimise ``objective``, first with images of each epoch's own, then with images that all epochs share.

    Dimitrov et al. 2022 match and average in the end. Departure, and our own: this happens before the end, after the
    share ``separate`` of the iterations; then the mean images, in the order of the matching, are fitted to the whole
    update. All are (E·n, C, H, W), epoch after epoch, n of them different in the end.
    """
    first = round(separate * iterations)
    rest = iterations - first
    (images,), before = reconstruct(
        objective,
        [initial],
        pixel_range,
        generator,
        lambda done, _: progress(done, iterations),
        iterations=first,
        after=rest,
        **settings,
    )
    example = examples_of(images, labels, epochs)
    (shared,), after = reconstruct(
        _of_shared(objective, example),
        [_means(images[None], example, epochs)[0]],
        pixel_range,
        generator,
        lambda done, _: progress(first + done, iterations),
        iterations=rest,
        before=first,
        **settings,
    )
    progress(iterations, iterations)
    trace = Trace(
        before.iterations[:-1] + [first + done for done in after.iterations],
        before.objective[:-1] + after.objective,
        torch.cat([before.snapshots[:-1], after.snapshots[:, example]]),
    )
    return [shared[example]], trace


def _of_shared(objective: Objective, example: Tensor) -> Objective:
    """Return ``objective`` as a function of (n, C, H, W) images that stand where ``example`` says."""

    def of_shared(images: Tensor) -> tuple[Tensor, Tensor]:
        value, slope = objective(images[example])
        return value, _sums(slope[None], example, len(slope) // len(images))[0]

    return of_shared


def agreed(images: Tensor, labels: Tensor, epochs: int) -> Tensor:
    """Return (s, E·n, C, H, W) images of s stages, each the mean of its example's in all epochs (Dimitrov et al. 2022).

    The first stage decides who is matched.
    """
    if epochs == 1:
        return images
    example = examples_of(images[0], labels, epochs)
    return _means(images, example, epochs)[:, example]


def examples_of(images: Tensor, labels: Tensor, epochs: int) -> Tensor:
    """Return (E·n,) which of the first epoch's n examples each image is of.

    As in Dimitrov et al. 2022 the assignment of least squared error matches every epoch's images to the first's.
    Departure: images of equal label before all others.
    """
    classes = labels.view(epochs, -1)
    vectors = images.view(*classes.shape, -1).double()
    examples = [torch.arange(classes.shape[1])]
    for own, theirs in zip(vectors[1:], classes[1:], strict=True):
        cost = torch.cdist(own, vectors[0]).square()
        cost += (theirs[:, None] != classes[0]) * (1 + cost.sum())
        examples.append(torch.as_tensor(linear_sum_assignment(cost.cpu().numpy())[1]))
    return torch.cat(examples).to(images.device)


def _means(images: Tensor, example: Tensor, epochs: int) -> Tensor:
    """Return (s, n, C, H, W), the mean image of every example at every stage."""
    return _sums(images, example, epochs) / epochs


def _sums(images: Tensor, example: Tensor, epochs: int) -> Tensor:
    rows = example.argsort(stable=True)  # an example's images of all epochs, one after another
    return images[:, rows].view(len(images), -1, epochs, *images.shape[2:]).sum(dim=2)
