"""Images, volumes and signals: space, pairing, luck, moves, scores, claims; the verdict; and the kind's words."""

from fedaudit.evaluation.images.embedding import embedding
from fedaudit.evaluation.images.evaluate import evaluate_images
from fedaudit.evaluation.images.kind import SCORES
from fedaudit.evaluation.images.luck import chance_level
from fedaudit.evaluation.images.pairing import assign
from fedaudit.evaluation.images.scores import standing
from fedaudit.evaluation.images.verdict import VISIBLE_CORRELATION, best_tries, verdict_of, visible

__all__ = [
    "SCORES",
    "VISIBLE_CORRELATION",
    "assign",
    "best_tries",
    "chance_level",
    "embedding",
    "evaluate_images",
    "standing",
    "verdict_of",
    "visible",
]
