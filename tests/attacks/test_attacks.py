"""Attacks through their public interface: what they recover, what they refuse, and that they never see the truth."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedaudit.attacks import ATTACKS, Finding, ImageFinding, make_attack
from fedaudit.attacks.inversion.template import GradientInversion
from fedaudit.data import Dataset, load_dataset
from fedaudit.pipeline.prepare import resolve
from fedaudit.pipeline.run import assess, plan, record
from fedaudit.pipeline.trials import run_trials
from fedaudit.scenario.scenario import Scenario, scenario_from
from fedaudit.simulation.simulator import Recording
from fedaudit.transcript.observation import Observation, observe
from fedaudit.transcript.threat import ThreatModel
from fedaudit.utils.errors import BadInput, NotApplicable
from fedaudit.utils.seeds import generator
from fedaudit_catalogue.train_generator import TrainingPlan, train_generator

# gias needs a generator; it has tests of its own
INVERSIONS = [
    entry.name
    for entry in ATTACKS
    if issubclass(entry.value, GradientInversion) and entry.value.default_scope == "update" and entry.name != "gias"
]

BATCH = {"name": "batch", "clients": 1, "examples": 2, "batch_size": 2}
FEDAVG = {"name": "fedavg", "algorithm": "fedavg", "clients": 1, "examples": 4, "local_steps": 4, "batch_size": 1}
ODD = (({"name": "odd", "clients": 1, "examples": 1, "rounds": 3}, "aren't 2 epochs of equal length"),)


@dataclasses.dataclass(frozen=True)
class Row:
    """What a method must win, and what it must refuse.

    settings: quick ones; least: PSNR on at least ``on`` of ``images`` digits of 8×8 pixels through DLG's LeNet;
    refuses: federations that it must refuse, and why; rounds: of a client with one digit.
    """

    settings: dict[str, Any]
    least: float
    on: int = 2
    images: int = 2
    refuses: tuple[tuple[dict[str, Any], str], ...] = ()
    rounds: int = 1


# One row a method; a new one is one more row.
ROWS: dict[str, Row] = {
    "dlg": Row({"iterations": 40}, 30.0, on=8, images=10, refuses=((FEDAVG, "no answer to 4 local steps"),)),
    "dlg-adam": Row({"iterations": 600}, 15.0),
    "idlg": Row(
        {"iterations": 40}, 30.0, on=8, images=10, refuses=((BATCH, "recovers one example"), (FEDAVG, "local"))
    ),
    "cpl": Row({"iterations": 40}, 30.0, refuses=((BATCH, "recovers one example"), (FEDAVG, "no answer"))),
    "invg": Row({"iterations": 600, "total_variation": 1e-4}, 15.0),
    "geng": Row({"iterations": 40}, 30.0, refuses=((FEDAVG, "used all of the client's 4 examples"),)),
    "agic": Row({"iterations": 600, "total_variation": 1e-4}, 15.0),
    "agic-plus": Row({"iterations": 600}, 15.0),
    "gradinversion": Row({"iterations": 400, "group": 2}, 30.0, refuses=((FEDAVG, "no answer to 4 local steps"),)),
    "r-gap": Row({}, 80.0, on=10, images=10, refuses=((BATCH, "works for one"), (FEDAVG, "works for one"))),
    "gias": Row({"iterations": 600}, 15.0, refuses=((BATCH, "needs public data"), (FEDAVG, "needs public data"))),
    "epochs": Row({"attack": {"name": "agic-plus", "iterations": 600}}, 15.0, rounds=2, refuses=ODD),
    "averaged": Row({"attack": {"name": "agic-plus", "iterations": 600}}, 15.0, rounds=2),
    "dlg-adam-epochs": Row({"iterations": 600}, 15.0, rounds=2, refuses=ODD),
    "invg-epochs": Row({"iterations": 600}, 15.0, rounds=2, refuses=ODD),
    "agic-epochs": Row({"iterations": 600}, 15.0, rounds=2, refuses=ODD),
}


def scenario(**changes: Any) -> Scenario:
    values: dict[str, Any] = {
        "data": {"name": "digits"},
        "model": {"name": "lenet", "initialisation": "uniform"},
        "federations": [{"name": "fedsgd", "clients": 2, "examples": 2}],
        "attacks": [{"name": "invg", "iterations": 20}],
    }
    return scenario_from(values | changes)


def recording(**changes: Any) -> tuple[Scenario, Recording]:
    made = scenario(**changes)
    (only,) = record(resolve(made))
    return made, only


def observation(**changes: Any) -> Observation:
    made, only = recording(**changes)
    return observe(only.transcript, made.threat).split()[0]


def run(name: str, seen: Observation, *, start: torch.Generator | None = None, **settings: Any) -> Any:
    few = {"iterations": 20} if name in INVERSIONS else {}
    return make_attack(name, {**few, **settings})(seen, generator=start or generator(0, "attack"))


# In files of their own: test_spear.py, test_cocktail.py, test_exact_linear.py, test_active_server.py, test_loki.py, …
ELSEWHERE = {
    "spear",
    "sratta",
    "cocktail",
    "exact-linear",
    "imprint",
    "fishing",
    "trap-weights",
    "peftleak",
    "seer",
    "loki",
    "cafe",
    "unsplit",
    "learned-inversion",
    "fsha",
}


def test_every_attack_has_its_row():
    assert set(ROWS) | ELSEWHERE == {entry.name for entry in ATTACKS if entry.value.recovers == "training images"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_attack_recovers_what_it_must(name, tmp_path):
    row = ROWS[name]
    settings: dict[str, Any] = {}
    if name == "gias":
        settings = {"generator_file": str(tmp_path / "digits.safetensors")}
        plan = TrainingPlan(steps=250)
        train_generator(load_dataset("digits"), Path(settings["generator_file"]), latent=16, width=8, plan=plan)
    federation = {"name": "fedsgd", "clients": row.images, "examples": row.images, "rounds": row.rounds}
    made, only = recording(
        data={"name": "digits", "split": "test"},
        federations=[federation],
        threat={"knows_public_data": True},
    )
    psnr = []
    for seen in observe(only.transcript, made.threat).split(make_attack(name).default_scope):
        found = run(name, seen, **row.settings, **settings)
        key = seen.messages[0].round, seen.messages[0].client
        assert found.labels.equal(only.truth.labels[key])
        psnr.append(-10 * (found.images - only.truth.inputs[key]).square().mean().log10().item())
    assert sum(p >= row.least for p in psnr) >= row.on, psnr


REFUSED = [(name, federation, reason) for name, row in ROWS.items() for federation, reason in row.refuses]


@pytest.mark.parametrize(("name", "federation", "reason"), REFUSED)
def test_attack_refuses_updates_that_it_has_no_answer_to(name, federation, reason):
    made, only = recording(federations=[federation])
    attack = make_attack(name)
    with pytest.raises(NotApplicable, match=reason):
        attack.check(observe(only.transcript, made.threat).split(attack.default_scope)[0])


@pytest.fixture(scope="module")
def table() -> Observation:
    made, only = recording(data={"name": "breast-cancer"}, model={"name": "mlp"})
    return observe(only.transcript, made.threat)


@pytest.mark.parametrize("name", ROWS)
def test_attack_refuses_rows_of_a_table(name, table):
    attack = make_attack(name)
    with pytest.raises(NotApplicable, match="rows of a table"):
        attack.check(table.split(attack.default_scope)[0])


ACCEPTED = [
    (name, federation)
    for name in INVERSIONS
    for federation in (BATCH, FEDAVG)
    if federation["name"] not in [refused["name"] for refused, _ in ROWS[name].refuses]
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "federation"), ACCEPTED)
def test_attack_lowers_its_objective_on_every_kind_of_update_that_it_takes(name, federation):
    found = run(name, observation(federations=[federation]))
    assert found.objective < found.trace.objective[0]
    assert found.iterations == 20
    assert found.images.shape[1:] == (1, 8, 8)
    assert found.images.min() >= 0
    assert found.images.max() <= 1
    assert found.trace.snapshots.shape[0] == len(found.trace.iterations) == len(found.trace.objective)
    assert found.trace.iterations[-1] == 20
    assert found.trace.snapshots[-1].equal(found.images)


def test_full_batches_are_recovered_once_and_counted_in_every_step():
    full = {**FEDAVG, "examples": 2, "batch_size": 2, "learning_rate": 1e-4}
    found = run("geng", observation(federations=[full]), iterations=3)
    assert found.images.shape == (8, 1, 8, 8)
    assert all(found.images[:2].equal(step) for step in found.images.split(2))
    assert found.labels.tolist() == found.labels[:2].tolist() * 4


@pytest.mark.slow
def test_a_fedavg_update_of_one_step_is_a_gradient():
    single = {**FEDAVG, "examples": 1, "local_steps": 1}
    for name in ("dlg", "idlg", "cpl", "gradinversion", "geng"):
        found = run(name, observation(federations=[single]), iterations=4)
        assert found.objective < found.trace.objective[0], name


def test_dlg_finds_the_label_beside_the_image():
    made, only = recording()
    seen = observe(only.transcript, made.threat).split()[0]
    found = run("dlg", seen, iterations=40)
    assert found.label_source == "optimised"
    assert found.labels.equal(only.truth.labels[0, 0])


def test_dlg_refuses_a_loss_that_takes_no_soft_labels():
    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.multi_margin_loss(outputs, labels)

    made = scenario(model={"name": "lenet", "loss": "custom"})
    (only,) = record(resolve(made, loss=loss))
    with pytest.raises(NotApplicable, match="soft labels"):
        make_attack("dlg").check(observe(only.transcript, made.threat).split()[0])


def test_of_several_restarts_the_one_of_least_objective_is_kept():
    seen = observation()
    start = generator(0, "restarts")
    singles: list[Any] = [make_attack("invg", {"iterations": 8})(seen, generator=start) for _ in range(3)]
    best: Any = make_attack("invg", {"iterations": 8, "restarts": 3})(seen, generator=generator(0, "restarts"))
    assert best.objective == pytest.approx(min(f.objective for f in singles), rel=1e-4)
    assert best.iterations == 24
    assert min((best.images - f.images).abs().max() for f in singles) < 1e-3  # few steps run otherwise: rounding


def test_progress_is_reported_up_to_the_end():
    calls: list[tuple[int, int]] = []
    make_attack("invg", {"iterations": 20, "restarts": 2})(
        observation(), generator=generator(0), progress=lambda done, total: calls.append((done, total))
    )
    assert calls[-1] == (40, 40)
    assert calls == sorted(calls)


def test_findings_survive_the_disk(tmp_path):
    found = run("agic", observation())
    found.save(tmp_path / "f.safetensors")
    again = Finding.load(tmp_path / "f.safetensors")
    assert isinstance(again, ImageFinding)
    assert again.trace is not None
    assert again.images.equal(found.images)
    assert again.trace.snapshots.equal(found.trace.snapshots)
    for field in ("attack", "label_source", "objective", "iterations", "notes", "seconds"):
        assert getattr(again, field) == getattr(found, field), field
    assert again.labels.equal(found.labels)
    assert (again.trace.iterations, again.trace.objective) == (found.trace.iterations, found.trace.objective)
    (tmp_path / "f.safetensors").write_bytes((tmp_path / "f.safetensors").read_bytes()[:100])
    with pytest.raises(BadInput, match="truncated"):
        Finding.load(tmp_path / "f.safetensors")


# The truth ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_finding_does_not_change_when_the_ground_truth_does():
    made, only = recording(attacks=[{"name": n, "iterations": 4} for n in INVERSIONS])
    start = generator(0, "lies")
    lies = dataclasses.replace(
        only.truth,
        inputs={k: torch.rand(v.shape, generator=start) for k, v in only.truth.inputs.items()},
        labels={k: (v + 1) % 10 for k, v in only.truth.labels.items()},
        candidates=torch.rand(only.truth.candidates.shape, generator=start),
    )
    attacks = [make_attack(a.name, a.settings()) for a in made.attacks]
    audits = []
    for truth in (only.truth, lies):
        recorded = [Recording(only.transcript, truth)]
        seen = [observe(only.transcript, made.threat)]
        audits.append(assess(resolve(made), recorded, seen, run_trials(plan(seen, attacks)), started=0))
    honest, lying = audits
    for name, pixels in honest.image_files.items():
        if any(part in name for part in ("/control-", "-power-", "-margin-")):  # made of what the auditor knows
            continue
        assert pixels.equal(lying.image_files[name]) != name.endswith("-true.png"), name
    for a, b in zip(honest.result.findings, lying.result.findings, strict=True):
        assert a.objective == b.objective
        assert a.curve is not None
        assert b.curve is not None
        assert a.curve.objective == b.curve.objective
        assert [i.label for i in a.images] == [i.label for i in b.images]
        assert a.images[0].psnr != b.images[0].psnr


def tensors_in(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """Yield every tensor that can be reached from an observation."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.state_dict().values()
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item, depth + 1)
    elif dataclasses.is_dataclass(value) and depth < 8:
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name), depth + 1)


