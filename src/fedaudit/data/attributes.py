"""Properties of examples, as scenarios name them: an attribute of the data set and its value."""

from __future__ import annotations

from fedaudit.data.dataset import Dataset
from fedaudit.utils.errors import BadInput, unknown_name


def property_of(data: Dataset, text: str) -> tuple[str, int]:
    """Return the attribute that ``text``, as ``sex=Female``, names, and the number of its value.

    Raises:
        BadInput: the data set has no such attribute, or that has no such value.
    """
    name, _, value = text.partition("=")
    if name not in data.attributes:
        raise BadInput(f"the data set '{data.name}' has no {unknown_name('attribute', name, data.attributes)}")
    values = data.attributes[name].values
    if value not in values:
        raise BadInput(f"'{name}' of '{data.name}': {unknown_name('value', value, values)}")
    return name, values.index(value)
