"""What a client can find in a model that it received, before it trains: checks that a manipulated one fails."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedaudit.defences.drift import ReceivedHistory as ReceivedHistory
from fedaudit.defences.own_gradients import Gradients, d_snr, own_gradients, uneven
from fedaudit.task.training import Loss

_ALIKE = 0.999  # absolute cosine from which two rows measure the same
_LEAST_ROWS, _LEAST_COLUMNS, _MOST_ROWS = 8, 16, 512
_NOTHING = 1e-3  # of the longest row: a row that says nothing
_FEWEST_TAPS = 8  # of a kernel: one of fewer may have a single weight that counts
_LONE = 0.99  # of a neuron's gradient, from which it is one example's alone
_ACTIVE = 1e-6  # of the strongest neuron's gradient
FEWEST = 16  # examples by which neurons are judged


@dataclass(frozen=True)
class Check:
    """One check of a received model: above its limit, the value raises an alarm."""

    name: str
    value: float
    limit: float
    text: str

    @property
    def alarm(self) -> bool:
        """Whether the model is suspicious; a value that isn't finite is."""
        return not self.value <= self.limit


# What each check is against, and its limit; measured on ordinary rounds by ``python -m tools.measure.false_alarms``.
LIMITS: dict[str, float] = {
    "architecture": 0.0,
    "alike rows": 0.5,
    "bare kernels": 0.5,
    "silent outputs": 0.5,
    "loss": 4.0,
    "lone neurons": 0.2,
    "disaggregation": 1.0,
    "uneven gradients": 0.85,
    "jump": 10.0,
    "lost rows": 0.5,
    "loss jump": 0.5,
}
# measured on examples, so that limits go by the last rounds; with the most that each can be
_MEASURED = {"loss": math.inf, "lone neurons": 1.0, "disaggregation": math.inf, "uneven gradients": 1.0}


