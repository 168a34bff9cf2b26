"""The main job from the outside: the command line, Python, results that repeat, runs that resume."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator
from torch import Tensor, nn

import fedaudit
from fedaudit.attacks.inversion.methods import InvG
from fedaudit.cli import main
from fedaudit.results import AuditResult

pytestmark = pytest.mark.usefixtures("kept_workers")

ROOT = Path(__file__).parents[2]
SMALL: dict[str, Any] = {
    "data": {"name": "digits"},
    "model": {"name": "convnet-small", "width": 4},
    "federations": [
        {"name": "fedsgd", "clients": 2, "examples": 2},
        {"name": "fedavg", "algorithm": "fedavg", "clients": 1, "examples": 2, "local_steps": 2},
    ],
    "attacks": [{"name": "invg", "iterations": 10}, {"name": "agic", "iterations": 10}],
}


def command(*words: object, code: int = 0) -> None:
    with pytest.raises(SystemExit) as stopped:
        main_with(["fedaudit", *map(str, words)])
    assert stopped.value.code == code


def main_with(argv: list[str]) -> None:
    before = sys.argv
    sys.argv = argv
    try:
        main()
    finally:
        sys.argv = before


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if k != "timing"}
    return [without_times(v) for v in value] if isinstance(value, list) else value


def results(folder: Path) -> Any:
    return without_times(json.loads((folder / "results.json").read_text()))


@pytest.fixture(scope="module")
def scenario_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scenario") / "small.yaml"
    path.write_text(json.dumps(SMALL))  # JSON is YAML
    return path


@pytest.fixture(scope="module")
def audited(scenario_file: Path) -> Path:
    out = scenario_file.parent / "audit"
    command("audit", scenario_file, "--out", out, "--workers", 1)
    return out


# Command line -------------------------------------------------------------------------------------------------------


def test_audit_writes_everything(audited):
    assert {p.name for p in audited.iterdir()} == {"findings", "images", "report.html", "results.json", "scenario.yaml"}
    found = results(audited)
    assert [(s["federation"], s["attack"], s["images"]) for s in found["summaries"]] == [
        ("fedsgd", "invg", 2), ("fedsgd", "agic", 2), ("fedavg", "invg", 2), ("fedavg", "agic", 2),
    ]  # fmt: skip
    for finding in found["findings"]:
        for image in finding["images"]:
            assert (audited / image["true_image"]).is_file()
            assert (audited / image["reconstruction"]).is_file()
    page = (audited / "report.html").read_text()
    assert "<html" in page
    drawn = "examples: drawn by the seed, of every class (if there are classes) in turn"
    assert all(drawn in federation["description"] for federation in found["federations"])
    assert page.count(drawn) == 2
    assert not re.search(r'(src|href)="https?://', page)


def test_results_validate_against_the_published_schema(audited):
    schema = json.loads((ROOT / "docs" / "reference" / "results.schema.json").read_text())
    Draft202012Validator.check_schema(schema)
    Draft202012Validator(schema).validate(json.loads((audited / "results.json").read_text()))
    with pytest.raises(Exception, match="required"):
        Draft202012Validator(schema).validate({"schema_version": 3})


def without_redundancies(schema: Any) -> Any:
    """Return the schema without what some versions of pydantic say and others leave out, for it goes without saying."""
    if isinstance(schema, list):
        return [without_redundancies(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    spoken = {"additionalProperties": True, "enum": [schema.get("const")]}
    return {k: without_redundancies(v) for k, v in schema.items() if k not in spoken or v != spoken[k]}


def test_the_published_schema_is_the_code_s():
    published = json.loads((ROOT / "docs" / "reference" / "results.schema.json").read_text())
    assert without_redundancies(published) == without_redundancies(AuditResult.model_json_schema()), "run 'make schema'"


@pytest.mark.slow
def test_repeating_the_resolved_scenario_gives_the_same_numbers_with_any_number_of_workers(audited, tmp_path):
    command("audit", audited / "scenario.yaml", "--out", tmp_path / "again", "--workers", 2)
    again = results(tmp_path / "again")
    assert again == results(audited)
    for name in ("fedavg-0-0-1-agic.png", "fedsgd-0-1-0-invg.png"):
        assert (tmp_path / "again/images" / name).read_bytes() == (audited / "images" / name).read_bytes()


@pytest.mark.slow
def test_another_seed_gives_other_numbers(audited, scenario_file, tmp_path):
    command("audit", scenario_file, "--seed", 1, "--out", tmp_path, "--workers", 1)
    assert results(tmp_path)["findings"] != results(audited)["findings"]


@pytest.mark.slow
def test_the_two_step_way_gives_the_same_numbers(audited, scenario_file, tmp_path, capsys):
    command("simulate", scenario_file, "--federation", "fedavg", "--out", tmp_path / "t")
    command("attack", tmp_path / "t", "--attack", "agic", "--set", "iterations=10", "--out", tmp_path / "a")
    one = [f for f in results(audited)["findings"] if (f["attack"], f["federation"]) == ("agic", "fedavg")]
    assert results(tmp_path / "a")["findings"] == one
    capsys.readouterr()
    (tmp_path / "t/truth.safetensors").rename(tmp_path / "truth")
    command("attack", tmp_path / "t", "--attack", "agic", "--set", "iterations=10", "--out", tmp_path / "b")
    assert "not evaluated" in capsys.readouterr().out
    rows = json.loads((tmp_path / "b/findings.json").read_text())
    assert rows[0]["objective"] == one[0]["objective"]
    recovered = sorted((tmp_path / "b" / name).read_bytes() for name in rows[0]["images"])
    assert recovered == sorted((audited / i["reconstruction"]).read_bytes() for i in one[0]["images"])
    command("attack", tmp_path / "t", "--attack", "agic", "--set", "iterations=10", "--out", tmp_path / "b",
            "--truth", tmp_path / "truth")  # fmt: skip
    assert results(tmp_path / "b")["findings"] == one


@pytest.mark.slow
def test_an_interrupted_audit_goes_on_where_it_stopped(scenario_file, audited, tmp_path, monkeypatch):
    ran: list[str] = []
    original = InvG._run

    def counted(self: InvG, seen: Any, *rest: Any) -> Any:
        if self.name == "invg" and not seen.federation.startswith("control") and "-power-" not in seen.federation:
            ran.append(f"{seen.federation} {seen.messages[0].client}")
        if len(ran) == 2:
            raise KeyboardInterrupt
        return original(self, seen, *rest)

    monkeypatch.setattr(InvG, "_run", counted)
    command("audit", scenario_file, "--out", tmp_path, "--workers", 1, code=130)
    assert not (tmp_path / "results.json").exists()
    command("audit", scenario_file, "--out", tmp_path, "--workers", 1)
    assert ran == ["fedsgd 0", "fedsgd 1", "fedsgd 1", "fedavg 0"]
    assert results(tmp_path) == results(audited)


def test_an_attack_that_does_not_apply_is_reported_and_not_an_error(tmp_path, capsys):
    command("audit", "--set", "data.name=breast-cancer", "--set", "model.name=mlp", "--out", tmp_path)
    assert "rows of a table" in capsys.readouterr().out
    assert {s["verdict"] for s in results(tmp_path)["summaries"]} == {"not applicable"}
    assert "rows of a table" in (tmp_path / "report.html").read_text()


def test_a_client_that_sees_no_update_is_reported(scenario_file, tmp_path):
    command("audit", scenario_file, "--set", "threat.adversary=client", "--out", tmp_path)
    found = results(tmp_path)
    assert {f["status"] for f in found["findings"]} == {"not applicable"}
    assert [f["updates_observed"] for f in found["federations"]] == [0, 0]


def test_list_is_stable_for_programs(capsys):
    command("list", "--json")
    shown = json.loads(capsys.readouterr().out)
    assert list(shown) == ["attacks", "defences", "behaviours", "models", "datasets", "studies"]
    for kind, entries in shown.items():
        assert isinstance(entries, list), kind
        assert all(entry["name"] and entry["summary"] for entry in entries), kind
    assert all(a["paper"] and a["threat_model"] and a["needs"] for a in shown["attacks"])
    assert {"photos", "cifar10", "svhn", "emnist-letters"} <= {d["name"] for d in shown["datasets"]}
    command("list", "attacks", "--json")
    assert json.loads(capsys.readouterr().out) == {"attacks": shown["attacks"]}


def test_list_and_doctor_speak_to_people(capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("FEDAUDIT_DATA", raising=False)
    command("list")
    assert "agic" in capsys.readouterr().out
    command("doctor")
    told = capsys.readouterr().out
    for word in ("torch", "threads", "GPU", "photos", "cifar10", "LPIPS"):
        assert word in told


def test_help_stays_light():
    heavy = (
        "import sys; import fedaudit.cli; print(sorted({'torch','matplotlib','pydantic','scipy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Python -------------------------------------------------------------------------------------------------------------


class Own(nn.Module):
    """A user's own network, with a dropout and a name that nobody registered."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Dropout(0.1), nn.Flatten())
        self.head = nn.Linear(6 * 64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.head(self.body(x)))