@pytest.mark.parametrize("knows_labels", [False, True])
def test_no_victim_can_be_reached_from_an_observation(knows_labels):
    made, only = recording(federations=[FEDAVG], threat={"knows_labels": knows_labels})
    seen = observe(only.transcript, made.threat)
    reachable = list(tensors_in(seen))
    shape = only.truth.inputs[0, 0].shape[1:]
    assert len(reachable) > 10
    assert not [t for t in reachable if tuple(t.shape[-3:]) == tuple(shape)]
    labels = [t for t in reachable if t.dtype == torch.int64 and t.numel() == 4]
    assert len(labels) == int(knows_labels)


def test_labels_that_travelled_are_hidden_from_who_is_not_granted_them():
    _, only = recording(federations=[FEDAVG], threat={"knows_labels": True})
    granted, blind = (observe(only.transcript, ThreatModel(knows_labels=known)) for known in (True, False))
    assert granted.messages[0].update.labels is not None
    assert blind.messages[0].update.labels is None


def test_training_facts_are_hidden_from_who_is_not_told():
    made, only = recording(federations=[FEDAVG])
    seen = observe(only.transcript, ThreatModel(knows_training=False)).split()[0]
    assert seen.messages[0].update.training is None
    for name in ("invg", "dlg-adam"):
        with pytest.raises(NotApplicable, match="knows_training"):
            make_attack(name).check(seen)
    assert run("agic", seen).images.shape == (4, 1, 8, 8)
    assert made.threat.knows_training


