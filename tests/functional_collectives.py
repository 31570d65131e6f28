"""Counts torch's functional collectives, which DTensors issue in forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from zeroshard.comm.traffic import Collective, Meter
from zeroshard.system.compat import OperationMode
from zeroshard.system.structures import tensors_in


@contextmanager
def count_functional() -> Iterator[Meter]:
    """Inside, counts them in the same way as zeroshard counts its own collectives."""
    meter = Meter()

    class Watch(OperationMode):
        def run(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            result = operation(*args, **kwargs)
            largest = max(tensors_in((args, result)), key=Tensor.numel, default=None)
            if operation.namespace == "_c10d_functional" and largest is not None:
                for kind in Collective:
                    if operation._opname.startswith(kind.value):
                        meter.count(kind, largest.numel(), largest.itemsize)
            return result

    with Watch():
        yield meter
