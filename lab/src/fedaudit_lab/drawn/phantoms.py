"""Phantoms: drawn scans of nobody. Heads with tissues and lesions, in three dimensions, and chests with findings.

The heads are of the kind of L. A. Shepp and B. F. Logan, The Fourier reconstruction of a head section, IEEE Trans.
Nucl. Sci. 21(3), 1974: ellipsoids within each other; with tissues in place of densities, folds, and a scanner's noise.
Chests are drawn as radiographs are seen: bones and fluid bright, air dark. What is drawn is named by the finding that
it looks like; it isn't one, and models of these learn nothing of patients.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedaudit.data import Dataset, Layout, Request, add_dataset

Array = np.ndarray[Any, Any]

_TRAIN, _TEST = 320, 80
_MANY = 1600  # of which all but the first 320 are held out

# --- heads ------------------------------------------------------------------------------------------------------------

TISSUES = ("air", "scalp", "skull", "fluid", "grey matter", "white matter", "lesion")
_BRIGHT = (0.0, 0.72, 0.10, 0.14, 0.52, 0.80, 0.97)  # of each tissue, as T1-weighted images with contrast show it
_SCALP, _SKULL, _FLUID, _GREY, _WHITE, _LESION = range(1, 7)
SHAPE = (16, 32, 32)  # depth from feet to head, height from front to back, width from the right to the left


class _Head:
    """A volume that ellipsoids are laid into, one over another, on coordinates from −1 to 1 of depth, height, width."""

    def __init__(self, shape: tuple[int, int, int], turn: Array, shift: Array) -> None:
        axes = [np.linspace(-1 + 1 / side, 1 - 1 / side, side, dtype=np.float32) for side in shape]
        axes[0] = axes[0] * np.float32(0.85) + np.float32(0.06)
        grid = [side - np.float32(by) for side, by in zip(np.meshgrid(*axes, indexing="ij"), shift, strict=True)]
        self.places = np.float32(turn).T @ np.stack(grid).reshape(3, -1)  # z, y, x of every voxel
        self.edge = 1.6 / max(shape)  # over so much a boundary goes from one tissue to the other
        self.shape = shape
        self.values = np.zeros(self.places.shape[1], dtype=np.float32)
        self.tissues = np.zeros(self.places.shape[1], dtype=np.int64)

    def lay(self, tissue: int, bright: float, centre: Any, radii: Any, folds: Array | None = None) -> None:
        """Lay an ellipsoid of a tissue over what is there; ``folds`` (voxels,) push its surface in and out."""
        far = np.zeros_like(self.values)
        for places, middle, radius in zip(self.places, centre, radii, strict=True):
            far += ((places - np.float32(middle)) * np.float32(1 / radius)) ** 2
        far = np.sqrt(far)
        inner = float(np.min(radii))
        outside = (far - 1 if folds is None else far - 1 - folds) * np.float32((inner + np.mean(radii)) / 2 / self.edge)
        cover = np.clip(np.float32(0.5) - outside, 0, 1)
        self.values += cover * (np.float32(bright) - self.values)
        self.tissues[cover > 0.5] = tissue

    def deep(self, radii: Array) -> Array:
        """Return the voxels, by number, that lie in grey or white matter and in the ellipsoid of these radii."""
        far = ((self.places / radii[:, None]) ** 2).sum(axis=0)
        return np.flatnonzero(np.isin(self.tissues, (_GREY, _WHITE)) & (far < 1))


def head_phantoms(n: int, *, shape: tuple[int, int, int] = SHAPE, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Draw heads of nobody, every other one with one to three lesions.

    Heads differ in size, pose, folds of the cortex, ventricles, contrast and brightness across the field; the noise is
    Rician, as that of MRI. The first examples are the same whatever ``n`` is.

    Returns:
        Volumes float32 (n, 1, D, H, W) in [0, 1]; whether there is a lesion, int64 (n,); and every voxel's tissue, a
        number of ``TISSUES``, int64 (n, D, H, W): a mask for segmentation.
    """
    volumes = np.empty((n, 1, *shape), dtype=np.float32)
    tissues = np.empty((n, *shape), dtype=np.int64)
    for i in range(n):
        volumes[i, 0], tissues[i] = _head(np.random.default_rng([seed, i]), shape, lesions=i % 2 == 1)
    return torch.from_numpy(volumes), torch.arange(n) % 2, torch.from_numpy(tissues)


