"""The one result of an audit: JSON-serialisable, and the only thing that a report, a table or a figure is drawn from.

Published as a JSON Schema in ``docs/reference/results.schema.json``. Whatever depends on the clock or on the machine's
load stands under a key named ``timing`` (and the machine itself under ``environment``); the rest is bit-identical when
the same scenario is repeated on the same machine.
"""

from fedaudit.results.audit import (
    SCHEMA_VERSION,
    AdversaryRecord,
    AttackRecord,
    AuditResult,
    DataRecord,
    Digests,
    FederationRecord,
    HistoryRecord,
    HistoryTiming,
    MappingRecord,
    ModelRecord,
    ReceivedCheck,
    RecordingRecord,
    ReplayRecord,
    SharedRecord,
    Threshold,
)
from fedaudit.results.ceilings import CeilingChange, CeilingExample, CeilingPicture, CeilingPoint, CeilingResult
from fedaudit.results.checks import (
    CalibrationResult,
    CalibrationStep,
    Comparison,
    ControlResult,
    MarginResult,
    MarginStep,
)
from fedaudit.results.epsilon import CertificateRecord, EpsilonBound, EpsilonResult, ObserverEpsilon, RecordEpsilon
from fedaudit.results.findings import (
    AttackSummary,
    Chart,
    Evidence,
    FindingResult,
    Line,
    MetricResult,
    MetricSummary,
    Sheet,
    Worst,
    overall,
    with_images,
)
from fedaudit.results.images import Curve, ImageResult, Look, NamedResult, NamedSummary, RegisteredResult
from fedaudit.results.membership import GroupExposure, RecordExposure
from fedaudit.results.record import LEAKS, VERDICTS, Interval, Setting, Timing, Verdict
from fedaudit.results.rows import RowResult, SequenceResult

__all__ = [
    "LEAKS",
    "SCHEMA_VERSION",
    "VERDICTS",
    "AdversaryRecord",
    "AttackRecord",
    "AttackSummary",
    "AuditResult",
    "CalibrationResult",
    "CalibrationStep",
    "CeilingChange",
    "CeilingExample",
    "CeilingPicture",
    "CeilingPoint",
    "CeilingResult",
    "CertificateRecord",
    "Chart",
    "Comparison",
    "ControlResult",
    "Curve",
    "DataRecord",
    "Digests",
    "EpsilonBound",
    "EpsilonResult",
    "Evidence",
    "FederationRecord",
    "FindingResult",
    "GroupExposure",
    "HistoryRecord",
    "HistoryTiming",
    "ImageResult",
    "Interval",
    "Line",
    "Look",
    "MappingRecord",
    "MarginResult",
    "MarginStep",
    "MetricResult",
    "MetricSummary",
    "ModelRecord",
    "NamedResult",
    "NamedSummary",
    "ObserverEpsilon",
    "ReceivedCheck",
    "RecordEpsilon",
    "RecordExposure",
    "RecordingRecord",
    "RegisteredResult",
    "ReplayRecord",
    "RowResult",
    "SequenceResult",
    "Setting",
    "SharedRecord",
    "Sheet",
    "Threshold",
    "Timing",
    "Verdict",
    "Worst",
    "overall",
    "with_images",
]
