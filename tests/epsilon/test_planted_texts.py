"""Planted texts: what clients train on, how exposed it is, and which ε that shows."""

from __future__ import annotations

import dataclasses
import itertools
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedaudit.attacks import make_attack
from fedaudit.epsilon.canaries import Canaries
from fedaudit.evaluation import evaluate, summarise
from fedaudit.evaluation.epsilon import luckiest
from fedaudit.modalities import TokenInfo
from fedaudit.pipeline.prepare import resolve
from fedaudit.results import FindingResult
from fedaudit.simulation.budget import PrivacyBudget
from fedaudit.simulation.history import History
from fedaudit.simulation.planted_texts import PlantedTexts, drawn_texts, mean_losses
from fedaudit.simulation.simulator import simulate
from fedaudit.transcript.files import CanariesEntry
from fedaudit.transcript.observation import Observation, observe
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.transcript import Transcript
from fedaudit.transcript.truth import Truth, save_recording
from fedaudit.utils.errors import BadInput
from fedaudit.utils.seeds import generator
from tests.build import Scenarios
from tests.conftest import Command, refused

COUNT = 120
NOTES = Scenarios(
    data={"name": "notes-causal", "split": "train"},
    model={"name": "decoder", "width": 64},
    federation={
        "algorithm": "fedavg",
        "clients": 3,
        "rounds": 6,
        "examples": 10,
        "batch_size": 10,
        "local_epochs": 10,
        "learning_rate": 1.0,
    },
    attacks=[{"name": "dp-canaries", "of": "texts", "canaries": COUNT}],
)
DP = {"name": "dp", "where": "local", "clip": 1.0, "noise": 1.0, "epsilon": None}


def played(*changes: Any, **parts: Any) -> tuple[Observation, Truth, Transcript]:
    (federation,) = resolve(NOTES(*changes, **parts)).federations
    made = simulate(federation)
    return observe(made.transcript, ThreatModel()), made.truth, made.transcript


@cache
def learnt() -> tuple[Observation, Truth, Transcript]:
    return played()


def judged(observed: Observation, truth: Truth) -> FindingResult:
    return evaluate(make_attack("dp-canaries", {"of": "texts"})(observed), observed, truth, seed=0).result


def value(result: FindingResult, name: str) -> tuple[float, float | None]:
    return next((m.value, m.baseline) for m in result.metrics if m.name == name)


def test_clients_hold_the_texts_whose_coin_says_so_and_no_others() -> None:
    (federation,) = resolve(NOTES()).federations
    assert federation.planted is not None
    texts, coins = federation.planted
    tokens = federation.task_info.tokens
    assert tokens is not None
    assert 0.3 < float(coins.double().mean()) < 0.7
    assert not bool(torch.isin(texts[:, :-1], torch.tensor([tokens.padding, tokens.end])).any())
    assert set(texts[:, -1].tolist()) == {tokens.end}
    counts = texts[:, :-1].flatten().bincount(minlength=tokens.vocabulary)
    expected = texts[:, :-1].numel() / (tokens.vocabulary - 2)
    assert float(((counts - expected)[counts > 0].square() / expected).sum()) < 2 * tokens.vocabulary  # drawn evenly
    held = [{tuple(row) for row in data.inputs.tolist()} for data in federation.client_data]
    for number, (text, inside) in enumerate(zip(texts.tolist(), coins.tolist(), strict=True)):
        assert [tuple(text) in own for own in held] == [inside and number % 3 == client for client in range(3)]
    assert sum(map(len, federation.client_data)) == 10 + int(coins.sum())
    assert federation.client_data[0].targets[-1].equal(tokens.following(federation.client_data[0].inputs[-1:])[0])


@pytest.mark.slow
def test_texts_that_were_learnt_by_heart_are_exposed_and_demonstrate_epsilon() -> None:
    observed, truth, _ = learnt()
    result = judged(observed, truth)
    absent = int((~truth.coins).sum())
    mean, others = value(result, "exposure")
    assert value(result, "exposure_most")[0] == pytest.approx(math.log2(absent + 1)), "before all absent ones"
    assert mean > 4
    ranks = torch.arange(1, absent + 1).double()
    assert others == pytest.approx(float((math.log2(absent) - ranks.log2()).mean()))
    assert result.is_leak
    assert result.epsilon is not None
    assert result.epsilon.claimed is None
    assert result.epsilon.unit == "record"
    assert (result.epsilon.demonstrated or 0) > 1
    (summary,) = summarise([result], resamples=100, seed=0)
    assert "can tell which records were trained on: an ε of at least" in summary.headline


