"""Auditing ε: canaries, what observers read of them, bounds."""

from fedaudit.epsilon.bounds import demonstrated
from fedaudit.results.epsilon import EpsilonBound

__all__ = ["EpsilonBound", "demonstrated"]
