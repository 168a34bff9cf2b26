"""AT&T's portraits, to ask whom a reconstruction shows: persons are known, and their classes name nobody."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from fedaudit.data import Dataset, Layout, Request, Split, add_dataset, load_dataset

_PEOPLE = 10  # of a class
_TRAIN = 4  # of each person's pictures; the others are held out


def _groups(paths: list[Path], request: Request) -> Dataset:
    whole = load_dataset("att-faces", image_size=request.image_size, data_dir=paths[0].parent)
    parts = whole.train, whole.test
    pictures, persons = torch.cat([p.inputs for p in parts]), torch.cat([p.targets for p in parts])
    each = [torch.nonzero(persons == one)[:, 0] for one in persons.unique().tolist()]
    train, test = (torch.cat([places[part] for places in each]) for part in (slice(_TRAIN), slice(_TRAIN, None)))
    splits = [Split(pictures[rows], persons[rows] // _PEOPLE, persons=persons[rows]) for rows in (train, test)]
    count = len(each) // _PEOPLE
    names = tuple(f"group {i + 1}" for i in range(count))
    changed = replace(whole, train=splits[0], test=splits[1], num_classes=count, class_names=names)
    return replace(changed, name=request.name, summary=request.summary)


add_dataset(
    "att-faces-groups",
    "the portraits of att-faces in four classes of ten people each; four pictures of each person are the train split",
    "the AT&T (ORL) Database of Faces, as att_faces.npz into DATA_DIR/att_faces/",
    Layout(_groups, ("att_faces.npz",), ("att_faces", "att-faces", ".")),
)
