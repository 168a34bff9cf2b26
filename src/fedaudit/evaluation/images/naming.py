"""Which picture, or which person, a reconstruction names: by its pixels, by its pattern, and by an embedding.

A picture need not be sharp to name somebody. Where persons are known, a reconstruction is held against other pictures
of theirs, as many of each, and the one attacked isn't among them; else against the true one and held-out ones of its
class. Half of the held-out ones teach the embedding, and no picture is looked for among these: what a network has seen
looks other to it, so they would be no rivals. Persons' pictures do both, for then all persons' have been seen.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from fedaudit.evaluation.images.embedding import FEWEST, embedded, shrunk, taught, worth_teaching
from fedaudit.evaluation.images.registration import without_colour
from fedaudit.evaluation.images.scores import squared_distances
from fedaudit.evaluation.images.space import Case
from fedaudit.results import ImageResult, NamedResult
from fedaudit.utils.fingerprint import tensor_digest
from fedaudit.utils.seeds import generator

_OTHERS = 200  # pictures of a class, at random
_TAUGHT = 2000  # pictures that teach, at random


def with_names(
    case: Case, rows: Tensor, scores: Sequence[ImageResult], held: Sequence[int], seed: int
) -> list[ImageResult]:
    """Return the scores of the distinct true examples with what their reconstructions name.

    Args:
        rows: of the images.
        held: places of the candidates that no update was made from.
    """
    candidates, labels, persons = case.truth.candidates, case.truth.candidate_labels, case.truth.candidate_persons
    if not case.pictures or not held:
        return list(scores)
    known = len(persons) > 0
    who = persons if known else torch.arange(len(candidates))
    first: dict[bytes, int] = {}
    for place, picture in enumerate(candidates):
        first.setdefault(tensor_digest(picture), place)
    own = {i: first[name] for i in case.uses if (name := tensor_digest(case.true[i])) in first}
    others = torch.tensor(sorted(set(held) & set(first.values())), dtype=torch.int64)
    others = others[torch.randperm(len(others), generator=generator(seed, "naming"))]
    teaching, places = (_of_persons if known else _of_pictures)(others, who, labels, list(own.values()))
    shown, pictures = who[places], candidates[places]
    network = theirs = None
    if len(teaching) >= FEWEST and worth_teaching(case.finding.iterations):
        network = taught(candidates[teaching], who[teaching], seed)
        theirs = embedded(network, pictures)
    patterns, vectors = without_colour(shrunk(pictures)).float(), case.kind.vectors(pictures)
    found = []
    for i, score in zip(case.uses, scores, strict=True):
        if i not in own or not bool((shown == who[own[i]]).any()):
            found.append(score)
            continue
        image, person, label = case.finding.images[rows[i], None], who[own[i]], int(labels[own[i]])
        of_class = who[labels == label]
        rivals = shown[torch.isin(shown, of_class)].unique()
        paired = sum(case.places[i][0] == key for key, _ in case.places)
        chance = max(
            paired / len(rivals), paired * float((of_class == person).double().mean()), score.chance_level or 0
        )
        if len(rivals) == 1:  # the label names it
            rivals, chance = shown.unique(), 1.0

        def rank(likeness: Tensor, person: Tensor = person, rivals: Tensor = rivals) -> int:
            best = torch.stack([likeness[shown == one].max() for one in rivals])
            own_best = best[rivals == person]
            return int((best >= own_best).sum()) if bool(own_best.isfinite()) else len(rivals)

        named = NamedResult(
            of="person" if known else "image",
            candidates=len(rivals),
            chance_level=min(1.0, chance),
            pixel=rank(-squared_distances(case.kind.vectors(image)[0], vectors)),
            pattern=rank((_shifted(shrunk(image)) @ patterns.T).amax(dim=0)),
            embedding=None if network is None or theirs is None else rank(theirs @ embedded(network, image)[0]),
        )
        found.append(score.model_copy(update={"named": named}))
    return found


def _of_persons(others: Tensor, who: Tensor, _labels: Tensor, _own: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the places of pictures that teach, and of those that are compared: as many of each person."""
    each = [others[who[others] == one] for one in who[others].unique().tolist()]
    least = min(max(1, _TAUGHT // len(each)), *map(len, each))
    chosen = torch.cat([of[:least] for of in each])
    return chosen, chosen


def _of_pictures(others: Tensor, _who: Tensor, labels: Tensor, own: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the same: half of the others, and the true ones with more of their classes."""
    half = len(others) // 2 if len(others) // 2 >= FEWEST else 0
    rest, true = others[half:], torch.tensor(own, dtype=torch.int64)
    of_classes = [rest[labels[rest] == label][:_OTHERS] for label in labels[true].unique()]
    return others[:half][:_TAUGHT], torch.cat([true.unique(), *of_classes])


def _shifted(image: Tensor) -> Tensor:
    """Return (3^axes, d) patterns of a picture (1, C, ...), each a pixel at most along each axis from where it is."""
    axes, moved = image.ndim - 2, []
    wide = functional.pad(image, (1, 1) * axes, mode="replicate")
    for starts in itertools.product(range(3), repeat=axes):
        window = tuple(slice(start, start + side) for start, side in zip(starts, image.shape[2:], strict=True))
        moved.append(wide[(slice(None), slice(None), *window)])
    return without_colour(torch.cat(moved)).float()
