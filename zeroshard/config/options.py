"""The options of ``shard()`` and the conflicts among them. Offloading and recomputation have files of their own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..system.words import quoted
from .activations import Activations as Activations
from .bounds import DEFAULT_PREFETCH
from .checks import AUTO as AUTO  # other rooms know this file alone
from .checks import (
    DTYPES,
    Mistake,
    Options,
    list_of,
    must,
    positive,
    unknown_dtype,
    whole,
)
from .offload import Offload, OffloadChoice

STAGE_3_ONLY = ("keep", "prefetch", "reads")
EMPTY: Literal["empty"] = "empty"
LONGEST_STALL = 365.0 * 24 * 3600

_stage = must('be 0, 1, 2, 3 or "auto"', lambda value: value in (0, 1, 2, 3, AUTO))
_wide_dtype = must("be a torch.dtype of at least 16 bits", lambda value: value in (*DTYPES.values(), torch.float64))
_mesh = must(
    "be a DeviceMesh of two dimensions, replicas, then shards; beside tensor parallelism, of one or two, without that "
    "of tensor parallelism",
    lambda value: isinstance(value, DeviceMesh) and value.ndim <= 2,
)
_initialiser = must(f"be a function of one module, or {EMPTY!r}", lambda value: callable(value) or value == EMPTY)
_example = must(
    "be what forward takes: a tensor, a tuple of them, or a dict by name",
    lambda value: isinstance(value, torch.Tensor | Sequence | Mapping),
)
_seconds_to_wait = must(f"be at most {LONGEST_STALL:g} seconds, a year", lambda value: value <= LONGEST_STALL)


def _device(value: Any) -> torch.device:
    try:
        device = torch.device(value)
    except (RuntimeError, TypeError):
        raise ValueError('must be a device, such as "cpu" or "cuda:0"') from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError("cannot train; use a CPU or CUDA device")
    return device


def _path(value: Any) -> Path:
    if not isinstance(value, str | os.PathLike) or str(value) == "":
        raise ValueError("must be the path of a folder or of a .safetensors file")
    return Path(value)


@dataclass(frozen=True, kw_only=True)
class LossScale(Options):
    """Dynamic loss scaling, for fp16 gradients that would otherwise vanish."""

    path = "loss_scale."
    accepted = "a zeroshard.LossScale, or None"

    initial: Annotated[float, positive] = 2.0**16
    """The first scale. A step that overflows is skipped and lowers the scale, so a high value costs a few steps."""
    growth_interval: Annotated[int, whole(least=1)] = 2000
    """The scale is raised after this many good steps in a row."""
    factor: Annotated[float, positive, must("be above 1", lambda value: value > 1)] = 2.0
    """The scale is multiplied or divided by this factor."""
    minimum: Annotated[float, positive] = 1.0
    """The scale is never lowered below this."""
    hysteresis: Annotated[int, whole(least=1)] = 1
    """Overflows since the scale last rose, from which on each overflow lowers it. Earlier ones only skip their step."""


@dataclass(frozen=True, kw_only=True)
class Precision(Options):
    """In which dtypes a model computes, communicates and accumulates.

    ``precision="bf16"`` stands for ``Precision(parameters=torch.bfloat16)``, likewise "fp16" and "fp32".
    """

    path = "precision."
    accepted = f"one of {', '.join(DTYPES)}, or a zeroshard.Precision"

    parameters: Annotated[torch.dtype | None, _wide_dtype] = None
    """Dtype of parameters and gradients. 16-bit parameters get fp32 masters.

    None leaves each parameter in its own dtype, without a master.
    """
    reduce: Annotated[torch.dtype | None, _wide_dtype] = None
    """Dtype of gradients while ranks add them up. By default the dtype of the parameter."""
    accumulate: Annotated[torch.dtype, _wide_dtype] = torch.float32
    """Dtype of gradients while several micro-batches add up."""
    output: Annotated[torch.dtype | None, _wide_dtype] = None
    """Floating-point outputs of the model are cast to this dtype. By default fp32 with fp16 parameters, else none."""
    cast_inputs: bool = True
    """Cast floating-point inputs of the model to the parameters' dtype."""
    cast_on_gather: bool = False
    """Stage 3: store no 16-bit shard. Every gather casts the shard from the fp32 master.

    A rank then has 14Ψ/N bytes of model states instead of the paper's 16Ψ/N, for two more passes over its shard.
    """
    loss_scale: LossScale | None = None
    """Dynamic loss scaling. On by default with fp16 parameters, refused otherwise."""

    def conflicts(self) -> Iterator[Mistake]:
        if self.cast_on_gather and not self.keeps_master:
            yield Mistake(
                ("cast_on_gather", "parameters"),
                f"precision.cast_on_gather has no effect with precision.parameters={self.parameters}: there is no "
                "master to cast from; leave it out",
            )
        if self.loss_scale is not None and self.parameters is not torch.float16:
            yield Mistake(
                ("loss_scale", "parameters"),
                f"precision.loss_scale has no effect with precision.parameters={self.parameters}: only fp16 gradients "
                "vanish; leave it out",
            )

    def __post_init__(self) -> None:
        if self.parameters is torch.float16:
            object.__setattr__(self, "loss_scale", LossScale() if self.loss_scale is None else self.loss_scale)
            object.__setattr__(self, "output", torch.float32 if self.output is None else self.output)
        super().__post_init__()

    @property
    def keeps_master(self) -> bool:
        """Whether there is an fp32 master of every parameter."""
        return self.parameters in (torch.float16, torch.bfloat16)

    @classmethod
    def parse(cls, value: object) -> Self:
        """The precision that a value stands for: a dtype, or its name, is the dtype of the parameters."""
        if isinstance(value, str):
            if value not in DTYPES:
                raise ValueError(unknown_dtype(value))
            value = DTYPES[value]
        if isinstance(value, torch.dtype):
            return cls(parameters=value)
        return super().parse(value) or cls()


