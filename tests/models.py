"""Small models and data for tests. Sizes divide nothing evenly, on purpose."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

WIDTH = 13


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """A residual network: a root (first, last) around repeated blocks."""

    def __init__(self, width: int = 13, depth: int = 4, inputs: int = 7, outputs: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.last = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Around(nn.Module):
    """A root (first, last) around two blocks of a kind."""

    def __init__(self, block: Callable[[], nn.Module], width: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(7, width)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.last = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def net(**sizes: int) -> Net:
    torch.manual_seed(1)
    return Net(**sizes)


def batch(step: int, rows: int = 6, inputs: int = 7) -> Tensor:
    """Another batch for every step and every rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of(model: nn.Module, step: int) -> Tensor:
    return model(batch(step)).float().square().mean()
