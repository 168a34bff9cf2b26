"""Volumes and signals: read, scaled, drawn; images of 12 and 16 bits; and what a shape alone doesn't tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import fedaudit
from fedaudit.data import Dataset, load_dataset
from fedaudit.data.own import pairs_of
from fedaudit.modalities import example_kind
from fedaudit.task.info import TaskInfo
from fedaudit.utils.errors import BadInput

LABELS = torch.arange(20) % 2
NUMBERS = np.random.default_rng(0)


def taken(inputs: Any, **options: Any) -> Dataset:
    return Dataset.from_tensors(inputs, LABELS, **options)


def all_inputs(data: Dataset) -> torch.Tensor:
    """Return the examples in the order in which they were given: the fifth of each class was held out."""
    rows = torch.zeros(20, dtype=torch.bool)
    rows[[8, 9, 18, 19]] = True
    found = torch.empty(20, *data.input_shape)
    found[~rows], found[rows] = data.train.inputs, data.test.inputs
    return found


# What a shape is taken for --------------------------------------------------------------------------------------------


def test_five_axes_are_volumes_and_four_are_where_one_says_so():
    assert taken(torch.rand(20, 2, 4, 5, 6)).kind == "volume"
    data = taken(torch.rand(20, 4, 5, 6), kind="volume")
    assert (data.kind, data.input_shape) == ("volume", (1, 4, 5, 6))
    assert "volumes of 1 channel, 4 x 5 x 6 voxels" in example_kind("volume").said((4, 5, 6), (1, 4, 5, 6))


@pytest.mark.parametrize("shape", [(20, 12, 1000), (20, 1000, 12), (20, 1, 187)])
@pytest.mark.parametrize("low", [0.0, -3.7])
def test_an_ecg_never_becomes_a_picture_silently(shape: tuple[int, ...], low: float):
    inputs = torch.rand(shape) + low
    with pytest.raises(BadInput, match=r"kind='signal'"):
        taken(inputs)
    data = taken(inputs, kind="signal")
    assert (data.kind, data.input_shape) == ("signal", shape[1:])
    torch.testing.assert_close(all_inputs(data), inputs, rtol=0, atol=0)


def test_a_long_picture_is_one_where_somebody_says_so():
    assert taken(torch.rand(20, 8, 64), kind="image").input_shape == (1, 8, 64)
    assert taken((255 * torch.rand(20, 8, 64)).byte()).kind == "image", "whole numbers are no signals"


def test_four_axes_out_of_range_name_volumes_and_channels():
    with pytest.raises(BadInput, match=r"not in \[0, 1\].*kind='volume'.*data.kind.*channels='first' or 'last'"):
        taken(torch.randn(20, 8, 8, 13))
    with pytest.raises(BadInput, match="kind='volume'"):
        taken(torch.rand(20, 9, 9, 9))
    assert taken(torch.randn(20, 8, 8, 13), kind="volume").input_shape == (1, 8, 8, 13)


def test_a_kind_that_the_data_set_isn_t_of_is_refused():
    data = taken(torch.rand(20, 3, 8, 8))
    with pytest.raises(BadInput, match="is of the kind 'image'"):
        fedaudit.simulate(data=data, kind="signal", progress=False)
    with pytest.raises(BadInput, match="kind is 'volume'"):
        load_dataset("digits", kind="volume")


# How values are scaled ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "dtype", "low", "high"),
    [
        ((0, 255), np.uint8, 0, 255),
        ((0, 4095), np.uint16, 0, 4095),
        ((0, 4095), np.int16, 0, 4095),
        ((-1024, 3071), np.int16, -1024, 3071),
        ((-1000, 400), np.int16, -1024, 3071),
        ((0, 65535), np.uint16, 0, 65535),
        ((-2000, 30000), np.int16, -32768, 32767),
    ],
)
def test_whole_voxels_are_scaled_by_the_range_of_their_depth(values: tuple[int, int], dtype: Any, low: int, high: int):
    array = NUMBERS.integers(values[0], values[1], (20, 3, 4, 5), endpoint=True).astype(dtype)
    array[0, 0, 0, :2] = values
    data = taken(array, kind="volume")
    back = all_inputs(data)[:, 0].double().numpy() * (high - low) + low
    np.testing.assert_allclose(back, array.astype(float), atol=(high - low) * 1e-6)
    np.testing.assert_array_equal(np.round(back), array)  # so the scaling can be undone
    assert (f"values {low} to {high} are scaled" in data.summary) == (dtype is not np.uint8)


def test_both_splits_have_one_depth():
    """The train split alone would have 12 bits."""
    train = np.full((4, 2, 3, 3), 4000, np.uint16)
    test = np.full((2, 2, 3, 3), 60000, np.uint16)
    data = Dataset.from_tensors(train, LABELS[:4], test=(test, LABELS[:2]), kind="volume")
    assert float(data.train.inputs.max()) == pytest.approx(4000 / 65535)
    assert float(data.test.inputs.max()) == pytest.approx(60000 / 65535)


def test_floats_are_scaled_by_the_train_split_s_range_and_the_summary_says_so():
    train, test = torch.rand(4, 2, 3, 3) * 700 - 200, torch.rand(2, 2, 3, 3)
    train[0, 0, 0, :2] = torch.tensor([-200.0, 500.0])
    test[0, 0, 0, 0] = 900.0
    data = Dataset.from_tensors(train, LABELS[:4], test=(test, LABELS[:2]), kind="volume")
    torch.testing.assert_close(data.train.inputs[:, 0] * 700 - 200, train, rtol=1e-5, atol=1e-3)
    assert float(data.test.inputs[0, 0, 0, 0, 0]) == 1.0
    assert "values -200 to 500" in data.summary
    plain = torch.rand(20, 2, 3, 3)
    assert torch.equal(all_inputs(taken(plain, kind="volume"))[:, 0], plain)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (torch.full((20, 2, 3, 3), 7.0), "all voxels of the train split are 7"),
        (np.full((20, 2, 3, 3), 100_000, np.int32), "more than 16 bits"),
        (NUMBERS.integers(0, 300, (20, 2, 3, 3)).astype(np.uint16), "would be nearly black"),
        (torch.full((20, 2, 3, 3), torch.nan), "not finite"),
        (torch.zeros(20, 2, 3, 3, dtype=torch.int64), "volumes of torch.int64 cannot be used"),
    ],
)
def test_volumes_that_have_no_scale_are_refused(inputs: Any, words: str):
    with pytest.raises(BadInput, match=words):
        taken(inputs, kind="volume")


@pytest.mark.parametrize("most", [4095, 65535])
def test_grey_images_of_many_bits_need_not_be_square(most: int):
    array = NUMBERS.integers(0, most, (20, 9, 14), endpoint=True).astype(np.uint16)
    array[0, 0, 0] = most
    data = taken(array)
    assert (data.kind, data.input_shape) == ("image", (1, 9, 14))
    np.testing.assert_allclose(all_inputs(data)[:, 0].numpy(), array / most, atol=1e-6)
    assert f"values 0 to {most} are scaled" in data.summary


def test_signals_are_standardised_by_channel_and_have_no_bounds():
    scale, offset = torch.tensor([1e-5, 1.0, 300.0]).view(3, 1), torch.tensor([0.0, 5.0, -40.0]).view(3, 1)
    inputs = torch.randn(20, 3, 50) * scale + offset
    data = taken(inputs, kind="signal")
    train = data.train.inputs.double().numpy()
    np.testing.assert_allclose(data.mean, train.mean(axis=(0, 2)), rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(data.std, train.std(axis=(0, 2)), rtol=1e-5)
    info = TaskInfo("custom", None, "eval", "cross-entropy", "signal", (3, 50), 2, data.mean, data.std)
    seen = info.normalise(data.train.inputs)
    torch.testing.assert_close(seen.mean(dim=(0, 2)), torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(info.denormalise(seen), data.train.inputs, rtol=1e-4, atol=1e-9)
    assert [float(end.unique()) for end in info.pixel_range(seen)] == [-torch.inf, torch.inf]
    flat = torch.zeros(20, 1, 30)
    assert taken(flat, kind="signal").std == (1.0,)
    with pytest.raises(BadInput, match="not finite"):
        taken(torch.full((20, 3, 5), torch.inf), kind="signal")


# How they are drawn ---------------------------------------------------------------------------------------------------


def test_a_volume_is_drawn_as_its_three_middle_planes():
    volume = torch.rand(1, 6, 8, 10)
    (sheet,) = example_kind("volume").draw(volume[None])
    larger = round(288 / (10 + 10 + 8 + 2))
    small = sheet[::larger, ::larger]
    assert small.shape == (8, 30)
    axial, coronal, sagittal = volume[0, 3], volume[0, :, 4].flip(0), volume[0, :, :, 5].flip(0)
    assert torch.equal(small[:, :10], axial)
    assert torch.equal(small[1:7, 11:21], coronal)
    assert torch.equal(small[1:7, 22:], sagittal)
    assert bool((small[:, 10] == 0.5).all())


def test_one_broken_voxel_takes_no_contrast_away():
    rng = torch.Generator().manual_seed(0)
    body = 100 + 20 * torch.rand(12, 1, 8, 9, 10, generator=rng)
    plain = Dataset.from_tensors(body, torch.arange(12) % 2, kind="volume")
    broken = body.clone()
    broken[0, 0, 1, 1, 1] = 30_000.0
    data = Dataset.from_tensors(broken, torch.arange(12) % 2, kind="volume")
    assert float(data.train.inputs.std()) > 0.9 * float(plain.train.inputs.std())
    assert float(data.train.inputs.max()) == 1
    assert "outermost 0.1% at either end" in data.summary
    assert "clipped" in data.summary
    # in [0, 1] the user's own scale stays; the drawing is stretched, of both in the same way
    given = broken / 30_000
    kept = Dataset.from_tensors(given, torch.arange(12) % 2, kind="volume")
    assert kept.train.inputs[0].equal(given[0])
    assert "PSNR is of [0, 1]" in kept.summary
    kind = example_kind("volume")
    sheet = kind.draw(given[:1])
    assert float(sheet.min()) < 0.05
    assert float(sheet.max()) > 0.95
    assert float(sheet.std()) > 0.2
    assert kind.draw_over(given[0], given[0]).equal(sheet)
    lighter = kind.draw_over(given[0] + 5 / 30_000, given[0])
    assert 0.1 < float((lighter - sheet)[sheet != 0.5].mean()) < 0.3


def test_a_signal_is_drawn_as_a_curve_a_channel():
    kind = example_kind("signal")
    rising = torch.linspace(-5, 5, 60)
    signal = torch.stack([rising, -rising])
    picture = kind.draw(signal[None])
    assert picture.shape == (3, 88, 300)
    dark = picture[0] < 0.5
    for top, sign in ((0, -1), (44, 1)):  # rows count from above
        rows = [torch.nonzero(column).float().mean() for column in dark[top : top + 44, 5:295].T if column.any()]
        assert len(rows) > 150
        assert all(sign * (later - before) > 0 for before, later in zip(rows, rows[30:], strict=False))
    over = kind.draw_over(signal + 4, signal)
    assert not torch.equal(over, kind.draw_over(signal, signal))
    orange = (over[0] > 0.9) & (over[2] < 0.6)
    assert int(orange.sum()) > 300, "the true curve is seen beside the recovered one"


def test_what_is_made_up_is_like_the_data_and_the_same_each_time():
    for name, shape in (("volume", (2, 6, 8, 10)), ("signal", (3, 64))):
        kind, channels = example_kind(name), shape[0]
        mean, std = torch.linspace(0.4, 0.6, channels), torch.full((channels,), 0.1)
        made, again = (kind.drawn_up(shape, 24, mean, std) for _ in range(2))
        assert made is not None
        assert again is not None
        assert made.shape == (24, *shape)
        assert torch.equal(made, again)
        assert len({tuple(one.flatten().tolist()) for one in made}) == 24
        assert kind.fault(made) is None
        found = made.transpose(0, 1).flatten(1)
        torch.testing.assert_close(found.mean(dim=1), mean, atol=0.05, rtol=0)
        torch.testing.assert_close(found.std(dim=1), std, atol=0.05, rtol=0)
    assert example_kind("image").drawn_up((3, 8, 8), 2, torch.zeros(3), torch.ones(3)) is None


# Files ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["npz", "safetensors"])
def test_own_arrays_are_a_data_set_of_a_scenario(tmp_path: Path, ending: str):
    inputs, labels = np.random.default_rng(1).normal(size=(20, 3, 30)).astype(np.float32), LABELS.numpy()
    for split, rows in (("train", slice(0, 16)), ("test", slice(16, 20))):
        file, arrays = tmp_path / f"{split}.{ending}", {"inputs": inputs[rows], "labels": labels[rows]}
        if ending == "npz":
            np.savez(file, inputs=arrays["inputs"], labels=arrays["labels"])
        else:
            save_file({name: torch.from_numpy(array.copy()) for name, array in arrays.items()}, file)
    data = load_dataset("arrays", data_dir=tmp_path, kind="signal")
    assert (data.kind, len(data.train), len(data.test)) == ("signal", 16, 4)
    np.testing.assert_array_equal(data.train.inputs.numpy(), inputs[:16])
    kept = pairs_of(tmp_path / f"test.{ending}")
    np.testing.assert_array_equal(kept[0].numpy(), inputs[16:])
    with pytest.raises(BadInput, match="kind='signal'"):
        load_dataset("arrays", data_dir=tmp_path)
    with pytest.raises(BadInput, match="image_size=8"):
        load_dataset("arrays", data_dir=tmp_path, kind="signal", image_size=8)


def test_a_file_without_labels_is_refused(tmp_path: Path):
    save_file({"inputs": torch.zeros(4, 3)}, tmp_path / "data.safetensors")
    with pytest.raises(BadInput, match="no tensor labels"):
        load_dataset("arrays", data_dir=tmp_path)
    (tmp_path / "data.safetensors").write_bytes(b"nothing")
    with pytest.raises(BadInput, match="cannot read"):
        load_dataset("arrays", data_dir=tmp_path)
