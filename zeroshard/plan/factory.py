"""Plans for a module of the user: a function of the user builds the module on the meta device, and it is traced."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from ..config.checks import nearest
from ..config.options import Activations
from .known_values import KnownValues
from .module_trace import ModuleTrace
from .shape import ModelError, Setup
from .tracer import samples_of, tokens_of, trace


class Factory:
    """``module:function``. The function returns an ``nn.Module``, or a pair of an ``nn.Module`` and its inputs.

    Inputs are a tuple or a dict of tensors on the meta device. If the function has parameters called ``batch`` and
    ``sequence``, their values are passed. If it returns no inputs, the module is called with token ids.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        module, _, name = source.partition(":")
        if not module or not name:
            raise ModelError(f"--model {source}: must be module:factory, as in my_project.models:build")
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        try:
            found: Any = importlib.import_module(module)
        except (Exception, SystemExit) as error:
            raise ModelError(f"--model {source}: {module} cannot be imported: {error_text(error)}") from None
        for part in name.split("."):
            if not hasattr(found, part):
                functions = [known for known, value in vars(found).items() if callable(value)]
                raise ModelError(f"--model {source}: {module} has no {part!r}{nearest(part, functions)}")
            found = getattr(found, part)
        if not callable(found):
            raise ModelError(f"--model {source}: {name} is no function, but {type(found).__name__}")
        self.function: Callable[..., Any] = found
        self._takes: set[str] = set()
        with suppress(TypeError, ValueError):  # a function in C may have no signature
            self._takes = {"batch", "sequence"} & set(inspect.signature(found).parameters)
        self._inputs: Any = None

    @lru_cache(maxsize=64)  # noqa: B019 - a factory lives as long as the command
    def trace(
        self, precision: str, batch: int, sequence: int, max_unit_bytes: int, activations: Activations | None = None
    ) -> ModuleTrace:
        """Builds the module on the meta device and traces a forward and backward."""
        model, inputs, values = self._build(batch, sequence)
        self._inputs = inputs
        try:
            traced = trace(
                model.to("meta"),
                inputs,
                precision,
                batch,
                sequence,
                max_unit_bytes,
                name=self.source,
                values=values,
                activations=activations,
            )
        except (Exception, SystemExit) as error:
            remedy = "return inputs that it takes, and "
            if inputs is None:
                remedy = f"return (module, inputs) if it does not take token ids, give --seq if not {sequence}, and "
            raise ModelError(
                f"--model {self.source}: tracing {type(model).__name__} on the meta device failed: "
                f"{error_text(error)}; {remedy}keep values that follow from parameters or random numbers out of its "
                "control flow"
            ) from None
        return replace(traced, tokens_known=traced.tokens_known or "sequence" in self._takes)

    def _build(self, batch: int, sequence: int) -> tuple[nn.Module, Any, KnownValues]:
        given = {key: value for key, value in (("batch", batch), ("sequence", sequence)) if key in self._takes}
        try:
            with torch.device("meta"), KnownValues() as values:
                made = self.function(**given)
        except (Exception, SystemExit) as error:
            raise ModelError(
                f"--model {self.source}: building it on the meta device failed: {error_text(error)}"
            ) from None
        model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        if not isinstance(model, nn.Module):
            raise ModelError(
                f"--model {self.source}: must return an nn.Module, or one and its inputs, not {type(made).__name__}"
            )
        if next(model.parameters(), None) is None:
            raise ModelError(f"--model {self.source}: {type(model).__name__} has no parameters, so nothing is trained")
        return model, inputs, values

    def check_undivided(self, degree: int, partition: bool) -> None:
        """Refuses options that divide a model: they need a description of the model, and a traced module has none."""
        if degree > 1 or partition:
            option = f"--model-parallel {degree}" if degree > 1 else "--partition"
            raise ModelError(
                f"{option}: --model {self.source} is planned as it is built, and cannot be divided; let it build what "
                "one of the model-parallel ranks has, and give --gpus divided by their number"
            )

    def settle(self, setup: Setup, given: Collection[str]) -> Setup:
        """The setup with the module's own batch, sequence and recomputation.

        ``given`` are the options on the command line. Options that cannot take effect with this module are refused.
        """
        where = f"--model {self.source}"
        if setup.checkpointing and setup.activations is None:
            setup = replace(setup, activations=Activations())
        traced = self.trace(setup.precision, setup.batch, setup.sequence, setup.max_unit_bytes, setup.activations)
        if setup.checkpointing and len(traced.units) == 1:
            option = "activation-offload" if "activation-offload" in given else "checkpointing"
            raise ModelError(
                f"--{option} is about blocks that are recomputed, and {where} has none: no ModuleList or Sequential of "
                "like modules holds most of its parameters; leave it out"
            )
        if traced.recomputes and "no-checkpointing" in given:
            raise ModelError(
                f"--no-checkpointing: {where} recomputes its blocks itself; let it build the module without that "
                "(Hugging Face: gradient_checkpointing_disable())"
            )
        if self._inputs is None:
            return setup
        for option, name in (("batch", "batch"), ("seq", "sequence")):
            if option in given and name not in self._takes:
                raise ModelError(
                    f"--{option} would have no effect: {where} returns inputs of its own, whatever the {name}; give "
                    f"the function a parameter called {name} and make them of it, or leave --{option} out"
                )
        batch, sequence = tokens_of(self._inputs)
        return replace(
            setup,
            batch=setup.batch if "batch" in self._takes else batch or samples_of(self._inputs),
            sequence=setup.sequence if "sequence" in self._takes else sequence or 1,
        )


def error_text(error: BaseException) -> str:
    """The kind of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")
