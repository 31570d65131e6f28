"""The private names of torch that tell what ``torch.compile`` has compiled, and with which options."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FrameType
from typing import Any, TypeVar, cast

import torch
from torch import nn

Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(module: nn.Module) -> nn.Module:
    """The module behind ``torch.compile(module)``. Any other module is returned as it is.

    The wrapper is known by the name of its child: importing its class takes half a second.
    """
    inner = module._modules.get("_orig_mod")
    return module if inner is None else inner


Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]
"""``torch.compile`` with the options of one of the user's calls of it: backend, mode, fullgraph, dynamic and others."""


def compiled_calls(modules: Sequence[nn.Module]) -> list[Callable[..., Any] | None]:
    """What runs instead of each module's ordinary call: what ``module.compile()`` has made, or ``set_call``."""
    return [module._compiled_call_impl for module in modules]


def set_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Calls of a module go to ``call``. None: the ordinary way, hooks and forward."""
    module._compiled_call_impl = call


def ordinary_call(module: nn.Module) -> Callable[..., Any]:
    """The ordinary call of a module, with its hooks, compiled or not."""
    return module._call_impl


def compiler_of(compiled: Any) -> Compiler | None:
    """The compiler that has made a function or module. None if ``torch.compile`` has not made it.

    A function that ``torch.compile`` has made keeps it in a method that tells the options of Inductor.
    """
    tell = getattr(compiled, "get_compiler_config", None)
    return None if tell is None else cast(Compiler, tell.__closure__[0].cell_contents)


def compiled(compiler: Compiler | None, function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function, unless there is no compiler or the user has kept torch.compile from the function."""
    return function if compiler is None or getattr(function, "_torchdynamo_disable", False) else compiler(function)


_codes: list[Any] = []
"""The code of functions that ``torch.compile`` and ``torch.compiler.disable`` make, once they are needed."""


def surrounding_compiler() -> Compiler | None:
    """The compiler of the innermost compiled function that runs now, around an untraced function that asks.

    None if that is inside another untraced function.
    """
    if "torch._dynamo" not in sys.modules:
        return None
    if not _codes:
        compiled = torch.compile(_nothing, backend="eager")
        _codes.extend((compiled.__code__, torch.compiler.disable(_nothing).__code__))
    compiled_code, untraced_code = _codes
    frame, untraced_frames = sys._getframe(), 0
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        if frame.f_code is untraced_code:
            untraced_frames += 1
            if untraced_frames == 2:
                return None
        elif frame.f_code is compiled_code:
            return cast(Compiler, frame.f_locals["self"])
    return None


def _nothing() -> None:
    pass


def running_codes() -> Iterator[CodeType]:
    """The code of all functions that run now on this thread, innermost first."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def is_uncompiled_part(running: CodeType, function: CodeType) -> bool:
    """Whether code that runs is a function, or its part after a graph that was cut, and not what was compiled of it."""
    return (
        running.co_filename == function.co_filename
        and (
            running.co_name == function.co_name
            or running.co_name.startswith(f"torch_dynamo_resume_in_{function.co_name}_")
        )
        and function.co_firstlineno <= running.co_firstlineno <= max(line or 0 for *_, line in function.co_lines())
        and not any(name.startswith(("__compiled_fn", "__resume_at")) for name in running.co_names)
    )


def untraced(function: Function) -> Function:
    """Makes ``torch.compile`` break the graph at a hook instead of tracing it."""
    reason = (
        "zeroshard.shard() gathers, releases and reduces parameters here, which no graph can contain; fullgraph=True "
        "is for modules that are one unit each, as in `for block in model.blocks: block.compile(fullgraph=True)`; "
        "where a block is several units, a larger max_unit_bytes makes it one"
    )
    return cast(Function, torch.compiler.disable(function, reason=reason))
