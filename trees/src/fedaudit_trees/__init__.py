"""Federations of boosted trees for fedaudit: their protocol, the attack on them, what records and reads boosters."""

__version__ = "0.2.0"
