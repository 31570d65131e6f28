"""The corpus of loops: what a loop is, who makes its model parallel, and how two runs of a loop are compared."""

from __future__ import annotations

import inspect
import re
import traceback
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zeroshard

TOLERANCE = 1e-6
"""Relative distance from DDP with torch's clipping, or with offload. Otherwise loops agree to the bit."""
SHORT = 3.0
"""``stall_timeout`` in seconds where a loop is to be refused: some refusals come when another rank is missing."""
PACKAGE = Path(zeroshard.__file__).parent

Log = dict[str, Any]
"""What a loop measured, by name: numbers, tensors, and lists or dicts of them."""


class Setting(NamedTuple):
    """How zeroshard runs a loop."""

    stage: int
    offload: bool

    def __str__(self) -> str:
        return f"stage {self.stage}{' with offload' * self.offload}"


SETTINGS = tuple(Setting(stage, offload) for offload in (False, True) for stage in range(4))
EVERYWHERE = frozenset(SETTINGS)
STAGE_3 = frozenset(setting for setting in SETTINGS if setting.stage == 3)
OFFLOAD = frozenset(setting for setting in SETTINGS if setting.offload)
SHARDED_GRADIENTS = frozenset(setting for setting in SETTINGS if setting.stage > 0 or setting.offload)
"""Where ``p.grad`` stands for a gradient that is divided or on the host."""


class Refusal(NamedTuple):
    """Where a loop is refused, with which words, and the line that it needs there."""

    where: frozenset[Setting]
    words: str
    """A regular expression that the message of the error matches."""
    line: str | None = None
    """With this line the loop runs and is equal. None: there is no such line."""


@dataclass(frozen=True)
class Loop:
    """A training loop as people write it. It does not know who makes its model parallel."""

    run: Callable[..., Log]
    title: str
    clips: bool
    """Whether torch's clipping, or another norm, is a part of the result: then it is equal within ``TOLERANCE``."""
    slow: bool
    refusals: tuple[Refusal, ...]

    @property
    def name(self) -> str:
        return self.run.__name__

    def refusal(self, setting: Setting) -> Refusal | None:
        return next((refusal for refusal in self.refusals if setting in refusal.where), None)


class Corpus:
    """Loops in the order in which they are written down."""

    def __init__(self) -> None:
        self.loops: list[Loop] = []

    def loop(
        self, title: str, *refusals: Refusal, clips: bool = False, slow: bool = False
    ) -> Callable[[Callable[..., Log]], Callable[..., Log]]:
        """Adds a function to the corpus. ``refusals`` say where it cannot run as it is."""

        def add(run: Callable[..., Log]) -> Callable[..., Log]:
            self.loops.append(Loop(run, title, clips, slow, refusals))
            return run

        return add


