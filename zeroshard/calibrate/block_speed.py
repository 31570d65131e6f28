"""Measures the speed of transformer blocks on this device: matrix products, and memory traffic of the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from ..config.job import ModelConfig
from ..train.gpt import Block
from .stopwatch import seconds_of, settled_seconds_of


class Size(NamedTuple):
    """The hidden size of a transformer block, and the tokens that pass through it."""

    hidden: int
    tokens: int

    @property
    def work(self) -> float:
        """Multiply-adds of one matrix product, the unit of ``Device.rate``."""
        return float(self.tokens * self.hidden**2)


GPU_SIZES = (Size(4096, 16384), Size(1024, 2048), Size(1024, 32768), Size(2048, 8192), Size(4096, 4096))
CPU_SIZES = (Size(1024, 1024), Size(128, 256), Size(256, 512), Size(256, 2048), Size(512, 1024))
OTHER_PRECISION_SIZES = {"cuda": Size(2048, 4096), "cpu": Size(512, 1024)}
GPU_SEQUENCE, CPU_SEQUENCE = 1024, 256
BLOCK_WRITTEN = 18
"""Elements of activations that the forward of a GPT block writes, for each token and hidden unit: two norms, queries,
keys, values, the result of attention, two projections, two sums, and twice the width of the MLP."""
GPU_DEPTH = 4
"""Blocks in a row, as in training."""


class Pass(NamedTuple):
    """One measurement: forward and backward of some blocks, and the seconds they took."""

    size: Size
    depth: int
    sequence: int
    seconds: float

    @property
    def flops(self) -> float:
        return 3 * self.depth * (24 * self.size.work + 4 * self.size.tokens * self.sequence * self.size.hidden)

    @property
    def written(self) -> float:
        """Elements of activations that the plan counts for the pass: three times what forward writes."""
        return 3 * self.depth * self.size.tokens * BLOCK_WRITTEN * self.size.hidden


class Speed(NamedTuple):
    """The speed of blocks: of large products, the loss of small products, and the time of memory traffic."""

    rate: float
    """FLOPs a second of very large products."""
    half_work: float
    """The size of a product (``Size.work``) that reaches half of this rate."""
    write_seconds: float
    """Seconds for each element of activations that is written."""


def fit(passes: Sequence[Pass]) -> Speed:
    """Fits the three numbers by least squares of relative errors. None of them is negative.

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
    for columns in ([0], [0, 1], [0, 2], [0, 1, 2]):
        scale = shares[:, columns].norm(dim=0)  # the columns differ by orders of magnitude
        found = torch.linalg.lstsq(shares[:, columns] / scale, torch.ones(len(passes), 1, dtype=torch.float64)).solution
        values = dict(zip(columns, (found[:, 0] / scale).tolist(), strict=True))
        if min(values.values()) >= 0:
            error = float((shares[:, columns] / scale @ found - 1).square().sum())
            best = min(best, (error, [values.get(column, 0.0) for column in range(3)]))
    a_flop, a_product, a_write = best[1]
    return Speed(1 / a_flop, max(a_product / a_flop, 1.0), a_write)


def pass_through(device: torch.device, dtype: torch.dtype, size: Size) -> Pass:
    """Measures forward and backward of whole GPT blocks."""
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
    """Records the work as one CUDA graph, so that it is timed without the launch of every kernel."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # allocations of the first call must not happen during the capture
        work()
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def product_rate(device: torch.device, dtype: torch.dtype, size: Size) -> float:
    """FLOPs a second of one plain matrix product."""
    left = torch.randn(size.tokens, size.hidden, device=device, dtype=dtype)
    right = torch.randn(size.hidden, 4 * size.hidden, device=device, dtype=dtype)
    return 8 * size.work / seconds_of(lambda: left @ right, device)
