"""Training before the audited rounds: what it trains on, and what is left to measure accuracy on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from fedaudit.pipeline import pretraining
from fedaudit.pipeline.prepare import resolve
from fedaudit.pipeline.pretraining import training_once
from fedaudit.pipeline.run import run_audit
from fedaudit.scenario.scenario import Scenario, scenario_from
from fedaudit.simulation.local_training import train
from fedaudit.utils.errors import BadInput

VALUES: dict[str, Any] = {
    "data": {"name": "digits"},
    "model": {"name": "logistic", "training": {"epochs": 1}},
    "federations": [{"name": "fed", "clients": 2, "examples": 300}],
    "attacks": [{"name": "invg", "iterations": 1}],
    "evaluation": {"accuracy_every": 1, "max_updates": 1},
}


def scenario(**changes: Any) -> Scenario:
    return scenario_from({**VALUES, **changes})


def rows(inputs: torch.Tensor) -> set[bytes]:
    return {row.numpy().tobytes() for row in inputs}


@pytest.mark.parametrize("threat", [{}, {"target_records": 10}], ids=["nothing", "records"])
def test_accuracy_is_measured_on_what_neither_training_has_seen(threat: dict[str, Any]) -> None:
    made = scenario(threat=threat)
    (federation,) = resolve(made).federations
    client_data, drawn = federation.client_data, federation.drawn
    measured = rows(drawn.held_out.inputs)
    assert len(drawn.held_out) == 355 - 300 - (5 if threat else 0)
    assert not measured & rows(federation.dataset.train.inputs)
    assert not measured & {row for data in client_data for row in rows(data.inputs)}
    assert not drawn.records or not measured & rows(drawn.records.inputs)
    history = run_audit(made).result.federations[0].history
    assert history is not None
    assert history.examples == len(drawn.held_out)


def test_without_it_accuracy_is_measured_on_the_other_split() -> None:
    made = scenario(model={"name": "logistic"})
    (federation,) = resolve(made).federations
    assert federation.drawn.held_out.inputs.equal(federation.dataset.train.inputs)


def test_where_nothing_is_left_to_measure_on_it_is_refused() -> None:
    all_held = [{"name": "fed", "clients": 2}]
    with pytest.raises(
        BadInput, match=r"clients leave 0 examples of the test split .* use data\.split: train, or fewer"
    ):
        resolve(scenario(federations=all_held))
    resolve(scenario(federations=all_held, evaluation={}))  # nothing is measured
    resolve(scenario(federations=all_held, data={"name": "digits", "split": "train"}))


def test_single_examples_are_trained_on() -> None:
    def trained(size: int, examples: int) -> nn.Module:
        made = scenario(
            data={"name": "digits", "limit": examples},
            model={"name": "logistic", "training": {"epochs": 1, "batch_size": size, "learning_rate": 0.5}},
            federations=[{"name": "fed", "clients": 1, "examples": 1}],
            evaluation={},
        )
        return resolve(made).federations[0].model

    untouched = resolve(scenario(model={"name": "logistic"})).federations[0].model
    one_by_one = trained(1, 21)
    assert not torch.equal(*(next(m.parameters()) for m in (untouched, one_by_one)))
    # of 21 examples in batches of 20 the last batch has one
    assert steps(scenario(data={"name": "digits", "limit": 21}), 20) == [20, 1]


def steps(made: Scenario, size: int) -> list[int]:
    """Return the sizes of the batches that the model is trained on beforehand."""
    seen: list[int] = []

    class Watching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training and torch.is_grad_enabled():
                sizes.append(len(x))
            out: torch.Tensor = self.body(x)
            return out

        def __deepcopy__(self, memo: dict[int, Any]) -> Watching:
            made = Watching()
            made.load_state_dict(copy.deepcopy(self.state_dict()))
            return made

    sizes = seen
    training = {"epochs": 1, "batch_size": size}
    values = {**made.model_dump(mode="json"), "model": {"name": "custom", "training": training}, "evaluation": {}}
    values["federations"] = [{"name": "fed", "clients": 1, "examples": 1}]
    resolve(scenario_from(values), model=Watching())
    return seen


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Return a list that grows with every epoch of training."""
    done: list[None] = []

    def counted(*arguments: Any, **settings: Any) -> Any:
        done.append(None)
        return train(*arguments, **settings)

    monkeypatch.setattr(pretraining, "train", counted)
    return done


FEW: dict[str, Any] = {"federations": [{"name": "fed", "clients": 1, "examples": 2}], "evaluation": {}}


def test_a_study_trains_a_network_once_for_all_attacks_on_it(loops: list[None]) -> None:
    model = {"name": "convnet-small", "width": 2, "training": {"epochs": 2, "learning_rate": 0.05}}
    values = {**FEW, "model": model, "data": {"name": "digits", "limit": 200}}
    alone = resolve(scenario(**values))
    assert len(loops) == 2
    with training_once():
        first = resolve(scenario(**values))
        again = resolve(scenario(**values, attacks=[{"name": "agic", "iterations": 2}]))
    assert len(loops) == 4
    assert alone.model.trained == first.model.trained == again.model.trained
    one, two, three = (made.federations[0].model.state_dict() for made in (alone, first, again))
    for name in one:
        assert one[name].equal(two[name])
        assert one[name].equal(three[name])
        assert two[name].data_ptr() != three[name].data_ptr()  # a client may change its own


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 7},
        {"model": {"name": "logistic", "training": {"epochs": 1, "learning_rate": 0.3}}},
        {"model": {"name": "logistic", "initialisation": "uniform", "training": {"epochs": 1}}},
        {"data": {"name": "digits", "limit": 300}},
    ],
)
def test_another_training_is_done(change: dict[str, Any], loops: list[None]) -> None:
    with training_once():
        resolve(scenario(**FEW))
        before = len(loops)
        resolve(scenario(**{**FEW, **change}))
    assert len(loops) == before + 1


def test_outside_of_studies_nothing_is_kept(loops: list[None]) -> None:
    for _ in range(2):
        resolve(scenario(**FEW, seed=1234))
    assert len(loops) == 2
