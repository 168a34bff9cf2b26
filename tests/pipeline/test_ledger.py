"""The ledger of a deployment: what is composed, what a target takes, what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
import torch
from dp_accounting import pld
from typer.testing import CliRunner

import fedaudit
from fedaudit.cli import app
from fedaudit.epsilon.accounting import RecordedGaussians
from fedaudit.epsilon.certificate import gaussian_success
from fedaudit.transcript.update import ClientDefenceInfo, PrivateSteps
from fedaudit.utils.errors import BadInput

SCENARIO = """
data: {name: digits}
model: {name: mlp, width: 8}
federations:
  - name: f
    algorithm: fedavg
    clients: 6
    clients_per_round: 2
    rounds: 8
    examples: 60
    batch_size: 10
    local_epochs: 1
defences: {client_defence: {name: dp, clip: 1.0, noise: 4.0, epsilon: null}}
attacks: [loss-threshold]
"""


def run(*words: str | Path) -> tuple[int, Any]:
    """Return the exit code and what is written as JSON."""
    done = CliRunner().invoke(app, ["ledger", *map(str, words), "--json"])
    if isinstance(done.exception, BadInput):
        return 2, str(done.exception)
    return done.exit_code, json.loads(done.stdout)


def job(folder: Path, *filters: dict[str, Any], rounds: int | None = 3) -> Path:
    """Write an NVFlare job of two sites that send through these filters."""
    config = folder / "app" / "config"
    config.mkdir(parents=True)
    chain = {"tasks": ["train"], "filters": list(filters)}
    (config / "config_fed_client.json").write_text(json.dumps({"task_result_filters": [chain]}))
    args = {} if rounds is None else {"num_rounds": rounds}
    (config / "config_fed_server.json").write_text(json.dumps({"workflows": [{"id": "c", "args": args}]}))
    meta = {"name": "spleen", "deploy_map": {"app": ["server", "site-1", "site-2"]}}
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def svt(**args: Any) -> dict[str, Any]:
    return {"path": "nvflare.app_common.filters.svt_privacy.SVTPrivacy", "args": args}


def gaussian(noise: float, rounds: int, delta: float = 1e-5) -> float:
    """Return ε of so many Gaussian mechanisms, by the library."""
    accountant = pld.PLDAccountant(value_discretization_interval=1e-4)
    accountant.compose(dp_accounting.GaussianDpEvent(noise), rounds)
    return float(accountant.get_epsilon(delta))


@pytest.mark.slow
def test_a_scenario_is_drawn_as_its_simulation_and_composed_as_the_library_does(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(SCENARIO)
    code, (found,) = run(file)
    assert code == 0
    transcript = fedaudit.simulate(file, progress=False).transcript
    sent = {str(n): sum(u.client == n for r in transcript.rounds for u in r.updates) for n in range(6)}
    assert {one["client"]: one["rounds"] for one in found["clients"]} == sent
    for one in found["clients"]:
        # the server sees who sent: one client's messages against any others are two clips apart
        assert one["epsilon"] == pytest.approx(gaussian(2.0, one["rounds"]), rel=1e-3) if one["rounds"] else 0
        assert [e for _, e in one["curve"]] == sorted(e for _, e in one["curve"])
    assert found["epsilon"] == max(one["epsilon"] for one in found["clients"])


@pytest.mark.slow
def test_noise_that_the_server_adds_counts_every_round_for_everybody(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    clipping = "{aggregator: {name: fixed-clipping, clipping_norm: 1.0, noise_multiplier: 2.0}}"
    file.write_text(SCENARIO.replace("{client_defence: {name: dp, clip: 1.0, noise: 4.0, epsilon: null}}", clipping))
    code, (found,) = run(file)
    assert code == 0
    assert "fixed-clipping" in found["mechanism"]
    assert found["adjacency"] == "add-remove"
    assert {one["rounds"] for one in found["clients"]} == {8}
    history = fedaudit.simulate(file, progress=False).history
    assert history is not None
    assert history.epsilon_pld is not None
    assert found["epsilon"] == pytest.approx(min(history.epsilon[-1], history.epsilon_pld), rel=1e-9)


def test_how_often_the_right_candidate_can_be_picked_stands_beside_epsilon(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(SCENARIO)
    made = fedaudit.simulate(file, progress=False)
    assert made.history is not None
    certificate = made.history.certificate
    assert certificate is not None
    assert certificate.candidates == len(made.truth.candidates.unique(dim=0))
    assert not certificate.central
    _, (found,) = run(file, "--candidates", str(certificate.candidates))
    most = max(one["rounds"] for one in found["clients"])
    assert found["success"] == certificate.success == gaussian_success(1 / certificate.candidates, most**0.5 / 4)
    assert {one["success"] for one in found["clients"] if not one["rounds"]} <= {1 / certificate.candidates}
    told = CliRunner().invoke(app, ["ledger", str(file)]).stdout
    assert "of 100 candidates" in told
    bare = CliRunner().invoke(app, ["ledger", str(file), "--set", "defences.client_defence=none"]).stdout
    assert "no noise that counts, and so no certificate" in " ".join(bare.split())
    _, (none,) = run(file, "--set", "defences.client_defence=none")
    assert none["success"] is None


@pytest.mark.slow
def test_what_a_target_takes_is_just_enough(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(SCENARIO)
    code, (found,) = run(file, "--target", "3", "--rounds", "20")
    assert code == 1
    target = found["target"]
    assert target["rounds"] == 20
    assert run(file, "--target", "3", "--rounds", str(target["allowed"]))[0] == 0
    _, (more,) = run(file, "--rounds", str(target["allowed"] + 1))
    assert more["clients"][0]["curve"][-1][1] > 3
    name = "defences.client_defence.noise"
    _, (enough,) = run(file, "--rounds", "20", "--set", f"{name}={target['noise']}")
    _, (short,) = run(file, "--rounds", "20", "--set", f"{name}={0.99 * target['noise']}")
    assert enough["clients"][0]["curve"][-1][1] <= 3 < short["clients"][0]["curve"][-1][1]


@pytest.mark.slow
def test_a_recording_of_different_noises_composes_them_all(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(SCENARIO.replace("    clients_per_round: 2\n", ""))
    transcript = fedaudit.simulate(file, progress=False).transcript
    for record in transcript.rounds:
        for row, update in enumerate(record.updates):
            how = update.sanitised
            assert how is not None
            assert how.clip
            noise = (4.0 if record.index % 2 else 8.0) * how.clip
            changed = type(how)(how.name, noise=noise, clip=how.clip)
            record.updates[row] = type(update)(**{**vars(update), "sanitised": changed})
    transcript.save(tmp_path / "t")
    code, (found,) = run(tmp_path / "t")
    accountant = pld.PLDAccountant(value_discretization_interval=1e-4)
    for noise in (8.0, 4.0):
        accountant.compose(dp_accounting.GaussianDpEvent(noise / 2), 4)
    assert code == 0
    assert found["epsilon"] == pytest.approx(float(accountant.get_epsilon(1e-5)), rel=1e-3)


def test_a_round_that_is_not_on_record_leaves_no_bound(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(SCENARIO.replace("    clients_per_round: 2\n", ""))
    transcript = fedaudit.simulate(file, progress=False).transcript
    del transcript.rounds[3]
    transcript.save(tmp_path / "t")
    code, (found,) = run(tmp_path / "t", "--target", "1000")
    assert code == 3
    assert found["epsilon"] is None
    assert {one["why"].split(";")[0] for one in found["clients"]} == {"round 4 not on record"}


def test_next_to_no_noise_is_no_bound_and_no_overflow() -> None:
    assert RecordedGaussians((1e-200,), 1e-5).spent(1) == math.inf
    sampled = RecordedGaussians((1e-200,), 1e-5, drawn=((10, 0.1),))
    assert sampled.spent(1) == sampled.spent(1, "pld") == math.inf


def test_messages_without_noise_have_no_bound(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(
        SCENARIO.replace("defences: {client_defence: {name: dp, clip: 1.0, noise: 4.0, epsilon: null}}\n", "")
    )
    code, (planned,) = run(file, "--target", "8")
    assert code == 3
    assert planned["epsilon"] is None
    assert planned["target"] is None
    fedaudit.simulate(file, progress=False).transcript.save(tmp_path / "t")
    code, (found,) = run(tmp_path / "t", "--target", "8")
    assert code == 3
    assert all(one["epsilon"] is None and one["why"] for one in found["clients"])


@pytest.mark.slow
def test_stock_sparse_vectors_of_a_densenet_cost_what_nvflare_says(tmp_path: Path) -> None:
    code, (found,) = run(job(tmp_path / "j", svt()), "--parameters", "7033190", "--target", "8")
    assert code == 1
    assert [one["client"] for one in found["clients"]] == ["site-1", "site-2"]
    assert any("70,332" in note for note in found["notes"])
    assert 3 * 3000 < found["epsilon"] < 3 * 70_332
    assert found["target"]["allowed"] == 0


def test_filters_that_promise_nothing_or_are_not_known_say_so(tmp_path: Path) -> None:
    percentile = {"path": "nvflare.app_common.filters.PercentilePrivacy", "args": {"percentile": 20}}
    code, (found,) = run(job(tmp_path / "j", percentile, {"path": "mine.Blur", "args": {}}), "--target", "1")
    assert code == 3
    assert found["epsilon"] is None
    assert "Blur" in " ".join(found["notes"])
    code, (kept,) = run(job(tmp_path / "k", svt(), percentile), "--parameters", "1000")
    assert code == 0
    assert kept["epsilon"] > 0  # what comes after can't take the promise away


def test_a_site_s_privacy_file_has_a_ledger_by_scope(tmp_path: Path) -> None:
    file = tmp_path / "privacy.json"
    scopes = [{"name": "public"}, {"name": "private", "task_result_filters": [{"name": "SVTPrivacy", "args": {}}]}]
    file.write_text(json.dumps({"scopes": scopes, "default_scope": "private"}))
    code, found = run(file, "--rounds", "2", "--parameters", "500")
    assert code == 0
    assert {one["clients"][0]["client"]: one["epsilon"] is None for one in found} == {
        "scope public": True,
        "scope private, the default": False,
    }


CLIENT_API = "nvflare.app_common.executors.client_api_executor.ClientAPIExecutor"
PERCENTILE = {"path": "nvflare.app_common.filters.PercentilePrivacy", "args": {}}


@pytest.mark.parametrize(
    ("executor", "chain", "clip"),
    [
        ({"path": CLIENT_API, "args": {}}, [svt()], "SVTPrivacy clips each number at 1e-05"),
        ({"path": CLIENT_API, "args": {"params_transfer_type": "FULL"}}, [svt(gamma=0.002)], "at 0.002 a local step"),
        (
            {"path": "mine.PTClientAPILauncherExecutor"},
            [PERCENTILE, svt()],
            "PercentilePrivacy clips each number at 0.01",
        ),
        ({"path": CLIENT_API, "args": {"params_transfer_type": "{kind}"}}, [svt()], ""),
        ({"path": CLIENT_API, "args": {"params_transfer_type": "DIFF"}}, [svt()], ""),
        ({"path": CLIENT_API, "args": {}}, [svt(gamma=5)], ""),
        ({"path": CLIENT_API, "args": {}}, [svt(data_kinds=["WEIGHT_DIFF"])], ""),
        ({"path": "mine.Learner", "args": {}}, [svt()], ""),
    ],
)
def test_filters_that_clip_each_number_are_told_to_leave_no_model_of_whole_weights(
    tmp_path: Path, executor: dict[str, Any], chain: list[dict[str, Any]], clip: str
) -> None:
    folder = job(tmp_path / "j", *chain)
    executors = [{"tasks": ["validate"], "executor": {"path": CLIENT_API}}, {"tasks": ["*"], "executor": executor}]
    write(folder / "app/config/config_fed_client.json", executors=executors, kind="DIFF")
    _, (found,) = run(folder, "--parameters", "500")
    told = [note for note in found["notes"] if "params_transfer_type=TransferType.DIFF" in note]
    assert len(told) == bool(clip)
    assert clip in " ".join(told)


def test_a_site_s_privacy_file_is_for_any_job_and_so_for_those_that_send_whole_weights(tmp_path: Path) -> None:
    file = tmp_path / "privacy.json"
    file.write_text(json.dumps({"scopes": [{"name": "a", "task_result_filters": [svt()]}], "default_scope": "a"}))
    _, (found,) = run(file, "--rounds", "2", "--parameters", "500")
    assert any("of whole weights, which NVFlare's jobs send unless" in note for note in found["notes"])


def write(file: Path, **changes: Any) -> None:
    """Change the top level of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    "chain",
    [
        {"tasks": ["*"]},  # NVFlare looks a task's name up as it is
        {"tasks": []},
        {"direction": "in"},
        {"filters": [svt(data_kinds=["WEIGHTS"])]},
        {"filters": [{"path": "mine.SVTPrivacy", "args": {}}]},
    ],
)
def test_what_does_not_filter_what_leaves_a_site_is_not_counted(tmp_path: Path, chain: dict[str, Any]) -> None:
    folder = job(tmp_path / "j", svt())
    chains = [{"tasks": ["train"], "filters": [svt()]} | chain]
    write(folder / "app/config/config_fed_client.json", task_result_filters=chains)
    code, (found,) = run(folder, "--parameters", "1000", "--target", "1000")
    assert code == 3
    assert found["epsilon"] is None


