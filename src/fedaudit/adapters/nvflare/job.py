"""Which filters an NVFlare job, or a site's privacy.json, puts on what sites send; NVFlare isn't needed to read it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedaudit.utils import plain_yaml
from fedaudit.utils.bounds import YAML, read_bytes, read_json, shown
from fedaudit.utils.errors import BadInput

Filter = tuple[str, dict[str, Any]]

_META, _PRIVACY = "meta.json", "privacy.json"
_CLIENT, _SERVER = "config_fed_client", "config_fed_server"
_ENDINGS = (".json", ".yml", ".yaml", ".conf")
_ALL_SITES = "every site"
_TRAINING = {"*", "train", "train_*", "fl_train"}


@dataclass(frozen=True)
class Job:
    """What a job says of what leaves its sites.

    Attributes:
        name: of the job.
        rounds: that are planned; None: it doesn't say.
        sites: by name, the filters on the result of a training task in the order in which they work: each a class'
            name, without its module, and its arguments.
    """

    name: str
    rounds: int | None
    sites: dict[str, tuple[Filter, ...]]


def is_job(path: Path) -> bool:
    """Return whether ``path`` is an NVFlare job's folder, or a privacy.json."""
    if path.is_dir():
        return next(_configs(path, _CLIENT), None) is not None
    return path.name.startswith(_PRIVACY)


def read_job(path: Path) -> Job:
    """Read a job's folder, as NVFlare exports or submits it, or a site's privacy.json.

    Raises:
        BadInput: it is neither, or can't be read.
    """
    if not path.is_dir():
        return _read_privacy(path)
    clients = list(_configs(path, _CLIENT))
    if not clients:
        raise BadInput(f"{shown(path)} is no NVFlare job: it has no app*/config/{_CLIENT}.json")
    meta = read_json(path / _META) if (path / _META).is_file() else {}
    deployed = meta.get("deploy_map", {}) if isinstance(meta, dict) else {}
    sites: dict[str, tuple[Filter, ...]] = {}
    for file in clients:
        app = file.parent.parent.name
        named = deployed.get(app, []) if isinstance(deployed, dict) else []
        where = [site for site in named if isinstance(site, str) and site not in {"server", "@ALL"}]
        filters = tuple(_results(_mapping(file), file))
        for site in where or [_ALL_SITES]:
            sites[site] = filters
    rounds = None
    for file in _configs(path, _SERVER):
        rounds = _rounds(_mapping(file)) or rounds
    name = meta.get("name") if isinstance(meta, dict) else None
    return Job(name if isinstance(name, str) else path.name, rounds, sites)


def _read_privacy(path: Path) -> Job:
    """Return a scope of a site's privacy.json as a site of a job: each has its filters."""
    written = read_json(path)
    scopes = written.get("scopes") if isinstance(written, dict) else None
    if not isinstance(scopes, list) or not all(isinstance(scope, dict) for scope in scopes):
        raise BadInput(f"{shown(path)} is no privacy.json of NVFlare: it has no list 'scopes'")
    default = written.get("default_scope")
    sites = {}
    for scope in scopes:
        name = str(scope.get("name"))
        label = f"scope {name}, the default" if name == default else f"scope {name}"
        sites[label] = tuple(_filters(scope.get("task_result_filters", []), path))
    return Job(path.parent.parent.name if path.parent.name == "local" else path.name, None, sites)


def _configs(folder: Path, name: str) -> Iterator[Path]:
    for file in sorted(folder.glob(f"*/config/{name}.*")) or sorted(folder.glob(f"config/{name}.*")):
        if file.suffix in _ENDINGS:
            yield file


def _mapping(file: Path) -> dict[str, Any]:
    if file.suffix == ".json":
        found = read_json(file)
    elif file.suffix == ".conf":
        try:
            hocon: Any = importlib.import_module("pyhocon")  # NVFlare brings it
        except ImportError:
            raise BadInput(f"{shown(file)}: HOCON is read where NVFlare is installed; else write it as JSON") from None
        found = hocon.ConfigFactory.parse_string(read_bytes(file, YAML).decode()).as_plain_ordered_dict()
    else:
        found = plain_yaml.read(file, shown(file))
    if not isinstance(found, dict):
        raise BadInput(f"{shown(file)} isn't a mapping; is it an NVFlare job's?")
    return found


def _results(config: dict[str, Any], file: Path) -> Iterator[Filter]:
    chains = config.get("task_result_filters", [])
    if not isinstance(chains, list):
        raise BadInput(f"{shown(file)}: 'task_result_filters' isn't a list")
    for chain in chains:
        if not isinstance(chain, dict):
            raise BadInput(f"{shown(file)}: a chain of 'task_result_filters' isn't a mapping")
        tasks = chain.get("tasks", ["*"])
        if not _TRAINING.isdisjoint(tasks if isinstance(tasks, list) else [tasks]):
            yield from _filters(chain.get("filters", []), file)


def _filters(filters: Any, file: Path) -> Iterator[Filter]:
    for one in filters if isinstance(filters, list) else []:
        path = one.get("path", one.get("name")) if isinstance(one, dict) else None
        if not isinstance(path, str):
            raise BadInput(f"{shown(file)}: a filter has neither 'path' nor 'name'")
        args = one.get("args") or {}
        yield path.rsplit(".", 1)[-1], dict(args) if isinstance(args, dict) else {}


def _rounds(config: dict[str, Any]) -> int | None:
    for workflow in config.get("workflows", []):
        args = workflow.get("args", {}) if isinstance(workflow, dict) else {}
        rounds = args.get("num_rounds") if isinstance(args, dict) else None
        if isinstance(rounds, str):  # a variable of the file: {num_rounds}
            rounds = config.get(rounds.strip("{}$"))
        if isinstance(rounds, int) and rounds > 0:
            return rounds
    return None
