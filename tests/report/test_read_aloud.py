"""First lines as a reader says them aloud, and reasons that many attacks share: once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fedaudit.attacks import make_attack
from fedaudit.evaluation.finding_types import FINDING_TYPES
from fedaudit.evaluation.limits import TIME_IS_UP
from fedaudit.pipeline.controls import Conditions, Controls, judged_by_control
from fedaudit.report import markdown
from fedaudit.report.conclusion import headline, message_of
from fedaudit.report.join import join_audits
from fedaudit.report.page import render_report
from fedaudit.report.terminal import print_summary
from fedaudit.report.wording import shared
from fedaudit.results import AdversaryRecord, AttackSummary, AuditResult, ControlResult, Evidence
from tests.report.output_cases import result as audit_of

WHO = ["server", "malicious-server", "eavesdropper", "client", "colluding-clients", "aggregating-client", "party"]
VERDICTS = ["recovered", "identifiable", "inferred", "inconclusive", "not demonstrated", "not applicable"]
PROOF = Evidence(what="share", value=0.5, n=8, of="records", baseline=0.4, method="m")


def summary(attack: str, kind: str, verdict: str, **rest: object) -> AttackSummary:
    told = {"attack": attack, "federation": "sgd", "update_kind": "gradient", "updates": 1, "images": 0, "kind": kind}
    return AttackSummary.model_validate({**told, "verdict": verdict, "verdict_text": "t", "evidence": PROOF, **rest})


def control(**rest: object) -> ControlResult:
    told = {"attack": "a", "model": "same", "federation": None, "case": "known records", "won": True, "text": "x"}
    return ControlResult.model_validate({**told, **rest})


CONTROLS = {
    "turned off": None,
    "won": control(),
    "won elsewhere": control(federation="plain"),
    "power": control(power=PROOF),
    "no power": control(power=PROOF, won=False),
    "defence": control(power=PROOF, without_defence=True),
    "lost": control(won=False),
    "reference": control(model="reference"),
    "none": control(won=None),
}


def doubled(text: str) -> list[str]:
    """Return the words that a line mustn't have twice, and has."""
    words = re.findall(r"[a-z]+", text.lower())
    return [word for word in ("whether", "tell", "can") if words.count(word) > 1]


@pytest.mark.parametrize("kind", sorted(FINDING_TYPES))
def test_a_first_line_has_no_word_twice_whatever_was_asked_and_found(kind: str, tmp_path: Path) -> None:
    seen = set[str]()
    for role in WHO:
        adversary = AdversaryRecord(adversary=role, summary="", knows=[], does_not_know=[], acts=False)
        known: dict[str, Any] = {"who": adversary.who, "things": "records", "attack": make_attack("invg")}
        judged = [
            judged_by_control(
                summary("invg", kind, "inconclusive"), None, wrong=None, conditions=Conditions(1, 1), **known
            )
        ]
        for case in CONTROLS.values():
            for wrong, batch in ((None, 1), (None, 8), ("the facts don't explain the updates", 1)):
                found = summary("invg", kind, "not demonstrated")
                controls = None if case is None else Controls()
                if case is not None and controls is not None:
                    controls.add(case, [found], size=1)
                at = Conditions(batch, 1, noisy=batch, defended=batch > 1)
                judged.append(judged_by_control(found, controls, wrong=wrong, conditions=at, **known))
        for row in judged:
            audit = audit_of(tmp_path, [([], row)], adversary=adversary)
            seen |= {row.headline, headline(audit).title, message_of(audit, row).split(" Evidence:")[0]}
        for verdict in VERDICTS:
            sites = {
                site: (audit_of(tmp_path, [([], summary("invg", kind, verdict))], adversary=adversary, name=site), True)
                for site in ("north", "south")
            }
            seen.add(join_audits(sites).headline)
            seen.add(headline(sites["north"][0]).title)
    assert len(seen) > 20
    assert [line for line in seen if doubled(line)] == []
    assert [line for line in seen if not line.endswith((".", "!"))] == []


def test_the_words_are_found_doubled_where_they_are() -> None:
    assert doubled("This audit can't tell whether the server can tell whether it was.") == ["whether", "tell", "can"]


def many() -> list[AttackSummary]:
    """Fourteen attacks that weren't run for want of time, and as many that found nothing and have no control."""
    late = [
        summary(
            f"late-{i}",
            "images",
            "not applicable",
            evidence=None,
            verdict_text=f"late-{i} could not be run: {TIME_IS_UP}",
        )
        for i in range(14)
    ]
    advice = "no positive control could be run for {}, which found nothing: no time was left"
    open_ones = [summary(f"open-{i}", "labels", "inconclusive", advice=[advice.format(f"open-{i}")]) for i in range(14)]
    return [*late, *open_ones]


def test_a_reason_that_many_share_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    controls = [control(attack=f"open-{i}", won=None, text="there was no second left for it") for i in range(14)]
    result: AuditResult = audit_of(tmp_path, [([], row) for row in many()], controls=controls)
    print_summary(result)
    printed = capsys.readouterr().out
    page = re.sub("<[^>]*>", " ", render_report(result, tmp_path))
    marked = markdown.render(result).replace("\\", "")
    late, left, second = TIME_IS_UP.removeprefix("not run: the time that"), "no time was left", "no second left for it"
    told = {
        name: [text.count(reason) for reason in (late, left, second)]
        for name, text in {"terminal": printed, "page": page, "markdown": marked}.items()
    }
    # of the attack that the first line is about, the advice stands below it, too; on the page only there
    assert told == {"terminal": [1, 2, 1], "page": [1, 1, 1], "markdown": [1, 2, 0]}
    whom = f"{', '.join(f'late-{i}' for i in range(14))} on sgd: each could not be run"
    assert whom in printed
    assert whom.replace("each", "Each") in page
    assert whom.replace("each", "Each") in marked


def test_what_is_told_of_one_names_it_and_what_differs_is_told_apart() -> None:
    told = [
        ("a", "x", "a fails"),
        ("b", "x", "b fails"),
        ("a", "y", "a fails"),
        ("c", "x", "c-b fails"),
        ("d", "", "d is d"),
    ]
    assert shared(told) == [("a, b on x, y", "each fails", 3), ("c on x", "c-b fails", 1), ("d", "d is d", 1)]
