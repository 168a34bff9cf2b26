"""Sealed folders, and what takes their digests away: then they are as an earlier fedaudit wrote them."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

OF_THE_SEAL = ("files", "digest", "before", "last")


def unsealed(folder: Path) -> Path:
    """Take the digests out of all files of a transcript or a recording, and return the folder."""
    for path in folder.rglob("*.json"):
        values = json.loads(path.read_text())
        path.write_text(json.dumps({key: value for key, value in values.items() if key not in OF_THE_SEAL}))
    for path in folder.rglob("*.safetensors"):
        unsealed_tensors(path)
    return folder


def unsealed_tensors(path: Path) -> None:
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata() or {})
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (no mapping)
    values = json.loads(metadata.get("about", "{}"))
    if values.pop("digest", None):
        old = values if path.parent.name == "truth" else {"about": json.dumps(values)}
        save_file(tensors, path, metadata=old)
