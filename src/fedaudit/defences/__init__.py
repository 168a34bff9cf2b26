"""Defences: aggregators on the server's side, sanitisers on the client's."""

from fedaudit.defences import averaging, compressing, coordinatewise, fragmenting, privacy, selection

__all__ = ["averaging", "compressing", "coordinatewise", "fragmenting", "privacy", "selection"]
