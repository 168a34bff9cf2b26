"""Attacks on an update that is about to leave a site, with the site's own data at hand."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from fedaudit.capture.recorder import Recorder
from fedaudit.evaluation.limits import CEILING, Limits, check_limits
from fedaudit.guard.outgoing import OutgoingUpdate
from fedaudit.guard.rounds import CheckRecord
from fedaudit.transcript.truth import truth_beside
from fedaudit.transcript.update import ClientDefenceInfo
from fedaudit.utils.errors import BadInput
from fedaudit.utils.folders import temporary_folder

if TYPE_CHECKING:
    from fedaudit.api import Audit, Verdict
    from fedaudit.task.training import Loss


@dataclass(frozen=True)
class AttackSettings:
    """What attacks on a site's updates are, are told, and are held to; the rest is as :class:`SiteGuard` has it.

    Attributes:
        specs: the attacks, by name.
        unset: nobody set the limits on metrics, so those that nothing measures don't count.
        out: folder for reports.
    """

    specs: Mapping[str, dict[str, Any]]
    fail_on: Verdict | None
    fail_above: Mapping[str, float]
    unset: bool
    largest: int
    mean: list[float] | None
    std: list[float] | None
    loss: str | Loss | None
    out: Path | None


def attacked(
    update: OutgoingUpdate,
    names: Sequence[str],
    index: int | None,
    settings: AttackSettings,
    sanitised: ClientDefenceInfo | None,
) -> dict[str, CheckRecord]:
    """Attack an update, which went through ``sanitised``; return what each attack says, by ``names``.

    Its seconds are those that it would take alone. BadInput: the update can't be attacked, or held to the limits.
    """
    from fedaudit import api  # what attacks need takes seconds to import

    began, examples = time.perf_counter(), sum(map(len, update.seen.inputs))
    if examples > settings.largest:
        raise BadInput(f"the update is over {examples} examples, and largest is {settings.largest}; raise largest")
    above = {name: limit for name, limit in settings.fail_above.items() if name != CEILING}  # a check of its own
    limits = api.Limits(above, settings.fail_on)
    with temporary_folder() as place:
        given = None if isinstance(settings.loss, str) else settings.loss or copy.deepcopy(update.seen.criterion)
        audit = api.audit_transcript(
            place / "recording",
            [uncalibrated(settings.specs[name]) for name in names],
            module=_recorded(place / "recording", update, index, settings, sanitised),
            loss=given,
            out=None if settings.out is None else settings.out / update.folder,
            fail_above=dict(limits.fail_above),
            fail_on=limits.fail_on,
            controls=False,
            overwrite=True,
            progress=False,
        )
    found = _checks(audit, names, limits, time.perf_counter() - began)
    if not audit.exceeded and (problem := _untested(audit, update, settings, whole=len(names) == len(settings.specs))):
        raise BadInput(problem)
    return found


def ceiling_check(
    update: OutgoingUpdate, index: int | None, settings: AttackSettings, sanitised: ClientDefenceInfo | None
) -> CheckRecord:
    """Return whether an update determines no more of its examples than the limit says, whoever attacks.

    BadInput: that can't be told.
    """
    from fedaudit.pipeline import offline  # what it needs takes seconds to import

    with temporary_folder() as place:
        given = None if isinstance(settings.loss, str) else settings.loss or copy.deepcopy(update.seen.criterion)
        module = _recorded(place / "recording", update, index, settings, sanitised)
        request = offline.AttackRequest(transcript=place / "recording", model=module, loss=given, progress=False)
        found = offline.ceilings_of(request, changes=False, limit=settings.fail_above[CEILING])
    limits = Limits({CEILING: settings.fail_above[CEILING]})
    (threshold,) = check_limits(limits, [], [], found.result.data.kind or "image", ceilings=found.result.ceilings)
    if threshold.outcome == "not tested":
        raise BadInput(threshold.reason or "it can't be told")
    (one,) = found.result.ceilings
    return CheckRecord(outcome="alarm" if threshold.exceeded else "quiet", text=one.text)


def _recorded(
    folder: Path,
    update: OutgoingUpdate,
    index: int | None,
    settings: AttackSettings,
    sanitised: ClientDefenceInfo | None,
) -> nn.Module:
    """Write a recording of the update alone; return the module that it is of. BadInput: the training isn't known."""
    module = copy.deepcopy(update.seen.module)
    assert module is not None
    called = settings.loss if isinstance(settings.loss, str) else None
    named: dict[str, Any] = {"mean": settings.mean, "std": settings.std, "loss": called}
    with Recorder(folder, name=update.name, module=module.cpu(), **named) as recorder:
        recorder.begin_round(update.sent, index)
        facts: dict[str, Any] = {"form": update.form, "sent": update.sent, "sanitised": sanitised}
        recorder.update(update.name, update.state, update.seen, **facts)
        recorder.end_round()
        module = recorder.without_personal(module)
    if truth_beside(folder) is None:
        raise BadInput("what the site trained on couldn't be recorded")
    return module