def test_an_app_that_goes_nowhere_counts_for_nobody_and_two_for_one_site_are_refused(tmp_path: Path) -> None:
    folder = job(tmp_path / "j")
    job(folder / "b", svt())
    (folder / "b" / "app").rename(folder / "other")
    code, (found,) = run(folder, "--parameters", "1000", "--rounds", "3")
    assert (code, found["epsilon"]) == (0, None)
    write(folder / "meta.json", deploy_map={"app": ["site-1"], "other": ["site-1"]})
    code, told = run(folder, "--parameters", "1000", "--rounds", "3")
    assert code == 2
    assert "two apps are for site-1" in told


def test_rounds_of_two_workflows_are_asked_for(tmp_path: Path) -> None:
    folder = job(tmp_path / "j", svt())
    args = [{"args": {"num_rounds": n}} for n in (1, 500)]
    write(folder / "app/config/config_fed_server.json", workflows=args)
    code, told = run(folder, "--parameters", "1000")
    assert code == 2
    assert "--rounds" in told


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("app/config/config_fed_client.json", {"task_result_filters": [1]}),
        ("app/config/config_fed_client.json", {"task_result_filters": [{"tasks": ["train"], "filters": [{}]}]}),
        ("meta.json", {"deploy_map": {"app": [1.5, {"sites": 3}]}}),
        ("app/config/config_fed_server.json", {"workflows": 3}),
    ],
)
def test_odd_files_are_refused_in_a_line(tmp_path: Path, file: str, changes: dict[str, Any]) -> None:
    folder = job(tmp_path / "j", svt())
    write(folder / file, **changes)
    code, told = run(folder, "--parameters", "10")
    assert code == 2
    assert str(folder) in told
    (folder / file).write_text("[1, 2")
    assert run(folder, "--parameters", "10")[0] == 2


