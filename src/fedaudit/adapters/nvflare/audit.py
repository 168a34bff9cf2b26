"""Audit an NVFlare job: run a copy of it by NVFlare's simulator, record what travels and its truth; attack that."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from fedaudit import api
from fedaudit.adapters.app_audit import AppAudit
from fedaudit.adapters.nvflare.desk import DeskFilter, Left
from fedaudit.adapters.nvflare.job import Filter, Job, class_of, configs, mapping, read_job
from fedaudit.adapters.own_modules import sent_by_value
from fedaudit.attacks.base import Attacks
from fedaudit.capture.estimators import FITTED
from fedaudit.capture.evaluation import joined
from fedaudit.capture.recorder import Recorder
from fedaudit.defences.client_defences import ClientContext
from fedaudit.guard.budget import known_of
from fedaudit.models import without_opacus
from fedaudit.pipeline import offline
from fedaudit.simulation.protocols import PROTOCOLS, MessageRecorder, WrongApp
from fedaudit.task.training import Loss
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.update import ClientDefenceInfo, Update
from fedaudit.utils.distributions import lacking
from fedaudit.utils.errors import BadInput, FedAuditError
from fedaudit.utils.folders import temporary_folder
from fedaudit.utils.progress import live_display
from fedaudit.utils.seeds import seed_all

if TYPE_CHECKING:
    from fedaudit.api import Audit, Verdict

_SITES = 2
_LINES = 3  # of what the simulator said last, where it failed
_WITHOUT = {  # of homomorphic encryption, and what stands in its place where nothing is encrypted; empty: nothing
    "HEModelEncryptor": "",
    "HEModelDecryptor": "",
    "HEModelSerializeFilter": "",
    "HEInTimeAccumulateWeightedAggregator": "nvflare.app_common.aggregators.intime_accumulate_model_aggregator."
    "InTimeAccumulateWeightedAggregator",
    "HEModelShareableGenerator": "nvflare.app_common.shareablegenerators.full_model_shareable_generator."
    "FullModelShareableGenerator",
}
_ENCRYPTED = (
    "sites encrypt what they send (homomorphic encryption): the server, which has no key, reads nothing; asked is what "
    "whoever has a key and these messages reads, which is everything; the job ran here without encryption"
)
_PEERS = "sites aggregate in turn, and the server reads nothing; unless told otherwise the first site is the adversary"
_REFUSED = {  # parts of a class's path, and what can be done instead
    "kmeans_assembler": "its sites send centres and sizes of clusters, which no attack here asks about; linear models "
    "and networks of scikit-learn are audited, and what a torch.nn.Module learns",
    "svm_assembler": "its sites send support vectors, rows that they train on as they are: whoever reads them needs no "
    "attack; LinearSVC and SGDClassifier (loss='hinge') send coefficients, which are audited",
    "FedXGBHistogram": "its server reads each site's sums of gradients and hessians in every node, by bins of columns "
    "(the splits, of sites that share rows), on a channel of xgboost's own; simulate that: algorithm: trees, "
    "trees.protocol: histogram",
    "Launcher": "it trains in a process of its own, which nobody here watches: say launch_external_process=False",
}


def audit_nvflare(
    job: Path | str,
    *,
    sites: int | None = None,
    attacked: Sequence[int] | Literal["last"] | None = "last",
    records: Any | None = None,
    words: Any | None = None,
    clients: int | None = None,
    max_minutes: float | None = None,
    attacks: Attacks | None = None,
    threat: Mapping[str, Any] | ThreatModel | None = None,
    loss: str | Loss | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    seed: int = 0,
    out: Path | str = "audit",
    workers: int = 1,
    fail_above: dict[str, float] | None = None,
    fail_on: Verdict | None = None,
    fail_below: dict[str, float] | None = None,
    controls: bool = True,
    overwrite: bool = False,
    progress: bool = True,
) -> Audit:
    """Run a copy of an NVFlare job by NVFlare's simulator, record every update with its truth, and attack that.

    Args:
        job: its folder, as ``recipe.export`` or NVFlare writes it.
        sites: how many; default: those that its ``deploy_map`` names, else its ``min_clients``, 2 at least.
        attacked: which rounds are attacked, from 0; default: the last, or where ``threat`` says which rounds the
            adversary sees, all that it sees; None: all.
        max_minutes: the job gets half of so long, then it is stopped.
        records, words, clients, attacks, threat, loss, mean, std, seed, out, workers, fail_above, fail_on, fail_below:
            as of :func:`fedaudit.adapters.flower.audit_flower`, and so are ``controls``, ``overwrite``, ``progress``.

    Returns:
        The finished audit, with the report in ``out``; the recording is in its ``recording``.

    Raises:
        BadInput: the job can't be run or watched, or no training was seen; the message says what to do.
    """
    path = Path(job)
    own = AppAudit.of(
        out, attacks=attacks, attacked=attacked, threat=threat, loss=loss, mean=mean, std=std, max_minutes=max_minutes,
        limits=api.limits_of(fail_above, fail_on, fail_below), controls=controls, seed=seed, records=records,
        words=words, clients=clients, workers=workers, overwrite=overwrite, progress=progress,
    )  # fmt: skip
    read = read_job(path)
    own.make_room()
    with temporary_folder() as place, contextlib.ExitStack() as stack:
        copied = _copied(path, place, seed)
        stack.enter_context(_importable(copied.folder))
        with live_display(progress) as display:
            report = display.stage(f"the NVFlare job {read.name}", read.rounds or math.inf)
            number = _number(read, path, sites)
            said = _run(copied.folder, place, number, own.until, lambda: report(_rounds(place)), seed)
            each = [pickle.loads(file.read_bytes()) for file in sorted((place / "left").glob("*.pickle"))]
            if not each:
                raise BadInput(f"no site of '{path}' sent an update{said and f': {said}'}")
            each = _one_a_round(each)
            ended = [f"the job ended early: {said}"] if said.startswith(_STOPPED) else []
            with own.recorder(read.name) as recorder:
                recorder.note(*copied.notes)
                notes = _record(recorder, each, read, own.others)
            module = next((one.seen.module for one in each if one.seen.module is not None), None)
            if own.messages:
                module = None
                shutil.rmtree(recorder.folder)
            elif any(one.model is not None for one in each):
                what = "; ".join(notes) or f"what reads it {lacking(PROTOCOLS.group, 'trees')}"
                raise BadInput(f"sites of '{path}' send a model as bytes, as those of boosted trees do: {what}")
            elif module is None:
                raise BadInput(
                    f"no training of '{path}' was seen: nothing of torch, scikit-learn or xgboost trains that fedaudit "
                    "can watch, or in another process; train in the process of the executor"
                )
            for note in dict.fromkeys([*copied.notes, *ended, *notes, *own.convert()]):
                display.say(f"note: {note}")
            number = len({one.site for one in each})
            display.say(f"{len(each)} updates of {number} sites recorded in {recorder.folder}")
        if copied.threat and not isinstance(threat, ThreatModel):
            own.threat = offline.threat_from({**copied.threat, **(threat or {})})
        stack.enter_context(sent_by_value(copied.folder))
        if module is not None:
            module = recorder.without_personal(without_opacus(module).cpu())
        criterion = next((one.seen.criterion for one in each if one.seen.criterion is not None), None)
        return own.finish(module, criterion, [one.index for one in each])


_STOPPED = "it was stopped when half of the time was over"


@dataclasses.dataclass(frozen=True)
class _Copy:
    """A job's copy that is watched; ``threat``: who reads it, unless told otherwise; ``notes``: that in words."""

    folder: Path
    threat: dict[str, Any]
    notes: list[str]


