"""Models of the library transformers, with peft's adapters or without: called with one tensor, they return logits."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

FEW_BITS = (
    "the model's frozen weights have 4 or 8 bits (bitsandbytes), and such a model can't be copied to train again: load "
    "it in bfloat16 or float32 for the audit (no quantization_config); what travels is the same"
)
_PLACE = -2  # among a module's hooks: before those that pack


def is_of_transformers(module: nn.Module | None) -> bool:
    """Whether a module is a model of transformers, of peft around one, or of a user's own around one."""
    return next(_configured(module), None) is not None


def _configured(module: nn.Module | None) -> Iterator[nn.Module]:
    """Yield the parts of a module, itself first, that have a configuration of a model type."""
    for part in module.modules() if module is not None else ():
        if isinstance(getattr(getattr(part, "config", None), "model_type", None), str):
            yield part


def embedded_words(module: nn.Module | None) -> int | None:
    """Return how many tokens such a model embeds; None where it isn't known."""
    find = getattr(next(_configured(module), None), "get_input_embeddings", None)
    part = find() if callable(find) else None
    return part.num_embeddings if isinstance(part, nn.Embedding) else None


def padding_of(module: nn.Module | None) -> int | None:
    """Return the token that fills up, as such a model's configuration says; None: there is none."""
    return next(iter(_told(module, "pad_token_id")), None)


def end_of(module: nn.Module | None, tokens: Tensor, padding: int | None = None) -> int | None:
    """Return the token that ends every sequence, as its configuration says and tokens (n, length) show; None: none.

    Of several that may end one it is that which ends all of these. ``padding``: by default the configuration's.
    """
    padding = padding_of(module) if padding is None else padding
    real = (tokens >= 0) & (True if padding is None else tokens != padding)
    last = tokens.gather(1, (real * torch.arange(tokens.shape[1])).amax(dim=1, keepdim=True))
    ends = [end for end in _told(module, "eos_token_id") if end != padding and bool((last == end).all())]
    return next(iter(ends), None)


def _told(module: nn.Module | None, name: str) -> list[int]:
    """Return the tokens of that name in a model's configuration, one or several, that it embeds."""
    config = getattr(next(_configured(module), None), "config", None)
    told, words = getattr(config, name, None), embedded_words(module) or 0
    tokens = told if isinstance(told, list | tuple) else [told]
    return [token for token in tokens if isinstance(token, int) and 0 <= token < words]


def of_few_bits(module: nn.Module | None) -> bool:
    """Whether a model has weights of 4 or 8 bits of bitsandbytes, which can be neither copied nor loaded again."""
    kinds = {kind.__name__ for p in (module.parameters() if module is not None else ()) for kind in type(p).__mro__}
    return not kinds.isdisjoint(("Params4bit", "Int8Params"))


def arguments_of(module: nn.Module) -> list[str]:
    """Return the names of what a module's ``forward`` takes by position; none where they aren't known."""
    try:
        kinds = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return []
    return [one.name for one in kinds if one.kind is one.POSITIONAL_OR_KEYWORD]


def logits_of(output: Any) -> Tensor | None:
    """Return the logits in such a model's output, (n, classes), or of each token (n, outputs, length); None: none."""
    if not any(kind.__name__ == "ModelOutput" for kind in type(output).__mro__):
        return None
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        return None
    return logits.transpose(1, 2) if logits.ndim == 3 else logits


@dataclass(frozen=True)
class _HidesPadding:
    """Before a pass of tokens alone: nobody sees what fills up."""

    padding: int | None

    def __call__(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.padding is None or len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
            return None
        return args, {"attention_mask": (args[0] != self.padding).long()}


@dataclass(frozen=True)
class _GivesLogits:
    """After a pass: the logits alone."""

    def __call__(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        logits = logits_of(output)
        return output if logits is None else logits


def of_one_input(module: nn.Module) -> None:
    """Let a copy of a transformers model take one input, such as tokens (n, length), and return logits alone, in place.

    Other models, and what an own module around one returns besides that output, stay as they are; so do the state's
    names.
    """
    inner = next(_configured(module), None)
    if inner is None:
        return
    config: Any = inner.config
    config.use_cache = False  # keys and values that only generating text needs
    if inner is module or "attention_mask" in arguments_of(module):
        module._forward_pre_hooks[_PLACE] = _HidesPadding(padding_of(module))
        module._forward_pre_hooks_with_kwargs[_PLACE] = True
    module._forward_hooks[_PLACE] = _GivesLogits()


def adapters_names(module: nn.Module, names: Collection[str]) -> dict[str, str]:
    """Return the names in a state by those under which peft's ``get_peft_model_state_dict`` lets them travel.

    It leaves out the adapter's name and, of layers that are trained whole, where they are kept.

    Args:
        module: any; of another than peft's there are none.
        names: in its state.
    """
    adapter = getattr(module, "active_adapter", None)
    if not isinstance(adapter, str) or not hasattr(module, "peft_config"):
        return {}
    found = {}
    for name in names:
        sent = name.replace(f".modules_to_save.{adapter}.", ".").replace(f".{adapter}.", ".")
        if sent not in names:
            found[sent] = name
    return found
