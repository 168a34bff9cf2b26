"""Attacks by a malicious server: what it sends, and what it reads in the answer."""
