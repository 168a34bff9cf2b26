"""The whole result, read and written, with what was audited: federations, model, data, adversary and attacks."""

from __future__ import annotations

import reprlib
import textwrap
from pathlib import Path
from typing import Any, Final, Literal, get_args

from pydantic import Field, ValidationError

from fedaudit.results.ceilings import CeilingResult
from fedaudit.results.checks import CalibrationResult, Comparison, ControlResult, MarginResult
from fedaudit.results.epsilon import CertificateRecord
from fedaudit.results.findings import AttackSummary, FindingResult
from fedaudit.results.record import READING, Adjacency, Record, Timing, Unit, Verdict, optional
from fedaudit.utils.bounds import read_json
from fedaudit.utils.errors import BadInput
from fedaudit.utils.renamed import of_plugin, of_scenario
from fedaudit.utils.validation import explain

SCHEMA_VERSION: Final = 3
_WHO = {
    "server": "The server",
    "malicious-server": "A malicious server",
    "eavesdropper": "An eavesdropper on the network",
    "client": "Another client",
    "colluding-clients": "Clients who collude",
    "aggregating-client": "A client that aggregates in some rounds",
    "party": "A party",
}


class HistoryTiming(Record):
    """Seconds that clients spent."""

    training: float = Field(description="seconds a client update, mean")
    client_defence: float = Field(description="seconds a client update, mean")


class HistoryRecord(Record):
    """What a federation's rounds brought and cost."""

    rounds: list[int] = Field(default=[], description="finished rounds at each measurement of the accuracy")
    accuracy: list[float] = Field(default=[], description="held-out accuracy at each")
    per_client: list[list[float]] = Field(
        default=[], description="at each, every client's accuracy, held-out classes weighted as its own are"
    )
    examples: int = Field(default=0, description="held-out examples that the accuracy is measured on")
    bytes: float = Field(description="of an update as it was sent, mean")
    parameters: float = Field(description="elements of an update as it was sent, mean")
    epsilon: list[float] = Field(
        default=[],
        description="spent after each round, where there is differential privacy: Rényi, of the client that took part "
        "most often (local noise), or of all rounds (central)",
    )
    epsilon_adjacency: Adjacency = Field(
        default="add-remove",
        description="by which: one client or example more or less, or one that takes another's place",
    )
    epsilon_delta: float | None = optional("δ, at which every ε here is told; null: there is none, or it is older")
    epsilon_unit: Unit | None = optional("whom ε protects; null: there is none, or it is older")
    epsilon_of_clients: list[list[float]] = Field(
        default=[], description="after each round, of the clients that sent least, median and most often (Rényi)"
    )
    epsilon_pld: float | None = optional("the same after the last round, by the privacy loss distribution")
    certificate: CertificateRecord | None = optional("after the last round; null: no noise is accounted for, or older")
    stopped: int | None = optional("rounds after which the privacy budget was spent")
    why_stopped: str | None = optional("why the privacy budget ended the federation there")
    honest_accepted: list[float | None] = Field(
        default=[], description="of each round, the share of honest clients' updates that the aggregator took"
    )
    malicious_accepted: list[float | None] = Field(
        default=[], description="the same of malicious clients' updates; null where none was sent"
    )
    timing: HistoryTiming = Field(description="what clients spent")


class ReplayRecord(Record):
    """One recorded update, trained again on the truth."""

    round: int = Field(description="from 0")
    client: str = Field(description="as the framework names it")
    error: float | None = Field(description="‖replayed − sent‖ / ‖sent‖; null: the replayed training diverged")
    rounding: float | None = Field(
        default=0.0,
        description="how far the replay ends from itself, relative, where its first weights are moved by a "
        "rounding; 0: not asked, as the error is small; null: so moved it diverged",
    )
    home: str = Field(default="", description="what the client trained from and wasn't sent; empty: nothing")
    explanation: str = Field(default="", description="what explains the error; empty: nothing has to, or nothing does")
    left: float | None = Field(
        default=0.0, description="relative error that it leaves; null: it can't be repeated, so that nobody can tell"
    )


