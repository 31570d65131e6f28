"""What a user may ask for: frozen, validated dataclasses (that of offloading is in ``offload/options.py``)."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .checks import DTYPES, dtype_named, nearest, require_count, require_flag, require_positive, sequence
from .offload import Offload

STAGES = (0, 1, 2, 3, "auto")
STAGE_3_ONLY = ("keep", "prefetch")
OFFLOAD_DEPENDS_ON = ("stage", "precision", "clip_grad_norm")
EMPTY: Literal["empty"] = "empty"
AUTO: Literal["auto"] = "auto"
LONGEST_STALL = 365.0 * 24 * 3600
GONE = {"arena": "arena is gone, because torch's expandable segments leave less memory unused; use defragment=True"}
"""Options of earlier versions, and what to use in their place."""


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """Dynamic loss scaling, for fp16 gradients that would otherwise vanish."""

    initial: float = 2.0**16
    """The first scale. Steps that overflow are skipped and lower it, so too high costs a few steps, never a run."""
    growth_interval: int = 2000
    """Good steps in a row after which the scale is raised."""
    factor: float = 2.0
    """By what the scale is raised and lowered."""
    minimum: float = 1.0
    """The scale is never lowered below this."""

    def __post_init__(self) -> None:
        for name in ("initial", "factor", "minimum"):
            require_positive(f"loss_scale.{name}", getattr(self, name))
        if self.factor <= 1:
            raise ValueError(f"loss_scale.factor={self.factor} must be above 1")
        require_count("loss_scale.growth_interval", self.growth_interval, least=1)


@dataclass(frozen=True, kw_only=True)
class Precision:
    """In which dtypes a model computes, communicates and accumulates.

    ``precision="bf16"`` stands for ``Precision(parameters=torch.bfloat16)``, likewise "fp16" and "fp32".
    """

    parameters: torch.dtype | None = None
    """Parameters and gradients. 16-bit ones get fp32 masters. None leaves each parameter as it is, without master."""
    reduce: torch.dtype | None = None
    """Gradients while ranks add them up; by default that of the parameter."""
    accumulate: torch.dtype = torch.float32
    """Gradients while more than one micro-batch adds up."""
    output: torch.dtype | None = None
    """Floating-point outputs of the model are cast to this; by default fp32 with fp16 parameters, else untouched."""
    cast_inputs: bool = True
    """Cast floating-point inputs of the model to the parameters' dtype."""
    cast_on_gather: bool = False
    """Stage 3: keep no 16-bit shard, but cast it from the fp32 master at every gather.

    A rank then holds 14Ψ/N bytes of model states instead of the paper's 16Ψ/N, for two more passes over its shard.
    """
    loss_scale: LossScale | None = None
    """Dynamic loss scaling; on by default with fp16 parameters, refused otherwise."""

    def __post_init__(self) -> None:
        for name in ("parameters", "reduce", "accumulate", "output"):
            dtype = getattr(self, name)
            if dtype not in (*DTYPES.values(), torch.float64) and (dtype is not None or name == "accumulate"):
                raise ValueError(
                    f"precision.{name}={dtype!r} must be a torch.dtype of at least 16 bits, or a name of it"
                )
        require_flag("precision.cast_inputs", self.cast_inputs)
        require_flag("precision.cast_on_gather", self.cast_on_gather)
        if self.cast_on_gather and not self.keeps_master:
            raise ValueError(
                f"precision.cast_on_gather has no effect with precision.parameters={self.parameters}: there is no "
                "master to cast from; leave it out"
            )
        if self.loss_scale is not None and not isinstance(self.loss_scale, LossScale):
            raise ValueError(f"precision.loss_scale={self.loss_scale!r} must be a zeroshard.LossScale")
        if self.parameters is torch.float16:
            if self.loss_scale is None:
                object.__setattr__(self, "loss_scale", LossScale())
            if self.output is None:
                object.__setattr__(self, "output", torch.float32)
        elif self.loss_scale is not None:
            raise ValueError(
                f"precision.loss_scale has no effect with precision.parameters={self.parameters}: only fp16 gradients "
                "vanish; leave it out"
            )

    @property
    def keeps_master(self) -> bool:
        """Whether an fp32 copy stands behind the parameters the model computes with."""
        return self.parameters in (torch.float16, torch.bfloat16)

    @classmethod
    def parse(cls, value: object) -> Self:
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        if isinstance(value, torch.dtype):
            return cls(parameters=value)
        if isinstance(value, str):
            return cls(parameters=dtype_named("precision", value))
        if isinstance(value, Mapping):
            return cls._from_table(value)
        raise ValueError(f"precision={value!r} must be one of {', '.join(DTYPES)}, or a zeroshard.Precision")

    @classmethod
    def _from_table(cls, table: Mapping[str, Any]) -> Self:
        """From a table of a configuration file, where dtypes are strings."""
        known = [entry.name for entry in fields(cls)]
        for name in table:
            if name not in known:
                raise ValueError(f"precision.{name} is unknown{nearest(name, known)}; known: {', '.join(known)}")
        values: dict[str, Any] = dict(table)
        for name, value in table.items():
            if isinstance(value, str):
                values[name] = dtype_named(f"precision.{name}", value)
            elif isinstance(value, Mapping):
                values[name] = LossScale(**value)
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Blocks are recomputed in backward, so that of what they make only their inputs, the checkpoints, are kept."""

    checkpoint: bool = True
    """Recompute every unit but the root, as if the model called ``zeroshard.checkpoint`` on it.

    False leaves that to the model, and the options below are for the calls that it makes.
    """
    partition: bool = False
    """Divide each checkpoint among the model-parallel ranks, which would all keep the same (P_a)."""
    offload: bool = False
    """Checkpoints, divided or whole, wait for backward in host memory (P_a+cpu)."""
    prefetch: int = 1
    """How many blocks ahead a divided or offloaded checkpoint is brought back."""

    def __post_init__(self) -> None:
        for name in ("checkpoint", "partition", "offload"):
            require_flag(f"activations.{name}", getattr(self, name))
        require_count("activations.prefetch", self.prefetch, least=0)
        if not (self.checkpoint or self.partition or self.offload):
            raise ValueError("activations has no effect with checkpoint, partition and offload all off; leave it out")
        if self.prefetch != 1 and not (self.partition or self.offload):
            raise ValueError("activations.prefetch has no effect without partition or offload; leave it out")

    @classmethod
    def parse(cls, value: object) -> Self | None:
        if value is None or isinstance(value, cls):
            return value
        if isinstance(value, Mapping):
            known = [entry.name for entry in fields(cls)]
            for name in value:
                if name not in known:
                    raise ValueError(f"activations.{name} is unknown{nearest(name, known)}; known: {', '.join(known)}")
            return cls(**value)
        raise ValueError(f"activations={value!r} must be a zeroshard.Activations, or None")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Every option of ``shard()``. A field either has an effect or is refused, with the remedy."""

    stage: int | Literal["auto"] = 3
    """ZeRO stage: 0 divides nothing, 1 optimizer states, 2 also gradients, 3 also parameters.

    "auto" takes the fastest one that fits by the plan, and prints which and why.
    """
    offload: Offload | None = None
    """Where optimizer states and gradients live: None for the device, "cpu" or an ``Offload`` for host memory.

    "auto" takes the fastest way that fits by the plan, of those that leave results as they are, and prints it.
    """
    precision: Precision = field(default_factory=Precision)
    """Dtypes: "fp32", "bf16", "fp16" or a ``Precision``. None keeps each parameter's own."""
    clip_grad_norm: float | None = None
    """Every ``step()`` scales the gradients down to this global norm, and reports it in ``stats(model).grad_norm``.

    ``math.inf`` reports it and clips nothing.
    """
    on_nonfinite: Literal["skip", "stop", "raise"] | None = None
    """What a step does whose loss or gradients are NaN or infinite; its unit is named, and it never enters the states.

    "skip" warns and leaves it out; "stop" also sets ``stats(model).stop_reason``, and later steps are refused; "raise"
    raises ``zeroshard.NonFiniteError`` on all ranks. None does not look. Looking makes ``step()`` wait for the device.
    """
    activations: Activations | None = None
    """Which activations are kept from forward to backward, and where. None leaves that to the model."""
    defragment: bool = False
    """Turn torch's expandable segments on, so that free GPU memory is not split into pieces too small to use (M_D).

    It changes the allocator of the whole process. It is refused on a CPU, and where the process already uses memory of
    the GPU that is divided in the ordinary way.
    """
    units: tuple[str | type[nn.Module], ...] | None = None
    """Modules (names, wildcards allowed, or classes) that form units; by default the repeated blocks are found."""
    max_unit_bytes: int = 1 << 30
    """A unit above this is split at child modules, and no fused buffer is larger, unless one parameter is (C_B)."""
    keep: tuple[str, ...] | None = None
    """Stage 3: units held from forward to backward. By default the root unit and the last; ``()`` holds none."""
    prefetch: int | None = None
    """Stage 3: how many units are gathered ahead of need. By default 1."""
    elementwise: bool = False
    """You vouch that an optimizer zeroshard does not know updates each element by itself."""
    device: torch.device | None = None
    """Where the model trains. By default the parameters' device, or this rank's GPU for a model on CPU or meta."""
    mesh: DeviceMesh | None = None
    """A two-dimensional mesh: states are divided along its second dimension and replicated along its first.

    Of a model with tensor parallelism, the data-parallel part of its mesh: ``mesh["dp"]``, or two dimensions as above.
    Left out, states are divided among all ranks that have the same part of the model.
    """
    init: Callable[[nn.Module], object] | Literal["empty"] | None = field(default=None, repr=False)
    """For a model on the meta device: called on each module in the order of ``modules()``, to set what it holds.

    By default each module's ``reset_parameters()``, or Hugging Face's ``_init_weights``. "empty" leaves zeros, for dry
    runs. With ``weights`` it is called on modules whose buffers no file has.
    """
    weights: Path | None = None
    """Folder of Hugging Face safetensors, or one such file: every rank reads its shards from there, and no more."""
    stall_timeout: float = 30.0
    """Seconds after which a collective that some rank does not join raises, naming that rank."""
    example: Any = field(default=None, repr=False, compare=False)
    """One micro-batch as ``forward`` takes it: a tensor, a tuple or a dict; on the meta device is enough.

    With it the plan that ``shard()`` consults counts activations and foresees times.
    """
    chooses_offload: bool = field(default=False, init=False)
    """Whether ``offload="auto"`` was asked for; ``shard()`` puts what it finds in its place."""

    def __post_init__(self) -> None:
        if not isinstance(self.stage, int | str) or isinstance(self.stage, bool) or self.stage not in STAGES:
            raise ValueError(f'stage={self.stage!r} must be 0, 1, 2, 3 or "auto"')
        if not isinstance(self.precision, Precision):
            object.__setattr__(self, "precision", Precision.parse(self.precision))
        if self.clip_grad_norm is not None and self.clip_grad_norm != math.inf:
            require_positive("clip_grad_norm", self.clip_grad_norm)
        object.__setattr__(self, "chooses_offload", isinstance(self.offload, str) and self.offload == AUTO)
        if self.chooses_offload:
            object.__setattr__(self, "offload", None)
        if self.offload is not None:
            object.__setattr__(self, "offload", Offload.parse(self.offload))
            assert self.offload is not None
            for conflict in _conflicts_of(self.offload, self.precision, self.stage, self.clip_grad_norm):
                raise ValueError(conflict)
        if self.on_nonfinite not in (None, "skip", "stop", "raise"):
            raise ValueError(f'on_nonfinite={self.on_nonfinite!r} must be "skip", "stop", "raise" or None')
        if self.on_nonfinite is not None and self.offload is not None and self.offload.update_in_backward:
            raise ValueError(
                f"on_nonfinite={self.on_nonfinite!r} looks at all gradients before any is used, and "
                "offload.update_in_backward uses each as it comes; leave one of them out"
            )
        if self.activations is not None:
            object.__setattr__(self, "activations", Activations.parse(self.activations))
        require_flag("defragment", self.defragment)
        require_positive("stall_timeout", self.stall_timeout)
        if self.stall_timeout > LONGEST_STALL:
            raise ValueError(f"stall_timeout={self.stall_timeout!r} must be at most {LONGEST_STALL:g} seconds, a year")
        require_count("max_unit_bytes", self.max_unit_bytes, least=1)
        if self.units is not None:
            object.__setattr__(self, "units", sequence("units", self.units, (str, type)))
        if self.keep is not None:
            object.__setattr__(self, "keep", sequence("keep", self.keep, (str,)))
        if self.prefetch is not None:
            require_count("prefetch", self.prefetch, least=0)
        require_flag("elementwise", self.elementwise)
        if self.example is not None and not isinstance(self.example, torch.Tensor | Sequence | Mapping):
            raise ValueError(
                f"example={self.example!r} must be what forward takes: a tensor, a tuple of them, or a dict by name"
            )
        if self.device is not None:
            object.__setattr__(self, "device", torch.device(self.device))
            if self.device.type not in ("cpu", "cuda"):
                raise ValueError(f"device={str(self.device)!r} cannot train; use a CPU or CUDA device")
        if self.mesh is not None:
            if not isinstance(self.mesh, DeviceMesh) or self.mesh.ndim > 2:
                raise ValueError(
                    f"mesh={self.mesh!r} must be a DeviceMesh of two dimensions, replicas, then shards; beside tensor "
                    "parallelism, of one or two, without that of tensor parallelism"
                )
            if self.stage == 0 and self.mesh.ndim == 2:
                raise ValueError("mesh has no effect in stage 0, where nothing is divided; leave it out")
        if self.init is not None and self.init != EMPTY and not callable(self.init):
            raise ValueError(f"init={self.init!r} must be a function of one module, or {EMPTY!r}")
        if self.weights is not None:
            if not isinstance(self.weights, str | os.PathLike) or str(self.weights) == "":
                raise ValueError(f"weights={self.weights!r} must be the path of a folder or of a .safetensors file")
            object.__setattr__(self, "weights", Path(self.weights))
            if self.init == EMPTY:
                raise ValueError(f"init={EMPTY!r} and weights= exclude each other; leave one out")
        if self.precision.cast_on_gather and self.stage != 3:
            raise ValueError(_without_effect("precision.cast_on_gather", True, self.stage))
        if self.stage != 3:
            for name in STAGE_3_ONLY:
                if getattr(self, name) is not None:
                    raise ValueError(_without_effect(name, getattr(self, name), self.stage))

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> Self:
        """From keyword options, as ``shard()`` takes them."""
        known = [entry.name for entry in fields(cls) if entry.init]
        for name in options:
            if name in GONE:
                raise TypeError(GONE[name])
            if name not in known:
                raise TypeError(f"shard() has no option {name!r}{nearest(name, known)}; options: {', '.join(known)}")
        return cls(**options)


