"""Local model reconstruction: the exact one against closed forms, the heuristic, refusals, the judgement, the data."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedaudit.attacks import LocalModelFinding, make_attack
from fedaudit.data import load_dataset
from fedaudit.evaluation import evaluate
from fedaudit.evaluation.local_models import least_loss
from fedaudit.pipeline.prepare import resolve
from fedaudit.pipeline.run import record, run_audit
from fedaudit.scenario.scenario import scenario_from
from fedaudit.task.info import TaskInfo
from fedaudit.task.training import TrainingConfig
from fedaudit.transcript.observation import Message, Observation, observe
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.truth import Truth
from fedaudit.transcript.update import Update
from fedaudit.utils.errors import BadInput, NotApplicable
from fedaudit.utils.seeds import generator
from fedaudit_lab.drawn.leaf import leaf_synthetic

RATE = 0.3  # of the largest learning rate at which plain gradient descent still converges


def problem(d: int, m: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """A well-conditioned least-squares problem with d − 1 columns and an intercept, and its closed-form optimum."""
    rng = np.random.default_rng(seed)
    columns, _ = np.linalg.qr(rng.normal(size=(m, d - 1)))
    x = columns * rng.uniform(0.7, 1.3, size=d - 1) * m**0.5
    y = rng.normal(size=m)
    design = np.concatenate([x, np.ones((m, 1))], axis=1)
    optimum = np.linalg.lstsq(design, y, rcond=None)[0]
    return torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(optimum)


def trained(theta: Tensor, x: Tensor, y: Tensor, steps: int, batch: int | None = None, seed: int = 0) -> Tensor:
    """What the client returns, by the slow, obvious loop: gradient steps on (1/m)·‖Xθ − y‖²."""
    design = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], dim=1)
    rate = RATE / float(torch.linalg.matrix_norm(design, 2) ** 2 / len(x))
    rng = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        rows = torch.randperm(len(x), generator=rng)[: batch or len(x)]
        theta = theta - rate * 2 / len(rows) * design[rows].T @ (design[rows] @ theta - y[rows])
    return theta


def seen(x: Tensor, y: Tensor, rounds: int, steps: int, *, batch: int | None = None, dtype: Any = torch.float64,
         seed: int = 0) -> Observation:  # fmt: skip
    """What an eavesdropper sees of that client when the server's models lie all over the place."""
    d = x.shape[1]
    rng = torch.Generator().manual_seed(seed)
    messages = []
    for r in range(rounds):
        theta = torch.randn(d + 1, generator=rng, dtype=torch.float64).to(dtype)
        back = trained(theta.double(), x, y, steps, batch, r).to(dtype)
        state = {"fc.weight": theta[:d][None], "fc.bias": theta[d:]}
        tensors = {"fc.weight": (back - theta)[:d][None], "fc.bias": (back - theta)[d:]}
        size = batch or len(x)
        training = TrainingConfig(0.1, steps, (size,) * steps)
        messages.append(Message(r, 0, state, Update(0, "weights", tensors, size * steps, training)))
    task_info = TaskInfo("linear", None, "eval", "mse", "table", (d,), None, (0.0,), (1.0,))
    module = nn.Sequential()
    module.add_module("fc", nn.Linear(d, 1).double())
    weights = tuple(m.weights for m in messages)
    return Observation(
        "f", ThreatModel(), task_info, module, nn.functional.mse_loss, "weights", weights, tuple(messages)
    )


def reconstructed(found: Any) -> Tensor:
    assert isinstance(found, LocalModelFinding)
    return torch.cat([found.state["fc.weight"].flatten(), found.state["fc.bias"]]).double()


def run_attack(name: str, observation: Observation, **options: Any) -> Any:
    return make_attack(name, options)(observation, generator=generator(0, "attack"))


# Exact ---------------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(d=st.integers(2, 30), surplus=st.integers(0, 5), more=st.integers(0, 40), steps=st.integers(1, 10),
       seed=st.integers(0, 10_000))  # fmt: skip
def test_the_exact_reconstruction_is_the_closed_form(d, surplus, more, steps, seed):
    x, y, optimum = problem(d, 2 * d + more, seed)
    found = run_attack("local-model-exact", seen(x, y, d + 1 + surplus, steps, seed=seed))
    assert (reconstructed(found) - optimum).norm() <= 1e-6 * optimum.norm()
    assert found.condition >= 1
    assert found.directions == d
    assert (found.mapping_error is None) == (surplus == 0)


