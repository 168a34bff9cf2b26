"""Tell what a federation leaks, to whom, and what each defence costs.

>>> import fedaudit
>>> result = fedaudit.audit(model=net, data=(images, labels), attacks=["agic"])  # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedaudit.utils.lazy import lazy
from fedaudit.utils.version import __version__

if TYPE_CHECKING:
    from fedaudit.api import AuditResult, attack, audit, audit_transcript, evaluate, simulate, verify
    from fedaudit.attacks import (
        Attack,
        AttributeFinding,
        EpsilonFinding,
        ExampleLabelFinding,
        Finding,
        ImageFinding,
        LabelScoreFinding,
        LocalModelFinding,
        MembershipFinding,
        PropertyFinding,
        RowFinding,
        SequenceFinding,
        SourceFinding,
        TokenFinding,
        make_attack,
        register,
    )
    from fedaudit.attacks.base import Progress
    from fedaudit.capture import CanaryClients, CanaryTexts, Recorder
    from fedaudit.data import Dataset, load_dataset
    from fedaudit.defences import Aggregator, ClientDefence
    from fedaudit.defences.received import ReceivedHistory
    from fedaudit.defences.received import check_received as check_model
    from fedaudit.pipeline.contract import check_attack
    from fedaudit.pipeline.offline import Findings
    from fedaudit.pipeline.run import Audit
    from fedaudit.pipeline.verify import Verification
    from fedaudit.scenario.scenario import Scenario, load_scenario
    from fedaudit.simulation.behaviour import Behaviour
    from fedaudit.simulation.server_behaviour import ServerBehaviour
    from fedaudit.simulation.simulator import Recording
    from fedaudit.transcript.observation import Observation, observe
    from fedaudit.transcript.threat import ThreatModel
    from fedaudit.transcript.transcript import Transcript
    from fedaudit.transcript.truth import Truth
    from fedaudit.utils.errors import BadInput, CorruptTranscript, FedAuditError, MissingData, NotApplicable
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "Aggregator",
    "Attack",
    "AttributeFinding",
    "Audit",
    "AuditResult",
    "BadInput",
    "Behaviour",
    "CanaryClients",
    "CanaryTexts",
    "ClientDefence",
    "CorruptTranscript",
    "Dataset",
    "EpsilonFinding",
    "ExampleLabelFinding",
    "FedAuditError",
    "Finding",
    "Findings",
    "ImageFinding",
    "LabelScoreFinding",
    "LocalModelFinding",
    "MembershipFinding",
    "MissingData",
    "NotApplicable",
    "Observation",
    "Progress",
    "PropertyFinding",
    "ReceivedHistory",
    "Recorder",
    "Recording",
    "RowFinding",
    "Scenario",
    "SequenceFinding",
    "ServerBehaviour",
    "SourceFinding",
    "ThreatModel",
    "TokenFinding",
    "Transcript",
    "Truth",
    "Verification",
    "__version__",
    "attack",
    "audit",
    "audit_transcript",
    "check_attack",
    "check_model",
    "evaluate",
    "load_dataset",
    "load_scenario",
    "make_attack",
    "observe",
    "register",
    "simulate",
    "verify",
]
