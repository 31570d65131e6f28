"""How to run what is planned: the call of ``shard()``, and the command that starts the job."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

import torch

from ..config.offload import Offload
from ..config.options import STAGE_3_ONLY, Activations
from .machine.hardware import Hardware
from .model.source import Subject
from .setup import Setup


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
        names = [f"recompute={_written(activations.recompute)}"] if activations.recompute != 1 else []
        names += [f"{name}=True" for name in ("partition", "offload") if getattr(activations, name)]
        names += [f"prefetch={activations.prefetch}"] if activations.prefetch != 1 else []
        found.append(f"activations=zeroshard.Activations({', '.join(names)})")
    return found


def torchrun_command(setup: Setup, hardware: Hardware, subject: Subject) -> str:
    """The command that starts the job on every node: ``zeroshard train`` for a preset, else the user's ``train.py``."""
    nodes = ""
    if hardware.nodes > 1:
        nodes = f"--nnodes {hardware.nodes} --node-rank $NODE_RANK --master-addr $MASTER_ADDR "
    ours = subject.preset is not None
    program = " ".join(["-m zeroshard train", *_train_options(setup, subject)]) if ours else "train.py"
    if ours and hardware.on_cpu:
        program += " --set train.device=cpu"
        program += " --set shard.defragment=false" if subject.shard.get("defragment") else ""
    return f"torchrun {nodes}--nproc-per-node {hardware.per_node} {program}"


def _train_options(setup: Setup, subject: Subject) -> Iterator[str]:
    """The options that turn a preset into the planned job."""
    yield f"{subject.preset} --stage {setup.stage} --precision {setup.precision}"
    yield f"--set train.batch={setup.batch} --tensor-parallel {setup.model_parallel}"
    if setup.micro_batches > 1:
        yield f"--set train.micro_batches={setup.micro_batches}"
    if setup.sequence != subject.sequence:
        yield f"--set model.sequence={setup.sequence}"
    if setup.checkpointing != subject.checkpointing:
        yield f"--set model.checkpointing={str(setup.checkpointing).lower()}"
    usual, planned = subject.activations or Activations(), setup.activations
    if planned is None and subject.activations is not None:
        yield "--set shard.activations=none"
    for name in ("recompute", "partition", "offload") if planned is not None else ():
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
