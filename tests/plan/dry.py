"""Dry runs of the built-in GPT, which tests compare with the plan."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.config.job import ModelConfig
from zeroshard.plan.dryrun import DryRun, dry_run
from zeroshard.train.gpt import GPT
from zeroshard.train.gpt.tensor_parallel import parallelise


def dry_gpt(
    config: ModelConfig, world: int, *, batch: int = 1, degree: int = 1, real: bool = False, **options: Any
) -> DryRun:
    """Runs one rank of ``world`` in bf16. ``degree`` neighbouring ranks share a replica. ``real``: on a GPU."""

    def loss(model: nn.Module) -> Tensor:
        tokens = torch.zeros(batch, config.sequence, dtype=torch.long, device="cuda" if real else "cpu")
        return model(tokens, tokens)  # type: ignore[no-any-return]

    return dry_run(
        lambda: GPT(config),
        lambda model: torch.optim.AdamW(model.parameters(), foreach=True),
        loss,
        world=world,
        real=real,
        tensor_parallel=degree,
        parallelise=parallelise,
        **{"precision": "bf16", **options},
    )
