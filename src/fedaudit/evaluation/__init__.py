"""Findings against ground truth: the only package that knows both. A module for each finding type."""

# they fill FINDING_TYPES and register their evaluation
from fedaudit.evaluation import (  # noqa: F401
    attribute,
    epsilon,
    extraction,
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
from fedaudit.evaluation.finding_types import (
    FINDING_TYPES,
    Evaluation,
    FindingType,
    Metric,
    done,
    entry,
    evaluate,
    metric,
    refused,
)
from fedaudit.evaluation.image_metrics import lpips, mse, psnr, psnr_from_mse, ssim
from fedaudit.evaluation.limits import Limits, check_limits, read_policy
from fedaudit.evaluation.scores import compare, summarise, verdict_rules
from fedaudit.evaluation.statistics import SURE, interval, paired_interval, proportion
from fedaudit.evaluation.verdicts import Judgement, by_test, leaks
from fedaudit.results import Interval

__all__ = [
    "FINDING_TYPES",
    "SURE",
    "Evaluation",
    "FindingType",
    "Interval",
    "Judgement",
    "Limits",
    "Metric",
    "by_test",
    "check_limits",
    "compare",
    "done",
    "entry",
    "evaluate",
    "interval",
    "leaks",
    "lpips",
    "metric",
    "mse",
    "paired_interval",
    "proportion",
    "psnr",
    "psnr_from_mse",
    "read_policy",
    "refused",
    "ssim",
    "summarise",
    "verdict_rules",
]
