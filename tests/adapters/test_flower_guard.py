"""A guard lets an update leave unchanged, or stops it and no round; what it finds stays on the site."""

from __future__ import annotations

import logging
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from fedaudit.guard.budget import site_account
from fedaudit.guard.rounds import read_site
from fedaudit.utils.errors import BadInput
from tests.adapters.flower_cases import CLIENT, NODES, OLD_CLIENT, OLD_SERVER, SERVER, TASK, replaced, write_app

pytest.importorskip("flwr")
pytestmark = pytest.mark.peers

from fedaudit.adapters.flower import Guard  # noqa: E402 (it needs Flower)
from fedaudit.adapters.flower.guard import HELD_OUT, MEMBERS, RECEIVED, STATE  # noqa: E402
from fedaudit.adapters.flower.in_process import loaded, run_app  # noqa: E402
from fedaudit.adapters.flower.tensors import load_state  # noqa: E402
from fedaudit.guard.policy import REFUSED  # noqa: E402

LABELS: Any = {"attacks": ["labels"], "fail_on": "inferred", "mean": (0.5,), "std": (0.5,), "share": None}
STRICT: Any = {**LABELS, "fail_on": None, "fail_above": {"label_accuracy": 0.01}}


@pytest.fixture
def logged():
    """What the guard logs, as it goes."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    handler = Keep()
    logging.getLogger("flwr.fedaudit").addHandler(handler)
    yield lines
    logging.getLogger("flwr.fedaudit").removeHandler(handler)


def run(folder, guard, **changed):
    """Run the tiny app under the guard; return replies by round and node, contexts, and the final model."""
    replies, contexts = {}, {}
    drawing = replaced(CLIENT, "    x, y = data(me)\n", "    x, y = data(me)\n    x = x + 0.01 * torch.randn_like(x)\n")
    client = changed.pop("client", drawing)

    def watch(index, message, context, call):
        reply = call(message, context) if guard is None else guard(message, context, call)
        replies[index, context.node_id], contexts[context.node_id] = reply, context
        return reply

    random.seed(0)
    torch.manual_seed(0)
    config = changed.pop("config", {})
    with loaded(write_app(folder, client=client, **changed)) as app:
        run_app(app, nodes=3, config=config, watch=watch)
        return replies, contexts, sys.modules["tiny_app.server"].RESULT["arrays"].to_torch_state_dict()


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def test_what_passes_leaves_byte_for_byte(tmp_path, logged):
    bare, _, final = run(tmp_path / "a", None)
    before = set(Path(tempfile.gettempdir()).glob("fedaudit-guard-*"))
    guarded, contexts, same = run(tmp_path / "b", Guard(**LABELS))
    assert bare.keys() == guarded.keys()
    for key, reply in bare.items():
        # an object's id is a hash of all its bytes
        assert guarded[key].content.object_id == reply.content.object_id
    assert equal(final, same)
    assert set(Path(tempfile.gettempdir()).glob("fedaudit-guard-*")) == before
    assert sum("labels: inconclusive" in line for line in logged) == 6
    assert sum("within the limits" in line for line in logged) == 6
    for node, context in contexts.items():
        kept = load_state(context.state, STATE)
        assert kept is not None
        assert kept["rounds"] == 2
        written = [one for one in read_site(Path("fedaudit-guard")).rounds if one.site == f"node {node}"]
        assert [one.index for one in written] == [0, 1]
        assert {check.outcome for one in written for check in one.checks.values()} == {"quiet", "not played"}
    assert Path("fedaudit-guard/guard.html").is_file()


def test_a_refusal_stops_one_update_and_no_round(tmp_path, logged):
    strict = Guard(**STRICT, on_fail="refuse")

    def guard(message, context, call):
        return strict(message, context, call) if context.node_id == NODES[1] else call(message, context)

    replies, _, final = run(tmp_path / "a", guard)
    assert sorted(key for key, reply in replies.items() if reply.has_error()) == [(0, NODES[1]), (1, NODES[1])]
    assert {reply.error.reason for reply in replies.values() if reply.has_error()} == {REFUSED}
    states = [replies[1, node].content["arrays"].to_torch_state_dict() for node in (NODES[0], NODES[2])]
    for name, value in final.items():
        torch.testing.assert_close(value, torch.stack([s[name] for s in states]).mean(0), rtol=1e-6, atol=1e-7)
    assert sum("more than allowed; it doesn't leave" in line for line in logged) == 2


def test_a_warning_stops_nothing(tmp_path, logged):
    bare, *_ = run(tmp_path / "a", None)
    warned, *_ = run(tmp_path / "b", Guard(**STRICT))
    assert all(warned[key].content.object_id == bare[key].content.object_id for key in bare)
    assert sum("more than allowed; it leaves nevertheless" in line for line in logged) == 6


def test_reports_are_kept_on_the_site(tmp_path):
    run(tmp_path / "a", Guard(**LABELS, out=tmp_path / "found", every=2, reports=True))
    reports = sorted(p.name for p in (tmp_path / "found").iterdir() if p.is_dir())
    assert reports == [f"round-1-node-{node}" for node in NODES]
    from fedaudit import AuditResult

    for node in NODES:
        text = (tmp_path / "found" / f"round-1-node-{node}" / "results.json").read_text()
        (finding,) = AuditResult.model_validate_json(text).findings
        assert finding.label_accuracy == 1.0


@pytest.mark.parametrize(
    ("settings", "audited"),
    [({"every": 2}, 3), ({"largest": 1}, 0), ({"largest": 2}, 6), ({"every": 3}, 3)],
)
def test_its_bounds_on_cost(tmp_path, logged, settings, audited):
    run(tmp_path / "a", Guard(**LABELS, **settings))
    assert sum("within the limits" in line for line in logged) == audited


def test_who_refuses_lets_no_update_leave_that_is_too_large_to_audit(tmp_path, logged):
    replies, *_ = run(tmp_path / "a", Guard(**LABELS, on_fail="refuse", largest=1), config={"rounds": 1})
    assert all(reply.has_error() for reply in replies.values())
    assert sum("over 2 examples, and largest is 1" in line for line in logged) == len(replies)


@pytest.mark.parametrize("told", [{"lr": 0.1}, {"server-round": 2}], ids=["nothing", "always-2"])
def test_it_counts_by_itself_whatever_the_server_says(tmp_path, logged, told):
    from flwr.app import ConfigRecord

    def guard(message, context, call, inner=Guard(**LABELS, every=2)):  # noqa: B008
        message.content["config"] = ConfigRecord(told)
        return inner(message, context, call)

    client = replaced(CLIENT, 'msg.content["config"]["server-round"]', "0")
    run(tmp_path / "a", guard, client=client)
    assert sum("within the limits" in line for line in logged) == 3


THREAD = """
    import threading
    worker = threading.Thread(target=fit, args=(model, x, y, context.run_config["nested.rate"]))
    worker.start(); worker.join()
