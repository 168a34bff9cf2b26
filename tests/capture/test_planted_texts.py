"""Texts planted in a federation that really runs: what clients hold, and what the recorded global model tells."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedaudit
from fedaudit import BadInput, CanaryTexts, NotApplicable, Recorder, Transcript, make_attack
from fedaudit.modalities import TokenInfo
from fedaudit.models import build_model
from fedaudit.transcript.observation import observe

WORDS, LENGTH, COUNT = 60, 8, 80
TOKENS = TokenInfo(WORDS, padding=0, end=1, causal=True)


def writer() -> nn.Module:
    torch.manual_seed(0)
    return build_model("decoder", input_shape=(LENGTH,), outputs=WORDS, width=32, tokens=TOKENS)


def run(
    folder: Path, *, steps: int = 40, planted: bool = True, rounds: int = 2, closed: bool = True, **options: Any
) -> CanaryTexts:
    """Record two clients that train on eight texts of their own, and on planted ones or not."""
    model = writer()
    canaries = CanaryTexts(model, COUNT, length=LENGTH, tokens=TOKENS, seed=3, **options)
    held = torch.randint(2, WORDS, (16, LENGTH), generator=torch.Generator().manual_seed(1))
    with Recorder(folder, tokens=TOKENS, canaries=canaries) as recorder:
        for _ in range(rounds):
            start, states = copy.deepcopy(model.state_dict()), []
            with recorder.round(start):
                for client in range(2):
                    model.load_state_dict(start)
                    own = held[client * 8 : client * 8 + 8]
                    own = torch.cat([own, canaries.of(client, 2)]) if planted else own
                    optimiser = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
                    with recorder.capture() as seen:
                        for _ in range(steps):
                            optimiser.zero_grad()
                            nn.functional.cross_entropy(model(own), TOKENS.following(own)).backward()
                            optimiser.step()
                    recorder.update(f"site-{client}", model.state_dict(), seen, num_examples=len(own))
                    states.append(copy.deepcopy(model.state_dict()))
            model.load_state_dict({k: torch.stack([s[k] for s in states]).mean(0) for k in start})
        if closed:
            recorder.close(model.state_dict())
    return canaries


def judged(folder: Path) -> Any:
    done = fedaudit.audit_transcript(folder, ["dp-canaries"], module=writer(), controls=False, progress=False)
    return done.result.findings[0]


def exposure(finding: Any) -> tuple[float, float]:
    return next((m.value, m.baseline) for m in finding.metrics if m.name == "exposure")


def test_clients_hold_the_texts_whose_coin_says_so() -> None:
    made = CanaryTexts(writer(), COUNT, length=LENGTH, tokens=TOKENS, seed=3)
    held = [{tuple(text) for text in made.of(client, 3).tolist()} for client in range(3)]
    for number, (text, coin) in enumerate(zip(made.texts.tolist(), made.coins.tolist(), strict=True)):
        assert [tuple(text) in own for own in held] == [coin and number % 3 == client for client in range(3)]
    again = CanaryTexts(writer(), COUNT, length=LENGTH, tokens=TOKENS, seed=3)
    assert again.texts.equal(made.texts), "two processes plant the same"
    assert again.coins.equal(made.coins)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"temperature": 2.0}])
def test_planted_texts_are_exposed_by_the_last_global_model(options: dict[str, Any], tmp_path: Path) -> None:
    canaries = run(tmp_path / "r", **options)
    finding = judged(tmp_path / "r")
    mean, others = exposure(finding)
    assert mean > others + 1.5
    assert finding.epsilon.demonstrated > 0.5
    assert finding.epsilon.unit == "record"
    transcript = Transcript.load(tmp_path / "r", writer())
    assert transcript.canaries is not None
    assert transcript.canaries.texts
    # a reading is the fall of the text's mean loss from the first global model to the last
    text = canaries.texts[5:6]
    with torch.no_grad():
        first, last = (
            float(nn.functional.cross_entropy(module(text)[:, :, :-1].double(), text[:, 1:]))
            for module in (writer().eval(), canaries.module)
        )
    assert float(transcript.canaries.readings["final"][0, 5]) == pytest.approx(first - last, rel=1e-6)


def test_texts_that_nobody_trained_on_are_as_exposed_as_the_absent_ones(tmp_path: Path) -> None:
    canaries = run(tmp_path / "r", steps=5, planted=False)
    finding = judged(tmp_path / "r")
    mean, others = exposure(finding)
    absent = int((~canaries.coins).sum())
    ranks = torch.arange(1, absent + 1).double()
    assert others == pytest.approx(float((math.log2(absent) - ranks.log2()).mean()))
    assert abs(mean - others) < 0.6
    assert not finding.is_leak


def test_what_cannot_be_planted_is_refused_in_a_line(tmp_path: Path) -> None:
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"count": 1}, "count from 2"),
        ({"length": 2}, "length from 3"),
        ({"temperature": 0.0}, "temperature above 0"),
        ({"temperature": 1e-4}, "some are equal"),
        ({"claimed": math.nan}, "claimed is nan"),
        ({"claimed": -1.0}, "claimed is -1"),
        ({"count": 10.5}, "count is 10.5; give a whole number"),
        ({"length": 8.5}, "length is 8.5; give a whole number"),
        ({"length": LENGTH + 1}, "reads no texts of 9 tokens out of 60"),
        ({"length": LENGTH + 1, "temperature": 2.0}, "reads no texts of 9 tokens out of 60"),
        (
            {"tokens": TokenInfo(WORDS + 1, padding=0, causal=True), "count": 300},
            "reads no texts of 8 tokens out of 61",
        ),
        ({"tokens": TokenInfo(2, padding=0, end=1, causal=True)}, "no token is left to draw"),
        ({"tokens": TokenInfo(WORDS, padding=0, end=1)}, "predicts the next token"),
        ({"module": nn.Linear(LENGTH, WORDS)}, "reads no texts"),
    )
    for options, said in refused:
        with pytest.raises(BadInput, match=said):
            CanaryTexts(
                **{"module": writer(), "count": COUNT, "length": LENGTH, "tokens": TOKENS, "seed": 0, **options}
            )
    made = CanaryTexts(writer(), COUNT, length=LENGTH, tokens=TOKENS, seed=3)
    with pytest.raises(BadInput, match="no client 2 among 2"):
        made.of(2, 2)
    assert made.of(COUNT + 1, COUNT + 2).shape == (0, LENGTH), "more clients than texts"
    with (
        pytest.raises(BadInput, match="give the module whose state travels"),
        Recorder(tmp_path / "r", tokens=TOKENS, canaries=made) as recorder,
    ):
        recorder.begin_round({"other.weight": torch.zeros(2)})
    with pytest.raises(BadInput, match="size mismatch") as error:
        made.begin({name: value[:1] for name, value in writer().state_dict().items()})
    assert "\n" not in str(error.value)


def test_a_last_model_that_was_forgotten_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path / "r", steps=1)
    assert not caplog.records
    run(tmp_path / "s", steps=1, rounds=1, closed=False)
    (said,) = caplog.records
    assert "Recorder.close(weights)" in said.getMessage()
    assert Transcript.load(tmp_path / "s", writer()).canaries is None
    with pytest.raises(NotApplicable, match=r"a recording has them .* close\(weights\)"):
        make_attack("dp-canaries")(observe(Transcript.load(tmp_path / "s", writer()), fedaudit.ThreatModel()))
