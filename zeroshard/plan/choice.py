"""All stages and offloads of a job on given hardware: which of them fit, and which one to take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Literal

import torch

from ..config.offload import Offload
from ..config.options import STAGE_3_ONLY, Activations
from .budget import WORKSPACE, Budget, budget
from .hardware import Hardware
from .models import Subject
from .module_trace import Model, ModuleTrace
from .scale import tokens_a_step
from .shape import Setup, Transformer, Work
from .time import StepTime, step_time
from .volume import Volume, volume

LARGEST_BATCH = 1 << 20
LARGEST_HIDDEN = 1 << 18
HEAD = 128
"""Width of a head in the models that ``--max-model`` makes up. Hidden sizes are multiples of it."""
VOCABULARY = 50257
AS_FAST = 0.95
"""A row with at least this share of the best speed counts as equally fast, because predictions are not more exact. Of
equally fast rows the one that changes least is taken."""


@dataclass(frozen=True)
class Variant:
    """One way to offload."""

    name: str
    offload: Offload | None


def variants(stage: int, setup: Setup, hardware: Hardware) -> Iterator[Variant]:
    """The offloads that get a row: none, all states, all states in fewer bytes, and in stage 3 the parameters too."""
    yield Variant("none", None)
    if hardware.on_cpu:
        return
    bf16 = torch.bfloat16
    yield Variant("cpu", Offload())
    yield Variant("cpu, 16-bit states", Offload(moments=bf16))
    half = setup.precision == "bf16"  # the upper half of an fp32 number is a bf16 number, not an fp16 number
    early = setup.precision != "fp16" and setup.micro_batches == 1  # otherwise the update needs all gradients first
    small = Offload(moments=bf16, split_master=half, read_back=half, update_in_backward=early)
    if small != Offload(moments=bf16):
        yield Variant("cpu, small", small)
    if stage == 3:
        yield Variant("cpu, parameters too", Offload(parameters="cpu"))


@dataclass(frozen=True)
class Row:
    """The plan of one stage and offload."""

    variant: Variant
    model: Model
    setup: Setup
    hardware: Hardware
    shape: Transformer | None = None
    """The transformer that times are predicted for, if ``model`` is a trace of a known transformer."""

    @cached_property
    def budget(self) -> Budget:
        return budget(self.model, self.setup, 0 if self.hardware.on_cpu else WORKSPACE)

    @cached_property
    def volume(self) -> Volume:
        return volume(self.model, self.setup)

    @cached_property
    def time(self) -> StepTime | None:
        """None without a machine profile, and for a module whose FLOPs are not known."""
        if self.hardware.machine is None or self.work is None:
            return None
        return step_time(self.work, self.setup, self.hardware.machine)

    @property
    def work(self) -> Transformer | Work | None:
        """The model that times are predicted for."""
        return self.model if isinstance(self.model, Transformer) else self.shape or self.model.work

    @property
    def room(self) -> float:
        """Bytes of the device that stay free; negative if the row does not fit."""
        on_host = self.budget.host.total if self.hardware.on_cpu else 0  # it is the same memory
        return self.hardware.usable_device_memory - self.budget.peak.total - on_host

    @property
    def host_room(self) -> float:
        """Bytes that stay free in this rank's part of host memory."""
        return self.hardware.host_memory_per_rank - self.budget.host.total

    @property
    def fits(self) -> bool:
        return self.room >= 0 and self.host_room >= 0  # without offload too: checkpoints may be on the host

    @property
    def tokens_a_second(self) -> float | None:
        """The sum over all ranks."""
        return None if self.time is None else tokens_a_step(self.setup) / self.time.total


def plan(subject: Subject, setup: Setup, hardware: Hardware, batch: int | Literal["max"]) -> list[Row]:
    """A row for every stage and offload; everything else is as in ``setup``."""
    found = []
    for stage in range(4):
        for variant in variants(stage, setup, hardware):
            asked = replace(setup, stage=stage, offload=variant.offload, batch=1 if batch == "max" else batch)
            if batch == "max":
                asked = replace(asked, batch=largest_batch(subject, asked, hardware))
            found.append(_row(variant, subject, asked, hardware))
    return found


