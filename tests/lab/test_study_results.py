"""What a study's tables say: cells, what is missing, the files of a result."""

from __future__ import annotations

import base64
import csv
import html
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.stats
from matplotlib import pyplot
from matplotlib.collections import PathCollection

from fedaudit.evaluation import Interval
from fedaudit_lab.studies.analysis import analyse, values
from fedaudit_lab.studies.drawing import figure, frontier, markdown, write
from fedaudit_lab.studies.store import Row
from tests.lab.test_studies import TINY, as_file, row, rows_of, tiny


def test_a_joint_attack_is_paired_with_what_it_was_played_beside_in_the_same_repetition():
    """Where one attack looks at single updates and the other at all of them together, no update is in both."""
    joint = rows_of([30.0, 32.0, 31.5], [20.0, 21.0, 20.5])
    for made in joint:
        assert made.outcome is not None
        if made.point["attack"] == "agic":
            made.outcome["updates"][0] |= {"round": None}
    (claim,) = analyse(tiny(), "cpu", joint).claims
    assert claim.difference is not None
    assert (claim.outcome, claim.difference.n) == ("holds", 3)
    assert claim.difference.mean == pytest.approx(32 / 3)


def test_a_study_can_be_about_any_metric_of_any_kind_of_finding():
    def local(attack: str, repetition: int, accuracy: float, distance: float) -> Row:
        made = row({"attack": attack, "iterations": "1"}, repetition)
        assert made.outcome is not None
        made.outcome["updates"][0] |= {
            "round": None, "metrics": {"local_accuracy": accuracy, "relative_distance": distance},
        }  # fmt: skip
        return made

    rows = [local("agic", i, 0.9 + i / 100, 0.1) for i in range(3)]
    rows += [local("invg", i, 0.8, 0.3 + i / 100) for i in range(3)]
    claim = {"text": "t", "better": {"attack": "agic"}, "worse": {"attack": "invg"}}
    study = tiny(metric="local_accuracy", claims=[claim, {**claim, "metric": "relative_distance"}], published=[])
    analysis = analyse(study, "cpu", rows)
    assert [cell.value.mean for cell in analysis.cells if cell.value] == pytest.approx([0.8, 0.91])
    assert [(c.metric, c.outcome) for c in analysis.claims] == [
        ("local_accuracy", "holds"), ("relative_distance", "holds"),
    ]  # fmt: skip
    assert analysis.claims[1].difference is not None
    assert analysis.claims[1].difference.mean == pytest.approx(0.21)
    assert "local accuracy: mean over updates" in markdown(analysis)


@pytest.mark.slow
def test_a_finished_study_can_be_drawn_by_another_metric(command, tmp_path):
    path = as_file(tmp_path)
    assert command("study", "run", path, "--scale", "smoke", "--out", tmp_path / "out", "--workers", 1).code == 0
    shown = (tmp_path / "out/pictures.png").read_bytes()
    assert base64.b64encode(shown).decode() in (tmp_path / "out/result.html").read_text()
    assert command("study", "report", tmp_path / "out", "--metric", "ssim").code == 0
    assert "SSIM: mean over updates" in (tmp_path / "out/result-ssim.md").read_text()
    assert "PSNR, dB: mean over updates" in (tmp_path / "out/result.md").read_text()
    wrong = command("study", "report", tmp_path / "out", "--metric", "simm")
    assert (wrong.code, "did you mean 'ssim'" in wrong.err) == (2, True)


def test_less_is_better_for_errors():
    analysis = analyse(tiny(metric="mse"), "cpu", rows_of([1, 1, 2], [3, 3, 5]))
    assert [c.outcome for c in analysis.claims] == ["holds"]


def test_a_cell_is_the_mean_over_updates_of_the_mean_over_images():
    rows = [row({"attack": "agic", "iterations": "1"}, 0, 10, 20), row({"attack": "agic", "iterations": "1"}, 1, 30)]
    (cell,) = analyse(tiny(), "cpu", rows).cells
    assert cell.value is not None
    assert (cell.value.mean, cell.value.n, cell.images) == (22.5, 2, 3)
    assert cell.published == 30
    assert sorted(values("psnr", rows).values()) == [15, 30]


def test_what_is_missing_says_why():
    point = {"attack": "agic", "iterations": "1"}
    (cell,) = analyse(tiny(), "cpu", [row(point, 0, reason="labels can't be inferred")]).cells
    assert cell.value is None
    assert cell.missing == "labels can't be inferred"
    (cell,) = analyse(tiny(metric="lpips"), "cpu", [row(point, 0, 1.0)]).cells
    assert cell.missing == "lpips isn't available here"
    failed = Row("k", point, 0, "failed", 2, None, None, "no memory")
    analysis = analyse(tiny(), "cpu", [failed])
    assert analysis.cells[0].missing == "1 of 1 trials failed"
    assert "no memory" in markdown(analysis)