def _copied(job: Path, place: Path, seed: int = 0) -> _Copy:
    """Copy a job with the filters that watch it, and without encryption; refuse what can't be watched."""
    folder, encrypted, peers = place / "job", False, False
    shutil.copytree(job, folder)
    (place / "left").mkdir()
    for name in ("config_fed_client", "config_fed_server"):
        for file in list(configs(folder, name)):
            config = mapping(file)
            encrypted |= _without_encryption(config)
            written = [one for part in ("executors", "components") for one in config.get(part) or []]
            classes = [str(class_of(one.get("executor") or one)) for one in written]
            for part, why in _REFUSED.items():
                if any(part in one for one in classes):
                    raise BadInput(f"'{job}' can't be watched: {why}")
            if "external" in json.dumps(config.get("executors") or []):
                raise BadInput(f"'{job}' can't be watched: {_REFUSED['Launcher']}")
            peers |= any("swarm" in one for one in classes)
            if name == "config_fed_client":
                script = any("ClientAPI" in one for one in classes)
                args = {"folder": str(place / "left"), "script": script, "seed": seed}
                own = {"path": f"{DeskFilter.__module__}.{DeskFilter.__name__}", "args": args}
                for chain in ("task_data_filters", "task_result_filters"):
                    there = config[chain] = list(config.get(chain) or [])
                    trains = [one for one in there if {"train", "*"} & set(one.get("tasks") or [])]
                    for one in trains:  # NVFlare takes one chain a task
                        one["filters"] = [*(one.get("filters") or []), own]
                    there += [] if trains else [{"tasks": ["train"], "filters": [own]}]
            file.unlink()
            file.with_suffix(".json").write_text(json.dumps(config))
    threat: dict[str, Any] = {"adversary": "eavesdropper"} if encrypted else {}
    if peers:
        threat = {"adversary": "aggregating-client", "clients": [0], "rounds": "from 0"}
    return _Copy(folder, threat, [_ENCRYPTED] * encrypted + [_PEERS] * peers)


def _without_encryption(config: dict[str, Any]) -> bool:
    """Take homomorphic encryption out of a job's configuration; return whether there was any."""
    found = False
    for chain in ("task_data_filters", "task_result_filters"):
        for one in config.get(chain) or []:
            kept = [f for f in one.get("filters") or [] if str(class_of(f)).rpartition(".")[2] not in _WITHOUT]
            found |= len(kept) < len(one.get("filters") or [])
            one["filters"] = kept
        config[chain] = [one for one in config.get(chain) or [] if one.get("filters")]  # NVFlare takes no empty chain
    for one in list(config.get("components") or []):
        instead = _WITHOUT.get(str(class_of(one)).rpartition(".")[2])
        if instead is not None:
            found = True
            config["components"].remove(one)
            if instead:
                args = {key: value for key, value in (one.get("args") or {}).items() if key == "expected_data_kind"}
                config["components"].append({"id": one.get("id"), "path": instead, "args": args})
    return found


