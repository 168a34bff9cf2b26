"""What a site shares: no example, name or hash of anybody, in whatever form and place; a planted one is refused."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedaudit.attacks.findings import ImageFinding
from fedaudit.report.page import render_report
from fedaudit.report.share import FILES, KEPT, LEAST, check_fields, share, shareable
from fedaudit.report.share_check import Phrases, phrases_of, refuse_traces
from fedaudit.results import (
    AuditResult,
    Evidence,
    FindingResult,
    GroupExposure,
    MetricResult,
    MetricSummary,
    RecordExposure,
    RecordingRecord,
    RowResult,
    SequenceResult,
    SharedRecord,
)
from fedaudit.results.record import Record
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.truth import Truth
from fedaudit.utils.errors import BadInput
from tests.conftest import Command, refused
from tests.report.output_cases import images_of, interval, result

CLIENTS = ["clinic-eppendorf", "clinic-charite"]
ROW = ["52", "female", "never smoked", "Ost-Berlin", "37.25", "yes"]
NOTE = ["patient", "reports", "dyspnoea", "after", "climbing", "two", "flights", "of", "stairs"]


def groups(*members: int, column: str = "") -> list[GroupExposure]:
    rows = enumerate(members)
    return [GroupExposure(label=i, column=column, auc=0.7, low=0.6, high=0.8, members=n, p_value=0.2) for i, n in rows]


def membership(exposure: list[GroupExposure], members: int) -> FindingResult:
    return FindingResult(
        attack="loss-threshold",
        federation="sgd",
        update_kind="gradient",
        round=None,
        client=None,
        num_examples=80,
        status="done",
        kind="membership",
        metrics=[MetricResult(name="membership_auc", value=0.7, higher_is_better=True, n=2 * members, of="records")],
        exposure=exposure,
        most_exposed=[RecordExposure(record=17, client=1, label=3, nonmembers_above=0, others=40)],
    )


@pytest.fixture
def audit(tmp_path: Path) -> Path:
    """An audit's folder: pictures, a kept finding, ground truth, a row, a text, records, clients with names."""
    folder = tmp_path / "site-audit"
    told = result(folder)
    first = told.findings[0]
    images = [first.images[0].model_copy(update={"victim": "b64783dcc5e0"}), *first.images[1:]]
    first = first.model_copy(
        update={
            "images": images,
            "rows": [RowResult(cells=6, right=6, true_label=1.0, true=ROW, recovered=ROW)],
            "sequences": [SequenceResult(true=[5, 1, 8, 2, 0, 7, 3, 6, 4], found=[5, 1], rouge1=1, rouge2=1)],
        }
    )
    recording = RecordingRecord(clients=CLIENTS, facts="unverified", notes=["of clinic-eppendorf"])
    told = told.model_copy(
        update={
            "findings": [first, *told.findings[1:], membership(groups(30, 12, 7), 49)],
            "data": told.data.model_copy(update={"words": NOTE, "name": "lungs", "summary": "of Ost-Berlin"}),
            "scenario": {**told.scenario, "data": {"name": "images", "path": "/srv/pacs/lungs-2031"}},
            "federations": [told.federations[0].model_copy(update={"recording": recording})],
        }
    )
    AuditResult.model_validate(told.model_dump()).save(folder / "results.json")
    draw = torch.Generator().manual_seed(3)
    pixels = torch.rand(2, 1, 8, 8, generator=draw)
    finding = ImageFinding(
        attack="invg", seconds=1.0, images=pixels, labels=torch.tensor([1, 2]), label_source="given", notes=()
    )
    (folder / "findings").mkdir()
    finding.save(folder / "findings" / "6da8785a8198b0d8a4a9a4128c589c0a.safetensors")
    true = torch.rand(3, 1, 8, 8, generator=draw)
    labels = torch.tensor([0, 1, 2])
    Truth({(0, 0): true}, {(0, 0): labels}, true, labels, {"transcript": "t"}).save(folder / "truth.safetensors")
    return folder


def clean(folder: Path) -> tuple[dict[str, str], Phrases]:
    """Return what would be shared of the audit, and what mustn't be in it."""
    told = AuditResult.load(folder / "results.json")
    about = SharedRecord(digest="sha256:" + "0" * 64, left_out=[], min_group_size=LEAST, looked_for=[])
    made = shareable(told).model_copy(update={"shared": about})
    made = AuditResult.model_validate(made.model_dump())
    return {FILES[0]: made.model_dump_json(indent=2), FILES[1]: render_report(made, folder)}, phrases_of(told, folder)


