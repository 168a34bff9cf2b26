"""Text: tokens as examples, transformers, which words and which sequences updates give away."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedaudit
from fedaudit.attacks import SequenceFinding, TokenFinding, make_attack
from fedaudit.attacks.text.layers import Receiver, span_of
from fedaudit.attacks.text.output_rows import OutputRows
from fedaudit.attacks.text.search import Linearised
from fedaudit.data import Dataset, load_dataset
from fedaudit.evaluation.sequences import matched, rouge
from fedaudit.modalities import NOTHING, TokenInfo
from fedaudit.models import build_model
from fedaudit.pipeline.prepare import resolve
from fedaudit.pipeline.run import record
from fedaudit.scenario.scenario import scenario_from
from fedaudit.simulation.simulator import Recording
from fedaudit.task.info import TaskInfo
from fedaudit.transcript.observation import observe
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.transcript import Transcript
from fedaudit.transcript.truth import Truth, check_belongs, save_recording
from fedaudit.transcript.update import ClientDefenceInfo
from fedaudit.utils.errors import BadInput, CorruptTranscript, NotApplicable
from fedaudit.utils.seeds import generator
from fedaudit_lab.drawn.notes import LENGTH, tokenise, vocabulary, write_notes
from tests import build
from tests.build import Scenarios

GRADIENTS = {"name": "f", "clients": 1, "examples": 4, "batch_size": 4}


def recorded(
    data: str = "notes-causal", model: str = "decoder", width: int = 96, seed: int = 0, **federation: Any
) -> Recording:
    scenarios = Scenarios(data=data, model={"name": model, "width": width}, federation=GRADIENTS, attacks="dager")
    return build.recorded(scenarios(federation, seed=seed))


def run(name: str, only: Recording, threat: ThreatModel | None = None, **settings: Any) -> Any:
    seen = observe(only.transcript, threat or ThreatModel()).split()[0]
    return make_attack(name, settings)(seen, generator=generator(0, "attack"))


def words(only: Recording, sequences: Tensor) -> list[list[int]]:
    info = only.transcript.task_info.tokens
    assert info is not None
    return sorted(info.words_of(row) for row in sequences)


# --- tokens as examples ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_notes_are_drawn_alike_every_time_and_read_back():
    first, again = load_dataset("notes", seed=3), load_dataset("notes", seed=3)
    assert first.train.inputs.equal(again.train.inputs)
    assert not first.train.inputs.equal(load_dataset("notes", seed=4).train.inputs)
    texts, classes = write_notes(5000, 3)
    assert first.words is not None
    text = " ".join(first.words[token] for token in first.train.inputs[7].tolist() if token)
    assert (text, first.train.targets[7]) == (texts[7], classes[7])
    assert max(len(text.split()) for text in texts) == LENGTH, "no note is cut"
    with pytest.raises(KeyError):
        tokenise(["unheard of"], vocabulary(), 4)


def test_a_causal_target_is_the_token_that_follows():
    tokens = torch.tensor([[5, 6, 7, 0], [5, 1, 0, 0]])
    data = Dataset.from_tokens(tokens, vocabulary=9, padding=0, test=tokens)
    assert data.train.targets.tolist() == [[6, 7, NOTHING, NOTHING], [1, NOTHING, NOTHING, NOTHING]]
    assert data.num_classes == 9
    assert Dataset.from_tokens(tokens.repeat(5, 1), torch.tensor([0, 1] * 5), vocabulary=9).num_classes == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"inputs": np.array([[1, 9]] * 5)}, "a token is 9, and the vocabulary has 0..8"),
        ({"inputs": np.array([[1, -1]] * 5)}, "a token is -1; they count from 0"),
        ({"inputs": np.array([[1.0, 2.0]] * 5)}, "tokens are whole numbers"),
        ({"inputs": np.array([[1, 2]] * 5), "padding": 9}, "padding is 9; it must be one of the 9 tokens"),
        ({"inputs": np.array([[1, 2]] * 5), "words": ["a"]}, "1 words for 9 tokens"),
        ({"inputs": np.array([[1, 2]] * 5), "targets": np.zeros(3, dtype=int)}, "5 sequences need as many targets"),
    ],
)
def test_tokens_are_checked(arguments: dict[str, Any], words: str):
    with pytest.raises(BadInput, match=words):
        Dataset.from_tokens(**arguments, vocabulary=9)


def test_whole_numbers_are_tokens_only_where_they_are_declared():
    rows = torch.randint(9, (20, 4), generator=torch.Generator().manual_seed(0))
    assert Dataset.from_tensors(rows, torch.arange(20) % 2).kind == "table"
    assert Dataset.from_tokens(rows, torch.arange(20) % 2, vocabulary=9).kind == "tokens"
    with pytest.raises(BadInput, match="vocabulary"):
        Dataset.from_tensors(rows, torch.arange(20) % 2, kind="tokens")


def test_a_recording_of_tokens_is_checked_when_it_is_read(tmp_path: Path):
    only = recorded()
    save_recording(only.transcript, only.truth, tmp_path / "t")
    transcript, truth = Transcript.load(tmp_path / "t"), Truth.load(tmp_path / "t/truth.safetensors")
    check_belongs(truth, transcript, tmp_path)
    assert transcript.task_info == only.transcript.task_info
    truth.inputs[0, 0][0, 0] = 5000
    with pytest.raises(CorruptTranscript, match="a token is 5000, and the vocabulary has"):
        check_belongs(truth, transcript, tmp_path)


def test_labels_have_no_meaning_for_a_causal_task_and_are_refused():
    made = {"data": {"name": "notes-causal"}, "model": {"name": "decoder"}, "federations": [GRADIENTS]}
    with pytest.raises(BadInput, match="knows_labels isn't for a causal task"):
        resolve(scenario_from({**made, "threat": {"knows_labels": True}, "attacks": ["dager"]}))


# --- transformers ---------------------------------------------------------------------------------------------------

INFO = TokenInfo(20, padding=0, causal=True)


def test_a_decoder_sees_what_precedes_and_an_encoder_everything():
    tokens = torch.randint(1, 20, (3, 6), generator=torch.Generator().manual_seed(0))
    other = tokens.clone()
    other[:, 4] = (other[:, 4] % 19) + 1
    decoder = build_model("decoder", input_shape=(6,), outputs=20, width=16, tokens=INFO).eval()
    before, after = decoder(tokens), decoder(other)
    assert before.shape == (3, 20, 6)
    torch.testing.assert_close(before[:, :, :4], after[:, :, :4])
    assert float((before - after).detach()[:, :, 4:].abs().min(dim=1).values.max()) > 1e-4
    encoder = build_model("encoder", input_shape=(6,), outputs=3, width=16, tokens=TokenInfo(20, padding=0)).eval()
    assert encoder(tokens).shape == (3, 3)
    assert float((encoder(tokens) - encoder(other)).abs().max()) > 1e-4


@pytest.mark.parametrize("name", ["decoder", "encoder"])
def test_padding_is_seen_by_nobody(name: str):
    short, long = (
        build_model(name, input_shape=(length,), outputs=3, width=16, tokens=TokenInfo(20, padding=0)).eval()
        for length in (4, 6)
    )
    state = long.state_dict()
    short.load_state_dict({**state, "position.weight": state["position.weight"][:4]})
    tokens = torch.tensor([[3, 4, 5, 0], [6, 0, 0, 0]])
    torch.testing.assert_close(short(tokens), long(nn.functional.pad(tokens, (0, 2))))


def test_attention_is_pytorch_s():
    model = build_model("encoder", input_shape=(5,), outputs=3, width=16, tokens=TokenInfo(20)).eval()
    ours = model.blocks[0].attention  # type: ignore[index, union-attr]
    theirs = nn.MultiheadAttention(16, ours.heads, batch_first=True)
    parts = [getattr(ours, name) for name in ("query", "key", "value")]
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
        theirs.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
        theirs.out_proj.weight.copy_(ours.output.weight)
        theirs.out_proj.bias.copy_(ours.output.bias)
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    expected = theirs(x, x, x, attn_mask=~causal, need_weights=False)[0]
    torch.testing.assert_close(ours(x, causal.expand(2, -1, -1)), expected)


def test_the_decoder_has_as_many_parameters_as_its_layers_say():
    model = build_model("decoder", input_shape=(6,), outputs=20, tokens=INFO)
    w = 128
    block = 2 * 2 * w + 4 * (w * w + w) + (4 * w * w + 4 * w) + (4 * w * w + w)
    assert sum(p.numel() for p in model.parameters()) == 20 * w + 6 * w + 2 * block + 2 * w + 20 * w + 20


def test_models_and_examples_must_go_together():
    made = {"federations": [GRADIENTS], "attacks": ["dager"]}
    for data, model, why in (
        ("notes", "mlp", "model 'mlp' takes real values"),
        ("digits", "decoder", "model 'decoder' takes sequences"),
        ("notes-causal", "encoder", "sees what follows"),
    ):
        with pytest.raises(BadInput, match=why):
            resolve(scenario_from({**made, "data": {"name": data}, "model": {"name": model}}))


# --- which tokens ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"algorithm": "fedavg", "local_steps": 3, "examples": 12, "learning_rate": 0.1}])
def test_rows_that_moved_are_the_words_that_occurred(more: dict[str, Any]):
    only = recorded(**more)
    found = run("token-presence", only)
    assert isinstance(found, TokenFinding)
    inputs = only.truth.inputs[0, 0]
    missing = set(inputs.unique().tolist()) - set(found.tokens.tolist())
    assert set(found.tokens.tolist()) <= set(inputs.unique().tolist())
    assert missing <= {0, 1}, "all but padding and the end, which nothing follows"


def test_noise_of_a_known_size_names_no_word():
    only = recorded()
    seen = observe(only.transcript, ThreatModel()).split()[0]
    message, rng = seen.messages[0], torch.Generator().manual_seed(0)
    noised = {n: t + 1e-4 * torch.randn(t.shape, generator=rng) for n, t in message.update.tensors.items()}
    update = dataclasses.replace(message.update, tensors=noised, sanitised=ClientDefenceInfo("dp", noise=1e-4))
    noisy = dataclasses.replace(seen, messages=(dataclasses.replace(message, update=update),))
    found = set(make_attack("token-presence")(noisy, generator=generator(0)).tokens.tolist())  # type: ignore[attr-defined]
    true = set(only.truth.inputs[0, 0].unique().tolist())
    assert found <= true
    assert len(found) > 0.8 * len(true)


# --- DAGER ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "model", "more"),
    [
        ("notes-causal", "decoder", {}),
        ("notes", "encoder", {}),
        ("notes", "encoder", {"algorithm": "fedavg", "local_steps": 1, "learning_rate": 0.01, "examples": 2}),
        *[
            pytest.param(*slow, marks=pytest.mark.slow)
            for slow in (
                ("notes", "decoder", {}),
                ("notes", "decoder-4", {}),
                ("notes", "encoder", {"examples": 1, "batch_size": 1}),
                ("notes-causal", "decoder", {"algorithm": "fedavg", "local_steps": 1, "learning_rate": 0.01}),
            )
        ],
    ],
)
def test_dager_reads_a_batch_word_for_word(data: str, model: str, more: dict[str, Any]):
    only = recorded(data, model, **more)
    found = run("dager", only)
    assert isinstance(found, SequenceFinding)
    assert words(only, found.sequences) == words(only, only.truth.inputs[0, 0])


@pytest.mark.parametrize("sizes", [(1.0,), (1.0, 1e-4), (1.0, 1e-2, 1e-4), (1e-3, 1.0, 3e-5), (1.0, 5e-7)])
def test_a_span_holds_examples_that_the_model_is_sure_of(sizes: tuple[float, ...]):
    """Their gradients are small, so the singular values fall in several steps; the last is that to rounding."""
    rng = torch.Generator().manual_seed(0)
    inputs = torch.randn(len(sizes), 6, 64, generator=rng, dtype=torch.float64)
    back = torch.randn(len(sizes), 6, 48, generator=rng, dtype=torch.float64) * torch.tensor(sizes)[:, None, None]
    noise = 1e-8 * torch.randn(48, 64, generator=rng, dtype=torch.float64)
    gradient = (torch.einsum("nto,nti->oi", back, inputs) + noise).to(torch.float32)
    receiver = Receiver("layer", 64, ("layer.weight",), frozenset(), attention=False)
    span = span_of({"layer.weight": gradient}, receiver, tokens=32)
    assert span is not None
    assert span.rank == 6 * len(sizes)
    assert bool((span.distances(inputs.to(torch.float32)) <= 1).all())
    assert bool((span.distances(torch.randn(20, 64, generator=rng)) > 1).all())


def test_a_square_matrix_ends_where_its_examples_do():
    """The last singular values of square noise fall to nearly nothing, each far below the one before."""
    receiver = Receiver("layer", 32, ("layer.weight",), frozenset(), attention=False)
    ranks = []
    for seed in range(100):
        rng = torch.Generator().manual_seed(seed)
        whole = torch.randn(32, 12, generator=rng) @ torch.randn(12, 32, generator=rng)
        span = span_of({"layer.weight": whole + 1e-7 * torch.randn(32, 32, generator=rng)}, receiver, tokens=200)
        ranks.append(span and span.rank)
    assert ranks == [12] * 100


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("rounds", [1, 100])
def test_dager_reads_an_encoder_s_batch_of_eight(rounds: int):
    """Untrained and trained: attention is nearly the mean at first, and isn't after a hundred rounds."""
    only = recorded("notes", "encoder", width=256, examples=800, batch_size=8, rounds=rounds, learning_rate=0.3)
    seen = observe(only.transcript, ThreatModel()).split()[rounds - 1]
    found: Any = make_attack("dager")(seen, generator=generator(0, "attack"))
    assert words(only, found.sequences) == words(only, only.truth.inputs[rounds - 1, 0])
    assert bool((found.distances <= 1).all()), "all are known to be right"


