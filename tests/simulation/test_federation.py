"""The simulator against independent oracles: plain autograd, plain torch.optim.SGD, plain arithmetic."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from fedaudit.data import Dataset, load_dataset
from fedaudit.defences.aggregation import AGGREGATORS, Aggregate, Aggregator, Cohort
from fedaudit.defences.client_defences import CLIENT_DEFENCES, ClientDefence
from fedaudit.pipeline.prepare import resolve
from fedaudit.simulation.client import Federation
from fedaudit.simulation.simulator import partition_clients, simulate
from fedaudit.task.training import TrainingConfig
from fedaudit.transcript.truth import Truth
from fedaudit.utils.errors import BadInput
from fedaudit.utils.registry import register
from tests.simulation.federation_cases import run, same, scenario

Loss = Callable[[Tensor, Tensor], Tensor]


def batches(
    federation: Federation, truth: Truth, key: tuple[int, int], sizes: tuple[int, ...]
) -> list[tuple[Tensor, Tensor]]:
    """Return the batches of an update as the model saw them, normalised here and not by the library."""
    pixels = truth.inputs[key]
    if pixels.ndim == 4:
        data = federation.dataset
        mean, std = torch.tensor(data.mean).view(1, -1, 1, 1), torch.tensor(data.std).view(1, -1, 1, 1)
        pixels = (pixels - mean) / std
    return list(zip(pixels.split(list(sizes)), truth.labels[key].split(list(sizes)), strict=True))


def model_at(federation: Federation, weights: dict[str, Tensor]) -> nn.Module:
    model = copy.deepcopy(federation.model)
    model.load_state_dict(weights)
    model.train()
    if federation.task_info.batch_norm == "eval":
        for part in model.modules():
            if isinstance(part, nn.BatchNorm2d):
                part.eval()
    return model


# --- one gradient --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "model", "loss"),
    [
        ("digits", {"name": "lenet", "initialisation": "uniform"}, functional.cross_entropy),
        ("digits", {"name": "convnet-small", "width": 4, "batch_norm": "eval"}, functional.cross_entropy),
        ("digits", {"name": "convnet-small", "width": 4, "batch_norm": "train"}, functional.cross_entropy),
        ("breast-cancer", {"name": "mlp", "width": 8}, functional.cross_entropy),
        ("diabetes", {"name": "linear"}, functional.mse_loss),
    ],
    ids=["lenet", "eval BatchNorm", "train BatchNorm", "table", "regression"],
)
def test_fedsgd_sends_the_gradient_of_the_batch(data: str, model: dict[str, Any], loss: Loss) -> None:
    spec = {"clients": 2, "examples": 12, "batch_size": 3, "rounds": 2, "learning_rate": 0.1}
    federation, transcript, truth = run(spec, data={"name": data}, model=model)
    assert transcript.updates == 4
    for record in transcript.rounds:
        for update in record.updates:
            oracle = model_at(federation, record.weights)
            ((inputs, targets),) = batches(federation, truth, (record.index, update.client), (3,))
            loss(oracle(inputs), targets).backward()
            gradients = {name: p.grad for name, p in oracle.named_parameters()}
            assert update.kind == "gradient"
            assert update.num_examples == 3
            assert update.tensors.keys() == gradients.keys()
            torch.testing.assert_close(update.tensors, gradients)


def test_a_parameter_without_part_in_the_loss_sends_zeros() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(64, 10), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.used(x.flatten(1))
            return out

    given = {"name": "custom", "initialisation": "given"}
    _, transcript, _ = run({"clients": 1, "examples": 2}, model=given, own={"model": Idle()})
    tensors = transcript.rounds[0].updates[0].tensors
    assert not tensors["idle.weight"].any()
    assert tensors["used.weight"].any()


# --- local training ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        {"algorithm": "fedavg"},
        {"algorithm": "fedavg", "momentum": 0.9},
        {"algorithm": "fedavg", "momentum": 0.5, "weight_decay": 0.1},
        {"algorithm": "fedprox", "proximal_mu": 2.0},
        {"algorithm": "fedprox", "proximal_mu": 0.7, "momentum": 0.9, "weight_decay": 0.05},
    ],
    ids=["plain", "momentum", "weight decay", "prox", "all"],
)
def test_fedavg_sends_what_plain_sgd_would_change(spec: dict[str, Any]) -> None:
    local = {"clients": 2, "examples": 12, "batch_size": 2, "local_steps": 5, "rounds": 2, "learning_rate": 0.2}
    federation, transcript, truth = run({**local, **spec})
    for record in transcript.rounds:
        for update in record.updates:
            oracle = model_at(federation, record.weights)
            start = {name: p.detach().clone() for name, p in oracle.named_parameters()}
            optimiser = torch.optim.SGD(
                oracle.parameters(),
                lr=0.2,
                momentum=spec.get("momentum", 0),
                weight_decay=spec.get("weight_decay", 0),
            )
            assert update.training is not None
            for inputs, targets in batches(
                federation, truth, (record.index, update.client), update.training.batch_sizes
            ):
                optimiser.zero_grad()
                value = functional.cross_entropy(oracle(inputs), targets)
                for name, parameter in oracle.named_parameters():
                    value = value + spec.get("proximal_mu", 0) / 2 * (parameter - start[name]).square().sum()
                value.backward()
                optimiser.step()
            moved = {name: p.detach() - start[name] for name, p in oracle.named_parameters()}
            assert update.kind == "weights"
            torch.testing.assert_close(update.tensors, moved, rtol=1e-4, atol=1e-6)


def test_the_facts_are_those_of_the_plan() -> None:
    plan: dict[str, Any] = {"momentum": 0.9, "weight_decay": 0.1, "proximal_mu": 2.0, "learning_rate": 0.2}
    spec = {"algorithm": "fedprox", "clients": 1, "examples": 5, "batch_size": 2, "local_steps": 4, **plan}
    _, transcript, _ = run(spec)
    training = transcript.rounds[0].updates[0].training
    told = TrainingConfig(**plan, local_steps=4, batch_sizes=(2, 2, 1, 2), data_size=5)  # 4 steps: a pass and more
    assert training == told


DIGITS = load_dataset("digits")


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 9),
    batch=st.integers(1, 11),
    epochs=st.integers(1, 3),
    rounds=st.integers(1, 2),
    seed=st.integers(0, 99),
)
def test_an_epoch_is_a_pass_over_all_that_the_client_has(
    n: int, batch: int, epochs: int, rounds: int, seed: int
) -> None:
    spec = {"algorithm": "fedavg", "clients": 2, "examples": 2 * n, "rounds": rounds}
    made = scenario({**spec, "batch_size": batch, "local_epochs": epochs}, seed=seed)
    shares = partition_clients(DIGITS, "test", made.federations[0], seed=seed)
    recording = simulate(resolve(made, dataset=DIGITS).federations[0])
    transcript, truth = recording.transcript, recording.truth
    for record in transcript.rounds:
        for update in record.updates:
            assert update.training is not None
            assert update.training.local_steps == math.ceil(n / batch) * epochs
            assert update.num_examples == n * epochs == sum(update.training.batch_sizes)
            held = sorted(row.tolist() for row in shares[update.client].inputs.flatten(1))
            for one_pass in truth.inputs[record.index, update.client].split(n):
                assert sorted(row.tolist() for row in one_pass.flatten(1)) == held


def test_passes_differ_in_their_order() -> None:
    spec = {"algorithm": "fedavg", "clients": 1, "examples": 10, "batch_size": 2, "local_epochs": 2}
    _, _, truth = run(spec)
    first, second = truth.inputs[0, 0].split(10)
    assert not first.equal(second)


def test_fedsgd_goes_through_the_data_round_by_round() -> None:
    _, _, truth = run({"clients": 1, "examples": 6, "batch_size": 2, "rounds": 3})
    seen = torch.cat([truth.inputs[r, 0] for r in range(3)])
    assert len(seen.flatten(1).unique(dim=0)) == 6


# --- clients and server --------------------------------------------------------------------------------------------


def test_so_many_clients_a_round_as_asked_for() -> None:
    _, transcript, truth = run({"clients": 6, "clients_per_round": 2, "examples": 12, "rounds": 12})
    chosen = [[u.client for u in record.updates] for record in transcript.rounds]
    assert all(len(set(round_)) == 2 and round_ == sorted(round_) for round_ in chosen)
    assert {client for round_ in chosen for client in round_} == set(range(6))  # in 12 rounds everybody had a turn
    assert len({tuple(round_) for round_ in chosen}) > 1
    assert set(truth.inputs) == {(r, c) for r, round_ in enumerate(chosen) for c in round_}


def test_the_server_steps_against_the_mean_gradient() -> None:
    _, transcript, _ = run({"clients": 3, "examples": 9, "batch_size": 2, "rounds": 3, "learning_rate": 0.5})
    for now, after in zip(transcript.rounds, transcript.rounds[1:], strict=False):
        for name, weight in now.weights.items():
            mean = sum(u.tensors[name] for u in now.updates) / 3
            torch.testing.assert_close(after.weights[name], weight - 0.5 * mean)


def test_the_server_adds_the_mean_change_of_weights() -> None:
    spec = {"algorithm": "fedavg", "clients": 3, "examples": 9, "local_steps": 2, "rounds": 3, "learning_rate": 0.5}
    _, transcript, _ = run(spec)
    for now, after in zip(transcript.rounds, transcript.rounds[1:], strict=False):
        for name, weight in now.weights.items():
            mean = sum(u.tensors[name] for u in now.updates) / 3
            torch.testing.assert_close(after.weights[name], weight + mean)


def test_fedavg_weighs_by_what_clients_hold_and_not_by_what_a_step_used() -> None:
    """McMahan et al. 2017, Algorithm 1: nₖ is the client's, here 184 to 1,536 examples, of which a step uses 32."""
    spec = {"algorithm": "fedavg", "clients": 5, "batch_size": 32, "local_steps": 1, "rounds": 2}
    data, shares = {"name": "leaf-synthetic", "split": "train"}, (280, 184, 1536, 256, 208)
    defences = {"aggregator": "fedavg"}
    _, transcript, _ = run({**spec, "partition": {"scheme": "natural"}}, data=data, defences=defences)
    now, after = transcript.rounds
    for name, weight in now.weights.items():
        moved = sum(n * u.tensors[name] for n, u in zip(shares, now.updates, strict=True)) / sum(shares)
        torch.testing.assert_close(after.weights[name], weight + moved)


