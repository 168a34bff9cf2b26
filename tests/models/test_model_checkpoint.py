"""Checkpoints of models: what comes back, and what is refused and changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fedaudit.models import build_model, initialise, load_checkpoint, save_checkpoint
from fedaudit.utils.errors import BadInput, MissingData
from tests.models.model_cases import Tokens, generator, one_line


def small(seed: int) -> nn.Module:
    model = build_model("convnet-small", input_shape=(1, 8, 8), outputs=3, width=2)
    initialise(model, "default", generator(seed))
    return model


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path: Path) -> None:
    a, b = small(1), small(2)
    a(torch.randn(4, 1, 8, 8, generator=generator()))  # running statistics are part of it
    path = tmp_path / "folder" / "model.safetensors"
    save_checkpoint(a, path)
    assert not same(a, b)
    load_checkpoint(b, path)
    assert same(a, b)


def test_tied_and_strided_tensors_survive(tmp_path: Path) -> None:
    a, b = Tokens(), Tokens()
    a.attention.in_proj_weight.data = torch.randn(8, 24, generator=generator()).t()
    save_checkpoint(a, tmp_path / "m.safetensors")
    load_checkpoint(b, tmp_path / "m.safetensors")
    assert same(a, b)
    assert b.out.weight is b.embed.weight


@pytest.mark.parametrize(
    "wrap", [lambda s: s, lambda s: {"state_dict": s, "epoch": 3}, lambda s: {"model_state_dict": s}]
)
@pytest.mark.parametrize("suffix", [".pt", ".pth"])
def test_a_pickle_of_tensors_is_read(tmp_path: Path, suffix: str, wrap: Callable[..., object]) -> None:
    a, b = small(1), small(2)
    path = tmp_path / f"model{suffix}"
    torch.save(wrap(a.state_dict()), path)
    load_checkpoint(b, path)
    assert same(a, b)


def test_half_precision_and_a_missing_batch_counter_are_accepted(tmp_path: Path) -> None:
    a, b = small(1), small(2)
    tensors = {n: t.half() for n, t in a.state_dict().items() if not n.endswith("num_batches_tracked")}
    save_file(tensors, tmp_path / "m.safetensors")
    load_checkpoint(b, tmp_path / "m.safetensors")
    assert next(b.parameters()).dtype == torch.float32
    torch.testing.assert_close(b.state_dict(), a.state_dict(), rtol=1e-3, atol=1e-4)


class Evil:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return (Path.touch, (Path("evil-was-here"),))


def _drop(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(list(state.items())[6:])


BAD: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "missing": (_drop, r"lacks 'features.layer1.conv.weight', .*more"),
    "unexpected": (lambda s: s | {"head.weight": torch.zeros(2)}, "also has 'head.weight';"),
    "both": (lambda s: _drop(s) | {"head.weight": torch.zeros(2)}, "lacks .* and also has"),
    "shape": (lambda s: s | {"fc.bias": torch.zeros(4)}, r"'fc.bias' has the shape \(4,\), the model's \(3,\)"),
    "transposed": (lambda s: s | {"fc.weight": torch.zeros(8, 3)}, "'fc.weight' has the shape"),
    "nan": (lambda s: s | {"fc.bias": torch.tensor([0, math.nan, 0])}, "'fc.bias' holds NaN"),
    "infinite": (lambda s: s | {"fc.bias": torch.tensor([0, math.inf, 0])}, "'fc.bias' holds NaN or inf"),
    "empty": (lambda _: {}, "lacks"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_checkpoint_that_does_not_fit_is_refused_and_changes_nothing(tmp_path: Path, case: str) -> None:
    change, words = BAD[case]
    model, before = small(2), small(2)
    path = tmp_path / "m.safetensors"
    save_file(change(small(1).state_dict()), path)
    with pytest.raises(BadInput, match=words) as error:
        load_checkpoint(model, path)
    one_line(error)
    assert same(model, before)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize("keep", [0, 5, 0.5, 0.999])
def test_a_truncated_file_is_refused(tmp_path: Path, suffix: str, keep: float) -> None:
    path = tmp_path / f"m{suffix}"
    save_checkpoint(small(1), path) if suffix == ".safetensors" else torch.save(small(1).state_dict(), path)
    data = path.read_bytes()
    path.write_bytes(data[: keep if isinstance(keep, int) else int(len(data) * keep)])
    with pytest.raises(BadInput) as error:
        load_checkpoint(small(2), path)
    assert str(path) in one_line(error)


def test_a_pickle_with_code_is_refused_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"fc.weight": Evil()}, "m.pt")
    with pytest.raises(BadInput, match=r"state_dict\(\) as .safetensors") as error:
        load_checkpoint(small(1), Path("m.pt"))
    one_line(error)
    assert not Path("evil-was-here").exists()


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match="no checkpoint at"):
        load_checkpoint(small(1), tmp_path / "nothing.pt")
    (tmp_path / "m.h5").write_bytes(b"x")
    with pytest.raises(BadInput, match=r"must be a \.safetensors"):
        load_checkpoint(small(1), tmp_path / "m.h5")
    (tmp_path / "m.pt").write_bytes(b"not a pickle")
    with pytest.raises(BadInput):
        load_checkpoint(small(1), tmp_path / "m.pt")
    torch.save([torch.zeros(2)], tmp_path / "list.pt")
    with pytest.raises(BadInput, match="not a state dict"):
        load_checkpoint(small(1), tmp_path / "list.pt")
    with pytest.raises(BadInput, match=r"written as \.safetensors"):
        save_checkpoint(small(1), tmp_path / "m.pt")
