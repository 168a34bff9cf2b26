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
_TASK = "train"  # NVFlare compares names of tasks as they are
_OURS = ("nvflare", "fedaudit")  # packages whose filters a class's name alone stands for


@dataclass(frozen=True)
class Job:
    """What a job says of what leaves its sites.

    Attributes:
        rounds: that are planned; None: it doesn't say, or says several numbers.
        sites: by name, the filters on the result of a training task in the order in which they work: each a class's
            name, with its module where that isn't NVFlare's, and its arguments.
        whole: the sites that may answer with whole weights: NVFlare's client API does unless it is told otherwise, and
            of a privacy.json, which is for any job, nobody knows.
    """

    name: str
    rounds: int | None
    sites: dict[str, tuple[Filter, ...]]
    whole: frozenset[str]


def is_job(path: Path) -> bool:
    """Return whether ``path`` is an NVFlare job's folder, or a privacy.json."""
    if path.is_dir():
        return next(configs(path, _CLIENT), None) is not None
    return path.name.startswith(_PRIVACY)


def read_job(path: Path) -> Job:
    """Read a job's folder, as NVFlare exports or submits it, or a site's privacy.json; refuse contradictions."""
    try:
        return _read_folder(path) if path.is_dir() else _read_privacy(path)
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise BadInput(f"{shown(path)} can't be read as an NVFlare job: {what}") from None


def _read_folder(path: Path) -> Job:
    meta = read_json(path / _META) if (path / _META).is_file() else {}
    deployed = meta.get("deploy_map") if isinstance(meta, dict) else None
    sites: dict[str, tuple[Filter, ...]] = {}
    whole = set()
    for file in configs(path, _CLIENT):
        app = file.parent.parent.name
        if deployed is not None and app not in deployed:
            continue
        config = mapping(file)
        filters = tuple(_results(config, file))
        for site in _places(deployed[app]) if deployed is not None else [_ALL_SITES]:
            if _sends_whole(config):
                whole.add(site)
            if sites.setdefault(site, filters) != filters:
                raise BadInput(f"{shown(path)}: two apps are for {site}; say in meta.json's deploy_map which is whose")
    if not sites:
        raise BadInput(f"{shown(path)} is no NVFlare job: no app with {_CLIENT} goes to a site")
    if len(sites) > 1 and _ALL_SITES in sites:
        raise BadInput(f"{shown(path)}: an app is for every site, and another for some; name the sites in deploy_map")
    rounds = [number for file in configs(path, _SERVER) for number in _rounds(mapping(file))]
    name = meta.get("name") if isinstance(meta, dict) else None
    name = name if isinstance(name, str) else path.name
    return Job(name, rounds[0] if len(rounds) == 1 else None, sites, frozenset(whole))


def _places(named: Any) -> list[str]:
    """Return the sites that an app goes to; of the server's app none."""
    sites = []
    for one in named or []:
        for site in one.get("sites", []) if isinstance(one, dict) else [one]:
            if site == "@ALL":
                sites.append(_ALL_SITES)
            elif site != "server":
                sites.append(str(site))
    return sites


def _read_privacy(path: Path) -> Job:
    """Return the scopes of a site's privacy.json as sites of a job: each has its filters."""
    written = read_json(path)
    scopes = written.get("scopes") if isinstance(written, dict) else None
    if not isinstance(scopes, list) or not all(isinstance(scope, dict) for scope in scopes):
        raise BadInput(f"{shown(path)} is no privacy.json of NVFlare: it has no list 'scopes'")
    default = written.get("default_scope")
    sites = {}
    for scope in scopes:
        name = str(scope.get("name"))
        label = f"scope {name}, the default" if name == default else f"scope {name}"
        if label in sites:
            raise BadInput(f"{shown(path)} has two scopes '{name}', which NVFlare refuses")
        sites[label] = tuple(_filters(scope.get("task_result_filters") or [], {}, path))
    name = path.parent.parent.name if path.parent.name == "local" else path.name
    return Job(name, None, sites, frozenset(sites))


def configs(folder: Path, name: str) -> Iterator[Path]:
    """Yield the files of that name, of any ending, of all of a job's apps."""
    for file in sorted(folder.glob(f"*/config/{name}.*")) or sorted(folder.glob(f"config/{name}.*")):
        if file.suffix in _ENDINGS:
            yield file


def mapping(file: Path) -> dict[str, Any]:
    """Return a job's configuration file; BadInput: it can't be read."""
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
    for chain in config.get("task_result_filters") or []:
        if _TASK in (chain.get("tasks") or []) and _leaves(chain):
            yield from _filters(chain.get("filters") or [], config, file)


def _leaves(written: dict[str, Any]) -> bool:
    """Return whether it works on what leaves the site."""
    return str(written.get("direction", "out")).lower() in {"out", "inout"}


def _filters(filters: list[Any], config: dict[str, Any], file: Path) -> Iterator[Filter]:
    for one in filters:
        if not _leaves(one):
            continue
        path = class_of(one)
        args = one.get("args") or {}
        if not isinstance(path, str) or not isinstance(args, dict):
            raise BadInput(f"{shown(file)}: a filter has no 'path' or 'name', or 'args' that aren't a mapping")
        module, _, name = path.rpartition(".")
        known = not module or module.partition(".")[0] in _OURS
        yield name if known else path, {key: _resolved(value, config) for key, value in args.items()}


def class_of(written: dict[str, Any]) -> Any:
    """Return the class that a configuration names."""
    return next((written[key] for key in ("path", "class_path", "name") if written.get(key)), None)


def _sends_whole(config: dict[str, Any]) -> bool:
    """Return whether NVFlare's client API trains, and isn't told to send differences."""
    for one in config.get("executors") or []:
        executor = one.get("executor") or {}
        if {_TASK, "*"} & set(one.get("tasks") or []) and "ClientAPI" in str(class_of(executor)):
            kind = _resolved((executor.get("args") or {}).get("params_transfer_type"), config)
            return str(kind).upper() != "DIFF"
    return False


def _resolved(value: Any, config: dict[str, Any]) -> Any:
    """Return a value, or where it names a variable of the file, {name}, what that is."""
    if isinstance(value, str) and value.startswith("{") and value.endswith("}"):
        return config.get(value.strip("{}$"), value)
    return value


def _rounds(config: dict[str, Any]) -> Iterator[int]:
    for workflow in config.get("workflows") or []:
        rounds = _resolved((workflow.get("args") or {}).get("num_rounds"), config)
        if isinstance(rounds, int) and not isinstance(rounds, bool) and rounds > 0:
            yield rounds
