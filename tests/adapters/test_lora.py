"""Models of transformers that are fine-tuned by peft's adapters of low rank: recorded as they are, replayed, read."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedaudit.utils.machine import import_torchvision, own_process

if importlib.util.find_spec("peft") is None:
    pytest.skip("needs peft", allow_module_level=True)
pytestmark = pytest.mark.peers
own_process()
import_torchvision()  # transformers looks for it

from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict  # noqa: E402
from transformers import (  # noqa: E402
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    get_cosine_schedule_with_warmup,
)

import fedaudit  # noqa: E402
from fedaudit.modalities import TokenInfo  # noqa: E402
from fedaudit.utils.errors import BadInput  # noqa: E402

EXAMPLE = Path(__file__).parents[2] / "examples" / "lora"
QUICK: Any = {"controls": False, "progress": False}
WORDS, LENGTH = 60, 8


def errors(recording: Path) -> list[float]:
    return [update["error"] for update in json.loads((recording / "replay.json").read_text())["updates"]]


def test_the_flower_example_is_recorded_unchanged_and_audited_by_one_command(tmp_path):
    pytest.importorskip("flwr")
    from fedaudit.adapters.flower import audit_flower

    words = EXAMPLE / "lora_app" / "words.txt"
    finished = audit_flower(EXAMPLE, nodes=4, words=words, out=tmp_path, **QUICK)
    assert max(errors(tmp_path / "recording")) < 1e-4
    result = finished.result
    recording = result.federations[0].recording
    assert recording is not None
    assert recording.facts == "verified"
    verdicts = {summary.attack: summary.verdict for summary in result.summaries}
    assert verdicts["dager"] == verdicts["extraction"] == "recovered"
    assert {verdicts[name] for name in ("reference-loss", "min-k", "fedmia", "source-inference")} == {"inferred"}
    # in the first round B is zero, and A has no gradient; then whole texts come out
    assert {f.round for f in result.findings if f.attack == "dager"} == {0, 29}
    later = [s for f in result.findings if f.attack == "dager" and f.round == 29 for s in f.sequences]
    assert [s.found for s in later] == [s.true for s in later]
    (refused, *_) = [f for f in result.findings if f.attack == "token-presence"]
    assert "needs the update of an embedding" in str(refused.reason)
    (said,) = [f.recited for f in result.findings if f.attack == "extraction"]
    named = recording.clients[said[0].client]
    page = (tmp_path / "report.html").read_text()
    assert f"held by client {named}" in page
    known = words.read_text().split()
    assert f"<span>{' '.join(known[token] for token in said[0].begin)}</span>" in page
    again = fedaudit.audit_transcript(
        tmp_path / "recording", ["dager", "extraction"], module=trained_module(), rounds=[0, 29], words="masked",
        out=tmp_path / "masked", **QUICK,
    ).result  # fmt: skip
    assert again.data.words is None
    assert [s.verdict for s in again.summaries] == ["recovered"] * 2
    masked: list[Any] = [t for f in again.findings for t in (*f.sequences, *f.recited)]
    assert {token for text in masked for token in (*text.true, *text.found)} == {-1, -2}
    assert "patient" not in (tmp_path / "masked" / "report.html").read_text()
    transcript = fedaudit.Transcript.load(tmp_path / "recording", trained_module())
    assert all(".lora_" in name for r in transcript.rounds for u in r.updates for name in u.tensors)
    info = transcript.task_info.tokens
    assert info is not None
    assert (info.vocabulary, info.padding, info.end, info.causal) == (170, 0, 1, True)


def trained_module() -> nn.Module:
    from fedaudit.adapters.flower.in_process import loaded

    with loaded(EXAMPLE):
        made: nn.Module = sys.modules["lora_app.task"].make_model()
    return made


def adapted(kind: str) -> Any:
    """Return a small Llama or a classifier of GPT-2's layers, with adapters."""
    torch.manual_seed(0)
    sizes: Any = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    sizes["initializer_range"] = 0.2  # weights about as large as trained ones, and so are gradients
    if kind == "llama":
        config = LlamaConfig(**sizes, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
        return get_peft_model(LlamaForCausalLM(config), LoraConfig(r=16, task_type="CAUSAL_LM"))
    drops: Any = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    model = GPT2Config(**sizes, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, num_labels=3, **drops)
    lora = LoraConfig(r=32, target_modules=["c_attn"], task_type="SEQ_CLS")
    return get_peft_model(GPT2ForSequenceClassification(model), lora)


def recorded(folder: Path, model: Any, batches: list[dict[str, Tensor]], *, whole_names: bool, own_loss: bool) -> None:
    """Record a round after one that only moves B away from zero."""
    recorder = fedaudit.Recorder(folder)
    optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
    model.train()
    model(**batches[0]).loss.backward()
    optimiser.step()
    start = state(model, whole_names=whole_names)
    with recorder.round(start):
        with recorder.capture() as seen:
            for batch in batches:
                optimiser.zero_grad()
                loss_of(model, batch, own=own_loss).backward()
                optimiser.step()
        recorder.update("a", state(model, whole_names=whole_names), seen, num_examples=len(batches[0]["labels"]))
    recorder.close()


def loss_of(model: Any, batch: dict[str, Tensor], *, own: bool) -> Tensor:
    made: Tensor
    if own:
        logits = model(input_ids=batch["input_ids"]).logits
        made = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    else:
        made = model(**batch).loss
    return made


def state(model: Any, *, whole_names: bool) -> dict[str, Tensor]:
    if whole_names:
        return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    return {name: value.clone() for name, value in get_peft_model_state_dict(model).items()}


def batch(examples: int, classes: int = 0, seed: int = 1) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(2, WORDS, (examples, LENGTH), generator=random)
    tokens[:, -1] = 1
    tokens[0, -3:] = torch.tensor([1, 0, 0])
    labels = torch.arange(examples) % classes if classes else tokens.where(tokens > 0, -100)
    return {"input_ids": tokens, "attention_mask": (tokens > 0).long(), "labels": labels}


@pytest.mark.parametrize("whole_names", [False, True])
def test_llama_s_adapters_are_read_under_both_kinds_of_names(whole_names, tmp_path):
    model = adapted("llama")
    recorded(tmp_path / "r", model, [batch(2)], whole_names=whole_names, own_loss=False)
    result = fedaudit.audit_transcript(tmp_path / "r", ["dager"], module=model, **QUICK).result
    assert errors(tmp_path / "r") == pytest.approx([0], abs=1e-6)
    (found,) = result.findings
    assert [s.found for s in found.sequences] == [s.true for s in found.sequences]


def test_a_classifier_s_adapters_and_its_whole_last_layer(tmp_path):
    model = adapted("classifier")
    recorded(tmp_path / "r", model, [batch(2, 3)], whole_names=False, own_loss=False)
    result = fedaudit.audit_transcript(tmp_path / "r", ["dager", "labels"], module=model, **QUICK).result
    assert errors(tmp_path / "r") == pytest.approx([0], abs=1e-6)
    assert result.data.classes == 3
    assert result.findings[0].status == "done", "what it finds depends on how far rounding hides small gradients"
    transcript = fedaudit.Transcript.load(tmp_path / "r", model)
    assert any("score.modules_to_save" in name for name in transcript.rounds[0].updates[0].tensors)


def test_members_of_a_classifier_s_training_are_told(tmp_path):
    model, own, others = adapted("classifier"), batch(12, 3), batch(12, 3, seed=2)
    recorded(tmp_path / "r", model, [own] * 25, whole_names=False, own_loss=False)
    records = others["input_ids"], others["labels"]
    attacks = ["loss-threshold"]
    result = fedaudit.audit_transcript(tmp_path / "r", attacks, module=model, records=records, **QUICK).result
    assert errors(tmp_path / "r") == pytest.approx([0], abs=1e-5)
    assert [f.status for f in result.findings] == ["done"]


def test_a_loss_of_part_of_the_logits_is_refused_in_words(tmp_path):
    model = adapted("llama")
    recorded(tmp_path / "r", model, [batch(2)], whole_names=False, own_loss=True)
    with pytest.raises(BadInput) as told:
        fedaudit.audit_transcript(tmp_path / "r", ["dager"], module=model, **QUICK)
    assert "isn't recorded" in str(told.value)
    assert "\n" not in str(told.value)


def test_planted_texts_are_read_of_adapters_alone() -> None:
    model = adapted("llama")
    tokens = TokenInfo(WORDS, padding=0, end=1, causal=True)
    canaries = fedaudit.CanaryTexts(model, 4, length=LENGTH, tokens=tokens, temperature=3.0, seed=0)
    state = get_peft_model_state_dict(model)
    moved = {name: value + 0.1 * torch.ones_like(value) for name, value in state.items()}
    canaries.begin(state)
    canaries.begin(moved)
    first, last = canaries._losses
    for weights, losses in ((state, first), (moved, last)):
        set_peft_model_state_dict(model, weights)
        with torch.no_grad():
            each = [float(model.eval()(input_ids=text[None], labels=text[None]).loss) for text in canaries.texts]
        assert losses.tolist() == pytest.approx(each, rel=1e-5)
    assert not torch.allclose(first, last)


def test_a_writer_s_texts_are_told_and_come_out_of_its_adapters(tmp_path):
    """GPT-2's layers, all with adapters, which learn two sites' texts by heart, labelled as transformers does."""
    torch.manual_seed(0)
    sizes: Any = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    drops: Any = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    config = GPT2Config(**sizes, n_positions=12, n_embd=48, n_layer=2, n_head=4, initializer_range=0.2, **drops)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules=["c_attn", "c_proj", "c_fc"], task_type="CAUSAL_LM")
    model = get_peft_model(GPT2LMHeadModel(config), lora)

    def texts(seed: int, count: int = 12) -> dict[str, Tensor]:
        tokens = torch.randint(1, WORDS, (count, 12), generator=torch.Generator().manual_seed(seed))
        tokens[::3, -2:] = 0
        return {"input_ids": tokens, "attention_mask": (tokens > 0).long(), "labels": tokens.where(tokens > 0, -100)}

    with fedaudit.Recorder(tmp_path / "r") as recorder:
        for _ in range(3):
            start, states = state(model, whole_names=False), []
            with recorder.round(start):
                for site in range(2):
                    set_peft_model_state_dict(model, start)
                    optimiser = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
                    with recorder.capture() as seen:
                        for _ in range(30):
                            optimiser.zero_grad()
                            model(**texts(site)).loss.backward()
                            optimiser.step()
                    states.append(state(model, whole_names=False))
                    recorder.update(f"site-{site}", states[-1], seen, num_examples=12)
            set_peft_model_state_dict(model, {n: torch.stack([s[n] for s in states]).mean(0) for n in start})
    others = texts(9, 60)
    records = others["input_ids"], others["labels"]
    attacks = ["extraction", "reference-loss", "min-k", "zlib-ratio", "loss-threshold"]
    result = fedaudit.audit_transcript(tmp_path / "r", attacks, module=model, records=records, **QUICK).result
    assert errors(tmp_path / "r") == pytest.approx([0] * 6, abs=1e-3)  # Adam divides by small gradients
    verdicts = {s.attack: s.verdict for s in result.summaries}
    assert verdicts == {name: "recovered" if name == "extraction" else "inferred" for name in attacks}
    recited = [text for f in result.findings for text in f.recited]
    assert recited
    for text in recited:
        own = [[t for t in row if t] for row in texts(text.client)["input_ids"].tolist()]
        assert [*text.begin, *text.true] in own


