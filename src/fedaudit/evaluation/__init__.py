"""Findings against ground truth: the only package that knows both. A module for each finding type."""

# they fill FINDING_TYPES and register their evaluation
from fedaudit.evaluation import (  # noqa: F401
    attribute,
    class_images,
    epsilon,
    images,
    label_sets,
    labels,
    local_models,
    membership,
    properties,
    rows,
    sequences,
    source,
    vertical,
)
from fedaudit.evaluation.finding_types import FINDING_TYPES, Evaluation, FindingType, Metric, entry, evaluate, metric
from fedaudit.evaluation.image_metrics import mse, psnr, psnr_from_mse
from fedaudit.evaluation.limits import Limits, check_limits, read_policy
from fedaudit.evaluation.scores import compare, summarise, verdict_rules
from fedaudit.evaluation.statistics import interval, paired_interval
from fedaudit.results import Interval

__all__ = [
    "FINDING_TYPES",
    "Evaluation",
    "FindingType",
    "Interval",
    "Limits",
    "Metric",
    "check_limits",
    "compare",
    "entry",
    "evaluate",
    "interval",
    "metric",
    "mse",
    "paired_interval",
    "psnr",
    "psnr_from_mse",
    "read_policy",
    "summarise",
    "verdict_rules",
]