"""
FIT = '    fit(model, x, y, context.run_config["nested.rate"])\n'


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (FIT, THREAD, "no training was seen"),
        (FIT, "", "no training was seen"),
        ("ArrayRecord(model.state_dict())", "ArrayRecord({'x': v for v in model.state_dict().values()})", "'x'"),
        ('"metrics": metrics}', '"metrics": metrics, "more": ArrayRecord(model.state_dict())}', "2 ArrayRecords"),
    ],
)
def test_what_it_cant_audit_leaves_and_is_said(tmp_path, logged, old, new, says):
    server = "from flwr.serverapp.strategy import FedAvg"
    client = replaced(CLIENT, old, new)
    keep = replaced(SERVER, server, server + "\nFedAvg.aggregate_train = lambda self, r, replies: (None, None)")
    import flwr.serverapp.strategy

    kept = flwr.serverapp.strategy.FedAvg.aggregate_train
    try:
        passing = Guard(**STRICT, on_fail="refuse", unaudited="pass")
        replies, *_ = run(tmp_path / "a", passing, client=client, server=keep)
        stopped, *_ = run(tmp_path / "b", Guard(**STRICT, on_fail="refuse"), client=client, server=keep)
    finally:
        flwr.serverapp.strategy.FedAvg.aggregate_train = kept
    assert not any(reply.has_error() for reply in replies.values())
    assert all(reply.has_error() for reply in stopped.values())
    assert sum(says in line for line in logged) == 12, logged


def test_a_clients_own_error_stays_its_own(tmp_path, logged):
    replies, *_ = run(tmp_path / "a", Guard(**LABELS), config={"trouble": "1:2"}, client=CLIENT)
    assert "disk is full" not in " ".join(logged)
    assert (0, NODES[2]) not in replies
    assert len(replies) == 5


def test_clients_written_for_the_older_api_are_guarded_too(tmp_path, logged):
    client = replaced(OLD_CLIENT, "to_client())", "to_client(), mods=[GUARD])")
    guard = "from fedaudit.adapters.flower import Guard\nGUARD = Guard(attacks=['labels'], fail_on=None, share=None)\n"
    run_app(write_app(tmp_path / "a", client=guard + client, server=OLD_SERVER), nodes=3)
    assert sum("within the limits" in line for line in logged) == 6, logged


def test_tables_are_guarded_too(tmp_path, logged):
    task = replaced(TASK, "torch.rand(2, 1, 8, 8, generator=g) * 2 - 1", "torch.randn(2, 64, generator=g)")
    run(tmp_path / "a", Guard(attacks=["labels"], fail_on="inferred", share=None), task=task)
    assert sum("within the limits" in line for line in logged) == 6, logged


@pytest.mark.parametrize("policy", ["warn", "refuse", "ignore"])
def test_a_received_model_that_looks_manipulated_is_told_of_or_not_trained_on(tmp_path, logged, policy):
    from flwr.app import ArrayRecord

    inner = Guard(**LABELS, on_received=policy)

    def guard(message, context, call):
        if context.node_id == NODES[1]:
            state = message.content["arrays"].to_torch_state_dict()
            last = [name for name, tensor in state.items() if tensor.ndim == 2][-1]
            state[last][1:] = 0.0
            message.content["arrays"] = ArrayRecord(state)
        return inner(message, context, call)

    replies, *_ = run(tmp_path / "a", guard)
    stopped = {key[1] for key, reply in replies.items() if reply.has_error()}
    assert stopped == ({NODES[1]} if policy == "refuse" else set())
    told = [line for line in logged if "suspicious: silent outputs" in line]
    assert len(told) == (0 if policy == "ignore" else 2)
    assert all(f"node {NODES[1]}, round" in line for line in told)


@pytest.mark.parametrize("told", [lambda index: index, lambda index: 10**6 * (index == 6) or index, None])
def test_what_came_in_is_remembered_in_the_node_s_state(tmp_path, logged, told):
    from flwr.app import ArrayRecord, ConfigRecord

    def guard(message, context, call):
        index = round(message.content["config"]["server-round"])
        message.content["config"] = ConfigRecord({} if told is None else {"server-round": told(index)})
        if context.node_id == NODES[1] and index == 6:
            swapped = {name: -tensor for name, tensor in message.content["arrays"].to_torch_state_dict().items()}
            message.content["arrays"] = ArrayRecord(swapped)
        every_message_is_a_process = Guard(attacks=[], share=None)
        return every_message_is_a_process(message, context, call)

    client = replaced(CLIENT, 'msg.content["config"]["server-round"]', "0")
    client = replaced(client, 'context.run_config["nested.rate"]', "0.01")
    _, contexts, _ = run(tmp_path / "a", guard, client=client, config={"rounds": 6})
    (line,) = (line for line in logged if "suspicious" in line)
    assert f"node {NODES[1]}, round {6 if told is None else told(6)}: the received model is suspicious: jump" in line
    kept = load_state(contexts[NODES[1]].state, RECEIVED)
    assert kept is not None
    assert (kept["index"], len(kept["changes"])) == (-1 if told is None else told(6) - 1, 5)


@pytest.mark.parametrize("policy", ["warn", "refuse"])
def test_a_received_model_that_cant_be_checked_is_refused_by_who_refuses(tmp_path, logged, policy, monkeypatch):
    def broken(*_, **__):
        raise KeyError("torn")

    monkeypatch.setattr("fedaudit.guard.site_guard.check_received", broken)
    replies, *_ = run(tmp_path / "a", Guard(**LABELS, on_received=policy))
    assert all(reply.has_error() == (policy == "refuse") for reply in replies.values())
    assert any("what came in can't be checked: KeyError: 'torn'" in line for line in logged)


def held_out():
    """Examples as the tiny app's, of the classes that its clients have."""
    source = torch.Generator().manual_seed(99)
    return torch.rand(200, 1, 8, 8, generator=source) * 2 - 1, torch.tensor([0, 1, 2, 7] * 50)


