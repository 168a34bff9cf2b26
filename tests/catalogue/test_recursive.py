"""R-GAP and its rank analysis: what they recover, what they count (against brute-force Jacobians), what they refuse."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedaudit.attacks import make_attack
from fedaudit.data import Dataset
from fedaudit.models import MODELS, build_model
from fedaudit.pipeline.prepare import resolve
from fedaudit.pipeline.run import record
from fedaudit.scenario.scenario import Scenario, scenario_from
from fedaudit.simulation.simulator import Recording
from fedaudit.transcript.observation import Observation, observe
from fedaudit.utils.errors import BadInput, NotApplicable
from fedaudit.utils.seeds import generator
from fedaudit_catalogue.attacks.chain import chain
from fedaudit_catalogue.attacks.constraints import gradient_constraints, rank_analysis, weight_constraints
from fedaudit_catalogue.rank import load, rank_of
from tests.conftest import Command, refused

SGD = {"name": "fedsgd", "clients": 1, "examples": 1}


def recorded(network: nn.Module | None = None, dataset: Dataset | None = None, **changes: Any) -> tuple[Scenario, Any]:
    values: dict[str, Any] = {"data": {"name": "digits"}, "federations": [SGD], "attacks": ["r-gap"], "seed": 3}
    if network is not None:
        values["model"] = {"name": "custom", "initialisation": "given", "batch_norm": "eval"}
    made = scenario_from(values | changes)
    (only,) = record(resolve(made, model=network, dataset=dataset))
    return made, only


def seen_by(made: Scenario, only: Recording) -> Observation:
    return observe(only.transcript, made.threat).split()[0]


def run_attack(made: Scenario, only: Recording) -> Any:
    return make_attack("r-gap")(seen_by(made, only), generator=generator(0))


def psnr(found: Any, only: Recording) -> float:
    return -10 * float((found.images - only.truth.inputs[0, 0]).square().mean().clamp(min=1e-30).log10())


def seeded(*layers: nn.Module) -> nn.Sequential:
    """Return the layers with parameters of a fixed seed, biases and normalisations too."""
    made, start = nn.Sequential(*layers), generator(0, "seeded")
    with torch.no_grad():
        for module in made.modules():
            for p in module.parameters(recurse=False):
                if p.ndim > 1:
                    p.copy_(torch.randn(p.shape, generator=start) / p[0].numel() ** 0.5)
                else:
                    p.copy_(0.2 + torch.rand(p.shape, generator=start))
            if isinstance(module, nn.BatchNorm2d | nn.BatchNorm1d):
                assert module.running_mean is not None
                assert module.running_var is not None
                module.running_mean.copy_(torch.randn(module.running_mean.shape, generator=start))
                module.running_var.copy_(0.5 + torch.rand(module.running_var.shape, generator=start))
    return made


# What it recovers ----------------------------------------------------------------------------------------------------

LEAKY = nn.LeakyReLU(0.2)
NETWORKS: dict[str, tuple[nn.Module, ...]] = {
    "linear": (nn.Flatten(), nn.Linear(64, 10)),
    "two linear layers": (nn.Flatten(), nn.Linear(64, 80), nn.Tanh(), nn.Linear(80, 10)),
    "a narrow hidden layer": (nn.Flatten(), nn.Linear(64, 20), LEAKY, nn.Linear(20, 10)),
    "no biases": (nn.Conv2d(1, 6, 3, bias=False), LEAKY, nn.Flatten(), nn.Linear(216, 10, bias=False)),
    "bias in the last layer only": (nn.Conv2d(1, 6, 3, bias=False), LEAKY, nn.Flatten(), nn.Linear(216, 10)),
    "stride and padding": (nn.Conv2d(1, 9, 3, stride=2, padding=1), LEAKY, nn.Flatten(), nn.Linear(144, 10)),
    "padding by a word": (nn.Conv2d(1, 4, 3, padding="same"), LEAKY, nn.Flatten(), nn.Linear(256, 10)),
    "dilation": (nn.Conv2d(1, 9, 3, dilation=2, padding=2), LEAKY, nn.Flatten(), nn.Linear(576, 10)),
    "groups": (
        *(nn.Conv2d(1, 4, 3, padding=1), LEAKY, nn.Conv2d(4, 8, 3, padding=1, groups=2), LEAKY),
        *(nn.Flatten(), nn.Linear(512, 10)),
    ),
    "BatchNorm in evaluation mode": (
        *(nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), LEAKY, nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)),
        *(nn.Tanh(), nn.Flatten(), nn.Linear(384, 10), nn.BatchNorm1d(10, affine=False), nn.Linear(10, 10)),
    ),
    "mean pooling before the activation": (
        *(nn.Conv2d(1, 16, 3, padding=1), nn.AvgPool2d(2), LEAKY, nn.Flatten(), nn.Linear(256, 10)),
    ),
    "two convolutions without activation": (
        *(nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1), LEAKY, nn.Flatten(), nn.Linear(256, 10)),
    ),
    **{
        type(act).__name__: (nn.Conv2d(1, 6, 3), act, nn.Conv2d(6, 8, 3), act, nn.Flatten(), nn.Linear(128, 10))
        for act in (nn.Identity(), nn.ELU(), nn.CELU(1.5), nn.SELU(), nn.Sigmoid(), nn.Tanh(), nn.Softplus(2.0))
    },
    "PReLU": (nn.Conv2d(1, 6, 3), nn.PReLU(6), nn.Flatten(), nn.Linear(216, 10)),
    "no dropout": (nn.Flatten(), nn.Dropout(0.0), nn.Linear(64, 10)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_image_is_recovered_exactly(name):
    made, only = recorded(seeded(*NETWORKS[name]))
    found = run_attack(made, only)
    assert psnr(found, only) > 70
    assert found.labels.equal(only.truth.labels[0, 0])
    assert found.label_source == "r-gap"
    assert found.objective < 1e-4
    assert found.iterations == 0
    assert not found.notes


def test_of_a_linear_layer_it_is_the_quotient_of_the_gradients():
    made, only = recorded(model={"name": "logistic"})
    message = seen_by(made, only).messages[0]
    weight, bias = message.update.tensors["fc.weight"], message.update.tensors["fc.bias"]
    row = int(bias.abs().argmax())
    quotient = only.transcript.task_info.denormalise((weight[row] / bias[row]).view(1, 1, 8, 8)).clamp(0, 1)
    found = run_attack(made, only)
    torch.testing.assert_close(found.images, quotient, atol=1e-6, rtol=0)
    torch.testing.assert_close(found.images, only.truth.inputs[0, 0], atol=1e-5, rtol=0)


@pytest.mark.slow
def test_leaky_cnn_gives_away_a_photograph():
    made, only = recorded(data={"name": "photos", "image_size": 16}, model={"name": "leaky-cnn"})
    assert psnr(run_attack(made, only), only) > 80


@pytest.mark.long
@pytest.mark.slow
def test_leaky_cnn_gives_away_a_photograph_of_32_pixels():
    made, only = recorded(data={"name": "photos"}, model={"name": "leaky-cnn"})
    assert psnr(run_attack(made, only), only) > 80


@pytest.mark.parametrize("knows_labels", [False, True])
def test_two_classes_without_a_bias(knows_labels):
    """Where the model is right, two images have the same gradient; where it is wrong, one (the paper's twin data)."""
    images = torch.rand((10, 1, 8, 8), generator=generator(0, "two"))
    data = Dataset.from_tensors(images, torch.arange(10) % 2)
    network = seeded(nn.Conv2d(1, 6, 3, bias=False), LEAKY, nn.Flatten(), nn.Linear(216, 2, bias=False))
    matched = set()
    for _ in range(2):
        next(network[3].parameters()).data.neg_()  # what was right is wrong, and the other way round
        made, only = recorded(network, data, threat={"knows_labels": knows_labels})
        label = only.truth.labels[0, 0]
        found = run_attack(made, only)
        assert found.labels.equal(label)
        assert found.label_source == ("given" if knows_labels else "r-gap")
        assert found.objective < 1e-4
        right = network(only.transcript.task_info.normalise(only.truth.inputs[0, 0])).argmax() == label
        assert [("differ by a factor" in note) for note in found.notes] == [True] * bool(right)
        assert right or psnr(found, only) > 60
        matched.add(bool(right))
    assert matched == {True, False}


@pytest.mark.parametrize("training", [{}, {"weight_decay": 0.1, "momentum": 0.9}, {"proximal_mu": 0.5}])
def test_one_local_step_is_a_gradient(training):
    algorithm = "fedprox" if "proximal_mu" in training else "fedavg"
    step = {"name": "f", "algorithm": algorithm, "clients": 1, "examples": 1, "local_steps": 1, "batch_size": 1}
    made, only = recorded(model={"name": "leaky-cnn"}, federations=[{**step, "learning_rate": 0.1, **training}])
    assert psnr(run_attack(made, only), only) > 40  # ΔW is rounded as W is


def test_functions_are_as_good_as_modules():
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.fc = seeded(nn.Conv2d(1, 6, 3), nn.Linear(54, 10))

        def forward(self, x: Tensor) -> Tensor:
            x = F.leaky_relu(F.avg_pool2d(self.conv(x), 2), 0.1)
            x = torch.tanh(F.elu(x, alpha=0.7))
            out: Tensor = self.fc(x.view(x.size(0), -1))
            return out

    made, only = recorded(Functional())
    found = run_attack(made, only)  # 54 outputs of the convolution for 64 pixels, and nine gradients: not enough
    assert "64 inputs open" in found.notes[0]
    layers = chain(Functional().double(), (1, 8, 8))
    assert [block.name for block in layers] == ["conv", "tanh_or_elu", "fc"][:1] + [b.name for b in layers[1:]]
    assert layers[-1].name == "fc"


def test_what_cannot_be_recovered_is_said():
    network = seeded(nn.Conv2d(1, 2, 3, stride=2), LEAKY, nn.Flatten(), nn.Linear(18, 10))
    made, only = recorded(network)
    found = run_attack(made, only)
    assert "64 inputs open" in found.notes[0]
    assert psnr(found, only) < 30


def test_a_changed_gradient_is_noticed():
    made, only = recorded(model={"name": "leaky-cnn"})
    seen = seen_by(made, only)
    message, start = seen.messages[0], generator(0, "noise")
    noisy = {n: t + 0.01 * torch.randn(t.shape, generator=start) for n, t in message.update.tensors.items()}
    changed = dataclasses.replace(message, update=dataclasses.replace(message.update, tensors=noisy))
    noised = dataclasses.replace(seen, messages=(changed,))
    with pytest.raises(NotApplicable, match="isn't one example's"):
        make_attack("r-gap").check(noised)
    made, only = recorded(seeded(*NETWORKS["Tanh"]))
    seen = seen_by(made, only)
    message = seen.messages[0]
    noisy = {n: t * (1 + 0.1 * torch.randn(t.shape, generator=start)) for n, t in message.update.tensors.items()}
    changed = dataclasses.replace(message, update=dataclasses.replace(message.update, tensors=noisy))
    found: Any = make_attack("r-gap")(dataclasses.replace(seen, messages=(changed,)), generator=generator(0))
    assert "differs from the observed one" in found.notes[-1]


# What it refuses -----------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 1, 3, padding=1), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc((x + self.conv(x)).flatten(1))
        return out


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 1, 3, padding=1), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.conv(self.conv(x)).flatten(1))
        return out


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(x.flatten(1) if x.sum() > 0 else -x.flatten(1))
        return out


