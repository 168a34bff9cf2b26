"""AGIC over several epochs: which updates are matched, what is reconstructed jointly, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedaudit.attacks import ImageFinding, make_attack
from fedaudit.pipeline.prepare import resolve
from fedaudit.pipeline.run import record, run_audit
from fedaudit.scenario.scenario import Scenario
from fedaudit.simulation.simulator import Recording
from fedaudit.transcript.observation import Observation, observe
from fedaudit.utils.errors import BadInput, NotApplicable
from fedaudit.utils.seeds import generator
from fedaudit_catalogue.attacks import epochs
from fedaudit_catalogue.attacks.epochs import chain, match
from tests.build import Scenarios

EPOCHS = {"name": "f", "clients": 1, "examples": 3, "batch_size": 1, "rounds": 6, "learning_rate": 1e-3}


_SHORT = Scenarios(model={"name": "lenet", "initialisation": "uniform"}, evaluation={"controls": False})


def scenario(federation: dict[str, Any], **attack: Any) -> Scenario:
    return _SHORT(federation, attacks=[{"name": "agic-epochs", "iterations": 60, "pre_iterations": 60, **attack}])


def seen(federation: dict[str, Any]) -> tuple[Observation, Recording]:
    made = scenario(federation)
    (only,) = record(resolve(made))
    (client,) = observe(only.transcript, made.threat).split("client")
    return client, only


def run(client: Observation, **settings: Any) -> ImageFinding:
    attack = make_attack("agic-epochs", {"iterations": 20, "pre_iterations": 30, **settings})
    found = attack(client, generator=generator(0, "epochs"))
    assert isinstance(found, ImageFinding)
    return found


@pytest.mark.parametrize("name", ["agic", "invg", "dlg-adam"])
def test_over_several_epochs_a_method_keeps_its_settings(name):
    alone, several = (make_attack(n).settings() for n in (name, f"{name}-epochs"))
    assert {k: several[k] for k in alone} == alone


@pytest.mark.slow
@pytest.mark.parametrize(("name", "method"), [("agic-epochs", "agic"), ("dlg-adam-epochs", "dlg-adam")])
def test_a_name_of_its_own_is_the_composition(name, method):
    client, _ = seen(EPOCHS)
    short = {"iterations": 20, "beta": 3.0}
    several = {"pre_iterations": 20, "gamma": 0.5}
    flat = make_attack(name, {**short, **several})
    composed = make_attack("epochs", {"attack": {"name": method, **short}, **several})
    a, b = (attack(client, generator=generator(0, "epochs")) for attack in (flat, composed))
    assert isinstance(a, ImageFinding)
    assert isinstance(b, ImageFinding)
    assert (a.attack, b.attack) == (name, "epochs")
    assert (a.objective, a.rounds, a.iterations) == (b.objective, b.rounds, b.iterations)
    assert a.images.equal(b.images)
    assert composed.settings()["attack"]["beta"] == 3.0
    assert make_attack("epochs", composed.settings()).settings() == composed.settings()
    assert composed.settings()["attack"].items() <= {**flat.settings(), "name": method}.items()


@pytest.mark.parametrize(
    ("method", "batch"),
    [
        *[pytest.param(*slow, marks=pytest.mark.slow) for slow in (("cpl", 1), ("idlg", 1), ("geng", 3))],
        *[("gradinversion", 3), ("agic-plus", 3), ("invg", 1)],
    ],
)
def test_any_method_that_optimises_images_goes_over_epochs(method, batch):
    client, _ = seen({**EPOCHS, "batch_size": batch, "rounds": 6 // batch})
    settings = {"name": method, "iterations": 12, **({"group": 2} if method == "gradinversion" else {})}
    found: Any = make_attack("epochs", {"attack": settings, "pre_iterations": 5})(client, generator=generator(0, "any"))
    assert found.images.shape == (3, 1, 8, 8)
    assert [len(rounds) for rounds in found.rounds] == [2, 2, 2]
    assert found.trace.snapshots[-1].equal(found.images)
    assert found.objective < found.trace.objective[0]


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("dlg", "optimises the labels"),
        ("gias", "generator"),
        ("labels", "doesn't optimise images"),
        ("r-gap", "doesn't optimise images"),
        ("epochs", "doesn't optimise images"),
        ({"name": "agic", "betta": 1}, "betta"),
        ({"beta": 1}, "give the name"),
    ],
)
def test_what_cannot_be_composed_is_refused_in_one_line(method, reason):
    with pytest.raises(BadInput, match=reason) as refused:
        make_attack("epochs", {"attack": method})
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_restarts_keep_the_joint_run_of_least_objective():
    client, _ = seen({**EPOCHS, "examples": 2, "batch_size": 2, "rounds": 2})
    start = generator(0, "restarts")
    method = {"name": "invg", "iterations": 8}
    singles: list[Any] = [make_attack("epochs", {"attack": method})(client, generator=start) for _ in range(3)]
    best: Any = make_attack("epochs", {"attack": {**method, "restarts": 3}})(client, generator=generator(0, "restarts"))
    assert best.objective == pytest.approx(min(found.objective for found in singles), rel=1e-4)


def test_progress_counts_what_is_matched_and_what_is_reconstructed():
    client, _ = seen(EPOCHS)
    calls: list[tuple[int, int]] = []
    attack = make_attack("agic-epochs", {"iterations": 20, "pre_iterations": 10})
    attack(client, generator=generator(0), progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (6 * 10 + 3 * 20, 6 * 10 + 3 * 20)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert all(done <= total for done, total in calls)


# Matching -----------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=30)
@given(count=st.integers(1, 8), seed=st.integers(0, 1000), pooling=st.booleans(), filtered=st.booleans())
def test_noisy_pictures_find_their_partners(count, seed, pooling, filtered):
    start = generator(seed, "pictures")
    first = torch.rand(count, 3, 8, 8, generator=start)
    order = torch.randperm(count, generator=start)
    second = (first + 0.01 * torch.randn(first.shape, generator=start))[order]
    labels = torch.randint(3, (count,), generator=start)
    theirs = labels[order]
    partner = match(first, second, labels if filtered else None, theirs if filtered else None, pooling)
    assert order[partner].tolist() == list(range(count))


def test_the_most_similar_pair_comes_first_and_each_picture_once():
    first = torch.tensor([0.0, 1.0, 5.0]).view(3, 1, 1, 1).expand(3, 1, 4, 4)
    second = torch.tensor([0.9, 1.1, 9.0]).view(3, 1, 1, 1).expand(3, 1, 4, 4)
    # 1.0 is nearest to 0.9 and 1.1 alike (the first is taken); then 0.0 gets 1.1, and 5.0 what is left
    assert match(first, second, None, None, False).tolist() == [1, 0, 2]


def test_labels_go_before_similarity_and_nobody_is_left_alone():
    first = torch.tensor([0.0, 1.0]).view(2, 1, 1, 1).expand(2, 1, 4, 4)
    partner = match(first, first, torch.tensor([0, 1]), torch.tensor([1, 0]), False)
    assert partner.tolist() == [1, 0]
    assert sorted(match(first, first, torch.tensor([0, 0]), torch.tensor([1, 1]), False).tolist()) == [0, 1]


def test_pooling_forgives_what_moves_by_a_pixel():
    stripes = torch.zeros(1, 1, 8, 8)
    stripes[..., ::2] = 1.0
    flat = torch.full((1, 1, 8, 8), 0.45)
    second = torch.cat([1 - stripes, flat])
    first = torch.cat([stripes, torch.full((1, 1, 8, 8), 0.44)])
    assert match(first, second, None, None, True).tolist() == [0, 1]
    assert (stripes - (1 - stripes)).square().mean() > (
        stripes - flat
    ).square().mean()  # without it the flat one is nearer


def test_more_epochs_are_chained():
    assert chain([torch.tensor([1, 2, 0]), torch.tensor([2, 1, 0])], 3).tolist() == [[0, 1, 2], [1, 2, 0], [1, 0, 2]]


# The attack ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3])
def test_every_example_is_recovered_once_from_both_epochs(batch):
    federation = {**EPOCHS, "batch_size": batch, "rounds": 6 // batch}
    client, only = seen(federation)
    found = run(client)
    assert found.images.shape == (3, 1, 8, 8)
    half = 3 // batch
    for rounds in found.rounds:
        assert len(rounds) == 2
        assert rounds[0] < half <= rounds[1]
    if batch == 1:
        truth = [int(only.truth.labels[r, 0]) for r in range(6)]
        assert all(truth[a] == truth[b] for a, b in found.rounds)  # three digits of different labels
    assert found.objective is not None
    assert found.trace is not None
    assert found.objective < found.trace.objective[0]


@pytest.mark.slow
def test_matched_updates_are_counted_in_the_result():
    audit = run_audit(scenario(EPOCHS, iterations=10, pre_iterations=40))
    (finding,) = audit.result.findings
    assert finding.matching == 1.0
    assert finding.rounds == list(range(6))
    assert len(finding.images) == 3
    assert all(image.uses == 2 and len(image.rounds) == 2 for image in finding.images)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 3])
def test_ties_are_judged_by_what_was_tied(batch, monkeypatch):
    """A reconstruction that is cut short is like no example: it says nothing of the ties."""
    federation = {**EPOCHS, "examples": 6, "batch_size": batch, "rounds": 12 // batch}
    short = scenario(federation, iterations=1)
    (finding,) = run_audit(short).result.findings
    assert max(image.psnr for image in finding.images) < 15
    assert finding.matching == 1.0
    tie = epochs.match
    monkeypatch.setattr(epochs, "match", lambda *given: tie(*given).roll(2))
    (finding,) = run_audit(short).result.findings
    assert finding.matching == 0.0


def test_one_epoch_alone_is_left_or_taken_by_its_weight():
    client, _ = seen(EPOCHS)
    first, second = run(client, gamma=0.0), run(client, gamma_first=0.0, gamma=1.0)
    assert sorted(first.rounds) == [(0,), (1,), (2,)]
    assert sorted(second.rounds) == [(3,), (4,), (5,)]


def test_every_epoch_counts_by_its_own_gamma():
    """Eq. 5, Σ γₖ·(1 − cosₖ), written out with autograd at the image that was found."""
    client, _ = seen({**EPOCHS, "examples": 1, "rounds": 2, "learning_rate": 1.0})
    plain = {"beta": 1.0, "relu_modifier": False, "total_variation": 0.0, "iterations": 5}
    found = run(client, **plain, gamma_first=0.5, gamma=2.0)
    model, distances = copy.deepcopy(client.module), []
    for message in client.messages:
        model.load_state_dict(message.weights)
        loss = torch.nn.functional.cross_entropy(model(client.task_info.normalise(found.images)), found.labels)
        own = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
        other = torch.cat([message.update.tensors[name].flatten() for name, _ in model.named_parameters()])
        distances.append(1 - float(torch.nn.functional.cosine_similarity(own, other, dim=0)))
    first, later = distances
    assert abs(first - later) > 0.005  # so that it matters which is which
    assert found.objective == pytest.approx(0.5 * first + 2.0 * later, rel=1e-3)


def test_a_fedavg_update_that_is_an_epoch_needs_no_matching():
    federation = {
        **EPOCHS,
        "algorithm": "fedavg",
        "examples": 4,
        "local_steps": 2,
        "batch_size": 2,
        "rounds": 2,
        "learning_rate": 1e-4,
    }
    client, _ = seen(federation)
    found = run(client)
    assert found.rounds == ((0, 1),) * 4
    assert run(client, pre_iterations=1).images.equal(found.images)


@pytest.mark.slow
def test_three_epochs():
    client, _ = seen({**EPOCHS, "examples": 2, "rounds": 6})
    found = run(client, epochs=3)
    assert [len(rounds) for rounds in found.rounds] == [3, 3]


@pytest.mark.parametrize(
    ("federation", "settings", "reason"),
    [
        (EPOCHS, {"epochs": 4}, "aren't 4 epochs of equal length"),
        (EPOCHS, {"gamma": 0.0, "gamma_first": 0.0}, "no epoch is left"),
        ({**EPOCHS, "examples": 3, "batch_size": 2, "rounds": 3}, {"epochs": 3}, "same number of examples"),
    ],
)
def test_what_are_no_epochs_is_refused(federation, settings, reason):
    client, _ = seen(federation)
    with pytest.raises(NotApplicable, match=reason):
        make_attack("agic-epochs", settings).check(client)


def test_updates_of_several_clients_are_refused():
    made = scenario({**EPOCHS, "clients": 3})
    (only,) = record(resolve(made))
    with pytest.raises(NotApplicable, match="follows one client"):
        make_attack("agic-epochs").check(observe(only.transcript, made.threat))


def test_joint_reconstruction_under_invg_objective():
    client, _ = seen(EPOCHS)
    found = make_attack("invg-epochs", {"iterations": 20, "pre_iterations": 20})(client, generator=generator(0))
    assert isinstance(found, ImageFinding)
    assert found.attack == "invg-epochs"
    assert len(found.images) == 3