def check_received(
    state: Mapping[str, Tensor],
    agreed: nn.Module | None,
    *,
    module: nn.Module | None = None,
    loss: Loss | None = None,
    examples: tuple[Tensor, Tensor] | None = None,
    history: ReceivedHistory | None = None,
    index: int | None = None,
) -> list[Check]:
    """Check a model that a server sent, without training it.

    - *architecture*: tensors that aren't those of the agreed network (a module put before it, Fowl et al. 2022).
    - *alike rows*: the largest share of a layer's rows that measure the same as another row of it (bins). Layers of
      ours that start at zero (the second halves of adapters) don't count: their first steps are along one direction.
    - *bare kernels*: the largest share of a convolution's kernels that are nothing, or a single weight that copies its
      input (Zhao et al. 2024 send each client such kernels of its own); 0 where all of them are nothing.
    - *silent outputs*: the share of classes whose row of the last layer is nothing beside the longest, or another
      class's (Wen et al. 2022 silence all but one).
    - *loss*: on the client's examples, over that of naming every class with equal probability.
    - *lone neurons*: the largest share of a fully connected hidden layer's active neurons whose gradient is one
      example's alone (bins; trap weights, Boenisch et al. 2023), on at least 16 examples.
    - *disaggregation*: D-SNR (Garov et al. 2024): the largest, over fully connected layers and convolutions, of the
      longest example's gradient over the sum of all others' lengths. Departures: it is the smaller of that with the
      examples' own targets and that with others, since of a well trained model only what it gets wrong has a gradient;
      up to 32 examples count, in evaluation mode.
    - *uneven gradients*: with other targets than their own, the largest share, over the same layers, of the examples
      that add nothing to the gradient beside the rest (a model that lets few examples through).
    - *jump*: how many robust standard deviations the logarithm of a layer's change lies above those of the last rounds.
    - *lost rows*: the largest share of a layer's rows that counted in the last rounds and don't any more, for they are
      shorter; a row that grew takes nothing from the others.
    - *loss jump*: how far the loss on the examples lies above the largest of the last rounds and twice their range, in
      losses of guessing.

    *Loss* to *uneven gradients* need ``examples`` and ``loss``, and with a ``history`` their limit is twice the largest
    of the last rounds where that is more: among uneven clients trained networks come near the largest values there are.
    Of shares (*lone neurons*, *uneven gradients*) it lies at most half way from that to 1.
    The last three need a history of three rounds or more, *loss jump* both.

    Args:
        state: parameters and buffers by name, as received.
        agreed: the architecture that the federation agreed on; its weights mean nothing. None: it isn't at hand, and
            only the weights are looked at.
        module: the architecture that was sent; default: the agreed one. Where the state doesn't fit it, only the
            weights are looked at.
        loss: mean over a batch.
        examples: the client's own, as the model sees them, and their targets.
        history: of the models that this client received before; the model is added to it.
        index: of the round, by which the history knows how many rounds the client missed; None: none.

    Raises:
        BadInput: the model or the loss can't take the examples.
    """
    checks = []
    if agreed is not None:
        own = agreed.state_dict()
        wrong = [n for n in {**state, **own} if n not in own or n not in state or own[n].shape != state[n].shape]
        checks.append(_made("architecture", len(wrong), f"not as agreed: {_named(wrong)}" if wrong else "as agreed"))
    matrices = {
        name: tensor.detach().flatten(1).double().cpu()
        for name, tensor in state.items()
        if tensor.ndim >= 2 and tensor.is_floating_point()
    }
    started = set() if agreed is None else {f"{n}.weight" for n, p in agreed.named_modules() if _starts_at_zero(p)}
    shares = {name: _alike(matrix) for name, matrix in matrices.items() if name not in started}
    checks.append(_worst("alike rows", shares, "{:.0%} of the rows of '{}' measure what another row of it measures"))
    bare = {name: _bare(matrix) for name, matrix in matrices.items() if state[name].ndim >= 3}
    checks.append(_worst("bare kernels", bare, "{:.0%} of the kernels of '{}' are nothing, or copy one input"))
    if matrices:
        last = next(reversed(matrices))
        lengths = matrices[last].norm(dim=1)
        # zeros throughout are how some begin; of numbers that are none, no row says anything
        nothing = ~(lengths > _NOTHING * lengths.max()) & bool(lengths.any())
        _, inverse, counts = matrices[last].unique(dim=0, return_inverse=True, return_counts=True)
        alike = (counts[inverse] > 1) & bool(lengths.any())
        silent = float((nothing | alike).double().mean()) if len(lengths) > 2 else 0.0
        text = f"{silent:.0%} of the rows of the last layer ('{last}') are nothing beside the longest, or another's"
        checks.append(_made("silent outputs", silent, text))
    run = agreed if module is None else module
    if (
        run is not None
        and examples is not None
        and loss is not None
        and {n: t.shape for n, t in run.state_dict().items()} == {n: t.shape for n, t in state.items()}
    ):
        found = own_gradients(run, state, loss, *examples)
        if not examples[1].is_floating_point():
            relative = _against_guessing(found)
            checks.append(_made("loss", relative, f"{found.loss:.3g}, {relative:.2g} times that of guessing"))
        if len(examples[0]) >= FEWEST:
            checks += _of_gradients(found)
    if history is not None:
        checks = [
            replace(c, limit=history.limit(c.name, c.limit, _MEASURED[c.name])) if c.name in _MEASURED else c
            for c in checks
        ]
        values = {c.name: c.value for c in checks if c.name in _MEASURED and math.isfinite(c.value)}
        checks += _of_history(history, state, values, index)
    return checks


def _against_guessing(found: Gradients) -> float:
    """Return the loss in those of naming every class with equal probability, also of masks and texts."""
    return found.loss / math.log(max(2, found.outputs.shape[1]) if found.outputs.ndim > 1 else 2)


