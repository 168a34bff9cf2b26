"""Capture and replay: an unchanged loop, and the same training again from nothing but what was seen of it."""

import copy
import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedaudit.capture.capture import Capture
from fedaudit.simulation.local_training import train
from fedaudit.simulation.replay import relative_error, replay
from fedaudit.task.training import ParameterGroup, Pass, loss_function
from fedaudit.utils.errors import BadInput
from tests.capture.capture_cases import CASES, Loop, batches, cnn, examples, plain

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
    facts = {
        "training": seen.training(),
        "passes": list(zip(seen.inputs, seen.targets, strict=True)),
        "batch_norm": seen.batch_norm,
        "dropout": seen.dropout,
        "randomness": seen.randomness,
        **changes,
    }
    loss = loss_function(seen.loss, seen.label_smoothing, seen.class_weights)
    return replay(copy.deepcopy(seen.module), loss, seen.start, **facts)  # type: ignore[arg-type]


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


def error(seen: Capture, model: nn.Module, **changes: object) -> float:
    sent = {name: p.detach() for name, p in model.named_parameters()}
    return relative_error(sent, again(seen, **changes), seen.start)


def test_wrong_facts_make_a_large_error() -> None:
    seen, model = watch("momentum")
    training, passes = seen.training(), list(zip(seen.inputs, seen.targets, strict=True))
    assert error(seen, model) == 0
    assert 0.05 < error(seen, model, training=dataclasses.replace(training, learning_rate=0.11)) < 0.2
    assert error(seen, model, training=dataclasses.replace(training, momentum=0.0)) > 0.2
    assert error(seen, model, training=dataclasses.replace(training, weight_decay=0.1)) > 0.05
    assert error(seen, model, training=dataclasses.replace(training, optimiser="adam", momentum=0.0)) > 0.5
    assert error(seen, model, training=dataclasses.replace(training, proximal_mu=1.0)) > 0.05
    assert error(seen, model, passes=passes[::-1]) > 0.01
    assert error(seen, model, passes=[(x, y.flip(0)) for x, y in passes]) > 0.1
    clipped, model = watch("clip by norm")
    assert clipped.training().clip_norm == 0.3
    assert error(clipped, model, training=dataclasses.replace(clipped.training(), clip_norm=None)) > 0.1
    drawn, model = watch("dropout")
    assert error(drawn, model, randomness=drawn.randomness[::-1]) > 0.1
    assert error(drawn, model, dropout=False) > 0.1


def test_relative_error_in_closed_form() -> None:
    start = {"w": torch.zeros(3), "n": torch.tensor(1)}
    sent, replayed = {"w": torch.tensor([3.0, 0.0, 4.0])}, {"w": torch.tensor([3.0, 0.0, 3.0]), "n": torch.tensor(2)}
    assert relative_error(sent, replayed, start) == pytest.approx(1 / 5)
    assert relative_error(start, start, start) == 0
    assert relative_error(start, {**start, "w": torch.ones(3)}, start) == math.inf
    assert relative_error(sent, {"w": torch.full((3,), math.nan)}, start) == math.inf
    with pytest.raises(BadInput, match="'v'"):
        relative_error({"v": torch.zeros(1)}, replayed, start)


def test_replay_adds_the_pull_of_fedprox() -> None:
    seen, _ = watch("sgd")
    training = dataclasses.replace(seen.training(), proximal_mu=0.7)
    model = cnn()
    model.load_state_dict(seen.start)
    train(model, F.cross_entropy, zip(seen.inputs, seen.targets, strict=True), learning_rate=0.1, proximal_mu=0.7)
    for name, value in again(seen, training=training).items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=0, atol=0)


def test_replay_refuses_what_nobody_can_repeat() -> None:
    seen, _ = watch("sgd")
    training = seen.training()
    passes = list(zip(seen.inputs, seen.targets, strict=True))
    cases: list[tuple[dict[str, object], str]] = [
        (
            {"training": dataclasses.replace(training, optimiser="other", unmodelled=("optimiser",))},
            "another optimiser",
        ),
        ({"training": dataclasses.replace(training, unmodelled=("several-inputs",))}, "several inputs"),
        ({"passes": passes[1:]}, "passes of"),
        ({"randomness": [torch.get_rng_state()]}, "states of the random generator"),
        ({"training": dataclasses.replace(training, groups=(ParameterGroup(("9.weight",), 0.5),))}, "'9.weight'"),
    ]
    for changes, match in cases:
        with pytest.raises(BadInput, match=match):
            again(seen, **changes)
    with pytest.raises(BadInput, match="isn't this model's"):
        replay(cnn(3), F.cross_entropy, seen.start, passes, training)