@pytest.mark.slow
def test_exposure_counts_ranks_among_the_absent_ones() -> None:
    observed, truth, _ = learnt()
    found: Any = make_attack("dp-canaries", {"of": "texts"})(observed)
    coins = torch.zeros(COUNT, dtype=torch.bool)
    coins[:3] = True
    scores = torch.arange(COUNT, dtype=torch.float64)[None]  # of the absent ones 3 … 119
    scores[0, :3] = torch.tensor([200.0, 118.5, -1.0])  # above all, below one, below all
    own = dataclasses.replace(found, scores=scores)
    result = evaluate(own, observed, dataclasses.replace(truth, coins=coins), seed=0).result
    ranks = torch.tensor([1.0, 2.0, 118.0])
    assert value(result, "exposure")[0] == pytest.approx(float((math.log2(118) - ranks.log2()).mean()), abs=1e-6)


@pytest.mark.parametrize(("planted", "absent"), [(1, 4), (3, 4), (4, 2), (2, 1)])
def test_the_luckiest_text_is_that_of_all_orders(planted: int, absent: int) -> None:
    highest = []
    for order in itertools.combinations(range(planted + absent), planted):  # places of the planted ones, best first
        before = order[0]  # absent ones ahead of the best planted one
        highest.append(math.log2(absent + 1) - math.log2(before + 1))
    assert luckiest(planted, absent) == pytest.approx(sum(highest) / len(highest))


def test_what_luck_exposes_most_is_no_more_than_luck() -> None:
    """Coins that decided nothing: over many, the most exposed one's exposure is its baseline on average."""
    observed, truth, _ = learnt()
    found: Any = make_attack("dp-canaries", {"of": "texts"})(observed)
    rng = torch.Generator().manual_seed(0)
    apart = []
    for _ in range(40):
        scores = torch.randn(COUNT, generator=rng, dtype=torch.float64)[None]
        told = evaluate(dataclasses.replace(found, scores=scores), observed, truth, seed=0).result
        most, luck = value(told, "exposure_most")
        assert luck is not None
        apart.append(most - luck)
    assert abs(float(np.mean(apart))) < 4 * float(np.std(apart)) / len(apart) ** 0.5


def test_a_model_that_never_saw_them_shows_nothing() -> None:
    """Coins that decided nothing: at most one verdict in a hundred, and exposure as of the absent ones."""
    observed, truth, _ = learnt()
    rng = torch.Generator().manual_seed(0)
    found: Any = make_attack("dp-canaries", {"of": "texts"})(observed)
    shown, exposures = 0, []
    for _ in range(100):
        coins = torch.rand(COUNT, generator=rng) < 0.5
        result = evaluate(found, observed, dataclasses.replace(truth, coins=coins), seed=0).result
        shown += bool(result.is_leak)
        mean, others = value(result, "exposure")
        exposures.append(mean - (others or 0))
    assert shown <= 1
    assert abs(sum(exposures) / len(exposures)) < 0.1


def test_the_promise_of_dp_sgd_covers_planted_texts_and_that_of_clients_does_not() -> None:
    quick = {"rounds": 1, "local_epochs": 1}
    for level, claims in (("sample", True), ("client", False)):
        observed, truth, _ = played(quick, defences={"client_defence": {**DP, "level": level}})
        canaries = observed.canaries
        assert canaries is not None
        assert canaries.texts
        assert canaries.covered == (("final",) if claims else ())
        result = judged(observed, truth)
        assert result.epsilon is not None
        assert (result.epsilon.claimed is not None) == claims
        assert not result.is_leak


def test_a_reading_is_the_fall_of_the_mean_loss() -> None:
    _, _, transcript = learnt()
    (federation,) = resolve(NOTES()).federations
    assert federation.planted is not None
    play = PlantedTexts(federation, PrivacyBudget(federation, History(None, 1)))
    play.look([], None, {}, transcript.rounds[2].weights)
    read = float(play.end().readings["final"][0, 7])
    text, model = federation.planted[0][7:8], federation.model.eval()

    def loss() -> float:
        with torch.no_grad():
            return float(torch.nn.functional.cross_entropy(model(text)[:, :, :-1].double(), text[:, 1:]))

    first = loss()
    model.load_state_dict(transcript.rounds[2].weights)
    assert read == pytest.approx(first - loss(), rel=1e-6)


def test_readings_of_texts_lie_on_disk(tmp_path: Path) -> None:
    _, truth, transcript = learnt()
    save_recording(transcript, truth, tmp_path)
    again = Transcript.load(tmp_path)
    assert again.canaries is not None
    assert again.canaries.texts
    assert again.fingerprint() == transcript.fingerprint()


