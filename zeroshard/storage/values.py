"""Python values as JSON, and back: numbers, strings, lists, tuples, dicts and tensors, and nothing that could run.

Small tensors stand in the JSON as their bits; large ones are left to whoever writes files, and named.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor

from .format import CheckpointError

SMALL_BYTES = 1024
"""Tensors up to this stand in the JSON."""
DEEPEST = 64
"""Levels of nesting that are read or written."""
TAG = "$"
"""Marks a dict that stands for something else than itself."""

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}

NAMED = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
"""All of torch's: a value may be a dtype that no tensor in a checkpoint has."""
LARGEST_INT_BITS = 14_000
"""Python reads and writes integers up to 4300 digits."""


class EncodingError(ValueError):
    """A value that cannot be written, or JSON that stands for none."""


def encode(value: object, where: str, large: Callable[[Tensor], str], depth: int = 0) -> Any:
    """A value as JSON; ``large`` takes a tensor that is to be written elsewhere and names it."""
    if depth > DEEPEST:
        raise EncodingError(f"{where} is nested more than {DEEPEST} levels deep")
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        if value.bit_length() > LARGEST_INT_BITS:
            raise EncodingError(
                f"{where} is an integer of {value.bit_length()} bits, which JSON cannot hold; use bytes"
            )
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {TAG: "float", "value": repr(float(value))}
    if isinstance(value, Tensor):
        return _encode_tensor(value, where, large)
    if isinstance(value, torch.dtype):
        return {TAG: "dtype", "value": str(value).removeprefix("torch.")}
    if isinstance(value, bytes):
        return {TAG: "bytes", "value": base64.b64encode(value).decode()}
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, list | tuple):
        items = [encode(entry, f"{where}[{place}]", large, depth + 1) for place, entry in enumerate(value)]
        return items if isinstance(value, list) else {TAG: "tuple", "items": items}
    if isinstance(value, Mapping):
        return _encode_mapping(value, where, large, depth)
    if hasattr(value, "item") and not getattr(value, "shape", ()):  # a number of numpy's
        return encode(value.item(), where, large, depth + 1)
    raise EncodingError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold: it takes numbers, strings, None, lists, "
        "tuples, dicts and tensors"
    )


def _encode_mapping(value: Mapping[Any, Any], where: str, large: Callable[[Tensor], str], depth: int) -> Any:
    if type(value) not in (dict, OrderedDict, Counter):
        raise EncodingError(f"{where} is a {type(value).__name__}, which would come back as another; make it a dict")
    plain = all(isinstance(key, str) for key in value) and TAG not in value and not isinstance(value, Counter)
    if plain:
        return {key: encode(entry, f"{where}.{key}", large, depth + 1) for key, entry in value.items()}
    pairs = [
        [encode(key, f"a key of {where}", large, depth + 1), encode(entry, f"{where}[{key!r}]", large, depth + 1)]
        for key, entry in value.items()
    ]
    return {TAG: "counter" if isinstance(value, Counter) else "dict", "items": pairs}


def _encode_tensor(value: Tensor, where: str, large: Callable[[Tensor], str]) -> Any:
    if value.layout is not torch.strided or str(value.dtype).removeprefix("torch.") not in DTYPES:
        raise EncodingError(f"{where} is a tensor of {value.dtype} and {value.layout}, which a checkpoint cannot hold")
    if value.is_meta:
        raise EncodingError(f"{where} is a tensor on the meta device, which has no elements that could be saved")
    value = value.detach()
    if value.nbytes > SMALL_BYTES:
        return {TAG: "large", "name": large(value)}
    bits = bytes(value.contiguous().reshape(-1).view(torch.uint8).cpu().tolist())
    dtype = str(value.dtype).removeprefix("torch.")
    return {TAG: "tensor", "dtype": dtype, "shape": list(value.shape), "bits": bits.hex()}


def decode(value: Any, where: str, large: Callable[[str], Tensor], depth: int = 0) -> Any:
    """The value that JSON stands for; ``large`` finds a tensor that was written elsewhere."""
    if depth > DEEPEST:
        raise EncodingError(f"{where} is nested more than {DEEPEST} levels deep")
    if isinstance(value, list):
        return [decode(entry, where, large, depth + 1) for entry in value]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {key: decode(entry, where, large, depth + 1) for key, entry in value.items()}
    try:
        return _decode_tagged(value, where, large, depth)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        if isinstance(error, EncodingError | CheckpointError):  # that a file is damaged, of a large tensor
            raise
        raise EncodingError(f"{where} holds something that is no value: {type(error).__name__}: {error}") from error


def _decode_tagged(value: dict[str, Any], where: str, large: Callable[[str], Tensor], depth: int) -> Any:
    match value[TAG]:
        case "float":
            return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[value["value"]]
        case "tuple":
            return tuple(decode(entry, where, large, depth + 1) for entry in value["items"])
        case "dict" | "counter":
            made = {
                decode(key, where, large, depth + 1): decode(entry, where, large, depth + 1)
                for key, entry in value["items"]
            }
            return Counter(made) if value[TAG] == "counter" else made
        case "dtype":
            return NAMED[value["value"]]
        case "bytes":
            return base64.b64decode(value["value"], validate=True)
        case "large":
            return large(str(value["name"]))
        case "tensor":
            bits = bytes.fromhex(value["bits"])
            dtype, shape = DTYPES[value["dtype"]], [int(size) for size in value["shape"]]
            if len(bits) > SMALL_BYTES or len(bits) != math.prod(shape) * dtype.itemsize:
                raise EncodingError(f"{where} holds a tensor of {shape} with {len(bits)} bytes")
            return torch.tensor(list(bits), dtype=torch.uint8).view(dtype).reshape(shape)
    raise EncodingError(f"{where} holds a {value[TAG]!r}, which this version does not know")
