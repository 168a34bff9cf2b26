"""The fast engine: first-order passes only, with the activation pattern of the first pass held fixed in the second."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from fedaudit.attacks.inversion.engines.activation_pattern import ActivationPattern
from fedaudit.attacks.inversion.objectives import Distance, Objective, flatten, unflatten
from fedaudit.attacks.victim import Victim
from fedaudit.task.training import TrainingConfig
from fedaudit.utils.channels_last import channels_last, is_miscomputed, usual_order
from fedaudit.utils.fingerprint import fingerprint
from fedaudit.utils.native import Unavailable, native_code
from fedaudit.utils.winograd import register, substitute

_ATEN = torch.ops.aten
# Up to here torch itself prefers its own convolution to oneDNN's for one image and one thread, if the kernel is 3×3.
_SMALL_INPUT = 20_480

Pass = Callable[..., Any]
LocalPass = Callable[..., tuple[list[Tensor], Tensor, list[Any]]]
# What was traced of the victims met last, each form with the notes on it. Updates of one round, for example, share it
# under every attack: to trace takes as long as some hundred iterations of a small network.
_TRACED: OrderedDict[str, dict[Any, tuple[Pass, list[str]]]] = OrderedDict()
_MOST_VICTIMS = 4
_OF_A_MODULE = ("training", "_parameters", "_buffers", "_modules")


def eager(victim: Victim, arrange: Callable[[Tensor], Tensor] = usual_order) -> LocalPass:
    """Return a first-order pass of a local step, forward and backward once, as torch's autograd runs it.

    It is a function of parameters, images and labels. It records the activation pattern, or holds ``pattern`` fixed,
    and returns the gradients on the parameters (none without ``weights``), the one on the images, and the recorded
    pattern. ``arrange``: memory order of what the model sees; not every module takes any but the usual one.
    """

    def run(
        parameters: Sequence[Tensor],
        images: Tensor,
        labels: Tensor,
        pattern: list[Any] | None = None,
        *,
        weights: bool = True,
    ) -> tuple[list[Tensor], Tensor, list[Any]]:
        leaves = [arrange(p.detach()).requires_grad_(weights) for p in parameters]
        images = arrange(images.detach()).requires_grad_()
        with torch.enable_grad(), ActivationPattern(pattern) as activations:
            value = victim.value(dict(zip(victim.parameters, leaves, strict=True)), images, labels)
        wanted = [*leaves, images] if weights else [images]
        *own, image_gradient = torch.autograd.grad(value, wanted, materialize_grads=True)
        return own, image_gradient, activations.recorded

    return run


def traced(victim: Victim, notes: list[str], *, compiled: bool = False) -> LocalPass:
    """Return :func:`eager`'s pass as a plain list of tensor operations: no autograd, no Python of the model's.

    The first call traces it, once for every batch size and each of its forms (torch.fx): on the CPU channels last where
    the model takes it; on a GPU, whose float32 convolutions are slower so, in the usual order. A model that can't be
    traced runs as it is, with a note. Victims whose parameters differ in values alone share a trace. If ``compiled``,
    torch.compile fuses the operations, which needs a C++ compiler and, the first time, up to minutes.
    """
    orders = [eager(victim)] if on_gpu(victim) else [eager(victim, channels_last), eager(victim)]
    graphs = _traced_of(victim)
    used: dict[Any, Pass] = {}

    def run(
        parameters: Sequence[Tensor],
        images: Tensor,
        labels: Tensor,
        pattern: list[Any] | None = None,
        *,
        weights: bool = True,
    ) -> Any:
        images = usual_order(images)  # what is traced is for these strides, which views inside rely on
        arguments = (parameters, images, labels) if pattern is None else (parameters, images, labels, pattern)
        form = images.shape, images.dtype, labels.shape, labels.dtype, pattern is None, weights, compiled
        if form not in used:
            if form not in graphs:
                said: list[str] = []
                functions: list[Pass] = [partial(order, weights=weights) for order in orders]
                graphs[form] = _first_that_works(functions, arguments, said, compiled), said
            used[form], said = graphs[form]
            for text in said:
                _note(notes, text)
        return used[form](*arguments)

    return run


def on_gpu(victim: Victim) -> bool:
    """Return whether the model is on a GPU."""
    return next(iter(victim.parameters.values())).is_cuda


def is_recurrent(victim: Victim) -> bool:
    """Return whether the model has one of torch's recurrent layers."""
    return any(isinstance(part, nn.RNNBase) for part in victim.module.modules())


