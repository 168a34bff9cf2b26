"""Texts of classifiers behind noise, by relaxed words whose gradient matches the update's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fedaudit
from fedaudit.attacks.text.lamp import Match
from fedaudit.data import Dataset
from fedaudit.modalities import TokenInfo
from fedaudit.models import build_model
from fedaudit.models.initialise import initialise
from fedaudit.simulation.simulator import Recording
from fedaudit.utils.errors import NotApplicable
from tests.attacks.test_somp import noisy
from tests.attacks.test_text import GRADIENTS, recorded, run, words

VOCABULARY, LENGTH, CLASSES = 40, 7, 3
INFO = TokenInfo(VOCABULARY, padding=0)


def encoder(seed: int = 0) -> nn.Module:
    model = build_model("encoder", input_shape=(LENGTH,), outputs=CLASSES, width=32, tokens=INFO)
    initialise(model, "default", torch.Generator().manual_seed(seed))
    return model.eval()


def texts(count: int, seed: int = 1) -> torch.Tensor:
    """Return (count, length) random texts of four words or more."""
    rng = torch.Generator().manual_seed(seed)
    rows = torch.randint(1, VOCABULARY, (count, LENGTH), generator=rng)
    ends = torch.randint(4, LENGTH + 1, (count, 1), generator=rng)
    return rows.where(torch.arange(LENGTH) < ends, 0)


def audited(count: int, share: float) -> Recording:
    """Return the update of so many texts, with white noise of a share of its root mean square."""
    made = {"data": {"name": "custom"}, "federations": [{**GRADIENTS, "examples": count, "batch_size": count}]}
    data = Dataset.from_tokens(texts(60), torch.arange(60) % CLASSES, vocabulary=VOCABULARY, padding=0)
    return noisy(fedaudit.simulate({**made, "attacks": ["lamp"]}, model=encoder(), data=data, progress=False), share)


@pytest.mark.slow
def test_a_text_of_an_encoder_is_read_behind_noise_that_hides_every_span():
    only = audited(1, share=0.5)
    assert len(run("dager", only).sequences) == 0
    found = run("lamp", only)
    assert words(only, found.sequences) == words(only, only.truth.inputs[0, 0]), found.notes


@pytest.mark.slow
def test_two_notes_are_read_behind_noise():
    only = noisy(recorded("notes", "encoder", 128, examples=2, batch_size=2), share=0.6)
    found = run("lamp", only)
    assert words(only, found.sequences) == words(only, only.truth.inputs[0, 0]), found.notes


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))])
def test_noise_alone_is_no_text(seed: int):
    only = audited(1, share=0.0)
    update, rng = only.transcript.rounds[0].updates[0], torch.Generator().manual_seed(seed)
    for name, tensor in update.tensors.items():
        update.tensors[name] = torch.randn(tensor.shape, generator=rng)
    found = run("lamp", only, iterations=20, restarts=1)
    assert len(found.sequences) == 0
    assert "that is white noise, or rounding; 0 of 1 texts" in found.notes[-1]


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))])
def test_what_another_network_s_texts_left_is_no_text_of_this_one_s(seed: int):
    only = audited(1, share=0.0)
    other = encoder(seed)
    nn.functional.cross_entropy(other(texts(1, seed)), torch.tensor([0])).backward()
    update = only.transcript.rounds[0].updates[0]
    for name, p in other.named_parameters():
        assert p.grad is not None
        update.tensors[name] = p.grad
    found = run("lamp", noisy(only, 0.5, seed), iterations=20, restarts=1)
    assert len(found.sequences) == 0
    assert "that is more than white noise" in found.notes[-1]


def a_match(update: dict[str, Any], module: nn.Module) -> Match:
    return Match(module, update, INFO, LENGTH, CLASSES, torch.Generator().manual_seed(0))


def gradient(module: nn.Module, rows: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    loss = nn.functional.cross_entropy(module(rows), labels, reduction="sum")
    grads = torch.autograd.grad(loss, list(module.parameters()))
    return dict(zip((name for name, _ in module.named_parameters()), grads, strict=True))


def test_the_gradient_over_lengths_is_the_mean_of_those_of_texts_cut_off_there():
    module, row, label = encoder(), texts(20)[(texts(20) != 0).all(dim=1)][:1], torch.tensor([2])
    match = a_match(gradient(module, row, label), module)
    hot = nn.functional.one_hot(row, VOCABULARY).float()
    shares = torch.linspace(1, 2, len(match.masks))
    mixed = match.gradient(hot, match.masks, shares[:, None] * nn.functional.one_hot(label, CLASSES))
    cut = [row.where(torch.arange(LENGTH) < end, 0) for end in range(LENGTH - len(match.masks) + 1, LENGTH + 1)]
    apart = [torch.cat([g.flatten() for g in gradient(module, each, label).values()]) for each in cut]
    torch.testing.assert_close(mixed, (shares @ torch.stack(apart)).double(), atol=1e-5, rtol=1e-4)
    assert match.rest(match.texts_gradient(row, label)) < 1e-6


def test_labels_are_counted_whatever_the_words_are():
    module, labels = encoder(), torch.tensor([0, 2, 2, 2])
    match = a_match(gradient(module, texts(4), labels), module)
    assert match.count_labels(4).tolist() == labels.tolist()


def test_only_what_leaves_white_noise_is_told_and_only_where_each_word_stands_out_of_it():
    module, rows, labels = encoder(), texts(2), torch.tensor([0, 1])
    true, rng = gradient(module, rows, labels), torch.Generator().manual_seed(0)
    size = sum(float(g.square().sum()) for g in true.values()) ** 0.5
    for noise, white, stands in ((1e-3, False, True), (1e-1, True, False)):
        made = {n: g + noise * size * torch.randn(g.shape, generator=rng) for n, g in true.items()}
        match = a_match(made, module)
        assert match.white(rows, labels)
        assert match.stands(rows, labels, 0) is stands
        wrong = rows.clone()
        wrong[1, 1] = wrong[1, 1] % (VOCABULARY - 1) + 1
        assert match.white(wrong, labels) is white


def test_models_that_predict_the_next_token_are_refused():
    with pytest.raises(NotApplicable, match="lamp needs a classifier"):
        run("lamp", recorded(width=16, examples=2, batch_size=2))
