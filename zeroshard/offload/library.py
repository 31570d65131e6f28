"""Finds or builds the native host optimizer, loads it, and says which SIMD path it takes and why.

A library beside the sources comes first (from `pip install` or `python -m zeroshard.offload.native.build`). If there is
none, the library is built in the user's cache folder, once for each version of the sources; several ranks may build at
the same time. A library in the cache that another user can have written is not loaded, but built again. If the build
fails, torch does the work, and one warning names the reason.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import tempfile
import warnings
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Final

from ..system.machine import cache_folder, is_private, make_private, remember
from .native.build import CXX_VARIABLE, HERE, BuildError, build, library_name

VARIABLE: Final = "ZEROSHARD_KERNEL"
"""Environment variable that forces a path, by a value of `Simd`."""


class Simd(Enum):
    """How the host optimizer computes. All paths except torch's give the same bits."""

    AVX512 = "avx512"
    AVX2 = "avx2"
    PORTABLE = "portable"
    TORCH = "torch"


NUMBERS: Final = {Simd.PORTABLE: 0, Simd.AVX2: 1, Simd.AVX512: 2}
"""``PathNumber`` of native/library.cpp."""


@dataclass(frozen=True)
class Choice:
    """A path, why it was chosen, and what would give a better one."""

    simd: Simd
    reason: str
    remedy: str = ""


def choose(asked: Simd | None = None) -> Choice:
    """The best path on this machine, or the path that the argument or the environment asks for."""
    if asked is None and (name := os.environ.get(VARIABLE)):
        try:
            asked = Simd(name.lower())
        except ValueError:
            names = ", ".join(simd.value for simd in Simd)
            raise ValueError(f"{VARIABLE}={name!r} must be one of {names}") from None
    if asked is Simd.TORCH:
        return Choice(Simd.TORCH, "asked for")
    try:
        library = load()
    except BuildError as error:
        if asked is not None:
            raise ValueError(f"the {asked.value} path was asked for, but there is no native library: {error}") from None
        remedy = f"install a C++17 compiler (or name one in ${CXX_VARIABLE}) and run again"
        return Choice(Simd.TORCH, f"no native library: {error}", remedy)
    there = paths(library)
    if asked is None:
        return Choice(there[0], "the best that this processor has")
    if asked not in there:
        raise ValueError(
            f"the {asked.value} path was asked for, but this processor has {', '.join(p.value for p in there)}"
        )
    return Choice(asked, "asked for")


def paths(library: ctypes.CDLL) -> list[Simd]:
    """The native paths that run on this processor, the fastest first."""
    return [simd for simd in Simd if simd in NUMBERS and library.zeroshard_has_path(NUMBERS[simd])]


@cache
def warn_once(message: str) -> None:
    """Warns the first time, and never again with the same text."""
    warnings.warn(message, RuntimeWarning, stacklevel=3)


_loaded: list[ctypes.CDLL | BuildError] = []


def load() -> ctypes.CDLL:
    """The native library, built if there is none. Later calls give the same answer.

    Raises:
        BuildError: the library could not be built or loaded.
    """
    if not _loaded:
        try:
            _loaded.append(_find())
        except BuildError as error:
            _loaded.append(error)
    found = _loaded[0]
    if isinstance(found, BuildError):
        raise found
    return found


def _find() -> ctypes.CDLL:
    name, cached = library_name(), cache_folder()
    installed, built = HERE / name, cached / name
    if installed.exists():  # as much to be trusted as the sources beside it
        with contextlib.suppress(OSError, AttributeError):  # made for another C library
            return _declare(ctypes.CDLL(str(installed)))
    if not make_private(cached):
        warn_once(
            f"{cached} is not a folder that only this user can write to, so zeroshard's native library is built anew "
            "in each process; change its owner and mode (chmod go-w), or name another folder in $XDG_CACHE_HOME"
        )
        with tempfile.TemporaryDirectory(prefix="zeroshard-") as folder:  # only this user can write there
            return _open(build(Path(folder)))
    if not _is_intact(built):
        build(cached)
        remember(_sum_file(built), _sum(built))
    return _open(built)


def _open(file: Path) -> ctypes.CDLL:
    try:
        return _declare(ctypes.CDLL(str(file)))
    except (OSError, AttributeError) as error:
        raise BuildError(f"the library does not load: {error}") from error


def _is_intact(file: Path) -> bool:
    """Whether a library in the cache is what was built, and only this user can have written it.

    A library that was cut off would kill the process where it is loaded, and one process cannot load another library
    under the same name.
    """
    try:
        return is_private(file) and _sum_file(file).read_text() == _sum(file)
    except (OSError, UnicodeDecodeError):
        return False


def _sum_file(file: Path) -> Path:
    return file.with_suffix(".sha256")


def _sum(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, int32, int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    signatures: dict[str, tuple[object, ...]] = {  # result, then arguments
        "zeroshard_has_path": (int32, int32),
        "zeroshard_open": (pointer, int32, int32, pointer, int32),
        "zeroshard_close": (None, pointer),
        "zeroshard_update": (int32, pointer, pointer, pointer, int64, ctypes.c_float, ctypes.c_uint64),
        "zeroshard_accumulate": (int32, pointer, pointer, pointer, int32, int32, int64),
        "zeroshard_square_sum": (int32, pointer, pointer, int32, int64, ctypes.POINTER(ctypes.c_double)),
    }
    for name, (result, *arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
