"""What a malicious client's drawings say of a federation that was hardly trained, and what they are made with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedaudit.api import audit_transcript, simulate
from fedaudit.data import load_dataset
from fedaudit.evaluation.image_metrics import ssim
from fedaudit.models import Generator, GeneratorSpec, build_model
from fedaudit.pipeline.prepare import resolve
from fedaudit.pipeline.run import Audit, run_audit
from fedaudit.scenario.scenario import Scenario, scenario_from
from fedaudit.utils.errors import BadInput
from fedaudit.utils.seeds import generator
from fedaudit_catalogue.class_images import nearest_ssim
from fedaudit_catalogue.generators import DCGenerator
from fedaudit_lab.studies.analysis import analyse
from fedaudit_lab.studies.pictures import pictures
from fedaudit_lab.studies.spec import expand, study_from
from fedaudit_lab.studies.store import Row
from tests.catalogue.test_malicious_clients import QUICK, scenario, seen


def changed(made: Scenario, **changes: dict[str, Any]) -> Scenario:
    values = made.model_dump(mode="json")
    for part, settings in changes.items():
        values[part] |= settings
    return scenario_from(values)


def audited(least: float) -> Audit:
    """Return the audit of a federation of four rounds, which leaves it at about one in ten right."""
    return run_audit(changed(scenario(QUICK), evaluation={"min_accuracy": least, "controls": False}))


def test_whatever_was_drawn_in_a_federation_that_was_hardly_trained_the_verdict_is_open() -> None:
    result = audited(0.5).result
    (federation,), (summary,), (finding,) = result.federations, result.summaries, result.findings
    assert federation.history is not None
    (reached,) = federation.history.accuracy  # measured at the end, though the scenario doesn't ask for it
    assert reached < 0.5
    assert summary.verdict == "inconclusive"
    assert summary.hardly_trained == reached
    said = f"the federation was hardly trained: accuracy {reached:.2f}"
    assert said in summary.verdict_text
    assert said in summary.advice[0]
    assert said in finding.notes
    assert finding.is_leak is False


def test_it_isn_t_where_the_federation_reached_what_was_asked_of_it() -> None:
    result = audited(0.0).result
    (summary,), (finding,) = result.summaries, result.findings
    assert summary.hardly_trained is None
    assert "hardly trained" not in summary.verdict_text
    assert not finding.notes


@pytest.mark.slow
def test_images_that_anybody_would_recognise_are_no_leak_of_a_federation_that_knows_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With real threes in place of the drawings, the verdict turns on the threshold alone."""
    made = scenario({**QUICK, "keep": 8}, examples=None)
    threes = load_dataset("digits").test
    drawn = threes.inputs[threes.targets == 3][-8:]
    monkeypatch.setattr(
        "fedaudit_catalogue.attacks.gan.GANClient._draw", lambda _, codes: drawn[torch.arange(len(codes)) % 8]
    )
    (federation,) = run_audit(made).result.federations
    assert federation.history is not None
    reached = federation.history.accuracy[-1]
    found = [
        run_audit(changed(made, evaluation={"min_accuracy": least})).result.summaries[0].verdict
        for least in (reached + 0.01, max(0.0, reached - 0.01))
    ]
    assert found == ["inconclusive", "recovered"]


def test_an_attack_on_the_transcript_alone_knows_how_well_it_was_trained(tmp_path: Path) -> None:
    recording = simulate(scenario(QUICK), out=tmp_path / "t", progress=False)
    audit = audit_transcript(tmp_path / "t", attacks=["gan"], threat={"adversary": "client"}, progress=False)
    (summary,) = audit.result.summaries
    assert summary.verdict == "inconclusive"
    assert recording.history is not None
    assert summary.hardly_trained == recording.history.accuracy[-1]


