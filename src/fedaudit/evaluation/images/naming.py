"""Which picture, or which person, a reconstruction names: by its pixels, by its pattern, and by an embedding.

A picture need not be sharp to name somebody. Where persons are known, a reconstruction is held against other pictures
of theirs, as many of each, and the one attacked isn't among them; else against the true one and held-out ones of its
class. Half of the held-out ones teach the embedding, and nobody is looked for among these: what it has seen looks
other to a network than what it hasn't, so they would be no rivals.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fedaudit.evaluation.images.embedding import FEWEST, shrunk, taught, worth_teaching
from fedaudit.evaluation.images.registration import without_colour
from fedaudit.evaluation.images.scores import squared_distances
from fedaudit.evaluation.images.space import Case
from fedaudit.results import ImageResult, NamedResult
from fedaudit.utils.fingerprint import tensor_digest
from fedaudit.utils.seeds import generator

_SIDES = {1: 256, 2: 64, 3: 24}  # by the number of axes, the side that larger pictures are shrunk to for a pattern
_OTHERS = 200  # pictures of a class, at random
_TAUGHT = 2000  # pictures that teach, at random


class _Gallery(NamedTuple):
    """What reconstructions are held against.

    Attributes:
        pictures: (g, ...).
        who: (g,) whose each is, from 0; a picture's own number where persons aren't known.
        classes: of each label, who may be of it; where there is one alone, or none, everybody may.
        teaching: places among the candidates of those that teach.
        own: by a victim's digest, who it is.
    """

    pictures: Tensor
    who: Tensor
    classes: dict[int, set[int]]
    teaching: Tensor
    own: dict[bytes, int]


def with_names(
    case: Case, rows: Tensor, scores: Sequence[ImageResult], held: Sequence[int], seed: int
) -> list[ImageResult]:
    """Return the scores of the distinct true examples with what their reconstructions name.

    Args:
        rows: of the images.
        held: places of the candidates that no update was made from.
    """
    persons = case.truth.candidate_persons
    if not case.pictures or not held:
        return list(scores)
    gallery = (_of_persons if len(persons) else _of_pictures)(case, _different(case.truth.candidates, held, seed))
    network = None
    if len(gallery.teaching) >= FEWEST and worth_teaching(case.finding.iterations):
        whose = persons[gallery.teaching] if len(persons) else gallery.teaching
        network = taught(case.truth.candidates[gallery.teaching].float(), whose, seed)
    embedded = None if network is None else network(gallery.pictures.float())
    patterns = without_colour(shrunk(gallery.pictures, _SIDES)).float()
    vectors = case.kind.vectors(gallery.pictures)
    found = []
    for i, score in zip(case.uses, scores, strict=True):
        image = case.finding.images[rows[i]]
        own = gallery.own.get(tensor_digest(case.true[i]))
        if own is None:
            found.append(score)
            continue
        likeness = [-squared_distances(case.kind.vectors(image[None])[0], vectors)]
        likeness += [(_shifted(shrunk(image[None], _SIDES)) @ patterns.T).amax(dim=0)]
        likeness += [] if network is None or embedded is None else [(network(image[None].float()) @ embedded.T)[0]]
        label, paired = int(case.labels[i]), sum(case.places[i][0] == key for key, _ in case.places)
        rivals = gallery.classes.get(label, set()) | {own}
        chance = paired * _frequency(case, own, label, len(rivals))
        if not len(persons):  # what is equal to others is named as often, and luck may know what such pictures are like
            chance = max(chance, score.chance_level or 0.0)
        if len(rivals) == 1:  # the label names it
            rivals, chance = set(gallery.who.tolist()), 1.0
        places = [_rank(one, gallery.who, own, rivals) for one in likeness]
        named = NamedResult(
            of="person" if len(persons) else "image",
            candidates=len(rivals),
            chance_level=min(1.0, chance),
            pixel=places[0],
            pattern=places[1],
            embedding=places[2] if network is not None else None,
        )
        found.append(score.model_copy(update={"named": named}))
    return found


def _rank(likeness: Tensor, who: Tensor, own: int, rivals: set[int]) -> int:
    """Return how many are at least as like the reconstruction as the true one, which counts as one itself."""
    best = torch.full((int(who.max()) + 1,), -torch.inf, dtype=likeness.dtype)
    best = best.scatter_reduce(0, who, likeness, "amax")
    others = torch.tensor(sorted(rivals - {own}), dtype=torch.int64)
    return 1 + int((best[others] >= best[own]).sum())


def _shifted(image: Tensor) -> Tensor:
    """Return (3^axes, d) patterns of a picture (1, C, ...), each a pixel at most along each axis from where it is."""
    axes = image.ndim - 2
    wide = functional.pad(image, (1, 1) * axes, mode="replicate")[0]
    moved = []
    for starts in itertools.product(range(3), repeat=axes):
        part = wide
        for axis, (start, side) in enumerate(zip(starts, image.shape[2:], strict=True), start=1):
            part = part.narrow(axis, start, side)
        moved.append(part)
    return without_colour(torch.stack(moved)).float()


def _frequency(case: Case, own: int, label: int, rivals: int) -> float:
    """Return how often one is named who is drawn of the class: a person in many pictures may be guessed more often."""
    persons, labels = case.truth.candidate_persons, case.truth.candidate_labels
    of_class = persons[labels == label] if len(persons) else persons
    return max(1 / rivals, float((of_class == own).double().mean()) if len(of_class) else 0.0)


def _of_pictures(case: Case, held: Tensor) -> _Gallery:
    """Return the true pictures and others of their classes."""
    truth, places = case.truth, list(case.uses)
    half = len(held) // 2 if len(held) // 2 >= FEWEST else 0
    rest, labels, chosen = held[half:], case.labels[places], []
    for label in labels.unique().tolist():
        chosen.append(rest[truth.candidate_labels[rest] == label][:_OTHERS])
    others = torch.cat(chosen)
    own = {tensor_digest(case.true[i]): number for number, i in enumerate(places)}
    classes = {
        label: {len(own) + n for n in torch.nonzero(truth.candidate_labels[others] == label)[:, 0].tolist()}
        for label in labels.unique().tolist()
    }
    pictures = torch.cat([case.true[places], truth.candidates[others].to(case.true)])
    return _Gallery(pictures, torch.arange(len(pictures)), classes, held[:half][:_TAUGHT], own)


def _of_persons(case: Case, held: Tensor) -> _Gallery:
    """Return other pictures of persons, as many of each as there are of whom there are least."""
    truth, persons = case.truth, case.truth.candidate_persons
    each = [held[persons[held] == one] for one in persons[held].unique().tolist()]
    least = min(max(1, _TAUGHT // len(each)), *map(len, each))
    chosen = torch.cat([places[:least] for places in each])
    shown = set(persons[chosen].tolist())
    labels = zip(truth.candidate_labels.tolist(), persons.tolist(), strict=True)
    classes: dict[int, set[int]] = {}
    for label, one in labels:
        if one in shown:
            classes.setdefault(label, set()).add(one)
    whose = zip(truth.candidates, persons.tolist(), strict=True)
    own = {tensor_digest(picture): one for picture, one in whose if one in shown}
    return _Gallery(truth.candidates[chosen], persons[chosen], classes, chosen, own)


def _different(pictures: Tensor, places: Sequence[int], seed: int) -> Tensor:
    """Return the places of pictures that differ from each other, in random order."""
    first: dict[bytes, int] = {}
    for place in places:
        first.setdefault(tensor_digest(pictures[place]), place)
    kept = torch.tensor(list(first.values()), dtype=torch.int64)
    return kept[torch.randperm(len(kept), generator=generator(seed, "naming"))]