@pytest.mark.slow
def test_noise_that_is_no_setting_of_its_own_is_not_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    clipping = "{aggregator: {name: fixed-clipping, clipping_norm: 1.0, noise_multiplier: 1.0, average: fedavg}}"
    file.write_text(SCENARIO.replace("{client_defence: {name: dp, clip: 1.0, noise: 4.0, epsilon: null}}", clipping))
    _, (found,) = run(file, "--target", "1")
    assert found["target"]["noise"] is None


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "parameters=…"),
        (["--parameters", "10", "--delta", "2"], "δ lies between"),
        (["--parameters", "10", "--set", "a=1"], "--set changes a scenario"),
    ],
)
def test_what_is_missing_is_asked_for(tmp_path: Path, words: list[str], why: str) -> None:
    code, told = run(job(tmp_path / "j", svt()), *words)
    assert code == 2
    assert why in told


def test_rounds_that_nobody_says_are_asked_for(tmp_path: Path) -> None:
    code, told = run(job(tmp_path / "j", svt(), rounds=None), "--parameters", "10")
    assert code == 2
    assert "--rounds" in told
    assert run(tmp_path / "nothing")[0] == 2


def test_a_page_shows_the_curve(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(SCENARIO)
    run(file, "--out", tmp_path / "out", "--target", "3")
    page = (tmp_path / "out" / "ledger.html").read_text()
    assert "<svg" in page
    assert "Below ε = 3" in page
    assert json.loads((tmp_path / "out" / "ledger.json").read_text())[0]["target"]["epsilon"] == 3


# --- private steps ----------------------------------------------------------------------------------------------------

STEPS = {"clip": 1.0, "noise": 1.1, "divisor": 8.0, "steps": 40, "rate": 0.02}


def recorded(folder: Path, *rounds: dict[str, Any]) -> Path:
    """Record two clients of which each round's messages say that their training had such steps."""
    state = {"weight": torch.zeros(3)}
    with fedaudit.Recorder(folder) as recorder:
        for steps in rounds:
            known = ClientDefenceInfo("dp-sgd", noise=1.0, private=PrivateSteps(**{**STEPS, **steps}))
            with recorder.round(state):
                for client in ("a", "b"):
                    recorder.update(client, {"weight": torch.ones(3)}, num_examples=5, sanitised=known)
    return folder


def of_steps(*each: tuple[float, float, int]) -> float:
    """Return ε by the privacy loss distribution: of each noise, the sampling rate and the number of steps."""
    accountant = pld.PLDAccountant(value_discretization_interval=1e-4)
    for noise, rate, steps in each:
        accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise)), steps)
    return float(accountant.get_epsilon(1e-5))