def test_a_study_marks_such_cells_and_decides_nothing_by_them() -> None:
    study = study_from(
        {
            "version": 1,
            "name": "s",
            "title": "t",
            "paper": "p",
            "metric": "recognised",
            "columns": "a",
            "scenario": {"federations": [{"name": "f"}], "attacks": ["gan"]},
            "axes": {"a": {"x": {}, "y": {"data.limit": 5}}},
            "scales": {"cpu": {"states": "s", "repetitions": 4}},
            "claims": [{"text": "c", "better": {"a": "x"}, "worse": {"a": "y"}}],
        },
        "the study",
    )

    def rows(hardly: int) -> list[Row]:
        return [
            Row(
                f"{level}{i}",
                {"a": level},
                i,
                "done",
                1,
                {
                    "updates": [
                        {
                            **{"federation": "f", "round": None, "client": None, "reason": None, "seconds": 1.0},
                            **{"images": [], "metrics": {"recognised": value}},
                        }
                    ],
                    "courses": [{"federation": "f", "attacked": True, "hardly_trained": level == "y" and i < hardly}],
                },
                1.0,
                None,
            )
            for level, value in (("x", 0.9), ("y", 0.1))
            for i in range(4)
        ]

    assert [c.outcome for c in analyse(study, "cpu", rows(0)).claims] == ["holds"]
    analysis = analyse(study, "cpu", rows(2))
    assert analysis.claims[0].difference is not None
    assert analysis.claims[0].difference.n == 2, "the trials that are left"
    assert [cell.missing for cell in analysis.cells] == [None, "no evidence: hardly trained in 2 of 4 trials"]
    assert [c.outcome for c in analyse(study, "cpu", rows(4)).claims] == ["not measured"]


def test_levels_that_meet_can_change_more_and_combinations_can_be_left_out() -> None:
    values = {
        "version": 1,
        "name": "s",
        "title": "t",
        "paper": "p",
        "columns": "a",
        "scenario": {"federations": [{"name": "f"}], "attacks": ["invg"]},
        "axes": {"a": {"x": {}, "y": {"data.limit": 5}}, "b": {"u": {}, "v": {"model.width": 8}}},
        "together": [{"at": {"a": "y", "b": "v"}, "changes": {"model.width": 4}}],
        "scales": {"cpu": {"states": "s", "repetitions": 1, "leave_out": [{"a": ["y"], "b": ["u"]}]}},
    }
    trials = expand(study_from(values, "the study"), "cpu")
    found = [(t.point["a"], t.point["b"], t.scenario.model.width) for t in trials]
    assert found == [("x", "u", None), ("x", "v", 8), ("y", "v", 4)]
    scale = values["scales"]["cpu"] | {"leave_out": [{"c": ["u"]}]}  # type: ignore[index]
    for wrong in ({"together": [{"at": {"a": "z"}, "changes": {}}]}, {"scales": {"cpu": scale}}):
        with pytest.raises(BadInput, match=r"(level of a|axis)"):
            study_from(values | wrong, "the study")


@pytest.mark.slow
def test_pictures_show_every_trial_that_drew_something(tmp_path: Path) -> None:
    from PIL import Image

    study = study_from(
        {
            "version": 1,
            "name": "s",
            "title": "t",
            "paper": "p",
            "columns": "defence",
            "scenario": {"federations": [{"name": "f"}], "attacks": ["gan"]},
            "axes": {"defence": {"FedAvg": {}, "Median": {"defences.aggregator": "median"}}},
            "scales": {"cpu": {"states": "s", "repetitions": 2}},
        },
        "the study",
    )
    audit = audited(0.5)
    rows = [Row(f"{d}{i}", {"defence": d}, i, "done", 1, {}, 1.0, None) for d in ("FedAvg", "Median") for i in range(2)]
    assert pictures(study, rows, tmp_path) is None
    for row in rows[:3]:
        audit.save_data(tmp_path / "trials" / row.key)
    drawn = pictures(study, rows, tmp_path)
    assert drawn is not None
    (tmp_path / "p.png").write_bytes(drawn)
    with Image.open(tmp_path / "p.png") as image:
        wide, high = image.size
    (tmp_path / "p.png").write_bytes(pictures(study, rows[:1], tmp_path) or b"")
    with Image.open(tmp_path / "p.png") as image:
        assert image.size[0] < wide, "fewer seeds are fewer columns"
        assert image.size[1] < high, "fewer defences are fewer rows"