class Parallel:
    """The one call of a loop that differs: DDP, or ``zeroshard.shard()`` with a setting."""

    def __init__(self, setting: Setting | None, **options: Any) -> None:
        self.setting, self._options = setting, options
        self._models: list[nn.Module] = []

    def __call__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **ddp: Any) -> tuple[Any, Any]:
        """Returns the model and the optimizer to train with. ``ddp`` are options of DDP alone."""
        self._models.append(model)
        if self.setting is None:
            # DDP refuses a model without trainable parameters. People leave such a model as it is.
            return (DistributedDataParallel(model, **ddp) if optimizer is not None else model), optimizer
        offload = "cpu" if self.setting.offload and optimizer is not None else None
        return zeroshard.shard(model, optimizer, stage=self.setting.stage, offload=offload, **self._options)

    def unwrapped(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        """The same for a loop in which a library puts DDP around a plain model."""
        if self.setting is None:
            self._models.append(model)
            return model, optimizer
        return self(model, optimizer)

    def weights(self) -> dict[str, Tensor]:
        """The final parameters of all models that were made parallel, on rank 0 also their buffers.

        DDP takes rank 0's buffers in each forward. What another rank writes into them since then counts for nothing.
        """
        found = {}
        for number, model in enumerate(self._models):
            sharded = self.setting is not None
            state = zeroshard.full_state_dict(model) if sharded else model.state_dict()
            wanted = state if dist.get_rank() == 0 else dict(model.named_parameters(remove_duplicate=False))
            found.update({f"model {number}: {name}": state[name].detach().clone() for name in wanted})
        return found


def when(line: bool, block: Callable[..., AbstractContextManager[Any]], *args: Any, **options: Any) -> Any:
    """The block of a line that a loop needs, where it is asked for."""
    return block(*args, **options) if line else nullcontext()


def run(loop: Loop, setting: Setting | None, line: bool = False, **options: Any) -> Log:
    """What the loop measured, and the weights that it ended with. ``setting=None`` runs it with DDP."""
    parallel = Parallel(setting, **options)
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        log = loop.run(parallel, line=True) if line else loop.run(parallel)
        return log | {"weights": parallel.weights()}


_ddp: dict[tuple[str, int], Log] = {}
"""What a loop gave with DDP, by the loop's name and the rank. It does not depend on the setting."""


def check(loop: Loop, setting: Setting) -> None:
    """Asserts that a loop gives what DDP gives, or is refused as its table says."""
    key = loop.name, dist.get_rank()
    if key not in _ddp:
        _ddp[key] = run(loop, None)
    refusal = loop.refusal(setting)
    if refusal is not None:
        assert_refused(loop, setting, refusal)
        assert takes_line(loop) == (refusal.line is not None)
        if refusal.line is None:
            return
    ours = run(loop, setting, line=refusal is not None)
    assert_equal(ours, _ddp[key], TOLERANCE if loop.clips or setting.offload else 0.0)


def takes_line(loop: Loop) -> bool:
    return "line" in inspect.signature(loop.run).parameters


def assert_refused(loop: Loop, setting: Setting, refusal: Refusal) -> None:
    """The loop raises, in our code and in the words of the table."""
    try:
        run(loop, setting, stall_timeout=SHORT)
    except Exception as error:
        text, raised_in = str(error), Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        assert raised_in.is_relative_to(PACKAGE), f"{setting}: raised by {raised_in}: {text}"
        assert re.search(refusal.words, text), f"{setting}: {refusal.words!r} is not in {text!r}"
    else:
        raise AssertionError(f"{setting}: not refused")


def assert_equal(ours: Any, theirs: Any, tolerance: float, where: str = "") -> None:
    """Compares two logs entry by entry. ``tolerance`` is a relative distance; 0 means that all bits are equal."""
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), where
        for name in theirs:
            assert_equal(ours[name], theirs[name], tolerance, f"{where}/{name}")
    elif isinstance(theirs, list) and all(isinstance(each, float) for each in theirs):  # a series, as one vector
        _assert_equal_values(_tensor(ours), _tensor(theirs), tolerance, where)
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs), where
        for number, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            assert_equal(our, their, tolerance, f"{where}/{number}")
    else:
        _assert_equal_values(_tensor(ours), _tensor(theirs), tolerance, where)


def _tensor(value: Tensor | float | list[float]) -> Tensor:
    return value.cpu() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64, device="cpu")


def _assert_equal_values(ours: Tensor, theirs: Tensor, tolerance: float, where: str) -> None:
    assert ours.shape == theirs.shape, f"{where}: {ours.shape}, not {theirs.shape}"
    assert bool(theirs.isfinite().all()), f"{where}: DDP gives {theirs}, which shows nothing"
    if not tolerance or not theirs.is_floating_point():
        assert torch.equal(ours, theirs), f"{where}: {ours}, not {theirs}"
    else:
        distance = torch.linalg.vector_norm(ours.double() - theirs.double())
        assert distance <= tolerance * torch.linalg.vector_norm(theirs.double()), f"{where}: {ours}, not {theirs}"
