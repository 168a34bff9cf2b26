"""Draws the adversary's records from what clients hold and from what nobody trained on."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, zip_longest

import torch
from torch import Tensor

from fedaudit.data.dataset import Attribute, Dataset, Split, property_of
from fedaudit.simulation.spec import FederationSpec
from fedaudit.transcript.queries import NOBODY, UNUSED, QuerySet
from fedaudit.utils import seeds
from fedaudit.utils.errors import BadInput
from fedaudit.utils.fingerprint import tensor_digest

_NEXT = 100  # persons, among whom one is matched


def _nothing() -> Tensor:
    return torch.zeros(0, dtype=torch.int64)


@dataclass(frozen=True)
class RecordDraw:
    """Records, and what only the simulator knows of them.

    Attributes:
        held_out: the examples on which accuracy is measured: none of those that were drawn.
        records: what the adversary gets, if anything.
        owners: (n,) the client that holds the record, or :data:`~fedaudit.transcript.queries.NOBODY`.
        positions: (n,) its row among the examples which that client trains on, or -1.
        matched: (n,) for each record the one that was drawn to go with it, of the other sort and like it in class.
        values: (n,) which value of the hidden attribute each record has; empty where none is hidden.
        persons: (n,) of which person each record is, where some are of one: then matched ones are of a pair of persons
            with as many each; empty where every record is another's, or that isn't known.
        homes: (n,) the client of whose own examples each record is one, trained on or kept back; empty where the
            matched ones are no client's.
        kept: of each client, which of its examples it trains on (masks); empty: all of them.
        public: examples that a malicious server holds, where the adversary has no records; None: none.
        asked: attribute and value of the property of clients that the adversary is after; None: none.
    """

    held_out: Split
    records: QuerySet | None = None
    owners: Tensor = field(default_factory=_nothing)
    positions: Tensor = field(default_factory=_nothing)
    matched: Tensor = field(default_factory=_nothing)
    values: Tensor = field(default_factory=_nothing)
    persons: Tensor = field(default_factory=_nothing)
    homes: Tensor = field(default_factory=_nothing)
    kept: tuple[Tensor, ...] = ()
    public: Split | None = None
    asked: tuple[str, int] | None = None

    def shares(self, held: Sequence[Split], used: Sequence[Tensor]) -> Tensor:
        """Return (k,) the share with the property of what each client's updates used (masks); -1 if it sent none."""
        if self.asked is None:
            return torch.zeros(0, dtype=torch.float64)
        name, value = self.asked
        own = [(data.attributes[name] == value)[mask].double() for data, mask in zip(held, used, strict=True)]
        return torch.tensor([float(marks.mean()) if len(marks) else -1.0 for marks in own], dtype=torch.float64)

    def numbered(self, clients: Sequence[int]) -> RecordDraw:
        """Return the same with these numbers for those by place."""
        assert self.records is not None
        numbers = torch.tensor([*clients, NOBODY])  # the last for nobody, who is -1
        records = replace(self.records, known_clients=numbers[self.records.known_clients])
        kept = tuple(mask for _, mask in sorted(zip(clients, self.kept, strict=False), key=lambda pair: pair[0]))
        return replace(self, records=records, owners=numbers[self.owners], homes=numbers[self.homes], kept=kept)

    def trained_on(self, client_data: Sequence[Split]) -> list[Split]:
        """Return what each client trains on of what it holds."""
        if not self.kept:
            return list(client_data)
        return [data[mask] for data, mask in zip(client_data, self.kept, strict=True)]

    def owned(self, used: Sequence[Tensor]) -> Tensor:
        """Return ``owners`` with ``UNUSED`` for what no update used; ``used`` has a mask for every client."""
        known = [
            owner if owner == NOBODY or used[owner][position] else UNUSED
            for owner, position in zip(self.owners.tolist(), self.positions.tolist(), strict=True)
        ]
        return torch.tensor(known, dtype=torch.int64)


