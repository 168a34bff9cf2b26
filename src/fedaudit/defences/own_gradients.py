"""What single examples add to the gradients of a received model: whether one of them outweighs all others."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedaudit.task.training import Loss
from fedaudit.utils.errors import BadInput

_LINEAR = (nn.Linear, nn.modules.conv._ConvNd)
_MOST = 32  # examples whose gradients are taken one by one
_NOTHING = 1e-12  # of a layer's largest gradient of all layers: it gets none


class Gradients(NamedTuple):
    """Of a model on a client's examples.

    Attributes:
        flows: layer to (2, n, outputs) ∂L/∂z, of fully connected hidden layers that see one vector an example: with
            their own targets, and with others.
        sizes: layer (fully connected or convolution) to (2, m) lengths of m examples' gradients by its weight, with
            both targets likewise.
        probed: (2, m) the targets, where they are classes; otherwise None.
    """

    outputs: Tensor
    loss: float
    flows: dict[str, Tensor]
    sizes: dict[str, Tensor]
    probed: Tensor | None


def own_gradients(
    module: nn.Module, state: Mapping[str, Tensor], loss: Loss, inputs: Tensor, targets: Tensor
) -> Gradients:
    """Return what examples add to the gradients of a received model, run once, in evaluation mode.

    Other targets tell an example that the model lets through from one that it got wrong: in a well-trained model few
    examples have any gradient, but with wrong classes all have. For classes and masks they are the classes that follow,
    each equally often; for real values, those of half a batch further.
    """
    run = copy.deepcopy(module).cpu().eval()
    calls: list[tuple[str, nn.Module, Tensor, Tensor]] = []

    def note(name: str) -> Callable[..., Tensor]:
        def hook(part: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> Tensor:
            calls.append((name, part, given[0], output))
            return output.clone()  # what is changed in place behind it isn't the layer's output

        return hook

    handles = [
        part.register_forward_hook(note(name)) for name, part in run.named_modules() if isinstance(part, _LINEAR)
    ]
    with torch.enable_grad():
        own = {name: tensor.detach().cpu().clone() for name, tensor in state.items()}
        for name, parameter in run.named_parameters():
            own[name].requires_grad_(parameter.requires_grad)
        try:
            answer = functional_call(run, own, (inputs.cpu(),))
            value = loss(answer, targets.cpu())
            others = _others(answer, targets.cpu())
            probed = loss(answer, others)
        except (ValueError, TypeError, RuntimeError, LookupError, ArithmeticError, AttributeError) as error:
            raise BadInput(
                f"the model or the loss can't take the examples, {tuple(inputs.shape)} with targets "
                f"{tuple(targets.shape)}: {type(error).__name__}: {error}; give the loss of (outputs, targets), both "
                "as in training, or no examples"
            ) from error
        finally:
            for handle in handles:
                handle.remove()
        used = [call for call in calls if call[3].requires_grad]
        ends = [output for *_, output in used]
        both = [
            torch.autograd.grad(one, ends, allow_unused=True, retain_graph=True) if ends else ()
            for one in (value, probed)
        ]
    last = ends[-1] if ends else None
    flows = {
        name: torch.stack([flow, probe])
        for (name, part, _, output), flow, probe in zip(used, *both, strict=True)
        if isinstance(part, nn.Linear)
        and flow is not None
        and probe is not None
        and output.ndim == 2
        and output is not last
    }
    sizes: dict[str, Tensor] = {}
    rows = range(min(len(inputs), _MOST))
    for place, (name, part, given, _) in enumerate(used):
        pair = both[0][place], both[1][place]
        weight = own.get(f"{name}.weight" if name else "weight")
        if weight is None or not weight.requires_grad or any(f is None or len(f) != len(inputs) for f in pair):
            continue
        if name in sizes or sum(n == name for n, *_ in used) > 1:  # used twice: its gradient is a sum
            sizes.pop(name, None)
            continue
        sizes[name] = torch.stack([_lengths(part, weight, given.detach(), flow, rows) for flow in pair])
    whole = max((float(size.max()) for size in sizes.values()), default=0.0)
    kept = {name: size for name, size in sizes.items() if float(size.sum(dim=1).min()) > _NOTHING * whole}
    classes = None if targets.is_floating_point() or targets.ndim > 1 else torch.stack([targets.cpu(), others])
    return Gradients(answer.detach(), float(value.detach()), flows, kept, classes)


def _others(answer: Tensor, targets: Tensor) -> Tensor:
    """Return targets that aren't the examples' own."""
    if targets.is_floating_point() or answer.ndim < 2:
        return targets.roll(len(targets) // 2, 0)
    classes = max(2, answer.shape[1])
    shift = (1 + torch.arange(len(targets)) % (classes - 1)).view(-1, *[1] * (targets.ndim - 1))
    return torch.where(targets < 0, targets, (targets + shift) % classes)


def _lengths(part: nn.Module, weight: Tensor, given: Tensor, flow: Tensor, rows: range) -> Tensor:
    """Return (m,) the lengths (float64) of single examples' gradients by a layer's weight."""
    if isinstance(part, nn.Linear) and flow.ndim == 2:  # an outer product
        product: Tensor = flow.norm(dim=1).double() * given.norm(dim=1).double()
        return product[: len(rows)]
    own = weight.detach().clone().requires_grad_()
    lengths = []
    for row in rows:
        output = functional_call(part, {"weight": own}, (given[row : row + 1],))
        (gradient,) = torch.autograd.grad(output, own, flow[row : row + 1])
        lengths.append(gradient.norm().double())
    return torch.stack(lengths)


def d_snr(sizes: Tensor) -> float:
    """Return max ‖g‖ / (Σ ‖g‖ − max ‖g‖) of (2, m) lengths, the smaller, at most 10⁹ (Garov et al. 2024)."""
    most = sizes.amax(dim=1)
    rest = sizes.sum(dim=1) - most
    return float((most / torch.maximum(rest, 1e-9 * most)).min())


def uneven(sizes: Tensor) -> float:
    """Return 1 − (Σ ‖g‖)² / (m·Σ ‖g‖²) of (m,) lengths: 0 where all add alike, 1 − k/m where only k do, and alike."""
    probed = sizes[1]
    return float(1 - probed.sum() ** 2 / (len(probed) * probed.square().sum()))
