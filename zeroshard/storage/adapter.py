"""The configuration of a LoRA adapter, as PEFT writes it: every value that an export uses is checked.

PEFT takes the keys of ``alpha_pattern`` for regular expressions. An expression of somebody else can take forever, so
none is compiled here. A key is the name of a module, or the end of its name. Anything else is refused. The keys of
``rank_pattern`` are not needed: a matrix has as many rows as its rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..system.words import quoted
from .format import CheckpointError, InvalidIndexError

PREFIX = "base_model.model."
"""PEFT puts this before the names of the model that it wraps."""
LARGEST_ALPHA = 1e9
LARGEST_RANK = 1 << 31
MOST_ADAPTERS = 256
_NAME = re.compile(r"(\^?)([\w.\-]+)\$?")
"""A key of a pattern that is a name: the whole name behind "^", or else the end of a name."""


@dataclass(frozen=True)
class Adapter:
    """One adapter and its configuration."""

    name: str
    config: Mapping[str, Any]

    @classmethod
    def of(cls, adapters: Mapping[str, Any], name: str) -> Adapter:
        """The adapter of this name.

        Raises:
            CheckpointError: there is none, or it is no LoRA.
            InvalidIndexError: its configuration makes no sense.
        """
        if name not in adapters:
            raise CheckpointError(f"there is no adapter {quoted(name)}; there are {quoted(list(adapters))}")
        if len(adapters) > MOST_ADAPTERS:
            raise CheckpointError(f"there are {len(adapters)} adapters; at most {MOST_ADAPTERS} are exported")
        config = adapters[name]
        if not isinstance(config, dict) or config.get("peft_type") != "LORA":
            kind = config.get("peft_type") if isinstance(config, dict) else config
            raise CheckpointError(
                f"adapter {quoted(name)} is {quoted(kind)}, and only LoRA is exported; save it with PEFT instead"
            )
        made = cls(name, config)
        made.check()
        return made

    def scale(self, module: str, rank: int) -> float:
        """The factor of the product of the adapter's matrices for a module.

        Raises:
            CheckpointError: a pattern is a regular expression.
            InvalidIndexError: the configuration has no such rank.
        """
        ranks = {value for _, value in self._values("r", "rank_pattern")}
        if rank not in ranks:
            raise InvalidIndexError(
                f"adapter {quoted(self.name)} has matrices of rank {rank} for {quoted(module)}, and its configuration "
                f"has r = {quoted(sorted(ranks))}"
            )
        alpha = self.config["lora_alpha"]
        for key, value in (self.config.get("alpha_pattern") or {}).items():
            if self._names(key, module.removeprefix(PREFIX)):
                alpha = value
                break
        return float(alpha) / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def _names(self, key: str, module: str) -> bool:
        """True if a key of ``alpha_pattern`` names a module."""
        found = _NAME.fullmatch(key.replace(r"\.", "."))
        if found is None:
            raise CheckpointError(
                f"adapter {quoted(self.name)} has {quoted(key)} in alpha_pattern, a regular expression, and none is "
                "run here; write the names of modules there, or merge it with PEFT"
            )
        whole, name = found.groups()
        return module == name or (not whole and module.endswith(f".{name}"))

    def check(self) -> None:
        """Every value that an export uses must make sense. Raises InvalidIndexError."""
        for key, value in self._values("r", "rank_pattern"):
            if type(value) is not int or not 0 < value < LARGEST_RANK:
                raise self._fault(key, value, f"a whole number, from 1 to below {LARGEST_RANK}")
        for key, value in self._values("lora_alpha", "alpha_pattern"):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not abs(value) <= LARGEST_ALPHA:
                raise self._fault(key, value, f"a number of at most {LARGEST_ALPHA:g}")
        for key in ("use_rslora", "fan_in_fan_out"):
            if self.config.get(key) not in (None, True, False):
                raise self._fault(key, self.config[key], "true or false")

    def _values(self, key: str, pattern: str) -> Iterator[tuple[str, Any]]:
        """A value and the exceptions to it, each with its place in the configuration."""
        yield key, self.config.get(key)
        exceptions = self.config.get(pattern) or {}
        if not isinstance(exceptions, dict) or not all(isinstance(name, str) for name in exceptions):
            raise self._fault(pattern, exceptions, "a table")
        yield from ((f"{pattern}[{quoted(name)}]", value) for name, value in exceptions.items())

    def _fault(self, key: str, value: object, wanted: str) -> InvalidIndexError:
        return InvalidIndexError(f"adapter {quoted(self.name)} has {key} = {quoted(value)}, not {wanted}")
