"""Moves by shift and flip that the objective alone chooses: what they find, what they cost, what they never do."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fedaudit.attacks import make_attack
from fedaudit.attacks.inversion.objectives import Objective
from fedaudit.attacks.inversion.reconstruct import affordable, explore, moves, with_move
from fedaudit.evaluation.image_metrics import mse, psnr_from_mse
from fedaudit.pipeline.prepare import resolve
from fedaudit.pipeline.run import record
from fedaudit.scenario.scenario import scenario_from
from fedaudit.transcript.observation import observe
from fedaudit.transcript.threat import ThreatModel
from fedaudit.utils.seeds import generator
from tests.evaluation.test_registration import pictures

RANGE = (torch.zeros((1, 3, 1, 1)), torch.ones((1, 3, 1, 1)))
SETTINGS: dict[str, Any] = {"learning_rate": 0.003, "optimiser": "adam", "signed": False, "clamp": True}


def things(count: int) -> Tensor:
    """Return pictures of a thing in the middle of an even ground, so that a shift loses nothing."""
    images = torch.full((count, 3, 16, 16), 0.5)
    images[..., 6:10, 6:10] = pictures(count, 4)
    return images


def matching(true: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Return an objective that hardly knows where a thing stands: its spectrum's amplitudes, a little its place."""
    amplitudes = torch.fft.rfft2(true, norm="ortho").abs()

    def objective(images: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaf = images.detach().requires_grad_()
            blind = (torch.fft.rfft2(leaf, norm="ortho").abs() - amplitudes).square().mean()
            value = blind + 0.1 * (leaf - true).square().mean()
        return value.detach(), torch.autograd.grad(value, leaf)[0]

    return objective


class Counted:
    """An objective that counts how often it is evaluated."""

    def __init__(self, objective: Objective) -> None:
        self.objective, self.calls = objective, 0

    def __call__(self, images: Tensor) -> tuple[Tensor, ...]:
        self.calls += 1
        return self.objective(images)


def run(true: Tensor, first: Tensor, rounds: int = 1) -> tuple[Tensor, list[float], list[int], int]:
    counted, done = Counted(matching(true)), list[int]()
    images, trace = explore(
        counted, lambda: first, RANGE, generator(0, "noise"), lambda now, total: done.append(now),
        starts=1, start_iterations=60, rounds=rounds, **SETTINGS,
    )  # fmt: skip
    assert trace.iterations[-1] == counted.calls == done[-1]
    assert trace.snapshots[-1].equal(images)
    return images, trace.objective, trace.iterations, counted.calls


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flipped", "down", "right"), [(False, 4, -2), pytest.param(True, 0, 4, marks=pytest.mark.slow), (True, -4, 2)]
)
def test_a_picture_in_the_wrong_place_is_put_right(flipped, down, right):
    true = things(1)
    first = with_move(true, 0, flipped, down, right)
    images, objective, _, _ = run(true, first, rounds=3)
    stuck, *_ = run(true, first, rounds=0)
    assert psnr_from_mse(mse(images, true)).item() > psnr_from_mse(mse(stuck, true)).item() + 4
    assert objective[-1] < objective[0]


def test_every_image_of_a_batch_moves_on_its_own():
    true = things(2)
    first = with_move(with_move(true, 0, False, 4, 0), 1, True, 0, -4)
    images, objective, _, _ = run(true, first, rounds=2)
    stuck, *_ = run(true, first, rounds=0)
    assert (psnr_from_mse(mse(images, true)) > psnr_from_mse(mse(stuck, true)) + 3).all()
    assert objective == sorted(objective, reverse=True)


@pytest.mark.slow
def test_the_objective_never_rises_and_the_same_seed_gives_the_same_bits():
    true, noise = things(1), torch.rand((1, 3, 16, 16), generator=generator(3, "start"))
    images, objective, iterations, calls = run(true, noise, rounds=2)
    assert all(a >= b for a, b in itertools.pairwise(objective))
    assert matching(true)(images)[0].item() == pytest.approx(objective[-1])
    again = run(true, noise, rounds=2)
    assert again[0].equal(images)
    assert (again[1], again[2], again[3]) == (objective, iterations, calls)


def test_moves_are_a_grid_of_eighths_and_shift_without_wrapping():
    every = moves((16, 32), 0)
    assert len(every) == 2 * 7 * 7 - 1 == len(set(every))
    assert {down for _, down, _ in every} == set(range(-6, 7, 2))
    assert {right for *_, right in every} == set(range(-12, 13, 4))
    assert (False, 0, 0) not in every
    odd = moves((16, 32), 1)
    assert {down for _, down, _ in odd} == {-5, -3, -1, 1, 3, 5}
    image = torch.arange(12.0).view(1, 1, 3, 4).repeat(2, 1, 1, 1)
    moved = with_move(image, 1, True, 1, -2)
    assert moved[0].equal(image[0])
    assert moved[1, 0].tolist() == [[1, 0, 0, 0], [1, 0, 0, 0], [5, 4, 4, 4]]


