"""A horizontal federation: rounds in which a server sends a model, and clients updates."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedaudit.data.dataset import Split
from fedaudit.defences.privacy import DifferentialPrivacy, refuse_batch_norm
from fedaudit.defences.spec import DefencesSpec
from fedaudit.models import has_batch_norm, layer_groups, set_training_mode
from fedaudit.simulation.arithmetic import runs_fast
from fedaudit.simulation.behaviour import Behaviour
from fedaudit.simulation.budget import PrivacyBudget
from fedaudit.simulation.canary_play import CanaryPlay
from fedaudit.simulation.checkpoint import Checkpoint, State, pack, unpack
from fedaudit.simulation.client import Client, Federation
from fedaudit.simulation.history import History
from fedaudit.simulation.planted_texts import PlantedTexts
from fedaudit.simulation.recording import Recording
from fedaudit.simulation.server import Server
from fedaudit.simulation.server_behaviour import ServerStep, sent
from fedaudit.simulation.spec import FederationSpec
from fedaudit.simulation.worker_pool import run_round
from fedaudit.transcript.rounds import Round
from fedaudit.transcript.secure_sum import sums_only, union
from fedaudit.transcript.transcript import Transcript
from fedaudit.transcript.truth import Truth
from fedaudit.transcript.update import Update
from fedaudit.utils.errors import BadInput
from fedaudit.utils.fingerprint import computation, device_name, tensor_digest
from fedaudit.utils.native import native_code
from fedaudit.utils.seeds import generator
from fedaudit.utils.validation import check_memory

_SERVER = -1  # its number where it trains itself: clients count from 0
_WORTH = 10.0  # seconds that are left, below which starting processes doesn't pay


def play(
    federation: Federation,
    report: Callable[[float], None] | None,
    checkpoint: Path | None,
    workers: int,
    say: Callable[[str], None] | None,
) -> Recording:
    """Run the rounds of a horizontal federation; see :func:`fedaudit.simulation.simulate`."""
    on_cpu = federation.device == "cpu"
    if federation.spec.arithmetic == "fast" and not (on_cpu and runs_fast(federation.model, _sample(federation))):
        federation = dataclasses.replace(federation, spec=federation.spec.model_copy(update={"arithmetic": "torch"}))
    spec, running = federation.spec, _Running(federation)

    @cache
    def key() -> str:
        code = [native_code()] if spec.arithmetic == "fast" else []  # it decides the bits
        return computation(federation, device_name(federation.device), *code)

    on_disk = Checkpoint(checkpoint) if checkpoint else None
    if on_disk and (saved := on_disk.load(key)):
        try:
            running.load_state_dict(saved)
        except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise BadInput(f"'{checkpoint}' isn't what fedaudit wrote there ({error}); delete it") from None
        if say:
            done = running.finished
            say(f"resuming: {done} of {spec.rounds} rounds of federation {federation.name} kept in {checkpoint}")
    while running.finished < spec.rounds and running.play_round(report, workers):
        if on_disk:
            on_disk.save(key, running.state_dict, running.finished == spec.rounds)
    return running.recording()


class _Running:
    """A federation, with all of its parts, while it is simulated, round by round."""

    def __init__(self, federation: Federation) -> None:
        self.federation, spec = federation, federation.spec
        self.model = copy.deepcopy(federation.model).to(federation.device)
        self.layers = _layers(federation)
        self.aggregator = federation.aggregator.anew()  # they may remember
        self.behaviour = federation.behaviour and federation.behaviour.anew()
        self.dishonest = spec.server and spec.server.anew()
        self.root = _root(federation)
        self.history = History(federation.accuracy_every, federation.accuracy_examples)
        self.history.at_end = self.behaviour is not None and self.behaviour.trained
        self.budget = PrivacyBudget(federation, self.history)
        play = PlantedTexts if federation.planted is not None else CanaryPlay
        self.canaries = play(federation, self.budget) if federation.canaries else None
        own_canaries = self.canaries.records() if self.canaries else [None] * spec.clients
        self.clients = [
            Client(number, data, federation, self.layers, own_canaries[number], self.behaviour)
            for number, data in enumerate(federation.client_data)
        ]
        step = -spec.learning_rate if spec.algorithm == "fedsgd" else 1.0
        noise = generator(federation.seed, spec.name, "central noise")
        self.server = Server(self.aggregator, step, self.budget.central_noise, noise)
        self.sampler = _sampler(spec, federation.seed)
        self.rounds: list[Round] = []
        self.rows: dict[tuple[int, int], Tensor] = {}  # (round, client) to which of its examples it used
        self.finished = 0
        self.seconds = 0.0  # of the last round in this process

    def _parts(self) -> dict[str, Any]:
        """Return what remembers anything from round to round, by its name in a checkpoint."""
        parts: dict[str, Any] = {f"client {client.number}": client for client in self.clients}
        parts |= {"server": self.server, "budget": self.budget, "root": self.root, "behaviour": self.behaviour}
        parts |= {"dishonest": self.dishonest, "canaries": self.canaries}
        return {name: part for name, part in parts.items() if part is not None}

    def state_dict(self) -> State:
        """Return what changes from round to round, for a checkpoint."""
        return {
            "finished": self.finished,
            "model": {name: value.cpu() for name, value in self.model.state_dict().items()},
            "sampler": self.sampler.get_state(),
            "parts": {name: part.state_dict() for name, part in self._parts().items()},
            "course": vars(self.history),
            "rounds": pack(self.rounds),
            "rows": self.rows,
        }

    def load_state_dict(self, state: State) -> None:
        """Go on from what :meth:`state_dict` returned."""
        self.model.load_state_dict(state["model"])
        self.sampler.set_state(state["sampler"])
        for name, part in self._parts().items():
            part.load_state_dict(state["parts"][name])
        vars(self.history).update(state["course"])
        self.rounds, self.rows, self.finished = unpack(state["rounds"]), state["rows"], state["finished"]

    def play_round(self, report: Callable[[float], None] | None, workers: int) -> bool:
        """Play the next round, and return whether there was one: nobody may be left who may send.

        Up to ``workers`` processes run the clients, where the rounds that are left take long enough for that.
        """
        federation, spec, index, history = self.federation, self.federation.spec, self.finished, self.history
        model, root, canaries = self.model, self.root, self.canaries
        weights = {name: value.detach().to("cpu", copy=True) for name, value in model.state_dict().items()}
        chosen, why = _choose(federation, self.budget, self.sampler)
        if why:
            history.stopped, history.why = index, why
            return False
        kept = spec.keep_rounds is None or index in spec.keep_rounds
        received, client_weights = weights, dict[int, dict[str, Tensor]]()
        pays = self.seconds * (spec.rounds - index) > _WORTH
        apart = pays and workers > 1 and len(chosen) > 1 and federation.device == "cpu"
        before = index * (spec.clients_per_round or spec.clients)
        began = time.perf_counter()
        if self.dishonest:
            received, client_weights = sent(self.dishonest, _server_step(federation, index, chosen, weights))
        results = run_round(
            [self.clients[number] for number in chosen],
            model,
            index,
            received,
            history,
            lambda steps: report(before + steps) if report else None,
            client_weights=client_weights,
            workers=workers if apart else 1,
        )
        self.seconds = self.seconds if apart else time.perf_counter() - began
        updates = self._asked([update for update, _ in results], received, client_weights)
        if root or canaries:
            model.load_state_dict(weights)
        own = root.train(model, index, weights)[0] if root else None
        canary_updates = canaries.join(weights, self.layers) if canaries else None
        after, aggregate = self.server.apply(weights, updates, own, canary_updates)
        model.load_state_dict(after)
        if canaries:
            canaries.look(updates, canary_updates, weights, after)
        rejected = {updates[row].client: why for row, why in aggregate.rejected.items() if row < len(updates)}
        history.sent.append(chosen)
        history.rejected.append(sorted(rejected))
        if kept:
            self.rows |= {(index, number): used for number, (_, used) in zip(chosen, results, strict=True)}
            self.rounds.append(Round(index, received, updates, rejected, aggregate.fallback, client_weights))
        self.budget.close(chosen)
        self.finished += 1
        self._measure(self.finished, self.finished == spec.rounds)
        return True

    def _asked(
        self, updates: list[Update], received: dict[str, Tensor], client_weights: dict[int, dict[str, Tensor]]
    ) -> list[Update]:
        """Return the updates after what the server has told clients to do with them."""
        began = time.perf_counter()
        sent = [self.aggregator.asked(u, client_weights.get(u.client, received)) for u in updates]
        self.history.client_defence_seconds += time.perf_counter() - began
        return sent

    def _measure(self, finished: int, last: bool) -> None:
        federation = self.federation
        held_out = federation.drawn.held_out
        models = map(self._of_client, self.clients) if any(client.own for client in self.clients) else [self.model]
        self.history.measure(models, federation.task_info, held_out, federation.client_data, finished, last)

    def _of_client(self, client: Client) -> nn.Module:
        """Return the model as a client has it: with the layers that stay there."""
        made = copy.deepcopy(self.model)
        made.load_state_dict(made.state_dict() | client.own)
        return made

    def recording(self) -> Recording:
        """Return what travelled, the truth that belongs to it, and how it went."""
        federation, history, rounds, rows = self.federation, self.history, self.rounds, self.rows
        drawn, clients = federation.drawn, self.clients
        if history.stopped is not None and history.rounds[-1:] != [history.stopped]:
            self._measure(history.stopped, True)
        transcript = Transcript(
            federation.name,
            federation.task_info,
            copy.deepcopy(federation.model),
            federation.loss,
            rounds,
            {name: t for who in (self.behaviour, self.dishonest) if who for name, t in who.adversary_log().items()},
            drawn.records,
            canaries=self.canaries.end() if self.canaries else None,
        )
        inputs = {key: clients[key[1]].data.inputs[used] for key, used in rows.items()}
        labels = {key: clients[key[1]].data.targets[used] for key, used in rows.items()}
        candidates = _candidates(federation, inputs, labels, rows)
        self.budget.end(candidates.inputs)
        owners = drawn.owned([client.used for client in clients])
        summed: dict[tuple[int, int], Tensor] = {}
        if federation.group_size > 1:
            weighted, alone = self.aggregator.averages == "by examples", federation.task_info.batch_norm == "train"
            transcript.rounds, members = sums_only(
                rounds, federation.group_size, weighted=weighted, batch_norm=alone and has_batch_norm(self.model)
            )
            # so that no two clients share a row
            starts = list(itertools.accumulate(map(len, federation.client_data), initial=0))
            summed = union({key: torch.full_like(used, key[1]) for key, used in rows.items()}, members)
            rows = union({key: used + starts[key[1]] for key, used in rows.items()}, members)
            inputs, labels = union(inputs, members), union(labels, members)
        truth = Truth(
            inputs,
            labels,
            candidates.inputs,
            candidates.targets,
            {"promise": self.budget.promise()} if self.budget.account and drawn.records is not None else {},
            rows,
            owners,
            drawn.matched,
            drawn.values,
            drawn.shares([client.data for client in clients], [client.used for client in clients]),
            coins=self.canaries.coins if self.canaries else torch.zeros(0, dtype=torch.bool),
            members=summed,
            candidate_persons=torch.zeros(0, dtype=torch.int64) if candidates.persons is None else candidates.persons,
            persons=drawn.persons,
            homes=drawn.homes,
        )
        return Recording(transcript, truth, history)


def _choose(federation: Federation, budget: PrivacyBudget, sampler: torch.Generator) -> tuple[list[int], str]:
    """Return who takes part in the next round, drawn among those who may still send; or nobody, and why."""
    spec = federation.spec
    per_round = spec.clients_per_round or spec.clients
    order = torch.randperm(spec.clients, generator=sampler).tolist()
    chosen = sorted(budget.admit(order)[:per_round])
    if not chosen:
        return [], "the privacy budget was spent"
    if len(chosen) < per_round:
        try:
            federation.aggregator.dry_run(len(chosen))
        except BadInput as error:
            return [], f"the privacy budget of all but {len(chosen)} clients was spent: {error}"
    return chosen, ""


def _server_step(federation: Federation, index: int, chosen: list[int], weights: dict[str, Tensor]) -> ServerStep:
    """Return what a malicious server has in its hands before a round."""
    info, public = federation.task_info, federation.drawn.public
    model = copy.deepcopy(federation.model)
    set_training_mode(model, info.batch_norm, dropout=info.dropout)
    draws = generator(federation.seed, federation.spec.name, "malicious server", index)
    held = (None, None) if public is None else (info.normalise(public.inputs), public.targets)
    return ServerStep(index, tuple(chosen), federation.spec.plan, model, weights, info, federation.loss, draws, *held)


def check_rounds(federation: Federation) -> None:
    """Refuse what can't work in rounds of updates: defences, behaviours, the budget, the memory it needs."""
    spec = federation.spec
    _check_size(federation)
    held = sum(map(len, federation.client_data))
    if (wanted := federation.aggregator.root_examples) > held:
        raise BadInput(
            f"root_examples is {wanted}, but the clients hold {held} examples together; "
            "lower defences.aggregator.root_examples"
        )
    dp = federation.defences.client_defence
    if isinstance(dp, DifferentialPrivacy) and dp.level == "sample" and federation.task_info.batch_norm == "train":
        refuse_batch_norm(has_batch_norm(federation.model))
    if federation.group_size > 1 and federation.aggregator.averages is None:
        raise BadInput(
            f"the server sees sums only (threat.sees), and the aggregator '{federation.aggregator.name}' compares "
            f"single updates; use mean or fedavg, or threat.sees=updates"
        )
    if federation.behaviour:
        given_records = federation.drawn.records is not None and federation.during_training
        federation.behaviour.check(federation.task_info, given_records)
        _check_attacked(federation, federation.behaviour)
    if spec.server:
        spec.server.check(federation.model, federation.task_info, spec.plan)
    _check_budget(federation)


