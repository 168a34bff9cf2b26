"""A look at a pickle before anybody runs it: how long its program is, and how deeply it nests tuples."""

from __future__ import annotations

import encodings.raw_unicode_escape  # noqa: F401 (pickletools' own: no file is to make a module be loaded)
import pickletools
from collections.abc import Collection
from pickle import UnpicklingError
from typing import Any

from fedaudit.utils.bounds import TORCH

_DEEPEST = TORCH.depth or 0  # tuples in tuples; a state has 3
_MARK = -1
# What torch admits, but no tensor needs: memory that a few bytes ask for.
_NEVER = {"builtins bytearray", "__builtin__ bytearray"}


def check_program(program: Any, most: int | None, admitted: Collection[str] | None = None) -> None:
    """Raise UnpicklingError where a pickle could exhaust the stack (a deep tuple's hash, as a key) or memory.

    Args:
        most: instructions; None: any number.
        admitted: names of the instructions that it may have; None: all of them.
    """
    stack: list[int] = []  # of every value, how deeply tuples are nested in it
    memo: dict[Any, int] = {}
    for steps, (code, argument, _) in enumerate(pickletools.genops(program)):
        if most is not None and steps > most:
            raise UnpicklingError(f"a pickle of more than {most:,} instructions")
        if admitted is not None and code.name not in admitted:
            raise UnpicklingError(f"the instruction {code.name} is refused")
        if code.name == "GLOBAL" and argument in _NEVER:
            raise UnpicklingError(f"it asks for {argument}")
        if code.name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if argument is None else argument] = stack[-1]
            continue
        if code.name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
            continue
        taken = 0
        before = code.stack_before
        if pickletools.markobject in before:
            while (depth := stack.pop()) != _MARK:
                taken = max(taken, depth)
            before = before[: before.index(pickletools.markobject)]
        taken = max([taken, *(stack.pop() for _ in before)])
        depth = taken + 1 if code.name.startswith("TUPLE") else taken if code.name == "DUP" else 0
        if depth > _DEEPEST:
            raise UnpicklingError(f"tuples nested more than {_DEEPEST} deep")
        stack += [_MARK] if code.name == "MARK" else [depth] * len(code.stack_after)
