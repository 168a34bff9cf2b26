"""The ledger of a deployment: the ε that each client's messages cost, composed over rounds, and what a target asks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from fedaudit.defences.aggregation import AGGREGATORS
from fedaudit.defences.client_defences import CLIENT_DEFENCES, ClientDefence
from fedaudit.defences.clipping import Clipping
from fedaudit.defences.filters import PercentilePrivacy, SVTPrivacy
from fedaudit.defences.privacy import DifferentialPrivacy
from fedaudit.epsilon.accounting import Account, PrivacyAccount, RecordedGaussians, SparseVectorAccount, TakingPart
from fedaudit.epsilon.certificate import in_words
from fedaudit.results.ledger import ClientLedger, Ledger, Target
from fedaudit.results.record import Adjacency
from fedaudit.simulation.budget import PrivacyBudget
from fedaudit.simulation.client import Federation
from fedaudit.simulation.history import History
from fedaudit.simulation.horizontal import planned_rounds
from fedaudit.transcript.files import read_header, read_rounds
from fedaudit.transcript.update import ClientDefenceInfo, PrivateSteps
from fedaudit.utils.errors import BadInput
from fedaudit.utils.fingerprint import tensor_digest
from fedaudit.utils.registry import make, settings_of

FILTERS = {  # a framework's class of a filter or mod, and ours that does the same
    "PercentilePrivacy": "percentile-privacy",
    "SVTPrivacy": "svt-privacy",
    "ExcludeVars": "exclude-vars",
    "LocalDpMod": "local-dp",
}
CLIPPING_MODS = {"fixedclipping_mod": "fixed-clipping", "adaptiveclipping_mod": "adaptive-clipping"}  # Flower's
_NO_NOISE_IN = {
    **dict.fromkeys(CLIPPING_MODS, "clips, and the server adds the noise"),
    **dict.fromkeys(("secaggplus_mod", "secagg_mod"), "hides single updates from the server, and adds no noise"),
}
_STRATEGIES = {  # Flower's, and our aggregator that does the same
    "DifferentialPrivacyServerSideFixedClipping": ("fixed-clipping", {"side": "server"}),
    "DifferentialPrivacyClientSideFixedClipping": ("fixed-clipping", {"side": "client"}),
    "DifferentialPrivacyServerSideAdaptiveClipping": ("adaptive-clipping", {"side": "server", "rule": "flower"}),
    "DifferentialPrivacyClientSideAdaptiveClipping": ("adaptive-clipping", {"side": "client", "rule": "flower"}),
}
Filter = tuple[str, Mapping[str, Any]]

_LOCAL_DP = {"clipping_norm", "sensitivity", "epsilon", "delta"}
_DELTA = 1e-5
_WAYS = 3  # in which messages were defended, that are told
_POINTS = 60  # of a curve; of more rounds some are told
_MOST_NOISE = 1e6  # clips of noise, beyond which none is looked for
_NO_NOISE = "no noise is added, so that nothing is promised"


@dataclass(frozen=True)
class Question:
    """What is asked of a ledger beside what is spent; each None where it isn't asked.

    Attributes:
        target: an ε to stay below.
        rounds: in which every client sends, in place of those that are planned or recorded.
        delta: in place of the settings'.
        adjacency: in place of the one that fits who looks on.
        candidates: among which the right one is to be picked, in place of 100.
    """

    target: float | None = None
    rounds: int | None = None
    delta: float | None = None
    adjacency: Adjacency | None = None
    candidates: int | None = None


@dataclass(frozen=True)
class _Sent:
    """In which rounds, from 1, a client sends; what these cost, or why nothing bounds it."""

    rounds: Sequence[int]
    account: PrivacyAccount | None
    why: str = _NO_NOISE


def of_federation(federation: Federation, question: Question) -> Ledger:
    """Return the ledger of a scenario's federation as it is planned; nothing is trained.

    Who takes part is drawn as in the simulation. Against central noise all rounds count for everybody: all clients'
    messages make a global model.
    """
    client_defence, aggregator = federation.defences.client_defence, federation.defences.aggregator
    budget = PrivacyBudget(federation, History())
    central = budget.account is not None and budget.central
    planned = planned_rounds(federation)
    everybody = range(federation.spec.clients)
    sent = {
        str(number): _Sent([i + 1 for i, chosen in enumerate(planned) if central or number in chosen], budget.account)
        for number in everybody
    }
    notes = []
    if len(planned) < federation.spec.rounds:
        notes.append(f"the budget ends it after {len(planned)} of {federation.spec.rounds} rounds")
    if central:
        notes.append(
            "the server adds the noise: the server itself, and whoever sees single updates, is promised nothing"
        )
    sample = isinstance(client_defence, DifferentialPrivacy) and client_defence.level == "sample"
    parts = (
        [client_defence, aggregator]
        if central and not isinstance(client_defence, DifferentialPrivacy)
        else [client_defence]
    )
    ledger = Ledger(
        federation=federation.name,
        mechanism=", then ".join(_named(one.name, one.settings()) for one in parts),
        protects="sample" if sample else "client",
        adjacency="add-remove" if central else "replace",
        sampling=_sampling(budget.account),
        delta=_DELTA,
        clients=(),
        notes=tuple(notes),
    )
    return _filled(ledger, sent, question, searched=isinstance(client_defence, DifferentialPrivacy))


def of_filters(
    name: str,
    sites: Mapping[str, Sequence[Filter]],
    rounds: int,
    elements: int | None,
    question: Question,
    whole: Collection[str] = (),
) -> list[Ledger]:
    """Return a ledger for all sites that send through the same filters of NVFlare, or mods of Flower.

    Args:
        sites: by name, its filters in the order in which they work: a class's name, and its settings; an unknown class
            (of neither NVFlare, Flower nor ours) with its module.
        rounds: that are planned; every site sends in each.
        elements: of the model's whole state; None: not known.
        whole: the sites that may send whole weights.

    Raises:
        BadInput: an ε depends on what isn't known, or the settings aren't possible.
    """
    alike: dict[str, list[str]] = {}
    for site, filters in sites.items():
        alike.setdefault(repr((filters, site in whole)), []).append(site)
    return [
        _of_chain(name, names, sites[names[0]], rounds, elements, question, whole=names[0] in whole)
        for names in alike.values()
    ]


def _of_chain(
    name: str,
    sites: Sequence[str],
    filters: Sequence[Filter],
    rounds: int,
    elements: int | None,
    question: Question,
    *,
    whole: bool,
) -> Ledger:
    chain = chain_account(name, filters, elements, sites=len(sites))
    account, notes = chain.account, chain.notes
    notes += filter(None, [of_whole_weights(filters) if whole else ""])
    ledger = Ledger(
        federation=name,
        mechanism=", then ".join(chain.shown) or "nothing",
        protects="client",
        adjacency="replace",
        sampling=_sampling(account),
        delta=_DELTA,
        clients=(),
        notes=tuple(notes),
    )
    sent = {site: _Sent(range(1, rounds + 1), account) for site in sites}
    return _filled(ledger, sent, question, searched=chain.searched)


@dataclass(frozen=True)
class Chain:
    """What a chain of filters promises.

    Attributes:
        account: of the noise in it; None: nothing bounds ε.
        shown: each filter, in words.
        notes: what else a reader must know.
        searched: the noise is a user's setting, so that more of it can be asked for.
    """

    account: PrivacyAccount | None
    shown: list[str]
    notes: list[str]
    searched: bool


def known_client_defence(kind: str, settings: Mapping[str, Any]) -> ClientDefence | None:
    """Return the client-side defence of ours that a framework's filter or mod is; None: none is known."""
    known = kind if kind in CLIENT_DEFENCES else FILTERS.get(kind)
    if known is None:
        return None
    return make(CLIENT_DEFENCES, known, {key: value for key, value in settings.items() if key != "data_kinds"})


