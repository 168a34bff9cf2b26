"""What is learned: the model, the data of a site, training and testing, as MONAI's tutorials have them."""

from __future__ import annotations

import numpy as np
import torch
from monai.data import DataLoader, Dataset, create_test_image_3d, decollate_batch
from monai.losses import DiceCELoss
from monai.metrics import DiceMetric
from monai.networks.nets import UNet
from monai.transforms import AsDiscrete, Compose, EnsureChannelFirstd, EnsureTyped, RandFlipd, ScaleIntensityd

KEYS = ["image", "label"]
TRAINED, TESTED, SIZE = 4, 2, 16  # a site's volumes, and their sides

criterion = DiceCELoss(to_onehot_y=True, softmax=True)


class Net(UNet):  # type: ignore[misc]
    """A small 3-D U-Net, which tells background and objects apart."""

    def __init__(self) -> None:
        super().__init__(3, 1, 2, channels=(8, 16, 32), strides=(2, 2), num_res_units=1)


def load_data(site: int, batch_size: int) -> tuple[DataLoader, DataLoader]:
    """Return what a site trains on and what it tests on."""
    random = np.random.RandomState(site)
    scans = []
    for _ in range(TRAINED + TESTED):
        drawn = create_test_image_3d(
            SIZE, SIZE, SIZE, num_objs=3, rad_max=6, rad_min=3, num_seg_classes=1, random_state=random
        )
        scans.append(dict(zip(KEYS, drawn, strict=True)))
    first = [EnsureChannelFirstd(KEYS, channel_dim="no_channel"), ScaleIntensityd("image")]
    augmented = Compose([*first, RandFlipd(KEYS, prob=0.5, spatial_axis=0), EnsureTyped(KEYS)])
    plain = Compose([*first, EnsureTyped(KEYS)])
    return (
        DataLoader(Dataset(scans[:TRAINED], augmented), batch_size=batch_size, shuffle=True),
        DataLoader(Dataset(scans[TRAINED:], plain), batch_size=1),
    )


def train(net: Net, loader: DataLoader, epochs: int, learning_rate: float) -> float:
    """Train, and return the mean loss."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    optimizer = torch.optim.SGD(net.parameters(), lr=learning_rate)
    net.to(device).train()
    total = 0.0
    for _ in range(epochs):
        for batch in loader:
            images, labels = batch["image"].to(device), batch["label"].to(device)
            optimizer.zero_grad()
            loss = criterion(net(images), labels)
            loss.backward()
            optimizer.step()
            total += loss.item()
    net.cpu()
    return total / (epochs * len(loader))


def test(net: Net, loader: DataLoader) -> tuple[float, float]:
    """Return the mean loss and the mean Dice score of the objects."""
    score = DiceMetric(include_background=False)
    chosen, true = AsDiscrete(argmax=True, to_onehot=2), AsDiscrete(to_onehot=2)
    net.eval()
    total = 0.0
    with torch.no_grad():
        for batch in loader:
            outputs = net(batch["image"])
            total += criterion(outputs, batch["label"]).item()
            score(
                [chosen(one) for one in decollate_batch(outputs)],
                [true(one) for one in decollate_batch(batch["label"])],
            )
    return total / len(loader), score.aggregate().item()
