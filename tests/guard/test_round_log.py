"""What a site's guard writes down survives crashes and restarts, and a budget counts it, never too little."""

from __future__ import annotations

import errno
import math
import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
from dp_accounting import rdp
from scipy.optimize import brentq
from scipy.stats import norm

from fedaudit.guard.budget import Budget, filters_of, site_account
from fedaudit.guard.round_log import RoundLog
from fedaudit.guard.rounds import FILE, CheckRecord, Done, SiteRound, Written, append_round, read_site
from fedaudit.pipeline.ledger import Filter
from fedaudit.utils.errors import BadInput

NOISE = 6.0
LOCAL: list[Filter] = [("dp", {"clip": 1.0, "noise": NOISE, "epsilon": None})]


def line(done: Done = "left", job: str = "j", site: str = "s") -> SiteRound:
    checks = {"labels": CheckRecord(outcome="quiet", text="inconclusive", seconds=0.5)}
    return SiteRound(time="2026-01-01T00:00:00+00:00", job=job, site=site, done=done, checks=checks, trained=1.0)


def log(folder: Path, target: float | None = None, **more: Any) -> RoundLog:
    return RoundLog(folder, Budget(target, **more))


def spent(rounds: int, delta: float = 1e-5) -> float:
    """ε of so many rounds of Gaussian noise, where neighbours are two clips apart, as dp-accounting has it."""
    accountant: Any = rdp.RdpAccountant([*range(2, 65), 80, 96, 128, 192, 256, 512])
    accountant.compose(dp_accounting.GaussianDpEvent(NOISE / 2), rounds)
    return float(accountant.get_epsilon(delta))


def exact(rounds: int, delta: float = 1e-5) -> float:
    """The least ε of that (Balle and Wang 2018, Theorem 8), of one Gaussian mechanism of sensitivity √rounds."""
    ratio = math.sqrt(rounds) / (NOISE / 2)

    def above(epsilon: float) -> float:
        far = epsilon / ratio
        return float(norm.cdf(ratio / 2 - far) - math.exp(epsilon) * norm.cdf(-ratio / 2 - far)) - delta

    return float(brentq(above, 0, 100))


def test_lines_are_appended_and_read_again(tmp_path):
    for number in range(3):
        one = line(job=f"j{number}")
        last, written = append_round(tmp_path / "deep" / "er", partial(lambda known, _: known, one))
        assert last.job == f"j{number}"
        assert len(written.rounds) == number + 1
    again = read_site(tmp_path / "deep" / "er")
    assert [one.job for one in again.rounds] == ["j0", "j1", "j2"]
    assert again.rounds[0].checks["labels"].seconds == 0.5
    assert read_site(tmp_path) == type(again)([], 0)
    if os.name == "posix":
        assert (tmp_path / "deep" / "er" / FILE).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("cut", [1, 20, 10_000])
def test_a_torn_last_line_loses_itself_alone_and_counts_as_sent(tmp_path, cut):
    for _ in range(3):
        append_round(tmp_path, lambda _: line())
    whole = (tmp_path / FILE).read_bytes()
    start = whole.rstrip(b"\n").rfind(b"\n") + 1
    (tmp_path / FILE).write_bytes(whole[: max(start + 1, len(whole) - cut)])
    before = read_site(tmp_path)
    assert len(before.rounds) + before.torn == 3
    assert before.sent("j", "s") == 3
    append_round(tmp_path, lambda _: line())
    after = read_site(tmp_path)
    assert (len(after.rounds), after.torn) == (len(before.rounds) + 1, before.torn)
    assert after.sent("j", "s") == 4


def test_only_what_left_is_counted_by_job_and_site():
    kinds: tuple[Done, ...] = ("left", "clipped", "refused", "not let in", "stopped")
    rounds = [line(done, job, site) for done in kinds for job, site in (("j", "s"), ("j", "t"), ("k", "s"))]
    assert Written(rounds, 0).sent("j", "s") == 2
    assert Written(rounds, 0).sent("j", None) == 4  # of a site whose name doesn't last
    assert Written(rounds, 1).sent("j", "s") == 3


