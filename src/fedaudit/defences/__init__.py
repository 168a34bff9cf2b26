"""Defences: aggregators on the server's side, sanitisers on the client's."""

from fedaudit.defences import averaging, coordinatewise, selection

__all__ = ["averaging", "coordinatewise", "selection"]
