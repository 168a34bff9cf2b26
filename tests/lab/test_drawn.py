"""Drawn heads, chests and ECGs: what they claim to show is there, and they are the same each time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from scipy.signal import find_peaks

from fedaudit.data import load_dataset
from fedaudit_lab.drawn.ecg import LEADS, RATE, RHYTHMS, pushed, synthetic_ecgs
from fedaudit_lab.drawn.phantoms import FINDINGS, TISSUES, chest_phantom, head_phantoms, xray_phantoms

# --- heads ---------------------------------------------------------------------------------------------------------


def test_heads() -> None:
    volumes, lesions, tissues = head_phantoms(40, seed=3)
    assert (volumes.shape, volumes.dtype) == ((40, 1, 16, 32, 32), torch.float32)
    assert (tissues.shape, tissues.dtype) == ((40, 16, 32, 32), torch.int64)
    assert float(volumes.min()) >= 0
    assert float(volumes.max()) <= 1
    sick = (tissues == TISSUES.index("lesion")).flatten(1).sum(dim=1)
    assert torch.equal(sick > 0, lesions == 1)
    assert int(sick.max()) < 400  # of 16,384 voxels
    bright = [float(volumes[:, 0][tissues == i].mean()) for i in range(len(TISSUES))]
    named = dict(zip(TISSUES, bright, strict=True))
    assert named["air"] < 0.1
    assert named["fluid"] < named["grey matter"] < named["white matter"] < named["lesion"]
    assert named["skull"] < named["scalp"]
    assert set(tissues.unique().tolist()) == set(range(len(TISSUES)))
    area = (tissues > 0).sum(dim=(0, 2, 3))
    assert int(area[-1]) < int(area[0]) < int(area[7])  # the vertex is at the last plane
    again = head_phantoms(10, seed=3)
    assert all(torch.equal(a, b[:10]) for a, b in zip(again, (volumes, lesions, tissues), strict=True))
    assert not torch.equal(head_phantoms(10, seed=4)[0], again[0])
    assert head_phantoms(2, shape=(8, 24, 20))[0].shape == (2, 1, 8, 24, 20)


def test_lesions_lie_in_the_brain() -> None:
    """Around them is brain: the same head without its lesions has grey or white matter, or fluid, there."""
    _, _, tissues = head_phantoms(60)
    lesion = tissues == TISSUES.index("lesion")
    near = torch.nn.functional.max_pool3d(lesion.float(), 3, stride=1, padding=1).bool() & ~lesion
    beside = torch.bincount(tissues[near], minlength=len(TISSUES)) / near.sum()
    assert float(beside[TISSUES.index("air")]) == 0
    assert float(beside[TISSUES.index("grey matter")] + beside[TISSUES.index("white matter")]) > 0.85


# --- chests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("finding", FINDINGS)
def test_a_finding_is_seen(finding: str) -> None:
    """The same chest with a finding differs from that without, where many pixels tell it from the noise."""
    for seed in range(4):
        without, having = (chest_phantom(np.random.default_rng(seed), found) for found in ([], [finding]))
        change = np.abs(having - without)
        assert (change > 0.08).sum() >= 6, f"{finding}, seed {seed}"
        if finding == "nodule":
            assert (change > 0.02).sum() < 40  # of 4,096 pixels


@pytest.mark.slow
def test_xrays() -> None:
    images, found = xray_phantoms(200, seed=1)
    assert (images.shape, images.dtype) == ((200, 1, 64, 64), torch.float32)
    assert (found.shape, found.dtype) == ((200, 14), torch.float32)
    assert set(found.unique().tolist()) == {0.0, 1.0}
    assert float(images.min()) >= 0
    assert float(images.max()) <= 1
    shares = found.mean(dim=0)
    assert float(shares.min()) > 0.06
    assert float(shares.max()) < 0.26
    assert float(found.sum(dim=1).max()) >= 4  # several at once
    wide, slim = FINDINGS.index("cardiomegaly"), FINDINGS.index("emphysema")
    assert not bool((found[:, wide] * found[:, slim]).any())
    again = xray_phantoms(5, seed=1)
    assert torch.equal(again[0], images[:5])
    assert torch.equal(again[1], found[:5])
    large = xray_phantoms(1, seed=1, side=128)[0]
    assert large.shape == (1, 1, 128, 128)
    small = torch.nn.functional.avg_pool2d(large, 2)
    assert float((small - images[:1]).abs().mean()) < 0.05  # the same chest, finer


@pytest.mark.slow
def test_slices_are_one_head_s_and_have_its_lesions() -> None:
    heads, masks = load_dataset("head-slices"), load_dataset("slice-tissues")
    assert (heads.kind, heads.class_names, len(heads.train), len(heads.test)) == (
        "image",
        ("no lesion", "lesion"),
        320,
        80,
    )
    assert (masks.task, masks.class_names, masks.train.targets.shape) == ("segmentation", TISSUES, (320, 32, 32))
    assert torch.equal(heads.train.inputs, masks.train.inputs)
    sick = (masks.train.targets == TISSUES.index("lesion")).flatten(1).any(dim=1)
    assert torch.equal(sick, heads.train.targets == 1)
    bright = masks.train.inputs[:, 0]
    assert float(bright[masks.train.targets == TISSUES.index("white matter")].mean()) > 0.6
    assert float(bright[masks.train.targets == TISSUES.index("air")].mean()) < 0.1
    assert load_dataset("head-slices", image_size=128, limit=2).train.inputs.shape == (2, 1, 128, 128)


@pytest.mark.slow
def test_xrays_of_one_label_are_the_same_images_with_their_first_finding() -> None:
    several, one = (load_dataset(name, image_size=16) for name in ("xray-phantoms", "xray-single-label"))
    assert one.class_names == ("no finding", *FINDINGS)
    assert torch.equal(several.test.inputs, one.test.inputs)
    for found, label in zip(several.test.targets.tolist(), one.test.targets.tolist(), strict=True):
        assert label == (1 + found.index(1) if 1 in found else 0)


# --- ECGs ----------------------------------------------------------------------------------------------------------


def test_the_model_is_that_of_the_paper() -> None:
    """z(t) with Table I's parameters, against the paper's three equations as a general solver integrates them."""
    theta, a, b = np.array([-1 / 3, -1 / 12, 0, 1 / 12, 1 / 2]) * np.pi, np.array([1.2, -5, 30, -7.5, 0.75]), np.array(
        [0.25, 0.1, 0.1, 0.1, 0.4]
    )  # fmt: skip
    omega, breath = 2 * np.pi * 1.1, 2 * np.pi * 0.25

    def slope(t: float, state: np.ndarray) -> list[float]:
        x, y, z = state
        alpha = 1 - np.hypot(x, y)
        apart = np.mod(np.arctan2(y, x) - theta + np.pi, 2 * np.pi) - np.pi
        rest = 0.15 * np.sin(breath * t)
        return [
            alpha * x - omega * y,
            alpha * y + omega * x,
            -float((a * apart * np.exp(-(apart**2) / (2 * b**2))).sum()) - (z - rest),
        ]

    step, count = 1 / 128, 384
    times = np.arange(2 * count + 1) * step / 2
    exact = solve_ivp(
        slope, (0, count * step), [-1, -1e-12, 0], t_eval=times[::2], rtol=1e-9, atol=1e-11, max_step=0.002
    )
    angles = np.mod(omega * times, 2 * np.pi) - np.pi
    rest = 0.15 * np.sin(breath * times)[None, :, None]
    waves = (theta, b, (a * b**2 / omega)[:, None])
    ours = pushed(angles[None], np.full((1, len(times)), omega), waves, rest, step)
    assert np.abs(exact.y[2]).max() > 0.04
    assert np.allclose(ours[0, :, 0], exact.y[2], atol=2e-5)


@pytest.fixture(scope="module")
def ecgs() -> tuple[np.ndarray, np.ndarray]:
    signals, rhythms = synthetic_ecgs(150, length=10 * RATE, seed=2)
    return signals.numpy().astype(np.float64), rhythms.numpy()


def beats(signal: np.ndarray) -> np.ndarray:
    """Return the seconds between a signal's beats, found by the length of its steps in all leads."""
    pace = np.sqrt((np.diff(signal, axis=1) ** 2).sum(axis=0))
    peaks, _ = find_peaks(np.convolve(pace, np.ones(5) / 5, "same"), height=0.35 * pace.max() / 2, distance=0.28 * RATE)
    return np.asarray(np.diff(peaks) / RATE)