def of_whole_weights(filters: Sequence[Filter]) -> str:
    """Return what NVFlare's filters that clip each number leave of whole weights, in a line; empty: they don't matter.

    They are made for differences of one local step. Clips above 1 don't matter: hardly a weight is above that.
    """
    for kind, settings in filters:
        if "WEIGHTS" not in (settings.get("data_kinds") or ["WEIGHTS"]):
            continue
        made = known_client_defence(kind, settings)
        if isinstance(made, PercentilePrivacy | SVTPrivacy) and made.gamma < 1:
            return (
                f"{kind} clips each number at {made.gamma:g} a local step: of whole weights, which NVFlare's jobs send "
                "unless they say params_transfer_type=TransferType.DIFF, it leaves no model"
            )
    return ""


def chain_account(name: str, filters: Sequence[Filter], elements: int | None, sites: int = 1) -> Chain:
    """Return what filters, in the order in which they work, promise for each site's messages.

    ``elements`` are the model's whole state's; None: not known. BadInput: an ε depends on what isn't known, the
    settings aren't possible, or two noises are on one message.
    """
    accounts: dict[str, PrivacyAccount] = {}
    notes, shown = [], []
    searched = False
    for kind, written in filters:
        settings = {key: value for key, value in written.items() if key != "data_kinds"}
        known = kind if kind in CLIENT_DEFENCES else FILTERS.get(kind)
        shown.append(_named(known or kind, settings))
        if known is None:
            why = _NO_NOISE_IN.get(kind, "isn't known here")
            notes.append(f"{kind} {why}: nothing is counted for it")
            continue
        if not {"WEIGHTS", "WEIGHT_DIFF"} <= set(written.get("data_kinds") or ("WEIGHTS", "WEIGHT_DIFF")):
            notes.append(
                f"{kind} works on some kinds of data only ({written['data_kinds']}): nothing is counted for it"
            )
            continue
        if known == "local-dp" and (missing := _LOCAL_DP - settings.keys()):
            raise BadInput(f"{name}: {kind} has no {', '.join(sorted(missing))} that can be read")
        client_defence = make(CLIENT_DEFENCES, known, settings)
        if isinstance(client_defence, DifferentialPrivacy) and (client_defence.level, client_defence.where) != (
            "client",
            "local",
        ):
            raise BadInput(f"{name}: dp of a {client_defence.level}, {client_defence.where}: write it as a scenario")
        if known == "svt-privacy" and elements is None:
            raise BadInput(f"{name}: the ε of {kind} depends on the model's size; give parameters=…")
        account = client_defence.account(TakingPart((1,), sites, 1, 1, None, elements or 0))
        if account is None:
            continue
        accounts[kind] = account
        searched = isinstance(client_defence, DifferentialPrivacy)
        if known in {"svt-privacy", "local-dp"}:
            notes.append("a parameter that is a single number travels without noise")
        if isinstance(account, SparseVectorAccount):
            own = client_defence.settings()["epsilon"] + account.numbers * account.each
            told = f"{own:,.0f}" if own >= 1000 else f"{own:.3g}"
            notes.append(f"by NVFlare's own count a round costs {told} at δ = 0, and rounds add up")
    if len(accounts) > 1:
        raise BadInput(
            f"{name}: {' and '.join(accounts)} on the same messages can't be accounted for; keep one of them"
        )
    account = next(iter(accounts.values()), None)
    return Chain(account, shown, notes, searched)