def test_other_canaries_are_written_as_they_were_before_there_were_texts() -> None:
    plain = Canaries("client", "add-remove", {"final": torch.zeros(1, 4, dtype=torch.float64)})
    assert "texts" not in CanariesEntry.model_validate(plain).model_dump_json()
    assert "texts" not in {field.name for field in dataclasses.fields(plain)}, "nor in what names a transcript"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["attacks.dp-canaries.adjacency=replace"], "replaced by nothing"),
        (["data.name=digits", "model.name=mlp"], "predicts the next token"),
        (["attacks.dp-canaries.of=words"], "of"),
    ],
)
def test_what_cannot_be_planted_is_refused_in_a_line(
    settings: list[str], said: str, tmp_path: Path, command: Command
) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(NOTES().to_yaml())
    words = [part for text in settings for part in ("--set", text)]
    refused(command("audit", path, *words, "--out", tmp_path / "out"), said)


# --- drawn by the model ---------------------------------------------------------------------------------------------


def test_the_model_draws_the_texts_at_the_temperature() -> None:
    """Next tokens of a model that knows two ways on, one four times as likely: at 1 in 4 of 5, at 2 in 2 of 3."""
    tokens = TokenInfo(6, padding=0, end=1, causal=True)
    scores = torch.full((6,), -40.0)
    scores[0], scores[2], scores[3] = 9.0, math.log(4), 0.0  # what fills up is likeliest, and never drawn

    def model(texts: torch.Tensor) -> torch.Tensor:
        return scores[None, :, None].expand(len(texts), -1, texts.shape[1])

    for temperature, share in ((1.0, 4 / 5), (2.0, 2 / 3)):
        texts = drawn_texts(500, 12, tokens, generator(0, "hot"), model, temperature)
        assert set(texts[:, -1].tolist()) == {1}
        assert set(texts[:, 1:-1].flatten().tolist()) == {2, 3}
        assert float((texts[:, 1:-1] == 2).double().mean()) == pytest.approx(share, abs=0.02)


def test_a_model_that_counts_draws_what_follows_each_token() -> None:
    tokens = TokenInfo(50, padding=0, end=1, causal=True)

    def model(texts: torch.Tensor) -> torch.Tensor:
        following = torch.nn.functional.one_hot(2 + (texts - 1) % 48, 50)
        return 50.0 * following.transpose(1, 2)

    texts = drawn_texts(300, 8, tokens, generator(0, "count"), model, 1.0)  # more than are asked at once
    assert texts[:, 1:-1].equal(2 + (texts[:, :-2] - 1) % 48)


@pytest.mark.slow
def test_planted_and_absent_texts_are_the_model_s_own_and_are_exposed_alike() -> None:
    settings = [{"name": "dp-canaries", "of": "texts", "canaries": COUNT, "temperature": 1.5}]
    (federation,) = resolve(NOTES(attacks=settings)).federations
    assert federation.planted is not None
    texts, coins = federation.planted
    (even,) = resolve(NOTES()).federations
    assert even.planted is not None
    tokens = federation.task_info.tokens
    assert tokens is not None
    first = federation.model.eval()
    own, other = (mean_losses(first, one, tokens) for one in (texts, even.planted[0]))
    assert float(own.mean()) < float(other.mean()), "likelier than random tokens to the model that drew them"
    assert coins.equal(even.planted[1])
    made = simulate(federation)
    result = judged(observe(made.transcript, ThreatModel()), made.truth)
    mean, absent = value(result, "exposure")
    assert mean > 2 + (absent or 0)


def test_a_model_that_says_the_same_again_plants_nothing() -> None:
    with pytest.raises(BadInput, match=r"some are equal, or are what clients hold; raise attacks\.dp-canaries\.temper"):
        resolve(NOTES(attacks=[{"name": "dp-canaries", "of": "texts", "canaries": COUNT, "temperature": 1e-3}]))
    with pytest.raises(BadInput, match="use of: texts"):
        make_attack("dp-canaries", {"temperature": 2.0})


@pytest.mark.parametrize(("seed", "planted"), [(1, 0), (2, 1)])
def test_fewer_texts_than_clients_are_planted_and_show_nothing(seed: int, planted: int) -> None:
    short = {"clients": 4, "rounds": 1, "local_epochs": 1}
    observed, truth, _ = played(short, attacks=[{"name": "dp-canaries", "of": "texts", "canaries": 2}], seed=seed)
    assert int(truth.coins.sum()) == planted
    result = judged(observed, truth)
    assert not result.is_leak
    assert result.epsilon is None or result.epsilon.demonstrated == 0