def own_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, label_smoothing=0.1)


def test_a_user_s_own_model_loss_and_data(tmp_path):
    start = torch.Generator().manual_seed(0)
    images, labels = torch.rand((30, 1, 8, 8), generator=start), torch.arange(30) % 3
    model = Own()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    state = torch.random.get_rng_state()
    finished = fedaudit.audit(
        model=model,
        data=(images, labels),
        loss=own_loss,
        federations=[{"name": "mine", "clients": 2, "examples": 2}],
        attacks=[{"name": "agic", "iterations": 20}],
        out=tmp_path,
        fail_above={"psnr": 99.0},
        progress=False,
    )
    assert all(t.equal(before[n]) for n, t in model.state_dict().items())
    assert torch.random.get_rng_state().equal(state)
    assert finished.result.summaries[0].images == 2
    assert any("dropout" in note for note in finished.result.findings[0].notes)
    assert finished.result.model.name == "custom"
    assert not finished.exceeded
    assert (tmp_path / "report.html").is_file()
    with pytest.raises(fedaudit.utils.errors.BadInput, match="user's own"):
        fedaudit.audit(tmp_path / "scenario.yaml", progress=False)


def test_a_model_whose_outputs_do_not_fit_is_refused():
    with pytest.raises(fedaudit.utils.errors.BadInput, match=r"\(1, 4\)"):
        fedaudit.audit(model=Own(), data=(torch.rand(8, 1, 8, 8), torch.arange(8) % 4), progress=False)


