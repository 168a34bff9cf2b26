"""What recording costs: time of a round with and without it, bytes on disk, memory."""

from __future__ import annotations

import copy
import math
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from scipy.stats import binom
from torch import Tensor, nn

from fedaudit import Recorder
from fedaudit.models import build_model, set_training_mode
from fedaudit.utils import Display, Quiet, one_thread, peak_memory, start_measuring_memory, temporary_folder

_MODELS = ("convnet-small", "resnet18")  # 0.08 and 11 million parameters
_SHAPE, _BATCH, _CLASSES = (3, 32, 32), 32, 10
_SECONDS = 2.0  # that a client trains, at least


def measure(*, quick: bool, display: Display | None = None) -> dict[str, Any]:
    """Time rounds with and without a recorder in turn, and measure a long recording of 11 million parameters.

    Clients train by SGD with momentum on batches of 32 colour images of 32×32, two seconds or more each; recording
    watches that and writes what they send and what they trained on. The long recording has ten clients of one step on
    one image each. The files of a round are deleted once it is over, so that neither disk nor memory must hold all. The
    ratios are medians with 95 % intervals.
    """
    pairs, clients, rounds = (2, 1, 2) if quick else (15, 2, 100)
    report = (display or Quiet()).stage("recorded rounds", len(_MODELS) * pairs + rounds)
    rows = []
    with one_thread(), temporary_folder() as folder:
        for at, name in enumerate(_MODELS):
            model = build_model(name, input_shape=_SHAPE, outputs=_CLASSES)
            steps = _steps(model)
            data = _examples(_BATCH * steps)
            spent: dict[str, list[float]] = {"without": [], "with": [], "cpu_without": [], "cpu_with": []}
            for pair in range(pairs + 1):
                kept = folder / f"{name}-{pair}"
                recorder = Recorder(kept)
                for recorded in (False, True) if pair % 2 else (True, False):  # neither always goes first
                    began = time.perf_counter(), time.process_time()
                    _round(model, data, clients, recorder if recorded else None)
                    ended = time.perf_counter(), time.process_time()
                    if pair:  # the first warms up
                        spent["with" if recorded else "without"].append(ended[0] - began[0])
                        spent["cpu_with" if recorded else "cpu_without"].append(ended[1] - began[1])
                shutil.rmtree(kept)  # fresh memory for files is a virtual machine's cost, several times that of writing
                report(at * pairs + pair)
            rows.append(
                {
                    "model": name,
                    "parameters": sum(p.numel() for p in model.parameters()),
                    "clients": clients,
                    "steps": steps,
                    **spent,
                    **{key: statistics.median(_ratios(spent, key)) for key in ("ratio", "cpu_ratio")},
                    "interval": _interval(_ratios(spent, "ratio")),
                }
            )
        before = len(_MODELS) * pairs
        volume = _long(folder / "long", rounds, lambda done: report(before + done))
    return {"batch": _BATCH, "pairs": pairs, "rows": rows, "long": volume}


def _ratios(spent: dict[str, list[float]], key: str) -> list[float]:
    """Return the ratio of each pair of rounds: on a machine that others use, too, pairs differ less than rounds."""
    before = key.removesuffix("ratio")
    return [b / a for a, b in zip(spent[f"{before}without"], spent[f"{before}with"], strict=True)]


def _interval(ratios: list[float]) -> tuple[float, float] | None:
    """Return the order statistics that hold the median in 95 of 100 cases at least (sign test); None of too few."""
    n, ranked = len(ratios), sorted(ratios)
    fits = [k for k in range(n // 2) if 2 * binom.cdf(k, n, 0.5) <= 0.05]
    return (ranked[fits[-1]], ranked[n - 1 - fits[-1]]) if fits else None


def _examples(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(n, *_SHAPE, generator=generator), torch.randint(0, _CLASSES, (n,), generator=generator)


def _train(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    """As anybody would write it."""
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for x, y in zip(images.split(_BATCH), labels.split(_BATCH), strict=True):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()


def _steps(model: nn.Module) -> int:
    """Return how many steps take the time that a client trains."""
    tried, data = copy.deepcopy(model), _examples(4 * _BATCH)
    _train(tried, *data)  # the first are slower
    began = time.perf_counter()
    _train(tried, *data)
    return max(1, math.ceil(1.1 * _SECONDS * 4 / (time.perf_counter() - began)))


def _round(model: nn.Module, data: tuple[Tensor, Tensor], clients: int, recorder: Recorder | None) -> None:
    """One round of federated averaging; every round begins with the same model."""
    start = model.state_dict()
    states = []
    if recorder is not None:
        recorder.begin_round(start)
    for client in range(clients):
        local = copy.deepcopy(model)
        if recorder is None:
            _train(local, *data)
        else:
            with recorder.capture() as captured:
                _train(local, *data)
            recorder.update(client, local.state_dict(), captured)
        states.append(local.state_dict())
    if recorder is not None:
        recorder.end_round()
    for key in start:
        torch.stack([state[key].float() for state in states]).mean(0)


def _long(folder: Path, rounds: int, report: Any) -> dict[str, Any]:
    """Record rounds of ten clients of ResNet-18, and count its bytes and the memory beside the model."""
    clients, model = 10, build_model("resnet18", input_shape=_SHAPE, outputs=_CLASSES)
    local, data = copy.deepcopy(model), _examples(1)
    set_training_mode(local, "eval")  # BatchNorm can't normalise a single image
    start = model.state_dict()
    _train(local, *data)
    before = start_measuring_memory()
    written, early, seconds = 0, None, 0.0
    with Recorder(folder) as recorder:
        for number in range(rounds):
            began = time.perf_counter()
            recorder.begin_round(start)
            for client in range(clients):
                local.load_state_dict(start)
                with recorder.capture() as captured:
                    _train(local, *data)
                recorder.update(client, local.state_dict(), captured)
                del captured
            recorder.end_round()
            seconds += time.perf_counter() - began
            files = [f for f in folder.rglob("*") if f.is_file() and f.name != "index.json"]
            written += sum(f.stat().st_size for f in files)
            for file in files:
                file.unlink()
            if number == 0:
                early = peak_memory(before)
            report(number + 1)
    return {
        "model": "resnet18",
        "parameters": sum(p.numel() for p in model.parameters()),
        "rounds": rounds,
        "clients": clients,
        "bytes": written,
        "bytes_of_100_rounds": written // rounds * 100,
        "seconds": seconds,
        "peak_mib_first_round": early,
        "peak_mib": peak_memory(before),
    }
