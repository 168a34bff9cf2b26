"""One meaning of "the same computation": a hash of everything that a result depends on.

Kept findings, checkpoints, a study's rows and trained generators are used again only where :func:`computation` says
that they would be made alike: by the same code and torch, from the same settings, tensors, functions and files.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
from functools import cache, partial
from pathlib import Path, PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# Packages and modules that present results and don't make them.
_NO_MATTER = ("__main__.py", "api.py", "cli", "report")
# What a class has beside what its author wrote.
_OF_A_PROCESS = ("__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__firstlineno__", "_abc_impl")
# Whose functions and classes are told by their names: a hash of the code, or the version, goes with them.
_BY_NAME = ("torch", "fedaudit", "builtins")
# The same of packages whose modules import what is looked for in them: their versions go with the names.
_BY_VERSION = ("transformers", "peft", "numpy", "jax", "jaxlib", "flax", "keras")
# Ours beside fedaudit, whose things go by their names, too: with a hash of the package's code.
_BY_CODE = ("fedaudit_trees",)
# What a dataclass is given besides, from what its author wrote; pydantic's parts hold addresses.
_MADE = (
    *("__dataclass_fields__", "__dataclass_params__", "__signature__", "__match_args__", "__init__", "__repr__"),
    *("__eq__", "__hash__", "__replace__", "__setattr__", "__delattr__"),
)


def computation(*parts: Any) -> str:
    """Return the fingerprint of ``parts`` as this version of fedaudit and of torch computes with them."""
    return fingerprint(code_version(), torch.__version__, *parts)


def fingerprint(*parts: Any) -> str:
    """Return a hash, 64 hexadecimal digits, of all that is in ``parts``.

    Tensors are told by their elements, shape and dtype, functions by their code and by what it refers to, objects by
    their class and attributes; what is torch's or ours by its name. Whatever else there is counts as another in every
    process, so that nothing outlives a change.
    """
    return _digest(list(parts), {}).hex()


def code_digest() -> str:
    """Return the digest, in hexadecimal, of torch's version and the code that computes, not of what only presents."""
    return computation()


@cache
def code_version(home: Path = Path(__file__).parents[1]) -> str:
    """Return a hash of a package's sources, of this one by default, those left out that only present results."""
    paths = sorted(p.relative_to(home) for kind in ("*.py", "*.cpp") for p in home.rglob(kind))
    return fingerprint([(str(p), (home / p).read_bytes()) for p in paths if p.parts[0] not in _NO_MATTER])


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of the tensor's elements in their order, of any dtype."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def tensor_digest(tensor: Tensor) -> bytes:
    """Return a hash, 32 bytes, of a tensor's elements, shape and dtype; of one on ``meta`` there are no elements."""
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    if not tensor.is_meta:
        digest.update(tensor_bytes(tensor))
    return digest.digest()


def file_digest(path: Path) -> str | None:
    """Return a hash of what is in the file, or in all files of the folder; None where there is neither."""
    if path.is_dir():
        return fingerprint([(str(p.relative_to(path)), file_digest(p)) for p in sorted(path.rglob("*")) if p.is_file()])
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def device_name(device: str) -> str:
    """Return what ``device`` is: the GPU's name for ``cuda``, where there is one here."""
    return torch.cuda.get_device_name() if device == "cuda" and torch.cuda.is_available() else device


def _digest(thing: Any, seen: dict[int, tuple[Any, bytes]]) -> bytes:
    """Return the digest of one thing; ``seen`` holds others with theirs: the id of one that is gone is used again."""
    if isinstance(thing, Tensor):
        return tensor_digest(thing)
    if isinstance(thing, str | bytes | int | float | complex | None | PurePath | torch.dtype | torch.device):
        return hashlib.sha256(f"{type(thing).__name__} {thing!r}".encode(errors="surrogatepass")).digest()
    if id(thing) in seen:
        return seen[id(thing)][1]
    seen[id(thing)] = thing, b"within itself"
    name, parts = _parts(thing)
    digest = hashlib.sha256(f"{len(parts)} {name}".encode())
    for part in parts:
        digest.update(_digest(part, seen))
    seen[id(thing)] = thing, digest.digest()
    return digest.digest()


