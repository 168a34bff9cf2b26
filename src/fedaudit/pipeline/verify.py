"""Whether an audit's numbers follow from what is kept beside them: derived again, and compared one by one."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedaudit.attacks import Finding
from fedaudit.evaluation import Limits
from fedaudit.modalities import save_png
from fedaudit.pipeline.margin import UNTOLD
from fedaudit.pipeline.offline import AttackRequest, attack_transcript, evaluate_findings
from fedaudit.pipeline.output import REQUEST, WITHIN, leaves
from fedaudit.pipeline.parts.data import own_dataset
from fedaudit.pipeline.run import Audit, run_audit
from fedaudit.pipeline.trials import Means, Trial
from fedaudit.results import AuditResult
from fedaudit.scenario.scenario import scenario_from
from fedaudit.task.training import LOSSES, Loss, loss_name
from fedaudit.transcript.transcript import Transcript
from fedaudit.utils import plain_yaml
from fedaudit.utils.errors import BadInput, NotApplicable
from fedaudit.utils.fingerprint import code_digest, device_name
from fedaudit.utils.folders import inside, temporary_folder
from fedaudit.utils.image_bytes import decode
from fedaudit.utils.integrity import file_sha256
from fedaudit.utils.machine import processor
from fedaudit.utils.native import native_code
from fedaudit.utils.progress import live_display

# What depends on the clock or the machine, or is compared on its own; see fedaudit.results.
_SKIPPED = {"timing", "environment", "digests", "fedaudit_version"}

# What depends on controls, or on how much there was time for.
_BY_CONTROLS = {
    "summaries",
    "comparisons",
    "controls",
    "calibrations",
    "margins",
    "ceilings",
    "not_asked",
    "requirements",
    "scenario",
    "thresholds",
}
_LATER = ("requirements", "test_again")  # which results of before don't have
_RELATIVE = 1e-4  # how much a number may differ where another processor or torch computed it
_GREYS = 1  # and a pixel, of 255
_NOTHING = object()  # what a document that lacks a key says there
_DECIMAL = re.compile(r"(\d+\.\d+)")


@dataclass
class Verification:
    """What came of deriving an audit's numbers again.

    Attributes:
        differences: a line each; empty where everything follows.
        notes: what was taken from the results and not derived, a line each.
        findings: how many kept findings were evaluated.
        values: how many values of ``results.json`` were compared.
    """

    differences: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    findings: int = 0
    values: int = 0


def verify(
    folder: Path | str,
    *,
    transcript: Transcript | Path | str | None = None,
    truth: Path | str | None = None,
    model: nn.Module | None = None,
    data: Any | None = None,
    loss: Loss | None = None,
    task: Mapping[str, Any] | None = None,
    rounds: Sequence[int] | None = None,
    records: Any | None = None,
    data_dir: Path | str | None = None,
    workers: int = 1,
    progress: bool = True,
) -> Verification:
    """Derive an audit's numbers again from the findings kept in its folder, and say what differs.

    Nothing is written, and no attack is run. An audit's federations are simulated again, for only the scenario is kept
    of them; a transcript that was attacked is read. Then follow evaluation against the truth, verdicts, scores, images
    and the page.

    Args:
        folder: that the audit was written to.
        transcript, truth, task, records: of an :func:`fedaudit.attack`, as it was given them; the transcript by
            default ``folder/recording``.
        rounds: the same; default: those that were attacked.
        model, data, loss, data_dir, workers, progress: as of :func:`fedaudit.audit`.

    Returns:
        ``verification.differences``, a line each, is empty where every value, image and the page follow.

    Raises:
        BadInput: there are no results or findings, they were changed, or they can't be derived here.
    """
    folder = Path(folder)
    if loss is not None and loss_name(loss) in LOSSES:
        loss = None
    stored = AuditResult.load(inside(folder, "results.json"))
    if stored.ceilings_alone:
        raise BadInput(f"'{folder}' holds ceilings alone, which no finding is behind: run fedaudit ceiling again")
    _check_place(stored, folder)
    found = Verification()
    exact = True
    for what, there, here in _elsewhere(stored):
        exact = False
        found.notes.append(f"made with {what} '{there}', and here it is '{here}'")
    if not exact:
        found.notes.append(f"another processor's arithmetic: compared within {_RELATIVE:g} relative")
    if stored.digests:
        found.notes += stored.digests.notes
    if not stored.thresholds:
        found.notes.append("results.json holds no limits; whether the audit was run with some follows from nothing")
    scenario = scenario_from(stored.scenario, where=f"the scenario in '{folder}'")
    with live_display(progress) as display:
        kept = _KeptFindings(stored, folder / "findings", found, exact=exact)
        means = Means(workers, kept=kept, display=display)
        if not (folder / REQUEST).exists():
            derived = run_audit(
                scenario,
                data_dir=None if data_dir is None else Path(data_dir),
                dataset=None if data is None else own_dataset(data, scenario.data.kind, scenario.model.loss, loss),
                model=model,
                loss=loss,
                workers=workers,
                kept=means.kept,
                checkpoints=False,
                display=display,
            )
        else:
            request = plain_yaml.read(inside(folder, REQUEST), REQUEST)
            if not isinstance(request, dict) or not _is_request(request):
                raise BadInput(f"{folder / REQUEST} isn't what 'fedaudit attack' writes")
            if request.get(WITHIN):
                kept.within = True
                found.notes.append("made within a time: findings are derived again, and not controls and verdicts")
            source = transcript or (folder / "recording" if (folder / "recording").is_dir() else None)
            if source is None:
                raise BadInput(f"the results in '{folder}' are of a transcript: name its folder with transcript=…")
            asked = AttackRequest(
                transcript=source,
                attacks=request["attacks"],
                threat=dict(request.get("threat") or {}),
                seed=request.get("seed"),
                device=str(request.get("device", "cpu")),
                truth=truth,
                model=model,
                loss=loss,
                task=task,
                rounds=request.get("rounds") if rounds is None else rounds,
                clients=request.get("clients"),
                records=records,
            )
            without = "the transcript has no ground truth beside it; name it with truth=…"
            attacked = attack_transcript(asked, means, without_truth=without)
            derived = evaluate_findings(
                attacked, means=means, controls=scenario.evaluation.controls and not kept.within
            )
            repeat = stored.repeat  # the flags as they were written, of which not all can be told again
            changes: dict[str, Any] = {"repeat": repeat}
            if kept.within and derived.result.digests is not None:  # it was derived without controls
                of = hashlib.sha256(scenario.to_yaml().encode()).hexdigest()
                changes["digests"] = derived.result.digests.model_copy(update={"scenario": of})
            derived = dataclasses.replace(derived, result=derived.result.model_copy(update=changes))
    derived = derived.held_to(
        Limits(
            {t.metric: t.limit for t in stored.thresholds if t.limit is not None and not t.below},
            next((t.verdict for t in stored.thresholds if t.verdict is not None), None),
            {t.metric: t.limit for t in stored.thresholds if t.limit is not None and t.below},
        )
    )
    found.findings = sum(finding.status == "done" for finding in derived.result.findings)
    found.differences += _of_digests(stored, derived, folder, exact=exact)
    before, after = (
        {
            key: value
            for key, value in result.model_dump(mode="json").items()
            if not (kept.within and key in _BY_CONTROLS) and not (key in _LATER and not getattr(stored, key))
        }
        for result in (stored, derived.result)
    )
    found.values = sum(1 for _ in leaves(before, without=_SKIPPED))
    found.differences += _of_files(stored, derived, folder, exact=exact)
    found.differences += _differences(before, after, "", exact=exact)
    return found


KNOWN_EXAMPLES = re.compile(r"-(power|margin)-")  # in the names of what is made of them


class _KeptFindings:
    """Returns the kept finding of a trial, or says why there is none.

    It lies under the trial's key. Where other arithmetic simulated the federation again, the trial's input has other
    last bits, so another key: there the time that its attack took, which the results say, tells which finding it is.
    """

    def __init__(self, stored: AuditResult, store: Path, found: Verification, *, exact: bool) -> None:
        self.stored, self.store, self.found, self.exact = stored, store, found, exact
        self.taken: set[Path] = set()
        self.within = False  # the audit had so much time, and no more

    def __call__(self, trial: Trial) -> Finding | NotApplicable:
        path = self.store / f"{trial.key(self.stored.environment.get('native code'))}.safetensors"
        if path.is_file():
            self.taken.add(path)
            return trial.kept(path)
        name, seen = trial.attack.name, trial.observation
        places = {(m.round, m.client) for m in seen.messages}
        rows = [
            f
            for f in self.stored.findings
            if (f.federation, f.attack) == (seen.federation, name)
            and ((f.round, f.client) in places or (len(places) > 1 and f.client in {None, *(c for _, c in places)}))
        ]
        reasons = [f.reason for f in rows if f.status == "not applicable"]
        reasons += [c.text for c in self.stored.controls if c.attack == name and c.won is None]
        if reasons and reasons[0]:
            self.found.notes.append(f"{name} has no finding, for it wasn't applicable: {reasons[0]}")
            return NotApplicable(reasons[0])
        if not self.exact and (other := self._of_time(trial, {f.timing.seconds for f in rows if f.timing})):
            return other
        if self.within and not any(f.status == "done" for f in rows):
            return NotApplicable("its finding isn't kept")
        if KNOWN_EXAMPLES.search(seen.federation):  # what is missing shows in the power or margin that came of it
            self.found.notes.append(f"{name} has no finding on known examples of {seen.federation}")
            of = KNOWN_EXAMPLES.split(seen.federation)[0]
            told = [m.text for m in self.stored.margins if (m.attack, m.federation) == (name, of) and not m.steps]
            return NotApplicable(told[0].removeprefix(UNTOLD) if told else "its finding isn't kept")
        where = ", ".join(f"round {r}, client {c}" for r, c in sorted(places)[:2])
        self.found.differences.append(f"{path} is missing: the finding of {name} on {seen.federation} ({where})")
        return NotApplicable("its finding isn't kept")

    def _of_time(self, trial: Trial, seconds: set[float]) -> Finding | None:
        """Return the finding that took so long; of a control, which no row names, the oldest that is left."""
        for path in sorted(self.store.glob("*.safetensors"), key=lambda path: path.stat().st_mtime_ns):
            if path not in self.taken:
                finding = Finding.load(path, path.stem)
                if trial.fits(finding) and (not seconds or finding.seconds in seconds):
                    self.taken.add(path)
                    return finding
        return None


def _is_request(request: dict[str, Any]) -> bool:
    rounds, clients = request.get("rounds", []), request.get("clients", 1)
    whole = isinstance(rounds, list) and all(type(one) is int for one in [*rounds, clients])
    return whole and isinstance(request.get("attacks"), list)


def _elsewhere(stored: AuditResult) -> Iterator[tuple[str, str, str]]:
    """Yield what decides the last bits and differs: what it is, what it was, what it is here."""
    device = device_name(str(stored.scenario.get("device", "cpu")))
    here = {"torch": torch.__version__, "processor": processor(), "native code": native_code(), "device": device}
    for what, value in here.items():
        if stored.environment.get(what, value) != value:
            yield what, stored.environment[what], value


def _check_place(stored: AuditResult, folder: Path) -> None:
    """Refuse what can't be derived here: no findings are kept, or other code made them."""
    if stored.shared is not None:
        raise BadInput(
            f"'{folder}' is a shared version, without what its numbers follow from: ask the site to verify the whole; "
            "whether the file was changed fedaudit join tells"
        )
    ran = any(finding.status == "done" for finding in stored.findings)  # what was refused leaves no finding
    if ran and not (folder / "findings").is_dir():
        raise BadInput(f"'{folder}' keeps no findings: there is no folder findings in it; repeat the audit")
    if stored.digests and stored.digests.code != code_digest():
        raise BadInput(
            f"the results in '{folder}' were made by other code than this (fedaudit {stored.fedaudit_version}, digest "
            f"{stored.digests.code[:16]}…): install that to verify them"
        )