def test_results_are_written_in_every_form(tmp_path):
    analysis = analyse(tiny(), "cpu", rows_of([20, 21, 22], [10, 11, 13]))
    write(analysis, tmp_path, shown=b"the trials' images")
    assert base64.b64encode(b"the trials' images").decode() in (tmp_path / "result.html").read_text()
    told = (tmp_path / "result.md").read_text()
    assert "21.0 [18.5, 23.5]; n=3 (3 images, 3 seeds); paper 30" in told
    assert "**holds**" in told
    table = (tmp_path / "result.csv").read_text().splitlines()
    assert table[0].startswith("attack,iterations,psnr,median,low,high,n")
    assert len(table) == 3
    assert "</svg>holds</span>" in (tmp_path / "result.html").read_text()
    drawn = "Clients' examples: drawn by the seed, of every class (if there are classes) in turn."
    assert drawn in (tmp_path / "result.md").read_text()
    assert drawn in html.unescape((tmp_path / "result.html").read_text())
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_a_claim_can_be_decided_again_from_the_values_alone(tmp_path):
    write(analyse(tiny(also=["ssim"]), "cpu", rows_of([20, 21.5, 22], [10, 11, 13])), tmp_path)
    with (tmp_path / "values.csv").open() as file:
        told = list(csv.DictReader(file))
    with (tmp_path / "claims.csv").open() as file:
        claim = next(row for row in csv.DictReader(file) if row["n"])
    assert [row["psnr"] for row in told] == [row["ssim"] for row in told]
    psnr = {(row["attack"], row["repetition"]): float(row["psnr"]) for row in told}
    differences = [psnr["agic", str(i)] - psnr["invg", str(i)] for i in range(3)]
    t = scipy.stats.ttest_1samp(differences, 0).confidence_interval(0.95)
    assert [float(claim[name]) for name in ("difference", "low", "high")] == pytest.approx([sum(differences) / 3, *t])


def test_a_place_on_the_axis_is_the_same_in_every_panel(monkeypatch):
    """Where a panel lacks a column, what it has must not move away from the labels below."""
    drawn: list[Any] = []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    widths = {str(width): {"model.width": width} for width in range(1, 10)}
    axes = {**TINY["axes"], "width": widths}
    rows = [
        row({"attack": attack, "iterations": iterations, "width": width}, 0, 20.0)
        for attack in axes["attack"]
        for iterations in axes["iterations"]
        for width in axes["width"]
        if (attack, iterations) != ("invg", "1")
    ]
    assert figure(analyse(tiny(axes=axes, claims=[]), "cpu", rows))
    (drawing,) = drawn
    panels = drawing.axes
    assert [len(panel.get_xticks()) for panel in panels] == [2, 2]
    assert panels[0].get_xlim() == panels[1].get_xlim()


@pytest.mark.parametrize(
    ("names", "slanted"),
    [
        (["loss", "gradient norm", "shadow models", "agrevader"], True),
        (["1", "2"], False),
        (["x" * 30, "y" * 30], True),
    ],
)
def test_names_below_a_figure_do_not_run_into_each_other(monkeypatch, names, slanted):
    drawn: list[Any] = []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    axes: dict[str, dict[str, Any]] = {
        "data": {str(i): {"seed": i} for i in range(2)},
        "width": {str(width): {"model.width": width} for width in range(1, 8)},
        "attack": {name: {"attacks": [{"name": "invg"}]} for name in names},
    }
    points = itertools.product(axes["data"], axes["width"], names)
    rows = [row({"data": data, "width": width, "attack": attack}, 0, 20.0) for data, width, attack in points]
    assert figure(analyse(tiny(axes=axes, columns="attack", claims=[], published=[]), "cpu", rows))
    (drawing,) = drawn
    assert len(drawing.axes) == 2
    for panel in drawing.axes:
        labels = panel.get_xticklabels()
        assert (labels[0].get_rotation() != 0) == slanted
        boxes = [label.get_window_extent() for label in labels]
        assert slanted or not any(a.overlaps(b) for a, b in itertools.pairwise(boxes))


def test_leakage_is_drawn_over_the_accuracy_of_the_same_defence_wherever_it_was_measured(monkeypatch):
    drawn: list[Any] = []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    analysis = analyse(tiny(columns="iterations", claims=[], published=[]), "cpu", rows_of([20.0, 21.0], [10.0, 11.0]))
    leaks = [cell for cell in analysis.cells if cell.value]
    paid = [
        replace(
            cell,
            point=cell.point | {analysis.study.columns: "price"},
            value=None,
            others={
                "model_accuracy": Interval(mean=0.5 + i / 10, low=0.4, high=0.7, median=0.5, n=2),
                "bytes_sent": Interval(mean=8, low=8, high=8, median=8, n=2),
            },
        )
        for i, cell in enumerate(leaks)
    ]
    assert frontier(replace(analysis, cells=leaks)) is None  # nothing has a price
    assert frontier(replace(analysis, cells=[*leaks, *paid]))
    (drawing,) = drawn
    (panel,) = drawing.axes
    dots = [collection for collection in panel.collections if isinstance(collection, PathCollection)]
    places = [tuple(np.asarray(one.get_offsets())[0]) for one in dots]
    wanted = [(50 + 10 * i, cell.value.mean) for i, cell in enumerate(leaks) if cell.value]
    assert sorted(places) == [pytest.approx(place) for place in sorted(wanted)]
