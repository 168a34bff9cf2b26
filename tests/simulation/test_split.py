"""Split learning: what travels, who sees what, what attacks find, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.special
import torch
from torch import Tensor, nn

from fedaudit.attacks import ExampleLabelFinding, make_attack
from fedaudit.attacks.active.fsha import HijackServer, decoder, discriminator, gradient_penalty
from fedaudit.attacks.vertical.completion import mixmatch, trained_party
from fedaudit.attacks.vertical.unsplit import Descent
from fedaudit.evaluation import evaluate
from fedaudit.models import VerticalModel, build_model, build_split
from fedaudit.pipeline.prepare import resolve
from fedaudit.pipeline.run import record
from fedaudit.scenario.scenario import Scenario, scenario_from
from fedaudit.simulation.protocols import protocol_of
from fedaudit.simulation.protocols.base import EasyCase
from fedaudit.simulation.server_behaviour import SplitStep
from fedaudit.simulation.simulator import Recording
from fedaudit.simulation.spec import FederationSpec
from fedaudit.transcript.observation import Observation, observe
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.transcript import Transcript
from fedaudit.transcript.truth import FILE, Truth, check_belongs, save_recording
from fedaudit.transcript.vertical import VerticalRecord
from fedaudit.utils.errors import BadInput, NotApplicable
from tests.build import Scenarios

HIJACKED: dict[str, Any] = {
    "threat": {"adversary": "malicious-server", "knows_public_data": True, "public_examples": 40},
    "attacks": ["fsha"],
}


_SPLIT = Scenarios(
    model={"name": "cafe-cnn", "width": 4},
    federation={"algorithm": "split", "rounds": 6, "examples": 8, "batch_size": 4, "learning_rate": 0.1},
    attacks="unsplit",
)


def scenario(cut: int | str | None = "relu1", **parts: Any) -> Scenario:
    vertical = {"cut": cut, **parts.pop("vertical", {})}
    return _SPLIT({"vertical": vertical, **parts.pop("federation", {})}, **parts)


def played(cut: int | str = "relu1", **parts: Any) -> tuple[Recording, Observation]:
    made = scenario(cut, **parts)
    (recording,) = record(resolve(made))
    return recording, observe(recording.transcript, made.threat)


def sent_in(recording: Recording) -> VerticalRecord:
    assert isinstance(recording.transcript.sent, VerticalRecord)
    return recording.transcript.sent


def batch(recording: Recording, index: int) -> tuple[Tensor, Tensor]:
    rows, truth = sent_in(recording).batches[index].tolist(), recording.truth
    inputs = recording.transcript.task_info.normalise(torch.cat([truth.inputs[i, 0] for i in rows]))
    return inputs, torch.cat([truth.labels[i, 0] for i in rows])


def client_of(recording: Recording) -> nn.Module:
    module = recording.transcript.module
    assert isinstance(module, VerticalModel)
    module.load_state_dict(sent_in(recording).weights)
    return module.parties[0]


# --- what travels ---------------------------------------------------------------------------------------------------


def test_both_parts_are_the_whole_network() -> None:
    shape = {"input_shape": (1, 8, 8), "outputs": 10, "width": 4}
    for cut in ("pool1", 3):
        split, whole = build_split("cafe-cnn", cut=cut, **shape), build_model("cafe-cnn", **shape)  # type: ignore[arg-type]
        inputs = torch.rand(2, 1, 8, 8)
        assert split(inputs).equal(whole(inputs))
        assert [name for name, _ in split.parties[0].named_children()] == ["conv1", "relu1", "pool1"]


def test_what_travels_is_autograds_of_the_whole_network() -> None:
    recording, _ = played("pool2")
    sent = sent_in(recording)
    inputs, labels = batch(recording, 0)
    info = recording.transcript.task_info
    whole = build_model("cafe-cnn", input_shape=info.input_shape, outputs=10, width=4)
    whole.load_state_dict({n.removeprefix("parties.0.").removeprefix("server."): t for n, t in sent.weights.items()})
    between: list[Tensor] = []
    whole.get_submodule("pool2").register_forward_hook(lambda _, __, out: between.append(out))
    loss = nn.functional.cross_entropy(whole(inputs), labels)
    torch.testing.assert_close(sent.embeddings[0, 0], between[0].detach())
    torch.testing.assert_close(sent.gradients[0, 0], torch.autograd.grad(loss, between[0], retain_graph=True)[0])
    gradients = torch.autograd.grad(loss, list(whole.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(whole.parameters(), gradients, strict=True):
            parameter.sub_(0.1 * gradient)
    between.clear()
    whole(batch(recording, 1)[0])
    torch.testing.assert_close(sent.embeddings[1, 0], between[0].detach(), rtol=1e-4, atol=1e-5)


def test_each_side_sees_its_own_part() -> None:
    recording, _ = played(vertical={"known_labels": 1})
    seen = {a: sent_in(recording).seen_by(a) for a in ("server", "malicious-server", "eavesdropper", "client")}
    assert {name.split(".")[0] for name in seen["server"].weights} == {"server"}
    assert {name.split(".")[0] for name in seen["client"].weights} == {"parties"}
    assert not seen["eavesdropper"].weights
    assert [one.labels is None for one in seen.values()] == [False, False, True, True]
    assert [bool(one.held.numel()) for one in seen.values()] == [False, False, False, True]
    known, labels = seen["client"].known, sent_in(recording).labels
    assert known is not None
    assert labels is not None
    told = torch.nonzero(known >= 0)[:, 0]
    assert labels[told].unique(return_counts=True)[1].tolist() == [1] * len(labels.unique())
    assert known[told].equal(labels[told])


@pytest.mark.parametrize("hijacked", [False, True])
def test_it_survives_the_disk(hijacked: bool, tmp_path: Path) -> None:
    own: dict[str, Any] = {**HIJACKED, "federation": {"server": "fsha"}} if hijacked else {}
    recording, _ = played(vertical={"known_labels": 1}, **own)
    save_recording(recording.transcript, recording.truth, tmp_path / "f")
    read = Transcript.load(tmp_path / "f")
    assert read.digest() == recording.transcript.digest()
    check_belongs(Truth.load(tmp_path / "f" / FILE), read, tmp_path)
    assert bool(read.adversary_log) == hijacked


# --- what attacks find ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_unsplit_with_the_clients_weights_solves_its_equations() -> None:
    recording, observation = played(
        "hidden", model={"name": "mlp", "width": 80}, federation={"batch_size": 8, "rounds": 1}
    )
    info = observation.task_info
    client = client_of(recording)
    target = sent_in(recording).last_embeddings()
    layer = client.get_submodule("hidden")
    assert isinstance(layer, nn.Linear)
    solved = torch.linalg.lstsq(layer.weight.detach().double(), (target - layer.bias.detach()).T.double()).solution.T
    pixels = info.denormalise(solved.float().view(-1, *info.input_shape))
    descent = Descent(iterations=600, input_steps=5, model_steps=0, learning_rate=0.02, tv_weight=0.0)
    images, value = descent(client, target, info, lambda *_: None)
    assert value < 1e-5
    torch.testing.assert_close(images, pixels.clamp(0, 1), atol=0.02, rtol=0)
    true = torch.cat([recording.truth.inputs[i, 0] for i in range(8)])
    assert float((images - true).square().mean()) < 1e-3  # of grey images: 0.2


def test_the_gradient_of_a_hijacking_server_is_the_critics() -> None:
    public = torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    _, observation = played()
    network = build_split("cafe-cnn", cut="relu1", input_shape=(1, 8, 8), outputs=10, width=3).parties[0]
    embeddings = network(public[:4]).detach()
    draws = torch.Generator().manual_seed(0)
    step = SplitStep(0, embeddings, torch.zeros(1), network, observation.task_info, draws, public)
    server = HijackServer(strength=3.0, batch_size=4)
    down = server.answer(step)
    critic = copy.deepcopy(server.critic)
    assert critic is not None
    eps, probe = 1e-6, torch.zeros_like(embeddings, dtype=torch.float64)
    probe[1, 2, 4, 5] = eps
    with torch.no_grad():
        critic.double()
        slope = (critic((embeddings + probe).double()).mean() - critic((embeddings - probe).double()).mean()) / (
            2 * eps
        )
    assert float(down[1, 2, 4, 5]) == pytest.approx(3.0 * float(slope), rel=1e-3, abs=1e-7)


def test_the_client_follows_the_hijacking_gradient() -> None:
    recording, _ = played(federation={"server": "fsha", "rounds": 2, "batch_size": 8}, **HIJACKED)
    sent, client = sent_in(recording), client_of(recording)
    inputs, _ = batch(recording, 0)
    steps = torch.autograd.grad((client(inputs) * sent.gradients[0, 0]).sum(), list(client.parameters()))
    with torch.no_grad():
        for parameter, step in zip(client.parameters(), steps, strict=True):
            parameter.sub_(0.1 * step)
    torch.testing.assert_close(sent.embeddings[1, 0], client(batch(recording, 1)[0]).detach(), rtol=1e-4, atol=1e-5)


def test_the_gradient_penalty_of_a_linear_critic_is_known() -> None:
    critic = nn.Sequential(nn.Flatten(), nn.Linear(12, 1))
    own, sent = torch.rand(5, 3, 2, 2), torch.rand(5, 3, 2, 2)
    expected = (next(critic[1].parameters()).norm() - 1) ** 2
    torch.testing.assert_close(gradient_penalty(critic, own, sent, torch.rand(5)), expected.detach())


@pytest.mark.parametrize("shape", [(6, 4, 4), (3, 8, 8), (20,), (16, 9, 7)])
def test_networks_of_the_server_take_what_travels(shape: tuple[int, ...]) -> None:
    sent = torch.rand(2, *shape)
    assert decoder(shape, (1, 9, 7))(sent).shape == (2, 1, 9, 7)
    assert discriminator(shape)(sent).shape == (2, 1)


PARTIES = {"algorithm": "vertical", "clients": 2, "vertical": {"known_labels": 1, "observer": 1, "top": "mlp"}}


@pytest.mark.parametrize("federation", [{}, PARTIES])
def test_a_party_repeats_its_own_training(federation: dict[str, Any]) -> None:
    _, observation = played(vertical={"known_labels": 1}, threat={"adversary": "client"}, attacks=["model-completion"])
    module, sent = observation.module, observation.vertical
    assert isinstance(module, VerticalModel)
    assert sent is not None
    assert sent.party is not None
    own = module.parties[sent.party]
    party = trained_party(own, sent)
    short = copy.copy(sent)
    for index in (1, 5):
        object.__setattr__(short, "batches", sent.batches[:index])
        object.__setattr__(short, "gradients", sent.gradients[:index])
        at = trained_party(own, short)
        again = at(sent.held[sent.batches[index]]).detach()
        torch.testing.assert_close(again, sent.embeddings[index, 0], rtol=1e-5, atol=1e-6)
    assert not party(sent.held).allclose(at(sent.held))


def test_mixmatch_is_its_formula() -> None:
    model = nn.Linear(3, 4)
    own, others, labels = torch.rand(2, 3), torch.rand(3, 3), torch.eye(4)[[1, 3]]
    order, share, weight = torch.tensor([4, 0, 1, 2, 3]), 0.7, 5.0
    found = mixmatch(model, own, labels, others, temperature=0.5, weight=weight, share=share, order=order)

    def softmax(rows: np.ndarray) -> np.ndarray:
        return np.asarray(scipy.special.softmax(rows @ w.T + b, axis=1))

    w, b = (p.detach().double().numpy() for p in model.parameters())
    x = np.concatenate([own.numpy(), others.numpy()]).astype(float)
    guessed = softmax(x[2:]) ** 2
    y = np.concatenate([labels.numpy(), guessed / guessed.sum(axis=1, keepdims=True)])
    mixed_x, mixed_y = share * x + (1 - share) * x[order], share * y + (1 - share) * y[order]
    p = softmax(mixed_x)
    expected = -np.mean(np.sum(mixed_y[:2] * np.log(p[:2]), axis=1)) + weight * np.mean((p[2:] - mixed_y[2:]) ** 2)
    assert found.item() == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.slow
def test_a_hijacked_client_is_read() -> None:
    recording, observation = played(
        "pool1",
        model={"name": "cafe-cnn", "width": 8},
        data={"name": "digits", "split": "train"},
        federation={"server": {"name": "fsha", "steps": 1}, "examples": 32, "batch_size": 32, "rounds": 300},
        **{**HIJACKED, "threat": {**HIJACKED["threat"], "public_examples": 200}},
    )
    found = make_attack("fsha")(observation)
    true = torch.cat([recording.truth.inputs[i, 0] for i in sent_in(recording).used.tolist()])
    usual = float((true - true.mean(dim=0)).square().mean())
    assert float((found.images - true).square().mean()) < 0.6 * usual  # type: ignore[attr-defined]


@pytest.mark.slow
def test_model_completion_tells_labels_from_few() -> None:
    recording, observation = played(
        "fc1",
        data={"name": "digits", "split": "train"},
        model={"name": "cafe-cnn", "width": 8},
        vertical={"known_labels": 4},
        federation={"examples": 300, "batch_size": 50, "rounds": 120},
        threat={"adversary": "client"},
        attacks=["model-completion"],
    )
    found = make_attack("model-completion", {"iterations": 150})(observation)
    assert isinstance(found, ExampleLabelFinding)
    true = torch.tensor([int(recording.truth.labels[i, 0]) for i in found.examples.tolist()])
    assert observation.vertical is not None
    assert observation.vertical.known is not None
    assert int((observation.vertical.known[found.examples] >= 0).sum()) == 0
    assert float((found.labels == true).float().mean()) > 0.6


def test_what_known_labels_tell_without_training_is_told_beside() -> None:
    _, observation = played(
        vertical={"known_labels": 1}, federation={"examples": 16}, threat={"adversary": "client"},
        attacks=["model-completion"],
    )  # fmt: skip
    assert observation.vertical is not None
    moved = dataclasses.replace(observation.vertical, gradients=-30 * observation.vertical.gradients)
    attack = make_attack("model-completion", {"iterations": 20})
    one, other = (attack(dataclasses.replace(observation, sent=v)) for v in (observation.vertical, moved))
    assert isinstance(one, ExampleLabelFinding)
    assert isinstance(other, ExampleLabelFinding)
    assert one.without is not None
    assert other.without is not None
    assert one.without.equal(other.without)  # nothing that came down is in it
    assert not one.labels.equal(other.labels)
    assert one.again is not None
    assert one.again.shape == (2, 2, len(one.labels))
    assert not one.again[0, 1].equal(one.without), "other draws"


@pytest.mark.parametrize(("right", "leak"), [
    (((150, 100), (104, 102), (98, 101)), False),  # one lucky run, which McNemar's test alone would take for a leak
    (((150, 100), (148, 104), (155, 101)), True),
])  # fmt: skip
def test_runs_are_judged_by_how_far_they_are_apart(right: tuple[tuple[int, int], ...], leak: bool) -> None:
    true = torch.arange(200) % 10
    told = torch.stack([torch.stack([torch.where(torch.arange(200) < k, true, true + 1) for k in of]) for of in right])
    found = ExampleLabelFinding(
        attack="a", examples=torch.arange(200), labels=told[0, 0], num_classes=10, without=told[0, 1], again=told[1:]
    )
    _, observation = played()
    truth = Truth({}, {(i, 0): true[i : i + 1] for i in range(200)}, torch.zeros(1, 1), torch.zeros(1).long(), {})
    result = evaluate(found, observation, truth, seed=0).result
    alone = dataclasses.replace(found, again=None)
    assert evaluate(alone, observation, truth, seed=0).result.is_leak
    assert result.is_leak is leak
    with_, without = (np.array(shares) / 200 for shares in zip(*right, strict=True))
    spread = ((with_.var(ddof=1) + without.var(ddof=1)) / 3) ** 0.5
    expected = scipy.special.stdtr(4, -(with_.mean() - without.mean()) / spread)  # Student's, of 4 degrees of freedom
    assert result.p_value == pytest.approx(expected)


def easy_case(recording: Recording, spec: FederationSpec | None = None, *, images: bool = False) -> EasyCase:
    case = protocol_of(recording.transcript).easy_case(recording, spec, images)
    assert isinstance(case, EasyCase)
    return case


def test_controls_are_played_with_known_examples() -> None:
    made = scenario(federation={"server": "fsha", "rounds": 2}, **HIJACKED)
    (recording,) = record(resolve(made))
    case = easy_case(recording, made.federations[0])
    assert case.recording.transcript.adversary_log
    make_attack("fsha").check(observe(case.recording.transcript, made.threat))
    plain, _ = played()
    still = sent_in(easy_case(plain, images=True).recording)
    assert still.batches.shape[1] == 2


# --- what is refused ------------------------------------------------------------------------------------------------


REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    ("unsplit", "client", {}),
    ("fsha", "server", {}),
    ("model-completion", "server", {"vertical": {"known_labels": 1}}),
    ("model-completion", "client", {}),
    ("cafe", "server", {}),
    ("direct-labels", "client", {}),
]


@pytest.mark.parametrize(("name", "adversary", "parts"), REFUSED)
def test_an_attack_says_what_it_lacks(name: str, adversary: str, parts: dict[str, Any]) -> None:
    recording, _ = played(**parts)
    seen = observe(recording.transcript, ThreatModel.model_validate({"adversary": adversary}))
    with pytest.raises(NotApplicable, match=name) as refused:
        make_attack(name).check(seen)
    assert "\n" not in str(refused.value)


WRONG: list[tuple[int | str | None, dict[str, Any], str]] = [
    (None, {}, "needs vertical.cut"),
    ("conv9", {}, "must be one of conv1, relu1"),
    (12, {}, "a number from 1 to 11"),
    (1, {"federation": {"clients": 2}}, "one client"),
    (1, {"vertical": {"top": "mlp"}}, "vertical.top isn't for split"),
    (1, {"federation": {"algorithm": "vertical", "clients": 2}}, "vertical.cut is for split"),
    (1, {"model": {"name": "resnet20"}}, "a sequence of layers"),
    (1, {"model": {"name": "mlp", "width": 8}}, "before the first layer with weights"),
    (1, {"federation": {"server": "fsha"}, "threat": {"adversary": "malicious-server"}}, "public examples"),
    (1, {**HIJACKED, "federation": {"server": "trap-weights"}}, "alters models"),
]


@pytest.mark.parametrize(("cut", "parts", "words"), WRONG)
def test_what_does_not_fit_is_refused_in_a_line(cut: int | str | None, parts: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words) as refused:
        resolve(scenario(cut, **parts))
    assert "\n" not in str(refused.value)


def test_a_hijacking_server_needs_split_learning() -> None:
    federation = {"name": "f", "examples": 4, "server": "fsha"}
    with pytest.raises(BadInput, match="hijacks split learning"):
        resolve(scenario_from({"data": {"name": "digits"}, "federations": [federation], **HIJACKED}))
