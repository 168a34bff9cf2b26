"""What a client can notice in a model that it received: manipulations are, ordinary training isn't."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fedaudit
from fedaudit.defences.received import FEWEST, LIMITS, Check
from fedaudit.pipeline.run import run_audit
from fedaudit.report.terminal import print_summary
from fedaudit.scenario.scenario import scenario_from
from tests.conftest import Command
from tools.measure.false_alarms import FISHED, MANIPULATED, TRAPPED, area, measure, rounds


def network(width: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def examples(n: int = 32) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(1)
    return torch.rand((n, 1, 8, 8), generator=draws), torch.arange(n) % 10


def found(state: dict[str, Tensor], agreed: nn.Module, n: int = 32) -> dict[str, Check]:
    checks = fedaudit.check_model(state, agreed, loss=cross_entropy, examples=examples(n))
    return {check.name: check for check in checks}


def alarms(checks: dict[str, Check]) -> set[str]:
    return {name for name, check in checks.items() if check.alarm}


def test_an_ordinary_model_raises_none():
    checks = found(network().state_dict(), network())
    assert set(checks) == set(LIMITS) - {"jump", "lost rows", "loss jump"}  # these need a history
    assert alarms(checks) == set()
    assert checks["loss"].value == pytest.approx(1, abs=0.05)  # it guesses


def test_the_model_is_run_once():
    calls = 0

    class Counted(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            answer: Tensor = super().forward(x)
            return answer

    found(Counted(*network()).state_dict(), Counted(*network()))
    assert calls == 1


def test_without_examples_only_weights_are_looked_at():
    names = [c.name for c in fedaudit.check_model(network().state_dict(), network())]
    assert names == ["architecture", "alike rows", "bare kernels", "silent outputs"]
    assert "lone neurons" not in found(network().state_dict(), network(), FEWEST - 1)


def test_every_difference_of_the_architecture_is_counted():
    state = network().state_dict()
    renamed = {"front." + name: tensor for name, tensor in state.items()}
    assert found(renamed, network())["architecture"].value == 8  # four too many, four missing
    assert found(state, network(32))["architecture"].value == 3  # of another shape; the last bias isn't
    assert alarms(found(state, network(32))) == {"architecture"}


def test_rows_that_measure_the_same_are_noticed():
    state = network().state_dict()
    for share, expected in ((0.25, set()), (0.75, {"alike rows"})):
        same = state["1.weight"].clone()
        rows = int(share * len(same))
        same[:rows] = same[0] * torch.linspace(-3, 3, rows + 1)[1:, None]
        checks = found({**state, "1.weight": same}, network())
        assert checks["alike rows"].value == pytest.approx(share, abs=0.04)
        assert "alike rows" in alarms(checks) or not expected


def test_kernels_that_are_nothing_or_copy_one_input_are_counted():
    agreed = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten())
    state = {name: tensor.clone() for name, tensor in agreed.state_dict().items()}
    shares = []
    for kernel in range(8):
        checks = {check.name: check for check in fedaudit.check_model(state, agreed)}
        shares.append(checks["bare kernels"].value)
        assert checks["bare kernels"].alarm == (kernel > 4)
        state["0.weight"][kernel] = 0.0
        if kernel % 2:
            state["0.weight"][kernel, 1, 1, 1] = 2.0
    assert shares == [kernel / 8 for kernel in range(8)]
    nothing = {**state, "0.weight": torch.zeros(8, 3, 3, 3)}  # a layer that begins at nothing passes nothing on
    assert not any(check.alarm for check in fedaudit.check_model(nothing, agreed) if check.name == "bare kernels")


def test_silenced_classes_and_a_wrong_head_are_noticed():
    state = network().state_dict()
    for row in (torch.zeros(64), torch.ones(64)):  # nothing, or one another's
        same = torch.cat([row.expand(9, -1), state["3.weight"][:1]])
        checks = found({**state, "3.weight": same}, network())
        assert checks["silent outputs"].value == pytest.approx(0.9)
        assert "silent outputs" in alarms(checks)
    state["3.bias"] = torch.tensor([-100.0] + [0.0] * 9)
    checks = found(state, network())
    expected = cross_entropy(run(state, examples()[0]), examples()[1]) / torch.tensor(10.0).log()
    assert checks["loss"].value == pytest.approx(float(expected), rel=1e-4)
    assert "loss" in alarms(checks)


def run(state: dict[str, Tensor], inputs: Tensor) -> Tensor:
    module = network()
    module.load_state_dict(state)
    with torch.no_grad():
        return torch.as_tensor(module(inputs))


def test_neurons_that_hold_one_example_are_counted():
    state = network(8).state_dict()
    inputs, _ = examples()
    direction = inputs.flatten(1)[0]
    values = (inputs.flatten(1) @ direction).sort().values
    edges = torch.stack([(values[-k] + values[-k - 1]) / 2 for k in range(1, 9)])  # k examples lie above the k-th
    state["1.weight"], state["1.bias"] = direction.expand(8, -1).clone(), -edges
    assert found(state, network(8))["lone neurons"].value == 1 / 8


def test_a_value_that_is_not_finite_is_an_alarm():
    state = network().state_dict()
    state["3.weight"] = torch.full_like(state["3.weight"], torch.nan)
    assert "loss" in alarms(found(state, network()))


@pytest.mark.parametrize("name", MANIPULATED)
def test_what_malicious_servers_send_is_noticed(name):
    for checks in rounds("mlp", "even", MANIPULATED[name], 1):
        alarmed = {check.name for check in checks if check.alarm}
        assert {"architecture", "alike rows"} <= alarmed
        assert ("bare kernels" in alarmed) == (name == "loki")


@pytest.mark.parametrize("name", FISHED)
def test_fishing_is_noticed_by_the_last_layer_and_the_loss(name):
    for checks in rounds("mlp", "even", FISHED[name], 1):
        assert {"silent outputs", "loss"} <= {check.name for check in checks if check.alarm}


def test_trap_weights_are_noticed_by_neurons_that_hold_one_example():
    for checks in rounds("mlp", "even", TRAPPED["trap weights"], 1):
        assert {check.name for check in checks if check.alarm} >= {"lone neurons"}


@pytest.mark.long
@pytest.mark.slow
def test_at_most_one_ordinary_round_in_a_hundred_raises_an_alarm():
    ordinary, altered = measure()
    assert len(ordinary) == 200
    assert sum(any(check.alarm for check in checks) for checks in ordinary) <= 2
    assert all(any(check.alarm for check in checks) for of in altered.values() for checks in of)


def test_area_is_that_of_the_rank_statistic():
    assert area([0.0, 1.0], [2.0, 3.0]) == 1.0
    assert area([0.0, 1.0], [0.0, 1.0]) == 0.5
    assert area([1.0], [0.0]) == 0.0


def test_the_command_tells_by_its_exit_code(command: Command, tmp_path: Path):
    scenario = ["--set", "data.name=digits", "--set", "model.name=mlp", "--set", "model.width=null", "--client", "0"]
    agreed = fedaudit.simulate({"data": {"name": "digits"}, "model": {"name": "mlp"}, "federations": [{"name": "f"}]})
    state = agreed.transcript.rounds[0].weights
    save_file(state, tmp_path / "honest.safetensors")
    outcome = command("check-model", tmp_path / "honest.safetensors", *scenario)
    assert outcome.code == 0, outcome.err
    assert "ok    architecture: as agreed" in outcome.out
    save_file({**state, "front.weight": torch.ones(3)}, tmp_path / "altered.safetensors")
    outcome = command("check-model", tmp_path / "altered.safetensors", *scenario, "--json")
    assert outcome.code == 1
    told = {check["name"]: check for check in json.loads(outcome.out)}
    assert told["architecture"]["alarm"]
    assert "'front.weight'" in told["architecture"]["text"]
    for number in range(4):
        moved = {name: (1 + 0.01 * number) * tensor for name, tensor in state.items()}
        save_file(moved, tmp_path / f"{number}.safetensors")
    before = [part for number in range(4) for part in ("--earlier", tmp_path / f"{number}.safetensors")]
    save_file({name: 10 * tensor for name, tensor in state.items()}, tmp_path / "jump.safetensors")
    outcome = command("check-model", tmp_path / "jump.safetensors", *scenario, *before)
    assert outcome.code == 1
    assert "ALARM jump: " in outcome.out
    assert "lost rows: 0% of the rows" in outcome.out
    save_file({name: torch.nan * tensor for name, tensor in state.items()}, tmp_path / "nan.safetensors")
    outcome = command("check-model", tmp_path / "nan.safetensors", *scenario, *before, "--json")
    assert outcome.code == 1
    told = {check["name"]: check for check in json.loads(outcome.out, parse_constant=pytest.fail)}
    assert [told[name]["value"] for name in ("loss", "jump")] == [None, None]
    assert told["loss"]["alarm"]
    assert told["jump"]["alarm"]
    outcome = command("check-model", tmp_path / "none.safetensors")
    assert outcome.code == 2
    assert "no checkpoint at" in outcome.err


def test_an_audit_says_what_a_client_would_notice(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    made = scenario_from(
        {
            "data": {"name": "digits"},
            "model": {"name": "lenet"},
            "federations": [{"name": "f", "clients": 1, "examples": 16, "batch_size": 16, "server": "imprint"}],
            "threat": {"adversary": "malicious-server"},
            "attacks": ["imprint"],
        }
    )
    audit = run_audit(made)
    (federation,) = audit.result.federations
    seen = {check.name: check for check in federation.checks}
    assert seen["architecture"].noticed == seen["alike rows"].noticed == 1.0
    assert "before the network" in federation.description
    print_summary(audit.result)
    assert "would a client notice? architecture" in capsys.readouterr().out
    page = audit.save(tmp_path / "out").read_text()
    assert "Would a client of f notice?" in page
    assert "A malicious server" in page


def test_of_several_models_the_worst_is_one_that_raises_an_alarm_and_no_number_is_read_back(monkeypatch, tmp_path):
    made = {
        "data": {"name": "digits"},
        "model": {"name": "mlp"},
        "federations": [{"name": "f", "clients": 1, "examples": 4, "batch_size": 4, "rounds": 2, "server": "imprint"}],
        "threat": {"adversary": "malicious-server"},
        "attacks": ["imprint"],
    }
    found = iter([[Check("disaggregation", 1.5, 1.0, "a"), Check("loss", 9.0, 4.0, "a")],
                  [Check("disaggregation", 2.5, 3.0, "b"), Check("loss", math.nan, 4.0, "b")]])  # fmt: skip
    monkeypatch.setattr("fedaudit.pipeline.received.check_received", lambda *_, **__: next(found))
    audit = run_audit(scenario_from(made))
    page = audit.save(tmp_path / "out").read_text()
    (federation,) = fedaudit.AuditResult.load(tmp_path / "out" / "results.json").federations
    uneven, loss = federation.checks
    assert (uneven.value, uneven.limit, uneven.noticed, uneven.text) == (1.5, 1.0, 0.5, "a")
    assert (loss.value, loss.noticed, loss.text) == (None, 1.0, "b")
    assert "Would a client of f notice?" in page


def test_the_loss_of_masks_is_measured_by_their_classes():
    net = nn.Conv2d(1, 3, 1)
    for parameter in net.parameters():  # it guesses: the loss is log(3), whatever the width of the images
        nn.init.zeros_(parameter)
    masks = torch.arange(4 * 5 * 6).reshape(4, 5, 6) % 3
    checks = fedaudit.check_model(net.state_dict(), net, loss=cross_entropy, examples=(torch.rand(4, 1, 5, 6), masks))
    (found,) = (check for check in checks if check.name == "loss")
    assert found.value == pytest.approx(1, abs=1e-5)


def test_a_loss_that_cannot_take_the_outputs_is_refused():
    net = nn.Linear(4, 3)
    with pytest.raises(fedaudit.BadInput, match="give the loss of"):
        fedaudit.check_model(
            net.state_dict(),
            net,
            loss=lambda out, y: cross_entropy(out["out"], y),
            examples=(torch.rand(4, 4), torch.arange(4) % 3),
        )
