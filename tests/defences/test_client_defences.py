"""ClientDefences against slow loops and closed forms; what travels, as bytes; what the server makes of parts."""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kstest
from torch import Tensor, nn

from fedaudit.attacks import ImageFinding, make_attack
from fedaudit.attacks.inversion.objectives import distance_to, smooth_signs
from fedaudit.defences.aggregation import AGGREGATORS
from fedaudit.defences.client_defences import CLIENT_DEFENCES, ClientContext, OwnExamples
from fedaudit.defences.privacy import DifferentialPrivacy
from fedaudit.epsilon.accounting import Account
from fedaudit.pipeline.run import run_audit
from fedaudit.scenario.scenario import Scenario
from fedaudit.simulation.encoding import decode, encode
from fedaudit.simulation.server import Server
from fedaudit.task.training import TrainingConfig
from fedaudit.transcript.observation import observe
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.transcript import Transcript
from fedaudit.transcript.update import ClientDefenceInfo, Update
from fedaudit.utils.errors import BadInput, CorruptTranscript
from fedaudit.utils.registry import make
from tests.build import Scenarios, with_history
from tests.models.model_cases import generator as rng

SHAPES = {"a.weight": (4, 3), "a.bias": (4,), "b.weight": (5, 4), "c.weight": (2, 5), "c.bias": (2,)}
LAYERS = (("a.weight", "a.bias"), ("b.weight",), ("c.weight", "c.bias"))


def tensors(seed: int, scale: float = 1.0) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(shape, generator=rng) for name, shape in SHAPES.items()}


def update(seed: int, kind: Any = "weights", client: int = 0, **rest: Any) -> Update:
    training = TrainingConfig(learning_rate=0.1, local_steps=1, batch_sizes=(4,))
    return Update(client, kind, tensors(seed), 4, training, **rest)


def context(weights: dict[str, Tensor] | None = None, clients: int = 4) -> ClientContext:
    parts = {"a": nn.Linear(3, 4), "b": nn.Linear(4, 5, bias=False), "c": nn.Linear(5, 2)}
    batch = torch.ones(3, 3), torch.zeros(3, dtype=torch.int64)
    own = OwnExamples(nn.Sequential(OrderedDict(parts)), nn.functional.cross_entropy, [batch])
    return ClientContext(weights or tensors(100), LAYERS, clients, own)


def flat(values: dict[str, Tensor]) -> list[float]:
    return [x for tensor in values.values() for x in tensor.flatten().tolist()]


# --- what each sends -----------------------------------------------------------------------------------------------


def test_top_k_sends_the_largest_and_keeps_the_rest():
    client_defence = make(CLIENT_DEFENCES, "top-k", {"ratio": 0.25})
    kept = [0.0] * 48
    for index in range(3):
        original = update(index)
        found = flat(client_defence(original, context(), rng()).tensors)
        whole = [a + b for a, b in zip(flat(original.tensors), kept, strict=True)]
        largest = sorted(range(48), key=lambda i: -abs(whole[i]))[:12]  # ⌈0.25 · 48⌉
        expected = [x if i in largest else 0.0 for i, x in enumerate(whole)]
        assert found == pytest.approx(expected, abs=1e-6)
        kept = [0.0 if i in largest else x for i, x in enumerate(whole)]


@given(seed=st.integers(0, 100), ratio=st.floats(0.01, 1))
def test_without_memory_top_k_forgets(seed, ratio):
    client_defence = make(CLIENT_DEFENCES, "top-k", {"ratio": ratio, "memory": False})
    one, two = (flat(client_defence(update(seed), context(), rng()).tensors) for _ in range(2))
    assert one == two
    assert sum(x != 0 for x in one) == math.ceil(round(ratio * 48, 6))


def test_signs_keep_the_mean_magnitude():
    original = update(1)
    found = make(CLIENT_DEFENCES, "sign")(original, context(), rng())
    for name, tensor in found.tensors.items():
        assert tensor.sign().equal(original.tensors[name].sign())
        torch.testing.assert_close(tensor.abs(), original.tensors[name].abs().mean().expand_as(tensor))
    plain = make(CLIENT_DEFENCES, "sign", {"scale": "one"})(original, context(), rng())
    assert set(flat(plain.tensors)) == {1.0, -1.0}
    assert found.sanitised == ClientDefenceInfo("sign", signs=True)


