"""Time to an image: seconds of one core until the mean PSNR of several images is good enough, ours beside a peer's."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedaudit import BadInput, Observation, Scenario, ThreatModel, make_attack, observe, simulate
from fedaudit.attacks.inversion import GradientInversion, make_step, one_gradient, prepare
from fedaudit.evaluation import mse, psnr_from_mse
from fedaudit.task import TaskInfo
from fedaudit.utils import Display, Quiet, generator, one_thread
from fedaudit_lab.bench.cases import Prepared

# Chosen on images of CIFAR-10's training split, which are never among the measured ones.
PRESET: dict[str, Any] = {"iterations": 800, "learning_rate": 0.2}
GOALS = (20.0, 25.0)
_EVERY = 10  # iterations between two measurements of the images


@dataclass
class _Run:
    """One image under attack by one tool: how to go on, and the reconstruction so far, normalised."""

    iterate: Callable[[], object]
    image: Tensor
    left: int


def measure(
    *,
    images: int,
    model: str = "convnet-small",
    data_dir: Path | None = None,
    peers: Sequence[str] = (),
    cap: float = 600.0,
    display: Display | None = None,
) -> dict[str, Any]:
    """Attack ``images`` gradients of one image each, in turn, and note when their mean PSNR reaches each goal.

    Ours is AGIC with :data:`PRESET`, set-up, tracing and guard included; the peer is breaching's ``invertinggradients``
    with all of its own settings (24,000 iterations, total variation 0.2), and once more with our total variation, for
    its own is much for an untrained network. All start from the same noise and are given the same labels. PSNR is taken
    outside of the clock.
    """
    observations, truths = _victims(images, model, data_dir)
    tools: dict[str, Callable[[Observation, Tensor], _Run]] = {"fedaudit": _ours()}
    if peers:
        tools["breaching"] = _peer(None)
        tools["breaching, our TV"] = _peer(1e-4)
    with one_thread():
        rows = [_race(n, start, observations, truths, cap, display or Quiet()) for n, start in tools.items()]
    speedups: list[dict[str, Any]] = []
    for goal in map(str, GOALS):
        ours = rows[0]["seconds"][goal]
        for row in rows[1:] if ours is not None else []:
            theirs = row["seconds"][goal]
            ratio = (theirs or row["cpu_seconds"]) / ours
            speedups.append({"goal": goal, "peer": row["tool"], "ratio": ratio, "reached": theirs is not None})
    return {
        "model": model,
        "images": len(observations),
        "data": "cifar10" if data_dir else "photos",
        "tools": rows,
        "speedups": speedups,
    }


def _victims(images: int, model: str, data_dir: Path | None) -> tuple[list[Observation], list[Tensor]]:
    scenario = Scenario.model_validate(
        {
            "data": {"name": "cifar10", "split": "test"} if data_dir else {"name": "photos"},
            "model": {"name": model, "initialisation": "default", "batch_norm": "eval"},
            "federations": [
                {"name": "fedsgd", "algorithm": "fedsgd", "clients": images, "examples": images, "batch_size": 1}
            ],
            "attacks": [{"name": "agic"}],
        }
    )
    recording = simulate(scenario, data_dir=data_dir, progress=False)
    seen = observe(recording.transcript, ThreatModel()).split()
    return seen, [recording.truth.inputs[o.messages[0].round, o.messages[0].client] for o in seen]


def _start(observation: Observation) -> Tensor:
    return torch.randn(
        (1, *observation.task_info.input_shape), generator=generator(0, "bench", observation.messages[0].client)
    )


def _ours() -> Callable[[Observation, Tensor], _Run]:
    attack = make_attack("agic", PRESET)
    if not isinstance(attack, GradientInversion):
        raise BadInput("the benchmark's attack isn't a gradient inversion")

    def start(observation: Observation, noise: Tensor) -> _Run:
        ready = attack.prepare(observation, "cpu")
        settings = attack.optimisation()
        settings.pop("average")
        pixel_range = observation.task_info.pixel_range(noise)
        step = make_step(attack.objective(ready), [noise], pixel_range, torch.Generator(), **settings)
        return _Run(step, noise, attack.iterations)

    return start


def _peer(total_variation: float | None) -> Callable[[Observation, Tensor], _Run]:
    def start(observation: Observation, noise: Tensor) -> _Run:
        from fedaudit_lab.bench.breaching import attacker, iteration

        ready = prepare(observation, "auto", "cpu")
        target = [ready.gradient[name] for name in ready.victim.parameters]
        pixel_range = observation.task_info.pixel_range(noise)
        victim = Prepared(ready.victim, ready.labels, target, noise, pixel_range, one_gradient(1))
        mean, std = _normalisation(observation.task_info, noise)
        peer, shared = attacker(victim, mean, std, total_variation)
        candidate = noise.requires_grad_()
        return _Run(iteration(peer, shared, victim, candidate), candidate, int(peer.cfg.optim.max_iterations))

    return start


def _normalisation(task_info: TaskInfo, like: Tensor) -> tuple[Tensor, Tensor]:
    black, white = task_info.pixel_range(like)
    std = 1 / (white - black)
    return (-black * std)[..., :1, :1], std[..., :1, :1]


def _race(
    name: str,
    start: Callable[[Observation, Tensor], _Run],
    observations: Sequence[Observation],
    truths: Sequence[Tensor],
    cap: float,
    display: Display,
) -> dict[str, Any]:
    report = display.stage(f"{name}: mean PSNR on its way to {GOALS[-1]:g} dB", GOALS[-1])
    cpu = wall = 0.0
    reached: dict[str, float | None] = {str(goal): None for goal in GOALS}
    curve: list[tuple[float, float]] = []
    runs: list[_Run] = []
    iterations = 0
    while cpu < cap and any(second is None for second in reached.values()):
        before, began = time.process_time(), time.perf_counter()
        if not runs:
            runs = [start(o, _start(o)) for o in observations]
        steps = min(_EVERY, runs[0].left)
        for run in runs:
            for _ in range(steps):
                run.iterate()
            run.left -= steps
        cpu += time.process_time() - before
        wall += time.perf_counter() - began
        iterations += steps
        quality = _mean_psnr(runs, observations, truths)
        curve.append((cpu, quality))
        report(min(quality, GOALS[-1]))
        for goal in GOALS:
            if quality >= goal and reached[str(goal)] is None:
                reached[str(goal)] = cpu
        if steps < _EVERY or not runs[0].left:
            break
    return {
        "tool": name,
        "seconds": reached,
        "iterations": iterations,
        "psnr": curve[-1][1],
        "cpu_seconds": cpu,
        "wall_seconds": wall,
        "curve": curve,
    }


def _mean_psnr(runs: Sequence[_Run], observations: Sequence[Observation], truths: Sequence[Tensor]) -> float:
    errors = [
        mse(o.task_info.denormalise(run.image.detach()).clamp(0, 1), truth)
        for run, o, truth in zip(runs, observations, truths, strict=True)
    ]
    return psnr_from_mse(torch.cat(errors)).mean().item()