def draw_records(
    data: Dataset,
    split: str,
    spec: FederationSpec,
    client_data: Sequence[Split],
    *,
    seed: int,
    records: int = 0,
    known: int = 0,
    public: int = 0,
    to_server: bool = False,
    hidden: str | None = None,
    wanted: str | None = None,
    own: Collection[int] = (),
    pretrained: bool = False,
    measured: bool = False,
) -> RecordDraw:
    """Return the records that the adversary holds, if any, and on what accuracy is measured.

    That is the split which the clients don't hold; where the model was trained on that, what is left of theirs.

    Args:
        client_data: what each client holds; the honest ones first.
        seed: gives the same records under every defence.
        records: how many; half of them are clients' examples.
        known: further examples of every client, of which the adversary knows whose they are. Then the records that
            nobody trained on are clients' own, too, which keep them back (:meth:`RecordDraw.trained_on`).
        public: further examples, which are nobody's.
        to_server: it is a malicious server that holds these, where there are no records.
        hidden: the attribute that the records lack, if any.
        wanted: the property of clients that the adversary is after, if any, as ``sex=Female``.
        own: clients that the adversary is itself; what they hold is no record.
        pretrained: the model was trained on the whole train split before: none of that is an example that nobody
            trained on.
        measured: accuracy will be measured.
    """
    rest, held_out = (data.train, data.test) if split == "train" else (data.test, data.train)
    if pretrained:
        rest, held_out = (rest[:0], held_out) if split == "train" else (rest, held_out[:0])
    if hidden is not None and hidden not in data.attributes:
        there = ", ".join(data.attributes) or "none"
        raise BadInput(f"the data set '{data.name}' has no attribute '{hidden}' to hide; it has: {there}")
    try:
        asked = None if wanted is None else property_of(data, wanted)
        if asked is not None and not public:
            raise BadInput(
                "threat.client_property needs examples of which the adversary knows it; set threat.knows_public_data: "
                "true and threat.public_examples, to 500 for example"
            )
        if records or asked or (public and not to_server):
            rng = seeds.generator(seed, spec.name, "records")
            attribute = None if hidden is None else (hidden, data.attributes[hidden])
            victims = [client for client in range(min(spec.honest, len(client_data))) if client not in own]
            order = [*victims, *(client for client in range(len(client_data)) if client not in victims)]
            parts = [client_data[client] for client in order]
            drawn = draw(
                *(records, public, parts, len(victims), rest, held_out),
                generator=rng,
                hidden=attribute,
                asked=asked,
                known=known,
                keep_back=known > 0,
            ).numbered(order)
        else:
            rest, held_out = (_strangers(part, client_data) for part in (rest, held_out))
            drawn = RecordDraw(held_out if len(held_out) else _unheld(rest, client_data, set()))
            if public:
                drawn = _with_public(drawn, public, seeds.generator(seed, spec.name, "records"))
        left, classes = len(drawn.held_out), data.num_classes
        if pretrained and split == "test" and measured and classes is not None and left < classes:
            raise BadInput(
                f"the model was trained on the train split, and clients leave {left} examples of the test split to "
                "measure accuracy on; use data.split: train, or fewer examples (federations.*.examples)"
            )
    except BadInput as error:
        raise BadInput(f"federation '{spec.name}': {error}") from None
    return drawn


def _with_public(drawn: RecordDraw, public: int, rng: torch.Generator) -> RecordDraw:
    """Return the draw with so many of its held-out examples as public ones."""
    if public >= len(drawn.held_out):
        raise BadInput(
            f"public_examples is {public}, and {len(drawn.held_out)} examples are nobody's; lower "
            "threat.public_examples"
        )
    order = torch.randperm(len(drawn.held_out), generator=rng)
    return replace(drawn, held_out=drawn.held_out[order[public:].sort().values], public=drawn.held_out[order[:public]])


