"""Capture in loops that aren't a tutorial's: errors, threads, other models, wrappers. It never disturbs a training."""

import copy
import gc
import io
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimiser_hooks

from fedaudit.capture import capture, step_hooks
from fedaudit.capture.capture import Capture
from fedaudit.capture.evaluation import Evaluation
from fedaudit.task.training import Pass
from fedaudit.utils.errors import BadInput
from tests.capture.capture_cases import batches, check, cnn, examples, sgd


@pytest.fixture(autouse=True)
def nothing_stays_behind() -> Iterator[None]:
    def others() -> int:
        tables = (module_hooks._global_forward_hooks, module_hooks._global_forward_pre_hooks)
        steps = (optimiser_hooks._global_optimizer_pre_hooks, optimiser_hooks._global_optimizer_post_hooks)
        return sum(len(table) for table in (*tables, *steps)) - len(step_hooks._handles)

    before = others()
    yield
    assert others() == before
    assert not step_hooks._listeners
    assert not step_hooks._handles or threading.active_count() > 1
    assert torch._C._len_torch_function_stack() == 0


def test_an_exception_goes_on_and_what_was_seen_stays() -> None:
    model, (x, y) = cnn(), examples()
    loop = sgd()
    with pytest.raises(ValueError, match="batch_size"), Capture() as seen:
        loop(model, x[:20], y[:16])  # the third batch has no labels
    assert seen.steps == 2
    check(seen, model)
    with pytest.raises(ValueError, match="batch_size"), Capture() as seen:
        F.cross_entropy(model(x), y[:3])
    with pytest.raises(BadInput, match="no training step"):
        seen.training()


def test_a_failed_pass_that_the_loop_survives() -> None:
    model, (x, y) = cnn(), examples()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with Capture() as seen:
        for inputs, targets in batches(x, y):
            with pytest.raises(RuntimeError):
                model(inputs[:, :, :2])
            opt.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            opt.step()
    assert len(seen.inputs) == 5
    check(seen, model)


def test_what_is_read_during_the_block() -> None:
    with Capture() as seen:
        assert (seen.module, seen.start, seen.steps, seen.loss, seen.inputs) == (None, {}, 0, None, [])
        assert (seen.batch_norm, seen.dropout, seen.targets, seen.randomness) == (None, True, [], [])
        sgd()(cnn(), *examples())
        assert seen.steps == 5
        assert seen.training().local_steps == 5
    with pytest.raises(BadInput, match="another for the next"), seen:
        pass


def test_errors_of_ours_are_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("ours")

    for name in ("read_loss", "tensors", "rates", "modes", "versions"):
        with monkeypatch.context() as patch:
            patch.setattr(capture, name, broken)
            watched, free = cnn(), cnn()
            with Capture() as seen:
                sgd()(watched, *examples())
        sgd()(free, *examples())
        assert torch.equal(next(watched.parameters()), next(free.parameters()))
        assert any("KeyError" in note for note in seen.notes), name
    assert seen.inputs == []


def test_other_threads_dont_count() -> None:
    model, other, (x, y) = cnn(), cnn(seed=7), examples()
    with Capture() as seen:
        beside = threading.Thread(target=sgd(), args=(other, x, y))
        beside.start()
        sgd()(model, x, y)
        beside.join()
    assert seen.steps == 5
    check(seen, model)
    with Capture() as seen:
        beside = threading.Thread(target=sgd(), args=(model, x, y))
        beside.start()
        beside.join()
    with pytest.raises(BadInput, match="another thread"):
        seen.training()


def test_captures_in_each_other() -> None:
    model, (x, y) = cnn(), examples()
    with Capture() as outer:
        sgd()(model, x[:16], y[:16])
        with Capture() as within:
            first = copy.deepcopy(model.state_dict())
            sgd()(model, x[16:], y[16:])
    assert (outer.steps, within.steps) == (5, 3)
    assert torch.equal(within.start["0.weight"], first["0.weight"])
    check(within, model)


