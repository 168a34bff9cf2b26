"""One digest for every file that is read back: it tells accidents, and with a secret key also whoever lacks it.

A sealed file holds the ``digest`` of its own bytes, computed with zeros where it stands. It is a SHA-256, or with a
secret in the environment's ``FEDAUDIT_KEY`` an HMAC-SHA-256. What the file is *about* (a trial's key, a recording's
identifier and the file's name) goes into it first, so that no file stands in for another. An index that is sealed
lists SHA-256 digests of the files that it names. Whoever may write to a folder can replace a digest without a key,
too; nobody can forge one with a key that they haven't got. Whoever writes while a file is read isn't kept out.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from fedaudit.utils.errors import BadInput, CorruptTranscript

if TYPE_CHECKING:  # importing torch takes seconds, which readers of texts needn't wait for
    from torch import Tensor

SECRET_VARIABLE = "FEDAUDIT_KEY"

# In a JSON text, or in one that is a string of another: a text within either has more backslashes.
_FIELD = re.compile(rb'(?<!\\)\\?"digest\\?":\s*\\?"((?:hmac-)?sha256):([0-9a-f]{64})\\?"')
_ZEROS = "0" * 64
_LONGEST_HEADER = 100_000_000  # of safetensors
_PIECE = 1 << 20


def blank() -> str:
    """Return what stands in a file's ``digest`` until it is sealed."""
    return f"{'hmac-sha256' if _secret() else 'sha256'}:{_ZEROS}"


def sealed(text: str, about: str = "") -> bytes:
    """Return a JSON text in UTF-8, its :func:`blank` ``digest`` filled in; :func:`check` needs the same ``about``."""
    data = text.encode()
    place, value = _digest(io.BytesIO(data), about, keyed=bool(_secret()))
    return data[:place] + value + data[place + 64 :]


def digest_in(data: bytes) -> str | None:
    """Return the digest that a JSON text, or the head of a file, holds, if one is there."""
    found = _FIELD.search(data)
    return (found[1] + b":" + found[2]).decode() if found else None


def write_whole(path: Path, data: bytes) -> None:
    """Write a small file at once: whoever reads it sees all of it, or what it was before."""
    draft = path.with_name(f".{path.name}.draft")
    draft.write_bytes(data)
    draft.replace(path)


def save_sealed(path: Path, tensors: Mapping[str, Tensor], values: Mapping[str, Any], about: str = "") -> None:
    """Write a sealed safetensors file; an interruption leaves no half-written one.

    Tensors share no memory. ``values``, without ``digest``, stand in the metadata's ``about``, the only entry: of
    several, safetensors would write the order anew every time.
    """
    from fedaudit.utils.tensor_files import pieces, write

    header, *memory = pieces(
        {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
        metadata={"about": json.dumps({"digest": blank(), **values})},
    )
    found = _FIELD.search(header)
    assert found is not None
    digest = _started(about, keyed=bool(_secret()), then=bytes(header))
    draft = path.with_suffix(".part")
    with draft.open("wb") as file:
        file.write(header)
        write(file, memory, digest)
        file.seek(found.start(2))
        file.write(digest.hexdigest().encode())
    draft.replace(path)


def load_sealed(
    path: Path, about: str = "", *, own: Collection[str], remedy: str, needed: str = ""
) -> tuple[dict[str, Any], dict[str, Tensor], str | None]:
    """Return what :func:`save_sealed` wrote, and :func:`check`'s note; ValueError: it has values not in ``own``."""
    from safetensors import safe_open

    note = check(path, about, remedy=remedy, needed=needed)
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata() or {})
        values: Any = json.loads(metadata["about"]) if "about" in metadata else metadata  # a recording's, before
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    if not isinstance(values, dict) or ("digest" in values) is bool(note) or not set(values) <= {"digest", *own}:
        raise ValueError("its metadata are none of ours")
    return {key: value for key, value in values.items() if key != "digest"}, tensors, note


def check(path: Path, about: str = "", *, remedy: str, data: bytes | None = None, needed: str = "") -> str | None:
    """Check the digest in a file, or in its ``data``; ``needed`` says what the file is where one without it is refused.

    Returns:
        A note where the file carries no digest, as those that earlier versions wrote; else None.
    """
    with path.open("rb") if data is None else io.BytesIO(data) as file:
        written = digest_in(_head(file))
        note = _judge(str(path), written, lambda keyed: _digest(file, about, keyed=keyed)[1].decode(), remedy)
    if note and needed:
        raise CorruptTranscript(f"{path} carries no digest: it isn't whole, or not {needed}; {remedy}")
    return note


