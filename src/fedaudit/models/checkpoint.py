"""A model's tensors on disk: safetensors, which cannot run code; PyTorch's own files only where no code is in them."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fedaudit.utils.bounds import PROGRAM, TENSORS, TORCH, check_file, opened
from fedaudit.utils.errors import BadInput, MissingData
from fedaudit.utils.finite import all_finite
from fedaudit.utils.pickles import check_program

_LEGACY = 5  # pickles that a file of torch before 1.6 begins with
_NESTED = ("state_dict", "model_state_dict")  # where training scripts put the tensors in a larger dictionary


def save_checkpoint(model: nn.Module, path: Path) -> None:
    """Write the parameters and buffers of ``model`` to the safetensors file ``path``, and its folder if need be.

    Raises:
        BadInput: the name does not end in .safetensors, or the model's state holds something that is not a tensor.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise BadInput(f"a checkpoint is written as .safetensors, not '{path.name}'; change the name")
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, Tensor):
            raise BadInput(f"the model's state '{name}' is not a tensor, so it does not fit in a safetensors file")
        tensors[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)  # also parts shared memory
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)


def load_checkpoint(model: nn.Module, path: Path) -> None:
    """Copy the tensors of ``path`` into ``model`` by name; names and shapes must fit exactly, values must be finite.

    Values are converted to the model's precision. Only BatchNorm's ``num_batches_tracked`` may be missing.

    Args:
        model: any module.
        path: a .safetensors file, or a .pt or .pth file of tensors only (``torch.load(weights_only=True)``), with the
            names at the top or under ``state_dict`` or ``model_state_dict``.

    Raises:
        MissingData: no such file.
        BadInput: the file cannot be read without running code, is damaged, or does not fit; ``model`` is unchanged.
    """
    path = Path(path)
    loaded = read_state(path)
    own = model.state_dict()
    missing = [name for name in own if name not in loaded and not name.endswith("num_batches_tracked")]
    unexpected = [name for name in loaded if name not in own]
    if missing or unexpected:
        parts = [f"{what} {_few(names)}" for what, names in (("lacks", missing), ("also has", unexpected)) if names]
        raise BadInput(f"checkpoint '{path}' does not fit the model: it {' and '.join(parts)}; check model and width")
    for name, tensor in loaded.items():
        if tensor.shape != own[name].shape:
            raise BadInput(
                f"checkpoint '{path}' does not fit the model: '{name}' has the shape {tuple(tensor.shape)}, "
                f"the model's {tuple(own[name].shape)}; check width, input shape and outputs"
            )
        if not all_finite([tensor]):
            raise BadInput(f"checkpoint '{path}': '{name}' holds NaN or infinite values; take an earlier checkpoint")
    with torch.no_grad():
        for name, tensor in loaded.items():
            own[name].copy_(tensor)


def read_state(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint by name, whatever they are.

    Raises:
        MissingData: there is no such file.
        BadInput: it can't be read, or holds more than tensors.
    """
    if not path.is_file():
        raise MissingData(f"no checkpoint at '{path}'; give the path of a .safetensors, .pt or .pth file")
    if path.suffix == ".safetensors":
        try:
            check_file(path, TENSORS)
            return load_file(path)
        except (SafetensorError, OSError, TypeError, KeyError, ValueError) as error:
            raise BadInput(f"checkpoint '{path}' is not a whole safetensors file ({error}); copy it again") from error
    if path.suffix in (".pt", ".pth"):
        return _read_pickle(path)
    raise BadInput(f"checkpoint '{path}' must be a .safetensors, .pt or .pth file; convert it to .safetensors")


def _read_pickle(path: Path) -> dict[str, Tensor]:
    try:
        content: Any = read_torch_file(path)
    except UnpicklingError as error:
        raise BadInput(
            f"checkpoint '{path}' holds more than tensors (a pickle that could run code) or is damaged, "
            f"so it is refused; save model.state_dict() as .safetensors"
        ) from error
    except (ValueError, OSError) as error:
        raise BadInput(f"checkpoint '{path}' cannot be read ({error}); copy or save it again") from error
    for key in _NESTED:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not all(map(_plain, content.values())):
        raise BadInput(f"checkpoint '{path}' is not a state dict (tensors by name); save model.state_dict()")
    return {str(name): tensor for name, tensor in content.items()}


def _plain(value: Any) -> bool:
    """Return whether ``value`` is a tensor of numbers one after the other: not sparse, nested or quantised."""
    return (
        isinstance(value, Tensor)
        and (value.layout, value.device.type) == (torch.strided, "cpu")
        and not (value.is_nested or value.is_quantized)
    )


def _few(names: Iterable[str]) -> str:
    first, *rest = (f"'{name}'" for name in names)
    more = f" and {len(rest) - 2} more" if len(rest) > 2 else ""
    return ", ".join([first, *rest[:2]]) + more


def read_torch_file(path: Path, whole: bool = False) -> Any:
    """Return what ``torch.save`` wrote: tensors and plain values, on the CPU (``weights_only=True``).

    With ``whole``, of a kept simulation, every byte is checked, which torch doesn't do.

    Raises:
        UnpicklingError: it holds something else, or is made to exhaust the process's stack or memory.
        ValueError: it is damaged.
    """
    try:
        _look_through(path, whole)
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, UnpicklingError, BadInput):
        raise
    except Exception as error:  # of a damaged file torch, zipfile and pickletools raise whatever comes
        raise ValueError((str(error).splitlines() or [""])[0] or type(error).__name__) from error


def _look_through(path: Path, whole: bool) -> None:
    """Raise where tuples nest so deeply that hashing one, as a key, would end the process, or where the file is packed.

    Torch never packs; a few packed bytes could stand for gigabytes.
    """
    with opened(path, TORCH) as file:
        if not zipfile.is_zipfile(file):
            file.seek(0)
            head = io.BytesIO(file.read(PROGRAM))
            for _ in range(_LEGACY):
                check_program(head, TORCH.items)
            return
        with zipfile.ZipFile(file) as archive:
            for entry in archive.infolist():
                if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
                    raise UnpicklingError("a part of it is packed")
                if entry.filename.endswith(".pkl"):
                    if entry.file_size > PROGRAM:
                        raise UnpicklingError(f"a pickle of more than {PROGRAM:,} bytes")
                    check_program(io.BytesIO(archive.read(entry)), None if whole else TORCH.items)
            if whole and (damaged := archive.testzip()):
                raise ValueError(f"'{damaged}' in it isn't what was written")
