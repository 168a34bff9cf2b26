"""fedaudit's defences in Flower: aggregators as a strategy, clients' as mods. Messages go round in process."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytestmark = pytest.mark.peers
pytest.importorskip("flwr", reason="Flower isn't installed")

from flwr.app import (  # noqa: E402
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.proto.message_pb2 import Context as ContextBytes  # noqa: E402
from flwr.serverapp.strategy import FedAvg  # noqa: E402
from flwr.supercore.task_identity import TaskIdentity  # noqa: E402

from fedaudit.adapters.flower import ClientDefenceMod, RobustStrategy, RootTraining  # noqa: E402
from fedaudit.data import load_dataset  # noqa: E402
from fedaudit.defences import AGGREGATORS, CLIENT_DEFENCES, Cohort  # noqa: E402
from fedaudit.defences.client_defences import ClientContext  # noqa: E402
from fedaudit.transcript.update import Update  # noqa: E402
from fedaudit.utils.errors import BadInput  # noqa: E402
from fedaudit.utils.registry import make  # noqa: E402

State = dict[str, Tensor]
CLIENTS = 7
FIRST = 100  # the nodes' ids begin here
DP: dict[str, Any] = {"clip": 1.0, "noise": 0.01, "epsilon": None}


@pytest.fixture(autouse=True)
def _in_a_task(monkeypatch):
    """Messages can be made within a task only."""
    monkeypatch.setattr(TaskIdentity, "_task_id", 1)
    monkeypatch.setattr(TaskIdentity, "_run_id", 1)
    monkeypatch.setattr(TaskIdentity, "_node_id", 1)


@pytest.fixture
def flower_logs(caplog, monkeypatch):
    """Flower's logger doesn't hand on what it logs; what other tests run makes it quiet or (NVFlare) turns it off."""
    logger = logging.getLogger("flwr")
    caplog.set_level(logging.INFO, logger="flwr")
    for each in (logger, logging.getLogger("flwr.fedaudit")):
        monkeypatch.setattr(each, "disabled", False)
    logger.addHandler(caplog.handler)
    yield
    logger.removeHandler(caplog.handler)


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    head = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AvgPool2d(2))
    return nn.Sequential(*head, nn.Flatten(), nn.Linear(128, 10))


PARAMETERS = [name for name, _ in network().named_parameters()]


class Grid:
    """Clients in process; ``work`` answers a message."""

    def __init__(self, work: Callable[[Message, Context], Message], clients: int = CLIENTS) -> None:
        self.work = work
        self.contexts = {
            FIRST + i: Context(1, FIRST + i, {"partition-id": i}, RecordDict(), {}) for i in range(clients)
        }

    def get_node_ids(self) -> list[int]:
        return list(self.contexts)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        replies = []
        for message in reversed(list(messages)):  # in no order that a strategy may count on
            sent, context = copy.deepcopy(message), self.contexts[message.metadata.dst_node_id]
            try:
                replies.append(self.work(sent, context))
            except Exception as error:
                replies.append(Message(Error(2, str(error)), reply_to=sent))
        return replies


def answer(message: Message, state: State, examples: float = 10, **metrics: float) -> Message:
    content = {"arrays": ArrayRecord(state), "metrics": MetricRecord({"num-examples": examples, **metrics})}
    return Message(RecordDict(content), reply_to=message)


def received(message: Message) -> State:
    return {
        name: t.clone() for name, t in next(iter(message.content.array_records.values())).to_torch_state_dict().items()
    }


def pushed(state: State, seed: int, scale: float = 0.1) -> State:
    """Return a state that some training could have ended in."""
    generator = torch.Generator().manual_seed(seed)
    moved = {}
    for name, tensor in state.items():
        noise = scale * torch.randn(tensor.shape, generator=generator)
        moved[name] = tensor + (noise if tensor.is_floating_point() else 5 + seed % 3)
        if name.endswith("running_var"):
            moved[name] = moved[name].abs()
    return moved


def pushing(message: Message, context: Context) -> Message:
    """Answer as a client that moves at random; the last one far away."""
    state, node = received(message), context.node_id
    turn = 1000 * int(message.content["config"]["server-round"])
    return answer(message, pushed(state, turn + node, 3.0 if node == FIRST + 6 else 0.1), 10 + node % 4)


def run(strategy: FedAvg, work: Callable[[Message, Context], Message] = pushing, rounds: int = 1) -> State:
    result = strategy.start(Grid(work), ArrayRecord(network().state_dict()), num_rounds=rounds)
    return dict(result.arrays.to_torch_state_dict())


def robust(name: str, settings: dict[str, Any] | None = None, **rest: Any) -> RobustStrategy:
    return RobustStrategy(name, settings, fraction_evaluate=0.0, **rest)


def root(state: State, server_round: int) -> State:
    return pushed(state, 9 + server_round)


@pytest.mark.parametrize("name", ["fedavg", "mean"])
def test_without_a_defence_it_is_flower_s_own_average_but_for_rounding(name):
    def equally(message: Message, context: Context) -> Message:
        return answer(message, pushed(received(message), context.node_id), 10 if name == "mean" else context.node_id)

    ours, theirs = run(robust(name), equally, 3), run(FedAvg(fraction_evaluate=0.0), equally, 3)
    assert list(ours) == list(theirs)
    for key, tensor in theirs.items():
        if tensor.is_floating_point() and not key.endswith("num_batches_tracked"):
            torch.testing.assert_close(ours[key], tensor.float(), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", [entry.name for entry in AGGREGATORS if not entry.value.whole])
def test_every_aggregator_does_to_flower_s_replies_what_it_does_in_the_simulator(name):
    """Against the aggregator itself, on a matrix made here; two rounds, so that what it remembers counts."""
    strategy = robust(name, root=root if name == "fltrust" else None)
    state, rule = network().state_dict(), make(AGGREGATORS, name)
    for server_round in (1, 2):

        def flat(other: State, start: State = state) -> Tensor:
            return torch.cat([(other[key] - start[key]).flatten() for key in PARAMETERS])

        grid = Grid(pushing)
        messages = strategy.configure_train(server_round, ArrayRecord(state), ConfigRecord(), grid)
        replies = grid.send_and_receive(messages)
        rows = sorted((r.metadata.src_node_id, received(r), r.content["metrics"]["num-examples"]) for r in replies)
        nodes, states, examples = zip(*rows, strict=True)
        cohort = Cohort(nodes, examples, flat(root(state, server_round)) if name == "fltrust" else None)
        want = rule(torch.stack([flat(other) for other in states]), cohort)

        arrays, _ = strategy.aggregate_train(server_round, replies)
        assert arrays is not None
        got = dict(arrays.to_torch_state_dict())
        assert flat(got).allclose(want.vector, atol=1e-6)
        assert strategy.rejected[server_round] == {nodes[row]: why for row, why in want.rejected.items()}
        means = torch.stack([other["1.running_mean"] for other in states])
        kept = [row for row in range(CLIENTS) if row not in want.rejected]
        if rule.coordinatewise:
            assert got["1.running_mean"].allclose(rule.anew()(means).vector, atol=1e-6)
        else:
            share = want.weights[kept] / want.weights[kept].sum()
            assert got["1.running_mean"].allclose(share.float() @ means[kept], atol=1e-6)
        assert int(got["1.num_batches_tracked"]) == max(int(states[row]["1.num_batches_tracked"]) for row in kept)
        state = got
    if name == "krum":
        assert FIRST + 6 in strategy.rejected[1]


@pytest.mark.parametrize("name", [entry.name for entry in AGGREGATORS if entry.value.whole])
def test_what_is_flower_s_own_is_left_to_it(name):
    with pytest.raises(BadInput, match="DifferentialPrivacy"):
        robust(name)


def test_one_client_stops_no_round_and_is_visible():
    odd = {
        FIRST: lambda m, s: Message(Error(2, "no power"), reply_to=m),
        FIRST + 1: lambda m, s: answer(m, s | {"0.bias": torch.full((8,), torch.nan)}),
        FIRST + 2: lambda m, s: answer(m, s | {"0.bias": torch.zeros(9)}),
        FIRST + 3: lambda m, s: answer(m, {"0.bias": s["0.bias"]}),
        FIRST + 4: lambda m, s: answer(m, s, 0.5),
        FIRST + 5: lambda m, s: Message(RecordDict({"arrays": ArrayRecord(s)}), reply_to=m),
    }

    def work(message: Message, context: Context) -> Message:
        state = received(message)
        return odd.get(context.node_id, lambda m, s: answer(m, pushed(s, 1), loss=2.0))(message, state)

    strategy = robust("mean")
    got = run(strategy, work)
    assert got["5.weight"].allclose(pushed(network().state_dict(), 1)["5.weight"], atol=1e-6)
    words = ["no power", "NaN", "shape (9,), not (8,)", "'0.weight' is in one", "num-examples", "one MetricRecord"]
    assert list(strategy.rejected[1]) == list(odd)
    assert all(word in why for word, why in zip(words, strategy.rejected[1].values(), strict=True))


def test_too_few_clients_are_an_error_before_training_and_later_leave_the_model_alone(caplog, flower_logs):
    trained = []

    def work(message: Message, context: Context) -> Message:
        trained.append(context.node_id)
        if message.content["config"]["server-round"] > 1 and context.node_id > FIRST:
            raise ValueError("gone")
        return pushing(message, context)

    with pytest.raises(BadInput, match="'krum' needs n >= 2f \\+ 3 with f = 5: 13 updates"):
        run(robust("krum", {"f": 5}), work)
    assert not trained
    once, thrice = run(robust("krum"), work), run(robust("krum"), work, 3)
    assert all(once[name].equal(thrice[name]) for name in once)
    assert "round 2: the model stays as it was" in caplog.text
    assert run(robust("krum"), lambda m, c: Message(Error(1, "all gone"), reply_to=m)) == {}


def test_what_is_a_parameter_is_said_by_the_module_or_by_names():
    """One client's statistics are far away: as parameters they would have Krum reject it."""

    def work(message: Message, context: Context) -> Message:
        state = pushed(received(message), context.node_id, 0.1 + 0.01 * (context.node_id - FIRST))
        if context.node_id == FIRST:
            state["1.running_var"] = torch.full((8,), 1e6)
        return answer(message, state)

    for parameters in (None, network(), PARAMETERS):
        strategy = robust("krum", parameters=parameters)
        run(strategy, work)
        assert sorted(strategy.rejected[1]) == list(range(FIRST + 1, FIRST + CLIENTS))
    strategy = robust("krum", parameters=["1.running_var"])
    run(strategy, work)
    assert FIRST in strategy.rejected[1]
    for wrong, words in (
        (["2.weight"], "'2.weight'"),
        (["1.num_batches_tracked"], "no floating-point"),
        ([], "no par"),
    ):
        with pytest.raises(BadInput, match=words):
            run(robust("krum", parameters=wrong))
    with pytest.raises(BadInput, match="the names"):
        robust("krum", parameters="0.weight")


