"""Whether what a site is about to share holds a victim: an example, its name or its hash, whatever it is written as.

The examples are those that lie beside the audit: true and recovered pictures, findings, and the ground truth where
there is one. The search takes them as bytes, in hexadecimal and in base64, as numbers and as words; their names and
those of files, clients and this machine as words; and their hashes, even cut short. No search finds everything (an
example that is encrypted, or told in other words): the first rule is that nothing is written that isn't listed
(:mod:`fedaudit.report.share`).
"""

from __future__ import annotations

import base64
import getpass
import hashlib
import html
import platform
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from fedaudit.results import AuditResult, FindingResult
from fedaudit.utils.bounds import PICTURE, TENSORS, YAML, check_file, read_bytes
from fedaudit.utils.errors import BadInput
from fedaudit.utils.image_bytes import decode

_HASHES = ("md5", "sha1", "sha256", "sha512", "blake2b")
_PIECE = 16  # characters of hexadecimal or base64 that are looked for: of a hash as many tell it
_PLACES = 8  # of an example's bytes, from which pieces are taken
_RUN = 8  # numbers in a row, or all of an example that has fewer
_LEAST_RUN = 4  # of fewer, an example can't be told from others
_DIFFERENT = 4  # values that a run has at least, to be one of an example's
_NEAR = 1e-3  # by how much a number may differ, relative to the largest of the example
_ROUNDED = 0.51  # of 8 bits, by how much a rounded pixel is off
_WORDS = 6  # in a row, of a row of a table or a text
_NAMES = 100_000  # of files below a folder of data, no more are read

_WORD = re.compile(r"[^\W_]+")
_NUMBER = re.compile(r"(?<![\w.#])[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w.])")
_BETWEEN = re.compile(r"[\s,;|\[\]()]*")
_ENCODED = re.compile(rf"[A-Za-z0-9+/=_-]{{{_PIECE},}}")
_TAG = re.compile(r"<[^>]*>")
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|[bfnrt])")
_PICTURE = re.compile(r"data:(?!;?\s|['\"])[a-z]+/[a-z0-9.+-]+[;,]", re.IGNORECASE)
_PATH = re.compile(r"[/\\]|\.\w{1,12}$")


