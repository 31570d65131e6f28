"""Plans for a module of the user: a function of the user builds the module on the meta device, and it is traced."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...config.checks import DTYPES, nearest
from ..setup import ModelError, Setup
from .known_values import KnownValues
from .model import Model, error_text
from .tracer import Built, samples_of, tokens_of

TARGETS = ("labels", "targets")
"""Names of forward's argument for the targets. If they get targets, most models return a loss."""


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
        if module.endswith(".py"):
            file = Path(module)
            elsewhere = file.is_absolute() or ".." in file.parts
            written = f"{file.stem}:{name}, with PYTHONPATH={file.parent}" if elsewhere else f"{dotted(file)}:{name}"
            raise ModelError(f"--model {source}: must name a module, not a file; write {written}")
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        try:
            found: Any = importlib.import_module(module)
        except SystemExit as error:
            raise ModelError(
                f"--model {source}: importing {module} runs a program, which ended with exit code {error.code}; put "
                "the model into a module of its own, or the program below `if __name__ == '__main__':`"
            ) from None
        except Exception as error:
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

    @cached_property
    def model(self) -> Model:
        """The model that the function builds."""
        remedy = f"; {self._remedy}keep values that follow from parameters or random numbers out of its control flow"
        return Model(self.source, self._built, remedy=remedy)

    @property
    def _remedy(self) -> str:
        return "return (module, inputs) if it does not take token ids, give --seq if the sequence is too long, and "

    def _built(self, setup: Setup) -> Built:
        check_undivided(self.source, setup)
        model, inputs, values = self._build(setup.batch, setup.sequence)
        self._inputs = inputs
        with values:
            arguments, named = arguments_for(model, inputs, setup)
        known = inputs is None or tokens_of(inputs) != (0, 0) or "sequence" in self._takes
        return Built(model.to("meta"), tuple(arguments), named, values, tokens_known=known)

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

    def settle(self, setup: Setup, given: Collection[str]) -> Setup:
        """The setup with the module's own batch, sequence and recomputation.

        ``given`` are the options on the command line. Options that cannot take effect with this module are refused.
        """
        where = f"--model {self.source}"
        traced = self.model.trace(setup)
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


def check_undivided(source: str, setup: Setup) -> None:
    """Refuses options that divide a model: how a user's module is divided is not known."""
    partition = setup.activations is not None and setup.activations.partition
    if setup.model_parallel > 1 or partition:
        option = f"--model-parallel {setup.model_parallel}" if setup.model_parallel > 1 else "--partition"
        raise ModelError(
            f"{option}: --model {source} is planned as it is built, and cannot be divided; let it build what one of "
            "the model-parallel ranks has, and give --gpus divided by their number"
        )


def arguments_for(model: nn.Module, inputs: Any, setup: Setup) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of forward, on the meta device. Without inputs: token ids that are all zero."""
    if inputs is None:
        tokens = torch.zeros(setup.batch, setup.sequence, dtype=torch.long, device="meta")
        known = inspect.signature(model.forward).parameters
        return [tokens], {target: tokens for target in TARGETS if target in known}
    dtype = DTYPES[setup.precision]

    def ready(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to("meta", dtype if value.is_floating_point() else value.dtype)

    if isinstance(inputs, Mapping):
        return [], {key: ready(value) for key, value in inputs.items()}
    values = [inputs] if isinstance(inputs, Tensor) else inputs
    return [ready(value) for value in values], {}


def dotted(file: Path) -> str:
    """The name by which a file below this folder is imported.

    >>> dotted(Path("./my_project/models.py"))
    'my_project.models'
    """
    return ".".join(file.with_suffix("").parts)
