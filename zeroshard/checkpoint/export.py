"""From a checkpoint to a folder as Hugging Face has them: safetensors shards, an index, a configuration.

Tensor by tensor, in one process, without the model's code or its memory: no more than one tensor is ever whole.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..offload.states import round_to
from .boxes import Region, whole_box
from .folder import candidates
from .format import BUFFER, SAFETENSORS, VALUE, CheckpointError, Index, read_index
from .lora import Adapter, adapter_tensors, merged_tensors
from .read import Reader
from .values import DTYPES, decode
from .write import bytes_of, write_json

SHARD_BYTES = 5_000_000_000
WEIGHTS = re.compile(r"(adapter_)?(pytorch_)?model(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")
"""Names under which a model's or an adapter's weights are looked for."""


class Tensors(NamedTuple):
    """A tensor to be written, made when its turn comes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Source:
    """A checkpoint's model, tensor by tensor."""

    def __init__(self, path: Path, dtype: torch.dtype | None) -> None:
        found = candidates(path.absolute())
        if not found:
            raise CheckpointError(f"{path} holds no complete checkpoint")
        self.folder = found[0]
        self.index: Index = read_index(self.folder)
        self.reader = Reader(self.index)
        self.reader.check_files()
        about = decode(self.index.values.get("about"), "about", self._no_tensor)
        self.about: dict[str, Any] = about if isinstance(about, dict) else {}
        self._dtype = dtype
        self._on_host = set(self.about.get("rounded_on_host") or ())
        named = self.about.get("parameter_dtype")
        self._trained_in = DTYPES.get(named) if isinstance(named, str) else None

    @staticmethod
    def _no_tensor(name: str) -> Tensor:
        raise CheckpointError(f"the description of a model holds a tensor {name!r}")

    @property
    def names(self) -> list[str]:
        """Parameters and buffers."""
        return [name for name, kind in self.index.places if kind in (VALUE, BUFFER)]

    def _kind(self, name: str) -> str:
        return VALUE if (name, VALUE) in self.index.places else BUFFER

    def dtype(self, name: str) -> torch.dtype:
        """In which a tensor is exported: as asked for, or as the model computed with it."""
        stored = self.index.places[name, self._kind(name)][0].entry.dtype
        if self._kind(name) == BUFFER or not stored.is_floating_point:
            return stored
        return self._dtype or self._trained_in or stored

    def shape(self, name: str) -> tuple[int, ...]:
        return self.index.shape(name)

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A whole tensor; a 16-bit parameter is rounded from its master as the run did it."""
        kind, shape = self._kind(name), self.shape(name)
        stored = self.index.places[name, kind][0].entry.dtype
        flat = torch.empty(math.prod(shape), dtype=stored)
        self.reader.read(name, kind, Region(whole_box(shape), 0, flat.numel()), flat)
        wanted = dtype or self.dtype(name)
        if wanted is not stored:
            flat = round_to(flat, wanted) if name in self._on_host and stored is torch.float32 else flat.to(wanted)
        return flat.reshape(shape)


def export(
    path: Path,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    adapter: str | None = None,
    merge: bool = False,
    shard_bytes: int = SHARD_BYTES,
    config: Path | None = None,
) -> list[Path]:
    """Writes a model as Hugging Face has them; returns the files.

    Args:
        path: a checkpoint, or a folder of them, of which the newest is taken.
        out: the folder to write; made if it is not there. It must have no weights yet.
        dtype: of the parameters; by default that which the model computed in.
        adapter: write this LoRA adapter alone, for PEFT.
        merge: write the base with its LoRA adapters added in.
        shard_bytes: the largest file, unless one tensor is larger.
        config: a configuration file to copy, in place of the one that the checkpoint has.
    """
    source = Source(path, dtype)
    adapters: dict[str, Any] = source.about.get("adapters") or {}
    if not adapters and (adapter is not None or merge):
        raise CheckpointError(f"{source.folder} has no adapters; export it without --adapter-only and --merge")
    if adapters and adapter is None and not merge:
        raise CheckpointError(
            f"{source.folder} holds adapters ({', '.join(adapters)}) on a base model; export with --merge, or with "
            "--adapter-only"
        )
    out.mkdir(parents=True, exist_ok=True)
    _check_out(out)
    if adapter is not None:
        return _export_adapter(source, Adapter.of(adapters, adapter), out)
    if merge:
        tied = bool((source.about.get("config") or {}).get("tie_word_embeddings"))
        found = merged_tensors(source, [Adapter.of(adapters, name) for name in adapters], tied)
        tensors = [Tensors(*entry) for entry in found]
    else:
        tensors = [
            Tensors(name, source.shape(name), source.dtype(name), _reading(source, name)) for name in source.names
        ]
    return [*_write_shards(out, tensors, shard_bytes), *_write_configs(source, out, tensors, config)]


def _check_out(out: Path) -> None:
    """Of two models in a folder, whoever loads it takes one: an older one must go first, and not by our hand."""
    for file in sorted(out.iterdir()):
        if WEIGHTS.fullmatch(file.name):
            raise CheckpointError(
                f"{out} has a model already ({file.name}); export to another folder, or remove that one"
            )


def _reading(source: Source, name: str) -> Callable[[], Tensor]:
    return lambda: source.read(name)


def _export_adapter(source: Source, adapter: Adapter, out: Path) -> list[Path]:
    tensors = [Tensors(*entry) for entry in adapter_tensors(source, adapter)]
    _write_file(out / "adapter_model.safetensors", tensors)
    write_json(out / "adapter_config.json", _json({**adapter.config, "inference_mode": True}))
    return [out / "adapter_model.safetensors", out / "adapter_config.json"]


def _write_shards(out: Path, tensors: Sequence[Tensors], shard_bytes: int) -> list[Path]:
    groups: list[list[Tensors]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.nbytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    if len(groups) == 1:
        _write_file(out / "model.safetensors", groups[0])
        return [out / "model.safetensors"]
    files = [out / f"model-{number:05}-of-{len(groups):05}.safetensors" for number in range(1, len(groups) + 1)]
    for file, group in zip(files, groups, strict=True):
        _write_file(file, group)
    places = {tensor.name: file.name for file, group in zip(files, groups, strict=True) for tensor in group}
    index = out / "model.safetensors.index.json"
    total = sum(tensor.nbytes for tensor in tensors)
    write_json(index, _json({"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}))
    return [*files, index]


def _write_file(file: Path, tensors: Sequence[Tensors]) -> None:
    tensors = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.nbytes
        table[tensor.name] = {
            "dtype": SAFETENSORS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    temporary = file.with_name(f".{file.name}.tmp")  # whole or not at all: a disk may be full, a process killed
    with open(temporary, "wb") as opened:
        opened.write(len(header).to_bytes(8, "little") + header)
        for tensor in tensors:
            made = tensor.make().contiguous()
            assert (made.dtype, tuple(made.shape)) == (tensor.dtype, tensor.shape), tensor.name
            opened.write(bytes_of(made))
        opened.flush()
        os.fsync(opened.fileno())
    os.replace(temporary, file)


def _write_configs(source: Source, out: Path, tensors: Sequence[Tensors], given: Path | None) -> list[Path]:
    if given is not None:
        (out / "config.json").write_bytes(given.read_bytes())
        return [out / "config.json"]
    config = source.about.get("config")
    if config is None:
        return []
    if "model_type" in config:  # one of transformers'
        dtypes = {tensor.dtype for tensor in tensors if tensor.dtype.is_floating_point}
        widest = max(dtypes, key=lambda dtype: dtype.itemsize)
        config = {**config, "architectures": [source.about["class"]], "dtype": str(widest).removeprefix("torch.")}
    files = [out / "config.json"]
    write_json(files[0], _json(config))
    if source.about.get("generation_config") is not None:
        files.append(out / "generation_config.json")
        write_json(files[1], _json(source.about["generation_config"]))
    return files


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
