"""Transcripts and truths on disk: the same bits back, no truth in what an attack reads, no code run by loading."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from fedaudit.scenario.scenario import scenario_from
from fedaudit.simulation.simulator import Recording
from fedaudit.task.info import TaskInfo
from fedaudit.transcript.observation import observe
from fedaudit.transcript.rounds import Round
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.transcript import Transcript
from fedaudit.transcript.truth import FILE, Truth, check_belongs, save_recording
from fedaudit.utils.errors import BadInput, CorruptTranscript
from tests.build import Scenarios, recorded

_TWO = Scenarios(
    model={"name": "convnet-small", "width": 4, "batch_norm": "train"},
    federation={"name": "fed", "algorithm": "fedavg", "clients": 2, "examples": 8, "batch_size": 2, "local_steps": 2,
                "rounds": 2},
    attacks="invg",
)  # fmt: skip


def recording(**changes: Any) -> Recording:
    return recorded(_TWO(**changes))


SGD = [{"name": "fed", "clients": 2, "examples": 8, "batch_size": 4}]
TABLE = {"data": {"name": "diabetes"}, "model": {"name": "linear"}, "federations": SGD}
FINDING_TYPES: dict[str, dict[str, Any]] = {
    "weights with BatchNorm statistics": {},
    "gradients": {"model": {"name": "lenet"}, "federations": SGD},
    "labels granted": {"federations": SGD, "threat": {"knows_labels": True}},
    "regression": TABLE,
    "regression, targets granted": {**TABLE, "threat": {"knows_labels": True}},
}


def identical(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether two sets of tensors are equal to the last bit (so that -0.0 differs from 0.0)."""
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype
        and a[n].shape == b[n].shape
        and a[n].contiguous().numpy().tobytes() == b[n].contiguous().numpy().tobytes()
        for n in a
    )


def assert_same(a: Transcript, b: Transcript) -> None:
    assert (a.name, a.task_info) == (b.name, b.task_info)
    assert len(a.rounds) == len(b.rounds)
    for x, y in zip(a.rounds, b.rounds, strict=True):
        assert (x.index, x.rejected) == (y.index, y.rejected)
        assert identical(x.weights, y.weights)
        assert len(x.updates) == len(y.updates)
        for u, v in zip(x.updates, y.updates, strict=True):
            assert (u.client, u.kind, u.num_examples, u.training) == (
                v.client,
                v.kind,
                v.num_examples,
                v.training,
            )
            assert identical(u.tensors, v.tensors)
            assert identical(u.buffers, v.buffers)
            assert (u.labels is None) == (v.labels is None)
            if u.labels is not None and v.labels is not None:
                assert identical({"labels": u.labels}, {"labels": v.labels})


@pytest.mark.parametrize("changes", FINDING_TYPES.values(), ids=FINDING_TYPES.keys())
def test_the_same_bits_come_back(changes: dict[str, Any], tmp_path: Path) -> None:
    made = recording(**changes)
    save_recording(made.transcript, made.truth, tmp_path / "t")
    loaded = Transcript.load(tmp_path / "t")
    assert_same(made.transcript, loaded)
    assert loaded.fingerprint() == made.transcript.fingerprint()
    truth = Truth.load(tmp_path / "t" / FILE)
    check_belongs(truth, loaded, tmp_path)
    for key, pixels in made.truth.inputs.items():
        assert identical({"x": pixels, "y": made.truth.labels[key]}, {"x": truth.inputs[key], "y": truth.labels[key]})
    assert truth.candidates.equal(made.truth.candidates)
    assert truth.about == {**made.truth.about, "transcript": loaded.fingerprint()}


def test_the_loaded_architecture_computes_what_the_original_does(tmp_path: Path) -> None:
    made = recording(**FINDING_TYPES["gradients"])
    made.transcript.save(tmp_path / "t")
    loaded = Transcript.load(str(tmp_path / "t"))  # a path as text will do
    record_ = loaded.rounds[0]
    loaded.module.load_state_dict(record_.weights)
    inputs = loaded.task_info.normalise(made.truth.inputs[0, 0])
    value = loaded.loss(loaded.module(inputs), made.truth.labels[0, 0])
    grads = torch.autograd.grad(value, list(loaded.module.parameters()))
    names = [name for name, _ in loaded.module.named_parameters()]
    torch.testing.assert_close(record_.updates[0].tensors, dict(zip(names, grads, strict=True)))