def _row(variant: Variant, subject: Subject, setup: Setup, hardware: Hardware) -> Row:
    model = subject.model(setup)
    if isinstance(model, ModuleTrace):  # a trace shows whether blocks are recomputed
        setup = replace(setup, checkpointing=model.recomputes)
    return Row(variant, model, setup, hardware)


def largest_batch(subject: Subject, setup: Setup, hardware: Hardware) -> int:
    """The largest number of sequences that fits, for a rank and micro-batch; 1 if not even one fits."""

    def fits(batch: int) -> bool:
        asked = replace(setup, batch=batch)
        return _row(Variant("", setup.offload), subject, asked, hardware).fits

    return max(1, largest_number(fits, LARGEST_BATCH))


def recommend(rows: Sequence[Row]) -> Row | None:
    """The fastest row that fits. Without times: the row that changes least. None if nothing fits."""
    fitting = [row for row in rows if row.fits]
    if not fitting:
        return None
    speeds = [row.tokens_a_second or 0.0 for row in fitting]
    as_fast = [row for row, speed in zip(fitting, speeds, strict=True) if speed >= AS_FAST * max(speeds)]
    return min(as_fast, key=lambda row: (row.setup.offload is not None, row.setup.stage))


# -- the largest model ------------------------------------------------------------------------------------------------


def gpt(heads: int, layers: int, vocabulary: int, setup: Setup) -> Transformer:
    """A made-up GPT with so many heads and layers."""
    hidden = heads * head_width(setup.model_parallel)
    return Transformer(layers=layers, hidden=hidden, heads=heads, vocabulary=vocabulary, positions=setup.sequence)


def head_width(model_parallel: int) -> int:
    """The width of a head in made-up models. If many ranks share the heads, smaller heads give more sizes to choose."""
    return HEAD if model_parallel <= 16 else HEAD // 2


def usual_layers(hidden: int) -> int:
    """The usual depth of a GPT of this width: 48 at 1600 (GPT-2), about 100 at 8192 (ZeRO's 100B), 130 at 25600 (1T).

    >>> [usual_layers(hidden) for hidden in (1600, 8192, 25600)]
    [46, 104, 132]
    """
    return max(2, round(hidden / (24 + hidden / 150)))


def largest_models(
    setup: Setup, hardware: Hardware, vocabulary: int = VOCABULARY
) -> list[tuple[Row, Transformer | None]]:
    """For every stage and offload the largest GPT that fits; None if not even the smallest GPT fits."""
    found = []
    for stage in range(4):
        for variant in variants(stage, setup, hardware):
            asked = replace(setup, stage=stage, offload=variant.offload)
            model = largest_model(asked, hardware, vocabulary)
            shown = model or gpt(setup.model_parallel, 2, vocabulary, setup)
            found.append((Row(variant, shown, asked, hardware), model))
    return found