def _of_gradients(found: Gradients) -> list[Check]:
    shares = {name: _lone(flow) for name, flow in found.flows.items()}
    text = "{:.0%} of the active neurons of '{}' hold one example's gradient alone"
    checks = [_worst("lone neurons", shares, text)]
    for name, measure, words in (
        ("disaggregation", d_snr, "one example's gradient of '{1}' is {0:.2g} times the sum of all others'"),
        ("uneven gradients", uneven, "{:.0%} of the examples add nothing to the gradient of '{}' beside the rest"),
    ):
        values = {layer: measure(sizes) for layer, sizes in found.sizes.items()}
        check = _worst(name, values, words)
        if values and found.probed is not None and check.alarm:  # whose they are, for whoever looks into it
            sizes = found.sizes[max(values, key=lambda key: values[key])]
            row = int(sizes[1].argmax())
            check = replace(check, text=f"{check.text}; most is example {row}'s, of class {int(found.probed[0, row])}")
        checks.append(check)
    return checks


def _of_history(
    history: ReceivedHistory, state: Mapping[str, Tensor], values: dict[str, float], index: int | None
) -> list[Check]:
    jumps, lost, rise = history.add(state, values, index)
    checks = [
        _worst("jump", jumps, "'{1}' has changed by {0:.2g} standard deviations more than in the last rounds"),
        _worst("lost rows", lost, "{:.0%} of the rows of '{}' that counted in the last rounds don't any more"),
    ]
    if "loss" in values:
        text = f"on the client's examples {rise:+.2g} losses of guessing against what the last rounds let expect"
        checks.append(_made("loss jump", rise, text))
    return checks


def _starts_at_zero(part: nn.Module) -> bool:
    return bool(getattr(part, "starts_at_zero", False))


def _alike(matrix: Tensor) -> float:
    """Return the share of rows (of an even sample of the longer ones) that are a multiple of another, or nearly so."""
    rows, columns = matrix.shape
    if rows < _LEAST_ROWS or columns < _LEAST_COLUMNS or not bool(torch.isfinite(matrix).all()):
        return 0.0
    lengths = matrix.norm(dim=1)
    kept = matrix[lengths > 1e-6 * lengths.max()]
    kept = kept[torch.linspace(0, len(kept) - 1, min(len(kept), _MOST_ROWS)).long()]
    if len(kept) < _LEAST_ROWS:
        return 0.0
    unit = nn.functional.normalize(kept, dim=1)
    cosines = (unit @ unit.T).abs().fill_diagonal_(0)
    return float((cosines.amax(dim=1) > _ALIKE).double().mean())


def _bare(kernels: Tensor) -> float:
    """Return the share of kernels (k, weights) with one weight that counts or none; 0 where none has any."""
    size = kernels.abs()
    if size.shape[1] < _FEWEST_TAPS or not bool(size.any()) or not bool(torch.isfinite(size).all()):
        return 0.0
    return float(((size > _NOTHING * size.max()).sum(dim=1) <= 1).double().mean())


def _lone(flows: Tensor) -> float:
    """Return the share of active neurons, of (2, n, neurons), whose gradient is one example's, the smaller of two."""
    return min(map(_one_alone, flows))


def _one_alone(flow: Tensor) -> float:
    size = flow.abs().double()
    whole = size.sum(dim=0)
    active = whole > _ACTIVE * whole.max()
    if int(active.sum()) < _LEAST_ROWS:
        return 0.0
    return float((size.amax(dim=0)[active] >= _LONE * whole[active]).double().mean())


def _made(name: str, value: float, text: str) -> Check:
    return Check(name, float(value), LIMITS[name], text)


def _worst(name: str, shares: Mapping[str, float], text: str) -> Check:
    worst = max(shares, key=lambda key: shares[key], default=None)
    if worst is None:
        return _made(name, 0.0, "there is no such layer")
    return _made(name, shares[worst], text.format(shares[worst], worst))


def _named(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:3])
    return f"{shown}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