def _head(rng: np.random.Generator, shape: tuple[int, int, int], *, lesions: bool) -> tuple[Array, Array]:
    head = _Head(shape, _turn(rng.normal(0, (0.13, 0.05, 0.05))), rng.normal(0, 0.025, 3))
    size = rng.normal(1, 0.045, 3)
    bright = np.array(_BRIGHT) * rng.normal(1, 0.06, 7)
    z, y, x = head.places
    around = np.arctan2(y, x)
    folds = np.zeros_like(z)
    for k, m in zip(rng.integers(7, 16, 4), rng.uniform(-1, 1, 4), strict=True):
        high, phase = rng.uniform(0.4, 1), rng.uniform(0, 2 * np.pi)
        folds += np.float32(high) * np.sin(np.float32(k) * around + np.float32(5 * m) * z + np.float32(phase))
    for tissue, radii in ((_SCALP, (0.95, 0.94, 0.80)), (_SKULL, (0.885, 0.87, 0.73)), (_FLUID, (0.82, 0.80, 0.66))):
        head.lay(tissue, bright[tissue], (0.02, 0, 0), radii * size)
    head.lay(_GREY, bright[_GREY], (0.04, 0, 0), (0.76, 0.745, 0.61) * size, np.float32(0.02) * folds)
    head.lay(_WHITE, bright[_WHITE], (0.04, 0, 0), (0.62, 0.60, 0.46) * size, np.float32(0.07) * folds)
    head.lay(_FLUID, bright[_FLUID], (0.45, 0, 0), (0.40, 0.80, 0.022) * size)  # between the hemispheres
    for side in (-1, 1):
        head.lay(_GREY, bright[_GREY], (-0.42, 0.46, side * 0.2), (0.2, 0.22, 0.2) * size)  # cerebellum
        head.lay(_GREY, bright[_GREY], (-0.02, -0.06, side * 0.23), (0.17, 0.2, 0.085) * size)  # deep grey matter
        wide = rng.uniform(0.75, 1.5)
        for centre, radii in (
            ((0.14, -0.08, side * 0.10), (0.15, 0.30, 0.055 * wide)),  # body and front horn of the ventricle
            ((0.08, 0.26, side * 0.20), (0.17, 0.13, 0.06 * wide)),  # back horn
        ):
            head.lay(_FLUID, bright[_FLUID], centre, radii * size)
    if lesions:
        for _ in range(rng.integers(1, 4)):
            radius = rng.uniform(0.09, 0.21)
            place = head.places[:, rng.choice(head.deep(np.array([0.76, 0.745, 0.61]) * size - 1.2 * radius))]
            sides = radius * rng.uniform(0.8, 1.25, 3)
            head.lay(_LESION, bright[_LESION], place, sides)
            if radius > 0.15:  # a large one is dark in its middle
                head.lay(_LESION, 0.35, place, sides * 0.5)
    field = 1 + np.float32(rng.normal(0, 0.07, 3)) @ head.places
    real, imaginary = rng.uniform(0.01, 0.025) * rng.standard_normal((2, len(field)), dtype=np.float32)
    values = np.sqrt((head.values * field + real) ** 2 + imaginary**2).clip(0, 1)
    return values.reshape(shape), head.tissues.reshape(shape)


def _turn(angles: Array) -> Array:
    """Return the rotation of (z, y, x) by these angles about z, y and x."""
    turn = np.eye(3)
    for (i, j), angle in zip(((1, 2), (0, 2), (0, 1)), angles, strict=True):
        one = np.eye(3)
        one[i, i] = one[j, j] = np.cos(angle)
        one[i, j], one[j, i] = -np.sin(angle), np.sin(angle)
        turn = turn @ one
    return turn


# --- chests -----------------------------------------------------------------------------------------------------------

