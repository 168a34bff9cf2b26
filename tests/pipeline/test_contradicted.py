"""Where a recorded training, repeated, gives another update: the advice says what it looks like, and what to do."""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fedaudit
from fedaudit.pipeline.recordings import why_contradicted
from fedaudit.simulation.simulator import Recording
from fedaudit.transcript.transcript import Transcript
from fedaudit.transcript.truth import load_truth, truth_beside
from fedaudit.transcript.update import Replay

INPUTS = torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(1))
LABELS = torch.tensor([0, 0, 0, 1, 2, 2, 3, 3])
State = dict[str, Tensor]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 4))


def step(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy) -> None:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    loss(model(INPUTS), LABELS).backward()
    optimiser.step()


def sharpness_aware(model: nn.Module) -> None:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    cross_entropy(model(INPUTS), LABELS).backward()
    moves = [0.5 * p.grad for p in model.parameters() if p.grad is not None]
    with torch.no_grad():
        for p, move in zip(model.parameters(), moves, strict=True):
            p.add_(move)
    optimiser.zero_grad()
    cross_entropy(model(INPUTS), LABELS).backward()
    with torch.no_grad():
        for p, move in zip(model.parameters(), moves, strict=True):
            p.sub_(move)
    optimiser.step()


def audited(
    folder: Path,
    train: Callable[[nn.Module], None],
    change: Callable[[State], State] = lambda moved: moved,
    net: Callable[[], nn.Module] = net,
    **known: Any,
) -> Any:
    model = net()
    with fedaudit.Recorder(folder) as recorder, recorder.round(model.state_dict()):
        local = copy.deepcopy(model)
        with recorder.capture() as seen:
            train(local)
        start = model.state_dict()
        moved = change({name: value - start[name] for name, value in local.state_dict().items()})
        recorder.update("a", moved, seen, num_examples=8, form="difference")
    attacks: list[Any] = [{"name": "invg", "iterations": 1}, "labels"]
    done = fedaudit.audit_transcript(folder, attacks, module=net(), controls=False, progress=False, **known)
    return done.result


def advice(result: Any) -> str:
    return " ".join(text for summary in result.summaries for text in summary.advice)


def clipped(moved: State) -> State:
    length = math.sqrt(sum(float(t.square().sum()) for t in moved.values()))
    return {name: 0.01 * t / length for name, t in moved.items()}


def noisy(moved: State) -> State:
    dice = torch.Generator().manual_seed(3)
    return {name: t + 0.05 * torch.randn(t.shape, generator=dice) for name, t in moved.items()}


def test_clipping_is_told_by_its_norm(tmp_path):
    done = audited(tmp_path / "r", step, clipped)
    assert "clipped to a norm of 0.01" in advice(done)
    assert done.federations[0].recording.facts == "verified"


def test_noise_is_told_by_its_standard_deviation(tmp_path):
    said = advice(audited(tmp_path / "r", step, noisy))
    found = re.search(r"noise of standard deviation ([\d.]+)", said)
    assert found is not None
    assert "wrong fact" not in said
    assert float(found[1]) == pytest.approx(0.05, rel=0.1)
    assert "clipping" not in said
    assert "learning rate" not in said


def test_noise_after_clipping_is_told_with_the_factor(tmp_path):
    def both(moved: State) -> State:
        dice = torch.Generator().manual_seed(3)
        return {name: 0.5 * t + 1e-3 * torch.randn(t.shape, generator=dice) for name, t in moved.items()}

    said = advice(audited(tmp_path / "r", step, both))
    found = re.search(r"noise of standard deviation ([\d.]+), after clipping by a factor of ([\d.]+)", said)
    assert found is not None
    assert [float(value) for value in found.groups()] == pytest.approx([1e-3, 0.5], rel=0.1)


def other() -> State:
    torch.manual_seed(5)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 4)).state_dict()


