"""One script, written for DeepSpeed. Its import is a parameter: run by DeepSpeed itself and by zeroshard, on 2 ranks.

torchrun --nproc-per-node 2 -m tests.integrations.deepspeed_script deepspeed OUT.json
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.models import batch, net

STEPS = 4
ADAM = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}}

OFFLOAD = {"zero_force_ds_cpu_optimizer": False}  # DeepSpeed's own CPU Adam would be compiled first


def configuration(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 6,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.1,
        "optimizer": ADAM,
        "zero_optimization": {"stage": stage, "overlap_comm": False, "reduce_bucket_size": 1000},
        **more,
    }


def warmup(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": name, "params": {"warmup_num_steps": 2, **parameters}}


CASES: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": configuration(stage) for stage in (0, 1, 2, 3)},
    **{f"bf16, stage {stage}": configuration(stage, bf16={"enabled": True}) for stage in (1, 2, 3)},
    "offload": configuration(2, **OFFLOAD, zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}}),
    "offload of parameters": configuration(
        3,
        **OFFLOAD,
        zero_optimization={"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    ),
    "autocast to bf16": configuration(2, torch_autocast={"enabled": True, "dtype": "bfloat16"}),
    "clipped by default": {k: v for k, v in configuration(2).items() if k != "gradient_clipping"},
    "not clipped": configuration(2, gradient_clipping=0.0),
    "Adam": configuration(1, optimizer={"type": "Adam", "params": {**ADAM["params"], "adam_w_mode": False}}),
    "SGD": configuration(1, zero_allow_untested_optimizer=True, optimizer={"type": "SGD", "params": {"lr": 0.1}}),
    "WarmupLR": configuration(2, scheduler=warmup("WarmupLR", warmup_max_lr=0.02)),
    "WarmupDecayLR": configuration(2, scheduler=warmup("WarmupDecayLR", total_num_steps=4, warmup_type="linear")),
    "WarmupCosineLR": configuration(2, scheduler=warmup("WarmupCosineLR", total_num_steps=4)),
}


def train(deepspeed: Any, config: dict[str, Any], *, own_backward: bool = False) -> list[list[float]]:
    """Loss, learning rate and gradient norm of each micro-batch."""
    model = net(depth=2)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=json.loads(json.dumps(config))
    )
    dtype = torch.bfloat16 if config.get("bf16") else torch.float32
    found = []
    for step in range(STEPS * engine.gradient_accumulation_steps()):
        output = engine(batch(step).to(dtype))
        loss = nn.functional.mse_loss(output.float(), torch.full_like(output, 3.0).float())
        if own_backward:
            loss.backward()
        else:
            engine.backward(loss)
        engine.step()
        norm = engine.get_global_grad_norm()
        found.append([loss.item(), engine.get_lr()[0], 0.0 if norm is None else float(norm)])
    assert engine.global_steps == STEPS
    return found


def main() -> None:
    name, out = sys.argv[1:]
    deepspeed = importlib.import_module(name)
    deepspeed.init_distributed("gloo")
    found = {case: train(deepspeed, config) for case, config in CASES.items()}
    found["own backward"] = train(deepspeed, CASES["stage 2"], own_backward=True)
    if os.environ["RANK"] == "0":
        Path(out).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
