"""A Flower app in this process: unchanged, as in a simulation; every node by itself; errors as in a deployment."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from fedaudit.utils.errors import BadInput
from tests.adapters.flower_cases import (
    CLIENT,
    EXAMPLE,
    NODES,
    OLD_CLIENT,
    OLD_SERVER,
    PYPROJECT,
    TASK,
    replaced,
    write_app,
)

pytest.importorskip("flwr")
pytestmark = pytest.mark.peers

from fedaudit.adapters.flower import app_file  # noqa: E402 (it needs Flower)
from fedaudit.adapters.flower.in_process import loaded, parse_config, run_app  # noqa: E402


@pytest.fixture
def tiny(tmp_path):
    return write_app(tmp_path / "tiny")


def averaged(rounds):
    """What federated averaging makes of the tiny app, written out: three nodes of two examples each."""
    space: dict[str, Any] = {}
    exec(TASK, space)
    model = space["net"]()
    for _ in range(rounds):
        start, states = {k: v.clone() for k, v in model.state_dict().items()}, []
        for me in range(3):
            model.load_state_dict(start)
            space["fit"](model, *space["data"](me), 0.5)
            states.append({k: v.clone() for k, v in model.state_dict().items()})
        model.load_state_dict({k: torch.stack([s[k] for s in states]).mean(0) for k in start})
    return model.state_dict()


def test_an_app_runs_as_in_a_simulation(tiny):
    calls = []

    def watch(index, message, context, call):
        reply = call(message, context)
        calls.append((index, context.node_id, dict(context.node_config), reply))
        return reply

    with loaded(tiny) as app:
        run = run_app(app, nodes=3, watch=watch)
        found = sys.modules["tiny_app.server"].RESULT["arrays"].to_torch_state_dict()
    assert (run.rounds, run.replies, run.failures) == (2, 6, [])
    assert sorted((index, node) for index, node, *_ in calls) == [(r, n) for r in (0, 1) for n in NODES]
    for index, node, config, reply in calls:
        assert config == {"partition-id": node - 1000, "num-partitions": 3}
        assert reply.content["metrics"]["rounds"] == index + 1, "a node's state is its own, and stays"
    for name, value in averaged(2).items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)
    assert "tiny_app.task" not in sys.modules
    assert str(tiny) not in sys.path


def test_two_apps_of_one_name_dont_meet(tmp_path):
    one = write_app(tmp_path / "one")
    two = write_app(tmp_path / "two", task=replaced(TASK, "Linear(64, 10)", "Linear(64, 11)"))
    shapes = []

    def watch(index, message, context, call):
        shapes.append(message.content["arrays"].to_torch_state_dict()["1.bias"].shape[0])
        return call(message, context)

    with loaded(one) as first:
        run_app(two, nodes=2, config={"rounds": 1}, watch=watch)
        run_app(first, nodes=2, config={"rounds": 1}, watch=watch)
    assert shapes == [11, 11, 10, 10]


def test_a_clients_error_is_a_reply_and_a_line(tiny, capsys):
    run = run_app(tiny, nodes=3, config={"trouble": "2:1"})
    assert (run.rounds, run.replies) == (2, 5)
    (line,) = run.failures
    assert line.startswith("client 1001 failed in round 2: RuntimeError: the disk is full (tiny_app/client.py:")
    assert line in capsys.readouterr().err


def test_a_client_cant_change_what_others_get(tmp_path):
    spoilt = replaced(CLIENT, "    x, y = data(me)\n", "    x, y = data(me)\n    msg.content['arrays'].clear()\n")
    assert run_app(write_app(tmp_path / "a", client=spoilt), nodes=3).replies == 6


def test_it_stops_after_the_rounds_asked_for(tiny):
    assert run_app(tiny, nodes=2, config={"rounds": 100}, rounds=3).rounds == 3


def test_the_number_of_nodes_is_the_apps_own(tmp_path):
    text = (
        PYPROJECT + '\n[tool.flwr.federations]\ndefault = "x"\n[tool.flwr.federations.x]\noptions.num-supernodes = 4\n'
    )
    assert run_app(write_app(tmp_path / "a", pyproject=text), config={"rounds": 1}).replies == 4
    assert app_file.NODES == 10
    assert run_app(write_app(tmp_path / "b"), config={"rounds": 1}).replies == 10


def test_flower_is_left_as_it_was(tiny):
    from flwr.supercore.task_identity import TaskIdentity

    names = ("_task_id", "_run_id", "_node_id")
    before = [getattr(TaskIdentity, name) for name in names]  # Flower's own simulation, in another test, may leave some
    run_app(tiny, nodes=2, config={"rounds": 1})
    assert [getattr(TaskIdentity, name) for name in names] == before


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda f: (f / "pyproject.toml").unlink(), "it has no pyproject.toml"),
        (lambda f: (f / "pyproject.toml").write_text("[tool"), "can't be read"),
        (lambda f: (f / "pyproject.toml").write_text("[project]\nname = 'x'"), "no [tool.flwr.app.components]"),
        (lambda f: (f / "pyproject.toml").write_text("[tool.flwr.app.components]\nserverapp = 'a:b'"), "'module:name'"),
        (lambda f: (f / "tiny_app" / "task.py").write_text("import nowhere"), "No module named 'nowhere' (tiny_app/"),
        (lambda f: (f / "tiny_app" / "server.py").write_text("app = None"), "ServerApp failed"),
        (lambda f: (f / "tiny_app" / "server.py").write_text("x = 1"), "no attribute 'app'"),
    ],
)  # fmt: skip
def test_what_isnt_an_app_is_refused_in_one_line(tiny, spoil, says):
    spoil(tiny)
    with pytest.raises(BadInput) as refused:
        run_app(tiny, nodes=2)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_wrong_arguments_are_refused(tiny):
    with pytest.raises(BadInput, match=r"no 'round' in .*known: rounds, trouble, nested.rate"):
        run_app(tiny, config={"round": 3})
    with pytest.raises(BadInput, match="1 or more"):
        run_app(tiny, nodes=-1)
    with pytest.raises(BadInput, match="1 or more"):
        run_app(tiny, rounds=0)


def test_an_app_that_waits_for_more_nodes_than_there_are_ends(tmp_path, monkeypatch):
    """Flower's own strategies want two nodes, and ask every second."""
    slept: list[float] = []
    monkeypatch.setattr("flwr.serverapp.strategy.strategy_utils.sleep", slept.append)
    with pytest.raises(BadInput, match="more nodes than the 1"):
        run_app(write_app(tmp_path / "tiny"), nodes=1)
    assert 2 < len(slept) <= 10


def test_another_flower_is_refused(tiny, monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda _: "1.43.0")
    with pytest.raises(BadInput, match=r"flwr 1.43.0 can't run .* pip install 'flwr>=1.41,<1.43'"):
        run_app(tiny)


def test_run_config_is_read_as_flower_reads_it():
    from flwr.common.config import parse_config_args

    texts = ["a=1 b=2.5", "c=true d='two words' e.f=\"x\""]
    assert (
        parse_config(texts) == parse_config_args(texts) == {"a": 1, "b": 2.5, "c": True, "d": "two words", "e.f": "x"}
    )
    for text in ("a", "a=word", "a=[1]"):
        with pytest.raises(BadInput):
            parse_config([text])


def test_clients_written_for_the_older_api(tmp_path):
    run = run_app(write_app(tmp_path / "old", client=OLD_CLIENT, server=OLD_SERVER), nodes=3)
    assert (run.rounds, run.replies, run.failures) == (2, 6, [])


def test_the_example_runs(tmp_path):
    config = {"num-server-rounds": 1, "final-model": str(tmp_path / "final.pt")}
    assert run_app(EXAMPLE, nodes=2, config=config).replies == 2
    assert torch.load(tmp_path / "final.pt")["fc2.bias"].shape == (10,)