def test_drawings_can_have_a_label_of_their_own() -> None:
    eleventh = changed(scenario({**QUICK, "label": 10}), model={"extra_classes": 1})
    (federation,) = resolve(eleventh).federations
    assert federation.task_info.outputs == 11
    assert federation.task_info.num_classes == 10
    result = run_audit(eleventh).result
    assert result.findings[0].status == "done"
    assert result.federations[0].history is not None
    with pytest.raises(BadInput, match=r"label is 10, but the model's outputs are 0 to 9; .*extra_classes is to be 1"):
        run_audit(scenario({**QUICK, "label": 10}))
    with pytest.raises(BadInput, match="for cross-entropy"):
        resolve(changed(scenario(QUICK), model={"extra_classes": 1, "loss": "mse"}, data={"name": "diabetes"}))


@pytest.mark.parametrize("network", [DCGenerator, Generator])
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 8, 8), (1, 64, 64), (3, 30, 37), (1, 4, 5)])
def test_the_generator_makes_any_images_and_one_doesn_t_depend_on_the_others(
    network: type[DCGenerator | Generator], shape: tuple[int, int, int]
) -> None:
    torch.manual_seed(0)
    made = network(GeneratorSpec(shape, 10, 8)).eval()
    codes = torch.randn(4, 10, generator=generator(0, "codes"))
    images = made(codes).detach()
    assert images.shape == (4, *shape)
    assert 0 <= float(images.min()) <= float(images.max()) <= 1
    assert torch.allclose(made(codes[:1]), images[:1], atol=1e-6)


@pytest.mark.slow
def test_a_generator_without_transposed_convolutions_leaves_no_chessboard() -> None:
    """The share of its images' variance that is at the highest frequency of both axes."""

    def chessboard(upsampling: str) -> float:
        log = seen(scenario({**QUICK, "upsampling": upsampling, "keep": 8, "width": 32})).adversary_log
        images = log["gan/round-00001"]
        spectrum = torch.fft.fft2(images - images.mean(dim=(-2, -1), keepdim=True)).abs().square()
        return float(spectrum[..., 3:6, 3:6].sum() / spectrum.sum())  # digits are 8 by 8: 4 is Nyquist's

    assert chessboard("nearest") < 0.5 * chessboard("transposed")
    with pytest.raises(BadInput, match="multiple of 8, not 12"):
        simulate(scenario({**QUICK, "upsampling": "nearest", "width": 12}), progress=False)


def test_every_pixel_of_an_image_gets_a_gradient_from_the_discriminator() -> None:
    model = build_model("strided-cnn", input_shape=(1, 28, 28), outputs=11)
    images = torch.rand(2, 1, 28, 28, generator=generator(0, "images"), requires_grad=True)
    torch.nn.functional.cross_entropy(model(images), torch.tensor([3, 3])).backward()
    assert images.grad is not None
    assert float((images.grad != 0).double().mean()) == 1


def test_real_images_are_compared_with_the_nearest_other_one() -> None:
    real = torch.rand(6, 1, 12, 12, generator=generator(0, "real"))
    real[4] = real[0] + 0.01  # its nearest
    found = nearest_ssim(real[:1], real, apart=True)
    assert found == pytest.approx(float(ssim(real[:1], real[4:5])))
    assert nearest_ssim(real[:1], real, apart=False) == pytest.approx(1)
    assert nearest_ssim(real[:1], real[:1], apart=True) is None