def digest_text(text: str, about: str = "") -> str:
    """Return the digest of a text that is kept apart from it, as in a database; see :func:`check_text`."""
    secret = bool(_secret())
    return f"{'hmac-sha256' if secret else 'sha256'}:{_started(about, keyed=secret, then=text.encode()).hexdigest()}"


def check_text(text: str, found: str | None, about: str = "", *, where: str, remedy: str) -> str | None:
    """Check a text against the digest that was kept of it, as :func:`check` does a file.

    Args:
        text: as it was read.
        found: the digest, as it was read; None where there is none.
        about: what it was sealed with.
        where: what the text is, for the message.
        remedy: as of :func:`check`.

    Raises:
        CorruptTranscript: the digest doesn't fit.
        BadInput: it can't be checked with the key that there is.
    """
    return _judge(where, found, lambda keyed: _started(about, keyed=keyed, then=text.encode()).hexdigest(), remedy)


def _judge(where: str, found: str | None, fitting: Callable[[bool], str], remedy: str) -> str | None:
    """Compare the digest that was found with the one that fits, given whether it is keyed; see :func:`check`."""
    secret, keyed = bool(_secret()), str(found).startswith("hmac-")
    if secret and not keyed:
        what = "no digest" if found is None else "a digest that was made without a key"
        raise BadInput(
            f"{where} carries {what}, and {SECRET_VARIABLE} is set: whoever may write there could have changed it; "
            f"unset {SECRET_VARIABLE} to take it as it is, or {remedy}"
        )
    if found is None:
        return f"{where} carries no digest, as an earlier fedaudit wrote it: nothing tells a change"
    if keyed and not secret:
        raise BadInput(
            f"{where} was sealed with a key, and {SECRET_VARIABLE} isn't set: set it to the same secret, or {remedy}"
        )
    fits = f"{'hmac-' * keyed}sha256:{fitting(keyed)}"
    if not hmac.compare_digest(fits.encode(), str(found).encode(errors="replace")):
        who = f"or somebody without the {SECRET_VARIABLE}" if keyed else "and whoever may write there"
        other = f", or written under another {SECRET_VARIABLE}" if keyed else ""
        raise CorruptTranscript(
            f"{where} was changed or damaged after it was written{other}: its digest doesn't fit; a disk could have "
            f"done so, {who}; {remedy}"
        )
    return None


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, as ``sha256sum`` prints it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_listed(path: Path, name: str, files: Mapping[str, str], *, remedy: str) -> None:
    """Check a file against the digests in a sealed index; where that is of an earlier version, ``files`` is empty.

    Raises:
        CorruptTranscript: the file isn't listed, or its digest is another.
        OSError: it can't be read.
    """
    if not files:
        return
    if name not in files:
        raise CorruptTranscript(
            f"{path} isn't among the files that the index lists: whoever may write there put it; delete it"
        )
    if file_sha256(path) != files[name]:
        raise CorruptTranscript(
            f"{path} was changed or damaged after it was written: its digest isn't the one in the index; a disk could "
            f"have done so, and whoever may write there; {remedy}"
        )


def _secret() -> bytes:
    return os.fsencode(os.environ.get(SECRET_VARIABLE, ""))


def _head(file: IO[bytes]) -> bytes:
    """Return the part of a file in which its digest stands: of safetensors the header, of JSON all."""
    file.seek(0)
    start = file.read(8)
    if start[:1] != b"{" and len(start) == 8:
        return start + file.read(min(int.from_bytes(start, "little"), _LONGEST_HEADER))
    return start + file.read()


def _digest(file: IO[bytes], about: str, *, keyed: bool) -> tuple[int, bytes]:
    """Return where a file's digest stands, and what it should be, as 64 hexadecimal digits."""
    head = _head(file)
    found = _FIELD.search(head)
    assert found is not None
    zeroed = head[: found.start(2)] + _ZEROS.encode() + head[found.end(2) :]
    digest = _started(about, keyed=keyed, then=zeroed)
    while piece := file.read(_PIECE):
        digest.update(piece)
    return found.start(2), digest.hexdigest().encode()


def _started(about: str, *, keyed: bool, then: bytes) -> Any:
    first = about.encode(errors="surrogatepass")
    digest: Any = hmac.new(_secret(), digestmod="sha256") if keyed else hashlib.sha256()
    digest.update(b"%d %s" % (len(first), first))
    digest.update(then)
    return digest