def test_own_examples_that_an_update_tells_are_warned_of_or_kept_in(tmp_path, logged):
    settings: Any = {"attacks": [], "held_out": f"{__name__}:held_out", "share": None, "every": 2}
    bare, *_ = run(tmp_path / "a", None)
    warned, contexts, _ = run(tmp_path / "b", Guard(**settings))
    assert all(warned[key].content.object_id == bare[key].content.object_id for key in bare)
    told = [
        line
        for line in logged
        if "which examples were trained on can be told: projection-residual has AUC 1.00 on 2 own" in line
    ]
    assert len(told) == 6  # in every round, whatever every says
    for context in contexts.values():
        kept = load_state(context.state, MEMBERS)
        assert kept is not None
        assert (kept["rounds"], kept["tests"]["projection-residual"]) == (2, 2)
    stopped, *_ = run(tmp_path / "c", Guard(**settings, on_fail="refuse"))
    assert {reply.error.reason for reply in stopped.values()} == {REFUSED}


def test_what_training_doesn_t_pay_for_is_played_once_and_leaves(tmp_path, logged):
    settings: Any = {**STRICT, "held_out": held_out(), "share": 1e-9, "on_fail": "refuse"}
    replies, *_ = run(tmp_path / "a", Guard(**settings))
    assert {key[0] for key, reply in replies.items() if reply.has_error()} == {0}
    rounds = read_site(Path("fedaudit-guard")).rounds
    assert [one.done for one in rounds] == 3 * ["refused"] + 3 * ["left"]
    assert {one.checks[name].outcome for one in rounds[3:] for name in ("labels", "members")} == {"not played"}


