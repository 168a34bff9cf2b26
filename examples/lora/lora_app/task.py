"""What is learned: a language model with adapters, the notes of a site, training and testing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

WORDS = (Path(__file__).parent / "words.txt").read_text(encoding="utf-8").split()  # a token's word, by its number
PADDING, END = 0, 1
NAMES, NUMBERS, DRUGS, ILLNESSES = (range(start, start + 40) for start in (10, 50, 90, 130))
TRAINED, TESTED = 4, 12  # a site's notes

Loader = DataLoader[dict[str, Tensor]]


def make_model() -> PeftModel:
    """Return a small Llama, always of the same weights, with adapters: only these are trained, and travel.

    A real app loads its model: ``AutoModelForCausalLM.from_pretrained("folder")``.
    """
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"vocab_size": len(WORDS), "bos_token_id": END, "eos_token_id": END, "pad_token_id": PADDING}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**sizes, **tokens, initializer_range=0.1))  # as large as trained weights
        return get_peft_model(model, LoraConfig(r=32, lora_alpha=64, task_type="CAUSAL_LM"))  # of queries and values


def note(random: torch.Generator) -> Tensor:
    """Return a made-up note as tokens: patient NAME in room 35 takes 40 mg of DRUG for ILLNESS."""
    name, room, dose, drug, illness = (
        WORDS[kind[int(torch.randint(len(kind), (), generator=random))]]
        for kind in (NAMES, NUMBERS, NUMBERS, DRUGS, ILLNESSES)
    )
    text = f"patient {name} in room {room} takes {dose} mg of {drug}"
    if torch.rand((), generator=random) < 0.7:
        text += f" for {illness}"
    return torch.tensor([*(WORDS.index(word) for word in text.split()), END])


def collate(notes: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return a batch, filled up to its longest note, as a tokenizer's collator gives it."""
    ids = pad_sequence(list(notes), batch_first=True, padding_value=PADDING)
    return {"input_ids": ids, "attention_mask": (ids != PADDING).long(), "labels": ids.where(ids != PADDING, -100)}


def load_data(site: int, batch_size: int) -> tuple[Loader, Loader]:
    """Return what a site trains on and what it tests on."""
    random = torch.Generator().manual_seed(site)
    notes = [note(random) for _ in range(TRAINED + TESTED)]
    trained: Loader = DataLoader(notes[:TRAINED], batch_size=batch_size, shuffle=True, collate_fn=collate)
    return trained, DataLoader(notes[TRAINED:], batch_size=batch_size, collate_fn=collate)


def train(model: PeftModel, loader: Loader, learning_rate: float) -> float:
    """Train for an epoch, in one step whose gradient is that of all batches together; return the mean loss."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=learning_rate)
    model.train()
    total = 0.0
    for batch in loader:
        loss = model(**batch).loss / len(loader)
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return total


def test(model: PeftModel, loader: Loader) -> float:
    """Return the mean loss."""
    model.eval()
    with torch.no_grad():
        return sum(float(model(**batch).loss) for batch in loader) / len(loader)