def test_what_a_capture_tells() -> None:
    seen, _ = watch("two groups")
    training = seen.training()
    assert (training.learning_rate, training.momentum, training.weight_decay) == (0.1, 0.9, 0.01)
    assert training.batch_sizes == (8,) * 5
    assert training.groups == (ParameterGroup(("0.bias", "4.bias"), 0.3 / 0.1, 0.5, 0.0),)
    assert watch("frozen")[0].training().groups == (ParameterGroup(("0.weight", "0.bias"), 0.0),)
    assert watch("head only")[0].training().groups == (ParameterGroup(("0.weight", "0.bias"), 0.0),)
    rates = watch("schedule")[0].training().learning_rates
    assert rates == pytest.approx([0.05 * (1 + math.cos(math.pi * i / 5)) for i in range(5)])
    assert watch("warm-up from 0")[0].training().learning_rate == pytest.approx(0.01 / 3)
    assert watch("accumulation")[0].training().passes == ((Pass(4, 0.5), Pass(4, 0.5)),) * 5
    assert watch("sums")[0].training().passes == ((Pass(3, 3.0), Pass(3, 3.0), Pass(2, 2.0)),) * 5
    assert watch("sgd")[0].training().passes == ()
    scaled = watch("bfloat16, scaled and clipped")[0].training()
    assert (scaled.precision, scaled.clip_norm, scaled.passes) == ("bfloat16", 0.5, ())
    assert watch("clip by value")[0].training().clip_value == 0.01
    amsgrad = watch("amsgrad")[0].training()
    assert (amsgrad.optimiser, amsgrad.amsgrad, amsgrad.betas) == ("adam", True, (0.9, 0.999))
    smooth, weighted = watch("smoothing")[0], watch("class weights")[0]
    assert (smooth.loss, smooth.label_smoothing) == ("cross-entropy", 0.1)
    assert weighted.class_weights == pytest.approx((1.0, 2.0, 0.5, 0.1))
    assert [watch(name)[0].loss for name in ("bce", "mse")] == ["bce-with-logits", "mse"]
    assert [watch(name)[0].batch_norm for name in ("sgd", "batch norm")] == [None, "train"]
    assert len(watch("dropout")[0].randomness) == 5
    assert watch("sgd")[0].randomness == []
    evaluated = watch("evaluation between")[0]
    assert evaluated.steps == len(evaluated.inputs) == 5
    assert [len(x) for x in watch("skipped")[0].inputs] == [8, 8, 8]
    assert 0 < seen.seconds < 60
    assert torch.equal(torch.cat(seen.inputs), examples()[0])
    assert torch.equal(torch.cat(seen.targets), examples()[1])


def unmodelled(loop: Callable[[nn.Module, Tensor, Tensor], object], model: nn.Module | None = None) -> tuple[str, ...]:
    with Capture() as seen:
        loop(model or cnn(), *examples())
    assert not any("wasn't understood" in note for note in seen.notes), seen.notes
    return seen.training().unmodelled


def changed(how: Callable[[nn.Module], object]) -> Callable[[nn.Module, Tensor, Tensor], None]:
    """Training that does something between backward pass and step."""

    def loop(model: nn.Module, x: Tensor, y: Tensor) -> None:
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for inputs, targets in batches(x, y):
            opt.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            how(model)
            opt.step()

    return loop


