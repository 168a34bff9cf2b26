"""Clipping with noise on the mean: what the server makes of it, its account, and Flower's own."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, pld
from torch import Tensor

from fedaudit.defences import AGGREGATORS, AdaptiveClipping, Cohort, FixedClipping, Update
from fedaudit.epsilon.accounting import Account, TakingPart
from fedaudit.pipeline.prepare import resolve
from fedaudit.scenario.scenario import scenario_from
from fedaudit.simulation.server import Server
from fedaudit.simulation.simulator import simulate
from fedaudit.transcript.transcript import Transcript
from fedaudit.transcript.update import ClientDefenceInfo
from fedaudit.utils.errors import BadInput
from fedaudit.utils.registry import make
from tests.models.model_cases import generator as rng

State = dict[str, Tensor]


def updates_of(seed: int, n: int = 10, scale: float = 1.0) -> list[Update]:
    """Of a network with a statistic; some long and some short."""
    draws, made = rng(seed), []
    for client in range(n):
        size = scale * 0.5 * 1.3**client
        tensors = {
            "a": size * torch.randn(4, 5, generator=draws) / 5,
            "b": size * torch.randn(6, generator=draws) / 5,
        }
        running = size * torch.randn(3, generator=draws) / 5
        made.append(Update(client, "weights", tensors, 4 + client, None, buffers={"running": running}))
    return made


START: State = {"a": torch.zeros(4, 5), "running": torch.zeros(3), "b": torch.zeros(6)}


def norms_over(rule: str, rounds: int, initial: float, lengths: list[float], noise: float = 0.0) -> list[float]:
    """The norm, round after round, over clients whose updates have these lengths."""
    settings = {"rule": rule, "initial_clipping_norm": initial, "noise_multiplier": noise, "average": "mean"}
    made = make(AGGREGATORS, "adaptive-clipping", settings)
    assert isinstance(made, AdaptiveClipping)
    matrix = torch.eye(len(lengths)) * torch.tensor(lengths)
    found = []
    for index in range(rounds):
        made(matrix, Cohort(tuple(range(len(lengths))), generator=rng(index)))
        found.append(made.norm())
    return found


LENGTHS = np.exp(np.random.RandomState(0).normal(0, 1, 101)).tolist()


@pytest.mark.parametrize("initial", [0.1, 20.0])
def test_the_norm_follows_the_quantile_by_andrew_s_rule_and_leaves_it_by_flower_s(initial: float) -> None:
    median = float(np.median(LENGTHS))
    norms = norms_over("andrew", 200, initial, LENGTHS)
    assert norms[-1] == pytest.approx(median, rel=0.1)
    away = norms_over("flower", 200, initial, LENGTHS)
    assert abs(math.log(away[-1] / median)) > abs(math.log(initial / median)) + 10
    assert (away[-1] < median) == (initial < median)  # to nothing, or without end


def test_one_step_of_the_norm_is_the_paper_s() -> None:
    share = sum(length <= 1.0 for length in LENGTHS) / len(LENGTHS)
    (norm,) = norms_over("andrew", 1, 1.0, LENGTHS)
    assert norm == pytest.approx(math.exp(-0.2 * (share - 0.5)))
    (other,) = norms_over("flower", 1, 1.0, LENGTHS)
    assert other == pytest.approx(math.exp(-0.2 * ((1 - share) - 0.5)))
    noisy = [norms_over("andrew", 1, 1.0, LENGTHS, noise=0.5)[0]]
    assert noisy[0] != norm
    assert math.log(noisy[0] / norm) == pytest.approx(0, abs=0.2 * 4 * (101 / 20) / 101)


@pytest.mark.parametrize("rule", ["andrew", "flower"])
def test_the_noise_is_of_the_stated_size(rule: str) -> None:
    """Andrew et al.: of this round's norm; Flower: of the next one's."""
    n, d, z, count = 20, 200_000, 0.8, 2.0
    matrix = torch.zeros(n, d)
    matrix[:, 0] = 3.0  # all are clipped
    settings = {
        "noise_multiplier": z, "initial_clipping_norm": 1.5, "clipped_count_stddev": count, "clip_norm_lr": 1.0,
        "rule": rule, "average": "mean",
    }  # fmt: skip
    made = make(AGGREGATORS, "adaptive-clipping", settings)
    found = made(matrix, Cohort(tuple(range(n)), generator=rng(3)))
    norm = 1.5 if rule == "andrew" else made.norm()  # type: ignore[attr-defined]
    expected = (z**-2 - (2 * count) ** -2) ** -0.5 * norm / n
    assert float(found.vector[1:].std()) == pytest.approx(expected, rel=0.01)
    assert float(found.vector[0]) == pytest.approx(1.5, abs=5 * expected)
    assert (made.norm() < 1.5) == (rule == "flower")  # type: ignore[attr-defined]


# --- in the simulator ----------------------------------------------------------------------------------------------


def simulated(aggregator: dict[str, Any], **changes: Any) -> Transcript:
    federation = {"name": "fed", "clients": 3, "examples": 30, "rounds": 3, "batch_size": 4, "algorithm": "fedavg"}
    values = {
        "data": {"name": "digits", "image_size": 16},
        "model": {"name": "convnet-small", "width": 4, "batch_norm": "train"},
        "federations": [{**federation, "local_steps": 2, "learning_rate": 0.05}],
        "defences": {"aggregator": aggregator},
        **changes,
    }
    (made,) = resolve(scenario_from(values)).federations
    return simulate(made).transcript


def length_of(update: Update, weights: State) -> float:
    moved = [t - weights[n] for n, t in update.buffers.items() if t.is_floating_point()]
    return math.sqrt(sum(float(t.double().square().sum()) for t in [*update.tensors.values(), *moved]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fixed-clipping", "adaptive-clipping"])
def test_what_the_server_sees_is_whole_or_clipped_and_the_model_is_the_same(name: str) -> None:
    norm = {"fixed-clipping": "clipping_norm", "adaptive-clipping": "initial_clipping_norm"}[name]
    settings = {"name": name, "noise_multiplier": 0.05, norm: 0.2, "average": "mean"}
    if name == "adaptive-clipping":
        settings |= {"clipped_count_stddev": 0.5}
    server, client = (simulated({**settings, "side": side}) for side in ("server", "client"))
    limit = 0.2
    for index, (whole, clipped) in enumerate(zip(server.rounds, client.rounds, strict=True)):
        assert any(length_of(u, whole.weights) > 1.5 * limit for u in whole.updates) or index
        assert all(u.sanitised is None for u in whole.updates)
        for update in clipped.updates:
            assert update.sanitised is not None
            assert update.sanitised.clip is not None
            assert length_of(update, clipped.weights) <= update.sanitised.clip * (1 + 1e-5)
        if not index:
            assert clipped.updates[0].sanitised.clip == limit  # type: ignore[union-attr]
        for tensor_name, tensor in whole.weights.items():
            torch.testing.assert_close(tensor, clipped.weights[tensor_name], rtol=1e-3, atol=1e-4)
    norms = [r.updates[0].sanitised.clip for r in client.rounds]  # type: ignore[union-attr]
    assert (len(set(norms)) == 1) == (name == "fixed-clipping")


def test_clipping_after_noise_does_not_make_more_of_the_noise() -> None:
    (update,) = updates_of(0, n=1, scale=10.0)
    known = ClientDefenceInfo("local-dp", noise=0.3, clip=2.0)
    noisy = dataclasses.replace(update, sanitised=known, buffers={})
    sent = FixedClipping(clipping_norm=0.5, side="client").asked(noisy, {})
    assert sent.sanitised is not None
    assert sent.sanitised.clip
    assert sent.sanitised.noise < 0.3
    assert sent.sanitised.noise / sent.sanitised.clip == pytest.approx(0.3 / 2.0)


def test_statistics_are_clipped_and_get_noise() -> None:
    updates = updates_of(1)
    quiet, noisy = (
        Server(make(AGGREGATORS, "fixed-clipping", {"noise_multiplier": z, "clipping_norm": 1.0}), 1.0, 0.0, rng())
        for z in (0.0, 1e4)
    )
    state, said = quiet.apply(START, updates)
    lengths = [length_of(u, START) for u in updates]
    expected = sum(
        float(w) * u.buffers["running"] * min(1.0, 1.0 / length)
        for w, u, length in zip(said.weights, updates, lengths, strict=True)
    )
    torch.testing.assert_close(state["running"], expected)
    assert noisy.apply(START, updates)[0]["running"].abs().min() > 1
    held_back = [dataclasses.replace(updates[0], tensors={"a": updates[0].tensors["a"]}), *updates[1:]]
    with pytest.raises(BadInput, match="held different layers back"):
        quiet.apply(START, held_back)


def test_it_goes_on_from_a_checkpoint() -> None:
    settings = {"noise_multiplier": 0.5, "clipped_count_stddev": 1.0}
    one = Server(make(AGGREGATORS, "adaptive-clipping", settings), 1.0, 0.0, rng())
    one.apply(START, updates_of(1))
    other = Server(make(AGGREGATORS, "adaptive-clipping", settings), 1.0, 0.0, rng(5))
    other.load_state_dict(one.state_dict())
    first, second = (server.apply(START, updates_of(2))[0] for server in (one, other))
    assert all(first[name].equal(second[name]) for name in START)
    assert not first["a"].equal(
        Server(make(AGGREGATORS, "adaptive-clipping", settings), 1.0).apply(START, updates_of(2))[0]["a"]
    )


# --- the account ---------------------------------------------------------------------------------------------------


def taking_part(*examples: int, per_round: int | None = None) -> TakingPart:
    return TakingPart(examples, per_round or len(examples), 1, 1, None, 100)


@pytest.mark.slow
def test_the_account_is_of_the_largest_weight() -> None:
    equal, uneven = taking_part(*[10] * 10), taking_part(*[10] * 9, 90)
    made = FixedClipping(noise_multiplier=2.0, delta=1e-5)
    account, worse = made.account(equal), made.account(uneven)
    assert account == Account(2.0, 1e-5, 1.0, 1)
    assert worse is not None
    assert worse.noise == pytest.approx(2.0 / (10 * 0.5))  # half of all examples, where a tenth is reckoned with
    oracle = pld.PLDAccountant().compose(GaussianDpEvent(0.4), 3).get_epsilon(1e-5)
    assert worse.spent(3, "pld") == pytest.approx(oracle, rel=1e-3)
    mean = FixedClipping(noise_multiplier=2.0, average="mean").account(uneven)
    assert mean is not None
    assert mean.noise == pytest.approx(2.0)
    few = FixedClipping(noise_multiplier=2.0).account(taking_part(10, 20, 30, 40, per_round=2))
    assert few is not None
    assert few.noise == pytest.approx(2.0 / (2 * 40 / 50))  # the largest with the smallest
    assert few.of == (2, 4)
    wrong = FixedClipping(noise_multiplier=2.0, num_sampled_clients=20).account(equal)
    assert wrong is not None
    assert wrong.noise == pytest.approx(1.0)  # divided by 20, and ten took part
    assert FixedClipping(noise_multiplier=0.0).account(equal) is None


def test_count_and_mean_together_are_what_was_asked_for() -> None:
    equal = taking_part(*[10] * 10)
    andrew = AdaptiveClipping(noise_multiplier=1.0, clipped_count_stddev=0.7).account(equal)
    assert andrew is not None
    assert andrew.noise == pytest.approx(1.0)
    flower = AdaptiveClipping(noise_multiplier=1.0, clipped_count_stddev=0.7, rule="flower").account(equal)
    assert flower is not None
    assert flower.noise < 0.95
    with pytest.raises(BadInput, match="clipped_count_stddev"):
        AdaptiveClipping(noise_multiplier=1.0).account(equal)


def test_an_audit_tells_what_is_spent() -> None:
    values = {
        "data": {"name": "digits"},
        "model": {"name": "lenet", "initialisation": "uniform"},
        "federations": [{"name": "fed", "clients": 3, "examples": 30, "rounds": 2, "batch_size": 4}],
        "defences": {"aggregator": {"name": "fixed-clipping", "noise_multiplier": 2.0, "average": "mean"}},
    }
    (federation,) = resolve(scenario_from(values)).federations
    history = simulate(federation).history
    assert history is not None
    assert history.epsilon == pytest.approx([Account(2.0, 1e-5, 1.0, 1).spent(n) for n in (1, 2)])


# --- Flower's own --------------------------------------------------------------------------------------------------


@pytest.mark.peers
@pytest.mark.parametrize("side", ["server", "client"])
@pytest.mark.parametrize("kind", ["fixed", "adaptive"])
def test_flower_s_own_gives_the_same(kind: str, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The norms to the bit, round after round; models to rounding, for Flower averages weights, not changes."""
    pytest.importorskip("flwr")
    from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

    pytest.importorskip("flwr")
    from flwr.clientapp.mod import adaptiveclipping_mod, fixedclipping_mod

    pytest.importorskip("flwr")
    from flwr.serverapp import strategy as flower

    pytest.importorskip("flwr")
    from flwr.supercore.task_identity import TaskIdentity

    for part in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, part, 1)
    wrapped = flower.FedAvg(fraction_evaluate=0.0)
    name = f"DifferentialPrivacy{side.capitalize()}Side{kind.capitalize()}Clipping"
    settings: dict[str, Any] = {"noise_multiplier": 0.6, "num_sampled_clients": 10}
    settings |= (
        {"clipping_norm": 1.1} if kind == "fixed" else {"initial_clipping_norm": 1.1, "clipped_count_stddev": 0.7}
    )
    theirs = getattr(flower, name)(wrapped, **settings)
    ours = make(AGGREGATORS, f"{kind}-clipping", settings | ({"rule": "flower"} if kind == "adaptive" else {}))
    server, state = Server(ours, 1.0, 0.0, rng(7)), dict(START)
    for index in range(4):
        norm = theirs.clipping_norm
        assert ours.norm() == norm  # type: ignore[attr-defined]
        updates = [
            dataclasses.replace(u, buffers={"running": u.buffers["running"] + state["running"]})
            for u in updates_of(index)
        ]
        seed = int(torch.randint(2**32, (), generator=torch.Generator().set_state(server.generator.get_state())))  # type: ignore[union-attr]
        replies = []
        for update in updates:
            after = {n: state[n] + update.tensors[n] if n in update.tensors else update.buffers[n] for n in state}
            message = Message(
                RecordDict({"arrays": ArrayRecord(state), "config": ConfigRecord({"clipping_norm": norm})}), 7, "train"
            )

            def app(asked: Message, _: Context, after: State = after, held: int = update.num_examples) -> Message:
                content = RecordDict({"arrays": ArrayRecord(after), "metrics": MetricRecord({"num-examples": held})})
                return Message(content, reply_to=asked)

            mod = {"fixed": fixedclipping_mod, "adaptive": adaptiveclipping_mod}[kind]
            context = Context(1, 7, {}, RecordDict(), {})
            replies.append(mod(message, context, app) if side == "client" else app(message, context))
        theirs.current_arrays = ArrayRecord(state)
        np.random.seed(seed)  # noqa: NPY002
        arrays, _ = theirs.aggregate_train(index + 1, replies)
        found, _ = server.apply(state, [ours.asked(u, state) for u in updates])
        for tensor, value in arrays.to_torch_state_dict().items():
            torch.testing.assert_close(found[tensor], value, rtol=1e-5, atol=1e-6)
        state = found