def test_a_linear_mapping_is_the_exact_reconstruction():
    x, y, _ = problem(8, 40, 0)
    observation = seen(x, y, 12, 5)
    exact, heuristic = (run_attack(name, observation, **options) for name, options in (
        ("local-model-exact", {}), ("local-model", {"mapping": "linear"}),
    ))  # fmt: skip
    assert reconstructed(heuristic).equal(reconstructed(exact))


def test_messages_in_single_precision_still_give_the_model_and_a_true_condition_number():
    x, y, optimum = problem(10, 60, 1)
    observation = seen(x, y, 14, 5, dtype=torch.float32)
    found = run_attack("local-model-exact", observation)
    assert (reconstructed(found) - optimum).norm() <= 1e-4 * optimum.norm()
    sent = np.array(
        [torch.cat([t.flatten() for t in m.weights.values()]).double().numpy() for m in observation.messages]
    )
    values = np.linalg.svd(sent - sent.mean(axis=0), compute_uv=False)
    assert found.condition == pytest.approx(values[0] / values[-1])
    assert f"{found.condition:.1e}" in found.notes[0]


def test_rounds_can_be_limited():
    x, y, optimum = problem(5, 30, 2)
    found = run_attack("local-model-exact", seen(x, y, 20, 3), rounds=6)
    assert found.rounds_used == 6
    assert (reconstructed(found) - optimum).norm() <= 1e-6 * optimum.norm()


@pytest.mark.parametrize("rounds", [3, 5, 6, 7, 9])
def test_the_model_is_found_from_the_round_on_in_which_the_equations_are_enough(rounds):
    """Observations 1 and 2: d + 1 rounds determine the model, and d don't."""
    x, y, own = problem(6, 30, 0)
    found = run_attack("local-model", seen(x, y, 20, 3), mapping="linear", rounds=rounds)
    distance = float((reconstructed(found) - own).norm() / own.norm())
    assert found.rounds_used == rounds
    assert distance < 1e-3 if rounds >= 7 else distance > 0.01


def few_rounds() -> Observation:
    x, y, _ = problem(6, 30, 0)
    return seen(x, y, 6, 1)


def mini_batches(rounds: int) -> Observation:
    x, y, _ = problem(6, 60, 0)
    return seen(x, y, rounds, 1, batch=10)


def few_examples() -> Observation:
    x, y, _ = problem(6, 60, 0)
    return seen(x[:4], y[:4], 12, 1)


def always_alike() -> Observation:
    x, y, _ = problem(6, 30, 0)
    whole = seen(x, y, 12, 1)
    line = [dataclasses.replace(m, weights={
        n: whole.messages[0].weights[n] + i / 10 * whole.messages[1].weights[n] for n in m.weights
    }) for i, m in enumerate(whole.messages)]  # fmt: skip
    moved = []
    for m in line:
        theta = torch.cat([t.flatten() for t in m.weights.values()])
        back = trained(theta, x, y, 1) - theta
        tensors = {"fc.weight": back[:5][None], "fc.bias": back[5:]}
        moved.append(dataclasses.replace(m, update=dataclasses.replace(m.update, tensors=tensors)))
    return dataclasses.replace(whole, messages=tuple(moved))


def network() -> Observation:
    whole = few_rounds()
    return dataclasses.replace(whole, module=nn.Sequential(nn.Linear(5, 1), nn.Tanh()).double())


def classifier() -> Observation:
    whole = few_rounds()
    task_info = dataclasses.replace(whole.task_info, loss="cross-entropy", num_classes=2)
    return dataclasses.replace(whole, task_info=task_info)


def nobody() -> Observation:
    return dataclasses.replace(few_rounds(), messages=())


def two_clients() -> Observation:
    whole = few_rounds()
    other = dataclasses.replace(whole.messages[0], client=1)
    return dataclasses.replace(whole, messages=(*whole.messages, other))


@pytest.mark.parametrize(
    ("observation", "reason"),
    [
        (few_rounds(), "needs 7 rounds"),
        (mini_batches(7), "mini-batches"),
        (mini_batches(30), "mini-batches"),
        (few_examples(), "don't determine a model"),
        (always_alike(), "too much alike"),
        (classifier(), "squared loss"),
        (nobody(), "sees no update"),
        (two_clients(), "one client's"),
    ],
    ids=["rounds", "batches", "batches, many rounds", "examples", "alike", "loss", "nobody", "clients"],
)
def test_what_cannot_be_exact_is_refused(observation, reason):
    with pytest.raises(NotApplicable, match=reason):
        run_attack("local-model-exact", observation)


