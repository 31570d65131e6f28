"""The ways of training that `nccl_step.py` compares, and the peers of `offload_step.py`. Both say what each gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zeroshard
from benchmarks.peers import deepspeed_engine, fully_sharded, torchao_optimizer
from zeroshard.config.job import ModelConfig
from zeroshard.train.gpt import GPT

LEARNING_RATE = 1e-4
MAX_NORM = 1.0
BUCKET = 50_000_000  # elements
BF16 = torch.bfloat16


class Job(NamedTuple):
    """What every variant trains."""

    config: ModelConfig
    batch: int
    device: torch.device


@dataclass
class Trainer:
    """A loop's body in the parts that are timed."""

    backward: Callable[[Tensor, Tensor], Tensor]
    """Tokens and targets, [batch, sequence] each, to the loss."""
    update: Callable[[], Any]
    clear: Callable[[], Any] = lambda: None
    """Forgets the gradients."""
    finish: Callable[[], Any] = lambda: None
    """Waits for updates that still run on the host."""
    close: Callable[[], Any] = lambda: None


class Variant(NamedTuple):
    """One way of training."""

    name: str
    build: Callable[[Job], Trainer]
    package: str | None = None
    """The package it is in, if not torch or zeroshard."""
    compiles: bool = False
    """It needs DeepSpeed's kernel for the host, which is compiled where it is first used."""
    gpu_only: bool = False


def new_model(job: Job) -> GPT:
    """The same values for every variant."""
    torch.manual_seed(0)
    with job.device:
        return GPT(job.config)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer that all use, but DeepSpeed's offload."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)


def backward_of(model: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Forward and backward as in any loop."""

    def backward(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = model(tokens, targets)
        loss.backward()
        return loss.detach()

    return backward


def ddp(job: Job) -> Trainer:
    """DistributedDataParallel of a bf16 model, with fp32 masters."""
    model = new_model(job)
    masters = [parameter.detach().clone() for parameter in model.parameters()]
    for master in masters:
        master.grad = torch.zeros_like(master)
    wrapped = nn.parallel.DistributedDataParallel(model.to(BF16), gradient_as_bucket_view=True)
    optimizer = adamw(masters)
    parameters = list(model.parameters())

    def update() -> None:
        nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        with torch.no_grad():
            torch._foreach_copy_([m.grad for m in masters], [p.grad for p in parameters])
            optimizer.step()
            torch._foreach_copy_(parameters, masters)

    return Trainer(backward_of(wrapped), update, wrapped.zero_grad)


def fsdp2(*, offload: bool = False) -> Callable[[Job], Trainer]:
    """fully_shard, a group a block."""

    def build(job: Job) -> Trainer:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

        policies: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)}
        if offload:
            policies["offload_policy"] = CPUOffloadPolicy()
        model = fully_sharded(new_model(job), init_device_mesh(job.device.type, (dist.get_world_size(),)), **policies)
        optimizer = adamw(model.parameters())

        def update() -> None:
            if offload:
                clip_on_host(model)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()

        return Trainer(backward_of(model), update, optimizer.zero_grad)

    return build


def clip_on_host(model: nn.Module) -> None:
    """Clips shards of gradients on the host. torch's function would reduce their norm there, and NCCL cannot."""
    shards: list[Any] = [parameter.grad.to_local() for parameter in model.parameters()]  # type: ignore[union-attr]
    square = torch.stack(torch._foreach_norm(shards)).square().sum().cuda()
    dist.all_reduce(square)
    torch._foreach_mul_(shards, min(1.0, MAX_NORM / (float(square.sqrt()) + 1e-6)))


def deepspeed(stage: int, *, offload: bool = False) -> Callable[[Job], Trainer]:
    """DeepSpeed at one stage."""

    def build(job: Job) -> Trainer:
        model = new_model(job)
        zero: dict[str, Any] = {"overlap_comm": True, "contiguous_gradients": True}
        optimizer: Any = None
        if offload:
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": job.device.type == "cuda"}
            optimizer = DeepSpeedCPUAdam(model.parameters(), lr=LEARNING_RATE)
        engine = deepspeed_engine(
            model,
            optimizer or adamw(model.parameters()),
            stage=stage,
            bucket=BUCKET,
            max_norm=MAX_NORM,
            train_micro_batch_size_per_gpu=job.batch,
            bf16={"enabled": True},
            zero_optimization=zero,
        )

        def backward(tokens: Tensor, targets: Tensor) -> Tensor:
            loss: Tensor = engine(tokens, targets)
            engine.backward(loss)
            return loss.detach()

        return Trainer(backward, engine.step, close=engine.destroy)

    return build


def torchao(job: Job) -> Trainer:
    """A bf16 model with torchao's CPUOffloadOptimizer. One rank alone can use it."""
    model = new_model(job).to(BF16)
    optimizer = torchao_optimizer(model, lr=LEARNING_RATE)
    return Trainer(backward_of(model), optimizer.step, optimizer.zero_grad)


def sharded(stage: int, **options: Any) -> Callable[[Job], Trainer]:
    """Zeroshard at one stage."""

    def build(job: Job) -> Trainer:
        model = new_model(job)
        model, optimizer = zeroshard.shard(
            model,
            adamw(model.parameters()),
            stage=stage,
            device=job.device,
            precision="bf16",
            clip_grad_norm=MAX_NORM,
            **options,
        )
        return Trainer(backward_of(model), optimizer.step, optimizer.zero_grad, lambda: zeroshard.synchronize(model))

    return build


# Peers that build kernels come last: if one of them hangs, the others have been measured.
VARIANTS = [
    Variant("ddp", ddp),
    Variant("fsdp2", fsdp2()),
    *(Variant(f"zeroshard stage {stage}", sharded(stage)) for stage in (0, 1, 2, 3)),
    Variant("zeroshard stage 3, prefetch 1", sharded(3, prefetch=1)),
    Variant("fsdp2, offload", fsdp2(offload=True), gpu_only=True),
    *(Variant(f"zeroshard stage {stage}, offload", sharded(stage, offload="cpu")) for stage in (2, 3)),
    *(Variant(f"deepspeed stage {stage}", deepspeed(stage), package="deepspeed") for stage in (1, 2, 3)),
    Variant("deepspeed stage 2, offload", deepspeed(2, offload=True), package="deepspeed", compiles=True),
]

PEERS_OF_OFFLOAD = [
    Variant("DeepSpeed ZeRO-2, CPU offload", deepspeed(2, offload=True), package="deepspeed", compiles=True),
    Variant("FSDP2, CPU offload", fsdp2(offload=True), gpu_only=True),
    Variant("torchao: bf16 without a master, no clipping", torchao, package="torchao", gpu_only=True),
]
"""What `offload_step.py` compares with, on one rank."""