def server_noise(strategies: Sequence[Filter]) -> tuple[Clipping, bool] | None:
    """Return what Flower's strategies, the outermost first, add to what they average, and whether that is a mean.

    None: none that is known adds noise. Of another rule than FedAvg's nobody knows how far one client moves it.
    """
    for kind, settings in strategies:
        if kind not in _STRATEGIES:
            continue
        name, own = _STRATEGIES[kind]
        given: dict[str, Any] = {**own, "num_sampled_clients": int(settings["num_sampled_clients"])}
        given |= {key: settings[key] for key in settings_of(AGGREGATORS[name].value) if key in settings.keys() - given}
        z, count, norm = given["noise_multiplier"], given.get("clipped_count_stddev"), settings["clipping_norm"]
        if count is not None:  # Flower keeps that of the mean alone
            given |= {"noise_multiplier": (z**-2 + (2 * count) ** -2) ** -0.5 if z else z}
            given |= {"initial_clipping_norm": norm}
        with suppress(BadInput):
            return cast("Clipping", make(AGGREGATORS, name, given)), strategies[-1][0] == "FedAvg"
    return None


def of_server(
    name: str, noise: Clipping, examples: Mapping[str, int | None], per_round: int, rounds: int, question: Question
) -> Ledger:
    """Return the ledger of noise that a server adds to a mean, towards those who see global models alone.

    ``examples``: by client; None: not known, and all are taken to have as many.
    """
    held, notes = [n for n in examples.values() if n], [noise.in_words()]
    if len(held) < len(examples):
        held = [1] * len(examples)
        noise = cast("Clipping", make(AGGREGATORS, noise.name, {**noise.settings(), "average": "mean"}))
        notes.append("clients are taken to have equally many examples, by which FedAvg weighs them: record it to count")
    account = noise.account(TakingPart(tuple(held), min(per_round, len(held)), 1, 1, None, 0))
    ledger = Ledger(
        federation=name,
        mechanism=_named(noise.name, noise.settings()),
        protects="client",
        adjacency="add-remove",
        sampling=_sampling(account),
        delta=_DELTA,
        clients=(),
        notes=tuple(notes),
    )
    return _filled(ledger, {client: _Sent(range(1, rounds + 1), account) for client in examples}, question)


