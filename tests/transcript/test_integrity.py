"""Transcripts, recordings and truths that were changed are refused, whatever byte it was."""

from __future__ import annotations

import functools
import hashlib
import hmac
import itertools
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from fedaudit import Recorder, Transcript
from fedaudit.pipeline.prepare import resolve
from fedaudit.pipeline.run import record
from fedaudit.scenario.scenario import scenario_from
from fedaudit.simulation.simulator import Recording
from fedaudit.transcript.files import REPLAY, write_replay
from fedaudit.transcript.truth import FILE, Truth, load_truth, save_recording
from fedaudit.transcript.update import Replay
from fedaudit.utils import integrity
from fedaudit.utils.errors import BadInput, CorruptTranscript
from tests.capture.recording_cases import MEAN, STD, Net, federation
from tests.conftest import Command, refused
from tests.data.data_cases import one_line
from tests.transcript.integrity_cases import changed_index, put_part

pytestmark = pytest.mark.usefixtures("no_secret")

GLOBAL, FIRST, LOG = (
    "round-00000-global.safetensors",
    "round-00000-client-00000.safetensors",
    "adversary-log.safetensors",
)
RECORDS = {"target_records": 2, "knows_public_data": True, "public_examples": 2}


def scenario_recording() -> Recording:
    values: dict[str, Any] = {
        "data": {"name": "digits"},
        "model": {"name": "logistic"},
        "federations": [{"name": "fed", "clients": 2, "examples": 2, "batch_size": 2}],
        "attacks": ["loss-threshold"],
        "threat": RECORDS,
    }
    (made,) = record(resolve(scenario_from(values)))
    made.transcript.adversary_log["seen"] = torch.arange(3.0)
    return made


def simulated(folder: Path) -> Path:
    """Write a transcript with all kinds of files: global weights, updates, queries, an adversary log, the truth."""
    made = scenario_recording()
    save_recording(made.transcript, made.truth, folder)
    return folder


def loop(folder: Path, **options: Any) -> Path:
    """Write a recording with its truth, candidates and the errors of a replay."""
    federation(folder, mean=MEAN, std=STD, **options)
    with Recorder(folder, append=True) as recorder:
        recorder.candidates(torch.rand(2, 1, 8, 8), torch.tensor([1, 2]))
    identifier = Transcript.load(folder, Net()).recording
    assert identifier is not None
    write_replay(folder, identifier, {(0, 0): Replay(0.5, 0.01), (1, 1): Replay(math.inf)})
    return folder


def read_simulated(folder: Path) -> None:
    load_truth(folder / FILE, Transcript.load(folder))


def read_loop(folder: Path) -> None:
    load_truth(folder / "truth", Transcript.load(folder, Net()))


KINDS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], None]]] = {
    "simulated": (simulated, read_simulated),
    "recorded": (loop, read_loop),
}


@functools.cache
def files_of(kind: str, folder: Path) -> tuple[Path, ...]:
    made = KINDS[kind][0](folder / kind)
    return tuple(sorted(path for path in made.rglob("*") if path.is_file()))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sealed")


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Callable[[str], Path]:
    def copied(kind: str) -> Path:
        files_of(kind, made)
        return Path(shutil.copytree(made / kind, tmp_path / kind))

    return copied


def flipped(path: Path, place: int, change: int) -> bytes:
    data = path.read_bytes()
    place %= len(data)
    return data[:place] + bytes([data[place] ^ change]) + data[place + 1 :]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_flipped_byte_in_every_file_is_refused(kind: str, made: Path) -> None:
    read = KINDS[kind][1]
    files = files_of(kind, made)
    assert {p.name for p in files} >= ({GLOBAL, FIRST, LOG, FILE} if kind == "simulated" else {GLOBAL, REPLAY})
    read(made / kind)

    @settings(max_examples=6 * len(files))
    @given(st.sampled_from(files), st.floats(0, 1, exclude_max=True), st.integers(1, 255), st.booleans())
    def check(path: Path, share: float, change: int, header: bool) -> None:
        whole = path.read_bytes()
        size = min(len(whole), 400) if header else len(whole)
        path.write_bytes(flipped(path, int(share * size), change))
        try:
            with pytest.raises(BadInput) as error:
                read(made / kind)
            one_line(error)
        finally:
            path.write_bytes(whole)

    check()
    read(made / kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_other_byte_at_the_digest_makes_it_a_file_of_before(kind: str, made: Path) -> None:
    """An index without a digest is read with a note: every byte of the field itself, each with all that it may be."""
    (path,) = (p for p in files_of(kind, made) if p.name == "index.json")
    whole = path.read_bytes()
    start = whole.index(b'"digest"')
    places = range(start - 1, start + len('"digest": "sha256:"'))
    for place, change in itertools.product(places, [*range(1, 256, 7), ord(" ") ^ ord("\t"), ord(" ") ^ ord("\n")]):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ change]) + whole[place + 1 :])
        with pytest.raises(BadInput):
            KINDS[kind][1](made / kind)
    path.write_bytes(whole)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_cut_or_gone_is_refused(kind: str, made: Path) -> None:
    read = KINDS[kind][1]
    for path in files_of(kind, made):
        whole = path.read_bytes()
        for size in (0, 7, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:size])
            with pytest.raises(BadInput):
                read(made / kind)
        path.write_bytes(whole + b" ")
        with pytest.raises(BadInput):
            read(made / kind)
        path.write_bytes(whole)
        if "truth" in path.parts[len(made.parts) :] or path.name == REPLAY:  # these may be missing
            continue
        path.unlink()
        with pytest.raises(BadInput):
            read(made / kind)
        path.write_bytes(whole)


