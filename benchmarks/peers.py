"""How FSDP2, DeepSpeed and torchao are set up in the benchmarks: in one place, so that they get the same everywhere."""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeroshard.train.gpt import GPT


def fully_sharded(model: GPT, mesh: DeviceMesh | None = None, **policies: Any) -> GPT:
    """FSDP2 with a group a block, and a group of what is left over."""
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, mesh=mesh, **policies)
    fully_shard(model, mesh=mesh, **policies)
    return model


def deepspeed_engine(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, stage: int, bucket: int, max_norm: float, **settings: Any
) -> Any:
    """DeepSpeed's engine at one ZeRO stage.

    Args:
        model: the whole model.
        optimizer: one of torch's, or one of DeepSpeed's own.
        stage: 1, 2 or 3.
        bucket: elements of every bucket: of reduces, of gathers, of stage 3's prefetching. The default of reduces and
            gathers, 5e8, would hold small models whole, and then nothing overlaps.
        max_norm: gradients are clipped to this norm.
        settings: further keys of its configuration; those of `zero_optimization` are added to the ones above.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    zero = {"stage": stage, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    zero |= {"stage3_prefetch_bucket_size": bucket} if stage == 3 else {}
    configuration = {
        "train_micro_batch_size_per_gpu": 1,  # it only logs throughput with it
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": max_norm,
        "steps_per_print": sys.maxsize,
        **settings,
        "zero_optimization": zero | settings.get("zero_optimization", {}),
    }
    deepspeed.init_distributed(get_accelerator().communication_backend_name(), verbose=False)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=configuration)
    return engine


def torchao_optimizer(model: nn.Module, *, lr: float) -> Any:
    """The optimizer of torchao on the host, which frees each gradient on the device once it was copied.

    It has the dtype of the parameters for everything: bf16 parameters have no fp32 master. It cannot clip, because it
    hands out no gradients.
    """
    from torchao.optim import CPUOffloadOptimizer

    return CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, offload_gradients=True, lr=lr, fused=True)
