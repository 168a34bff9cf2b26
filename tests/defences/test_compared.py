"""The defences that papers compare themselves with: against a few lines of torch, closed forms, and who knows them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import kstest
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedaudit.attacks import ImageFinding, make_attack
from fedaudit.attacks.inversion.objectives import DISTANCES, distance_to
from fedaudit.attacks.inversion.own_updates import own_update
from fedaudit.defences import CLIENT_DEFENCES, ClientContext, ClientDefenceInfo, OwnExamples, Update
from fedaudit.pipeline.prepare import resolve
from fedaudit.scenario.scenario import scenario_from
from fedaudit.simulation.simulator import simulate
from fedaudit.transcript.observation import Observation, observe
from fedaudit.transcript.threat import ThreatModel
from fedaudit.utils.errors import BadInput
from fedaudit.utils.registry import make
from tests.models.model_cases import generator as rng

Case = tuple[Update, ClientContext]


def network(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3))


def trained(seed: int = 0, examples: int = 2) -> Case:
    """A client's gradient on a small network, with all that it has at hand."""
    model, draws = network(), rng(seed)
    x, y = torch.randn(examples, 12, generator=draws), torch.randint(3, (examples,), generator=draws)
    grads = torch.autograd.grad(cross_entropy(model(x), y), list(model.parameters()))
    tensors = dict(zip(dict(model.named_parameters()), grads, strict=True))
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    own = OwnExamples(model, cross_entropy, [(x, y)])
    return Update(0, "gradient", tensors, examples, None), ClientContext(weights, (), 1, own)


def sent(name: str, settings: dict[str, Any], case: Case, seed: int = 0) -> Update:
    return make(CLIENT_DEFENCES, name, settings)(*case, rng(seed))


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([t.flatten() for t in tensors.values()])


# --- what is sent --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("distribution", ["gaussian", "laplace"])
@pytest.mark.parametrize("secret", [False, True])
def test_noise_is_of_the_chosen_variance_and_kind(distribution: str, secret: bool) -> None:
    update = Update(0, "gradient", {"w": torch.full((20_000,), 3.0)}, 1, None)
    client_defence = make(CLIENT_DEFENCES, "gradient-noise", {"variance": 0.25, "distribution": distribution})
    found = client_defence(update, ClientContext({}, (), 1), None if secret else rng())  # type: ignore[arg-type]
    noise = (found.tensors["w"] - 3).double().numpy()
    law = ("norm", (0, 0.5)) if distribution == "gaussian" else ("laplace", (0, math.sqrt(0.125)))
    assert kstest(noise, law[0], args=law[1]).pvalue > 1e-3
    assert found.sanitised == ClientDefenceInfo("gradient-noise", noise=0.5, unclipped=True)


@pytest.mark.parametrize("bound", [0.1, 1e3])
def test_clipping_is_torch_s(bound: float) -> None:
    update, context = trained()
    parameters = [nn.Parameter(t.clone()) for t in update.tensors.values()]
    for parameter, tensor in zip(parameters, update.tensors.values(), strict=True):
        parameter.grad = tensor.clone()
    nn.utils.clip_grad_norm_(parameters, bound)
    found = sent("gradient-clipping", {"bound": bound}, (update, context))
    for tensor, parameter in zip(found.tensors.values(), parameters, strict=True):
        torch.testing.assert_close(tensor, parameter.grad, rtol=1e-4, atol=1e-7)


def test_outpost_prunes_and_adds_noise_by_each_layer_s_risk() -> None:
    draws = rng(1)
    weights = {"a": 0.5 * torch.randn(400, 50, generator=draws), "b": 3 * torch.randn(300, generator=draws)}
    values = {"a": torch.randn(400, 50, generator=draws), "b": 2 * torch.randn(300, generator=draws)}
    case = Update(0, "gradient", values, 1, None), ClientContext(weights, (), 1)
    found = sent("outpost", {"prune": 0.5, "scale": 0.2, "share": 0.3}, case)
    fisher = {"a": np.tile(values["a"].square().mean(0).numpy(), (400, 1)), "b": values["b"].square().numpy()}
    limit = np.percentile(np.concatenate([f.ravel() for f in fisher.values()]), 70)
    for name, tensor in values.items():
        kept = np.abs(tensor.numpy()) > np.percentile(np.abs(tensor.numpy()), 50)
        rest = found.tensors[name].numpy() - np.where(kept, tensor.numpy(), 0)
        noisy = fisher[name] > limit
        assert not rest[~noisy & (fisher[name] < limit)].any()
        risk = min(float(weights[name].numpy().var(ddof=1)), 1.0)
        assert risk == (1.0 if name == "b" else pytest.approx(0.25, rel=0.05))
        assert kstest(rest[noisy], "norm", args=(0, 0.2 * risk)).pvalue > 1e-3
        assert found.sanitised is not None
        assert dict(found.sanitised.noises)[name] == pytest.approx(0.2 * risk * math.sqrt(0.3))


