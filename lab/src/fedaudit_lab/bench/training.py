"""How fast the simulator trains, beside a bare PyTorch loop of the same steps: in turn, one thread.

On the CPU by CPU time; on a GPU by the seconds until it has done all.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fedaudit import BadInput, Scenario
from fedaudit.models import set_training_mode
from fedaudit.pipeline import resolve
from fedaudit.simulation import Federation, simulate
from fedaudit.utils import Display, Quiet, device_name, full_precision, native_code, one_thread

_CLIENTS = 2
_PEER_ROUNDS = 4  # of which the first isn't counted
_SIDE = 1024  # of the matrices whose product tells what this core can do


class Case(NamedTuple):
    """A network, its images, its batches, and the steps and rounds of each client."""

    model: str
    width: int | None
    data: str
    pixels: int
    batch: int
    steps: int
    rounds: int = 2


_QUICK = [
    Case("mlp", None, "digits", 28, 16, 20, 20),
    Case("convnet-small", 8, "digits", 28, 32, 6),
]
_FULL = [
    Case("logistic", None, "digits", 28, 32, 40, 20),
    Case("mlp", None, "digits", 28, 16, 40, 20),
    Case("lenet", None, "digits", 28, 32, 16, 10),
    Case("strided-cnn", None, "digits", 28, 32, 40, 10),
    Case("leaky-cnn", None, "digits", 28, 32, 16),
    Case("convnet-small", 8, "digits", 28, 32, 16),
    Case("convnet-small", 16, "photos", 16, 32, 16),
    Case("convnet-small", 16, "photos", 32, 32, 8),
    Case("convnet", 16, "photos", 16, 32, 6),
    Case("convnet", 16, "photos", 32, 32, 4),
    Case("resnet20", None, "photos", 32, 32, 4),
    Case("resnet20-4", None, "photos", 32, 8, 8),
    Case("resnet18", None, "photos", 32, 8, 8),
]


def measure(
    *, quick: bool, device: str = "cpu", peers: Sequence[str] = (), display: Display | None = None
) -> dict[str, Any]:
    """Time clients' local training (SGD with momentum, BatchNorm in training mode) in three ways.

    The bare loop is ``torch.optim.SGD`` on batches that lie ready, and nothing else. The simulator's time is that of a
    federation, with drawing, normalising, encoding and aggregating, in torch's arithmetic and in the fast one.

    Args:
        device: cpu or cuda; there steps are ten times as many, and the fast arithmetic and the peer are left out.
        peers: ``flower``: its simulation engine, whose client trains by our own loop; seconds that pass, not CPU time.
    """
    if device != "cpu" and peers:
        raise BadInput(f"--vs {peers[0]}: it is compared on the CPU only; leave out --device")
    cases = _QUICK if quick else _FULL
    report = (display or Quiet()).stage("local training", len(cases))
    rows = []
    with one_thread():
        for done, case in enumerate(cases, start=1):
            repetitions = 3 if quick else 5
            rows.append(
                _time(case, repetitions, peer="flower" in peers)
                if device == "cpu"
                else _time_there(case._replace(steps=10 * case.steps), repetitions, device)
            )
            report(done)
    return {"native_code": native_code(), "device": device_name(device), "clients": _CLIENTS, "rows": rows}


def _time_there(case: Case, repetitions: int, device: str) -> dict[str, Any]:
    """Time the same on a GPU, in float32 without TF32."""
    federation = _federation(case, "torch", device)
    batches = [(inputs.to(device), targets.to(device)) for inputs, targets in _batches(federation, case)]
    seconds: dict[str, list[float]] = {"bare": [], "simulator": []}
    for _ in range(repetitions + 1):  # the first time doesn't count
        for name, times in seconds.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            if name == "bare":
                with full_precision(device):
                    _bare(federation, batches, clients=_CLIENTS * case.rounds)
            else:
                simulate(federation)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
    bare, simulator = (min(times[1:]) for times in seconds.values())
    missing = dict.fromkeys(("fast", "flower", "gflops", "share"))
    step = 1e3 * bare / (_CLIENTS * case.rounds * case.steps)
    return {**case._asdict(), "bare_ms": step, "simulator": bare / simulator, **missing}


def _time(case: Case, repetitions: int, *, peer: bool) -> dict[str, Any]:
    plain, fast = (_federation(case, arithmetic) for arithmetic in ("torch", "fast"))
    batches = _batches(plain, case)
    with FlopCounterMode(display=False) as counter:
        _bare(plain, batches[:1], clients=1)
    square = torch.randn(_SIDE, _SIDE)
    ways: dict[str, Callable[[], object]] = {
        "bare": lambda: _bare(plain, batches, clients=_CLIENTS * case.rounds),
        "simulator": lambda: simulate(plain),
        "fast": lambda: simulate(fast),
        "matrix": lambda: square @ square,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repetitions + 1):  # the first time doesn't count
        for name, way in ways.items():
            began = time.process_time()
            way()
            seconds[name].append(time.process_time() - began)
    least = {name: min(times[1:]) for name, times in seconds.items()}
    step = least["bare"] / (_CLIENTS * case.rounds * case.steps)
    rate = counter.get_total_flops() / step
    return {
        **case._asdict(),
        "bare_ms": 1e3 * step,
        "simulator": least["bare"] / least["simulator"],
        "fast": least["bare"] / least["fast"],
        "flower": _beside_flower(plain, ways["bare"], repetitions) if peer else None,
        "gflops": rate / 1e9,
        "share": rate / (2 * _SIDE**3 / least["matrix"]),
    }


def _beside_flower(federation: Federation, bare: Callable[[], object], repetitions: int) -> float:
    """Return the bare loop's seconds by those of Flower's rounds."""
    from fedaudit_lab.bench.flower import time_flower

    seconds, _ = time_flower(
        dataclasses.replace(federation, spec=federation.spec.model_copy(update={"rounds": _PEER_ROUNDS}))
    )
    times = []
    for _ in range(repetitions):
        began = time.perf_counter()
        bare()
        times.append(time.perf_counter() - began)
    return min(times) / federation.spec.rounds / (seconds / _PEER_ROUNDS)


def _federation(case: Case, arithmetic: str, device: str = "cpu") -> Federation:
    training = {
        **{"name": "f", "algorithm": "fedavg", "clients": _CLIENTS, "rounds": case.rounds, "arithmetic": arithmetic},
        **{
            "batch_size": case.batch,
            "local_steps": case.steps,
            "learning_rate": 0.01,
            "momentum": 0.5,
            "keep_rounds": [0],
        },
    }
    scenario = Scenario.model_validate(
        {
            "data": {"name": case.data, "image_size": case.pixels},
            "model": {"name": case.model, "width": case.width, "batch_norm": "train"},
            "federations": [training],
            "attacks": [{"name": "labels"}],
            "device": device,
        }
    )
    (federation,) = resolve(scenario).federations
    return dataclasses.replace(federation, accuracy_every=None)


def _batches(federation: Federation, case: Case) -> list[tuple[Tensor, Tensor]]:
    data = federation.client_data[0]
    rows = torch.arange(case.batch * case.steps).remainder(len(data)).split(case.batch)
    return [(federation.task_info.normalise(data.inputs[r]), data.targets[r]) for r in rows]


def _bare(federation: Federation, batches: list[tuple[Tensor, Tensor]], *, clients: int) -> None:
    spec = federation.spec
    model = copy.deepcopy(federation.model).to(federation.device)
    weights = federation.model.state_dict()
    set_training_mode(model, "train")
    for _ in range(clients):
        model.load_state_dict(weights)
        optimiser = torch.optim.SGD(model.parameters(), lr=spec.learning_rate, momentum=spec.momentum)
        for inputs, targets in batches:
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimiser.step()