HEAD = (nn.Flatten(), nn.Linear(64, 10))
FEDAVG = {"name": "f", "algorithm": "fedavg", "clients": 1, "examples": 2, "local_steps": 2, "batch_size": 1}
REFUSALS: dict[str, tuple[nn.Module | None, dict[str, Any], str]] = {
    "ReLU": (nn.Sequential(nn.ReLU(), *HEAD), {}, "ReLU .*loses what it cuts off"),
    "ReLU6": (nn.Sequential(nn.ReLU6(), *HEAD), {}, "loses what it cuts off"),
    "a LeakyReLU of slope 0": (nn.Sequential(nn.LeakyReLU(0.0), *HEAD), {}, "LeakyReLU"),
    "GELU": (nn.Sequential(nn.GELU(), *HEAD), {}, "same value at two places"),
    "max pooling": (nn.Sequential(nn.MaxPool2d(1), *HEAD), {}, "one value of each window"),
    "dropout": (nn.Sequential(nn.Dropout(0.5), *HEAD), {}, "masks"),
    "attention": (nn.Sequential(nn.LayerNorm(8), *HEAD), {}, "LayerNorm"),
    "circular padding": (nn.Sequential(nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular"), *HEAD), {}, "circular"),
    "a residual connection": (Residual(), {}, "residual connection"),
    "a layer used twice": (Shared(), {}, "used twice"),
    "data-dependent control flow": (Branching(), {}, "can't be traced"),
    "no linear layer at the end": (nn.Sequential(nn.Conv2d(1, 10, 8), nn.Flatten()), {}, "end in a fully connected"),
    "an activation at the end": (nn.Sequential(*HEAD, nn.Tanh()), {}, "expects logits"),
    "a batch": (None, {"federations": [{**SGD, "examples": 2, "batch_size": 2}]}, "works for one example"),
    "several steps": (None, {"federations": [FEDAVG]}, "works for one example"),
    "a table": (None, {"data": {"name": "breast-cancer"}, "model": {"name": "mlp"}}, "rows of a table"),
    "a residual network": (None, {"model": {"name": "resnet20", "width": 4}}, "can't be undone"),
    "a client": (None, {"threat": {"adversary": "client"}}, "sees no update"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_have_a_reason(case):
    network, changes, reason = REFUSALS[case]
    made, only = recorded(network, **({"model": {"name": "leaky-cnn"}} if network is None else {}) | changes)
    seen = observe(only.transcript, made.threat)
    with pytest.raises(NotApplicable, match=reason):
        make_attack("r-gap").check(seen.split()[0] if seen.messages else seen)


def test_batch_statistics_are_refused():
    network = nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), nn.Tanh(), nn.Flatten(), nn.Linear(128, 10)
    )
    made, only = recorded(network, model={"name": "custom", "initialisation": "given", "batch_norm": "train"})
    with pytest.raises(NotApplicable, match="batch's own statistics"):
        make_attack("r-gap").check(seen_by(made, only))


def test_a_loss_of_ones_own_needs_a_bias():
    made, only = recorded(model={"name": "leaky-cnn"})
    seen = dataclasses.replace(seen_by(made, only), loss=lambda z, y: F.cross_entropy(z, y, label_smoothing=0.1))
    with pytest.raises(NotApplicable, match="bias in the last layer"):
        make_attack("r-gap").check(seen)


def test_missing_gradients_and_facts_are_refused():
    made, only = recorded(model={"name": "leaky-cnn"})
    seen = seen_by(made, only)
    message = seen.messages[0]
    for part, reason in (("fc.weight", "lacks the last layer's gradient"), ("", "zero throughout")):
        rest = {n: t * bool(part) for n, t in message.update.tensors.items() if n != part}
        cut = dataclasses.replace(message, update=dataclasses.replace(message.update, tensors=rest))
        with pytest.raises(NotApplicable, match=reason):
            make_attack("r-gap").check(dataclasses.replace(seen, messages=(cut,)))
    made, only = recorded(federations=[FEDAVG], threat={"knows_training": False}, model={"name": "leaky-cnn"})
    with pytest.raises(NotApplicable, match="knows_training"):
        make_attack("r-gap").check(seen_by(made, only))


# The rank analysis ---------------------------------------------------------------------------------------------------


def brute_force(module: nn.Module, shape: tuple[int, ...], start: torch.Generator) -> list[tuple[int, int, int]]:
    """Return of every block the ranks of its weight constraints, gradient constraints and both, from Jacobians."""
    image = torch.randn((1, *shape), generator=start, dtype=torch.float64)
    label = torch.randint(5, (1,), generator=start)
    found = []
    blocks = chain(module, shape)
    inputs, x = [], image
    for block in blocks:
        inputs.append(x)
        x = block.activation(block.affine(x))
    for i, block in enumerate(blocks):
        names = [f"{step.name}.weight" for step in block.steps if step.kind != "plain"]
        weights = {name: p for name, p in module.named_parameters() if name in names}

        def output(x: Tensor, block: Any = block) -> Tensor:
            return torch.as_tensor(block.affine(x[None])[0].flatten())

        rest = blocks[i + 1 :]
        z = block.affine(inputs[i]).detach().requires_grad_()
        y = block.activation(z * 1)
        for other in rest:
            y = other.activation(other.affine(y))
        (k,) = torch.autograd.grad(F.cross_entropy(y, label), z)

        def gradients(x: Tensor, block: Any = block, weights: Any = weights, k: Tensor = k) -> Tensor:
            leaf = x.requires_grad_()
            own = torch.autograd.grad((block.affine(leaf[None]) * k).sum(), list(weights.values()), create_graph=True)
            return torch.cat([g.flatten() for g in own])

        at = inputs[i][0].detach()
        a = torch.autograd.functional.jacobian(output, at).flatten(1).flatten(1)
        a = a.reshape(len(a), -1)
        b = torch.autograd.functional.jacobian(gradients, at)
        b = b.reshape(len(b), -1)
        b = b / b.norm() * a.norm()
        together = b if not rest else torch.cat([a, b])
        ranks = [int(torch.linalg.matrix_rank(m, rtol=1e-8)) for m in (a, b, together)]
        found.append((ranks[0] if rest else 0, ranks[1], ranks[2]))
    return found


@settings(max_examples=12)
@given(
    channels=st.integers(1, 2),
    out=st.integers(1, 4),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 2),
    padding=st.integers(0, 1),
    hidden=st.integers(1, 3),
    pool=st.booleans(),
    bias=st.booleans(),
)
def test_ranks_are_those_of_the_jacobians(channels, out, kernel, stride, padding, hidden, pool, bias):
    features: list[nn.Module] = [nn.Conv2d(channels, out, kernel, stride, padding, bias=bias)]
    features += [nn.AvgPool2d(2)] * pool
    features += [nn.LeakyReLU(0.3), nn.Conv2d(out, hidden, 2, padding=1), nn.Tanh(), nn.Flatten()]
    shape = (channels, 6, 5)
    size = nn.Sequential(*features)(torch.zeros(1, *shape)).shape[1]
    module = seeded(*features, nn.Linear(size, 5, bias=bias)).double()
    analysis = rank_analysis(module, shape, F.cross_entropy, 5, generator=generator(0, "rank"))
    expected = brute_force(module, shape, generator(0, "rank"))
    assert [(one.weight_rank, one.gradient_rank, one.rank) for one in analysis.layers] == expected


@settings(max_examples=10)
@given(stride=st.integers(1, 2), padding=st.integers(0, 2), groups=st.sampled_from([1, 2]), dilation=st.integers(1, 2))
def test_the_equations_hold_for_the_true_input(stride, padding, groups, dilation):
    """Oracle: autograd's gradient of the true image, and the true output."""
    start = generator(0, "equations")
    conv = nn.Conv2d(2, 4, 3, stride, padding, dilation, groups)
    size = conv(torch.zeros(1, 2, 8, 8)).flatten().numel()
    module = seeded(conv, nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(size, 5)).double().eval()
    x = torch.randn((1, 2, 8, 8), generator=start, dtype=torch.float64)
    block = chain(module, (2, 8, 8))[0]
    z = block.affine(x)
    loss = F.cross_entropy(module[2:](z), torch.tensor([1]))
    names = [n for n, _ in module.named_parameters()]
    k, *grads = torch.autograd.grad(loss, [z, *module.parameters()])
    by_gradient = gradient_constraints(block, k[0], dict(zip(names, grads, strict=True)))
    assert len(by_gradient) == 2  # the convolution's and BatchNorm's
    for one in [*by_gradient, weight_constraints(block, z[0].detach())]:
        assert one.values is not None
        torch.testing.assert_close(one.matrix @ x.flatten(), one.values, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize(("least", "found"), [(1e-5, 4), (1e-9, 3)])
def test_what_single_precision_can_tell_counts_and_no_more(least, found):
    """Rounded to 6e-8, a singular value of 1e-5 of the greatest can be told from zero, one of 1e-9 can't."""
    first = nn.Linear(4, 4)
    q, _ = torch.linalg.qr(torch.randn(4, 4, generator=generator(0, "singular"), dtype=torch.float64))
    module = nn.Sequential(nn.Flatten(), first, LEAKY, nn.Linear(4, 3)).double()
    first.weight.data = q @ torch.tensor([1.0, 0.5, 0.1, least], dtype=torch.float64).diag() @ q.T
    analysis = rank_analysis(module, (1, 2, 2), F.cross_entropy, 3, generator=generator(0))
    assert analysis.layers[0].weight_rank == found


def test_a_bottleneck_is_found():
    """A wide layer after a narrow one: its input isn't free, so virtual constraints make up for what is missing."""
    module = seeded(
        *(nn.Flatten(), nn.Linear(64, 40), LEAKY, nn.Unflatten(1, (10, 2, 2)), nn.Conv2d(10, 40, 1), LEAKY),
        *(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(40, 5)),
    ).double()
    analysis = rank_analysis(module, (1, 8, 8), F.cross_entropy, 5, generator=generator(0))
    assert [layer.unknowns for layer in analysis.layers] == [64, 40, 160]
    assert [layer.missing for layer in analysis.layers] == [0, 0, 120]  # the mean of four keeps one in four
    assert [layer.virtual for layer in analysis.layers] == [0, 0, 120]
    assert [layer.verdict for layer in analysis.layers] == ["determined", "determined", "with virtual constraints"]
    assert analysis.verdict == "counted"
    assert analysis.index == pytest.approx(-120 / 3)


def test_the_analysis_tells_what_the_attack_will_do():
    narrow = seeded(nn.Conv2d(1, 2, 3, stride=2), LEAKY, nn.Flatten(), nn.Linear(18, 10))
    wide = seeded(nn.Conv2d(1, 6, 3), LEAKY, nn.Flatten(), nn.Linear(216, 10))
    for network, verdict in ((narrow, "deficient"), (wide, "invertible")):
        made, only = recorded(network)
        assert rank_of(made, model=network).verdict == verdict
        assert (psnr(run_attack(made, only), only) > 60) == (verdict == "invertible")


def test_the_command_prints_a_table_and_json(command: Command):
    table = command("rank", "logistic", "--set", "data.name=digits")
    assert table.code == 0
    assert "fc" in table.out
    assert "invertible" in table.out
    programs = command("rank", "lenet", "--set", "data.name=digits", "--json")
    assert programs.code == 0
    read = json.loads(programs.out)
    assert read["verdict"] == "invertible"
    assert [layer["layer"] for layer in read["layers"]] == ["conv1", "conv2", "conv3", "fc"]
    assert read["layers"][1] | {"verdict": ""} == {
        **{"layer": "conv2", "unknowns": 192, "virtual": 128, "verdict": ""},
        **{"weight_constraints": 48, "gradient_constraints": 3600, "weight_rank": 48, "gradient_rank": 192},
        "rank": 192,
    }


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["resnet20"], "ReLU"),
        (["lennet"], "lennet"),
        (["linear", "--set", "data.name=diabetes"], "needs a classifier"),
        (["lenet", "--set", "data.nam=digits"], "unknown key"),
    ],
)
def test_the_command_says_why_not(command: Command, words: list[str], reason: str):
    outcome = command("rank", *words)
    refused(outcome, reason)


def test_a_file_is_taken_before_a_models_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load("lenet", [], None).model.name == "lenet"
    (tmp_path / "lenet").write_text("federations: [{name: a}]\nattacks: [r-gap]\nmodel: {name: mlp}\n")
    assert load("lenet", [], None).model.name == "mlp"
    with pytest.raises(BadInput):
        load("nothing.yaml", [], None)


def test_leaky_cnn_is_r_gaps_network():
    network = build_model("leaky-cnn", input_shape=(3, 32, 32), outputs=1)
    shapes = [tuple(p.shape) for p in network.parameters()]
    assert shapes == [(12, 3, 4, 4), (36, 12, 3, 3), *[(36, 36, 3, 3)] * 2, (64, 36, 3, 3), (128, 64, 3, 3), (1, 3200)]
    assert "R-GAP" in MODELS["leaky-cnn"].info["paper"]
