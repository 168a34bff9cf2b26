"""What a client can find in a model that it received, before it trains: checks that a manipulated one fails."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedaudit.task.training import Loss
from fedaudit.utils.errors import BadInput

_ALIKE = 0.999  # absolute cosine from which two rows measure the same
_LEAST_ROWS, _LEAST_COLUMNS, _MOST_ROWS = 8, 16, 512
_NOTHING = 1e-3  # of the longest row: a row that says nothing
_FEWEST_TAPS = 8  # of a kernel: one of fewer may have a single weight that counts
_LONE = 0.99  # of a neuron's gradient, from which it is one example's alone
_ACTIVE = 1e-6  # of the strongest neuron's gradient
FEWEST = 16  # examples by which neurons are judged


@dataclass(frozen=True)
class Check:
    """One check of a received model.

    Attributes:
        name: of the check.
        value: that was measured.
        limit: above which it raises an alarm.
        text: what was found, in words.
    """

    name: str
    value: float
    limit: float
    text: str

    @property
    def alarm(self) -> bool:
        """Whether the model is suspicious; a value that isn't finite is."""
        return not self.value <= self.limit


# What each check is against, and its limit; measured on ordinary rounds by ``python -m tests.measure.false_alarms``.
LIMITS: dict[str, float] = {
    "architecture": 0.0,
    "alike rows": 0.5,
    "bare kernels": 0.5,
    "silent outputs": 0.5,
    "loss": 4.0,
    "lone neurons": 0.2,
}


def check_received(
    state: Mapping[str, Tensor],
    agreed: nn.Module | None,
    *,
    module: nn.Module | None = None,
    loss: Loss | None = None,
    examples: tuple[Tensor, Tensor] | None = None,
) -> list[Check]:
    """Check a model that a server sent, without training it.

    - *architecture*: tensors that aren't those of the agreed network (a module put before it, Fowl et al. 2022).
    - *alike rows*: the largest share of a layer's rows that measure the same as another row of it (bins).
    - *bare kernels*: the largest share of a convolution's kernels that are nothing, or a single weight that copies its
      input (Zhao et al. 2024 send each client such kernels of its own); 0 where all of them are nothing.
    - *silent outputs*: the share of classes whose row of the last layer is nothing beside the longest, or another
      class's (Wen et al. 2022 silence all but one).
    - *loss*: on the client's examples, over that of naming every class with equal probability.
    - *lone neurons*: the largest share of a fully connected hidden layer's active neurons whose gradient is one
      example's alone (bins; trap weights, Boenisch et al. 2023), on at least 16 examples. In the spirit of D-SNR (Garov
      et al. 2024), which compares examples' gradients of whole layers.

    The last two need ``examples`` and ``loss``.

    Args:
        state: parameters and buffers by name, as received.
        agreed: the architecture that the federation agreed on; its weights mean nothing. None: it isn't at hand, and
            only the weights are looked at.
        module: the architecture that was sent; default: the agreed one. Where the state doesn't fit it, only the
            weights are looked at.
        loss: mean over a batch.
        examples: the client's own, as the model sees them, and their targets.

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
    shares = {name: _alike(matrix) for name, matrix in matrices.items()}
    checks.append(_worst("alike rows", shares, "{:.0%} of the rows of '{}' measure what another row of it measures"))
    bare = {name: _bare(matrix) for name, matrix in matrices.items() if state[name].ndim >= 3}
    checks.append(_worst("bare kernels", bare, "{:.0%} of the kernels of '{}' are nothing, or copy one input"))
    if matrices:
        last = next(reversed(matrices))
        lengths = matrices[last].norm(dim=1)
        nothing = lengths <= _NOTHING * lengths.max()
        _, inverse, counts = matrices[last].unique(dim=0, return_inverse=True, return_counts=True)
        silent = float((nothing | (counts[inverse] > 1)).double().mean()) if len(lengths) > 2 else 0.0
        text = f"{silent:.0%} of the rows of the last layer ('{last}') are nothing beside the longest, or another's"
        checks.append(_made("silent outputs", silent, text))
    run = agreed if module is None else module
    if run is None or examples is None or loss is None:
        return checks
    if {n: t.shape for n, t in run.state_dict().items()} == {n: t.shape for n, t in state.items()}:
        checks += _on_examples(run, state, loss, *examples)
    return checks


def _on_examples(
    module: nn.Module, state: Mapping[str, Tensor], loss: Loss, inputs: Tensor, targets: Tensor
) -> list[Check]:
    run = copy.deepcopy(module).cpu().eval()
    outputs: dict[str, Tensor] = {}
    for name, part in run.named_modules():
        if isinstance(part, nn.Linear):
            part.register_forward_hook(lambda _m, _i, output, name=name: outputs.update({name: output}))
    with torch.enable_grad():
        own = {name: tensor.detach().cpu().clone() for name, tensor in state.items()}
        for name, parameter in run.named_parameters():
            own[name].requires_grad_(parameter.requires_grad)
        try:
            answer = functional_call(run, own, (inputs.cpu(),))
            value = loss(answer, targets.cpu())
        except (ValueError, TypeError, RuntimeError, LookupError, ArithmeticError, AttributeError) as error:
            raise BadInput(
                f"the model or the loss can't take the examples, {tuple(inputs.shape)} with targets "
                f"{tuple(targets.shape)}: {type(error).__name__}: {error}; give the loss of (outputs, targets), both "
                "as in training, or no examples"
            ) from error
        hidden = [n for n, out in outputs.items() if out.requires_grad and out is not answer and out.ndim == 2]
        flows = torch.autograd.grad(value, [outputs[n] for n in hidden], allow_unused=True) if hidden else ()
    checks = []
    if not targets.is_floating_point():
        classes = max(2, answer.shape[1]) if answer.ndim > 1 else 2  # also of masks and of texts, (n, classes, ...)
        ratio = float(value.detach()) / math.log(classes)
        checks.append(_made("loss", ratio, f"{float(value.detach()):.3g}, {ratio:.2g} times that of guessing"))
    if len(inputs) >= FEWEST:
        shares = {n: _lone(flow.detach()) for n, flow in zip(hidden, flows, strict=True) if flow is not None}
        text = "{:.0%} of the active neurons of '{}' hold one example's gradient alone"
        checks.append(_worst("lone neurons", shares, text))
    return checks


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


def _lone(flow: Tensor) -> float:
    """Return the share of active neurons, of (n, neurons) gradients, whose gradient is one example's alone."""
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
