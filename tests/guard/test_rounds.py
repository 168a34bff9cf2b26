"""A guard, round after round: what it plays, what its policy makes of it, and what it leaves behind."""

from __future__ import annotations

import copy
import errno
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedaudit
from fedaudit.capture.capture import Capture
from fedaudit.guard import OutgoingUpdate, SiteGuard
from fedaudit.guard.budget import site_account
from fedaudit.guard.outgoing import few_numbers
from fedaudit.guard.policy import REFUSED, SPENT
from fedaudit.guard.rounds import SiteRound, read_site
from fedaudit.transcript.transcript import Transcript
from fedaudit.utils.errors import BadInput
from tests.guard.cases import outgoing, trained

KEY = ("job", "site")
LABELS: dict[str, Any] = {"attacks": ["labels"], "fail_on": "inferred"}
STRICT: dict[str, Any] = {"attacks": ["labels"], "fail_on": None, "fail_above": {"label_accuracy": 0.01}}
NOISE = {"name": "dp", "clip": 1.0, "noise": 5.0, "epsilon": None}


def update(seconds: float = 1e6, examples: int = 2, rate: float = 0.1) -> OutgoingUpdate:
    """Return an update of a training that is said to have taken so long."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    timed: type[Capture] = type("Timed", (Capture,), {"seconds": seconds})
    return outgoing(*trained(net, torch.randn(examples, 12), torch.arange(examples) % 4, rate=rate, seen=timed(net)))


def lines(folder: str = "fedaudit-guard") -> list[SiteRound]:
    return read_site(Path(folder)).rounds


def outcomes(name: str) -> list[str]:
    return [one.checks[name].outcome for one in lines()]


def test_a_guard_without_settings_watches_and_leaves_a_page():
    guard = SiteGuard()
    assert guard.decide(KEY, "site", 0, update).done == "left"
    (line,) = lines()
    assert set(line.checks) == {"labels", "invg", "members"}
    assert line.checks["members"].outcome == "not played"
    assert "give held_out" in line.checks["members"].text
    assert sorted(path.name for path in Path("fedaudit-guard").iterdir()) == ["guard.html", "guard.jsonl", "guard.prom"]
    assert line.trained == 1e6
    assert 0 < line.spent < 600
    json.dumps({key: value for key, value in vars(guard).items() if not key.startswith("_")})  # of a configuration


@pytest.mark.parametrize(("seconds", "played"), [(1e9, 4), (1e-9, 1)])
def test_what_the_training_pays_for_is_played(seconds, played):
    guard = SiteGuard(**LABELS)
    for index in range(4):
        guard.decide(KEY, "site", index, lambda: update(seconds))
    assert outcomes("labels") == played * ["quiet"] + (4 - played) * ["not played"]


def test_a_debt_outlasts_the_process():
    for index in range(3):
        SiteGuard(**LABELS).decide(KEY, "site", index, lambda: update(1e-9))
    assert outcomes("labels") == ["quiet", "not played", "not played"]


def test_the_policy_decides():
    for policy, done in (("warn", "left"), ("refuse", "refused"), ("clip", "refused")):
        decision = SiteGuard(**STRICT, on_fail=policy, out=policy).decide(KEY, "site", 0, update)
        assert decision.done == lines(policy)[0].done == done  # nothing says yet to which norm it is clipped
        assert decision.reason == ("" if done == "left" else REFUSED)
        assert lines(policy)[0].alarms == ["labels"]


def test_what_raises_an_alarm_is_clipped_to_the_median_of_the_last_quiet_rounds():
    rates = [0.01, 0.03, 0.02]
    for index, rate in enumerate(rates):
        assert SiteGuard(**LABELS, share=None).decide(KEY, "s", index, partial(update, rate=rate)).done == "left"
    norms = [one.norm for one in lines()]
    assert [norm / norms[0] for norm in norms if norm and norms[0]] == pytest.approx([1, 3, 2], rel=1e-4)
    passing = update(rate=0.1)
    decision = SiteGuard(**STRICT, on_fail="clip", share=None).decide(KEY, "s", 3, lambda: passing)
    assert decision.done == "clipped"
    assert decision.scale == pytest.approx(0.2, rel=1e-4)
    left = passing.clipped(decision.scale)
    names = {name for name, _ in passing.seen.module.named_parameters()} if passing.seen.module else set()
    change = torch.cat([(left[name] - passing.sent[name]).flatten() for name in names])
    assert change.norm() == pytest.approx(norms[2], rel=1e-4)
    assert left["1.num_batches_tracked"] == 1  # whole numbers leave as they are
    between = passing.sent["1.running_var"] + 0.2 * (passing.state["1.running_var"] - passing.sent["1.running_var"])
    torch.testing.assert_close(left["1.running_var"], between, rtol=1e-4, atol=1e-6)
    difference = outgoing({"w": torch.ones(3)}, passing.seen, form="difference")
    assert difference.clipped(0.25)["w"].tolist() == [0.25] * 3
    within = SiteGuard(**STRICT, on_fail="clip", share=None, clip_norm=1e3).decide(KEY, "s", 4, lambda: passing)
    assert (within.done, within.scale) == ("left", 1.0)


def test_clipping_takes_nothing_from_what_reads_the_direction():
    """As the docs say: the labels of a clipped update are found as before."""
    passing = update()
    less = outgoing(passing.clipped(0.01), passing.seen, follows=False)
    for given in (passing, less):
        SiteGuard(**STRICT).decide(KEY, "s", 0, partial(copy.copy, given))
    assert [one.alarms for one in lines()] == 2 * [["labels"]]


def test_a_budget_stops_before_the_round_that_would_exceed_it(caplog):
    account = site_account([("dp", {"clip": 1.0, "noise": 5.0, "epsilon": None})], 1, 1e-6)
    assert account is not None
    target = account.spent(3)
    for index in range(5):
        guard = SiteGuard(**LABELS, target_epsilon=target, delta=1e-6, sanitised=NOISE, unaudited="pass")
        stops = guard.stops(KEY, "site", [], 100)
        assert stops == (index >= 3)
        if not stops:
            assert guard.decide(KEY, "site", index, update).done == "left"
        else:
            decision = guard.decide(KEY, "site", index, update)  # whoever doesn't ask before
            assert (decision.done, decision.reason) == ("stopped", SPENT)
    assert [one.epsilon for one in lines()[:3]] == [account.spent(n) for n in (1, 2, 3)]
    assert f"target_epsilon is {target:g}" in caplog.text
    assert guard.decide(("next job", "site"), "site", 0, update).done == "left"


def test_an_update_that_can_t_be_read_is_counted_as_the_framework_tells():
    def unreadable() -> OutgoingUpdate:
        raise BadInput("no training was seen")

    local = {"clipping_norm": 1.0, "sensitivity": 2.0, "epsilon": 0.5, "delta": 1e-5}
    guard, through = SiteGuard(**LABELS, target_epsilon=8.0), [("LocalDpMod", local)]
    assert guard.decide(KEY, "site", 0, unreadable, None, through, 100).done == "left"
    (line,) = lines()
    account = site_account(through, 100, None)
    assert account is not None
    assert line.epsilon == account.spent(1)
    assert SiteGuard(**LABELS, target_epsilon=8.0).decide(("k", "s"), "site", 0, unreadable).done == "stopped"


def test_what_a_site_gives_by_name_takes_none_of_its_training_s_random_numbers(monkeypatch):
    monkeypatch.syspath_prepend(".")
    Path("own_net.py").write_text(
        "import torch\ndef net(): return torch.nn.Linear(4, 2)\ndef some(): return torch.rand(9, 4), torch.arange(9)\n"
    )
    torch.manual_seed(3)
    before = torch.get_rng_state()
    SiteGuard(agreed="own_net:net", examples="own_net:some", held_out="own_net:some")
    assert torch.get_rng_state().equal(before)


def test_without_a_known_defence_a_budget_lets_nothing_leave(caplog):
    guard = SiteGuard(**LABELS, target_epsilon=8.0)
    assert guard.stops(KEY, "site", [], 100)
    assert guard.decide(KEY, "site", 0, update).done == "stopped"
    assert "give sanitised" in caplog.text


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("how", ["disk", "folder"])
def test_what_can_t_be_written_stops_nothing_but_a_budget_s_updates(how, monkeypatch, caplog):
    Path("taken").write_text("")
    if how == "disk":
        monkeypatch.setattr("fedaudit.guard.rounds.os.fsync", full)
    out = "fedaudit-guard" if how == "disk" else "taken"
    guard = SiteGuard(**STRICT, on_fail="refuse", out=out)
    for index in range(3):
        assert guard.decide(KEY, "site", index, update).done == "refused"  # the policy decides nevertheless
    assert caplog.text.count("a round isn't written down") == 1
    assert SiteGuard(**LABELS, out=out).decide(KEY, "site", 0, update).done == "left"
    counted = SiteGuard(**LABELS, out=out, target_epsilon=8.0, sanitised=NOISE, unaudited="pass")
    assert counted.decide(KEY, "site", 0, update).done == "stopped"
    assert "it can't be counted" in caplog.text


def test_nothing_is_written_where_nobody_wants_it():
    guard = SiteGuard(**LABELS, out=None)
    assert [guard.decide(KEY, "site", index, lambda: update(1e-9)).done for index in range(2)] == ["left", "left"]
    assert not list(Path().iterdir())


def test_an_error_of_the_guard_s_own_stops_no_training_unless_the_site_says_so(monkeypatch):
    monkeypatch.setattr("fedaudit.guard.checks.attacked", lambda *_: 1 / 0)
    assert SiteGuard(**LABELS).decide(KEY, "site", 0, update).done == "left"
    assert SiteGuard(**LABELS, on_fail="refuse").decide(KEY, "site", 1, update).done == "refused"
    assert outcomes("labels") == ["unable", "unable"]

    def unreadable() -> OutgoingUpdate:
        raise BadInput("several models in a reply")

    assert SiteGuard(**LABELS, share=None).decide(KEY, "site", 2, unreadable).done == "left"
    assert lines()[-1].checks["labels"].text == "several models in a reply"


def statistics() -> OutgoingUpdate:
    raise BadInput("STATISTICS: no weights in plain sight")


@pytest.mark.parametrize("policy", ["pass", "refuse"])
def test_what_is_no_update_is_held_to_the_policy_in_every_round(policy):
    guard = SiteGuard(**LABELS, unaudited=policy, every=3)
    for index in range(4):  # neither takes the other's turn
        assert guard.decide(KEY, "site", index, update).done == "left"
        decision = guard.decide(KEY, "site", index, statistics, through=None)
        assert (decision.done, decision.reason) == (("left", "") if policy == "pass" else ("refused", REFUSED))
    assert [one.checks["labels"].outcome for one in lines()[::2]] == ["quiet", "not played", "not played", "quiet"]
    for one in lines()[1::2]:
        assert {name: (check.outcome, check.text) for name, check in one.checks.items()} == {
            "result": ("unable", "STATISTICS: no weights in plain sight")
        }
    said = "4 results left that nobody can look into" in Path("fedaudit-guard/guard.html").read_text()
    assert said == (policy == "pass")


def test_what_no_noise_was_added_to_is_outside_a_budget():
    guard = SiteGuard(**LABELS, target_epsilon=8.0, sanitised=NOISE, unaudited="pass")
    assert guard.decide(KEY, "site", 0, update).done == "left"
    for read in (statistics, update):  # weights that leave where the site's noise doesn't work are no other case
        decision = guard.decide(KEY, "site", 1, read, through=None)
        assert (decision.done, decision.reason) == ("stopped", SPENT)
    assert guard.decide(KEY, "site", 2, update).done == "left"
    account = site_account([("dp", {"clip": 1.0, "noise": 5.0, "epsilon": None})], 1, None)
    assert account is not None
    assert [one.epsilon for one in lines()] == [account.spent(1), None, None, account.spent(2)]


def test_without_a_budget_what_isn_t_counted_leaves_no_number(caplog):
    guard = SiteGuard(**LABELS, sanitised=NOISE)
    guard.decide(KEY, "site", 0, update)
    assert " spent" in Path("fedaudit-guard/guard.html").read_text()
    assert guard.decide(KEY, "site", 1, statistics, through=None).done == "left"
    assert guard.decide(KEY, "site", 2, update).done == "left"  # a number for this one alone would be too small
    assert [one.epsilon is None for one in lines()] == [False, True, True]
    assert "nothing bounds what it tells" in caplog.text
    page = Path("fedaudit-guard/guard.html").read_text()
    assert "nothing bounds the ε spent" in page
    assert 'fedaudit_guard_epsilon{job="job",site="site"} +Inf' in Path("fedaudit-guard/guard.prom").read_text()


def test_few_numbers_are_counted_whatever_holds_them():
    few: list[Any] = [
        {},
        {"a": {"accuracy": 0.5, "loss": np.float32(1)}, "b": [1, None, True, "text"]},
        {"classes": torch.zeros(10, 10)},
        {"classes": np.zeros(100)},
        b"x" * 800,
        [0.5] * 100,
    ]
    several: list[Any] = [torch.zeros(101), np.zeros((2, 51)), [0.5] * 101, "x" * 808, {"a": b"x" * 808}, 2**6500]
    several += [{"a": {"b": [torch.zeros(60), torch.zeros(41)]}}, object(), {1: {"a": object()}}]
    several += [{"name" * 300: 0.5}, np.array(b"a" * 1000), np.zeros(1, [("a", "f4", (1000,))]), [[]] * 1000]
    several += [np.array([np.zeros(1000)], dtype=object)[:1]]
    endless: list[Any] = []
    endless.append(endless)
    assert all(few_numbers(one) for one in few)
    assert not any(few_numbers(one) for one in [*several, endless])


def test_a_model_that_isn_t_let_in_is_written_down():
    def fished() -> tuple[dict[str, Tensor], bool]:
        state = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).state_dict()
        return {**state, "2.weight": state["2.weight"] * (torch.arange(10) == 3)[:, None]}, False

    assert not SiteGuard(on_received="refuse").receives(KEY, "site", None, fished).let_in
    assert SiteGuard(on_received="warn").receives(KEY, "site", None, fished).let_in
    (line,) = lines()
    assert (line.done, line.alarms) == ("not let in", ["received"])
    assert "in 1 of 1 round (model that came in): 1 not trained on" in Path("fedaudit-guard/guard.html").read_text()


@pytest.mark.parametrize("given", ["by the site", "by the framework"])
def test_attacks_are_told_which_defence_the_update_went_through(given, monkeypatch):
    seen: list[Any] = []
    audit_transcript = fedaudit.api.audit_transcript

    def kept(recording: Any, *arguments: Any, **rest: Any) -> Any:
        seen.extend(u.sanitised for r in Transcript.load(recording, module=rest["module"]).rounds for u in r.updates)
        return audit_transcript(recording, *arguments, **rest)

    monkeypatch.setattr(fedaudit.api, "audit_transcript", kept)
    local = {"clipping_norm": 2.0, "sensitivity": 4.0, "epsilon": 0.5, "delta": 1e-5}
    passing = update()
    if given == "by the framework":
        passing = replace(passing, follows=False, went_through=[("LocalDpMod", local)])
    settings: dict[str, Any] = {"sanitised": {"name": "local-dp", **local}} if given == "by the site" else {}
    SiteGuard(**LABELS, **settings).decide(KEY, "site", 0, lambda: passing)
    (known,) = seen
    assert (known.name, known.clip) == ("local-dp", 2.0)
    assert known.noise == pytest.approx(4.0 * (2 * torch.log(torch.tensor(1.25 / 1e-5))).sqrt().item() / 0.5)
