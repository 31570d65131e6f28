"""What `zeroshard plan --model module:factory` is given in tests."""

from __future__ import annotations

from torch import nn

from zeroshard.train.gpt import GPT, ModelConfig


def gpt() -> nn.Module:
    return GPT(ModelConfig(layers=2, hidden=64, heads=2, sequence=64))