def test_a_network_is_refused():
    whole = few_rounds()
    state = {"0.weight": torch.zeros(1, 5).double(), "0.bias": torch.zeros(1).double()}
    module = nn.Sequential(nn.Linear(5, 1), nn.Tanh()).double()
    tensors = {n: t + 1 for n, t in state.items()}
    messages = tuple(
        dataclasses.replace(m, weights=state, update=dataclasses.replace(m.update, tensors=tensors))
        for m in whole.messages
    )
    with pytest.raises(NotApplicable, match="linear in their parameters"):
        run_attack("local-model-exact", dataclasses.replace(whole, module=module, messages=messages))


# In a federation -----------------------------------------------------------------------------------------------------

SAMPLED: dict[str, Any] = {
    "name": "f", "algorithm": "fedavg", "clients": 3, "clients_per_round": 1, "rounds": 45, "batch_size": 500,
    "local_steps": 5, "learning_rate": 0.05,
}  # fmt: skip
TABLE: dict[str, Any] = {
    "data": {"name": "diabetes", "split": "train"},
    "model": {"name": "linear"},
    "threat": {"adversary": "eavesdropper"},
    "attacks": ["local-model-exact"],
}


def audit(**changes: Any) -> Any:
    return run_audit(scenario_from({**TABLE, "federations": [SAMPLED], **changes})).result


@pytest.mark.parametrize(
    "how",
    [
        {},
        pytest.param({"algorithm": "fedprox", "proximal_mu": 1.0}, marks=pytest.mark.slow),
        pytest.param({"momentum": 0.5}, marks=pytest.mark.slow),
        pytest.param({"algorithm": "fedsgd", "local_steps": None}, marks=pytest.mark.slow),
        pytest.param({"local_steps": 1, "learning_rate": 0.15}, marks=pytest.mark.slow),
    ],
    ids=["fedavg", "fedprox", "momentum", "fedsgd", "one step"],
)
def test_sampled_clients_leak_their_model_to_whoever_listens(how):
    result = audit(federations=[{**SAMPLED, **how}])
    found = {(f.client, m.name): m for f in result.findings for m in f.metrics}
    assert result.summaries[0].verdict == "inferred"
    for client in range(3):
        assert found[client, "relative_distance"].value < 1e-2
        assert found[client, "relative_distance"].baseline > 0.3
        assert found[client, "gap_closed"].value > 0.999


def test_with_all_clients_in_every_round_the_models_are_too_much_alike_and_that_is_said():
    result = audit(federations=[{**SAMPLED, "clients_per_round": 3}])
    assert {f.status for f in result.findings} == {"not applicable"}
    assert "ill-conditioned" in result.findings[0].reason


def test_the_last_returned_model_is_its_own_baseline_and_the_charts_tell_the_distances():
    result = audit(attacks=["last-update"], federations=[{**SAMPLED, "clients_per_round": None, "rounds": 4}])
    for f in result.findings:
        (closed, distance) = f.metrics
        assert (closed.name, distance.name) == ("gap_closed", "relative_distance")
        assert closed.value == pytest.approx(0, abs=1e-6)
        assert distance.value == pytest.approx(distance.baseline, rel=1e-6)
        assert not f.is_leak
        (chart,) = f.charts
        lines = {line.name: line for line in chart.lines}
        assert lines["what it returned"].x == [0, 1, 2, 3]
        # the last model returned lies from the last model sent as far as the update is long
        assert lines["reconstructed by the attack"].y[-1] == pytest.approx(lines["what it returned"].y[-1], rel=1e-5)
        assert set(lines) == {"what it returned", "its own optimum", "reconstructed by the attack"}


def test_noise_of_a_defence_stops_the_exact_attack_and_the_linear_one_ends_far_away():
    defended = {"client_defence": {"name": "dp", "clip": 0.2, "noise": 1.0, "epsilon": None}}
    scenario = scenario_from({**TABLE, "federations": [SAMPLED], "defences": defended})
    (recording,) = record(resolve(scenario))
    part = observe(recording.transcript, scenario.threat).split("client")[0]
    with pytest.raises(NotApplicable, match="mini-batches, noise"):
        run_attack("local-model-exact", part)
    evaluated = evaluate(run_attack("local-model", part, mapping="linear"), part, recording.truth, seed=0).result
    assert {m.name: m for m in evaluated.metrics}["relative_distance"].value > 0.3
    assert not evaluated.is_leak


def test_a_client_that_sends_fragments_is_refused():
    defended = {"client_defence": {"name": "ffl-random", "ratio": 0.5}}
    federation = {**SAMPLED, "rounds": 8, "learning_rate": 0.01}
    model = {"name": "mlp", "width": 2}
    result = audit(defences=defended, federations=[federation], model=model, attacks=["local-model"])
    assert {f.status for f in result.findings} == {"not applicable"}
    assert "holds some back" in result.findings[0].reason


