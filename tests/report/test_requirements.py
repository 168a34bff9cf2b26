"""What texts ask is met only where it was measured, not met where a test says so, and else not tested."""

from __future__ import annotations

from typing import Any

import pytest

from fedaudit.attacks.standards import ASKED
from fedaudit.report.again import changes
from fedaudit.report.page import render_report
from fedaudit.report.requirements import RULES, requirements
from fedaudit.report.share import shareable
from fedaudit.results import (
    AttackRecord,
    AttackSummary,
    AuditResult,
    EpsilonBound,
    EpsilonResult,
    HistoryRecord,
    HistoryTiming,
    Interval,
    MetricSummary,
    RecordEpsilon,
    RequirementRecord,
    Threshold,
    Timing,
    Worst,
)
from tests.report.output_cases import result


def history(epsilon: list[float] | None) -> HistoryRecord:
    timing = HistoryTiming(training=0.0, client_defence=0.0)
    return HistoryRecord(
        bytes=1, parameters=1, epsilon=epsilon or [], epsilon_delta=1e-5, epsilon_unit="record", timing=timing
    )


def asked(
    verdict: Any, accuracy: tuple[float, float, float] = (0.5, 0.44, 0.56), worst: float | None = None
) -> AttackSummary:
    mean, low, high = accuracy
    value = Interval(mean=mean, median=mean, low=low, high=high, n=300)
    metric = MetricSummary(name="membership_accuracy", summary="", unit="", higher_is_better=True, value=value)
    return AttackSummary(
        attack="lira",
        federation="sgd",
        update_kind="gradient",
        updates=1,
        images=0,
        kind="membership",
        metrics=[metric],
        verdict=verdict,
        verdict_text="as it came out",
        worst=None if worst is None else Worst(value=9, n=150, p_value=worst, text="9 members stand out"),
        timing=Timing(seconds=7.0),
    )


@pytest.fixture
def base(tmp_path) -> AuditResult:
    return result(tmp_path)


def line(base: AuditResult, id_: str, **changes: Any) -> RequirementRecord:
    return next(one for one in requirements(base.model_copy(update=changes)) if one.id == id_)


def with_history(base: AuditResult, *courses: HistoryRecord | None) -> dict[str, Any]:
    one = base.federations[0]
    return {
        "federations": [one.model_copy(update={"name": f"f{i}", "history": c}) for i, c in enumerate(courses)],
        "summaries": [],
        "findings": [],
    }


def test_every_line_has_a_source_and_a_rule_or_a_reason():
    assert len({(one.text, one.id) for one in ASKED}) == len(ASKED)
    for one in ASKED:
        assert bool(one.by) != bool(one.why), one
        assert one.source
        assert not one.by or one.by in RULES
    assert set(RULES) == {one.by for one in ASKED if one.by}
    aisvs = [one.id for one in ASKED if one.text.startswith("OWASP")]
    assert aisvs == [f"11.{section}.{i + 1}" for section, n in ((1, 5), (2, 5), (3, 4), (4, 3)) for i in range(n)]


@pytest.mark.parametrize(
    ("rows", "outcome", "value"),
    [
        ([], "not tested", None),
        ([asked("not applicable")], "not tested", None),
        ([asked("inconclusive")], "not tested", 0.5),
        ([asked("not demonstrated"), asked("inconclusive", (0.51, 0.45, 0.57))], "not tested", 0.51),
        ([asked("not demonstrated", (0.56, 0.501, 0.62))], "not tested", 0.56),  # too near to call
        ([asked("not demonstrated", (0.5, 0.35, 0.65))], "not tested", 0.5),  # of too few
        ([asked("not demonstrated", worst=0.2)], "met", 0.5),
        ([asked("not demonstrated", worst=0.005)], "not met", 0.5),  # some members are known for certain
        ([asked("not demonstrated"), asked("not demonstrated", (0.52, 0.46, 0.58))], "met", 0.52),
        ([asked("not demonstrated"), asked("inferred", (0.6, 0.54, 0.66))], "not met", 0.6),
        ([asked("inferred", (0.5, 0.44, 0.56))], "not met", 0.5),  # pairs tell, though the decisions don't
    ],
)
def test_membership_is_no_better_than_guessing_only_where_all_that_could_find_it_found_nothing(
    rows: list[AttackSummary], outcome: str, value: float | None, base
):
    found = line(base, "11.2.5", summaries=rows)
    assert (found.outcome, found.value) == (outcome, value)
    if value is not None:
        interval = next(m.value for s in rows for m in s.metrics if m.value.mean == value)
        assert (found.low, found.high, found.n) == (interval.low, interval.high, 300)