BATCH_NORM = {"clients": 2, "examples": 12, "batch_size": 3, "rounds": 2, "learning_rate": 0.1}


@pytest.mark.parametrize("local", [{}, {"algorithm": "fedavg", "local_steps": 2}], ids=["fedsgd", "fedavg"])
def test_batchnorm_in_training_mode_sends_its_statistics_and_the_server_averages_them(local: dict[str, Any]) -> None:
    model = {"name": "convnet-small", "width": 4, "batch_norm": "train"}
    federation, transcript, truth = run({**BATCH_NORM, **local}, model=model)
    buffers = {name for name, _ in federation.model.named_buffers()}
    first, second = transcript.rounds
    for update in first.updates:
        oracle = model_at(federation, first.weights)
        optimiser = torch.optim.SGD(oracle.parameters(), lr=0.1)
        assert update.training is not None
        for inputs, targets in batches(federation, truth, (0, update.client), update.training.batch_sizes):
            optimiser.zero_grad()
            functional.cross_entropy(oracle(inputs), targets).backward()
            optimiser.step()
        assert update.buffers.keys() == buffers
        torch.testing.assert_close(update.buffers, dict(oracle.named_buffers()), rtol=1e-4, atol=1e-6)
    for name in buffers:
        sent = [u.buffers[name] for u in first.updates]
        expected = sent[0] if name.endswith("num_batches_tracked") else (sent[0] + sent[1]) / 2
        torch.testing.assert_close(second.weights[name], expected)
        assert not second.weights[name].equal(first.weights[name])


