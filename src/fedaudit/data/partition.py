"""How a federation's examples are shared out among its clients: pure functions of the targets."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Generator, Tensor

from fedaudit.data.dataset import usual_targets
from fedaudit.utils.errors import BadInput, unknown_name
from fedaudit.utils.registry import Registry

Scheme = Callable[..., list[Tensor]]

_SWITCHES = 20  # tried for every edge: far more than such a graph takes to forget how it began
_DRAWS = 20  # of a graph, at most, until no two clients have the same labels

PARTITIONS: Registry[Scheme] = Registry("partition")


def partition(
    scheme: str,
    targets: Tensor,
    clients: int,
    generator: Generator,
    *,
    groups: Tensor | None = None,
    lacking: Mapping[int, Collection[int]] | None = None,
    marks: Tensor | None = None,
    persons: Tensor | None = None,
    **options: Any,
) -> list[Tensor]:
    """Share examples out among clients: for each the int64 row numbers of its examples, at least one, in random order.

    Args:
        targets: int64 (n,) labels; others, such as float (n, 1) of a regression, can only be shared out by ``iid``,
            ``natural``, and ``attribute`` with natural labels.
        groups: int64 (n,) whose example each is, where the data set says so; for ``natural``.
        lacking: client to labels that it shouldn't have; for ``label-to-clients``, the others don't look at it.
        marks: bool (n,) which examples have the property by which ``attribute`` shares them out.
        persons: int64 (n,) of which person each example is. Persons are shared out then, each with all examples and
            counted once, under the class of most of them; but not by ``natural``, which says whose every example is.
    """
    if persons is not None and "groups" not in inspect.signature(PARTITIONS[scheme].value).parameters:
        if marks is not None:
            raise BadInput(
                f"partition '{scheme}' shares out single examples, and those of one person stay together; take another "
                "partition, or leave the table's column of persons out"
            )
        units, of = persons.unique(return_inverse=True)
        own = usual_targets(targets, of, len(units))
        whose = partition(scheme, own, clients, generator, lacking=lacking, **options)
        rows = [torch.isin(of, part).nonzero()[:, 0] for part in whose]
        return [part[torch.randperm(len(part), generator=generator)] for part in rows]
    share_out = PARTITIONS[scheme].value
    takes = inspect.signature(share_out).parameters
    given = {"lacking": lacking, "marks": marks, "groups": groups}
    known = [name for name in takes if name not in ("targets", "clients", "generator", *given)]
    for option in options:
        if option not in known:
            allowed = unknown_name("option", option, known) if known else f"it has no option '{option}'"
            raise BadInput(f"partition '{scheme}': {allowed}")
    _whole(scheme, "clients", clients, len(targets), "examples")
    by_class = not (scheme == "iid" or "groups" in takes or ("labels" in takes and options.get("labels") == "natural"))
    if by_class and (targets.is_floating_point() or targets.ndim > 1):
        what = "several labels or" if targets.ndim == 2 and targets.shape[1] > 1 else ""
        what = f"{what} numbers (regression)" if targets.is_floating_point() else "sequences of tokens, or masks"
        instead = "labels: natural, or 'iid'" if "labels" in takes else "'iid'"
        raise BadInput(f"partition '{scheme}' goes by class labels, but the targets are {what.strip()}; use {instead}")
    options |= {name: value for name, value in given.items() if name in takes}
    parts = share_out(targets, clients, generator, **options)
    return [part[torch.randperm(len(part), generator=generator)] for part in parts]


@PARTITIONS.register("iid", "shuffled and cut into equal parts; covers everything", options={})
def iid(targets: Tensor, clients: int, generator: Generator) -> list[Tensor]:
    """Shuffle and cut into parts whose sizes differ by one at most."""
    return _deal(torch.arange(len(targets)), clients, generator)


@PARTITIONS.register(
    "dirichlet",
    "each class is split by proportions drawn from Dirichlet(alpha); small alpha: few classes a client; covers all",
    options={"alpha": 0.5},
)
def dirichlet(targets: Tensor, clients: int, generator: Generator, alpha: float = 0.5) -> list[Tensor]:
    """Split every class by its own proportions p ~ Dirichlet(alpha, ..., alpha) over the clients.

    Yurochkin et al., Bayesian Nonparametric Federated Learning of Neural Networks, ICML 2019. A client that the draw
    leaves with nothing then gets one random example of whichever client has most at that moment.
    """
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not (math.isfinite(alpha) and alpha > 0):
        raise BadInput(f"partition 'dirichlet': alpha={alpha!r}; give a number above 0, such as 0.5")
    # torch has no Dirichlet draw with an explicit generator, so numpy's is seeded from it
    seed = int(torch.randint(2**62, (1,), generator=generator))
    rng = np.random.default_rng(seed)
    parts: list[list[Tensor]] = [[] for _ in range(clients)]
    for rows in _by_class(targets):
        fractions = np.cumsum(rng.dirichlet(np.full(clients, float(alpha))))[:-1]
        cuts = np.clip(np.round(fractions * len(rows)), 0, len(rows)).astype(int)
        shuffled = rows[torch.randperm(len(rows), generator=generator)]
        for part, piece in zip(parts, torch.tensor_split(shuffled, cuts.tolist()), strict=True):
            part.append(piece)
    whole = [torch.cat(part) for part in parts]
    for client in range(clients):
        if len(whole[client]) == 0:
            rich = max(range(clients), key=lambda c: len(whole[c]))
            given = int(torch.randint(len(whole[rich]), (1,), generator=generator))
            whole[client] = whole[rich][given : given + 1]
            whole[rich] = torch.cat([whole[rich][:given], whole[rich][given + 1 :]])
    return whole


@PARTITIONS.register(
    "classes-per-client",
    "every client has exactly k random classes; a class that no client has is left out",
    options={"k": 2},
)
def classes_per_client(targets: Tensor, clients: int, generator: Generator, k: int = 2) -> list[Tensor]:
    """Give every client k random classes, and split each class among its clients.

    As in Liang et al., Think Locally, Act Globally (LG-FedAvg), 2020: every class is cut into equal shards, and each
    client draws k shards of different classes. The numbers of clients that two classes have differ by one at most.
    Where clients * k is less than the number of classes, some classes are left out; otherwise all examples are given
    out. k is in 1..classes, and no class may have fewer examples than clients.
    """
    groups = _by_class(targets)
    _whole("classes-per-client", "k", k, len(groups), "classes")
    shards, rest = divmod(clients * k, len(groups))
    left = torch.full((len(groups),), float(shards))
    left[torch.randperm(len(groups), generator=generator)[:rest]] += 1
    holders: dict[int, list[int]] = {c: [] for c in range(len(groups))}
    for client in range(clients):
        # a class with a shard for every client to come must be taken now, or one of them would get two of it
        drawn = torch.nonzero(left >= clients - client).flatten().tolist()
        while len(drawn) < k:
            free = left.clone()
            free[drawn] = 0
            drawn.append(int(torch.multinomial(free, 1, generator=generator)))
        for c in drawn:
            holders[c].append(client)
            left[c] -= 1
    return _give("classes-per-client", groups, holders, clients, generator)


@PARTITIONS.register(
    "shards",
    "sorted by label and cut into shards, each client gets some at random; covers everything",
    options={"shards_per_client": 2},
)
def shards(targets: Tensor, clients: int, generator: Generator, shards_per_client: int = 2) -> list[Tensor]:
    """Sort by label, cut into clients * shards_per_client equal shards (by one at most), deal them out at random.

    McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017.
    """
    _whole("shards", "shards_per_client", shards_per_client, len(targets) // clients, "examples per client")
    shuffled = torch.randperm(len(targets), generator=generator)
    in_order = shuffled[torch.argsort(targets[shuffled], stable=True)]
    pieces = torch.tensor_split(in_order, clients * shards_per_client)
    dealt = torch.randperm(len(pieces), generator=generator).view(clients, shards_per_client)
    return [torch.cat([pieces[i] for i in row]) for row in dealt.tolist()]


@PARTITIONS.register(
    "label-to-clients",
    "every label lives on m clients drawn at random, among whom its examples are split; covers everything",
    options={"m": 2},
)
def label_to_clients(
    targets: Tensor,
    clients: int,
    generator: Generator,
    m: int = 2,
    lacking: Mapping[int, Collection[int]] | None = None,
) -> list[Tensor]:
    """Give every label to m clients drawn at random, and split its examples among these.

    The numbers of labels that two clients have differ by one at most. Apart from that any choice of owners is as
    likely as another; then, where the numbers allow it, no two clients have the same labels, and clients and labels
    hang together: no group of clients has labels that nobody outside of it knows.

    Args:
        m: clients a label.
        lacking: client to labels that it isn't given, as far as the numbers allow it.

    Raises:
        BadInput: m is not in 1..clients, m * labels leaves a client empty, or a label has fewer than m examples.
    """
    labels = torch.unique(targets).tolist()
    _whole("label-to-clients", "m", m, clients, "clients")
    if m * len(labels) < clients:
        enough = math.ceil(clients / len(labels))
        many = f"{len(labels)} labels on m={m} clients each leave some of {clients} clients without any"
        raise BadInput(f"partition 'label-to-clients': {many}; give m of at least {enough}, or fewer clients")
    without = {(labels.index(x), who) for who, given in (lacking or {}).items() for x in given if x in labels}
    holders = draw_owners(len(labels), clients, m, generator, without)
    return _give("label-to-clients", _by_class(targets), holders, clients, generator)


@PARTITIONS.register(
    "natural",
    "as the data set itself says; what is nobody's goes evenly to the clients that it doesn't name",
    options={},
)
def natural(
    targets: Tensor,  # noqa: ARG001 (as of all schemes)
    clients: int,
    generator: Generator,
    groups: Tensor | None = None,
) -> list[Tensor]:
    """Give every client its own examples, and deal those of nobody (group -1) to the clients that no group is.

    Raises:
        BadInput: the data set doesn't say whose its examples are, there are fewer clients than it names, or a client is
            left without any.
    """
    if groups is None:
        known = "leaf-synthetic, adult-phd"
        raise BadInput(f"partition 'natural': this data set doesn't say whose its examples are; {known} do")
    named = sorted(set(groups.tolist()) - {-1})
    if named and named[-1] >= clients:
        raise BadInput(f"partition 'natural': the data set names {named[-1] + 1} clients; set clients to that or more")
    parts = {client: torch.nonzero(groups == client)[:, 0] for client in named}
    others = [client for client in range(clients) if client not in parts]
    free = torch.nonzero(groups == -1)[:, 0]
    if len(free) < len(others) or (len(free) and not others):
        raise BadInput(
            f"partition 'natural': {len(free)} examples are nobody's, for {len(others)} clients that the data set "
            f"doesn't name; set clients to {'more than ' * bool(len(free))}{len(named)}"
        )
    if others:
        parts |= dict(zip(others, _deal(free, len(others), generator), strict=True))
    return [parts[client] for client in range(clients)]


@PARTITIONS.register(
    "attribute",
    "half of the clients, drawn at random, hold a share of examples with an attribute, the others another share",
    options={"attribute": None, "share": 1.0, "otherwise": 0.0, "labels": "alike"},
)
def by_attribute(
    targets: Tensor,
    clients: int,
    generator: Generator,
    marks: Tensor | None = None,
    share: float = 1.0,
    otherwise: float = 0.0,
    labels: str = "alike",
) -> list[Tensor]:
    """Give half of the clients a share of marked examples, and the others another share; all hold equally many.

    Args:
        clients: how many; half of them, rounded down, have the property.
        marks: bool (n,) which examples are marked.
        share: of marked examples where the property is had.
        otherwise: of marked examples elsewhere.
        labels: ``alike``: every client has as many examples of each class, and marked ones make up the same share of
            each; ``natural``: classes fall as they come with marked and other examples. What doesn't fit is left out.
    """
    if marks is None or clients < 2:
        raise BadInput("partition 'attribute': it takes an attribute of the data set, and 2 clients or more")
    having = clients // 2
    shares = [share] * having + [otherwise] * (clients - having)
    shares = [shares[i] for i in torch.randperm(clients, generator=generator).tolist()]
    strata = torch.zeros(len(targets), dtype=torch.int64) if labels == "natural" else targets
    parts: list[list[Tensor]] = [[] for _ in range(clients)]
    for label in strata.unique():
        cells = [torch.nonzero((strata == label) & (marks == bool(mark)))[:, 0] for mark in range(2)]
        cells = [rows[torch.randperm(len(rows), generator=generator)] for rows in cells]
        size = len(targets) // clients
        while size and any(sum(_cut(s, size)[mark] for s in shares) > len(cells[mark]) for mark in range(2)):
            size -= 1
        for mark, rows in enumerate(cells):
            counts = [_cut(s, size)[mark] for s in shares]
            pieces = rows[: sum(counts)].split(counts)
            for part, piece in zip(parts, pieces, strict=True):
                part.append(piece)
    whole = [torch.cat(part) for part in parts]
    if not len(whole[0]):
        raise BadInput(
            f"partition 'attribute': {int(marks.sum())} of {len(marks)} examples have the attribute, too few of one "
            f"sort for {clients} clients; take fewer clients or more examples"
        )
    return whole


def _cut(share: float, size: int) -> tuple[int, int]:
    """Return how many of ``size`` examples are unmarked, and marked."""
    marked = round(share * size)
    return size - marked, marked


def _by_class(targets: Tensor) -> list[Tensor]:
    return [torch.nonzero(targets == label)[:, 0] for label in torch.unique(targets)]


def _deal(rows: Tensor, parts: int, generator: Generator) -> list[Tensor]:
    return list(torch.tensor_split(rows[torch.randperm(len(rows), generator=generator)], parts))


def _give(
    scheme: str,
    groups: list[Tensor],
    holders: dict[int, list[int]],
    clients: int,
    generator: Generator,
) -> list[Tensor]:
    """Split every class among the clients that hold it."""
    parts: list[list[Tensor]] = [[] for _ in range(clients)]
    for group, who in sorted(holders.items()):
        rows = groups[group]
        if len(rows) < len(who):
            few = f"class number {group} has {len(rows)} examples for {len(who)} clients"
            raise BadInput(f"partition '{scheme}': {few}; take fewer clients or more examples")
        if who:
            for client, piece in zip(who, _deal(rows, len(who), generator), strict=True):
                parts[client].append(piece)
    return [torch.cat(part) for part in parts]


def _whole(scheme: str, name: str, value: object, most: int, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise BadInput(f"partition '{scheme}': {name}={value!r}; give a whole number from 1 to {most} (the {what})")


def draw_owners(
    labels: int, clients: int, m: int, generator: Generator, without: Collection[tuple[int, int]] = ()
) -> dict[int, list[int]]:
    """Draw each label's m owners, ascending, among the clients, whose numbers of labels differ by one at most.

    From a regular graph, by random switches: two labels exchange an owner. Switches change no number, reach every such
    graph, and in the long run each with the same probability (Kannan, Tetali & Vempala 1999). Labels and clients hang
    together wherever there are enough edges for that, m * labels >= labels + clients - 1.

    Args:
        clients: at most m * labels, so that each has one label or more.
        without: (label, client) that should be no edge; one stays where the switches find no way around it.
    """
    order = torch.randperm(clients, generator=generator).tolist()
    names = torch.randperm(labels, generator=generator).tolist()
    edges = [(names[i // m], order[i % clients]) for i in range(labels * m)]
    held = set(edges)
    for _ in range(_DRAWS):
        for first, second in torch.randint(len(edges), (_SWITCHES * len(edges), 2), generator=generator).tolist():
            _switch(edges, held, first, second, without)
        _join(edges, held, labels, clients)
        hands: list[set[int]] = [set() for _ in range(clients)]
        for label, client in edges:
            hands[client].add(label)
        if len(set(map(frozenset, hands))) == clients and held.isdisjoint(without):
            break
    return {label: sorted(client for own, client in edges if own == label) for label in range(labels)}


def _switch(
    edges: list[tuple[int, int]],
    held: set[tuple[int, int]],
    first: int,
    second: int,
    without: Collection[tuple[int, int]],
) -> None:
    """Let two edges exchange their clients, unless that makes an edge that is there, or shouldn't be."""
    old = (edges[first], edges[second])
    new = ((old[0][0], old[1][1]), (old[1][0], old[0][1]))
    if held.isdisjoint(new) and not any(edge in without for edge in new):
        edges[first], edges[second] = new
        held.difference_update(old)
        held.update(new)


def _join(edges: list[tuple[int, int]], held: set[tuple[int, int]], labels: int, clients: int) -> None:
    """Switch until everything hangs together, where there are enough edges.

    An edge on a circle holds nothing together: switched with any edge of another part, it joins the two. With enough
    edges and several parts, one of them has a circle.
    """
    while len(edges) >= labels + clients - 1:
        part = _parts(edges, labels, clients)
        if len(set(part)) == 1:
            return
        first, outside = next(
            (i, part[label])
            for i, (label, client) in enumerate(edges)
            if (rest := _parts(edges[:i] + edges[i + 1 :], labels, clients))[label] == rest[labels + client]
        )
        second = next(i for i, (label, _) in enumerate(edges) if part[label] != outside)
        _switch(edges, held, first, second, ())


def _parts(edges: list[tuple[int, int]], labels: int, clients: int) -> list[int]:
    """Return for every label, and then for every client, the part of the graph that it is in."""
    nodes = labels + clients
    own, held = zip(*edges, strict=True)
    graph = coo_array((np.ones(len(edges)), (own, np.array(held) + labels)), shape=(nodes, nodes))
    parts: list[int] = connected_components(graph, directed=False)[1].tolist()
    return parts
