"""Weights on disk: Hugging Face safetensors, read straight into shards.

Every rank reads the files itself, and only the ranges that rest on this rank. So nothing is communicated, ranks read at
the same time, and no rank needs memory for more than its ranges. The price: all ranks must see the same files, on a
shared file system or as a copy on each node. Where parameters are whole at rest, each rank reads all of them (on one
node from the page cache). If rank 0 read and broadcast, no copies would be needed, but every byte would go through one
disk and one link while the other ranks wait.
"""

from __future__ import annotations

import math
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor, nn

from ..comm import parallel
from ..config.layout import Slot
from ..states.flat import Flat
from ..system.parse import LARGEST_JSON, parse_json, read_start
from ..system.words import quoted, word
from .joined import Conversions, JoinedTensor
from .safetensors_file import DTYPES, DiskTensor, Elements, read_header

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

FLOATING = frozenset({"F16", "BF16", "F32", "F64"})
"""Dtypes that are converted to the dtype of the model. 8-bit dtypes are not here: their values need scales."""

EXACT = {name: dtype for name, dtype in DTYPES.items() if name not in FLOATING}
"""Dtypes that are not converted: the buffer must have the same dtype."""

READ_BYTES = 1 << 20
"""Most bytes that are read at a time. So reading a large tensor takes no memory beside the tensor.

Larger buffers would leave holes between the shards that no shard fits into.
"""
NAMES_IN_A_MESSAGE = 5


class Weights:
    """A model's weights on disk. The constructor checks every name, shape and dtype, and reads no value."""

    def __init__(self, path: Path, model: nn.Module) -> None:
        self.path = path
        named = {
            _plain(name, model): value
            for name, value in model.state_dict(keep_vars=True).items()
            if isinstance(value, Tensor)
        }
        contents = contents_of(path)
        self.checksum = zlib.crc32(repr(sorted((name, entry[1:4]) for name, entry in contents.items())).encode())
        """Checksum of all names, shapes and dtypes. It tells ranks with different files apart."""
        try:
            stored = Conversions(model).joined(_renamed(contents, named, model), named)
        except ValueError as error:
            raise self._error(str(error)) from None
        names: dict[int, list[str]] = {}  # a tied weight has several names, and the files may have one or all of them
        for name, tensor in named.items():
            names.setdefault(id(tensor), []).append(name)
        not_there = {key for key, aliases in names.items() if not any(name in stored for name in aliases)}
        self._kept = {key for key in not_there if _has_value_of_adapter(named, names[key][0], model)}
        missing = [names[key][0] for key in names if key in not_there and key not in self._kept]
        unexpected = [name for name in stored if name not in named and not _ignored(name, model)]
        if missing or unexpected:
            parts = [f"it lacks {_listed(missing)}"] if missing else []
            parts += [f"it has {_listed(unexpected)}, which the model has not"] if unexpected else []
            if _has_adapters(model) and any(".lora_" in name for name in missing):
                parts.append(
                    "adapters that PEFT made on the meta device have no values: before the optimizer is made, call "
                    'to_empty(device="cpu") on lora_A and lora_B of each adapted module, and its '
                    "reset_lora_parameters()"
                )
            elif hasattr(model, "base_model_prefix"):  # a model of transformers
                parts.append(
                    "where transformers computes tensors as it loads, call from_pretrained() before shard() or "
                    "save model.state_dict() as safetensors once"
                )
            raise self._error(f"does not fit {type(model).__name__}: {'; '.join(parts)}")
        for name, tensor in named.items():
            if name in stored:
                self._check_fits(name, stored[name], tensor)
        self._copies = {key: [stored[name] for name in aliases if name in stored] for key, aliases in names.items()}

    def has(self, tensor: Tensor) -> bool:
        """Whether this tensor of the model is on disk. Parameters are, but for adapters; some buffers are not."""
        return bool(self._copies.get(id(tensor)))

    def keeps(self, parameter: Tensor) -> bool:
        """Whether this parameter keeps the values that it has: it is an adapter's, and in no file."""
        return id(parameter) in self._kept

    def read_flat(self, flat: Flat, target: Tensor) -> None:
        """Fills ``target`` with the range of a flat that rests on this rank. Padding stays as it is."""
        with _OpenFiles() as files:
            for piece in flat.layout.pieces(flat.at_rest):
                part = target[piece.offset :][: piece.numel]
                if self.keeps(flat.parameters[piece.slot]):
                    own = parallel.local(flat.parameters[piece.slot]).detach().reshape(-1)
                    part.copy_(own[piece.start : piece.start + piece.numel])
                    continue
                self._read(files, flat.parameters[piece.slot], flat.layout.slots[piece.slot], piece.start, part)

    def read_buffer(self, buffer: Tensor) -> None:
        """Fills a buffer that is on disk."""
        target = torch.empty(buffer.numel(), dtype=buffer.dtype, device=buffer.device)
        with _OpenFiles() as files:
            self._read(files, buffer, Slot("", tuple(buffer.shape), 0, buffer.numel()), 0, target)
        buffer.copy_(target.view(buffer.shape))

    def _read(self, files: _OpenFiles, tensor: Tensor, slot: Slot, start: int, target: Tensor) -> None:
        first, *others = self._copies[id(tensor)]
        for begin, end in _ranges(first, slot, start, start + target.numel()):
            values = files.elements(first, slot, begin, end)
            target[begin - start : end - start].copy_(values)
            for other in others:
                if not torch.equal(files.elements(other, slot, begin, end).to(values.dtype), values):
                    raise self._error(
                        f"{quoted(first.name)} and {quoted(other.name)} are one tied weight in the model, but differ "
                        "on disk"
                    )

    def _check_fits(self, name: str, entry: DiskTensor | JoinedTensor, tensor: Tensor) -> None:
        if entry.shape != tuple(tensor.shape):
            shapes = f"{quoted(list(entry.shape))} in {entry.file.name}, {list(tensor.shape)} in the model"
            raise self._error(f"{quoted(name)} has different shapes: {shapes}")
        if entry.dtype in FLOATING and tensor.is_floating_point():
            return
        if EXACT.get(entry.dtype) is not tensor.dtype:
            raise self._error(
                f"{quoted(name)} is {word(entry.dtype)} in {entry.file.name}, which does not convert to "
                f"{tensor.dtype}; quantised weights must be dequantised first"
            )

    def _error(self, text: str) -> ValueError:
        return ValueError(f"weights={str(self.path)!r}: {text}")


