"""Exports a checkpoint in Hugging Face's format: safetensors shards, an index, a configuration.

The export runs in one process, tensor by tensor. It needs neither the model's code nor memory for the whole model: only
one tensor at a time is whole. LoRA adapters, as PEFT names them, are exported alone, or added to the weights that they
adapt.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..init.safetensors_file import METADATA
from ..offload.host_buffers import round_to
from ..system.words import quoted
from .adapter import PREFIX, Adapter
from .folder import candidates
from .format import BUFFER, VALUE, CheckpointError, InvalidIndexError
from .frozen import NAME as FROZEN
from .output import SHARD_BYTES, WEIGHTS, Output, Shards, WholeTensor, as_json
from .read import CheckpointReader, read_index
from .regions import Region, whole
from .validate import check_about, check_frozen, decoded, no_tensor
from .values import NAMED

PARAMETER_DTYPES = ("float64", "float32", "float16", "bfloat16")


class Recipe(NamedTuple):
    """A tensor to be written, and how to make it when its turn comes."""

    whole: WholeTensor
    make: Callable[[], Tensor]
    origin: str
    """The tensor's name in the checkpoint."""


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
        frozen = decoded(self._index.file, self._index.values.get(FROZEN), FROZEN, no_tensor) or {}
        check_frozen(self._index, frozen)
        self.lacking = list(frozen)
        """Frozen parameters that the checkpoint leaves out."""
        self._on_host = set(self.about["rounded_on_host"])
        computed = self.about.get("parameter_dtype")
        if computed is not None and computed not in PARAMETER_DTYPES:
            raise InvalidIndexError(
                f"{self._index.file}: about.parameter_dtype is {quoted(computed)}, not one of {PARAMETER_DTYPES}"
            )
        self._dtype = dtype or NAMED.get(computed or "")

    @property
    def names(self) -> list[str]:
        """Parameters and buffers."""
        return [name for name, kind in self._index.places if kind in (VALUE, BUFFER)]

    def _kind(self, name: str) -> str:
        return VALUE if (name, VALUE) in self._index.places else BUFFER

    def is_buffer(self, name: str) -> bool:
        return self._kind(name) == BUFFER

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

    def recipe(self, name: str, new_name: str) -> Recipe:
        """Exports a tensor under another name."""
        dtype = self.dtype(name)
        return Recipe(WholeTensor(new_name, self.shape(name), dtype), lambda: self.read(name, dtype), name)


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
            f"{source.folder} holds adapters ({quoted(list(adapters))}) on a base model; export with --merge, or with "
            "--adapter-only"
        )
    if adapter is None and source.lacking:
        raise CheckpointError(
            f"{source.folder} leaves out frozen parameters, {quoted(source.lacking[0])} and {len(source.lacking) - 1} "
            "more, which its run read from files; export with --adapter-only, and PEFT adds the adapters to that model"
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
    _check_names(source, recipes)
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


def _check_names(source: Source, recipes: Sequence[Recipe]) -> None:
    """Every tensor must have a name of its own, which safetensors can hold."""
    if not recipes:
        raise CheckpointError(f"{source.folder} has no tensor of what is to be exported")
    origins: dict[str, str] = {}
    for recipe in recipes:
        name = recipe.whole.name
        if name in origins:
            raise CheckpointError(
                f"{quoted(origins[name])} and {quoted(recipe.origin)} would both be written as {quoted(name)}; rename "
                "one of them in the model"
            )
        if name in ("", METADATA) or not _is_text(name):
            raise InvalidIndexError(f"{source.folder}: safetensors can hold no tensor of the name {quoted(name)}")
        origins[name] = recipe.origin


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:  # half a character, which JSON can write
        return False
    return True


def _configs(source: Source, recipes: Sequence[Recipe], given: bytes | None) -> dict[str, bytes]:
    """The files to write beside the weights, by name."""
    if given is not None:
        return {"config.json": given}
    config = source.about.get("config")
    if config is None:
        return {}
    if "model_type" in config:  # of transformers
        dtypes = {recipe.whole.dtype for recipe in recipes if recipe.whole.dtype.is_floating_point}
        config = {**config, "architectures": [source.about["class"]]}
        if dtypes:
            widest = max(dtypes, key=lambda dtype: dtype.itemsize)
            config["dtype"] = str(widest).removeprefix("torch.")
    files = {"config.json": as_json(config)}
    if source.about.get("generation_config") is not None:
        files["generation_config.json"] = as_json(source.about["generation_config"])
    return files


# -- LoRA -------------------------------------------------------------------------------------------------------------


def adapter_tensors(source: Source, adapter: Adapter) -> Iterator[Recipe]:
    """The adapter's own tensors, under the names by which PEFT loads them."""
    name_of = re.escape(adapter.name)
    of_matrix = re.compile(rf"(\.lora_\w+)\.{name_of}(?=\.|$)")
    of_module = re.compile(rf"\.modules_to_save\.{name_of}\.")
    for name in [*source.lacking, *source.names]:
        plain, found = of_matrix.subn(r"\1", name)
        if not found:
            plain, found = of_module.subn(".", name)
        if found and name in source.lacking:
            raise CheckpointError(
                f"{source.folder} leaves out {quoted(name)}, a frozen part of the adapter {quoted(adapter.name)}; save "
                "it whole, without frozen=False"
            )
        if found:
            yield source.recipe(name, plain)


class Change(NamedTuple):
    """What an adapter adds to a weight: the product of two matrices and a factor."""

    down: str
    up: str
    scale: float
    transposed: bool
    """True if the weight is stored as the transposed product."""


def merged_tensors(source: Source, adapters: Sequence[Adapter], tied: bool) -> Iterator[Recipe]:
    """The model's tensors with the changes of the adapters added, under the names that they have without PEFT.

    Raises:
        CheckpointError: a tensor of an adapter cannot be merged here, or does not fit the weight that it changes.
    """
    names = set(source.names)
    for name in names:
        if tied and ".lora_embedding_" in name:
            raise CheckpointError(
                f"{quoted(name)} adapts an embedding whose weight is also the head, which the adapter leaves as "
                "it was: merged, they would differ; untie them, or export with --adapter-only"
            )
        is_more = ".lora_magnitude_vector" in name or ".token_adapter." in name
        if is_more or (".lora_B" in name and name.endswith(".bias")):
            raise CheckpointError(
                f"{quoted(name)} makes this more than plain LoRA (DoRA, single tokens, or a bias); merge it with PEFT"
            )
    left = {name for name in names if _is_of_adapter(name)}
    for name in source.names:
        if _is_of_adapter(name):
            continue
        plain = name.removeprefix(PREFIX).replace(".base_layer.", ".").replace(".original_module.", ".")
        saved = [
            other
            for adapter in adapters
            if (other := name.replace(".original_module.", f".modules_to_save.{adapter.name}.")) != name
            and other in names
        ]
        if saved:
            changes: list[Change] = []
            _check_shape(source, saved[-1], source.shape(saved[-1]), name)
        else:
            changes = list(_changes(source, name, adapters, names))
        left.difference_update(saved, *(change[:2] for change in changes))
        target = WholeTensor(plain, source.shape(name), source.dtype(name))
        yield Recipe(target, partial(_merged, source, saved[-1] if saved else name, target.dtype, changes), name)
    if left:
        raise CheckpointError(
            f"{quoted(min(left))} belongs to no adapter that is known, or to no weight that is merged here; merge it "
            "with PEFT"
        )


def _is_of_adapter(name: str) -> bool:
    return ".lora_" in name or ".modules_to_save." in name


def _changes(source: Source, name: str, adapters: Sequence[Adapter], names: set[str]) -> Iterator[Change]:
    """What the adapters add to a tensor. Checks shapes and scales, and reads no matrix."""
    module, _, leaf = name.rpartition(".base_layer.")
    if not module or leaf != "weight":
        return
    for adapter in adapters:
        pairs = [
            (f"{module}.lora_A.{adapter.name}.weight", f"{module}.lora_B.{adapter.name}.weight"),
            (f"{module}.lora_embedding_A.{adapter.name}", f"{module}.lora_embedding_B.{adapter.name}"),
        ]
        for is_embedding, (down, up) in enumerate(pairs):
            if down not in names and up not in names:
                continue
            for matrix, other in ((down, up), (up, down)):
                if matrix not in names:
                    raise CheckpointError(f"{source.folder} has {quoted(other)} without {quoted(matrix)}")
                if len(source.shape(matrix)) != 2:
                    raise CheckpointError(f"{quoted(matrix)} is no matrix, as of a convolution; merge it with PEFT")
            (rank, inputs), (outputs, columns) = source.shape(down), source.shape(up)
            if rank != columns:
                raise CheckpointError(f"{quoted(down)} has rank {rank}, and {quoted(up)} has rank {columns}")
            transposed = bool(is_embedding or adapter.config.get("fan_in_fan_out"))
            _check_shape(source, up, (inputs, outputs) if transposed else (outputs, inputs), name)
            yield Change(down, up, adapter.scale(module, rank), transposed)


def _check_shape(source: Source, change: str, shape: tuple[int, ...], name: str) -> None:
    if shape != source.shape(name):
        raise CheckpointError(
            f"{quoted(change)} changes a tensor of shape {list(shape)}, and {quoted(name)} has shape "
            f"{list(source.shape(name))}"
        )


def _merged(source: Source, name: str, dtype: torch.dtype, changes: Sequence[Change]) -> Tensor:
    """A tensor with changes added. A parameter must be finite before and after, or else the model is of no use."""
    values = source.read(name, dtype)
    if source.is_buffer(name):  # a mask may be infinite
        return values
    _check_finite(values, f"{quoted(name)} has values that are NaN or infinite in {dtype}")
    if not changes:
        return values
    weight = values.float()
    for change in changes:
        down, up = (source.read(matrix, torch.float32) for matrix in change[:2])
        for matrix, elements in zip(change, (down, up), strict=False):
            _check_finite(elements, f"{quoted(matrix)} has values that are NaN or infinite")
        product = (up @ down) * change.scale
        weight += product.T if change.transposed else product
    merged = weight.to(dtype)
    _check_finite(merged, f"{quoted(name)} and its adapters add up to values that are infinite in {dtype}")
    return merged


def _check_finite(values: Tensor, told: str) -> None:
    if values.is_floating_point() and not bool(torch.isfinite(values).all()):
        raise CheckpointError(f"{told}, so nothing is written; export a checkpoint from before, or without --merge")
