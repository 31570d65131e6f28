"""DeepSpeed's ``zero.Init`` and ``zero.GatheredParameters``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn

from ...api import gathered
from ...runtime import is_sharded


class Init:
    """Inside this block models are built as everywhere else: ``initialize`` divides them, unit by unit.

    For a model that does not fit in host memory use ``with torch.device("meta"):`` in its place.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes DeepSpeed's arguments. None of them is needed."""

    def __enter__(self) -> None:
        return

    def __exit__(self, *_: object) -> None:
        return


@contextmanager
def GatheredParameters(  # noqa: N802 - DeepSpeed's name
    params: nn.Parameter | Iterable[nn.Parameter],
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """Inside this block parameters are whole. With ``modifier_rank=0`` rank 0's changes count on all ranks.

    Parameters that are not sharded yet are whole already. There rank 0's changes count too: ``initialize`` takes the
    values of rank 0.
    """
    if modifier_rank is not None and modifier_rank != 0 and dist.is_initialized():
        raise ValueError(f"modifier_rank={modifier_rank} is not there: rank 0's changes count; use modifier_rank=0")
    parameters = [params] if isinstance(params, nn.Parameter) else list(params)
    if not enabled or not is_sharded(nn.ParameterList(parameters)):
        yield
        return
    with gathered(parameters, write=modifier_rank is not None):
        yield
