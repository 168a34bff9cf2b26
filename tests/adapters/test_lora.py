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
)

import fedaudit  # noqa: E402
from fedaudit.utils.errors import BadInput  # noqa: E402

EXAMPLE = Path(__file__).parents[2] / "examples" / "lora"
QUICK: Any = {"controls": False, "progress": False}
WORDS, LENGTH = 60, 8


def errors(recording: Path) -> list[float]:
    return [update["error"] for update in json.loads((recording / "replay.json").read_text())["updates"]]


def test_the_flower_example_is_recorded_unchanged_and_attacked(tmp_path):
    pytest.importorskip("flwr")
    from fedaudit.adapters.flower import audit_flower

    attacks = ["dager", "token-presence"]
    finished = audit_flower(EXAMPLE, nodes=2, attacks=attacks, attacked=None, out=tmp_path, **QUICK)
    assert errors(tmp_path / "recording") == pytest.approx([0] * 6, abs=1e-6)
    result = finished.result
    recording = result.federations[0].recording
    assert recording is not None
    assert recording.facts == "verified"
    assert [f.status for f in result.findings if f.attack == "dager"] == ["done"] * 6
    # in the first round B is zero, and A has no gradient; then whole texts come out
    later = [s for f in result.findings if f.attack == "dager" and f.round == 2 for s in f.sequences]
    assert [s.found for s in later] == [s.true for s in later]
    (refused, *_) = [f for f in result.findings if f.attack == "token-presence"]
    assert "needs the update of an embedding" in str(refused.reason)
    transcript = fedaudit.Transcript.load(tmp_path / "recording", trained_module())
    assert all(".lora_" in name for r in transcript.rounds for u in r.updates for name in u.tensors)
    info = transcript.task_info.tokens
    assert info is not None
    assert (info.vocabulary, info.padding, info.end, info.causal) == (200, 0, 1, True)


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