def problems(options: Mapping[str, object], path: str) -> list[str]:
    """All that is wrong with the ``shard`` options of a configuration file, each with its key path; [] if none."""
    known = [entry.name for entry in fields(Config) if entry.init]
    found = [
        f"{path}.{name}: {GONE.get(name, f'unknown key{nearest(name, known)}')}"
        for name in options
        if name not in known
    ]
    base: Any = Config()
    stage = options.get("stage", base.stage)
    for name, value in options.items():
        if name == "offload" and isinstance(value, Mapping):
            found += [f"{path}.offload: {mistake}" for mistake in _mistakes_of_offload(value, options)]
        elif name in known:
            try:
                # What an offload may ask for depends on these; what is wrong with them is said of them.
                others = {n: options[n] for n in OFFLOAD_DEPENDS_ON if n in options and name == "offload"}
                replace(base, **{name: value, **_valid(base, others)})
            except (ValueError, TypeError, RuntimeError) as error:
                found.append(f"{path}.{name}: {error}")
            else:
                if name in STAGE_3_ONLY and value is not None and stage in (0, 1, 2, "auto"):
                    found.append(f"{path}.{name}: {_without_effect(name, value, stage)}")
    if not found:  # each by itself; together they may still not go
        try:
            Config.parse(options)
        except (ValueError, TypeError, RuntimeError) as error:
            found.append(f"{path}: {error}")
    return found


