"""From a scenario to a finished audit: prepare, simulate, attack, evaluate."""
