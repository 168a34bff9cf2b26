"""Public names of a package, taken from their modules when they are first used: importing the package stays quick."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from fedaudit.utils.distributions import moved
from fedaudit.utils.errors import BadInput
from fedaudit.utils.renamed import of_name


def lazy(package: str, *, needs: str = "", of: str = "") -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package whose public names its ``if TYPE_CHECKING`` imports say.

    So that type checkers, completion and the interpreter read one list:

        if TYPE_CHECKING:
            from fedaudit.transcript.truth import Truth
        else:
            __getattr__, __dir__ = lazy(__name__)
    """

    @cache
    def homes() -> dict[str, tuple[str, str]]:
        tree = ast.parse(inspect.getsource(sys.modules[package]))
        branches = [node for node in tree.body if isinstance(node, ast.If)]
        imports = [node for branch in branches for node in branch.body if isinstance(node, ast.ImportFrom)]
        return {alias.asname or alias.name: (str(node.module), alias.name) for node in imports for alias in node.names}

    def get(name: str) -> Any:
        name = of_name(package, name)
        if name.startswith("__") or name not in homes():
            return moved(package)(name)
        if needs and importlib.util.find_spec(needs) is None:
            raise BadInput(f"{of} isn't installed: pip install 'PATH_OF_THE_CLONE[{of.lower()}]'")
        module, there = homes()[name]
        return getattr(importlib.import_module(module), there)

    def names() -> list[str]:
        module = sys.modules[package]
        return sorted({*vars(module), *module.__all__})

    return get, names
