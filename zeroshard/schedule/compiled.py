"""Keeps hooks and recomputation outside of what ``torch.compile`` compiles: a graph is a block's own forward.

Users compile blocks, parts of the model or all of it, in place (``module.compile()``) or by a wrapper
(``torch.compile(module)``), before ``shard()`` or after. No graph can contain what happens around a unit: a gather
waits for other ranks, a release takes memory away. So a unit is called as usual, with its hooks, and what they call is
its forward, compiled with the user's options. There the parameters are ordinary ones. A recomputed block runs the same
graph again in backward.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any

from torch import nn

from ..recompute.checkpoint import RecomputedForward
from ..states.unit import Unit
from ..system import compat_compile
from ..system.callers import user_level
from ..system.compat_compile import Compiler


class Compiled:
    """The compiled forwards of one model's units and recomputed blocks, both called seams here."""

    def __init__(self, model: nn.Module, units: Iterable[Unit]) -> None:
        self._model = model
        self._units = {unit.module for unit in units if unit.module is not model}
        self._in_place: dict[nn.Module, Compiler] = {}
        """The compilers of seams on which the user has called ``compile()``."""
        self._compilers: dict[nn.Module, Compiler | None] = {}
        """The compiler that each seam's forward is compiled with now."""
        self._ordinary: dict[nn.Module, Callable[..., Any]] = {}
        """The forward of each of these before it was compiled."""
        self._closed: dict[nn.Module, Callable[..., Any]] = {}
        """What calls of seams go to inside compiled code: ``torch.compile`` does not look into it."""
        self._watched: list[nn.Module] = []
        """The seams and the modules around them."""
        self._calls: list[Callable[..., Any] | None] | None = None
        """What calls of these modules go to. None until the first look."""
        self._around: Compiler | None = None
        self._callers: list[tuple[CodeType, str]] = []
        """The code of compiled forwards around seams, with their names, until the first of them has run."""
        self._told: set[str] = set()

    def look(self, *, changed: bool) -> None:
        """Finds what the user has compiled. Called before each forward, so it costs little if that is as before.

        ``changed``: modules were put into the model since the last look.
        """
        around = compat_compile.surrounding_compiler()
        if changed or around is not self._around or compat_compile.compiled_calls(self._watched) != self._calls:
            self._around, self._callers = around, []
            found: dict[nn.Module, bool] = {}
            self._arrange(self._model, around, found)
            self._watched = [module for module, has_seam in found.items() if has_seam]
            self._calls = compat_compile.compiled_calls(self._watched)

    def _arrange(
        self, module: nn.Module, around: Compiler | None, found: dict[nn.Module, bool], own: Compiler | None = None
    ) -> bool:
        """Compiles the seams in a module. Returns whether there are any.

        ``around`` compiles the code that calls the module. ``own`` is of a wrapper that must not have hooks in it.
        ``found`` has the results for modules that were seen before.
        """
        if module in found:
            return found[module]
        found[module] = seam = self._is_seam(module)
        inner = compat_compile.uncompiled(module)
        own = own or self._own_compiler(module)
        if seam:
            compat_compile.set_call(module, None if around is None else self._close(module))
            if inner is module:
                self._compile(module, own or around)
        elif inner is not module and own is not None and self._is_seam(inner):
            module.forward = inner.__call__
            found[module] = self._arrange(inner, around, found, own)
            return found[module]
        within = own if inner is not module else own or around
        if within is not None:
            self._callers.append((inspect.unwrap(type(module).forward).__code__, f"{type(module).__name__}.forward"))
        for child in module.children():
            found[module] |= self._arrange(child, within, found)
        return found[module]

    def _is_seam(self, module: nn.Module) -> bool:
        return module in self._units or isinstance(vars(module).get("forward"), RecomputedForward)

    def _own_compiler(self, module: nn.Module) -> Compiler | None:
        """What the user has compiled this very module with."""
        if compat_compile.uncompiled(module) is not module:
            return compat_compile.compiler_of(module)
        (call,) = compat_compile.compiled_calls([module])
        if call is None or call is self._closed.get(module):
            return self._in_place.get(module)
        compiler = compat_compile.compiler_of(call)
        if compiler is not None and self._is_seam(module):
            self._in_place[module] = compiler
        return compiler

    def _close(self, module: nn.Module) -> Callable[..., Any]:
        if module not in self._closed:
            ordinary = compat_compile.ordinary_call(module)

            def call(*args: Any, **kwargs: Any) -> Any:
                if self._callers:
                    self._name_uncompiled_callers()
                return ordinary(*args, **kwargs)

            self._closed[module] = compat_compile.untraced(call)
        return self._closed[module]

    def _name_uncompiled_callers(self) -> None:
        """Warns of compiled forwards around a seam that run uncompiled."""
        callers, self._callers = self._callers, []
        running = list(compat_compile.running_codes())
        for code, title in callers:
            if title not in self._told and any(compat_compile.is_uncompiled_part(part, code) for part in running):
                self._told.add(title)
                warnings.warn(
                    f"{title} calls blocks in a loop, and torch.compile does not cut a graph in two inside a loop: the "
                    "blocks are compiled, the rest of this forward is not; compile parts of the rest, such as the head "
                    "or the loss, by themselves",
                    stacklevel=user_level(),
                )

    def _compile(self, module: nn.Module, compiler: Compiler | None) -> None:
        """Compiles the forward of a seam. None: makes it ordinary again."""
        if compiler is self._compilers.get(module):
            return
        forward = vars(module).get("forward")
        if isinstance(forward, RecomputedForward):
            forward.compile(compiler)
        elif compiler is None:
            module.forward = self._ordinary.pop(module)
        else:
            ordinary = self._ordinary.setdefault(module, module.forward)
            module.forward = compat_compile.compiled(compiler, ordinary)
        self._compilers[module] = compiler
