"""Placeholders: a parameter or gradient whose value is not current shows NaN, one scalar expanded to its shape.

Reading a tensor whose storage is freed crashes the process, and an old value misleads silently. A placeholder does
neither: shape and dtype are right, reading gives NaN, in-place arithmetic raises. torch allows two ways to write to a
placeholder. ``fill_`` and similar functions raise the parameter's version, which shows the write. A write through
``.data`` or numpy changes the scalar, and ``check`` finds that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..system import compat


class Placeholders:
    """The placeholders of one model: one NaN scalar a dtype, on the model's device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._scalars: dict[torch.dtype, Tensor] = {}
        self._witnesses: list[Callable[[], list[str]]] = []
        self._last_look: tuple[list[Tensor], torch.cuda.Event] | None = None

    def parameter(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """For a parameter's data. Shares one scalar, so that a thousand released parameters cost four bytes."""
        if dtype not in self._scalars:
            self._scalars[dtype] = torch.full((), math.nan, dtype=dtype, device=self._device)
        return self._scalars[dtype].expand(tuple(shape))

    def gradients(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> list[Tensor]:
        """For ``grad`` of some parameters. Each has a version of its own (``.data``), which shows if it was zeroed."""
        scalars = torch.full((len(shapes),), math.nan, dtype=dtype, device=self._device)
        return [scalar.expand(tuple(shape)).data for scalar, shape in zip(scalars.unbind(), shapes, strict=True)]

    def ask_when_written(self, witness: Callable[[], list[str]]) -> None:
        """``witness`` returns the names of written parameters. ``check`` calls it to name them in its error."""
        self._witnesses.append(witness)

    def repair(self) -> None:
        """Makes all placeholders of parameters NaN again."""
        for scalar in self._scalars.values():
            scalar.fill_(math.nan)

    def check_now(self) -> None:
        """``check`` on a CPU, where reading the value does not wait for a device."""
        if self._device.type == "cpu":
            self.check()

    def check(self) -> None:
        """Raises if somebody wrote to a placeholder past autograd.

        On CUDA the check looks at the values from the time of the last call: the present values would have to be
        waited for.
        """
        if any(map(compat.is_fake, self._scalars.values())):
            return
        seen = list(self._scalars.values())
        if self._device.type == "cuda":
            look = ([scalar.to("cpu", non_blocking=True) for scalar in seen], torch.cuda.Event())
            look[1].record()
            before, self._last_look = self._last_look, look
            if before is None:
                return
            before[1].synchronize()
            seen = before[0]
        if not all(math.isnan(value) for value in map(float, seen)):
            self.repair()
            self._last_look = None
            names = [name for witness in self._witnesses for name in witness()]
            which = f"parameter {names[0]!r}" if names else "a parameter (through .data or numpy)"
            raise RuntimeError(
                f"{which} was written to while its value was not here, so the write is lost; "
                "write inside `with zeroshard.gathered(model, write=True):`"
            )