def edited(file: str, place: tuple[str | int, ...], value: Any) -> Callable[[Path], None]:
    return lambda folder: changed_index(folder / file, place, value)


def halved(name: str) -> Callable[[Path], None]:
    return lambda folder: save_file({k: v / 2 for k, v in load_file(folder / name).items()}, folder / name)


ROUND = "round-00000.json"
# What the fingerprint of its updates doesn't know, or not all of.
SILENT: dict[str, Callable[[Path], object]] = {
    "other weights": halved(GLOBAL),
    "other adversary log": lambda folder: (folder / LOG).write_bytes(flipped(folder / LOG, -5, 1)),
    "learning rate": edited(ROUND, ("messages", 0, "training"), {"learning_rate": 1e30, "local_steps": 1}),
    "std": edited("index.json", ("task", "std"), [1e308]),
    "rejected": edited(ROUND, ("rejected",), {"1": "nothing"}),
    "two files swapped": lambda folder: swap(folder / FIRST, folder / FIRST.replace("client-00000", "client-00001")),
}


def swap(one: Path, two: Path) -> None:
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)


@pytest.mark.parametrize("change", SILENT)
def test_what_the_fingerprint_does_not_know_is_sealed(
    change: str, copy: Callable[[str], Path], command: Command, tmp_path: Path
) -> None:
    folder = copy("simulated")
    SILENT[change](folder)
    outcome = command("attack", folder, "--attack", "loss-threshold", "--out", tmp_path / "out")
    refused(outcome, "was changed or damaged after it was written")
    assert "a disk could have done so" in outcome.err


def test_an_adversary_log_that_is_put_beside_is_refused(tmp_path: Path, recorded: Path) -> None:
    folder = Path(shutil.copytree(recorded, tmp_path / "t"))
    save_file({"x": torch.ones(1)}, folder / LOG)
    with pytest.raises(CorruptTranscript, match="carries no digest"):
        Transcript.load(folder)
    other = Path(shutil.copytree(recorded, tmp_path / "other"))
    changed_index(other / "index.json", ("id",), "0" * 64)
    put_part(other, "adversary-log", {"x": torch.ones(1)})
    shutil.copy(other / LOG, folder)
    with pytest.raises(CorruptTranscript, match="digest doesn't fit"):
        Transcript.load(folder)


