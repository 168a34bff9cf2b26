"""Watches a local training that wasn't written for it, through torch's hooks: what went in, and how it was trained."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from fedaudit.capture import estimators, step_hooks
from fedaudit.capture.gradients import IN_PLACE, NORMS, Edits, GradientWatch, clipping
from fedaudit.capture.language import TransformersCall, read_by_value, transformers_call
from fedaudit.capture.optimisers import (
    Settings,
    configured,
    has_closure,
    has_state,
    joined,
    rates,
    read_settings,
    step_by_hand,
)
from fedaudit.capture.passes import (
    SEVERAL,
    ForwardPass,
    Step,
    Watched,
    alike,
    chained,
    modes,
    precision,
    reaches_leaf,
    same_elements,
    state_of,
    still,
    tag,
    tagged,
    tensors,
    versions,
    weights_precision,
    whole_of,
)
from fedaudit.capture.private import goes_on, poisson_rate, private_step
from fedaudit.capture.unhooked import Listener, forget, listen, listen_to_trainer
from fedaudit.modalities import Packing
from fedaudit.models import adapters_names, logits_of, unwrapped
from fedaudit.models.own import InOrder
from fedaudit.task.losses import KNOWN, SIGNATURES, LossCall, LossOptions, read_loss, recognise
from fedaudit.task.targets import observed_task
from fedaudit.task.training import BCE, UNMODELLED, UNREPEATABLE, Pass, TrainingConfig
from fedaudit.transcript.reading import by_own_names
from fedaudit.transcript.update import PrivateSteps
from fedaudit.utils.errors import BadInput
from fedaudit.utils.plain_tensors import plain_copy

_LOSS = "loss"  # marks what a loss that was seen returned
_BY_HAND = 0  # in place of an optimiser's id
_HEAD = "-head"  # after the key that marks outputs: which of several
_EMPTY = "every batch that was drawn was empty: there is no example in this update"
_WAITING = 100  # forward passes without a backward pass that are kept; evaluation with gradients on makes many
_WAITING_BESIDE = 4  # likewise of a module beside the one that is trained, a teacher say

# What belongs to one training, of several that follow each other.
_OF_ONE = (
    *("module", "notes", "_own", "_start", "_moving", "_end", "_reloads", "_settings", "_optimiser", "_frozen"),
    *("_recorded", "_unmodelled", "_kept_state"),
)


# not in torch's documentation; where it isn't there, nothing is paused
current_mode: Callable[[], Any] = getattr(torch.overrides, "_get_current_function_mode", lambda: None)
_MOVED = "weights were changed between passes by something else than a step of the optimiser (SAM, L-BFGS)"
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def _quiet(method: Callable[..., None]) -> Callable[..., None]:
    """Keep errors of ours out of the training: each is a note."""

    @functools.wraps(method)
    def quietly(self: Capture, *args: Any) -> None:
        if torch.compiler.is_compiling() or threading.get_ident() != self._thread:
            return
        try:
            method(self, *args)
        except Exception as error:
            self._misunderstood(error)

    return quietly


def _copied(value: Any) -> Any:
    """Return nested lists, tuples and mappings with copies of their tensors on the CPU, and all else as it is."""
    if isinstance(value, Tensor):
        return plain_copy(value)
    if isinstance(value, list | tuple):
        return tuple(_copied(part) for part in value)
    return {key: _copied(part) for key, part in value.items()} if isinstance(value, Mapping) else value


def _common(packings: list[Packing | None]) -> Packing | None:
    """Return the one packing of all passes; None where they differ, or there is none."""
    return packings[0] if packings and all(packing == packings[0] for packing in packings) else None


def _by_own_names(sent: Mapping[str, Tensor], watched: Watched) -> dict[str, Tensor]:
    return by_own_names(sent, watched.start, adapters_names(watched.module, watched.start))


def _apart(one: Mapping[str, Any], sent: Mapping[str, Tensor], difference: bool | None) -> float:
    """Return how far a training (``_OF_ONE``) ended from what was sent, in one tensor; infinity: it changed none."""
    name, end = one["_end"]
    if not any(id(p) in one["_moving"] for n, p in one["_own"].parameters.items() if n in sent):
        return math.inf
    if name not in sent or sent[name].shape != end.shape or difference is None:
        return 0.0
    reached = end.cpu() - one["_start"][name] if difference else end.cpu()
    return float((sent[name] - reached).norm())


class _Functions(TorchFunctionMode):
    """Tells a capture of calls of the functions that it asks for; every call goes on unchanged.

    Every call of torch takes some microseconds more meanwhile, so it is paused where none is asked for: within the
    model's forward pass and the optimiser's step.
    """

    def __init__(self, told: dict[Any, Callable[..., None]]) -> None:
        super().__init__()
        self._told = told
        self._paused = False

    def pause(self) -> None:
        """Tell of nothing, until :meth:`resume`, unless another mode was entered meanwhile."""
        if not self._paused and current_mode() is self:
            self.__exit__(None, None, None)
            self._paused = True

    def resume(self) -> None:
        """Tell again."""
        if self._paused:
            self._paused = False
            self.__enter__()

    def stop(self) -> None:
        """Tell of nothing from now on, and forget whom."""
        if not self._paused:
            self.__exit__(None, None, None)
        self._told = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        told = self._told.get(func)
        if told is None or torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        if func is torch.Tensor.backward:  # its graph is gone afterwards
            told(func, args, kwargs or {}, None)
            return func(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        told(func, args, kwargs or {}, result)
        return result


class Capture:
    """Watches what trains inside its with-block, and changes nothing of it.

    >>> with Capture() as seen:  # doctest: +SKIP
    ...     train(model, batches)
    >>> seen.training()  # doctest: +SKIP

    It sees what happens in the thread that entered the block. What it reads is there during the block, too, and after
    an exception, which goes on as it would without. An error of its own becomes a note. Where several trainings follow
    each other (a personal model beside the shared one; the head, then the body), it tells of the first until
    :meth:`choose` says which is meant.

    Args:
        module: whose training, or that of a copy of it, to watch; None: the first module with parameters that is called
            with gradients on and that an optimiser then steps.
        known: tensors by name that nobody changes; where the state begins with one, it isn't copied.

    Attributes:
        module: that was watched; the inner one of ``DataParallel`` and ``torch.compile``. None: none was seen.
        start: its state before the first pass, on the CPU.
        steps: that an optimiser took with a gradient of the module.
        seconds: wall time of the block so far.
        label_smoothing, class_weights: of the cross-entropy.
        notes: what else a reader should know, in words.
        elsewhere: names of the module's parameters that other trainings changed, before or after the chosen one.
        how: what is noted where a change of the weights is no step along a gradient, and its key of ``UNMODELLED``.
    """

    def __init__(self, module: nn.Module | None = None, known: Mapping[str, Tensor] | None = None) -> None:
        self._begin_training()
        self._now: dict[str, Any] = {}  # keeps _OF_ONE of the training under way when another begins
        self._trainings = [self._now]
        self.elsewhere: frozenset[str] = frozenset()
        self._known = known or {}
        self._only = None if module is None else unwrapped(module)
        self._watched: list[Watched] = []
        self._calls: list[tuple[int, ForwardPass | None]] = []  # modules that are being called, the outermost first
        self._running_module: nn.Module | None = None  # the watched one, while it is called
        self._depth = 0  # of its calls of itself
        self._inside = False  # one of its parts was called
        self._read: dict[nn.Module, LossOptions | None] = {}  # losses of the user's own of masks: which they are
        self._criterion: nn.Module | None = None  # the outermost module that is called on the model's output
        self._in_step = False
        self._thread = self._home = 0  # whose calls are seen; 0: nobody's for now
        self._began = self._seconds = 0.0
        self._running = False
        told: dict[Any, Callable[..., None]] = dict.fromkeys(IN_PLACE, self._edited)
        told |= dict.fromkeys(NORMS, self._normed)
        told |= dict.fromkeys(SIGNATURES, self._lost)
        told |= {_SET_DATA: self._edited, torch.autograd.grad: self._derived, torch.Tensor.backward: self._backward}
        self._mode = _Functions(told | {torch.rand: self._drawn})
        self._in_closure = False  # of an optimiser that makes the passes itself
        self._handles: list[Any] = []
        self._listener: Listener | None = None
        self._steps: step_hooks.Listener | None = None
        self._fits: list[estimators.Fit] = []  # of scikit-learn
        self._estimators: estimators.Listener | None = None
        self.how = "weights are changed by hand, and not by a rate times the gradient", "optimiser"
        self._key = f"fedaudit-{id(self)}"
        self._terms = False
        self._rate: float | None = None  # of Poisson sampling

    def _begin_training(self) -> None:
        """Know of no training yet."""
        self.module: nn.Module | None = None
        self.notes: list[str] = []
        self._own: Watched | None = None
        self._start: dict[str, Tensor] = {}
        self._moving: set[int] = set()  # parameters that had a gradient at a step, by id
        self._end: tuple[str, Tensor] | None = None  # the smallest of them, as the last step left it
        self._reloads = 0  # how often weights had been loaded into its module
        self._settings: dict[int, Settings] = {}  # of each optimiser, by its id
        self._optimiser: Optimizer | None = None  # the first, kept so that no other gets its id
        self._frozen: list[bool] = []
        self._recorded: list[Step] = []
        self._unmodelled: set[str] = set()
        self._kept_state = False  # whether the optimiser had momentum or moments before its step

    def _turn_to(self, one: dict[str, Any] | None) -> None:
        """Put the training under way aside, and go on with another; None: with a new one."""
        self._now |= {name: getattr(self, name) for name in _OF_ONE}
        if one is None:
            self._begin_training()
            self._trainings.append(one := {})
        vars(self).update(one)
        self._now = one

    def __enter__(self) -> Self:
        if self._running or self._began:
            raise BadInput("a Capture watches one training; make another for the next")
        self._thread, self._began, self._running = threading.get_ident(), time.perf_counter(), True
        self._home = self._thread
        self._handles = [
            module_hooks.register_module_forward_pre_hook(self._enters),
            module_hooks.register_module_forward_hook(self._leaves, with_kwargs=True, always_call=True),
        ]
        self._steps = step_hooks.Listener(self._stepping, self._stepped)
        step_hooks.listen(self._steps)
        self._listener = Listener(self._enters, self._leaves, self._smoothed)
        listen(self._listener)
        self._estimators = estimators.Listener(self._rests, self._fitted)
        estimators.listen(self._estimators)
        self._mode.__enter__()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._estimators is not None:
            estimators.forget(self._estimators)
        self._echo()
        self._mode.stop()
        if self._listener is not None:
            forget(self._listener)
        if self._steps is not None:
            step_hooks.forget(self._steps)
        for handle in self._handles:
            handle.remove()
        # no circle of references may keep a model's weights until a collection
        self._handles = []
        self._listener = self._steps = self._estimators = None
        for watched in self._watched:
            self._changed_by_hand(watched)
            watched.passes = []
        self._turn_to(self._trainings[0])
        self._running_module = None
        for one in self._trainings:
            one["_optimiser"] = None
        self._optimiser = None
        self._running, self._seconds = False, time.perf_counter() - self._began

    @property
    def start(self) -> dict[str, Tensor]:
        """The module's state before the first pass."""
        return self._start if self._own else self._watched[0].start if self._watched else {}

    @property
    def trained(self) -> set[str]:
        """Names of the module's parameters that had a gradient at a step, of other trainings, too."""
        own = self._own.parameters.items() if self._own else ()
        return {name for name, p in own if id(p) in self._moving} | self.elsewhere

    @property
    def steps(self) -> int:
        """Steps that were taken."""
        return len(self._recorded)

    @property
    def seconds(self) -> float:
        """Wall time of the block, so far."""
        return time.perf_counter() - self._began if self._running else self._seconds

    @property
    def inputs(self) -> list[Tensor]:
        """What the model was given, one tensor a pass, in the order of use; empty where it isn't known."""
        found = [p.inputs for p in self._passes()]
        return [] if any(i is None for i in found) else [i for i in found if i is not None]

    @property
    def packed_inputs(self) -> Packing | None:
        """What stands where in the inputs of a model of several; None: it takes one, or not always the same."""
        return _common([p.packing for p in self._passes()])

    @property
    def heads(self) -> Packing | None:
        """The same of the outputs of a model of several; None: it returns one, or not always the same."""
        return _common([p.heads for p in self._passes()])

    @property
    def packed_targets(self) -> Packing | None:
        """The same of the targets of several outputs; None: there is one output, or they weren't all seen."""
        return _common([self._packed_targets(p)[0] for p in self._passes()])

    @property
    def filling(self) -> int | None:
        """The token that fills texts up, by their masks, where the model's configuration tells none; None: not one."""
        found = {p.filling for p in self._passes()} - {None}
        return found.pop() if len(found) == 1 else None

    @property
    def varies(self) -> bool:
        """Whether the parts of several inputs, outputs or targets differ from pass to pass."""
        return len({(p.packing, p.heads, self._packed_targets(p)[0]) for p in self._passes()}) > 1

    def _packed_targets(self, one: ForwardPass) -> tuple[Packing | None, Tensor | None]:
        if one.heads is None or (given := one.head_targets) is None:
            return None, None
        try:
            packing = Packing.of(given, "the loss's target", whole=True)
            return packing, packing.pack(given, "the loss's targets").cpu()
        except BadInput as error:
            self._note(str(error))
            return None, None

    @property
    def targets(self) -> list[Tensor]:
        """What the loss was given, one tensor a pass, packed where the outputs are several; empty where not known."""
        found = [p.targets if p.heads is None else self._packed_targets(p)[1] for p in self._passes()]
        return [] if any(t is None for t in found) else [t for t in found if t is not None]

    @property
    def randomness(self) -> list[Tensor]:
        """The state of torch's CPU generator before each pass, where model or Opacus drew from it; else empty."""
        passes = [p for step in self._recorded for p in step.passes if p.examples or step.empty]
        noisy = any(step.private and step.private.made.noise for step in self._recorded)
        return [p.random_state for p in passes] if noisy or any(p.drew for p in passes) else []

    @property
    def loss(self) -> str | None:
        """The loss's registered name; ``custom``: it is none of them; None: none was seen."""
        names = {"custom" if p.mismatch or p.loss is None else p.loss.name for p in self._passes()}
        return None if not names else names.pop() if len(names) == 1 else "custom"

    @property
    def outputs(self) -> int:
        """Of the model, one a class, of each example or pixel; 0: none was seen."""
        return next((p.shape[1] for p in self._passes() if len(p.shape) > 1), 0)

    @property
    def maps(self) -> bool:
        """Whether the outputs have more axes than classes or numbers."""
        return any(len(p.shape) > 2 for p in self._passes())

    @property
    def criterion(self) -> nn.Module | None:
        """The module of the user's own that computed the loss of every pass, of outputs and targets; None: none did."""
        found = {id(p.criterion): None if p.mismatch else p.criterion for p in self._passes()}
        return next(iter(found.values())) if len(found) == 1 else None

    @property
    def label_smoothing(self) -> float:
        """Of the cross-entropy."""
        return next((p.loss.label_smoothing for p in self._passes() if p.loss), 0.0)

    @property
    def class_weights(self) -> tuple[float, ...] | None:
        """Of the cross-entropy; of the binary one over labels what each weighs where it is 1."""
        return next((p.loss.class_weights for p in self._passes() if p.loss), None)

    @property
    def batch_norm(self) -> Literal["eval", "train"] | None:
        """In which mode BatchNorm was; None: the model has none, or no pass was seen."""
        mode = next((p.modes.get("batch_norm") for p in self._passes()), None)
        return None if mode is None else "train" if mode else "eval"

    @property
    def dropout(self) -> bool:
        """Whether the rest of the model was in training mode."""
        return next((p.modes["rest"] for p in self._passes()), True)

    def training(self) -> TrainingConfig:
        """Return how the module was trained.

        Raises:
            BadInput: no step was seen.
        """
        own, settings = self._own, joined(self._settings.values())
        if own is None or settings is None or not self._recorded:
            raise BadInput(UNMODELLED["nothing-seen"])
        steps, positions = [s for s in self._recorded if not s.empty], list(own.parameters)
        if not steps:
            raise BadInput(_EMPTY)
        frozen = {name for name, held in zip(positions, self._frozen, strict=True) if held}
        config, whole = configured(settings, [s.rates for s in steps], own.parameters, frozen)
        still = {name for g in config["groups"] if g.learning_rate == 0 for name in g.parameters}
        trained = frozenset(i for i, name in enumerate(positions) if name not in still)
        norm, value, factors, changed = clipping([Edits() if s.private else s.edits for s in steps], trained)
        unmodelled = set(self._unmodelled)
        made = {s.private for s in self._recorded}
        if len(made) > 1:
            unmodelled.add("gradients-changed" if None in made else "optimiser-settings")
        changed |= any(one is not None and one.how == "other" for one in made)
        unmodelled |= {"optimiser"} if settings.kind == "other" else set()
        if any(len(s.rates) != len(settings.groups) for s in self._recorded):  # not all optimisers step each time
            unmodelled.add("optimiser")
        unmodelled |= set() if whole else {"optimiser-settings"}
        unmodelled |= {"gradients-changed"} if changed else set()
        passes, precisions = [], {p.precision for s in steps for p in s.passes}
        for step, factor in zip(steps, factors, strict=True):
            factor = factor if step.scale is None else factor / float(step.scale)
            used = [p for p in step.passes if p.examples or step.private is None]
            weighed = [(p.examples, p.weight(factor)) for p in used]
            if step.private is not None:  # an example counts by itself, wherever it stands
                drawn = sum(n for n, _ in weighed)
                weighed = [(n, w and w / drawn * (1 if step.private.summed else n)) for n, w in weighed]
            if any(w is None for _, w in weighed):
                unmodelled.add("loss")
            passes.append(tuple(Pass(n, 1.0 if w is None else w) for n, w in weighed))
        for p in self._passes():
            unmodelled |= {"several-losses"} if p.losses > 1 else set()
            unmodelled |= {"loss"} if p.mismatch or p.loss is None else set()
        options = {(p.loss.name, p.loss.label_smoothing, p.loss.class_weights) for p in self._passes() if p.loss}
        unmodelled |= {"loss"} if len(options) > 1 else set()
        plain = all(len(step) == 1 and step[0].weight == 1 for step in passes)
        sizes = tuple(sum(p.examples for p in step) for step in passes)
        return TrainingConfig(
            **config,
            local_steps=len(steps),
            batch_sizes=sizes,
            passes=() if plain else tuple(passes),
            clip_norm=norm,
            clip_value=value,
            precision=precisions.pop() if len(precisions) == 1 else "float32",
            weights=weights_precision(own.parameters) or "float32",
            unmodelled=tuple(name for name in UNMODELLED if name in unmodelled),
        )

    @property
    def private(self) -> PrivateSteps | None:
        """How Opacus made every step private; None: it didn't, or not all."""
        made = [step.private.made for step in self._recorded if step.private is not None]
        if not made or len(made) < len(self._recorded):
            return None
        empty = [
            (sum(not before.empty for before in self._recorded[:i]), step.rates[0])
            for i, step in enumerate(self._recorded)
            if step.empty
        ]
        noise = min(one.noise for one in made)
        return dataclasses.replace(made[0], noise=noise, steps=len(made), rate=self._rate, empty=tuple(empty))

    def choose(self, sent: Mapping[str, Tensor], *, difference: bool | None = False) -> None:
        """Tell of the training whose work is ``sent``, where several were seen.

        It changed some of these tensors, and of such trainings left the one that comes nearest.

        Args:
            sent: tensors by name.
            difference: whether they are changes of weights; None: they are gradients.
        """
        if len(self._trainings) == 1:
            return
        self._turn_to(self._now)
        seen = [(one, _by_own_names(sent, one["_own"])) for one in self._trainings if one["_end"] is not None]
        chosen, own = min(seen, key=lambda each: _apart(each[0], each[1], difference), default=(self._now, {}))
        self._turn_to(chosen)
        moved = {i for one, _ in seen for i in one["_moving"]} - self._moving
        if self._own is None:
            return
        self.elsewhere = frozenset(name for name, p in self._own.parameters.items() if id(p) in moved)
        line = [one for one, _ in seen if one["_own"] is self._own and one["_reloads"] == self._reloads]
        others = [one["_own"] for one, _ in seen if one["_own"] is not self._own or one["_reloads"] != self._reloads]
        if any(alike(other.module, self._own.module) for other in others):
            self._note("clients train another such model beside it, which isn't sent")
        if len(line) > 1 and self.elsewhere & own.keys():
            self._start = line[0]["_start"]
            self._note("several optimisers train the model, one after another", "optimiser")

    def _passes(self) -> Iterator[ForwardPass]:
        return (p for step in self._recorded for p in step.passes if p.examples)

    def _note(self, text: str, unmodelled: str | None = None) -> None:
        if text not in self.notes:
            self.notes.append(text)
        if unmodelled is not None:
            self._unmodelled.add(unmodelled)

    def _misunderstood(self, error: Exception) -> None:
        why = f"{type(error).__name__}: {error}"
        self._note(f"something of the training wasn't understood, so that it {UNREPEATABLE}: {why}")

    # Models of scikit-learn and Keras.

    def _rests(self, begins: bool) -> None:
        """See nothing of what torch does inside their calls."""
        if threading.get_ident() == self._home:
            self._thread = 0 if begins else self._home

    @_quiet
    def _fitted(self, fit: estimators.Fit) -> None:
        self._fits.append(fit)

    @_quiet
    def _echo(self) -> None:
        """Watch with torch what was trained without it, where nothing was trained with it."""
        fits, self._fits = self._fits, []
        if fits and self._own is None and all(watched.taken is None for watched in self._watched):
            self._watched, self.module = [], None
            self.how = fits[-1].how, "optimiser"
            if getattr(estimators.echo(fits), "by_answers", False):
                self.how = self.how[0], "no-gradient"

    # Forward passes.

    def _enters(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            return
        if self._running_module is None:
            self._before(module, args)
        else:  # of what it calls nothing more is asked, and there may be hundreds
            self._depth += module is self._running_module
            if not self._inside:
                self._inside = True
                self._within()

    def _leaves(self, module: nn.Module, *more: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if module is self._running_module and self._depth:
            self._depth -= 1
        elif self._running_module is None or module is self._running_module:
            self._after(module, *more)

    @_quiet
    def _within(self) -> None:
        """Keep the precision in which the model's first part runs: its forward may switch autocast on (accelerate)."""
        seen = self._calls[-1][1]
        if seen is not None and seen.part is not None:
            seen.precision = precision(next(seen.part.parameters()).device.type)

    @_quiet
    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._calls.append((id(module), None))
        outer = len(self._calls) - 1
        self._criterion = self._criterion if outer else None  # after an error in one
        if outer and self._only is None:
            return
        self._in_step = False  # after an error in a step
        self._mode.resume()
        own = unwrapped(module)
        if self._wanted(own, outer) and (watched := self._watch(own)) is not None:
            self._running_module, self._inside = module, False
            self._mode.pause()
            if torch.is_grad_enabled():
                self._calls[outer] = (id(module), self._begin(watched, module, args))
        elif len(args) == 2 and torch.is_grad_enabled() and (outputs := next(tensors(args[0]), None)) is not None:
            seen = tagged(outputs, self._key)[0]  # by a loss of somebody's own
            if isinstance(seen, ForwardPass) and (seen.heads is None) == isinstance(args[0], Tensor):
                self._criterion = self._criterion or module
                if seen.heads is not None:
                    seen.target = _copied(args[1])
                elif isinstance(args[1], Tensor):
                    seen.target = plain_copy(args[1])

    def _wanted(self, module: nn.Module, outer: int) -> bool:
        """Whether a module is watched: any, the given one or its copy, or a part of it that is called by itself."""
        only = self._only
        return only is None or alike(module, only) or (not outer and any(part is module for part in only.modules()))

    @_quiet
    def _after(self, module: nn.Module, args: tuple[Any, ...], *more: Any) -> None:
        while self._calls and self._calls[-1][0] != id(module):  # what ended without telling
            self._calls.pop()
        if not self._calls:
            return
        seen = self._calls.pop()[1]
        if module is self._running_module:
            self._running_module = None
            self._mode.resume()
        if seen is not None:
            self._made(seen, more[-1], more[0] if len(more) > 1 else {})
        elif module is self._criterion:
            self._criterion = None
            self._judged(module, args[0], more[-1])

    def _made(self, seen: ForwardPass, output: Any, kwargs: dict[str, Any]) -> None:
        """A watched module has returned."""
        watched = next(w for w in self._watched if seen in w.passes)
        seen.drew = not torch.equal(seen.random_state, torch.get_rng_state())
        outputs = next((t for t in tensors(output) if t.requires_grad), None)
        if outputs is None:  # it failed, or there is nothing to train on
            watched.passes.remove(seen)
            return
        if (call := transformers_call(watched.module, seen.args, kwargs, output)) is not None:
            self._made_of_transformers(watched, seen, call)
            return
        self._given(seen, kwargs)
        if not isinstance(output, Tensor):
            try:
                seen.heads = Packing.of(output, "the model's output")
            except BadInput:
                seen.mismatch = seen.mismatch or f"the model returns {type(output).__name__}, not tensors (n, …)"
        seen.shape = tuple(outputs.shape)
        made = [outputs] if seen.heads is None else list(seen.heads.in_order(output))
        for i, one in enumerate(made):
            if one.requires_grad:
                tag(one, self._key, seen)
                tag(one, self._key + _HEAD, i)
                one.register_hook(functools.partial(self._reached, watched, seen))

    def _made_of_transformers(self, watched: Watched, seen: ForwardPass, call: TransformersCall) -> None:
        """A model of transformers has returned logits and, where it was given labels, its loss."""
        seen.args, seen.inputs, seen.shape, seen.mismatch = (), call.inputs, call.shape, call.refused
        seen.filling = call.filling
        tag(call.logits, self._key, seen)
        call.logits.register_hook(functools.partial(self._reached, watched, seen))
        if call.loss is not None and call.read is not None and call.loss.requires_grad:
            call.loss.register_hook(functools.partial(self._reached, watched, seen))  # accelerate returns other logits
            self._takes_part(seen, call.read, call.loss)
        elif call.loss is None:
            seen.items = call.items
            listen_to_trainer()

    @_quiet
    def _smoothed(self, epsilon: float, output: Any, labels: Tensor, loss: Tensor) -> None:
        """The Trainer of transformers has smoothed labels."""
        logits = logits_of(output)
        seen = None if logits is None else tagged(logits, self._key)[0]
        if logits is not None and isinstance(seen, ForwardPass) and loss.requires_grad:
            read = read_by_value(logits.detach(), labels, loss.detach(), seen.items, epsilon)
            self._takes_part(seen, read, loss)

    def _takes_part(self, seen: ForwardPass, read: LossCall, loss: Tensor) -> None:
        """Keep what a loss is that wasn't computed by a call of torch's, once a backward pass goes through it."""
        within = [1]

        def reached(gradient: Tensor) -> None:
            seen.losses += within.pop() if within else 0
            seen.loss, seen.mismatch = read, seen.mismatch or read.mismatch
            seen.weights.append(gradient.detach().clone())

        tag(loss, self._key, _LOSS)
        loss.register_hook(reached)

    def _watch(self, module: nn.Module) -> Watched | None:
        """Return the watched module that this is, or begin to watch it where it may be trained."""
        if (known := next((w for w in self._watched if w.module is module), None)) is not None:
            return known
        if self._own is not None and isinstance(self._own.module, InOrder):
            names = [name for name, _ in self._own.module.order]
            return self._own if any(self._own.module.get_submodule(name) is module for name in names) else None
        if not torch.is_grad_enabled():
            return None
        parameters = dict(module.named_parameters())
        if not any(p.requires_grad for p in parameters.values()):
            return None
        start, gradients = state_of(module, self._known), GradientWatch([*parameters.values()])
        watched = Watched(module, start, parameters, versions(parameters), gradients)
        self._watched.append(watched)
        if self.module is None:
            self.module = module
        return watched

    def _begin(self, watched: Watched, called: nn.Module, args: tuple[Any, ...]) -> ForwardPass:
        self._changed_by_hand(watched)
        if watched.versions != (now := versions(watched.parameters)):
            trained = [self._own, *(one.get("_own") for one in self._trainings)]
            if watched in trained and _BY_HAND not in self._settings:
                if _MOVED not in self.notes and not watched.loaded:  # what it was, the next step tells
                    watched.loaded = state_of(watched.module, self._known)
            elif watched is self._own or any(p.backward for p in watched.passes):  # its training has begun
                self._note(_MOVED, "optimiser")
            else:  # they were loaded after a first look at the model
                watched.start = state_of(watched.module, self._known)
            watched.versions = now
        if isinstance(called, nn.parallel.DistributedDataParallel):
            self._note("gradients are averaged over processes, of which one was watched", "several-losses")
        one = next(iter(watched.parameters.values()))
        seen = ForwardPass(None, torch.get_rng_state(), precision(one.device.type), modes(watched))
        if one.device.type != "cpu" and seen.modes.get("masks"):
            self._note(f"dropout draws on the {one.device.type} device, which can't be repeated")
        if weights_precision(watched.parameters) is None:
            self._note("the model's weights are of several precisions")
        seen.part, seen.args = unwrapped(called), _copied(args)
        if len(args) == 1 and isinstance(args[0], Tensor):
            before, seen.way = tagged(args[0], self._key)
            seen.after = before if isinstance(before, ForwardPass) else None
        waiting = [p for p in watched.passes if not p.backward]
        if len(waiting) >= (_WAITING if self._own in (None, watched) else _WAITING_BESIDE):
            watched.passes.remove(waiting[0])
        watched.passes.append(seen)
        return seen

    def _given(self, seen: ForwardPass, kwargs: dict[str, Any]) -> None:
        """Keep what the module was called with; by name that is known once it has returned."""
        args, seen.args = seen.args, ()
        given = [*tensors(args), *tensors(kwargs)]
        if len(given) == 1:
            seen.inputs = given[0] if args else _copied(given[0])
        elif given:
            try:
                seen.packing, seen.inputs = Packing.of_call(args, kwargs, "the model's input")
            except BadInput as error:
                seen.mismatch, seen.refused = SEVERAL, str(error)
                seen.inputs = _copied(given[0])

    # Losses and gradients.

    @_quiet
    def _lost(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        outputs = args[0] if args else kwargs.get("input")
        if not isinstance(outputs, Tensor) or not isinstance(result, Tensor) or not result.requires_grad:
            return
        seen, way = tagged(outputs, self._key)
        if not isinstance(seen, ForwardPass):
            return
        if function not in KNOWN and self._criterion is not None:
            return  # the module around it, nn.BCELoss() for one, is kept as a loss of the user's own
        if seen.heads is not None:
            self._lost_on_head(seen, outputs, dict(zip(SIGNATURES[function], args, strict=False)) | kwargs, result)
            return
        call = read_loss(function, args, kwargs)
        if function is nn.functional.nll_loss:
            way = [name for name in way if name != "LogSoftmax"]
        whole = outputs.numel() == math.prod(seen.shape)
        mismatch = "" if same_elements(way, whole=whole) else "the loss is of something else than the model's output"
        masks = len(seen.shape) > 2 and seen.shape[1] == 1  # one logit a pixel
        if call.name == BCE and not masks and seen.shape not in ((seen.shape[0], 1), call.targets.shape):
            mismatch = mismatch or "the model doesn't return one column of logits, or one for each label"
        if call.name == BCE and len(seen.shape) > 2 and not masks:
            mismatch = "the loss is of several labels a pixel; give the model one logit a pixel, or an output a class"
        if call.name == "mse" and not mismatch and call.targets.numel() == math.prod(seen.shape):
            call = dataclasses.replace(call, targets=call.targets.view(seen.shape))  # as the outputs, before a squeeze
        if precision(outputs.device.type) != seen.precision:
            self._note("the loss is computed outside of autocast, and repeated inside of it")

        within = self._criterion

        def takes_part(gradient: Tensor) -> None:
            if within is not None and within is seen.criterion:
                return  # it is a part of that loss
            seen.losses += seen.loss is not call
            seen.loss, seen.mismatch = call, seen.mismatch or mismatch or call.mismatch
            seen.weights.append(gradient.detach().clone())

        tag(result, self._key, _LOSS)
        result.register_hook(takes_part)

    def _judged(self, criterion: nn.Module, outputs: Any, result: Any) -> None:
        """A module was called on the model's output and targets: keep it where torch's losses aren't all of it."""
        if not isinstance(result, Tensor) or not result.requires_grad or result.numel() != 1:
            return
        if not reaches_leaf(result, self._key, _LOSS, self._parameter_ids()):
            return
        seen, way = tagged(next(tensors(outputs)), self._key)
        whole = isinstance(outputs, Tensor) and outputs.numel() == math.prod(seen.shape)
        mismatch = "" if same_elements(way, whole=whole) else "the loss is of something else than the model's output"
        call = None if mismatch or seen.heads or seen.inputs is None else self._of_masks(criterion, seen)
        if precision(result.device.type) != seen.precision:
            self._note("the loss is computed outside of autocast, and repeated inside of it")

        counted = [1]

        def takes_part(gradient: Tensor) -> None:
            seen.losses += counted.pop() if counted else 0
            seen.criterion, seen.loss, seen.mismatch = criterion, call, seen.mismatch or mismatch
            seen.weights.append(plain_copy(gradient))

        tag(result, self._key, _LOSS)
        result.register_hook(takes_part)

    def _of_masks(self, criterion: nn.Module, seen: ForwardPass) -> LossCall | None:
        """Return a loss of one's own of masks as the registered one that it is; None: it is none of them."""
        assert seen.inputs is not None
        targets, shape = seen.target, tuple(seen.inputs.shape[1:])
        task = observed_task(targets, shape, "custom", seen.shape[1])
        if task is None or not task.dense or seen.shape[1] < 2:
            return None
        if criterion not in self._read:
            own, axes = copy.deepcopy(criterion).cpu(), len(shape) - 1
            self._read[criterion] = recognise(own, seen.shape[1], None, task.name, axes)
        read, masks = self._read[criterion], targets.long().view(len(targets), *shape[1:])
        if read is None or read.summed or not masks.equal(targets.view(masks.shape)):
            return None
        return LossCall(read.name, masks, read.label_smoothing, read.class_weights)

    def _parameter_ids(self) -> set[int]:
        return {id(p) for w in self._watched for p in w.parameters.values()}

    def _lost_on_head(self, seen: ForwardPass, outputs: Tensor, bound: dict[str, Any], result: Tensor) -> None:
        """Keep what the loss of one of several outputs was given, once it takes part."""
        head, targets = tagged(outputs, self._key + _HEAD)[0], plain_copy(bound["target"])

        def takes_part(_: Tensor) -> None:
            if head in seen.asked and not seen.asked[head].equal(targets):
                self._note("an output of the model has several losses", "several-losses")
            seen.asked[head] = targets

        tag(result, self._key, _LOSS)
        result.register_hook(takes_part)

    @_quiet
    def _backward(self, _: Any, args: tuple[Any, ...], *__: Any) -> None:
        for watched in self._watched:
            watched.gradients.fresh()
        self._terms = self._terms or reaches_leaf(args[0], self._key, _LOSS, self._parameter_ids())

    @_quiet
    def _edited(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> None:
        if self._in_step:
            return
        touched = {t.data_ptr() for t in tensors(args[:1]) if t.layout == torch.strided}
        for watched in self._watched:
            if function is not _SET_DATA:
                watched.gradients.edit(function, args, kwargs)
            own = [*watched.parameters.values()]
            if any(p.data_ptr() in touched for p in own):
                self._take(watched, [None if p.grad is None else p.grad.detach().clone() for p in own])

    @_quiet
    def _derived(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Gradients were computed that don't lie at the parameters."""
        of, found = list(tensors([kwargs.get("inputs", args[1:2])])), list(result)
        by_id = {id(p): g for p, g in zip(of, found, strict=True) if g is not None}
        for watched in self._watched:
            own = [by_id.get(id(p)) for p in watched.parameters.values()]
            if any(g is not None for g in own):
                self._take(watched, [None if g is None else g.detach().clone() for g in own])

    def _take(self, watched: Watched, gradients: list[Tensor | None]) -> None:
        """Keep the gradients by which weights are changed without an optimiser, unless one trains."""
        by_hand = not self._settings.keys() - {_BY_HAND} and not self._in_closure
        if by_hand and watched.taken is None and any(p.backward for p in watched.passes):
            watched.taken = gradients, watched.gradients.step()

    def _changed_by_hand(self, watched: Watched) -> None:
        """Count a step of SGD that was written out, once its passes are over; another change is noted."""
        taken, watched.taken = watched.taken, None
        passes = [p for p in watched.passes if p.backward]
        if taken is None or not passes or self._own not in (None, watched):
            return
        step = step_by_hand(watched.before or watched.start, watched.parameters, taken[0])
        if step is None:
            return
        settings, rate = step
        if self._own is None:
            self._choose(watched, settings, None, set(settings.groups[0].parameters))
        known = self._settings.get(_BY_HAND)
        if settings.kind == "other" or known is None:
            self._note(*self.how)
            self._settings = {_BY_HAND: dataclasses.replace(known or settings, kind="other")}
        elif settings != known:
            self._note("by hand now these weights are changed and then others", "optimiser-settings")
        watched.before = {name: p.detach().to("cpu", copy=True) for name, p in watched.parameters.items()}
        watched.versions = versions(watched.parameters)
        self._keep(watched, Step((rate,), passes, taken[1], None))

    @_quiet
    def _normed(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2))
        for watched in self._watched:
            watched.gradients.norm(result if order in (2, "fro", None) else None)

    @_quiet
    def _drawn(self, *_: Any) -> None:
        self._rate = self._rate or poisson_rate()

    def _reached(self, watched: Watched, seen: ForwardPass, _: Tensor) -> None:
        """A backward pass has come to the module's output (in whatever thread autograd runs it)."""
        try:
            if not seen.backward:
                if watched.gradients.begin() and not goes_on([*watched.parameters.values()]):
                    watched.passes = [p for p in watched.passes if not p.backward]
                seen.backward = True
        except Exception as error:
            self._misunderstood(error)

    # Steps.

    @_quiet
    def _stepping(self, optimiser: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._own is None:
            self._kept_state = has_state(optimiser, {id(p) for g in optimiser.param_groups for p in g["params"]})
        if has_closure(args, kwargs):
            self._in_closure = True
            return  # its passes are made inside the step
        self._in_step, self._running_module, self._depth = True, None, 0
        self._mode.pause()
        self._count(optimiser)

    @_quiet
    def _stepped(self, optimiser: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if has_closure(args, kwargs):
            self._mode.pause()
            self._count(optimiser)
        for watched in self._watched:
            watched.versions = versions(watched.parameters)
        self._keep_end()
        self._in_step = self._in_closure = False  # nothing is to be told until the next forward pass has ended

    def _count(self, optimiser: Optimizer) -> None:
        held = {id(p) for g in optimiser.param_groups for p in g["params"]}
        self._find_training(optimiser, held)
        for watched in self._watched if self._own is None else [self._own]:
            own = {id(p) for p in watched.parameters.values()} & held
            passes = [p for p in watched.passes if p.backward]
            if own and (passes or watched is self._own):
                break
        else:
            return
        if _BY_HAND in self._settings:  # SAM's first half
            self._note(_MOVED, "optimiser")
            self._own, self._recorded = None, []
        for one in self._watched:
            one.taken = None
        if self._own is None:
            if held - own and (whole := self._whole(held)) is not None:
                watched, own = whole, {id(p) for p in whole.parameters.values()} & held
            self._choose(watched, settings := read_settings(optimiser), optimiser, own)
            if settings.kind == "other":
                self._note(f"clients train by {type(optimiser).__name__}, whose steps can't be repeated here")
            if self._kept_state:
                self._note(UNMODELLED["optimiser-state"], "optimiser-state")
        self._moving |= {id(p) for p in watched.parameters.values() if p.grad is not None} & held
        first = id(optimiser) == next(iter(self._settings))
        if not first and not (self._recorded and not passes and self._beside(optimiser, watched, own)):
            self._note("several optimisers train the model", "optimiser")
        if not passes and first:
            self._note("an optimiser's step came without a backward pass through the model", "gradients-changed")
        if not passes:
            return
        if isinstance(watched.module, InOrder):
            found = chained([p for p in watched.passes if p.backward], watched.module)
            if found is None or found[1] != watched.module.order:
                self._note("parts of the model are called one after another in different ways", "several-losses")
            else:
                passes = found[0]
        edits = watched.gradients.step()
        self._compare(optimiser, watched, held)
        scale = getattr(optimiser, "grad_scale", None)
        private = private_step(optimiser)
        if private is not None and private.how == "ghost":  # the second backward pass has the clipping in its weights
            for seen in passes:
                del seen.weights[1:]
        scale = None if scale is None else scale.detach().clone()
        self._keep(watched, Step(rates(optimiser), passes, edits, scale, private))

    def _find_training(self, optimiser: Optimizer, held: set[int]) -> None:
        """Turn to the training that a step is of: of another module, of other layers, or from weights loaded since."""
        if self._own is None or isinstance(self._own.module, InOrder) or _BY_HAND in self._settings:
            return
        for watched in (self._own, *self._watched):
            stepped = {id(p) for p in watched.parameters.values() if p.grad is not None} & held
            if stepped and any(p.backward for p in watched.passes):
                break
        else:
            return
        loaded, watched.loaded = watched.loaded, {}
        if watched is self._own and stepped & self._moving and not loaded:
            return
        self._turn_to(self._now)
        before = [one for one in self._trainings if one["_own"] is watched]
        known = next((one for one in reversed(before) if one["_moving"] & stepped), None)
        if known is not None and (not loaded or id(optimiser) in known["_settings"]):
            self._turn_to(known)
            if loaded:
                self._note(_MOVED, "optimiser")
            elif any(one["_reloads"] == self._reloads for one in before if one is not known):
                self._note("layers are trained in turn, again and again", "optimiser")
            watched.gradients.turn(i for i, p in enumerate(watched.parameters.values()) if id(p) in self._moving)
            return
        start = loaded or watched.start
        if before and not loaded:  # other layers, after the last ones; what norms remember has moved along
            now, start = state_of(watched.module, self._known), before[-1]["_start"]
            start = {name: now[name] if name in watched.parameters else value for name, value in start.items()}
        self._turn_to(None)
        self._kept_state = not self._in_closure and has_state(optimiser, stepped)
        self._start, self._reloads = start, len(before) if loaded else before[-1]["_reloads"] if before else 0

    def _keep_end(self) -> None:
        """Keep what a step left of the smallest tensor that is trained, by which trainings are told apart."""
        if self._own is not None:
            own = [(p.numel(), name) for name, p in self._own.parameters.items() if id(p) in self._moving]
            if own:
                name = self._end[0] if self._end else min(own)[1]
                self._end = name, self._own.parameters[name].detach().clone()

    def _keep(self, watched: Watched, step: Step) -> None:
        self._recorded.append(step)
        watched.passes, passes = [], step.passes
        if self._terms and all(p.loss is not None or p.criterion is not None for p in passes):
            self._note("the total has terms besides the loss (FedProx, a penalty)", "several-losses")
        self._terms = False
        self._facts(passes)

    def _whole(self, held: set[int]) -> Watched | None:
        """Return the module whose parts were called one after another, as one that calls them; None: it isn't so."""
        parts = [w for w in self._watched if any(p.backward for p in w.passes)]
        whole = whole_of([w.module for w in parts], held) if len(parts) > 1 else None
        passes = [p for w in parts for p in w.passes if p.backward]
        found = None if whole is None else chained(passes, whole)
        if whole is None or found is None:
            return None
        module = InOrder(whole, found[1])
        parameters, start = dict(module.named_parameters()), state_of(module, self._known)
        names = {id(part): f"{name}." for name, part in module.named_modules()}
        for one in parts:
            start |= {names[id(one.module)] + name: value for name, value in one.start.items()}
        gradients = GradientWatch.of_parts([*parameters.values()], [w.gradients for w in parts])
        made = Watched(module, start, parameters, versions(parameters), gradients, passes)
        for seen in passes:
            seen.modes = modes(made)
        return made

    def _choose(self, watched: Watched, settings: Settings, optimiser: Optimizer | None, own: set[int]) -> None:
        self._own, self.module = watched, watched.module
        self._start = self._start or watched.start
        others = [one["_own"] for one in self._trainings if one.get("_own") not in (None, watched)]
        self._watched = [*dict.fromkeys(others), watched]
        self._optimiser, self._settings = optimiser, {_BY_HAND if optimiser is None else id(optimiser): settings}
        self._frozen = still(watched)
        positions = [i for i, p in enumerate(watched.parameters.values()) if id(p) in own and p.requires_grad]
        watched.gradients.turn(positions)

    def _beside(self, optimiser: Optimizer, watched: Watched, own: set[int]) -> bool:
        """Take an optimiser that steps other parameters after the same passes for more groups of the first, if so."""
        settings, held = (
            read_settings(optimiser),
            {i for s in self._settings.values() for g in s.groups for i in g.parameters},
        )
        alike = {settings.kind, *(s.kind for s in self._settings.values())}
        if len(self._recorded) == 1 and id(optimiser) not in self._settings and len(alike) == 1 and not own & held:
            if has_state(optimiser, own):
                self._note(UNMODELLED["optimiser-state"], "optimiser-state")
            self._settings[id(optimiser)] = settings
            watched.gradients.also(i for i, p in enumerate(watched.parameters.values()) if id(p) in own)
        if self._settings.get(id(optimiser)) != settings or watched.gradients.edited:
            return False
        self._recorded[-1].rates += rates(optimiser)
        return True

    def _compare(self, optimiser: Optimizer, watched: Watched, held: set[int]) -> None:
        if self._settings.get(id(optimiser), settings := read_settings(optimiser)) != settings:
            self._note("the optimiser's settings changed between steps", "optimiser-settings")
        if still(watched) != self._frozen:
            self._note("layers were frozen or unfrozen between steps", "optimiser-settings")
        if not self._recorded and held - {id(p) for p in watched.parameters.values()}:
            self._note("the optimiser trains parameters besides those of the watched model", "several-losses")

    def _facts(self, passes: list[ForwardPass]) -> None:
        """Note what a reader should know of the passes of a step."""
        for p in passes:
            if p.inputs is None:
                self._note("the model's input holds no tensor", "several-inputs")
            if p.mismatch == SEVERAL:
                self._note(f"{UNMODELLED['several-inputs']}: {p.refused}", "several-inputs")
            elif p.mismatch:
                self._note(p.mismatch)
            if p.modes.get("mixed"):
                self._note("parts of the model are in training mode, others in evaluation mode")
            first = next(self._passes(), p)
            if p.modes != first.modes:
                self._note("the model's mode changed between passes")
            if p.precision != first.precision:
                self._note("the precision changed between passes")
