"""LoRA: the model's own parameters are frozen, and small matrices beside them are trained."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..setup import ModelError, Setup
from .model import Model
from .tracer import Built

INSTALL = 'LoRA is planned with the package peft: pip install "peft>=0.19"'


def with_adapters(model: Model, rank: int) -> Model:
    """The model with adapters of this rank beside all its linear layers except the head, as PEFT adds them."""

    def build(setup: Setup) -> Built:
        try:
            import peft
        except ImportError:
            raise ModelError(f"--lora {rank}: {INSTALL}") from None
        built = model.build(setup)
        if setup.model_parallel > 1:
            raise ModelError(f"--lora {rank}: adapters are not planned together with --model-parallel")
        with torch.device("meta"):
            adapted = peft.get_peft_model(built.module, peft.LoraConfig(r=rank, target_modules="all-linear"))
        return replace(built, module=adapted)

    return replace(
        model, name=f"{model.name}, LoRA {rank}", build=build, recomputes_itself=False, _known={}, _traces={}
    )