@dataclass
class Traces:
    """What must not be in what is shared.

    Attributes:
        phrases: by their words, in lower case, what they are.
        pieces: by their characters, hexadecimal in lower case or base64.
        examples: (d,) numbers each, with what it is.
        told: what is looked for, in words, for the shared page.
    """

    phrases: dict[tuple[str, ...], str] = field(default_factory=dict)
    pieces: dict[str, str] = field(default_factory=dict)
    examples: list[tuple[np.ndarray[Any, Any], str]] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    def add_name(self, name: str, what: str) -> None:
        """Look for a name: by its words, if one of them is none of ours; else whoever reads them learns nothing."""
        words = _words(name)
        own = [w for w in words if w not in _our_words() and (len(w) >= 4 or len(words) > 1)]
        if own or len(set(words)) >= _DIFFERENT:
            self.phrases.setdefault(words, what)

    def add_text(self, cells: Iterable[str], what: str) -> None:
        """Look for a row of a table or a text: for any six of its words in a row, or all if it has fewer."""
        words = _words(" ".join(cells))
        length = min(_WORDS, len(words))
        for i in range(len(words) - length + 1 if length > 2 else 0):
            part = words[i : i + length]
            if len(set(part)) >= min(_DIFFERENT, length):
                self.phrases.setdefault(part, what)

    def add_bytes(self, data: bytes, what: str) -> None:
        """Look for bytes and for their hashes, in hexadecimal and in base64."""
        for name in _HASHES:
            digest = hashlib.new(name, data).digest()
            self.pieces.setdefault(digest.hex()[:_PIECE], f"a hash of {what}")
            self.pieces.setdefault(base64.b64encode(digest).decode()[:_PIECE], f"a hash of {what}")
        size = _PIECE * 3 // 4 + 2
        places = np.linspace(0, max(0, len(data) - size), 8 * _PLACES).astype(int)
        parts = dict.fromkeys(data[i : i + size] for i in places)
        varied = sorted(parts, key=lambda part: -len(set(part)))[:_PLACES]
        for part in (p for p in varied if len(set(p)) >= _DIFFERENT):
            pieces = {part.hex()[:_PIECE]: part[: _PIECE // 2]}
            for k in range(3):  # base64 parts its bytes by threes, and begins who knows where
                pieces[base64.b64encode(part[k : k + 12]).decode()] = part[k : k + 12]
            for piece, of in pieces.items():
                if len(set(of)) > 1:  # whole numbers are mostly zeros, which say nothing
                    self.pieces.setdefault(piece, what)

    def add_example(self, values: np.ndarray[Any, Any], what: str) -> None:
        """Look for an example by its numbers, and as bytes: as they are, in single precision, and in 8 bits."""
        flat = np.asarray(values).reshape(-1)
        forms = [flat]
        if flat.dtype.kind == "f":
            forms += [flat.astype(t) for t in (np.float16, np.float32, np.float64) if flat.dtype != t]
            forms += [(flat * 255).round().astype(np.uint8)] * _shares(flat)
        for form in forms:
            self.add_bytes(form.tobytes(), what)
        if flat.size >= _LEAST_RUN:
            self.examples.append((flat, what))


def traces_of(result: AuditResult, folder: Path, truth: Path | None = None) -> Traces:
    """Return what mustn't be shared of the audit in ``folder``, whose whole ``result`` is given, not a shared version.

    ``truth``: file or folder of the ground truth; None: what lies beside the audit, if anything does.
    """
    from fedaudit.transcript.truth import examples_in, truth_beside

    found = Traces()
    _add_results(found, result)
    pictures = sorted(folder.glob("images/**/*.png"))
    for path in pictures:
        data = read_bytes(path, PICTURE)
        found.add_bytes(data, "a picture")
        found.add_example(decode(data, str(path), None, formats=("PNG",)), "a picture")
        found.add_name(path.name, "the name of a picture")
    kept = sorted(folder.glob("findings/*.safetensors"))
    for path in kept:
        _add_hashes(found, path)
        found.add_name(path.stem, "the name of a finding")
        for value in _tensors(path).values():
            _add_examples(found, value, "what an attack recovered")
    truth = truth or truth_beside(folder) or truth_beside(folder / "recording")
    examples = examples_in(truth) if truth else {}
    for example in examples.values():
        _add_examples(found, example.numpy(), "an example")
    for path in [truth] if truth and truth.is_file() else []:
        _add_hashes(found, path)
    _add_names(found, result, folder)
    found.told = [
        f"{len(pictures)} pictures, true and recovered",
        f"{len(kept)} kept findings",
        f"{sum(map(len, examples.values())):,} examples of the ground truth"
        if truth
        else "no ground truth was at hand",
        f"{len(found.phrases):,} names of files, clients and this machine, rows and texts",
    ]
    return found


def refuse_victims(files: Mapping[str, str], traces: Traces) -> None:
    """Refuse to share texts, by name, with a trace of a victim: say what and in which line, not the thing itself."""
    for name, text in files.items():
        if picture := _PICTURE.search(text):
            _refuse(name, text, picture.start(), "an embedded picture or file")
        forms = list(dict.fromkeys([text, _plain(text)]))
        for form in forms:
            for place, what in (*_phrases(form, traces), *_pieces(form, traces), *_runs(form, traces)):
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


def _phrases(text: str, traces: Traces) -> Iterator[tuple[int, str]]:
    lengths: dict[str, set[int]] = {}
    for phrase in traces.phrases:
        lengths.setdefault(phrase[0], set()).add(len(phrase))
    places = [(found[0], found.start()) for found in _WORD.finditer(text.lower())]
    words = [word for word, _ in places]
    for i, (word, place) in enumerate(places):
        for length in lengths.get(word, ()):
            if what := traces.phrases.get(tuple(words[i : i + length])):
                yield place, what


def _pieces(text: str, traces: Traces) -> Iterator[tuple[int, str]]:
    for run in _ENCODED.finditer(text):
        same = run[0].replace("-", "+").replace("_", "/")
        for form in (same, run[0].lower()):
            for i in range(len(form) - _PIECE + 1):
                if what := traces.pieces.get(form[i : i + _PIECE]):
                    yield run.start() + i, what


def _runs(text: str, traces: Traces) -> Iterator[tuple[int, str]]:
    """Yield the runs of numbers that are an example's: as they are, or of values in [0, 1] those of 8 bits."""
    runs: list[tuple[int, list[float]]] = []
    end = -1
    for found in _NUMBER.finditer(text):
        if end < 0 or _BETWEEN.fullmatch(text, end, found.start()) is None:
            runs.append((found.start(), []))
        runs[-1][1].append(float(found[0]))
        end = found.end()
    for place, numbers in runs:
        if len(numbers) < _LEAST_RUN:
            continue
        run = np.array(numbers)
        for example, what in traces.examples:
            length = min(_RUN, len(example))
            parts = [run[i : i + length] for i in range(len(run) - length + 1)]
            for part in filter(_telling, parts):
                if any(_has(example, *form) for form in _forms(example, part)):
                    yield place, f"the numbers of {what}"
                    return


def _telling(part: np.ndarray[Any, Any]) -> bool:
    """Return whether numbers differ enough to be an example's, and aren't merely counted up."""
    steps = np.diff(part)
    return len(np.unique(part)) >= min(_DIFFERENT, len(part)) and not np.allclose(steps, steps[0])


def _shares(example: np.ndarray[Any, Any]) -> bool:
    """Return whether the numbers lie in [0, 1], as pixels do that are 8 bits elsewhere."""
    return bool(example.size and example.min() >= 0 and example.max() <= 1)


def _forms(example: np.ndarray[Any, Any], part: np.ndarray[Any, Any]) -> Iterator[tuple[np.ndarray[Any, Any], float]]:
    """Yield numbers in the example's scale, and how far each may be off; pixels are taken in 8 bits and in [0, 1]."""
    yield part, _NEAR * max(1.0, float(np.abs(example).max()))
    if _shares(example):
        yield part / 255, _ROUNDED / 255
    elif example.dtype == np.uint8:
        yield part * 255, _ROUNDED


def _has(example: np.ndarray[Any, Any], part: np.ndarray[Any, Any], near: float) -> bool:
    """Return whether the numbers of ``part`` stand in a row in an example."""
    example = example if example.dtype.kind == "f" else example.astype(np.float64)
    places = np.flatnonzero(np.abs(example[: len(example) - len(part) + 1] - part[0]) <= near)
    for k in range(1, len(part)):
        places = places[np.abs(example[places + k] - part[k]) <= near]
    return bool(len(places))


def _add_results(found: Traces, result: AuditResult) -> None:
    """Look for what the whole results say of single examples, and for every digest that they have."""
    words = result.data.words or []
    for finding in result.findings:
        _add_finding(found, finding, words)
    if result.digests:
        for digest in (result.digests.scenario, *result.digests.transcripts.values()):
            found.pieces.setdefault(digest[:_PIECE], "the digest of a file")


def _add_finding(found: Traces, finding: FindingResult, words: Sequence[str]) -> None:
    for mark in (finding.victims, *(one.victim for one in finding.images), *(one.victim for one in finding.rows)):
        if mark:
            found.phrases.setdefault(_words(mark), "the mark of an example")
    for row in finding.rows:
        found.add_text(row.true, "a row of a table")
        found.add_text(row.recovered, "a recovered row")
    for sequence in finding.sequences:
        for tokens, what in ((sequence.true, "a text"), (sequence.found, "a recovered text")):
            if len(tokens) >= _LEAST_RUN:
                found.examples.append((np.array(tokens, dtype=np.float64), what))
            found.add_text((words[t] for t in tokens if t < len(words)), what)


def _tensors(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        check_file(path, TENSORS)
        return {name: value.float().numpy() if value.is_floating_point() else value.numpy()
                for name, value in load_file(path).items()}  # fmt: skip
    except (OSError, SafetensorError, ValueError) as error:
        raise BadInput(f"'{path}' can't be read, so what is shared can't be checked ({error})") from None


def _add_examples(found: Traces, values: np.ndarray[Any, Any], what: str) -> None:
    """Look for each example of an array (n, ...); an array of one axis, such as scores, counts as one."""
    least = _LEAST_RUN if values.ndim > 1 else _RUN
    for one in values if values.ndim > 1 else [values]:
        if one.size >= least and one.dtype.kind in "fiu":
            found.add_example(one, what)


def _add_hashes(found: Traces, path: Path) -> None:
    check_file(path, TENSORS)
    with path.open("rb") as file:
        for name in _HASHES:
            file.seek(0)
            digest = hashlib.file_digest(file, name).digest()
            found.pieces.setdefault(digest.hex()[:_PIECE], "a hash of a file")
            found.pieces.setdefault(base64.b64encode(digest).decode()[:_PIECE], "a hash of a file")


def _add_names(found: Traces, result: AuditResult, folder: Path) -> None:
    """Look for the names of data, clients and this machine."""
    for path in {text for text in _strings(result.scenario) if _PATH.search(text)}:
        found.add_name(path, "a path")
        found.add_name(re.split(r"[/\\]", path.rstrip("/\\"))[-1], "the name of a file")
        with suppress(OSError, ValueError):
            for below in list(_below(Path(path))):
                found.add_name(below.name, "the name of a file of the data")
                found.add_name(below.stem, "the name of a file of the data")
    for federation in result.federations:
        for client in federation.recording.clients if federation.recording else []:
            found.add_name(client, "the name of a client")
    for name in result.data.class_names or []:
        if len(name) >= 4:
            found.add_name(name, "the name of a class")
    for finding in result.findings:
        for file in (*(i.true_image for i in finding.images), *(s.path for s in finding.image_rows)):
            found.add_name(Path(file).name, "the name of a picture")
    found.add_name(str(folder.resolve()), "the path of the audit")
    found.add_name(str(Path.home()), "the path of a home folder")
    found.add_name(platform.node(), "the name of this machine")
    with suppress(Exception):  # no such user, in a container
        found.add_name(getpass.getuser(), "the name of a user")
    for file in ("scenario.yaml", "attack.yaml"):
        if (folder / file).is_file():
            digest = hashlib.sha256(read_bytes(folder / file, YAML)).hexdigest()
            found.pieces.setdefault(digest[:_PIECE], "a hash of a file")


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
