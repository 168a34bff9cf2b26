"""What is learned: a language model with adapters, the sentences of a site, training and testing."""

from __future__ import annotations

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

WORDS, LENGTH, PADDING, END = 200, 8, 0, 1
TRAINED, TESTED = 2, 8  # a site's sentences

Loader = DataLoader[dict[str, Tensor]]


def make_model() -> PeftModel:
    """Return a small Llama, always of the same weights, with adapters: only these are trained, and travel.

    A real app loads its model: ``AutoModelForCausalLM.from_pretrained("folder")``.
    """
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"vocab_size": WORDS, "bos_token_id": END, "eos_token_id": END, "pad_token_id": PADDING}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**sizes, **tokens, initializer_range=0.2))  # as large as trained weights
        return get_peft_model(model, LoraConfig(r=16, task_type="CAUSAL_LM"))  # of queries and values


def load_data(site: int, batch_size: int) -> tuple[Loader, Loader]:
    """Return what a site trains on and what it tests on: token ids, as a tokenizer and its collator give them."""
    random = torch.Generator().manual_seed(site)
    batch = torch.randint(2, WORDS, (TRAINED + TESTED, LENGTH), generator=random)
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (len(batch), 1), generator=random)
    mask = (torch.arange(LENGTH) < lengths).long()
    batch.scatter_(1, lengths - 1, END)
    ids = batch.where(mask > 0, PADDING)
    labels = ids.where(mask > 0, -100)
    names = "input_ids", "attention_mask", "labels"
    rows: list[dict[str, Tensor]] = [dict(zip(names, row, strict=True)) for row in zip(ids, mask, labels, strict=True)]
    return DataLoader(rows[:TRAINED], batch_size=batch_size, shuffle=True), DataLoader(rows[TRAINED:], batch_size=4)


def train(model: PeftModel, loader: Loader, learning_rate: float) -> float:
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


def test(model: PeftModel, loader: Loader) -> float:
    """Return the mean loss."""
    model.eval()
    with torch.no_grad():
        return sum(float(model(**batch).loss) for batch in loader) / len(loader)