@pytest.mark.parametrize(
    ("epsilons", "outcome"),
    [
        ([[1.0, 2.0]], "answered"),
        ([[1.0], None], "not met"),
        ([[float("inf")]], "not met"),
        ([None], "not met"),
    ],
)
def test_private_training_needs_noise_that_counts_everywhere(epsilons: list[Any], outcome: str, base):
    found = line(base, "11.2.4", **with_history(base, *(history(e) for e in epsilons)))
    assert found.outcome == outcome
    assert found.value == (2.0 if outcome == "answered" else None)


def test_what_isn_t_known_of_the_training_isn_t_called_met_or_not_met(base):
    assert line(base, "11.2.4", **with_history(base, history([1.0]), None)).outcome == "not tested"
    for id_ in ("parameters", "unit", "composition", "trust"):
        assert line(base, id_, **with_history(base, history(None))).outcome == "not tested"
    told = line(base, "parameters", **with_history(base, history([0.5, 1.234])))
    assert (told.outcome, told.value) == ("answered", 1.234)
    assert "ε 1.24 at δ = 1e-05" in told.answer  # never rounded down
    assert line(base, "unit", **with_history(base, history([1.0]))).answer == "f0: one record"


def canaries(demonstrated: float | None, detectable: float | None) -> EpsilonResult:
    return EpsilonResult(
        claimed=3.0,
        delta=1e-5,
        unit="record",
        adjacency="add-remove",
        canaries=1000,
        canaries_in=500,
        confidence=0.95,
        correction="",
        demonstrated=demonstrated,
        attainable=6.0,
        detectable=detectable,
        observers=[],
    )


@pytest.mark.parametrize(
    ("demonstrated", "detectable", "outcome"),
    [
        (1.0, 5.0, "answered"),  # an audit proves no promise
        (None, 5.0, "answered"),
        (4.0, 5.0, "not met"),
        (1.0, None, "not tested"),
        (3.1, 5.0, "not tested"),
    ],
)
def test_canaries_break_a_promise_and_never_keep_one(demonstrated, detectable, outcome, base):
    changes = with_history(base, history([3.0]))
    own = {"federation": "f0", "epsilon": canaries(demonstrated, detectable), "images": []}
    finding = base.findings[0].model_copy(update={**own, "is_leak": outcome == "not met"})
    found = line(base, "correctness", **{**changes, "findings": [finding]})
    assert found.outcome == outcome
    assert line(base, "11.2.4", **{**changes, "findings": [finding]}).outcome == (
        "not met" if outcome == "not met" else "answered"
    )


def test_a_promise_that_membership_refutes_is_broken(base):
    bound = EpsilonBound(
        method="one_run",
        kind="bound",
        epsilon=4.0,
        delta=1e-5,
        confidence=0.95,
        unit="record",
        adjacency="replace",
        canaries=300,
        guesses=300,
        correct=250,
        correction="",
        assumes="",
    )
    for p_value, outcome in ((0.005, "not met"), (0.05, "not tested")):
        shown = RecordEpsilon(bound=bound, claimed=3.0, p_value=p_value, attainable=6.0)
        finding = base.findings[0].model_copy(update={"federation": "f0", "record_epsilon": shown})
        changes = {**with_history(base, history([3.0])), "findings": [finding]}
        assert line(base, "correctness", **changes).outcome == outcome


@pytest.mark.parametrize(
    ("adversary", "who"),
    [("server", "server"), ("eavesdropper", "server"), ("client", "site"), ("malicious-server", "server")],
)
def test_means_are_told_of_the_recipient_who_has_them(adversary: str, who: str, base):
    changes: dict[str, Any] = {
        "adversary": base.adversary.model_copy(update={"adversary": adversary}),
        "summaries": [asked("inferred")],
        "attacks": [AttackRecord(name="lira", summary="", paper="", settings={"model": "client"})],
    }
    outcomes = {id_: line(base, id_, **changes).outcome for id_ in ("server", "site", "user")}
    assert outcomes == {**dict.fromkeys(("server", "site", "user"), "not tested"), who: "not met"}
    changes["attacks"][0].settings["model"] = "global"
    assert line(base, "user", **changes).outcome == "not met"
    changes["summaries"] = [asked("not demonstrated")]
    assert line(base, who, **changes).outcome == "answered"  # no proof, so nothing is met


