"""A study's images, all of them in one picture: what malicious clients drew, a row a level, a column a seed."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedaudit import BadInput
from fedaudit.utils import check_listed, decode, inside
from fedaudit_lab.studies.recovered import recovered
from fedaudit_lab.studies.spec import StudySpec
from fedaudit_lab.studies.store import Row

Pixels = np.ndarray[Any, Any]

_WIDTH, _CAPTION = 4.2, 0.2  # inches: of a strip of images, and of the line above it
_MOST = 16  # columns
_PICTURES = "pictures.png"


def write_pictures(study: StudySpec, rows: Sequence[Row], folder: Path) -> Path | None:
    """Write ``pictures.png`` to the study's folder and return its path; None where its trials have no images.

    What attacks recovered is drawn by :func:`.recovered.recovered`, the following is about what malicious clients drew.
    Nothing is chosen: every finished trial shows all images that its last round kept, from the same codes in each
    round; above them stand real images of the class. Rows are the levels of all axes but the one that tables have
    across (if there are several axes), columns this one's levels, each with all of its seeds.

    Args:
        study: that was run.
        rows: of its store.
        folder: of the study, where the trials' files lie.

    Raises:
        BadInput: the folder can't be written.
    """
    import matplotlib as mpl

    with mpl.rc_context({"text.parse_math": False}):  # a study's own words may have dollars
        drawn = pictures(study, rows, folder) or recovered(
            study, rows, lambda row, name: _read(folder / "trials" / row.key, name, row.files)
        )
    if drawn is None:
        return None
    try:
        (folder / _PICTURES).write_bytes(drawn)
    except OSError as error:
        raise BadInput(f"can't write to '{folder}': {error.strerror or error}") from None
    return folder / _PICTURES


def pictures(study: StudySpec, rows: Sequence[Row], folder: Path) -> bytes | None:
    """Return that picture as a PNG; see :func:`write_pictures`."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    shown = {row.key: found for row in rows if (found := _sheets(folder / "trials" / row.key, row.files))}
    rows = [row for row in rows if row.key in shown]
    if not rows:
        return None
    down = [axis for axis in study.axes if axis != study.columns or len(study.axes) == 1]
    left = list(dict.fromkeys(tuple(row.point[a] for a in down) for row in rows))
    across = sorted(
        {(_across(study, row, down), row.repetition) for row in rows},
        key=lambda column: (list(study.axes[study.columns]).index(column[0]) if column[0] else 0, column[1]),
    )[:_MOST]
    strip = shown[rows[0].key][0]
    high = _WIDTH * strip.shape[0] / strip.shape[1] + _CAPTION
    size = (1.2 + _WIDTH * len(across), 0.2 + high * (len(left) + 1))
    drawing, axes = plt.subplots(len(left) + 1, len(across), figsize=size, squeeze=False, layout="constrained")
    for place in axes.flat:
        place.set_xticks([])
        place.set_yticks([])
        for side in place.spines.values():
            side.set_visible(False)
    for row in rows:
        column = (_across(study, row, down), row.repetition)
        if column not in across:
            continue
        i, j = left.index(tuple(row.point[a] for a in down)) + 1, across.index(column)
        real, last, caption = shown[row.key]
        axes[0, j].imshow(real, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
        axes[0, j].set_title(f"{column[0]} seed {row.repetition}".strip(), fontsize=8)
        axes[i, j].imshow(last, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
        axes[i, j].set_title(caption, fontsize=6, pad=2)
    for i, name in enumerate(["real", *map(", ".join, left)]):
        axes[i, 0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8)
    out = io.BytesIO()
    drawing.savefig(out, format="png", dpi=150, metadata={"Software": None})
    plt.close(drawing)
    return out.getvalue()


def _across(study: StudySpec, row: Row, down: Sequence[str]) -> str:
    return "" if study.columns in down else row.point[study.columns]


def _sheets(trial: Path, files: Mapping[str, str]) -> tuple[Pixels, Pixels, str] | None:
    """Return a trial's real images, those of its attack's last round, and what they come from, in words."""
    if not (trial / "results.json").is_file():
        return None
    result: dict[str, Any] = json.loads(_read(trial, "results.json", files))
    finding = next((f for f in result["findings"] if f.get("kind") == "class-images"), None)
    if finding is None or len(finding["sheets"]) < 2:
        return None
    real, last = (finding["sheets"][i] for i in (0, -1))
    course = next((f["course"] for f in result["federations"] if f["name"] == finding["federation"]), None) or {}
    caption = last["title"].rpartition(", ")[0]  # without its PSNR
    if course.get("accuracy"):
        caption += f"; accuracy {course['accuracy'][-1]:.2f}"
    first, second = (decode(_read(trial, s["path"], files), s["path"], None, ("PNG",)) for s in (real, last))
    return first, second, caption


def _read(trial: Path, name: str, files: Mapping[str, str]) -> bytes:
    """Return what is in a trial's file, which must be what the store says of it."""
    path = inside(trial, name)
    check_listed(path, name, files, remedy="delete the folder and run the study again")
    return path.read_bytes()