def test_dgc_is_algorithm_4():
    settings = {"ratio": 0.3, "momentum": 0.5, "clip": 2.0, "warmup": 2}
    client_defence = make(CLIENT_DEFENCES, "dgc", settings)
    u, v = ({name: [0.0] * math.prod(shape) for name, shape in SHAPES.items()} for _ in range(2))
    for index in range(4):
        original = update(index)
        length = math.hypot(*flat(original.tensors))
        scale = min(1.0, (2.0 / math.sqrt(4)) / length)  # four clients
        ratio = 0.3 ** (min(index + 1, 3) / 3)
        found = client_defence(original, context(), rng())
        for name in SHAPES:
            g = original.tensors[name].flatten().tolist()
            u[name] = [0.5 * a + scale * b for a, b in zip(u[name], g, strict=True)]
            v[name] = [a + b for a, b in zip(v[name], u[name], strict=True)]
            most = sorted(range(len(g)), key=lambda i, n=name: -abs(v[n][i]))  # type: ignore[misc]
            sent = most[: math.ceil(ratio * len(g))]
            expected = [x if i in sent else 0.0 for i, x in enumerate(v[name])]
            assert found.tensors[name].flatten().tolist() == pytest.approx(expected, abs=1e-5)
            for i in sent:
                u[name][i] = v[name][i] = 0.0


@pytest.mark.parametrize("name", sorted(CLIENT_DEFENCES.names()))
def test_the_client_s_own_update_is_not_changed(name):
    original, before = update(1), tensors(1)
    client_defence = make(CLIENT_DEFENCES, name)
    for _ in range(2):
        client_defence(original, context(), rng())
    assert all(original.tensors[n].equal(before[n]) for n in before)


# --- differential privacy ------------------------------------------------------------------------------------------


def test_an_update_is_clipped_and_gets_noise_of_the_stated_size():
    original = Update(0, "weights", {"w": torch.full((400, 500), 0.1)}, 4, None, buffers={"m": torch.ones(1)})
    settings = {"clip": 2.0, "noise": 0.5, "epsilon": None}
    found = make(CLIENT_DEFENCES, "dp", settings)(original, context(), rng())
    noise = found.tensors["w"] - original.tensors["w"] * 2 / (0.1 * math.sqrt(200_000))
    assert float(noise.std()) == pytest.approx(1.0, rel=0.01)
    assert abs(float(noise.mean())) < 0.01
    assert found.sanitised == ClientDefenceInfo("dp", noise=1.0, clip=2.0)
    assert found.buffers == {}
    central = make(CLIENT_DEFENCES, "dp", {**settings, "where": "central"})(original, context(), rng())
    assert float(central.tensors["w"].double().norm()) == pytest.approx(2.0)
    small = make(CLIENT_DEFENCES, "dp", {**settings, "clip": 1e3, "where": "central"})(original, context(), rng())
    assert small.tensors["w"].equal(original.tensors["w"])


def test_without_a_generator_the_noise_is_the_system_s():
    original = Update(0, "weights", {"w": torch.zeros(200, 500)}, 4, None)
    one, other = (DifferentialPrivacy(clip=2.0, noise=0.5)(original, context(), None).tensors["w"] for _ in range(2))
    assert not one.equal(other)
    assert one.dtype == torch.float32
    assert kstest(one.flatten(), "norm").pvalue > 1e-6


def test_every_example_is_clipped_at_the_sample_s_level():
    model = nn.Linear(3, 2)
    inputs, targets = torch.randn(5, 3, generator=rng()), torch.tensor([0, 1, 0, 1, 1])
    each = []
    for x, y in zip(inputs, targets, strict=True):
        value = nn.functional.cross_entropy(model(x[None]), y[None])
        each.append(torch.cat([g.flatten() for g in torch.autograd.grad(value, list(model.parameters()))]))
    clip = sorted(float(g.norm()) for g in each)[2]  # two of the five are shorter, and stay as they are
    dp = DifferentialPrivacy(clip=clip, noise=1.0, level="sample", where="central")
    found = dp.gradients(model, nn.functional.cross_entropy, (inputs, targets), rng())
    total = torch.stack([g * min(1.0, clip / float(g.norm())) for g in each]).sum(dim=0)
    torch.testing.assert_close(torch.cat([g.flatten() for g in found]), total / 5)


# --- what travels --------------------------------------------------------------------------------------------------


