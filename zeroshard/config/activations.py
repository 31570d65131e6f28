"""The options of activation checkpoints: which blocks are recomputed, and where their inputs wait until then."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from ..system.words import quoted
from .checks import AUTO, Mistake, Options, list_of, whole

_named_blocks = list_of("names of blocks", str)


def _recompute(value: Any) -> float | str | tuple[str, ...]:
    if value == AUTO and isinstance(value, str):
        return AUTO
    if isinstance(value, float) and 0 <= value <= 1:
        return value
    try:
        return _named_blocks(value)  # type: ignore[no-any-return]
    except ValueError:
        raise ValueError('must be a share from 0 to 1, "auto", or names of blocks') from None


@dataclass(frozen=True, kw_only=True)
class Activations(Options):
    """Blocks are recomputed in backward. Only the inputs of a block, its checkpoint, are stored until then."""

    path = "activations."
    accepted = "a zeroshard.Activations, or None"
    gone: ClassVar[Mapping[str, str]] = {
        "checkpoint": "activations.checkpoint is gone: leave it out to recompute every block, and say recompute=0 "
        "where it was False"
    }

    recompute: Annotated[float | Literal["auto"] | tuple[str, ...], _recompute] = 1.0
    """Which blocks are recomputed: a share of them from 0 to 1, their names (wildcards allowed), or "auto".

    A share means the first blocks. The last blocks keep their activations, because backward frees these first, before
    it recomputes a block and before gradients pile up. "auto" recomputes as few blocks as the device has room for. The
    plan decides where ``example=`` is given, else the memory that the second step takes, in which every block is still
    recomputed. A forward with larger inputs than these recomputes every block. With 0 or ``()`` the model calls
    ``zeroshard.checkpoint`` itself, and the options below apply to those calls.
    """
    partition: bool = False
    """Divide each checkpoint among the model-parallel ranks, instead of storing all of it on each of them (P_a)."""
    offload: bool = False
    """Checkpoints, divided or whole, wait for backward in host memory (P_a+cpu)."""
    prefetch: Annotated[int, whole(least=0)] = 1
    """How many blocks ahead a divided or offloaded checkpoint is brought back."""

    def conflicts(self) -> Iterator[Mistake]:
        if not (self.recompute or self.partition or self.offload):
            yield Mistake(
                ("recompute", "partition", "offload"),
                "activations has no effect with recompute, partition and offload all off; leave it out",
            )
        if self.prefetch != 1 and not (self.partition or self.offload):
            yield Mistake(
                ("prefetch", "partition", "offload"),
                "activations.prefetch has no effect without partition or offload; leave it out",
            )

    def recomputed(self, blocks: Sequence[str]) -> list[bool]:
        """For each block, by its name: whether it is recomputed. As long as "auto" is not decided, every block is.

        >>> Activations(recompute=0.5).recomputed(["a", "b", "c"])
        [True, True, False]
        >>> Activations(recompute="[ac]").recomputed(["a", "b", "c"])
        [True, False, True]
        """
        if self.recompute == AUTO:
            return [True] * len(blocks)
        if isinstance(self.recompute, tuple):
            for name in self.recompute:
                if not fnmatch.filter(blocks, name):
                    raise ValueError(
                        f"activations.recompute names {quoted(name)}, which is no block; blocks: "
                        f"{', '.join(blocks) or 'none'}"
                    )
            return [any(fnmatch.fnmatchcase(block, name) for name in self.recompute) for block in blocks]
        first = math.floor(float(self.recompute) * len(blocks) + 0.5)
        return [number < max(first, self.recompute > 0) for number in range(len(blocks))]

    @staticmethod
    def share(first: int, blocks: int) -> float:
        """The share that means so many first blocks, with as few digits as possible.

        >>> Activations.share(7, 48), Activations.share(48, 48)
        (0.15, 1.0)
        """
        digits = (round(first / blocks, number) for number in range(1, 16))
        return next(share for share in digits if math.floor(share * blocks + 0.5) == first)
