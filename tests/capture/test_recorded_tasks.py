"""What a model is asked for is learnt while a federation is recorded, or what it trained on is refused at once."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fedaudit
from fedaudit import BadInput, Transcript
from fedaudit.pipeline.recordings import check_replay
from fedaudit.transcript.files import read_header, read_rounds
from fedaudit.transcript.truth import FOLDER, Truth, load_truth
from fedaudit.utils.progress import Quiet

DICE = torch.Generator().manual_seed(5)
ROWS = torch.randn(16, 6, generator=DICE)
IMAGES = torch.rand(16, 1, 6, 5, generator=DICE)
MASKS = (IMAGES[:, 0] > 0.5).long()
LABELS = (torch.rand(16, 4, generator=DICE) < 0.5).float()

Loss = Callable[[Tensor, Tensor], Tensor]


def recorded(
    folder: Path, net: nn.Module, inputs: Tensor, targets: list[Tensor], loss: Loss, **options: Any
) -> list[str]:
    """Record a client for each of ``targets``, of 4 examples in two steps, and return what was noted."""
    recorder = fedaudit.Recorder(folder, **options)
    with recorder.round(net.state_dict()):
        for client, wanted in enumerate(targets):
            local, rows = copy.deepcopy(net), inputs[4 * client : 4 * client + 4]
            with recorder.capture() as seen:
                optimiser = torch.optim.SGD(local.parameters(), lr=0.1)
                for x, y in zip(rows.split(2), wanted.split(2), strict=True):
                    optimiser.zero_grad()
                    loss(local(x), y).backward()
                    optimiser.step()
            recorder.update(client, local.state_dict(), seen, num_examples=4)
    recorder.close()
    entries = read_rounds(folder, read_header(folder))
    return [note for entry in entries for m in entry.messages for note in m.notes]


def linear(outputs: int) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, outputs))


def pixels(outputs: int) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, outputs, 3, padding=1))


def read(folder: Path, net: nn.Module, **more: Any) -> tuple[Transcript, Truth]:
    transcript = Transcript.load(folder, net, **more)
    truth = load_truth(folder / FOLDER, transcript)
    return check_replay(transcript, truth, None, Quiet()), truth


def repeated(transcript: Transcript) -> bool:
    """Whether every update comes out again, but for rounding."""
    replays = transcript.replays
    return len(replays) == transcript.updates > 0 and all(replay.error < 1e-6 for replay in replays.values())


ONE_LOGIT: dict[str, Loss] = {
    "a channel": lambda z, y: functional.binary_cross_entropy_with_logits(z, y[:, None].float()),
    "squeeze(1)": lambda z, y: functional.binary_cross_entropy_with_logits(z.squeeze(1), y.float()),
    "[:, 0]": lambda z, y: functional.binary_cross_entropy_with_logits(z[:, 0], y.float()),
    "a module": lambda z, y: nn.BCEWithLogitsLoss()(z, y[:, None].float()),
    "pos_weight": lambda z, y: nn.BCEWithLogitsLoss(pos_weight=torch.tensor(3.0))(z, y[:, None].float()),
    "a sum": lambda z, y: nn.BCEWithLogitsLoss(reduction="sum")(z, y[:, None].float()) / 100,
}


@pytest.mark.parametrize("way", ONE_LOGIT)
def test_masks_of_one_logit_are_recorded_and_repeated(way: str, tmp_path: Path) -> None:
    recorded(tmp_path / "r", pixels(1), IMAGES, [MASKS[:4], MASKS[4:8]], ONE_LOGIT[way])
    transcript, truth = read(tmp_path / "r", pixels(1))
    info = transcript.task_info
    assert (info.task, info.loss, info.outputs, info.target_values) == ("segmentation", "bce-with-logits", 1, 2)
    assert info.class_weights == ((3.0,) if way == "pos_weight" else None)
    assert repeated(transcript)
    assert truth.labels[0, 1].equal(MASKS[4:8])


@pytest.mark.parametrize("ignored", [255, -1, -100])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_ignored_pixels_count_nothing_and_are_repeated(ignored: int, reduction: str, tmp_path: Path) -> None:
    masks = MASKS.clone()
    masks[:, :2] = ignored
    masks[1] = MASKS[1]
    loss = nn.CrossEntropyLoss(ignore_index=ignored, reduction=reduction, weight=torch.tensor([1.0, 2.0]))
    recorded(tmp_path / "r", pixels(2), IMAGES, [masks[:4], masks[4:8]], lambda z, y: loss(z, y) / 10)
    transcript, truth = read(tmp_path / "r", pixels(2))
    assert repeated(transcript)
    assert truth.labels[0, 0][:, :2].unique().tolist() == [-100, 0, 1]
    assert truth.labels[0, 0][0, 2:].equal(MASKS[0, 2:])


def test_a_series_of_classes_beside_a_signal_is_a_mask(tmp_path: Path) -> None:
    series, states = torch.randn(8, 2, 12, generator=DICE), torch.randint(3, (8, 12), generator=DICE)
    torch.manual_seed(0)
    net = nn.Conv1d(2, 3, 3, padding=1)
    recorded(tmp_path / "r", net, series, [states[:4], states[4:]], functional.cross_entropy)
    transcript, truth = read(tmp_path / "r", net)
    assert (transcript.task_info.kind, transcript.task_info.task) == ("signal", "segmentation")
    assert repeated(transcript)
    assert truth.labels[0, 1].equal(states[4:])


def test_labels_between_0_and_1_are_repeated_as_they_are_and_reported_as_what_is_likelier(tmp_path: Path) -> None:
    soft = LABELS * 0.9 + 0.05
    recorded(tmp_path / "r", linear(4), ROWS, [soft[:4], LABELS[4:8]], functional.binary_cross_entropy_with_logits)
    transcript, truth = read(tmp_path / "r", linear(4))
    assert transcript.task_info.task == "multi-label"
    assert repeated(transcript)
    assert torch.cat([truth.labels[0, 0], truth.labels[0, 1]]).equal(LABELS[:8])


def of_columns(z: Tensor, y: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(z, y[:, None])


def of_rows(z: Tensor, y: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(z.flatten(), y)


@pytest.mark.parametrize("loss", [of_columns, of_rows])
def test_classes_between_0_and_1_are_not_cut_off(loss: Loss, tmp_path: Path) -> None:
    soft = torch.tensor([0.9, 0.1, 1.0, 0.0])  # the second step's are whole
    recorded(tmp_path / "r", linear(1), ROWS, [soft], loss)
    transcript, truth = read(tmp_path / "r", linear(1))
    assert repeated(transcript)
    assert truth.labels[0, 0].tolist() == [1, 0, 1, 0]


class Pinball(nn.Module):
    """A loss of one's own: of several numbers."""

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        off = y - z
        return torch.maximum(0.3 * off, -0.7 * off).mean()