def test_words_are_weighed_by_what_they_move_together():
    """A layer that is linear, and of it two sequences: each gets its words, and of both nothing else gets weight."""
    rng = torch.Generator().manual_seed(0)
    sets = [torch.arange(5) for _ in range(4)]
    moves = torch.randn(20, 30, generator=rng, dtype=torch.float64)
    one, other = torch.tensor([0, 6, 12, 18]), torch.tensor([1, 6, 13, 18])  # rows of the words of two sequences
    moves[one[0]] += moves[other].sum(dim=0) - moves[one].sum(dim=0)  # both move the sum by as much
    base = -moves[one].sum(dim=0)
    weights, rest = Linearised(torch.zeros(4), {}, sets, torch.cat([base[None], base + moves])).weigh()
    assert rest < 1e-6
    every = torch.cat(weights)
    assert torch.allclose(every.view(4, 5).sum(dim=1), torch.ones(4, dtype=torch.float64), atol=1e-6)
    assert set((every > 1e-6).nonzero()[:, 0].tolist()) <= {*one.tolist(), *other.tolist()}
    layer = Linearised(torch.zeros(4), {}, sets, torch.cat([base[None], base + moves])).without(0, {0})
    assert layer is not None
    weights, rest = layer.weigh()
    assert rest < 1e-6
    assert [int(words[each.argmax()]) for words, each in zip(layer.sets, weights, strict=True)] == [1, 1, 3, 3]
    assert Linearised(torch.zeros(4), {}, sets, torch.cat([base[None], base + moves])).without(0, set(range(5))) is None
    lost = layer.without(0, {1})
    assert lost is not None
    assert lost.weigh()[1] > 0.3, "what no sequence explains is left over"


