"""What the tests of the host optimizer share: pools for every native path, random states, and sizes of errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from zeroshard.offload.codes import TILE, encode
from zeroshard.offload.kernel import Pool, Segment
from zeroshard.offload.library import Simd, load, paths
from zeroshard.offload.rules import AdamRule, Rule, SGDRule

ADAMW = AdamRule(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, decoupled=True, maximize=False, step=3)
ADAM = replace(ADAMW, decoupled=False)
SGD = SGDRule(lr=0.1, momentum=0.9, dampening=0.1, nesterov=False, weight_decay=0.1, maximize=False, step=3)

NATIVE = paths(load())

CODES = (torch.int8, torch.uint8)
"""The dtypes of Adam's moments in 8 bits."""


@cache
def pool(simd: Simd = NATIVE[0], threads: int = 2) -> Pool:
    """One for each path and number of threads, for the whole run."""
    return Pool(threads, simd)


def update(pool: Pool, segments: Sequence[Segment], rule: Rule | Sequence[Rule], factor: float, seed: int = 0) -> None:
    """One step of some segments, with one rule for all or one for each."""
    rules = rule if isinstance(rule, Sequence) else [rule] * len(segments)
    pool.update([(pool.prepare(segments), rules)], factor, seed)


@dataclass(frozen=True)
class Format:
    """The dtypes of a segment."""

    gradient: torch.dtype = torch.bfloat16
    parameter: torch.dtype | None = torch.bfloat16
    split: bool = False
    moments: tuple[torch.dtype, ...] = (torch.float32, torch.float32)
    over_gradient: bool = False
    """The parameter is written over the gradient's slot."""


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """A bf16 parameter and int16 remainders that together are the fp32 master, by the definition."""
    bits = master.view(torch.int32).long()
    bits = torch.where(master.isnan(), 0x7FC00000, bits)
    high = (bits + 0x8000) >> 16
    low = bits - (high << 16)
    assert low.min() >= -(2**15)
    assert low.max() < 2**15
    return high.to(torch.int16).view(torch.bfloat16), low.to(torch.int16)


def joined(high: Tensor, low: Tensor) -> Tensor:
    """The fp32 master again."""
    bits = (high.view(torch.int16).long() << 16) + low.long()
    return bits.to(torch.int32).view(torch.float32)


def random_segment(length: int, form: Format, seed: int = 0, special: bool = False) -> Segment:
    """Values of ordinary size; `special` puts zeros, denormals, infinities and NaN among them."""
    generator = torch.Generator().manual_seed(seed)
    gradient = torch.randn(length, generator=generator) * 1e-2
    master = torch.randn(length, generator=generator)
    moments = [torch.randn(length, generator=generator) * 1e-2, torch.rand(length, generator=generator) * 1e-4]
    if special:
        odd = torch.tensor([0.0, -0.0, 1e-40, -3e-45, 6e-8, 65519.9, 65520.0, 3.4e38, -3.4e38, torch.inf, -torch.inf])
        odd = torch.cat([odd, torch.tensor([torch.nan, -torch.nan])])
        for tensor in (gradient, master, *moments):
            where = torch.randint(0, max(length, 1), (length // 4,), generator=generator)
            tensor[where] = odd[torch.randint(0, len(odd), (length // 4,), generator=generator)]
        moments[1].abs_()
    states = tuple(_stored(moment, dtype) for moment, dtype in zip(moments, form.moments, strict=False))
    slot = gradient.to(form.gradient)
    parameter: Tensor | None = None
    if form.split:
        parameter, master = split(master)
    elif form.over_gradient:
        assert form.parameter is form.gradient
        parameter = slot
    elif form.parameter is not None:
        parameter = torch.zeros(length, dtype=form.parameter)
    scales = tuple(scale for _, scale in states if scale is not None)
    return Segment(slot, master, parameter, tuple(values for values, _ in states), key=7, start=0, scales=scales)


def _stored(moment: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """A moment as the kernel reads it, and the scales of codes."""
    if dtype not in CODES:
        return moment.to(dtype), None
    codes, scales = torch.empty(len(moment), dtype=dtype), torch.empty(-(-len(moment) // TILE), dtype=torch.uint8)
    encode(moment, codes, scales)
    return codes, scales


def clone(segment: Segment, offset: int = 0) -> Segment:
    """The same state in other memory, `offset` elements off its alignment."""

    def copy(tensor: Tensor) -> Tensor:
        return torch.cat([tensor.new_zeros(offset), tensor])[offset:]

    gradient = copy(segment.gradient)
    parameter = segment.parameter
    if parameter is not None:
        parameter = gradient if parameter is segment.gradient else copy(parameter)
    return replace(
        segment,
        gradient=gradient,
        master=copy(segment.master),
        parameter=parameter,
        moments=tuple(copy(moment) for moment in segment.moments),
        scales=tuple(copy(scales) for scales in segment.scales),
    )


def cut(segment: Segment, *places: int) -> list[Segment]:
    """The same memory as several segments. Places must be multiples of a tile where moments are codes."""
    bounds = [0, *sorted(places), segment.gradient.numel()]
    return [
        replace(
            segment,
            gradient=segment.gradient[begin:end],
            master=segment.master[begin:end],
            parameter=None if segment.parameter is None else segment.parameter[begin:end],
            moments=tuple(moment[begin:end] for moment in segment.moments),
            start=segment.start + begin,
            scales=tuple(scales[begin // TILE : -(-end // TILE)] for scales in segment.scales),
        )
        for begin, end in pairwise(bounds)
    ]


def outcome(segment: Segment) -> list[Tensor]:
    """Every bit that an update writes."""
    written = [segment.master, *segment.moments, *segment.scales]
    if segment.parameter is not None:
        written.append(segment.parameter)
    return [tensor.view(torch.uint8) for tensor in written]


def assert_same_bits(segment: Segment, other: Segment) -> None:
    for mine, theirs in zip(outcome(segment), outcome(other), strict=True):
        assert torch.equal(mine, theirs)


def ulps(got: Tensor, exact: Tensor, scale: Tensor) -> float:
    """The largest error, in units of the last place of an fp32 number as large as `scale`."""
    largest = torch.maximum(scale.abs(), exact.abs()).float().clamp(min=torch.finfo(torch.float32).tiny)
    unit = torch.nextafter(largest, torch.tensor(torch.inf)).double() - largest.double()
    return float(((got.double() - exact).abs() / unit).max())