def _number(read: Job, path: Path, sites: int | None) -> int:
    meta = json.loads((path / "meta.json").read_text()) if (path / "meta.json").is_file() else {}
    named, least = [site for site in read.sites if site != "every site"], meta.get("min_clients")
    return sites or len(named) or (least if isinstance(least, int) and least > _SITES else _SITES)


def _run(job: Path, place: Path, sites: int, until: float | None, tick: Any, seed: int) -> str:
    """Run a job by NVFlare's simulator, a process a site; return what it said last where it failed or was stopped."""
    begin = f"import sys; from {seed_all.__module__} import {seed_all.__name__} as seed; seed({seed}); "
    begin += "from nvflare.cli import main; sys.argv[0] = 'nvflare'; main()"
    options = ["-w", str(place / "ws"), "-n", str(sites), "-t", str(sites)]
    command = [sys.executable, "-c", begin, "simulator", str(job), *options]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    with (place / "said.txt").open("wb") as said:
        process = subprocess.Popen(
            command, cwd=place, env=environment, stdout=said, stderr=said, start_new_session=True
        )
        try:
            while process.poll() is None and (until is None or time.time() < until):
                time.sleep(0.5)
                tick()
            over = process.poll() is None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if over:
        return f"{_STOPPED}: give more (max_minutes=…)"
    lines = [line for line in (place / "said.txt").read_text(errors="replace").splitlines() if "rror" in line]
    return " ".join(" ".join(lines[-_LINES:]).split())


def _rounds(place: Path) -> int:
    names = [file.name.rpartition("-")[0] for file in (place / "left").glob("*.pickle")]
    return max((names.count(name) for name in set(names)), default=0)


@contextlib.contextmanager
def _importable(job: Path) -> Iterator[None]:
    """Let the modules of a job's apps be imported, as its sites do."""
    before, modules = list(sys.path), set(sys.modules)
    sys.path[:0] = [str(folder) for folder in job.glob("**/custom")]
    try:
        yield
    finally:
        sys.path[:] = before
        for name in set(sys.modules) - modules:
            if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(job)):
                del sys.modules[name]


def _one_a_round(each: list[Left]) -> list[Left]:
    """Count each training as a round where sites hand on a model of bytes, one after the other, in a round."""
    sent = {(one.index, one.model) for one in each if one.model}
    if not any((one.index, one.start) in sent for one in each):
        return each
    return [replace(one, index=index) for index, one in enumerate(sorted(each, key=lambda one: one.at))]


def _record(recorder: Recorder, each: Sequence[Left], job: Job, others: Mapping[str, MessageRecorder]) -> list[str]:
    """Record what sites left, round by round; return notes."""
    notes: list[str] = []
    begun: int | None = None
    for one in sorted(each, key=lambda one: one.index):
        try:
            known = one.others
            if any(o.message(one.index, one.site, one.model, one.start, known[name]) for name, o in others.items()):
                continue
            named = _named(one)
            if begun != one.index:
                recorder.begin_round(named.sent, one.index)
                begun = one.index
            filters = job.sites.get(one.site) or job.sites.get("every site") or ()
            facts: dict[str, Any] = {"form": one.form, "num_examples": one.examples, "sent": named.sent}
            facts["sanitised"] = None if one.seen.private else _known(named, filters)
            recorder.update(one.site, named.state, one.seen, **facts)
        except WrongApp:
            raise
        except FedAuditError as error:
            notes.append(f"an update of {one.site} isn't recorded: {error}")
        notes += one.seen.notes
    if (tested := joined([part for one in each for part in one.tested])) is not None:
        with contextlib.suppress(BadInput):
            recorder.candidates(*tested)
    return notes


def _named(one: Left) -> Left:
    """Return it with arrays by the module's names: those of scikit-learn travel by others."""
    module = one.seen.module
    if not isinstance(module, FITTED):
        return one
    state = module.state([*one.state.values()])
    if one.sent:
        return replace(one, state=state, sent=module.state([*one.sent.values()]))
    if not getattr(module, "linear", False):
        raise BadInput(f"round {one.index} begins with no weights of the server's, but the site's own, which differ")
    return replace(one, state=state, sent={name: torch.zeros_like(value) for name, value in state.items()})


def _known(one: Left, filters: Sequence[Filter]) -> ClientDefenceInfo | None:
    """Return what everybody knows of an update that went through a job's filters."""
    change = {
        name: value if one.form == "difference" else value - one.sent[name]
        for name, value in one.state.items()
        if value.is_floating_point() and name in one.sent
    }
    update = Update(0, "weights", change, 1, None)
    return known_of(filters, update, ClientContext(dict(one.sent), tuple((name,) for name in one.sent), 1))
