"""Label sets on the report page: each example's true labels, and those that were inferred."""

from __future__ import annotations

from dataclasses import dataclass

from fedaudit.evaluation.scores import grouped
from fedaudit.report.panels import PANELS, Panel
from fedaudit.report.wording import place_of
from fedaudit.results import AuditResult

_SHOWN = 16  # examples, of each attack on each federation


@dataclass(frozen=True)
class DrawnLabel:
    """One label: its name, whether the example has it, and whether it was inferred."""

    name: str
    true: bool
    found: bool


@dataclass(frozen=True)
class DrawnSet:
    """One example: its number, whose update it is in, and the labels that are true or were inferred."""

    number: int
    where: str
    labels: list[DrawnLabel]

    @property
    def whole(self) -> bool:
        """Whether its label set was inferred without a fault."""
        return all(label.true == label.found for label in self.labels)


@dataclass(frozen=True)
class DrawnSets:
    """What one attack inferred of one federation.

    Attributes:
        sets: of the first examples, in the order of the audit.
        whole, total: examples whose label set was inferred without a fault, and all whose sets were kept.
    """

    federation: str
    attack: str
    sets: list[DrawnSet]
    whole: int
    total: int


def drawn_sets(result: AuditResult) -> list[DrawnSets]:
    """Return the label sets of each attack on each federation, where it told which labels occur together."""
    findings = [f for f in result.findings if f.kind == "label-sets" and f.details.get("label_sets")]
    made = []
    for (federation, attack), group in grouped(findings).items():
        pairs = [(finding, pair) for finding in group for pair in finding.details["label_sets"]]
        sets = [
            DrawnSet(i, place_of(finding, result), _labels(pair, result.data.class_names))
            for i, (finding, pair) in enumerate(pairs, start=1)
        ]
        made.append(DrawnSets(federation, attack, sets[:_SHOWN], sum(one.whole for one in sets), len(sets)))
    return made


def _labels(pair: dict[str, list[int]], names: list[str] | None) -> list[DrawnLabel]:
    true, found = set(pair["true"]), set(pair["found"])
    return [
        DrawnLabel(names[k] if names and k < len(names) else f"label {k}", k in true, k in found)
        for k in sorted(true | found)
    ]


PANELS["label-sets"] = Panel("Label sets", "parts/label_sets.html.j2", lambda result, images: drawn_sets(result))  # noqa: ARG005