@pytest.mark.parametrize("id_", ["Art. 15(5), confidentiality", "Art. 5(1)(f), 32(1)(b)"])
def test_confidentiality_isn_t_met_where_an_attack_works_and_never_met(id_: str, base):
    (worked,) = [s for s in base.summaries if s.verdict == "recovered"][:1]
    found = line(base, id_)
    assert worked.evidence is not None
    assert worked.evidence.low is not None
    assert (found.outcome, found.value, found.low) == ("not met", worked.evidence.value, worked.evidence.low)
    assert f"[{worked.evidence.low:.3g}, {worked.evidence.high:.3g}]" in found.answer
    assert line(base, id_, summaries=[asked("not demonstrated"), asked("inconclusive")]).outcome == "answered"
    assert line(base, id_, summaries=[asked("inconclusive")]).outcome == "not tested"
    assert line(base, id_, summaries=[]).outcome == "not tested"


def test_the_acts_other_lines_are_answered_with_what_is_there_and_never_met(base):
    limit = Threshold(metric="psnr", limit=20, worst=30, where="invg on sgd", exceeded=True, outcome="fail")
    told = line(base, "Art. 9(8)", thresholds=[limit])
    assert (told.outcome, told.answer.partition(".")[0]) == ("answered", "psnr at most 20: fail")
    assert line(base, "Art. 9(8)", thresholds=[]).outcome == "not tested"
    changes = with_history(base, history(None).model_copy(update={"accuracy": [0.1, 0.75]}))
    assert line(base, "Art. 15(1)", **changes).answer == "f0: 0.75 at the end"
    assert line(base, "Art. 15(1)", **with_history(base, history(None))).outcome == "not tested"
    assert "this audit is one" in line(base, "Art. 32(1)(d)").answer
    assert line(base, "Art. 25(1)").answer.startswith("sgd: no defence")
    defended = base.federations[0].model_copy(update={"client_defence": "dp"})
    assert line(base, "Art. 25(1)", federations=[defended]).answer.startswith("sgd: dp")
    laws = [one for one in requirements(base) if one.text in ("EU AI Act", "GDPR")]
    assert {one.outcome for one in laws} <= {"not met", "answered", "not tested"}


def test_a_defence_that_is_only_tried_answers_for_nobody(base):
    changes = with_history(base, history(None), history([1.0]))
    tried = changes["federations"][1].model_copy(update={"client_defence": "dp", "defences": "dp"})
    changes["federations"] = [changes["federations"][0], tried]
    compared = {"scenario": {"evaluation": {"compare_defences": True}}}
    assert line(base, "parameters", **changes).outcome == "answered"
    assert line(base, "parameters", **changes, **compared).outcome == "not tested"


def test_the_page_and_what_is_shared_say_the_same(tmp_path, base):
    rows = [asked("not demonstrated", (0.52, 0.46, 0.58))]
    attacks = [AttackRecord(name="lira", summary="", paper="", settings={"model": "global"})]
    made = base.model_copy(update={"summaries": rows, "findings": [], "attacks": attacks})
    made = made.model_copy(update={"requirements": requirements(made)})
    assert shareable(made).requirements == made.requirements
    part = render_report(made, tmp_path).partition('id="mapping"')[2].partition("</section>")[0]
    assert "lira on sgd is right about 0.52 [0.46, 0.58] of 300 records" in part
    assert "<b>met</b>" in part
    assert "11.1.1, 11.1.2" in part  # among what wasn't tested


def test_what_mustn_t_change_is_told_of_the_federations_in_use(base):
    one = base.federations[0]
    tried = one.model_copy(update={"name": "dp", "client_defence": "dp", "defences": "dp"})
    (told,) = changes(base)
    assert (told.federation, told.more_rounds_than, told.other_clients_than, told.without) == ("sgd", 1, 2, [])
    assert (told.other_model_than, told.other_parameters_than) == ("lenet", 100)
    both = base.model_copy(update={"federations": [one, tried]})
    assert [(c.federation, c.without) for c in changes(both)] == [("sgd", []), ("dp", ["dp"])]
    compared = both.model_copy(update={"scenario": {"evaluation": {"compare_defences": True}}})
    assert [c.federation for c in changes(compared)] == ["sgd"]


def test_what_is_shared_meets_no_line_that_is_not_met_at_the_site(base):
    few = base.model_copy(update={"summaries": [asked("not demonstrated", worst=0.001)]})
    whole, shared = requirements(few), shareable(few).requirements
    assert [one.outcome for one in whole] == [one.outcome for one in shared]
    (told,) = [one for one in shared if one.id == "11.2.5"]
    assert told.outcome == "not met"
    assert "more members than by luck" in told.answer
    assert "9 members" not in told.answer