@pytest.mark.parametrize("local", [{}, {"algorithm": "fedavg", "local_steps": 2}], ids=["fedsgd", "fedavg"])
def test_batchnorm_in_evaluation_mode_keeps_its_statistics(local: dict[str, Any]) -> None:
    model = {"name": "convnet-small", "width": 4, "batch_norm": "eval"}
    federation, transcript, _ = run({**BATCH_NORM, **local}, model=model)
    for name, value in federation.model.named_buffers():
        assert all(record.weights[name].equal(value) for record in transcript.rounds)
    assert all(not update.buffers for record in transcript.rounds for update in record.updates)


# --- what clients hold ---------------------------------------------------------------------------------------------


def test_clients_hold_test_examples_and_all_of_these_are_candidates() -> None:
    federation, _, truth = run({"clients": 2, "examples": 10, "batch_size": 5})
    test = {tuple(row) for row in federation.dataset.test.inputs.flatten(1).tolist()}
    victims = torch.cat(list(truth.inputs.values()))
    assert all(tuple(row) in test for row in victims.flatten(1).tolist())
    assert truth.candidates.equal(federation.dataset.test.inputs)
    assert sorted(torch.cat(list(truth.labels.values())).tolist()) == list(range(10))  # one of each class


def test_victims_from_the_train_split_join_the_candidates() -> None:
    federation, _, truth = run({"clients": 2, "examples": 4}, data={"name": "digits", "split": "train"})
    train = {tuple(row) for row in federation.dataset.train.inputs.flatten(1).tolist()}
    assert len(truth.candidates) == 2 + len(federation.dataset.test)  # the two that were used, of the four held
    for victim in torch.cat(list(truth.inputs.values())):
        assert tuple(victim.flatten().tolist()) in train
        assert any(victim.equal(candidate) for candidate in truth.candidates[:2])