def draw(
    records: int,
    public: int,
    client_data: Sequence[Split],
    honest: int,
    rest: Split,
    held_out: Split,
    *,
    generator: torch.Generator,
    hidden: tuple[str, Attribute] | None = None,
    asked: tuple[str, int] | None = None,
    known: int = 0,
    keep_back: bool = False,
) -> RecordDraw:
    """Draw the adversary's records: half from what honest clients hold, half from what nobody trains on, shuffled.

    Every member has a matched non-member of its class, and of its group (whose data it is like, where the data set
    knows) as far as there is one, so that a record isn't given away by what it is of. Where a class has more of
    clients' examples than of nobody's, fewer of it are drawn, and more of others. Equal examples are drawn once,
    nothing that a malicious client holds is drawn, and nothing that any client holds, nor another example of a person
    of whom one holds some, passes for an example that nobody trained on. Where of every example is known of which
    person it is, the records are of as many persons as there are, each of them with as many as its matched one, and no
    public example is of one of them. Others come from ``rest`` first, which is of
    the clients' own split, and then from ``held_out``. Accuracy is measured on what is left of ``held_out``, or where
    that is empty, on what is left of ``rest``.

    Args:
        client_data: what each client holds; the honest ones first.
        rest: examples of the split that the clients hold, held or not; they may be theirs.
        hidden: an attribute and its name: it is taken out of the records, not out of public examples.
        asked: attribute and value of a property, which is told of the public examples.
        known: further examples of every honest client, none of them a record, of which it is told whose they are. Where
            persons are known, no other example of theirs is a record either.
        keep_back: clients may keep examples from training: then a member's match is one of the same client and class,
            and chance says which of the two is trained on. Not where there are too few such pairs, or persons are
            known, whose other examples would be trained on.
    """
    rest, held_out = (_strangers(part, client_data) for part in (rest, held_out))
    half = records // 2
    theirs = _joined(client_data[:honest])
    marks = [_digests(data) for data in client_data]
    malicious = {mark for share in marks[honest:] for mark in share}
    own = [mark for share in marks[:honest] for mark in share]
    held = _distinct(torch.randperm(len(theirs), generator=generator).tolist(), own, malicious)
    lengths = torch.tensor([len(data) for data in client_data[:honest]])
    whose = torch.repeat_interleave(torch.arange(honest), lengths)
    by_client = [[row for row in held if whose[row] == client][:known] for client in range(honest)] if known else []
    if (least := min(map(len, by_client), default=0)) < known:
        raise BadInput(
            f"threat.known_records asks for {known} examples of every honest client, and one holds {least} that "
            "differ; lower it"
        )
    given_away = [row for rows in by_client for row in rows]
    gone = set(given_away)
    if theirs.persons is not None:  # nor anything else of these persons
        gone = set(torch.nonzero(torch.isin(theirs.persons, theirs.persons[given_away]))[:, 0].tolist())
    held = [row for row in held if row not in gone]
    if len(held) < half:
        raise BadInput(
            f"threat.target_records asks for {half} examples of honest clients, and "
            + (
                f"beside threat.known_records {len(held)} are left; lower either"
                if known
                else f"they hold {len(held)} that differ"
            )
        )
    pairs_of_own = _own_pairs(theirs, held, own, whose)[:half] if keep_back and theirs.persons is None else []
    at_home = bool(half) and len(pairs_of_own) == half
    strange = 0 if at_home else half
    free = _joined([rest, held_out])
    order = [
        *torch.randperm(len(rest), generator=generator).tolist(),
        *(len(rest) + torch.randperm(len(held_out), generator=generator)).tolist(),
    ]
    non_members = _distinct(order, [*_digests(rest), *_digests(held_out)], malicious | set(own))
    if len(non_members) < strange + public + 1:  # one, at least, for accuracy
        raise BadInput(
            f"threat.target_records and public_examples ask for {strange + public} examples that nobody trains on, and "
            f"there are {max(0, len(non_members) - 1)}; lower them, or let the clients hold less "
            "(federations.*.examples)"
        )
    strata, person = _strata(free, non_members), _nothing()
    unfit: list[int] = []
    if at_home:
        members, others = [one for one, _ in pairs_of_own], [other for _, other in pairs_of_own]
    elif theirs.persons is None or free.persons is None:
        members = _with_partners(held, _strata(theirs, held), strata)[:half]
        others = unfit = _matched(_strata(theirs, members), non_members, strata)
    else:
        paired = _persons_paired((theirs, held), (free, non_members), half)
        members, others = [one[0] for one in paired], [one[1] for one in paired]
        person = torch.tensor([one[2] for one in paired])
        unfit = torch.nonzero(torch.isin(free.persons, free.persons[others])).flatten().tolist()
    if len(members) < half:
        raise BadInput(
            f"threat.target_records asks for {half} examples of honest clients, each with another of its class that "
            f"nobody trains on, and there are {len(members)}; set threat.target_records to {2 * len(members)} or "
            "less, or let the clients hold less of the classes that are few (federations.*.examples)"
        )
    out = set(unfit)
    further = [row for row in non_members if row not in out][:public]
    if len(further) < public:
        raise BadInput(
            f"threat.public_examples asks for {public}, and beside the records' persons {len(further)} are nobody's; "
            "lower it, or threat.target_records"
        )
    source, gone_from_free = (theirs, further) if at_home else (free, [*others, *further])
    taken = {row - len(rest) for row in gone_from_free}
    left = held_out[[row for row in range(len(held_out)) if row not in taken]]
    if not len(held_out):
        left = _unheld(rest, client_data, set(gone_from_free))
    elif not len(left):
        raise BadInput("threat.target_records and public_examples leave nothing to measure accuracy on; lower them")
    shuffle = torch.randperm(2 * half, generator=generator)
    place = torch.argsort(shuffle)
    owners = whose[members]
    trained = torch.ones(len(theirs), dtype=torch.bool)
    if at_home:
        trained[others] = False
    kept = trained.split(lengths.tolist())
    remain = torch.tensor([int(mask.sum()) for mask in kept])
    positions = trained.cumsum(0)[members] - 1 - (remain.cumsum(0) - remain)[owners]
    none = torch.full((half,), NOBODY)
    pairs = torch.arange(2 * half).roll(half)  # the i-th member goes with the i-th of the others
    given = QuerySet(
        torch.cat([theirs.inputs[members], source.inputs[others]])[shuffle],
        torch.cat([theirs.targets[members], source.targets[others]])[shuffle],
        free.inputs[further],
        free.targets[further],
    )
    if known:
        told = {"inputs": theirs.inputs, "labels": theirs.targets, "clients": whose}
        given = replace(given, **{f"known_{name}": tensor[given_away] for name, tensor in told.items()})
    values = _nothing()
    if hidden is not None:
        name, attribute = hidden
        mine, nobodys = theirs.attributes[name], free.attributes[name]
        values = torch.cat([mine[members], source.attributes[name][others]])[shuffle]
        columns = torch.tensor(attribute.columns, dtype=torch.int64)
        given.inputs[:, columns] = 0.0
        if known:
            given.known_inputs[:, columns] = 0.0
        codes = attribute.codes if len(columns) else torch.zeros(len(attribute.values), 0)
        given = replace(given, codes=codes, columns=columns, public_values=nobodys[further])
    if asked is not None:
        given = replace(given, public_property=free.attributes[asked[0]][further] == asked[1])
    return RecordDraw(
        left,
        given,
        owners=torch.cat([owners, none])[shuffle],
        positions=torch.cat([positions, none])[shuffle],
        matched=place[pairs[shuffle]],
        values=values,
        homes=torch.cat([owners, whose[others]])[shuffle] if at_home else _nothing(),
        kept=(*kept, *(torch.ones(len(data), dtype=torch.bool) for data in client_data[honest:])) if at_home else (),
        persons=torch.cat([2 * person, 2 * person + 1])[shuffle] if len(person.unique()) < len(person) else _nothing(),
        asked=asked,
    )


