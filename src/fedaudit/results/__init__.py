"""The one result of an audit: JSON-serialisable, and the only thing that a report, a table or a figure is drawn from.

Published as a JSON Schema in ``docs/reference/results.schema.json``. Whatever depends on the clock or on the machine's
load stands under a key named ``timing`` (and the machine itself under ``environment``); the rest is bit-identical when
the same scenario is repeated on the same machine.
"""

from fedaudit.results.audit import SCHEMA_VERSION, AuditResult, Digests, Threshold
from fedaudit.results.base import Interval, Timing
from fedaudit.results.epsilon import EpsilonBound, EpsilonResult, ObserverEpsilon
from fedaudit.results.findings import (
    LEAKS,
    VERDICTS,
    AttackSummary,
    Chart,
    Comparison,
    ControlResult,
    Curve,
    Evidence,
    FindingResult,
    ImageResult,
    Line,
    MetricResult,
    MetricSummary,
    RegisteredResult,
    RowResult,
    SequenceResult,
    Sheet,
    Verdict,
    overall,
    with_images,
)
from fedaudit.results.setting import (
    AdversaryRecord,
    AttackRecord,
    DataRecord,
    FederationRecord,
    HistoryRecord,
    HistoryTiming,
    MappingRecord,
    ModelRecord,
    ReceivedCheck,
    RecordingRecord,
    ReplayRecord,
)

__all__ = [
    "LEAKS",
    "SCHEMA_VERSION",
    "VERDICTS",
    "AdversaryRecord",
    "AttackRecord",
    "AttackSummary",
    "AuditResult",
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
    "HistoryRecord",
    "HistoryTiming",
    "ImageResult",
    "Interval",
    "Line",
    "MappingRecord",
    "MetricResult",
    "MetricSummary",
    "ModelRecord",
    "ObserverEpsilon",
    "ReceivedCheck",
    "RecordingRecord",
    "RegisteredResult",
    "ReplayRecord",
    "RowResult",
    "SequenceResult",
    "Sheet",
    "Threshold",
    "Timing",
    "Verdict",
    "overall",
    "with_images",
]
