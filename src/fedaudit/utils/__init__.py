"""Helpers that know nothing of federated learning; every package may use them."""