def test_dager_says_where_the_tokens_are_too_many_for_the_width():
    only = recorded("notes", width=32, examples=8, batch_size=8)
    found = run("dager", only)
    assert len(found.sequences) == 0
    assert any("too many for that width" in note for note in found.notes)


@pytest.mark.slow
def test_dager_reads_more_tokens_than_the_model_is_wide():
    """109 places with a next word, of width 64: no span has an end, and the output layer's rows tell every word."""
    only = recorded(width=64, examples=8, batch_size=8)
    inputs = only.truth.inputs[0, 0]
    assert int((inputs > 0).sum()) - len(inputs) > 1.5 * 64
    found = run("dager", only)
    assert words(only, found.sequences) == words(only, inputs)
    assert "they are all of the update's" in found.notes[-1]


def test_what_sequences_leave_of_an_output_layer_s_gradient_is_autograd_s():
    only = recorded(width=32)
    module, inputs, info = only.transcript.module, only.truth.inputs[0, 0], only.transcript.task_info.tokens
    assert info is not None
    module.load_state_dict(only.transcript.rounds[0].weights)
    module.zero_grad()
    nn.functional.cross_entropy(module(inputs), info.following(inputs)).backward()
    gradient = module.get_parameter("fc.weight").grad
    assert gradient is not None
    layer = Receiver("fc", 32, ("fc.weight",), frozenset(), attention=False)
    rows = OutputRows(module, layer, gradient.double(), inputs.unique()[2:], info, inputs.shape[1], len(inputs))
    assert rows.rest(inputs) < 1e-5
    assert rows.rest(inputs[[1, 0, 3, 2]]) < 1e-5
    wrong = inputs.clone()
    wrong[0, 1] = wrong[1, 1]
    assert rows.rest(wrong) > 1e-2
    assert rows.rest(inputs[:3]) > 1e-2