def of_recording(folder: Path, question: Question) -> Ledger:
    """Return the ledger of what travelled, by the noise on record; BadInput: it has no single clients' updates."""
    header = read_header(folder)
    messages: dict[int, list[tuple[int, ClientDefenceInfo | None]]] = {}
    rounds, names, examples = read_rounds(folder, header), dict[int, str](), dict[str, int | None]()
    for entry in rounds:
        if any(message.members for message in entry.messages) or (entry.total and not entry.messages):
            raise BadInput(f"{header.name} has sums of updates; a ledger is of single clients' messages")
        for message in entry.messages:
            names[message.client] = message.name or str(message.client)
            examples[names[message.client]] = message.num_examples
            messages.setdefault(message.client, []).append((entry.index + 1, message.sanitised))
    if not messages:
        raise BadInput(f"{header.name} has no updates, and so no ledger")
    kept = {entry.index for entry in rounds}
    missing = [index + 1 for index in range(max(kept)) if index not in kept]
    sent = {names[client]: _recorded(own, missing) for client, own in sorted(messages.items())}
    known = [done for own in messages.values() for _, done in own]
    if header.central is not None and not any(done and done.clip and done.noise for done in known):
        settings = {key: value for key, value in header.central.items() if key != "name"}
        noise = make(AGGREGATORS, str(header.central.get("name")), settings)
        if isinstance(noise, Clipping):
            most = max(len(entry.messages) for entry in rounds)
            return of_server(header.name, noise, examples, most, rounds[-1].index + 1, question)
    ways = sorted({str(done.private or done.name) if done else "none" for done in known})
    of_examples = any(done and done.private for done in known)
    notes = ["a recording says what noise was meant to be added; an audit with canaries tests whether it was"]
    if of_examples:
        notes.append("how many examples a client tells the server that it has is taken for known to everybody")
    ledger = Ledger(
        federation=header.name,
        mechanism=", ".join(ways[:_WAYS]) + f" and {len(ways) - _WAYS} other ways" * (len(ways) > _WAYS),
        protects="sample" if of_examples else "client",
        adjacency="add-remove" if of_examples else "replace",
        sampling=_sampling(None) if not of_examples else _drawing([done.private for done in known if done]),
        delta=_DELTA,
        clients=(),
        notes=tuple(notes),
    )
    return _filled(ledger, sent, question)


def in_a_line(folder: Path, candidates: Tensor) -> str | None:
    """Return the largest ε of a recording's clients, and what it rules out of picking one of (m, …) candidates.

    All rounds on record count. None: no noise is on record.
    """
    different = len({tensor_digest(one) for one in candidates}) or None
    try:
        ledger = of_recording(folder, Question(candidates=different))
    except BadInput:  # of sums
        return None
    spent = [(client.epsilon, client) for client in ledger.clients if client.epsilon is not None and client.curve]
    if not spent:
        return None
    most, client = max(spent, key=lambda one: one[0])
    whose = "an example" if ledger.protects == "sample" else "a client"
    central = ledger.mechanism.partition(" ")[0] in AGGREGATORS
    begin = "towards those who see global models alone, not the server, " * central + "the noise on record promises"
    return (
        f"{begin} {whose} ε = {most:.3g} at δ = {ledger.delta:g}, or less: client {client.client} "
        f"after {client.rounds} round{'s' * (client.rounds != 1)} ({ledger.sampling}); "
        f"{in_words(ledger.candidates, client.success)}; see fedaudit ledger"
    )


def _drawing(steps: Sequence[PrivateSteps | None]) -> str:
    """Return what the account supposes of how private steps drew examples."""
    rates = sorted({one.rate for one in steps if one is not None and one.rate is not None})
    unseen = "Poisson sampling was off or not seen: every step costs every example in full"
    if not rates:
        return unseen
    told = f"{rates[0]:.3g}" if len(rates) == 1 else f"{rates[0]:.3g} to {rates[-1]:.3g}"
    more = f"; for some clients {unseen}" if any(one is None or one.rate is None for one in steps) else ""
    return f"Poisson sampling with probability {told} a step, as it was seen{more}"


