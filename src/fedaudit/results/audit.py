"""The whole result, read and written."""

from __future__ import annotations

import reprlib
import textwrap
from pathlib import Path
from typing import Any, Final, Literal, get_args

from pydantic import Field, ValidationError

from fedaudit.results.base import READING, Record, Timing, optional
from fedaudit.results.findings import AttackSummary, Comparison, ControlResult, FindingResult, Verdict
from fedaudit.results.setting import AdversaryRecord, AttackRecord, DataRecord, FederationRecord, ModelRecord
from fedaudit.utils.bounds import read_json
from fedaudit.utils.errors import BadInput
from fedaudit.utils.validation import explain

SCHEMA_VERSION: Final = 2


class Threshold(Record):
    """A limit that the user set with --fail-above or --fail-on, and the worst that was met."""

    metric: str = Field(description="the metric of --fail-above; 'verdict' for --fail-on")
    limit: float | None = optional("of --fail-above")
    verdict: Verdict | None = optional("of --fail-on: it fails on this and on all worse ones")
    worst: float | None = optional("the highest value that was met; null: a verdict, or nothing measured it")
    where: str | None = Field(description="attack and federation of the worst value")
    exceeded: bool = Field(description="whether the limit was")
    outcome: Literal["pass", "fail", "not tested"] = Field(
        default="not tested", description="not tested: nothing measured it, or what measured it is inconclusive"
    )
    reason: str | None = optional("why it was not tested, or what the limit leaves out")


class Digests(Record):
    """What the results were made of; ``fedaudit verify`` checks them."""

    scenario: str = Field(description="SHA-256 of scenario.yaml, as sha256sum prints it")
    transcripts: dict[str, str] = Field(description="of each federation, over all that travelled and was recorded")
    code: str = Field(description="of fedaudit's sources that compute, and of its version of torch")
    notes: list[str] = Field(default=[], description="what was read without a digest, so that nothing tells a change")


def _from_version_1(values: dict[str, Any]) -> dict[str, Any]:
    """Return a result of schema version 1 as one of version 2: verdicts by their new names, kinds, no controls.

    Images were the only kind at first, and their findings didn't say so. "Not demonstrated" had no control then, so it
    is inconclusive now; what "partly recognisable" was, its images tell.
    """
    seen = {
        (f["federation"], f["attack"])
        for f in values["findings"]
        for i in f.get("images", [])
        if i["rank"] == 1 and i["ssim"] >= 0.5
    }

    def renamed(summary: dict[str, Any]) -> dict[str, Any]:
        visible = (summary["federation"], summary["attack"]) in seen or summary.get("kind") == "class-images"
        verdict = {
            "recognisable": "recovered",
            "partly recognisable": "recovered" if visible else "identifiable",
            "demonstrated": "recovered" if visible else "inferred",
            "partly demonstrated": "recovered" if visible else "inferred",
            "not demonstrated": "inconclusive",
        }.get(summary["verdict"], summary["verdict"])
        return {**summary, "verdict": verdict}

    def of_images(row: dict[str, Any], ran: bool) -> dict[str, Any]:
        return {**row, "kind": "images"} if ran and row.get("kind") is None else row

    summaries = [of_images(renamed(s), s["verdict"] != "not applicable") for s in values["summaries"]]
    undecided = any(s["verdict"] == "inconclusive" for s in summaries)

    def tested(limit: dict[str, Any]) -> dict[str, Any]:
        kept = "not tested" if undecided or limit.get("worst") is None else "pass"
        return {**limit, "outcome": "fail" if limit["exceeded"] else kept}

    return {
        **values,
        "schema_version": SCHEMA_VERSION,
        "findings": [of_images(f, f.get("status") == "done") for f in values["findings"]],
        "summaries": summaries,
        "thresholds": [tested(t) for t in values["thresholds"]],
    }


class AuditResult(Record):
    """Everything that an audit found."""

    schema_version: Literal[2] = Field(default=SCHEMA_VERSION, description="of this format")
    fedaudit_version: str = Field(description="which wrote it")
    name: str = Field(description="the scenario's")
    scenario: dict[str, Any] = Field(description="the resolved scenario; repeating it gives the same numbers")
    data: DataRecord = Field(description="what was trained on")
    model: ModelRecord = Field(description="what was trained")
    adversary: AdversaryRecord = Field(description="who attacked")
    federations: list[FederationRecord] = Field(description="each under each set of defences")
    attacks: list[AttackRecord] = Field(description="which were run")
    findings: list[FindingResult] = Field(description="each run of an attack")
    summaries: list[AttackSummary] = Field(description="a row of the report's table each")
    comparisons: list[Comparison] = Field(description="of attacks with each other")
    controls: list[ControlResult] = Field(default=[], description="positive controls; summaries name theirs")
    verdict_rules: list[str] = Field(description="how verdicts are reached, in words")
    not_tested: list[str] = Field(description="what this audit says nothing about")
    lpips_missing: str | None = Field(description="why LPIPS is null, if it is")
    repeat: str = Field(default="fedaudit audit scenario.yaml --out DIR", description="the command that repeats it")
    thresholds: list[Threshold] = Field(description="the limits that the user set")
    environment: dict[str, str] = Field(description="the machine and the versions")
    digests: Digests | None = optional("null in results of earlier versions")
    timing: Timing = Field(description="of the whole audit")

    def save(self, path: Path) -> None:
        """Write ``results.json`` to ``path``."""
        path.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path | str) -> AuditResult:
        """Read a ``results.json``; fields that only a later fedaudit knows are left out.

        Raises:
            BadInput: the file can't be read, or isn't a result of this schema version.
        """
        try:
            values = read_json(Path(path))
        except OSError as error:
            raise BadInput(f"can't read '{path}': {error.strerror or error}") from None
        except ValueError as error:
            raise BadInput(f"{path} is truncated or not JSON ({error})") from None
        version = values.get("schema_version") if isinstance(values, dict) else None
        if isinstance(version, int) and version > SCHEMA_VERSION:
            raise BadInput(
                f"{path} has schema version {version}, and this fedaudit reads {SCHEMA_VERSION}; "
                f"install the one that wrote it ({reprlib.repr(values.get('fedaudit_version'))}), or a later one"
            )
        try:
            if version == 1:
                values = _from_version_1(values)
            return cls.model_validate(values, context=READING)
        except ValidationError as error:
            raise BadInput(f"{path} isn't an audit's result: {explain(error, cls)}") from None
        except (KeyError, TypeError, AttributeError) as error:
            raise BadInput(f"{path} isn't an audit's result: {error!r}") from None

    def __repr_args__(self) -> list[tuple[str | None, Any]]:
        reached = {summary.verdict for summary in self.summaries}
        return [
            ("name", textwrap.shorten(self.name, 60, placeholder="…")),
            ("federations", len(self.federations)),
            ("attacks", len(self.attacks)),
            ("findings", len(self.findings)),
            ("worst", next((verdict for verdict in get_args(Verdict) if verdict in reached), None)),
        ]