def test_several_writers_lose_no_line(tmp_path):
    def write() -> None:
        for _ in range(20):
            append_round(tmp_path, lambda _: line())

    writers = [threading.Thread(target=write) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert (len(read_site(tmp_path).rounds), read_site(tmp_path).torn) == (80, 0)


def test_epsilon_is_that_of_the_ledger_and_of_dp_accounting():
    account = site_account(LOCAL, 100, None)
    assert account is not None
    for rounds in (1, 7, 40):
        assert account.spent(rounds) == pytest.approx(spent(rounds))
        assert exact(rounds) <= account.spent(rounds) <= 1.15 * exact(rounds)
    stricter = site_account(LOCAL, 100, 1e-7)
    assert stricter is not None
    assert stricter.spent(7) == pytest.approx(spent(7, 1e-7))
    assert site_account([("top-k", {}), ("Other", {})], 100, None) is None


def test_a_budget_stops_before_the_update_that_would_exceed_it_whatever_restarts(tmp_path):
    target = (spent(4) + spent(5)) / 2
    ends = []
    for _ in range(7):
        begun = log(tmp_path, target, given=LOCAL)  # begun anew each time
        stops = begun.stops("j", "s", [], 100)
        ended = begun.end(line())
        assert (stops is None) == (ended.done == "left")
        ends.append(ended)
    assert [ended.done for ended in ends] == 4 * ["left"] + 3 * ["stopped"]
    assert f"{target:.4g}"[:4] in ends[-1].why
    found = read_site(tmp_path).rounds
    assert [one.epsilon for one in found[:4]] == pytest.approx([spent(n) for n in range(1, 5)])
    assert [one.epsilon for one in found[4:]] == 3 * [None]
    assert log(tmp_path, target, given=LOCAL).stops("another job", "s", [], 100) is None
    assert log(tmp_path, target, given=LOCAL, lasting=False).stops("j", "another name", [], 100) is not None
    assert log(tmp_path, target).stops("j2", "s", LOCAL, 100) is None  # as the framework tells
    assert "bounds" in (log(tmp_path, target).stops("j2", "s", [("Other", {})], 100) or "")
    assert "svt" in (log(tmp_path, target).stops("j2", "s", [*LOCAL, ("SVTPrivacy", {})], 100) or "").lower()


def test_what_left_with_less_noise_or_before_the_budget_is_not_counted_as_what_leaves_now(tmp_path):
    louder: list[Filter] = [("dp", {"clip": 1.0, "noise": 10 * NOISE, "epsilon": None})]
    for number in range(3):
        assert log(tmp_path, 8.0, given=LOCAL).end(line()).done == "left", number
    changed = log(tmp_path, 8.0, given=louder)
    assert "less noise than now" in (changed.stops("j", "s", [], 100) or "")
    assert changed.end(line()).done == "stopped"
    assert log(tmp_path, 8.0, delta=1e-3, given=LOCAL).end(line()).done == "stopped"
    assert log(tmp_path, 8.0, given=LOCAL).end(line()).done == "left"  # as it was
    assert read_site(tmp_path).rounds[-1].epsilon == pytest.approx(spent(4))
    assert log(tmp_path, 8.0, given=louder).end(line(job="k")).done == "left"
    assert log(tmp_path, 8.0, given=LOCAL).end(line(job="k")).done == "left"  # less noise: all count as that
    assert read_site(tmp_path).rounds[-1].epsilon == pytest.approx(spent(2))

    log(tmp_path).end(line(job="late"))
    assert "before ε was counted" in (log(tmp_path, 8.0, given=LOCAL).stops("late", "s", [], 100) or "")
    assert log(tmp_path, 8.0, given=LOCAL).end(line(job="late")).done == "stopped"


def test_an_epsilon_that_can_t_be_told_stops_nothing_but_a_budget_s_updates_and_the_round_is_written(tmp_path):
    sparse = filters_of({"name": "svt-privacy"})
    ended = log(tmp_path, given=sparse).end(line())
    assert ended.done == "left"
    assert "depends on the model's size" in ended.problems[0]
    assert [(one.done, one.epsilon) for one in read_site(tmp_path).rounds] == [("left", None)]
    assert log(tmp_path, 1e9, given=sparse).end(line(job="k")).done == "stopped"
    assert log(tmp_path, 1e9, given=sparse).end(line(job="k"), elements=100).done == "left"


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_stops_what_a_budget_must_count_and_nothing_else(tmp_path, monkeypatch):
    append_round(tmp_path, lambda _: line(job="another"))
    size = (tmp_path / FILE).stat().st_size
    monkeypatch.setattr("fedaudit.guard.rounds.os.fsync", full)
    ended = log(tmp_path, 8.0, given=LOCAL).end(line())
    assert ended.done == "stopped"
    assert "can't be counted: can't write to" in ended.why
    ended = log(tmp_path).end(line())
    assert (ended.done, ended.why) == ("left", "")
    assert "No space left" in ended.problems[0]
    assert (tmp_path / FILE).stat().st_size == size  # half a line is taken away again
    monkeypatch.undo()
    monkeypatch.setattr("fedaudit.guard.page.write_whole", full)
    ended = log(tmp_path, 8.0, given=LOCAL).end(line())
    assert ended.done == "left"
    assert "the page isn't drawn" in ended.problems[0]


def test_a_folder_that_is_none_stops_what_a_budget_must_count_and_nothing_else(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "deeper"):
        assert log(folder).end(line()).done == "left"
        assert log(folder, 8.0, given=LOCAL).stops("j", "s", [], 100) is not None
        assert log(folder, 8.0, given=LOCAL).end(line()).done == "stopped"
        assert log(folder, 8.0, given=LOCAL).end(line("refused")).done == "refused"
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / FILE)  # nothing waits
        assert "isn't written down" in log(tmp_path).end(line()).problems[0]


@pytest.mark.parametrize("given", ["dp", [{"clip": 1.0}], {"name": "no such"}, [["dp"]]])
def test_what_is_no_defence_is_refused(given):
    with pytest.raises(BadInput, match="sanitised"):
        filters_of(given)
    assert filters_of(None) is None
    assert filters_of({"name": "dp", "clip": 2.0}) == [("dp", {"clip": 2.0})]


def test_a_file_that_is_too_large_is_refused(tmp_path, monkeypatch):
    from fedaudit.utils.bounds import Bounds

    append_round(tmp_path, lambda _: line())
    monkeypatch.setattr("fedaudit.guard.rounds.SITE", Bounds("lines", 10))
    assert log(tmp_path, 8.0, given=LOCAL).end(line()).done == "stopped"
    assert log(tmp_path).end(line()).done == "left"
    assert [path.name for path in Path(tmp_path).iterdir()] == [FILE]