def grads(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def add_noise(model: nn.Module) -> None:
    for g in grads(model):
        g.add_(torch.ones_like(g), alpha=0.1)


def replace(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = None if p.grad is None else p.grad.sign()


def through_data(model: nn.Module) -> None:
    for g in grads(model):
        g.data.add_(0.1)


def part(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(next(model.children()).parameters(), 0.01)


def one_row(model: nn.Module) -> None:
    grads(model)[0][0].mul_(0.5)


def twice(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


@pytest.mark.parametrize("how", [add_noise, replace, through_data, part, one_row, twice])
def test_changed_gradients_are_told(how: Callable[[nn.Module], object]) -> None:
    assert unmodelled(changed(how)) == ("gradients-changed",)


def test_a_clip_that_never_bites_changes_nothing() -> None:
    assert unmodelled(changed(lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1e6))) == ()
    assert unmodelled(changed(lambda m: None)) == ()


def test_a_factor_of_gradients_is_a_weight_of_the_pass() -> None:
    with Capture() as seen:
        changed(lambda m: [g.mul_(0.25) for g in grads(m)])(cnn(), *examples())
    assert seen.training().passes == ((Pass(8, 0.25),),) * 5
    assert seen.training().unmodelled == ()


def never_zeroed(model: nn.Module, x: Tensor, y: Tensor) -> None:
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for inputs, targets in batches(x, y):
        F.cross_entropy(model(inputs), targets).backward()
        opt.step()


def penalised(model: nn.Module, x: Tensor, y: Tensor) -> None:
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for inputs, targets in batches(x, y):
        opt.zero_grad()
        (F.cross_entropy(model(inputs), targets) + 0.1 * sum(p.square().sum() for p in model.parameters())).backward()
        opt.step()


def other_loss(model: nn.Module, x: Tensor, y: Tensor) -> None:
    plain(lambda p: torch.optim.SGD(p, lr=0.1), lambda o, t: (o.logsumexp(1) - o.gather(1, t[:, None])[:, 0]).mean())(
        model, x, y
    )


def temperature(model: nn.Module, x: Tensor, y: Tensor) -> None:
    plain(lambda p: torch.optim.SGD(p, lr=0.1), lambda o, t: F.cross_entropy(o / 2, t))(model, x, y)


def two_losses(model: nn.Module, x: Tensor, y: Tensor) -> None:
    plain(
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda o, t: F.cross_entropy(o, t) + F.mse_loss(o, F.one_hot(t, 4).float()),
    )(model, x, y)


def focal(model: nn.Module, x: Tensor, y: Tensor) -> None:
    def loss(o: Tensor, t: Tensor) -> Tensor:
        each = F.cross_entropy(o, t, reduction="none")
        return ((1 - (-each).exp()) ** 2 * each).mean()

    plain(lambda p: torch.optim.SGD(p, lr=0.1), loss)(model, x, y)


def ignored(model: nn.Module, x: Tensor, y: Tensor) -> None:
    sgd_loss = nn.CrossEntropyLoss(ignore_index=2)
    plain(lambda p: torch.optim.SGD(p, lr=0.1), sgd_loss)(model, x, y)


def momentum_cycles(model: nn.Module, x: Tensor, y: Tensor) -> None:
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for inputs, targets in batches(x, y):
        opt.param_groups[0]["momentum"] -= 0.1
        opt.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        opt.step()


def unfrozen(model: nn.Module, x: Tensor, y: Tensor) -> None:
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (inputs, targets) in enumerate(batches(x, y)):
        next(model.children()).requires_grad_(i > 2)
        opt.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        opt.step()


def averaged(model: nn.Module, x: Tensor, y: Tensor) -> None:
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in batches(x, y):
        opt.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        opt.step()
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.1, 0.1)


def two_optimisers(model: nn.Module, x: Tensor, y: Tensor) -> None:
    first, *_, last = model.children()
    one, other = torch.optim.SGD(first.parameters(), lr=0.1), torch.optim.Adam(last.parameters(), lr=0.1)
    for inputs, targets in batches(x, y):
        one.zero_grad()
        other.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        one.step()
        other.step()


def optimisers_in_turn(model: nn.Module, x: Tensor, y: Tensor) -> None:
    first, *_, last = model.children()
    both = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (first, last)]
    for i, (inputs, targets) in enumerate(batches(x, y)):
        model.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        both[i % 2].step()


@pytest.mark.parametrize(
    ("loop", "expected"),
    [
        (plain(lambda p: torch.optim.RMSprop(p, lr=0.01)), {"optimiser"}),
        (plain(lambda p: torch.optim.NAdam(p, lr=0.01)), {"optimiser"}),
        (plain(lambda p: torch.optim.SGD(p, lr=0.01, maximize=True)), {"optimiser"}),
        (two_optimisers, {"optimiser"}),
        (optimisers_in_turn, {"optimiser"}),
        (averaged, {"optimiser"}),
        (never_zeroed, {"gradients-changed"}),
        (penalised, {"several-losses"}),
        (two_losses, {"several-losses"}),
        (other_loss, {"loss"}),
        (temperature, {"loss"}),
        (focal, {"loss"}),
        (ignored, {"loss"}),
        (plain(lambda p: torch.optim.SGD(p, lr=0.1), lambda o, t: F.l1_loss(o, F.one_hot(t, 4).float())), {"loss"}),
        (momentum_cycles, {"optimiser-settings"}),
        (unfrozen, {"optimiser-settings"}),
    ],
)
def test_what_isnt_modelled_is_told(loop: Loop, expected: set[str]) -> None:
    assert set(unmodelled(loop)) == expected