def test_rhythms(ecgs: tuple[np.ndarray, np.ndarray]) -> None:
    signals, rhythms = ecgs
    rates: dict[str, list[float]] = {name: [] for name in RHYTHMS}
    spreads: dict[str, list[float]] = {name: [] for name in RHYTHMS}
    for signal, rhythm in zip(signals, rhythms, strict=True):
        between = beats(signal)
        rates[RHYTHMS[rhythm]].append(60 / float(np.median(between)))
        spreads[RHYTHMS[rhythm]].append(float(between.std() / between.mean()))
    for name, low, high in (("normal", 57, 98), ("bradycardia", 36, 53), ("tachycardia", 105, 168)):
        assert low < np.percentile(rates[name], 5), name
        assert np.percentile(rates[name], 95) < high, name
    assert np.median(spreads["atrial fibrillation"]) > 0.12
    assert np.median(spreads["normal"]) < 0.07


def test_leads(ecgs: tuple[np.ndarray, np.ndarray]) -> None:
    """Einthoven's and Goldberger's laws hold exactly; V1 looks from the right, V6 from the left."""
    lead = dict(zip(LEADS, ecgs[0].transpose(1, 0, 2), strict=True))
    assert np.allclose(lead["I"] + lead["III"], lead["II"], atol=1e-5)
    assert np.allclose(lead["aVR"], -(lead["I"] + lead["II"]) / 2, atol=1e-5)
    assert np.allclose(lead["aVL"], (lead["I"] - lead["III"]) / 2, atol=1e-5)
    assert np.allclose(lead["aVF"], (lead["II"] + lead["III"]) / 2, atol=1e-5)
    normal = ecgs[1] == RHYTHMS.index("normal")
    tall = {name: np.median(lead[name][normal].max(axis=1) + lead[name][normal].min(axis=1)) for name in ("V1", "V6")}
    assert tall["V1"] < -0.2
    assert tall["V6"] > 0.3
    assert 0.5 < np.median(lead["II"][normal].max(axis=1)) < 2.0  # millivolts