def small(**told: Any) -> Any:
    """Return a small Llama with adapters."""
    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens: Any = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, **told}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **tokens, initializer_range=0.2))
    return get_peft_model(model, LoraConfig(r=8, task_type="CAUSAL_LM"))


def batches(padding: int = 0, *, left: bool = False, answers: bool = False) -> list[dict[str, Tensor]]:
    """Return four batches of three texts, each filled up to its longest, which end with token 1."""
    found, random = [], torch.Generator().manual_seed(3)
    for longest in (6, 9, 7, 8):
        ids = torch.randint(2, WORDS, (3, longest), generator=random)
        mask = torch.ones_like(ids)
        for row, length in enumerate((longest, longest - 1, longest - 2)):
            spare = slice(0, longest - length) if left else slice(length, longest)
            ids[row, spare], mask[row, spare] = padding, 0
            ids[row, -1 if left else length - 1] = 1
        labels = ids.where(mask > 0, -100)
        labels[:, : 3 * answers] = -100
        found.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return found


def fine_tuned(model: Any, given: list[dict[str, Tensor]], *, adam: bool = False, mixed: bool = False) -> None:
    """Train as fine-tuning recipes do: two batches a step, a rate that warms up and falls like a cosine, clipping."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=0.01) if adam else torch.optim.SGD(trained, lr=0.3)
    rates = get_cosine_schedule_with_warmup(optimiser, 1, 3)
    for i, one in enumerate(given):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed):
            loss = model(**one).loss / 2
        loss.backward()
        if i % 2:
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimiser.step()
            rates.step()
            optimiser.zero_grad()


# how models, batches and training differ from the usual -> padding and end, and the most that a replay may be off
PRACTICE: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], tuple[int | None, int | None], float]] = {
    "accumulated, cosine, clipped": ({}, {}, {}, (0, 1), 1e-5),
    "AdamW": ({}, {}, {"adam": True}, (0, 1), 1e-3),
    "answers alone": ({}, {"answers": True}, {}, (0, 1), 1e-5),
    "filled up on the left": ({}, {"left": True}, {}, (0, 1), 1e-5),
    "no padding token: filled up with the end": ({"pad_token_id": None}, {"padding": 1}, {}, (1, None), 1e-5),
    "padding is the end": ({"pad_token_id": 1}, {"padding": 1}, {}, (1, None), 1e-5),
    "several ends": ({"eos_token_id": [7, 1]}, {}, {}, (0, 1), 1e-5),
    "autocast to bfloat16": ({}, {}, {"mixed": True}, (0, 1), 1e-3),
}


def practised(folder: Path, model: Any, given: list[dict[str, Tensor]], **how: Any) -> Any:
    """Record two rounds, and return what is known of the recording."""
    with fedaudit.Recorder(folder) as recorder:
        for _ in range(2):
            with recorder.round(state(model, whole_names=False)):
                with recorder.capture() as seen:
                    fine_tuned(model.train(), given, **how)
                recorder.update("a", state(model, whole_names=False), seen, num_examples=12)
    others = batch(40, seed=5)
    attacks = ["extraction", "reference-loss"]
    records = others["input_ids"], others["labels"]
    result = fedaudit.audit_transcript(folder, attacks, module=model, records=records, **QUICK).result
    assert [f.status for f in result.findings] == ["done"] * 2
    return result.federations[0].recording


@pytest.mark.parametrize("way", PRACTICE)
def test_what_people_run_is_recorded_and_repeated(way: str, tmp_path: Path) -> None:
    told, form, how, (padding, end), most = PRACTICE[way]
    model = small(**told)
    recording = practised(tmp_path / "r", model, batches(**form), **how)
    assert recording.facts == "verified", recording.notes
    assert max(errors(tmp_path / "r")) < most
    info = fedaudit.Transcript.load(tmp_path / "r", model).task_info.tokens
    assert info is not None
    assert (info.padding, info.end) == (padding, end)


def test_a_frozen_part_in_bfloat16_is_recorded_and_stored_nowhere(tmp_path: Path) -> None:
    model = small()
    for name, value in model.named_parameters():
        value.data = value.data if ".lora_" in name else value.data.bfloat16()
    assert practised(tmp_path / "r", model, batches()).facts == "verified"
    adapters = sum(4 * p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(2 * p.numel() for p in model.parameters() if not p.requires_grad)
    stored = [file.stat().st_size for file in (tmp_path / "r").rglob("*.safetensors")]
    assert max(stored) < adapters + 8000 < frozen


def test_a_text_that_nobody_can_tell_the_padding_of_is_refused_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"config\.pad_token_id") as told:
        practised(tmp_path / "r", small(pad_token_id=None), batches(padding=1, left=True))
    assert "\n" not in str(told.value)


def test_weights_of_4_bits_are_refused_in_a_line(tmp_path: Path) -> None:
    class Params4bit(nn.Parameter):
        """As bitsandbytes calls them."""

    model = small()
    layer = model.base_model.model.lm_head
    layer.weight = Params4bit(layer.weight.detach(), requires_grad=False)
    with pytest.raises(BadInput, match="4 or 8 bits") as told:
        practised(tmp_path / "r", model, batches())
    assert "\n" not in str(told.value)