def test_the_digests_are_those_of_the_standard_library(
    copy: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index, worked out again from the description alone; and every file's, as sha256sum gives it."""
    folder = copy("simulated")
    entry = json.loads((folder / ROUND).read_text())
    others = {path.name for path in folder.glob("round-*.safetensors")}
    assert entry["files"] == {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in others}
    identifier = json.loads((folder / "index.json").read_text())["id"]
    about = f"{identifier}/{ROUND}".encode()
    for path, first in ((folder / "index.json", b"0 "), (folder / ROUND, b"%d %s" % (len(about), about))):
        scheme, digest = json.loads(path.read_text())["digest"].split(":")
        zeroed = path.read_bytes().replace(digest.encode(), b"0" * 64)
        assert (scheme, digest) == ("sha256", hashlib.sha256(first + zeroed).hexdigest())
    read = Transcript.load(folder)
    monkeypatch.setenv("FEDAUDIT_KEY", "a secret")
    read.save(tmp_path / "keyed")
    data = (tmp_path / "keyed/index.json").read_bytes()
    scheme, digest = json.loads(data)["digest"].split(":")
    zeroed = data.replace(digest.encode(), b"0" * 64)
    assert (scheme, digest) == ("hmac-sha256", hmac.new(b"a secret", b"0 " + zeroed, "sha256").hexdigest())


# --- a key ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_must_be_the_one(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, read = KINDS[kind]
    make(tmp_path / "plain")
    monkeypatch.setenv("FEDAUDIT_KEY", "the secret")
    folder = make(tmp_path / "keyed")
    read(folder)
    with pytest.raises(BadInput) as error:
        read(tmp_path / "plain")
    one_line(error, "a digest that was made without a key, and FEDAUDIT_KEY is set", "unset FEDAUDIT_KEY")
    monkeypatch.setenv("FEDAUDIT_KEY", "another secret")
    with pytest.raises(CorruptTranscript) as error:
        read(folder)
    one_line(error, "or written under another FEDAUDIT_KEY", "somebody without the FEDAUDIT_KEY")
    monkeypatch.delenv("FEDAUDIT_KEY")
    with pytest.raises(BadInput) as error:
        read(folder)
    one_line(error, "was sealed with a key, and FEDAUDIT_KEY isn't set: set it to the same secret")
    monkeypatch.setenv("FEDAUDIT_KEY", "the secret")
    read(folder)


def test_whoever_lacks_the_key_cannot_seal_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDAUDIT_KEY", "the secret")
    made, folder = scenario_recording(), simulated(tmp_path / "t")
    monkeypatch.delenv("FEDAUDIT_KEY")
    truth = folder / FILE
    save_recording(made.transcript, made.truth, tmp_path / "plain")
    forged = Truth.load(tmp_path / "plain" / FILE)
    forged.save(truth)  # with a digest that fits, but without the key
    monkeypatch.setenv("FEDAUDIT_KEY", "the secret")
    with pytest.raises(BadInput, match="made without a key"):
        Truth.load(truth)


def test_a_keyed_folder_without_the_key_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.setenv("FEDAUDIT_KEY", "the secret")
    simulated(tmp_path / "t")
    words = ["attack", tmp_path / "t", "--attack", "loss-threshold", "--no-controls", "--out", tmp_path / "out"]
    assert command(*words).code in (0, 3)
    monkeypatch.delenv("FEDAUDIT_KEY")
    refused(command(*words), "was sealed with a key, and FEDAUDIT_KEY isn't set")


# --- recordings, round by round ------------------------------------------------------------------------------------


def test_rounds_that_were_deleted_or_put_there_are_found_out(tmp_path: Path) -> None:
    loop(tmp_path / "r", rounds=3)
    loop(tmp_path / "other", rounds=3)
    for i, name in enumerate(["round-00000.json", "round-00001.json", "round-00002.json"]):
        folder = Path(shutil.copytree(tmp_path / "r", tmp_path / f"lost{i}"))
        (folder / name).unlink()
        with pytest.raises(CorruptTranscript, match=r"doesn't go on|lacks rounds"):
            Transcript.load(folder, Net())
    folder = Path(shutil.copytree(tmp_path / "r", tmp_path / "swapped"))
    for file in (tmp_path / "other").glob("round-00001*"):
        shutil.copy(file, folder)
    with pytest.raises(CorruptTranscript, match="digest doesn't fit"):
        Transcript.load(folder, Net())


def test_a_truth_knows_the_update_whatever_its_file_is_called(tmp_path: Path) -> None:
    folder = loop(tmp_path / "r")
    transcript = Transcript.load(folder, Net())
    before = load_truth(folder / "truth", transcript)
    swap(folder / "truth" / FIRST, folder / "truth" / FIRST.replace("client-00000", "client-00001"))
    after = load_truth(folder / "truth", transcript)
    assert all(value.equal(after.inputs[key]) for key, value in before.inputs.items())
    (folder / "truth" / FIRST).unlink()
    with pytest.raises(CorruptTranscript, match="another transcript"):
        load_truth(folder / "truth", Transcript.load(loop(tmp_path / "other"), Net()))


def test_a_recorder_that_is_killed_between_any_two_writes_leaves_whole_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every write of an index is the last one once; what was closed before is read, and goes on."""
    write = integrity.write_whole
    writes = 1 + 3 * 3  # the header, and in each of three rounds the header, the round and the header again
    for last in range(1, writes + 1):
        count = itertools.count(1)

        def killed(path: Path, data: bytes, count: Any = count, last: int = last) -> None:
            if next(count) > last:
                raise KeyboardInterrupt
            write(path, data)

        monkeypatch.setattr("fedaudit.transcript.files.write_whole", killed)
        folder = tmp_path / str(last)
        try:
            federation(folder, rounds=3)
        except KeyboardInterrupt:
            assert last < writes
        monkeypatch.setattr("fedaudit.transcript.files.write_whole", write)
        closed = last // 3
        if closed:
            assert [r.index for r in Transcript.load(folder, Net()).rounds] == list(range(closed))
        with Recorder(folder, append=True) as recorder, recorder.round(Net().state_dict()):
            recorder.update("late", Net().state_dict(), num_examples=1)
        given = {"input_shape": (1, 8, 8)}
        assert [r.index for r in Transcript.load(folder, Net(), task=given).rounds] == list(range(closed + 1))
