"""Membership inference: of each record, whether a client trained on it."""