def test_outpost_acts_ever_more_rarely() -> None:
    update, context = trained()
    acted = np.zeros(12)
    draws = rng(5)
    for _ in range(300):
        client_defence = make(CLIENT_DEFENCES, "outpost", {"beta": 0.5})
        acted += [client_defence(update, context, draws).sanitised is not None for _ in range(12)]
    expected = 1 / (1 + 0.5 * np.arange(12))
    assert np.abs(acted / 300 - expected).max() < 4 * math.sqrt(0.25 / 300)
    assert acted[0] == 300


def test_dual_pruning_sends_the_middle_and_remembers_the_rest() -> None:
    client_defence = make(CLIENT_DEFENCES, "dgp", {"largest": 0.1, "smallest": 0.3})
    error = {name: np.zeros(t.shape) for name, t in trained()[0].tensors.items()}
    for seed in range(3):
        update, context = trained(seed)
        found = client_defence(update, context, rng())
        for name, tensor in update.tensors.items():
            whole = tensor.double().numpy() + error[name]
            ranks = np.abs(whole).ravel().argsort(kind="stable").argsort().reshape(whole.shape)
            few, many = math.ceil(round(0.3 * whole.size, 6)), math.ceil(round(0.1 * whole.size, 6))
            middle = (ranks >= few) & (ranks < whole.size - many)
            assert middle.any()
            np.testing.assert_allclose(found.tensors[name].numpy(), np.where(middle, whole, 0), atol=1e-6)
            error[name] = np.where(middle, 0, whole)
    one = Update(0, "gradient", {"b": torch.tensor([2.0])}, 1, None)
    assert float(sent("dgp", {"smallest": 0.9}, (one, context)).tensors["b"]) == 2  # something is left of everything


def test_censor_sends_the_orthogonal_vector_of_least_loss() -> None:
    update, context = trained()
    settings = {"trials": 5, "probe": 0.1}
    found = sent("censor", settings, (update, context), seed=3)
    for name, g in update.tensors.items():
        u = found.tensors[name]
        assert abs(float(torch.dot(u.flatten().double(), g.flatten().double()))) < 1e-5 * float(g.norm()) ** 2
        torch.testing.assert_close(u.norm(), g.norm())
    draws, model, losses = rng(3), network(), []
    assert context.own is not None
    ((x, y),) = context.own.batches
    for _ in range(5):
        own = {}
        for name, g in update.tensors.items():
            v = torch.randn(g.shape, generator=draws)
            u = v - (v * g).sum() / (g * g).sum() * g
            own[name] = u * g.norm() / u.norm()
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(context.weights[name] - 0.1 * own[name])
            losses.append((float(cross_entropy(model(x), y)), flat(own)))
    torch.testing.assert_close(flat(found.tensors), min(losses, key=lambda one: one[0])[1], rtol=1e-4, atol=1e-6)
    assert len({loss for loss, _ in losses}) == 5
    turned = sent(
        "censor", settings, (Update(0, "weights", {n: -g for n, g in update.tensors.items()}, 2, None), context)
    )
    assert set(turned.tensors) == set(update.tensors)


def test_soteria_prunes_the_features_that_tell_most() -> None:
    """On tanh(Wx + b) the derivative is known: ∂rᵢ/∂x = (1 − rᵢ²)·wᵢ."""
    update, context = trained(examples=3)
    assert context.own is not None
    ((x, _),) = context.own.batches
    w, b = context.weights["0.weight"].double(), context.weights["0.bias"].double()
    r = (x.double() @ w.T + b).tanh()
    scores = (r.abs() / ((1 - r**2) * w.norm(dim=1))).sum(0)
    pruned = scores.argsort(descending=True)[:3].tolist()
    found = sent("soteria", {"rate": 0.3}, (update, context))  # ⌈0.3 · 8⌉ = 3
    expected = update.tensors["2.weight"].clone()
    expected[:, pruned] = 0
    assert found.tensors["2.weight"].equal(expected)
    assert all(found.tensors[name].equal(t) for name, t in update.tensors.items() if name != "2.weight")
    first = sent("soteria", {"rate": 0.25, "layer": "0"}, (update, context))  # there the features are the inputs
    columns = x.abs().sum(0).argsort(descending=True)[:3]
    assert not first.tensors["0.weight"][:, columns].any()
    assert int((first.tensors["0.weight"] == 0).all(0).sum()) == 3