BASE = recording(**FINDING_TYPES["gradients"]).transcript
numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=25, deadline=None)
@given(data=st.data(), features=st.integers(1, 5), classes=st.integers(2, 5), clients=st.integers(1, 3))
def test_any_finite_numbers_of_any_shape_come_back(
    data: st.DataObject, features: int, classes: int, clients: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    def draw(*shape: int) -> Tensor:
        count = int(torch.tensor(shape).prod())
        return torch.tensor(data.draw(st.lists(numbers, min_size=count, max_size=count)), dtype=torch.float32).view(
            shape
        )

    def state() -> dict[str, Tensor]:
        return {"weight": draw(classes, features), "bias": draw(classes)}

    training = {
        "mean": (0.0,),
        "std": (1.0,),
        "num_classes": classes,
        "input_shape": (features,),
        "kind": "table",
    }
    task_info = dataclasses.replace(BASE.task_info, model="custom", loss="custom", **training)  # type: ignore[arg-type]
    blank = BASE.rounds[0].updates[0]
    updates = [
        dataclasses.replace(blank, client=2 * c, tensors=state(), buffers={}, training=None) for c in range(clients)
    ]
    rounds = [Round(3, state(), updates, {0: "an outlier"}), Round(7, state(), updates)]
    net = nn.Linear(features, classes)
    made = Transcript("any", task_info, net, functional.cross_entropy, rounds)
    folder = tmp_path_factory.mktemp("any") / "t"
    made.save(folder)
    assert_same(made, Transcript.load(folder, module=net, loss=functional.cross_entropy))
    with pytest.raises(BadInput, match="a user's own model"):
        Transcript.load(folder)


# --- nothing of the truth ------------------------------------------------------------------------------------------


def everything(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.iterdir()) if path.name != FILE)


@pytest.mark.parametrize("granted", [False, True])
def test_no_victim_and_no_ungranted_label_is_in_the_transcript(granted: bool, tmp_path: Path) -> None:
    federations = [{"name": "fed", "clients": 2, "examples": 20, "batch_size": 10}]
    made = recording(federations=federations, threat={"knows_labels": granted})
    save_recording(made.transcript, made.truth, tmp_path / "t")
    content, truth = everything(tmp_path / "t"), (tmp_path / "t" / FILE).read_bytes()
    task_info = made.transcript.task_info
    for pixels in made.truth.inputs.values():
        for image in pixels:
            forms = [image, task_info.normalise(image[None])[0], (image * 255).round().byte(), image.double()]
            assert not any(form.contiguous().numpy().tobytes() in content for form in forms)
            assert image.contiguous().numpy().tobytes() in truth  # so the search does find what is there
    index = json.loads((tmp_path / "t" / "round-00000.json").read_text())
    sent = {u["client"]: u["labels"] for u in index["messages"]}
    for (_, client), labels in made.truth.labels.items():
        assert labels.numpy().tobytes() not in content
        assert sent[client] == (labels.tolist() if granted else None)
    indices = "".join(path.read_text() for path in (tmp_path / "t").glob("*.json"))
    assert "seed" not in indices  # nor what the clients' choices derive from


def test_labels_that_were_recorded_are_still_withheld_from_who_does_not_know_them() -> None:
    made = recording(**FINDING_TYPES["labels granted"])
    threat = scenario_from({"federations": SGD, "attacks": ["invg"]}).threat
    for knows in (False, True):
        seen = observe(made.transcript, threat.model_copy(update={"knows_labels": knows}))
        assert all((message.update.labels is not None) is knows for message in seen.messages)


# --- loading runs no code ------------------------------------------------------------------------------------------


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_is_refused_and_not_run(recorded: Path, tmp_path: Path) -> None:
    import shutil

    payload = pickle.dumps(Payload(tmp_path / "hacked"))
    names = [path.name for path in recorded.iterdir()]
    assert len(names) == 6  # index, a round's, truth, global weights, two updates
    for name in names:
        folder = tmp_path / name
        shutil.copytree(recorded, folder)
        (folder / name).write_bytes(payload)
        with pytest.raises(CorruptTranscript):
            Truth.load(folder / name) if name == FILE else Transcript.load(folder)
    assert not (tmp_path / "hacked").exists()
    pickle.loads(payload)  # so it would have
    assert (tmp_path / "hacked").exists()


def test_loading_never_unpickles(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_args: object, **_options: object) -> None:
        raise AssertionError("a transcript was unpickled")

    for place, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(place, name, forbidden)
    loaded = Transcript.load(recorded)
    check_belongs(Truth.load(recorded / FILE), loaded, recorded)


# --- folders and fingerprints --------------------------------------------------------------------------------------


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(BadInput, match="isn't an empty folder"):
        BASE.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_the_fingerprint_knows_every_update() -> None:
    (first, *others), before = BASE.rounds, BASE.fingerprint()
    name = next(iter(first.updates[0].tensors))
    for position, update in enumerate(first.updates):
        nudged = update.tensors[name].clone()
        nudged.view(-1)[0] += 1
        changed = list(first.updates)
        changed[position] = dataclasses.replace(update, tensors={**update.tensors, name: nudged})
        rounds = [dataclasses.replace(first, updates=changed), *others]
        assert Transcript(BASE.name, BASE.task_info, BASE.module, BASE.loss, rounds).fingerprint() != before
    same = Transcript(BASE.name, BASE.task_info, BASE.module, BASE.loss, [first, *others])
    assert same.fingerprint() == before