def _checks(audit: Audit, names: Sequence[str], limits: Limits, seconds: float) -> dict[str, CheckRecord]:
    """Return what each attack found; what of the seconds is no single attack's, each would have taken alone, too."""
    result = audit.result
    by_attack = dict(zip((attack.name for attack in result.attacks), names, strict=True))
    took = {name: sum(f.timing.seconds for f in result.findings if f.attack == name and f.timing) for name in by_attack}
    beside = max(0.0, seconds - sum(took.values()))
    found: dict[str, CheckRecord] = {}
    for row in result.summaries:
        of_it = [f for f in result.findings if f.attack == row.attack]
        held = check_limits(limits, of_it, [row], result.data.kind or "image")
        psnr = f" ({row.psnr.mean:.1f} dB)" if row.psnr else ""
        exceeded = any(threshold.exceeded for threshold in held)
        found[by_attack[row.attack]] = CheckRecord(
            outcome="not played" if row.verdict == "not applicable" else "alarm" if exceeded else "quiet",
            text=f"{row.verdict}{psnr}",
            seconds=took[row.attack] + beside,
        )
    return found


def _untested(audit: Audit, update: OutgoingUpdate, settings: AttackSettings, *, whole: bool) -> str | None:
    """Return why an audit without alarm doesn't count; ``whole``: all attacks that the site has were played.

    A limit that none of them can exceed isn't kept; of a part of them that may be.
    """
    result = audit.result
    if all(row.verdict == "not applicable" for row in result.summaries):
        return "none of the attacks can be run against it"
    recordings = [one.recording for one in result.federations if one.recording is not None]
    if update.follows and any(one.facts == "contradicted" for one in recordings):
        return "the update doesn't follow from the training that was watched"
    unable = [t for t in result.thresholds if t.measured_by != "what ran"] if whole else []
    if settings.unset and len(unable) < len(result.thresholds):  # of limits that nobody set, what nothing measures
        unable = [t for t in unable if t.measured_by != "nothing" or t.verdict is not None]
    if not unable:
        return None
    first = min(unable, key=lambda t: t.verdict is None)
    limit = f"the limit on {first.metric}" if first.verdict is None else "fail_on"
    return f"{limit} can't be exceeded by what ran: {first.reason}"


def uncalibrated(attack: str | dict[str, Any]) -> dict[str, Any]:
    """Return an attack that isn't calibrated unless it is asked for: in every round that would cost as much again."""
    from fedaudit import api

    spec: dict[str, Any] = {"name": attack} if isinstance(attack, str) else dict(attack)
    settings = {key: value for key, value in spec.items() if key != "name"}
    known = api.make_attack(spec["name"], settings).settings()
    if "attack" in known:  # a method of another one's
        spec["attack"] = uncalibrated(spec.get("attack", known["attack"]))
    return {"calibrate": False, **spec} if "calibrate" in known else spec
