"""A site's guard on a table: limits on images don't block, and what blocks says what to set."""

import json
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import fedaudit
from fedaudit.guard import SiteGuard
from fedaudit.guard.attacks import uncalibrated
from tests.guard.cases import outgoing, trained


class Gate(SiteGuard):
    _limits: ClassVar[dict[str, float]] = {"psnr": 20.0}  # as NVFlare's


def gives_away(**settings: Any) -> str:
    """Return what becomes of an update over two rows of a table."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 2))
    passing = outgoing(*trained(net, torch.randn(2, 12), torch.tensor([0, 1])))
    return Gate(on_fail="refuse", **settings).decide(("job", "s"), "s", 0, lambda: passing).done


ROWS = ["labels", {"name": "tableak", "iterations": 1, "restarts": 1}]


def test_a_limit_on_images_that_nobody_set_blocks_no_table() -> None:
    assert gives_away(attacks=ROWS) == "left"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, r"fail_on can't be exceeded .* 'recovered' .*; on records .*tableak could"),
        ({"attacks": ROWS, "fail_above": {"psnr": 20}}, r"the limit on psnr can't .*no attack on records could"),
        ({"attacks": ROWS, "fail_on": None}, r"the limit on psnr can't .*no attack on records could"),
        ({"attacks": ROWS, "fail_above": {"psnr": 30}}, r"the limit on psnr can't .*no attack on records could"),
        (
            {"fail_on": None, "fail_above": {"cell_accuracy": 0.9}},
            r"the limit on cell_accuracy can't .*; on records .*tableak could",
        ),
    ],
)
def test_what_can_t_be_tested_on_a_table_says_what_to_set(
    settings: dict[str, Any], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert gives_away(**settings) == "refused"
    assert re.search(says, caplog.text)


@pytest.mark.parametrize(
    ("given", "calibrated"), [({}, False), pytest.param({"calibrate": True}, True, marks=pytest.mark.slow)]
)
def test_no_attack_is_calibrated_in_every_round_unless_that_is_asked_for(
    given: dict[str, Any], calibrated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    audit_transcript = fedaudit.api.audit_transcript

    def seen(recording: Any, attacks: Any, **rest: Any) -> Any:
        done = audit_transcript(recording, attacks, **rest)
        made.append(done.result)
        return done

    monkeypatch.setattr(fedaudit.api, "audit_transcript", seen)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 2))
    passing = outgoing(*trained(net, torch.rand(1, 1, 8, 8), torch.tensor([0])))
    guard = Gate(attacks=[{"name": "agic-plus", "iterations": 100, **given}], fail_above={}, fail_on="recovered")
    guard.decide(("job", "s"), "s", 0, lambda: passing)
    assert bool(made[0].calibrations) is calibrated
    assert made[0].attacks[0].settings["calibrate"] is calibrated


def test_a_method_within_an_attack_is_not_calibrated_either() -> None:
    assert uncalibrated({"name": "averaged", "attack": {"name": "agic-plus"}}) == {
        "name": "averaged",
        "attack": {"name": "agic-plus", "calibrate": False},
    }
    assert uncalibrated("labels") == {"name": "labels"}


@pytest.mark.parametrize(("limit", "done", "outcome"), [(20, "refused", "alarm"), (100, "left", "quiet")])
def test_a_limit_on_the_ceiling_is_a_check_of_its_own(limit: float, done: str, outcome: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Sigmoid(), nn.Linear(16, 2))
    passing = outgoing(*trained(net, torch.rand(2, 1, 8, 8), torch.tensor([0, 1])))
    guard = SiteGuard(attacks=["labels"], fail_on=None, fail_above={"ceiling": limit}, on_fail="refuse", out=tmp_path)
    assert guard.decide(("job", "s"), "s", 0, lambda: passing).done == done
    (line,) = (tmp_path / "guard.jsonl").read_text().splitlines()
    check = json.loads(line)["checks"]["ceiling"]
    assert check["outcome"] == outcome
    assert "whoever attacks could rebuild" in check["text"]
    assert check["seconds"] > 0
