"""Auditing ε: canaries, what observers read of them, what is spent, and which ε is demonstrated."""

from fedaudit.epsilon.bounds import CanaryScores, demonstrated
from fedaudit.results.epsilon import EpsilonBound
from fedaudit.results.record import Adjacency, Unit

__all__ = ["Adjacency", "CanaryScores", "EpsilonBound", "Unit", "demonstrated"]