EVALUATES = """

@app.evaluate()
def evaluate(msg, context):
    model = net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    model.eval()
    source = torch.Generator().manual_seed(99)
    x, y = torch.rand(200, 1, 8, 8, generator=source) * 2 - 1, torch.tensor([0, 1, 2, 7] * 50)
    with torch.no_grad():
        correct = (model(x).argmax(1) == y).float().mean().item()
    metrics = MetricRecord({"num-examples": len(x), "accuracy": correct})
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)
"""


def test_what_the_app_evaluates_on_is_held_out(tmp_path, logged):
    """Nobody gives held_out: from the second round on members are told from what the first evaluation used."""
    guard = Guard(attacks=[], share=None)
    server = replaced(SERVER, "fraction_evaluate=0.0", "fraction_evaluate=1.0")
    _, contexts, _ = run(tmp_path / "a", guard, client=CLIENT + EVALUATES, server=server, config={"rounds": 3})
    for context in contexts.values():
        kept = load_state(context.state, HELD_OUT)
        assert kept is not None
        assert kept["inputs"].shape == (200, 1, 8, 8)
    rounds = read_site(Path("fedaudit-guard")).rounds
    assert [one.checks["members"].outcome for one in rounds] == 3 * ["not played"] + 6 * ["alarm"]
    assert "let the client's app evaluate" in rounds[0].checks["members"].text


@pytest.mark.parametrize("policy", ["pass", "refuse"])
def test_an_evaluation_that_sends_a_model_is_held_to_the_policy(tmp_path, logged, policy):
    server = replaced(SERVER, "fraction_evaluate=0.0", "fraction_evaluate=1.0")
    metrics = 'RecordDict({"metrics": metrics})'
    sends = replaced(EVALUATES, metrics, 'RecordDict({"metrics": metrics, "arrays": ArrayRecord(model.state_dict())})')
    for evaluates, lines in ((EVALUATES, 0), (sends, 3)):
        guard = Guard(attacks=[], share=None, unaudited=policy, out=tmp_path / f"{lines}")
        kept: dict[int, Any] = {}

        def noted(message, context, call, guard=guard, kept=kept):
            reply = guard(message, context, call)
            if message.metadata.message_type == "evaluate":
                kept[context.node_id] = reply
            return reply

        run(tmp_path / f"app-{lines}", noted, client=CLIENT + evaluates, server=server, config={"rounds": 1})
        assert [reply.has_error() for reply in kept.values()] == 3 * [bool(lines) and policy == "refuse"]
        written = [one for one in read_site(tmp_path / f"{lines}").rounds if "result" in one.checks]
        assert [one.done for one in written] == lines * ["refused" if policy == "refuse" else "left"]
        assert {one.checks["result"].text for one in written} <= {"an answer to 'evaluate' with more than 100 numbers"}