def test_state_from_an_earlier_round() -> None:
    model, (x, y) = cnn(), examples()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for expected in ((), ("optimiser-state",)):
        with Capture() as seen:
            for inputs, targets in batches(x, y):
                opt.zero_grad()
                F.cross_entropy(model(inputs), targets).backward()
                opt.step()
        assert seen.training().unmodelled == expected


def test_weights_that_are_averaged_away_between_steps() -> None:
    model, (x, y) = cnn(), examples()
    with Capture() as seen:
        sgd()(model, x, y)
        copied, buffer = copy.deepcopy(model), io.BytesIO()
        torch.save(model, buffer)
        torch.save(model.state_dict(), buffer)
    assert torch.equal(next(copied.parameters()), next(model.parameters()))
    check(seen, model)


def test_the_trained_one_of_several_modules_is_watched() -> None:
    model, teacher, (x, y) = cnn(), cnn(seed=4), examples()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with Capture() as seen:
        for inputs, targets in batches(x, y):
            opt.zero_grad()
            teacher(inputs)  # with gradients on
            F.cross_entropy(model(inputs), targets).backward()
            opt.step()
    assert seen.module is model
    check(seen, model)


def test_distillation_is_a_loss_of_its_own() -> None:
    model, teacher, (x, y) = cnn(), cnn(seed=4), examples()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with Capture() as seen:
        for inputs, targets in batches(x, y):
            opt.zero_grad()
            logits = model(inputs)
            told = F.kl_div(F.log_softmax(logits, 1), F.softmax(teacher(inputs), 1), reduction="batchmean")
            (F.cross_entropy(logits, targets) + told).backward()
            opt.step()
    assert "several-losses" in seen.training().unmodelled


def test_the_two_halves_of_a_gan() -> None:
    torch.manual_seed(0)
    generator, judge = nn.Linear(3, 6), nn.Linear(6, 1)
    opt_g, opt_d = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (generator, judge))
    bce = F.binary_cross_entropy_with_logits

    def train() -> None:
        for _ in range(3):
            fake = generator(torch.randn(4, 3))
            opt_d.zero_grad()
            real = bce(judge(torch.randn(4, 6)), torch.ones(4, 1))
            (real + bce(judge(fake.detach()), torch.zeros(4, 1))).backward()
            opt_d.step()
            opt_g.zero_grad()
            bce(judge(fake), torch.ones(4, 1)).backward()
            opt_g.step()

    with Capture() as seen:
        train()
    assert seen.module is judge
    assert seen.training().passes == ((Pass(4, 1.0), Pass(4, 1.0)),) * 3
    with Capture(generator) as seen:
        train()
    assert seen.module is generator
    assert "loss" in seen.training().unmodelled


def test_memory_isnt_held_by_passes_that_arent_trained_on() -> None:
    model, (x, y) = cnn(), examples()
    with Capture() as seen:
        for _ in range(300):  # an evaluation that forgot no_grad
            F.cross_entropy(model(x), y)
        assert len(seen._watched[0].passes) <= capture._WAITING
        sgd()(model, x, y)
    assert len(seen.inputs) == 5
    check(seen, model)


def test_a_capture_is_freed_at_once() -> None:
    model = cnn(dropout=0.2)
    gc.disable()
    try:
        with Capture() as seen:
            sgd()(model, *examples())
        gone = weakref.ref(seen)
        del seen
        assert gone() is None
    finally:
        gc.enable()


def test_a_loss_that_is_only_looked_at() -> None:
    model, (x, y) = cnn(), examples()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with Capture() as seen:
        for inputs, targets in batches(x, y):
            opt.zero_grad()
            outputs = model(inputs)
            F.cross_entropy(outputs, targets).backward(retain_graph=True)
            F.mse_loss(outputs, F.one_hot(targets, 4).float())
            opt.step()
    assert seen.training().unmodelled == ()
    assert seen.loss == "cross-entropy"
    check(seen, model)