def test_an_ectopic_beat_is_early_and_wide(ecgs: tuple[np.ndarray, np.ndarray]) -> None:
    signals, _ = synthetic_ecgs(100, seed=5)
    inside = signals.numpy()[3::5]
    two = inside[:, LEADS.index("II")]
    down = two.min(axis=1)
    other = synthetic_ecgs(100, seed=5)[0].numpy()[0::5][:, LEADS.index("II")].min(axis=1)
    assert np.mean(down < other.min() - 0.1) > 0.8  # against the direction of the others
    assert np.median((two < down[:, None] / 2).sum(axis=1)) >= 3  # of 64 samples a second: 50 ms and more


def test_ecgs_are_the_same_each_time() -> None:
    signals, rhythms = synthetic_ecgs(12, seed=9)
    again, _ = synthetic_ecgs(30, seed=9)
    assert torch.equal(signals, again[:12])
    assert signals.dtype == torch.float32
    assert rhythms.tolist() == [i % 5 for i in range(12)]
    three, _ = synthetic_ecgs(12, leads=3, seed=9)
    assert torch.equal(three, signals[:, [0, 1, 7]])
    assert not torch.equal(synthetic_ecgs(12, seed=8)[0], signals)


# --- data sets -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind", "shape", "classes"),
    [
        pytest.param("head-phantoms", "volume", (1, 16, 32, 32), 2, marks=pytest.mark.slow),
        ("ecg-synthetic", "signal", (12, 256), 5),
    ],
)
def test_data_sets(name: str, kind: str, shape: tuple[int, ...], classes: int) -> None:
    data = load_dataset(name, seed=1)
    assert (data.kind, data.input_shape, data.num_classes) == (kind, shape, classes)
    assert (len(data.train), len(data.test)) == (320, 80)
    for split in (data.train, data.test):
        counts = torch.bincount(split.targets)
        assert int(counts.max() - counts.min()) <= 1
    joined = torch.cat([data.train.inputs, data.test.inputs]).flatten(1)
    assert len(torch.unique(joined, dim=0)) == 400
    assert torch.equal(load_dataset(name, seed=1).train.inputs, data.train.inputs)
    assert not torch.equal(load_dataset(name, seed=2).train.inputs, data.train.inputs)
