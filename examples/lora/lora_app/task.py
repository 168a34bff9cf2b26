"""What is learned: a language model with adapters, the sentences of a site, training and testing."""

from __future__ import annotations

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

WORDS, LENGTH, PADDING = 200, 10, 0
TRAINED, TESTED = 2, 8  # a site's sentences


def make_model() -> PeftModel:
    """Return a small GPT-2, always of the same weights, with adapters: only these are trained, and travel.

    A real app loads its model: ``AutoModelForCausalLM.from_pretrained("folder")``.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": 64, "n_layer": 2, "n_head": 4}
        config = GPT2Config(**sizes, bos_token_id=1, eos_token_id=1, pad_token_id=PADDING)
        model = GPT2LMHeadModel(config)
        return get_peft_model(model, LoraConfig(r=32, lora_alpha=64, target_modules=["c_attn"], task_type="CAUSAL_LM"))


def load_data(site: int, batch_size: int) -> tuple[DataLoader, DataLoader]:
    """Return what a site trains on and what it tests on: token ids, as a tokenizer and its collator give them."""
    random = torch.Generator().manual_seed(site)
    batch = torch.randint(2, WORDS, (TRAINED + TESTED, LENGTH), generator=random)
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (len(batch), 1), generator=random)
    mask = (torch.arange(LENGTH) < lengths).long()
    ids = batch * mask + PADDING * (1 - mask)
    rows = [{"input_ids": x, "attention_mask": m, "labels": x.where(m > 0, -100)} for x, m in zip(ids, mask, strict=True)]
    return DataLoader(rows[:TRAINED], batch_size=batch_size, shuffle=True), DataLoader(rows[TRAINED:], batch_size=4)


def train(model: PeftModel, loader: DataLoader, learning_rate: float) -> float:
    """Train for an epoch, and return the mean loss."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=learning_rate)
    model.train()
    total = 0.0
    for batch in loader:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / len(loader)


def test(model: PeftModel, loader: DataLoader) -> float:
    """Return the mean loss."""
    model.eval()
    with torch.no_grad():
        return sum(model(**batch).loss.item() for batch in loader) / len(loader)
