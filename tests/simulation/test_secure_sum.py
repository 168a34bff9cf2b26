"""Secure aggregation: what the protocol yields, what stands for it here, and what attacks make of it."""

from __future__ import annotations

import dataclasses
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fedaudit
from fedaudit.attacks import ATTACKS, make_attack
from fedaudit.pipeline.recordings import replay_update
from fedaudit.transcript.observation import Observation, observe
from fedaudit.transcript.secure_sum import groups, order, summed
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.transcript import Transcript
from fedaudit.transcript.truth import Truth
from fedaudit.transcript.update import Update
from fedaudit.utils.errors import BadInput, NotApplicable
from tests.simulation.federation_cases import run

SGD: dict[str, Any] = {"algorithm": "fedsgd", "clients": 5, "examples": 15, "batch_size": 3}
AVG: dict[str, Any] = {"algorithm": "fedavg", "clients": 4, "examples": 24, "batch_size": 3, "learning_rate": 0.05}
UNEQUAL: dict[str, Any] = {"partition": {"scheme": "dirichlet", "alpha": 1.0}}

# The protocol -------------------------------------------------------------------------------------------------------

STEP = 2.0**-20  # of the quantisation
MODULUS = 2**32


def masked(updates: np.ndarray[Any, Any], seed: int) -> np.ndarray[Any, Any]:
    """Return (n, d) uint32, what each client sends by Bonawitz et al. 2017: quantised, plus its pairwise masks.

    Of every two clients one adds and the other subtracts what they draw from the seed that they share.
    """
    sent = np.round(updates / STEP).astype(np.int64).astype(np.uint32)
    for a, b in combinations(range(len(updates)), 2):
        mask = np.random.default_rng((seed, a, b)).integers(0, MODULUS, updates.shape[1], dtype=np.uint32)
        sent[a] += mask
        sent[b] -= mask
    return sent


@pytest.mark.parametrize("weighted", [False, True])
def test_the_protocol_of_pairwise_masks_yields_the_sum_that_stands_for_it(weighted):
    _, transcript, _ = run({**SGD, "batch_size": 4, **UNEQUAL}, seed=3)
    updates = transcript.rounds[0].updates
    held = [(u.training.data_size if weighted and u.training else None) or 1 for u in updates]
    flat = np.stack([torch.cat([t.flatten() for t in u.tensors.values()]).double().numpy() for u in updates])
    sent = masked(flat * np.array(held)[:, None], seed=1)
    total = sent.sum(axis=0, dtype=np.uint32).astype(np.int32) * STEP  # modulo 2³², the masks cancel
    ours = torch.cat([t.flatten() for t in summed(updates, weighted=weighted).tensors.values()]).double().numpy()
    assert abs(total / sum(held) - ours).max() <= len(updates) * STEP / 2 / sum(held) + 1e-7 * abs(ours).max()
    assert len(set(held)) > 1 or not weighted  # else it would say nothing of the weights
    assert abs(np.corrcoef(sent[0].astype(float), flat[0])[0, 1]) < 0.05  # one message alone tells nothing


# What stands for it -------------------------------------------------------------------------------------------------


@given(st.integers(1, 60), st.integers(1, 70))
def test_everybody_is_in_one_sum_and_no_sum_is_smaller_than_was_said(clients, size):
    cut = groups(range(clients), size)
    assert [client for group in cut for client in group] == list(range(clients))
    assert all(size <= len(group) < 2 * size for group in cut) or (len(cut) == 1 and clients < size)


def gradient_of_union(transcript: Transcript, truth: Truth, members: list[Update]) -> dict[str, Tensor]:
    """Return the gradient of the mean loss over all examples of the clients, by autograd alone."""
    module, info = transcript.module, transcript.task_info
    module.load_state_dict(transcript.rounds[0].weights)
    module.eval()
    inputs = torch.cat([truth.inputs[0, u.client] for u in members])
    labels = torch.cat([truth.labels[0, u.client] for u in members])
    loss = nn.functional.cross_entropy(module(info.normalise(inputs)), labels)
    return dict(zip(transcript.module.state_dict(), torch.autograd.grad(loss, list(module.parameters())), strict=True))