WRONG: dict[str, Callable[[State], State]] = {
    "one layer trained by another rate": lambda moved: {n: t if n[0] == "1" else 3 * t for n, t in moved.items()},
    "whole weights sent as a difference": lambda moved: {n: t + net().state_dict()[n] for n, t in moved.items()},
    "strong decay after the step": lambda moved: {n: 0.9 * t - 0.1 * net().state_dict()[n] for n, t in moved.items()},
    "weak decay after the step": lambda moved: {n: 0.99 * t - 0.01 * net().state_dict()[n] for n, t in moved.items()},
    "a tenth of another model": lambda moved: {
        n: 0.9 * t + 0.1 * (other()[n] - net().state_dict()[n]) for n, t in moved.items()
    },
    "the sign flipped": lambda moved: {n: -t for n, t in moved.items()},
    "one number added to all": lambda moved: {n: t + 0.1 for n, t in moved.items()},
}


@pytest.mark.parametrize("what", WRONG)
def test_other_wrong_facts_are_neither(what, tmp_path):
    said = advice(audited(tmp_path / "r", step, WRONG[what]))
    assert "BatchNorm) is wrong" in said
    assert "standard deviation" not in said


def test_an_update_of_whole_numbers_only_looks_like_nothing(tmp_path):
    audited(tmp_path / "r", step)
    loaded = Transcript.load(tmp_path / "r", net())
    sent = loaded.rounds[0].updates[0]
    signs = {name: torch.sign(value).to(torch.int8) for name, value in sent.tensors.items()}
    rounds = [dataclasses.replace(loaded.rounds[0], updates=[dataclasses.replace(sent, tensors=signs)])]
    contradicted = dataclasses.replace(loaded, rounds=rounds, replays={(0, sent.client): Replay(1.0)})
    where = truth_beside(tmp_path / "r")
    assert where is not None
    said = why_contradicted(Recording(contradicted, load_truth(where, loaded)), Replay(1.0))
    assert "BatchNorm) is wrong" in said


def steps(rate: float, count: int) -> Callable[[nn.Module], None]:
    def train(model: nn.Module) -> None:
        optimiser = torch.optim.SGD(model.parameters(), lr=rate)
        for _ in range(count):
            optimiser.zero_grad()
            cross_entropy(model(INPUTS), LABELS).backward()
            optimiser.step()

    return train


def rounded(make: Callable[[], nn.Module], train: Callable[[nn.Module], None]) -> Callable[[State], State]:
    """Return the update of training from weights a rounding away: what another order of sums would do."""

    def change(_: State) -> State:
        model, start = make(), make().state_dict()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 + 1.2e-7)
        train(model)
        return {name: value - start[name] for name, value in model.state_dict().items()}

    return change


def deep() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
    return nn.Sequential(nn.Flatten(), *layers)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.7, 1.0])
def test_rounding_that_training_amplifies_contradicts_nothing(rate, tmp_path):
    train = steps(rate, 60)
    done = audited(tmp_path / "r", train, rounded(deep, train), net=deep)
    recording = done.federations[0].recording
    (replay,) = recording.replays
    assert replay.error > 0.05
    assert 10 * replay.rounding > replay.error
    assert recording.facts == "unverified"  # a replay that is so unsure would let any update pass
    assert "gives other updates" not in advice(done)
    assert "facts unverified" in " ".join(c for s in done.summaries for c in s.cautions)


@pytest.mark.slow
def test_a_wrong_fact_is_told_where_training_amplifies_a_little(tmp_path):
    done = audited(tmp_path / "r", steps(1.0, 200), lambda moved: {name: 1.2 * t for name, t in moved.items()})
    (replay,) = done.federations[0].recording.replays
    assert replay.error == pytest.approx(1 - 1 / 1.2, rel=0.05)
    assert 0 < replay.rounding < 0.01
    assert done.federations[0].recording.facts == "contradicted"
    assert "1.2 times as large" in advice(done)


def with_kept_momentum(model: nn.Module, kept: float = 1.0) -> None:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for p in model.parameters():
        optimiser.state[p]["momentum_buffer"] = torch.full_like(p, kept)
    cross_entropy(model(INPUTS), LABELS).backward()
    optimiser.step()


def with_kept_zeros(model: nn.Module) -> None:
    with_kept_momentum(model, 0.0)


