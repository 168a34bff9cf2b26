"""On a GPU recurrent layers run without cuDNN, which has no gradient of them in evaluation mode."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedaudit.models import build_model
from fedaudit.utils.machine import full_precision


class Watched(nn.LSTM):
    """Notes whether cuDNN was on while it was called."""

    def forward(self, signals: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # type: ignore[override]
        SEEN.append(torch.backends.cudnn.enabled)
        if signals.shape[-1] != self.input_size:
            raise ValueError("no such input")
        found: tuple[Tensor, tuple[Tensor, Tensor]] = super().forward(signals)
        return found


SEEN: list[bool] = []


def test_cudnn_is_off_while_a_recurrent_layer_is_called_and_then_only() -> None:
    layer, other = Watched(3, 4), nn.Linear(4, 2)
    other.register_forward_hook(lambda *_: SEEN.append(torch.backends.cudnn.enabled))
    before = torch.backends.cudnn.enabled, torch.backends.cudnn.deterministic
    with full_precision("cuda"):
        SEEN.clear()
        other(layer(torch.zeros(2, 5, 3))[0])
        with pytest.raises(ValueError, match="no such input"):
            layer(torch.zeros(2, 5, 7))
        other(torch.zeros(1, 4))
        assert SEEN == [False, True, False, True]
    assert (torch.backends.cudnn.enabled, torch.backends.cudnn.deterministic) == before
    SEEN.clear()
    layer(torch.zeros(2, 5, 3))
    assert SEEN == [True]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_gradients_of_gradients_in_evaluation_mode(name: str) -> None:
    with full_precision("cuda"):
        model = build_model(name, input_shape=(3, 20), outputs=4).eval().cuda()
        signals = torch.randn(2, 3, 20, device="cuda", requires_grad=True)
        value = nn.functional.cross_entropy(model(signals), torch.tensor([0, 1], device="cuda"))
        grads = torch.autograd.grad(value, list(model.parameters()), create_graph=True)
        (found,) = torch.autograd.grad(torch.stack([g.square().sum() for g in grads]).sum(), signals)
        assert bool(found.isfinite().all())
