"""Capture and replay: an unchanged loop, and the same training again from nothing but what was seen of it."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedaudit.recording.capture import Capture
from fedaudit.recording.replay import relative_error, replay
from fedaudit.training import loss_function
from tests.capture_cases import CASES, cnn, examples

# that compute the same by other operations: a sum instead of a mean, logits instead of log-probabilities
ROUNDED = {"nll of log_softmax", "none, then mean", "mse, sum", "class weights, sum"}


def watch(name: str) -> tuple[Capture, nn.Module]:
    loop, settings = CASES[name]
    model = cnn(**settings)
    with Capture() as seen:
        loop(model, *examples())
    return seen, model


def again(seen: Capture, **changes: object) -> dict[str, Tensor]:
    assert seen.module is not None
    assert seen.loss is not None
    facts = {"training": seen.training(), "passes": list(zip(seen.inputs, seen.targets, strict=True)), **changes}
    return replay(
        copy.deepcopy(seen.module),
        loss_function(seen.loss, seen.label_smoothing, seen.class_weights),
        seen.start,
        batch_norm=seen.batch_norm,
        dropout=seen.dropout,
        randomness=seen.randomness,
        **facts,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("name", CASES)
def test_training_is_repeated_from_what_was_seen_of_it(name: str) -> None:
    loop, settings = CASES[name]
    unwatched = cnn(**settings)
    torch.manual_seed(3)
    loop(unwatched, *examples())
    torch.manual_seed(3)
    seen, model = watch(name)
    after = torch.get_rng_state()
    for key, value in unwatched.state_dict().items():
        assert torch.equal(value, model.state_dict()[key]), key  # watching changes nothing
    assert seen.training().unmodelled == ()
    assert seen.module is model
    replayed = again(seen)
    assert torch.equal(torch.get_rng_state(), after)
    for key, value in model.named_parameters():
        if name in ROUNDED:
            torch.testing.assert_close(replayed[key], value.detach(), rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(replayed[key], value), key