def test_a_trained_model_is_reported_with_its_accuracy(tmp_path):
    scenario = {
        **SMALL,
        "model": {"name": "mlp", "training": {"epochs": 2}},
        "attacks": [{"name": "invg", "iterations": 3}],
    }
    finished = fedaudit.audit(scenario, progress=False)
    accuracy = re.search(r"2 epochs on \d+ examples, test accuracy (0\.\d+)", finished.result.model.trained)
    assert accuracy
    assert float(accuracy[1]) > 0.7


@pytest.mark.slow
def test_the_example_script_runs(tmp_path):
    script = ROOT / "examples" / "own_model.py"
    done = subprocess.run(
        [sys.executable, str(script), "--iterations", "5", "--out", str(tmp_path)],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "report.html").is_file()
    assert "agic" in done.stdout


@pytest.mark.parametrize(
    ("scenario", "script", "changes", "told"),
    [
        (
            "honest-mnist.yaml",
            "distances.py",
            ["federations.f.examples=40", "federations.f.rounds=2", "federations.f.keep_rounds=[0,1]"],
            ["    1", "    2", "of 10"],
        ),
        (
            "fragments.yaml",
            "fragments.py",
            [
                "model.name=mlp",
                "model.batch_norm=eval",
                "federations.training.rounds=2",
                "federations.training.clients=10",
                "federations.training.clients_per_round=4",
                "federations.training.examples=200",
            ],
            ["hidden.weight ", "fc.bias ", "%"],
        ),
    ],
)
@pytest.mark.slow
def test_the_examples_about_updates_read_a_transcript(scenario, script, changes, told, tmp_path):
    seen = tmp_path / "transcript"
    small = ["data.name=digits", *changes]
    command("simulate", ROOT / "examples" / scenario, "--out", seen, *(f"--set={c}" for c in small))
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / script), str(seen)],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [words for words in told if words not in done.stdout] == []


