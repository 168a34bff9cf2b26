"""Sums of several clients' updates over rounds: images that are alone in a neuron, and whose they are."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from sklearn.metrics import adjusted_rand_score

from fedaudit import audit
from fedaudit.attacks import ImageFinding, make_attack
from fedaudit.evaluation import evaluate
from fedaudit.scenario.scenario import Scenario
from fedaudit.simulation.simulator import Recording
from fedaudit.transcript.observation import Observation, observe
from fedaudit.utils.errors import NotApplicable
from tests.build import Scenarios, recorded

LEVELS = 16  # of the digits


_SUMS = Scenarios(
    data={"split": "train"},
    model={"name": "mlp", "width": 1000},
    federation={"algorithm": "fedavg", "clients": 3, "rounds": 8, "examples": 18, "batch_size": 3, "local_steps": 4,
                "learning_rate": 0.5},
    threat={"sees": "sum"},
    attacks=[{"name": "sratta", "levels": LEVELS}],
)  # fmt: skip


def scenario(sees: str = "sum", model: str = "mlp", **federation: Any) -> Scenario:
    return _SUMS(federation, model=model, threat={"sees": sees})


@pytest.fixture(scope="module")
def recording() -> Recording:
    return recorded(scenario())


@pytest.fixture(scope="module")
def seen(recording: Recording) -> Observation:
    return observe(recording.transcript, scenario().threat)


@pytest.fixture(scope="module")
def found(seen: Observation) -> ImageFinding:
    finding = make_attack("sratta", {"levels": LEVELS})(seen)
    assert isinstance(finding, ImageFinding)
    return finding


def owners(recording: Recording, found: ImageFinding) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return of each image that was found its distance from an example, that one's client, and its label."""
    assert found.groups is not None
    images = found.images[found.groups >= 0].flatten(1)
    true, members, labels = (
        torch.cat(list(of.values())) for of in (recording.truth.inputs, recording.truth.members, recording.truth.labels)
    )
    far = torch.cdist(images, true.flatten(1), compute_mode="donot_use_mm_for_euclid_dist").min(dim=1)
    return far.values / true[0].numel() ** 0.5, members[far.indices], labels[far.indices]


def test_images_out_of_sums_are_exact_and_grouped_by_their_client(recording, found):
    off, whose, labels = owners(recording, found)
    assert len(off) >= 15
    assert off.max() < 0.01
    groups = found.groups[found.groups >= 0]
    assert all(len(whose[groups == group].unique()) == 1 for group in groups.unique())
    assert groups.bincount().sort().values[-2:].min() >= 5, "nearly all of two clients' six"
    assert (found.labels[: len(labels)] == labels).float().mean() > 0.9
    assert len(found.images) == 18, "as many as there are, copies following"


def test_two_rounds_that_agree_vouch_for_an_image_without_levels(recording, seen):
    finding = make_attack("sratta")(seen)
    assert isinstance(finding, ImageFinding)
    off, *_ = owners(recording, finding)
    assert len(off) >= 12
    assert off.max() < 0.01


def test_each_example_of_a_sum_is_its_clients(recording):
    truth = recording.truth
    for key, members in truth.members.items():
        inputs = truth.inputs[key]
        assert members.unique().tolist() == [0, 1, 2]
        assert len(members) == len(inputs)
    alone = recorded(scenario(sees="updates")).truth
    for (index, _), members in truth.members.items():
        for client in range(3):
            own = truth.inputs[index, 0][members == client]
            assert torch.equal(own, alone.inputs[index, client]), "in the order in which the client used them"


def test_the_evaluation_of_groups_is_that_of_sklearn_and_luck_is_told(recording, seen, found):
    _, whose, _ = owners(recording, found)
    result = evaluate(found, seen, recording.truth, seed=0).result
    values = {m.name: m for m in result.metrics}
    groups = found.groups[found.groups >= 0]
    assert values["adjusted_rand"].value == pytest.approx(adjusted_rand_score(whose, groups))
    assert values["same_client_pairs"].value == 1
    assert (values["same_client_pairs"].baseline or 0) < 0.5
    assert "p = 0.001" in " ".join(result.notes)


@pytest.mark.slow
def test_groups_at_random_are_luck(recording, seen, found):
    rejected = 0
    assert found.groups is not None
    kept = found.groups >= 0
    for seed in range(40):
        order = torch.randperm(int(kept.sum()), generator=torch.Generator().manual_seed(seed))
        groups = found.groups.clone()
        groups[kept] = found.groups[kept][order]
        told = evaluate(dataclasses.replace(found, groups=groups), seen, recording.truth, seed=seed).result.notes[-1]
        rejected += float(told.rpartition("p = ")[2]) <= 0.05
    assert rejected <= 6  # of 40 at a level of 5 %: more with a probability of 0.3 %


def test_one_example_a_client_and_one_step_joins_nobody():
    made = scenario(examples=3, batch_size=1, local_steps=1, rounds=2)
    one = recorded(made)
    finding = make_attack("sratta", {"levels": LEVELS})(observe(one.transcript, made.threat))
    assert isinstance(finding, ImageFinding)
    assert finding.groups is not None
    groups = finding.groups[finding.groups >= 0]
    assert len(groups.unique()) == len(groups)


@pytest.mark.parametrize("local_steps", [1, 4])  # of one update, of which half of the examples or each twice is used
def test_of_a_single_round_every_use_is_asked_for(local_steps):
    made = scenario(rounds=1, local_steps=local_steps)
    one = recorded(made)
    seen = observe(one.transcript, made.threat)
    finding = make_attack("sratta", {"levels": LEVELS})(seen)
    assert isinstance(finding, ImageFinding)
    assert len(finding.images) == seen.messages[0].update.num_examples == 9 * local_steps
    off, *_ = owners(one, finding)
    assert off.max() < 0.01
    images = evaluate(finding, seen, one.truth, seed=0).result.images
    assert sum(image.uses for image in images) == 9 * local_steps
    assert sum(image.psnr > 60 for image in images) == len(off)


@pytest.mark.parametrize(("model", "says"), [("convnet-small", "fully connected layer"), ("logistic", "no ReLU")])
def test_what_it_can_not_read_is_refused(model, says):
    made = scenario(model=model, rounds=1, learning_rate=0.01)
    with pytest.raises(NotApplicable, match=says):
        make_attack("sratta")(observe(recorded(made).transcript, made.threat))


def test_nobody_alone_in_any_neuron_is_refused():
    made = scenario(learning_rate=1e-3, rounds=1, examples=400, batch_size=50)
    with pytest.raises(NotApplicable, match="vouched for"):
        make_attack("sratta", {"levels": LEVELS})(observe(recorded(made).transcript, made.threat))


@pytest.mark.slow
def test_the_audit_shows_images_and_groups():
    result = audit(scenario()).result
    (summary,) = result.summaries
    assert summary.verdict == "recovered"
    assert {m.name for m in summary.metrics} == {"adjusted_rand", "same_client_pairs"}
