"""Labels by the mean of a client's updates over rounds, and the power of attacks on labels."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fedaudit
from fedaudit.attacks import AveragedLabels, LabelFinding
from fedaudit.attacks.base import Case
from fedaudit.evaluation import evaluate
from fedaudit.evaluation.finding_types import FINDING_TYPES
from fedaudit.evaluation.labels import _found_by_luck, _independent
from fedaudit.results import LEAKS
from fedaudit.scenario.scenario import scenario_from
from fedaudit.transcript.observation import Observation, observe
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.truth import Truth
from fedaudit.utils.errors import NotApplicable
from tests.build import Scenarios, audited

FEDERATION: dict[str, Any] = {
    "name": "f", "clients": 6, "examples": 36, "batch_size": 6, "rounds": 60, "learning_rate": 1e-4,
}  # fmt: skip
BOTH = ["labels", "averaged-labels"]


_MEANS = Scenarios(data={"limit": 300}, model={"name": "mlp", "width": 16}, federation=FEDERATION)


def scenario(noise: float = 0.0, attacks: Any = BOTH, **federation: Any) -> dict[str, Any]:
    dp = {"name": "dp", "where": "local", "level": "client", "clip": 1.0, "noise": noise, "epsilon": None}
    limits = {"updates": federation.get("clients", 6)}
    return _MEANS.values(
        federation, defences={"client_defence": dp} if noise else {}, attacks=attacks, evaluation=limits
    )


def clients_of(values: dict[str, Any]) -> tuple[list[Observation], Truth]:
    recording = fedaudit.simulate(values, progress=False)
    return observe(recording.transcript, scenario_from(values).threat).split("client"), recording.truth


@pytest.mark.slow
def test_the_mean_of_sixty_noisy_rounds_shows_labels_that_no_single_update_shows() -> None:
    result = audited(scenario(0.6))
    alone, together = result.summaries
    assert alone.verdict == "inconclusive"
    assert any("add the attack averaged-labels" in line for line in alone.advice)
    assert together.verdict == "inferred"
    assert together.evidence is not None
    assert together.evidence.n == 36  # of the clients' examples, each once, not of sixty rounds
    assert together.evidence.value > (together.evidence.baseline or 0) + 0.15


def test_what_noise_hides_in_the_mean_the_defence_stops() -> None:
    result = audited(scenario(50.0, ["averaged-labels"], rounds=3))
    (summary,), (control,) = result.summaries, result.controls
    assert (summary.verdict, control.won, control.without_defence) == ("not demonstrated", True, True)
    assert control.power is not None
    assert (control.power.n, control.power.of) == (36, "labels")
    assert control.power.value > 0.9
    assert "of 36 labels of held-out examples" in summary.headline


@pytest.mark.slow
def test_noise_alone_is_hardly_ever_inferred() -> None:
    values = scenario(1.0, clients=4, examples=24, rounds=2)
    seen, truth = clients_of(values)
    leaks = 0
    for seed in range(150):
        rng = torch.Generator().manual_seed(seed)
        drawn = truth.candidate_labels[torch.randint(len(truth.candidate_labels), (4, 6), generator=rng)]
        other = dataclasses.replace(truth, labels={key: drawn[key[1]] for key in truth.labels})
        done = []
        for client in seen:
            noise = [
                {n: torch.randn(t.shape, generator=rng) for n, t in m.update.tensors.items()} for m in client.messages
            ]
            messages = tuple(
                dataclasses.replace(m, update=dataclasses.replace(m.update, tensors=tensors))
                for m, tensors in zip(client.messages, noise, strict=True)
            )
            drowned = dataclasses.replace(client, messages=messages)
            done.append(evaluate(AveragedLabels()(drowned), drowned, other, seed=seed).result)
        leaks += FINDING_TYPES["labels"].verdict(done).verdict in LEAKS
    assert leaks <= 5  # of 150 at 1 %: more with a probability of 0.004


@pytest.mark.parametrize(
    "federation",
    [
        {"batch_size": 2, "rounds": 3},  # an epoch in three updates
        {"algorithm": "fedavg", "batch_size": 6, "rounds": 2, "local_epochs": 2},  # whole epochs, twice
    ],
)
def test_the_labels_are_those_of_all_examples(federation: dict[str, Any]) -> None:
    seen, truth = clients_of(scenario(clients=2, examples=12, **federation))
    for client in seen:
        found: Any = AveragedLabels()(client)
        result = evaluate(found, client, truth, seed=0).result
        number = client.messages[0].client
        true = truth.held_by(number)[1].bincount(minlength=10)
        times = len(found.labels) // 6
        overlap = torch.minimum(found.labels.bincount(minlength=10), times * true).sum() / (6 * times)
        assert result.metrics[0].value == pytest.approx(float(overlap))
        assert overlap > 0.6


def test_local_steps_that_are_no_whole_epochs_have_no_mean() -> None:
    seen, _ = clients_of(scenario(clients=2, examples=16, algorithm="fedavg", batch_size=4, local_steps=3, rounds=3))
    with pytest.raises(NotApplicable, match="several local steps"):
        AveragedLabels()(seen[0])


def test_luck_draws_an_example_that_is_used_twice_once() -> None:
    both = torch.tensor([0, 0, 1, 1])
    drawn = _independent(torch.ones(2), torch.tensor([2, 2]), torch.Generator().manual_seed(0))
    shares = _found_by_luck(both, drawn)
    assert shares == pytest.approx([0, 0, 0.5, 0, 0.5], abs=0.02)


def test_a_client_of_unknown_size_is_not_judged() -> None:
    seen, truth = clients_of(scenario(clients=1, examples=4, batch_size=2, rounds=2))
    finding = LabelFinding(attack="averaged-labels", labels=torch.tensor([1, 2]), method="geng", num_classes=10)
    result = evaluate(finding, seen[0], truth, seed=0).result
    assert result.status == "not applicable"
    assert "2 labels for 4 different examples" in (result.reason or "")


def test_it_needs_one_client_whose_training_is_known() -> None:
    values = scenario(clients=2, examples=8, batch_size=4, rounds=2, algorithm="fedavg", local_steps=1)
    seen, _ = clients_of({**values, "threat": {"knows_training": False}})
    with pytest.raises(NotApplicable, match="needs the learning rate"):
        AveragedLabels().check(seen[0])
    both = dataclasses.replace(seen[0], messages=(seen[0].messages[0], seen[1].messages[0]))
    with pytest.raises(NotApplicable, match="averaged-labels"):
        AveragedLabels().check(both)


def cases() -> Iterator[tuple[Case, bool]]:
    noisy = Case(kind="image", num_classes=10, threat=ThreatModel(), examples=8, rounds=5, noisy=True)
    yield noisy, True
    yield dataclasses.replace(noisy, noisy=False), False
    yield dataclasses.replace(noisy, rounds=1), False
    yield dataclasses.replace(noisy, sums=True), False


@pytest.mark.parametrize(("case", "fits"), list(cases()))
def test_an_audit_that_names_no_attack_takes_it_where_noise_is_added_again_and_again(case: Case, fits: bool) -> None:
    assert AveragedLabels.fits(case) is fits
