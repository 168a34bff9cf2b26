"""Auditing ε: canaries, what observers read of them, bounds."""
