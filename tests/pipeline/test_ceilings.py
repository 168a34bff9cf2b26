"""Ceilings in audits: what they make of verdicts, limits and reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fedaudit
from fedaudit.results import AuditResult, CeilingResult
from tests.conftest import Command, refused

FEDAVG = {"name": "f", "algorithm": "fedavg", "clients": 2, "batch_size": 2, "local_steps": 2, "learning_rate": 0.1}
BASE: dict[str, Any] = {
    "data": {"name": "digits"},
    "model": {"name": "lenet"},
    "federations": [{**FEDAVG}],
    "attacks": [{"name": "invg", "iterations": 2, "restarts": 1}],
    "evaluation": {"controls": False, "max_updates": 1, "ceiling": True},
}
NOISE = [{"name": "d", "client_defence": {"name": "gradient-noise", "variance": 1.0}}]


def audited(**changes: Any) -> AuditResult:
    limits = changes.pop("fail_above", None)
    return fedaudit.audit({**BASE, **changes}, progress=False, fail_above=limits).result


@pytest.fixture(scope="module")
def plain() -> AuditResult:
    return audited(fail_above={"ceiling": 20})


def test_attacks_that_fail_where_the_information_is_there(plain: AuditResult) -> None:
    summary, ceiling = plain.summaries[0], plain.ceilings[0]
    assert ceiling.verdict == "high"
    assert ceiling.low is not None
    assert ceiling.guess is not None
    assert ceiling.low > ceiling.guess + 20
    assert summary.verdict == "present, not extracted"
    assert summary.had_power is False
    assert "the information is in the update" in summary.headline
    values = [e.value or 0.0 for e in ceiling.examples]
    assert values == sorted(values, reverse=True)
    assert ceiling.worst is not None
    assert ceiling.worst.value == values[0] > (ceiling.worst.mean or 0) == pytest.approx(ceiling.low, abs=0.1)
    assert ceiling.worst.n == 4 * ceiling.updates
    assert ceiling.examples[0].true_image
    assert len(ceiling.examples[0].others) == 3


@pytest.mark.slow
def test_a_ceiling_tells_the_most_exposed_of_each_class() -> None:
    """The oracle groups the examples by hand, by the labels of the recording's truth."""
    parity = {"data": {"name": "digits-parity"}, "evaluation": {**BASE["evaluation"], "max_updates": 2}}
    recording = fedaudit.simulate({**BASE, **parity}, progress=False)
    made = audited(**parity).ceilings[0]
    values: dict[int, list[float]] = {}
    for one in made.examples:
        assert one.value is not None
        values.setdefault(int(recording.truth.labels[one.round, one.client][one.place]), []).append(one.value)
    assert made.worst is not None
    assert sorted(values) == [0, 1]
    assert [(g.label, g.n, g.value, pytest.approx(g.mean)) for g in made.worst.by_group] == [
        (label, len(own), max(own), pytest.approx(sum(own) / len(own))) for label, own in sorted(values.items())
    ]
    assert "; by class (2, of " in made.worst.text


def test_more_precision_is_worth_more(plain: AuditResult) -> None:
    lows = [point.low for point in plain.ceilings[0].curve]
    assert lows == sorted(lows, reverse=True)


def test_a_limit_is_exceeded_by_what_any_attack_could_have(plain: AuditResult) -> None:
    (limit,) = plain.thresholds
    assert (limit.outcome, limit.exceeded) == ("fail", True)
    assert limit.worst == plain.ceilings[0].examples[0].value


@pytest.mark.slow
def test_probes_go_on_until_a_limit_is_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    fedsgd = [{"name": "f", "algorithm": "fedsgd", "clients": 2, "batch_size": 4}]
    noise = [{"name": "d", "client_defence": {"name": "gradient-noise", "variance": 1e-6}}]
    most = audited(federations=fedsgd, defences=noise).ceilings[0].examples[0].value
    assert most is not None
    monkeypatch.setattr("fedaudit.ceiling.estimate.WHOLE", 0)
    for limit, outcome in ((most - 4, "fail"), (most + 4, "pass")):
        result = audited(federations=fedsgd, defences=noise, fail_above={"ceiling": limit})
        assert not result.ceilings[0].exact
        assert all(e.low is not None and e.high is not None for e in result.ceilings[0].examples)
        assert result.thresholds[0].outcome == outcome
        assert result.scenario["evaluation"]["ceiling"] == limit
    monkeypatch.setattr("fedaudit.ceiling.estimate.BUDGET", 0.0)
    monkeypatch.setattr("fedaudit.pipeline.ceilings.BUDGET", 0.0)
    (threshold,) = audited(federations=fedsgd, fail_above={"ceiling": 99}).thresholds
    assert threshold.outcome == "not tested"
    assert "don't tell of single ones" in (threshold.reason or "")


