"""Tensors that transformers joins as it loads: a model's experts are one parameter, and a tensor each in the files.

The names of both come from the table of conversions that transformers itself loads with. A conversion that only stacks
experts, or joins two matrices of each expert before, leaves the elements in the order of the files' tensors, one behind
the other. So a rank reads the ranges that it needs, as of any tensor. Other conversions are not made here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..system.compat_compile import uncompiled
from ..system.words import quoted
from .safetensors_file import DiskTensor

STACKED = [("MergeModulelist", {"dim": 0})]
"""The operations of transformers that stack a tensor of every expert."""
PAIRED = [*STACKED, ("Concatenate", {"dim": 1, "num_shards_attribute": None})]
"""The same for several tensors of every expert, one below the other."""


class JoinedTensor(NamedTuple):
    """A tensor whose elements are those of several tensors on disk, one behind the other."""

    parts: tuple[DiskTensor, ...]
    """All with the same shape and dtype."""
    shape: tuple[int, ...]

    @property
    def file(self) -> Any:
        return self.parts[0].file

    @property
    def name(self) -> str:
        return self.parts[0].name

    @property
    def dtype(self) -> str:
        return self.parts[0].dtype

    def ranges(self, start: int, stop: int) -> Iterator[tuple[DiskTensor, int, int]]:
        """Divide a range of elements into ranges of the parts."""
        size = math.prod(self.parts[0].shape)
        while start < stop:
            number, begin = divmod(start, size)
            end = min(size, begin + stop - start)
            yield self.parts[number], begin, end
            start += end - begin


class Part(NamedTuple):
    """A tensor of the files, and where it is in the model's tensor."""

    name: str
    region: tuple[int | slice, ...]
    """The part of the model's tensor. Empty: all of it."""


class _Place(NamedTuple):
    """Where a tensor of the files goes."""

    target: str
    expert: int
    matrix: int
    """Which of an expert's tensors that are joined."""
    matrices: int


class Conversions:
    """What transformers does to the tensors of a model's files, as far as it is done here."""

    def __init__(self, model: nn.Module) -> None:
        found = _table(model)
        self._renamings = [each for each in found if not hasattr(each, "operations")]
        self._joining = [each for each in found if _operations(each) in (STACKED, PAIRED)]

    def joined(
        self, stored: Mapping[str, DiskTensor], named: Mapping[str, Tensor]
    ) -> dict[str, DiskTensor | JoinedTensor]:
        """Return the tensors of files by the names that the model has. Others keep the names of the files.

        Raises:
            ValueError: an expert lacks a tensor, or its tensor has another shape or dtype.
        """
        found: dict[str, DiskTensor | JoinedTensor] = {}
        groups: dict[str, dict[tuple[int, int], DiskTensor]] = {}
        matrices: dict[str, int] = {}
        for name in sorted(stored):
            place = None if name in named else self._place(name)
            if place is None or place.target not in named or place.target in stored:
                found[name] = stored[name]
            elif not place.matrices:
                found[place.target] = stored[name]
            else:
                matrices[place.target] = place.matrices
                groups.setdefault(place.target, {})[place.expert, place.matrix] = stored[name]
        for target, parts in groups.items():
            found[target] = _join(target, parts, matrices[target])
        return found

    def parts(self, name: str, shape: tuple[int, ...]) -> list[Part]:
        """Return the tensors that the files have in place of a tensor of the model."""
        found = [Part(name, ())]
        for joining in self._joining:
            back = joining.reverse_transform()
            renamed, matched = back.rename_source_key(name)
            if matched is not None:
                first, rows = back.target_patterns[0], shape[1] // len(back.target_patterns)
                found = [
                    Part(
                        renamed.replace(first, pattern).replace("*", str(expert)), (expert, slice(begin, begin + rows))
                    )
                    for expert in range(shape[0])
                    for begin, pattern in zip(range(0, shape[1], rows), back.target_patterns, strict=True)
                ]
                break
        for renaming in reversed(self._renamings):
            back = renaming.reverse_transform()
            found = [Part(back.rename_source_key(part.name)[0], part.region) for part in found]
        places = [self._place(part.name) for part in found]
        return found if all(place is not None and place.target == name for place in places) else [Part(name, ())]

    def _place(self, name: str) -> _Place | None:
        for renaming in self._renamings:
            name, _ = renaming.rename_source_key(name)
        for joining in self._joining:
            target, matched = joining.rename_source_key(name)
            if matched is not None:
                number = re.search(re.escape(matched).replace(r"\*", r"(\d+)"), name)
                if number is None:
                    return None
                patterns = joining.source_patterns
                return _Place(target, int(number[1]), patterns.index(matched), len(patterns))
        return _Place(name, 0, 0, 0)


def _table(model: Any) -> list[Any]:
    """The conversions of transformers for one of its models. A model of another library has none."""
    model = uncompiled(model)
    model = model.get_base_model() if getattr(model, "peft_config", None) is not None else model
    if not hasattr(model, "base_model_prefix"):
        return []
    try:
        from transformers import PreTrainedModel
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange
    except ImportError:
        return []
    if not isinstance(model, PreTrainedModel):
        return []
    table = get_model_conversion_mapping(model, add_legacy=False)
    return [each for each in table if not isinstance(each, PrefixChange)]  # a base model's prefix is found by itself


def _operations(conversion: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(type(each).__name__, vars(each)) for each in getattr(conversion, "operations", ())]


def _join(target: str, parts: Mapping[tuple[int, int], DiskTensor], matrices: int) -> JoinedTensor:
    first = parts[min(parts)]
    experts = len(parts) // matrices
    order = list(product(range(experts), range(matrices)))
    lacking = next((place for place in order if place not in parts), None)
    if lacking is not None or len(order) != len(parts):
        last = max(parts.values(), key=lambda entry: entry.name)
        raise ValueError(
            f"{quoted(target)} is made of {len(parts)} tensors, {quoted(first.name)} to {quoted(last.name)}, of which "
            "some are missing: every expert from 0 on needs each of them"
        )
    for entry in parts.values():
        if entry[2:4] != first[2:4] or not entry.shape:
            raise ValueError(
                f"{quoted(entry.name)} is {quoted(list(entry.shape))} in {entry.dtype}, and {quoted(first.name)} is "
                f"{quoted(list(first.shape))} in {first.dtype}; both are parts of {quoted(target)}"
            )
    rows, *rest = first.shape
    return JoinedTensor(tuple(parts[place] for place in order), (experts, matrices * rows, *rest))