def test_fltrust_needs_root_data_and_trains_on_it_as_a_client():
    with pytest.raises(BadInput, match="give root="):
        robust("fltrust")
    with pytest.raises(BadInput, match="no use for root"):
        robust("median", root=root)
    with pytest.raises(BadInput, match="3 inputs and 2 targets"):
        RootTraining(network(), torch.zeros(3, 1, 8, 8), torch.zeros(2), 0.1)
    with pytest.raises(BadInput, match=r"lacks '0\.weight'"):
        RobustStrategy("fltrust", root=lambda state, r: {})._root_update(1, PARAMETERS)

    inputs, targets = torch.randn(5, 1, 8, 8), torch.arange(5)
    start = network().state_dict()
    got = RootTraining(network(1), inputs, targets, 0.1, batch_size=5, epochs=2)(start, 1)
    own = network()  # by hand: two steps on all
    optimiser = torch.optim.SGD(own.parameters(), lr=0.1)
    for _ in range(2):
        optimiser.zero_grad()
        nn.functional.cross_entropy(own(inputs), targets).backward()
        optimiser.step()
    for name, tensor in own.state_dict().items():
        assert got[name].allclose(tensor, atol=1e-6)


# --- client-side defences ---


DATA = load_dataset("digits").train
INPUTS, TARGETS = 2 * DATA.inputs - 1, DATA.targets


