"""AuditStrategy records what a curious server sees, and changes nothing."""

from __future__ import annotations

import logging
import random
import sys
from typing import Any

import pytest
import torch

from fedaudit.task.training import TrainingConfig
from fedaudit.utils.errors import BadInput
from tests.adapters.flower_cases import CLIENT, NODES, SERVER, replaced, write_app

pytest.importorskip("flwr")
pytestmark = pytest.mark.peers

from fedaudit.adapters.flower import AuditStrategy  # noqa: E402 (it needs Flower)
from fedaudit.adapters.flower.in_process import loaded, run_app  # noqa: E402
from fedaudit.adapters.flower.strategy import config_for  # noqa: E402


@pytest.fixture
def logged():
    """What fedaudit logs, as it goes."""
    lines = []

    class Keep(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    handler = Keep()
    logger = logging.getLogger("flwr.fedaudit")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


class Calls:
    """A recorder that keeps what it is called with, and may fail."""

    def __init__(self, fails=()):
        self.calls, self.fails, self.module = [], fails, None

    def _call(self, name, *arguments, **options):
        self.calls.append((name, arguments, options))
        if name in self.fails:
            raise OSError("no space left")

    def begin_round(self, *a, **o):
        self._call("begin_round", *a, **o)

    def update(self, *a, **o):
        self._call("update", *a, **o)

    def total(self, *a, **o):
        self._call("total", *a, **o)

    def end_round(self):
        self._call("end_round")

    def names(self):
        return [name for name, *_ in self.calls]

    def all(self, name):
        return [(arguments, options) for each, arguments, options in self.calls if each == name]


STRATEGY = "strategy = FedAvg(fraction_evaluate=0.0)\n"


def run(folder, recorder, *, strategy=STRATEGY, wrap="AuditStrategy(strategy, RECORDER)", watch=None, **changed):
    """Run the tiny app with the strategy wrapped; return the final model."""
    import fedaudit.adapters.flower.strategy as home

    vars(home)["RECORDER"] = recorder
    wrapped = f"from fedaudit.adapters.flower.strategy import AuditStrategy, RECORDER\n    strategy = {wrap}\n"
    server = replaced(SERVER, STRATEGY, strategy + ("    " + wrapped if recorder is not None else ""))
    config = changed.pop("config", {})
    random.seed(0)  # nodes are sampled, and sums of floats depend on the order
    with loaded(write_app(folder, server=server, **changed)) as app:
        run_app(app, nodes=3, config=config, watch=watch)
        return sys.modules["tiny_app.server"].RESULT["arrays"].to_torch_state_dict()


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def test_it_records_what_travels_and_changes_nothing(tmp_path):
    sent, replies = {}, {}

    def watch(index, message, context, call):
        reply = call(message, context)
        sent[index] = message.content["arrays"].to_torch_state_dict()
        replies[index, context.node_id] = reply.content["arrays"].to_torch_state_dict()
        return reply

    recorder = Calls()
    final = run(tmp_path / "a", recorder, watch=watch)
    assert recorder.names() == ["begin_round", *["update"] * 3, "end_round"] * 2
    for index, ((weights, number), _) in enumerate(recorder.all("begin_round")):
        assert number == index
        assert equal(weights, sent[index])
    assert not equal(sent[0], sent[1])
    for i, ((node, state), options) in enumerate(recorder.all("update")):
        assert options == {"num_examples": 2, "sent": None, "training": None}
        assert equal(state, replies[i // 3, node])
    assert sorted(a[0] for a, _ in recorder.all("update")) == sorted(NODES * 2)
    assert equal(final, run(tmp_path / "b", None))


@pytest.mark.parametrize("fails", [("begin_round",), ("update",), ("end_round",), ("begin_round", "end_round")])
def test_its_own_errors_stop_nothing_and_are_said_once(tmp_path, logged, fails):
    assert equal(run(tmp_path / "a", Calls(fails)), run(tmp_path / "b", None))
    assert logged == ["fedaudit doesn't record this; the federation goes on: OSError: no space left"]


def test_a_client_that_fails_isnt_recorded(tmp_path):
    recorder = Calls()
    final = run(tmp_path / "a", recorder, config={"trouble": "1:1"})
    assert [a[0] for a, _ in recorder.all("update")[:2]] != NODES[:2]
    assert len(recorder.all("update")) == 5
    assert equal(final, run(tmp_path / "b", None, config={"trouble": "1:1"}))


OWN = """
    class Own(FedAvg):
        def configure_train(self, server_round, arrays, config, grid):
            messages = list(super().configure_train(server_round, arrays, config, grid))
            from flwr.app import ArrayRecord, Message, RecordDict
            state = arrays.to_torch_state_dict()
            state["1.bias"] += 1
            last = messages[-1].metadata.dst_node_id
            content = RecordDict({"arrays": ArrayRecord(state), "config": config})
            return [m for m in messages if m.metadata.dst_node_id != 1002] + [Message(content, 1002, "train")]

        def start(self, *arguments, **options):
            self.mine = "set in start"
            result = super().start(*arguments, **options)
            assert self.seen == self.mine
            return result

        def aggregate_train(self, server_round, replies):
            self.seen = self.mine
            return super().aggregate_train(server_round, replies)

    strategy = Own(fraction_evaluate=0.0)
"""


def test_a_strategy_of_ones_own_that_sends_different_models(tmp_path):
    recorder = Calls()
    final = run(tmp_path / "a", recorder, strategy=OWN.lstrip("\n ").replace("class", "class", 1))
    assert equal(final, run(tmp_path / "b", None, strategy=OWN.lstrip("\n ")))
    starts = [weights for (weights, _), _ in recorder.all("begin_round")]
    for i, ((node, _), options) in enumerate(recorder.all("update")):
        if node == 1002:
            torch.testing.assert_close(options["sent"]["1.bias"], starts[i // 3]["1.bias"] + 1)
        else:
            assert options["sent"] is None


SECRET = (
    '    return Message(RecordDict({"masked": ConfigRecord({"shares": [1, 2]}), "metrics": metrics}), reply_to=msg)\n'
)
SECAGG = """
    class Masked(FedAvg):
        def aggregate_train(self, server_round, replies):
            from flwr.app import ArrayRecord
            state = net().state_dict()
            state["1.bias"] += 2
            return ArrayRecord(state), None

    strategy = Masked(fraction_evaluate=0.0)
"""


def test_of_secure_aggregation_the_total_is_recorded(tmp_path):
    client = replaced(CLIENT, CLIENT[CLIENT.index("    return Message") :], SECRET)
    client = replaced(client, "import ArrayRecord,", "import ArrayRecord, ConfigRecord,")
    recorder = Calls()
    run(tmp_path / "a", recorder, strategy=SECAGG.lstrip("\n "), client=client)
    assert recorder.names() == ["begin_round", "total", "end_round"] * 2
    ((state,), options), _ = recorder.all("total")
    assert options == {"clients": 3, "num_examples": 6, "training": ()}
    torch.testing.assert_close(state["1.bias"], recorder.all("begin_round")[0][0][0]["1.bias"] + 2)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("model.state_dict())", "{'other.' + k: v for k, v in model.state_dict().items()})", "holds 'other.1.weight'"),
        ("model.state_dict())", "{k: v[:1] for k, v in model.state_dict().items()})", "shape (1, 64), what"),
        ("ArrayRecord(model.state_dict())", "ArrayRecord()", "is empty"),
        ("ArrayRecord(model.state_dict())", "ArrayRecord([torch.zeros(9).byte().numpy()])", "1 arrays without names"),
    ],
)  # fmt: skip
def test_replies_that_are_no_such_model_are_left_out(tmp_path, logged, old, new, says):
    recorder = Calls()
    run(tmp_path / "a", recorder, client=replaced(CLIENT, old, new), strategy=SECAGG.lstrip("\n "))
    assert recorder.names() == ["begin_round", "end_round"] * 2
    assert sum(says in line for line in logged) == 1


def test_what_travels_beside_the_model_is_left_out(tmp_path):
    """SCAFFOLD's control variates, for example."""
    more = '"metrics": metrics, "control": ArrayRecord(net().state_dict())}'
    recorder, plain = Calls(), Calls()
    client = replaced(CLIENT, '"metrics": metrics}', more)
    run(tmp_path / "a", recorder, strategy=SECAGG.lstrip("\n "), client=client)
    run(tmp_path / "b", plain, strategy=SECAGG.lstrip("\n "))
    assert recorder.names() == plain.names() == ["begin_round", *["update"] * 3, "end_round"] * 2
    for ((_, one), _), ((_, other), _) in zip(recorder.all("update")[:3], plain.all("update")[:3], strict=True):
        assert equal(one, other)


def test_everything_else_is_the_strategys_own(tmp_path):
    from flwr.serverapp.strategy import FedProx

    inner = FedProx(proximal_mu=0.25)
    recorder: Any = Calls()
    strategy = AuditStrategy(inner, recorder)
    assert strategy.proximal_mu == 0.25
    with pytest.raises(AttributeError):
        _ = strategy.nothing
    with pytest.raises(TypeError):
        strategy.start()
    assert "configure_train" not in vars(inner), "the strategy is as it was, even after an error"


def test_how_clients_train_is_worked_out_for_each(tmp_path):
    facts = {"learning_rate": 0.5, "batch_size": 4, "epochs": 2, "momentum": 0.9}
    assert config_for(facts, 10) == TrainingConfig(0.5, 6, (4, 4, 2, 4, 4, 2), momentum=0.9, data_size=10)
    assert config_for(lambda n: {"learning_rate": 1.0 / n}, 4) == TrainingConfig(0.25, 1, (4,), data_size=4)
    assert config_for(facts, None) is None
    recorder: Any = Calls()
    run(tmp_path / "a", recorder, wrap="AuditStrategy(strategy, RECORDER, training={'learning_rate': 0.5})")
    assert recorder.all("update")[0][1]["training"] == TrainingConfig(0.5, 1, (2,), data_size=2)
    for wrong in ({"learning_rate": -1}, {"lr": 0.1}, {"batch_size": 4}, {"learning_rate": 1, "batch_size": 0}):
        with pytest.raises(BadInput):
            AuditStrategy(None, recorder, training=wrong)
