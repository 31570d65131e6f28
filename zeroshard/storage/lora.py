"""LoRA adapters as PEFT names them: taken out alone, or added to the weights that they adapt."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .format import CheckpointError, InvalidIndexError

PREFIX = "base_model.model."
"""What PEFT puts before the names of the model that it wraps."""

Found = tuple[str, tuple[int, ...], torch.dtype, Callable[[], Tensor]]


class Source(Protocol):
    """Where tensors come from."""

    @property
    def names(self) -> list[str]:
        """All of them."""

    def shape(self, name: str) -> tuple[int, ...]: ...
    def dtype(self, name: str) -> torch.dtype: ...
    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor: ...


@dataclass(frozen=True)
class Adapter:
    """One adapter and its configuration."""

    name: str
    config: Mapping[str, Any]

    @classmethod
    def of(cls, adapters: Mapping[str, Any], name: str) -> Adapter:
        """The adapter of this name, if it is one that is known here."""
        if name not in adapters:
            raise CheckpointError(f"there is no adapter {name!r}; there are {', '.join(adapters)}")
        config = adapters[name]
        if not isinstance(config, dict) or config.get("peft_type") != "LORA":
            kind = config.get("peft_type") if isinstance(config, dict) else config
            raise CheckpointError(f"adapter {name!r} is {kind}, and only LoRA is exported; save it with PEFT instead")
        _check_scales(name, config)
        return cls(name, config)

    def scale(self, module: str) -> float:
        """By what the product of an adapter's matrices is multiplied."""
        rank = _by_pattern(self.config.get("rank_pattern"), module, self.config["r"])
        alpha = _by_pattern(self.config.get("alpha_pattern"), module, self.config["lora_alpha"])
        return float(alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank))


def _check_scales(name: str, config: Mapping[str, Any]) -> None:
    """What a scale is found from."""
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


def adapter_tensors(source: Source, adapter: Adapter) -> Iterator[Found]:
    """The adapter's own tensors, by the names under which PEFT loads them."""
    name_of = re.escape(adapter.name)
    of_matrix = re.compile(rf"(\.lora_\w+)\.{name_of}(?=\.|$)")
    of_module = re.compile(rf"\.modules_to_save\.{name_of}\.")
    for name in source.names:
        plain, found = of_matrix.subn(r"\1", name)
        if not found:
            plain, found = of_module.subn(".", name)
        if found:
            yield plain, source.shape(name), source.dtype(name), _reading(source, name)


def merged_tensors(source: Source, adapters: Sequence[Adapter], tied: bool) -> Iterator[Found]:
    """The model's tensors without PEFT's names, each with what adapters add to it."""
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
            yield plain, source.shape(name), source.dtype(name), _reading(source, saved[-1], source.dtype(name))
            continue
        yield plain, source.shape(name), source.dtype(name), _merging(source, name, adapters, names)


def _reading(source: Source, name: str, dtype: torch.dtype | None = None) -> Callable[[], Tensor]:
    return lambda: source.read(name, dtype)


def _merging(source: Source, name: str, adapters: Sequence[Adapter], names: set[str]) -> Callable[[], Tensor]:
    def make() -> Tensor:
        module, _, leaf = name.rpartition(".base_layer.")
        if not module or leaf != "weight":
            return source.read(name)
        weight = source.read(name).float()
        for adapter in adapters:
            delta = _delta(source, module, adapter, names)
            if delta is not None:
                weight += delta
        return weight.to(source.dtype(name))

    return make


def _delta(source: Source, module: str, adapter: Adapter, names: set[str]) -> Tensor | None:
    """What an adapter adds to a module's weight, in fp32."""
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
