"""Lets `python -m fedaudit` work."""

from fedaudit.cli import main

main()