def test_a_sum_of_gradients_is_the_gradient_over_the_union():
    _, transcript, truth = run(SGD, seed=1)
    updates = transcript.rounds[0].updates
    expected = gradient_of_union(transcript, truth, updates)
    found = summed(updates)
    assert found.num_examples == 15
    assert found.members == (0, 1, 2, 3, 4)
    assert found.training is not None
    assert found.training.batch_sizes == (15,)
    assert not found.training.passes
    for name, tensor in found.tensors.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-6)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gradients": (SGD, {}),
    "one step": ({**AVG, "local_steps": 1}, {}),
    "unequal batches": ({**SGD, "batch_size": 4, **UNEQUAL}, {}),
    "unequal, weighted": ({**SGD, "batch_size": 4, **UNEQUAL}, {"defences": {"aggregator": "fedavg"}}),
    "unequal, one step": ({**AVG, "local_steps": 1, "batch_size": 5, **UNEQUAL}, {}),
    "BatchNorm": (
        {**SGD, "batch_norm": "train"},
        {"data": {"name": "photos"}, "model": {"name": "convnet-small", "width": 4}},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_one_step_of_all_is_what_training_on_the_union_gives(case):
    spec, rest = CASES[case]
    _, transcript, truth = run(spec, **rest, seed=2, threat={"sees": "aggregate of 2", "knows_labels": True})
    for record in transcript.rounds:
        assert [len(u.members) for u in record.updates] == ([2, 3] if spec["clients"] == 5 else [2, 2])
        for update in record.updates:
            assert update.labels is not None
            assert update.labels.equal(truth.labels[record.index, update.client])
            assert replay_update(transcript, truth, record.index, record.weights, update).error < 1e-5


def test_examples_of_several_steps_stand_step_by_step():
    _, single, alone = run({**AVG, "local_steps": 2, "clients": 2, "examples": 12}, seed=1)
    _, transcript, truth = run({**AVG, "local_steps": 2, "clients": 2, "examples": 12}, seed=1, threat={"sees": "sum"})
    a, b = alone.inputs[0, 0], alone.inputs[0, 1]
    assert truth.inputs[0, 0].equal(torch.cat([a[:3], b[:3], a[3:], b[3:]]))
    assert list(truth.inputs) == [(0, 0)]
    assert order(single.rounds[0].updates).tolist() == [0, 1, 2, 6, 7, 8, 3, 4, 5, 9, 10, 11]
    (update,) = transcript.rounds[0].updates
    assert update.training is not None
    assert update.training.batch_sizes == (6, 6)
    moved = torch.stack([u.tensors["0.weight"] if "0.weight" in u.tensors else next(iter(u.tensors.values()))
                         for u in single.rounds[0].updates])  # fmt: skip
    torch.testing.assert_close(next(iter(update.tensors.values())), moved.mean(dim=0))


def test_clients_that_train_unlike_leave_no_training_to_simulate():
    spec = {**AVG, "local_epochs": 1, "batch_size": 4, **UNEQUAL}
    _, transcript, _ = run(spec, seed=3, threat={"sees": "sum"})
    assert transcript.rounds[0].updates[0].training is None


def test_noise_of_several_adds_up_and_signs_are_lost():
    noisy = {
        "defences": {"client_defence": {"name": "dp", "where": "local", "level": "client", "noise": 2.0, "clip": 0.1}}
    }
    _, single, _ = run(SGD, seed=1, **noisy)
    _, transcript, _ = run(SGD, seed=1, **noisy, threat={"sees": "sum"})
    before, sanitised = (made.rounds[0].updates[0].sanitised for made in (single, transcript))
    assert before is not None
    assert before.noise > 0
    assert sanitised is not None
    assert sanitised.noise == pytest.approx(before.noise / 5**0.5)
    _, transcript, _ = run(SGD, seed=1, defences={"client_defence": "sign"}, threat={"sees": "sum"})
    sanitised = transcript.rounds[0].updates[0].sanitised
    assert sanitised is not None
    assert not sanitised.signs


def test_sums_survive_the_disk_and_single_updates_say_nothing_of_them(tmp_path):
    _, transcript, _ = run(SGD, threat={"sees": "aggregate of 2"})
    transcript.save(tmp_path / "sums")
    back = Transcript.load(tmp_path / "sums")
    assert [u.members for u in back.rounds[0].updates] == [(0, 1), (2, 3, 4)]
    assert back.digest() == transcript.digest()
    _, single, _ = run(SGD)
    single.save(tmp_path / "single")
    assert "members" not in (tmp_path / "single" / "index.json").read_text()


# What the adversary is told, and attacks ----------------------------------------------------------------------------


def seen(spec: dict[str, Any]) -> Observation:
    _, transcript, _ = run(spec, threat={"sees": "sum"})
    return observe(transcript, ThreatModel(sees="sum"))


@pytest.mark.parametrize("name", ATTACKS.names())
def test_every_attack_says_what_it_makes_of_sums_and_does_so(name):
    whole = seen({**AVG, "local_steps": 1} if name == "last-update" else SGD)
    attack = make_attack(name)
    alone = dataclasses.replace(
        whole,
        messages=tuple(
            dataclasses.replace(m, update=dataclasses.replace(m.update, members=())) for m in whole.messages
        ),
    )
    refusals = [refusal(attack, observation) for observation in (whole, alone)]
    said = ATTACKS[name].info["on_sums"]
    assert said.startswith(("works: ", "refused: "))
    if "vertical" in said:  # these refuse every other federation
        assert refusals[0] == refusals[1]
        assert "vertical" in str(refusals[0])
    elif said.startswith("works"):
        assert refusals[0] == refusals[1]  # that several clients made the update is no reason
    else:
        assert refusals[0]
        assert refusals[0] != refusals[1]
        assert "sum" in refusals[0]


def refusal(attack: Any, observation: Observation) -> str | None:
    try:
        attack.check(observation)
    except NotApplicable as error:
        return str(error)
    return None


def test_what_is_known_names_the_sum_in_place_of_updates():
    known, unknown = ThreatModel(sees="aggregate of 10").knowledge()
    assert any("updates of 10 clients" in line for line in known)
    assert any("every update" in line for line in unknown)
    known, unknown = ThreatModel().knowledge()
    assert not any("the sum of" in line for line in known + unknown)


@pytest.mark.parametrize("sees", ["sums", "aggregate of 0", "aggregate of two", "aggregate of"])
def test_another_word_for_what_is_seen_is_refused(sees):
    with pytest.raises(BadInput, match=r"sees"):
        run(SGD, threat={"sees": sees})


def test_aggregators_that_compare_single_updates_are_refused():
    with pytest.raises(BadInput, match=r"threat.sees=updates"):
        run(SGD, defences={"aggregator": "median"}, threat={"sees": "sum"})


def test_the_server_behind_secure_aggregation_reads_no_canary_of_single_updates():
    _, transcript, _ = run(
        SGD,
        attacks=[{"name": "dp-canaries", "canaries": 8}],
        defences={"client_defence": {"name": "dp", "where": "local"}},
    )
    readings = observe(transcript, ThreatModel()).canaries
    summed_up = observe(transcript, ThreatModel(sees="sum")).canaries
    assert readings is not None
    assert summed_up is not None
    assert set(readings.readings) - set(summed_up.readings) == {"updates"}


# The whole way ------------------------------------------------------------------------------------------------------

SCENARIO = {
    "name": "sums",
    "data": {"name": "photos"},
    "model": {"name": "lenet"},
    "federations": [{"name": "sgd", "algorithm": "fedsgd", "clients": 2, "examples": 2, "batch_size": 1}],
    "threat": {"sees": "sum", "knows_labels": True},
    "attacks": [{"name": "invg", "iterations": 60}],
    "evaluation": {"controls": False},
}


@pytest.mark.slow
def test_a_sum_is_attacked_alike_from_a_scenario_and_from_single_updates_on_disk(tmp_path: Path):
    audit = fedaudit.audit(SCENARIO, out=tmp_path / "audit")
    single = {**SCENARIO, "threat": {"knows_labels": True}}
    fedaudit.simulate(single, out=tmp_path / "single")
    again = fedaudit.audit_transcript(
        tmp_path / "single",
        [{"name": "invg", "iterations": 60}],
        threat={"sees": "sum", "knows_labels": True},
        controls=False,
    )
    assert not isinstance(again, list)
    result = audit.result
    (found,), (other,) = result.findings, again.result.findings
    assert found.clients == other.clients == [0, 1]
    assert [i.psnr for i in found.images] == pytest.approx([i.psnr for i in other.images], abs=0.2)
    assert len(found.images) == 2
    page = (tmp_path / "audit" / "report.html").read_text()
    assert "summed over 2 clients" in page
    assert "0 to 1, summed" in page
    assert result.federations[0].summed == 2


@pytest.mark.parametrize(("sees", "sums"), [("updates", 7), ("sum", 1), ("aggregate of 2", 3), ("aggregate of 10", 1)])
def test_sums_are_of_so_many_clients(sees, sums):
    assert len(groups(range(7), ThreatModel(sees=sees).group_size)) == sums
