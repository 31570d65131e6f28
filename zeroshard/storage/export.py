"""Exports a checkpoint in Hugging Face's format: safetensors shards, an index, a configuration.

The export runs in one process, tensor by tensor. It needs neither the model's code nor memory for the whole model: only
one tensor at a time is whole. LoRA adapters, as PEFT names them, are exported alone, or added to the weights that they
adapt.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..offload.host_buffers import round_to
from .folder import candidates
from .format import BUFFER, VALUE, CheckpointError, InvalidIndexError
from .output import SHARD_BYTES, WEIGHTS, Output, Shards, WholeTensor, as_json
from .read import CheckpointReader, read_index
from .regions import Region, whole
from .validate import check_about
from .values import NAMED

PREFIX = "base_model.model."
"""PEFT puts this before the names of the model that it wraps."""


class Recipe(NamedTuple):
    """A tensor to be written, and how to make it when its turn comes."""

    whole: WholeTensor
    make: Callable[[], Tensor]


class Source:
    """A checkpoint's model, tensor by tensor."""

    def __init__(self, path: Path, dtype: torch.dtype | None) -> None:
        found = candidates(path.absolute())
        if not found:
            raise CheckpointError(f"{path} holds no complete checkpoint")
        self.folder = found[0]
        self._index = read_index(self.folder)
        self._reader = CheckpointReader(self._index)
        self._reader.check_files()
        self.about = check_about(self._index)
        self._on_host = set(self.about["rounded_on_host"])
        self._dtype = dtype or NAMED.get(self.about.get("parameter_dtype") or "")

    @property
    def names(self) -> list[str]:
        """Parameters and buffers."""
        return [name for name, kind in self._index.places if kind in (VALUE, BUFFER)]

    def _kind(self, name: str) -> str:
        return VALUE if (name, VALUE) in self._index.places else BUFFER

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in which a tensor is exported: the dtype asked for, or the dtype that the model computed in."""
        stored = self._index.dtype(name, self._kind(name))
        if self._kind(name) == BUFFER or not stored.is_floating_point:
            return stored
        return self._dtype or stored

    def shape(self, name: str) -> tuple[int, ...]:
        return self._index.shape(name, self._kind(name))

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A whole tensor. A 16-bit parameter is rounded from its master as the run did it."""
        kind, shape = self._kind(name), self.shape(name)
        stored = self._index.dtype(name, kind)
        flat = torch.empty(math.prod(shape), dtype=stored, device="cpu")
        self._reader.read(name, kind, Region(whole(shape), 0, flat.numel()), flat)
        wanted = dtype or self.dtype(name)
        if wanted is not stored:
            flat = round_to(flat, wanted) if name in self._on_host and stored is torch.float32 else flat.to(wanted)
        return flat.reshape(shape)

    def recipe(self, name: str, new_name: str, origin: str | None = None) -> Recipe:
        """Exports a tensor under another name, with the values of ``origin`` if that is given."""
        dtype = self.dtype(name)
        return Recipe(WholeTensor(new_name, self.shape(name), dtype), lambda: self.read(origin or name, dtype))


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
    """Writes the model of a checkpoint in Hugging Face's format; returns the files.

    Args:
        path: a checkpoint, or a folder of checkpoints, of which the newest is taken.
        out: the folder to write, which may be new. It must have no weights yet.
        dtype: the dtype of the parameters. By default the dtype that the model computed in.
        adapter: write this LoRA adapter alone, for PEFT.
        merge: write the base model with its LoRA adapters added in.
        shard_bytes: the size of the largest file, unless one tensor is larger.
        config: a configuration file to copy, in place of the checkpoint's own configuration.

    Raises:
        InvalidIndexError: the checkpoint's description of its model makes no sense.
        CheckpointError: the checkpoint cannot be read, or the folder cannot be written. Then nothing is left there.
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
    if adapter is not None:
        alone = Adapter.of(adapters, adapter)
        recipes = list(adapter_tensors(source, alone))
        configs = {"adapter_config.json": as_json({**alone.config, "inference_mode": True})}
    else:
        if merge:
            tied = bool((source.about.get("config") or {}).get("tie_word_embeddings"))
            recipes = list(merged_tensors(source, [Adapter.of(adapters, name) for name in adapters], tied))
        else:
            recipes = [source.recipe(name, name) for name in source.names]
        configs = _configs(source, recipes, given)
    with Output(out) as output:
        for name, text in configs.items():
            output.new(name, text)
        wholes = [recipe.whole for recipe in recipes]
        if adapter is not None:  # PEFT reads no index
            shards = Shards(output, wholes, sys.maxsize, "adapter_model")
        else:
            shards = Shards(output, wholes, shard_bytes)
        for recipe in recipes:
            shards.write(recipe.whole.name, recipe.make())
        shards.finish()
    return output.files


def _check_out(out: Path) -> None:
    """The folder must have no model: of two models in a folder, nobody knows which one is loaded."""
    for file in sorted(out.iterdir()) if out.exists() else ():
        if WEIGHTS.fullmatch(file.name):
            raise CheckpointError(
                f"{out} has a model already ({file.name}); export to another folder, or remove that one"
            )


def _configs(source: Source, recipes: Sequence[Recipe], given: bytes | None) -> dict[str, bytes]:
    """The files to write beside the weights, by name."""
    if given is not None:
        return {"config.json": given}
    config = source.about.get("config")
    if config is None:
        return {}
    if "model_type" in config:  # of transformers
        dtypes = {recipe.whole.dtype for recipe in recipes if recipe.whole.dtype.is_floating_point}
        widest = max(dtypes, key=lambda dtype: dtype.itemsize)
        config = {**config, "architectures": [source.about["class"]], "dtype": str(widest).removeprefix("torch.")}
    files = {"config.json": as_json(config)}
    if source.about.get("generation_config") is not None:
        files["generation_config.json"] = as_json(source.about["generation_config"])
    return files


# -- LoRA -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Adapter:
    """One adapter and its configuration."""

    name: str
    config: Mapping[str, Any]

    @classmethod
    def of(cls, adapters: Mapping[str, Any], name: str) -> Adapter:
        """The adapter of this name. Raises CheckpointError if there is none, or it is no LoRA."""
        if name not in adapters:
            raise CheckpointError(f"there is no adapter {name!r}; there are {', '.join(adapters)}")
        config = adapters[name]
        if not isinstance(config, dict) or config.get("peft_type") != "LORA":
            kind = config.get("peft_type") if isinstance(config, dict) else config
            raise CheckpointError(f"adapter {name!r} is {kind}, and only LoRA is exported; save it with PEFT instead")
        _check_scales(name, config)
        return cls(name, config)

    def scale(self, module: str) -> float:
        """The factor of the product of the adapter's matrices."""
        rank = _by_pattern(self.config.get("rank_pattern"), module, self.config["r"])
        alpha = _by_pattern(self.config.get("alpha_pattern"), module, self.config["lora_alpha"])
        return float(alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank))


