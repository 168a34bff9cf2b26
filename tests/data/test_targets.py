"""Targets that aren't one class an example: several labels, several numbers, masks; which task they are taken for."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedaudit import BadInput, Dataset
from fedaudit.task import TaskInfo
from fedaudit.task.losses import LossOptions, recognise
from fedaudit.task.training import dice_loss, loss_function

RNG = np.random.default_rng(3)
IMAGES = RNG.random((20, 3, 6, 5), dtype=np.float32)


def made(targets, **options):
    return Dataset.from_tensors(IMAGES, targets, **options)


LABELS = RNG.integers(0, 2, (20, 4))
MASKS = RNG.integers(0, 3, (20, 6, 5))


@pytest.mark.parametrize("targets", [LABELS, LABELS.astype(bool), LABELS.astype(np.float32), torch.tensor(LABELS)])
def test_zeros_and_ones_of_several_columns_are_labels(targets):
    data = made(targets, class_names=list("abcd"))
    assert (data.task, data.num_classes, data.num_targets) == ("multi-label", None, 4)
    held_out = torch.arange(20) % 5 == 4
    assert data.train.targets.equal(torch.tensor(LABELS[~held_out]).float())
    assert data.test.targets.equal(torch.tensor(LABELS[held_out]).float())
    assert "4 labels, each 0 or 1" in data.summary


@pytest.mark.parametrize("targets", [MASKS, MASKS[:, None], MASKS.astype(np.uint8), MASKS.astype(np.float32)])
def test_whole_numbers_of_the_images_shape_are_masks(targets):
    data = made(targets)
    assert (data.task, data.num_classes, data.num_targets) == ("segmentation", None, 3)
    assert data.train.targets.equal(torch.tensor(MASKS[torch.arange(20) % 5 != 4]))


def test_probabilities_are_no_masks():
    with pytest.raises(BadInput, match=re.escape("give whole numbers of shape (n, 6, 5), the class of every pixel")):
        made(RNG.random((20, 6, 5)), task="segmentation")


def test_masks_may_have_classes_that_no_pixel_shows():
    assert made(MASKS, num_classes=7).num_targets == 7


def test_columns_of_real_values_are_standardised_one_by_one():
    numbers = RNG.normal(size=(20, 3)) * [1.0, 100.0, 0.01] + [0.0, 5.0, -3.0]
    data = made(numbers)
    assert (data.task, data.num_targets) == ("regression", 3)
    assert data.train.targets.mean(dim=0).abs().max() < 1e-6
    assert data.train.targets.std(dim=0, correction=0).numpy() == pytest.approx([1, 1, 1], abs=1e-5)
    assert made(numbers, raw_targets=True).train.targets[0].tolist() == pytest.approx(numbers[0], rel=1e-6)


def test_a_task_may_be_said_where_the_targets_do_not_tell():
    assert made(LABELS.astype(float), task="regression").task == "regression"
    with pytest.raises(BadInput, match="0 or 1"):
        made(LABELS * 2.0, task="multi-label")


def info(task: str, num_targets: int, **more: Any) -> TaskInfo:
    known: dict[str, Any] = {
        "model": "custom",
        "width": None,
        "batch_norm": "eval",
        "kind": "image",
        "input_shape": (3, 6, 5),
    }
    known |= {"num_classes": None, "mean": (0.0,) * 3, "std": (1.0,) * 3, "task": task, "num_targets": num_targets}
    return TaskInfo(**{**known, **more})


def test_the_shapes_of_targets_and_outputs():
    labels = info("multi-label", 4, loss="bce-with-logits")
    masks = info("segmentation", 3, loss="dice")
    assert (labels.target_shape, labels.output_shape) == ((4,), (4,))
    assert (masks.target_shape, masks.output_shape) == ((6, 5), (3, 6, 5))
    assert labels.blank(2)[1].dtype == torch.float32
    assert masks.blank(2)[1].shape == (2, 6, 5)
    assert masks.blank(2)[1].dtype == torch.int64


@pytest.mark.parametrize(
    ("task", "loss", "said"),
    [
        ("multi-label", "cross-entropy", "use bce-with-logits"),
        ("segmentation", "mse", "use cross-entropy, dice, dice-cross-entropy"),
        ("regression", "dice", "use mse"),
    ],
)
def test_a_loss_of_another_task_is_refused(task, loss, said):
    with pytest.raises(BadInput, match=said):
        info(task, 2, loss=loss)


def test_labels_may_weigh_more_where_they_are_there():
    weights = (1.0, 2.0, 3.0, 4.0)
    known = info("multi-label", 4, loss="bce-with-logits", class_weights=weights)
    outputs, targets = torch.randn(5, 4), torch.tensor(LABELS[:5]).float()
    own = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(weights))
    ours = loss_function(known.loss, class_weights=known.class_weights)
    assert ours(outputs, targets) == own(outputs, targets)
    assert recognise(own, 4, None, "multi-label") == LossOptions("bce-with-logits", 0.0, weights)
    with pytest.raises(BadInput, match="class_weights"):
        info("multi-label", 4, loss="bce-with-logits", class_weights=weights[:3])


def test_dice_in_closed_form():
    masks = torch.tensor([[[0, 0, 1, 1]]])
    sure = 50 * nn.functional.one_hot(torch.tensor([[[0, 1, 1, 1]]]), 2).movedim(-1, 1).float()
    # class 0: 2·1/(1 + 2), class 1: 2·2/(3 + 2)
    assert float(dice_loss(sure, masks)) == pytest.approx(1 - (2 / 3 + 4 / 5) / 2, abs=1e-4)
    assert float(dice_loss(sure, masks, "sum")) == pytest.approx(2 * float(dice_loss(sure, masks)))
    right = 50 * nn.functional.one_hot(masks, 3).movedim(-1, 1).float()
    assert float(dice_loss(right, masks)) == pytest.approx(0, abs=1e-5)  # of a class that is nowhere, too


@pytest.mark.parametrize("name", ["cross-entropy", "dice", "dice-cross-entropy"])
def test_losses_of_masks_are_means_over_examples(name):
    outputs, masks = torch.randn(4, 3, 6, 5), torch.tensor(MASKS[:4])
    loss = loss_function(name)
    each = torch.stack([loss(outputs[i : i + 1], masks[i : i + 1]) for i in range(4)])
    assert float(loss(outputs, masks)) == pytest.approx(float(each.mean()), rel=1e-5)
    both = loss_function("dice")(outputs, masks) + loss_function("cross-entropy")(outputs, masks)
    assert float(loss_function("dice-cross-entropy")(outputs, masks)) == pytest.approx(float(both))
    assert recognise(lambda z, y: loss(z, y), 3, None, "segmentation") == LossOptions(name)
    assert recognise(lambda z, y: loss(z, y.squeeze(1)), 3, None, "segmentation") == LossOptions(name)
    assert recognise(lambda z, y: loss(z, y) + 0.01, 3, None, "segmentation") is None


def test_what_is_unclear_is_asked():
    with pytest.raises(BadInput, match="one-hot"):
        made(np.eye(4)[RNG.integers(0, 4, 20)])
    assert made(np.eye(4)[RNG.integers(0, 4, 20)], task="multi-label").num_targets == 4
    with pytest.raises(BadInput, match=r"give -1 \(uncertain\) one of these"):
        made(np.where(LABELS[:, :3] > 0, 1.0, -1.0) * (RNG.random((20, 3)) < 0.7))
    with pytest.raises(BadInput, match="have no num_classes"):
        made(LABELS, num_classes=4)
    with pytest.raises(BadInput, match=r"the values 0, 255 up to 255.*masks > 0"):
        made((MASKS > 0).astype(np.uint8) * 255)
    series = RNG.random((20, 2, 6), dtype=np.float32)
    with pytest.raises(BadInput, match="say which"):
        Dataset.from_tensors(series, RNG.integers(0, 2, (20, 6)), kind="signal")


def test_a_list_of_volumes_is_examples():
    volumes = [torch.rand(1, 4, 4, 4, generator=torch.Generator().manual_seed(i)) for i in range(10)]
    assert Dataset.from_tensors(volumes, np.arange(10) % 2, kind="volume").input_shape == (1, 4, 4, 4)


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (torch.arange(60) % 2 * 1.0, "targets of 0.0 and 1.0 are two classes or numbers"),
        ((torch.arange(60) % 2 * 1.0)[:, None], "task='regression'"),
        (torch.where(torch.arange(60) < 3, torch.nan, torch.arange(60) % 2), "missing, of 3 examples"),
        (torch.where(torch.arange(60) < 3, 99, torch.arange(60) % 2), "99, in 3 of 60 cells, is far from all others"),
        (torch.arange(60), "are the 60 different whole numbers"),
    ],
)
def test_outcomes_of_a_table_that_can_be_meant_otherwise_are_asked_about(targets, words):
    with pytest.raises(BadInput, match=re.escape(words)):
        Dataset.from_tensors(torch.rand(60, 3), targets)


def test_who_says_what_targets_are_is_not_asked():
    rows, zeros = torch.rand(60, 3), torch.arange(60) % 2 * 1.0
    assert Dataset.from_tensors(rows, zeros, task="regression").task == "regression"
    assert Dataset.from_tensors(rows, zeros, raw_targets=True).task == "regression"
    assert Dataset.from_tensors(rows, zeros, classes=True).num_classes == 2
    assert Dataset.from_tensors(rows, zeros.long()).num_classes == 2
    assert Dataset.from_tensors(rows, zeros.bool()).num_classes == 2
    assert Dataset.from_tensors(rows, torch.arange(60), num_classes=60).num_classes == 60
    assert Dataset.from_tensors(torch.rand(60, 1, 8, 8), torch.arange(60)).num_classes == 60


@pytest.mark.parametrize("task", [None, "classification", "multi-label", "regression", "segmentation"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.float32])
@pytest.mark.parametrize("shape", [(), (0,), (0, 4)])
def test_targets_of_nobody_are_refused(task, dtype, shape):
    with pytest.raises(BadInput, match=re.escape(f"targets of shape {shape}; give one for each example")):
        Dataset.from_tensors(torch.rand(60, 3), torch.zeros(shape, dtype=dtype), task=task)
