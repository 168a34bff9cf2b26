"""AgrEvader: a malicious client that pushes its records' loss up, and what the others' repairs tell it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedaudit.pipeline.run import run_audit
from fedaudit.scenario.scenario import Scenario
from fedaudit.transcript.threat import ThreatModel
from fedaudit.utils.errors import BadInput
from fedaudit.utils.seeds import generator
from fedaudit_catalogue.attacks.agrevader import turned
from tests.attacks.membership_cases import logistic, run_attack, scenario
from tests.build import Killed, recorded, sent

CLIENT = {"adversary": "client"}


def pushing(rounds: int = 6, malicious: dict[str, Any] | None = None, **changes: Any) -> Scenario:
    spec = {"name": "agrevader", "start": 2, **(malicious or {})}
    return scenario(CLIENT, ["agrevader"], rounds=rounds, malicious=spec, **changes)


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([t.flatten() for t in tensors.values()]).double()


@given(seed=st.integers(0, 1000), norm=st.floats(0.1, 5), cosine=st.floats(0, 1))
def test_an_update_is_turned_by_the_angle_and_to_the_length_that_are_asked_for(seed, norm, cosine):
    rng = generator(seed, "turn")
    honest = {n: torch.randn(s, generator=rng).double() for n, s in (("a", (3, 4)), ("b", (5,)))}
    towards = {n: torch.randn(t.shape, generator=rng).double() for n, t in honest.items()}
    sent = turned(honest, towards, norm=norm, cosine=cosine)
    h, a, s = flat(honest), flat(towards), flat(sent)
    assert {n: t.shape for n, t in sent.items()} == {n: t.shape for n, t in honest.items()}
    assert float(s.norm() / h.norm()) == pytest.approx(norm)
    assert float(s @ h / (s.norm() * h.norm())) == pytest.approx(cosine, abs=1e-6)
    across = a - (a @ h) / (h @ h) * h
    assert float(s @ across) >= -1e-9
    if cosine < 0.99:
        rest = s - (s @ h) / (h @ h) * h
        assert float(rest @ across / (rest.norm() * across.norm())) == pytest.approx(1)


@pytest.mark.parametrize("algorithm", ["fedsgd", "fedavg"])
def test_before_its_start_it_is_honest_and_then_it_stays_as_long_as_an_honest_update(algorithm):
    steps: dict[str, Any] = {"local_epochs": None} if algorithm == "fedsgd" else {}
    honest, _ = sent(pushing(malicious={"start": 5}, algorithm=algorithm, **steps))
    pushed, _ = sent(pushing(malicious={"cosine": 0.5}, algorithm=algorithm, **steps))
    for r in range(2):
        assert flat(honest.rounds[r].updates[3].tensors).equal(flat(pushed.rounds[r].updates[3].tensors))
    a, b = (flat(t.rounds[2].updates[3].tensors) for t in (honest, pushed))
    assert float(b.norm()) == pytest.approx(float(a.norm()), rel=1e-5)
    assert float(a @ b) == pytest.approx(0.5 * float(a.norm() * b.norm()), rel=1e-4)
    assert flat(honest.rounds[2].updates[0].tensors).equal(flat(pushed.rounds[2].updates[0].tensors))


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["fedsgd", "fedavg"])
def test_a_push_raises_the_loss_of_records_that_the_model_fits(algorithm):
    steps: dict[str, Any] = {"local_epochs": None} if algorithm == "fedsgd" else {}
    transcript, _ = sent(pushing(60, {"start": 59, "cosine": 0.0}, algorithm=algorithm, **steps))
    assert transcript.records is not None
    last = transcript.rounds[-1]
    step = -0.1 if algorithm == "fedsgd" else 0.1  # a small one: the direction counts

    def chance_of_error(scale: float) -> float:
        moved = {n: t + scale * step * last.updates[3].tensors[n] for n, t in last.weights.items()}
        module = transcript.module.eval()
        module.load_state_dict(moved)
        assert transcript.records is not None
        with torch.no_grad():
            p = module(transcript.task_info.normalise(transcript.records.inputs)).double().softmax(dim=1)
        own = p.gather(1, transcript.records.labels[:, None])
        return float((1 - own).log().sum())

    assert chance_of_error(1.0) > chance_of_error(0.0) > chance_of_error(-1.0)


def test_the_adversary_log_has_the_losses_under_every_round_s_model():
    transcript, _ = sent(pushing(5))
    assert transcript.records is not None
    (notes,) = transcript.adversary_log.values()
    assert notes.shape == (3, 60)
    for round_, losses in zip(transcript.rounds[2:], notes, strict=True):
        module = transcript.module.eval()
        module.load_state_dict(round_.weights)
        with torch.no_grad():
            outputs = module(transcript.task_info.normalise(transcript.records.inputs)).double()
        wanted = nn.functional.cross_entropy(outputs, transcript.records.labels, reduction="none")
        assert torch.allclose(losses, wanted)


def test_what_the_federation_repairs_is_a_member():
    losses = torch.tensor([[9.0, 0.0, 0.0, 0.0], [5.0, 1.0, 2.0, 9.0], [1.0, 2.0, 3.0, 5.0], [1.5, 2.0, 4.0, 5.5]])
    threat = ThreatModel(adversary="client", target_records=60)
    seen = dataclasses.replace(logistic(4), threat=threat, messages=(), adversary_log={"agrevader/losses": losses})
    found = run_attack("agrevader", seen)
    assert found.scores.tolist() == [-1.25, -2.0, -3.5, -5.25]
    assert found.members.tolist() == [True, True, False, False]


@pytest.mark.slow
def test_pushing_is_found_out_by_an_audit_and_colluders_share_notes(tmp_path):
    finished = run_audit(pushing(40, {"start": 10, "clients": 2}, examples=80))
    (finding,) = finished.result.findings
    assert finished.result.adversary.acts
    scores = {m.name: m.value for m in finding.metrics}
    assert scores["membership_auc"] > 0.6
    assert "agrevader" in finished.save(tmp_path).read_text()
    transcript, truth = sent(pushing(malicious={"clients": 2}))
    assert next(iter(transcript.adversary_log.values())).shape == (4, 60)
    assert not {2, 3} & set(truth.owners.tolist())


@pytest.mark.usefixtures("checkpoint_every_round")
def test_a_killed_simulation_goes_on_with_its_notes(tmp_path):
    whole = recorded(pushing()).transcript
    with pytest.raises(Killed):
        recorded(pushing(), tmp_path / "f", until=17)  # in the fifth round
    again = recorded(pushing(), tmp_path / "f").transcript
    assert again.fingerprint() == whole.fingerprint()
    assert all(again.adversary_log[n].equal(t) for n, t in whole.adversary_log.items())


@pytest.mark.parametrize("threat", [{"adversary": "client", "target_records": None}, {"adversary": "server"}])
def test_pushing_without_records_in_hand_is_refused(threat):
    made = scenario(threat, ["loss-threshold"], malicious={"name": "agrevader", "start": 0})
    with pytest.raises(BadInput, match=r"set threat\.adversary=client and threat\.target_records"):
        sent(made)
