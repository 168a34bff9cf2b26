"""Attacks in closed form: no optimiser, only linear algebra."""
