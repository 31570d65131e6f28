"""From a checkpoint to a folder as Hugging Face has them: safetensors shards, an index, a configuration.

Tensor by tensor, in one process, without the model's code or its memory: no more than one tensor is ever whole.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..offload.host_buffers import round_to
from .boxes import Region, whole_box
from .checked import check_about, decoded, no_tensor
from .folder import candidates
from .format import BUFFER, INDEX, VALUE, CheckpointError
from .index import Index, read_index
from .lora import Adapter, Found, adapter_tensors, merged_tensors
from .output import WEIGHTS, Output
from .read import Reader
from .shards import SHARD_BYTES, Shards, Whole, as_json
from .values import DTYPES


class Made(NamedTuple):
    """A tensor to be written, made when its turn comes."""

    whole: Whole
    make: Callable[[], Tensor]


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
        file = self.folder / INDEX
        self.about = check_about(file, decoded(file, self.index.values.get("about"), "about", no_tensor))
        self._dtype = dtype
        self._on_host = set(self.about["rounded_on_host"])
        named = self.about.get("parameter_dtype")
        self._trained_in = DTYPES.get(named) if isinstance(named, str) else None

    @property
    def names(self) -> list[str]:
        """Parameters and buffers."""
        return [name for name, kind in self.index.places if kind in (VALUE, BUFFER)]

    def _kind(self, name: str) -> str:
        return VALUE if (name, VALUE) in self.index.places else BUFFER

    def dtype(self, name: str) -> torch.dtype:
        """In which a tensor is exported: as asked for, or as the model computed with it."""
        stored = self.index.dtype(name, self._kind(name))
        if self._kind(name) == BUFFER or not stored.is_floating_point:
            return stored
        return self._dtype or self._trained_in or stored

    def shape(self, name: str) -> tuple[int, ...]:
        return self.index.shape(name, self._kind(name))

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A whole tensor; a 16-bit parameter is rounded from its master as the run did it."""
        kind, shape = self._kind(name), self.shape(name)
        stored = self.index.dtype(name, kind)
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

    Raises:
        InvalidIndexError: what the checkpoint says of its model makes no sense.
        CheckpointError: the checkpoint cannot be read, or the folder not be written; then nothing is left there.
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
    given = None if config is None else config.read_bytes()
    _check_out(out)
    found: Iterable[Found]
    if adapter is not None:
        alone = Adapter.of(adapters, adapter)
        found = adapter_tensors(source, alone)
        configs = {"adapter_config.json": as_json({**alone.config, "inference_mode": True})}
    elif merge:
        tied = bool((source.about.get("config") or {}).get("tie_word_embeddings"))
        found = merged_tensors(source, [Adapter.of(adapters, name) for name in adapters], tied)
    else:
        found = [(name, source.shape(name), source.dtype(name), _reading(source, name)) for name in source.names]
    tensors = [Made(Whole(name, shape, of), make) for name, shape, of, make in found]
    if adapter is None:
        configs = _configs(source, tensors, given)
    with Output(out) as output:
        for name, text in configs.items():
            output.new(name, text)
        if adapter is not None:  # PEFT knows no index
            shards = Shards(output, [tensor.whole for tensor in tensors], sys.maxsize, "adapter_model")
        else:
            shards = Shards(output, [tensor.whole for tensor in tensors], shard_bytes)
        for tensor in tensors:
            shards.write(tensor.whole.name, tensor.make())
        shards.finish()
    return output.files


def _check_out(out: Path) -> None:
    """Of two models in a folder, whoever loads it takes one: an older one must go first, and not by our hand."""
    for file in sorted(out.iterdir()) if out.exists() else ():
        if WEIGHTS.fullmatch(file.name):
            raise CheckpointError(
                f"{out} has a model already ({file.name}); export to another folder, or remove that one"
            )


def _reading(source: Source, name: str) -> Callable[[], Tensor]:
    return lambda: source.read(name)


def _configs(source: Source, tensors: Sequence[Made], given: bytes | None) -> dict[str, bytes]:
    """What is to be written beside the weights, by name."""
    if given is not None:
        return {"config.json": given}
    config = source.about.get("config")
    if config is None:
        return {}
    if "model_type" in config:  # one of transformers'
        dtypes = {tensor.whole.dtype for tensor in tensors if tensor.whole.dtype.is_floating_point}
        widest = max(dtypes, key=lambda dtype: dtype.itemsize)
        config = {**config, "architectures": [source.about["class"]], "dtype": str(widest).removeprefix("torch.")}
    files = {"config.json": as_json(config)}
    if source.about.get("generation_config") is not None:
        files["generation_config.json"] = as_json(source.about["generation_config"])
    return files
