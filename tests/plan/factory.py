"""Functions that tests pass to `zeroshard plan --model module:factory`."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.config.job import ModelConfig
from zeroshard.train.gpt import GPT


def gpt() -> nn.Module:
    return GPT(ModelConfig(layers=2, hidden=64, heads=2, sequence=64))


def misfit() -> Any:
    return nn.Linear(8, 8), (torch.empty(4, 9),)


def no_tokens() -> nn.Module:
    return nn.Linear(8, 8)


def recomputing() -> nn.Module:
    return GPT(ModelConfig(layers=2, hidden=64, heads=2, sequence=64, checkpointing=True))


def _layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))


def fixed() -> Any:
    return _layers(), (torch.empty(6, 1024),)


def fixed_tokens() -> Any:
    tokens = torch.zeros(3, 32, dtype=torch.long)
    return gpt(), {"tokens": tokens, "targets": tokens}


def samples(batch: int) -> Any:
    return _layers(), (torch.empty(batch, 1024),)


def sequences(batch: int, sequence: int) -> Any:
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), (torch.empty(batch, sequence, 256),)


def one_matrix(batch: int) -> Any:
    return nn.Linear(64, 64), (torch.empty(batch, 64),)


def without_parameters() -> Any:
    return nn.ReLU(), (torch.empty(4, 4, requires_grad=True),)


def leaves() -> nn.Module:
    sys.exit(5)


def masked() -> Any:
    class Masked(nn.Linear):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            assert mask is not None
            return super().forward(x) if mask.all() else x

    return Masked(64, 64), {"x": torch.empty(4, 64), "mask": torch.ones(4, dtype=torch.bool)}


llama = fixed
"""A function with the name of an animal, which a terminal might print as a picture."""
