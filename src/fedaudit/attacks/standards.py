"""What standards and laws call an attack: NIST, MITRE ATLAS, the EDPB, the CNIL, OWASP AISVS, the EU's AI Act.

All of it is data, ``standards.yaml``. An attack has the identifiers of what it finds (:data:`BY_KIND`) and those that
its class declares in ``standards``: names for what was tested. What an audit as a whole gives evidence for, article by
article, is :data:`EVIDENCE_FOR`; what texts ask line by line, and what answers it, is :data:`ASKED`. Which number
passes almost none says: limits are the user's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fedaudit.results import MappingRecord
from fedaudit.utils import plain_yaml

NIST = "NIST AI 100-2 E2025"
ATLAS = "MITRE ATLAS"
EDPB = "EDPB Opinion 28/2024"
CNIL = "CNIL AI how-to sheet, July 2025"
AISVS = "OWASP AISVS 1.0, C11"
AI_ACT = "EU AI Act"

_DATA = plain_yaml.read(Path(__file__).parent / "standards.yaml", "what standards say")

# What each is, for those who look it up, in the order of tables. ATLAS has no word for federated learning, and the CNIL
# and OWASP write of a model's answers and not of updates: theirs are the nearest ones.
ABOUT: dict[str, str] = {one["title"]: one["about"] for one in _DATA["standards"]}
READING: tuple[str, ...] = tuple(_DATA["reading"])

# Every identifier that may be used, by its id.
IDENTIFIERS: dict[str, MappingRecord] = {
    id_: MappingRecord(standard=one["title"], id=id_, name=name, nearest=one["nearest"])
    for one in _DATA["standards"]
    for id_, name in one["names"].items()
}
EDPB_TESTS = tuple(id_ for id_, record in IDENTIFIERS.items() if record.standard == EDPB)
BY_KIND: dict[str, tuple[str, ...]] = {kind: tuple(ids) for kind, ids in _DATA["by_kind"].items()}
EVIDENCE_FOR: dict[str, tuple[str, str]] = {
    article: (one["about"], one["evidence"]) for article, one in _DATA["evidence_for"].items()
}

# What a server does that alters the model before it sends it.
ALTERED_MODELS = ("NISTAML.026", "NISTAML.051")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a text asks in one line, in our words.

    Attributes:
        text, id, asks: title, the line's own name there or ours, and what it asks.
        source: where that is from, and how far its wording was checked.
        by: the rule that answers it from what was measured; empty: none does.
        why: why none does.
    """

    text: str
    id: str
    asks: str
    source: str
    by: str = ""
    why: str = ""


ASKED: tuple[Asked, ...] = tuple(
    Asked(text=one["text"], **{**line, "source": "; ".join(filter(None, (line.get("source"), one["source"])))})
    for one in _DATA["asked"]
    for line in one["lines"]
)


def mapping(kind: str, declared: Iterable[str | MappingRecord] = ()) -> list[MappingRecord]:
    """Return what standards call an attack, standard by standard; its class declares identifiers or other records."""
    found: dict[tuple[str, str], MappingRecord] = {}
    for one in (*BY_KIND.get(kind, ()), *declared):
        if isinstance(one, str) and one not in IDENTIFIERS:
            raise ValueError(f"the standard's identifier '{one}' isn't known; known: {', '.join(IDENTIFIERS)}")
        record = IDENTIFIERS[one] if isinstance(one, str) else one
        found[record.standard, record.id] = record
    order = list(ABOUT)
    return sorted(found.values(), key=lambda r: order.index(r.standard) if r.standard in order else len(order))
