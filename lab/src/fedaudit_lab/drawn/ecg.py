"""ECGs that are drawn, not measured: by the dynamical model of McSharry et al., 2003. Nobody's heart.

P. E. McSharry, G. D. Clifford, L. Tarassenko, L. A. Smith, A dynamical model for generating synthetic
electrocardiogram signals, IEEE Trans. Biomed. Eng. 50(3), 2003. A point runs round a circle, once a beat; wherever it
passes the angle of a wave (P, Q, R, S, T) it is pushed up and down. Here the push is a vector in space, the heart's
dipole, and the leads are its projections, as in R. Sameni, G. D. Clifford, C. Jutten, M. B. Shamsollahi, Multichannel
ECG and noise modeling, EURASIP J. Adv. Signal Process., 2007.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedaudit.data import Dataset, Layout, Request, add_dataset

RHYTHMS = ("normal", "bradycardia", "tachycardia", "ectopic beat", "atrial fibrillation")
LEADS = ("I", "II", "III", "aVR", "aVL", "aVF", "V1", "V2", "V3", "V4", "V5", "V6")
RATE = 64  # samples a second
_FINE = 4  # steps of the integration for each sample, an even number
_BEFORE = 2.0  # seconds that run before the first sample
_AT_ONCE = 16  # ECGs that are integrated together
_TRAIN, _TEST = 320, 80

Array = np.ndarray[Any, Any]

# Of each wave: its angle and width on the circle (Table I of McSharry et al.), and its dipole in millivolts: to the
# left, to the feet, to the back.
_ANGLES = np.array([-1 / 3, -1 / 12, 0, 1 / 12, 1 / 2]) * np.pi
_WIDTHS = np.array([0.25, 0.1, 0.1, 0.1, 0.4])
_DIPOLES = np.array(
    [[0.09, 0.11, 0.01], [-0.14, -0.06, -0.22], [1.05, 0.95, 0.35], [-0.28, -0.22, 0.45], [0.26, 0.26, -0.12]]
)
# The same of a beat that begins in a ventricle: early, wide, against the others' direction, without P, then a T wave
# the other way. What is left of its turn is the pause that follows such beats.
_ECTOPIC_ANGLES = np.array([0.0, -2.1, -1.85, -1.5, -0.35])
_ECTOPIC_WIDTHS = np.array([0.25, 0.15, 0.22, 0.2, 0.45])
_ECTOPIC_DIPOLES = np.array([[0, 0, 0], [0.25, 0.3, 0.2], [-1.1, -1.3, -0.7], [0.2, 0.1, 0.5], [0.45, 0.5, 0.25]])
_FLUTTER = np.array([0.25, 0.35, -0.9])  # direction of the atria's waves in fibrillation

# Potentials at the electrodes RA, LA, LL, V1 ... V6 of a unit dipole; limb leads lie in the frontal plane at 0 and 60
# degrees, the others in the horizontal one.
_CHEST = np.deg2rad([120, 90, 75, 60, 30, 0])
_ELECTRODES = np.array(
    [[0, 0, 0], [1, 0, 0], [0.5, np.sqrt(0.75), 0], *([np.cos(angle), 0, -np.sin(angle)] for angle in _CHEST)]
)
_LIMBS = np.array([[-1, 1, 0], [-1, 0, 1], [0, -1, 1], [1, -0.5, -0.5], [-0.5, 1, -0.5], [-0.5, -0.5, 1]])


def _lead_matrix() -> Array:
    """Return (12, 9): the leads from the potentials at the electrodes; the V leads against the limbs' noise, too."""
    matrix = np.zeros((12, 9))
    matrix[:6, :3] = _LIMBS
    matrix[6:, 3:] = np.eye(6)
    return matrix