@pytest.mark.slow
def test_the_default_audit_finds_what_the_readme_says(tmp_path):
    command("audit", "--out", tmp_path, "--set", "attacks.invg.iterations=300", "--set", "attacks.agic.iterations=300")
    found = {(s["federation"], s["attack"]): s for s in results(tmp_path)["summaries"]}
    assert {key: s["images"] for key, s in found.items()} == dict.fromkeys(
        [("fedsgd", "invg"), ("fedsgd", "agic"), ("fedavg", "invg"), ("fedavg", "agic")], 4
    )
    for (federation, attack), summary in found.items():
        assert summary["psnr"]["mean"] > summary["psnr_mean_image"], (federation, attack)
        assert summary["label_accuracy"] == 1.0
    assert found["fedsgd", "agic"]["verdict"] == "recovered"
    notes = [note for f in results(tmp_path)["findings"] for note in f["notes"]]
    assert not [note for note in notes if "engine" in note]


def test_an_example_that_an_update_used_several_times_counts_once():
    federation = {"name": "epochs", "algorithm": "fedavg", "clients": 1, "examples": 2, "local_epochs": 3}
    made = {**SMALL, "federations": [federation], "attacks": SMALL["attacks"][:1], "evaluation": {"controls": False}}
    finished = fedaudit.audit(made, progress=False)
    (finding,) = finished.result.findings
    assert finding.num_examples == 6
    assert [image.uses for image in finding.images] == [3, 3]
    assert finished.result.summaries[0].images == 2


def test_tied_weights_are_refused():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 3))
    model[2].weight = model[1].weight
    with pytest.raises(fedaudit.utils.errors.BadInput, match="tied"):
        fedaudit.audit(model=model, data=(torch.rand(20, 1, 8, 8), torch.arange(20) % 3), progress=False)


def test_a_model_that_cannot_take_the_data_is_refused():
    with pytest.raises(fedaudit.utils.errors.BadInput, match="can't take examples"):
        fedaudit.audit(model=Own(), data=(torch.rand(20, 3, 8, 8), torch.arange(20) % 3), progress=False)


@pytest.mark.slow
def test_the_two_step_way_takes_the_simulation_s_seed_and_tells_how_to_repeat_it(scenario_file, tmp_path, capsys):
    command("audit", scenario_file, "--seed", 5, "--out", tmp_path / "one", "--workers", 1)
    command("simulate", scenario_file, "--seed", 5, "--federation", "fedsgd", "--out", tmp_path / "t")
    command("attack", tmp_path / "t", "--attack", "invg", "--set", "iterations=10", "--out", tmp_path / "two")
    wanted = [f for f in results(tmp_path / "one")["findings"] if (f["attack"], f["federation"]) == ("invg", "fedsgd")]
    found = results(tmp_path / "two")
    assert found["findings"] == wanted
    assert found["repeat"] == (
        "fedaudit attack TRANSCRIPT --attack invg --set attacks.invg.iterations=10 --adversary server --seed 5 "
        "--out DIR --max-minutes none"
    )
    capsys.readouterr()
    command("attack", tmp_path / "t", "--attack", "invg", "--no-knows-training", "--set", "iterations=2",
            "--out", tmp_path / "three")  # fmt: skip
    assert "how clients train" in " ".join(results(tmp_path / "three")["adversary"]["does_not_know"])


def test_a_limit_that_nothing_was_measured_for_is_said_so(tmp_path, capsys):
    command("audit", "--set", "data.name=breast-cancer", "--set", "model.name=mlp", "--set", "model.width=8",
            "--out", tmp_path, "--fail-above", "psnr=20", code=3)  # fmt: skip
    assert "NOT TESTED: PSNR at most 20 dB" in capsys.readouterr().out


@pytest.mark.slow
def test_results_do_not_depend_on_torch_s_threads(audited, scenario_file, tmp_path):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        command("audit", scenario_file, "--out", tmp_path, "--workers", 1)
    finally:
        torch.set_num_threads(before)
    assert results(tmp_path) == results(audited)
