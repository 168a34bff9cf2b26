"""Held-out examples stand for a client's own only where nothing in the data tells the two apart."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import binom
from torch import Tensor

from fedaudit.data import load_dataset
from fedaudit.evaluation.shift import SHIFTED, comparable, of_clients, shift_test
from fedaudit.transcript.truth import Truth
from fedaudit.utils.seeds import generator
from tools.measure.nulls import LEAKS, NULLS


def drawn(name: str, count: int, seed: int, others: int = 300) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return so many examples with their labels, and other ones, of one data set."""
    data = load_dataset(name).train
    order = torch.randperm(len(data.inputs), generator=generator(seed, "drawn"))
    own, rest = order[:count], order[count : count + others]
    return data.inputs[own].clone(), data.targets[own], data.inputs[rest], data.targets[rest]


def marked(x: Tensor) -> Tensor:
    x[..., :2, -2:] = 1
    return x


def softer(x: Tensor) -> Tensor:
    return torch.nn.functional.avg_pool2d(torch.nn.functional.pad(x, (1,) * 4, mode="replicate"), 3, 1)


def older(x: Tensor) -> Tensor:
    return torch.cat([x[:, :1] + 1.5 * x[:, :1].std(), x[:, 1:]], dim=1)


def headed(x: Tensor) -> Tensor:
    x[:, :4] = x[0, :4].clone()
    return x


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [("digits", 1), ("digits", 8), ("notes", 4), ("breast-cancer", 16)])
def test_examples_of_the_same_people_are_told_apart_as_seldom_as_the_level_says(name, count):
    audits = 15 if name == "notes" else 40
    alarms = sum(shift_test(*drawn(name, count, seed, 100), seed=seed) <= 0.05 for seed in range(audits))
    assert alarms <= binom.ppf(1 - 1e-4, audits, 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("count", [4, 16])
@pytest.mark.parametrize(
    ("name", "shifted"), [("digits", marked), ("digits", softer), ("breast-cancer", older), ("notes", headed)]
)
def test_a_site_of_its_own_is_told_by_four_examples(name, shifted, count):
    found = 0
    for seed in range(3):
        own, labels, others, other_labels = drawn(name, count, seed, 150)
        found += shift_test(shifted(own), labels, others, other_labels, seed=seed) <= SHIFTED
    assert found >= (3 if shifted is not older or count > 4 else 1)


def test_a_client_of_one_class_is_no_site_of_its_own():
    """What goes by class alone is no shift: candidates of the same class stand for one another."""
    data = load_dataset("digits").train
    alone = torch.nonzero(data.targets == 3).flatten()  # in the order of their writers
    alone = alone[torch.randperm(len(alone), generator=generator(0, "threes"))[:12]]
    rest = torch.ones(len(data.targets), dtype=torch.bool)
    rest[alone] = False
    told = shift_test(data.inputs[alone], data.targets[alone], data.inputs[rest], data.targets[rest], seed=0)
    unlabelled = shift_test(data.inputs[alone], alone * 0, data.inputs[rest], data.targets[rest] * 0, seed=0)
    assert told > 0.05
    assert unlabelled <= 0.001


def test_where_held_out_examples_may_not_serve_only_those_of_the_same_clients_are_left():
    """Of the same client in another round, too; of other clients none."""
    inputs, labels, others, other_labels = drawn("digits", 20, 0)
    keys = [(0, 0), (0, 1), (1, 0)]
    for shifted in (False, True):
        own = [marked(part.clone()) if shifted else part for part in inputs.split([8, 4, 8])]
        truth = Truth(
            dict(zip(keys, own, strict=True)),
            dict(zip(keys, labels.split([8, 4, 8]), strict=True)),
            torch.cat([*own, others]),
            torch.cat([labels, other_labels]),
            {},
        )
        used, _ = of_clients(truth, [(1, 0)])
        assert used.equal(torch.cat([own[2], own[0]]))
        kept, p_value = comparable(truth, [(1, 0)], seed=0)
        assert (p_value <= SHIFTED) is shifted
        assert kept.candidates.equal(used if shifted else truth.candidates)


def test_nothing_to_compare_is_no_shift():
    own, labels, others, other_labels = drawn("digits", 4, 0)
    assert shift_test(own, labels, others[:0], other_labels[:0], seed=0) == 1
    assert shift_test(own * 0, labels, others * 0, other_labels, seed=0) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "images of a site, marked, 4",
        "images of the same people, labels name them, candidates have one of each",
        "volumes of a site, marked",
    ],
)
def test_another_picture_of_the_same_site_or_person_is_no_leak_and_a_copy_is_one(name):
    audit = NULLS[name].audit
    assert all(audit(seed, planted=False) not in LEAKS for seed in range(2))
    assert all(audit(seed, planted=True) in LEAKS for seed in range(2))
