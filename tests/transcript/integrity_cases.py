"""Sealed folders that are sealed again after a change: whoever may write there can do that, where there is no key."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from fedaudit.utils.integrity import blank, digest_in, save_sealed, sealed


def seal_again(folder: Path) -> Path:
    """Give every index of a transcript the digests that fit, whatever it says, and return the folder."""
    header = json.loads((folder / "index.json").read_text())
    before = None
    for path in sorted(folder.glob("round-*.json")):
        entry = json.loads(path.read_text())
        named = {*entry["files"], *(message["file"] for message in entry["messages"])}
        entry["files"] = {file.name: _sha256(file) for file in folder.iterdir() if file.name in named}
        entry |= {"before": before, "digest": blank()}
        data = sealed(json.dumps(entry), f"{header['id']}/{path.name}")
        path.write_bytes(data)
        before = digest_in(data)
    header |= {"last": before, "digest": blank()}
    (folder / "index.json").write_bytes(sealed(json.dumps(header)))
    return folder


def changed_index(path: Path, place: tuple[str | int, ...], value: Any) -> None:
    """Change one value of an index."""
    node = values = json.loads(path.read_text())
    for part in place[:-1]:
        node = node[part]
    node[place[-1]] = value
    path.write_text(json.dumps(values))


def changed_tensors(path: Path, change: Callable[[dict[str, Tensor]], Any], about: str = "") -> None:
    """Change the tensors of a sealed safetensors file, and seal it again."""
    with safe_open(path, framework="pt") as file:
        values = json.loads((file.metadata() or {}).get("about", "{}"))
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (no mapping)
    values.pop("digest", None)
    change(tensors)
    save_sealed(path, tensors, values, about)


def put_part(folder: Path, part: str, tensors: dict[str, Tensor]) -> None:
    """Put a part of the whole federation, sealed as that transcript's, into its folder."""
    identifier = json.loads((folder / "index.json").read_text())["id"]
    save_sealed(folder / f"{part}.safetensors", tensors, {}, f"{identifier}/{part}.safetensors")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