def _check_attacked(federation: Federation, behaviour: Behaviour) -> None:
    """Refuse drawings of a class that never start, and of one of which the attackers hold examples.

    Others that never start stand for honest clients whom the adversary owns.
    """
    spec = federation.spec
    target = behaviour.target
    if target is not None and behaviour.start >= spec.rounds:
        raise BadInput(
            f"malicious clients start in round {behaviour.start}, and rounds count from 0 to {spec.rounds - 1}; lower "
            "malicious.start, or raise rounds"
        )
    held = [data.targets.tolist() for data in federation.client_data[spec.honest :]]
    own = [labels.count(target) for labels in held]
    if target is not None and any(own):
        raise BadInput(
            f"malicious clients hold {sum(own)} examples of class {target}, which they are after; set "
            f"malicious.missing_classes: [{target}]"
        )


def planned_rounds(federation: Federation) -> list[list[int]]:
    """Return who takes part in each round, drawn as in the simulation, until the privacy budget ends it."""
    budget, sampler = PrivacyBudget(federation, History()), _sampler(federation.spec, federation.seed)
    planned = []
    for _ in range(federation.spec.rounds):
        chosen, why = _choose(federation, budget, sampler)
        if why:
            break
        budget.count(chosen)
        planned.append(chosen)
    return planned


