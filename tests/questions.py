"""What code asks by name: kinds, tasks and protocols are asked, never compared."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection


def compared(code: str, names: Collection[str], objects: Collection[str] = ()) -> list[int]:
    """Return the lines on which something is compared with one of these texts or objects."""
    words = [f"[\"']{re.escape(name)}[\"']" for name in names] + [rf"\b{name}\b" for name in objects]
    if not re.search("|".join(words), code):  # most modules: parsing takes long
        return []
    asked = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Compare | ast.MatchValue)]
    parts = [part for node in asked for part in ast.walk(node)]
    found = [part.lineno for part in parts if isinstance(part, ast.Constant) and part.value in names]
    return found + [part.lineno for part in parts if isinstance(part, ast.Name) and part.id in objects]