class RecordingRecord(Record):
    """A federation that really ran, as far as it was recorded."""

    clients: list[str] = Field(description="as the framework names them, in the order of their numbers")
    totals: int = Field(default=0, description="rounds of which only the sum of several updates is known")
    training: list[str] = Field(default=[], description="how clients train, in words: each way once")
    seconds: float | None = optional("that local training took, median; null: not recorded")
    replays: list[ReplayRecord] = Field(default=[], description="of every update whose truth is at hand")
    facts: Literal["verified", "contradicted", "unverified"] = Field(
        description="whether what is recorded of local training gives the updates that travelled, when it is repeated"
    )
    facts_text: str = Field(default="", description="the same in a sentence, with what explains a difference")
    notes: list[str] = Field(default=[], description="what else to know of the recording")


class ReceivedCheck(Record):
    """What a client finds in the models that a malicious server sent, by one of ``fedaudit check-model``'s checks."""

    name: str = Field(description="of the check")
    value: float | None = Field(
        description="the largest that was measured, of the models that raise an alarm, or else of all; null: it isn't "
        "finite, which is an alarm"
    )
    limit: float = Field(description="above which the check raises an alarm of that model")
    noticed: float = Field(description="share of the models sent that raise it")
    models: int = Field(description="how many were checked")
    text: str = Field(description="what was found in that model")


class FederationRecord(Record):
    """One simulated or recorded federation, as the report describes it."""

    name: str = Field(description="its own, and that of its defences where there are several")
    algorithm: str = Field(
        description="'fedsgd', 'fedavg', 'fedprox', 'vertical', 'split', 'trees', or the framework's"
    )
    update_kind: Literal["gradient", "weights"] = Field(description="what clients sent")
    clients: int = Field(description="how many there are")
    rounds: int = Field(description="how many were run")
    batch_size: int = Field(description="examples in a step")
    local_steps: int | None = Field(description="FedAvg; null: another measure, or not known")
    local_epochs: int | None = Field(description="FedAvg; null: another measure, or not known")
    learning_rate: float = Field(description="of SGD")
    updates_observed: int = Field(description="how many the adversary saw")
    summed: int = Field(
        default=1, description="of how many clients, at most, the adversary reads the sum of the updates only"
    )
    updates_rejected: int = Field(default=0, description="updates that the aggregator left out")
    fallbacks: int = Field(default=0, description="rounds in which the aggregator had to do something else")
    description: str = Field(description="one sentence")
    aggregator: str = Field(default="mean", description="its name")
    client_defence: str = Field(default="none", description="its name")
    defences: str | None = optional(
        "what these two do, with which settings, in words; empty where neither is a defence"
    )
    replay_error: float | None = optional(
        "relative error with which the recorded local training, repeated on the truth, gives the first "
        "updates; null: not checked"
    )
    device: str | None = optional("the GPU on which it was simulated; null: the CPU, or not known")
    recording: RecordingRecord | None = optional("null where the federation was simulated")
    checks: list[ReceivedCheck] = Field(
        default=[], description="where the server is malicious: would a client notice? Each check of a received model"
    )
    history: HistoryRecord | None = optional("null where a transcript was attacked from disk")

    @property
    def undefended(self) -> bool:
        """Whether neither its aggregator nor what clients do to their updates is a defence."""
        return self.aggregator in ("mean", "fedavg") and self.client_defence == "none"


class ModelRecord(Record):
    """The audited model."""

    name: str = Field(description="its name, or the class of a module of your own")
    parameters: int = Field(description="how many numbers are trained")
    initialisation: str = Field(description="of the weights")
    batch_norm: str = Field(description="'eval', 'train' or 'none': decides much, see docs/reference/methods.md")
    trained: str = Field(description="'untrained', 'n epochs' or 'checkpoint ...'")
    dropout: Literal["on", "off", "none"] | None = optional(
        "in the clients' training; 'none': the model has none; null: not recorded"
    )
    mode: str | None = optional("in which mode clients train, and who said so; null: no choice")