class _OpenFiles(ExitStack):
    """Files that are open, each once, until the block ends."""

    def __init__(self) -> None:
        super().__init__()
        self._open: dict[Path, Elements] = {}

    def elements(self, entry: DiskTensor | JoinedTensor, slot: Slot, start: int, stop: int) -> Tensor:
        """A range of the elements of a slot."""
        if slot.box is None or not entry.shape:
            return self._read(entry, start, stop)
        # Tensor parallelism divides the tensor: rows are read whole, and the part of this rank is taken from them.
        row, stored_row = math.prod(slot.shape[1:]), math.prod(entry.shape[1:])
        first, last = start // row, -(-stop // row)
        offset, *offsets = slot.box.offsets
        across = [slice(begin, begin + size) for begin, size in zip(offsets, slot.shape[1:], strict=True)]
        rows = self._read(entry, (offset + first) * stored_row, (offset + last) * stored_row)
        part = rows.view(last - first, *entry.shape[1:])[(slice(None), *across)]
        return part.reshape(-1)[start - first * row : stop - first * row]

    def _read(self, entry: DiskTensor | JoinedTensor, start: int, stop: int) -> Tensor:
        if isinstance(entry, JoinedTensor):
            return torch.cat([self._read(*each) for each in entry.ranges(start, stop)])
        if entry.file not in self._open:
            self._open[entry.file] = Elements(entry.file)
            self.callback(self._open[entry.file].close)
        return self._open[entry.file].read(entry, start, stop)