@given(data=st.data(), seed=st.integers(0, 1000))
def test_bytes_give_back_every_bit(data, seed):
    whole = tensors(seed)
    whole["count"] = torch.tensor([2**40])
    keep = data.draw(st.sets(st.sampled_from(sorted(whole)), min_size=1))
    form = data.draw(st.sampled_from(["dense", "sparse", "very sparse", "signs", "zero"]))
    sent = {name: whole[name] for name in whole if name in keep}
    if form != "dense":
        for name in [n for n in sent if n != "count"]:
            x = sent[name]
            share = {"sparse": 0.5, "very sparse": 0.05, "zero": 0.0}.get(form, 0)
            sent[name] = torch.where(torch.rand(x.shape) < share, x, 0.0) if form != "signs" else 0.3 * x.sign()
    message = encode(sent, list(whole))
    found = decode(message, whole)
    assert list(found) == list(sent)
    assert all(found[n].equal(sent[n]) and found[n].dtype == sent[n].dtype for n in sent)
    with pytest.raises(CorruptTranscript):
        decode(message[:-1], whole)


def test_bytes_are_few_where_little_is_sent():
    like = {"w": torch.zeros(10_000)}
    dense = torch.randn(10_000, generator=rng())
    sizes = {
        "dense": len(encode({"w": dense}, ["w"])),
        "tenth": len(encode({"w": torch.where(torch.arange(10_000) % 10 == 0, dense, 0.0)}, ["w"])),
        "hundredth": len(encode({"w": torch.where(torch.arange(10_000) % 100 == 0, dense, 0.0)}, ["w"])),
        "signs": len(encode({"w": dense.sign()}, ["w"])),
    }
    assert sizes == {
        "dense": 40_000 + 3,
        "tenth": 1250 + 4000 + 3,  # a bitmap and values
        "hundredth": 4 + 800 + 3,  # positions and values
        "signs": 4 + 1250 + 3,
    }
    assert decode(encode({"w": -torch.zeros(10_000)}, ["w"]), like)["w"].signbit().all()


def test_layers_are_averaged_over_those_who_sent_them():
    weights = tensors(7)
    whole, part, other = update(1, client=0), update(2, client=1), update(3, client=2)
    part.tensors.pop("b.weight")
    for name in ("a.weight", "a.bias", "c.weight", "c.bias"):
        other.tensors.pop(name)
    state, _ = Server(make(AGGREGATORS, "mean"), 1.0).apply(weights, [whole, part, other])
    for name in SHAPES:
        senders = [u for u in (whole, part, other) if name in u.tensors]
        expected = weights[name] + torch.stack([u.tensors[name] for u in senders]).mean(dim=0)
        torch.testing.assert_close(state[name], expected)


def test_layers_that_too_few_sent_stay_as_they_are():
    weights = tensors(7)
    updates = [update(i, client=i) for i in range(5)]
    updates[0].tensors.pop("b.weight")
    state, said = Server(make(AGGREGATORS, "krum"), 1.0).apply(weights, updates)
    assert state["b.weight"].equal(weights["b.weight"])
    assert not state["a.weight"].equal(weights["a.weight"])
    assert said.fallback is not None
    assert "stayed as they were" in said.fallback


# --- in the simulator, on disk, in an audit ------------------------------------------------------------------------


_THREE = Scenarios(
    model={"name": "lenet", "initialisation": "uniform"},
    federation={"name": "fed", "clients": 3, "examples": 30, "rounds": 2, "batch_size": 4, "learning_rate": 0.05},
    threat={"knows_labels": True},
    attacks=[{"name": "invg", "iterations": 3}],
    evaluation={"accuracy_every": 1},
)


def scenario(client_defence: Any, federation: dict[str, Any] | None = None, **rest: Any) -> Scenario:
    return _THREE(federation, **{"defences": {"client_defence": client_defence}, **rest})


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CLIENT_DEFENCES.names()))
def test_a_federation_with_every_client_defence_can_be_saved_and_attacked(name, tmp_path):
    made = scenario({"name": name, "exclude_vars": "bias"} if name == "exclude-vars" else name)
    transcript, history = with_history(made)
    transcript.save(tmp_path / "there")
    loaded = Transcript.load(tmp_path / "there")
    assert loaded.fingerprint() == transcript.fingerprint()
    sanitised = [u.sanitised for r in loaded.rounds for u in r.updates]
    assert sanitised == [u.sanitised for r in transcript.rounds for u in r.updates]
    assert [history.rounds, len(history.bytes), len(history.accuracy)] == [[1, 2], 6, 2]
    assert 0 < max(history.bytes) <= 4 * 1.1 * sum(p.numel() for p in transcript.module.parameters())
    seen = observe(loaded, ThreatModel(knows_labels=True)).split()[-1]
    for aware in (True, False):
        attack = make_attack("invg", {"iterations": 3, "aware": aware})
        finding = attack(seen, generator=rng())
        assert isinstance(finding, ImageFinding)
        assert torch.isfinite(finding.images).all()