def test_dager_refuses_what_it_cannot_use():
    made = scenario_from({"data": {"name": "digits"}, "federations": [GRADIENTS], "attacks": ["labels"]})
    (images,) = record(resolve(made))
    with pytest.raises(NotApplicable, match="dager is for sequences"):
        run("dager", images)
    fedavg = recorded(algorithm="fedavg", local_steps=2, examples=8)
    with pytest.raises(NotApplicable, match="needs the learning rate"):
        run("dager", fedavg, ThreatModel(knows_training=False))


@pytest.mark.parametrize(("examples", "found"), [(2, True), (8, False)])
def test_dager_reads_adapters_as_far_as_their_rank_goes(examples: int, found: bool):
    """3 x 16 rows of the adapters' gradients span 30 vectors of two notes, not a hundred of eight."""
    only = recorded(model="decoder-lora", rounds=2, learning_rate=0.5, examples=examples, batch_size=examples)
    assert {name.split(".")[-2] for name in only.transcript.rounds[1].updates[0].tensors} == {"down", "up"}
    seen = observe(only.transcript, ThreatModel()).split()[1]
    finding: Any = make_attack("dager")(seen, generator=generator(0, "attack"))
    if found:
        assert words(only, finding.sequences) == words(only, only.truth.inputs[1, 0])
    else:
        assert len(finding.sequences) == 0
        assert any("too many" in note or "more tokens" in note for note in finding.notes)


