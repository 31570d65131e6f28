"""What the value of an option must be. Every refusal names the option and the value."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def dtype_named(name: str, value: str) -> torch.dtype:
    """The dtype that a configuration file calls ``value``."""
    if value not in DTYPES:
        raise ValueError(f"{name}={value!r} is unknown{nearest(value, DTYPES)}; known: {', '.join(DTYPES)}")
    return DTYPES[value]


def nearest(name: str, known: Sequence[str] | Mapping[str, object]) -> str:
    """What a misspelt name may have meant, to be put behind it in a message; empty if nothing comes close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def require_positive(name: str, value: object) -> None:
    """Refuses what is no finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name}={value!r} must be a positive number")


def require_count(name: str, value: object, least: int) -> None:
    """Refuses what is no whole number, or too small a one."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r} must be a whole number, at least {least}")


def require_flag(name: str, value: object) -> None:
    """Refuses what is neither True nor False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be True or False")


def sequence(name: str, value: object, kinds: tuple[type, ...]) -> tuple[Any, ...]:
    """Values as a tuple; one alone is taken for a sequence of one."""
    if isinstance(value, kinds):
        value = (value,)
    if not isinstance(value, Sequence) or not all(isinstance(entry, kinds) for entry in value):
        raise ValueError(f"{name}={value!r} must be a list of {' or '.join(kind.__name__ for kind in kinds)}")
    return tuple(value)
