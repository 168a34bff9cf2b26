"""Attacks on examples that the adversary holds: membership, and attributes that they lack."""