@pytest.mark.slow
def test_where_noise_leaves_little_nothing_is_demonstrated() -> None:
    result = audited(defences=NOISE, fail_above={"ceiling": 20})
    assert result.ceilings[0].verdict == "low"
    assert result.summaries[0].verdict == "not demonstrated"
    assert "little to find" in result.summaries[0].headline
    assert result.thresholds[0].outcome == "pass"


@pytest.mark.parametrize(
    ("noise", "where", "proven"), [(20.0, "local", True), (0.5, "local", False), (20.0, "central", False)]
)
def test_noise_with_a_low_certificate_leaves_little(noise: float, where: str, proven: bool) -> None:
    defence = {"name": "dp", "where": where, "clip": 1.0, "noise": noise, "epsilon": None}
    result = audited(
        defences=[{"name": "d", "client_defence": defence}], evaluation={"controls": False, "ceiling": False}
    )
    history, summary = result.federations[0].history, result.summaries[0]
    assert history is not None
    assert history.certificate is not None
    assert history.certificate.central == (where == "central")
    assert (history.certificate.success <= 2 / history.certificate.candidates) == (noise > 10)
    assert summary.verdict == ("not demonstrated" if proven else "inconclusive")
    assert ("nobody can pick the right one" in summary.headline) == proven


def test_drawing_alone_proves_nothing_of_an_update_that_holds_its_victim() -> None:
    """Next to no noise, and one example of very many in a step: the certificate of all is low, that of one isn't."""
    drawn = {"level": "sample", "sampling": "poisson", "clip": 1.0, "noise": 0.001, "epsilon": None}
    federation = {**FEDAVG, "algorithm": "fedsgd", "local_steps": None, "clients": 1, "examples": None, "batch_size": 1}
    result = audited(
        federations=[federation],
        defences=[{"name": "d", "client_defence": {"name": "dp", **drawn}}],
        evaluation={"controls": False, "ceiling": False, "max_updates": 1},
    )
    history = result.federations[0].history
    assert history is not None
    assert history.certificate is not None
    assert history.certificate.held is not None
    assert history.certificate.success < 3 / history.certificate.candidates
    assert history.certificate.held > 0.9
    assert "nobody can pick" not in result.summaries[0].headline


def test_without_a_derivative_the_reason_is_told() -> None:
    result = audited(defences=[{"name": "d", "client_defence": {"name": "sign"}}], fail_above={"ceiling": 20})
    assert "signs alone" in (result.ceilings[0].reason or "")
    assert result.summaries[0].verdict == "inconclusive"
    assert result.thresholds[0].outcome == "not tested"


def test_a_short_attack_pays_for_no_ceiling() -> None:
    result = audited(evaluation={"controls": False, "max_updates": 1}, fail_above={"psnr": 90})
    assert not result.ceilings
    assert result.summaries[0].verdict == "inconclusive"


def test_cells_of_tables() -> None:
    table = {"data": {"name": "breast-cancer"}, "model": {"name": "mlp"}}
    attack = [{"name": "tableak", "iterations": 2}]
    result = audited(**table, federations=[{**FEDAVG, "algorithm": "fedsgd", "local_steps": None}], attacks=attack)
    ceiling = result.ceilings[0]
    assert ceiling.unit == "share of cells"
    assert ceiling.low == pytest.approx(1, abs=0.01)
    assert ceiling.guess is not None
    assert 0.1 < ceiling.guess < 0.6