def _parts(thing: Any) -> tuple[str, list[Any]]:
    """Return what a thing is called, and what it consists of."""
    if isinstance(thing, BuiltinFunctionType):
        return f"builtin {thing.__module__}.{thing.__qualname__}", []
    if isinstance(thing, ModuleType):
        if version := _version(thing.__name__):
            return f"module {thing.__name__} {version}", []
        file = getattr(thing, "__file__", None) or ""
        ours = thing.__name__.partition(".")[0] in _BY_NAME or not file.endswith(".py")
        return f"module {thing.__name__}", [] if ours else [file_digest(Path(file))]
    kind = type(thing)
    named = thing if isinstance(thing, type | FunctionType) else kind
    name = f"{kind.__qualname__} {named.__module__}.{named.__qualname__}"
    parts: list[Any]
    if isinstance(thing, dict):
        items = list(thing.items())
        if all(isinstance(key, str) and isinstance(value, Tensor) for key, value in items):
            items.sort()  # named tensors come from files in another order
        parts = [part for item in items for part in item]
    elif isinstance(thing, list | tuple):
        parts = list(thing)
    elif isinstance(thing, set | frozenset):
        parts = sorted(map(repr, thing))
    elif isinstance(thing, CodeType):
        parts = [thing.co_code, thing.co_names, thing.co_consts]
    elif isinstance(thing, np.ndarray):
        parts = [str(thing.dtype), thing.shape, thing.tobytes()]
    elif isinstance(thing, partial):
        parts = [thing.func, thing.args, thing.keywords]
    elif isinstance(thing, MethodType):
        parts = [thing.__func__, thing.__self__]
    elif str(named.__module__).partition(".")[0] in _BY_NAME and named is thing:
        parts = []
    elif named is thing and (version := _version(str(named.__module__))):
        parts = [version]
    elif isinstance(thing, FunctionType):
        around = [thing.__globals__[name] for name in _names(thing.__code__) if name in thing.__globals__]
        cells = [_content(cell) for cell in thing.__closure__ or ()]
        parts = [thing.__code__, thing.__defaults__, thing.__kwdefaults__, cells, around]
    elif isinstance(thing, type):
        made = _MADE if "__dataclass_fields__" in vars(thing) else ()
        written = {name: value for name, value in vars(thing).items() if name not in (*_OF_A_PROCESS, *made)}
        parts = [thing.__bases__, [value for name, value in written.items() if not name.startswith("__pydantic")]]
    elif isinstance(thing, property):
        parts = [thing.fget, thing.fset]
    elif isinstance(thing, staticmethod | classmethod):
        parts = [thing.__func__]
    elif hasattr(thing, "__dict__"):
        mode = "training" if isinstance(thing, nn.Module) else None  # it is set before use
        held = {**vars(thing), **(getattr(thing, "__pydantic_extra__", None) or {})}
        parts = [kind, {name: value for name, value in held.items() if name != mode}]
    else:
        parts = [repr(thing)]  # where that holds an address, it is another in every process
    return name, parts


@cache
def _version(module: str) -> str:
    """Return the version of the package that a module is of, where such go with its names; else nothing."""
    package = module.partition(".")[0]
    if package in _BY_CODE:
        return code_version(Path(str(importlib.import_module(package).__file__)).parent)
    return importlib.metadata.version(package) if package in _BY_VERSION else ""


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing was assigned yet
        return "nothing"


def _names(code: CodeType) -> list[str]:
    """Return the names that ``code``, and what is defined in it, refers to."""
    inner = [name for part in code.co_consts if isinstance(part, CodeType) for name in _names(part)]
    return [*code.co_names, *inner]