@dataclass(frozen=True, kw_only=True)
class Config(Options):
    """Every option of ``shard()``. An option either has an effect or is refused, with the remedy."""

    unknown = "shard() has no option {quoted}{nearest}; options: {known}"
    gone: ClassVar[Mapping[str, str]] = {
        "arena": "arena is gone, because torch's expandable segments leave less memory unused; use defragment=True"
    }

    stage: Annotated[int | Literal["auto"], _stage] = 3
    """ZeRO stage: 0 divides nothing, 1 optimizer states, 2 also gradients, 3 also parameters.

    "auto" takes the fastest stage that fits by the plan, and prints its choice with the reason.
    """
    offload: Offload | None = None
    """Where optimizer states and gradients live: None for the device, "cpu" or an ``Offload`` for host memory.

    "auto" takes the fastest placement that fits by the plan, and prints it. It changes no result and nothing that a
    training loop may do; ``Offload.auto(allow=...)`` names what it may change, too.
    """
    precision: Precision = field(default_factory=Precision)
    """Dtypes: "fp32", "bf16", "fp16" or a ``Precision``. None leaves each parameter in its own dtype."""
    clip_grad_norm: Annotated[float | None, must("be a positive number", lambda value: value > 0)] = None
    """Every ``step()`` scales the gradients down to this global norm. ``stats(model).grad_norm`` is the norm before.

    ``math.inf`` reports the norm and clips nothing.
    """
    on_nonfinite: Literal["skip", "stop", "raise"] | None = None
    """What a step does if its loss or gradients are NaN or infinite. The message names the unit.

    "skip" warns and skips the update. "stop" also sets ``stats(model).stop_reason``, and later steps are refused.
    "raise" raises ``zeroshard.NonFiniteError`` on all ranks. None does not look. Looking makes ``step()`` wait for the
    device.
    """
    activations: Activations | None = None
    """Which activations remain from forward to backward, and where. None leaves that to the model."""
    defragment: bool = False
    """Turn torch's expandable segments on, so that free GPU memory is not split into pieces too small to use (M_D).

    It changes the allocator of the whole process. It is refused on a CPU, and where the process already uses memory of
    the GPU that is divided in the ordinary way.
    """
    units: Annotated[tuple[str | type[nn.Module], ...] | None, list_of("names or classes", str, type)] = None
    """Modules that form units: names, wildcards allowed, or classes. By default the repeated blocks are units."""
    max_unit_bytes: Annotated[int, whole(least=1)] = 1 << 30
    """A unit above this size is split at child modules. No fused buffer is larger, unless one parameter is (C_B)."""
    keep: Annotated[tuple[str, ...] | None, list_of("names", str)] = None
    """Stage 3: units that stay gathered from forward to backward. By default the root and the last; ``()`` for none.

    Whole names of units, without wildcards, such as "blocks.11"; "(root)" is the root. The error about a wrong name
    lists the names of all units.
    """
    prefetch: Annotated[int | None, whole(least=0)] = None
    """Stage 3: how many units are gathered before they are needed. By default 2.

    More units hide more communication behind computing. Each needs the memory of one more whole unit at the peak.
    """
    reads: Literal["gather", "raise"] | None = None
    """Stage 3: what happens if user code uses a parameter between the passes of the model.

    "gather", the default, gathers the unit, if all ranks make the read. "raise" refuses, and names the parameter.
    """
    elementwise: bool = False
    """True: you promise that your optimizer, which zeroshard does not know, updates each element by itself."""
    device: Annotated[torch.device | None, _device] = None
    """Where the model trains. By default the parameters' device, or this rank's GPU for a model on CPU or meta."""
    mesh: Annotated[DeviceMesh | None, _mesh] = None
    """A two-dimensional mesh: states are divided along its second dimension and replicated along its first.

    For a model with tensor parallelism give the data-parallel part of its mesh: ``mesh["dp"]``, or two dimensions as
    above. By default states are divided among all ranks that have the same part of the model.
    """
    init: Annotated[Callable[[nn.Module], object] | Literal["empty"] | None, _initialiser] = field(
        default=None, repr=False
    )
    """For a model on the meta device: called on each module in the order of ``modules()``, to set its own tensors.

    By default each module's ``reset_parameters()``, or Hugging Face's ``_init_weights``. "empty" leaves zeros, for dry
    runs. With ``weights`` the function is called on modules with buffers that are in no file.
    """
    weights: Annotated[Path | None, _path] = None
    """Folder of Hugging Face safetensors, or one such file. Every rank reads only its own shards from there."""
    stall_timeout: Annotated[float, positive, _seconds_to_wait] = 30.0
    """Seconds after which a collective raises if some rank does not join. The error names that rank.

    Time that the device itself computes does not count.
    """
    example: Annotated[Any | None, _example] = field(default=None, repr=False, compare=False)
    """One micro-batch as ``forward`` takes it: a tensor, a tuple or a dict. Tensors may be on the meta device.

    With an example the plan that ``shard()`` consults counts activations and foresees times.
    """
    choice: OffloadChoice | None = field(default=None, init=False)
    """From what to choose, if ``offload="auto"`` was asked for. ``shard()`` then sets ``offload`` to its choice."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.offload, OffloadChoice):
            object.__setattr__(self, "choice", self.offload)
            object.__setattr__(self, "offload", None)

    @property
    def chooses_offload(self) -> bool:
        """Whether ``offload="auto"`` was asked for, with or without more."""
        return self.choice is not None

    @property
    def units_ahead(self) -> int:
        """The value of ``prefetch``, or its default."""
        return DEFAULT_PREFETCH if self.prefetch is None else self.prefetch

    @classmethod
    def parse(cls, value: object) -> Self:
        """From keyword options, as ``shard()`` takes them."""
        return super().parse(value) or cls()

    def conflicts(self) -> Iterator[Mistake]:
        for name in STAGE_3_ONLY:
            if getattr(self, name) is not None:
                yield from self._outside_stage_3(name, getattr(self, name))
        if self.precision.cast_on_gather:
            yield from self._outside_stage_3("precision.cast_on_gather", True)
        if self.mesh is not None and self.stage == 0 and self.mesh.ndim == 2:
            yield Mistake(("mesh", "stage"), "mesh has no effect in stage 0, where nothing is divided; leave it out")
        if self.weights is not None and self.init == EMPTY:
            yield Mistake(("init", "weights"), f"init={EMPTY!r} and weights= exclude each other; leave one out")
        if isinstance(self.offload, Offload):
            yield from self._conflicts_with_offload(self.offload)

    def _outside_stage_3(self, name: str, value: object) -> Iterator[Mistake]:
        if self.stage == AUTO:
            why = "an effect in stage 3 alone, and stage is 'auto'"
        elif self.stage < 3:
            why = f"no effect in stage {self.stage}, where parameters are whole at rest"
        else:
            return
        yield Mistake((name, "stage"), f"{name}={quoted(value)} has {why}; leave it out or use stage=3")

    def _conflicts_with_offload(self, offload: Offload) -> Iterator[Mistake]:
        precision = self.precision
        if offload.parameters == "cpu":
            yield from self._outside_stage_3("offload.parameters", "cpu")
        if offload.split_master and precision.parameters is not torch.bfloat16:
            yield Mistake(
                ("offload.split_master", "precision.parameters"),
                f"offload.split_master needs precision='bf16', not {precision.parameters}: only the upper half of an "
                "fp32 number is a bf16 one",
            )
        if precision.accumulate is not torch.float32:
            yield Mistake(
                ("precision.accumulate", "offload"),
                f"precision.accumulate={precision.accumulate} has no effect with offload=, where micro-batches add up "
                "in fp32; leave it out",
            )
        if precision.cast_on_gather:
            yield Mistake(
                ("precision.cast_on_gather", "offload"),
                "precision.cast_on_gather casts from a master on the device; leave it out with offload=",
            )
        if not offload.update_in_backward:
            return
        for option, name, value in (
            ("clip_grad_norm", "clip_grad_norm", self.clip_grad_norm),
            ("precision", "loss scaling (fp16)", precision.loss_scale),
        ):
            if value is not None:
                yield Mistake(
                    ("offload.update_in_backward", option),
                    f"offload.update_in_backward updates before all gradients are known, so it excludes {name}; "
                    "leave one of them out",
                )
        if self.on_nonfinite is not None:
            yield Mistake(
                ("on_nonfinite", "offload.update_in_backward"),
                f"on_nonfinite={self.on_nonfinite!r} looks at all gradients before any is used, and "
                "offload.update_in_backward uses each as it comes; leave one of them out",
            )
