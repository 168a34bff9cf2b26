"""Membership by spans: exact where a batch is smaller than a layer, and honest where it isn't."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedaudit.attacks import MembershipFinding
from fedaudit.evaluation import evaluate
from fedaudit.models import initialise
from fedaudit.task.info import TaskInfo
from fedaudit.transcript.observation import Message, Observation
from fedaudit.transcript.queries import NOBODY, QuerySet
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.truth import Truth
from fedaudit.transcript.update import ClientDefenceInfo, Update
from fedaudit.utils.errors import NotApplicable
from fedaudit.utils.seeds import generator
from tests import build
from tests.attacks.membership_cases import run_attack
from tests.build import Scenarios

STEPS = {"algorithm": "fedavg", "local_steps": 5, "learning_rate": 0.01}


_TWO = Scenarios(
    data={"split": "train"},
    model={"name": "mlp", "width": 32},
    federation={"clients": 2},
    attacks="projection-residual",
)


def recorded(own: nn.Module | None = None, batch: int = 8, **values: Any) -> tuple[Observation, Truth]:
    """Return what a server sees of two clients who send one update each, and whose the records are."""
    two = _TWO.but(federation={"batch_size": batch, "examples": 2 * batch}, threat={"target_records": 4 * batch})
    return build.seen(two(**values), model=own)


def judged(seen: Observation, truth: Truth, **settings: Any) -> tuple[MembershipFinding, float]:
    found = run_attack("projection-residual", seen, **settings)
    return found, next(
        m.value for m in evaluate(found, seen, truth, seed=0).result.metrics if m.name == "membership_auc"
    )


NOTES = {"data": {"name": "notes", "split": "train"}}
EXACT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "linear": ({"name": "logistic"}, {}),
    "network": ({"name": "mlp", "width": 32}, {}),
    "convolutions": ({"name": "convnet-small", "width": 4}, {"batch": 4}),
    "patches": ({"name": "vit", "width": 64}, {"batch": 2}),
    "tokens": ({"name": "encoder", "width": 64}, {"batch": 2, **NOTES}),
    "sums": ({"name": "mlp", "width": 32}, {"threat": {"sees": "sum"}}),
    "local steps": ({"name": "mlp", "width": 32}, {"federation": STEPS}),
}


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.slow) if c == "patches" else c for c in EXACT])
def test_a_batch_smaller_than_a_layer_gives_its_members_away_and_nobody_else(case):
    model, values = EXACT[case]
    found, area = judged(*(made := recorded(model=model, **values)))
    member = made[1].owners != NOBODY
    assert area == 1
    assert "exact in none" not in found.notes[0]
    assert not bool((found.members & ~member).any())
    assert float(found.members[member].double().mean()) > 0.9


class Masked(nn.Module):
    """Behind its first layer everything depends on masks, or on the batch."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.hidden, self.between, self.fc = nn.Linear(64, 32), between, nn.Linear(32, 10)
        initialise(self, "default", generator(0, "masked"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.fc(self.between(self.hidden(x.flatten(1))).relu()))


@pytest.mark.parametrize(("between", "least"), [(nn.Dropout(0.3), 1.0), (nn.BatchNorm1d(32), 0.9)])
def test_layers_behind_masks_and_batch_statistics_are_left_out(between, least):
    own = {"name": "custom", "initialisation": "given", "batch_norm": "train"}
    seen, truth = recorded(Masked(between), model=own)
    found, area = judged(seen, truth)
    assert area >= least  # what comes back through BatchNorm sums to zero over a batch: one direction is missing
    assert not bool((found.members & (truth.owners == NOBODY)).any())
    assert found.notes[0].endswith("layers: hidden.weight")


def altered(seen: Observation, change: Any, **more: Any) -> Observation:
    """Return an observation whose updates' tensors went through ``change``."""
    messages = tuple(
        dataclasses.replace(
            m,
            update=dataclasses.replace(
                m.update, tensors={n: change(n, t) for n, t in m.update.tensors.items()}, **more
            ),
        )
        for m in seen.messages
    )
    return dataclasses.replace(seen, messages=messages)


@pytest.fixture(scope="module")
def network() -> tuple[Observation, Truth]:
    return recorded()


def test_clipping_and_layers_that_are_held_back_change_nothing(network):
    seen, truth = network
    plain = run_attack("projection-residual", seen)
    clipped = run_attack("projection-residual", altered(seen, lambda _, t: 0.01 * t))
    assert torch.allclose(plain.scores, clipped.scores, rtol=1e-3)
    assert clipped.members.equal(plain.members)
    part = tuple(
        dataclasses.replace(
            m, update=dataclasses.replace(m.update, tensors={n: t for n, t in m.update.tensors.items() if "fc" in n})
        )
        for m in seen.messages
    )
    found, area = judged(dataclasses.replace(seen, messages=part), truth)
    assert area > 0.95
    assert found.notes[0].endswith("layers: fc.weight")


def test_the_order_of_records_and_messages_is_of_no_matter(network):
    seen, _ = network
    records = seen.records
    assert records is not None
    order = torch.randperm(len(records), generator=generator(1, "order"))
    other = dataclasses.replace(records, inputs=records.inputs[order], labels=records.labels[order])
    turned = dataclasses.replace(seen, records=other, messages=seen.messages[::-1])
    found, also = run_attack("projection-residual", seen), run_attack("projection-residual", turned)
    assert torch.allclose(also.scores, found.scores[order], rtol=1e-6)
    assert also.members.equal(found.members[order])


def test_records_of_another_client_and_unused_ones_score_like_non_members(network):
    seen, truth = network
    for client, own in enumerate(seen.split("client")):
        found, area = judged(own, truth, whose="client")
        assert area == 1
        assert found.members.equal(truth.owners == client)


def test_noise_blurs_spans_until_nothing_rises_above_it(network):
    seen, truth = network

    def loud(noise: float) -> Observation:
        rng = generator(0, "noise")
        return altered(
            seen,
            lambda _, t: t + noise * torch.randn(t.shape, generator=rng),
            sanitised=ClientDefenceInfo("dp", noise=noise),
        )

    found, area = judged(loud(1e-5), truth)
    assert area > 0.95
    assert "exact in none" in found.notes[0]
    with pytest.raises(NotApplicable, match="noise hides it"):
        run_attack("projection-residual", loud(10.0))


@pytest.mark.parametrize("steps", [2, 5])
def test_deeper_layers_after_local_steps_are_asked_at_the_steps_mean_weights(steps):
    federation = {**STEPS, "local_steps": steps, "learning_rate": 0.02}
    seen, truth = recorded(batch=4, model={"name": "convnet-small", "width": 4}, federation=federation)
    found, area = judged(seen, truth)
    assert area > 0.95
    assert "exact in none" in found.notes[0]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": {"name": "logistic"}, "batch": 40}, "spans more than those of 9 exactly"),  # a softmax of ten
    ({"batch": 140}, "over 140 examples or more, and no layer's gradient spans more than those of 32"),
    ({"defences": [{"name": "d", "client_defence": {"name": "top-k", "ratio": 0.1}}]}, "sends some numbers only"),
    ({"defences": [{"name": "d", "client_defence": "sign"}]}, "sends signs only"),
    ({"threat": {"adversary": "client"}}, "the adversary sees no update"),
]


