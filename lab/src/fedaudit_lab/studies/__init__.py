"""Grids of audits: a table or a figure as scenarios with axes and repetitions, run with resume and drawn."""
