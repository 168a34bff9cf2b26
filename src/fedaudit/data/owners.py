"""Who owns which label: a random bipartite graph of labels and clients with given numbers of edges."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Generator

_SWITCHES = 20  # tried for every edge: far more than such a graph takes to forget how it began
_DRAWS = 20  # of a graph, at most, until no two clients have the same labels


def draw_owners(
    labels: int, clients: int, m: int, generator: Generator, without: Collection[tuple[int, int]] = ()
) -> dict[int, list[int]]:
    """Draw m different owners for every label, so that two clients' numbers of labels differ by one at most.

    From a regular graph, by random switches: two labels exchange an owner. Switches change no number, reach every such
    graph, and in the long run each with the same probability (Kannan, Tetali & Vempala 1999).

    Args:
        labels: how many.
        clients: how many; at most m * labels, so that each has one label or more.
        m: owners a label, at most ``clients``.
        generator: the source of all randomness.
        without: (label, client) that should be no edge; one stays where the switches find no way around it.

    Returns:
        for every label its owners in ascending order. Labels and clients hang together wherever there are enough
        edges for that, m * labels >= labels + clients - 1.
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

    An edge on a circle holds nothing together: switched with any edge of another part, it joins the two. As long as
    there are several parts and enough edges, one of them has a circle.
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
