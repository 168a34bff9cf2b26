"""Models of transformers as its documentation trains them: by Trainer or in a loop, padded texts, images, losses."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedaudit.utils.machine import import_torchvision, own_process

if importlib.util.find_spec("accelerate") is None:
    pytest.skip("needs transformers and accelerate", allow_module_level=True)
pytestmark = pytest.mark.peers
own_process()
import_torchvision()  # transformers looks for it

from transformers import (  # noqa: E402
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

import fedaudit  # noqa: E402
from fedaudit import Recorder  # noqa: E402
from tests.adapters.flower_cases import write_app  # noqa: E402

LENGTHS = (7, 10, 9, 12)
SIZES: dict[str, Any] = {
    "vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 32,
}  # fmt: skip
Train = Callable[[Any, int], None]
Batch = dict[str, Tensor]


def bert(labels: int = 3, **more: Any) -> nn.Module:
    """With dropout, whose draws depend on the shape of what goes in."""
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(**SIZES, num_labels=labels, **more))  # type: ignore[no-any-return]


def gpt(**more: Any) -> nn.Module:
    torch.manual_seed(0)
    tokens = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    return GPT2LMHeadModel(GPT2Config(vocab_size=30, n_embd=16, n_layer=1, n_head=2, n_positions=32, **tokens, **more))  # type: ignore[no-any-return]


def vit() -> nn.Module:
    torch.manual_seed(0)
    drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {key: value for key, value in SIZES.items() if key not in ("vocab_size", "max_position_embeddings")}
    return ViTForImageClassification(  # type: ignore[no-any-return]
        ViTConfig(**sizes, image_size=8, patch_size=4, num_channels=1, num_labels=4, **drops)
    )


class Own(nn.Module):
    """A user's own classifier around a model of transformers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bert, self.head = BertModel(BertConfig(**SIZES)), nn.Linear(16, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.head(self.bert(input_ids, attention_mask).last_hidden_state[:, 0])  # type: ignore[no-any-return]