def test_clipping_scales_the_change_of_what_raised_an_alarm(tmp_path, logged):
    bare, *_ = run(tmp_path / "a", None, config={"rounds": 1})
    sent: dict[int, Any] = {}
    inner = Guard(**STRICT, on_fail="clip", clip_norm=1e-3)

    def guard(message, context, call):
        sent[context.node_id] = message.content["arrays"].to_torch_state_dict()
        return inner(message, context, call)

    clipped, *_ = run(tmp_path / "b", guard, config={"rounds": 1})
    for (index, node), reply in clipped.items():
        before, whole = sent[node], bare[index, node].content["arrays"].to_torch_state_dict()
        after = reply.content["arrays"].to_torch_state_dict()
        assert list(after) == list(whole)
        change = torch.cat([(after[name] - before[name]).flatten() for name in before])
        was = torch.cat([(whole[name] - before[name]).flatten() for name in before])
        assert change.norm() == pytest.approx(1e-3, rel=1e-2)
        assert torch.cosine_similarity(change, was, dim=0) > 0.999
        assert reply.content["metrics"] == bare[index, node].content["metrics"]
    assert {one.done for one in read_site(Path("fedaudit-guard")).rounds} == {"clipped"}
    run(tmp_path / "c", Guard(**STRICT, on_fail="clip", out="new"), config={"rounds": 1})
    assert {one.done for one in read_site(Path("new")).rounds} == {"refused"}  # nobody knows a norm yet


def test_a_budget_is_read_of_the_mods_and_stops_before_the_round_that_would_exceed_it(tmp_path, logged):
    """The nodes of a simulation share a file, and nobody knows which of them is which after a restart: all count."""
    settings = {"clip": 0.5, "noise": 5.0, "epsilon": None, "delta": 1e-5}
    account = site_account([("dp", settings)], 100, None)
    assert account is not None
    client = (
        "from fedaudit.adapters.flower import Guard, ClientDefenceMod\n"
        + f"GUARD = Guard(attacks=['labels'], fail_on=None, target_epsilon={account.spent(4) + 1e-6})\n"
        + f"NOISE = ClientDefenceMod('dp', {settings!r})\n"
        + replaced(CLIENT, "ClientApp()", "ClientApp(mods=[GUARD, NOISE])")
    )
    seen = run_app(write_app(tmp_path / "a", client=client), nodes=3)
    rounds = read_site(Path("fedaudit-guard")).rounds
    assert [one.done for one in rounds] == 4 * ["left"] + 2 * ["stopped"]
    assert [one.epsilon for one in rounds[:4]] == pytest.approx([account.spent(n) for n in range(1, 5)])
    assert seen.replies == 4
    assert sum("nothing is trained or sent: with it ε would be" in line for line in logged) == 2


def test_wrong_settings_are_refused(tmp_path):
    wrong: Any
    for wrong in ({"on_fail": "stop"}, {"unaudited": "stop"}, {"on_received": "stop"}, {"every": 0}, {"largest": 0}):
        with pytest.raises(BadInput):
            Guard(**wrong)
    for i, wrong in enumerate(
        (
            {"fail_on": "leak"},
            {"fail_above": {"psnrr": 1}},
            {"attacks": ["invgg"]},
            {"attacks": ["projection-residual"]},
        )
    ):
        guard = Guard(**wrong)  # not quietly: under such a policy everything would leave
        app = write_app(tmp_path / str(i))
        seen = run_app(app, nodes=2, watch=lambda _, *arguments, guard=guard: guard(*arguments))
        assert seen.replies == 0
        assert all("BadInput: " in failure for failure in seen.failures)
