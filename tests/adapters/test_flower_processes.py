"""Flower as it is deployed: a SuperLink and two SuperNodes, processes of their own, with and without fedaudit."""

from __future__ import annotations

import itertools
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fedaudit.transcript.transcript import Transcript
from tests.adapters.flower_cases import EXAMPLE, audited, example

pytest.importorskip("flwr")
pytestmark = [pytest.mark.slow, pytest.mark.peers, pytest.mark.timeout(1200)]

from fedaudit.adapters.flower.in_process import run_app  # noqa: E402 (it needs Flower)
from tests.adapters.flower_processes import Deployment, deployment  # noqa: E402

AVERAGE = 'strategy = FedAvg(fraction_train=config["fraction-train"], fraction_evaluate=config["fraction-evaluate"])\n'

# Writes down what every reply is: the id of its content is a hash of all its bytes.
WITNESS = """
    class Witness(FedAvg):
        def aggregate_train(self, server_round, replies):
            replies = list(replies)
            import json
            with open(config["final-model"] + ".replies", "a") as file:
                for reply in replies:
                    error = reply.error.reason if reply.has_error() else None
                    seen = None if error else reply.content.object_id
                    file.write(json.dumps([server_round, reply.metadata.src_node_id, seen, error]) + "\\n")
            return super().aggregate_train(server_round, replies)

    strategy = Witness(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=AVAILABLE)
"""


def witness(available: int = 2) -> dict[str, str]:
    return {"    " + AVERAGE: WITNESS.lstrip("\n").replace("AVAILABLE", str(available))}


GUARD = 'Guard(on_fail="refuse")'
QUICK = 'Guard(attacks=["labels"], fail_on=None, share=None)'
# One client's site allows nothing.
STRICT = (
    """Strict(attacks=["labels"], fail_on=None, fail_above={"label_accuracy": 0.01}, on_fail="refuse", share=None)"""
)
STRICTER = """
class Strict(Guard):
    def __call__(self, msg, context, call_next):
        if context.node_config["partition-id"] == 0:
            return call_next(msg, context)
        return super().__call__(msg, context, call_next)


app = ClientApp("""
TROUBLE = """
    import os, pathlib, time
    me, now = context.node_config["partition-id"], msg.content["config"]["server-round"]
    if (me, now) == (0, 1):
        raise RuntimeError("the disk is full")
    if (me, now) == (1, 2):
        time.sleep(60)
    if (me, now) == (1, 3):
        pathlib.Path(context.run_config["final-model"] + ".asleep").touch()
        time.sleep(600)
"""
TRAINS = """    loader, _ = data_of(msg, context)
    loss = train_fn("""


def replies(final: Path) -> dict[tuple[int, int], tuple[str | None, str | None]]:
    """Return what came back, by round and node: the hash of the content, or the error."""
    lines = [json.loads(line) for line in Path(f"{final}.replies").read_text().splitlines()]
    return {(index, node): (seen, error) for index, node, seen, error in lines}


def config(final: Path, rounds: int = 3) -> str:
    return f'final-model="{final}" num-server-rounds={rounds} fraction-evaluate=0.0'


def module() -> torch.nn.Module:
    space: dict[str, Any] = {"__name__": "digits_app.task"}
    exec((EXAMPLE / "digits_app" / "task.py").read_text(), space)
    made: torch.nn.Module = space["Net"]()
    return made


def read(folder: Path) -> Transcript:
    return Transcript.load(folder, module(), task={"input_shape": (1, 8, 8), "mean": (0.5,), "std": (0.5,)})


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("flower")


@pytest.fixture(scope="module")
def running(where: Path) -> Any:
    with deployment(where / "deployment") as running:
        yield running


@pytest.fixture(scope="module")
def bare(running: Deployment, where: Path) -> Path:
    """The final model of the example app alone."""
    run = running.submit(example(where / "bare", server_app=witness()), config(where / "bare.pt"))
    assert running.wait(run, 300) == "finished:completed"
    return where / "bare.pt"


@pytest.fixture(scope="module")
def recorded(running: Deployment, where: Path) -> tuple[Path, Path]:
    """The final model of the example app with the eight lines, and the recording."""
    app = audited(where / "audited", server_app=witness(), client_app={GUARD: QUICK})
    run = running.submit(app, config(where / "audited.pt"))
    assert running.wait(run, 300) == "finished:completed"
    return where / "audited.pt", running.folder / f"recording-{run}"


def test_nothing_changes_with_recorder_and_guard(bare: Path, recorded: tuple[Path, Path], running: Deployment) -> None:
    final, _ = recorded
    one, other = torch.load(bare), torch.load(final)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert replies(bare) == replies(final)
    assert len(replies(bare)) == 6
    assert all(error is None for _, error in replies(bare).values())
    for node in (0, 1):
        assert running.log(f"node-{node}").count("within the limits") == 3
    assert "labels" not in running.log("superlink"), "what a guard finds stays on its site"


def test_the_recording_is_what_travelled_and_agrees_with_in_process(
    recorded: tuple[Path, Path], where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final, folder = recorded
    transcript = read(folder)
    assert [r.index for r in transcript.rounds] == [0, 1, 2]
    assert [len(r.updates) for r in transcript.rounds] == [2, 2, 2]
    for r in transcript.rounds:
        for update in r.updates:
            assert update.num_examples == 12
            assert update.training is not None
            assert (update.training.learning_rate, update.training.batch_sizes) == (0.1, (4, 4, 4))
    for before, after in zip(transcript.rounds, transcript.rounds[1:], strict=False):
        for name in before.updates[0].tensors:  # what is averaged is what the next round begins with
            mean = torch.stack([u.tensors[name] for u in before.updates]).mean(0)
            torch.testing.assert_close(before.weights[name] + mean, after.weights[name], rtol=1e-5, atol=1e-7)
    monkeypatch.chdir(where)
    app = audited(where / "here", server_app=witness(), client_app={GUARD: QUICK})
    run_app(app, nodes=2, config={"final-model": str(where / "here.pt"), "fraction-evaluate": 0.0})
    here = read(where / "recording-1")
    for one, other in zip(transcript.rounds, here.rounds, strict=True):
        assert all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)

        def parts(r: Any) -> list[list[float]]:
            return sorted(torch.cat([t.flatten() for t in u.tensors.values()]).tolist() for u in r.updates)

        assert parts(one) == parts(other)
    deployed, local = torch.load(final), torch.load(where / "here.pt")
    assert all(torch.equal(deployed[name], local[name]) for name in deployed)


