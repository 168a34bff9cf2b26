"""A user's own data, in the forms that training code has them, and what can't be taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import fedaudit
from fedaudit.data.own import dataset_of
from fedaudit.utils.errors import BadInput

START = torch.Generator().manual_seed(0)
IMAGES = torch.rand((20, 3, 8, 6), generator=START)
LABELS = torch.arange(20) % 4
ROWS = torch.randn((20, 5), generator=START)
Dataset = fedaudit.Dataset


class Pairs:
    """A map-style data set of anything."""

    def __init__(self, *items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> Any:
        return self.items[i]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(zip(IMAGES, LABELS, strict=True))


def simulated(data: Any, model: nn.Module | None = None, **options: Any) -> fedaudit.Transcript:
    model = model or nn.Sequential(nn.Flatten(), nn.LazyLinear(4))
    with torch.no_grad():
        model(torch.zeros((1, *IMAGES.shape[1:])))
    scenario = {"federations": [{"name": "f", "clients": 1, "examples": 2}]}
    return fedaudit.simulate(scenario, model=model, data=data, progress=False, **options).transcript


def held(data: Any) -> Tensor:
    made = fedaudit.simulate(
        {"federations": [{"name": "f", "clients": 1}]}, model=nn.Sequential(nn.Flatten(), nn.Linear(144, 4)),
        data=data, progress=False,
    )  # fmt: skip
    return made.truth.candidates


# Taken --------------------------------------------------------------------------------------------------------------


def test_of_a_data_loader_the_data_set_is_taken_and_the_result_says_so():
    loader: Any = DataLoader(TensorDataset(IMAGES, LABELS), batch_size=7, shuffle=True, drop_last=True)
    assert torch.equal(held(loader), held((IMAGES, LABELS)))
    finished = fedaudit.audit(
        model=nn.Sequential(nn.Flatten(), nn.Linear(144, 4)), data=loader, attacks=["labels"], progress=False,
        federations=[{"name": "f", "clients": 1, "examples": 2}],
    )  # fmt: skip
    assert "DataLoader" in finished.result.data.summary


@pytest.mark.parametrize("as_numpy", [True, False])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_channels_last_images_are_recognised(channels, as_numpy):
    first = torch.rand((20, channels, 8, 6), generator=START)
    last = first.permute(0, 2, 3, 1)
    read = Dataset.from_tensors(last.numpy() if as_numpy else last, LABELS)
    assert read.input_shape == (channels, 8, 6)
    assert torch.equal(read.train.inputs, Dataset.from_tensors(first, LABELS).train.inputs)


@pytest.mark.parametrize(
    ("shape", "read"),
    [
        ((8, 8, 3), (3, 8, 8)),
        ((3, 8, 8), (3, 8, 8)),
        ((1, 4, 4), (1, 4, 4)),  # the other order would make an image of 1 by 4
        ((3, 3, 1), (1, 3, 3)),
        ((16, 4, 4), (16, 4, 4)),
        ((2, 8, 8), (2, 8, 8)),
        ((13, 9, 7), (7, 13, 9)),  # the shortest axis
        ((3, 3, 3), None),
        ((3, 9, 4), None),
        ((1, 8, 1), None),
    ],
)
def test_where_channels_stand_is_told_by_the_shape_or_asked(shape, read):
    images = torch.rand((20, *shape), generator=START)
    if read is not None:
        assert Dataset.from_tensors(images, LABELS).input_shape == read
        return
    with pytest.raises(BadInput, match=r"channels='first'\) or 'last'"):
        Dataset.from_tensors(images, LABELS)
    assert Dataset.from_tensors(images, LABELS, channels="first").input_shape == shape
    last = Dataset.from_tensors(images, LABELS, channels="last")
    assert last.input_shape == (shape[2], *shape[:2])
    assert torch.equal(last.test.inputs[0], images[last_test(LABELS)].permute(2, 0, 1))


def last_test(labels: Tensor) -> int:
    """Return the first row that is held out: the fifth example of the first class that has five."""
    seen: Counter[int] = Counter()
    for i, label in enumerate(labels.tolist()):
        seen[label] += 1
        if seen[label] == 5:
            return i
    raise AssertionError


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_floats_of_any_precision_are_taken(dtype):
    images = Dataset.from_tensors(IMAGES.to(dtype), LABELS)
    assert images.train.inputs.dtype == torch.float32
    wanted = Dataset.from_tensors(IMAGES.to(dtype).float(), LABELS)
    assert torch.equal(images.train.inputs, wanted.train.inputs)
    rows = Dataset.from_tensors(ROWS.to(dtype), ROWS[:, 0].to(dtype))
    again = Dataset.from_tensors(ROWS.to(dtype).float(), ROWS[:, 0].to(dtype).float())
    assert torch.equal(rows.train.inputs, again.train.inputs)
    assert torch.equal(rows.train.targets, again.train.targets)
    pairs = Pairs(*zip(IMAGES.to(dtype), LABELS, strict=True))
    assert torch.equal(Dataset.from_torch(pairs).train.inputs, wanted.train.inputs)


def test_numpy_s_half_precision_is_taken():
    halves = Dataset.from_tensors(IMAGES.numpy().astype(np.float16), LABELS.numpy())
    assert torch.equal(halves.train.inputs, Dataset.from_tensors(IMAGES.half(), LABELS).train.inputs)


def test_several_inputs_of_a_torch_data_set_are_those_of_arrays():
    wanted = Dataset.from_tensors((IMAGES, ROWS), LABELS)
    pairs: Any = Pairs(*[((image, row), label) for image, row, label in zip(IMAGES, ROWS, LABELS, strict=True)])
    loader: Any = DataLoader(pairs, batch_size=3)
    for given in (pairs, loader):
        found = dataset_of(given)
        assert found.packed_inputs == wanted.packed_inputs
        assert torch.equal(found.train.inputs, wanted.train.inputs)
        assert torch.equal(found.train.targets, wanted.train.targets)
    named = Pairs(
        *[({"row": row, "image": image}, label) for image, row, label in zip(IMAGES, ROWS, LABELS, strict=True)]
    )
    found = dataset_of(named)
    assert str(found.packed_inputs) == "image 3 x 8 x 6, row 5 numbers"
    assert torch.equal(found.train.inputs, wanted.train.inputs)


def test_several_targets_of_a_torch_data_set_keep_their_types():
    pairs = Pairs(*[(row, (int(label), float(row[0]))) for row, label in zip(ROWS, LABELS, strict=True)])
    packing = dataset_of(pairs).packed_targets
    assert packing is not None
    assert [(part.name, part.shape, part.whole) for part in packing.parts] == [("0", (), True), ("1", (), False)]
    labels = Pairs(*[(row, (0, int(label > 1), 1)) for row, label in zip(ROWS, LABELS, strict=True)])
    assert dataset_of(labels).task == "multi-label"  # numbers that go into one array are one target


# Refused, in one line and with a remedy -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((pair for pair in zip(IMAGES, LABELS, strict=True)), r"generator.*read it into tensors"),
        (iter([(IMAGES, LABELS)]), r"front to back; read it into tensors"),
        (Stream(), r"Stream, which can only be read from front to back"),
        (DataLoader(Stream()), r"Stream, which can only be read from front to back"),
        ({"image": IMAGES, "label": LABELS}, r"dict of parts by name; give \(inputs, targets\)"),
        ((IMAGES, ROWS, LABELS), r"tuple of 3; .*several inputs of an example are given as"),
        (((IMAGES, ROWS), LABELS), r"takes the inputs .* neither as arguments nor as one"),
        (({"image": IMAGES}, LABELS), r"takes the inputs image 3 x 8 x 6 neither"),
        (Pairs({"image": IMAGES[0], "label": 1}), r"item 0 .* is a dict of 'image, label'.*pair; wrap it"),
        (Pairs(((IMAGES[0], ROWS[0]), 1), ((IMAGES[0],), 1)), r"item 1 .* has other parts than the first"),
        (Pairs((IMAGES[0], ROWS[0], 1)), r"item 0 .* nobody says which is the target.*wrap it"),
        (7, r"data is a int; give a fedaudit.Dataset"),
    ],
)
def test_what_cannot_be_taken_is_refused_with_a_remedy(data, message):
    with pytest.raises(BadInput, match=message) as refused:
        simulated(data)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (
            torch.linspace(-3.7, 3.3, 7480).reshape(40, 11, 17),
            r"\(40, 11, 17\) are taken for grey images, 11 x 17 pixels.*signals \(n, C, T\).*kind='signal'",
        ),
        (IMAGES * 2 - 1, r"taken for images of 3 channels, \d+ x \d+ pixels.*kind='volume'"),
        (
            torch.rand(40, 8, 8, 13) - 0.5,
            r"images of 13 channels, 8 x 8 pixels.*\(n, D, H, W\).*'volume'.*channels='first'",
        ),
    ],
)
def test_values_of_no_picture_are_refused_with_what_they_were_taken_for(inputs, words):
    with pytest.raises(BadInput, match=words):
        fedaudit.Dataset.from_tensors(inputs, torch.arange(len(inputs)) % 2)


def test_what_a_shape_was_taken_for_stands_in_the_summary():
    labels = torch.arange(40) % 2
    for shape, said in (((40, 20, 6), "grey images, 20 x 6 pixels"), ((40, 8, 8, 13), "images of 13 channels, 8 x 8")):
        assert said in fedaudit.Dataset.from_tensors(torch.rand(shape), labels).summary
    assert "taken" not in fedaudit.Dataset.from_tensors(torch.rand(40, 3, 8, 8), labels).summary


class Tokens(nn.Module):
    """Whose first layer looks rows up; ``cast``: of floats, too."""

    def __init__(self, cast: bool) -> None:
        super().__init__()
        self.cast = cast
        self.words = nn.Embedding(30, 4)
        self.head = nn.Linear(20, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.head(self.words(x.long() if self.cast else x).flatten(1)))


@pytest.mark.parametrize("cast", [True, False])
def test_an_embedding_is_refused_in_our_words(cast):
    tokens = torch.randint(0, 30, (20, 5), generator=START)
    with pytest.raises(BadInput, match=r"'words' is an embedding.*audit the part of the model behind it") as refused:
        fedaudit.simulate(
            {"federations": [{"name": "f", "clients": 1, "examples": 2}]}, model=Tokens(cast), data=(tokens, LABELS),
            progress=False,
        )  # fmt: skip
    assert "\n" not in str(refused.value)
    assert "IntTensor" not in str(refused.value)


def test_a_model_of_another_precision_is_refused_with_a_remedy():
    model = nn.Sequential(nn.Flatten(), nn.Linear(144, 4)).double()
    with pytest.raises(BadInput, match=r"model.float\(\)"):
        fedaudit.simulate(model=model, data=(IMAGES, LABELS), federation="fedsgd", progress=False)
