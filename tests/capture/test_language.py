"""The loss that a model of transformers computed, told by its value against formulas that are written out."""

from __future__ import annotations

import torch

from fedaudit.capture.language import read_by_value


def test_losses_are_told_by_their_values() -> None:
    source = torch.Generator().manual_seed(0)
    logits, classes = torch.randn(6, 4, generator=source), torch.tensor([0, 1, 2, 3, 0, 1])
    several = torch.rand(6, 4, generator=source).round()
    for loss, labels, name in (
        (-logits.log_softmax(1)[torch.arange(6), classes].mean(), classes, "cross-entropy"),
        ((logits.clamp(min=0) - logits * several + (-logits.abs()).exp().log1p()).mean(), several, "bce-with-logits"),
        (((logits - several) ** 2).mean(), several, "mse"),
    ):
        read = read_by_value(logits, labels, loss)
        assert (read.name, read.terms, read.mismatch) == (name, 1.0, "")
    summed = -logits.log_softmax(1)[torch.arange(6), classes].sum() / 8
    assert read_by_value(logits, classes, summed, 8.0).terms == 6 / 8
    assert read_by_value(logits, classes, summed).name == "custom"
    assert "documents" in read_by_value(logits, classes, torch.tensor(0.123)).mismatch
