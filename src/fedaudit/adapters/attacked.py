"""An update that is about to leave a site, attacked there with the site's own data at hand."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedaudit.capture.capture import Capture
from fedaudit.capture.recorder import Recorder
from fedaudit.evaluation.limits import check_limits
from fedaudit.results.site import CheckRecord
from fedaudit.transcript.files import Form
from fedaudit.transcript.truth import truth_beside
from fedaudit.transcript.update import ClientDefenceInfo
from fedaudit.utils.errors import BadInput
from fedaudit.utils.folders import temporary_folder

if TYPE_CHECKING:
    from fedaudit.api import Limits
    from fedaudit.pipeline.ledger import Filter
    from fedaudit.task.training import Loss


@dataclass(frozen=True)
class Passing:
    """An update that is about to leave a site.

    Attributes:
        sent: the model that came in, by name.
        state: what is about to leave, in that ``form``.
        seen: the training that was watched.
        form: of ``state``.
        name: of the site.
        folder: where its report goes, below ``out``.
        follows: nothing changes the update after the training that was watched.
        went_through: filters that worked on ``state`` already, in their order.
        goes_through: filters that will, before it leaves the site.
    """

    sent: Mapping[str, Tensor]
    state: Mapping[str, Tensor]
    seen: Capture
    form: Form
    name: str
    folder: str
    follows: bool
    went_through: Sequence[Filter] = ()
    goes_through: Sequence[Filter] = ()


@dataclass(frozen=True)
class Known:
    """What an attacked update is known by, and held to.

    Attributes:
        unset: nobody set the limits on metrics, so those that nothing measures don't count.
        whole: all attacks are played that the site has, so that a limit that none of them can exceed isn't kept.
        sanitised: the defence that it went through.
    """

    mean: list[float] | None
    std: list[float] | None
    loss: str | Loss | None
    limits: Limits
    unset: bool
    whole: bool
    out: Path | None
    sanitised: ClientDefenceInfo | None


def attacked(
    passing: Passing, attacks: Mapping[str, dict[str, Any]], index: int | None, known: Known
) -> dict[str, CheckRecord]:
    """Attack an update with ``attacks``, by check; return what each says, with the seconds that it would take alone."""
    from fedaudit import api  # what attacks need takes seconds to import

    began, module = time.perf_counter(), copy.deepcopy(passing.seen.module)
    assert module is not None
    with temporary_folder() as place:
        called, given = (known.loss, None) if isinstance(known.loss, str) else (None, known.loss)
        given = given or (None if called else copy.deepcopy(passing.seen.criterion))
        named: dict[str, Any] = {"mean": known.mean, "std": known.std, "loss": called}
        with Recorder(place / "recording", name=passing.name, module=module.cpu(), **named) as recorder:
            recorder.begin_round(passing.sent, index)
            facts: dict[str, Any] = {"form": passing.form, "sent": passing.sent, "sanitised": known.sanitised}
            recorder.update(passing.name, passing.state, passing.seen, **facts)
            recorder.end_round()
            module = recorder.without_personal(module)
        if truth_beside(place / "recording") is None:
            raise BadInput("what the site trained on couldn't be recorded")
        audit = api.audit_transcript(
            place / "recording",
            [uncalibrated(attack) for attack in attacks.values()],
            module=module,
            loss=given,
            out=known.out,
            fail_above=dict(known.limits.fail_above),
            fail_on=known.limits.fail_on,
            controls=False,
            overwrite=True,
            progress=False,
        )
    result = audit.result
    names = dict(zip((attack.name for attack in result.attacks), attacks, strict=True))
    took = {name: sum(f.timing.seconds for f in result.findings if f.attack == name and f.timing) for name in names}
    beside = max(0.0, time.perf_counter() - began - sum(took.values()))
    found: dict[str, CheckRecord] = {}
    for row in result.summaries:
        of_it = [f for f in result.findings if f.attack == row.attack]
        told = check_limits(known.limits, of_it, [row], result.data.kind or "image")
        psnr = f" ({row.psnr.mean:.1f} dB)" if row.psnr else ""
        found[names[row.attack]] = CheckRecord(
            outcome="alarm" if any(t.exceeded for t in told) else "quiet",
            text=f"{row.verdict}{psnr}",
            seconds=took[row.attack] + beside,
        )
    found = {
        name: check.model_copy(update={"outcome": "not played"}) if check.text == "not applicable" else check
        for name, check in found.items()
    }
    if audit.exceeded:
        return found
    if all(row.verdict == "not applicable" for row in result.summaries):
        raise BadInput("none of the attacks can be run against it")
    if passing.follows and any(
        f.recording is not None and f.recording.facts == "contradicted" for f in result.federations
    ):
        raise BadInput("the update doesn't follow from the training that was watched")
    unable = [t for t in result.thresholds if t.measured_by != "what ran"] if known.whole else []
    if known.unset and len(unable) < len(result.thresholds):  # of limits that nobody set, what nothing measures
        unable = [t for t in unable if t.measured_by != "nothing" or t.verdict is not None]
    unable.sort(key=lambda t: t.verdict is None)
    if unable:
        limit = f"the limit on {unable[0].metric}" if unable[0].verdict is None else "fail_on"
        raise BadInput(f"{limit} can't be exceeded by what ran: {unable[0].reason}")
    return found


def uncalibrated(attack: str | dict[str, Any]) -> dict[str, Any]:
    """Return an attack that isn't calibrated unless it is asked for: in every round that would cost as much again."""
    from fedaudit import api

    spec: dict[str, Any] = {"name": attack} if isinstance(attack, str) else dict(attack)
    settings = {key: value for key, value in spec.items() if key != "name"}
    known = api.make_attack(spec["name"], settings).settings()
    if "attack" in known:  # a method of another one's
        spec["attack"] = uncalibrated(spec.get("attack", known["attack"]))
    return {"calibrate": False, **spec} if "calibrate" in known else spec
