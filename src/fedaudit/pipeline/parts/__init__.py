"""The parts of a scenario, made and checked: data, loss and task, model, federations."""
