"""Orthogonal matching pursuit over sequences: behind noise, and beyond adapters' rank."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedaudit
from fedaudit.attacks import SequenceFinding
from fedaudit.attacks.text.somp import Pursuit, whitened
from fedaudit.data import Dataset
from fedaudit.modalities import TokenInfo
from fedaudit.models import build_model
from fedaudit.simulation.simulator import Recording
from fedaudit.utils.errors import NotApplicable
from tests.attacks.test_text import GRADIENTS, recorded, run, words


def noisy(only: Recording, share: float, seed: int = 0) -> Recording:
    """Add white noise to the update, of which the deviation is a share of its root mean square."""
    update = only.transcript.rounds[0].updates[0]
    rng = torch.Generator().manual_seed(seed)
    size = math.sqrt(sum(float(t.square().sum()) for t in update.tensors.values()))
    deviation = share * size / math.sqrt(sum(t.numel() for t in update.tensors.values()))
    for name, tensor in update.tensors.items():
        update.tensors[name] = tensor + deviation * torch.randn(tensor.shape, generator=rng)
    return only


@pytest.mark.slow
def test_texts_are_read_behind_noise_that_hides_every_span():
    only = noisy(recorded(width=32, examples=2, batch_size=2), share=0.5)
    true = words(only, only.truth.inputs[0, 0])
    assert len(run("dager", only).sequences) == 0
    assert words(only, run("somp", only, passes=0).sequences) == true


@pytest.mark.slow
def test_texts_are_read_beyond_the_adapters_rank():
    """Four notes have some 60 places; the adapters' gradients span 48 dimensions at most."""
    only = recorded(model="decoder-lora", rounds=2, keep_rounds=[1], learning_rate=0.3)
    true = words(only, only.truth.inputs[1, 0])
    assert len(run("dager", only).sequences) == 0
    found = run("somp", only)
    assert words(only, found.sequences) == true
    assert "it is all that there was" in found.notes[-1]


class Bottleneck(nn.Module):
    """What a layer returns, and beside it an adapter: down to a few numbers, ReLU, up again (Houlsby et al. 2019)."""

    def __init__(self, part: nn.Module, width: int, rank: int) -> None:
        super().__init__()
        self.part, self.down, self.up = part, nn.Linear(width, rank), nn.Linear(rank, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.part(x)
        return torch.add(x, self.up(torch.relu(self.down(x))))


def test_texts_are_read_from_bottleneck_adapters_which_tell_no_attention_s_span():
    """UTR's setting (Chen et al. 2026): 28 places of four texts, behind two adapters of eight numbers each."""
    tokens = torch.randint(1, 50, (60, 8), generator=torch.Generator().manual_seed(1))
    tokens[:, -1] = 0
    torch.manual_seed(0)
    info = TokenInfo(50, end=0, causal=True)
    model: Any = build_model("decoder", input_shape=(8,), outputs=50, width=64, tokens=info)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for block in model.blocks:
        block.out = Bottleneck(block.out, 64, 8)
    made = {"data": {"name": "custom"}, "federations": [GRADIENTS], "attacks": ["dager"]}
    data = Dataset.from_tokens(tokens, vocabulary=50, end=0)
    only = fedaudit.simulate(made, model=model, data=data, progress=False)
    with pytest.raises(NotApplicable, match="needs the gradients of an attention's query, key and value"):
        run("dager", only)
    assert words(only, run("somp", only).sequences) == words(only, only.truth.inputs[0, 0])


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))])
def test_noise_alone_is_no_text(seed: int):
    only = recorded(width=16, examples=2, batch_size=2)
    update, rng = only.transcript.rounds[0].updates[0], torch.Generator().manual_seed(seed)
    for name, tensor in update.tensors.items():
        update.tensors[name] = torch.randn(tensor.shape, generator=rng)
    found = run("somp", only, passes=0)
    assert isinstance(found, SequenceFinding)
    assert len(found.sequences) == 0