def training(app: ClientApp) -> ClientApp:
    """Have an app train on digits, one pass a round."""

    @app.train()
    def train(message: Message, context: Context) -> Message:
        part = int(context.node_config["partition-id"])
        inputs, targets = INPUTS[part::CLIENTS], TARGETS[part::CLIENTS]
        model = network()
        model.load_state_dict(received(message))
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        for rows in torch.randperm(len(inputs), generator=torch.Generator().manual_seed(part)).split(32):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(inputs[rows]), targets[rows]).backward()
            optimiser.step()
        return answer(message, model.state_dict(), len(inputs), loss=1.0)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return answer(message, received(message))

    return app


MILD: dict[str, dict[str, Any]] = {
    "dp": DP,
    "local-dp": {"clipping_norm": 30.0, "sensitivity": 2.0, "epsilon": 500.0, "delta": 1e-5},  # batches count in it
    "exclude-vars": {"exclude_vars": "^0"},
    "percentile-privacy": {"gamma": 0.1},
    "svt-privacy": {"fraction": 0.5, "gamma": 0.1, "tau": 0.0, "epsilon": 1e7, "noise_var": 200.0},
}


@pytest.mark.parametrize("name", [n for n in CLIENT_DEFENCES.names() if not CLIENT_DEFENCES[n].value.needs_examples])
def test_with_every_client_defence_the_federation_still_trains(name):
    losses = []

    def evaluate(server_round: int, arrays: ArrayRecord) -> None:
        model = network().eval()
        model.load_state_dict(arrays.to_torch_state_dict())
        with torch.no_grad():
            losses.append(float(nn.functional.cross_entropy(model(INPUTS), TARGETS)))

    app = training(ClientApp(mods=[ClientDefenceMod(name, MILD.get(name), seed=0)]))
    robust("fedavg").start(Grid(app), ArrayRecord(network().state_dict()), num_rounds=12, evaluate_fn=evaluate)
    assert losses[0] > 2.2
    assert losses[-1] < 1.6  # without a defence 0.3, with this dp 1.0
    assert max(losses) == losses[0]


