"""Vertical federations: what travels, who sees what, what attacks find, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from sklearn.metrics import roc_auc_score
from torch import nn

import fedaudit
from fedaudit.attacks import ATTACKS, Attack, make_attack
from fedaudit.attacks.vertical.cafe import layer_inputs, membership, output_gradients
from fedaudit.evaluation.vertical import area, area_interval
from fedaudit.models import VerticalModel, build_vertical
from fedaudit.models.vertical import parts_of, share_of
from fedaudit.pipeline.prepare import resolve
from fedaudit.pipeline.run import plan, record
from fedaudit.scenario.scenario import Scenario, scenario_from
from fedaudit.simulation.simulator import Recording
from fedaudit.transcript.observation import Observation, observe
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.transcript import Transcript
from fedaudit.transcript.truth import FILE, Truth, check_belongs, save_recording
from fedaudit.transcript.vertical import VerticalRecord
from fedaudit.utils.errors import BadInput, CorruptTranscript, NotApplicable
from tests.build import Scenarios

PARTIES: dict[str, Any] = {
    "name": "f", "algorithm": "vertical", "clients": 2, "rounds": 12, "examples": 8, "batch_size": 4,
    "learning_rate": 0.1,
}  # fmt: skip
VERTICAL = [name for name in ATTACKS.names() if ATTACKS[name].value.reads is VerticalRecord]


_VERTICAL = Scenarios(model={"name": "mlp", "width": 8}, federation=PARTIES, attacks="norm-scoring")


def scenario(vertical: dict[str, Any] | None = None, **parts: Any) -> Scenario:
    return _VERTICAL({**parts.pop("federation", {}), "vertical": vertical or {}}, **parts)


def played(vertical: dict[str, Any] | None = None, **parts: Any) -> tuple[Recording, Scenario]:
    made = scenario(vertical, **parts)
    (recording,) = record(resolve(made))
    return recording, made


def seen(adversary: str, vertical: dict[str, Any] | None = None, **parts: Any) -> Observation:
    recording, _ = played(vertical, **parts)
    return observe(recording.transcript, ThreatModel.model_validate({"adversary": adversary}))


def run(attack: Attack, observation: Observation) -> Any:
    return attack(observation, generator=torch.Generator().manual_seed(0))


# --- what travels ---------------------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(2, 12))
def test_strips_cover_every_column_once(width: int, parties: int) -> None:
    if parties > width:
        with pytest.raises(BadInput, match="can't share"):
            parts_of("strips", parties, (width,))
        return
    columns = torch.cat([torch.arange(width)[part] for part in parts_of("strips", parties, (width,))])
    assert columns.tolist() == list(range(width))


def test_quadrants_are_an_images_quarters() -> None:
    image = torch.arange(2 * 5 * 7).view(2, 5, 7)
    parts = [share_of(image[None], part)[0] for part in parts_of("quadrants", 4, (2, 5, 7))]
    assert torch.cat([torch.cat(parts[:2], dim=2), torch.cat(parts[2:], dim=2)], dim=1).equal(image)


@pytest.mark.parametrize("top", ["sum", "linear", "mlp"])
def test_the_gradients_that_come_down_are_autograds_of_the_whole_model(top: str) -> None:
    recording, _ = played({"top": top})
    sent, truth = recording.transcript.vertical, recording.truth
    module = recording.transcript.module
    assert sent is not None
    assert isinstance(module, VerticalModel)
    module.load_state_dict(sent.weights)
    rows = sent.batches[0].tolist()
    inputs = recording.transcript.task_info.normalise(torch.cat([truth.inputs[i, 0] for i in rows]))
    labels = torch.cat([truth.labels[i, 0] for i in rows])
    up = module.embed(module.features(inputs))
    torch.testing.assert_close(sent.embeddings[0], torch.stack(up))
    down = torch.autograd.grad(nn.functional.cross_entropy(module.merge(up), labels), up)
    torch.testing.assert_close(sent.gradients[0], torch.stack(down))


def test_aggregated_gradients_give_the_weights_of_every_round() -> None:
    split, _ = played({"protocol": "split"})
    whole, _ = played({"protocol": "aggregated-gradients"})
    one, other = split.transcript.vertical, whole.transcript.vertical
    assert one is not None
    assert other is not None
    assert one.batches.equal(other.batches)  # the protocol changes what is seen, not the training
    module, info = split.transcript.module, split.transcript.task_info
    assert isinstance(module, VerticalModel)
    module.load_state_dict(other.weights_of(7))
    inputs = torch.cat([split.truth.inputs[i, 0] for i in one.batches[7].tolist()])
    up = module.embed(module.features(info.normalise(inputs)))
    torch.testing.assert_close(torch.stack(up), one.embeddings[7], rtol=1e-4, atol=1e-5)


def test_each_side_sees_its_own_part() -> None:
    party = seen("client", {"observer": 1}).vertical
    server = seen("server").vertical
    assert party is not None
    assert server is not None
    assert party.labels is None
    assert {name.split(".")[1] for name in party.weights} == {"1"}
    assert party.embeddings.shape == (12, 1, 4, 10)
    assert server.labels is not None
    assert {name.split(".")[0] for name in server.weights} == {"server"}
    assert server.embeddings.shape == (12, 2, 4, 10)
    assert party.embeddings[:, 0].equal(server.embeddings[:, 1])
    assert not seen("client", {"protocol": "aggregated-gradients"}).vertical.updates


@pytest.mark.parametrize("protocol", ["split", "aggregated-gradients"])
def test_it_survives_the_disk(protocol: str, tmp_path: Path) -> None:
    recording, _ = played({"protocol": protocol})
    save_recording(recording.transcript, recording.truth, tmp_path / "f")
    read = Transcript.load(tmp_path / "f")
    assert read.digest() == recording.transcript.digest()
    check_belongs(Truth.load(tmp_path / "f" / FILE), read, tmp_path)
    path = tmp_path / "f" / "vertical.safetensors"
    save_file({**load_file(path), "batches": load_file(path)["batches"] + 5}, path)
    with pytest.raises((BadInput, CorruptTranscript)):
        Transcript.load(tmp_path / "f")


def test_the_same_seed_gives_the_same_bits() -> None:
    first, again, other = (played(seed=seed)[0].transcript.digest() for seed in (3, 3, 4))
    assert first == again != other


# --- what attacks find ----------------------------------------------------------------------------------------------


def test_direct_labels_are_all_right_where_the_server_only_adds_up() -> None:
    recording, made = played({"top": "sum"}, threat={"adversary": "client"})
    found = run(make_attack("direct-labels"), observe(recording.transcript, made.threat))
    assert found.labels.tolist() == [int(recording.truth.labels[i, 0]) for i in found.examples.tolist()]


def test_scores_tell_the_rarer_class_where_the_model_has_learnt_how_rare_it_is() -> None:
    recording, made = played(
        federation={"examples": 200, "batch_size": 32, "rounds": 80},
        data={"name": "breast-cancer", "split": "train"},
        threat={"adversary": "client"},
    )
    observation = observe(recording.transcript, made.threat)
    found = run(make_attack("direction-scoring"), observation)
    true = torch.stack([recording.truth.labels[i, 0][0] for i in found.examples.tolist()])
    assert roc_auc_score(true == 0, found.scores) > 0.75  # malignant tumours, 37 % of all


@given(st.lists(st.integers(0, 5), min_size=2, max_size=9), st.lists(st.integers(0, 5), min_size=2, max_size=9))
@settings(max_examples=30)
def test_the_leak_auc_is_scikit_learns(own: list[int], others: list[int]) -> None:
    a, b = torch.tensor(own).double().numpy(), torch.tensor(others).double().numpy()
    classes = [1] * len(own) + [0] * len(others)
    value = area(a, b)
    assert value == pytest.approx(roc_auc_score(classes, own + others))
    low, high = area_interval(a, b)
    assert low <= value <= high


def exact(model: str = "cafe-cnn") -> tuple[Recording, Observation]:
    recording, made = played(
        {"protocol": "aggregated-gradients"},
        federation={"learning_rate": 1e-9, "rounds": 16},
        model={"name": model, "width": 8},
    )
    return recording, observe(recording.transcript, made.threat)


def test_the_first_two_steps_of_cafe_are_exact_where_the_model_stands_still() -> None:
    recording, observation = exact()
    sent, module = observation.vertical, observation.module
    assert sent is not None
    assert isinstance(module, VerticalModel)
    module.load_state_dict(sent.weights)
    inputs = observation.task_info.normalise(torch.cat([recording.truth.inputs[i, 0] for i in range(8)]))
    labels = torch.cat([recording.truth.labels[i, 0] for i in range(8)])
    kept: list[Any] = []
    handle = module.get_submodule("parties.1.fc1").register_forward_hook(
        lambda _, given, out: kept.append((given[0], out))
    )
    value = nn.functional.cross_entropy(module(inputs), labels, reduction="sum")
    handle.remove()
    (into, out), member = kept[0], membership(sent)
    (gradients,) = torch.autograd.grad(value, out)
    torch.testing.assert_close(
        output_gradients(sent, "parties.1.fc1.bias", member).float(), gradients, rtol=1e-3, atol=1e-6
    )
    names = ("parties.1.fc1.weight", "parties.1.fc1.bias")
    found = layer_inputs(sent, names, member, torch.arange(8)).float()
    torch.testing.assert_close(found, into.detach(), rtol=1e-2, atol=1e-3)


def test_cafe_rebuilds_images() -> None:
    recording, observation = exact("mlp")  # whose first layer takes the pixels themselves
    found = run(make_attack("cafe", {"iterations": 150, "tv_weight": 0.0}), observation)
    true = torch.cat([recording.truth.inputs[i, 0] for i in range(8)])
    assert float((found.images - true).square().mean()) < 1e-3  # of a random image: 0.2


def test_an_audit_ends_with_verdicts() -> None:
    audit = fedaudit.audit(scenario({"top": "sum"}, threat={"adversary": "client"}, attacks=["direct-labels", "agic"]))
    first, second = audit.result.summaries
    assert first.verdict in ("inferred", "inconclusive")
    assert second.verdict == "not applicable"
    assert "vertical" in second.verdict_text


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def observations() -> list[Observation]:
    return [seen(adversary) for adversary in ("server", "client")]


@pytest.mark.parametrize("name", [name for name in ATTACKS.names() if name not in VERTICAL])
def test_other_attacks_refuse_a_vertical_federation(name: str, observations: list[Observation]) -> None:
    if name in ("gias", "epochs"):
        pytest.skip("it needs settings of its own")
    for observation in observations:
        with pytest.raises(NotApplicable) as refused:
            make_attack(name).check(observation)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", VERTICAL)
def test_attacks_on_vertical_federations_refuse_others(name: str) -> None:
    made = scenario_from({"data": {"name": "digits"}, "federations": [{"name": "f", "examples": 4}], "attacks": [name]})
    (recording,) = record(resolve(made))
    (trial,) = plan([observe(recording.transcript, ThreatModel())], [make_attack(name)])
    assert "is for vertical federations" in str(trial.outcome)


REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    ("cafe", "server", {}),
    ("cafe", "client", {"protocol": "aggregated-gradients"}),
    ("norm-scoring", "client", {}),  # ten classes
    ("direct-labels", "client", {"top": "linear"}),
    ("direct-labels", "server", {"top": "sum"}),
    ("direct-labels", "client", {"top": "sum", "protocol": "aggregated-gradients"}),
]


@pytest.mark.parametrize(("name", "adversary", "vertical"), REFUSED)
def test_an_attack_says_what_it_lacks(name: str, adversary: str, vertical: dict[str, Any]) -> None:
    with pytest.raises(NotApplicable, match=name):
        run(make_attack(name), seen(adversary, vertical))


def test_cafe_needs_as_many_rounds_as_examples() -> None:
    observation = seen("server", {"protocol": "aggregated-gradients"}, federation={"rounds": 5})
    with pytest.raises(NotApplicable, match=r"determine 5 of \d; raise rounds"):
        run(make_attack("cafe"), observation)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"defences": {"client_defence": "sign"}}, "client-side defences or aggregators"),
    ({"defences": {"aggregator": "median"}}, "client-side defences or aggregators"),
    ({"threat": {"sees": "sum"}}, "threat.sees"),
    ({"threat": {"target_records": 4}}, "threat.target_records"),
    ({"threat": {"knows_labels": True}}, "knows_labels"),
    ({"attacks": ["dp-canaries"]}, "audit of ε"),
    ({"data": {"name": "diabetes"}}, "classifier"),
    ({"federation": {"batch_size": 9}}, "batch_size is 9"),
    ({"federation": {"clients": 1}}, "2 parties"),
    ({"federation": {"local_steps": 2}}, "local_steps isn't for a vertical"),
    ({"federation": {"partition": {"scheme": "dirichlet", "alpha": 1.0}}}, "partition isn't for a vertical"),
    ({"federation": {"malicious": {"name": "gan"}}}, "malicious isn't for a vertical"),
    ({"vertical": {"observer": 2}}, "vertical.observer is 2"),
    ({"vertical": {"features": "quadrants"}}, "for 4 parties"),
    ({"vertical": {"top": "sum", "embedding": 4}}, "leave vertical.embedding out"),
]


@pytest.mark.parametrize(("parts", "words"), WRONG)
def test_what_does_not_fit_is_refused_in_a_line(parts: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words) as refused:
        resolve(scenario(**parts))
    assert "\n" not in str(refused.value)


def test_vertical_and_other_federations_do_not_mix() -> None:
    with pytest.raises(BadInput, match="a scenario of its own"):
        scenario_from({"federations": [PARTIES, {"name": "g"}], "attacks": ["cafe"]})
    with pytest.raises(BadInput, match="different models"):
        scenario_from({"federations": [PARTIES, {**PARTIES, "name": "g", "clients": 3}], "attacks": ["cafe"]})


def test_a_party_network_comes_from_the_models_that_there_are() -> None:
    made = build_vertical(
        "cafe-cnn",
        parties=4,
        features="quadrants",
        top="linear",
        embedding=10,
        input_shape=(3, 32, 32),
        outputs=10,
        width=8,
    )
    assert made(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert made.parties[0].fc1.in_features == 16 * 4 * 4  # type: ignore[union-attr]