@pytest.mark.slow
def test_the_command_computes_ceilings_alone(tmp_path: Path, command: Command) -> None:
    scenario = tmp_path / "s.yaml"
    scenario.write_text(
        "{data: {name: digits}, model: {name: lenet}, federations: [{name: f, algorithm: fedsgd, clients: 2, "
        "batch_size: 1}]}\n"
    )
    done = command("ceiling", scenario, "--out", tmp_path / "out", "--fail-above", "ceiling=20")
    assert done.code == 1
    assert "whoever attacks could rebuild images" in done.out
    result = AuditResult.load(tmp_path / "out" / "results.json")
    changes = result.ceilings[0].changes
    assert changes[0].text == "nothing is changed"
    known = [change.low for change in changes[1:] if change.low is not None]
    assert known == sorted(known)
    assert min(known) < (changes[0].low or 0)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<title>What any attack could get: audit</title>" in page
    assert "no attack was run" in page
    assert "fedaudit ceiling scenario.yaml" in page
    for word in ("No attack was aimed", 'id="results"', 'id="mapping"', "fedaudit verify", "--fail-above psnr"):
        assert word not in page


def test_of_a_dear_network_no_change_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedaudit.pipeline.run import ceilings_of
    from fedaudit.scenario.scenario import Scenario

    monkeypatch.setattr("fedaudit.pipeline.ceilings._ALONE", 0.0)
    (ceiling,) = ceilings_of(Scenario.model_validate(BASE)).result.ceilings
    assert ceiling.updates == 1
    told = {change.text: change for change in ceiling.changes}
    assert told["nothing is changed"].low is not None
    assert told["numbers are rounded to 8 bits"].low is not None
    assert "too long" in (told["fc.weight isn't sent"].reason or "")


@pytest.mark.slow
def test_of_a_recording_on_disk(tmp_path: Path, command: Command) -> None:
    fedaudit.simulate({**BASE, "evaluation": {}}, out=tmp_path / "t", progress=False)
    assert command("ceiling", tmp_path / "t", "--out", tmp_path / "out").code == 0
    assert AuditResult.load(tmp_path / "out" / "results.json").ceilings[0].verdict == "high"


def test_without_the_truth_counting_is_left(tmp_path: Path, command: Command) -> None:
    few = {"model": {"name": "logistic"}, "federations": [{"name": "f", "clients": 1, "batch_size": 16}]}
    fedaudit.simulate({**BASE, **few, "evaluation": {}}, out=tmp_path / "t", progress=False)
    for path in (tmp_path / "t").rglob("*truth*"):
        path.rename(tmp_path / path.name)
    done = command("ceiling", tmp_path / "t", "--out", tmp_path / "out")
    refused(done, "no ground truth")
    assert "(16) are 1,024 numbers, and 650 are sent, so 37 % of their directions are lost" in " ".join(
        done.err.split()
    )


def test_what_is_shared_shows_no_example(plain: AuditResult) -> None:
    from fedaudit.report.share import shareable

    (shared,) = shareable(plain).ceilings
    assert isinstance(shared, CeilingResult)
    assert shared.low == plain.ceilings[0].low
    assert not shared.examples


@pytest.mark.slow
def test_a_limit_on_tables_is_a_share() -> None:
    table = {
        "data": {"name": "breast-cancer"},
        "model": {"name": "mlp"},
        "attacks": [{"name": "tableak", "iterations": 2}],
    }
    federations = [{"name": "f", "algorithm": "fedsgd", "clients": 2, "batch_size": 2}]
    for limit, outcome in ((20, "not tested"), (0.5, "fail")):
        (threshold,) = audited(**table, federations=federations, fail_above={"ceiling": limit}).thresholds
        assert threshold.outcome == outcome


@pytest.mark.slow
def test_no_report_is_overwritten_and_none_verified(tmp_path: Path, command: Command) -> None:
    scenario = tmp_path / "s.yaml"
    scenario.write_text(
        "{data: {name: digits}, model: {name: lenet}, federations: [{name: f, clients: 2, batch_size: 1}]}\n"
    )
    assert command("ceiling", scenario, "--out", tmp_path / "out").code == 0
    refused(command("ceiling", scenario, "--out", tmp_path / "out"), "holds another report")
    refused(
        command("ceiling", scenario, "--mean", "0.5", "--std", "0.5", "--out", tmp_path / "b"),
        "--mean is for a recording",
    )
    refused(command("verify", tmp_path / "out"), "holds ceilings alone")