def largest_model(setup: Setup, hardware: Hardware, vocabulary: int = VOCABULARY) -> Transformer | None:
    """The largest GPT of a usual shape that fits: first the largest width, then the largest depth at that width.

    The number of heads is a multiple of the ranks that share the model.
    """
    ranks = setup.model_parallel
    step = ranks * head_width(ranks)  # from one hidden size to the next

    def fits(steps: int, layers: int) -> bool:
        return Row(Variant("", setup.offload), gpt(steps * ranks, layers, vocabulary, setup), setup, hardware).fits

    widest = largest_number(lambda steps: fits(steps, usual_layers(steps * step)), LARGEST_HIDDEN // step)
    if not widest:
        return None
    usual = usual_layers(widest * step)
    more = largest_number(lambda extra: fits(widest, usual + extra), 2 * usual)
    return gpt(widest * ranks, usual + more, vocabulary, setup)


def largest_number(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to ``most`` that fits, if all smaller numbers fit too; 0 if none fits.

    >>> largest_number(lambda number: number < 78, 1000)
    77
    """
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


# -- how to run it ----------------------------------------------------------------------------------------------------


def shard_call(setup: Setup) -> str:
    """The call of ``shard()`` for a setup.

    >>> shard_call(Setup(stage=2, offload=Offload(moments=torch.bfloat16)))
    'zeroshard.shard(model, optimizer, stage=2, precision="bf16", offload=zeroshard.Offload(moments=torch.bfloat16))'
    """
    stage, *offload = shard_options(setup)
    options = [stage, f'precision="{setup.precision}"', *offload]
    return f"zeroshard.shard(model, optimizer, {', '.join(options)})"


def shard_options(setup: Setup) -> list[str]:
    """Stage, offload and activations as arguments of ``shard()``.

    >>> shard_options(Setup(stage=3, offload=Offload()))
    ['stage=3', 'offload="cpu"']
    """
    found = [f"stage={setup.stage}"]
    if setup.offload is not None:
        given = ", ".join(f"{name}={_written(value)}" for name, value in _changed(setup.offload))
        found.append(f"offload=zeroshard.Offload({given})" if given else 'offload="cpu"')
    if setup.activations is not None:
        activations = setup.activations
        names = [f"{name}=True" for name in ("partition", "offload") if getattr(activations, name)]
        names += [f"prefetch={activations.prefetch}"] if activations.prefetch != 1 else []
        found.append(f"activations=zeroshard.Activations({', '.join(names)})")
    return found


def torchrun_command(setup: Setup, hardware: Hardware, subject: Subject) -> str:
    """The command that starts the job on every node: ``zeroshard train`` for a preset, else the user's ``train.py``."""
    nodes = ""
    if hardware.nodes > 1:
        nodes = f"--nnodes {hardware.nodes} --node-rank $NODE_RANK --master-addr $MASTER_ADDR "
    ours = subject.preset is not None and setup.micro_batches == 1  # `zeroshard train` has one micro-batch a step
    program = " ".join(["-m zeroshard train", *_train_options(setup, subject)]) if ours else "train.py"
    if ours and hardware.on_cpu:
        program += " --set train.device=cpu"
        program += " --set shard.defragment=false" if subject.shard.get("defragment") else ""
    return f"torchrun {nodes}--nproc-per-node {hardware.per_node} {program}"


def _train_options(setup: Setup, subject: Subject) -> Iterator[str]:
    """The options that turn a preset into the planned job."""
    yield f"{subject.preset} --stage {setup.stage} --precision {setup.precision}"
    yield f"--set train.batch={setup.batch} --tensor-parallel {setup.model_parallel}"
    if setup.sequence != subject.sequence:
        yield f"--set model.sequence={setup.sequence}"
    if setup.checkpointing != subject.checkpointing:
        yield f"--set model.checkpointing={str(setup.checkpointing).lower()}"
    usual, planned = subject.activations or Activations(), setup.activations
    if planned is None and subject.activations is not None:
        yield "--set shard.activations=none"
    for name in ("partition", "offload") if planned is not None else ():
        if getattr(planned, name) != getattr(usual, name):
            yield f"--set shard.activations.{name}={str(getattr(planned, name)).lower()}"
    for name in STAGE_3_ONLY if setup.stage < 3 else ():
        if name in subject.shard:
            yield f"--set shard.{name}=none"
    if setup.offload is None:
        yield "--offload none"
        return
    yield "--offload cpu"
    for name, value in _changed(setup.offload):
        yield f"--set shard.offload.{name}={'bf16' if value is torch.bfloat16 else str(value).lower()}"
    if setup.offload.update_in_backward:
        yield "--set shard.clip_grad_norm=none"


def _changed(offload: Offload) -> Iterator[tuple[str, object]]:
    """The options that differ from their defaults."""
    for entry in fields(offload):
        if getattr(offload, entry.name) != entry.default:
            yield entry.name, getattr(offload, entry.name)


def _written(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)
