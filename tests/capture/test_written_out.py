"""Training that is written out: steps without an optimiser, parts called one after another, other precisions."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedaudit
from fedaudit import Recorder
from fedaudit.capture.capture import Capture
from fedaudit.results import FederationRecord
from fedaudit.utils.errors import BadInput
from tests.capture.capture_cases import batches, check, cnn, examples, sgd

Train = Callable[[Any, Tensor, Tensor], None]


def audited(folder: Path, make: Callable[[], nn.Module], train: Train, **options: Any) -> FederationRecord:
    """Record two clients of a round, and return what an audit says of the recording."""
    model = make()
    with Recorder(folder, **options) as recorder, recorder.round(model.state_dict()):
        for client in range(2):
            local = copy.deepcopy(model)
            with recorder.capture() as seen:
                train(local, *examples(client))
            recorder.update(f"client-{client}", local.state_dict(), seen)
    done = fedaudit.audit_transcript(folder, ["labels"], module=make(), controls=False, progress=False)
    return done.result.federations[0]


# --- steps by hand ----------------------------------------------------------------------------------------------------


def by_data(model: nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.data -= 0.1 * p.grad


def by_assignment(model: nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.data = p.data - 0.1 * p.grad


def without_grad(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            assert p.grad is not None
            p -= 0.1 * p.grad  # type: ignore[misc]


def all_at_once(model: nn.Module) -> None:
    with torch.no_grad():
        own: list[Tensor] = [*model.parameters()]
        torch._foreach_add_(own, [p.grad for p in own if p.grad is not None], alpha=-0.1)


def loaded(model: nn.Module) -> None:
    named = dict(model.named_parameters())
    model.load_state_dict({name: p.detach() - 0.1 * p.grad for name, p in named.items() if p.grad is not None})


def head_alone(model: nn.Module) -> None:
    with torch.no_grad():
        for p in [*model.parameters()][-2:]:
            assert p.grad is not None
            p -= 0.1 * p.grad  # type: ignore[misc]


def clipped(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.2)
    by_data(model)


def zeroed(model: nn.Module) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.zero_()


def forgotten(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = None


def by_hand(change: Callable[[nn.Module], None], clear: Callable[[nn.Module], None]) -> Train:
    def train(model: nn.Module, x: Tensor, y: Tensor) -> None:
        for inputs, targets in batches(x, y):
            F.cross_entropy(model(inputs), targets).backward()
            change(model)
            clear(model)

    return train


@pytest.mark.parametrize("clear", [zeroed, forgotten])
@pytest.mark.parametrize(
    "change", [by_data, by_assignment, without_grad, all_at_once, loaded, head_alone, clipped], ids=lambda f: f.__name__
)
def test_a_rate_times_the_gradient_is_sgd(
    change: Callable[[nn.Module], None], clear: Callable[[nn.Module], None], tmp_path: Path
) -> None:
    model, plain = cnn(), cnn()
    with Capture() as seen:
        by_hand(change, clear)(model, *examples())
    by_hand(change, clear)(plain, *examples())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True)), "unchanged"
    training = seen.training()
    assert (training.optimiser, training.learning_rate, training.local_steps) == ("sgd", 0.1, 5)
    assert (training.unmodelled, seen.notes, training.learning_rates) == ((), [], ())
    assert training.clip_norm == (pytest.approx(0.2, rel=1e-5) if change is clipped else None)
    trained = {name for group in training.groups if group.learning_rate == 0 for name in group.parameters}
    assert trained == ({"0.weight", "0.bias"} if change is head_alone else set())
    record = audited(tmp_path / "r", cnn, by_hand(change, clear))
    assert record.recording is not None
    assert record.recording.facts == "verified"
    assert record.replay_error == pytest.approx(0, abs=1e-5)


def test_gradients_that_dont_lie_at_the_parameters() -> None:
    def train(model: nn.Module, x: Tensor, y: Tensor) -> None:
        for inputs, targets in batches(x, y):
            slopes = torch.autograd.grad(F.cross_entropy(model(inputs), targets), [*model.parameters()])
            with torch.no_grad():
                for p, slope in zip(model.parameters(), slopes, strict=True):
                    p.add_(slope, alpha=-0.05)

    model = cnn()
    with Capture() as seen:
        train(model, *examples())
    assert (seen.training().optimiser, seen.training().learning_rate, seen.steps) == ("sgd", 0.05, 5)
    check(seen, model)


@pytest.mark.parametrize("rule", ["signs", "momentum"])
def test_another_rule_by_hand_is_said(rule: str) -> None:
    kept: dict[nn.Parameter, Tensor] = {}

    def change(model: nn.Module) -> None:
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                kept[p] = 0.9 * kept.get(p, torch.zeros_like(p)) + p.grad
                p -= 0.01 * (p.grad.sign() if rule == "signs" else kept[p])  # type: ignore[misc]

    with Capture() as seen:
        by_hand(change, zeroed)(cnn(), *examples())
    assert (seen.training().optimiser, seen.steps) == ("other", 5)
    assert "optimiser" in seen.training().unmodelled
    assert seen.notes == ["weights are changed by hand, and not by a rate times the gradient"]


def test_what_follows_an_optimiser_s_step_is_no_step_of_its_own() -> None:
    average = cnn(seed=3)

    def train(model: nn.Module, x: Tensor, y: Tensor) -> None:
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for inputs, targets in batches(x, y):
            opt.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            opt.step()
            for mean, p in zip(average.parameters(), model.parameters(), strict=True):
                mean.data.mul_(0.9).add_(p.data, alpha=0.1)

    model = cnn()
    with Capture() as seen:
        train(model, *examples())
    assert (seen.training().optimiser, seen.steps, seen.notes) == ("sgd", 5, [])
    check(seen, model)


# --- modules compiled in place ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("before", [True, False])
def test_a_module_that_is_compiled_in_place(before: bool) -> None:
    original, model, plain = nn.Module.compile, cnn(), cnn()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain.compile(backend="aot_eager")
        sgd()(plain, *examples())
        if before:
            model.compile(backend="aot_eager")
        compiled = model._compiled_call_impl
        with Capture() as seen:
            if not before:
                model.compile(backend="aot_eager")
            sgd()(model, *examples())
    assert nn.Module.compile is original
    assert not before or model._compiled_call_impl is compiled
    assert (seen.steps, seen.notes, seen.module) == (5, [], model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True)), "unchanged"


# --- precisions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", [False, True])
def test_models_in_other_precisions_are_replayed_in_theirs(kind: torch.dtype, norm: bool, tmp_path: Path) -> None:
    def make() -> nn.Module:
        return cnn(norm=norm).to(kind)

    def train(model: nn.Module, x: Tensor, y: Tensor) -> None:
        sgd(momentum=0.9)(model, x.to(kind), y)

    record = audited(tmp_path / "r", make, train, mean=(0.0,), std=(1.0,))
    assert record.recording is not None
    assert record.recording.facts == "verified"
    assert record.replay_error == pytest.approx(0, abs=1e-5 if kind == torch.float64 else 0)
    name = str(kind).removeprefix("torch.")
    assert f"weights in {name}" in record.recording.training[0]
    transcript = fedaudit.Transcript.load(tmp_path / "r", make())
    assert {p.dtype for p in transcript.module.parameters()} == {torch.float32}
    update = transcript.rounds[0].updates[0]
    assert update.training is not None
    assert update.training.weights == name
    assert update.training.rounds == (kind != torch.float64)


# --- parts ------------------------------------------------------------------------------------------------------------


class Auto(nn.Module):
    """As Lightning's first example: parts are called by themselves, and the target is the input."""

    def __init__(self, maps: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.encoder = nn.Sequential(nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 3))
            self.decoder = nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Linear(12, 64))
            if maps:
                self.encoder = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.Tanh())
                self.decoder = nn.Sequential(nn.ConvTranspose2d(4, 1, 2, stride=2))
        self.maps = maps

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)  # type: ignore[no-any-return]

    def training_step(self, x: Tensor) -> Tensor:
        x = x if self.maps else x.view(len(x), -1)
        return F.mse_loss(self.decoder(self.encoder(x)), x)


