"""The picture of what attacks recovered in a study's trials."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from fedaudit_lab.studies.pictures import write_pictures
from tests.lab.test_studies import row, tiny


def picture(colour: tuple[int, int, int], side: int = 8) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (side, side), colour).save(out, format="png")
    return out.getvalue()


def colours_of(drawn: bytes) -> list[tuple[int, int, int]]:
    """Return the colours of the images in a picture, row by row from the top; text and paper are grey."""
    pixels = np.asarray(Image.open(io.BytesIO(drawn)).convert("RGB"))
    found: dict[tuple[int, int, int], None] = {}
    for line in pixels:
        for colour in dict.fromkeys(map(tuple, line.tolist())):
            if len(set(colour)) == 3:  # as in none of the greys between text and paper
                found.setdefault(colour)
    return list(found)


def trial_folder(folder: Path, key: str, true: tuple[int, int, int], found: tuple[int, int, int]) -> None:
    (folder / "trials" / key).mkdir(parents=True)
    images = [{"true_image": "true.png", "reconstruction": "found.png", "psnr": 12.3}]
    finding = {"kind": "images", "images": images}
    contents = {"true.png": picture(true), "found.png": picture(found)}
    contents["results.json"] = json.dumps({"findings": [finding, {"kind": "labels"}]}).encode()
    for name, data in contents.items():
        (folder / "trials" / key / name).write_bytes(data)


def test_what_was_recovered_stands_below_the_true_images_cell_by_cell(tmp_path):
    rows = [
        replace(row({"attack": attack, "iterations": number}, repetition), key=f"{attack}{number}{repetition}")
        for attack in ("invg", "agic")
        for number in ("2", "1")
        for repetition in (1, 0)
    ]
    assert write_pictures(tiny(), rows, tmp_path) is None
    true = {(number, r): (250, 10 * r + 100, int(number)) for number in "12" for r in (0, 1)}
    found = {r.key: (20 + i, 200, 90) for i, r in enumerate(rows)}
    for r in rows:
        trial_folder(tmp_path, r.key, true[r.point["iterations"], r.repetition], found[r.key])
    path = tmp_path / "pictures.png"
    assert write_pictures(tiny(), rows, tmp_path) == path
    levels = list(tiny().axes["attack"])
    expected = []
    for number in sorted("12", key=list(tiny().axes["iterations"]).index):
        expected += [true[number, 0], true[number, 1]]
        for attack in sorted(("invg", "agic"), key=levels.index):
            expected += [found[f"{attack}{number}0"], found[f"{attack}{number}1"]]
    assert colours_of(path.read_bytes()) == expected
    shutil.rmtree(tmp_path / "trials" / rows[0].key)
    (tmp_path / "trials" / rows[1].key / "found.png").unlink()
    write_pictures(tiny(), rows, tmp_path)
    left = colours_of(path.read_bytes())
    assert set(expected) - set(left) == {found[rows[0].key], found[rows[1].key]}


def test_of_many_images_the_first_are_shown(tmp_path):
    rows = [replace(row({"attack": "agic", "iterations": "1"}, r), key=str(r)) for r in range(25)]
    for r in rows:
        trial_folder(tmp_path, r.key, (250, 100 + r.repetition, 1), (20, 100 + r.repetition, 2))
    path = write_pictures(tiny(), rows, tmp_path)
    assert path is not None
    assert {colour[1] for colour in colours_of(path.read_bytes())} == set(range(100, 120))
