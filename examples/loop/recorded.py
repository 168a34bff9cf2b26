"""The same federation, recorded: `python recorded.py`, then `fedaudit attack recording --model task:Net`."""

from __future__ import annotations

import copy

import torch
from task import CLIENTS, MEAN, STD, Net, accuracy, load, train

import fedaudit  # added

ROUNDS = 3


def main() -> None:
    """Train the global model by federated averaging."""
    torch.manual_seed(0)
    model = Net()
    recorder = fedaudit.Recorder("recording", mean=[MEAN], std=[STD])  # added
    for number in range(ROUNDS):
        states = []
        recorder.begin_round(model.state_dict())  # added
        for name in CLIENTS:
            local = copy.deepcopy(model)
            images, labels = load(name)
            with recorder.capture() as seen:  # added
                train(local, images, labels)
            recorder.update(name, local.state_dict(), seen, num_examples=len(images))  # added
            states.append(local.state_dict())
        recorder.end_round()  # added
        mean = {key: torch.stack([state[key] for state in states]).mean(0) for key in states[0]}
        model.load_state_dict(mean)
        print(f"round {number}: accuracy {accuracy(model):.3f}")
    torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