STATEFUL = [
    *(("top-k", {}), ("dgc", {}), ("ffl", {}), ("ffl-random", {}), ("sign", {}), ("none", {})),
    *MILD.items(),
]


def moving(seed: int, message: Message, context: Context) -> Message:
    return answer(message, pushed(received(message), seed))


def rounds_of(mod: Callable[[], ClientDefenceMod], *, restart: bool) -> list[State]:
    """Return what leaves in five rounds; ``restart``: the context goes through bytes before every message."""
    from flwr.common.serde import context_from_proto, context_to_proto  # private, and only here

    context = Context(1, 7, {}, RecordDict(), {})
    state, sent = network().state_dict(), []
    for r in range(5):
        if restart:
            read = ContextBytes.FromString(context_to_proto(context).SerializeToString())
            context = context_from_proto(read)
        message = Message(RecordDict({"arrays": ArrayRecord(state)}), 7, MessageType.TRAIN)
        reply = mod()(message, context, partial(moving, r))
        assert list(reply.content) == ["arrays", "metrics"]
        assert dict(reply.content["metrics"]) == {"num-examples": 10}
        sent.append(received(reply))
        assert {name: (t.shape, t.dtype) for name, t in sent[-1].items()} == {
            name: (t.shape, t.dtype) for name, t in state.items()
        }
        state = sent[-1]
    kinds = {type(record) for record in context.state.values()}
    assert kinds == {ArrayRecord, ConfigRecord}
    assert all(isinstance(value, str) for record in context.state.config_records.values() for value in record.values())
    return sent


@pytest.mark.parametrize(("name", "settings"), STATEFUL)
def test_a_process_a_message_gives_the_bits_of_one_that_lives_on(name, settings):
    mod = ClientDefenceMod(name, settings, seed=3)
    kept = rounds_of(lambda: mod, restart=False)
    anew = rounds_of(lambda: ClientDefenceMod(name, settings, seed=3), restart=True)
    for one, other in zip(kept, anew, strict=True):
        assert all(one[key].equal(other[key]) for key in one)


@pytest.mark.parametrize(("name", "settings"), [("top-k", {}), ("dgc", {}), ("ffl", {})])
def test_what_leaves_is_what_the_client_defence_itself_says(name, settings):
    """Against one defence object that is called here, round after round; choices at random come first in ffl."""
    got = rounds_of(lambda: ClientDefenceMod(name, settings, seed=3), restart=True)
    own, state = make(CLIENT_DEFENCES, name, settings), network().state_dict()
    layers = (tuple(k for k in state if k[0] == "0"), tuple(k for k in state if k[0] == "1"), ("5.weight", "5.bias"))
    for r, sent in enumerate(got):
        after = pushed(state, r)
        update = Update(7, "weights", {k: after[k] - state[k] for k in PARAMETERS}, 10, None)
        first = ClientDefenceMod(name, settings, seed=3)._generator(7, r)
        want = own(update, ClientContext(state, layers, 1), first)
        for key in PARAMETERS:
            expected = state[key] + want.tensors[key] if key in want.tensors else state[key]
            assert sent[key].allclose(expected, atol=1e-7)
        assert sent["1.running_mean"].equal(after["1.running_mean"])
        state = sent


def test_noise_comes_from_the_system_and_statistics_stay_behind(caplog, flower_logs):
    settings = {"clip": 0.5, "noise": 2.0, "epsilon": None}
    start, twice = (
        network().state_dict(),
        [rounds_of(lambda: ClientDefenceMod("dp", settings), restart=True) for _ in "ab"],
    )
    assert not twice[0][0]["0.weight"].equal(twice[1][0]["0.weight"])
    noise = torch.cat([(twice[0][0][key] - start[key]).flatten() for key in PARAMETERS])
    assert "the noise is 7" in caplog.text  # 2·√1386 = 74 times as long as the clip
    assert 0.9 < float(noise.std()) < 1.1  # of 1,386 numbers; the clipped update adds 0.013
    for key in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        assert twice[0][0][key].equal(start[key])
    small = rounds_of(lambda: ClientDefenceMod("dp", settings | {"noise": 1e-9}, seed=1), restart=False)[0]
    moved = torch.cat([(small[key] - start[key]).flatten() for key in PARAMETERS])
    assert float(moved.norm()) == pytest.approx(0.5, rel=1e-4)