def _check_budget(federation: Federation) -> None:
    """Refuse a privacy budget that ends the federation before the first recorded round."""
    spec = federation.spec
    budget = PrivacyBudget(federation, History())
    first = min(spec.keep_rounds or [0])
    if budget.account is None or budget.allowed > first:  # nobody has sent so often by then
        return
    sampler = _sampler(spec, federation.seed)
    for index in range(first + 1):
        chosen, why = _choose(federation, budget, sampler)
        if why:
            raise BadInput(f"no recorded round is reached: after {index} rounds {why}; raise epsilon or noise")
        budget.count(chosen)


def _sampler(spec: FederationSpec, seed: int) -> torch.Generator:
    """Return what draws the clients of each round."""
    return generator(seed, spec.name, "sampling")


def _check_size(federation: Federation) -> None:
    """Refuse a transcript that can't fit into memory, and training that would take for ever, before it begins."""
    spec = federation.spec
    rounds = spec.rounds if spec.keep_rounds is None else len(spec.keep_rounds)
    sent = rounds * (spec.clients_per_round or spec.clients)
    tensors = (sent + rounds) * sum(t.numel() for t in federation.model.state_dict().values())
    pixels = sent * (spec.local_steps or 1) * spec.batch_size * math.prod(federation.task_info.input_shape)
    check_memory(4 * (tensors + pixels), f"its transcript ({sent:,} updates)")
    apart = federation.aggregator.averages != "equally"  # which alone takes their sum
    if federation.canaries and federation.planted is None and apart:
        rows = federation.canaries.count * sum(p.numel() for p in federation.model.parameters())
        check_memory(8 * rows, f"the {federation.canaries.count:,} canaries' updates, one by one")


