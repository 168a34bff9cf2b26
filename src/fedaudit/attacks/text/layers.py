"""What a transformer's layers receive, found by running it, and the spans that their gradients tell."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_ROUNDED = 1e-6  # of the greatest singular value: what lies below may be rounding to float32
_LEAST_GAP = 3.0  # between the last singular value that counts and the first that is rounding or noise
_ROUNDING = 1e-5  # of the candidates' own vectors, which are computed in float32
_DRIFT = 3e-3  # by which a token's vector moves over several local steps
_CHUNK = 512  # sequences in one pass


@dataclass(frozen=True)
class Receiver:
    """Fully connected layers that receive the same input: an attention's query, key and value, or one alone.

    Attributes:
        name: of the first of them.
        transposed: those of them that are (inputs, outputs), as in GPT-2's own layers.
    """

    name: str
    width: int
    weights: tuple[str, ...]
    transposed: frozenset[str]
    attention: bool


@dataclass(frozen=True)
class Span:
    """The space of a layer's inputs, as far as its weights' gradient shows it.

    A gradient is a sum of outer products of what comes back from the outputs and the input, over all tokens of all
    sequences, so its rows lie in the span of the inputs (Petrov et al. 2024, on Geiping et al.'s linear layer). The
    rank is the number of singular values above rounding; where noise, or several steps, leave none at rounding, it is
    where they fall most steeply. (Always there would be wrong: examples that the model is sure of have small gradients,
    and the values fall in several steps, or smoothly.)

    Noise (rounding, at least) turns each direction of the span by about its size over the direction's singular value: a
    vector that is inside is found at a distance of at most the root of the sum of these, weighted by how much of the
    vector lies in each direction. True vectors are at a quarter to a half of it, where nothing but rounding disturbs.

    Attributes:
        turned: (rank,) by how much noise turns each direction.
        least: distance that counts as none, at least.
    """

    basis: Tensor
    turned: Tensor
    least: float

    @property
    def width(self) -> int:
        """How many numbers the inputs have."""
        return int(self.basis.shape[0])

    @property
    def rank(self) -> int:
        """Dimensions of the span."""
        return int(self.basis.shape[1])

    @property
    def full(self) -> bool:
        """Whether it tells nothing: LayerNorm leaves inputs width − 1 dimensions, and it has as many."""
        return self.rank >= self.width - 1

    def distances(self, inputs: Tensor) -> Tensor:
        """Return (...,) how far (..., width) inputs, scaled to length 1, are from the span; noise explains up to 1."""
        unit = _unit(inputs)
        parts = unit @ self.basis
        off = (unit - parts @ self.basis.T).norm(dim=-1)
        apart = torch.as_tensor(off / (parts * self.turned).norm(dim=-1).clamp(min=self.least))
        return apart.where((inputs != 0).any(dim=-1), torch.inf)  # no direction: a padding token's embedding

    def outside(self, inputs: Tensor) -> Tensor:
        """Return (..., width) what of inputs (..., width), brought to length 1, lies outside the span."""
        unit = _unit(inputs)
        return unit - (unit @ self.basis) @ self.basis.T


def _unit(inputs: Tensor) -> Tensor:
    wide = inputs.to(torch.float64)
    return torch.as_tensor(wide / wide.norm(dim=-1, keepdim=True).clamp(min=1e-30))


def span_of(
    gradient: Mapping[str, Tensor], receiver: Receiver, tokens: int, steps: int = 1, rank: int | None = None
) -> Span | None:
    """Return the span of a receiver's inputs; None where the singular values show no end of it.

    That is so, too, where the weights have hardly more rows than the span has dimensions: those of adapters are few.
    Each weight's gradient is brought to norm 1 first, because rounding is in proportion to it.

    Args:
        tokens: that the gradient was made of, at most: the rank isn't higher.
        steps: of local training, over which the inputs moved.
        rank: of the span, if another layer's has shown it: singular values needn't show its end then.
    """
    parts = []
    for name in receiver.weights:
        part = gradient[name].to(torch.float64)
        part = part.T if name in receiver.transposed else part
        size = float(part.norm())
        if size > 0:
            parts.append(part / size)
    if not parts:
        return None
    whole = torch.cat(parts)
    _, values, rows = torch.linalg.svd(whole, full_matrices=False)
    last = min(tokens, len(values) - 1)
    if rank is None and steps == 1 and float(values[last]) <= _ROUNDED * float(values[0]):
        rank = _ending(values, last, square=len(whole) <= len(values))
    elif rank is None:
        ratios = values[:last] / values[1 : last + 1].clamp(min=1e-300)
        rank = int(ratios.argmax()) + 1
        if float(ratios[rank - 1]) < _LEAST_GAP:
            return None
    if rank > last or (len(values) < whole.shape[1] and rank >= len(values) - 1):
        return None
    return Span(rows[:rank].T.contiguous(), values[rank] / values[:rank], _ROUNDING if steps == 1 else _DRIFT)


def _ending(values: Tensor, last: int, *, square: bool) -> int:
    """Return at which singular value, of ``last`` at most, the span ends; the others are rounding to float32.

    Rounding's own values are all about as large as the least of them. In a square matrix they fall without end instead,
    so their median says how large they are.
    """
    floor = values[values <= _ROUNDED * values[0]].median() if square else values[last]
    above = int((values[:last] > _LEAST_GAP * floor).sum())
    ratios = values[:above] / values[1 : above + 1].clamp(min=1e-300)
    falls = (ratios >= _LEAST_GAP) & (values[1 : above + 1] <= _ROUNDED * values[0])
    return int(falls.nonzero()[-1]) + 1 if falls.any() else max(above, 1)


class _Reached(Exception):
    """The pass has come as far as it was to."""


def receivers(module: nn.Module, examples: Tensor) -> list[Receiver]:
    """Return the fully connected layers that take a vector a token or patch, in the order in which a pass calls them.

    Those of one input stand together, adapters of low rank (LoRA) with their layers; three, or one of three times its
    width, are an attention's. ``examples``: (n, length) tokens, or (n, …) images, n above 1.
    """
    seen: list[tuple[str, nn.Module, Any, Any]] = []
    with ExitStack() as stack, torch.no_grad():
        for name, part in module.named_modules():
            if isinstance(part, nn.MultiheadAttention) or _matrix(part) is not None:
                stack.callback(part.register_forward_hook(_noting(seen, name), with_kwargs=True).remove)
        module(examples)
    given_on = {
        id(given) for _, _, given, _ in seen
    }  # as it is: a layer whose output is one of these is half of an adapter
    groups: list[tuple[Any, list[tuple[str, nn.Module, bool]]]] = []
    ahead = examples.shape if examples.ndim == 2 else examples.shape[:1]
    for name, part, given, output in seen:
        if not isinstance(given, Tensor) or given.shape[: len(ahead)] != ahead or given.ndim != 3:
            continue
        same = next((members for other, members in groups if other is given), None)
        if same is None:
            groups.append((given, [(name, part, id(output) in given_on)]))
        else:
            same.append((name, part, id(output) in given_on))
    return [_receiver(given.shape[2], members) for given, members in groups]


def _noting(seen: list[tuple[str, nn.Module, Any, Any]], name: str) -> Callable[..., None]:
    def hook(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        seen.append((name, part, args[0] if args else next(iter(kwargs.values()), None), output))

    return hook


def _matrix(part: nn.Module) -> Tensor | None:
    """Return the weight of a layer that multiplies by a matrix; None for any other, and for what wraps one."""
    weight = part._parameters.get("weight")
    if isinstance(part, nn.Embedding) or weight is None or weight.ndim != 2:
        return None
    return weight


def _receiver(width: int, members: Sequence[tuple[str, nn.Module, bool]]) -> Receiver:
    """Return the receiver of layers: of each its name, itself, and whether it is the first half of an adapter."""
    weights, transposed, whole, fused = [], set[str](), 0, False
    for name, part, half in members:
        if isinstance(part, nn.MultiheadAttention):
            weights.append(f"{name}.in_proj_weight")
            fused = True
            continue
        weight = _matrix(part)
        assert weight is not None
        weights.append(f"{name}.weight")
        turned = not isinstance(part, nn.Linear) and weight.shape[0] == width and type(part).__name__ == "Conv1D"
        transposed |= {weights[-1]} if turned else set()
        whole += not half
        fused |= not half and weight.shape[1 if turned else 0] == 3 * width
    attention = whole >= 3 or (fused and whole <= 1)
    return Receiver(members[0][0], width, tuple(weights), frozenset(transposed), attention)


def sees(module: nn.Module, receiver: Receiver, tokens: Tensor, place: int, other: int) -> bool:
    """Return whether a receiver's input at ``place`` depends on ``other``, where alone both sequences differ."""
    assert bool((tokens[0] != tokens[1])[other])
    inputs = inputs_of(module, receiver, tokens)
    return not torch.allclose(inputs[0, place], inputs[1, place], rtol=1e-6, atol=1e-6)


def takes(module: nn.Module, tokens: Tensor) -> bool:
    """Return whether a model takes such tokens (n, length), shorter ones than it was made for, perhaps."""
    try:
        with torch.no_grad():
            module(tokens)
    except (RuntimeError, ValueError, IndexError, TypeError):
        return False
    return True


def inputs_of(module: nn.Module, receiver: Receiver, examples: Tensor, *, differentiable: bool = False) -> Tensor:
    """Return (n, length, width) what a receiver gets, where the pass ends, of tokens (n, length) or images (n, …)."""
    caught: list[Tensor] = []

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caught.append(args[0] if args else next(iter(kwargs.values())))
        raise _Reached

    handle = module.get_submodule(receiver.name).register_forward_pre_hook(hook, with_kwargs=True)
    try:
        with torch.set_grad_enabled(differentiable):
            for part in examples.split(_CHUNK):
                try:
                    module(part)
                except _Reached:
                    continue
    finally:
        handle.remove()
    return torch.cat(caught)
