"""Defences: aggregators on the server's side, sanitisers on the client's."""
