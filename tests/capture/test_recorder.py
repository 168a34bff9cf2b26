"""Recording a federation that really runs: what is on disk, what is read of it, and what an audit of it says."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedaudit
from fedaudit import Recorder, Transcript
from fedaudit.attacks.findings import ImageFinding
from fedaudit.capture.capture import Capture
from fedaudit.transcript.files import REPLAY, read_header, read_replay, write_replay
from fedaudit.transcript.secure_sum import sums_only
from fedaudit.transcript.truth import load_truth
from fedaudit.transcript.update import Replay
from fedaudit.utils import integrity, tensor_files
from fedaudit.utils.errors import BadInput, CorruptTranscript, NotApplicable
from fedaudit.utils.integrity import blank, sealed
from tests.capture.recording_cases import MEAN, STD, Net, audited, federation, held, train
from tests.transcript.integrity_cases import seal_again


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded") / "loop"
    federation(folder, mean=MEAN, std=STD)
    return folder


def test_a_recording_holds_what_travelled(recorded: Path) -> None:
    transcript = Transcript.load(recorded, Net())
    assert [r.index for r in transcript.rounds] == [0, 1]
    assert transcript.clients == {0: "site-0", 1: "site-1"}
    for r in transcript.rounds:
        for update in r.updates:
            model = Net()
            model.load_state_dict(r.weights)
            train(model, held(update.client))
            for name, p in model.named_parameters():
                assert torch.equal(p.detach() - r.weights[name], update.tensors[name])
            assert update.training is not None
            assert (update.training.learning_rate, update.training.batch_sizes) == (0.1, (2, 2))
            assert update.training.data_size == 4
    info = transcript.task_info
    assert (info.loss, info.num_classes, info.input_shape, info.mean, info.std) == (
        *("cross-entropy", 10, (1, 8, 8)),
        *(MEAN, STD),
    )


def test_recording_changes_nothing(tmp_path: Path) -> None:
    with_it = federation(tmp_path / "a").state_dict()
    torch.manual_seed(0)
    model = Net()
    for _ in range(2):
        start = copy.deepcopy(model.state_dict())
        states = []
        for client in range(2):
            model.load_state_dict(start)
            train(model, held(client))
            states.append(copy.deepcopy(model.state_dict()))
        model.load_state_dict({k: torch.stack([s[k] for s in states]).mean(0) for k in start})
    assert all(torch.equal(with_it[k], v) for k, v in model.state_dict().items())


@pytest.mark.slow
def test_the_facts_of_a_recording_are_verified_by_replay(recorded: Path, tmp_path: Path) -> None:
    result = audited(recorded, tmp_path / "out", module=Net())
    (record,) = result.federations
    assert record.recording is not None
    assert record.recording.facts == "verified"
    assert [r.error for r in record.recording.replays] == [0.0] * 4
    assert record.replay_error == 0.0
    assert record.recording.clients == ["site-0", "site-1"]
    assert "SGD (learning rate 0.1)" in record.description
    assert {e["error"] for e in json.loads((recorded / "replay.json").read_text())["updates"]} == {0.0}
    page = (tmp_path / "out" / "report.html").read_text()
    assert "The facts are verified" in page
    assert "site-1" in page


OPTIMISERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "nesterov": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=1e-3),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, weight_decay=0.05),
    "two groups": lambda m: torch.optim.SGD(
        [{"params": m.features.parameters(), "lr": 0.01}, {"params": m.classifier.parameters()}],  # type: ignore[union-attr]
        lr=0.1,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMISERS)
def test_every_optimiser_and_dropout_replay_without_error(name: str, tmp_path: Path) -> None:
    federation(tmp_path / "r", make=lambda: Net(0.5), optimiser=OPTIMISERS[name], rounds=1)
    (record,) = audited(tmp_path / "r", module=Net(0.5)).federations
    assert record.recording is not None
    assert [r.error for r in record.recording.replays] == [0.0, 0.0]


WRONG: dict[str, dict[str, Any]] = {
    "rate": {"learning_rate": 1.0},
    "momentum": {"momentum": 0.9},
    "weight decay": {"weight_decay": 0.5},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_facts_are_said_and_the_audit_is_inconclusive(wrong: str, tmp_path: Path) -> None:
    model, data = Net(), held(0)
    with Recorder(tmp_path / "r", name="loop") as recorder, recorder.round(model.state_dict()):
        with recorder.capture() as captured:
            train(model, data)
        recorder.update("a", model.state_dict(), captured, training=WRONG[wrong])
    result = audited(tmp_path / "r", module=Net())
    (record,) = result.federations
    assert record.recording is not None
    assert record.recording.facts == "contradicted"
    assert record.replay_error is not None
    assert record.replay_error > 0.05
    if result.summaries[0].verdict not in ("recovered", "identifiable"):
        assert result.summaries[0].verdict == "inconclusive"
        assert "recorded" in " ".join(result.summaries[0].advice)


def test_normalisation_is_estimated_from_the_range_of_the_inputs(tmp_path: Path) -> None:
    federation(tmp_path / "r", examples=40)
    transcript = Transcript.load(tmp_path / "r", Net())
    assert transcript.task_info.mean == pytest.approx(MEAN, abs=1e-5)
    assert transcript.task_info.std == pytest.approx(STD, abs=1e-5)
    assert any("estimated from their range" in note for note in transcript.notes)
    given = Transcript.load(tmp_path / "r", Net(), task={"mean": (0.1,), "std": (0.3,)})
    assert (given.task_info.mean, given.task_info.std) == ((0.1,), (0.3,))


# --- without the truth, and in parts ---------------------------------------------------------------------------------


def test_a_server_records_without_truth_or_module(tmp_path: Path) -> None:
    model = Net()
    start = copy.deepcopy(model.state_dict())
    train(model, held(0))
    with Recorder(tmp_path / "r") as recorder, recorder.round(start):
        recorder.update(987654321987654321, {k: v.numpy() for k, v in model.state_dict().items()}, num_examples=4)
    with pytest.raises(BadInput, match="input_shape"):
        Transcript.load(tmp_path / "r", Net())
    with pytest.raises(BadInput, match="module=…"):
        Transcript.load(tmp_path / "r")
    transcript = Transcript.load(tmp_path / "r", Net(), task={"input_shape": (1, 8, 8)})
    (update,) = transcript.rounds[0].updates
    assert update.training is None
    assert transcript.clients == {0: "987654321987654321"}
    assert torch.equal(update.tensors["classifier.bias"], model.classifier.bias.detach() - start["classifier.bias"])
    quick = {"name": "agic", "iterations": 2}
    found = fedaudit.attack(tmp_path / "r", [quick], module=Net(), task={"input_shape": (1, 8, 8)}, progress=False)
    assert found.truth is None
    assert isinstance(found[0], ImageFinding)


def test_differences_and_gradients_are_taken_as_such(tmp_path: Path) -> None:
    model = Net()
    start = copy.deepcopy(model.state_dict())
    train(model, held(0))
    moved = {k: v - start[k] for k, v in model.state_dict().items()}
    for form in ("difference", "gradient"):
        with Recorder(tmp_path / form) as recorder, recorder.round(start):
            recorder.update("a", moved, form=form, num_examples=4)
        (read,) = Transcript.load(tmp_path / form, Net(), task={"input_shape": (1, 8, 8)}).rounds
        assert read.updates[0].kind == ("weights" if form == "difference" else "gradient")
        assert all(torch.equal(read.updates[0].tensors[k], v) for k, v in moved.items())


def test_a_part_of_the_model_is_enough(tmp_path: Path) -> None:
    model = Net()
    for p in model.features.parameters():
        p.requires_grad = False
    part = lambda: {k: v.clone() for k, v in model.state_dict().items() if k.startswith("classifier")}  # noqa: E731
    start = part()
    frozen = copy.deepcopy(model)
    with Recorder(tmp_path / "r", name="adapter") as recorder, recorder.round(start):
        with recorder.capture() as captured:
            train(model, held(0))
        recorder.update("a", part(), captured)
    (record,) = audited(tmp_path / "r", module=frozen).federations
    assert record.recording is not None
    assert record.recording.replays[0].error == 0.0
    transcript = Transcript.load(tmp_path / "r", frozen)
    assert set(transcript.rounds[0].updates[0].tensors) == {"classifier.weight", "classifier.bias"}
    assert torch.equal(transcript.rounds[0].weights["features.0.weight"], frozen.state_dict()["features.0.weight"])


def test_clients_may_start_from_their_own_weights(tmp_path: Path) -> None:
    model = Net()
    sent = copy.deepcopy(model.state_dict())
    with Recorder(tmp_path / "r") as recorder, recorder.round({k: v + 1 for k, v in sent.items()}):
        with recorder.capture() as captured:
            train(model, held(0))
        recorder.update("a", model.state_dict(), captured)
    (read,) = Transcript.load(tmp_path / "r", Net()).rounds
    assert all(torch.equal(read.sent_to(0)[k], v) for k, v in sent.items())
    (record,) = audited(tmp_path / "r", module=Net()).federations
    assert record.replay_error == 0.0


def test_a_recorded_total_is_attacked_as_the_sum_that_it_is(tmp_path: Path) -> None:
    model, states, sizes = Net(), [], (4, 8)
    start = copy.deepcopy(model.state_dict())
    with Recorder(tmp_path / "single", module=model) as recorder, recorder.round(start):
        for client, n in enumerate(sizes):
            model.load_state_dict(start)
            with recorder.capture() as captured:
                train(model, held(client, n), batch=n // 2)
            recorder.update(client, model.state_dict(), captured)
            states.append(copy.deepcopy(model.state_dict()))
    single = Transcript.load(tmp_path / "single", Net())
    mean = {k: (4 * states[0][k] + 8 * states[1][k]) / 12 for k in start}
    with Recorder(tmp_path / "sum", module=model) as recorder, recorder.round(start):
        told = [u.training for u in single.rounds[0].updates if u.training]
        recorder.total(mean, clients=2, training=told)
    (update,) = Transcript.load(tmp_path / "sum", Net(), task={"input_shape": (1, 8, 8)}).rounds[0].updates
    (wanted,) = sums_only(single.rounds, 2, weighted=True)[0][0].updates
    assert (update.members, update.num_examples) == ((0, 1), 12)
    assert update.training == wanted.training
    assert update.training is not None
    assert update.training.batch_sizes == (6, 6)
    for name, value in wanted.tensors.items():
        assert torch.allclose(update.tensors[name], value, atol=1e-6)


def test_of_a_total_that_nothing_is_told_of_what_can_be_run_is(tmp_path: Path) -> None:
    model = Net()
    start = copy.deepcopy(model.state_dict())
    train(model, held(0))
    with Recorder(tmp_path / "r") as recorder, recorder.round(start):
        recorder.total(model.state_dict(), clients=5)
        with pytest.raises(BadInput, match="has a total already"):
            recorder.total(model.state_dict(), clients=5)
    transcript = Transcript.load(tmp_path / "r", Net(), task={"input_shape": (1, 8, 8)})
    assert any("taken for one a client" in note for note in transcript.notes)
    assert transcript.rounds[0].updates[0].num_examples == 5
    found = fedaudit.attack(transcript, [{"name": "agic", "iterations": 2}, "labels", "local-model"], progress=False)
    assert isinstance(found[0], ImageFinding)
    assert len(found[0].images) == 5  # of the union, one batch: as agic takes any update
    assert isinstance(found[1], NotApplicable)
    assert "learning rate" in str(found[1])
    assert isinstance(found[2], NotApplicable)
    assert "secure aggregation" in str(found[2])


def test_a_total_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    model, config = Net(), {"learning_rate": 0.1, "local_steps": 1, "batch_sizes": [4]}
    with Recorder(tmp_path / "r") as recorder, recorder.round(model.state_dict()):
        with pytest.raises(BadInput, match="of 1 clients, and the total is of 2"):
            recorder.total(model.state_dict(), clients=2, training=[config])
        with pytest.raises(BadInput, match="of 8 examples, num_examples of 9"):
            recorder.total(model.state_dict(), clients=2, training=[config, config], num_examples=9)
        with pytest.raises(BadInput, match="clients"):
            recorder.total(model.state_dict(), clients=10**12)
        recorder.total(model.state_dict(), clients=2, training=[config, config])


# --- whatever happens ------------------------------------------------------------------------------------------------


LOOP = """
import sys, torch
sys.path.insert(0, {tests!r})
from tests.capture.recording_cases import Net, train, held
from fedaudit import Recorder
recorder = Recorder({folder!r}, append=True)
for index in range(1000):
    model = Net()
    with recorder.round(model.state_dict()):
        for client in range(2):
            with recorder.capture() as captured:
                train(model, held(client))
            recorder.update(client, model.state_dict(), captured)
    print(index, flush=True)