def test_dead_features_aren_t_pruned_for_others() -> None:
    first = nn.Linear(4, 4)
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        first.weight.copy_(torch.eye(4))
        first.bias.zero_()
    x, y = torch.tensor([[1.0, -1.0, 3.0, -2.0]]), torch.tensor([1])
    grads = torch.autograd.grad(cross_entropy(model(x), y), list(model.parameters()))
    update = Update(0, "gradient", dict(zip(dict(model.named_parameters()), grads, strict=True)), 1, None)
    context = ClientContext(dict(model.state_dict()), (), 1, OwnExamples(model, cross_entropy, [(x, y)]))
    found = sent("soteria", {"rate": 0.25}, (update, context)).tensors["2.weight"]
    assert found.any(0).tolist() == [True, False, False, False]  # feature 2 is 3, feature 0 is 1, the others are dead


def test_what_can_t_work_is_refused() -> None:
    update, context = trained()
    bare = ClientContext(context.weights, (), 1)
    for name in ("censor", "soteria"):
        with pytest.raises(BadInput, match="use it in a simulation"):
            sent(name, {}, (update, bare))
        with pytest.raises(BadInput, match="use it in a simulation"):
            make(CLIENT_DEFENCES, name).check_alone((), None)
    with pytest.raises(BadInput, match="has 0, 2"):
        sent("soteria", {"layer": "1"}, (update, context))
    conv = nn.Sequential(nn.Conv2d(1, 1, 3), nn.Flatten())
    own = OwnExamples(conv, cross_entropy, [(torch.ones(1, 1, 4, 4), torch.zeros(1, dtype=torch.int64))])
    with pytest.raises(BadInput, match="this model has none"):
        sent("soteria", {}, (update, ClientContext({}, (), 1, own)))
    tokens = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(12, 2))
    read = OwnExamples(tokens, cross_entropy, [(torch.ones(1, 3, dtype=torch.int64), torch.zeros(1).long())])
    words = Update(0, "gradient", dict(tokens.named_parameters()), 1, None)
    with pytest.raises(BadInput, match="tokens have none"):
        sent("soteria", {}, (words, ClientContext({}, (), 1, read)))
    with pytest.raises(BadInput, match="leave nothing to send"):
        make(CLIENT_DEFENCES, "dgp", {"largest": 0.5, "smallest": 0.5})


# --- what an attacker makes of it ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["squared-l2", "layer-l2"])
def test_a_clipped_update_is_compared_with_a_clipped_dummy(name: str) -> None:
    whole = torch.randn(30, generator=rng(1), dtype=torch.float64)
    clipped = {"w": whole / whole.norm()}
    update = Update(0, "gradient", clipped, 1, None, sanitised=ClientDefenceInfo("gradient-clipping", clip=1.0))
    distance = distance_to(name, update, ["w"], {"w": 3 * clipped["w"]}, {"w": 1.0})  # 3: as a pseudo-gradient's scale
    assert float(distance.value(whole)) < 1e-12  # longer than 3, so clipped to it
    vector = torch.randn(30, generator=rng(2), dtype=torch.float64).requires_grad_()
    value = distance.value(vector)
    torch.testing.assert_close(distance.derivative(vector.detach())[1], torch.autograd.grad(value, vector)[0])
    short = distance_to(name, update, ["w"], {"w": clipped["w"]}, {"w": 1.0})
    plain = DISTANCES[name]([clipped["w"]], [1.0])
    torch.testing.assert_close(short.value(0.1 * whole / 3), plain.value(0.1 * whole / 3))