@pytest.mark.slow
def test_private_steps_are_composed_over_rounds_with_their_own_noise_and_sampling(tmp_path: Path) -> None:
    code, (found,) = run(recorded(tmp_path / "r", {}, {"noise": 0.9}, {"rate": 0.05, "steps": 10}))
    assert code == 0
    assert (found["protects"], found["adjacency"]) == ("sample", "add-remove")
    assert "DP-SGD: each example's gradient clipped to 1, noise of 0.9 times that" in found["mechanism"]
    wanted = of_steps((1.1, 0.02, 40), (0.9, 0.02, 40), (1.1, 0.05, 10))
    assert found["epsilon"] == pytest.approx(wanted, rel=1e-3)
    assert "Poisson sampling with probability 0.02 to 0.05 a step" in found["sampling"]
    rising = [epsilon for _, epsilon in found["clients"][0]["curve"]]
    assert 0 < rising[0] < rising[1] < rising[2]
    _, (more,) = run(tmp_path / "r", "--rounds", "5")  # more go on like the last
    wanted = of_steps((1.1, 0.02, 40), (0.9, 0.02, 40), (1.1, 0.05, 30))
    assert more["epsilon"] == pytest.approx(wanted, rel=1e-3)


def test_steps_that_were_not_seen_drawn_by_poisson_sampling_are_not_amplified(tmp_path: Path) -> None:
    code, (found,) = run(recorded(tmp_path / "r", {"rate": None, "noise": 20.0}))
    assert code == 0
    assert found["sampling"] == "Poisson sampling was off or not seen: every step costs every example in full"
    accountant = pld.PLDAccountant(value_discretization_interval=1e-4)
    accountant.compose(dp_accounting.GaussianDpEvent(20.0), 40)
    assert found["epsilon"] == pytest.approx(float(accountant.get_epsilon(1e-5)), rel=1e-3)


def test_private_steps_without_noise_promise_nothing(tmp_path: Path) -> None:
    code, (found,) = run(recorded(tmp_path / "r", {"noise": 0.0}), "--target", "8")
    assert code == 3
    assert found["epsilon"] is None


@pytest.mark.peers
def test_private_steps_cost_what_opacus_own_accountants_say(tmp_path: Path) -> None:
    accountants = pytest.importorskip("opacus.accountants")
    _, (found,) = run(recorded(tmp_path / "r", {}, {"noise": 0.9}))
    spent = {}
    for name in ("RDPAccountant", "PRVAccountant"):
        accountant = getattr(accountants, name)()
        accountant.history = [(1.1, 0.02, 40), (0.9, 0.02, 40)]
        spent[name] = accountant.get_epsilon(1e-5)
    assert found["epsilon"] <= spent["RDPAccountant"]
    assert found["epsilon"] == pytest.approx(spent["PRVAccountant"], rel=0.02)
    assert found["epsilon"] < 0.95 * spent["RDPAccountant"]
