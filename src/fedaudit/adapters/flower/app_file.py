"""What a Flower app's pyproject.toml says; Flower isn't needed to read it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedaudit.utils.errors import BadInput

Config = dict[str, bool | int | float | str]
NODES = 10  # as many as Flower's own local simulation has


def read_app(folder: Path) -> dict[str, Any]:
    """Return ``[tool.flwr.app]`` of a pyproject.toml, the project's ``name`` and a local simulation's ``nodes``."""
    file = folder / "pyproject.toml"
    try:
        written = tomllib.loads(file.read_text(encoding="utf-8"))
        tool, name = written.get("tool", {}).get("flwr", {}), written.get("project", {}).get("name")
    except FileNotFoundError:
        raise BadInput(f"{folder} is no Flower app: it has no pyproject.toml") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, AttributeError) as error:
        raise BadInput(f"{file} can't be read: {error}") from None
    app = tool.get("app") if isinstance(tool, dict) else None
    if not isinstance(app, dict) or not isinstance(app.get("components", {}), dict):
        raise BadInput(f"{file} is no Flower app's: it has no [tool.flwr.app.components]")
    federations = tool.get("federations", {})
    default = federations.get(federations.get("default")) if isinstance(federations, dict) else None
    options = default.get("options", {}) if isinstance(default, dict) else {}
    number = options.get("num-supernodes") if isinstance(options, dict) else None
    return {
        **app,
        "name": name if isinstance(name, str) else folder.name,
        "nodes": number if isinstance(number, int) and number > 0 else None,
    }


def flat(values: Mapping[str, Any], parent: str = "") -> Config:
    """Return a config as Flower hands it to apps: nested tables by dotted keys, below the key ``parent``."""
    found: Config = {}
    for key, value in values.items():
        name = f"{parent}.{key}" if parent else key
        if isinstance(value, dict):
            found |= flat(value, name)
        elif isinstance(value, bool | int | float | str):
            found[name] = value
        else:
            raise BadInput(f"run config {name}: {value!r} isn't text, a number or a truth value")
    return found
