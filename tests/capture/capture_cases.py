"""Local training as people write it, which knows nothing of fedaudit: (model, examples, labels), trained in place."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedaudit.capture.capture import Capture
from fedaudit.simulation.replay import replay
from fedaudit.task.training import loss_function

Loop = Callable[[nn.Module, Tensor, Tensor], None]
SIZE = 8


def examples(seed: int = 0) -> tuple[Tensor, Tensor]:
    """40 images of 8x8 and labels of 4 classes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(40, 1, 8, 8, generator=generator), torch.randint(0, 4, (40,), generator=generator)


def cnn(outputs: int = 4, *, dropout: float = 0.0, norm: bool = False, seed: int = 1) -> nn.Module:
    """A small network; the global generator is as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        middle = [nn.BatchNorm2d(6)] if norm else []
        last = [nn.Dropout(dropout)] if dropout else []
        return nn.Sequential(
            nn.Conv2d(1, 6, 3), *middle, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), *last, nn.Linear(54, outputs)
        )


def batches(x: Tensor, y: Tensor, size: int = SIZE) -> Iterator[tuple[Tensor, Tensor]]:
    for begin in range(0, len(x), size):
        yield x[begin : begin + size], y[begin : begin + size]


def plain(optimiser: Callable[[Any], torch.optim.Optimizer], loss: Any = F.cross_entropy) -> Loop:
    """The loop of every tutorial."""

    def loop(model: nn.Module, x: Tensor, y: Tensor) -> None:
        opt = optimiser(model.parameters())
        for inputs, targets in batches(x, y):
            opt.zero_grad()
            loss(model(inputs), targets).backward()
            opt.step()

    return loop


def sgd(**settings: Any) -> Loop:
    return plain(lambda p: torch.optim.SGD(p, **{"lr": 0.1, **settings}))


def scheduled(model: nn.Module, x: Tensor, y: Tensor) -> None:
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 5)
    for inputs, targets in batches(x, y):
        opt.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        opt.step()
        schedule.step()


def warmed_up(model: nn.Module, x: Tensor, y: Tensor) -> None:
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: step / 3)  # the first rate is 0
    for inputs, targets in batches(x, y):
        opt.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        opt.step()
        schedule.step()


def two_groups(model: nn.Module, x: Tensor, y: Tensor) -> None:
    weights = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim < 2]
    opt = torch.optim.SGD(
        [{"params": weights, "weight_decay": 0.01}, {"params": rest, "lr": 0.3, "momentum": 0.5}], lr=0.1, momentum=0.9
    )
    train(opt, model, x, y)


def two_optimisers(model: nn.Module, x: Tensor, y: Tensor) -> None:
    first, *_, last = model.children()
    slow, fast = torch.optim.SGD(first.parameters(), lr=0.02), torch.optim.SGD(last.parameters(), lr=0.1, momentum=0.9)
    for inputs, targets in batches(x, y):
        model.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        slow.step()
        fast.step()


def head_only(model: nn.Module, x: Tensor, y: Tensor) -> None:
    train(torch.optim.Adam(list(model.children())[-1].parameters(), lr=0.01), model, x, y)


def frozen(model: nn.Module, x: Tensor, y: Tensor) -> None:
    for p in next(model.children()).parameters():
        p.requires_grad_(False)
    train(torch.optim.AdamW(model.parameters(), lr=0.01), model, x, y)


def train(opt: torch.optim.Optimizer, model: nn.Module, x: Tensor, y: Tensor) -> None:
    criterion = nn.CrossEntropyLoss()
    for inputs, targets in batches(x, y):
        opt.zero_grad(set_to_none=False)
        criterion(model(inputs), targets).backward()
        opt.step()


def accumulated(model: nn.Module, x: Tensor, y: Tensor) -> None:
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    opt.zero_grad()
    for i, (inputs, targets) in enumerate(batches(x, y, 4)):
        loss = F.cross_entropy(model(inputs), targets) / 2
        loss.backward()
        if i % 2:
            opt.step()
            opt.zero_grad()


def summed(model: nn.Module, x: Tensor, y: Tensor) -> None:
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for inputs, targets in batches(x, y):
        opt.zero_grad()
        for a, b in batches(inputs, targets, 3):
            F.cross_entropy(model(a), b, reduction="sum").backward()
        opt.step()


def one_total(model: nn.Module, x: Tensor, y: Tensor) -> None:
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for inputs, targets in batches(x, y):
        total = sum(F.cross_entropy(model(a), b) / 2 for a, b in batches(inputs, targets, 4))
        opt.zero_grad()
        assert isinstance(total, Tensor)
        total.backward()
        opt.step()


def zeroed_by_hand(model: nn.Module, x: Tensor, y: Tensor) -> None:
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for inputs, targets in batches(x, y):
        F.cross_entropy(model(inputs), targets).backward()
        opt.step()
        for p in model.parameters():
            assert p.grad is not None
            p.grad.zero_()


def interrupted(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """A backward pass that ends with an exception, and is made again."""

    def fail(_: Tensor) -> None:
        raise MemoryError

    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    first = next(model.parameters())
    for inputs, targets in batches(x, y):
        opt.zero_grad()
        handle = first.register_hook(fail)
        with contextlib.suppress(MemoryError):
            F.cross_entropy(model(inputs), targets).backward()
        handle.remove()
        opt.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        opt.step()


def clipped(norm: float | None = None, value: float | None = None) -> Loop:
    def loop(model: nn.Module, x: Tensor, y: Tensor) -> None:
        opt = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        for inputs, targets in batches(x, y):
            opt.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            if norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), norm)
            if value is not None:
                nn.utils.clip_grad_value_(model.parameters(), value)
            opt.step()

    return loop


def accumulated_and_clipped(model: nn.Module, x: Tensor, y: Tensor) -> None:
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    for inputs, targets in batches(x, y):
        opt.zero_grad()
        for a, b in batches(inputs, targets, 4):
            (F.cross_entropy(model(a), b) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        opt.step()


def mixed(model: nn.Module, x: Tensor, y: Tensor) -> None:
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for inputs, targets in batches(x, y):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        opt.step()


def scaled(model: nn.Module, x: Tensor, y: Tensor) -> None:
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for inputs, targets in batches(x, y):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.CrossEntropyLoss()(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(opt)
        scaler.update()


def closures(model: nn.Module, x: Tensor, y: Tensor) -> None:
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in batches(x, y):

        def closure(inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
            opt.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            return loss

        opt.step(closure)


def with_evaluation(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """As real ones are: a look at the model first, a teacher, an evaluation after every step, one with gradients on."""
    teacher = cnn(seed=5)
    model(x[:2])
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    for inputs, targets in batches(x, y):
        opt.zero_grad()
        with torch.no_grad():
            teacher(inputs)
        teacher(inputs)
        F.cross_entropy(model(inputs), targets).backward()
        opt.step()
        model.eval()
        with torch.no_grad():
            F.cross_entropy(model(x), y)
        F.cross_entropy(model(x), y)
        model.train()


def skipped(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Every other batch's gradients are thrown away."""
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (inputs, targets) in enumerate(batches(x, y)):
        opt.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        if i % 2 == 0:
            opt.step()


