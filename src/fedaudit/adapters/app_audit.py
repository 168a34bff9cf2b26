"""An audit of an app or a job that is run here, whatever its framework: what comes before its run, and after it."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from torch import nn

from fedaudit.attacks.base import attacks_of
from fedaudit.capture.recorder import Recorder
from fedaudit.data.own import with_persons
from fedaudit.evaluation import Limits
from fedaudit.pipeline import offline
from fedaudit.simulation.protocols import PROTOCOLS, MessageRecorder
from fedaudit.task.training import Loss
from fedaudit.transcript.files import INDEX, read_header
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.truth import truth_beside
from fedaudit.utils.errors import BadInput
from fedaudit.utils.folders import check_folder

if TYPE_CHECKING:
    from fedaudit.api import Audit

RECORDING = "recording"  # the folder in OUT
SENT = "boosters"  # likewise, of an app that sends no arrays: what travelled, of which the recording is made

Attacked = Sequence[int] | Literal["last"] | None


@dataclasses.dataclass
class AppAudit:
    """What is asked of an app, checked before it runs for an hour.

    Attributes:
        until: when the app is to be stopped, in seconds since 1970; None: never.
        columns: ``mean`` and ``std`` of the app's preprocessing.
        others: what records an app that sends no arrays, by its protocol; empty until :meth:`recorder`.
    """

    folder: Path
    request: offline.AttackRequest
    threat: ThreatModel
    attacked: Attacked
    loss: str | Loss | None
    columns: dict[str, Any]
    limits: Limits
    controls: bool
    deadline: float | None
    until: float | None
    others: dict[str, MessageRecorder] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls, out: Path | str, *, attacks: Any, attacked: Any, threat: Mapping[str, Any] | ThreatModel | None, loss: Any,
        mean: Sequence[float] | None, std: Sequence[float] | None, max_minutes: float | None, limits: Limits,
        controls: bool, **asked: Any,
    ) -> Self:  # fmt: skip
        """Check what is asked; ``asked`` is the rest of an :class:`AttackRequest`. BadInput: it can't be done."""
        folder, began = Path(out), time.time()
        check_folder(folder)
        deadline = offline.deadline_of(max_minutes)
        request = offline.AttackRequest(
            transcript=folder / RECORDING, attacks=attacks_of(attacks), threat=threat, out=folder, **asked
        )
        if mean is not None and std is not None and (len(mean) != len(std) or not all(value > 0 for value in std)):
            raise BadInput(
                f"{len(mean)} means and std {', '.join(map(str, std))}: as many are needed, each std above 0"
            )
        if request.records is not None:
            with_persons(request.records)
        if attacked is not None and attacked != "last":
            if isinstance(attacked, str) or not isinstance(attacked, Collection) or not len(attacked):
                raise BadInput(f"attacked is {attacked!r}; give a list of rounds, such as [0, 1], or leave it out")
            attacked = sorted(attacked)
        return cls(
            folder, request, offline.threat_from(threat), attacked, loss,
            {key: None if given is None else tuple(given) for key, given in (("mean", mean), ("std", std))},
            limits, controls, deadline, None if deadline is None else (began + deadline) / 2,
        )  # fmt: skip

    def make_room(self) -> None:
        """Make room for a recording and its boosters; BadInput: some, or others' files, are in the way."""
        for place, own, use in (
            (self.folder / RECORDING, INDEX, "attack it with 'fedaudit attack {}' (of a network: --model MODULE:NAME)"),
            (self.folder / SENT, "round-*", "make a recording of it with 'fedaudit convert {} TRANSCRIPT'"),
        ):
            if not place.exists():
                continue
            if not self.request.overwrite or not any(place.glob(own)):
                raise BadInput(
                    f"'{place}' is there already: {use.format(place)}, take another out=…, or overwrite=True"
                )
            shutil.rmtree(place)

    def recorder(self, name: str) -> Recorder:
        """Return what records the app of this name; what it sends in place of arrays is for ``others``."""
        found = {e.name: e.value.recorder(self.folder / SENT, name, **self.columns) for e in PROTOCOLS}
        self.others = {key: other for key, other in found.items() if other is not None}
        called = self.loss if isinstance(self.loss, str) else None
        return Recorder(self.folder / RECORDING, name=name, loss=called, **self.columns)

    @property
    def messages(self) -> int:
        """How many messages that aren't arrays were recorded."""
        return sum(other.messages for other in self.others.values())

    def convert(self) -> list[str]:
        """Make the recording of an app that sends no arrays, if it is one; return notes. BadInput: nothing was seen."""
        notes = [note for other in self.others.values() for note in other.notes]
        for name, other in self.others.items():
            if other.messages:
                told = None if self.request.records is None else with_persons(self.request.records)
                other.close(told and told[:2])
                if told and told[2] is not None:
                    notes.append(f"whose the records are isn't read of {name}: records are counted, not persons")
                notes += PROTOCOLS[name].value.convert(self.folder / SENT, self.folder / RECORDING)
        return notes

    def _last_of(self, rounds: Collection[int]) -> list[int]:
        """Return the last round; of a model of the next token the first besides, which shows what it said untrained."""
        tokens = read_header(self.folder / RECORDING).observed.tokens
        return sorted({min(rounds), max(rounds)} if tokens is not None and tokens.causal else {max(rounds)})

    def finish(self, module: nn.Module | None, loss: Loss | None, rounds: Collection[int], because: str = "") -> Audit:
        """Attack the recording, evaluate what is found, and write the report.

        Args:
            module: that was trained; None: what was sent has none, and all of it is attacked together.
            loss: of the app's own.
            rounds: of which there are updates.
            because: why there may be no truth, in words.

        Raises:
            BadInput: what clients trained on isn't in the recording.
        """
        attacked = None if module is None or (self.attacked == "last" and self.threat.partial) else self.attacked
        request = dataclasses.replace(
            self.request,
            model=module,
            loss=None if isinstance(self.loss, str) else loss if self.loss is None else self.loss,
            rounds=self._last_of(rounds) if attacked == "last" else attacked,
            records=None if module is None else self.request.records,
            threat=self.threat,
            max_minutes=None if self.deadline is None else max(1e-3, (self.deadline - time.time()) / 60),
        )
        if self.limits or truth_beside(self.folder / RECORDING) is not None:
            return offline.audited(request, self.limits, controls=self.controls)
        offline.attacked(request)
        listed = self.folder / "findings.json"
        raise BadInput(
            f"what the clients trained on couldn't be recorded{because}; what was recovered is listed in {listed}"
        )