def test_of_an_orthogonal_update_lengths_and_angles_are_all_that_is_left() -> None:
    update, context = trained()
    seen = sent("censor", {}, (update, context))
    names = list(update.tensors)
    distance = distance_to("cosine", seen, names, seen.tensors, dict.fromkeys(names, 1.0))
    true = torch.cat([update.tensors[n].flatten() for n in names])
    assert float(distance.value(true)) < 1e-8
    assert float(distance.value(2 * true)) == pytest.approx(1, rel=1e-3)  # (2 − 1)² a tensor
    assert float(distance.value(flat(seen.tensors))) == pytest.approx(1, rel=1e-3)  # cos² = 1 a tensor
    other = torch.cat([u.flatten() for u in sent("censor", {}, (update, context), seed=9).tensors.values()])
    assert float(distance.value(other)) < 0.3  # of many others nobody can tell whether they are it
    two = Update(0, "gradient", {"b": torch.tensor([3.0, -4.0])}, 1, None)
    own = OwnExamples(nn.Linear(1, 1), lambda *_: torch.zeros(()), [(torch.ones(1, 1), torch.ones(1))])
    pair = sent("censor", {"trials": 1}, (two, ClientContext({"b": torch.zeros(2)}, (), 1, own))).tensors["b"]
    torch.testing.assert_close(pair.abs(), torch.tensor([4.0, 3.0]))  # two numbers are given away


def recording(
    defence: dict[str, Any], clients: int = 2, model: str = "lenet"
) -> tuple[list[Observation], list[Tensor]]:
    values = {
        "data": {"name": "digits"},
        "model": {"name": model, "initialisation": "uniform"},
        "federations": [{"name": "fed", "clients": clients, "examples": clients, "rounds": 1, "batch_size": 1}],
        "defences": {"client_defence": defence},
    }
    (federation,) = resolve(scenario_from(values)).federations
    made = simulate(federation)
    assert made.truth is not None
    found = observe(made.transcript, ThreatModel(knows_labels=True)).split()
    originals = [
        inputs for seen in found for key, inputs in made.truth.inputs.items() if key[1] == seen.messages[0].client
    ]
    return found, originals


def psnr(seen: Observation, original: Tensor, settings: dict[str, Any], attack: str = "invg") -> float:
    finding = make_attack(attack, settings)(seen, generator=rng())
    assert isinstance(finding, ImageFinding)
    return -10 * math.log10(float((finding.images[0] - original[0]).square().mean()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("defence", "attack", "gain"),
    [
        ({"name": "soteria", "rate": 0.5}, "invg", 3),
        ({"name": "dgp"}, "invg", 3),
        ({"name": "ats", "policies": ["rotate:6, contrast:6"]}, "invg", 3),
        ({"name": "gradient-clipping", "bound": 0.01}, "dlg-adam", 3),
    ],
    ids=lambda one: str(one["name"]) if isinstance(one, dict) else str(one),
)
def test_who_knows_the_defence_recovers_more(defence: dict[str, Any], attack: str, gain: float) -> None:
    gains = []
    for seen, original in zip(*recording(defence), strict=True):
        found = [psnr(seen, original, {"iterations": 100, "aware": aware}, attack) for aware in (True, False)]
        gains.append(found[0] - found[1])
    print(gains)
    assert min(gains) > gain


def test_who_leaves_the_bottleneck_out_recovers_more() -> None:
    (seen,), (original,) = recording({"name": "none"}, 1, "lenet-precode")
    found = [psnr(seen, original, {"iterations": 100, "aware": aware}) for aware in (True, False)]
    assert found[0] > found[1] + 3


def test_clipping_hides_nothing_from_who_compares_directions() -> None:
    settings = {"iterations": 60}
    clear, hidden = recording({"name": "none"}, 1), recording({"name": "gradient-clipping", "bound": 1e-3}, 1)
    found = [psnr(seen[0], original[0], settings) for seen, original in (clear, hidden)]
    assert found[1] == pytest.approx(found[0], abs=0.5)


@pytest.mark.parametrize("name", ["censor", "dgp", "soteria", "outpost", "gradient-noise"])
def test_own_updates_are_defended_likewise(name: str) -> None:
    """So a control that nobody wins is one under the same conditions."""
    (seen,), (original,) = recording({"name": name}, 1)
    known = seen.single().update
    made = own_update(seen, original, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), rng())
    own = made.single().update
    assert own.sanitised == known.sanitised
    for label, tensor in known.tensors.items():
        if name in ("dgp", "soteria"):
            assert ((own.tensors[label] == 0) | (tensor != 0)).all()  # held back in the same places
        elif name == "censor":
            assert own.tensors[label].any()