def test_numbers_that_happen_to_be_0_and_1_at_first_are_numbers(tmp_path: Path) -> None:
    counts = torch.tensor([[0, 1, 1, 0]] * 4), torch.tensor([[0, 1, 7, 2]] * 4)
    for order in (counts, counts[::-1]):
        folder = tmp_path / f"r{len(list(tmp_path.iterdir()))}"
        assert not any("recorded" in note for note in recorded(folder, linear(4), ROWS, list(order), Pinball()))
        transcript, truth = read(folder, linear(4), loss=Pinball())
        assert transcript.task_info.task == "regression"
        assert repeated(transcript)
        assert truth.labels[0, 1].equal(order[1].float())


def test_what_the_user_says_of_the_task_counts(tmp_path: Path) -> None:
    counts = [torch.tensor([[0, 1, 1, 0]] * 4).float()]
    recorded(tmp_path / "r", linear(4), ROWS, counts, Pinball(), task="regression")
    assert read(tmp_path / "r", linear(4), loss=Pinball())[0].task_info.task == "regression"
    more = [*counts, torch.tensor([[0.0, 1, 7, 2]] * 4)]
    notes = recorded(tmp_path / "s", linear(4), ROWS, more, Pinball(), task="multi-label")
    (refused,) = [note for note in notes if "recorded" in note]
    assert "0 or 1" in refused
    assert "these are 0 to 7" in refused
    assert "Recorder(task='multi-label') said so" in refused
    transcript = Transcript.load(tmp_path / "s", linear(4), loss=Pinball())
    assert len(load_truth(tmp_path / "s" / FOLDER, transcript).labels) == 1
    with pytest.raises(BadInput, match="task"):
        fedaudit.Recorder(tmp_path / "t", task="labels")