@pytest.mark.parametrize(("values", "reason"), REFUSED)
def test_where_spans_tell_nothing_it_says_so(values, reason):
    seen, _ = recorded(**values)
    with pytest.raises(NotApplicable, match=reason):
        run_attack("projection-residual", seen)


def test_adam_s_steps_are_refused():
    seen, _ = recorded(federation=STEPS)
    training = seen.messages[0].update.training
    assert training is not None
    adam = altered(seen, lambda _, t: t, training=dataclasses.replace(training, optimiser="adam"))
    with pytest.raises(NotApplicable, match=r"clients train by Adam.*loss-threshold"):
        run_attack("projection-residual", adam)


def exact_toy(many: int = 16, batch: int = 5, width: int = 12, outputs: int = 9) -> Observation:
    """A linear model in float64, whose gradient of the first ``batch`` records is the update."""
    rng = generator(7, "toy")
    model = nn.Linear(width, outputs).double()
    state = {n: torch.randn(t.shape, generator=rng, dtype=torch.float64) for n, t in model.state_dict().items()}
    model.load_state_dict(state)
    x = torch.randn(many, width, generator=rng, dtype=torch.float64)
    y = torch.arange(many) % outputs
    loss = nn.functional.cross_entropy
    value = loss(model(x[:batch]), y[:batch])
    names = list(state)
    grads = torch.autograd.grad(value, [dict(model.named_parameters())[n] for n in names])
    update = Update(0, "gradient", dict(zip(names, grads, strict=True)), batch, None)
    info = TaskInfo("custom", None, "eval", "cross-entropy", "table", (width,), outputs, (0.0,), (1.0,))
    records = QuerySet(x, y, x[:0], y[:0])
    threat = ThreatModel(target_records=many)
    return Observation(
        "f", threat, info, model, loss, "gradient", (state,), (Message(0, 0, state, update),), {}, records
    )


def test_residuals_are_those_of_least_squares():
    seen = exact_toy()
    assert seen.records is not None
    x, rows = seen.records.inputs.numpy(), seen.messages[0].update.tensors["weight"].numpy()
    found = run_attack("projection-residual", seen)
    fitted = np.linalg.lstsq(rows.T, x.T, rcond=1e-12)[0]
    near = -np.log(np.linalg.norm(x.T - rows.T @ fitted, axis=0) / np.linalg.norm(x, axis=1))
    near = np.minimum(near, -np.log(1e-7))
    usual, tail = np.quantile(near, [0.25, 0.125])
    assert found.scores.numpy() == pytest.approx((near - usual) / (usual - tail) * 0.6745, rel=1e-8)
    assert found.members.tolist() == [True] * 5 + [False] * 11


def test_records_that_were_never_used_look_like_any_other():
    seen, truth = recorded(threat={"target_records": 32})
    records = seen.records
    assert records is not None
    other = dataclasses.replace(records, inputs=records.inputs.flip(-1))  # mirrored: nobody had these
    found = run_attack("projection-residual", dataclasses.replace(seen, records=other))
    assert not bool(found.members.any())
    assert not evaluate(found, seen, truth, seed=0).result.is_leak
