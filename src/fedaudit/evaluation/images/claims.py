"""What an attack says of its images beside showing them: that they are exact, and which are one client's."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.metrics import adjusted_rand_score

from fedaudit.evaluation.finding_types import Metric
from fedaudit.evaluation.images.space import ROUNDING, Case
from fedaudit.results import MetricResult
from fedaudit.utils.fingerprint import tensor_digest
from fedaudit.utils.seeds import derive_seed

CERTIFIED_MSE = (0.5 / 255) ** 2  # half a grey level: what a certified image may be off by
GROUPED_MSE = (1 / 255) ** 2  # one grey level: what an image may be off by whose client is asked for
_GROUPINGS = 999  # at random: the least p-value is 1 in 1,000
ADJUSTED_RAND = Metric(
    "adjusted_rand",
    "agreement of groups of images with the clients that they are of, chance taken off (Hubert and Arabie 1985)",
    ends=(-1.0, 1.0),
)
SAME_CLIENT = Metric(
    "same_client_pairs",
    "share of the pairs of images in one group that are one client's; without the attack: in groups at random",
    ends=(0.0, 1.0),
)


def wrongly_certified(case: Case) -> int | None:
    """Return how many certified images are none of their client's; None: the attack vouches for none.

    Up to half a grey level (root mean square); without a range, half a 255th of a standard deviation, or of the
    example's own size where that is less, as the model sees it, and the rounding of what was found.
    """
    finding, truth = case.given
    if finding.certified is None:
        return None
    wrong, free = 0, case.kind.bounds is None
    seen = case.info.normalise if free else torch.clone
    for part in case.parts:
        inputs = truth.inputs[part.key].double()
        vouched = finding.images[part.rows[finding.certified[part.rows]]].double()
        true, own = (seen(x).flatten(1) for x in (inputs, vouched))
        least = CERTIFIED_MSE * (true.square().mean(dim=1).clamp(max=1.0) if free else torch.ones(len(true)))
        rounded = (seen(inputs * (1 + ROUNDING)).flatten(1) - true).abs()
        for image in own:
            off = ((true - image).abs() - rounded).clamp(min=0)
            wrong += int((off.square().mean(dim=1) > least).all())
    return wrong


def grouped(case: Case, seed: int) -> tuple[list[MetricResult], list[str]]:
    """Return how well images were grouped by client, and what luck would do, in a sentence; nothing where they weren't.

    An image is its nearest example's; one that is a grey level or more off from all counts as a client of its own. What
    there is without the attack, and the test, come from random groupings of the same sizes.
    """
    finding, truth = case.finding, case.truth
    if finding.groups is None or not truth.members:
        return [], []
    held: dict[bytes, int] = {}
    for key, _ in case.parts:
        held |= {tensor_digest(x): int(c) for x, c in zip(truth.inputs[key], truth.members.get(key, []), strict=False)}
    kept, true = torch.nonzero(finding.groups >= 0)[:, 0], case.true
    far = torch.cdist(finding.images[kept].flatten(1).double(), true.flatten(1).double())
    nearest, near = far.argmin(dim=1), far.amin(dim=1).square() / true[0].numel() <= GROUPED_MSE
    owners = np.array(
        [held[tensor_digest(true[i])] if ok else -1 - n for n, (i, ok) in enumerate(zip(nearest, near, strict=True))]
    )
    groups = finding.groups[kept].numpy()
    if len(groups) < 2 or len(np.unique(owners)) == 1:
        return [], [f"{len(groups)} images, of which grouping by client is no question"]
    rng = np.random.default_rng(derive_seed(seed, "groups"))
    own = _pairs(groups, owners)
    lucky = np.array([_pairs(groups, rng.permutation(owners)) for _ in range(_GROUPINGS)])
    index, chance_level = adjusted_rand_score(owners, groups), lucky.mean()
    p = (1 + int((lucky >= own).sum())) / (1 + _GROUPINGS)
    together = _pairs(groups, groups)
    metrics = [ADJUSTED_RAND.of(float(index), 0.0, n=len(groups), of="images")]
    if together:
        metrics.append(SAME_CLIENT.of(own / together, chance_level / together, n=together, of="pairs of images"))
    told = f"{own} of {together} pairs that it put into one group are one client's"
    return metrics, [f"{told}; of groups of the same sizes at random {chance_level:.1f}, and as many with p = {p:.2g}"]


def _pairs(groups: np.ndarray, owners: np.ndarray) -> int:
    """Return how many pairs are in one group and one owner's."""
    return int(np.triu((groups[:, None] == groups) & (owners[:, None] == owners), 1).sum())