def _check_scales(name: str, config: Mapping[str, Any]) -> None:
    """Ranks and alphas must be numbers, and their patterns regular expressions."""
    for key in ("r", "lora_alpha"):
        patterns = config.get({"r": "rank_pattern"}.get(key, "alpha_pattern")) or {}
        if not isinstance(patterns, dict):
            raise InvalidIndexError(f"adapter {name!r} has patterns of {key} that are {patterns!r}, not a table")
        for pattern, value in (("", config.get(key)), *patterns.items()):
            if isinstance(value, bool) or not isinstance(value, int | float) or (key == "r" and value <= 0):
                raise InvalidIndexError(f"adapter {name!r} has {key} = {value!r}{f' for {pattern!r}' * bool(pattern)}")
            try:
                re.compile(pattern)
            except re.error as error:
                raise InvalidIndexError(f"adapter {name!r}: {pattern!r} is no pattern, {error}") from error


def _by_pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def adapter_tensors(source: Source, adapter: Adapter) -> Iterator[Recipe]:
    """The adapter's own tensors, under the names by which PEFT loads them."""
    name_of = re.escape(adapter.name)
    of_matrix = re.compile(rf"(\.lora_\w+)\.{name_of}(?=\.|$)")
    of_module = re.compile(rf"\.modules_to_save\.{name_of}\.")
    for name in source.names:
        plain, found = of_matrix.subn(r"\1", name)
        if not found:
            plain, found = of_module.subn(".", name)
        if found:
            yield source.recipe(name, plain)


def merged_tensors(source: Source, adapters: Sequence[Adapter], tied: bool) -> Iterator[Recipe]:
    """The model's tensors with the changes of the adapters added, under the names that they have without PEFT."""
    names = set(source.names)
    for name in names:
        if tied and ".lora_embedding_" in name:
            raise CheckpointError(
                f"{name!r} adapts an embedding whose weight is also the head, which the adapter leaves as "
                "it was: merged, they would differ; untie them, or export with --adapter-only"
            )
        if ".lora_magnitude_vector" in name or (".lora_B" in name and name.endswith(".bias")):
            raise CheckpointError(f"{name!r} makes this more than plain LoRA (DoRA, or a bias); merge it with PEFT")
    for name in source.names:
        if ".lora_" in name or ".modules_to_save." in name:
            continue
        plain = name.removeprefix(PREFIX).replace(".base_layer.", ".").replace(".original_module.", ".")
        saved = [
            other
            for adapter in adapters
            if (other := name.replace(".original_module.", f".modules_to_save.{adapter.name}.")) != name
            and other in names
        ]
        if saved:
            yield source.recipe(name, plain, saved[-1])
        else:
            target = WholeTensor(plain, source.shape(name), source.dtype(name))
            yield Recipe(target, partial(_merged, source, name, adapters, names))


def _merged(source: Source, name: str, adapters: Sequence[Adapter], names: set[str]) -> Tensor:
    """A tensor with the changes of the adapters added."""
    module, _, leaf = name.rpartition(".base_layer.")
    if not module or leaf != "weight":
        return source.read(name)
    weight = source.read(name).float()
    for adapter in adapters:
        delta = _delta(source, module, adapter, names)
        if delta is not None:
            weight += delta
    return weight.to(source.dtype(name))


def _delta(source: Source, module: str, adapter: Adapter, names: set[str]) -> Tensor | None:
    """The matrix that an adapter adds to a module's weight, in fp32; None if it adds nothing."""
    scale = adapter.scale(module)
    down, up = f"{module}.lora_A.{adapter.name}.weight", f"{module}.lora_B.{adapter.name}.weight"
    if down in names:
        a, b = (source.read(name, torch.float32) for name in (down, up))
        if a.dim() > 2:
            raise CheckpointError(f"{module!r} is a convolution with LoRA; merge it with PEFT")
        product = (b @ a) * scale
        return product.T if adapter.config.get("fan_in_fan_out") else product
    down, up = f"{module}.lora_embedding_A.{adapter.name}", f"{module}.lora_embedding_B.{adapter.name}"
    if down in names:
        a, b = (source.read(name, torch.float32) for name in (down, up))
        return (b @ a).T * scale
    return None
