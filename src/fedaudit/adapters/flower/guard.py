"""A guard in front of a site: audits the update that is about to leave, with the client's own data in hand."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from torch import Tensor, nn

from fedaudit.adapters.flower.messages import check_names, is_training, log, server_round, state_in
from fedaudit.adapters.received import REFUSED as NOT_LET_IN
from fedaudit.adapters.received import Policy, agreed_network, check_policy, let_in, own_examples
from fedaudit.capture.capture import Capture
from fedaudit.capture.recorder import Recorder
from fedaudit.simulation.local_training import local_randomness
from fedaudit.utils.errors import BadInput, FedAuditError
from fedaudit.utils.folders import temporary_folder

if TYPE_CHECKING:
    from fedaudit.pipeline.run import Audit
    from fedaudit.results import Verdict

Attacks = Sequence[str | dict[str, Any]]

ATTACKS: Attacks = ("labels", {"name": "invg", "iterations": 300})
REFUSED = "the site's guard didn't let this update leave"  # and not why: that would tell what was found
STATE = "fedaudit-guard"  # the guard's record in the context's state
_MOD_FAILED = 6  # Flower's code of an error for a mod's refusal


class Guard:
    """A mod that attacks each update before it leaves: ``ClientApp(mods=[Guard(...)])``, the first of the mods.

    It watches the local training, which stays as it is, and plays the attacks that a curious server could play. What
    it finds is logged on the site; nothing is added to the reply. It refuses where ``on_fail`` is ``"refuse"``: the
    reply becomes an error, and the round goes on without this client. Where an update can't be audited (no training was
    seen, the reply holds several models, an error of the guard's own) it says so and lets it leave, unless
    ``unaudited`` is ``"refuse"``; one over more than ``largest`` examples always leaves.

    Before every training it inspects the model that came in, as ``fedaudit check-model`` does, and logs what looks
    manipulated; where ``on_received`` is ``"refuse"`` such a model isn't trained on, and the reply is an error.

    Args:
        attacks: names, or mappings with settings; default: the labels, and 300 iterations of invg.
        fail_on: the verdict that an update must not reach, nor a worse one.
        fail_above: metric to limit, as ``fedaudit audit --fail-above``.
        on_fail: ``"warn"`` or ``"refuse"``.
        unaudited: ``"pass"`` or ``"refuse"`` what can't be audited, for a site that wants to be sure.
        every: audit only every so many trainings of this client in a run, the first of them first.
        largest: most examples of an update that is audited, over all its steps.
        mean, std: of the preprocessing, per channel; default: estimated from the inputs' range.
        loss: registered name, where the training's own isn't recognised.
        out: folder on the site for a report on every update; default: none is kept.
        on_received: ``"warn"``, ``"refuse"`` or ``"ignore"`` received models that look manipulated.
        agreed: the network that the federation agreed on, or ``package.module:name`` of what makes it; default: of a
            received model only the weights are looked at.
        examples: the site's own, as the model sees them, and their classes, or ``package.module:name`` of what returns
            them: received models are tried on them, too.

    Raises:
        BadInput: a setting can't be used; of attacks and limits that is found out with the first training message.
    """

    def __init__(
        self,
        *,
        attacks: Attacks = ATTACKS,
        fail_on: Verdict | None = "recovered",
        fail_above: Mapping[str, float] | None = None,
        on_fail: Literal["warn", "refuse"] = "warn",
        unaudited: Literal["pass", "refuse"] = "pass",
        every: int = 1,
        largest: int = 32,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        loss: str | None = None,
        out: Path | str | None = None,
        on_received: Policy = "warn",
        agreed: nn.Module | str | None = None,
        examples: tuple[Tensor, Tensor] | str | None = None,
    ) -> None:
        check_policy(on_received)
        if on_fail not in ("warn", "refuse"):
            raise BadInput(f"on_fail is {on_fail!r}; give 'warn' or 'refuse'")
        if unaudited not in ("pass", "refuse"):
            raise BadInput(f"unaudited is {unaudited!r}; give 'pass' or 'refuse'")
        if every < 1 or largest < 1:
            raise BadInput(f"every is {every} and largest {largest}; both must be 1 or more")
        self.attacks = attacks
        self.fail_on = fail_on
        self.fail_above = dict(fail_above or {})
        self.refuses = on_fail == "refuse"
        self.unaudited = unaudited == "refuse"
        self.every, self.largest = every, largest
        self.recorded: dict[str, Any] = {
            "mean": None if mean is None else tuple(mean),
            "std": None if std is None else tuple(std),
            "loss": loss,
        }
        self._checked = False
        self.out = None if out is None else Path(out)
        self.on_received = on_received
        self.agreed, self.examples = agreed_network(agreed), own_examples(examples)

    def __call__(self, msg: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
        """Have the client train, and audit what it is about to send."""
        if not is_training(msg):
            return call_next(msg, context)
        if _quietly(self._let_in, msg, context) is False:
            return Message(Error(_MOD_FAILED, NOT_LET_IN), reply_to=msg)
        before = _quietly(self._count, context)
        if before is not None and before % self.every:
            return call_next(msg, context)
        index = (server_round(msg) or (before or 0) + 1) - 1
        self._check()  # before training, and not quietly: a policy with a wrong word in it must not let all pass
        sent = copy.deepcopy(msg.content)  # the client may change what it is given
        with Capture() as seen:
            reply = call_next(msg, context)
        with local_randomness(0):  # in a simulation the process trains on after the audit
            refused = _quietly(self._audit, index, context, sent, seen, reply)
        if refused is None:  # it couldn't be audited
            refused = self.unaudited
            log.warning("fedaudit guard: node %d: %s", context.node_id, "it doesn't leave" if refused else "it leaves")
        return Message(Error(_MOD_FAILED, REFUSED), reply_to=msg) if refused else reply

    def _let_in(self, msg: Message, context: Context) -> bool:
        records = msg.content.array_records
        count = len(next(iter(records.values()))) if len(records) == 1 else 0
        unnamed = [str(place) for place in range(count)]  # names tell these checks nothing but the architecture
        names = list(self.agreed.state_dict()) if self.agreed is not None else unnamed
        state = state_in(msg.content, names)
        who = f"node {context.node_id}, round {server_round(msg)}"
        return let_in(state, self.on_received, log, who, agreed=self.agreed, examples=self.examples)

    def _check(self) -> None:
        from fedaudit.attacks import make_attack  # what attacks need takes seconds to import
        from fedaudit.evaluation import Limits

        if not self._checked:
            Limits(self.fail_above, self.fail_on).check()
            for attack in self.attacks:
                settings = {"name": attack} if isinstance(attack, str) else dict(attack)
                make_attack(settings.pop("name"), settings)
            self._checked = True

    def _count(self, context: Context) -> int:
        """Return how many training messages came before this one: what a server says its round is proves nothing."""
        state = context.state.config_records.get(STATE)
        if state is None:
            state = context.state[STATE] = ConfigRecord({"messages": 0})
        before = int(state["messages"])
        state["messages"] = before + 1
        return before

    def _audit(self, index: int, context: Context, sent: RecordDict, seen: Capture, reply: Message) -> bool | None:
        """Attack the update; return whether it mustn't leave, None where that can't be told."""
        if reply.has_error():
            return False
        who = f"node {context.node_id}, round {index + 1}"
        if seen.module is None or not seen.inputs:
            log.warning("fedaudit guard: %s: not audited: no training was seen (another thread or process?)", who)
            return None
        examples = sum(len(inputs) for inputs in seen.inputs)
        if examples > self.largest:
            log.info("fedaudit guard: %s: not audited: %d examples, largest is %d", who, examples, self.largest)
            return False
        started = time.perf_counter()
        with temporary_folder() as folder:
            audit = self._attack(folder, index, context.node_id, sent, seen, reply)
        if all(row.verdict == "not applicable" for row in audit.result.summaries):
            log.warning("fedaudit guard: %s: not audited: none of its attacks applies", who)
            return None
        for line in _findings(audit):
            log.info("fedaudit guard: %s: %s", who, line)
        seconds = time.perf_counter() - started
        if not audit.exceeded:
            log.info("fedaudit guard: %s: within the limits (%.1f s)", who, seconds)
            return False
        done = "it doesn't leave" if self.refuses else "it leaves nevertheless"
        log.warning("fedaudit guard: %s: the update gives away more than allowed; %s (%.1f s)", who, done, seconds)
        return self.refuses

    def _attack(self, folder: Path, index: int, node: int, sent: RecordDict, seen: Capture, reply: Message) -> Audit:
        from fedaudit import api
        from fedaudit.pipeline.offline import truth_beside

        assert seen.module is not None
        module = copy.deepcopy(seen.module).cpu()
        weights = state_in(sent, list(module.state_dict()))
        state = state_in(reply.content, list(weights))
        check_names(state, weights)
        recording = folder / "recording"
        with Recorder(recording, name=f"node-{node}", module=module, **self.recorded) as recorder:
            recorder.begin_round(weights, index)
            recorder.update(node, state, seen)
            recorder.end_round()
        if truth_beside(recording) is None:
            raise BadInput("not audited: what the client trained on couldn't be recorded")
        return api.audit_transcript(
            recording,
            list(self.attacks),
            model=module,
            out=None if self.out is None else self.out / f"round-{index + 1}-node-{node}",
            fail_above=self.fail_above,
            fail_on=self.fail_on,
            controls=False,
            overwrite=True,
            progress=False,
        )


def _findings(audit: Audit) -> list[str]:
    """Return what was found, a line an attack."""
    lines = []
    for row in audit.result.summaries:
        psnr = f" ({row.psnr.mean:.1f} dB)" if row.psnr else ""
        lines.append(f"{row.attack}: {row.verdict}{psnr}")
    return lines


def _quietly(work: Callable[..., Any], *arguments: Any) -> Any:
    """Do the guard's own work; an error in it is logged and stops nothing."""
    try:
        return work(*arguments)
    except Exception as error:
        text = str(error) if isinstance(error, FedAuditError) else f"{type(error).__name__}: {error}"
        log.warning("fedaudit guard: this update isn't audited: %s", text)
        return None