def pushed(angles: Array, speeds: Array, waves: tuple[Array, Array, Array], rest: Array, step: float) -> Array:
    """Return z(t), dz/dt = −Σ aᵢ ω Δθᵢ/bᵢ² exp(−Δθᵢ²/2bᵢ²) − (z − z₀), (n, m + 1, c) at whole steps, from z = z₀ on.

    The amplitudes aᵢ are the heights of the waves, as in Sameni et al.; McSharry et al., Table I, have aᵢ ω/bᵢ². On the
    limit cycle, where it begins, the point stays, so its angle is known at every time; z is linear and is integrated by
    Simpson's rule with the exact decay, of fourth order as the authors' Runge-Kutta.

    Args:
        angles: (n, 2m + 1) of the point, at steps and in their middles.
        speeds: ω likewise, in radians a second.
        waves: (n, 2m + 1, k) angles θᵢ and widths bᵢ, or what broadcasts to it, and (n, 2m + 1, k, c) amplitudes.
        rest: z₀ likewise, (n, 2m + 1, c).
        step: seconds of a whole step.
    """
    where, widths, amplitudes = waves
    from scipy.signal import lfilter  # not above: listing data sets shall be quick

    apart = np.mod(angles[..., None] - where + np.pi, 2 * np.pi) - np.pi
    push = -apart / widths**2 * np.exp(-(apart**2) / (2 * widths**2)) * speeds[..., None]
    force = np.einsum("ntk,ntkc->ntc", push, np.broadcast_to(amplitudes, (*push.shape, amplitudes.shape[-1]))) + rest
    decay = np.exp(-step)
    parts = force[:, :-2:2] * decay + 4 * np.exp(-step / 2) * force[:, 1::2] + force[:, 2::2]
    parts = np.concatenate([rest[:, :1], step / 6 * parts], axis=1)
    return np.asarray(lfilter([1.0], [1.0, -decay], parts, axis=1))


