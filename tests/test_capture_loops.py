"""Capture in loops that aren't a tutorial's: errors, threads, other models, wrappers. It never disturbs a training."""

import copy
import io
import threading
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimiser_hooks

from fedaudit.recording import capture
from fedaudit.recording.capture import Capture
from fedaudit.recording.replay import replay
from fedaudit.training import ParameterGroup, Pass, loss_function
from fedaudit.utils.errors import BadInput
from tests.capture_cases import batches, cnn, examples, sgd


@pytest.fixture(autouse=True)
def nothing_stays_behind() -> Iterator[None]:
    def hooks() -> int:
        tables = (module_hooks._global_forward_hooks, module_hooks._global_forward_pre_hooks)
        steps = (optimiser_hooks._global_optimizer_pre_hooks, optimiser_hooks._global_optimizer_post_hooks)
        return sum(len(table) for table in (*tables, *steps))

    before = hooks()
    yield
    assert hooks() == before
    assert torch._C._len_torch_function_stack() == 0


def check(seen: Capture, trained: nn.Module) -> None:
    """The training is repeated to the same bits."""
    assert seen.module is not None
    loss = loss_function(str(seen.loss), seen.label_smoothing, seen.class_weights)
    passes = list(zip(seen.inputs, seen.targets, strict=True))
    after = replay(seen.module, loss, seen.start, passes, seen.training(), batch_norm=seen.batch_norm)
    for name, p in trained.named_parameters():
        assert torch.equal(after[name], p), name


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

    for name in ("read_loss", "tensors", "rates", "modes", "_versions"):
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


class Wrapped(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out


def test_a_given_module_inside_of_another() -> None:
    body = cnn()
    outer = Wrapped(body)
    with Capture(body) as seen:
        sgd()(outer, *examples())
    assert seen.module is body
    check(seen, body)
    with Capture() as seen:
        sgd()(outer, *examples())
    assert seen.module is outer


def test_a_given_module_that_isnt_trained() -> None:
    with Capture(cnn()) as seen:
        sgd()(cnn(), *examples())
    assert seen.module is None
    with pytest.raises(BadInput, match="no training step"):
        seen.training()


def test_parts_that_are_called_one_after_another() -> None:
    model, (x, y) = cnn(), examples()
    assert isinstance(model, nn.Sequential)
    body, head = model[:-1], model[-1]
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with Capture() as seen:
        for inputs, targets in batches(x, y):
            opt.zero_grad()
            F.cross_entropy(head(body(inputs)), targets).backward()
            opt.step()
    assert {"several-losses", "loss"} <= set(seen.training().unmodelled)


def test_wrappers_that_leave_what_is_computed() -> None:
    model = cnn()
    with Capture() as seen:
        sgd()(nn.DataParallel(model), *examples())
    assert seen.module is model
    assert set(seen.start) == set(model.state_dict())
    check(seen, model)


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False])
def test_compiled_modules(whole: bool) -> None:
    model = cnn()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=whole)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Capture() as seen:
            sgd(momentum=0.9)(compiled, *examples())  # type: ignore[arg-type]
        sgd()(compiled, *examples())  # type: ignore[arg-type]
    assert seen.notes == []
    assert seen.module is model
    assert seen.steps == 5
    assert len(seen.inputs) == len(seen.targets) == 5
    assert seen.loss == "cross-entropy"


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = cnn()

    def forward(self, x: Tensor, scale: Tensor | float = 1.0, **more: Tensor) -> Tensor:
        out: Tensor = self.body(x * scale)
        return out