def test_gradients_hold_no_returned_model():
    result = audit(attacks=["last-update"], federations=[{**SAMPLED, "algorithm": "fedsgd", "local_steps": None}])
    assert "no model" in result.findings[0].reason


def test_the_heuristic_learns_the_mapping_and_moves_where_it_vanishes():
    scenario = scenario_from({
        **TABLE, "data": {"name": "breast-cancer", "split": "train"}, "model": {"name": "mlp", "width": 2},
        "federations": [{**SAMPLED, "clients": 2, "rounds": 30, "local_steps": 10, "batch_size": 64,
                         "learning_rate": 0.1}],
    })  # fmt: skip
    (recording,) = record(resolve(scenario))
    part = observe(recording.transcript, scenario.threat).split("client")[0]
    options = {"hidden": 200, "fit_iterations": 300, "iterations": 200}
    found, again = (run_attack("local-model", part, **options) for _ in range(2))
    short = run_attack("local-model", part, **{**options, "fit_iterations": 1, "iterations": 1})
    assert all(found.state[n].equal(again.state[n]) for n in found.state)
    assert found.mapping_error < 0.2 < short.mapping_error
    assert found.objective < 0.5
    assert found.iterations == 500
    evaluated = evaluate(found, part, recording.truth, seed=0).result
    assert {m.name for m in evaluated.metrics} >= {"local_accuracy", "accuracy_over_global", "mapping_error"}
    with pytest.raises(NotApplicable, match="at least 3 rounds"):
        run_attack("local-model", dataclasses.replace(part, messages=part.messages[:2]))


@pytest.mark.long
@pytest.mark.slow
def test_on_clients_that_contradict_each_other_the_network_beats_the_last_returned_model_and_whitening_spoils_it():
    """Table 1's setting on one of its draws, one local step; each client's accuracy on its own data."""
    federation = {"name": "fedavg", "algorithm": "fedavg", "clients": 5, "rounds": 50, "batch_size": 256,
                  "local_steps": 1, "learning_rate": 0.01, "partition": {"scheme": "natural"}}  # fmt: skip
    effort = {"name": "local-model", "fit_iterations": 1500, "iterations": 1000}
    found = {}
    for name, attack in (
        ("last", {"name": "last-update"}), ("raw", effort),
        ("whitened", {**effort, "whitened": True, "learning_rate": 0.1}),
    ):  # fmt: skip
        result = audit(data={"name": "leaf-synthetic", "split": "train"}, model={"name": "logistic"}, seed=3,
                       attacks=[attack], federations=[federation], defences={"aggregator": "fedavg"})  # fmt: skip
        accuracies = [m.value for f in result.findings for m in f.metrics if m.name == "local_accuracy"]
        assert len(accuracies) == 5
        found[name] = sum(accuracies) / 5
    assert found["last"] < 0.7
    assert found["raw"] > found["last"] + 0.03
    assert found["raw"] > found["whitened"]


# Judgement -----------------------------------------------------------------------------------------------------------


def test_the_true_optimum_is_found_and_a_separable_problem_has_none():
    result = audit(data={"name": "leaf-synthetic", "split": "train"}, model={"name": "logistic"},
                   attacks=["last-update"],
                   federations=[{**SAMPLED, "clients": 5, "clients_per_round": None, "rounds": 2, "batch_size": 256,
                                 "partition": {"scheme": "natural"}}])  # fmt: skip
    assert [f.num_examples for f in result.findings] == [
        256 + 24 + 256 + 24 + 256 + (24 + 256 + 24 + 256 + 24),
        10 * 184,
        2560,
        2560,
        2080,
    ]
    names = {m.name for f in result.findings for m in f.metrics}
    assert {"local_accuracy", "gap_closed"} <= names


def test_what_a_client_holds_is_what_it_used_each_once(tmp_path):
    inputs = {(0, 1): torch.tensor([[1.0], [2.0], [1.0]]), (3, 1): torch.tensor([[2.0], [5.0]])}
    labels = {(0, 1): torch.tensor([0, 1, 0]), (3, 1): torch.tensor([1, 0])}
    rows = {(0, 1): torch.tensor([4, 2, 0]), (3, 1): torch.tensor([2, 3])}
    truth = Truth(inputs, labels, torch.zeros(1, 1), torch.zeros(1).long(), {}, rows)
    truth.save(tmp_path / "truth.safetensors")
    for one in (truth, Truth.load(tmp_path / "truth.safetensors")):
        held, targets = one.held_by(1)
        # rows 4 and 0 are equal and yet two examples
        assert sorted(zip(held.flatten().tolist(), targets.tolist(), strict=True)) == [(1, 0), (1, 0), (2, 1), (5, 0)]
    older = dataclasses.replace(truth, rows={})
    assert sorted(older.held_by(1)[0].flatten().tolist()) == [1, 2, 5]