# Refusals -----------------------------------------------------------------------------------------------------------


def duplicates(seen: Observation) -> Observation:
    message = seen.messages[0]
    many = dataclasses.replace(message.update, num_examples=11, training=None)
    return dataclasses.replace(seen, messages=(dataclasses.replace(message, update=many),))


REFUSALS = {
    "table": (lambda: observation(data={"name": "breast-cancer"}, model={"name": "mlp"}), "rows of a table"),
    "client": (lambda: observe(recording()[1].transcript, ThreatModel(adversary="client")), "sees no update"),
    "several updates": (lambda: observe(recording()[1].transcript, ThreatModel()), "one update at a time"),
}


@pytest.mark.parametrize("name", INVERSIONS)
@pytest.mark.parametrize("case", REFUSALS)
def test_attack_refuses_with_a_reason(name, case):
    make, reason = REFUSALS[case]
    with pytest.raises(NotApplicable, match=reason):
        run(name, make())


def test_more_examples_than_classes_are_refused_by_an_inference_without_duplicates():
    with pytest.raises(NotApplicable, match="knows_labels"):
        run("invg", duplicates(observation()), label_inference="yin")
    assert run("invg", duplicates(observation()), iterations=2).label_source == "ilrg-pooled"


def test_labels_are_used_when_granted():
    made, only = recording(federations=[FEDAVG], threat={"knows_labels": True})
    found = run("invg", observe(only.transcript, made.threat).split()[0])
    assert found.label_source == "given"
    assert found.labels.equal(only.truth.labels[0, 0])


