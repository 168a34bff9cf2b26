"""Whether what a site is about to share holds what must stay: encoded bytes, a picture, a name, a row or a text.

Nothing is written that isn't listed (:mod:`fedaudit.report.share`): that keeps examples away. What is left are our own
sentences, and names that people gave. So no bytes or hash may stand there in hexadecimal or base64, whatever they are
of, no embedded file, and none of the names and words that lie beside the audit.
"""

from __future__ import annotations

import getpass
import html
import platform
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from fedaudit.data.table_file import read_columns
from fedaudit.results import AuditResult
from fedaudit.utils.errors import BadInput, FedAuditError

_WORDS = 6  # in a row, of a row of a table or a text
_DIFFERENT = 4  # words that are enough to be somebody's, though all of them are ours
_NAMES = 100_000  # of files below a folder of data, no more are read
LOOKED_FOR = (
    "pictures and other embedded files",
    "bytes and hashes in hexadecimal or base64, of 16 or 32 characters and more",
)

_WORD = re.compile(r"[^\W_]+")
_TAG = re.compile(r"<[^>]*>")
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|[bfnrt])")
_PICTURE = re.compile(r"data:(?!;?\s|['\"])[a-z]+/[a-z0-9.+-]+[;,]", re.IGNORECASE)
_PATH = re.compile(r"[/\\]|\.\w{1,12}$")
# Letters and digits mixed, as whatever is random has them; the decimals of a number aren't meant.
_ENCODED = re.compile(
    r"(?<![^\W_])(?<!\d\.)(?=\d*[a-f])(?=[a-f]*\d)[0-9a-f]{16,}"
    r"|(?<![^\W_])(?<!\d\.)(?=\d*[A-F])(?=[A-F]*\d)[0-9A-F]{16,}"
    r"|(?<![\w+/-])(?=[^a-z]{0,31}[a-z])(?=[^A-Z]{0,31}[A-Z])(?=\D{0,31}\d)[A-Za-z0-9+/_-]{32,}"
)
Phrases = dict[tuple[str, ...], str]


def phrases_of(result: AuditResult, folder: Path) -> Phrases:
    """Return the words that mustn't be shared of the audit in ``folder``, and what they are.

    ``result`` is the whole one, not a shared version.
    """
    found: Phrases = {}
    words = result.data.words or []
    for finding in result.findings:
        for mark in (finding.victims, *(one.victim for one in finding.images), *(one.victim for one in finding.rows)):
            if mark:
                found.setdefault(_words(mark), "the mark of an example")
        for row in finding.rows:
            _add_text(found, row.true, "a row of a table")
            _add_text(found, row.recovered, "a recovered row")
        for sequence in finding.sequences:
            _add_text(found, _said(sequence.true, words), "a text")
            _add_text(found, _said(sequence.found, words), "a recovered text")
        for text in finding.recited:
            _add_text(found, _said(text.begin + text.true, words), "a text")
            _add_text(found, _said(text.begin + text.found, words), "a recited text")
        for file in (*(i.true_image for i in finding.images), *(s.path for s in finding.image_rows)):
            _add_name(found, Path(file).name, "the name of a picture")
    for picture in folder.glob("images/**/*.png"):
        _add_name(found, picture.name, "the name of a picture")
    for path in {text for text in _strings(result.scenario) if _PATH.search(text)}:
        _add_name(found, path, "a path")
        _add_name(found, re.split(r"[/\\]", path.rstrip("/\\"))[-1], "the name of a file")
        with suppress(OSError, ValueError):
            for below in list(_below(Path(path))):
                _add_name(found, below.name, "the name of a file of the data")
                _add_name(found, below.stem, "the name of a file of the data")
    for federation in result.federations:
        for client in federation.recording.clients if federation.recording else []:
            _add_name(found, client, "the name of a client")
    for client in _clients_of_table(result):
        _add_name(found, client, "the name of a client")
    for name in result.data.class_names or []:
        if len(name) >= 4 or _telling(name):
            _add_name(found, name, "the name of a class")
    if result.scenario.get("evaluation", {}).get("mask_texts"):
        for name in (result.name, *(one.name for one in result.federations)):  # the user's own words
            if len(_words(name)) > 2:
                found.setdefault(_words(name), "a name that may be a text, and texts are masked: take one or two words")
    _add_name(found, str(folder.resolve()), "the path of the audit")
    _add_name(found, str(Path.home()), "the path of a home folder")
    _add_name(found, platform.node(), "the name of this machine")
    with suppress(Exception):  # no such user, in a container
        _add_name(found, getpass.getuser(), "the name of a user")
    return found


