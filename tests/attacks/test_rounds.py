"""Membership over rounds: fedmia against closed forms, loss-series against numpy's fit, and what they refuse."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import Tensor, nn

from fedaudit.attacks import MembershipFinding, make_attack
from fedaudit.evaluation import evaluate
from fedaudit.transcript.observation import Message, Observation
from fedaudit.transcript.queries import NOBODY, QuerySet
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.truth import Truth
from fedaudit.transcript.update import Update
from fedaudit.utils.errors import NotApplicable
from fedaudit.utils.seeds import generator
from tests.attacks.membership_cases import logistic, run_attack

State = dict[str, Tensor]


def federation(*rounds: tuple[int, ...]) -> Observation:
    """Models and updates that nobody trained: in each round of the clients that are given."""
    seen = logistic()
    rng = generator(5, "rounds")
    weights = tuple({n: torch.randn(t.shape, generator=rng) for n, t in seen.weights[0].items()} for _ in rounds)
    messages = [
        Message(i, client, weights[i], Update(client, "weights", random_like(weights[i], rng), 5, None))
        for i, clients in enumerate(rounds)
        for client in clients
    ]
    return dataclasses.replace(seen, weights=weights, messages=tuple(messages))


def truth_of(owners: Tensor, matched: Tensor) -> Truth:
    return Truth({}, {}, torch.zeros(1), torch.zeros(1), {}, owners=owners, matched=matched)


def random_like(state: State, rng: torch.Generator) -> State:
    return {name: torch.randn(t.shape, generator=rng) for name, t in state.items()}


def right(seen: Observation, state: State) -> np.ndarray:
    """Return the probability of the right class under a logistic regression."""
    assert seen.records is not None
    x, y = seen.records.inputs.double(), seen.records.labels
    p = (x @ state["weight"].double().T + state["bias"].double()).softmax(dim=1)
    return p[torch.arange(len(x)), y].numpy()


def log_odds(seen: Observation, message: Message) -> np.ndarray:
    p = right(seen, {name: t + message.update.tensors[name] for name, t in message.weights.items()})
    return np.asarray(np.log(p / (1 - p)))


def cosine(seen: Observation, message: Message) -> np.ndarray:
    assert seen.records is not None
    x, y = seen.records.inputs.double(), seen.records.labels
    w, b = message.weights["weight"].double(), message.weights["bias"].double()
    error = (x @ w.T + b).softmax(dim=1) - nn.functional.one_hot(y, 3)
    gradients = torch.cat([(error[:, :, None] * x[:, None]).flatten(1), error], dim=1)
    moved = torch.cat([message.update.tensors[name].double().flatten() for name in ("weight", "bias")])
    return torch.cosine_similarity(-gradients, moved[None]).numpy()


@pytest.mark.parametrize(("statistic", "of"), [("loss", log_odds), ("gradient", cosine)])
def test_a_client_s_score_is_its_mean_probability_under_the_others_gaussian(statistic, of):
    seen = federation((0, 1, 2, 3), (0, 2, 3), (1, 3))  # the last round has too few to compare
    means = []
    for client in range(4):
        tails = []
        for i in (0, 1):
            values = {m.client: of(seen, m) for m in seen.messages if m.round == i}
            if client in values:
                others = np.stack([value for other, value in values.items() if other != client])
                tails.append(norm.sf(values[client], others.mean(axis=0), np.sqrt(others.var(axis=0) + 1e-8)))
        means.append(np.mean(tails, axis=0))
    found = run_attack("fedmia", seen, statistic=statistic)
    assert found.clients is not None
    assert found.clients.tolist() == [0, 1, 2, 3]
    assert np.allclose(found.scores.numpy(), -np.log(means).T, rtol=1e-4, atol=1e-4)  # float32 models
    assert found.members.sum(dim=0).tolist() == [2] * 4  # half of twelve records are members, of one of four clients


def of_probability(signal: str, p: np.ndarray) -> np.ndarray:
    return np.asarray({"confidence": p, "log-odds": np.log(p / (1 - p)), "loss": np.log(p)}[signal])


@pytest.mark.parametrize("signal", ["confidence", "log-odds", "loss"])
def test_the_slope_is_numpy_s(signal):
    seen = federation((0,), (0, 1), (1,), (0,), (1,))
    series = np.stack([of_probability(signal, right(seen, state)) for state in seen.weights])
    found = run_attack("loss-series", seen, signal=signal)
    assert np.allclose(found.scores.numpy(), np.polyfit(range(5), series, 1)[0], atol=1e-5)  # models are float32
    asked = seen.split("client")[0]  # took part in rounds 0, 1 and 3
    returned = [{n: m.weights[n] + t for n, t in m.update.tensors.items()} for m in asked.messages]
    series = np.stack([of_probability(signal, right(seen, state)) for state in returned])
    found = run_attack("loss-series", asked, signal=signal, model="client")
    assert np.allclose(found.scores.numpy(), np.polyfit([0, 1, 3], series, 1)[0], atol=1e-5)


@pytest.mark.parametrize("statistic", ["gradient", "loss"])
def test_the_record_that_one_client_alone_learns_is_found(statistic):
    seen = federation((0, 1, 2, 3))
    assert seen.records is not None
    x, y = seen.records.inputs[0], seen.records.labels[0]
    one_hot = nn.functional.one_hot(y, 3).float()
    first, *rest = seen.messages
    learnt = {"weight": 20 * torch.outer(one_hot - 1 / 3, x), "bias": 0 * one_hot}
    update = dataclasses.replace(first.update, tensors=learnt)
    seen = dataclasses.replace(seen, messages=(dataclasses.replace(first, update=update), *rest))
    before = run_attack("fedmia", federation((0, 1, 2, 3)), statistic=statistic).scores
    after = run_attack("fedmia", seen, statistic=statistic).scores
    assert after[0, 0] > before[0, 0]
    assert after[0, 0] > after.median()
    assert int(after[0].argmax()) == 0


def test_only_layers_that_all_send_are_compared():
    seen = federation((0, 1, 2))
    first, *rest = seen.messages
    part = dataclasses.replace(first, update=dataclasses.replace(first.update, tensors={"bias": torch.ones(3)}))
    alone = [
        dataclasses.replace(m, update=dataclasses.replace(m.update, tensors={"bias": m.update.tensors["bias"]}))
        for m in rest
    ]
    mixed, bias = (dataclasses.replace(seen, messages=(part, *others)) for others in (rest, alone))
    assert run_attack("fedmia", mixed).scores.equal(run_attack("fedmia", bias).scores)
    nothing = dataclasses.replace(part, update=dataclasses.replace(part.update, tensors={}))
    with pytest.raises(NotApplicable, match="use statistic: loss"):
        make_attack("fedmia").check(dataclasses.replace(seen, messages=(nothing, *rest)))


def test_sums_leave_the_global_models():
    seen = federation((0,), (0,))
    summed = [dataclasses.replace(m, update=dataclasses.replace(m.update, members=(0, 1, 2))) for m in seen.messages]
    seen = dataclasses.replace(seen, messages=tuple(summed), threat=ThreatModel(target_records=12, sees="sum"))
    with pytest.raises(NotApplicable, match="sums of several"):
        make_attack("fedmia").check(seen)
    assert run_attack("loss-series", seen).scores.isfinite().all()
    with pytest.raises(NotApplicable, match="sums of several"):
        make_attack("loss-series", {"model": "client"}).check(seen)


def test_a_client_has_the_global_models():
    client = dataclasses.replace(federation((0, 1, 2), (0, 1, 2)), messages=())
    assert run_attack("loss-series", client).scores.isfinite().all()
    for name, settings in (("fedmia", {}), ("loss-series", {"model": "client"})):
        with pytest.raises(NotApplicable, match="sees no update"):
            make_attack(name, settings).check(client)


def test_what_is_too_little_is_said():
    with pytest.raises(NotApplicable, match="updates of three"):
        make_attack("fedmia").check(federation((0, 1), (1, 2)))
    with pytest.raises(NotApplicable, match="of one only"):
        make_attack("loss-series").check(federation((0, 1, 2)))
    with pytest.raises(NotApplicable, match=r"set threat\.target_records"):
        make_attack("fedmia").check(dataclasses.replace(federation((0, 1, 2)), records=None))
    seen = federation((0, 1, 2), (0, 1, 2))
    gradients = tuple(
        dataclasses.replace(m, update=dataclasses.replace(m.update, kind="gradient")) for m in seen.messages
    )
    seen = dataclasses.replace(seen, messages=gradients, update_kind="gradient")
    assert run_attack("fedmia", seen).scores.isfinite().all()
    with pytest.raises(NotApplicable, match="statistic: gradient"):
        make_attack("fedmia", {"statistic": "loss"}).check(seen)
    with pytest.raises(NotApplicable, match="model: global"):
        make_attack("loss-series", {"model": "client"}).check(seen.split("client")[0])


def trained(members: int) -> Observation:
    """Ten clients, three rounds; the first ``members`` of 200 records, dealt to them in turn, are their data.

    Labels are random, so that a record is learnt by heart or not at all; with no members clients hold other examples.
    """
    seen = logistic(n=200, d=200)
    assert seen.records is not None
    x, y = seen.records.inputs, seen.records.labels
    if not members:
        x, y = torch.randn(100, 200, generator=generator(7, "others")), torch.arange(100) % 3
    global_state = {n: torch.zeros_like(t) for n, t in seen.weights[0].items()}
    states: list[State] = []
    messages: list[Message] = []
    for i in range(3):
        states.append(global_state)
        for client in range(10):
            own = slice(client, members or 100, 10)
            state = {n: t.clone().requires_grad_() for n, t in global_state.items()}
            for _ in range(5):
                loss = nn.functional.cross_entropy(x[own] @ state["weight"].T + state["bias"], y[own])
                grads = torch.autograd.grad(loss, list(state.values()))
                stepped = zip(state.items(), grads, strict=True)
                state = {n: (t - 0.1 * g).detach().requires_grad_() for (n, t), g in stepped}
            moved = {n: (t - global_state[n]).detach() for n, t in state.items()}
            messages.append(Message(i, client, global_state, Update(client, "weights", moved, 10, None)))
        mean = {n: torch.stack([m.update.tensors[n] for m in messages[-10:]]).mean(dim=0) for n in global_state}
        global_state = {n: t + mean[n] for n, t in global_state.items()}
    return dataclasses.replace(seen, weights=tuple(states), messages=tuple(messages))


@pytest.mark.slow
def test_members_are_found_better_than_by_the_loss_and_nobody_is_where_there_are_none():
    def aucs(seen: Observation) -> list[float]:
        attacks: tuple[tuple[str, dict[str, str]], ...] = (
            ("loss-threshold", {}),
            ("loss-series", {}),
            ("fedmia", {}),
            ("fedmia", {"statistic": "loss"}),
        )
        found = [run_attack(name, seen, **settings) for name, settings in attacks]
        owners = torch.where(torch.arange(200) < 100, torch.arange(200) % 10, NOBODY)
        truth = truth_of(owners, torch.arange(200).roll(100))
        results = [evaluate(one, seen, truth, seed=0).result for one in found]
        return [next(m.value for m in result.metrics if m.name == "membership_auc") for result in results]

    by_loss, by_slope, *by_others = aucs(trained(100))
    assert by_slope > 0.85
    assert min(by_others) > by_loss + 0.03
    assert max(abs(area - 0.5) for area in aucs(trained(0))) < 0.12  # three standard errors of 100 and 100


def test_each_record_is_asked_of_its_pair_s_client():
    owners = torch.tensor([2, NOBODY, 5, NOBODY, 7, NOBODY])
    truth = truth_of(owners, torch.tensor([1, 0, 3, 2, 5, 4]))
    scores = torch.zeros(6, 2, dtype=torch.float64)
    scores[0, 0] = scores[3, 1] = 1.0  # of client 2 the member, of client 5 the other one; client 7 isn't compared
    seen = federation((2, 5, 7))
    assert seen.records is not None
    seen = dataclasses.replace(
        seen,
        records=QuerySet(
            seen.records.inputs[:6], seen.records.labels[:6], seen.records.inputs[:0], seen.records.labels[:0]
        ),
    )
    found = MembershipFinding(attack="m", scores=scores, members=scores > 0.5, clients=torch.tensor([2, 5]))
    result = evaluate(found, seen, truth, seed=0).result
    area = next(m for m in result.metrics if m.name == "membership_auc")
    assert (area.value, area.n) == (0.5, 4)
    assert "1 pairs of records were left out" in result.notes[0]
    scores[3, 1], scores[2, 1] = 0.0, 1.0
    found = MembershipFinding(attack="m", scores=scores, members=scores > 0.5, clients=torch.tensor([2, 5]))
    assert next(m.value for m in evaluate(found, seen, truth, seed=0).result.metrics) == 1.0


def test_rounds_are_spread_and_end_with_the_last():
    seen = federation((0, 1, 2), (0, 1), (0, 1, 2), (0, 1, 2), (0, 1, 2))
    whole = run_attack("fedmia", seen, statistic="loss").scores
    kept = dataclasses.replace(seen, messages=tuple(m for m in seen.messages if m.round in (2, 4)))
    assert run_attack("fedmia", seen, statistic="loss", rounds=2).scores.equal(
        run_attack("fedmia", kept, statistic="loss").scores
    )
    assert run_attack("fedmia", seen, statistic="loss", rounds=9).scores.equal(whole)