def test_an_update_of_zeros_is_refused():
    seen = observation()
    message = seen.messages[0]
    silent = dataclasses.replace(message.update, tensors={k: 0 * v for k, v in message.update.tensors.items()})
    with pytest.raises(NotApplicable, match="zero throughout"):
        run("agic", dataclasses.replace(seen, messages=(dataclasses.replace(message, update=silent),)))


def test_a_model_without_a_classifier_at_its_end_is_refused():
    class Convolutional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 10, 3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.as_tensor(self.conv(x).mean(dim=(2, 3)))

    made = scenario(model={"name": "custom", "initialisation": "given"})
    (only,) = record(resolve(made, model=Convolutional()))
    with pytest.raises(NotApplicable, match="no fully connected layer"):
        run("agic", observe(only.transcript, made.threat).split()[0])


@pytest.mark.parametrize("setting", [{"iterations": 0}, {"betta": 1}, {"shape": "cubic"}, {"label_inference": "yim"}])
def test_bad_settings_are_refused_in_one_line(setting):
    with pytest.raises(BadInput) as caught:
        make_attack("agic", setting)
    assert "\n" not in str(caught.value)
    assert next(iter(setting)) in str(caught.value)


def test_agic_says_when_its_layer_weights_have_nothing_to_work_on():
    assert "ReLU" in run("agic", observation()).notes[0]
    assert "no convolution" in run("agic", observation(model={"name": "mlp"})).notes[0]