def synthetic_ecgs(n: int, *, leads: int = 12, length: int = 256, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Draw ECGs of made-up hearts: millivolts float32 (n, leads, length), and their rhythms' places, int64 (n,).

    Each has waves of its own sizes, widths, places and direction; breathing moves the baseline and the rate (two waves
    of 0.1 and 0.25 Hz, where the paper's spectrum has two bands); electrodes add noise, so Einthoven's law holds. The
    first examples are the same whatever ``n`` is.

    Args:
        leads: 12, or 3: I, II and V2.
        length: samples, of which ``RATE`` are a second.
    """
    rhythms = np.arange(n) % len(RHYTHMS)
    steps = round(_BEFORE * RATE) * _FINE // 2 + length * _FINE // 2
    times = np.arange(2 * steps + 1) / (RATE * _FINE) - _BEFORE
    shape = (n, len(times))
    angles, speeds, ectopic = np.empty(shape), np.empty(shape), np.zeros(shape, dtype=bool)
    where, widths = np.empty((2, n, 2, 5))
    dipoles, rest = np.empty((n, 2, 5, 3)), np.empty((*shape, 3))
    noise = np.empty((n, 9, length))
    for i in range(n):
        rng = np.random.default_rng([seed, i])
        rate = _heart_rate(rng, RHYTHMS[rhythms[i]])
        angles[i], speeds[i], ectopic[i] = _beats(rng, RHYTHMS[rhythms[i]], rate, times, length / RATE)
        quick = np.sqrt(rate / 60)  # waves take a larger share of short beats, as in the authors' program
        stretch = np.array([quick, quick, 1, quick, np.sqrt(quick)])
        jitter = rng.normal(1, 0.05, (2, 5))
        where[i] = _ANGLES * stretch * jitter[0], _ECTOPIC_ANGLES
        widths[i] = _WIDTHS * quick * jitter[1], _ECTOPIC_WIDTHS
        sizes = rng.lognormal(0, 0.12) * rng.lognormal(0, (0.2, 0.25, 0.1, 0.25, 0.25))
        turn = _rotation(rng.normal(0, np.deg2rad(14), 3))
        dipoles[i] = np.stack([_DIPOLES * sizes[:, None], _ECTOPIC_DIPOLES * rng.lognormal(0, 0.12)]) @ turn.T
        breath, shift, depth = rng.uniform(0.2, 0.33), rng.uniform(0, 2 * np.pi), rng.uniform(0.02, 0.15)
        rest[i] = np.sin(2 * np.pi * breath * times + shift)[:, None] * depth * turn[:, 1]
        if RHYTHMS[rhythms[i]] == "atrial fibrillation":
            dipoles[i, :, 0] = 0
        noise[i] = rng.normal(0, rng.uniform(0.005, 0.02), noise[i].shape)
    kept = np.empty((n, length, 3))
    for rows in np.array_split(np.arange(n), -(-n // _AT_ONCE)):
        one, beat = rows[:, None], ectopic[rows].astype(np.int64)
        waves = (where[one, beat], widths[one, beat], dipoles[one, beat])
        moment = pushed(angles[rows], speeds[rows], waves, rest[rows], 2 / (RATE * _FINE))
        kept[rows] = moment[:, -length * _FINE // 2 :].reshape(len(rows), length, _FINE // 2, 3).mean(axis=2)
    for i in np.flatnonzero(rhythms == RHYTHMS.index("atrial fibrillation")).tolist():
        kept[i] += _fibrillation(np.random.default_rng([seed, i, 1]), length)[:, None] * _FLUTTER
    signals = _lead_matrix() @ (np.einsum("ec,ntc->net", _ELECTRODES, kept) + noise)
    signals[:, 6:] -= noise[:, :3].mean(axis=1, keepdims=True)
    picked = signals if leads == 12 else signals[:, [LEADS.index(lead) for lead in ("I", "II", "V2")]]
    return torch.from_numpy(picked.astype(np.float32)), torch.from_numpy(rhythms)


def _heart_rate(rng: np.random.Generator, rhythm: str) -> float:
    """Return beats a minute."""
    low, high = {"bradycardia": (38, 50), "tachycardia": (110, 160), "atrial fibrillation": (75, 130),
                 "ectopic beat": (62, 92)}.get(rhythm, (60, 95))  # fmt: skip
    return float(rng.uniform(low, high))


def _beats(
    rng: np.random.Generator, rhythm: str, rate: float, times: Array, seconds: float
) -> tuple[Array, Array, Array]:
    """Return the point's angle and speed at each time, and whether the beat is an ectopic one.

    A beat is a turn from −π to π, at one speed; R lies in its middle.
    """
    mean = 60 / rate
    begin = float(times[0]) - rng.uniform(0, mean)
    phases = rng.uniform(0, 2 * np.pi, 2)
    starts, durations = [begin], []
    while starts[-1] <= times[-1]:
        if rhythm == "atrial fibrillation":
            factor = float(np.clip(rng.normal(1, 0.22), 0.55, 1.6))
        else:
            now = starts[-1]
            factor = 1 + 0.02 * np.sin(0.2 * np.pi * now + phases[0]) + 0.03 * np.sin(0.5 * np.pi * now + phases[1])
        durations.append(mean * factor)
        starts.append(starts[-1] + durations[-1])
    beat = np.searchsorted(starts, times, side="right") - 1
    lasting = np.array(durations)[beat]
    angles = 2 * np.pi * (times - np.array(starts)[beat]) / lasting - np.pi
    ectopic = np.zeros(len(times), dtype=bool)
    if rhythm == "ectopic beat":  # one that lies within the recording
        middles = np.array(starts[:-1]) + 0.2 * np.array(durations)
        inside = np.flatnonzero((middles > 0.15 * seconds) & (middles < 0.75 * seconds))
        ectopic = beat == (rng.choice(inside) if len(inside) else beat[-1])
    return angles, 2 * np.pi / lasting, ectopic


def _rotation(angles: Array) -> Array:
    """Return the rotation by these angles about the three axes, one after the other."""
    turn = np.eye(3)
    for axis, angle in enumerate(angles):
        i, j = [k for k in range(3) if k != axis]
        one = np.eye(3)
        one[i, i] = one[j, j] = np.cos(angle)
        one[i, j], one[j, i] = -np.sin(angle), np.sin(angle)
        turn = one @ turn
    return turn


def _fibrillation(rng: np.random.Generator, length: int) -> Array:
    """Return the waves of fibrillating atria in millivolts: 4 to 9 a second, of changing height."""
    times = np.arange(length) / RATE
    speed = rng.uniform(5, 8) + 0.6 * np.sin(2 * np.pi * rng.uniform(0.2, 0.5) * times)
    phase = rng.uniform(0, 2 * np.pi) + 2 * np.pi * np.cumsum(speed) / RATE
    height = rng.uniform(0.05, 0.1) * (1 + 0.4 * np.sin(2 * np.pi * rng.uniform(0.3, 0.8) * times))
    return np.asarray(height * (np.sin(phase) + 0.35 * np.sin(2 * phase)))


def _ecgs(_: list[Path], request: Request) -> Dataset:
    signals, rhythms = synthetic_ecgs(_TRAIN + _TEST, seed=request.seed)
    return Dataset.from_tensors(
        signals[:_TRAIN],
        rhythms[:_TRAIN],
        test=(signals[_TRAIN:], rhythms[_TRAIN:]),
        kind="signal",
        name=request.name,
        summary=request.summary,
        class_names=RHYTHMS,
        source=f"drawn here by the model of McSharry et al. (2003) with seed {request.seed}; nobody's heart",
    )


add_dataset(
    "ecg-synthetic",
    "400 ECGs of 12 leads, 4 s at 64 Hz, by a model of the heart's dipole; normal, slow, fast, ectopic, fibrillating",
    "drawn by fedaudit",
    Layout(_ecgs),
    kind="signal",
    needs="nothing",
)
