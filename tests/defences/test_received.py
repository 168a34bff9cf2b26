"""Checks of a received model by single examples' gradients and by the last rounds: closed forms and torch.func."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

import fedaudit
from fedaudit import ReceivedHistory
from fedaudit.defences.received import Check
from fedaudit.models import build_model
from tools.measure.received_checks import WAYS
from tools.measure.received_checks import checked as played

CLASSES = 4


def checks(net: nn.Module, inputs: Tensor, labels: Tensor, history: ReceivedHistory | None = None) -> dict[str, Check]:
    found = fedaudit.check_model(net.state_dict(), net, loss=cross_entropy, examples=(inputs, labels), history=history)
    return {check.name: check for check in found}


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def of_a_layer(bias: bool = True) -> nn.Linear:
    layer = nn.Linear(6, CLASSES, bias=bias)
    with torch.no_grad():
        layer.weight.zero_()  # it guesses: every example's gradient is as long as the example, times a number
    return layer


def test_the_ratio_of_one_layer_is_that_of_the_examples_lengths():
    inputs, labels = drawn(16, 6), torch.arange(16) % CLASSES
    inputs[3] *= 40
    found = checks(of_a_layer(bias=False), inputs, labels)
    lengths = inputs.norm(dim=1).double()
    expected = float(lengths[3] / (lengths.sum() - lengths[3]))
    assert found["disaggregation"].value == pytest.approx(expected, rel=1e-5)
    assert found["disaggregation"].alarm == (expected > 1)
    assert "example 3's, of class 3" in found["disaggregation"].text
    effective = float(lengths.sum() ** 2 / lengths.square().sum())
    assert found["uneven gradients"].value == pytest.approx(1 - effective / 16, rel=1e-5)


def test_a_layer_that_one_example_alone_activates_has_the_largest_ratio():
    first = nn.Linear(6, 16)
    net = nn.Sequential(first, nn.ReLU(), nn.Linear(16, CLASSES))
    inputs = drawn(16, 6).abs()
    inputs[5] = -inputs[5]
    with torch.no_grad():
        first.weight.copy_(-drawn(16, 6).abs())
        first.bias.zero_()
    found = checks(net, inputs, torch.arange(16) % CLASSES)
    assert found["disaggregation"].value == pytest.approx(1e9)  # and no infinity, which JSON hasn't
    assert found["uneven gradients"].value == pytest.approx(1 - 1 / 16)
    assert found["disaggregation"].alarm
    assert found["uneven gradients"].alarm
    assert "example 5's" in found["disaggregation"].text


def test_what_a_good_model_gets_wrong_is_no_manipulation():
    layer = of_a_layer()
    inputs = 10 * torch.eye(6)[:CLASSES].repeat(4, 1)
    labels = torch.arange(16) % CLASSES
    with torch.no_grad():
        layer.weight.copy_(torch.eye(CLASSES, 6))
    labels[7] = 0  # the only example with a gradient to speak of: of its own classes the ratio is about 400
    found = checks(layer, inputs, labels)
    assert found["disaggregation"].value < 0.2
    assert found["uneven gradients"].value < 0.2


@pytest.mark.parametrize("inplace", [False, True])
def test_lengths_are_those_of_the_gradients_of_single_examples(inplace):
    net = nn.Sequential(
        nn.Conv2d(2, 5, 3, stride=2, padding=1), nn.ReLU(inplace=inplace), nn.Conv2d(5, 5, 3, groups=5),
        nn.ReLU(inplace=inplace), nn.Flatten(), nn.Linear(20, CLASSES),
    )  # fmt: skip
    inputs, labels = drawn(16, 2, 8, 8), torch.arange(16) % CLASSES
    state = {name: p.detach() for name, p in net.named_parameters()}

    def alone(p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(functional_call(net, p, (x[None],)), y[None])

    of_each: Callable[..., dict[str, Tensor]] = vmap(grad(alone), in_dims=(None, 0, 0))
    ratios = []
    for targets in (labels, (labels + 1 + torch.arange(16) % (CLASSES - 1)) % CLASSES):
        found = {n: g.flatten(1).norm(dim=1) for n, g in of_each(state, inputs, targets).items() if "weight" in n}
        ratios.append({name: float(size.max() / (size.sum() - size.max())) for name, size in found.items()})
    expected = max(min(one[name] for one in ratios) for name in ratios[0])
    assert checks(net, inputs, labels)["disaggregation"].value == pytest.approx(expected, rel=1e-4)


def test_layers_that_begin_at_nothing_are_honest():
    net = build_model("resnet20", input_shape=(3, 16, 16), outputs=10, width=4)
    with torch.no_grad():
        for name, part in net.named_modules():
            if isinstance(part, nn.BatchNorm2d) and name.endswith("bn2"):
                part.weight.zero_()  # residual branches that begin at nothing
        last = [part for part in net.modules() if isinstance(part, nn.Linear)][-1]
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
    found = checks(net, drawn(16, 3, 16, 16), torch.arange(16) % 10)
    assert not [check for check in found.values() if check.alarm]
    assert found["silent outputs"].value == 0


def test_a_jump_is_measured_in_the_scatter_of_the_last_changes():
    net, history = nn.Linear(6, 8), ReceivedHistory()
    inputs, labels = drawn(16, 6), torch.arange(16) % CLASSES
    for _ in range(5):  # a hundredth a round
        found = checks(net, inputs, labels, history)
        assert not found["jump"].alarm
        with torch.no_grad():
            net.weight.mul_(1.01)
    with torch.no_grad():
        net.weight.mul_(1.51 / 1.01)
    found = checks(net, inputs, labels, history)
    assert found["jump"].value == pytest.approx(math.log(0.51 / 0.01) / 0.25, rel=1e-3)  # 0.25 is the least scatter
    assert found["jump"].alarm


def test_the_scatter_is_the_median_deviation_of_three_changes_or_more():
    net, history, jumps = nn.Linear(6, 8), ReceivedHistory(), []
    for change in (0, 0.01, 0.02, 0.04, 0.08, 0.16, 0.64):
        with torch.no_grad():
            net.weight.mul_(1 + change)
        found = fedaudit.check_model(net.state_dict(), net, history=history)
        jumps.append(next(check.value for check in found if check.name == "jump"))
    doubled = [0, 0, 0, 0, 2, 3, 4]  # above the lower median, of deviations of one doubling
    assert jumps == pytest.approx([times / 1.4826 for times in doubled], rel=1e-3)


def test_a_loss_jumps_from_three_remembered_on():
    history = ReceivedHistory()
    rises = [history.add({}, {"loss": loss})[2] for loss in (1.0, 1.2, 1.1, 2.0)]
    assert rises == pytest.approx([0, 0, 0, 2.0 - 1.2 - 2 * 0.2])


def test_rows_and_a_loss_that_are_lost_are_noticed():
    net, history = nn.Linear(6, 8, bias=False), ReceivedHistory()
    with torch.no_grad():
        net.weight.copy_(torch.nn.functional.normalize(drawn(8, 6), dim=1))
    inputs, labels = drawn(16, 6), torch.arange(16) % CLASSES
    losses = []
    for factor in (1.0, 1.5, 1 / 1.5, 1.0):
        with torch.no_grad():
            net.weight *= factor
        losses.append(checks(net, inputs, labels, history)["loss"].value)
    with torch.no_grad():
        net.weight[:5] *= 0
        net.weight[5:] *= 100
    found = checks(net, inputs, labels, history)
    assert found["lost rows"].value == pytest.approx(5 / 8, rel=1e-4)
    assert found["lost rows"].alarm
    expected = max(losses) + 2 * (max(losses) - min(losses))
    assert found["loss jump"].value == pytest.approx(found["loss"].value - expected, rel=1e-4)
    assert found["loss jump"].alarm


def test_rows_that_grow_apart_lose_none_and_rows_that_are_silenced_then_are_lost():
    net, history = nn.Linear(20, 8, bias=False), ReceivedHistory()
    with torch.no_grad():
        net.weight.copy_(torch.nn.functional.normalize(drawn(8, 20), dim=1))

    def lost() -> float:
        found = fedaudit.check_model(net.state_dict(), net, history=history)
        return next(check.value for check in found if check.name == "lost rows")

    for _ in range(8):  # to 17 times the others, beside which these hardly count
        assert lost() == 0
        with torch.no_grad():
            net.weight[:2] *= 1.5
            net.weight[2:] *= 1.05
    before = copy.deepcopy(history)
    with torch.no_grad():
        net.weight[2:] *= 0.5
    assert 0 < lost() < 0.5
    history = before
    with torch.no_grad():
        net.weight[1:] = 0
    usual = torch.tensor([1.5**3] * 2 + [1.05**3] * 6).double()  # in the fourth of eight rounds
    counted = float(usual.sum() ** 2 / usual.square().sum())
    assert lost() == pytest.approx(1 - 1 / counted, rel=1e-4)


def test_who_missed_rounds_meets_larger_changes_which_are_no_jump():
    jumps = {}
    for told in (True, False):
        net, history, index = nn.Linear(6, 8), ReceivedHistory(), 0
        for gap in (1, 2, 1, 2, 20):
            with torch.no_grad():
                net.weight.mul_(1 + 0.01 * gap)
            index += gap
            found = fedaudit.check_model(net.state_dict(), net, history=history, index=index if told else None)
            jumps[told] = next(check for check in found if check.name == "jump").value
    assert jumps[False] == pytest.approx(math.log(0.2 / 0.02) / 0.25, rel=1e-3)
    assert jumps[True] == pytest.approx(math.log(0.2 / 8 / 0.01) / 0.25, rel=1e-3)  # no more than eight count


def after_eight_rounds() -> tuple[nn.Module, ReceivedHistory]:
    """Return a network that moves by a hundredth a round, and what is remembered of rounds 0 to 7."""
    net, history = nn.Linear(20, 8), ReceivedHistory()
    with torch.no_grad():
        net.weight.copy_(drawn(8, 20))
        for index in range(8):
            net.weight.mul_(1.01)
            found = fedaudit.check_model(net.state_dict(), net, history=history, index=index)
            assert not any(check.alarm for check in found)
    return net, history


def jump(net: nn.Module, history: ReceivedHistory, index: int | None, times: float = 1.0) -> float:
    state = {name: times * tensor for name, tensor in net.state_dict().items()}
    found = fedaudit.check_model(state, net, history=history, index=index)
    return next(check.value for check in found if check.name == "jump")


@pytest.mark.parametrize("told", [None, 0, 7, 8, 10**9])
def test_a_server_that_tells_another_round_hides_no_jump(told: int | None) -> None:
    net, history = after_eight_rounds()
    gap = 8 if told == 10**9 else 1
    expected = math.log(2 / gap / 0.01) / 0.25
    assert jump(net, history, told, -1) == pytest.approx(expected, rel=1e-3)
    assert expected > 10


def test_rounds_that_begin_at_0_again_are_one_after_another():
    net, history = after_eight_rounds()
    for index in (0, 1, 2):
        assert jump(net, history, index, 1.01 ** (index + 1)) < 1
        assert history.index == index
    assert list(history.gaps) == [1] * 8


def test_the_same_model_again_and_again_pushes_nothing_out():
    net, history = after_eight_rounds()
    for index in range(8, 20):
        assert jump(net, history, index) == 0
    assert jump(net, history, 20, -1) > 10


@pytest.mark.parametrize("number", [math.nan, math.inf, 1e30])
def test_weights_that_are_no_numbers_alarm_each_time_and_the_next_model_is_compared_with_the_last_that_were(number):
    net, history = after_eight_rounds()
    last = net.state_dict()
    for index in (8, 9, 10):
        broken = {name: torch.full_like(tensor, number) for name, tensor in last.items()}
        found = {c.name: c for c in fedaudit.check_model(broken, net, history=history, index=index)}
        assert found["jump"].alarm
        assert found["silent outputs"].alarm or number == 1e30
    assert jump(net, copy.deepcopy(history), 11, -1) > 10
    assert jump(net, history, 11, 1.01) < 1
    assert all(math.isfinite(value) for one in history.changes for value in one.values())
    assert all(bool(lengths.isfinite().all()) for one in history.rows for lengths in one.values())


def test_of_a_share_a_limit_lies_at_most_half_way_to_1():
    history = ReceivedHistory()
    for value in (0.1, 0.7, 0.3):
        history.add({}, dict.fromkeys(("lone neurons", "uneven gradients", "disaggregation"), value))
    inputs, labels = drawn(16, 6), torch.arange(16) % CLASSES
    found = checks(of_a_layer(bias=False), inputs, labels, history)
    assert found["disaggregation"].limit == pytest.approx(1.4)
    assert found["lone neurons"].limit == pytest.approx(0.85)
    assert found["uneven gradients"].limit == pytest.approx(0.85)
    history.add({}, {"uneven gradients": 0.8})
    assert checks(of_a_layer(bias=False), inputs, labels, history)["uneven gradients"].limit == pytest.approx(0.9)


def test_a_loss_that_is_no_number_alarms_each_time_and_is_not_remembered():
    layer, history = of_a_layer(), ReceivedHistory()
    inputs, labels = drawn(16, 6), torch.arange(16) % CLASSES
    for _ in range(3):
        checks(layer, inputs, labels, history)
    broken = copy.deepcopy(layer)
    nn.init.constant_(broken.bias, math.nan)
    for _ in range(9):
        assert checks(broken, inputs, labels, history)["loss"].alarm
    found = checks(layer, inputs, labels, history)
    assert found["loss"].limit == 4
    assert found["loss jump"].value == 0
    assert not any(check.alarm for check in found.values())


def test_what_0_2_0_remembered_is_read():
    net, history = after_eight_rounds()
    older = {name: history.state_dict()[name] for name in ("last", "changes")} | {"losses": [1.0] * 8}
    back = ReceivedHistory()
    back.load_state_dict(older | {"rows": [{"weight": 8.0}] * 8})  # how many counted
    assert (back.index, list(back.gaps), len(back.values)) == (-1, [1] * 7, 0)
    assert jump(net, back, 100, -1) == pytest.approx(math.log(2 / 0.01) / 0.25, rel=1e-3)


def test_a_limit_is_twice_the_largest_of_the_last_rounds():
    net, history = of_a_layer(bias=False), ReceivedHistory()
    inputs, labels = drawn(16, 6), torch.arange(16) % CLASSES
    assert checks(net, inputs, labels, history)["disaggregation"].limit == 1
    inputs[3] *= 40
    first = checks(net, inputs, labels, history)["disaggregation"]
    assert first.alarm
    again = checks(net, inputs, labels, history)["disaggregation"]
    assert again.limit == pytest.approx(2 * first.value)
    assert not again.alarm
    back = ReceivedHistory()
    back.load_state_dict(history.state_dict())
    assert back.limit("disaggregation", 1) == again.limit


def test_a_neuron_that_only_the_one_wrong_example_moves_is_no_bin():
    first, last = nn.Linear(6, 16), nn.Linear(16, CLASSES)
    net = nn.Sequential(first, nn.ReLU(), last)
    inputs = drawn(32, 6).abs()
    with torch.no_grad():
        first.weight.copy_(drawn(16, 6).abs())
        first.bias.zero_()
        last.weight.zero_()
        last.weight[0] = 100.0  # sure of class 0
        last.bias.zero_()
    labels = torch.zeros(32, dtype=torch.long)
    labels[7] = 1  # the one that it gets wrong
    found = checks(net, inputs, labels)
    assert found["lone neurons"].value == 0


def test_nothing_is_concluded_from_fewer_than_three_rounds():
    net, history = nn.Linear(6, 8), ReceivedHistory()
    inputs, labels = drawn(16, 6), torch.arange(16) % CLASSES
    for _ in range(3):
        found = checks(net, inputs, labels, history)
        assert [found[name].value for name in ("jump", "lost rows", "loss jump")] == [0, 0, 0]
        with torch.no_grad():
            net.weight.mul_(-50)


@pytest.mark.parametrize(("half", "alarm"), [("up", False), ("down", True)])
def test_the_half_of_an_adapter_that_has_hardly_left_zero_holds_no_bins(half: str, alarm: bool) -> None:
    net = build_model("vit-adapters", input_shape=(1, 8, 8), outputs=10, width=64)
    layer = net.get_submodule(f"blocks.0.adapter.{half}")
    assert isinstance(layer, nn.Linear)
    with torch.no_grad():  # as after a step along one direction
        layer.weight.copy_(torch.outer(drawn(layer.out_features), drawn(layer.in_features)))
    alike = {check.name: check for check in fedaudit.check_model(net.state_dict(), net)}["alike rows"]
    assert alike.alarm == alarm


@pytest.mark.slow
def test_ordinary_rounds_raise_no_alarm_and_a_swapped_layer_does():
    traps = {"trap-weights": {"name": "trap-weights"}}
    seen = [
        (server, [check.name for check in found if check.alarm])
        for model in ("mlp", "strided-cnn", "lenet")
        for way in WAYS
        for server, when, _, found in played(model, way, 5, None, traps if model == "mlp" else {})
        if when != "first"
    ]
    ordinary = [alarms for server, alarms in seen if server == "none"]
    assert len(ordinary) == 108
    assert sum(map(bool, ordinary)) <= 1
    swapped = [alarms for server, alarms in seen if server == "trap-weights"]
    assert len(swapped) == 3
    assert sum("jump" in alarms for alarms in swapped) >= 2  # who took part in few rounds remembers too few