def _valid(base: Any, options: Mapping[str, object]) -> dict[str, object]:
    found = {}
    for name, value in options.items():
        try:
            replace(base, **{name: value})
        except (ValueError, TypeError, RuntimeError):
            continue
        found[name] = value
    return found


def _mistakes_of_offload(table: Mapping[str, Any], options: Mapping[str, object]) -> list[str]:
    """All of them, those against other options included as far as each of these is good by itself."""
    base: Any = Config()
    others = {name: getattr(base, name) for name in OFFLOAD_DEPENDS_ON}
    for name, value in _valid(base, {name: options[name] for name in others if name in options}).items():
        others[name] = getattr(replace(base, **{name: value}), name)
    offload, mistakes = Offload.examine(table)
    return [*mistakes, *_conflicts_of(offload, **others)]


def _conflicts_of(
    offload: Offload, precision: Precision, stage: int | Literal["auto"], clip_grad_norm: float | None
) -> Iterator[str]:
    """What the other options leave of an offload without effect or sense."""
    if offload.parameters == "cpu" and stage != 3:
        yield _without_effect("offload.parameters", "cpu", stage)
    if offload.split_master and precision.parameters is not torch.bfloat16:
        yield (
            f"offload.split_master needs precision='bf16', not {precision.parameters}: only the upper half of an "
            "fp32 number is a bf16 one"
        )
    if precision.accumulate is not torch.float32:
        yield (
            f"precision.accumulate={precision.accumulate} has no effect with offload=, where micro-batches add up "
            "in fp32; leave it out"
        )
    if precision.cast_on_gather:
        yield "precision.cast_on_gather casts from a master on the device; leave it out with offload="
    if offload.update_in_backward:
        for name, given in (
            ("clip_grad_norm", clip_grad_norm is not None),
            ("loss scaling (fp16)", precision.loss_scale is not None),
        ):
            if given:
                yield (
                    f"offload.update_in_backward updates before all gradients are known, so it excludes {name}; "
                    "leave one of them out"
                )


def _without_effect(name: str, value: object, stage: object) -> str:
    if stage == "auto":
        return f"{name}={value!r} has an effect in stage 3 alone, and stage is 'auto'; leave it out or use stage=3"
    return (
        f"{name}={value!r} has no effect in stage {stage}, where parameters are whole at rest; "
        "leave it out or use stage=3"
    )
