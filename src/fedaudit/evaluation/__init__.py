"""Findings against ground truth: the only package that knows both. A module for each finding type."""

# they fill FINDING_TYPES and register their evaluation
from fedaudit.evaluation import attributes, class_images, images, labels, local_models, membership  # noqa: F401
from fedaudit.evaluation.finding_types import FINDING_TYPES, Evaluation, FindingType, Metric, entry, evaluate
from fedaudit.evaluation.scores import (
    check_limits,
    check_thresholds,
    compare,
    interval,
    paired_interval,
    summarise,
    verdict_rules,
)

__all__ = [
    "FINDING_TYPES",
    "Evaluation",
    "FindingType",
    "Metric",
    "check_limits",
    "check_thresholds",
    "compare",
    "entry",
    "evaluate",
    "interval",
    "paired_interval",
    "summarise",
    "verdict_rules",
]
