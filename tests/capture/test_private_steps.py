"""DP-SGD: what Opacus makes of a training is seen, repeated to the last rounding, described and accounted for."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner

import fedaudit
from fedaudit import Recorder
from fedaudit.capture.capture import Capture
from fedaudit.cli import app
from fedaudit.defences.privacy import DifferentialPrivacy
from fedaudit.simulation.replay import relative_error, replay
from fedaudit.task.training import TrainingConfig, loss_function
from fedaudit.transcript.update import ClientDefenceInfo, PrivateSteps
from fedaudit.utils.errors import BadInput
from tests.capture.capture_cases import cnn, examples

CLIP = 0.5
Optimiser = Callable[[Any], torch.optim.Optimizer]


def sgd(**settings: Any) -> Optimiser:
    return lambda p: torch.optim.SGD(p, **{"lr": 0.1, **settings})


def privately(
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    *,
    noise: float = 1.0,
    size: int = 8,
    optimiser: Optimiser | None = None,
    loss: Any = F.cross_entropy,
    epochs: int = 1,
    virtual: int | None = None,
    every: int = 1,
    own_loader: bool = False,
    around: bool = False,
    **settings: Any,
) -> None:
    """Train as Opacus' tutorials do."""
    from opacus import PrivacyEngine
    from opacus.utils.batch_memory_manager import BatchMemoryManager

    optimiser = optimiser or sgd()
    loader = DataLoader(TensorDataset(*data), size, shuffle=True)
    inner = optimiser(model.parameters())
    made: Any = PrivacyEngine().make_private(
        module=model,
        optimizer=inner,
        data_loader=loader,
        noise_multiplier=noise,
        **{"max_grad_norm": CLIP, "criterion": loss, **settings},
    )
    net, outer, drawing = made[0] if callable(made[0]) else model, made[1], loader if own_loader else made[-1]
    loss = made[2] if len(made) == 4 else loss  # ghost clipping has a loss of its own
    memory = contextlib.nullcontext(drawing)
    if virtual:
        memory = BatchMemoryManager(data_loader=drawing, max_physical_batch_size=virtual, optimizer=outer)
    with memory as batches:
        for _ in range(epochs):
            for i, (x, y) in enumerate(batches):
                if i % every == 0:
                    outer.zero_grad()
                loss(net(x), y).backward()
                if (i + 1) % every == 0:
                    (inner if around else outer).step()


def watched(model: nn.Module, data: tuple[Tensor, Tensor] | None = None, **how: Any) -> Capture:
    torch.manual_seed(5)
    with Capture() as seen:
        privately(model, data or examples(), **how)
    return seen


def error(seen: Capture, model: nn.Module, blank: nn.Module, **changes: Any) -> float:
    """Return how far a replay of what was seen, or of something else, is from what was trained."""
    assert seen.loss is not None
    private = seen.private
    assert private is not None
    private = dataclasses.replace(private, **{k: changes.pop(k) for k in list(changes) if hasattr(private, k)})
    passes = list(zip(seen.inputs, seen.targets, strict=True))
    loss = loss_function(seen.loss, seen.label_smoothing, seen.class_weights)
    facts: dict[str, Any] = {"randomness": seen.randomness, "dropout": seen.dropout, **changes}
    found = replay(blank, loss, seen.start, passes, seen.training(), private=private, **facts)
    return relative_error({name: p.detach() for name, p in model.named_parameters()}, found, seen.start)


ADAPTIVE: dict[str, Any] = {
    "clipping": "adaptive",
    "target_unclipped_quantile": 0.5,
    "clipbound_learning_rate": 0.2,
    "max_clipbound": 10.0,
    "min_clipbound": 0.01,
    "unclipped_num_std": 2.0,
}
WAYS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "without noise": {"noise": 0.0},
    "momentum and decay": {"optimiser": sgd(momentum=0.9, weight_decay=0.01)},
    "adam": {"optimiser": lambda p: torch.optim.Adam(p, lr=0.01)},
    "virtual steps": {"virtual": 3, "size": 20},
    "not poisson": {"poisson_sampling": False},
    "accumulated": {"poisson_sampling": False, "every": 2, "size": 10},
    "sum": {"loss": nn.CrossEntropyLoss(reduction="sum"), "loss_reduction": "sum"},
    "class weights": {"loss": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 0.5]))},
    "ghost": {"grad_sample_mode": "ghost", "loss": nn.CrossEntropyLoss()},
    "ghost, virtual steps": {"grad_sample_mode": "ghost", "loss": nn.CrossEntropyLoss(), "virtual": 3, "size": 20},
    "functorch": {"grad_sample_mode": "functorch"},
    "expanded weights": {"grad_sample_mode": "ew", "poisson_sampling": False},
    "by layers": {"clipping": "per_layer", "max_grad_norm": [0.1, 0.2, 0.3, 0.4]},
    "hooks alone": {"wrap_model": False},
}