"""


@pytest.mark.slow
def test_a_killed_federation_leaves_its_closed_rounds(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    code = LOOP.format(tests=str(Path(__file__).parents[2]), folder=str(folder))
    done = 0
    for kill in range(6):
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _ in range(1 + kill):
                assert process.stdout.readline()
                done += 1
            os.kill(process.pid, signal.SIGKILL)
        transcript = Transcript.load(folder, Net())
        assert len(transcript.rounds) in (done, done + 1)  # one more may have been closed before it was killed
        done = len(transcript.rounds)
    assert all(len(r.updates) == 2 for r in transcript.rounds)


def test_every_nth_round_is_recorded(tmp_path: Path) -> None:
    federation(tmp_path / "r", rounds=5, every=2)
    assert [r.index for r in Transcript.load(tmp_path / "r", Net()).rounds] == [0, 2, 4]
    assert [r.index for r in Transcript.load(tmp_path / "r", Net(), rounds=[2, 4]).rounds] == [2, 4]


def damages() -> Iterator[tuple[str, Callable[[Path], object], str]]:
    yield "a round's index cut", lambda f: (f / "round-00001.json").write_text("{"), "round-00001.json"
    yield (
        "an update cut",
        lambda f: (f / "round-00000-client-00000.safetensors").write_bytes(b"x"),
        "truncated or not a safetensors file",
    )
    yield "an update gone", lambda f: (f / "round-00000-client-00001.safetensors").unlink(), "is missing"
    yield "the index foreign", lambda f: (f / "index.json").write_text('{"format": 1}'), "index"


@pytest.mark.parametrize(("what", "damage", "words"), [pytest.param(*d, id=d[0]) for d in damages()])
def test_a_damaged_recording_is_one_line(
    what: str, damage: Callable[[Path], object], words: str, tmp_path: Path
) -> None:
    federation(tmp_path / "r")
    damage(tmp_path / "r")
    with contextlib.suppress(ValueError, KeyError):  # where an index is none
        seal_again(tmp_path / "r")
    with pytest.raises(BadInput, match=words):
        Transcript.load(tmp_path / "r", Net())


def test_a_truth_that_is_cut_is_one_line(tmp_path: Path) -> None:
    federation(tmp_path / "r")
    (tmp_path / "r" / "truth" / "round-00000-client-00000.safetensors").write_bytes(b"x")
    with pytest.raises(CorruptTranscript, match="not a ground truth file"):
        audited(tmp_path / "r", module=Net())


FOREIGN: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "another size": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
        "give the module that the clients trained",
    ),
    "no module": (lambda: nn.Sequential(nn.Flatten()), "the model has no tensor"),
}


@pytest.mark.parametrize("which", FOREIGN)
def test_a_foreign_module_is_one_line(which: str, recorded: Path) -> None:
    make, words = FOREIGN[which]
    with pytest.raises(BadInput, match=words):
        Transcript.load(recorded, make())


def test_updates_that_are_not_finite_are_left_out_and_said(tmp_path: Path) -> None:
    model = Net()
    with Recorder(tmp_path / "r") as recorder, recorder.round(model.state_dict()):
        recorder.update("good", model.state_dict(), num_examples=1)
        recorder.update("bad", {k: v * float("nan") for k, v in model.state_dict().items()}, num_examples=1)
    transcript = Transcript.load(tmp_path / "r", Net(), task={"input_shape": (1, 8, 8)})
    assert transcript.updates == 1
    assert any("client bad" in note for note in transcript.notes)


USES: dict[str, tuple[Callable[[Recorder, nn.Module], object], str]] = {
    "a client twice": (
        lambda r, m: [record("a", m.state_dict(), num_examples=1) for record in (r.update, r.update)],
        "sent an update of round 0 already",
    ),
    "an empty state": (lambda r, m: r.update("a", {}), "the state is empty"),
    "what is no array": (lambda r, m: r.update("a", {"w": b"<xgboost>"}), "is no tensor or array"),
    "a rate below zero": (
        lambda r, m: r.update(
            "a", m.state_dict(), training={"learning_rate": -1, "local_steps": 1, "batch_sizes": [1]}
        ),
        "learning rate is -1",
    ),
    "no candidates": (lambda r, m: r.candidates(torch.zeros(0, 1), torch.zeros(0)), "no candidates"),
    "a round twice": (lambda r, m: r.begin_round(m.state_dict(), index=0), "each once"),
}


@pytest.mark.parametrize("use", USES)
def test_a_wrong_use_is_one_line(use: str, tmp_path: Path) -> None:
    wrong, words = USES[use]
    recorder, model = Recorder(tmp_path / "r"), Net()
    recorder.begin_round(model.state_dict())
    with pytest.raises(BadInput, match=words):
        wrong(recorder, model)


def test_a_folder_in_use_is_refused_unless_the_recording_goes_on(recorded: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="isn't an empty folder"):
        Recorder(recorded)
    federation(tmp_path / "r", rounds=1)
    with Recorder(tmp_path / "r", append=True) as recorder, recorder.round(Net().state_dict()):
        recorder.update("new", Net().state_dict(), num_examples=1)
    transcript = Transcript.load(tmp_path / "r", Net())
    assert [r.index for r in transcript.rounds] == [0, 1]
    assert transcript.clients == {0: "site-0", 1: "site-1", 2: "new"}


def test_victims_are_looked_for_among_all_that_was_recorded_or_given(tmp_path: Path) -> None:
    model, others = Net(), fedaudit.load_dataset("digits").test
    with Recorder(tmp_path / "r", mean=MEAN, std=STD) as recorder:
        recorder.candidates((others.inputs[:50] - 0.5) / 0.25, others.targets[:50])
        for index in range(2):
            with recorder.round(model.state_dict()), recorder.capture() as captured:
                train(model, held(index))
                recorder.update("a", model.state_dict(), captured)
    result = audited(tmp_path / "r", module=Net(), rounds=[0])
    assert {i.candidates for f in result.findings for i in f.images} == {4 + 4 + 50}


def test_what_many_candidates_have_stays_as_frequent_and_a_victim_among_them_is_itself(tmp_path: Path) -> None:
    model, others = Net(), fedaudit.load_dataset("digits").test
    with Recorder(tmp_path / "r", mean=MEAN, std=STD) as recorder:
        own = held(0)[0]
        recorder.candidates(torch.cat([(others.inputs[[0] * 5 + [1, 2]] - 0.5) / 0.25, own[:2]]), torch.zeros(9).long())
        with recorder.round(model.state_dict()), recorder.capture() as captured:
            train(model, held(0))
            recorder.update("a", model.state_dict(), captured)
    transcript = Transcript.load(tmp_path / "r", Net())
    truth = load_truth(tmp_path / "r" / "truth", transcript)
    assert len(truth.candidates) == len(own) + 5 + 2


def test_a_state_that_is_known_is_not_copied() -> None:
    model = Net()
    known = {name: value.clone() for name, value in model.state_dict().items()}
    first = next(iter(known))
    with torch.no_grad():
        model.state_dict()[first].add_(1)  # not what was sent
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    with Capture(known=known) as seen:
        train(model, held(0))
    assert {name for name, value in seen.start.items() if value is known[name]} == set(known) - {first}
    assert all(value.equal(wanted[name]) for name, value in seen.start.items())


@pytest.mark.slow
def test_a_contradiction_of_a_version_that_asked_for_no_rounding_is_computed_again(tmp_path: Path) -> None:
    federation(tmp_path / "r")
    header = read_header(tmp_path / "r")
    old = [{"round": r, "client": c, "error": error} for (r, c), error in
           {(0, 0): 0.4, (0, 1): None, (1, 0): 1e-6}.items()]  # fmt: skip
    text = json.dumps({"updates": old, "digest": blank()}, indent=2)
    (tmp_path / "r" / REPLAY).write_bytes(sealed(text, f"{header.id}/{REPLAY}"))
    assert read_replay(tmp_path / "r", header.id) == {(1, 0): Replay(1e-6)}
    (record,) = audited(tmp_path / "r", tmp_path / "out", module=Net()).federations
    assert record.recording is not None
    assert record.recording.facts == "verified"
    assert [r.error for r in record.recording.replays] == [0, 0, 1e-6, 0]
    # what this version wrote says of itself that rounding was asked for
    write_replay(tmp_path / "r", header.id, {(0, 0): Replay(0.4)})
    assert read_replay(tmp_path / "r", header.id) == {(0, 0): Replay(0.4)}


def test_what_a_full_disk_cut_short_is_left_out_and_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, state, left = Recorder(tmp_path / "r"), Net().state_dict(), [3]

    def write(file: Any, parts: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            file.write(b"a beginning")
            raise OSError(28, "No space left on device")
        tensor_files.write(file, parts)

    def write_whole(path: Path, data: bytes) -> None:
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        integrity.write_whole(path, data)

    monkeypatch.setattr("fedaudit.transcript.files.write", write)
    monkeypatch.setattr("fedaudit.transcript.files.write_whole", write_whole)
    for room in (3, 1, 0, 3):  # the round's model and two updates; the model alone; nothing
        left[0] = room
        with contextlib.suppress(BadInput):
            recorder.begin_round(state)
        for client in range(2):
            with contextlib.suppress(BadInput):
                recorder.update(client, state)
        recorder.end_round()
    left[0] = 3
    recorder.begin_round(state)
    recorder.update(0, state)
    left[0] = -1
    with pytest.raises(BadInput, match="No space left"):
        recorder.end_round()
    rounds = Transcript.load(tmp_path / "r", Net(), task={"input_shape": (1, 8, 8)}).rounds
    assert [(one.index, len(one.updates)) for one in rounds] == [(0, 2), (3, 2)]
    assert {int(path.name[6:11]) for path in (tmp_path / "r").glob("round-*")} == {0, 3}