def _root(federation: Federation) -> Client | None:
    """Return a trainer on the server's own root data, a random part of what the clients hold, if the rule wants one."""
    if not federation.aggregator.root:
        return None
    wanted = federation.aggregator.root_examples
    held = federation.client_data
    owned = Split(torch.cat([s.inputs for s in held]), torch.cat([s.targets for s in held]))
    rows = torch.randperm(len(owned), generator=generator(federation.seed, federation.spec.name, "root"))[:wanted]
    return Client(_SERVER, owned[rows], dataclasses.replace(federation, defences=DefencesSpec()))


def _sample(federation: Federation) -> Tensor:
    """Return two examples as the model sees them, of no particular content."""
    return federation.task_info.blank(2)[0]


def _layers(federation: Federation) -> tuple[tuple[str, ...], ...]:
    """Return the names of each layer's parameters and statistics, in forward order."""
    groups = {layer.name: list(layer.parameters) for layer in layer_groups(federation.model, _sample(federation))}
    for name, _ in federation.model.named_buffers():
        owner = name.rpartition(".")[0]
        if owner in groups:
            groups[owner].append(name)
    return tuple(map(tuple, groups.values()))


def _candidates(
    federation: Federation,
    inputs: dict[tuple[int, int], Tensor],
    labels: dict[tuple[int, int], Tensor],
    rows: dict[tuple[int, int], Tensor],
) -> Split:
    """Return the held-out examples, with the victims (each once) in front where these come from elsewhere."""
    test = federation.dataset.test
    if federation.split == "test":
        return test
    seen: dict[bytes, tuple[Tensor, Tensor, Tensor]] = {}
    known = [data.persons for data in federation.client_data]
    used: set[tuple[int, int]] = set()  # (client, row): comparing row numbers is quicker than comparing examples
    for key, batch in inputs.items():
        for i, row in enumerate(rows[key].tolist()):
            if (key[1], row) not in used:
                used.add((key[1], row))
                whose = known[key[1]]
                person = torch.tensor(-1) if whose is None else whose[row]
                seen.setdefault(tensor_digest(batch[i]), (batch[i], labels[key][i], person))
    victims, targets, persons = map(torch.stack, zip(*seen.values(), strict=True))
    whole = torch.cat([victims, test.inputs]), torch.cat([targets, test.targets])
    return Split(*whole, persons=None if test.persons is None else torch.cat([persons, test.persons]))
