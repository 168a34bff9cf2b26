"""What the tokens of a recording stand for: read from a tokenizer, or from the files in which people keep them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedaudit.utils.bounds import JSON, read_bytes, read_json
from fedaudit.utils.errors import BadInput

MASKED = "masked"  # in place of words: nobody is to read the texts
_MOST = 10_000_000
_LONGEST = 200  # characters of a word that are shown
_SPACES = str.maketrans("Ġ▁Ċ", "  ↵")  # how tokenizers write a space and the end of a line
_FORMS = "a tokenizer, its tokenizer.json or vocab.json, a file with a word a line, or a list of words"


def words_of(given: Any) -> list[str]:
    """Return what each token stands for, by its number; "" where that isn't told.

    Args:
        given: a tokenizer of transformers (anything with ``get_vocab``), a mapping of words to numbers, a list of
            words, or a file: ``tokenizer.json``, ``vocab.json``, or text with a word a line.

    Raises:
        BadInput: it is none of these, or can't be read.
    """
    if isinstance(given, str | Path):
        given = _read(Path(given))
    elif callable(vocabulary := getattr(given, "get_vocab", None)):
        given = vocabulary()
    if isinstance(given, Mapping):
        numbers = list(given.values())
        if not all(type(n) is int and 0 <= n < _MOST for n in numbers) or not all(isinstance(w, str) for w in given):
            raise BadInput(f"words: a vocabulary has a number from 0 to {_MOST:,} for each word; give {_FORMS}")
        found = [""] * (1 + max(numbers, default=-1))
        for word, number in given.items():
            found[number] = word
        given = found
    if not isinstance(given, Sequence) or not given or not all(isinstance(word, str) for word in given):
        raise BadInput(f"words is a {type(given).__name__} without words; give {_FORMS}")
    return [word.translate(_SPACES).strip()[:_LONGEST] for word in given]


def _read(path: Path) -> Any:
    """Return what a file says, as one of the forms."""
    try:
        if path.suffix.lower() != ".json":
            return read_bytes(path, JSON).decode().splitlines()
        found = read_json(path)
    except OSError as error:
        raise BadInput(f"can't read the words in '{path}': {error.strerror or error}") from None
    except ValueError as error:
        raise BadInput(f"'{path}' isn't text in UTF-8, or no JSON ({str(error)[:100]}); give {_FORMS}") from None
    model = found.get("model") if isinstance(found, dict) else None
    if not isinstance(model, Mapping):
        return found
    kept = model.get("vocab")
    if isinstance(kept, list):  # pieces with their scores, by their numbers
        kept = {one[0]: i for i, one in enumerate(kept) if isinstance(one, list) and one and isinstance(one[0], str)}
    added = found.get("added_tokens")
    more = [one for one in added if isinstance(one, dict)] if isinstance(added, list) else []
    return {**(kept if isinstance(kept, dict) else {}), **{str(one.get("content")): one.get("id") for one in more}}
