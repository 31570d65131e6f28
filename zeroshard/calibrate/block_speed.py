"""How fast the blocks of a transformer are here: their products, and what their memory takes beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from ..config.job import ModelConfig
from ..plan.shape import Transformer
from ..train.gpt import Block
from .stopwatch import seconds_of, settled_seconds_of


class Size(NamedTuple):
    """Of a transformer block, and of what goes through it."""

    hidden: int
    tokens: int

    @property
    def work(self) -> float:
        """As ``Device.rate`` takes it."""
        return float(self.tokens * self.hidden**2)


GPU_SIZES = (Size(4096, 16384), Size(1024, 2048), Size(1024, 32768), Size(2048, 8192), Size(4096, 4096))
CPU_SIZES = (Size(1024, 1024), Size(128, 256), Size(256, 512), Size(256, 2048), Size(512, 1024))
OTHER_PRECISION_SIZES = {"cuda": Size(2048, 4096), "cpu": Size(512, 1024)}
GPU_SEQUENCE, CPU_SEQUENCE = 1024, 256
GPU_DEPTH = 4
"""Blocks in a row, as in a training."""


class Pass(NamedTuple):
    """Blocks that were passed through, forward and back, and how long that took."""

    size: Size
    depth: int
    sequence: int
    seconds: float

    @property
    def flops(self) -> float:
        return 3 * self.depth * (24 * self.size.work + 4 * self.size.tokens * self.sequence * self.size.hidden)

    @property
    def written(self) -> float:
        """Activations as the time model counts them: three times what forward writes."""
        block = Transformer(layers=1, hidden=self.size.hidden, heads=1, vocabulary=1).block_written()
        return 3 * self.depth * self.size.tokens * block


class Speed(NamedTuple):
    """Of blocks: what their products tend to, what each of these loses, and what all else takes."""

    rate: float
    """FLOPs a second."""
    half_work: float
    """The work (``Size.work``) that reaches half of it."""
    write_seconds: float
    """For each activation that is written."""


def fit(passes: Sequence[Pass]) -> Speed:
    """The least squares of relative errors; none of the three is negative.

    >>> sizes = [Size(1024, 2048), Size(1024, 16384), Size(4096, 4096), Size(4096, 16384)]
    >>> passes = [Pass(size, 1, 1024, 1.0) for size in sizes]
    >>> passes = [one._replace(seconds=one.flops / 6e14 * (1 + 1e9 / one.size.work)) for one in passes]
    >>> rate, half_work, write_seconds = fit(passes)
    >>> round(rate / 1e12), round(half_work / 1e9, 3), round(write_seconds * 1e15)
    (600, 1.0, 0)
    """
    rows = [[one.flops, one.flops / one.size.work, one.written] for one in passes]
    shares = torch.tensor(rows, dtype=torch.float64) / torch.tensor([[one.seconds] for one in passes])
    best = (math.inf, [0.0, 0.0, 0.0])
    for kept in ([0], [0, 1], [0, 2], [0, 1, 2]):
        scale = shares[:, kept].norm(dim=0)  # their units are far apart
        found = torch.linalg.lstsq(shares[:, kept] / scale, torch.ones(len(passes), 1, dtype=torch.float64)).solution
        values = dict(zip(kept, (found[:, 0] / scale).tolist(), strict=True))
        if min(values.values()) >= 0:
            error = float((shares[:, kept] / scale @ found - 1).square().sum())
            best = min(best, (error, [values.get(column, 0.0) for column in range(3)]))
    a_flop, a_product, a_write = best[1]
    return Speed(1 / a_flop, max(a_product / a_flop, 1.0), a_write)


def pass_through(device: torch.device, dtype: torch.dtype, size: Size) -> Pass:
    """Measures blocks of a GPT, everything in them included."""
    cuda = device.type == "cuda"
    depth, sequence = (GPU_DEPTH, GPU_SEQUENCE) if cuda else (1, CPU_SEQUENCE)
    config = ModelConfig(layers=depth, hidden=size.hidden, heads=max(1, size.hidden // 64), sequence=sequence)
    blocks = nn.Sequential(*(Block(config) for _ in range(depth))).to(device, dtype)
    shape = (max(1, size.tokens // sequence), sequence, size.hidden)
    tokens = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    wanted, gradient = [tokens, *blocks.parameters()], torch.randn(shape, device=device, dtype=dtype)

    def work() -> None:
        torch.autograd.grad(blocks(tokens), wanted, gradient)

    seconds = settled_seconds_of(as_cuda_graph(work), device) if cuda else seconds_of(work, device)
    return Pass(size, depth, sequence, seconds)


def as_cuda_graph(work: Callable[[], object]) -> Callable[[], object]:
    """The same as one CUDA graph: what the device takes, without what it takes to launch kernel by kernel."""
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):  # what is made once must not be made while it is captured
        work()
        work()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def product_rate(device: torch.device, dtype: torch.dtype, size: Size) -> float:
    """FLOPs a second of one plain product."""
    left = torch.randn(size.tokens, size.hidden, device=device, dtype=dtype)
    right = torch.randn(size.hidden, 4 * size.hidden, device=device, dtype=dtype)
    return 8 * size.work / seconds_of(lambda: left @ right, device)
