"""A federation in one loop: `python plain.py` (4 CPU seconds)."""

from __future__ import annotations

import copy

import torch
from task import CLIENTS, Net, accuracy, load, train

ROUNDS = 3


def main() -> None:
    """Train the global model by federated averaging."""
    torch.manual_seed(0)
    model = Net()
    for number in range(ROUNDS):
        states = []
        for name in CLIENTS:
            local = copy.deepcopy(model)
            images, labels = load(name)
            train(local, images, labels)
            states.append(local.state_dict())
        mean = {key: torch.stack([state[key] for state in states]).mean(0) for key in states[0]}
        model.load_state_dict(mean)
        print(f"round {number}: accuracy {accuracy(model):.3f}")
    torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