def picture(folder: Path) -> Path:
    return folder / "images" / "sgd-0-1-1-true.png"


def pixels(folder: Path) -> np.ndarray:
    return np.asarray(Image.open(picture(folder)))


def truth(folder: Path) -> np.ndarray:
    return Truth.load(folder / "truth.safetensors").inputs[0, 0][1].numpy()


def found(folder: Path) -> np.ndarray:
    finding = ImageFinding.load(next((folder / "findings").iterdir()))
    assert isinstance(finding, ImageFinding)
    return finding.images[1].numpy()


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


PLANTED: dict[str, Callable[[Path], str]] = {
    "a picture, base64": lambda f: b64(picture(f).read_bytes()),
    "a picture, base64 within other bytes": lambda f: b64(b"x" + picture(f).read_bytes()[40:]),
    "a picture, base64 for addresses": lambda f: base64.urlsafe_b64encode(picture(f).read_bytes()).decode(),
    "a picture, hexadecimal": lambda f: picture(f).read_bytes().hex().upper(),
    "a picture's data URI": lambda f: f"data:image/png;base64,{b64(picture(f).read_bytes())}",
    "pixels, hexadecimal": lambda f: pixels(f).tobytes().hex(),
    "the hash of a picture": lambda f: hashlib.sha256(picture(f).read_bytes()).hexdigest(),
    "the hash of a picture, cut short": lambda f: hashlib.sha1(picture(f).read_bytes()).hexdigest()[:20],
    "the hash of pixels": lambda f: hashlib.md5(pixels(f).tobytes()).hexdigest().upper(),
    "the hash of a picture, base64": lambda f: b64(hashlib.sha512(picture(f).read_bytes()).digest()),
    "the name of a picture": lambda _: "sgd-0-1-1-true.png",
    "the mark of a victim": lambda _: "b64783dcc5e0",
    "a true example, base64": lambda f: b64(truth(f).tobytes()),
    "a true example in double precision": lambda f: truth(f).astype(np.float64).tobytes().hex(),
    "the hash of a true example": lambda f: hashlib.blake2b(truth(f).tobytes()).hexdigest(),
    "the hash of the truth's file": lambda f: hashlib.sha256((f / "truth.safetensors").read_bytes()).hexdigest(),
    "a recovered example, base64": lambda f: b64(found(f).tobytes()),
    "the name of a finding": lambda _: "6da8785a8198b0d8a4a9a4128c589c0a",
    "the hash of a finding": lambda f: hashlib.sha256(next((f / "findings").iterdir()).read_bytes()).hexdigest(),
    "a row of a table": lambda _: "; ".join(ROW),
    "a text": lambda _: " ".join(NOTE[t] for t in [5, 1, 8, 2, 0, 7]),
    "the name of a client": lambda _: "Clinic Eppendorf",
    "the path of the data": lambda _: "/srv/pacs/lungs-2031",
    "the name of the data's folder": lambda _: "lungs_2031",
}


def test_what_is_shared_is_clean(audit):
    refuse_traces(*clean(audit))


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_trace_of_a_victim_is_refused_wherever_it_stands(audit, planted):
    files, phrases = clean(audit)
    thing = PLANTED[planted](audit)
    told = json.loads(files[FILES[0]])
    told["summaries"][0]["headline"] += f" ({thing})"
    plain = json.dumps(told, ensure_ascii=False)
    escaped = plain.replace(thing, "".join(f"\\u{ord(c):04x}" for c in thing)) if '"' not in thing else plain
    page = files[FILES[1]]
    places = {
        "a value": {FILES[0]: plain},
        "a value, escaped": {FILES[0]: escaped},
        "the page's text": {FILES[1]: page.replace("</h1>", f" {html.escape(thing)}</h1>")},
        "an attribute": {FILES[1]: page.replace("<h1>", f'<h1 title="{html.escape(thing)}">')},
        "a comment": {FILES[1]: page.replace("<h1>", f"<!-- {thing} --><h1>")},
    }
    for place, changed in places.items():
        assert next(iter(changed.values())) not in files.values(), place
        with pytest.raises(BadInput, match="nothing was written"):
            refuse_traces(changed, phrases)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("findings", lambda told: [told.findings[0]]),  # with pictures, rows, texts
        (
            "findings",
            lambda told: [told.findings[-1].model_copy(update={"most_exposed": told.findings[-1].most_exposed})],
        ),
        ("scenario", lambda _: {"seed": 5}),
        ("environment", lambda _: {"platform": "Linux"}),
        ("data", lambda told: told.data.model_copy(update={"class_names": ["0", "1"]})),
        ("repeat", lambda _: "fedaudit audit ours.yaml --out DIR"),
    ],
)
def test_a_field_that_is_not_meant_to_be_shared_is_refused(audit, key, value):
    told = AuditResult.load(audit / "results.json")
    files, _ = clean(audit)
    check_fields(files[FILES[0]])
    shared = AuditResult.model_validate_json(files[FILES[0]])
    changed = shared.model_copy(update={key: value(told)})
    with pytest.raises(BadInput, match=f"something in '{key}' that isn't meant to be shared"):
        check_fields(changed.model_dump_json(indent=2))