def with_a_layer_frozen_midway(model: nn.Module) -> None:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    for frozen in (False, True):
        next(model.parameters()).requires_grad_(not frozen)
        optimiser.zero_grad()
        cross_entropy(model(INPUTS), LABELS).backward()
        optimiser.step()


def with_changed_gradients(model: nn.Module) -> None:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    cross_entropy(model(INPUTS), LABELS).backward()
    for p in model.parameters():
        p.grad = torch.sign(p.grad) if p.grad is not None else None
    optimiser.step()


@pytest.mark.parametrize(
    ("train", "remedy"),
    [
        (with_kept_momentum, "Make the optimiser anew each round."),
        (with_a_layer_frozen_midway, "freeze layers before its first step."),
        (with_changed_gradients, "change gradients by torch.nn.utils.clip_grad_norm_ or clip_grad_value_ only."),
    ],
)
def test_the_remedy_fits_what_was_seen(train, remedy, tmp_path):
    said = advice(audited(tmp_path / "r", train))
    assert remedy in said
    assert "Record a training by SGD" not in said


def by_transforms(model: nn.Module) -> None:
    weights = dict(model.named_parameters())
    for _ in range(2):
        free = {name: value.detach() for name, value in weights.items()}
        gradients = torch.func.grad(
            lambda free: cross_entropy(torch.func.functional_call(model, free, INPUTS), LABELS)
        )(free)
        with torch.no_grad():
            for name, value in weights.items():
                value.sub_(0.1 * gradients[name])


def test_what_wasnt_understood_of_a_training_contradicts_nothing(tmp_path):
    result = audited(tmp_path, by_transforms)
    recording = result.federations[0].recording
    assert recording.facts == "unverified"
    assert "can't be repeated" in recording.facts_text


def test_what_was_seen_of_an_update_that_is_reproduced_explains_no_other(tmp_path):
    model = net()
    with fedaudit.Recorder(tmp_path / "r") as recorder, recorder.round(model.state_dict()):
        for client, train, change in (("a", with_kept_zeros, dict), ("b", step, noisy)):
            local = copy.deepcopy(model)
            with recorder.capture() as seen:
                train(local)
            recorder.update(client, change(local.state_dict()), seen, num_examples=8)
    done = fedaudit.audit_transcript(tmp_path / "r", ["labels"], module=net(), controls=False, progress=False)
    said = advice(done.result)
    assert "noise of standard deviation" in said
    assert "kept its state" not in said


def test_a_step_of_several_gradients_is_told_as_such(tmp_path):
    said = advice(audited(tmp_path / "r", sharpness_aware))
    assert "more than one gradient a step" in said
    assert "noise" not in said


def focal(outputs: Tensor, targets: Tensor) -> Tensor:
    each = cross_entropy(outputs, targets, reduction="none")
    return ((1 - torch.exp(-each)) ** 2 * each).mean()


def gathered(outputs: Tensor, targets: Tensor) -> Tensor:
    return -outputs.log_softmax(1).gather(1, targets[:, None]).mean()


def test_a_loss_of_ones_own_is_asked_for_and_repeated_where_it_is_given(tmp_path):
    assert "Give the loss: --loss" in advice(audited(tmp_path / "a", lambda model: step(model, focal)))
    given = audited(tmp_path / "b", lambda model: step(model, focal), loss=focal)
    assert given.federations[0].replay_error == 0
    with pytest.raises(fedaudit.BadInput, match="a loss of torch's"):
        audited(tmp_path / "c", lambda model: step(model, gathered), loss=gathered)


@pytest.mark.parametrize("wrap", ["tied", "distributed"])
def test_tied_and_distributed_models_are_repeated(wrap, tmp_path, monkeypatch):
    def train(model: nn.Module) -> None:
        if wrap == "tied":
            step(model)
            return
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
        try:
            step(nn.parallel.DistributedDataParallel(model))
        finally:
            torch.distributed.destroy_process_group()

    def tied() -> nn.Module:
        torch.manual_seed(0)
        made = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 4))
        made[3].weight = made[1].weight
        return made

    if wrap == "tied":
        monkeypatch.setitem(globals(), "net", tied)
    assert audited(tmp_path / "r", train).federations[0].replay_error == 0
