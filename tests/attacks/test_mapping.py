"""What standards call an attack: in the registry, in results, on the page; and only identifiers that are listed."""

from __future__ import annotations

import json
import re
from typing import Any, ClassVar

import pytest

from fedaudit.attacks import ATTACKS
from fedaudit.attacks.base import Attack
from fedaudit.attacks.findings import ImageFinding
from fedaudit.attacks.standards import (
    AI_ACT,
    AISVS,
    ATLAS,
    BY_KIND,
    CNIL,
    EDPB,
    EDPB_TESTS,
    EVIDENCE_FOR,
    IDENTIFIERS,
    NIST,
    mapping,
)
from fedaudit.evaluation.finding_types import FINDING_TYPES
from fedaudit.report.mapping import assessment
from fedaudit.results import AttackRecord, AttackSummary, MappingRecord, Verdict
from tests.conftest import Command
from tests.report.output_cases import result
from tools.docs.pages import DOCS

# Written down here once more, so that a slip in the table is noticed.
LISTED = {
    NIST: {f"NISTAML.0{n}" for n in (26, 31, 32, 33, 34, 51)},
    ATLAS: {"AML.T0018", "AML.T0020", "AML.T0024.000", "AML.T0024.001", "AML.T0024.002"},
    EDPB: {
        *("membership-inference", "attribute-inference", "exfiltration"),
        *("regurgitation", "model-inversion", "reconstruction"),
    },
    CNIL: {"cnil-membership-inference", "cnil-model-inversion", "cnil-regurgitation"},
    AISVS: {"C11.2", "C11.3"},
    AI_ACT: {"Art. 15(5)"},
}
MEMBERS = ["cnil-membership-inference", "C11.2", "Art. 15(5)"]
EXAMPLES = ["cnil-model-inversion", "C11.2", "Art. 15(5)"]


def test_every_identifier_is_listed_under_its_standard():
    found: dict[str, set[str]] = {}
    for id_, record in IDENTIFIERS.items():
        assert record.id == id_
        assert record.nearest == (record.standard in (ATLAS, CNIL, AISVS))
        found.setdefault(record.standard, set()).add(id_)
    assert found == LISTED
    assert set(EDPB_TESTS) == LISTED[EDPB]


def test_every_kind_of_finding_is_mapped():
    assert set(BY_KIND) == set(FINDING_TYPES)


@pytest.mark.parametrize("name", ATTACKS.names())
def test_every_attack_has_a_class_of_nist_and_a_nearest_technique(name):
    records = ATTACKS[name].value.by_standards()
    assert {r.standard for r in records} >= {NIST, ATLAS, AISVS, AI_ACT}
    assert all(IDENTIFIERS[r.id] == r for r in records)
    told = ATTACKS[name].info["mapping"]
    assert [MappingRecord.model_validate(one) for one in told] == records


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("invg", ["NISTAML.032", "AML.T0024.001", "reconstruction", *EXAMPLES]),
        ("shadow-models", ["NISTAML.033", "AML.T0024.000", "membership-inference", *MEMBERS]),
        ("attribute-loss", ["NISTAML.032", "AML.T0024.001", "attribute-inference", *EXAMPLES]),
        ("local-model", ["NISTAML.031", "AML.T0024.002", "C11.3", "Art. 15(5)"]),
        ("gan", ["NISTAML.032", "NISTAML.026", "AML.T0024.001", "AML.T0020", "model-inversion", *EXAMPLES]),
        (
            "imprint",
            ["NISTAML.032", "NISTAML.026", "NISTAML.051", "AML.T0024.001", "AML.T0018", "reconstruction", *EXAMPLES],
        ),
        ("agrevader", ["NISTAML.033", "NISTAML.026", "AML.T0024.000", "AML.T0018", "membership-inference", *MEMBERS]),
    ],
)
def test_what_an_attack_does_decides_what_it_is_called(name, ids):
    assert [r.id for r in ATTACKS[name].value.by_standards()] == ids


def test_a_plug_in_declares_its_own():
    own = MappingRecord(standard="House rules", id="H-1", name="no faces")

    class Faces(Attack):
        name = "faces"
        summary = "faces"
        threat_model = "server"
        needs: ClassVar[tuple[str, ...]] = ()
        finds = ImageFinding
        standards: ClassVar[tuple[str | MappingRecord, ...]] = ("NISTAML.051", own)

        def _run(self, *_: Any) -> ImageFinding:
            raise NotImplementedError

    assert [r.id for r in Faces.by_standards()] == [
        *("NISTAML.032", "NISTAML.051", "AML.T0024.001", "reconstruction", *EXAMPLES, "H-1")
    ]
    assert Faces.by_standards()[-1] is own
    with pytest.raises(ValueError, match=r"'NISTAML\.999' isn't known; known: NISTAML\.026"):
        mapping("images", ["NISTAML.999"])
    assert mapping("a kind of somebody else's") == []


