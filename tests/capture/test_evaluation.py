"""What an evaluation that wasn't written for it tells of the examples it used."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax, nll_loss

from fedaudit.capture.evaluation import Evaluation, joined
from fedaudit.models.own import InOrder

BATCHES = [(torch.randn(3, 4), torch.tensor([0, 2, 1])), (torch.randn(2, 4), torch.tensor([1, 1]))]


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def evaluate(score: Callable[[Tensor, Tensor], Any], model: Callable[[Tensor], Tensor]) -> None:
    with torch.no_grad():
        for inputs, targets in BATCHES:
            score(model(inputs), targets)


@pytest.mark.parametrize(
    "score",
    [
        cross_entropy,
        lambda out, y: nn.CrossEntropyLoss()(out, y),
        lambda out, y: nll_loss(log_softmax(out, dim=1), y),
        lambda out, y: (torch.max(out.data, 1)[1] == y).sum(),
        lambda out, y: out.argmax(dim=1, keepdim=True).eq(y.view(-1, 1)).sum(),
        lambda out, y: (y == out.softmax(dim=1).max(1).indices.cpu()).float().mean(),
        lambda out, y: (cross_entropy(out, y), (out.argmax(1) == y).sum()),  # once
    ],
)
def test_examples_and_targets_are_kept_of_a_copy_of_the_model(score):
    with Evaluation(net(), 100) as seen:
        evaluate(score, net())
    found = joined(seen.passes)
    assert found is not None
    assert found[0].equal(torch.cat([x for x, _ in BATCHES]))
    assert found[1].equal(torch.cat([y for _, y in BATCHES]))


@pytest.mark.parametrize(
    "score",
    [
        lambda out, _: out.argmax(dim=1) == torch.tensor(1),  # a class, not the targets
        lambda out, y: cross_entropy(torch.zeros_like(out), y),
        lambda out, y: out.argmin(dim=1) == y,
    ],
)
def test_what_isnt_compared_with_targets_isnt_kept(score):
    with Evaluation(net(), 100) as seen:
        evaluate(score, net())
        evaluate(cross_entropy, nn.Linear(4, 3))  # another model
    assert not seen.passes


def test_training_another_thread_and_a_pause_are_no_evaluation_and_most_is_kept():
    model = net()
    with Evaluation(model, 4) as seen:
        cross_entropy(model(BATCHES[0][0]), BATCHES[0][1]).backward()
        with seen.paused():
            evaluate(cross_entropy, model)
        other = threading.Thread(target=evaluate, args=(cross_entropy, model))
        other.start()
        other.join()
        assert not seen.passes
        cross_entropy(model.eval()(BATCHES[1][0]), BATCHES[1][1])  # in evaluation mode, gradients on
        evaluate(cross_entropy, model)
    assert [len(x) for x, _ in seen.passes] == [2, 2]
    assert torch.overrides._get_current_function_mode() is None
    evaluate(cross_entropy, model)
    assert len(seen.passes) == 2


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_a_compiled_model_gives_the_same_numbers(whole):
    model = net().eval()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=whole)
    with Evaluation(model, 100) as seen, torch.no_grad():
        assert compiled(BATCHES[0][0]).equal(model(BATCHES[0][0]))
        evaluate(cross_entropy, compiled)
    assert len(seen.passes) == 2


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor, more: Tensor) -> Tensor:
        return torch.as_tensor(self.last(torch.cat([x, more], dim=1)))


def test_several_inputs_are_kept_together():
    x, more, y = torch.randn(3, 4), torch.randn(3, 2), torch.tensor([0, 2, 1])
    with Evaluation(Two(), 100) as seen, torch.no_grad():
        cross_entropy(Two()(x, more=more), y)
    found = joined(seen.passes)
    assert found is not None
    assert found[0].equal(torch.cat([x, more], dim=1))


class Parts(nn.Module):
    """As Lightning's first example: an autoencoder whose parts are called, and not it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Sequential(nn.Linear(4, 2), nn.ReLU()), nn.Sequential(nn.Linear(2, 4))


def test_parts_that_are_called_in_turn_are_the_model():
    whole = InOrder(Parts(), [("encoder", (4,)), ("decoder", (2,))])
    x = torch.randn(3, 4)
    with Evaluation(whole, 100) as seen, torch.no_grad():
        net = Parts()
        nn.functional.mse_loss(net.decoder(torch.zeros(3, 2)), x)  # not of what the encoder made
        nn.functional.mse_loss(net.encoder(x), torch.zeros(3, 2))  # nor is this the model's output
        assert not seen.passes
        nn.functional.mse_loss(net.decoder(net.encoder(x)), x)
    ((inputs, targets),) = seen.passes
    assert inputs.equal(x)
    assert targets.equal(x)