@pytest.mark.peers
@pytest.mark.parametrize("name", WAYS)
def test_private_training_is_repeated_from_what_was_seen_of_it(name: str) -> None:
    pytest.importorskip("opacus")
    unwatched, model = cnn(), cnn()
    torch.manual_seed(5)
    privately(unwatched, examples(), **WAYS[name])
    seen = watched(model, **WAYS[name])
    for key, value in unwatched.state_dict().items():
        assert torch.equal(value, model.state_dict()[key]), key  # watching changes nothing, the noise neither
    assert seen.training().unmodelled == ()
    assert error(seen, model, cnn()) < 1e-5


@pytest.mark.peers
def test_dropout_is_repeated_beside_clipping_and_noise() -> None:
    pytest.importorskip("opacus")
    model = cnn(dropout=0.5)
    assert error(watched(model), model, cnn(dropout=0.5)) < 1e-5


@pytest.mark.peers
def test_steps_that_drew_nobody_have_noise_and_momentum() -> None:
    pytest.importorskip("opacus")
    x, y = examples()
    for momentum in (0.0, 0.9):
        model = cnn()
        seen = watched(model, (x[:4], y[:4]), size=1, epochs=3, optimiser=sgd(momentum=momentum))
        assert seen.private is not None
        assert (seen.private.steps, seen.private.rate) == (12, 0.25)
        assert 0 < len(seen.private.empty) == 12 - seen.training().local_steps
        assert error(seen, model, cnn()) < 1e-5
        if momentum:
            assert error(seen, model, cnn(), empty=(), randomness=()) > 0.05


@pytest.mark.peers
def test_an_update_of_empty_batches_alone_is_no_training_and_still_private(tmp_path: Path) -> None:
    pytest.importorskip("opacus")
    from opacus import PrivacyEngine

    x, y = examples()
    model = cnn()
    with Recorder(tmp_path / "r") as recorder, recorder.round(model.state_dict()):
        with recorder.capture() as seen:
            net, optimiser, loader = PrivacyEngine().make_private(
                module=model,
                optimizer=sgd()(model.parameters()),
                data_loader=DataLoader(TensorDataset(x[:2], y[:2]), 1),
                noise_multiplier=1.0,
                max_grad_norm=1.0,
            )
            torch.manual_seed(0)
            inputs, targets = next((a, b) for _ in range(100) for a, b in loader if not len(a))
            F.cross_entropy(net(inputs.float()), targets.long()).backward()
            optimiser.step()
        assert seen is not None
        with pytest.raises(BadInput, match="was empty"):
            seen.training()
        recorder.update("a", model.state_dict(), seen, num_examples=2)
    (entry,) = json.loads((tmp_path / "r/round-00000.json").read_text())["messages"]
    assert entry["notes"] == ["every batch that was drawn was empty: there is no example in this update"]
    done = CliRunner().invoke(app, ["ledger", str(tmp_path / "r"), "--json"])
    assert 0 < json.loads(done.stdout)[0]["epsilon"] < math.inf


@pytest.mark.peers
def test_wrong_facts_of_private_steps_make_a_large_error() -> None:
    pytest.importorskip("opacus")
    model = cnn()
    seen = watched(model, noise=0.1)
    assert error(seen, model, cnn(), clip=2 * CLIP) > 0.2
    assert error(seen, model, cnn(), divisor=10.0) > 0.1
    assert error(seen, model, cnn(), noise=0.0) > 0.2
    assert error(seen, model, cnn(), randomness=()) > 0.2


