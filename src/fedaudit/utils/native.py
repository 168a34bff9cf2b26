"""The native code: built once by ``fedaudit doctor --build``, for this source and kind of processor; never at run time.

It lies in the user's cache, not in the package: a wheel, which may be installed on another processor than it was built
on, stays one of Python alone. What was built from another source or for another processor isn't found, so not loaded.
It uses nothing of torch's, so a new torch leaves it valid.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import torch

from fedaudit.utils.folders import temporary_folder

BUILD = "fedaudit doctor --build"
_SOURCE = Path(__file__).with_name("winograd.cpp")
_OPTIONS = ["-std=c++17", "-O3", "-ffp-contract=fast", "-shared", "-fPIC"]
_VECTORS = {"AVX512": ["-mavx512f", "-mfma"], "AVX2": ["-mavx2", "-mfma"]}


class Unavailable(Exception):
    """There is no native code for this source and processor, or it can't be built."""


def _options() -> list[str]:
    return [*_OPTIONS, *_VECTORS.get(torch.backends.cpu.get_cpu_capability(), [])]


def path() -> Path:
    """Return where the native code for this source and kind of processor lies, or would."""
    kind = [sys.platform, platform.machine(), *_options(), _SOURCE.read_text()]
    key = hashlib.sha256("\0".join(kind).encode()).hexdigest()[:32]
    try:
        cached = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        raise Unavailable(str(error)) from error
    return cached / "fedaudit" / f"winograd-{key}.so"


@cache
def kernels() -> ctypes.CDLL:
    """Return the native code; Unavailable says what to do where it wasn't built, or can't be loaded."""
    library = path()
    if not library.is_file():
        others = any(library.parent.glob("winograd-*.so"))
        why = "what was built is for another version or processor" if others else "not built"
        raise Unavailable(f"{why}: {BUILD}")
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise Unavailable(f"{' '.join(str(error).split())}; delete {library}, then {BUILD}") from error


def build() -> Path:
    """Compile the native code, if it isn't there, and return where it lies; Unavailable where that can't be."""
    library = path()
    if library.is_file():
        return library
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
    if compiler is None:
        raise Unavailable("no C++ compiler; install one, or name it in the environment's CXX")
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(library.parent) as scratch:
            made = scratch / library.name
            command = [compiler, *_options(), str(_SOURCE), "-o", str(made)]
            subprocess.run(command, check=True, capture_output=True, text=True)
            made.replace(library)  # whole or not at all: other processes may be looking for it
    except subprocess.CalledProcessError as error:
        raise Unavailable(next(iter(error.stderr.splitlines()), f"{compiler} failed")) from error
    except OSError as error:
        raise Unavailable(str(error)) from error
    kernels.cache_clear()
    return library


def native_code() -> str:
    """Return which native code is used here, for the record: it decides the bits. ``none`` where there is none."""
    try:
        kernels()
        digest = hashlib.sha256(path().read_bytes()).hexdigest()
    except (Unavailable, OSError):
        return "none"
    return f"winograd {torch.backends.cpu.get_cpu_capability()} {digest[:12]}"
