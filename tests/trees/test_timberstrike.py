"""TimberStrike on trees of which closed forms, or scikit-learn, say what is in the leaves."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from fedaudit.attacks import RowFinding, make_attack
from fedaudit.transcript.observation import Observation, observe
from fedaudit.transcript.threat import ThreatModel
from fedaudit.utils.errors import BadInput, NotApplicable
from fedaudit_trees.model import read_booster
from fedaudit_trees.timberstrike import fewest
from tests.trees.tree_cases import ETA, LAMBDA, boosted, model, noise, rows_of, seen, stump, transcript


def attacked(observation: Observation) -> RowFinding:
    found = make_attack("timberstrike")(observation)
    assert isinstance(found, RowFinding)
    return found


def test_a_stump_tells_how_many_of_which_class_are_on_each_side() -> None:
    # left 6 rows, 2 of class 1: G = 6/2 - 2, H = 6/4; right 4 rows of class 1
    found = attacked(seen((0, 0, model(stump(0, 0.0, (1.0, 1.5), (-2.0, 1.0))), 10)))
    left = found.rows[:, 0] < 0
    assert sorted(found.labels[left].tolist()) == [0, 0, 0, 0, 1, 1]
    assert found.labels[~left].tolist() == [1, 1, 1, 1]


def test_a_regressions_stump_tells_counts_and_mean_labels() -> None:
    # 3 rows of mean 2 below, 5 of mean -1 above: G = -sum of y, H = count
    made = model(stump(1, 0.0, (-6.0, 3.0), (5.0, 5.0)), objective="reg:squarederror")
    found = attacked(seen((0, 0, made, 8), classes=None))
    low = found.rows[:, 1] < 0
    assert found.labels[low].flatten().tolist() == pytest.approx([2.0] * 3)
    assert found.labels[~low].flatten().tolist() == pytest.approx([-1.0] * 5)


# whether the rows are below the first split and below the second, and their labels
SIX = sorted(
    [(True, True, 1), (False, True, 0), (True, False, 1), (True, False, 0), (False, False, 0), (False, False, 0)]
)


def test_the_second_tree_puts_rows_into_its_leaves_by_the_sums() -> None:
    """Left of the first split two of class 1 and one of class 0, right three of class 0; one of each goes below."""
    first = stump(0, 0.0, (-0.5, 0.75), (1.5, 0.75))
    below, above = first["split_conditions"][1:]
    p, q = (1 / (1 + np.exp(-v)) for v in (below, above))
    left = (p - 1 + q, p * (1 - p) + q * (1 - q))
    right = (p - 1 + p + 2 * q, 2 * p * (1 - p) + 2 * q * (1 - q))
    found = attacked(seen((0, 0, model(first), 6), (1, 0, model(stump(1, 0.0, left, right)), 6)))
    assert rows_of(found.rows, found.labels) == SIX


def test_trees_of_others_move_the_margins() -> None:
    """The same two trees, with one of another client in between that moves every row's margin by 1."""
    other = stump(0, -99.0, (0.0, 0.0), (0.0, 0.0))
    other["split_conditions"][1:] = [1.0, 1.0]
    first = stump(0, 0.0, (-0.5, 0.75), (1.5, 0.75))
    p, q = (1 / (1 + np.exp(-v - 1)) for v in first["split_conditions"][1:])
    left = (p - 1 + q, p * (1 - p) + q * (1 - q))
    right = (p - 1 + p + 2 * q, 2 * p * (1 - p) + 2 * q * (1 - q))
    second = model(stump(1, 0.0, left, right))
    found = attacked(seen((0, 0, model(first), 6), (0, 1, model(other), 6), (1, 0, second, 6), clients=2))
    assert rows_of(found.rows, found.labels) == SIX


@pytest.mark.parametrize("logistic", [True, False])
def test_a_deep_first_tree_of_scikit_learns_has_each_leaf_filled_as_there(logistic: bool) -> None:
    x = noise(50, 4)
    y = (x[:, 0] + noise(50, 1, seed=1)[:, 0] > 0).astype(float) if logistic else x[:, 1] ** 2
    made, _ = boosted(x, y, rounds=1, depth=4, logistic=logistic)
    found = attacked(seen((0, 0, made, 50), features=4, classes=2 if logistic else None))
    tree = read_booster(made, "test").trees[0]
    true, rebuilt = tree.reached(x.astype(np.float32)), tree.reached(found.rows.numpy())
    assert sorted(true.tolist()) == sorted(rebuilt.tolist())
    for leaf in np.unique(true):
        own = found.labels.flatten().numpy()[rebuilt == leaf]
        assert own.mean() == pytest.approx(y[true == leaf].mean(), abs=1e-5)


