"""Benchmarks: each module's ``measure`` times one thing, ``page`` shows what came out."""

from __future__ import annotations

import importlib
import warnings
from contextlib import suppress
from typing import Any

from fedaudit import BadInput
from fedaudit.utils import import_torchvision


def import_peer(peer: str, *modules: str) -> list[Any]:
    """Import a peer's modules; BadInput where it isn't installed, or doesn't import."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with suppress(Exception):  # some want it; if it isn't there, they say so
                import_torchvision()
            return [importlib.import_module(name) for name in modules]
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise BadInput(
            f"--vs {peer}: it can't be imported ({reason}); make bench-peers sets up an environment that has it"
        ) from None
