"""Kinds of examples: a new one is a class that is registered, and nothing else in the package needs to know it."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import fedaudit
from fedaudit.attacks import ATTACKS, make_attack
from fedaudit.attacks.base import INSTEAD
from fedaudit.data import Dataset
from fedaudit.data.dataset import Split
from fedaudit.evaluation.image_metrics import mse
from fedaudit.modalities import EXAMPLE_KINDS, ExampleKind, example_kind, fitting_kind, register
from fedaudit.pipeline.prepare import resolve
from fedaudit.pipeline.run import check_public_examples, record
from fedaudit.scenario.scenario import scenario_from
from fedaudit.simulation.simulator import Recording
from fedaudit.task.info import TaskInfo
from fedaudit.transcript.observation import Observation, observe
from fedaudit.transcript.rounds import check_examples
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.transcript import Transcript
from fedaudit.transcript.truth import Truth, check_belongs, save_recording
from fedaudit.utils.errors import BadInput, CorruptTranscript, NotApplicable
from tests.questions import compared

SOURCE = Path(fedaudit.__file__).parent
MEAN, STD = 0.25, 0.5


class Wave(ExampleKind):
    """A short recording: 24 samples between -1 and 1."""

    name: ClassVar[str] = "wave"
    summary: ClassVar[str] = "waves, (t,) samples in [-1, 1]"
    plural: ClassVar[str] = "waves"
    described: ClassVar[str] = "waves"
    axes: ClassVar[tuple[str, ...]] = ("samples",)
    letters: ClassVar[str] = "t"
    arrays: ClassVar[str] = "(n, t)"
    array_axes: ClassVar[tuple[int, ...]] = (2,)
    element: ClassVar[str] = "sample"
    bounds: ClassVar[tuple[float, float] | None] = (-1.0, 1.0)

    def prepare(self, train: Tensor, test: Tensor) -> tuple[Tensor, Tensor, tuple[float, ...], tuple[float, ...]]:
        return train, test, (MEAN,), (STD,)


@pytest.fixture(autouse=True)
def _waves() -> Iterator[None]:
    register(Wave())
    yield
    EXAMPLE_KINDS._entries.pop("wave", None)


def waves(count: int = 240) -> Dataset:
    """Sines of three frequencies, which are the classes."""
    generator = torch.Generator().manual_seed(0)
    classes = torch.arange(count) % 3
    time = torch.linspace(0, 1, 24)
    phase = torch.rand(count, 1, generator=generator)
    sines = torch.sin(2 * torch.pi * ((1 + classes[:, None]) * time + phase))
    noise = 0.1 * torch.randn(count, 24, generator=generator)
    return Dataset.from_tensors((sines + noise).clamp(-1, 1), classes, kind="wave", name="waves")


SCENARIO: dict[str, Any] = {
    "name": "waves",
    "data": {"name": "custom", "split": "train"},
    "model": {"name": "mlp", "width": 8},
    "federations": [{"name": "f", "clients": 3, "examples": 20, "batch_size": 4}],
    "threat": {"target_records": 40},
    "attacks": [{"name": "labels"}, {"name": "loss-threshold"}, {"name": "invg", "iterations": 2}],
}
REFUSAL = f"invg is for images, volumes, signals or examples of several inputs; these are waves, (24,): {INSTEAD}"


def recorded() -> Recording:
    (only,) = record(resolve(scenario_from(SCENARIO), dataset=waves()))
    return only


# A kind of somebody else's --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_audit_of_a_new_kind_goes_from_the_data_to_the_report(tmp_path: Path):
    finished = fedaudit.audit(SCENARIO, data=waves(), out=tmp_path, progress=False)
    result = finished.result
    assert (result.data.kind, result.data.input_shape) == ("wave", [24])
    found = {f.attack: f for f in result.findings}
    assert {name: f.status for name, f in found.items()} == {
        "labels": "done", "loss-threshold": "done", "invg": "not applicable",
    }  # fmt: skip
    assert {f.reason for f in result.findings if f.attack == "invg"} == {REFUSAL}
    assert 0 <= found["loss-threshold"].metrics[0].value <= 1
    page = (tmp_path / "report.html").read_text()
    assert REFUSAL in page
    assert "loss-threshold" in page


def test_the_report_names_what_could_not_be_reconstructed(tmp_path: Path):
    fedaudit.audit({**SCENARIO, "attacks": ["invg"]}, data=waves(), out=tmp_path, progress=False)
    page = (tmp_path / "report.html").read_text()
    assert REFUSAL in page
    assert "waves" in page


@pytest.mark.slow
def test_worker_processes_learn_of_a_new_kind():
    alone, together = (
        fedaudit.audit(SCENARIO, data=waves(), workers=workers, progress=False).result for workers in (1, 2)
    )
    assert [f.metrics for f in alone.findings] == [f.metrics for f in together.findings]


def test_a_task_info_takes_its_kind_along():
    info = recorded().transcript.task_info
    sent = pickle.dumps(info)
    del EXAMPLE_KINDS._entries["wave"]
    assert pickle.loads(sent) == info
    assert isinstance(example_kind("wave"), Wave)
    assert pickle.loads(sent) == info, "what is known already isn't registered again"


def test_clients_train_on_the_kind_s_normalised_examples():
    only = recorded()
    sent = only.transcript.rounds[0]
    model = nn.Sequential(nn.Flatten(), nn.Linear(24, 8), nn.ReLU(), nn.Linear(8, 3))
    model.load_state_dict(dict(zip(model.state_dict(), sent.weights.values(), strict=True)))
    for update in sent.updates:
        key = (sent.index, update.client)
        loss = nn.functional.cross_entropy(model((only.truth.inputs[key] - MEAN) / STD), only.truth.labels[key])
        for expected, given in zip(
            torch.autograd.grad(loss, list(model.parameters())), update.tensors.values(), strict=True
        ):
            torch.testing.assert_close(given, expected)


def test_normalisation_and_bounds_are_the_kind_s():
    info = recorded().transcript.task_info
    x = waves().test.inputs
    torch.testing.assert_close(info.normalise(x), (x - MEAN) / STD)
    torch.testing.assert_close(info.denormalise(info.normalise(x)), x)
    low, high = info.pixel_range(x)
    assert (low.unique().tolist(), high.unique().tolist()) == ([(-1 - MEAN) / STD], [(1 - MEAN) / STD])


def test_a_recording_of_a_new_kind_is_checked_when_it_is_read(tmp_path: Path):
    only = recorded()
    save_recording(only.transcript, only.truth, tmp_path / "t")
    transcript, truth = Transcript.load(tmp_path / "t"), Truth.load(tmp_path / "t/truth.safetensors")
    check_belongs(truth, transcript, tmp_path)
    truth.inputs[0, 0][1, 3] = -1.01
    with pytest.raises(CorruptTranscript, match=r"a sample lies outside of \[-1, 1\]"):
        check_belongs(truth, transcript, tmp_path)
    del EXAMPLE_KINDS._entries["wave"]
    with pytest.raises(CorruptTranscript, match="'wave'; known: image"):
        Transcript.load(tmp_path / "t")


def test_data_of_a_new_kind_are_checked():
    good = waves()
    for change, words in (
        ({"kind": "sound"}, "unknown kind of examples 'sound'"),
        ({"train": Split(good.train.inputs * 2, good.train.targets)}, r"not in \[-1, 1\]; scale them to \[-1, 1\]"),
        ({"train": Split(good.train.inputs[:, None], good.train.targets)}, r"must be float32 \(n, t\)"),
        ({"mean": (0.0, 0.0)}, "must have 1 values"),
    ):
        with pytest.raises(BadInput, match=words):
            dataclasses.replace(good, **change)
    with pytest.raises(BadInput, match=r"none of them empty"):
        Dataset.from_tensors(torch.zeros(5, 2, 2), torch.arange(5), kind="wave")
    with pytest.raises(BadInput, match="not finite"):
        Dataset.from_tensors(torch.full((5, 2), torch.nan), torch.arange(5), kind="wave")
    assert Dataset.from_tensors(torch.rand(9, 4), torch.arange(9) % 2).kind == "table", "the first that reads such"
    with pytest.raises(ValueError, match="registered twice"):
        register(Wave())


def test_a_new_kind_is_drawn_and_written(tmp_path: Path):
    waves = torch.tensor([[-1.0, 0.0, 1.0], [1.0, 1.0, -1.0]])
    kind = example_kind("wave")
    assert kind.draw(waves).tolist() == [[[0.0, 0.5, 1.0], [1.0, 1.0, 0.0]]]
    kind.write(waves[0], tmp_path / "wave.png")
    with Image.open(tmp_path / "wave.png") as image:
        assert np.array(image).tolist() == [[0, 128, 255]]


def test_public_examples_among_the_victims_are_found_whatever_the_kind(monkeypatch: pytest.MonkeyPatch):
    only = recorded()
    victims = only.truth.inputs[0, 1]
    attack = make_attack("labels")
    monkeypatch.setattr(type(attack), "files", lambda _: [Path("public")])
    for public, shared in ((victims[:2], 2), (victims[:2] + 1e-6, 0)):
        prints = example_kind("wave").fingerprints(public)
        monkeypatch.setattr(type(attack), "public_examples", lambda _, prints=prints: prints)
        if shared:
            with pytest.raises(BadInput, match="waves are among"):
                check_public_examples([only], [attack])
        else:
            check_public_examples([only], [attack])


# Who works on what ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rows() -> Observation:
    made = {**SCENARIO, "data": {"name": "breast-cancer"}, "threat": {}}
    (only,) = record(resolve(scenario_from(made)))
    return observe(only.transcript, ThreatModel())


@pytest.mark.parametrize("name", [e.name for e in ATTACKS if e.value.examples and "table" not in e.value.examples])
def test_an_attack_refuses_kinds_that_it_is_not_for(name: str, rows: Observation):
    attack = make_attack(name)
    seen = rows.split(attack.default_scope)[0]
    if attack.threat_model.startswith("client"):
        seen = dataclasses.replace(seen, threat=ThreatModel(adversary="client"), messages=())
    *first, last = (example_kind(kind).described for kind in attack.examples)
    suited = f"{', '.join(first)} or {last}" if first else last
    with pytest.raises(
        NotApplicable, match=rf"^{name} is for {suited}; these are rows of a table, \(30,\): {INSTEAD}$"
    ):
        attack.check(seen)


def test_every_inversion_says_what_it_is_for():
    searched = ("image", "volume", "signal", "packed")
    found = {e.name: e.value.examples for e in ATTACKS if e.value.recovers == "training images"}
    assert found["invg"] == searched
    assert set(found.values()) == {("image",), searched[:-1], searched}


# The kinds that are there ---------------------------------------------------------------------------------------------


def info(kind: str, shape: tuple[int, ...], mean: tuple[float, ...], std: tuple[float, ...]) -> TaskInfo:
    return TaskInfo("mlp", None, "eval", "cross-entropy", kind, shape, 2, mean, std)


def test_images_are_normalised_by_channel_and_rows_of_a_table_are_not():
    colour = info("image", (2, 1, 2), (0.5, 0.2), (0.5, 0.1))
    x = torch.tensor([[[[0.0, 1.0]], [[0.2, 0.4]]]])
    torch.testing.assert_close(colour.normalise(x), torch.tensor([[[[-1.0, 1.0]], [[0.0, 2.0]]]]))
    black, white = colour.pixel_range(x)
    torch.testing.assert_close(black[0, :, 0, 0], torch.tensor([-1.0, -2.0]))
    torch.testing.assert_close(white[0, :, 0, 0], torch.tensor([1.0, 8.0]))
    table = info("table", (3,), (0.5,), (2.0,))
    row = torch.tensor([[-3.0, 0.0, 9.0]])
    assert table.normalise(row).equal(row)
    assert table.denormalise(row).equal(row)
    low, high = table.pixel_range(row)
    assert row.clamp(low, high).equal(row), "nothing bounds a row of a table"


def test_nothing_bounds_the_values_in_a_table_that_is_read_from_a_file():
    table, image = info("table", (3,), (0.0,), (1.0,)), info("image", (1, 1, 3), (0.0,), (1.0,))
    values = torch.tensor([[-3.0, 0.0, 9.0]])
    check_examples(values, torch.tensor([1]), table, 1, "the file")
    for broken, of, words in (
        (values.view(1, 1, 1, 3), image, r"the file: a pixel lies outside of \[0, 1\]"),
        (values.double(), table, "the file: the inputs must be finite float32 numbers"),
        (values / 0, table, "the file: the inputs must be finite float32 numbers"),
    ):
        with pytest.raises(CorruptTranscript, match=words):
            check_examples(broken, torch.tensor([1]), of, 1, "the file")


def test_images_are_drawn_side_by_side_and_compared_pixel_by_pixel():
    images = torch.rand(3, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    kind = example_kind("image")
    sheet = kind.draw(images)
    assert sheet.shape == (3, 4, 17)
    assert sheet[:, :, 6:11].equal(images[1])
    assert sheet[:, :, [5, 11]].unique().tolist() == [0.5]
    assert kind.draw(images[:1]).equal(images[0])
    apart = (kind.vectors(images)[0] - kind.vectors(images)[1]).square().sum()
    torch.testing.assert_close(apart.double() / 60, mse(images[:1], images[1:2])[0])


@pytest.mark.parametrize("most", [4095, 65535])
def test_images_of_12_and_16_bits_are_told_apart_by_their_last_bit(most):
    kind, rng = example_kind("image"), torch.Generator().manual_seed(0)
    steps = torch.randint(most + 1, (5, 1, 6, 7), generator=rng).float()
    steps[:, 0, 0, 0] = 1
    near = steps.clone()
    near[:, 0, 0, 0] += 1
    prints = kind.fingerprints(steps / most)
    assert not torch.isin(kind.fingerprints(near / most), prints).any()
    mean, std = (0.3,), (0.07,)
    again = kind.denormalise(kind.normalise(steps / most, mean, std), mean, std)
    assert not again.equal(steps / most)
    assert kind.fingerprints(again).equal(prints)
    beside = torch.cat([steps / most, torch.rand(1, 1, 6, 7, generator=rng)])
    assert kind.fingerprints(beside)[:5].equal(prints)


def test_results_of_old_are_of_the_kind_that_their_shape_says():
    shapes = ((3, 32, 32), (30,), (1, 8, 16, 16), (12, 256))
    assert [fitting_kind(shape).plural for shape in shapes] == ["images", "records", "volumes", "signals"]
    assert fitting_kind((30,), discrete=True).plural == "sequences"
    for shape, discrete in (((2, 2, 2, 2, 2), None), ((3, 8, 8), True)):
        with pytest.raises(BadInput, match="no kind of examples"):
            fitting_kind(shape, discrete=discrete)


# No kind has a name outside of its module -----------------------------------------------------------------------------


def comparisons(code: str) -> list[int]:
    """Return the lines on which something is compared with the name of a kind."""
    return compared(code, {"image", "table", "volume", "signal"}, {"IMAGE", "TABLE"})


def test_nothing_outside_of_the_kinds_asks_which_one_it_is():
    modules = [path for path in SOURCE.rglob("*.py") if path.parent != SOURCE / "examples"]
    assert len(modules) > 300
    assert {str(path): lines for path in modules if (lines := comparisons(path.read_text()))} == {}


def test_such_questions_would_be_found():
    for code in ('if a.kind == "image": x', 'y = 1 if "table" != kind else 2', 'kind in ("image", "x")',
                 'match kind:\n case "image": x', "kind is IMAGE"):  # fmt: skip
        assert comparisons(code), code
    assert not comparisons('kind="image"; study.kind == "figure"')