@pytest.mark.peers
def test_adaptive_clipping_is_named_and_its_replay_not_claimed() -> None:
    pytest.importorskip("opacus")
    seen = watched(cnn(), **ADAPTIVE)
    assert "gradients-changed" in seen.training().unmodelled
    assert seen.private is not None
    assert seen.private.noise == 1.0  # which is what is accounted for


@pytest.mark.peers
def test_batches_count_as_poisson_samples_only_where_they_were_drawn_so() -> None:
    pytest.importorskip("opacus")
    ways: list[dict[str, Any]] = [{}, {"own_loader": True}, {"poisson_sampling": False}]
    seen = [watched(cnn(), **how).private for how in ways]
    assert [one and one.rate for one in seen] == [0.2, None, None]


@pytest.mark.peers
def test_an_optimiser_that_is_called_around_opacus_promises_nothing() -> None:
    pytest.importorskip("opacus")
    assert watched(cnn(), around=True).private is None


@pytest.mark.peers
def test_the_noise_and_length_that_are_told_of_an_update_are_those_that_it_has(tmp_path: Path) -> None:
    pytest.importorskip("opacus")
    for number, momentum in enumerate((0.0, 0.9)):
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 40))
        start = copy.deepcopy(model.state_dict())
        with Recorder(tmp_path / str(number)) as recorder, recorder.round(start):
            with recorder.capture() as seen:
                how: dict[str, Any] = {"noise": 1e5, "max_grad_norm": 1e-5, "optimiser": sgd(momentum=momentum)}
                privately(model, examples(), **how)
            recorder.update("a", model.state_dict(), seen)
        (entry,) = json.loads((tmp_path / str(number) / "round-00000.json").read_text())["messages"]
        told = entry["sanitised"]
        moved = torch.cat([(model.state_dict()[name] - start[name]).flatten() for name in start])
        assert told["noise"] == pytest.approx(float(moved.std()), rel=0.06)  # 2,600 numbers
        steps = [n * 1e-5 / 8 * 0.1 for n in entry["training"]["batch_sizes"]]
        carried = [sum(momentum**k for k in range(len(steps) - s)) for s in range(len(steps))]
        assert told["clip"] == pytest.approx(sum(a * b for a, b in zip(steps, carried, strict=True)))


# --- audits -----------------------------------------------------------------------------------------------------------


def recorded(folder: Path, n: int, *, clients: int = 2, claim: float | None = None, **how: Any) -> nn.Module:
    """Record one round of a federation whose clients train privately on n digits each."""
    data = fedaudit.load_dataset("digits").train
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    start = copy.deepcopy(model.state_dict())
    torch.manual_seed(2)
    with Recorder(folder) as recorder, recorder.round(start):
        for client in range(clients):
            local = copy.deepcopy(model)
            rows = slice(client * n, (client + 1) * n)
            with recorder.capture() as seen:
                privately(local, (data.inputs[rows], data.targets[rows]), **how)
            assert seen is not None
            told = None
            if claim is not None:
                assert seen.private is not None
                told = ClientDefenceInfo("dp-sgd", noise=1.0, private=dataclasses.replace(seen.private, noise=claim))
            recorder.update(client, local.state_dict(), seen, num_examples=n, sanitised=told)
        recorder.module = local  # as it was left, with hooks
    return local


def audited(folder: Path, module: nn.Module, attack: Any = "labels") -> Any:
    done = fedaudit.audit_transcript(
        folder, [attack], module=module, out=folder.parent / f"{folder.name}-out", controls=False, progress=False
    )
    return done.result


@pytest.mark.peers
def test_one_example_without_noise_is_recovered_behind_its_clip(tmp_path: Path) -> None:
    pytest.importorskip("opacus")
    module = recorded(tmp_path / "r", 1, size=1, noise=0.0, poisson_sampling=False, clients=3)
    result = audited(tmp_path / "r", module, "exact-linear")
    (row,) = result.summaries
    assert row.verdict == "recovered"
    (record,) = [f.recording for f in result.federations]
    assert record.facts == "verified"
    assert "DP-SGD: each example's gradient clipped to 0.5, no noise, the sum divided by 1" in record.training[0]


