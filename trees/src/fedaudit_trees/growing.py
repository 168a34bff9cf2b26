"""A federation of boosted trees, grown by xgboost: bagging, cyclic, or by histograms."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedaudit.data import Split
from fedaudit.simulation import Federation, History
from fedaudit.task import TaskInfo
from fedaudit.transcript import Transcript, Truth
from fedaudit.utils import BOOSTER, BadInput, generator
from fedaudit_trees.model import OBJECTIVES, Booster, Tree, TreeEnsemble, read_booster, write_booster
from fedaudit_trees.record import HELD, TreeMessage, TreeRecord, TreeSpec, tree_record

Rows = NDArray[np.float32]


def play(federation: Federation, report: Callable[[float], None] | None = None) -> tuple[Transcript, Truth, History]:
    """Run the rounds of a federation of trees that :func:`check_trees` checked, see :func:`grow`.

    Returns:
        What travelled; the truth, in which all rows of client c are under (0, c); how it went.
    """
    spec, info, trees = federation.spec, federation.task_info, _spec_of(federation)
    history = History(federation.accuracy_every, federation.accuracy_examples)

    def after(finished: int, model: TreeEnsemble, sent: int) -> None:
        history.bytes.append(sent)
        history.parameters.append(0)
        held_out = federation.drawn.held_out
        history.measure([model], info, held_out, federation.client_data, finished, finished == spec.rounds)
        if report:
            report(finished * spec.clients)

    rng = generator(federation.seed, spec.name, "trees")
    held, asked = federation.client_data, list(federation.client_data)
    log = {}
    if federation.during_training:  # the adversary is a client: it holds rows of its own
        own = held[trees.observer]
        log = dict(zip(HELD, (own.inputs, own.targets), strict=True))
        del asked[trees.observer]
    whole = asked if _summed(federation) else None
    record = grow(held, trees, spec.learning_rate, spec.rounds, info.num_classes, rng, after, summed=whole)
    transcript = Transcript(federation.name, info, federation.model, federation.loss, [], log, sent=record)
    data = [_pooled(whole)] if whole else held
    return transcript, truth_of([data[c] for c in record.victims], record.victims, federation), history


def grow(
    client_data: list[Split],
    spec: TreeSpec,
    learning_rate: float,
    rounds: int,
    num_classes: int | None,
    rng: torch.Generator,
    after: Callable[[int, TreeEnsemble, int], None] | None = None,
    *,
    summed: list[Split] | None = None,
) -> TreeRecord:
    """Return what travels when clients grow trees together.

    ``bagging`` (Flower's FedXgbBagging, NVFlare's XGBoost bagging): in every round each client grows trees on the
    model's margins of its own rows and sends them alone; all join the model. ``cyclic`` (both frameworks', too): the
    same of one client a round, in turn. ``histogram`` (NVFlare, by xgboost's federated communicator): one tree a
    round, of the sum of the clients' histograms; here grown on all rows together, which is the same tree but for
    rounding, with bins by the quantiles of all rows. What a client's histograms say of it is kept as the sums in the
    leaves, which are sums of bins; the bins within nodes aren't kept, so an adversary who reads every histogram has
    more than this transcript.

    Args:
        num_classes: 2, or None: a regression by squares.
        rng: of the columns that trees may use, and of noise.
        after: called after every round with how many there were, the model, and how many bytes a client sent.
        summed: clients of whose histograms only the sum is seen: all, or all but a client who looks and takes its own
            off; None: each is seen.
    """
    booster = Booster(OBJECTIVES[num_classes is None], 0.0, client_data[0].inputs.shape[1], ())
    data = [(split.inputs.numpy().astype(np.float32), _targets(split)) for split in client_data]
    pooled = [(np.concatenate([x for x, _ in data]), np.concatenate([y for _, y in data]))]
    margins = [np.zeros(len(x), dtype=np.float32) for x, _ in data]
    shared = spec.protocol == "histogram"
    model = TreeEnsemble(1 if num_classes is None else 2)
    messages = list[TreeMessage]()
    for index in range(rounds):
        sent = list[TreeMessage]()
        if shared:
            made = _grown(booster, spec, learning_rate, *pooled[0], np.concatenate(margins), rng)
            new = made.trees
            for client, split in enumerate([_pooled(summed)] if summed else client_data):
                x, y = split.inputs.numpy().astype(np.float32), _targets(split)
                margin = sum((tree.margin(x) for tree in model.trees), np.zeros(len(x), dtype=np.float32))
                own = replace(made, trees=tuple(_of_client(made, spec.reg_lambda, learning_rate, x, y, margin)))
                sent.append(TreeMessage(index, client, write_booster(own), len(x)))
        else:
            turn: Iterable[int] = [index % len(data)] if spec.protocol == "cyclic" else range(len(data))
            for client in turn:
                grown = _grown(booster, spec, learning_rate, *data[client], margins[client], rng)
                sent.append(TreeMessage(index, client, write_booster(grown), len(data[client][0])))
            new = tuple(tree for message in sent for tree in message.booster.trees)
        for margin, (x, _) in zip(margins, data, strict=True):
            for tree in new:
                margin += tree.margin(x)
        model.trees += new
        messages += sent
        if after:
            after(index + 1, model, sum(len(m.model) for m in sent) // len(sent))
    return tree_record(spec, learning_rate, 1 if shared and summed else len(data), messages)


def _grown(
    booster: Booster,
    spec: TreeSpec,
    learning_rate: float,
    x: Rows,
    y: NDArray[np.float64],
    margin: NDArray[np.float32],
    rng: torch.Generator,
) -> Booster:
    """Return the trees that xgboost grows on these rows, from these margins, as the client sends them."""
    xgboost = _xgboost()
    settings = {
        "objective": booster.objective,
        "base_score": 0.5 if booster.objective == OBJECTIVES[0] else 0.0,
        "eta": learning_rate,
        "max_depth": spec.max_depth,
        "min_child_weight": spec.min_child_weight,
        "lambda": spec.reg_lambda,
        "max_bin": spec.max_bin,
        "tree_method": "hist",
        "nthread": 1,
        "colsample_bytree": spec.columns,
        "seed": int(torch.randint(2**31, (1,), generator=rng)),
    }
    matrix, found = xgboost.DMatrix(x, label=y, base_margin=margin, nthread=1), list[Tree]()
    raw = bytes(xgboost.train(settings, matrix, num_boost_round=spec.per_round).save_raw("json"))
    for tree in read_booster(raw, "xgboost").trees:
        if spec.noise:
            tree = _noisy(tree, spec, learning_rate, rng)
        found.append(replace(tree, gain=None) if spec.cover else _bare(tree))  # with cover, gains tell nothing more
    return replace(booster, trees=tuple(found))


def _noisy(tree: Tree, spec: TreeSpec, learning_rate: float, rng: torch.Generator) -> Tree:
    """Return a tree whose leaves come from noisy sums; inner nodes say the sums of theirs."""
    assert tree.weights is not None
    assert tree.cover is not None
    leaves = tree.leaves
    g = -tree.weights[leaves] / learning_rate * (tree.cover[leaves] + spec.reg_lambda)
    noise = spec.noise * torch.randn(2, len(leaves), generator=rng, dtype=torch.float64).numpy()
    g, h = g + noise[0], np.maximum(tree.cover[leaves] + noise[1], 0.0)
    return _with_sums(tree, g, h, spec.reg_lambda, learning_rate, values=True)


def is_json(data: bytes) -> bool:
    """Return whether a model of xgboost is JSON: in UBJSON, the length of a key comes after the brace."""
    return data[:1] == b"{" and data[1:2] in b' \t\r\n"}'


def as_json(data: bytes, where: str) -> bytes:
    """Return a model of xgboost (``Booster.save_raw``) as JSON; xgboost itself reads one that is UBJSON."""
    if is_json(data):
        return data
    if len(data) > BOOSTER.file:
        raise BadInput(f"{where} is larger than {BOOSTER.file:,} bytes, the most that are read of {BOOSTER.what}")
    if data[:1] != b"{":
        raise BadInput(f"{where}: neither JSON nor UBJSON of a model of xgboost")
    xgboost = _xgboost("UBJSON is read by xgboost")
    try:
        booster = xgboost.Booster()
        booster.load_model(bytearray(data))
        return bytes(booster.save_raw("json"))
    except (xgboost.core.XGBoostError, TypeError, ValueError) as error:
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BadInput(f"{where}: neither JSON nor UBJSON of a model of xgboost ({line[:100]})") from None


def _bare(tree: Tree) -> Tree:
    return replace(tree, weights=None, cover=None, gain=None)


def _of_client(
    booster: Booster, reg_lambda: float, learning_rate: float, x: Rows, y: NDArray[np.float64], margin: Rows
) -> list[Tree]:
    """Return the trees that all grew, with the sums of one client's rows in their leaves."""
    found, margin = list[Tree](), margin.copy()
    for tree in booster.trees:
        reached, leaves = tree.reached(x), tree.leaves
        p = 1 / (1 + np.exp(-margin.astype(np.float64))) if booster.objective == OBJECTIVES[0] else margin
        slope = p * (1 - p) if booster.objective == OBJECTIVES[0] else np.ones(len(x))
        g = np.array([(p - y)[reached == leaf].sum() for leaf in leaves])
        h = np.array([slope[reached == leaf].sum() for leaf in leaves])
        found.append(_with_sums(tree, g, h, reg_lambda, learning_rate, values=False))
        margin += tree.value[reached]
    return found


def _with_sums(
    tree: Tree, g: NDArray[np.float64], h: NDArray[np.float64], reg_lambda: float, learning_rate: float, *, values: bool
) -> Tree:
    """Return a tree with these sums (J,) of gradients and hessians in its leaves, and the values that they give."""
    m, leaves = len(tree.left), tree.leaves
    sums = np.zeros((2, m))
    sums[:, leaves] = g, h
    for node in reversed(np.flatnonzero(tree.left >= 0)):  # children come after their parents
        sums[:, node] = sums[:, tree.left[node]] + sums[:, tree.right[node]]
    weights = -learning_rate * sums[0] / np.maximum(sums[1] + reg_lambda, 1e-12)
    weights[tree.left >= 0] /= learning_rate  # as xgboost has them: only leaves are scaled
    value = tree.value
    if values:
        value = value.copy()
        value[leaves] = weights[leaves]
    return replace(tree, value=value, weights=weights, cover=sums[1])


def replay_error(record: TreeRecord, message: TreeMessage, held: Split) -> float:
    """Return how far the leaves' values that a client's rows give are from those that it sent, relative."""
    booster, x, y = message.booster, held.inputs.numpy().astype(np.float32), _targets(held)
    margin = np.full(len(x), booster.base, dtype=np.float32)
    for tree in record.before(message):
        margin += tree.margin(x)
    own = _of_client(booster, record.spec.reg_lambda, record.learning_rate, x, y, margin)
    sent = np.concatenate([tree.value[tree.leaves] for tree in booster.trees]).astype(np.float64)
    given = np.concatenate([tree.weights[tree.leaves] for tree in own if tree.weights is not None])
    cover = np.concatenate([tree.cover[tree.leaves] for tree in own if tree.cover is not None])
    given[(cover < record.spec.min_child_weight) & (sent == 0)] = 0  # xgboost gives a root of so little no weight
    return float(np.linalg.norm(given - sent)) / max(float(np.linalg.norm(sent)), 1e-12)


def truth_of(data: list[Split], clients: Iterable[int], federation: Federation) -> Truth:
    """Return the truth about the rows of ``clients``: those of client c under (0, c)."""
    keys = [(0, client) for client in clients]
    test, held = federation.dataset.test, federation.client_data
    candidates, targets = test.inputs, test.targets
    if federation.split != "test":
        candidates = torch.cat([*(split.inputs for split in held), candidates])
        targets = torch.cat([*(split.targets for split in held), targets])
    inputs = {key: split.inputs.clone() for key, split in zip(keys, data, strict=True)}
    labels = {key: split.targets.clone() for key, split in zip(keys, data, strict=True)}
    rows = {key: torch.arange(len(split)) for key, split in zip(keys, data, strict=True)}
    return Truth(inputs, labels, candidates, targets, {}, rows)


def check_task(info: TaskInfo) -> None:
    """Refuse what boosted trees of one output can't learn."""
    one = info.num_classes == 2 or (info.task_kind.real and info.num_targets == 1)
    if (
        len(info.example_kind.axes) != 1
        or info.example_kind.discrete
        or not one
        or info.packed_inputs
        or info.outputs > 2
    ):
        raise BadInput("a federation of trees learns two classes or one number from rows of a table; use other data")


def check_trees(federation: Federation) -> None:
    """Refuse what a federation of trees can't have, before anything is simulated."""
    spec, trees = federation.spec, _spec_of(federation)
    protocol, summed = trees.protocol, federation.group_size > 1
    if not federation.defences.undefended:
        raise BadInput(
            "a federation of trees has no updates that client-side defences or aggregators could change; use "
            "client_defence: none and aggregator: mean, and the settings noise, cover, max_depth and "
            "min_child_weight of its trees"
        )
    if summed and (protocol != "histogram" or federation.group_size < spec.clients):
        raise BadInput(
            "secure aggregation adds histograms up, of all clients, and can't add trees: use trees.protocol: histogram "
            "and threat.sees: sum, or threat.sees: updates"
        )
    if protocol == "histogram" and (trees.noise or not trees.cover or trees.per_round > 1):
        raise BadInput("by histograms clients send sums, one tree a round: leave noise, cover and per_round out")
    if federation.during_training and spec.clients < 2:
        raise BadInput("a client looks at the others (threat.adversary: client), and there are none; raise clients")
    if federation.canaries is not None:
        raise BadInput("an audit of ε needs updates of a federation of networks; use fedsgd, fedavg or fedprox")
    if federation.drawn.records is not None:
        raise BadInput("threat.target_records and client_property are for federations of networks; leave them out")
    if federation.reveal_labels:
        raise BadInput("labels don't travel with trees, which tell them: leave threat.knows_labels out")
    if any(len(split) < 2 for split in federation.client_data):
        raise BadInput("a client has fewer than 2 examples, on which no tree grows; raise examples")
    _xgboost()


def _summed(federation: Federation) -> bool:
    """Whether only the sum of all histograms is seen: under secure aggregation, and by a client in any case."""
    return _spec_of(federation).protocol == "histogram" and (federation.group_size > 1 or federation.during_training)


def _spec_of(federation: Federation) -> TreeSpec:
    assert isinstance(federation.spec.settings, TreeSpec)
    return federation.spec.settings


def _xgboost(why: str = "a federation of trees is grown by xgboost") -> Any:
    try:
        import xgboost
    except ImportError:
        raise BadInput(f"{why}, which isn't installed: pip install 'fedaudit[trees]'") from None
    return xgboost


def _targets(split: Split) -> NDArray[np.float64]:
    return np.asarray(split.targets.flatten().double().numpy())


def _pooled(data: list[Split]) -> Split:
    return Split(torch.cat([split.inputs for split in data]), torch.cat([split.targets for split in data]))