class DataRecord(Record):
    """The audited data."""

    name: str = Field(description="its name")
    summary: str = Field(description="one line about it")
    classes: int | None = Field(description="how many; null: regression")
    class_names: list[str] | None = Field(description="null: they have none")
    kind: str | None = optional("of the examples: 'image', 'table' or another; null: not recorded")
    input_shape: list[int] = Field(description="of one example")
    words: list[str] | None = optional("of text: what each token stands for; null: not known")


class AdversaryRecord(Record):
    """Who the adversary was."""

    adversary: str = Field(
        description="'server', 'malicious-server', 'eavesdropper', 'client', 'colluding-clients', "
        "'aggregating-client', or 'party' of a vertical federation"
    )
    summary: str = Field(description="one line about it")
    knows: list[str] = Field(description="in words")
    does_not_know: list[str] = Field(description="in words")
    acts: bool = Field(description="whether it interferes; false: it only looks")

    @property
    def who(self) -> str:
        """The adversary, as a sentence begins with it."""
        return _WHO.get(self.adversary, f"The adversary ({self.adversary})")


class MappingRecord(Record):
    """What a standard calls an attack."""

    standard: str = Field(description="title, with its edition")
    id: str = Field(description="the standard's identifier; of the EDPB's tests, which have none, the name as a slug")
    name: str = Field(description="the standard's word")
    nearest: bool = Field(default=False, description="the standard has no word for it; this is the nearest one")


RequirementOutcome = Literal["met", "not met", "not tested", "answered"]


class RequirementRecord(Record):
    """What a text asks in one line, and what became of it."""

    text: str = Field(description="title of the standard, guidance or opinion")
    id: str = Field(description="the line's own name there, or ours")
    asks: str = Field(description="what it asks, in our words")
    outcome: RequirementOutcome = Field(
        description="met only where it was measured; answered: a question, or means of which none worked"
    )
    answer: str = Field(description="what that rests on, or why nothing answers it")
    value: float | None = optional("the number behind it; null: there is none")
    low: float | None = optional("lower end of its 95 % interval; null: it has none")
    high: float | None = optional("upper end of it")
    n: int | None = optional("how many records, canaries or victims it rests on")
    timing: Timing | None = optional("of the attack whose means worked; null: of another kind")
    source: str = Field(description="where the line is from, and how far its wording was checked")


class TestAgain(Record):
    """What of a federation mustn't change, or the audit doesn't cover it any more: for monitoring."""

    __test__ = False  # for pytest

    federation: str = Field(description="its name")
    more_rounds_than: int = Field(description="that were audited")
    other_clients_than: int = Field(description="clients that there were")
    other_model_than: str = Field(description="its name")
    other_parameters_than: int = Field(description="numbers of the model that are trained")
    without: list[str] = Field(default=[], description="defences that were in use")


class AttackRecord(Record):
    """An attack that was run, with its settings."""

    name: str = Field(description="in scenarios")
    summary: str = Field(description="one line about it")
    paper: str = Field(description="its source")
    settings: dict[str, Any] = Field(description="all of them, as they were used")
    mapping: list[MappingRecord] = Field(default=[], description="what standards call it; names only, no pass marks")


class Threshold(Record):
    """A limit that the user set with --fail-above, --fail-below or --fail-on, and the worst that was met."""

    metric: str = Field(description="the metric of --fail-above or --fail-below; 'verdict' for --fail-on")
    limit: float | None = optional("of --fail-above or --fail-below")
    below: bool = Field(default=False, description="whether it is a least value (--fail-below)")
    verdict: Verdict | None = optional("of --fail-on: it fails on this and on all worse ones")
    worst: float | None = optional(
        "the highest value that was met (where below: the lowest); null: a verdict, or none was"
    )
    where: str | None = Field(description="attack and federation of the worst value")
    exceeded: bool = Field(description="whether the limit was")
    measured_by: Literal["what ran", "another attack", "nothing"] = Field(
        default="what ran", description="which attacks on such examples could exceed it"
    )
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