def _clients_of_table(result: AuditResult) -> set[str]:
    """Return the values of the column that says whose a table's rows are; of a file that is gone, those that are named
    in the data's summary.
    """
    data = result.scenario.get("data", {})
    if not data.get("client"):
        return set()
    named = set(re.findall(r"\d+: (.+?) \([\d,]+\)", result.data.summary))
    with suppress(FedAuditError, KeyError, TypeError):
        columns = read_columns(Path(data["path"]), data.get("separator"), data.get("encoding"))
        named |= {str(value) for value in columns[data["client"]]}
    return named


def refuse_traces(files: Mapping[str, str], phrases: Phrases) -> None:
    """Refuse to share texts, by name, that hold what must stay: say what and in which line, not the thing itself."""
    for name, text in files.items():
        for form in dict.fromkeys([text, _plain(text)]):
            if picture := _PICTURE.search(form):
                _refuse(name, form, picture.start(), "an embedded picture or file")
            if encoded := _ENCODED.search(form):
                _refuse(name, form, encoded.start(), "bytes or a hash")
            for place, what in _places(form, phrases):
                _refuse(name, form, place, what)


def _refuse(name: str, text: str, place: int, what: str) -> NoReturn:
    raise BadInput(
        f"not shared: {name} would have {what} (line {text.count(chr(10), 0, place) + 1}); nothing was written. Rename "
        "what the audit, its federations or its attacks are called after it, and audit again; else report it as a bug"
    )


def _plain(text: str) -> str:
    """Return the text without tags and escapes, with as many lines."""
    bare = _TAG.sub(lambda tag: " " + "\n" * tag[0].count("\n"), text)
    return html.unescape(_ESCAPE.sub(lambda found: chr(int(found[1] or "20", 16)), bare))


def _words(text: str) -> tuple[str, ...]:
    return tuple(_WORD.findall(text.lower()))


@cache
def _our_words() -> frozenset[str]:
    """Return all words of fedaudit's own sources: to read one of them tells nobody anything."""
    files = [p for p in Path(__file__).parents[1].rglob("*") if p.suffix in {".py", ".j2", ".yaml", ".css"}]
    return frozenset(word for path in files for word in _words(path.read_text(encoding="utf-8")))


def _places(text: str, phrases: Phrases) -> Iterator[tuple[int, str]]:
    lengths: dict[str, set[int]] = {}
    for phrase in phrases:
        lengths.setdefault(phrase[0], set()).add(len(phrase))
    places = [(found[0], found.start()) for found in _WORD.finditer(text.lower())]
    words = [word for word, _ in places]
    for i, (word, place) in enumerate(places):
        for length in lengths.get(word, ()):
            if what := phrases.get(tuple(words[i : i + length])):
                yield place, what


def _add_name(found: Phrases, name: str, what: str) -> None:
    """Look for a name by its words, if one of them is none of ours; else whoever reads them learns nothing."""
    words = _words(name)
    own = [w for w in words if w not in _our_words() and (len(w) >= 4 or len(words) > 1 or _telling(w))]
    if own or len(set(words)) >= _DIFFERENT:
        found.setdefault(words, what)


def _telling(word: str) -> bool:
    """Return whether a short word may name somebody or something: three letters, as of a clinic or an illness."""
    return len(word) == 3 and word.isalpha()


def _add_text(found: Phrases, cells: Iterable[str], what: str) -> None:
    """Look for a row of a table or a text: for any six of its words in a row, or all if it has fewer."""
    words = _words(" ".join(cells))
    length = min(_WORDS, len(words))
    for i in range(len(words) - length + 1 if length > 2 else 0):
        part = words[i : i + length]
        if len(set(part)) >= min(_DIFFERENT, length):
            found.setdefault(part, what)


def _said(tokens: Iterable[int], words: Sequence[str]) -> Iterator[str]:
    """Yield the words of tokens, or their numbers where those aren't known; masked texts have neither."""
    for token in tokens:
        if token >= 0:
            yield (words[token : token + 1] or [""])[0] or str(token)


def _below(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        for number, path in enumerate(folder.rglob("*")):
            if number >= _NAMES:
                return
            yield path


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _strings(one)