def test_a_loss_outside_of_autocast_is_noted() -> None:
    model, (x, y) = cnn(), examples()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with Capture() as seen:
        for inputs, targets in batches(x, y):
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                outputs = model(inputs)
            F.cross_entropy(outputs.float(), targets).backward()
            opt.step()
    assert any("outside of autocast" in note for note in seen.notes)
    assert seen.training().unmodelled == ()


def test_an_error_within_a_step_that_the_loop_survives() -> None:
    model, (x, y) = cnn(), examples()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with Capture() as seen:
        for i, (inputs, targets) in enumerate(batches(x, y)):
            opt.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            if i == 1:
                opt.param_groups[0]["lr"] = "fast"
                with pytest.raises(TypeError):
                    opt.step()
                opt.param_groups[0]["lr"] = 0.1
                continue
            opt.step()
    assert seen.loss == "cross-entropy"
    assert len(seen.inputs) >= 4


def stepped_by_closure(optimiser: torch.optim.Optimizer, model: nn.Module) -> None:
    x, y = examples()

    def closure() -> torch.Tensor:
        optimiser.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    optimiser.step(closure)  # type: ignore[arg-type]


def sharpness_aware(model: nn.Module) -> None:
    x, y = examples()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    F.cross_entropy(model(x), y).backward()
    moves = [0.1 * p.grad for p in model.parameters() if p.grad is not None]
    with torch.no_grad():
        for p, move in zip(model.parameters(), moves, strict=True):
            p.add_(move)
    optimiser.zero_grad()
    F.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        for p, move in zip(model.parameters(), moves, strict=True):
            p.sub_(move)
    optimiser.step()


@pytest.mark.parametrize("way", ["L-BFGS", "sharpness-aware", "Rprop", "Adam with a closure"])
def test_the_start_is_the_state_of_the_first_pass_whoever_moves_weights_between_passes(way: str) -> None:
    model = cnn()
    sent = {name: value.clone() for name, value in model.state_dict().items()}
    with Capture() as seen:
        if way == "sharpness-aware":
            sharpness_aware(model)
        elif way == "L-BFGS":
            stepped_by_closure(torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3), model)
        elif way == "Rprop":
            stepped_by_closure(torch.optim.Rprop(model.parameters()), model)
        else:
            stepped_by_closure(torch.optim.Adam(model.parameters(), lr=1e-3), model)
    assert all(torch.equal(seen.start[name], value) for name, value in sent.items())
    moved = any("something else than a step" in note for note in seen.notes)
    named = any(f"train by {name}," in note for name in ("LBFGS", "Rprop") for note in seen.notes)
    assert (moved, named, seen.training().unmodelled) == {
        "L-BFGS": (True, True, ("optimiser",)),
        "sharpness-aware": (True, False, ("optimiser",)),
        "Rprop": (False, True, ("optimiser",)),
        "Adam with a closure": (False, False, ()),
    }[way]


def test_another_thread_trains_while_captures_begin_and_end() -> None:
    """Torch goes through its tables of hooks during a step, in which no other thread may change them."""
    model, ended = nn.Linear(2, 1), threading.Event()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)

    def watch() -> int:
        begun = 0
        while not ended.is_set():
            with Capture(), Evaluation(None, 0):
                begun += 1
        return begun

    with Capture():  # in this thread, so that the other's are never the first
        handle = optimiser_hooks.register_optimizer_step_post_hook(lambda *_: time.sleep(0.002))
        with ThreadPoolExecutor(1) as pool:
            watched = pool.submit(watch)
            try:
                for _ in range(30):
                    model(torch.ones(1, 2)).sum().backward()
                    optimiser.step()
            finally:
                ended.set()
                handle.remove()
            assert watched.result() > 30