def test_least_loss_agrees_with_least_squares_and_with_scikit_learn():
    from sklearn.linear_model import LogisticRegression

    from fedaudit.evaluation.local_models import Local

    x, y, optimum = problem(7, 50, 3)
    linear = Local(nn.Sequential(nn.Linear(6, 1)).double(), nn.functional.mse_loss, x, y[:, None], {})
    start = {"0.weight": torch.zeros(1, 6).double(), "0.bias": torch.zeros(1).double()}
    found, converged = least_loss(linear, start)
    assert converged
    assert torch.cat([found["0.weight"][0], found["0.bias"]]).numpy() == pytest.approx(optimum.numpy(), abs=1e-7)
    noisy = (y + torch.randn(50, generator=generator(0), dtype=torch.float64) > 0).long()
    logistic = Local(nn.Sequential(nn.Linear(6, 2)).double(), nn.functional.cross_entropy, x, noisy, {})
    start = {"0.weight": torch.zeros(2, 6).double(), "0.bias": torch.zeros(2).double()}
    found, converged = least_loss(logistic, start)
    assert converged
    theirs = LogisticRegression(C=np.inf, tol=1e-10, max_iter=10_000).fit(x.numpy(), noisy.numpy())
    ours = found["0.weight"][1] - found["0.weight"][0]
    assert ours.numpy() == pytest.approx(theirs.coef_[0], rel=1e-3, abs=1e-4)
    separable = Local(logistic.module, logistic.loss, x, (x[:, 0] > 0).long(), {})
    assert not least_loss(separable, start)[1]


# Data ----------------------------------------------------------------------------------------------------------------


def test_leaf_s_generator_has_the_moments_that_its_description_gives():
    clients = leaf_synthetic((4000,) * 12, features=6, classes=3, clusters=2, seed=5)
    within = torch.stack([x.var(dim=0) for x, _ in clients])
    assert within.mean(dim=0).numpy() == pytest.approx(np.arange(1, 7) ** -1.2, rel=0.05)
    many = leaf_synthetic((1,) * 4000, features=6, classes=3, clusters=2, seed=6)
    # a client's centre: a scalar of variance 1 shared by all features, and one of variance 1 for each
    centres = torch.cat([x for x, _ in many])
    covariance = torch.cov(centres.T)
    assert covariance[0, 1:].mean() == pytest.approx(1.0, abs=0.1)
    assert float(covariance[5, 5]) == pytest.approx(2 + 6**-1.2, abs=0.2)
    assert {int(v) for _, y in clients for v in y} <= {0, 1, 2}


@pytest.mark.slow
def test_leaf_synthetic_has_the_paper_s_clients_and_its_seed_is_the_scenario_s():
    a, b, c = (load_dataset("leaf-synthetic", seed=seed) for seed in (1, 1, 2))
    assert a.train.groups is not None
    assert a.train.groups.bincount().tolist() == [280, 184, 1536, 256, 208]
    assert a.train.inputs.equal(b.train.inputs)
    assert not a.train.inputs.equal(c.train.inputs)
    assert a.input_shape == (10,)
    assert a.train.inputs.mean(dim=0).abs().max() < 1e-5
    first, second = (audit(seed=s, **LEAF).findings[0].metrics[0].value for s in (0, 1))
    assert first != second


LEAF: dict[str, Any] = {
    "data": {"name": "leaf-synthetic", "split": "train"},
    "model": {"name": "logistic"},
    "attacks": ["last-update"],
    "federations": [{**SAMPLED, "clients": 5, "clients_per_round": None, "rounds": 1, "local_steps": 1,
                     "batch_size": 64, "partition": {"scheme": "natural"}}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"clients": 4}, "names 5 clients"),
        ({"clients": 6}, "0 examples are nobody's, for 1 client"),
    ],
)
def test_a_natural_partition_that_cannot_be_is_refused(changes, reason):
    with pytest.raises(BadInput, match=reason):
        audit(**{**LEAF, "federations": [{**LEAF["federations"][0], **changes}]})


def test_data_without_groups_have_no_natural_partition():
    with pytest.raises(BadInput, match="whose its examples are"):
        audit(federations=[{**SAMPLED, "partition": {"scheme": "natural"}}])