@pytest.mark.peers
def test_noise_is_named_and_attacks_that_need_the_gradient_say_so(tmp_path: Path) -> None:
    pytest.importorskip("opacus")
    module = recorded(tmp_path / "r", 24)
    result = audited(tmp_path / "r", module, "spear")
    (record,) = [f.recording for f in result.federations]
    assert record.facts == "verified"
    assert max(replay.error for replay in record.replays) < 1e-4
    (note,) = [one for one in record.notes if "noise on record promises an example ε = " in one]
    assert "; of 35 candidates that seem equally likely" in note
    assert {f.status for f in result.findings} == {"not applicable"}
    assert all("per-example clipping and noise" in (f.reason or "") for f in result.findings)


@pytest.mark.peers
@pytest.mark.parametrize(("claim", "facts"), [(None, "unverified"), (0.25, "contradicted"), (12.0, "contradicted")])
def test_noise_that_was_not_recorded_explains_what_its_size_explains(
    claim: float | None, facts: str, tmp_path: Path
) -> None:
    pytest.importorskip("opacus")
    generator = torch.Generator().manual_seed(7)
    module = recorded(tmp_path / "r", 24, claim=claim, noise_generator=generator)
    (record,) = [f.recording for f in audited(tmp_path / "r", module).federations]
    assert record.facts == facts
    assert all(replay.error > 0.05 for replay in record.replays)
    assert {bool(replay.explanation) for replay in record.replays} == {facts != "contradicted"}


# --- without Opacus ---------------------------------------------------------------------------------------------------


def test_a_private_step_in_closed_form() -> None:
    model = nn.Linear(2, 2, bias=False)
    start = {"weight": torch.zeros(2, 2)}
    x, y = torch.tensor([[3.0, 4.0], [0.1, 0.0]]), torch.tensor([0, 1])
    # at zero weights an example's gradient is (p − e_y) xᵀ = ±(½, −½) xᵀ, of length |x| / √2
    training = TrainingConfig(1.0, 1, (2,))
    private = PrivateSteps(clip=1.0, noise=0.0, divisor=4.0, steps=1)
    found = replay(model, F.cross_entropy, start, [(x, y)], training, private=private)["weight"]
    side = torch.tensor([[0.5], [-0.5]])
    wanted = (side * (x[0] / 5 * math.sqrt(2)) - side * x[1]) / 4
    torch.testing.assert_close(found, wanted)
    model.load_state_dict(start)
    dp = DifferentialPrivacy(clip=1.0, noise=1e-9, level="sample")
    (ours,) = dp.gradients(model, F.cross_entropy, (x, y), torch.Generator())
    torch.testing.assert_close(found, -ours * 2 / 4)  # which divides by the examples that there are


def test_noise_has_the_size_that_is_told_and_empty_steps_have_it_too() -> None:
    model, start = nn.Linear(50, 40, bias=False), {"weight": torch.zeros(40, 50)}
    x, y = torch.zeros(2, 50), torch.tensor([0, 1])  # without a gradient
    private = PrivateSteps(clip=0.5, noise=3.0, divisor=4.0, steps=3, empty=((0, 0.1), (1, 0.2)))
    training = TrainingConfig(0.3, 1, (2,))
    moved = replay(model, F.cross_entropy, start, [(x, y)], training, private=private, seed=4)["weight"]
    assert float(moved.std()) == pytest.approx(3.0 * 0.5 / 4 * math.hypot(0.1, 0.2, 0.3), rel=0.06)
    once = replay(
        model, F.cross_entropy, start, [(x, y)], training, private=dataclasses.replace(private, empty=()), seed=4
    )["weight"]
    assert float(once.std()) == pytest.approx(3.0 * 0.5 / 4 * 0.3, rel=0.06)


@pytest.mark.parametrize(
    "values",
    [{"clip": 0.0}, {"noise": -1.0}, {"divisor": math.nan}, {"rate": 1.5}, {"steps": 1, "empty": ((0, 1), (0, 1))}],
)
def test_private_steps_that_nobody_takes_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="private steps"):
        PrivateSteps(**{"clip": 1.0, "noise": 1.0, "divisor": 8.0, "steps": 2, **values})


def test_opacus_is_read_only_where_somebody_uses_it() -> None:
    before = "opacus" in sys.modules
    with Capture() as seen:
        model = cnn()
        optimiser = sgd()(model.parameters())
        x, y = examples()
        F.cross_entropy(model(x), y).backward()
        optimiser.step()
    assert seen.private is None
    assert ("opacus" in sys.modules) == before