def refusal(folder: Path, *of: Any, **options: Any) -> str:
    (said,) = {note for note in recorded(folder, *of, **options) if "isn't recorded" in note}
    return said


def test_what_is_no_task_is_refused_while_it_is_recorded(tmp_path: Path) -> None:
    maps = refusal(tmp_path / "maps", pixels(1), IMAGES, [IMAGES[:4]], functional.l1_loss)
    assert "masks alone" in maps
    sure = -torch.ones(4, 4)
    labels = refusal(tmp_path / "s", linear(4), ROWS, [sure], functional.binary_cross_entropy_with_logits)
    assert "these are -1 to -1" in labels
    several = (torch.rand(4, 3, 6, 5, generator=DICE) > 0.5).float()
    pixel = refusal(tmp_path / "p", pixels(3), IMAGES, [several], functional.binary_cross_entropy_with_logits)
    assert "isn't recorded" in pixel
    with pytest.raises(BadInput, match=r"isn't recorded|labels of a multi-label task"):
        Transcript.load(tmp_path / "s", linear(4))


@pytest.mark.parametrize("outputs", [1, 2])
def test_maps_of_real_values_are_a_number_a_pixel(outputs: int, tmp_path: Path) -> None:
    wanted = IMAGES[:4].repeat(1, outputs, 1, 1) / 2
    recorded(tmp_path / "maps", pixels(outputs), IMAGES, [wanted], functional.mse_loss)
    transcript, truth = read(tmp_path / "maps", pixels(outputs))
    assert repeated(transcript)
    info = transcript.task_info
    assert (info.task, info.loss, info.num_targets) == ("regression", "mse", wanted[0].numel())
    assert torch.equal(truth.labels[0, 0], wanted.flatten(1))


class Tagger(nn.Module):
    """Text whose every token gets one of a few classes, or whose whole several labels."""

    def __init__(self, outputs: int, *, each: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head, self.each = nn.Embedding(20, 8), nn.Linear(8, outputs), each

    def forward(self, tokens: Tensor) -> Tensor:
        made: Tensor = self.head(self.embedding(tokens))
        return made.transpose(1, 2) if self.each else made.mean(dim=1)


TEXT = torch.randint(20, (8, 6), generator=torch.Generator().manual_seed(1))


def test_labels_of_a_text_are_no_tokens(tmp_path: Path) -> None:
    loss, net = functional.binary_cross_entropy_with_logits, Tagger(4, each=False)
    recorded(tmp_path / "r", net, TEXT, [LABELS[:4], LABELS[4:8]], loss)
    transcript, _ = read(tmp_path / "r", net)
    assert transcript.task_info.task == "multi-label"
    assert repeated(transcript)


def test_a_class_for_every_token_is_refused(tmp_path: Path) -> None:
    said = refusal(tmp_path / "r", Tagger(3, each=True), TEXT, [TEXT[:4] % 3], functional.cross_entropy)
    assert "(1, 3, 6)" in said
