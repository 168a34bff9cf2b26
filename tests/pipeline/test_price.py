"""What a defence costs: accuracy, bytes, comparisons of several defences, in results, report and studies."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import pytest
import torch

from fedaudit.pipeline.prepare import resolve
from fedaudit.pipeline.run import Audit, run_audit
from fedaudit.report import frontier
from fedaudit.report.terminal import print_summary
from fedaudit.scenario.scenario import load_scenario, scenario_from
from fedaudit.simulation.simulator import simulate
from fedaudit.utils.errors import BadInput
from fedaudit_lab.studies.analysis import analyse
from fedaudit_lab.studies.drawing import frontier as study_frontier
from fedaudit_lab.studies.drawing import markdown
from fedaudit_lab.studies.running import Task, run_trial
from fedaudit_lab.studies.spec import load_study
from fedaudit_lab.studies.store import Row

FEDERATION = {"name": "fed", "clients": 3, "examples": 30, "rounds": 2, "batch_size": 4, "keep_rounds": [1]}
VALUES: dict[str, Any] = {
    "data": {"name": "digits", "split": "train"},
    "model": {"name": "lenet", "initialisation": "uniform"},
    "federations": [{**FEDERATION, "learning_rate": 0.5}],
    "defences": [
        {},
        {"name": "few", "client_defence": {"name": "ffl", "ratio": 0.4}},
        {"client_defence": {"name": "dp", "noise": 3.0, "epsilon": None}},
    ],
    "threat": {"knows_labels": True},
    "attacks": [{"name": "invg", "iterations": 2}],
    "evaluation": {"accuracy_every": 1, "accuracy_examples": 200, "max_updates": 1, "controls": False},
}


@pytest.fixture(scope="module")
def audit() -> Audit:
    return run_audit(scenario_from(VALUES))


def test_every_defence_is_a_federation_of_its_own_on_the_same_data(audit):
    assert [f.name for f in audit.result.federations] == ["fed-none", "fed-few", "fed-dp"]
    assert [(f.aggregator, f.client_defence) for f in audit.result.federations] == [
        ("mean", "none"),
        ("mean", "ffl"),
        ("mean", "dp"),
    ]
    victims = {
        name: [
            pixels
            for path, pixels in audit.image_files.items()
            if path.startswith(f"images/{name}-") and "true" in path
        ]
        for name in ("fed-none", "fed-few", "fed-dp")
    }
    for name in ("fed-few", "fed-dp"):
        assert all(a.equal(b) for a, b in zip(victims["fed-none"], victims[name], strict=True))


def test_the_comparison_lists_the_least_leakage_first(audit, capsys):
    rows = frontier.prices(audit.result)
    leaks = [row.leak.mean for row in rows if row.leak]
    assert leaks == sorted(leaks)
    by_name = {row.federation: row for row in rows}
    assert by_name["fed-few"].bytes < by_name["fed-none"].bytes
    assert by_name["fed-dp"].epsilon is not None
    assert by_name["fed-none"].epsilon is None
    print_summary(audit.result)
    shown = capsys.readouterr().out
    table = shown[shown.index("which defence, at what price") :]
    assert table.index("fed-none") < min(table.index(row.federation) for row in rows if row.federation != "fed-none")


@pytest.mark.parametrize(
    ("by", "key"),
    [
        ("accuracy", lambda row: -row.accuracy),
        ("worst client", lambda row: -row.worst_client),
        ("bytes", lambda row: row.bytes),
        ("epsilon", lambda row: math.inf if row.epsilon is None else row.epsilon),
    ],
)
def test_the_comparison_can_be_sorted_by_what_matters(audit, by, key):
    scenario = {**audit.result.scenario, "evaluation": {**audit.result.scenario["evaluation"], "sort_by": by}}
    rows = frontier.prices(audit.result.model_copy(update={"scenario": scenario}))
    assert {row.federation for row in rows} == {row.federation for row in frontier.prices(audit.result)}
    values = [key(row) for row in rows]
    assert values == sorted(values)


@pytest.mark.slow
def test_the_report_shows_the_price(audit, tmp_path):
    page = audit.save(tmp_path).read_text()
    assert "Leakage and its price" in page
    assert 'aria-label="Leakage against price' in page
    for name in ("fed-none", "fed-few", "fed-dp"):
        assert page.count(name) > 2
    again = load_scenario(tmp_path / "scenario.yaml")
    assert [name for name, _, _ in again.runs()] == ["fed-none", "fed-few", "fed-dp"]


def test_an_undefended_audit_has_no_such_section(tmp_path):
    values = {**VALUES, "defences": {}, "evaluation": {"max_updates": 1}}
    assert "Leakage and its price" not in run_audit(scenario_from(values)).save(tmp_path).read_text()


def test_accuracy_is_that_of_the_model_after_the_round():
    made = scenario_from({**VALUES, "defences": {}})
    (federation,) = resolve(made).federations
    spec = federation.spec.model_copy(update={"keep_rounds": None})
    federation = dataclasses.replace(federation, spec=spec, accuracy_every=1, accuracy_examples=100)
    recording = simulate(federation)
    transcript, history = recording.transcript, recording.history
    assert history is not None
    model = copy.deepcopy(federation.model)
    model.load_state_dict(transcript.rounds[1].weights)  # what the server sent in the second round
    model.eval()
    held_out = federation.dataset.test
    guesses = model(federation.task_info.normalise(held_out.inputs[:100])).argmax(dim=1)
    right = guesses == held_out.targets[:100]
    assert history.rounds == [1, 2]
    assert history.accuracy[0] == pytest.approx(float(right.double().mean()))
    for data, found in zip(federation.client_data, history.per_client[0], strict=True):
        weights = torch.bincount(data.targets, minlength=10).double()
        per_class = [right[held_out.targets[:100] == c].double().mean() for c in range(10)]
        assert found == pytest.approx(float((torch.stack(per_class) * weights).sum() / weights.sum()))
    assert not any(part.training for part in model.modules())


def test_measuring_changes_nothing():
    made = scenario_from({**VALUES, "defences": {}})
    (federation,) = resolve(made).federations
    one, other = (simulate(dataclasses.replace(federation, accuracy_every=every)) for every in (1, None))
    assert one.transcript.fingerprint() == other.transcript.fingerprint()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"defences": [{}, {}]}, "both be called 'fed-none'"),
        ({"defences": []}, "one or more"),
        ({"evaluation": {"attacked_federations": ["feed"]}}, "unknown federation 'feed'; did you mean 'fed'"),
        ({"defences": [{"aggregatr": "mean"}]}, "did you mean 'aggregator'"),
    ],
)
def test_wrong_lists_are_refused(change, words):
    with pytest.raises(BadInput, match=words):
        scenario_from({**VALUES, **change})


def test_a_federation_may_only_train(tmp_path, capsys):
    second = {**FEDERATION, "name": "training", "keep_rounds": [0]}
    evaluation = {"federations": ["fed"], "updates": 1, "accuracy_every": 1}
    values = {**VALUES, "defences": {}}
    finished = run_audit(scenario_from({**values, "federations": [second, FEDERATION], "evaluation": evaluation}))
    result = finished.result
    assert {f.federation for f in result.findings} == {"fed"}
    assert [f.name for f in result.federations] == ["training", "fed"]
    assert [(row.federation, row.strongest) for row in frontier.prices(result)] == [
        ("fed", "invg"),
        ("training", "not attacked"),  # whether it leaks is unknown, so it isn't first
    ]
    page = finished.save(tmp_path).read_text()
    assert "not attacked</span>" in page
    assert "none could be run" not in page
    print_summary(result)
    assert "training   not attacked" in capsys.readouterr().out


def row(point: dict[str, str], accuracy: float, sent: int, psnr: float) -> Row:
    update = {"federation": "victims", "round": 0, "client": 0, "reason": None, "label_accuracy": None, "seconds": 1.0}
    image = {"psnr": psnr, "ssim": 0.1, "mse": 0.1, "lpips": None, "rank": 1}
    cost = {
        "parameters": sent // 4,
        "bytes": sent,
        "training": 1.0,
        "client_defence": 0.1,
        "epsilon": None,
        "stopped": None,
    }
    courses = [
        {"federation": "victims", "attacked": True, "accuracy": 0.1, **cost},
        {"federation": "training", "attacked": False, "accuracy": accuracy, **cost},
    ]
    outcome = {"updates": [{**update, "images": [image], "metrics": {}}], "courses": courses, "lpips_missing": None}
    fields = {f.name: None for f in dataclasses.fields(Row)}
    given = {"key": str(point), "point": point, "repetition": 0, "status": "done", "outcome": outcome}
    return Row(**{**fields, **given})  # type: ignore[arg-type]


def test_a_study_tells_accuracy_and_bytes_of_the_federation_that_trains():
    rows = [row({"defence": "FFL 0.2"}, 0.3, 800, 8.0), row({"defence": "FFL 1.0"}, 0.4, 4000, 20.0)]
    study = load_study("ffl/frontier")
    analysis = analyse(study, "cpu", rows)
    assert [cell.others["model_accuracy"].mean for cell in analysis.cells] == [0.3, 0.4]
    assert [cell.others["bytes_sent"].mean for cell in analysis.cells] == [800, 4000]
    assert "0.400" in markdown(analysis)
    figure = study_frontier(analysis)
    assert figure is not None
    assert figure.startswith(b"\x89PNG")
    table = analyse(
        load_study("ffl/table-4"), "cpu", [row({"setting": "cifar10 convnet", "defence": "FFL 0.2"}, 0.3, 8, 8.0)]
    )
    (cell,) = table.cells
    assert cell.value is not None
    assert (cell.value.mean, cell.published) == (0.3, 0.8442)


@pytest.mark.slow
def test_what_a_trial_keeps_of_a_federation_is_its_share_and_its_late_accuracy():
    """Of ten measurements the last two; of what was sent the part of the model's elements."""
    federation = {**FEDERATION, "rounds": 10, "keep_rounds": [0]}
    evaluation = {"updates": 1, "accuracy_every": 1, "controls": False}
    defences = {"client_defence": {"name": "ffl", "ratio": 0.4}}
    made = scenario_from({**VALUES, "federations": [federation], "defences": defences, "evaluation": evaluation})
    (kept,) = run_trial(Task("key", made.to_yaml(), None)).outcome["courses"]
    result = run_audit(made).result
    (course,) = [f.history for f in result.federations]
    assert course is not None
    assert kept["late_accuracy"] == pytest.approx(sum(course.accuracy[-2:]) / 2)
    assert kept["share"] == pytest.approx(course.parameters / result.model.parameters)
    assert 0 < kept["share"] < 1


def test_the_studies_of_the_ffl_paper_quote_it_rightly():
    """Table 2's ResNet column: the model has a quarter of the parameters that the table gives it."""
    study = load_study("ffl/table-2")
    quoted = {(p.at["model"], p.metric): p.value for p in study.published if p.at["ratio"] == "1.0"}
    assert quoted["convnet", "parameters_sent"] == pytest.approx(3_495_562, rel=0.01)
    assert quoted["convnet", "bytes_sent"] == pytest.approx(4 * 3_495_562, rel=0.01)
    assert quoted["resnet18", "parameters_sent"] == pytest.approx(4 * 11_173_962, rel=0.01)
    assert quoted["resnet18", "bytes_sent"] == pytest.approx(16 * 11_173_962, rel=0.01)
    assert quoted["convnet", None] == quoted["resnet18", None] == 1.0  # shares, which no unit moves