def _of_digests(stored: AuditResult, derived: Audit, folder: Path, *, exact: bool) -> Iterator[str]:
    before, after = stored.digests, derived.result.digests
    if before is None or after is None:
        yield "results.json names no digests: an earlier fedaudit wrote it"
        return
    try:
        beside = file_sha256(inside(folder, "scenario.yaml"))
    except OSError as error:
        yield f"scenario.yaml can't be read: {error.strerror or error}"
    else:
        if beside != before.scenario:
            yield f"scenario.yaml: results.json names the digest {before.scenario[:16]}…, the file has {beside[:16]}…"
    if before.scenario != after.scenario:
        yield f"scenario: results.json names the digest {before.scenario[:16]}…, its scenario {after.scenario[:16]}…"
    for name in sorted(before.transcripts.keys() | after.transcripts.keys()):
        one, two = before.transcripts.get(name, "none"), after.transcripts.get(name, "none")
        if one != two and (exact or "none" in (one, two)):
            yield f"transcript of {name}: results.json names the digest {one[:16]}…, here it is {two[:16]}…"


def _of_files(stored: AuditResult, derived: Audit, folder: Path, *, exact: bool) -> Iterator[str]:
    """Yield what differs in the images and in the page."""
    from fedaudit.report.page import render_report

    with temporary_folder() as draft:
        for name, pixels in derived.image_files.items():
            made = draft / "image.png"
            save_png(pixels, made)
            path = inside(folder, name)
            if not path.is_file():
                yield f"{name} is missing"
            elif path.read_bytes() != made.read_bytes() and (exact or not _look_alike(path, made)):
                yield f"{name} isn't the image that the finding and the truth give"
    page = folder / "report.html"
    if page.is_file():
        try:
            same = page.read_text(encoding="utf-8") == render_report(stored, folder)
        except (BadInput, OSError, ValueError) as error:
            yield f"report.html can't be drawn from results.json: {error}"
        else:
            if not same:
                yield "report.html isn't the page that results.json and the images give"