def _ranges(entry: DiskTensor | JoinedTensor, slot: Slot, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Divides a range of a slot's elements, so that no read is much larger than ``READ_BYTES``."""
    step = max(1, READ_BYTES // DTYPES[entry.dtype].itemsize)
    if slot.box is not None:
        row = math.prod(slot.shape[1:])
        step = row * max(1, step // max(1, math.prod(entry.shape[1:])))
    while start < stop:
        end = min(stop, (start // step + 1) * step)
        yield start, end
        start = end


def contents_of(path: Path) -> dict[str, DiskTensor]:
    """Every tensor at ``path``, by name: a folder as Hugging Face writes it, or one file."""
    if path.is_file():
        return read_header(path)
    if not path.is_dir():
        raise ValueError(f"weights={str(path)!r} is not there; all ranks must see the same folder or file")
    if (path / SINGLE).is_file():
        return read_header(path / SINGLE)
    if not (path / INDEX).is_file():
        pickles = sorted(entry.name for entry in path.glob("*.bin"))
        hint = f"; {pickles[0]} is a pickle, which is never read: save it as safetensors" if pickles else ""
        raise ValueError(f"weights={str(path)!r} has neither {SINGLE} nor {INDEX}{hint}")
    place_of = _index(path / INDEX)
    headers = {file: read_header(path / file) for file in dict.fromkeys(place_of.values())}
    for name, file in place_of.items():
        if name not in headers[file]:
            raise ValueError(f"{path / INDEX} says that {quoted(name)} is in {word(file)}, which does not have it")
    return {name: headers[file][name] for name, file in place_of.items()}


def _index(path: Path) -> dict[str, str]:
    """Which file of the folder has which tensor."""
    try:
        table = parse_json(read_start(path, LARGEST_JSON))
        place_of = table.get("weight_map") if isinstance(table, dict) else None
        if not isinstance(place_of, dict) or not all(isinstance(file, str) for file in place_of.values()):
            raise ValueError("it needs a table 'weight_map' of file names")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no index of safetensors files: {error}") from error
    for name, file in place_of.items():
        # Links are followed, because Hugging Face's cache consists of links. A path to another folder is refused.
        if PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts:
            raise ValueError(f"{path} puts {quoted(name)} into {quoted(file)}, which is outside its folder")
        if not os.path.isfile(path.parent / file):  # a Path raises if the name is too long
            raise ValueError(f"{path} puts {quoted(name)} into {quoted(file)}, which is not there")
    return place_of


def _renamed(stored: dict[str, DiskTensor], named: dict[str, Tensor], model: nn.Module) -> dict[str, DiskTensor]:
    """Adds or removes the prefix of a base model: Hugging Face writes names with it for a model that has a head."""
    prefix = getattr(model, "base_model_prefix", None)
    if not isinstance(prefix, str) or not prefix or any(name in named for name in stored):
        return stored
    longer = {f"{prefix}.{name}": entry for name, entry in stored.items()}
    shorter = {name.removeprefix(f"{prefix}."): entry for name, entry in stored.items()}
    return next((names for names in (longer, shorter) if any(name in named for name in names)), stored)


def _ignored(name: str, model: nn.Module) -> bool:
    """Whether a Hugging Face model says that old files may have a tensor of this name."""
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return any(re.search(pattern, name) for pattern in patterns)


def _plain(name: str, model: nn.Module) -> str:
    """A name without what ``torch.compile`` and PEFT add to it."""
    name = name.replace("_orig_mod.", "")
    if not _has_adapters(model):
        return name
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def _has_adapters(model: nn.Module) -> bool:
    return getattr(model, "peft_config", None) is not None


def _has_value_of_adapter(named: dict[str, Tensor], name: str, model: nn.Module) -> bool:
    """Whether a parameter is an adapter's, and has a value already."""
    return _has_adapters(model) and ".lora_" in name and not named[name].is_meta


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(map(quoted, names[:NAMES_IN_A_MESSAGE]))
    more = len(names) - NAMES_IN_A_MESSAGE
    return f"{shown} and {more} more" if more > 0 else shown
