"""Attacks on vertical federations: labels from gradients, and the parties' data from aggregated ones."""