def _recorded(messages: Sequence[tuple[int, ClientDefenceInfo | None]], missing: Sequence[int]) -> _Sent:
    """Return what the noise on record costs: without any, without its clip, or with rounds missing, no bound."""
    noises, drawn = [], []
    for _, done in messages:
        if done and (private := done.private) and private.noise:
            noises.append(private.noise)
            drawn.append((private.steps, private.rate or 1.0))
        elif done and not done.private and done.clip and done.noise:
            noises.append(done.noise / done.clip)
            drawn.append((1, 1.0))
    rounds = [index for index, _ in messages]
    if short := len(messages) - len(noises):
        return _Sent(rounds, None, f"{short} of {len(messages)} messages have no noise with a known clip on record")
    account = RecordedGaussians(tuple(noises), _DELTA, drawn=() if set(drawn) == {(1, 1.0)} else tuple(drawn))
    if missing:
        told = f"round {missing[0]}" if len(missing) == 1 else f"{len(missing)} rounds from {missing[0]} on"
        return _Sent(rounds, None, f"{told} not on record; what is on record costs {account.spent(len(rounds)):.3g}")
    return _Sent(rounds, account)


def _filled(ledger: Ledger, sent: Mapping[str, _Sent], question: Question, *, searched: bool = False) -> Ledger:
    """Return the ledger with its clients and the answer to the question; ``searched`` as in :class:`Chain`."""
    accounts = [one.account for one in sent.values() if one.account is not None]
    delta = question.delta or (accounts[0].delta if accounts else ledger.delta)
    adjacency = question.adjacency or ledger.adjacency
    candidates = question.candidates or ledger.candidates
    asked: dict[str, Any] = {"adjacency": adjacency, "delta": delta}
    sent = {
        name: replace(one, account=None if one.account is None else replace(cast("Any", one.account), **asked))
        for name, one in sent.items()
    }
    if question.rounds is not None:
        sent = {name: replace(one, rounds=range(1, question.rounds + 1)) for name, one in sent.items()}
    clients = tuple(_client(name, one, candidates) for name, one in sent.items())
    target = None
    if question.target is not None and accounts and len(accounts) == len(sent):
        busiest = max(sent.values(), key=lambda one: len(one.rounds))
        assert busiest.account is not None
        target = _target(busiest.account, len(busiest.rounds), question.target, searched=searched)
    asked |= {"clients": clients, "target": target, "candidates": candidates}
    return replace(ledger, **asked)


def _client(name: str, sent: _Sent, candidates: int) -> ClientLedger:
    n, luck = len(sent.rounds), 1 / candidates
    if sent.account is None:
        if not n:
            return ClientLedger(name, n, 0.0, success=luck)
        return ClientLedger(name, n, None, why=sent.why)
    account = sent.account
    spent = min(account.spent(n), account.spent(n, "pld"))
    curve = tuple((sent.rounds[k - 1], account.spent(k)) for k in _told(n))
    return ClientLedger(name, n, spent, curve, account.success(n, luck))


def _told(n: int) -> Iterator[int]:
    """Return how many rounds are behind at the points of a curve."""
    if n <= _POINTS:
        return iter(range(1, n + 1))
    return iter(sorted({1 + round(i * (n - 1) / (_POINTS - 1)) for i in range(_POINTS)}))


def _target(account: PrivacyAccount, rounds: int, epsilon: float, *, searched: bool) -> Target:
    allowed = account.rounds(epsilon)
    noise = None
    if searched and isinstance(account, Account):
        low, high = 0.0, account.noise

        def fits(noise: float) -> bool:
            return replace(account, noise=noise).spent(rounds) <= epsilon

        while high < _MOST_NOISE and not fits(high):
            low, high = high, 2 * high
        if fits(high):
            while high - low > 1e-3 * high:
                middle = (low + high) / 2
                low, high = (low, middle) if fits(middle) else (middle, high)
            noise = high
    return Target(epsilon, rounds, allowed, noise)


def _sampling(account: PrivacyAccount | None) -> str:
    whole = "no drawing is counted: every round in which a client sends costs it in full"
    if not isinstance(account, Account):
        return whole
    if account.of is not None:
        return f"{account.of[0]} of {account.of[1]} clients are drawn for each round, without replacement"
    if account.rate < 1:
        return f"Poisson sampling with probability {account.rate:.3g} a step is supposed, which nobody here does"
    if account.every > 1:
        return f"an example is in one of {account.every} steps: the batches of a pass are disjoint"
    return whole


def _named(name: str, settings: Mapping[str, Any]) -> str:
    shown = ", ".join(f"{key} {value}" for key, value in settings.items() if value is not None)
    return f"{name} ({shown})" if shown else name