def most_of_persons(client_data: Sequence[Split], others: Split, most: int) -> int:
    """Return how many records, up to ``most``, can be drawn of clients and others of whom all persons are known."""
    others, theirs = _joined([_strangers(others, client_data)]), _joined(client_data)
    rows = (_distinct(range(len(split)), _digests(split), set()) for split in (theirs, others))
    return 2 * len(_persons_paired((theirs, next(rows)), (others, next(rows)), most // 2))


def _unheld(rest: Split, client_data: Sequence[Split], taken: set[int]) -> Split:
    """Return the examples of ``rest`` that no client holds, without the rows in ``taken``."""
    held = {mark for data in client_data for mark in _digests(data)}
    return rest[[row for row, mark in enumerate(_digests(rest)) if mark not in held and row not in taken]]


def _strangers(split: Split, client_data: Sequence[Split]) -> Split:
    """Return the examples that are of no person of whom a client holds any; all where persons aren't known.

    What clients hold themselves stays: it is left out by what it is, wherever it stands.
    """
    known = [data.persons for data in client_data if data.persons is not None]
    if split.persons is None or not known:
        return split
    return split[~torch.isin(split.persons, torch.cat(known))]


def _joined(parts: Sequence[Split]) -> Split:
    groups = [torch.full((len(p),), -1) if p.groups is None else p.groups for p in parts]
    attributes = {name: torch.cat([p.attributes[name] for p in parts]) for name in parts[0].attributes}
    inputs, targets = torch.cat([p.inputs for p in parts]), torch.cat([p.targets for p in parts])
    known = [p.persons for p in parts if p.persons is not None]
    persons = torch.cat(known) if len(known) == len(parts) else None
    return Split(inputs, targets, torch.cat(groups), attributes, persons)


def _digests(split: Split) -> list[bytes]:
    return [tensor_digest(example) for example in split.inputs]


def _distinct(order: Sequence[int], marks: Sequence[bytes], excluded: set[bytes]) -> list[int]:
    """Return the rows in ``order``, without those that equal an earlier one or an excluded one."""
    first: dict[bytes, int] = {}
    for row in order:
        if marks[row] not in excluded:
            first.setdefault(marks[row], row)
    return list(first.values())


def _strata(split: Split, rows: Sequence[int]) -> list[tuple[int, int]]:
    """Return group and class of each row; targets that are no class are all of one."""
    assert split.groups is not None
    no_class = split.targets.is_floating_point() or split.targets.ndim > 1
    classes = torch.zeros(len(split)) if no_class else split.targets
    return [(int(split.groups[row]), int(classes[row])) for row in rows]


def _own_pairs(split: Split, rows: Sequence[int], marks: Sequence[bytes], whose: Tensor) -> list[tuple[int, int]]:
    """Return pairs of ``rows``, in their order, of one client and class each; none that equals another example."""
    times = Counter(marks)
    waiting: dict[tuple[int, int], int] = {}
    found = []
    for row, (_, label) in zip(rows, _strata(split, rows), strict=True):
        kind = int(whose[row]), label
        if times[marks[row]] > 1:
            continue
        if kind in waiting:
            found.append((waiting.pop(kind), row))
        else:
            waiting[kind] = row
    return found


def _with_partners(
    rows: Sequence[int], kinds: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]]
) -> list[int]:
    """Return those of ``rows``, in their order, for which ``others`` have one each of the same class."""
    left = Counter(label for _, label in others)
    found = []
    for row, (_, label) in zip(rows, kinds, strict=True):
        if left[label]:
            left[label] -= 1
            found.append(row)
    return found