def loaded(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """The global weights are loaded after a first look at the model."""
    F.cross_entropy(model(x[:2]), y[:2])
    model.load_state_dict(cnn(seed=9).state_dict())
    sgd()(model, x, y)


def check(seen: Capture, trained: nn.Module) -> None:
    """The training is repeated to the same bits."""
    assert seen.module is not None
    loss = loss_function(str(seen.loss), seen.label_smoothing, seen.class_weights)
    passes = list(zip(seen.inputs, seen.targets, strict=True))
    after = replay(seen.module, loss, seen.start, passes, seen.training(), batch_norm=seen.batch_norm)
    for name, p in trained.named_parameters():
        assert torch.equal(after[name], p), name


# name -> (the loop, arguments of the model)
CASES: dict[str, tuple[Loop, dict[str, Any]]] = {
    "sgd": (sgd(), {}),
    "momentum": (sgd(momentum=0.9), {}),
    "nesterov": (sgd(momentum=0.9, nesterov=True), {}),
    "dampening": (sgd(momentum=0.9, dampening=0.5), {}),
    "weight decay": (sgd(weight_decay=0.05), {}),
    "sgd, everything": (sgd(momentum=0.8, nesterov=True, weight_decay=0.05), {"norm": True}),
    "foreach": (sgd(momentum=0.9, weight_decay=0.01, foreach=True), {}),
    "adam": (plain(lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1)), {}),
    "adamw": (plain(lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1)), {}),
    "betas": (plain(lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.9), eps=1e-3)), {}),
    "amsgrad": (plain(lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True)), {}),
    "schedule": (scheduled, {}),
    "warm-up from 0": (warmed_up, {}),
    "two groups": (two_groups, {}),
    "two optimisers": (two_optimisers, {}),
    "head only": (head_only, {}),
    "frozen": (frozen, {}),
    "accumulation": (accumulated, {}),
    "sums": (summed, {}),
    "one total of two passes": (one_total, {}),
    "zeroed by hand": (zeroed_by_hand, {}),
    "interrupted": (interrupted, {}),
    "one sum": (plain(lambda p: torch.optim.SGD(p, lr=0.01), nn.CrossEntropyLoss(reduction="sum")), {}),
    "none, then mean": (
        plain(lambda p: torch.optim.SGD(p, lr=0.1), lambda o, t: F.cross_entropy(o, t, reduction="none").mean()),
        {},
    ),
    "clip by norm": (clipped(norm=0.3), {}),
    "clip by value": (clipped(value=0.01), {}),
    "clip by both": (clipped(norm=0.3, value=0.02), {}),
    "accumulation and clip": (accumulated_and_clipped, {}),
    "smoothing": (plain(lambda p: torch.optim.SGD(p, lr=0.1), nn.CrossEntropyLoss(label_smoothing=0.1)), {}),
    "class weights": (
        plain(lambda p: torch.optim.SGD(p, lr=0.1), nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 0.5, 0.1]))),
        {},
    ),
    "class weights, sum": (
        plain(
            lambda p: torch.optim.SGD(p, lr=0.01),
            lambda o, t: F.cross_entropy(o, t, weight=torch.tensor([1.0, 2.0, 0.5, 0.1]), reduction="sum"),
        ),
        {},
    ),
    "soft targets": (
        plain(
            lambda p: torch.optim.SGD(p, lr=0.1), lambda o, t: F.cross_entropy(o, F.one_hot(t, 4).float() * 0.7 + 0.075)
        ),
        {},
    ),
    "nll of log_softmax": (
        plain(lambda p: torch.optim.SGD(p, lr=0.1), lambda o, t: F.nll_loss(F.log_softmax(o, 1), t)),
        {},
    ),
    "mse": (plain(lambda p: torch.optim.SGD(p, lr=0.1), lambda o, t: F.mse_loss(o, F.one_hot(t, 4).float())), {}),
    "mse, sum": (
        plain(
            lambda p: torch.optim.SGD(p, lr=0.01), lambda o, t: nn.MSELoss(reduction="sum")(o, F.one_hot(t, 4).float())
        ),
        {},
    ),
    "bce": (
        plain(
            lambda p: torch.optim.SGD(p, lr=0.1),
            lambda o, t: F.binary_cross_entropy_with_logits(o.squeeze(1), (t % 2).float()),
        ),
        {"outputs": 1},
    ),
    "bce module": (
        plain(
            lambda p: torch.optim.Adam(p, lr=0.01), lambda o, t: nn.BCEWithLogitsLoss()(o, (t % 2).float().unsqueeze(1))
        ),
        {"outputs": 1},
    ),
    "dropout": (plain(lambda p: torch.optim.AdamW(p, lr=0.01)), {"dropout": 0.4}),
    "batch norm": (sgd(), {"norm": True}),
    "dropout, batch norm, accumulation": (accumulated, {"dropout": 0.3, "norm": True}),
    "bfloat16": (mixed, {}),
    "bfloat16, scaled and clipped": (scaled, {}),
    "closures": (closures, {}),
    "evaluation between": (with_evaluation, {"dropout": 0.2}),
    "skipped": (skipped, {}),
    "loaded": (loaded, {}),
}