FINDINGS = (
    "atelectasis",  # a line across a lung
    "cardiomegaly",  # a heart that is wide
    "effusion",  # fluid at the bottom of a lung
    "infiltration",  # patches
    "mass",  # a large round opacity
    "nodule",  # a small one
    "consolidation",  # a dense part of a lung, with air in its airways
    "pneumothorax",  # air beside a lung, whose edge is a line
    "oedema",  # haze around the hila on both sides
    "emphysema",  # dark, long lungs and a slim heart
    "fibrosis",  # a net of lines in the lower lungs
    "pleural thickening",  # a bright band along the chest wall
    "hernia",  # a bubble with a level behind the heart
    "device",  # a pacemaker and its lead
)
_SHARE = 0.15  # of chests that have each finding
SIDE = 64


class _Chest:
    """A radiograph that shapes are added to, on coordinates from 0 to 1 of height and width."""

    def __init__(self, side: int) -> None:
        axis = (np.arange(side, dtype=np.float32) + np.float32(0.5)) / np.float32(side)
        self.y, self.x = np.meshgrid(axis, axis, indexing="ij")
        self.pixel = 1 / side
        self.image = np.zeros((side, side), dtype=np.float32)

    def cover(self, far: Array, soft: float = 0.0) -> Array:
        """Return how much of each pixel lies inside, where ``far`` is the distance from the boundary."""
        return np.asarray(np.clip(0.5 - far / (self.pixel + soft), 0, 1), dtype=np.float32)

    def near(self, low: tuple[float, float], high: tuple[float, float]) -> tuple[slice, slice]:
        """Return the rows and columns between two corners, and a few beside them."""
        side = len(self.image)
        ends = [(max(int(a * side) - 2, 0), max(int(b * side) + 3, 0)) for a, b in zip(low, high, strict=True)]
        return slice(*ends[0]), slice(*ends[1])

    def ellipse(self, y: float, x: float, high: float, wide: float, *, lean: float = 0, soft: float = 0) -> Array:
        """Return the cover of an ellipse with these half axes, whose height leans by an angle."""
        reach = max(high, wide) + soft
        part = self.near((y - reach, x - reach), (y + reach, x + reach))
        down, right = self.y[part] - y, self.x[part] - x
        along, across = down * np.cos(lean) + right * np.sin(lean), right * np.cos(lean) - down * np.sin(lean)
        far = np.sqrt((along / high) ** 2 + (across / wide) ** 2)
        whole = np.zeros_like(self.image)
        whole[part] = self.cover((far - 1) * min(high, wide), soft)
        return whole

    def line(self, points: Any, thick: float) -> Array:
        """Return the cover of a line through points (k, 2) of y and x."""
        whole = np.zeros_like(self.image)
        for (y, x), (to_y, to_x) in itertools.pairwise(points):
            low, high = (min(y, to_y) - thick, min(x, to_x) - thick), (max(y, to_y) + thick, max(x, to_x) + thick)
            part = self.near(low, high)
            down, right = to_y - y, to_x - x
            below, beside = self.y[part] - y, self.x[part] - x
            share = np.clip((below * down + beside * right) / max(down**2 + right**2, 1e-9), 0, 1)
            far = np.sqrt((below - share * down) ** 2 + (beside - share * right) ** 2)
            whole[part] = np.maximum(whole[part], self.cover(far - thick / 2))
        return whole

    def blob(self, y: float, x: float, size: float) -> Array:
        """Return a soft round spot, 1 in its middle."""
        return np.asarray(np.exp(-((self.y - y) ** 2 + (self.x - x) ** 2) / (2 * size**2)))