def test_dp_has_no_default_and_stops_when_its_budget_is_spent():
    for settings, words in (
        (None, "needs clip and noise, which nobody can choose for you"),
        ({"clip": 1.0}, "dp needs noise"),
        ({"clip": 1.0, "noise": 0.01}, "spends more than epsilon 8 in one round"),
        ({**DP, "level": "sample"}, "inside of the training"),
        ({**DP, "where": "central"}, "or on the server"),
    ):
        with pytest.raises(BadInput, match=words):
            ClientDefenceMod("dp", settings)
    mod, context = ClientDefenceMod("dp", {"clip": 1.0, "noise": 2.0}), Context(1, 7, {}, RecordDict(), {})
    state, trained, replies = network().state_dict(), [], []

    def work(message: Message, _: Context) -> Message:
        trained.append(1)
        return answer(message, pushed(received(message), 1))

    assert mod.rounds is not None
    for _ in range(mod.rounds + 2):
        replies.append(mod(Message(RecordDict({"arrays": ArrayRecord(state)}), 7, "train"), context, work))
    assert len(trained) == mod.rounds > 3
    assert [reply.has_error() for reply in replies] == [False] * mod.rounds + [True] * 2
    assert f"spent after {mod.rounds} rounds" in replies[-1].error.reason


def passing(reply: Callable[[Message], Message], message: Message, context: Context) -> Message:
    return reply(message)


def test_what_can_t_be_sanitised_isn_t_sent():
    state = network().state_dict()
    flat = {str(i): tensor for i, tensor in enumerate(state.values())}
    bad: list[tuple[str, State, Callable[[Message], Message], str]] = [
        ("dgc", state, lambda m: answer(m, state | {"0.bias": torch.full((8,), torch.nan)}), "NaN"),
        ("dgc", state, lambda m: answer(m, state | {"more": torch.zeros(1)}), "other tensors than the message"),
        ("dgc", state, lambda m: Message(RecordDict({"m": MetricRecord({"a": 1})}), reply_to=m), "reply has 0"),
        ("ffl", flat, lambda m: answer(m, flat), "give layers="),
    ]
    for name, start, reply, words in bad:
        context = Context(1, 7, {}, RecordDict(), {})
        message = Message(RecordDict({"arrays": ArrayRecord(start)}), 7, "train")
        with pytest.raises(BadInput, match=words):
            ClientDefenceMod(name, {"layers": "modules"} if name == "ffl" else None)(
                message, context, partial(passing, reply)
            )
        assert not context.state
    with pytest.raises(BadInput, match="1 or -1"):
        ClientDefenceMod("sign", {"scale": "one"})
    with pytest.raises(BadInput, match="give clients="):
        ClientDefenceMod("dgc", {"clip": 1.0})
    with pytest.raises(BadInput, match="did you mean 'dgc'"):
        ClientDefenceMod("dgcc")


def test_evaluation_and_errors_pass():
    state, context = network().state_dict(), Context(1, 7, {"partition-id": 0}, RecordDict(), {})
    app = training(ClientApp(mods=[ClientDefenceMod("top-k", {"ratio": 0.01})]))
    message = Message(RecordDict({"arrays": ArrayRecord(state)}), 7, MessageType.EVALUATE)
    assert all(t.equal(state[name]) for name, t in received(app(message, context)).items())
    message = Message(RecordDict({"arrays": ArrayRecord(state)}), 7, MessageType.TRAIN)
    failed = ClientDefenceMod("top-k")(message, context, lambda m, c: Message(Error(2, "no"), reply_to=m))
    assert failed.error.reason == "no"
    assert not context.state


def test_the_page_s_snippet_runs():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "defences.md").read_text(encoding="utf-8")
    (snippet,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {"module": network(), "inputs": INPUTS[:10], "targets": TARGETS[:10]}
    exec(snippet, names)
    grid = Grid(training(names["app"]))
    for strategy in (names["strategy"], names["trusting"]):
        strategy.fraction_train, strategy.fraction_evaluate = 1.0, 0.0
        result = strategy.start(grid, ArrayRecord(network().state_dict()), num_rounds=1)
        assert not result.arrays.to_torch_state_dict()["5.weight"].equal(network().state_dict()["5.weight"])