ALTERED = "a server that alters the model it sends (NIST AI 100-2 E2025: NISTAML.026 and NISTAML.051)"


def summary(attack: str, verdict: Verdict, federation: str = "f") -> AttackSummary:
    row = {"attack": attack, "federation": federation, "update_kind": "gradient", "updates": 1, "images": 0}
    return AttackSummary.model_validate({**row, "verdict": verdict, "verdict_text": "so it is"})


def attack(name: str, kind: str) -> AttackRecord:
    return AttackRecord(name=name, summary="", paper="", settings={}, mapping=mapping(kind))


def test_the_assessment_lists_what_was_tested_and_what_was_not(tmp_path):
    rows = [
        *(summary("invg", "recovered"), summary("invg", "not demonstrated", "g")),
        *(summary("labels", "inconclusive"), summary("gan", "not applicable")),
    ]
    attacks = [attack("invg", "images"), attack("labels", "labels"), attack("gan", "class-images")]
    made = assessment(result(tmp_path).model_copy(update={"summaries": rows, "attacks": attacks}))
    assert made.rows[0].verdicts == [("recovered", ["f"]), ("not demonstrated", ["g"])]
    assert [[r.id for r in called] for called in made.rows[0].called] == [
        *(["NISTAML.032"], ["AML.T0024.001"], ["reconstruction"]),
        *([name] for name in EXAMPLES),
    ]
    untested = dict(made.untested)
    assert "reconstruction" not in untested
    assert untested["attribute inference"] == "inconclusive (labels)"
    assert untested["model inversion"] == "could not be run (gan)"
    for test in ("membership inference", "exfiltration", "regurgitation of training data"):
        assert untested[test] == "no attack of this audit makes this test"
    assert untested[ALTERED] == "no attack of this audit makes this test"


@pytest.mark.parametrize(
    ("verdict", "why"),
    [("not demonstrated", None), ("recovered", None), ("not applicable", "could not be run (imprint)")],
)
def test_an_audit_of_a_malicious_server_says_that_it_tested_one(tmp_path, verdict, why):
    was = result(tmp_path)
    changes = {
        "adversary": was.adversary.model_copy(update={"adversary": "malicious-server"}),
        "summaries": [summary("imprint", verdict)],
        "attacks": [attack("imprint", "images")],
    }
    assert dict(assessment(was.model_copy(update=changes)).untested).get(ALTERED) == why


ACT = ("EU AI Act, Art. 9", "Art. 15(5) confidentiality attacks", "nearest: C11.2", "Evidence: which inference")


def test_no_law_or_standard_is_said_to_be_complied_with():
    said = " ".join(text for pair in EVIDENCE_FOR.values() for text in pair)
    assert {int(n) for article in EVIDENCE_FOR for n in re.findall(r"\d+", article)} == {
        9,
        10,
        11,
        12,
        15,
        26,
        27,
        53,
        55,
    }
    assert not re.search(r"\bcompl(y|ies|iant|iance)\b|\bmeets\b|\bproves\b|\bsafe\b", said)


def test_the_docs_have_every_identifier_and_article():
    page = (DOCS / "data-protection" / "standards.md").read_text(encoding="utf-8")
    for title, ids in LISTED.items():
        for id_ in ids:
            assert (IDENTIFIERS[id_].name if title in (EDPB, CNIL) else id_).removesuffix(" of training data") in page
    for article, (about, evidence) in EVIDENCE_FOR.items():
        assert f"| {article} | {about.split(',')[0]}" in page
        assert evidence.split(",")[0].split(" as a part")[0] in page


def test_the_page_carries_the_table(tmp_path):
    from fedaudit.report.page import render_report

    page = render_report(result(tmp_path), tmp_path)
    part = page.partition('<section class="part" id="mapping"')[2].partition("</section>")[0]
    text = " ".join(re.sub("<[^>]*>", " ", part).split())
    for words in (
        "NISTAML.032 data reconstruction",
        "nearest: AML.T0024.001",
        "invg recovered (sgd)",
        "SP 800-226",
        *ACT,
    ):
        assert words in text
    assert "Membership inference: no attack of this audit makes this test." in text


def test_list_tells_it(command: Command):
    entries = json.loads(command("list", "attacks", "--json").out)["attacks"]
    told = {entry["name"]: [m["id"] for m in entry["mapping"]] for entry in entries}
    assert told["invg"] == ["NISTAML.032", "AML.T0024.001", "reconstruction", *EXAMPLES]
    assert "nearest MITRE AML.T0024.001" in " ".join(command("list", "attacks", "--long").out.split())