def test_starts_and_rounds_fit_the_budget():
    """A start costs an evaluation more than its iterations; a round 97 moved copies and four short descents."""
    a_round = 97 + 4 * 61
    assert affordable(61 + a_round - 1, 1, 60) == (0, 0)
    assert affordable(61 + a_round, 1, 60) == (1, 1)
    assert affordable(2 * 401 - 1, 4, 400) == (1, 1)
    assert affordable(2 * 401, 4, 400) == (2, 0)
    assert affordable(4 * 401 + 3 * a_round - 1, 4, 400) == (4, 2)
    assert affordable(0, 3, 60) == (0, 0)


def test_the_start_of_least_objective_is_kept_and_what_starts_cost_is_counted():
    """Of four starts one is near; the others stay in the wrong place."""
    true = things(1)
    firsts = [with_move(true, 0, False, down, 0) for down in (-4, 4)] + [true + 0.05, with_move(true, 0, True, 4, 4)]
    given, counted, done = iter(firsts), Counted(matching(true)), list[int]()
    images, trace = explore(
        counted, lambda: next(given), RANGE, generator(0, "noise"), lambda now, _: done.append(now),
        starts=4, start_iterations=100, rounds=0, **SETTINGS,
    )  # fmt: skip
    assert counted.calls == 4 * 101 == trace.iterations[-1] == done[-1]
    assert done == sorted(done)
    assert trace.objective == [pytest.approx(float(counted(images)[0]))]
    assert psnr_from_mse(mse(images, true)).item() > 30


@pytest.mark.slow
def test_starts_descend_what_they_are_given_in_turn_and_the_objective_chooses():
    """The objective of every other start has its image elsewhere; what is chosen is near the true one, first or not."""
    true = things(1)
    right, wrong = matching(true), matching(1 - true)
    for turns in ([right, wrong], [wrong, right], [wrong, wrong, right]):
        images, trace = explore(
            right, lambda: torch.full_like(true, 0.4), RANGE, generator(0, "noise"), lambda *_: None,
            at_first=turns, starts=len(turns), start_iterations=200, rounds=0, **SETTINGS,
        )  # fmt: skip
        alone, _ = explore(
            right, lambda: torch.full_like(true, 0.4), RANGE, generator(0, "noise"), lambda *_: None,
            starts=1, start_iterations=200, rounds=0, **SETTINGS,
        )  # fmt: skip
        assert images.equal(alone)
        assert trace.objective == [pytest.approx(float(right(alone)[0]))]


@pytest.mark.parametrize(("iterations", "plan"), [(980, (0, 0)), (1_070, (2, 0)), (2_400, (4, 0)), (10_000, (4, 17))])
def test_whoever_asks_for_few_iterations_gets_one_descent(iterations, plan):
    settings = make_attack("agic-plus", {"iterations": iterations}).settings()
    budget = round(settings["moving"] * iterations)
    assert affordable(budget, settings["starts"], settings["start_iterations"]) == plan


@pytest.mark.long
@pytest.mark.slow
def test_the_attack_moves_within_its_iterations_whatever_the_batch():
    """One start and one round of moves before the descent; a gradient's batch of two on the fast engine."""
    (recorded,) = record(
        resolve(
            scenario_from(
                {
                    "name": "moves",
                    "data": {"name": "photos"},
                    "model": {"name": "lenet"},
                    "federations": [{"name": "f", "algorithm": "fedsgd", "clients": 1, "examples": 2, "batch_size": 2}],
                    "attacks": ["agic-plus"],
                    "threat": {"knows_labels": True},
                }
            )
        )
    )
    (seen,) = observe(recorded.transcript, ThreatModel(knows_labels=True)).split("update")
    attack = make_attack("agic-plus", {"iterations": 680, "moving": 0.6, "starts": 1, "start_iterations": 60})
    calls: list[tuple[int, int]] = []
    found: Any = attack(seen, generator=generator(0, "x"), progress=lambda done, total: calls.append((done, total)))
    assert found.trace.iterations[0] == 61
    assert found.trace.iterations == sorted(found.trace.iterations)
    assert found.trace.iterations[-1] == found.iterations == 680
    assert len(found.trace.snapshots) == len(found.trace.iterations)
    assert found.trace.snapshots[-1].equal(found.images)
    assert calls == sorted(calls)
    assert calls[-1] == (680, 680)
    again: Any = attack(seen, generator=generator(0, "x"))
    assert again.images.equal(found.images)
