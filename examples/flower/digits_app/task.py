"""What is learned: the model, the data of a node, training and testing."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

Loader = DataLoader[tuple[Tensor, ...]]


class Net(nn.Module):
    """A small convolutional network."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.fc1 = nn.Linear(16 * 4 * 4, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return (n, 10) logits of (n, 1, 8, 8) images."""
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
        x = functional.relu(self.conv2(x))
        x = functional.relu(self.fc1(x.flatten(1)))
        return torch.as_tensor(self.fc2(x))


def load_data(
    partition_id: int, num_partitions: int, examples: int, batch_size: int, seed: int
) -> tuple[Loader, Loader]:
    """Return what a node trains on and what it tests on, three to one."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    own = order[partition_id::num_partitions][:examples]
    images = (torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16 - 0.5) / 0.5
    whole = TensorDataset(images[own], torch.tensor(digits.target)[own])
    train, test = torch.utils.data.random_split(whole, [0.75, 0.25], generator=torch.Generator().manual_seed(0))
    shuffle = torch.Generator().manual_seed(seed)
    return DataLoader(train, batch_size, shuffle=True, generator=shuffle), DataLoader(test, batch_size)


def train(net: nn.Module, loader: Loader, epochs: int, learning_rate: float) -> float:
    """Train, and return the mean loss."""
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=learning_rate)
    net.train()
    total = 0.0
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = criterion(net(images), labels)
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total / (epochs * len(loader))


def test(net: nn.Module, loader: Loader) -> tuple[float, float]:
    """Return the mean loss and the accuracy."""
    criterion = nn.CrossEntropyLoss(reduction="sum")
    net.eval()
    loss, correct, examples = 0.0, 0, 0
    with torch.no_grad():
        for images, labels in loader:
            outputs = net(images)
            loss += criterion(outputs, labels).item()
            correct += int((outputs.argmax(1) == labels).sum())
            examples += len(labels)
    return loss / examples, correct / examples
