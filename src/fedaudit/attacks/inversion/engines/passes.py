"""The two first-order passes of a local step: one that records its kinks, one that goes the same ways elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from fedaudit.attacks.inversion.engines.activation_pattern import Kept, Recording, Replaying
from fedaudit.attacks.inversion.engines.native import Unavailable
from fedaudit.attacks.inversion.engines.winograd import register, substitute
from fedaudit.attacks.victim import Victim

_ATEN = torch.ops.aten
# Up to here torch itself prefers its own convolution to oneDNN's for one image and one thread, if the kernel is 3×3.
_SMALL_INPUT = 20_480


class First(Protocol):
    """The pass that finds the gradients and keeps the ways of the kinks."""

    def __call__(
        self, parameters: Sequence[Tensor], images: Tensor, labels: Tensor
    ) -> tuple[list[Tensor], Tensor, list[Kept]]:
        """Return the gradients on the parameters, the one on the images, and the ways."""
        ...


class Again(Protocol):
    """The pass at other parameters, the kinks held."""

    def __call__(
        self, parameters: Sequence[Tensor], images: Tensor, labels: Tensor, kept: list[Kept]
    ) -> tuple[list[Tensor], Tensor]:
        """Return the gradients on the parameters (none where they aren't wanted) and the one on the images."""
        ...


@dataclass(frozen=True)
class Passes:
    """What the frozen engine is made of.

    Attributes:
        first: the recording pass.
        again: the replaying one, for the gradient on the images.
        again_with_weights: the same, for the gradients on the parameters, too.
    """

    first: First
    again: Again
    again_with_weights: Again


def channels_last(tensor: Tensor) -> Tensor:
    """Return ``tensor`` in the memory order in which convolutions are fastest."""
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor.contiguous()


def eager(victim: Victim, arrange: Callable[[Tensor], Tensor] = Tensor.contiguous) -> Passes:
    """Return the passes as torch's autograd runs them.

    Args:
        victim: the model.
        arrange: memory order of what the model sees; not every module takes any but the usual one.
    """

    def gradients(
        parameters: Sequence[Tensor], images: Tensor, labels: Tensor, mode: Recording | Replaying, *, weights: bool
    ) -> tuple[list[Tensor], Tensor]:
        leaves = [arrange(p.detach()).requires_grad_(weights) for p in parameters]
        images = arrange(images.detach()).requires_grad_()
        with torch.enable_grad(), mode:
            value = victim.value(dict(zip(victim.parameters, leaves, strict=True)), images, labels)
        wanted = [*leaves, images] if weights else [images]
        *own, image_gradient = torch.autograd.grad(value, wanted, materialize_grads=True)
        return own, image_gradient

    def first(parameters: Sequence[Tensor], images: Tensor, labels: Tensor) -> tuple[list[Tensor], Tensor, list[Kept]]:
        mode = Recording()
        own, image_gradient = gradients(parameters, images, labels, mode, weights=True)
        return own, image_gradient, mode.kept

    def again(
        parameters: Sequence[Tensor], images: Tensor, labels: Tensor, kept: list[Kept], *, weights: bool
    ) -> tuple[list[Tensor], Tensor]:
        return gradients(parameters, images, labels, Replaying(kept), weights=weights)

    return Passes(first, partial(again, weights=False), partial(again, weights=True))


@dataclass
class Traced:
    """The passes as plain lists of tensor operations: no autograd, no Python of the model's, channels last.

    Each pass is traced once for every batch size (torch.fx), in the memory order that the model takes; a model that
    can't be traced runs as it is, with a note.

    Attributes:
        victim: the model.
        compiled: fuse the operations by torch.compile: needs a C++ compiler and, the first time, up to minutes; torch
            keeps the result on disk.
        notes: what the user should know; filled while running.
    """

    victim: Victim
    compiled: bool = False
    notes: list[str] = field(default_factory=list)

    def passes(self) -> Passes:
        """Return the passes; each is traced when it is first called."""
        ways = [eager(self.victim, channels_last), eager(self.victim)]
        return Passes(*(self._traced([getattr(way, part.name) for way in ways]) for part in fields(Passes)))

    def _traced(self, ways: list[Callable[..., Any]]) -> Callable[..., Any]:
        graphs: dict[torch.Size, Callable[..., Any]] = {}

        def run(parameters: Sequence[Tensor], images: Tensor, *others: Any) -> Any:
            if images.shape not in graphs:
                graphs[images.shape] = self._first_that_works(ways, (parameters, images, *others))
            return graphs[images.shape](parameters, images, *others)

        return run

    def _first_that_works(self, ways: list[Callable[..., Any]], arguments: tuple[Any, ...]) -> Callable[..., Any]:
        attempts = [(way, True) for way in ways if self.compiled] + [(way, False) for way in ways]
        reasons: dict[bool, str] = {}
        for way, compiled in attempts:
            try:
                graph = self._graph(way, arguments, compiled=compiled)
                graph(*arguments)
            except Exception as error:
                lines = [line for line in str(error).splitlines() if line.strip()]
                reasons[compiled] = f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"
            else:
                break
        else:
            graph = ways[-1]
            self._note(f"engine: the model is run as written, which is slower: not traced ({reasons[False]})")
        if self.compiled and not compiled:
            self._note(f"engine: not compiled, which is slower ({reasons[True]})")
        return graph

    def _graph(self, function: Callable[..., Any], arguments: tuple[Any, ...], *, compiled: bool) -> Callable[..., Any]:
        leaves, inputs = tree_flatten(arguments)
        outputs: list[Any] = []

        def flat(*leaves: Tensor) -> list[Any]:
            results, form = tree_flatten(function(*tree_unflatten(leaves, inputs)))
            outputs[:] = [form]
            return results

        # on fake tensors: the real first pass would need autograd's memory beside that of the trace
        module = _without_detaching(make_fx(flat, tracing_mode="fake", _allow_non_fake_inputs=True)(*leaves))
        small = _is_small(module)
        if compiled:
            register()
        try:
            substitute(module)
        except Unavailable as error:
            self._note(f"engine: torch's own convolutions, which are slower (Winograd's, native code: {error})")
        run: Callable[..., Any] = module
        if compiled:
            from torch._inductor import compile as compile_graph  # a second of imports

            with torch.no_grad():
                run = compile_graph(module, leaves, options={"compile_threads": 1})

        def graph(*arguments: Any) -> Any:
            with torch.no_grad(), _own_convolutions() if small else nullcontext():
                return tree_unflatten(run(*tree_leaves(arguments)), outputs[0])

        return graph

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


@contextmanager
def _own_convolutions() -> Iterator[None]:
    """Let torch take its own convolutions instead of oneDNN's."""
    mkldnn: Any = torch.backends.mkldnn
    before, mkldnn.enabled = mkldnn.enabled, False
    try:
        yield
    finally:
        mkldnn.enabled = before


def _without_detaching(module: GraphModule) -> GraphModule:
    """Drop what matters to autograd only: it would cost a call each."""
    for node in list(module.graph.nodes):
        if node.op == "call_function" and node.target in (_ATEN.detach.default, _ATEN.alias.default):
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
    module.recompile()
    return module


def _is_small(module: GraphModule) -> bool:
    """Whether the overhead of oneDNN's convolutions exceeds their gain: one small image at a time."""
    nodes = [n for n in module.graph.nodes if n.target is _ATEN.convolution.default]
    inputs = [node.args[0].meta["val"] for node in nodes]
    return all(len(i) == 1 and i.numel() <= _SMALL_INPUT and i.device.type == "cpu" for i in inputs)