@pytest.mark.parametrize(
    ("client_defence", "numbers"),
    [("none", 1.0), ({"name": "top-k", "ratio": 0.1}, 0.1), ({"name": "dgc", "ratio": 0.1, "warmup": 0}, 0.1)],
)
def test_parameters_sent_are_counted(client_defence, numbers):
    transcript, history = with_history(scenario(client_defence))
    whole = sum(p.numel() for p in transcript.module.parameters())
    assert history.parameters == pytest.approx([numbers * whole] * 6, rel=0.02)


def test_a_budget_ends_the_federation():
    settings = {"name": "dp", "noise": 2.0, "epsilon": 4.0}
    made = scenario(settings, {"rounds": 9})
    _, history = with_history(made)
    allowed = Account(2.0, 1e-5, 1.0, 1).rounds(4.0)
    assert 1 <= allowed < 9
    assert history.stopped == allowed == len(history.epsilon)
    assert history.epsilon[-1] <= 4.0
    assert history.epsilon_pld is not None
    assert history.epsilon_pld <= history.epsilon[-1]


@pytest.mark.parametrize(
    ("level", "share"), [("client", 3), ("sample", 3 * 2)]
)  # of three clients, of batches of 4, 4 and 2
def test_central_noise_is_the_server_s(level, share):
    settings = {"name": "dp", "where": "central", "level": level, "noise": 3.0, "clip": 0.5, "epsilon": None}
    transcript, _ = with_history(scenario(settings))
    now, after = transcript.rounds
    moved, mean = [], []
    for name in now.updates[0].tensors:
        moved.append((after.weights[name] - now.weights[name]).flatten() / -0.05)
        mean.append(torch.stack([u.tensors[name] for u in now.updates]).mean(dim=0).flatten())
    noise = torch.cat(moved) - torch.cat(mean)
    assert float(noise.std()) == pytest.approx(3.0 * 0.5 / share, rel=0.05)
    for update in now.updates:
        known = update.sanitised
        assert known is not None
        assert (known.name, known.noise) == ("dp", 0.0)
        assert known.clip is not None
        assert math.hypot(*flat(update.tensors)) <= known.clip * (1 + 1e-4)


@pytest.mark.parametrize(
    ("federation", "size"),
    [({}, 3.0 * 0.5 / 4), ({"algorithm": "fedavg", "local_steps": 1, "learning_rate": 0.2}, 0.2 * 3.0 * 0.5 / 4)],
    ids=["fedsgd", "fedavg"],
)
def test_local_noise_at_the_sample_s_level_is_sigma_times_clip_over_the_batch(federation, size):
    settings = {"name": "dp", "level": "sample", "clip": 0.5, "epsilon": None}
    loud, quiet = (with_history(scenario({**settings, "noise": noise}, federation))[0] for noise in (3.0, 0.02))
    for noisy, clipped in zip(loud.rounds[0].updates, quiet.rounds[0].updates, strict=True):
        noise = torch.cat([(noisy.tensors[n] - clipped.tensors[n]).flatten() for n in noisy.tensors])
        assert float(noise.std()) == pytest.approx(size, rel=0.05)
        assert noisy.sanitised is not None
        assert noisy.sanitised.noise == pytest.approx(size)


def test_the_noise_of_several_steps_is_known_as_that_of_their_sum():
    settings = {"name": "dp", "level": "sample", "noise": 0.1, "clip": 0.5, "epsilon": None}
    transcript, _ = with_history(
        scenario(settings, {"algorithm": "fedavg", "local_steps": 3})
    )  # of 4, 4 and 2 examples
    size = 0.05 * 0.1 * 0.5 * math.sqrt(1 / 4**2 + 1 / 4**2 + 1 / 2**2)
    known = [u.sanitised.noise for u in transcript.rounds[0].updates if u.sanitised]
    assert known == pytest.approx([size] * 3)