def test_every_type_of_the_results_is_either_shared_field_by_field_or_not_at_all():
    for kind, fields in KEPT.items():
        assert fields == "*" or set(fields.split()) < set(kind.model_fields), kind
        inner = re.findall(
            r"fedaudit\.results\.\w+\.(\w+)",
            str(
                {n: kind.model_fields[n].annotation for n in kind.model_fields if fields == "*" or n in fields.split()}
            ),
        )
        missing = {name for name in inner if name not in {k.__name__ for k in KEPT}}
        assert not {m for m in missing if any(s.__name__ == m for s in Record.__subclasses__())}, kind


@pytest.mark.parametrize(
    ("members", "total", "kept"),
    [
        ((30, 12), 42, [30, 12]),
        ((30, 12, 9), 51, [30]),  # 9 would follow from 51 - 42, and so would 12 + 9 of 21 not
        ((30, 12, 7, 8), 57, [30, 12]),  # together 15: neither follows
        ((9,), 9, []),
        ((40,), 47, []),  # 7 of no group follow
        ((10, 10), 20, [10, 10]),
    ],
)
def test_small_groups_are_left_out_and_what_they_follow_from(tmp_path, members, total, kept):
    told = result(tmp_path)
    found = membership(groups(*members, column="sex"), total)
    shared = shareable(told.model_copy(update={"findings": [found]}))
    assert [g.members for f in shared.findings for g in f.exposure] == kept
    assert not any(f.most_exposed for f in shared.findings)
    # Whatever is left out of a column is nobody, or at least ten.
    assert total - sum(kept) == 0 or total - sum(kept) >= LEAST or not kept


def test_groups_of_two_findings_tell_nothing_by_subtraction(tmp_path):
    def exposed(members: int, other: int, client: int | None = None) -> FindingResult:
        found = membership(groups(members, other, column="sex"), members + other)
        return found.model_copy(update={"client": client})

    def kept(*findings: FindingResult) -> list[list[int]]:
        told = result(tmp_path).model_copy(update={"findings": list(findings)})
        return [[g.members for g in f.exposure] for f in shareable(told).findings]

    whole = exposed(24, 40)
    assert kept(whole, exposed(24, 40)) == [[24, 40], [24, 40]]
    assert kept(whole, exposed(20, 60)) == [[24, 40]]  # four are in one and not in the other
    assert kept(whole, exposed(12, 15)) == [[24, 40], [12, 15]]
    assert kept(whole, exposed(10, 15, client=0), exposed(10, 15, client=1)) == [[24, 40]]  # 4 of client 2


@pytest.mark.parametrize(("n", "numbers"), [(40, False), (400, True)])
def test_a_rare_value_of_an_attribute_is_not_told_by_what_guessing_gets(tmp_path, n, numbers):
    """Of 40 records, 38 have the usual value: the most frequent one is right for 0.95 of them."""
    spans = {"value": interval([0.99], 1.0).model_copy(update={"n": n}), "baseline": interval([0.95], 1.0)}
    found = MetricSummary(name="attribute_accuracy", summary="", higher_is_better=True, of="records", **spans)
    evidence = Evidence(what="attribute accuracy", value=0.99, n=n, of="records", baseline=0.95, method="exact")
    _, summary = images_of(
        tmp_path,
        "map-attribute",
        [[9.0]],
        "inferred",
        kind="attribute",
        metrics=[found],
        evidence=evidence,
        verdict_text="attribute accuracy 0.99, 0.95 without the attack",
        headline="The server can tell: right for 99 %, where the most frequent value gets 95 %",
    )
    told = result(tmp_path, [([], summary.model_copy(update={"psnr": None}))])
    (tmp_path / "audit").mkdir()
    told.save(tmp_path / "audit" / "results.json")
    share(tmp_path / "audit", tmp_path / "out")
    text, page = ((tmp_path / "out" / name).read_text() for name in FILES)
    assert AuditResult.model_validate_json(text).summaries[0].verdict == "inferred"
    assert ("0.95" in text, "gets 95 %" in text, "gets 95 %" in page) == 3 * (numbers,)