def _matched(wanted: Sequence[tuple[int, int]], rows: Sequence[int], kinds: Sequence[tuple[int, int]]) -> list[int]:
    """Return for each wanted (group, class) a row of its own: of both, or else of the class, which has enough."""
    found: dict[int, int] = {}
    for first in range(2):  # what is compared: group and class, class
        heap: dict[tuple[int, ...], deque[int]] = {}
        taken = set(found.values())
        for row, kind in zip(rows, kinds, strict=True):
            if row not in taken:
                heap.setdefault(kind[first:], deque()).append(row)
        for i, kind in enumerate(wanted):
            if i not in found and (left := heap.get(kind[first:])):
                found[i] = left.popleft()
    return [found[i] for i in range(len(wanted))]


def _persons_paired(
    members: tuple[Split, Sequence[int]], others: tuple[Split, Sequence[int]], most: int
) -> list[tuple[int, int, int]]:
    """Return up to ``most`` members with their matched others, and which pair of persons each is of, from 0.

    Every person is paired with the one, of the next hundred, who has most to go with theirs, in class and in group;
    then each pair gives one record of either, and those that have more another, until there are enough.
    """
    (own, known), (strange, free) = ((split, _by_person(split, rows)) for split, rows in (members, others))
    kinds = {person: _strata(strange, rows) for person, rows in free.items()}
    pairs: list[list[tuple[int, int, int]]] = []
    for rows in known.values():
        if len(pairs) == most or not free:
            break
        mine = _strata(own, rows)
        other = max(islice(free, _NEXT), key=lambda person: _alike(mine, kinds[person]))
        if kept := _with_partners(rows, mine, kinds[other]):
            matched = _matched(_strata(own, kept), free.pop(other), kinds[other])
            pairs.append([(row, to, len(pairs)) for row, to in zip(kept, matched, strict=True)])
    return [one for turn in zip_longest(*pairs) for one in turn if one is not None][:most]


def _by_person(split: Split, rows: Sequence[int]) -> dict[int, list[int]]:
    """Return the rows of each person, both in the order of ``rows``."""
    assert split.persons is not None
    found: dict[int, list[int]] = {}
    for row in rows:
        found.setdefault(int(split.persons[row]), []).append(row)
    return found


def _alike(one: Sequence[tuple[int, int]], other: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return how many pairs of one class, and of those how many of one group, too, can be made."""
    classes = (Counter(label for _, label in kinds) for kinds in (one, other))
    return (next(classes) & next(classes)).total(), (Counter(one) & Counter(other)).total()
