"""Modules of an app or a job that is audited: they lie in its folder, and nobody else can import them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import cloudpickle


@contextlib.contextmanager
def sent_by_value(folder: Path, names: Collection[str] = ()) -> Iterator[None]:
    """Let worker processes get the classes of a folder's modules, and of others by name, themselves."""
    # They can't import them. A script in the app's folder is sent by value anyway, and can't be registered.
    modules = [(name, module) for name, module in sys.modules.items() if name != "__main__"]
    own = [module for name, module in modules if name in names or lies_in(module, folder)]
    for module in own:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in own:
            cloudpickle.unregister_pickle_by_value(module)


def lies_in(module: Any, folder: Path) -> bool:
    """Return whether a module's code is in a folder."""
    file = getattr(module, "__file__", None)
    if file is None:  # a namespace package
        return any(Path(path).is_relative_to(folder) for path in getattr(module, "__path__", []))
    return Path(file).resolve().is_relative_to(folder)