def texts(client: int, *, left: bool = False, multiple: int = 1) -> Iterator[Batch]:
    """Two batches of three texts, padded as a tokenizer does: to the longest, or to a multiple."""
    source = torch.Generator().manual_seed(client)
    for length in LENGTHS[2 * client : 2 * client + 2]:
        width = -(-length // multiple) * multiple
        tokens, mask = torch.zeros(3, width, dtype=torch.long), torch.zeros(3, width, dtype=torch.long)
        for row in range(3):
            real = length - row
            place = slice(width - real, width) if left else slice(real)
            tokens[row, place], mask[row, place] = torch.randint(1, 30, (real,), generator=source), 1
        yield {"input_ids": tokens, "attention_mask": mask, "labels": torch.tensor([0, 1, 2])}


def in_a_loop(of: Callable[[int], Iterator[Batch]], loss: Callable[[Any, Batch], Tensor] | None = None) -> Train:
    def train(model: Any, client: int) -> None:
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in of(client):
            opt.zero_grad()
            (model(**batch).loss if loss is None else loss(model, batch)).backward()
            opt.step()

    return train


def verified(folder: Path, make: Callable[[], nn.Module], train: Train, **options: Any) -> tuple[float, Any, Any]:
    """Record two clients; return the worst replay's error, what is known of the recording, and the transcript."""
    model = make().train()
    with Recorder(folder, **options) as recorder, recorder.round(model.state_dict()):
        for client in range(2):
            local, alone = copy.deepcopy(model), copy.deepcopy(model)
            torch.manual_seed(client)
            with recorder.capture() as seen:
                train(local, client)
            torch.manual_seed(client)
            train(alone, client)
            assert all(torch.equal(a, b) for a, b in zip(local.parameters(), alone.parameters(), strict=True))
            recorder.update(f"client-{client}", local.state_dict(), seen)
    attacks = ["labels" if make is vit else "token-presence"]
    done = fedaudit.audit_transcript(folder, attacks, module=make(), controls=False, progress=False).result
    (record,) = done.federations
    assert record.recording is not None
    assert record.recording.facts == "verified", record.recording.notes
    assert len(record.recording.replays) == 2
    return float(record.replay_error or 0), record.recording, fedaudit.Transcript.load(folder, make())


WAYS: dict[str, Callable[[int], Iterator[Batch]]] = {
    "right": texts,
    "left": lambda client: texts(client, left=True),
    "a multiple": lambda client: texts(client, multiple=8),
}


@pytest.mark.parametrize("way", WAYS)
def test_texts_padded_to_the_longest_of_each_batch_are_replayed_to_the_bit(way: str, tmp_path: Path) -> None:
    error, _, transcript = verified(tmp_path / "r", bert, in_a_loop(WAYS[way]))
    assert error == 0
    assert transcript.task_info.input_shape == (16 if way == "a multiple" else max(LENGTHS),)
    assert (transcript.task_info.loss, transcript.task_info.num_classes) == ("cross-entropy", 3)


def causal(batch: Batch) -> Batch:
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


@pytest.mark.parametrize("way", ["right", "left"])
def test_texts_of_which_the_next_token_is_learnt(way: str, tmp_path: Path) -> None:
    error, _, transcript = verified(tmp_path / "r", gpt, in_a_loop(lambda client: map(causal, WAYS[way](client))))
    assert error == pytest.approx(0, abs=1e-6)
    assert transcript.task_info.causal


@pytest.mark.parametrize("by_name", [True, False])
def test_a_module_of_one_s_own_around_one(by_name: bool, tmp_path: Path) -> None:
    def loss(model: Any, batch: Batch) -> Tensor:
        given = batch["input_ids"], batch["attention_mask"]
        made = model(input_ids=given[0], attention_mask=given[1]) if by_name else model(*given)
        return F.cross_entropy(made, batch["labels"])

    assert verified(tmp_path / "r", Own, in_a_loop(texts, loss))[0] == 0


PROBLEMS: dict[str, tuple[int, Tensor, str, str]] = {
    "multi_label_classification": (
        3,
        torch.tensor([[1.0, 0, 1], [0, 0, 1], [1, 1, 0]]),
        "bce-with-logits",
        "multi-label",
    ),
    "regression": (1, torch.tensor([0.5, -1.0, 2.0]), "mse", "regression"),
    "regression of several": (2, torch.tensor([[0.5, 1], [-1.0, 0.2], [2.0, -0.3]]), "mse", "regression"),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_the_losses_that_a_model_computes_itself(problem: str, tmp_path: Path) -> None:
    outputs, labels, loss, task = PROBLEMS[problem]

    def make() -> nn.Module:
        return bert(outputs, problem_type=problem.split(" ")[0])

    batches = in_a_loop(lambda client: ({**batch, "labels": labels} for batch in texts(client)))
    error, _, transcript = verified(tmp_path / "r", make, batches)
    assert error == 0
    assert (transcript.task_info.loss, transcript.task_info.task_kind.name) == (loss, task)


IMAGES: dict[str, Callable[[Any, Batch], Tensor]] = {
    "its own loss": lambda model, batch: model(**batch).loss,
    "of its logits": lambda model, batch: F.cross_entropy(model(batch["pixel_values"]).logits, batch["labels"]),
    "by name": lambda model, batch: F.cross_entropy(model(pixel_values=batch["pixel_values"]).logits, batch["labels"]),
}


@pytest.mark.parametrize("way", IMAGES)
def test_an_image_classifier(way: str, tmp_path: Path) -> None:
    def images(client: int) -> Iterator[Batch]:
        source = torch.Generator().manual_seed(client)
        yield {"pixel_values": torch.rand(4, 1, 8, 8, generator=source), "labels": torch.arange(4)}

    error, _, transcript = verified(tmp_path / "r", vit, in_a_loop(images, IMAGES[way]), mean=(0.0,), std=(1.0,))
    assert error == 0
    info = transcript.task_info
    assert (info.kind, info.input_shape, info.loss, info.num_classes) == ("image", (1, 8, 8), "cross-entropy", 4)


# --- Trainer ----------------------------------------------------------------------------------------------------------


class Rows(torch.utils.data.Dataset[Batch]):
    def __init__(self, client: int, *, causal: bool = False) -> None:
        source = torch.Generator().manual_seed(client)
        self.tokens = [torch.randint(1, 30, (n,), generator=source) for n in (7, 10, 9, 12, 5, 6, 8, 11)]
        self.causal = causal

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> Batch:
        own = self.tokens[i]
        return {"input_ids": own, "labels": own if self.causal else torch.tensor(i % 3)}


def collated(rows: list[Batch]) -> Batch:
    """As DataCollatorWithPadding makes a batch, without a tokenizer."""
    longest = max(len(row["input_ids"]) for row in rows)

    def filled(row: Tensor, value: int) -> Tensor:
        return F.pad(row, (0, longest - len(row)), value=value) if row.ndim else row

    return {
        "input_ids": torch.stack([filled(row["input_ids"], 0) for row in rows]),
        "attention_mask": torch.stack([filled(torch.ones_like(row["input_ids"]), 0) for row in rows]),
        "labels": torch.stack([filled(row["labels"], -100) for row in rows]),
    }


def by_trainer(folder: Path, *, causal: bool = False, **more: Any) -> Train:
    def train(model: Any, client: int) -> None:
        quiet = {
            "report_to": [],
            "disable_tqdm": True,
            "save_strategy": "no",
            "logging_strategy": "no",
            "use_cpu": True,
        }
        usual = {"max_steps": 2, "learning_rate": 1e-3, "per_device_train_batch_size": 2}
        how = TrainingArguments(output_dir=str(folder), **quiet, **{**usual, **more})
        Trainer(model=model, args=how, train_dataset=Rows(client, causal=causal), data_collator=collated).train()

    return train


# settings -> what is known of each client's training
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as it comes": ({}, {"learning_rates": (1e-3, 5e-4)}),
    "accumulated": ({"gradient_accumulation_steps": 2}, {"batch_sizes": (4, 4)}),
    "warm-up": ({"warmup_steps": 1, "max_steps": 3}, {"learning_rates": (0.0, 1e-3, 5e-4)}),
    "decay": ({"weight_decay": 0.05}, {"weight_decay": 0.05}),
    "clipped": ({"max_grad_norm": 0.05}, {"clip_norm": pytest.approx(0.05, rel=1e-4)}),
    "sgd": ({"optim": "sgd"}, {"optimiser": "sgd"}),
    "bfloat16": ({"bf16": True}, {"learning_rates": (1e-3, 5e-4)}),
    "everything": (
        {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2, "weight_decay": 0.01, "max_grad_norm": 0.1},
        {"batch_sizes": (4, 4), "clip_norm": pytest.approx(0.1, rel=1e-4)},
    ),
}


@pytest.mark.parametrize("way", SETTINGS)
def test_what_a_trainer_does_is_recorded_and_repeated(way: str, tmp_path: Path) -> None:
    settings, known = SETTINGS[way]
    error, _, transcript = verified(tmp_path / "r", bert, by_trainer(tmp_path, **settings))
    assert error == pytest.approx(0, abs=1e-5)
    assert transcript.task_info.label_smoothing == settings.get("label_smoothing_factor", 0.0)
    for update in transcript.rounds[0].updates:
        assert update.training is not None
        assert update.training.unmodelled == ()
        assert {key: getattr(update.training, key) for key in known} == known


def test_accumulated_sums_over_tokens_are_weighed_by_their_number(tmp_path: Path) -> None:
    train = by_trainer(tmp_path, causal=True, gradient_accumulation_steps=2)
    error, _, transcript = verified(tmp_path / "r", gpt, train)
    assert error == pytest.approx(0, abs=1e-4)
    training = transcript.rounds[0].updates[0].training
    assert training is not None
    for step in training.passes:  # each text's first token is no target of the shifted ones, and counts nevertheless
        assert 0.8 < sum(one.weight for one in step) < 1


TASK = """
import tempfile
from tests.adapters.test_transformers import Rows, bert as net, by_trainer


def data(me):
    return Rows(me), me


def fit(model, x, me, rate):
    by_trainer(tempfile.mkdtemp())(model, me)
"""


def test_an_app_that_trains_by_trainer(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    from fedaudit.adapters.flower import audit_flower

    app = write_app(tmp_path / "app", task=TASK)
    done = audit_flower(
        app, nodes=2, rounds=1, out=tmp_path / "out", attacks=["labels"], controls=False, progress=False
    )
    (record,) = done.result.federations
    assert record.recording is not None
    assert (record.recording.facts, len(record.recording.replays)) == ("verified", 2)
    assert record.replay_error == pytest.approx(0, abs=1e-5)
