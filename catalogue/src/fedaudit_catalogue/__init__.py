"""Methods of papers that no audit chooses by itself, as plug-ins of fedaudit: for studies and comparisons."""

__version__ = "0.2.0"
