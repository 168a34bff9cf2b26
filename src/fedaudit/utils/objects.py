"""A user's own Python object by its name on the command line: ``package.module:name``."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from fedaudit.utils.errors import BadInput


def load_object(name: str, what: str) -> Any:
    """Return what ``package.module:attribute`` is, also in the working directory; ``what`` names it in errors."""
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise BadInput(f"{what} '{name}': give package.module:name, for example my_app.task:Net")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None:  # raised by a library's own hand (transformers: "Could not import module …")
            raise BadInput(f"{what} '{name}': importing {module} fails: {error}") from None
        raise BadInput(
            f"{what} '{name}': there is no module '{error.name}'; run this where it lies, or install it"
        ) from None
    except Exception as error:
        raise BadInput(f"{what} '{name}': importing {module} fails: {type(error).__name__}: {error}") from None
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise BadInput(f"{what} '{name}': {module} has no '{attribute}'")
        found = getattr(found, part)
    return found