@pytest.mark.parametrize(
    ("client_defence", "rest", "words"),
    [
        ({"name": "top-k", "ratio": 0}, {}, "greater than 0"),
        ({"name": "ffl", "ratio": 1.5}, {}, "less than or equal to 1"),
        ({"name": "ffl", "rato": 1}, {}, "unknown key 'rato'; did you mean 'ratio'"),
        ({"name": "dp", "delta": 1}, {}, "less than 1"),
        ({"name": "dp", "noise": 0.01}, {}, "no recorded round is reached: after 0 rounds the privacy budget"),
        ({"name": "dp", "where": "central"}, {"aggregator": "median"}, "made for the aggregator 'mean'"),
    ],
)
def test_wrong_settings_are_refused(client_defence, rest, words):
    with pytest.raises(BadInput, match=words):
        with_history(scenario(client_defence, defences={"client_defence": client_defence, **rest}))


def test_sample_level_needs_batch_norm_in_eval_mode():
    made = scenario(
        {"name": "dp", "level": "sample"},
        model={"name": "convnet-small", "width": 4, "batch_norm": "train"},
        data={"name": "digits", "image_size": 16},
    )
    with pytest.raises(BadInput, match="BatchNorm mixes"):
        with_history(made)


def test_recorded_rounds_are_those_that_were_asked_for():
    transcript, _ = with_history(scenario("none", {"rounds": 3, "keep_rounds": [0, 2]}))
    assert [r.index for r in transcript.rounds] == [0, 2]
    with pytest.raises(BadInput, match="keep_rounds names round 3"):
        scenario("none", {"rounds": 3, "keep_rounds": [3]})


# --- what an adversary makes of it ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "counts"), [("unknown", 0.0), ("dgc", 0.3), ("mine", 0.5), ("top-k", 1.0)])
def test_a_number_that_was_not_sent_counts_as_the_defence_makes_it_likely(name, counts, monkeypatch):
    another = type("Another", (CLIENT_DEFENCES["top-k"].value,), {"unsent": 0.5})  # as of another package
    monkeypatch.setitem(CLIENT_DEFENCES._entries, "mine", dataclasses.replace(CLIENT_DEFENCES["top-k"], value=another))
    sparse = update(1, "gradient", sanitised=ClientDefenceInfo(name, sparse=True))
    names = list(sparse.tensors)
    target = {n: torch.where(t.abs() > 1, t, 0.0) for n, t in sparse.tensors.items()}
    distance = distance_to("squared-l2", sparse, names, target, dict.fromkeys(names, 1.0))
    flat = torch.cat([sparse.tensors[n].flatten() for n in names])
    unsent = flat[flat.abs() <= 1]
    assert float(distance.value(flat)) == pytest.approx(counts * float(unsent.square().sum()), rel=1e-5, abs=1e-6)
    naive = distance_to("squared-l2", update(1, "gradient"), names, target, dict.fromkeys(names, 1.0))
    assert float(naive.value(flat)) == pytest.approx(float(unsent.square().sum()), rel=1e-5)


def test_a_tensor_of_noise_weighs_nothing():
    values = {"w": 5 + torch.randn(1000, generator=rng()), "v": torch.randn(1000, generator=rng(1))}
    noisy = Update(0, "gradient", values, 4, None, sanitised=ClientDefenceInfo("dp", noise=1.05))
    distance = distance_to("squared-l2", noisy, ["w", "v"], values, {"w": 1.0, "v": 1.0})
    off = torch.cat([values["w"], values["v"] + 100])
    assert float(distance.value(off)) == 0
    assert float(distance.value(torch.cat([values["w"] + 1, values["v"]]))) == pytest.approx(1000 * 0.96, rel=0.03)


@given(seed=st.integers(0, 100))
def test_smooth_signs_derivative(seed):
    target = [0.3 * torch.randn(20, generator=rng(seed)).sign()]
    distance = smooth_signs(target)
    vector = torch.randn(20, generator=rng(seed + 1)).requires_grad_()
    value = distance.value(vector)
    (expected,) = torch.autograd.grad(value, vector)
    found, derivative = distance.derivative(vector.detach())
    torch.testing.assert_close(found, value.detach())
    torch.testing.assert_close(derivative, expected)
    assert float(distance.value(1e3 * target[0])) == pytest.approx(0, abs=1e-5)


@pytest.mark.slow
def test_an_audit_with_fragmented_updates_runs():
    result = run_audit(scenario({"name": "ffl", "ratio": 0.4})).result
    assert all(f.status == "done" for f in result.findings)
