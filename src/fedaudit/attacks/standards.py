"""What standards and laws call an attack: NIST, MITRE ATLAS, the EDPB, the CNIL, OWASP AISVS, the EU's AI Act.

An attack has the identifiers of what it finds (:data:`BY_KIND`) and those that its class declares in ``standards``. All
are names for what was tested. None says which number passes: limits are the user's own. What an audit as a whole gives
evidence for, article by article, is :data:`EVIDENCE_FOR`.
"""

from __future__ import annotations

from collections.abc import Iterable

from fedaudit.results import MappingRecord

NIST = "NIST AI 100-2 E2025"
ATLAS = "MITRE ATLAS"
EDPB = "EDPB Opinion 28/2024"
CNIL = "CNIL AI how-to sheet, July 2025"
AISVS = "OWASP AISVS 1.0, C11"
AI_ACT = "EU AI Act"

# What each is, for those who look it up, in the order of tables. ATLAS has no word for federated learning, and the CNIL
# and OWASP write of a model's answers and not of updates: theirs are the nearest ones.
ABOUT = {
    NIST: "Adversarial Machine Learning: A Taxonomy and Terminology of Attacks and Mitigations (March 2025)",
    ATLAS: "Adversarial Threat Landscape for Artificial-Intelligence Systems; the nearest technique, since it has none "
    "for federated learning",
    EDPB: "on AI models and personal data (December 2024): whether a model is anonymous (§§43, 134), and the attacks "
    "that tests should try",
    CNIL: "analysing the status of an AI model with regard to the GDPR (22 July 2025): tests of whether training data "
    "can be had from a model; nearest, since it is about models and not about updates",
    AISVS: "AI Security Verification Standard, chapter on adversarial robustness and resistance to attacks; nearest, "
    "since its requirements are about a model's answers; drafts before 1.0 had 11.3 and 11.4 for what is C11.2",
    AI_ACT: "Regulation (EU) 2024/1689; Art. 15(5) names confidentiality attacks among what high-risk systems are to "
    "be resilient against; whether it applies depends on what the system is for",
}
_NEAREST = (ATLAS, CNIL, AISVS)
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
    CNIL: {
        "cnil-membership-inference": "membership inference",
        "cnil-model-inversion": "model inversion",
        "cnil-regurgitation": "regurgitation",
    },
    AISVS: {
        "C11.2": "membership inference and model inversion",
        "C11.3": "model extraction",
    },
    AI_ACT: {"Art. 15(5)": "confidentiality attacks"},
}

# Every identifier that may be used, by its id.
IDENTIFIERS: dict[str, MappingRecord] = {
    id_: MappingRecord(standard=standard, id=id_, name=name, nearest=standard in _NEAREST)
    for standard, names in _NAMES.items()
    for id_, name in names.items()
}
EDPB_TESTS = tuple(_NAMES[EDPB])

# By the kind of finding. NIST counts the attributes of one record to reconstruction; property inference is about a data
# set as a whole, such as which classes an update was made from. The opinion's tests ask for data: it names none for
# another participant's model. Regurgitation is what a model answers: only what continues texts tests it.
_ACT = ("Art. 15(5)",)
_MEMBERS = ("cnil-membership-inference", "C11.2", *_ACT)
_EXAMPLES = ("cnil-model-inversion", "C11.2", *_ACT)
BY_KIND: dict[str, tuple[str, ...]] = {
    "images": ("NISTAML.032", "AML.T0024.001", "reconstruction", *_EXAMPLES),
    "rows": ("NISTAML.032", "AML.T0024.001", "reconstruction", *_EXAMPLES),
    "class-images": ("NISTAML.032", "AML.T0024.001", "model-inversion", *_EXAMPLES),
    "labels": ("NISTAML.034", "AML.T0024.001", "attribute-inference", *_EXAMPLES),
    "label-sets": ("NISTAML.034", "AML.T0024.001", "attribute-inference", *_EXAMPLES),
    "example-labels": ("NISTAML.032", "AML.T0024.001", "attribute-inference", *_EXAMPLES),
    "label-scores": ("NISTAML.032", "AML.T0024.001", "attribute-inference", *_EXAMPLES),
    "attribute": ("NISTAML.032", "AML.T0024.001", "attribute-inference", *_EXAMPLES),
    "property": ("NISTAML.034", "AML.T0024.001", "attribute-inference", *_EXAMPLES),
    "membership": ("NISTAML.033", "AML.T0024.000", "membership-inference", *_MEMBERS),
    "source": ("NISTAML.033", "AML.T0024.000", "membership-inference", *_MEMBERS),
    "epsilon": ("NISTAML.033", "AML.T0024.000", "membership-inference", *_MEMBERS),
    "sequences": ("NISTAML.032", "AML.T0024.001", "reconstruction", *_EXAMPLES),
    "tokens": ("NISTAML.032", "AML.T0024.001", "reconstruction", *_EXAMPLES),
    "extraction": ("NISTAML.032", "AML.T0024.001", "regurgitation", "cnil-regurgitation", "C11.2", *_ACT),
    "local-model": ("NISTAML.031", "AML.T0024.002", "C11.3", *_ACT),
}

# What an audit gives evidence for, beside Art. 15(5): article, whom it is about, and the evidence. Never that it is
# complied with: each asks for more than tests.
EVIDENCE_FOR: dict[str, tuple[str, str]] = {
    "Art. 9": (
        "risk management, high-risk systems",
        "which inference from updates is a known risk, how it was tested, and what a measure leaves of it",
    ),
    "Art. 10": (
        "data and data governance, high-risk systems",
        "what can be learnt of training data from what leaves a site; nothing on their quality, origin or bias",
    ),
    "Art. 11, Annex IV": (
        "technical documentation, high-risk systems",
        "a test report with metrics, date, version and digests, as a part of the description of tests and of measures "
        "for cybersecurity",
    ),
    "Art. 12": (
        "record-keeping, high-risk systems",
        "what travelled, if the federation was recorded; an audit isn't the log of events that is asked for",
    ),
    "Art. 15": (
        "accuracy, robustness and cybersecurity, high-risk systems",
        "resilience to the confidentiality attacks that were tried, and what each defence costs in accuracy; nothing "
        "on evasion, and on poisoning only where malicious clients were audited",
    ),
    "Art. 26": (
        "deployers of high-risk systems",
        "figures for the data-protection impact assessment that a deployer makes",
    ),
    "Art. 27": (
        "fundamental-rights impact assessment, deployers that have to make one",
        "the likelihood of one specific harm, that data of a person are inferred; nothing on the others",
    ),
    "Art. 53, 55": (
        "providers of general-purpose models; Art. 55 with systemic risk only",
        "tests of confidentiality as a part of a model's evaluation, where such a model is trained in a federation",
    ),
}

# What a server does that alters the model before it sends it.
ALTERED_MODELS = ("NISTAML.026", "NISTAML.051")


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