def test_what_does_not_fit_is_found_before_anything_runs() -> None:
    made = scenario({"clients": 4, "partition": {"scheme": "classes-per-client", "k": 11}})
    with pytest.raises(BadInput, match="k=11"):
        partition_clients(DIGITS, "test", made.federations[0], seed=0)


# --- the same again ------------------------------------------------------------------------------------------------

SPECS = [{}, {"algorithm": "fedavg", "local_steps": 3}]


@pytest.mark.parametrize("spec", SPECS, ids=["fedsgd", "fedavg"])
def test_the_seed_decides_everything(spec: dict[str, Any]) -> None:
    plan = {"clients": 4, "clients_per_round": 2, "examples": 20, "batch_size": 2, "rounds": 2, **spec}
    _, first, truth = run(plan, seed=3)
    torch.manual_seed(12345)  # the global generator has no say in it
    _, second, again = run(plan, seed=3)
    _, other, _ = run(plan, seed=4)
    assert same(first, second)
    assert all(truth.inputs[key].equal(again.inputs[key]) for key in truth.inputs)
    assert not same(first, other)


class Dropping(nn.Module):
    """A user's own model that draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Dropout(0.5), nn.Linear(16, 10))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out


@pytest.mark.parametrize("spec", SPECS, ids=["fedsgd", "fedavg"])
def test_dropout_is_on_and_repeatable_and_the_global_generator_untouched(spec: dict[str, Any]) -> None:
    given = {"name": "custom", "initialisation": "given"}
    plan = {"clients": 2, "examples": 4, "batch_size": 2, **spec}
    torch.manual_seed(99)
    state = torch.get_rng_state()
    federation, first, truth = run(plan, model=given, own={"model": Dropping()})
    assert torch.get_rng_state().equal(state)
    torch.rand(7)
    _, second, _ = run(plan, model=given, own={"model": Dropping()})
    assert same(first, second)
    if not spec:
        record = first.rounds[0]
        oracle = model_at(federation, record.weights).eval()
        ((inputs, targets),) = batches(federation, truth, (0, 0), (2,))
        functional.cross_entropy(oracle(inputs), targets).backward()
        without = dict(oracle.named_parameters())["body.1.weight"].grad
        assert without is not None
        assert not torch.allclose(record.updates[0].tensors["body.1.weight"], without)


def test_dropout_s_masks_differ_from_round_to_round() -> None:
    plan = {"clients": 1, "examples": 1, "rounds": 2, "learning_rate": 1e-30}  # the same weights, the same example
    _, transcript, _ = run(plan, model={"name": "custom", "initialisation": "given"}, own={"model": Dropping()})
    first, second = (record.updates[0].tensors["body.3.bias"] for record in transcript.rounds)
    assert not first.equal(second)


def test_every_client_shuffles_on_its_own() -> None:
    _, _, truth = run({"algorithm": "fedavg", "clients": 2, "examples": 40, "local_epochs": 1})
    orders = [truth.rows[0, client].tolist() for client in (0, 1)]
    assert [sorted(order) for order in orders] == [list(range(20))] * 2
    assert orders[0] != orders[1]


def test_the_users_model_is_not_changed() -> None:
    model = Dropping().eval()
    before = copy.deepcopy(model.state_dict())
    run({"clients": 1, "examples": 2, "rounds": 2}, model={"name": "custom"}, own={"model": model})
    assert not model.training
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_own_loss_and_data() -> None:
    rng = torch.Generator().manual_seed(0)
    pixels, labels = torch.rand(20, 3, 4, 4, generator=rng), torch.arange(20) % 2
    net = nn.Sequential(nn.Flatten(), nn.Linear(48, 2))

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return 3 * functional.multi_margin_loss(outputs, targets)

    made = {"model": {"name": "custom", "loss": "custom"}, "data": {"name": "custom"}}
    own = {"model": net, "loss": loss, "dataset": Dataset.from_tensors(pixels, labels)}
    federation, transcript, truth = run({"clients": 1, "examples": 2, "batch_size": 2}, own=own, **made)
    oracle = copy.deepcopy(net)
    ((inputs, targets),) = batches(federation, truth, (0, 0), (2,))
    loss(oracle(inputs), targets).backward()
    gradients = {name: p.grad for name, p in oracle.named_parameters()}
    torch.testing.assert_close(transcript.rounds[0].updates[0].tensors, gradients)


# --- defences plug in by name --------------------------------------------------------------------------------------


@pytest.fixture
def defences(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in (CLIENT_DEFENCES, AGGREGATORS):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))

    @register(frozen=False)
    class Growing(ClientDefence):
        name = "growing"
        summary = "multiplies by how often this client has sent, and adds noise to one tensor"

        sent: int = dataclasses.field(default=0, init=False)

        def __call__(self, update: Any, context: Any, generator: torch.Generator) -> Any:
            self.sent += 1
            tensors = {name: self.sent * tensor for name, tensor in update.tensors.items()}
            tensors["fc.bias"] = torch.randn(10, generator=generator)
            return dataclasses.replace(update, tensors=tensors)

    @register
    class First(Aggregator):
        name = "first"
        summary = "takes the first update and rejects the others"

        def __call__(self, updates: Tensor, cohort: Cohort | None = None) -> Aggregate:
            shares = torch.zeros(len(updates))
            shares[0] = 1
            return Aggregate(updates[0], shares, dict.fromkeys(range(1, len(updates)), "not the first"))

    assert {"growing", "first"} <= {*CLIENT_DEFENCES.names(), *AGGREGATORS.names()}


def test_a_client_defence_sees_every_update_and_keeps_state_for_its_client(defences: None) -> None:
    spec = {"clients": 2, "examples": 2, "rounds": 3, "learning_rate": 0.1}
    federation, transcript, truth = run(spec, defences={"client_defence": "growing"})
    noise = []
    for record in transcript.rounds:
        for update in record.updates:
            oracle = model_at(federation, record.weights)
            ((inputs, targets),) = batches(federation, truth, (record.index, update.client), (1,))
            functional.cross_entropy(oracle(inputs), targets).backward()
            gradient = dict(oracle.named_parameters())["hidden.weight"].grad
            assert gradient is not None
            torch.testing.assert_close(update.tensors["hidden.weight"], (record.index + 1) * gradient)
            noise.append(update.tensors["fc.bias"])
    assert len(torch.stack(noise).unique(dim=0)) == 6  # every client and round has its own
    _, again, _ = run(spec, defences={"client_defence": "growing"})
    assert same(transcript, again)


def test_an_aggregator_decides_what_the_server_applies_and_whom_it_rejects(defences: None) -> None:
    spec = {"clients": 4, "clients_per_round": 3, "examples": 8, "rounds": 2, "learning_rate": 0.5}
    _, transcript, _ = run(spec, defences={"aggregator": "first"})
    now, after = transcript.rounds
    for name, weight in now.weights.items():
        torch.testing.assert_close(after.weights[name], weight - 0.5 * now.updates[0].tensors[name])
    assert now.rejected == {update.client: "not the first" for update in now.updates[1:]}
    assert len(now.updates) == 3  # who is rejected has sent all the same