class SharedRecord(Record):
    """What was left out of results so that a site may share them, and what was looked for before they were written."""

    digest: str = Field(description="of the file, with zeros in its place; by FEDAUDIT_KEY where that is set")
    left_out: list[str] = Field(description="in words")
    min_group_size: int = Field(description="groups of fewer members are left out")
    looked_for: list[str] = Field(description="what the files were searched for and don't hold, in words")


def _from_version_2(values: dict[str, Any]) -> dict[str, Any]:
    """Return a result of schema version 2 as one of version 3, whose fields and attacks have other names.

    Fields are renamed where each part is read.
    """
    attacks = [{**a, "name": of_plugin("fedaudit.attacks", a["name"], tell=False)} for a in values["attacks"]]
    scenario = of_scenario(values["scenario"], tell=False)
    return {**values, "schema_version": SCHEMA_VERSION, "attacks": attacks, "scenario": scenario}


def _from_version_1(values: dict[str, Any]) -> dict[str, Any]:
    """Return a result of schema version 1 as one of version 2: verdicts by their new names, kinds, no controls.

    Images were the only kind then, and findings didn't name it. "Not demonstrated" had no control, so it is
    inconclusive now; "partly recognisable" is told anew from the images.
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
        "schema_version": 2,
        "findings": [of_images(f, f.get("status") == "done") for f in values["findings"]],
        "summaries": summaries,
        "thresholds": [tested(t) for t in values["thresholds"]],
    }


class AuditResult(Record):
    """Everything that an audit found."""

    schema_version: Literal[3] = Field(default=SCHEMA_VERSION, description="of this format")
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
    calibrations: list[CalibrationResult] = Field(
        default=[], description="how attacks came by their settings, where they were calibrated"
    )
    margins: list[MarginResult] = Field(
        default=[], description="how far away the conditions are in which an attack would recover images"
    )
    ceilings: list[CeilingResult] = Field(
        default=[], description="how much updates determine of their examples, whoever attacks"
    )
    requirements: list[RequirementRecord] = Field(
        default=[], description="what texts ask, line by line, and what became of it; empty: it is older"
    )
    test_again: list[TestAgain] = Field(
        default=[], description="of the federations in use, what mustn't change: else audit again; empty: it is older"
    )
    verdict_rules: list[str] = Field(description="how verdicts are reached, in words")
    not_asked: list[str] = Field(
        default=[], description="which of the first questions this audit didn't try, and why; what limits left out"
    )
    out_of_scope: list[str] = Field(description="what this audit says nothing about")
    lpips_missing: str | None = Field(description="why LPIPS is null, if it is")
    as_deployed: list[str] = Field(
        default=[],
        description="settings (--set) of the same audit of a deployment: a trained network, batches, epochs; empty: it "
        "is one, or there is no such audit",
    )
    repeat: str = Field(default="fedaudit audit scenario.yaml --out DIR", description="the command that repeats it")
    thresholds: list[Threshold] = Field(description="the limits that the user set")
    environment: dict[str, str] = Field(description="the machine and the versions")
    digests: Digests | None = optional("null in results of earlier versions")
    timing: Timing = Field(description="of the whole audit")
    shared: SharedRecord | None = optional("of what 'fedaudit share' wrote; null: all results, which stay at the site")

    @property
    def ceilings_alone(self) -> bool:
        """Whether it holds ceilings, and no attack was asked for."""
        return bool(self.ceilings) and not self.attacks and not self.summaries

    def in_use(self) -> list[str]:
        """Return the names of the federations that the answer is about: without defences that are only tried."""
        if not self.scenario.get("evaluation", {}).get("compare_defences"):
            return [f.name for f in self.federations]
        plain = [f.name for f in self.federations if f.undefended]
        return plain or [f.name for f in self.federations]

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
            if version in (1, 2):
                values = _from_version_2(values)
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