def test_the_numbers_of_the_whole_audit_stay(audit):
    told = AuditResult.load(audit / "results.json")
    shared = shareable(told)
    assert [s.model_dump() for s in shared.summaries] == [s.model_dump() for s in told.summaries]
    assert shared.adversary == told.adversary
    assert shared.timing == told.timing
    assert shareable(
        shared.model_copy(update={"shared": SharedRecord(digest="", left_out=[], min_group_size=1, looked_for=[])})
    )


def test_share_writes_results_and_page_and_nothing_else(audit, tmp_path, command: Command):
    out = tmp_path / "lyon"
    done = command("share", audit, "--out", out)
    assert done.code == 0, done
    assert "searched for: bytes and hashes" in done.out
    assert sorted(p.name for p in out.iterdir()) == sorted(FILES)
    page = (out / "report.html").read_text()
    assert "A shared version" in page
    assert "<img" not in page
    shared = AuditResult.load(out / "results.json")
    assert shared.shared is not None
    assert shared.shared.min_group_size == LEAST
    assert [g.members for f in shared.findings for g in f.exposure] == [30]
    for secret in (*CLIENTS, "lungs", "Ost-Berlin", "site-audit", "b64783dcc5e0", "dyspnoea"):
        assert secret not in page + (out / "results.json").read_text()


def test_an_audit_that_is_called_after_a_victim_is_not_shared(audit, tmp_path, command: Command):
    told = AuditResult.load(audit / "results.json")
    told.model_copy(update={"name": "of Clinic-Charite, weekly"}).save(audit / "results.json")
    refused(
        command("share", audit, "--out", tmp_path / "lyon"), "results.json would have the name of a client (line 4)"
    )
    assert not (tmp_path / "lyon").exists()


def test_the_truth_of_earlier_versions_is_not_needed(audit, tmp_path, command: Command):
    done = command("share", audit, "--out", tmp_path / "lyon", "--truth", audit / "truth.safetensors")
    assert (done.code, "--truth isn't needed any more" in done.err) == (0, True)


@pytest.mark.parametrize(
    ("out", "says"),
    [("site-audit", "is the audit's own folder"), ("other", "holds an audit that isn't a shared version")],
)
def test_an_audit_is_not_overwritten(audit, tmp_path, command: Command, out, says):
    result(tmp_path / "other").save(tmp_path / "other" / "results.json")
    before = (audit / "results.json").read_bytes()
    refused(command("share", audit, "--out", tmp_path / out), says)
    assert (audit / "results.json").read_bytes() == before


@pytest.mark.parametrize("names", [["kl", "A1"], CLIENTS, ["server", "north (old)"]])
def test_who_the_adversary_is_is_shared_by_number_alone(audit, tmp_path, command: Command, names):
    told = AuditResult.load(audit / "results.json")
    threat = ThreatModel(adversary="client", clients=[0, 1])
    who = told.adversary.model_copy(update={"summary": threat.in_words(names=dict(enumerate(names)))})
    recording = RecordingRecord(clients=names, facts="unverified", notes=[])
    federation = told.federations[0].model_copy(update={"recording": recording})
    told.model_copy(update={"adversary": who, "federations": [federation]}).save(audit / "results.json")
    assert all(f"({name})" in who.summary for name in names)
    done = command("share", audit, "--out", tmp_path / "lyon")
    assert done.code == 0, done
    shared = AuditResult.load(tmp_path / "lyon" / "results.json")
    assert shared.adversary.summary == threat.in_words()


def test_a_shared_version_is_not_shared_again(audit, tmp_path, command: Command):
    command("share", audit, "--out", tmp_path / "lyon")
    refused(command("share", tmp_path / "lyon", "--out", tmp_path / "again"), "is a shared version already")
    refused(command("verify", tmp_path / "lyon"), "is a shared version, without what its numbers follow from")


@pytest.mark.parametrize("harmless", ["0" * 64, "A" * 40, "1.2345678901234567e-05", "0.12345678901234567890"])
def test_numbers_and_seals_are_no_encoded_bytes(harmless):
    refuse_traces({"results.json": f'"sha256:{harmless}", {harmless}'}, {})


def test_words_of_our_own_are_no_names(tmp_path):
    told = result(tmp_path, [images_of(tmp_path, "invg", [[30.0]], "recovered")])
    told = told.model_copy(update={"scenario": {"data": {"path": "/data/train"}}})
    refuse_traces({"page": "train on data; the server reads"}, phrases_of(told, tmp_path))
