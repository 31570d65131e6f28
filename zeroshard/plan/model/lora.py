"""LoRA: the model's own parameters are frozen, and small matrices beside them are trained."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..setup import ModelError, Setup
from .model import Model
from .tracer import Built

INSTALL = 'LoRA is planned with the package peft: pip install "peft>=0.19"'


def with_adapters(model: Model, rank: int) -> Model:
    """The model with adapters of this rank beside all its linear layers except the head, as PEFT adds them.

    Experts that are one tensor are no linear layers, and stay as they are.
    """

    def build(setup: Setup) -> Built:
        try:
            import peft
        except ImportError:
            raise ModelError(f"--lora {rank}: {INSTALL}") from None
        built = model.build(setup)
        if setup.model_parallel > 1:
            raise ModelError(f"--lora {rank}: adapters are not planned together with --model-parallel")
        targets = list(_linear_layers(built.module))
        with torch.device("meta"), warnings.catch_warnings(action="ignore"):
            adapted = peft.get_peft_model(built.module, peft.LoraConfig(r=rank, target_modules=targets))
        return replace(built, module=adapted)

    return replace(
        model,
        name=f"{model.name}, LoRA {rank}",
        build=build,
        recomputes_itself=False,
        _known={},
        _known_traces={},
        _traces={},
    )


def _linear_layers(model: Any) -> Iterator[str]:
    """The names of all linear layers except the head."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    for name, module in model.named_modules():
        linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"  # that of GPT-2
        if linear and module is not head:
            yield name
