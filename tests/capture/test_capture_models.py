"""Capture with models of many kinds: wrapped, compiled, of several inputs, in parts, with adapters."""

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fedaudit.capture.capture import Capture
from fedaudit.modalities import Packing, Part
from fedaudit.task.training import ParameterGroup
from fedaudit.utils.errors import BadInput
from tests.capture.capture_cases import batches, check, cnn, examples, sgd


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


def test_a_copy_of_the_given_module() -> None:
    given = cnn()
    local = copy.deepcopy(given)
    with Capture(given) as seen:
        sgd()(local, *examples())
    assert seen.module is local
    check(seen, local)


def test_a_given_module_that_isnt_trained() -> None:
    with Capture(cnn(norm=True)) as seen:
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
    assert seen.heads == Packing((Part("logits", (4,)),))
    assert [y.shape for y in seen.targets] == [(8, 1)] * 5
    assert seen.packed_targets == Packing((Part("", (), whole=True),))


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


def test_sparse_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Flatten(), nn.Linear(12, 3))
    tokens, labels = torch.randint(0, 20, (40, 3)), torch.randint(0, 3, (40,))
    with Capture() as seen:
        sgd()(model, tokens, labels)
    assert seen.training().unmodelled == ()
    check(seen, model)


def test_the_precision_of_weights_is_a_fact() -> None:
    model, (x, y) = cnn().double(), examples()
    with Capture() as seen:
        sgd()(model, x.double(), y)
    assert seen.notes == []
    assert seen.training().weights == "float64"
    check(seen, model)


def test_recomputed_activations() -> None:
    torch.manual_seed(0)

    class Saving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU()), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(checkpoint(self.body, x, use_reentrant=False))
            return out

    model = Saving()
    with Capture() as seen:
        sgd()(model, *examples())
    assert seen.module is model
    assert seen.training().unmodelled == ()
    check(seen, model)


def test_a_module_that_calls_itself() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(64, 64), nn.Linear(64, 4)

        def forward(self, x: Tensor, again: bool = True) -> Tensor:
            if not again:
                changed: Tensor = self.body(x.flatten(1)).relu()
                return changed
            out: Tensor = self.head(self(x, False))
            return out

    torch.manual_seed(0)
    model = Twice()
    with Capture() as seen:
        sgd()(model, *examples())
    assert seen.training().unmodelled == ()
    check(seen, model)