def test_rows_stay_within_the_leaves_that_later_trees_put_them_into() -> None:
    x = noise(40, 3)
    y = (x[:, 0] + noise(40, 1, seed=1)[:, 0] > 0).astype(float)
    made, _ = boosted(x, y, rounds=4, depth=2)
    found = attacked(seen((0, 0, made, 40), features=3))
    assert len(found.rows) == 40
    assert int(found.labels.sum()) == int(y.sum())
    assert found.confidence is not None
    assert bool(((found.confidence >= 0) & (found.confidence <= 1)).all())
    # As many in each leaf of the second tree as there are, which follows from its sums, not from the first tree.
    second = read_booster(made, "test").trees[1]
    counts = [np.bincount(second.reached(rows), minlength=8) for rows in (x.astype(np.float32), found.rows.numpy())]
    assert np.abs(counts[0] - counts[1]).sum() <= 4


@pytest.mark.parametrize(("n", "ones"), [(4, 4), (7, 5), (9, 1), (31, 17)])
def test_a_value_alone_gives_the_fewest_examples_that_it_can_be_of(n: int, ones: int) -> None:
    def value(n: int, ones: int) -> float:
        return float(np.float32(-ETA * (n / 2 - ones) / (n / 4 + LAMBDA)))

    found = fewest(value(n, ones), 0.5, ETA, LAMBDA, 100)
    alike = [
        (m, k) for m in range(1, n + 1) for k in range(m + 1) if np.isclose(value(m, k), value(n, ones), rtol=1e-6)
    ]
    assert found == alike[0]


def test_without_cover_the_rows_are_the_fewest() -> None:
    tree = stump(0, 0.0, (1.0, 1.5), (-2.0, 1.0))
    for key in ("base_weights", "sum_hessian"):
        del tree[key]
    found = attacked(seen((0, 0, model(tree), 10)))
    left = found.rows[:, 0] < 0
    assert found.labels[left].tolist() == [0]  # one row of class 0 gives -0.12, too
    assert found.labels[~left].tolist() == [1] * 4
    assert any("no cover" in note for note in found.notes)


def test_who_sees_what() -> None:
    made = model(stump(0, 0.0, (1.0, 1.5), (-2.0, 1.0)))
    whole = transcript((0, 0, made, 10), (0, 1, made, 10), clients=2, observer=0)
    whole.adversary_log = {"held/inputs": torch.zeros(3, 2), "held/labels": torch.tensor([0, 1, 1])}
    server, client = (observe(whole, ThreatModel(adversary=who)) for who in ("server", "client"))
    assert [m.client for m in server.messages] == [0, 1]
    assert [m.client for m in client.messages] == [1]  # the observer's own rows aren't asked for
    assert not server.adversary_log
    assert client.adversary_log


def test_a_client_fills_what_is_open_with_rows_of_its_own() -> None:
    made = model(stump(0, 0.0, (1.0, 1.5), (-2.0, 1.0)))
    whole = transcript((0, 0, made, 10), (0, 1, made, 10), clients=2, observer=0)
    whole.adversary_log = {
        "held/inputs": torch.tensor([[-1.0, 5.0], [-2.0, 6.0], [1.0, 7.0]]), "held/labels": torch.tensor([0, 1, 1])
    }  # fmt: skip
    (own,) = observe(whole, ThreatModel(adversary="client")).split("client")
    found = attacked(own)
    assert set(found.rows[:, 1].tolist()) <= {5.0, 6.0, 7.0}
    assert int((found.rows[:, 0] < 0).sum()) == 6


def test_it_refuses_what_it_cannot_work_with() -> None:
    made = model(stump(0, 0.0, (1.0, 1.5), (-2.0, 1.0)))
    whole = transcript((0, 0, made, 10))
    blind = observe(whole, ThreatModel(knows_training=False)).split("client")[0]
    with pytest.raises(NotApplicable, match="knows_training"):
        attacked(blind)
    for part in (ThreatModel(rounds=[0]), ThreatModel(adversary="client", clients=[0])):
        with pytest.raises(BadInput, match="for horizontal federations of networks"):
            observe(whole, part)
    lone = {"left_children": [-1], "right_children": [-1], "split_indices": [0], "split_conditions": [0.0]}
    of_three = model(lone | {"base_weights": [0.0], "sum_hessian": [0.75]})  # of less than 1, xgboost's least
    with pytest.raises(NotApplicable, match="tells their number alone"):
        attacked(seen((0, 0, of_three, 3)))
    with pytest.raises(NotApplicable, match="federation is of boosted trees"):
        make_attack("tableak")(observe(whole, ThreatModel()).split("update")[0])


def test_json_of_tests_is_read_as_it_is_written() -> None:
    made = json.loads(model(stump(0, 0.5, (1.0, 1.5), (-2.0, 1.0))))
    tree = made["learner"]["gradient_booster"]["model"]["trees"][0]
    assert tree["split_conditions"] == pytest.approx([0.5, -0.12, 0.3])