def test_dager_reads_new_adapters_by_their_second_half():
    """B is zero in the first round, and so is the gradient of A."""
    tokens = torch.randint(1, 50, (60, 5), generator=torch.Generator().manual_seed(1))
    tokens[:, -1] = 0
    made = {
        "data": {"name": "custom"}, "model": {"name": "decoder-lora", "width": 96}, "attacks": ["dager"],
        "federations": [{**GRADIENTS, "examples": 2, "batch_size": 2}],
    }  # fmt: skip
    recording = fedaudit.simulate(made, data=Dataset.from_tokens(tokens, vocabulary=50, end=0), progress=False)
    sent = recording.transcript.rounds[0].updates[0].tensors
    assert not any(bool(t.any()) for name, t in sent.items() if ".down." in name)
    assert words(recording, run("dager", recording).sequences) == words(recording, recording.truth.inputs[0, 0])


def test_labels_of_classified_text_are_told_for_an_encoder_s_single_example():
    only = recorded("notes", "encoder", examples=1, batch_size=1)
    assert run("labels", only).labels.equal(only.truth.labels[0, 0])


def test_noise_hides_the_span_and_nothing_is_claimed():
    only = recorded()
    update = only.transcript.rounds[0].updates[0]
    rng = torch.Generator().manual_seed(0)
    for name, tensor in update.tensors.items():
        update.tensors[name] = tensor + 0.1 * torch.randn(tensor.shape, generator=rng)
    true = words(only, only.truth.inputs[0, 0])
    assert not any(row in true for row in words(only, run("dager", only).sequences))


# --- evaluation and report ------------------------------------------------------------------------------------------


def test_rouge_by_hand():
    assert rouge([1, 2, 3], [1, 2, 3], 1) == rouge([1, 2, 3], [1, 2, 3], 2) == 1
    assert rouge([1, 1, 2], [1, 2, 3, 4], 1) == pytest.approx(2 * (2 / 3) * (2 / 4) / (2 / 3 + 2 / 4))
    assert rouge([1, 2, 9], [1, 2, 3, 4], 2) == pytest.approx(2 * (1 / 2) * (1 / 3) / (1 / 2 + 1 / 3))
    assert rouge([], [1], 1) == 0


def test_each_found_sequence_is_paired_once():
    assert matched([[1, 2], [3, 4]], [[3, 4], [1, 2], [1, 9]]) == [1, 0, None]
    assert matched([], [[1]]) == [None]


