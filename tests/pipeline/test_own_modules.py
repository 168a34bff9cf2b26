"""Modules as people write and wrap them, on every way in: each works, or is refused in one line of our own."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, weight_norm

import fedaudit
from fedaudit.models import twice_differentiable
from fedaudit.utils.errors import FedAuditError

INPUTS = torch.rand(40, 1, 6, 6, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(40) % 4
FEDERATION = [{"name": "f", "clients": 1, "examples": 3, "batch_size": 3}]
ATTACKS: list[Any] = ["labels", {"name": "invg", "iterations": 2}, "exact-linear"]


def plain() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4))


class Probe(nn.Module):
    """A frozen body under ``no_grad`` and a trained head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten()).requires_grad_(False)
        self.head = nn.Linear(48, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            features = self.body(x)
        out: Tensor = self.head(features)
        return out


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(36, 36), nn.Linear(36, 36), nn.Linear(36, 4)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(functional.relu(self.b(functional.relu(self.a(x.flatten(1))))))
        return out


class GradSampleModule(nn.Module):
    """As Opacus wraps."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module

    def forward(self, x: Tensor) -> Any:
        return self._module(x)


class Odd(nn.Module):
    """A base that does something of its own in ``forward``."""

    def __init__(self, forward: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.net, self.own = plain(), forward
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Any:
        return self.own(self.net, x)


def with_norms(*evaluated: int, frozen: bool = False) -> Any:
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3),
                        nn.Flatten(), nn.Linear(12, 4))  # fmt: skip
    for place in evaluated:
        net[place].eval()
    return net.requires_grad_(not frozen) if not frozen else frozen_but(net, 6)


def frozen_but(net: nn.Sequential, last: int) -> nn.Module:
    net.requires_grad_(False)
    net[last].requires_grad_(True)
    return net


def hooked() -> nn.Module:
    net = plain()
    seen: list[Tensor] = []
    net.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    return net


def normed(norm: Callable[..., nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Flatten(), norm(nn.Linear(36, 8)), nn.ReLU(), nn.Linear(8, 4))


# Where "works" is said, simulation, recording and library give findings; elsewhere a line of our own may come.
MODULES: dict[str, tuple[Callable[[], Any], bool]] = {
    "plain": (plain, True),
    "DataParallel": (lambda: nn.DataParallel(plain()), True),
    "compiled": (lambda: torch.compile(plain(), backend="eager"), True),
    "GradSampleModule": (lambda: GradSampleModule(plain()), True),
    "wrapped twice": (lambda: nn.DataParallel(GradSampleModule(plain())), True),
    "weight_norm": (lambda: normed(weight_norm), True),
    "weight_norm, new": (lambda: normed(parametrizations.weight_norm), True),
    "spectral_norm": (lambda: normed(nn.utils.spectral_norm), True),
    "spectral_norm, new": (lambda: normed(parametrizations.spectral_norm), True),
    "orthogonal": (lambda: normed(parametrizations.orthogonal), False),
    "frozen under no_grad": (Probe, True),
    "frozen body": (
        lambda: frozen_but(nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 4)), 3),
        True,
    ),
    "all frozen": (lambda: plain().requires_grad_(False), False),
    "tied": (Tied, False),  # recorded it works, simulated it is refused
    "BatchNorm": (with_norms, True),
    "BatchNorm, evaluated": (lambda: with_norms(1, 4), True),
    "BatchNorm, mixed": (lambda: with_norms(1), True),
    "BatchNorm, frozen body": (lambda: with_norms(1, 4, frozen=True), True),
    "GroupNorm": (lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(64, 4)), True),
    "dropout": (lambda: nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.Linear(36, 4)), True),
    "half": (lambda: plain().half(), False),
    "double": (lambda: plain().double(), False),
    "lazy": (lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(4)), False),
    "hooks": (hooked, False),
    "no bias": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 4, bias=False)), True),
    "unused parameter": (lambda: Odd(lambda net, x: net(x)), True),
    "a tuple": (lambda: Odd(lambda net, x: (net(x), x)), False),
    "a dictionary": (lambda: Odd(lambda net, x: {"logits": net(x)}), False),
    "numpy inside": (lambda: Odd(lambda net, x: net(torch.from_numpy(x.detach().numpy()))), False),
    "detached": (lambda: Odd(lambda net, x: net(x).detach()), False),
    "in place": (
        lambda: nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(48, 4)),
        True,
    ),
    "raises": (lambda: Odd(lambda net, x: net(x[:, :, :3])), False),
    "asserts": (lambda: Odd(lambda net, x: net(x) if len(x) > 99 else [][0]), False),
    "asks values": (lambda: Odd(lambda net, x: net(x) if float(x.sum()) > 0 else -net(x)), False),
    "complex": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 4, dtype=torch.complex64)), False),
    "recurrent": (lambda: Odd(lambda net, x: net(x)), True),
    "embedding": (lambda: nn.Sequential(nn.Flatten(), nn.Embedding(4, 4)), False),
    "no parameters": (lambda: nn.Flatten(), False),
    "scripted": (lambda: torch.jit.trace(plain(), INPUTS[:2]), False),
    "few outputs": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 3)), False),
}
QUICK = ("DataParallel", "compiled", "GradSampleModule", "weight_norm", "spectral_norm", "frozen under no_grad", "tied",
         "BatchNorm, mixed", "half", "lazy")  # fmt: skip


def made(name: str) -> nn.Module:
    torch.manual_seed(1)
    module: nn.Module = MODULES[name][0]()
    return module


def simulated(name: str) -> Any:
    recording = fedaudit.simulate({"federations": FEDERATION}, model=made(name), data=(INPUTS, LABELS), progress=False)
    return fedaudit.attack(recording, ATTACKS, progress=False)


def trained(name: str, folder: Any) -> bool:
    """Record a client's training in a loop of somebody's own; return whether that itself works."""
    module, recorder = made(name), fedaudit.Recorder(folder)
    try:
        with recorder.round(module.state_dict()):
            with recorder.capture() as seen:
                optimiser = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
                functional.cross_entropy(module(INPUTS[:3]), LABELS[:3]).backward()
                optimiser.step()
            recorder.update("a", module.state_dict(), seen, num_examples=3)
        recorder.close()
    except Exception:
        return False
    return True


def recorded(name: str, folder: Any) -> Any:
    return fedaudit.attack(folder, ATTACKS, module=made(name), progress=False)


def check(name: str, way: Callable[[], Any]) -> None:
    """Findings, or one line of ours."""
    works, refused = MODULES[name][1], ""
    found: Any = ()
    try:
        found = way()
    except FedAuditError as error:
        refused = str(error)
    assert "\n" not in refused
    if refused:
        assert not works, refused
        return
    reasons = [str(one) for one in found if isinstance(one, fedaudit.NotApplicable)]
    assert not any("\n" in reason for reason in reasons)
    assert len(reasons) < len(found) or not works, reasons


def play(name: str, folder: Any) -> None:
    check(name, lambda: simulated(name))
    if trained(name, folder / "r"):
        check(name, lambda: recorded(name, folder / "r"))
    else:
        assert not MODULES[name][1]


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_a_module_as_people_write_it_works_or_is_refused_in_one_line(name, tmp_path):
    play(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(MODULES) - set(QUICK)))
def test_another_module_works_or_is_refused_in_one_line(name, tmp_path):
    play(name, tmp_path)


def test_what_wraps_a_module_is_taken_off():
    net = plain()
    data: Any = {"data": (INPUTS, LABELS), "progress": False}
    bare = fedaudit.simulate({"federations": FEDERATION}, model=net, **data).transcript
    wraps: list[Callable[[nn.Module], Any]] = [
        nn.DataParallel,
        GradSampleModule,
        lambda m: torch.compile(m, backend="eager"),
    ]
    for wrap in wraps:
        wrapped = fedaudit.simulate({"federations": FEDERATION}, model=wrap(net), **data).transcript
        for name, sent in bare.rounds[0].updates[0].tensors.items():
            assert torch.equal(wrapped.rounds[0].updates[0].tensors[name], sent)


class Decoder(nn.Module):
    """A weight that a hook computes, read by two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.out = weight_norm(nn.Linear(36, 8)), nn.Linear(36, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(functional.linear(self.a(x.flatten(1)), self.a.weight.t()))
        return out


def test_tied_weights_beside_weight_norm_have_their_whole_gradient():
    net = Decoder()
    net(INPUTS)  # leaves a weight that is part of a graph
    got = fedaudit.simulate({"federations": FEDERATION}, model=net, data=(INPUTS, LABELS), progress=False)
    inputs = got.transcript.task_info.normalise(got.truth.inputs[0, 0])
    loss = functional.cross_entropy(net(inputs), got.truth.labels[0, 0])
    wanted = torch.autograd.grad(loss, list(net.parameters()))
    for (name, _), gradient in zip(net.named_parameters(), wanted, strict=True):
        torch.testing.assert_close(got.transcript.rounds[0].updates[0].tensors[name], gradient)


def test_each_batch_norm_layer_keeps_its_mode():
    net = with_norms(1)
    recording = fedaudit.simulate({"federations": FEDERATION}, model=net, data=(INPUTS, LABELS), progress=False)
    inputs, labels = recording.truth.inputs[0, 0], recording.truth.labels[0, 0]
    buffers = {name: value.clone() for name, value in net.named_buffers()}
    net.train()
    net[1].eval()
    x = recording.transcript.task_info.normalise(inputs)
    own = torch.autograd.grad(functional.cross_entropy(net(x), labels), list(net.parameters()))
    update = recording.transcript.rounds[0].updates[0]
    for sent, oracle in zip(update.tensors.values(), own, strict=True):
        torch.testing.assert_close(sent, oracle)
    assert not any(name.startswith("1.") for name in update.buffers)
    assert any(name.startswith("4.") for name in update.buffers)
    assert all(torch.equal(buffers[name], value) for name, value in net.named_buffers() if name.startswith("1."))


def test_a_recorder_takes_arrays_in_the_order_of_the_state(tmp_path):
    net = plain()
    arrays = [value.numpy() for value in net.state_dict().values()]
    moved = [value + 1 for value in arrays]
    recorder = fedaudit.Recorder(tmp_path / "r", module=net)
    with recorder.round(arrays):
        recorder.update("a", moved, num_examples=3)
        with pytest.raises(FedAuditError, match="4 tensors"):
            recorder.update("b", moved[:1], num_examples=3)
    recorder.close()
    read = fedaudit.Transcript.load(tmp_path / "r", plain(), task={"input_shape": [1, 6, 6]})
    assert all(torch.allclose(t, torch.ones_like(t)) for t in read.rounds[0].updates[0].tensors.values())
    with pytest.raises(FedAuditError, match="unknown tensors"):
        fedaudit.Recorder(tmp_path / "s").begin_round(arrays)


WITHIN = torch.linspace(-4, 4, 33, dtype=torch.float64)


def by_adam(net: nn.Module, folder: Any) -> Any:
    """Attack two steps of Adam, which takes the model's second derivative."""
    with fedaudit.Recorder(folder) as recorder, recorder.round(net.state_dict()):
        with recorder.capture() as seen:
            local = copy.deepcopy(net)
            optimiser = torch.optim.Adam(local.parameters(), lr=0.01)
            for rows in (slice(2), slice(2, 4)):
                optimiser.zero_grad()
                functional.cross_entropy(local(INPUTS[rows]), LABELS[rows]).backward()
                optimiser.step()
        recorder.update("a", local.state_dict(), seen, num_examples=4)
    (found,) = fedaudit.attack(folder, [{"name": "invg", "iterations": 2}], module=net, progress=False)
    return found


def test_a_hard_sigmoid_is_derived_twice(tmp_path):
    part = nn.Hardsigmoid()
    twice_differentiable(part)
    torch.testing.assert_close(part(WITHIN), functional.hardsigmoid(WITHIN))
    assert torch.autograd.gradgradcheck(
        part, (torch.tensor([-3.5, -1.0, 2.0], dtype=torch.float64, requires_grad=True),)
    )
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Hardsigmoid(), nn.Flatten(), nn.Linear(48, 4))
    assert isinstance(by_adam(net, tmp_path / "r"), fedaudit.ImageFinding)


def test_another_operation_without_a_second_derivative_is_named_with_a_way_forward(tmp_path):
    found = by_adam(Odd(lambda net, x: functional.hardsigmoid(net(x))), tmp_path / "r")
    assert isinstance(found, fedaudit.NotApplicable)
    assert "hard sigmoid as relu6(x + 3) / 6" in str(found)


class Auxiliary(nn.Module):
    """Two outputs in training mode, one otherwise, as GoogLeNet has them."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.other = plain(), plain()

    def forward(self, x: Tensor) -> Any:
        return (self.net(x), self.other(x)) if self.training else self.net(x)


def test_outputs_that_only_training_has_are_refused_and_evaluation_mode_is_audited():
    given: dict[str, Any] = {"data": (INPUTS, LABELS), "progress": False}
    with pytest.raises(fedaudit.BadInput, match=r"in training mode the model returns several .* model\.eval\(\)"):
        fedaudit.simulate({"federations": FEDERATION}, model=Auxiliary(), **given)
    net = Auxiliary().eval()
    sent = fedaudit.simulate({"federations": FEDERATION}, model=net, **given).transcript.rounds[0].updates[0].tensors
    assert all(bool(value.any()) == name.startswith("net.") for name, value in sent.items())


def test_one_output_in_a_dictionary_is_told_to_come_alone(tmp_path):
    net = Odd(lambda inner, x: {"logits": inner(x)})
    with pytest.raises(fedaudit.BadInput, match=r"one output in a dictionary .* returns the tensor alone$"):
        fedaudit.simulate({"federations": FEDERATION}, model=net, data=(INPUTS, LABELS), progress=False)
    recorder = fedaudit.Recorder(tmp_path / "r")
    with recorder.round(net.state_dict()):
        with recorder.capture() as seen:
            optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
            functional.cross_entropy(net(INPUTS[:3])["logits"], LABELS[:3]).backward()
            optimiser.step()
        recorder.update("a", net.state_dict(), seen, num_examples=3)
    with pytest.raises(fedaudit.BadInput, match=r"one output in a dictionary .* and record that$"):
        fedaudit.attack(tmp_path / "r", ATTACKS, module=net, progress=False)