@pytest.mark.parametrize("how", ["args", "kwargs", "mixed"])
def test_several_inputs(how: str) -> None:
    torch.manual_seed(0)
    model, (x, y) = Two(), examples()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with Capture() as seen:
        for inputs, targets in batches(x, y):
            scale = torch.ones(1)
            calls = {"args": ((inputs, scale), {}), "kwargs": ((), {"x": inputs, "scale": scale})}
            args, kwargs = calls.get(how, ((inputs,), {"scale": scale}))
            opt.zero_grad()
            F.cross_entropy(model(*args, **kwargs), targets).backward()
            opt.step()
    assert "several-inputs" in seen.training().unmodelled
    assert torch.equal(seen.inputs[0], x[:8])


def test_one_input_by_name_or_with_a_number() -> None:
    model, (x, y) = Two(), examples()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with Capture() as seen:
        for inputs, targets in batches(x, y):
            opt.zero_grad()
            F.cross_entropy(model(x=inputs), targets).backward()
            opt.step()
    assert seen.training().unmodelled == ()
    check(seen, model)


class Names(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = cnn()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.body(x)}


def test_a_model_that_returns_more_than_a_tensor() -> None:
    model, (x, y) = Names(), examples()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with Capture() as seen:
        for inputs, targets in batches(x, y):
            opt.zero_grad()
            F.cross_entropy(model(inputs)["logits"], targets).backward()
            opt.step()
    assert seen.training().unmodelled == ("loss",)
    assert any("returns dict" in note for note in seen.notes)
    assert len(seen.targets) == 5


class OwnLoss(nn.Module):
    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.logsumexp(1) - outputs.gather(1, targets[:, None])[:, 0]).mean()


def test_a_loss_module_of_ones_own_has_targets() -> None:
    model, (x, y) = cnn(), examples()
    opt, criterion = torch.optim.SGD(model.parameters(), lr=0.1), OwnLoss()
    with Capture() as seen:
        for inputs, targets in batches(x, y):
            opt.zero_grad()
            criterion(model(inputs), targets).backward()
            opt.step()
    assert seen.training().unmodelled == ("loss",)
    assert seen.loss == "custom"
    assert torch.equal(torch.cat(seen.targets), y)


def test_modes_of_parts() -> None:
    model = cnn(norm=True, dropout=0.5)
    assert isinstance(model, nn.Sequential)
    model[1].eval()
    with Capture() as seen:
        sgd()(model, *examples())
    assert (seen.batch_norm, seen.dropout) == ("eval", True)
    model.train()
    model[5].eval()
    with Capture() as seen:
        sgd()(model, *examples())
    assert (seen.batch_norm, seen.dropout, seen.randomness) == ("train", False, [])
    both = nn.Sequential(nn.BatchNorm2d(1), cnn(norm=True)).train()
    both[0].eval()
    with Capture() as seen:
        sgd()(both, *examples())
    assert any("evaluation mode" in note for note in seen.notes)


def test_functional_dropout_is_repeated() -> None:
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = cnn()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.body(F.dropout(x, 0.5, self.training))
            return out

    model = Drops()
    with Capture() as seen:
        sgd()(model, *examples())
    assert len(seen.randomness) == 5


def test_memory_isnt_held_by_passes_that_arent_trained_on() -> None:
    model, (x, y) = cnn(), examples()
    with Capture() as seen:
        for _ in range(300):  # an evaluation that forgot no_grad
            F.cross_entropy(model(x), y)
        assert len(seen._watched[0].passes) <= capture._WAITING
        sgd()(model, x, y)
    assert len(seen.inputs) == 5
    check(seen, model)


def test_lora_like_adapters() -> None:
    torch.manual_seed(0)
    base = nn.Linear(64, 4).requires_grad_(False)

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.low, self.high = base, nn.Linear(64, 2, bias=False), nn.Linear(2, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            x = x.flatten(1)
            out: Tensor = self.base(x) + self.high(self.low(x))
            return out

    model, (x, y) = Adapted(), examples()
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    with Capture() as seen:
        for inputs, targets in batches(x, y):
            opt.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            opt.step()
    assert seen.training().groups == (ParameterGroup(("base.weight", "base.bias"), 0.0),)
    check(seen, model)
