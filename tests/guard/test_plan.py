"""What a guard's checks take of a site's time: at most their share of it, and none of them never."""

from __future__ import annotations

import math

import pytest

from fedaudit.guard.plan import Plan
from fedaudit.guard.rounds import CheckRecord, SiteRound

NOW = "2026-01-01T00:00:00+00:00"
TAKES = {"labels": 0.2, "invg": 10.0, "members": 0.05}


def played(rounds: int, share: float | None, trained: float = 3.0, beside: float = 0.01) -> tuple[Plan, list[set[str]]]:
    """Play a job on a clock of our own, where every check takes what it takes."""
    plan, found = Plan(share), []
    for _ in range(rounds):
        due = plan.begin(list(TAKES), trained)
        for name in due:
            plan.played(name, TAKES[name])
        spent = beside + sum(TAKES[name] for name in due)
        plan.end(SiteRound(time=NOW, job="j", site="s", trained=trained, spent=spent), beside)
        found.append(set(due))
        if share is not None and len(found) > 1 and due:
            assert plan.spent <= share * plan.trained + 1e-9  # whatever is played is paid for
    return plan, found


def test_after_the_first_round_all_checks_take_their_share_and_no_more():
    plan, found = played(2000, 0.05)
    assert found[0] == set(TAKES)  # measures
    debt = sum(TAKES.values()) + 0.01
    paid = math.ceil(debt / (0.05 * 3.0 - 0.01))  # rounds until what is earned beside the rest has paid for it
    assert not any(found[1 : paid - 1])
    assert any(found[paid : paid + 2])
    assert 0.9 * 0.05 < plan.spent / plan.trained <= 0.05
    times = {name: sum(name in due for due in found) for name in TAKES}
    assert times["members"] > times["labels"] > times["invg"] > 5  # the dear one isn't starved


def test_a_round_that_pays_for_all_plays_all():
    assert all(due == set(TAKES) for due in played(50, 0.05, trained=1000.0)[1])


def test_without_a_share_everything_is_played_and_with_next_to_none_once():
    assert all(due == set(TAKES) for due in played(20, None)[1])
    assert [bool(due) for due in played(20, 1e-9)[1]] == [True] + 19 * [False]


def test_a_check_that_comes_later_is_measured_when_it_comes():
    plan = Plan(0.05)
    plan.begin(["labels"], 1.0)
    plan.played("labels", 5.0)
    plan.end(SiteRound(time=NOW, job="j", site="s", trained=1.0, spent=5.0))
    assert plan.begin(["labels", "members"], 1.0) == {"members": math.inf}


def test_what_was_too_little_is_put_by_until_it_is_enough():
    plan, looks = Plan(0.1), []
    for _ in range(100):
        due = plan.begin(["members"], 1.0)
        if due:
            looks.append(due["members"])
            enough = due["members"] >= 2.0
            took = 2.0 if enough else 0.01
            plan.played("members", took, 0.0 if enough else 2.0)
            plan.end(SiteRound(time=NOW, job="j", site="s", trained=1.0, spent=took))
        else:
            plan.end(SiteRound(time=NOW, job="j", site="s", trained=1.0))
    assert looks[0] == math.inf
    assert all(look >= 2.0 for look in looks)
    assert len(looks) == 5  # 2 s in the first round, 8 of the 10 s that 100 rounds earn


def test_a_guard_that_begins_anew_goes_on_with_what_was_written_down():
    quiet = CheckRecord(outcome="quiet", seconds=4.0)
    lines = [
        SiteRound(time=NOW, job="j", site="s", trained=10.0, spent=5.0, norm=norm, checks={"invg": quiet})
        for norm in (1.0, 5.0, 2.0)
    ]
    alarm = CheckRecord(outcome="alarm", seconds=3.0)
    lines += [SiteRound(time=NOW, job="j", site="s", trained=10.0, spent=5.0, norm=99.0, checks={"invg": alarm})]
    plan = Plan.of(lines, 0.05)
    assert (plan.rounds, plan.trained, plan.spent, plan.costs) == (4, 40.0, 20.0, {"invg": 3.0})
    assert plan.usual_norm == 2.0  # of quiet rounds alone
    assert plan.begin(["invg"], 10.0) == {}
    assert Plan(0.05).usual_norm is None
    assert Plan(0.05, norms=[1.0, 2.0]).usual_norm == pytest.approx(1.5)


def test_a_page_that_its_round_doesn_t_pay_for_is_drawn_less_and_less():
    plan, drawn = Plan(0.05), []
    for number in range(1, 20):
        plan.begin([], 1.0)
        plan.drawing = 0.2
        drawn += [number] if plan.draws(1.0) else []
        assert plan.draws(4.0)
    assert drawn == [1, 2, 4, 8, 16]