def _traced_of(victim: Victim) -> dict[Any, tuple[Pass, list[str]]]:
    """Return what was traced of victims whose passes are the same function of parameters, images and labels."""
    key = _function_of(victim)
    graphs = _TRACED.setdefault(key, {})
    _TRACED.move_to_end(key)
    while len(_TRACED) > _MOST_VICTIMS:
        _TRACED.popitem(last=False)
    return graphs


def _function_of(victim: Victim) -> str:
    """Return the fingerprint of all that a pass is made of but the values of its arguments."""
    modules = [
        (
            name,
            module.training,
            type(module),
            {key: value for key, value in vars(module).items() if key not in _OF_A_MODULE},
            [(key, p is None) for key, p in module._parameters.items()],
            list(module._buffers.items()),
        )
        for name, module in victim.module.named_modules(remove_duplicate=False)
    ]
    inputs = [(name, tuple(p.shape), p.dtype, p.device) for name, p in victim.parameters.items()]
    surroundings = native_code(), torch.get_num_threads(), torch.get_default_dtype()
    return fingerprint(modules, victim.loss, inputs, list(victim.constants.items()), surroundings)


def _first_that_works(
    functions: list[Callable[..., Any]], arguments: tuple[Any, ...], notes: list[str], compiled: bool
) -> Callable[..., Any]:
    attempts = [(function, True) for function in functions if compiled] + [(function, False) for function in functions]
    reasons: dict[bool, str] = {}
    for function, fused in attempts:
        try:
            graph = _graph(function, arguments, notes, compiled=fused)
            graph(*arguments)
        except Exception as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            reasons[fused] = f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"
        else:
            break
    else:
        graph = functions[-1]
        _note(notes, f"engine: the model is run as written, which is slower: not traced ({reasons[False]})")
    if compiled and not fused:
        _note(notes, f"engine: not compiled, which is slower ({reasons[True]})")
    return graph


def _graph(
    function: Callable[..., Any], arguments: tuple[Any, ...], notes: list[str], *, compiled: bool
) -> Callable[..., Any]:
    leaves, inputs = tree_flatten(arguments)
    outputs: list[Any] = []

    def flat(*leaves: Tensor) -> list[Any]:
        results, form = tree_flatten(function(*tree_unflatten(leaves, inputs)))
        outputs[:] = [form]
        return results

    # on fake tensors: the real first pass would need autograd's memory beside that of the trace
    module = _without_detaching(make_fx(flat, tracing_mode="fake", _allow_non_fake_inputs=True)(*leaves))
    _refuse_wrong_gradients(module)
    small = _is_small(module)
    if compiled:
        register()
    try:
        substitute(module)
    except Unavailable as error:
        _note(notes, f"engine: torch's own convolutions, which are slower (Winograd's, native code: {error})")
    run: Callable[..., Any] = module
    if compiled:
        from torch._inductor import compile as compile_graph  # a second of imports

        with torch.no_grad():
            run = compile_graph(module, leaves, options={"compile_threads": 1})

    def graph(*arguments: Any) -> Any:
        with torch.no_grad(), _own_convolutions() if small else nullcontext():
            return tree_unflatten(run(*tree_leaves(arguments)), outputs[0])

    return graph


def _note(notes: list[str], text: str) -> None:
    if text not in notes:
        notes.append(text)


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


def _refuse_wrong_gradients(module: GraphModule) -> None:
    for node in module.graph.nodes:
        if node.target is _ATEN.convolution.default:
            images, filters, _, stride, *_ = node.args
            usual = images.meta["val"].is_contiguous()
            if not usual and is_miscomputed(filters.meta["val"].shape, stride):
                raise ValueError(f"{node.name} of this shape can't run channels last")


def _is_small(module: GraphModule) -> bool:
    """Whether the overhead of oneDNN's convolutions exceeds their gain: one small image at a time."""
    nodes = [n for n in module.graph.nodes if n.target is _ATEN.convolution.default]
    inputs = [node.args[0].meta["val"] for node in nodes]
    return all(len(i) == 1 and i.numel() <= _SMALL_INPUT and i.device.type == "cpu" for i in inputs)


# Length of the finite difference relative to the parameters' norm: long enough for float32, short enough for curves.
_RELATIVE_STEP = 1e-4


