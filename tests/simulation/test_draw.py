"""Which examples clients hold: other ones for every seed, so that repetitions are repetitions."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedaudit.data import Dataset, load_dataset
from fedaudit.simulation.simulator import partition_clients
from fedaudit.simulation.spec import FederationSpec
from fedaudit.utils.fingerprint import tensor_digest
from fedaudit_lab.studies.spec import builtin_studies, expand, load_study

PHOTOS, DIGITS = load_dataset("photos"), load_dataset("digits")


def held(dataset: Dataset, examples: int | None, seed: int, split: str = "test", **options: object) -> list[bytes]:
    spec = FederationSpec.model_validate({"name": "f", "clients": 1, "examples": examples, **options})
    (data,) = partition_clients(dataset, split, spec, seed=seed)
    return [tensor_digest(x) for x in data.inputs]


@given(examples=st.integers(1, 16), seed=st.integers(0, 10**6))
def test_seeds_that_follow_each_other_have_different_examples(examples: int, seed: int) -> None:
    drawn = [x for s in range(seed, seed + 10) for x in held(PHOTOS, examples, s)]
    one_pass = seed * examples // len(PHOTOS.test) == (seed + 10) * examples // len(PHOTOS.test)
    assert not one_pass or len(set(drawn)) == 10 * examples
    assert all(len(set(drawn[i : i + examples])) == examples for i in range(0, len(drawn), examples))


@given(examples=st.integers(1, 300), seed=st.integers(0, 9))
def test_classes_come_in_turn(examples: int, seed: int) -> None:
    spec = FederationSpec.model_validate({"name": "f", "clients": 1, "examples": examples})
    (data,) = partition_clients(DIGITS, "test", spec, seed=seed)
    counts = torch.bincount(data.targets, minlength=10)
    assert int(counts.sum()) == examples
    within = (seed + 1) * examples <= 10 * int(torch.bincount(DIGITS.test.targets).min())
    # Where a pass over a class ends within a portion, one of its examples may come again, and is passed over.
    assert not within or int(counts.max() - counts.min()) <= 1


def test_all_federations_of_a_scenario_hold_the_same_and_all_examples_are_all() -> None:
    assert set(held(PHOTOS, 4, 7)) == set(held(PHOTOS, 4, 7, name="another"))
    assert set(held(PHOTOS, len(PHOTOS.test), 3)) == set(held(PHOTOS, None, 3))


def test_the_first_ones_can_be_asked_for() -> None:
    inputs, labels = PHOTOS.test.inputs, PHOTOS.test.targets.tolist()
    first = {tensor_digest(inputs[labels.index(c)]) for c in range(4)}
    assert set(held(PHOTOS, 4, 0, sampling="first")) == set(held(PHOTOS, 4, 9, sampling="first")) == first
    assert set(held(PHOTOS, 4, 0)) != first


def test_drawn_without_regard_to_classes_a_client_has_several_of_some_and_none_of_others() -> None:
    options = {"name": "f", "clients": 1, "examples": 10, "sampling": "uniform"}
    counts = torch.zeros(10)
    several = 0
    for seed in range(100):
        (data,) = partition_clients(DIGITS, "train", FederationSpec.model_validate(options), seed=seed)
        own = torch.bincount(data.targets, minlength=10)
        counts += own
        several += bool(own.max() > 1)
    # Ten draws of ten classes are all different with a chance of 10!/10^10, 0.04 %.
    assert several >= 98
    expected = 1000 * torch.bincount(DIGITS.train.targets, minlength=10) / len(DIGITS.train)
    assert float(((counts - expected) ** 2 / expected).sum()) < 27.9  # chi-squared, nine degrees, 0.1 %
    assert len({x for seed in range(16) for x in held(PHOTOS, 1, seed, sampling="uniform")}) == min(
        16, len(PHOTOS.test)
    )


@cache
def loaded(name: str, image_size: int | None, limit: int | None, seed: int) -> Dataset:
    return load_dataset(name, image_size=image_size, limit=limit, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", builtin_studies())
def test_ten_repetitions_of_every_built_in_study_hold_ten_different_victims(name: str) -> None:
    study = load_study(name)
    smoke = study.scales["smoke"].model_copy(update={"repetitions": 10, "at": {}})
    point = {axis: {next(iter(levels)): levels[next(iter(levels))]} for axis, levels in study.axes.items()}
    smoke = smoke.model_copy(update={"only": {}})
    own = expand(study.model_copy(update={"axes": point, "scales": {"smoke": smoke}}), "smoke")
    assert len(own) == 10
    victims = []
    for trial in own:
        scenario = trial.scenario
        generated = scenario.data.name.startswith("leaf")  # by the seed
        data = loaded(
            scenario.data.name, scenario.data.image_size, scenario.data.limit, scenario.seed if generated else 0
        )
        attacked = scenario.federations[-1]
        first = partition_clients(data, scenario.data.split, attacked, seed=scenario.seed)[0]
        victims.append(tensor_digest(first.inputs[0]))
    assert len(set(victims)) == 10
