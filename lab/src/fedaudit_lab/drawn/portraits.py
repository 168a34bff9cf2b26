"""AT&T's portraits, to ask whom a reconstruction shows: persons are known, and classes name nobody."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from fedaudit.data import Dataset, Layout, Request, Split, add_dataset, load_dataset

_TRAIN = 4  # of each person's ten pictures; the others are held out


def _turned(paths: list[Path], request: Request) -> Dataset:
    whole = load_dataset("att-faces", image_size=request.image_size, data_dir=paths[0].parent)
    parts = whole.train, whole.test
    pictures, persons = torch.cat([p.inputs for p in parts]), torch.cat([p.targets for p in parts])
    splits = []
    for shots in (slice(_TRAIN), slice(_TRAIN, None)):
        rows = torch.cat([torch.nonzero(persons == one)[shots, 0] for one in persons.unique()])
        upright = torch.arange(len(rows)) % 2 == 0
        shown = torch.where(upright[:, None, None, None], pictures[rows], pictures[rows].flip(-2, -1))
        splits.append(Split(shown, (~upright).long(), persons=persons[rows]))
    changed = replace(whole, train=splits[0], test=splits[1], num_classes=2, class_names=("upright", "upside down"))
    return replace(changed, name=request.name, summary=request.summary)


add_dataset(
    "att-faces-turned",
    "the portraits of att-faces, every other upside down: which ones is the class; four of each person to train with",
    "the AT&T (ORL) Database of Faces, as att_faces.npz into DATA_DIR/att_faces/",
    Layout(_turned, ("att_faces.npz",), ("att_faces", "att-faces", ".")),
)
