"""Models as newcomers write them, with their data and their loss: what ``test_newcomers.py`` takes to the command line."""