def first_order(
    victim: Victim,
    labels: Tensor,
    training: TrainingConfig,
    distance: Distance,
    run_pass: LocalPass,
) -> Objective:
    """Return an engine of the same meaning as :func:`reference.reference` without any second-order graph.

    Our own method, see docs/evidence/performance.md.

    The wanted image gradient is ∂⟨∇_W L, λ⟩/∂x for a direction λ on the parameters (λ = ∂Dist/∂g for one batch; for
    several local steps the adjoint of the SGD recursion). It is taken as (∇_x L(W + ελ) − ∇_x L(W))/ε with the
    activation pattern of the first pass held fixed in the second; the same pair of passes gives the Hessian-vector
    product that carries λ back to the step before. Memory: one gradient and one activation pattern per local step;
    where a step began is worked out backwards from where it ended.
    """
    shapes = [p.shape for p in victim.parameters.values()]
    batches = list(training.batch_sizes)
    pull = training.weight_decay + training.proximal_mu

    origin = flatten([p.detach() for p in victim.parameters.values()])
    length = _RELATIVE_STEP * origin.norm()
    elsewhere = torch.empty_like(origin)  # where passes are taken: one memory for all, as new pages are dear
    origin_views, elsewhere_views = unflatten(origin, shapes), unflatten(elsewhere, shapes)
    rate = training.learning_rate
    # a single step's gradient isn't needed any more when the second pass needs the memory
    gradient_memory = elsewhere if len(batches) == 1 else None

    def step(images: Tensor) -> tuple[Tensor, Tensor]:
        cut = list(zip(images.split(batches), labels.split(batches), strict=True))
        # what the forward sweep leaves of each local step: gradient, velocity (without momentum, decay and pull it *is*
        # the gradient), gradient on the images, activation pattern
        done: list[tuple[Tensor, Tensor, Tensor, list[Any]]] = []
        pseudo_gradient = velocity = None
        for x, y in cut:
            if pseudo_gradient is not None:
                torch.sub(origin, pseudo_gradient, out=elsewhere)
            own, image_gradient, pattern = run_pass(origin_views if pseudo_gradient is None else elsewhere_views, x, y)
            gradient = flatten(own, out=gradient_memory)
            del own
            total = gradient
            if training.proximal_mu and pseudo_gradient is not None:
                total = torch.sub(total, pseudo_gradient, alpha=training.proximal_mu)
            if training.weight_decay:
                total = torch.add(total, origin if pseudo_gradient is None else elsewhere, alpha=training.weight_decay)
            if velocity is not None and training.momentum:
                total = torch.add(total, velocity, alpha=training.momentum)
            velocity = total
            done.append((gradient, velocity, image_gradient, pattern))
            if pseudo_gradient is not None:
                pseudo_gradient.add_(velocity, alpha=rate)
            else:
                pseudo_gradient = velocity if rate == 1 and len(cut) == 1 else rate * velocity
        assert pseudo_gradient is not None
        del total, gradient, velocity  # what lingers here is as large as the model
        value, pseudo_gradient_grad = distance.derivative(pseudo_gradient)
        if rate != 1:
            pseudo_gradient_grad.mul_(rate)  # times the rate it stays, back to the first step

        results: list[Tensor] = []
        on_velocity = None
        while done:
            gradient, velocity, first_image_gradient, pattern = done.pop()
            x, y = cut[len(done)]
            direction = pseudo_gradient_grad
            if on_velocity is not None and training.momentum:
                direction = torch.add(pseudo_gradient_grad, on_velocity, alpha=training.momentum)
            on_velocity = direction
            scale = length / direction.norm().clamp_min(1e-30)
            if not done:
                torch.addcmul(origin, direction, scale, out=elsewhere)
                del pseudo_gradient, pseudo_gradient_grad, on_velocity, direction, gradient, velocity
                _, image_gradient, _ = run_pass(elsewhere_views, x, y, pattern, weights=False)
            else:
                torch.sub(origin, pseudo_gradient.sub_(velocity, alpha=rate), out=elsewhere)
                elsewhere.addcmul_(direction, scale)
                own, image_gradient, _ = run_pass(elsewhere_views, x, y, pattern)
                change = gradient  # where that was: what it is less after the step along the direction
                torch._foreach_sub_(unflatten(change, shapes), own)
                del own
                change.div_(scale)
                if pull:
                    change.sub_(direction, alpha=pull)
                pseudo_gradient_grad = torch.add(pseudo_gradient_grad, change, alpha=rate, out=change)
            results.append((image_gradient - first_image_gradient) / scale)
        return value, torch.cat(results[::-1]).contiguous()

    return step