def test_a_whitened_gradient_tells_places_apart():
    rng = torch.Generator().manual_seed(0)
    back, inputs = (torch.linalg.qr(torch.randn(n, 5, generator=rng, dtype=torch.float64))[0].T for n in (20, 30))
    sizes = torch.linspace(0.5, 2, 5, dtype=torch.float64)
    gradient = torch.einsum("t,to,ti->oi", sizes, back, inputs)
    for inverted, own in ((False, torch.ones_like(sizes)), (True, 1 / sizes)):
        direction = whitened(gradient, inverted=inverted)
        told = torch.einsum("so,oi,ti->st", back, direction, inputs)
        torch.testing.assert_close(told, own.diag(), atol=1e-9, rtol=0.15)  # the least is damped
    mixed = torch.eye(5, dtype=torch.float64) + 0.1 * torch.ones(5, 5, dtype=torch.float64)
    back, inputs = mixed @ back, mixed @ inputs  # no longer at right angles
    direction = whitened(1e3 * torch.einsum("to,ti->oi", back, inputs), inverted=True)
    told = 1e3 * torch.einsum("so,oi,ti->st", back, direction, inputs)
    torch.testing.assert_close(told, torch.eye(5, dtype=torch.float64), atol=0.05, rtol=0)


def test_derivatives_along_the_update_are_autograd_s_inner_products():
    info = TokenInfo(20, padding=0, causal=True)
    module = build_model("decoder", input_shape=(6,), outputs=20, width=16, tokens=info).eval().double()
    rng = torch.Generator().manual_seed(0)
    gradient = {n: torch.randn(p.shape, generator=rng, dtype=torch.float64) for n, p in module.named_parameters()}
    pursuit = Pursuit(module, gradient, info, torch.arange(1, 20), 6, 4, True, rng)
    pursuit.aim(pursuit.gradient)
    rows = torch.randint(1, 20, (3, 6), generator=rng)
    told = pursuit.derivatives(rows)
    for row, place, token in ((0, 0, 3), (1, 4, 7), (2, 5, 19)):
        weights = dict(module.named_parameters())
        loss: Any = -module(rows)[row, :, place].log_softmax(dim=0)[token]
        inner = sum(
            (g * pursuit.along[name]).sum()
            for name, g in zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True)
            if name in pursuit.along
        )
        assert isinstance(inner, Tensor)
        torch.testing.assert_close(told[row, token, place], inner, rtol=1e-4, atol=1e-6)


def test_classifiers_of_text_are_refused():
    with pytest.raises(NotApplicable, match="somp needs a model that predicts the next token; this one predicts"):
        run("somp", recorded("notes", examples=2, batch_size=2))


def test_texts_of_different_shares_are_found_and_leave_nothing():
    """An update of three parts of one text and two of another: both are found, and nothing is left."""
    info = TokenInfo(20, padding=0, causal=True)
    module: nn.Module = build_model("decoder", input_shape=(6,), outputs=20, width=16, tokens=info).eval().double()
    rng = torch.Generator().manual_seed(0)
    texts, gradient = torch.tensor([[5, 6, 7, 8, 0, 0], [9, 3, 2, 11, 12, 0]]), dict[str, Tensor]()
    for text, share in zip(texts, (1.5, 1.0), strict=True):
        module.zero_grad()
        loss = nn.functional.cross_entropy(module(text[None]), info.following(text[None]), reduction="sum")
        (share * loss).backward()
        for name, p in module.named_parameters():
            assert p.grad is not None
            gradient[name] = gradient.get(name, 0) + p.grad.clone()
    pursuit = Pursuit(module, gradient, info, torch.arange(1, 20), 6, 32, True, rng)
    found, rest = pursuit.run(2, 0, lambda *_: None)
    assert sorted(found) == [[5, 6, 7, 8], [9, 3, 2, 11, 12]]
    assert rest < 1e-3