def test_the_truth_of_another_seed_is_refused(tmp_path: Path) -> None:
    one, two = recording(**FINDING_TYPES["gradients"], seed=1), recording(**FINDING_TYPES["gradients"], seed=2)
    save_recording(one.transcript, one.truth, tmp_path / "one")
    truth = Truth.load(tmp_path / "one" / FILE)
    check_belongs(truth, one.transcript, tmp_path)
    with pytest.raises(CorruptTranscript, match="another transcript"):
        check_belongs(truth, two.transcript, tmp_path)


@settings(max_examples=30)
@given(data=st.data(), kind=st.sampled_from(["image", "table"]), channels=st.integers(1, 4))
def test_pixels_are_normalised_channel_by_channel_and_back(data, kind, channels):
    values = st.lists(st.floats(0.1, 0.9), min_size=channels, max_size=channels)
    image = kind == "image"
    mean, std = (data.draw(values), data.draw(values)) if image else ([0.0], [1.0])
    shape = (channels, 2, 3) if image else (channels,)
    task_info = TaskInfo("mlp", None, "eval", "cross-entropy", kind, shape, 2, tuple(mean), tuple(std))
    pixels = torch.rand(5, *shape)
    seen = task_info.normalise(pixels)
    for channel in range(channels if image else 0):
        expected = (pixels[:, channel] - mean[channel]) / std[channel]
        torch.testing.assert_close(seen[:, channel], expected)
        black, white = (value[0, channel, 0, 0] for value in task_info.pixel_range(pixels))
        assert float(black) == pytest.approx(-mean[channel] / std[channel], rel=1e-5)
        assert float(white) == pytest.approx((1 - mean[channel]) / std[channel], rel=1e-5)
    if not image:
        assert torch.equal(seen, pixels)
    torch.testing.assert_close(task_info.denormalise(seen), pixels)


# --- made in Python ------------------------------------------------------------------------------------------------

Changes = dict[str, Any]
WRONG: dict[str, tuple[Changes, Changes, str]] = {
    "shape": ({"fc.bias": torch.zeros(3)}, {}, r"client 0: tensor 'fc.bias' has shape \(3,\), the model needs \(10,\)"),
    "precision": ({"fc.bias": torch.zeros(10, dtype=torch.float64)}, {}, "is torch.float64, the model needs torch.fl"),
    "NaN": ({"fc.bias": torch.full((10,), math.nan)}, {}, "client 0: tensor 'fc.bias' has NaN or infinite values"),
    "a stranger": ({"x": torch.zeros(1)}, {}, "the model has no tensor 'x'"),
    "missing weights": ({}, {"fc.bias": None}, "round 0, global weights: tensor 'fc.bias' is missing"),
    "infinite weights": (
        {},
        {"fc.bias": torch.full((10,), math.inf)},
        "global weights: tensor 'fc.bias' has NaN or inf",
    ),
}


@pytest.mark.parametrize(("sent", "weights", "words"), WRONG.values(), ids=WRONG.keys())
def test_what_is_made_in_python_is_checked_as_what_is_loaded(sent: Changes, weights: Changes, words: str) -> None:
    made = recording(**FINDING_TYPES["gradients"]).transcript
    first = made.rounds[0]
    update = dataclasses.replace(first.updates[0], tensors={**first.updates[0].tensors, **sent})
    given = {name: value for name, value in {**first.weights, **weights}.items() if value is not None}
    rounds = [Round(first.index, given, [update, *first.updates[1:]])]
    wrong = Transcript(made.name, made.task_info, made.module, made.loss, rounds)
    with pytest.raises(BadInput, match=words):
        observe(wrong, ThreatModel())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda rounds: [], "there must be a round"),
        (lambda rounds: [dataclasses.replace(rounds[0], updates=[])], "and an update in every one"),
        (lambda rounds: [rounds[0], rounds[0]], "are not in order, each once"),
        (lambda rounds: [dataclasses.replace(rounds[0], updates=rounds[0].updates[:1] * 2)], "sent two updates in rou"),
    ],
    ids=["no round", "no update", "a round twice", "a client twice"],
)
def test_a_transcript_that_contradicts_itself_is_refused(change: Any, words: str) -> None:
    made = recording(**FINDING_TYPES["gradients"]).transcript
    wrong = Transcript(made.name, made.task_info, made.module, made.loss, change(made.rounds))
    with pytest.raises(BadInput, match=words):
        observe(wrong, ThreatModel())
