"""Watches an evaluation that wasn't written for it: examples that the model was tested on, and their targets."""

from __future__ import annotations

from typing import Any, Self

from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.overrides import TorchFunctionMode

from fedaudit.capture.passes import alike
from fedaudit.models import unwrapped
from fedaudit.task.losses import SIGNATURES


class Evaluation(TorchFunctionMode):
    """Keeps what a model is given inside its with-block, and the targets of the loss that is taken of its outputs.

    Nothing of the evaluation is changed. Where no loss of torch's is taken of the outputs themselves, nothing is kept.

    Args:
        module: that is evaluated, or a copy of it.
        most: examples that are kept, the first ones.

    Attributes:
        inputs, targets: on the CPU, one tensor a pass.
    """

    def __init__(self, module: nn.Module, most: int) -> None:
        super().__init__()
        self.inputs: list[Tensor] = []
        self.targets: list[Tensor] = []
        self._module, self._left = module, most
        self._passed: tuple[Tensor, Tensor] | None = None  # what the model was last given, and what it returned
        self._hook: Any = None

    def __enter__(self) -> Self:
        self._hook = module_hooks.register_module_forward_hook(self._after)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hook.remove()
        self._passed = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in SIGNATURES and self._passed is not None:
            given = dict(zip(SIGNATURES[func], args, strict=False)) | (kwargs or {})
            self._keep(given.get("input"), given.get("target"))
        return result

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        own = unwrapped(module)
        if self._left > 0 and type(own) is type(self._module) and alike(own, self._module):
            single = len(args) == 1 and isinstance(args[0], Tensor) and isinstance(output, Tensor)
            self._passed = (args[0], output) if single else None

    def _keep(self, outputs: Any, targets: Any) -> None:
        assert self._passed is not None
        inputs, known = self._passed
        if outputs is known and isinstance(targets, Tensor) and len(targets) == len(inputs):
            self.inputs.append(inputs.detach()[: self._left].to("cpu", copy=True))
            self.targets.append(targets.detach()[: self._left].to("cpu", copy=True))
            self._left -= len(self.inputs[-1])
        self._passed = None
