"""A user's own data, in the forms that training code has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from fedaudit.data.dataset import ONE_INPUT, Dataset
from fedaudit.data.frames import from_frame, is_frame
from fedaudit.utils.errors import BadInput

_FORMS = (
    "a fedaudit.Dataset, (inputs, targets), (frame, name of the target's column), a map-style torch Dataset of such "
    "pairs, or a DataLoader of one"
)


def dataset_of(data: Any, *, classes: bool = False) -> Dataset:
    """Return a user's own data as a data set.

    Args:
        data: a Dataset, (inputs, targets), (frame, name of the target's column), a map-style torch Dataset, or a
            DataLoader, whose data set is taken.
        classes: floating-point targets are the classes 0 and 1, not real values.

    Raises:
        BadInput: it is none of these, or can be read only once; the message says what to do.
    """
    options: dict[str, Any] = {"classes": True} if classes else {}
    if isinstance(data, DataLoader):
        data = data.dataset
        options["summary"] = "given as a DataLoader: its data set was taken, without its batches, order and sampler"
    if isinstance(data, Dataset):
        return data
    if isinstance(data, Iterator | IterableDataset):
        raise BadInput(
            f"data is a {type(data).__name__}, which can only be read from front to back; read it into tensors first "
            "and give (inputs, targets)"
        )
    if isinstance(data, Mapping):
        raise BadInput(f"data is a {type(data).__name__} of parts by name; give two of them, (inputs, targets)")
    if isinstance(data, tuple) and len(data) > 2:
        raise BadInput(f"data is a tuple of {len(data)}; give (inputs, targets): {ONE_INPUT}")
    if isinstance(data, tuple | list) and len(data) == 2:
        if is_frame(data[0]) and isinstance(data[1], str):
            return from_frame(*data)
        if _parts(data[0]):
            raise BadInput(f"the inputs are a {type(data[0]).__name__} of several; {ONE_INPUT}")
        return Dataset.from_tensors(*data, **options)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return Dataset.from_torch(data, **options)
    raise BadInput(f"data is a {type(data).__name__}; give {_FORMS}")


def _parts(inputs: Any) -> bool:
    """Whether these are several arrays that each have a value of every example."""
    if isinstance(inputs, Mapping):
        return True
    if not isinstance(inputs, tuple | list) or not all(hasattr(part, "shape") for part in inputs):
        return False
    return len({tuple(part.shape) for part in inputs}) > 1 or any(part.ndim > 3 for part in inputs)
