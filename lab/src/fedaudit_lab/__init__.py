"""Studies and benchmarks of fedaudit: grids of audits, their tables and figures, and how fast fedaudit is."""

__version__ = "0.2.0"
