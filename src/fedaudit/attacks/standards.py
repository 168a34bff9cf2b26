"""What standards call an attack: NIST's class, the nearest technique of MITRE ATLAS, the test of the EDPB's opinion.

An attack has the identifiers of what it finds (:data:`BY_KIND`) and those that its class declares in ``standards``. All
are names for what was tested. No standard says which number passes: limits are the user's own.
"""

from __future__ import annotations

from collections.abc import Iterable

from fedaudit.results import MappingRecord

NIST = "NIST AI 100-2 E2025"
ATLAS = "MITRE ATLAS"
EDPB = "EDPB Opinion 28/2024"

# What each is, for those who look it up. ATLAS has no word for federated learning: its techniques are the nearest ones.
ABOUT = {
    NIST: "Adversarial Machine Learning: A Taxonomy and Terminology of Attacks and Mitigations (March 2025)",
    ATLAS: "Adversarial Threat Landscape for Artificial-Intelligence Systems; the nearest technique, since it has none "
    "for federated learning",
    EDPB: "on AI models and personal data (December 2024): whether a model is anonymous (§§43, 134), and the attacks "
    "that tests should try",
}
READING = (
    "EDPS TechDispatch 1/2025, on federated learning",
    "NIST SP 800-226, on evaluating guarantees of differential privacy",
)

_NAMES = {
    NIST: {
        "NISTAML.026": "model poisoning",
        "NISTAML.031": "model extraction",
        "NISTAML.032": "data reconstruction",
        "NISTAML.033": "membership inference",
        "NISTAML.034": "property inference",
        "NISTAML.051": "model poisoning (supply chain)",
    },
    ATLAS: {
        "AML.T0018": "Manipulate AI Model",
        "AML.T0020": "Poison Training Data",
        "AML.T0024.000": "Infer Training Data Membership",
        "AML.T0024.001": "Invert AI Model",
        "AML.T0024.002": "Extract AI Model",
    },
    EDPB: {
        "membership-inference": "membership inference",
        "attribute-inference": "attribute inference",
        "exfiltration": "exfiltration",
        "regurgitation": "regurgitation of training data",
        "model-inversion": "model inversion",
        "reconstruction": "reconstruction",
    },
}

# Every identifier that may be used, by its id.
IDENTIFIERS: dict[str, MappingRecord] = {
    id_: MappingRecord(standard=standard, id=id_, name=name, nearest=standard == ATLAS)
    for standard, names in _NAMES.items()
    for id_, name in names.items()
}
EDPB_TESTS = tuple(_NAMES[EDPB])

# By the kind of finding. NIST counts the attributes of one record to reconstruction; property inference is about a data
# set as a whole, such as which classes an update was made from. The opinion's tests ask for data: it names none for
# another participant's model.
BY_KIND: dict[str, tuple[str, ...]] = {
    "images": ("NISTAML.032", "AML.T0024.001", "reconstruction"),
    "rows": ("NISTAML.032", "AML.T0024.001", "reconstruction"),
    "class-images": ("NISTAML.032", "AML.T0024.001", "model-inversion"),
    "labels": ("NISTAML.034", "AML.T0024.001", "attribute-inference"),
    "label-sets": ("NISTAML.034", "AML.T0024.001", "attribute-inference"),
    "example-labels": ("NISTAML.032", "AML.T0024.001", "attribute-inference"),
    "label-scores": ("NISTAML.032", "AML.T0024.001", "attribute-inference"),
    "attribute": ("NISTAML.032", "AML.T0024.001", "attribute-inference"),
    "property": ("NISTAML.034", "AML.T0024.001", "attribute-inference"),
    "membership": ("NISTAML.033", "AML.T0024.000", "membership-inference"),
    "source": ("NISTAML.033", "AML.T0024.000", "membership-inference"),
    "epsilon": ("NISTAML.033", "AML.T0024.000", "membership-inference"),
    "sequences": ("NISTAML.032", "AML.T0024.001", "reconstruction"),
    "tokens": ("NISTAML.032", "AML.T0024.001", "reconstruction"),
    "local-model": ("NISTAML.031", "AML.T0024.002"),
}

# What a server does that alters the model before it sends it.
ALTERED_MODELS = ("NISTAML.026", "NISTAML.051")


def mapping(kind: str, declared: Iterable[str | MappingRecord] = ()) -> list[MappingRecord]:
    """Return what standards call an attack, standard by standard.

    Args:
        kind: of its finding.
        declared: by its class, beside that: identifiers of :data:`IDENTIFIERS`, or records of another standard.

    Raises:
        ValueError: an identifier isn't known.
    """
    found: dict[tuple[str, str], MappingRecord] = {}
    for one in (*BY_KIND.get(kind, ()), *declared):
        if isinstance(one, str) and one not in IDENTIFIERS:
            raise ValueError(f"the standard's identifier '{one}' isn't known; known: {', '.join(IDENTIFIERS)}")
        record = IDENTIFIERS[one] if isinstance(one, str) else one
        found[record.standard, record.id] = record
    order = [NIST, ATLAS, EDPB]
    return sorted(found.values(), key=lambda r: order.index(r.standard) if r.standard in order else len(order))