@pytest.mark.slow
def test_an_audit_of_text_goes_from_the_data_to_the_report(tmp_path: Path):
    made = {
        "name": "text",
        "data": {"name": "notes-causal"},
        "model": {"name": "decoder", "width": 96},
        "federations": [{**GRADIENTS, "clients": 2, "examples": 6, "batch_size": 3}],
    }
    result = fedaudit.audit(made, out=tmp_path, progress=False).result
    assert {s.attack: s.verdict for s in result.summaries} == {"dager": "recovered", "token-presence": "inferred"}
    found = next(f for f in result.findings if f.attack == "dager")
    assert {m.name: m.value for m in found.metrics} == {"rouge1": 1.0, "rouge2": 1.0, "exact_sequences": 1.0}
    assert [s.true for s in found.sequences] == [s.found for s in found.sequences]
    page = (tmp_path / "report.html").read_text()
    assert "word for word" in page
    assert result.data.words is not None
    sentence = [result.data.words[token] for token in found.sequences[0].true]
    assert " ".join(f"<mark>{word}</mark>" for word in sentence) in page


def test_a_user_s_own_tokens_and_transformer_are_audited():
    class Own(nn.Module):
        """A transformer of PyTorch's own layers, for whole sentences."""

        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(50, 64), nn.Parameter(torch.randn(6, 64) * 0.5)
            layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
            self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.out = nn.Linear(64, 50)

        def forward(self, x: Tensor) -> Tensor:
            seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
            hidden = self.layers(self.words(x) + self.places[: x.shape[1]], mask=~seen)
            return self.out(hidden).transpose(1, 2)  # type: ignore[no-any-return]

    tokens = torch.randint(1, 50, (60, 6), generator=torch.Generator().manual_seed(1))
    tokens[:, -1] = 0
    data = Dataset.from_tokens(tokens, vocabulary=50, end=0)
    torch.manual_seed(0)
    made = {"data": {"name": "custom"}, "federations": [GRADIENTS], "attacks": ["dager"]}
    result = fedaudit.audit(made, model=Own(), data=data, progress=False).result
    assert result.summaries[0].verdict == "recovered"
    assert {m.name: m.value for m in result.findings[0].metrics}["exact_sequences"] == 1.0


def _gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")

    class Own(nn.Module):
        """GPT-2's layers with an output layer of its own: its usual one shares the embedding's weights."""

        def __init__(self) -> None:
            super().__init__()
            sizes = {"n_positions": 6, "n_embd": 64, "n_layer": 2, "n_head": 4}
            config = transformers.GPT2Config(vocab_size=50, **sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
            self.body, self.out = transformers.GPT2Model(config), nn.Linear(64, 50)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.body(x).last_hidden_state).transpose(1, 2)  # type: ignore[no-any-return]

    return Own()


def _bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")

    class Own(nn.Module):
        """BERT, which classifies a sequence by its first token."""

        def __init__(self) -> None:
            super().__init__()
            sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
            drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
            config = transformers.BertConfig(vocab_size=50, max_position_embeddings=6, num_labels=3, **sizes, **drops)
            self.body = transformers.BertForSequenceClassification(config)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x).logits  # type: ignore[no-any-return]

    return Own()


@pytest.mark.parametrize(("model", "targets", "batch"), [(_gpt2, None, 4), (_bert, torch.arange(60) % 3, 2)])
def test_models_of_transformers_are_audited(model: Callable[[], nn.Module], targets: Tensor | None, batch: int):
    tokens = torch.randint(1, 50, (60, 6), generator=torch.Generator().manual_seed(1))
    tokens[:, -1] = 0
    torch.manual_seed(0)
    federation = {**GRADIENTS, "examples": batch, "batch_size": batch}
    made = {"data": {"name": "custom"}, "federations": [federation], "attacks": ["dager"]}
    data = Dataset.from_tokens(tokens, targets, vocabulary=50, end=0)
    result = fedaudit.audit(made, model=model(), data=data, progress=False).result
    assert result.summaries[0].verdict == "recovered"
    assert {m.name: m.value for m in result.findings[0].metrics}["exact_sequences"] == 1.0


def test_task_info_wants_a_vocabulary_for_tokens_alone():
    common: dict[str, Any] = {
        "model": "decoder", "width": None, "batch_norm": "eval", "loss": "cross-entropy", "input_shape": (4,),
        "mean": (0.0,), "std": (1.0,),
    }  # fmt: skip
    with pytest.raises(BadInput, match="tokens need a vocabulary"):
        TaskInfo(**common, kind="tokens", num_classes=2)
    with pytest.raises(BadInput, match="a vocabulary belongs to"):
        TaskInfo(**common, kind="table", num_classes=2, tokens=INFO)
    with pytest.raises(BadInput, match="a class for each token"):
        TaskInfo(**common, kind="tokens", num_classes=2, tokens=INFO)