def test_a_refusal_stops_one_clients_update_and_no_round(running: Deployment, where: Path) -> None:
    app = audited(where / "strict", server_app=witness(), client_app={GUARD: STRICT, "app = ClientApp(": STRICTER})
    run = running.submit(app, config(where / "strict.pt", 2))
    assert running.wait(run, 300) == "finished:completed"
    seen = replies(where / "strict.pt")
    assert len(seen) == 4
    refused = {key for key, (_, error) in seen.items() if error}
    assert len(refused) == 2
    assert len({node for _, node in refused}) == 1
    assert {seen[key][1] for key in refused} == {"the site's guard didn't let this update leave"}
    transcript = read(running.folder / f"recording-{run}")
    assert [len(r.updates) for r in transcript.rounds] == [1, 1]


DGC = {GUARD: 'ClientDefenceMod("dgc", {"ratio": 0.1})', "flower import Guard": "flower import ClientDefenceMod"}
FORGETS = {**DGC, GUARD: "forgetful", "app = ClientApp(": """
def forgetful(msg, context, call_next):
    context.state.clear()
    return ClientDefenceMod("dgc", {"ratio": 0.1})(msg, context, call_next)


app = ClientApp("""}  # fmt: skip
HALF = """
    strategy = FedAvg(fraction_train=0.5, fraction_evaluate=0.0, min_train_nodes=1)
"""


def flat(folder: Path) -> list[list[list[float]]]:
    """Return what clients sent, round by round, in an order that no node's name decides."""
    rounds = read(folder).rounds
    return [sorted(torch.cat([t.flatten() for t in u.tensors.values()]).tolist() for u in r.updates) for r in rounds]


@pytest.mark.long
def test_what_dgc_remembers_survives_a_process_per_message(
    running: Deployment, where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = running.submit(audited(where / "dgc", server_app=witness(), client_app=DGC), config(where / "dgc.pt"))
    assert running.wait(run, 300) == "finished:completed"
    deployed = flat(running.folder / f"recording-{run}")
    sent = [sum(v != 0 for v in update) / len(update) for update in (deployed[0][0], deployed[2][0])]
    assert sent[1] < sent[0] < 0.6  # it sends more while it warms up
    settings = {"final-model": str(where / "dgc-here.pt"), "fraction-evaluate": 0.0}
    for name, client, same in (("here", DGC, True), ("forgets", FORGETS, False)):
        (where / f"dgc-{name}").mkdir()
        monkeypatch.chdir(where / f"dgc-{name}")
        app = audited(where / f"dgc-{name}" / "app", server_app=witness(), client_app=client)
        run_app(app, nodes=2, config=settings)
        here = flat(Path("recording-1"))
        assert here[0] == deployed[0]
        assert (here[1:] == deployed[1:]) is same


@pytest.mark.long
def test_rounds_of_sampled_clients_are_recorded(running: Deployment, where: Path) -> None:
    app = audited(where / "half", server_app={"    " + AVERAGE: HALF.lstrip("\n")}, client_app={GUARD: QUICK})
    run = running.submit(app, config(where / "half.pt", 4))
    assert running.wait(run, 300) == "finished:completed"
    rounds = read(running.folder / f"recording-{run}").rounds
    assert [len(r.updates) for r in rounds] == [1, 1, 1, 1]
    for before, after in itertools.pairwise(rounds):
        for name, update in before.updates[0].tensors.items():
            torch.testing.assert_close(before.weights[name] + update, after.weights[name], rtol=1e-5, atol=1e-7)


@pytest.mark.long
def test_failing_late_and_killed_clients_are_survived(running: Deployment, where: Path) -> None:
    server = {**witness(1), "        grid=grid,\n": "        grid=grid,\n        timeout=40,\n"}
    client = {GUARD: QUICK, TRAINS: TROUBLE.lstrip("\n") + TRAINS}
    final = where / "trouble.pt"
    run = running.submit(audited(where / "trouble", server_app=server, client_app=client), config(final))
    for _ in range(600):
        if Path(f"{final}.asleep").exists():
            break
        time.sleep(0.5)
    running.kill(1)
    assert running.wait(run, 300) == "finished:completed"
    transcript = read(running.folder / f"recording-{run}")
    assert [r.index for r in transcript.rounds] == [0, 1, 2]
    assert [len(r.updates) for r in transcript.rounds] == [1, 1, 1]
    first, second, third = (r.updates[0].client for r in transcript.rounds)
    assert first != second == third
    assert any("disk is full" in (error or "") for _, error in replies(final).values()) or len(replies(final)) >= 3


def test_every_process_is_gone_whatever_happens(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="halfway"), deployment(tmp_path / "d", nodes=1) as running:
        raise RuntimeError("halfway")
    time.sleep(1)
    files = [str(file) for file in Path("/proc").glob("[0-9]*/environ")]
    left = subprocess.run(["grep", "-lzs", running.token, *files], capture_output=True)
    assert left.stdout == b""
