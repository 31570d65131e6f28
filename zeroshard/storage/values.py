"""Python values as JSON, and back: numbers, strings, lists, tuples, dicts and tensors, and nothing that could run.

The bits of a small tensor stand in the JSON. A large tensor is written as a range, and the JSON has its name.
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

from ..init.safetensors_file import DTYPES
from ..system.words import quoted, told
from .format import SAFETENSORS, CheckpointError, shape_from

SMALL_BYTES = 1024
"""Bytes of the largest tensor whose bits stand in the JSON."""
DEEPEST = 64
"""Levels of nesting that may be read or written."""
TAG = "$"
"""A key that marks a dict as standing for another value."""

NAMED = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
"""All dtypes of torch, by name: a value may be a dtype that no tensor in a checkpoint has."""
MOST_OF_ONE_HASH = 1000
"""Keys of a table that may have the hash of another key. Python compares each of them with all others."""
LARGEST_INT_BITS = 14_000
"""Python turns integers of up to 4300 digits into text and back."""


class EncodingError(ValueError):
    """A value cannot be written as JSON, or some JSON cannot be read as a value."""


def encode(value: object, where: str, large: Callable[[Tensor], str], depth: int = 0) -> Any:
    """Returns a value as JSON. ``large`` takes a tensor to be written elsewhere, and returns a name for it."""
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
    if hasattr(value, "item") and not getattr(value, "shape", ()):  # a number of numpy
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
    if value.layout is not torch.strided or value.dtype not in SAFETENSORS:
        raise EncodingError(f"{where} is a tensor of {value.dtype} and {value.layout}, which a checkpoint cannot hold")
    if value.is_meta:
        raise EncodingError(f"{where} is a tensor on the meta device, which has no elements that could be saved")
    value = value.detach()
    if value.nbytes > SMALL_BYTES:
        return {TAG: "large", "name": large(value)}
    bits = bytes(value.contiguous().reshape(-1).view(torch.uint8).cpu().tolist())
    return {TAG: "tensor", "dtype": SAFETENSORS[value.dtype], "shape": list(value.shape), "bits": bits.hex()}


def decode(value: Any, where: str, large: Callable[[str], Tensor], depth: int = 0) -> Any:
    """Returns the value that JSON stands for. ``large`` finds a tensor that was written elsewhere, by its name."""
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
        if isinstance(error, EncodingError | CheckpointError):  # also: the file of a large tensor is damaged
            raise
        raise EncodingError(f"{where} holds something that is no value: {told(error)}") from error


def _decode_tagged(value: dict[str, Any], where: str, large: Callable[[str], Tensor], depth: int) -> Any:
    match value[TAG]:
        case "float":
            return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[value["value"]]
        case "tuple":
            return tuple(decode(entry, where, large, depth + 1) for entry in value["items"])
        case "dict" | "counter":
            keys = [decode(key, where, large, depth + 1) for key, _ in value["items"]]
            if len(keys) - len({hash(key) for key in keys}) > MOST_OF_ONE_HASH:
                raise EncodingError(f"{where} holds a table with keys that were chosen to make it slow")
            entries = (decode(entry, where, large, depth + 1) for _, entry in value["items"])
            made = dict(zip(keys, entries, strict=True))
            return Counter(made) if value[TAG] == "counter" else made
        case "dtype":
            return NAMED[value["value"]]
        case "bytes":
            return base64.b64decode(value["value"], validate=True)
        case "large":
            return large(str(value["name"]))
        case "tensor":
            bits = bytes.fromhex(value["bits"])
            dtype, shape = DTYPES[value["dtype"]], shape_from(value["shape"])
            if len(bits) > SMALL_BYTES or len(bits) != math.prod(shape) * dtype.itemsize:
                raise EncodingError(f"{where} holds a tensor of {quoted(list(shape))} with {len(bits)} bytes")
            return torch.tensor(list(bits), dtype=torch.uint8, device="cpu").view(dtype).reshape(shape)
    raise EncodingError(f"{where} holds a {quoted(value[TAG])}, which this version does not know")