class Noisy(Auto):
    def training_step(self, x: Tensor) -> Tensor:
        x = x.view(len(x), -1)
        code = self.encoder(x)
        return F.mse_loss(self.decoder(code + torch.randn_like(code)), x)


def fit(model: Any, x: Tensor, _: Tensor) -> None:
    """As Lightning's loop: passes are made inside of the optimiser's step."""
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    for inputs, _ in batches(x, x):

        def closure(inputs: Tensor = inputs) -> Tensor:
            loss: Tensor = model.training_step(inputs)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            return loss

        opt.step(closure)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("maps", [True, False])
def test_parts_called_one_after_another_are_one_model(maps: bool, given: bool, tmp_path: Path) -> None:
    model, plain, (x, y) = Auto(maps), Auto(maps), examples()
    with Capture(model if given else None) as seen:
        fit(model, x, y)
    fit(plain, x, y)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True)), "unchanged"
    assert (seen.loss, seen.steps, seen.notes) == ("mse", 5, [])
    assert seen.start.keys() == model.state_dict().keys()
    assert all(torch.equal(value, Auto(maps).state_dict()[name]) for name, value in seen.start.items())
    whole = x if maps else x.flatten(1)
    assert torch.equal(torch.cat(seen.inputs), whole)
    assert torch.equal(torch.cat(seen.targets), whole)
    assert seen.training().clip_norm == pytest.approx(0.05, rel=1e-5)
    record = audited(tmp_path / "r", lambda: Auto(maps), fit, **({"mean": (0.0,), "std": (1.0,)} if maps else {}))
    assert record.recording is not None
    assert record.recording.facts == "verified"
    assert record.replay_error == pytest.approx(0, abs=1e-6)


def test_what_happens_between_the_parts_isnt_guessed(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="count as one"):
        audited(tmp_path / "r", Noisy, fit)
