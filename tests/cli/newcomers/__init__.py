"""Models as newcomers write them, with their data and their loss, for ``test_newcomers.py``."""