# Found by trying ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("rate", [1e-2, 1e-4])
def test_the_squared_distance_does_not_depend_on_the_learning_rate(rate):
    found = run("dlg-adam", observation(federations=[{**FEDAVG, "learning_rate": rate}]), iterations=150)
    assert found.objective < 0.05 * found.trace.objective[0]
    assert not found.notes


def test_a_diverged_optimisation_is_said_so():
    class Steep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(64, 10)

        def forward(self, x: Tensor) -> Tensor:
            return torch.as_tensor(self.fc(x.flatten(1) ** 4))

    made = scenario(model={"name": "custom", "initialisation": "given"}, threat={"knows_labels": True})
    (only,) = record(resolve(made, model=Steep()))
    with pytest.raises(NotApplicable, match="diverged at learning_rate"):
        run("dlg-adam", observe(only.transcript, made.threat).split()[0], learning_rate=1e20)


@pytest.mark.parametrize("classes", [2, 3])
def test_few_classes_are_told_apart(classes):
    images = torch.rand((12, 1, 8, 8), generator=generator(0, "few"))
    data = Dataset.from_tensors(images, torch.arange(12) % classes)
    made = scenario(data={"name": "custom", "split": "train"}, federations=[{"name": "f", "clients": 8, "examples": 8}])
    (only,) = record(resolve(made, dataset=data))
    for seen in observe(only.transcript, made.threat).split():
        assert run("invg", seen, iterations=1).labels.equal(only.truth.labels[0, seen.messages[0].client])


def test_a_coarse_learning_rate_is_noted():
    assert "advises against" in run("agic", observation(federations=[{**FEDAVG, "learning_rate": 0.05}])).notes[-1]


def test_agic_takes_adam_as_its_paper_does_and_agic_plus_as_it_was_tuned():
    own, epochs, plus = (make_attack(name).settings() for name in ("agic", "agic-epochs", "agic-plus"))
    assert (own["signed"], own["schedule"]) == (epochs["signed"], epochs["schedule"]) == (False, "constant")
    assert (plus["signed"], plus["schedule"]) == (True, "linear")


def test_parameters_that_the_loss_does_not_use_are_left_alone():
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(64, 10)
            self.spare = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.as_tensor(self.fc(torch.sigmoid(x).flatten(1)))

    made = scenario(
        model={"name": "custom", "initialisation": "given"},
        federations=[{**FEDAVG, "weight_decay": 0.1, "learning_rate": 0.1}],
        threat={"knows_labels": True},
    )
    (only,) = record(resolve(made, model=Spare()))
    seen = observe(only.transcript, made.threat).split()[0]
    assert not seen.messages[0].update.tensors["spare.weight"].any()
    attack = make_attack("invg", {"iterations": 1})
    assert isinstance(attack, GradientInversion)
    prepared = attack.prepare(seen, "cpu")
    victims = seen.task_info.normalise(only.truth.inputs[0, 0])
    value, _ = attack.make_engine(prepared)(victims)
    assert value.item() == pytest.approx(0, abs=1e-4)