def xray_phantoms(n: int, *, side: int = SIDE, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Draw chest radiographs of nobody, each with any of 14 findings.

    Chests differ in size, pose, ribs, vessels, exposure and noise. Findings are drawn independently, each in 15 % of
    the chests, but that a heart is not wide where emphysema makes it slim. One may hide another. The first examples are
    the same whatever ``n`` is.

    Returns:
        Images float32 (n, 1, side, side) in [0, 1], and float32 (n, 14): 1 where a finding of ``FINDINGS`` is there.
    """
    images = np.empty((n, 1, side, side), dtype=np.float32)
    found = np.empty((n, len(FINDINGS)), dtype=np.float32)
    for i in range(n):
        rng = np.random.default_rng([seed, i])
        found[i] = rng.random(len(FINDINGS)) < _SHARE
        if found[i, FINDINGS.index("emphysema")]:
            found[i, FINDINGS.index("cardiomegaly")] = 0
        there = [name for name, one in zip(FINDINGS, found[i], strict=True) if one]
        images[i, 0] = chest_phantom(rng, there, side=side)
    return torch.from_numpy(images), torch.from_numpy(found)


def chest_phantom(rng: np.random.Generator, found: Collection[str], *, side: int = SIDE) -> Array:
    """Return a chest, float32 (side, side) in [0, 1], with these of ``FINDINGS``: the same chest but for them."""
    own = dict(zip(FINDINGS, rng.spawn(len(FINDINGS)), strict=True))
    chest = _Chest(side)
    shift = rng.normal(0, 0.012, 2)
    large = float(rng.normal(1, 0.035))
    long = 1.12 if "emphysema" in found else 1.0
    middle = 0.5 + float(shift[1])
    top = 0.13 + float(shift[0])
    # the body
    chest.image += 0.62 * chest.ellipse(0.72, middle, 0.66, 0.47 * large, soft=0.05)
    for sign in (-1, 1):  # shoulders
        chest.image += 0.55 * chest.ellipse(top + 0.17, middle + sign * 0.33 * large, 0.17, 0.17, soft=0.05)
        chest.image += 0.60 * chest.ellipse(top + 0.08, middle + sign * 0.2 * large, 0.13, 0.17, soft=0.05)
    chest.image += 0.30 * chest.ellipse(0.02, middle, 0.17, 0.13, soft=0.05)
    chest.image = np.minimum(chest.image, 0.62)
    # the lungs; at the picture's left is the right one, which is wider and a little shorter
    lungs, air, floors = [], np.zeros_like(chest.image), []
    for sign, wide, high in ((-1, 0.158, 0.31), (1, 0.150, 0.325)):
        x = middle + sign * 0.205 * large
        floor = top + 2.02 * high * long + float(rng.normal(0, 0.012))
        dome = floor - 0.05 * (2.2 - 2 * long) * np.cos(np.clip((chest.x - x) / wide, -1.5, 1.5) * 1.4)
        shape = chest.ellipse(top + 1.06 * high * long, x, 1.1 * high * long, wide * large * 1.04, lean=-sign * 0.10)
        lung = shape * chest.cover(chest.y - dome - 0.02)
        lungs.append((x, wide * large, high * long, lung))
        floors.append(floor)
        air = np.maximum(air, lung)
    chest.image -= (0.47 if "emphysema" in found else 0.41) * air
    # what lies between and behind them: spine, mediastinum, hila, heart
    chest.image += 0.10 * chest.cover(np.abs(chest.x - middle) - 0.032, 0.02)
    chest.image += 0.12 * chest.ellipse(top + 0.12, middle, 0.20, 0.052, soft=0.02)
    chest.image += 0.16 * chest.ellipse(top + 0.155, middle + 0.045, 0.05, 0.045, soft=0.015)  # the aorta's arch
    scale = 1.55 if "cardiomegaly" in found else 0.72 if "emphysema" in found else float(rng.normal(1, 0.05))
    heart = chest.ellipse(
        min(floors) - 0.14, middle + 0.045 + 0.03 * (scale - 1), 0.155 * min(scale, 1.15), 0.125 * scale,
        lean=-0.45, soft=0.012,
    )  # fmt: skip
    chest.image += 0.36 * heart * (0.35 + 0.65 * air)
    for (x, _, _, lung), sign in zip(lungs, (-1, 1), strict=True):
        _vessels(rng, chest, lung, top + 0.27, x - sign * 0.105, sign)
    # bones
    for rib in range(8):
        y = top - 0.005 + 0.072 * rib * long
        for sign in (-1, 1):
            t = np.linspace(0.1, 1, 6)
            bend = y + 0.02 + 0.055 * t**2 - 0.05 * np.sin(np.pi * t) + 0.012 * rib * t**2
            points = np.stack([bend, middle + sign * t * (0.30 + 0.012 * min(rib, 4)) * large], axis=1)
            chest.image += 0.075 * chest.line(points, 0.017)
    for sign in (-1, 1):
        bones = [(top + y, middle + sign * x) for y, x in ((0.03, 0.05), (0.015, 0.17), (-0.03, 0.33))]
        chest.image += 0.13 * chest.line(bones, 0.024)
    chest.image -= 0.22 * chest.ellipse(floors[1] + 0.055, middle + 0.20, 0.035, 0.07, soft=0.02)  # gas in the stomach
    for name in sorted(FINDINGS, key=lambda name: name == "effusion"):  # fluid covers the others
        if name in found:
            _add_finding(name, own[name], chest, lungs, heart, floors, middle, top)
    exposed = np.clip(chest.image * rng.normal(1.12, 0.05) + rng.normal(0.0, 0.02), 0, 1) ** rng.uniform(0.85, 1.15)
    noisy = exposed + rng.normal(0, rng.uniform(0.008, 0.018), exposed.shape)
    return np.asarray(np.clip(noisy, 0, 1), dtype=np.float32)


def _vessels(rng: np.random.Generator, chest: _Chest, lung: Array, y: float, x: float, sign: int) -> None:
    """Add a hilum and the vessels that branch out of it, thinner and thinner."""
    chest.image += 0.07 * chest.blob(y, x, 0.035)
    for angle in np.linspace(-1.2, 1.35, 6) + rng.normal(0, 0.1, 6):
        points, heading = [(y, x)], float(angle)
        for _ in range(3):
            heading += float(rng.normal(0, 0.18))
            y_last, x_last = points[-1]
            points.append((y_last + 0.062 * np.sin(heading), x_last + sign * 0.062 * np.cos(heading)))
        for i, thick in enumerate((0.016, 0.011, 0.008)):
            chest.image += (0.085 - 0.02 * i) * lung * chest.line(points[i : i + 2], thick)


def _add_finding(
    name: str,
    rng: np.random.Generator,
    chest: _Chest,
    lungs: list[tuple[float, float, float, Array]],
    heart: Array,
    floors: list[float],
    middle: float,
    top: float,
) -> None:
    number = int(rng.integers(2))
    x, wide, high, lung = lungs[number]
    lung = lung * (1 - 0.75 * heart)
    sign = (-1, 1)[number]
    floor = floors[number]

    def place(spread: float = 0.55) -> tuple[float, float]:
        """Return a place inside of the lung, away from its edges."""
        return top + high * (1.05 + rng.uniform(-0.6, 0.6)), x + wide * rng.uniform(
            -spread, spread
        ) + sign * 0.15 * wide

    if name == "atelectasis":
        y, slope = floor - rng.uniform(0.14, 0.24), rng.normal(0, 0.03)
        points = [(y - slope, x - 0.75 * wide), (y + 0.012, x), (y + slope, x + 0.75 * wide)]
        chest.image += 0.34 * lung * chest.line(points, 0.026)
    elif name == "effusion":
        rise = floor - rng.uniform(0.10, 0.20)
        out = np.clip((chest.x - x) * sign / wide, -1, 1)
        level = rise - 0.07 * np.clip(out, 0, 1) ** 2  # it climbs along the chest wall
        chest.image += lung * chest.cover(level - chest.y, 0.015) * np.clip(0.62 - chest.image, 0, 0.42)
    elif name == "infiltration":
        for _ in range(int(rng.integers(6, 10))):
            y, at = place(0.7)
            chest.image += rng.uniform(0.10, 0.2) * lung * chest.blob(y, at, rng.uniform(0.016, 0.03))
    elif name in ("mass", "nodule"):
        y, at = place()
        radius = rng.uniform(0.055, 0.085) if name == "mass" else rng.uniform(0.018, 0.028)
        chest.image += (0.36 if name == "mass" else 0.42) * chest.ellipse(
            y, at, radius, radius * rng.uniform(0.85, 1.1), lean=rng.uniform(0, 3), soft=0.008
        )
    elif name == "consolidation":
        upper = rng.random() < 0.5
        y = top + high * (0.75 if upper else 1.4)
        dense = lung * chest.ellipse(y, x + sign * 0.2 * wide, 0.30 * high, 0.9 * wide, lean=0.3 * sign, soft=0.05)
        airways = sum(
            chest.line([(y, x - sign * 0.5 * wide), (y + down, x + sign * 0.5 * wide)], 0.012)
            for down in (-0.05, 0, 0.05)
        )
        chest.image += 0.36 * dense * (1 - 0.5 * np.clip(airways, 0, 1))
    elif name == "pneumothorax":
        edge = sign * (chest.x - x) - wide * (0.5 - 6 * (chest.y - top - 1.25 * high) ** 2)
        outside = lung * chest.cover(-edge)
        smooth = np.median(chest.image[outside > 0.5]) if bool((outside > 0.5).any()) else 0.1
        chest.image += outside * (np.minimum(chest.image, np.float32(smooth)) - 0.07 - chest.image)
        chest.image += 0.30 * lung * chest.cover(np.abs(edge) - 0.007)
    elif name == "oedema":
        for (center, _, _, area), side in zip(lungs, (-1, 1), strict=True):
            chest.image += 0.30 * area * chest.blob(top + 0.30, center - side * 0.05, 0.10)
            for k in range(4):
                y = floor - 0.06 - 0.035 * k
                edge_x = center + side * 0.85 * wide
                chest.image += 0.16 * area * chest.line([(y, edge_x), (y, edge_x - side * 0.05)], 0.009)
    elif name == "fibrosis":
        for _, _, _, area in lungs:
            area = area * (1 - 0.8 * heart)
            waves = np.abs(np.sin(58 * (chest.x + 0.35 * chest.y) + rng.uniform(0, 6))) ** 6
            others = np.abs(np.sin(58 * (chest.y - 0.35 * chest.x) + rng.uniform(0, 6))) ** 6
            low = np.clip((chest.y - top - 0.9 * high) / (0.5 * high), 0, 1)
            chest.image += 0.24 * area * low * np.maximum(waves, others)
    elif name == "pleural thickening":
        from_y, to_y = top + high * rng.uniform(0.3, 0.6), top + high * rng.uniform(1.2, 1.6)
        inside = chest.ellipse(top + 1.06 * high, x - sign * 0.05, 1.1 * high, wide * 0.98, lean=-sign * 0.10)
        band = lung * (1 - inside) * chest.cover(from_y - chest.y, 0.03) * chest.cover(chest.y - to_y, 0.03)
        chest.image += 0.40 * band * (sign * (chest.x - x) > 0)
    elif name == "hernia":
        y, at, radius = min(floors) - 0.13, middle + 0.03, rng.uniform(0.062, 0.08)
        bubble = chest.ellipse(y, at, radius, radius * 1.1)
        level = chest.cover(y + 0.012 - chest.y)
        chest.image += bubble * (0.10 * level - 0.34 * (1 - level))
        chest.image += 0.18 * bubble * (1 - chest.ellipse(y, at, radius - 0.014, radius * 1.1 - 0.014))
    elif name == "device":
        y, at = top + 0.09, middle + 0.285
        box = chest.ellipse(y, at, 0.045, 0.055)
        chest.image += box * (0.98 - chest.image)
        points = [(y + 0.02, at - 0.03), (top + 0.02, middle + 0.16), (top + 0.12, middle - 0.035),
                  (min(floors) - 0.2, middle - 0.05), (min(floors) - 0.075, middle + 0.09)]  # fmt: skip
        lead = chest.line(points, 0.010)
        chest.image += lead * np.clip(0.95 - chest.image, 0, 1)


# --- data sets --------------------------------------------------------------------------------------------------------


_DRAWN = "heads of the kind of Shepp and Logan (1974)"


def _as_dataset(request: Request, drawn: Tensor, targets: Tensor, what: str, **more: Any) -> Dataset:
    return Dataset.from_tensors(
        drawn[:_TRAIN],
        targets[:_TRAIN],
        test=(drawn[_TRAIN:], targets[_TRAIN:]),
        name=request.name,
        summary=request.summary,
        source=f"drawn here, {what}, with seed {request.seed}; nobody's",
        **more,
    )


def _heads(_paths: list[Path], request: Request) -> Dataset:
    volumes, lesions, _ = head_phantoms(_TRAIN + _TEST, seed=request.seed)
    return _as_dataset(request, volumes, lesions, _DRAWN, kind="volume", class_names=("no lesion", "lesion"))


def _tissues(_paths: list[Path], request: Request) -> Dataset:
    volumes, _, tissues = head_phantoms(_TRAIN + _TEST, seed=request.seed)
    return _as_dataset(request, volumes, tissues, _DRAWN, kind="volume", class_names=TISSUES)


def _slice(request: Request) -> tuple[Tensor, Tensor, Tensor]:
    """Return head phantoms of one slice, through the middle and the lesions: images (n, 1, H, W), classes, masks."""
    side = request.image_size or SHAPE[-1]
    images, lesions, tissues = head_phantoms(_TRAIN + _TEST, shape=(1, side, side), seed=request.seed)
    return images[:, :, 0], lesions, tissues[:, 0]


def _slices(_paths: list[Path], request: Request) -> Dataset:
    images, lesions, _ = _slice(request)
    return _as_dataset(request, images, lesions, _DRAWN, class_names=("no lesion", "lesion"))


def _slice_tissues(_paths: list[Path], request: Request) -> Dataset:
    images, _, tissues = _slice(request)
    return _as_dataset(request, images, tissues, _DRAWN, class_names=TISSUES)


_CHESTS = "chests as radiographs show them"


def _chests(_paths: list[Path], request: Request) -> Dataset:
    images, findings = xray_phantoms(_TRAIN + _TEST, side=request.image_size or SIDE, seed=request.seed)
    return _as_dataset(request, images, findings, _CHESTS, class_names=FINDINGS)


def _chests_of_one_label(_paths: list[Path], request: Request) -> Dataset:
    images, findings = xray_phantoms(_TRAIN + _TEST, side=request.image_size or SIDE, seed=request.seed)
    first = torch.where(findings.sum(dim=1) > 0, 1 + findings.argmax(dim=1), 0)
    return _as_dataset(request, images, first, _CHESTS, class_names=("no finding", *FINDINGS))


def _many_chests(_paths: list[Path], request: Request) -> Dataset:
    images, findings = xray_phantoms(_MANY, side=request.image_size or SIDE, seed=request.seed)
    ill = findings.amax(dim=1).long()
    return _as_dataset(request, images, ill, _CHESTS, class_names=("no finding", "some finding"))


add_dataset(
    "head-phantoms",
    "400 drawn heads as of MRI, 16x32x32 voxels, half of them with lesions",
    "drawn by fedaudit",
    Layout(_heads),
    kind="volume",
    needs="nothing",
)
add_dataset(
    "head-tissues",
    "the same 400 drawn heads, with the tissue of every voxel: masks of 7 classes",
    "drawn by fedaudit",
    Layout(_tissues),
    kind="volume",
    task="segmentation",
    needs="nothing",
)
add_dataset(
    "head-slices",
    "400 drawn slices of heads as of MRI, 32x32 pixels, half of them with lesions",
    "drawn by fedaudit",
    Layout(_slices),
    needs="nothing",
)
add_dataset(
    "slice-tissues",
    "the same 400 drawn slices, with the tissue of every pixel: masks of 7 classes",
    "drawn by fedaudit",
    Layout(_slice_tissues),
    task="segmentation",
    needs="nothing",
)
add_dataset(
    "xray-phantoms",
    "400 drawn chest X-rays, 64x64 pixels, with several of 14 findings each",
    "drawn by fedaudit",
    Layout(_chests),
    task="multi-label",
    needs="nothing",
)
add_dataset(
    "xray-single-label",
    "the same 400 drawn chest X-rays, each with the first of its findings alone, or none: 15 classes",
    "drawn by fedaudit",
    Layout(_chests_of_one_label),
    needs="nothing",
)
add_dataset(
    "xray-many",
    "1,600 drawn chest X-rays, 64x64 pixels, with findings or without: to be told from each other",
    "drawn by fedaudit",
    Layout(_many_chests),
    needs="nothing",
)
