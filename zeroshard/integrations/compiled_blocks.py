"""Compiles the blocks of a sharded model where ``torch_compile=True`` or ``dynamo_backend=`` asks for compilation.

Accelerate would wrap the whole model. A graph ends at each unit of a sharded model, and torch does not cut a graph
inside a loop over blocks, so only the blocks would be compiled, and a wrapper would hide the model. Each block is
therefore compiled in place, with the user's options.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate.utils import DynamoBackend  # type: ignore[import-untyped]
from torch import nn

from ..runtime import runtime_of
from ..system import compat_compile

MOVING = "a CUDA graph keeps the addresses of parameters, and sharding gathers them to others"
REFUSED_MODES = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}
"""Modes that record CUDA graphs, and what to say instead."""
CUDA_GRAPHS = "triton.cudagraphs"
"""The option of Inductor that those modes set."""


def check_compiler(plugin: Any) -> None:
    """Raise if blocks cannot be compiled as a ``TorchDynamoPlugin`` says.

    Raises:
        ValueError: naming the setting, and what to write instead.
    """
    if plugin.backend == DynamoBackend.NO:
        return
    if plugin.mode in REFUSED_MODES:
        raise ValueError(
            f"torch_compile_mode={plugin.mode!r} does not go with zeroshard: {MOVING}; "
            f"write {REFUSED_MODES[plugin.mode]!r}"
        )
    if plugin.backend == DynamoBackend.CUDAGRAPHS:
        raise ValueError(f'the backend "cudagraphs" does not go with zeroshard: {MOVING}; write "inductor"')
    if (plugin.options or {}).get(CUDA_GRAPHS):
        raise ValueError(f"the option {CUDA_GRAPHS!r} does not go with zeroshard: {MOVING}; leave it out")


def compile_blocks(model: nn.Module, plugin: Any) -> None:
    """Compile every unit that is not compiled yet, in place. A model that is one unit is compiled whole."""
    if plugin.backend == DynamoBackend.NO:
        return
    parts = [unit.module for unit in runtime_of(model).units]
    blocks = [part for part in parts if part is not model] or [model]
    for block, call in zip(blocks, compat_compile.compiled_calls(blocks), strict=True):
        if call is None and compat_compile.uncompiled(block) is block:
            block.compile(**plugin.to_kwargs())


@contextmanager
def not_compiled(plugin: Any) -> Iterator[None]:
    """Inside, Accelerate compiles nothing by itself."""
    backend, plugin.backend = plugin.backend, DynamoBackend.NO
    try:
        yield
    finally:
        plugin.backend = backend