def _look_alike(one: Path, other: Path) -> bool:
    """Return whether two images differ by the rounding of a pixel at most."""
    try:
        before, after = (decode(path.read_bytes(), str(path), None).astype(np.int16) for path in (one, other))
    except (OSError, BadInput):
        return False
    return before.shape == after.shape and bool(np.abs(before - after).max(initial=0) <= _GREYS)


def _differences(before: Any, after: Any, where: str, *, exact: bool) -> Iterator[str]:
    """Yield a line for every value of a JSON document that differs."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            if key not in _SKIPPED:
                own = f"{where}.{key}".lstrip(".")
                yield from _differences(before.get(key, _NOTHING), after.get(key, _NOTHING), own, exact=exact)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for i, (one, two) in enumerate(zip(before, after, strict=True)):
            yield from _differences(one, two, f"{where}[{i}]", exact=exact)
    elif not _equal(before, after) and (exact or not _close(before, after)):
        yield f"{where}: results.json says {_shown(before)}, the findings give {_shown(after)}"


def _equal(one: Any, two: Any) -> bool:
    if isinstance(one, float) and isinstance(two, float) and math.isnan(one):
        return math.isnan(two)
    return type(one) is type(two) and bool(one == two)


def _close(one: Any, two: Any) -> bool:
    """Return whether numbers, and the decimals in texts, differ by rounding only."""
    if isinstance(one, float) and isinstance(two, float):
        return math.isclose(one, two, rel_tol=_RELATIVE, abs_tol=_RELATIVE**2)
    if not isinstance(one, str) or not isinstance(two, str):
        return False
    before, after = _DECIMAL.split(one), _DECIMAL.split(two)
    if len(before) != len(after) or before[::2] != after[::2]:
        return False
    pairs = zip(before[1::2], after[1::2], strict=True)
    return all(abs(float(a) - float(b)) <= 1.01 * 10.0 ** -len(a.partition(".")[2]) for a, b in pairs)


def _shown(value: Any) -> str:
    if value is _NOTHING:
        return "nothing"
    if isinstance(value, list):
        return f"{len(value)} items"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
