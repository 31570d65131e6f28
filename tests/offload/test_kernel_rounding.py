"""Moments in bf16 and in 8 bits are rounded stochastically: reproducibly, without bias, and without getting stuck."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.offload.host import ADAMW, CODES, NATIVE, SGD, pool, update
from zeroshard.offload.codes import TILE, decode
from zeroshard.offload.kernel import Segment
from zeroshard.offload.library import Simd
from zeroshard.offload.rules import AdamRule

# With both betas 0 the moments are the gradient and its square, so that any value can be rounded.
PLAIN = replace(ADAMW, beta1=0.0, beta2=0.0, lr=0.0)
LOST = {"bf16": 16, "8bit": 20}
"""The lower bits of fp32 that a moment does not keep. A code keeps as many if it is near the largest of its tile."""
KINDS = pytest.mark.parametrize("kind", LOST)


def zeros(kind: str, count: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Moments of Adam, and their scales."""
    if kind == "bf16":
        return tuple(torch.zeros(count, dtype=torch.bfloat16) for _ in range(2)), ()
    moments = tuple(torch.zeros(count, dtype=dtype) for dtype in CODES)
    return moments, tuple(torch.zeros(-(-count // TILE), dtype=torch.uint8) for _ in CODES)


def shown(segment: Segment) -> tuple[Tensor, ...]:
    """The moments of a segment as numbers."""
    return tuple(map(decode, segment.moments, segment.scales)) if segment.scales else segment.moments


def rounded(
    values: Tensor,
    seed: int = 0,
    key: int = 1,
    step: int = 1,
    start: int = 0,
    simd: Simd = NATIVE[0],
    kind: str = "bf16",
) -> tuple[Tensor, ...]:
    """Values and their squares, as moments."""
    moments, scales = zeros(kind, len(values))
    segment = Segment(values, torch.zeros(len(values)), None, moments, key, start, scales)
    update(pool(simd), [segment], replace(PLAIN, step=step), 1.0, seed)
    return shown(segment)


@KINDS
@pytest.mark.parametrize("fraction", [0.0, 1 / 65536, 0.01, 0.25, 0.5, 0.9, 65535 / 65536])
def test_a_value_goes_up_as_often_as_it_is_near(fraction: float, kind: str) -> None:
    count, unit = 200_000, 1 << LOST[kind]
    for below in (1.0, -3.0, 2.0**-100, 2.0 ** (LOST[kind] - 149), 0.0):  # the last two among denormals
        bits = torch.tensor(below).view(torch.int32) + round(fraction * 65536) * (unit >> 16)
        value = bits.view(torch.float32)
        above = ((bits & -unit) + unit).view(torch.float32)
        got = rounded(value.repeat(count), seed=5, kind=kind)[0].float()
        assert torch.logical_or(got == below, got == above).all()
        ups = int((got != below).sum())
        deviation = (count * fraction * (1 - fraction)) ** 0.5
        assert abs(ups - count * fraction) <= 5 * deviation + 1e-9


@KINDS
def test_an_elements_roundings_are_unbiased_over_the_steps(kind: str) -> None:
    unit = 2.0 ** (LOST[kind] - 23)
    values = 1.0 + torch.rand(512) * unit
    steps = 4000
    first, second = torch.zeros(512, dtype=torch.float64), torch.zeros(512, dtype=torch.float64)
    for step in range(1, steps + 1):
        one, two = rounded(values, step=step, kind=kind)
        first += one.double() - values.double()
        second += two.double() - (values * values).double()
    deviation = unit / 2 / steps**0.5  # of the mean of one element, at most
    assert (first / steps).abs().max() < 5 * deviation
    assert (second / steps).abs().max() < 5 * deviation
    assert (first / steps).mean().abs() < 4 * deviation / 512**0.5
    assert (second / steps).mean().abs() < 4 * deviation / 512**0.5


@KINDS
def test_roundings_of_neighbours_moments_steps_seeds_and_keys_are_unrelated(kind: str) -> None:
    unit = 2.0 ** (LOST[kind] - 23)
    values = torch.full((100_000,), 1 + unit / 2)  # half way, and its square nearly so
    one, two = rounded(values, kind=kind)
    first, second = one.float() > 1, two.float() > 1 + unit
    others = {
        "the next element": first.roll(1),
        "the next cache line": first.roll(32),
        "the other moment": second,
        "another step": rounded(values, step=2, kind=kind)[0].float() > 1,
        "another seed": rounded(values, seed=1, kind=kind)[0].float() > 1,
        "another key": rounded(values, key=2, kind=kind)[0].float() > 1,
        "elements further on": rounded(values, start=2**32, kind=kind)[0].float() > 1,
    }
    assert abs(float(first.float().mean()) - 0.5) < 0.01
    for name, other in others.items():
        agreement = float((first == other).float().mean())
        assert abs(agreement - 0.5) < 0.01, name


@pytest.mark.parametrize("part", [0.5, 0.1, 0.01])
def test_elements_of_a_tile_that_share_a_hash_round_independently(part: float) -> None:
    values = torch.full((40_000 * TILE,), 1 + part * 2.0**-3)
    first = (rounded(values, kind="8bit")[0].float() > 1).view(-1, TILE).double()
    squares = rounded(values.sqrt(), kind="8bit")[1]
    second = (squares.float() > 1).view(-1, TILE).double()
    numbers = torch.arange(TILE)
    deviation = (part * part * (1 - part * part) / first.numel()) ** 0.5
    for distance in (4, 32, 36):
        for one, other in ((first, first), (second, second), (first, second)):
            both = float((one * other[:, numbers ^ distance]).mean())
            assert abs(both - part * part) < 6 * deviation, distance


@KINDS
def test_the_same_seed_gives_the_same_bits(kind: str) -> None:
    values = torch.randn(10_000)
    for one, other in zip(rounded(values, seed=9, kind=kind), rounded(values, seed=9, kind=kind), strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(rounded(values, seed=9, kind=kind)[0], rounded(values, seed=10, kind=kind)[0])


@KINDS
def test_the_second_moment_does_not_stick_at_beta2_0_999(kind: str) -> None:
    """A decay by 0.1% is less than half a bf16 step, so rounding to nearest would never leave 1."""
    assert torch.tensor(1.0, dtype=torch.bfloat16) * 0.999 == 1.0
    count, steps = 20_000, 1000
    segment = Segment(torch.ones(count), torch.zeros(count), None, *zeros(kind, count)[:1], 0, 0, zeros(kind, count)[1])
    update(pool(), [segment], PLAIN, 1.0)
    segment.gradient.zero_()
    batch = pool().prepare([segment])
    for step in range(1, steps + 1):
        pool().update([(batch, [replace(ADAMW, step=step)])], 1.0)
    bound = 0.005 if kind == "bf16" else 0.03  # a step of a code is 16 times as large
    assert float(shown(segment)[1].float().mean()) == pytest.approx(0.999**steps, rel=bound)


@KINDS
def test_the_second_moment_finds_the_mean_of_the_squares(kind: str) -> None:
    count = 4096
    moments, scales = zeros(kind, count)
    exact = torch.zeros(count)
    master = torch.zeros(count)
    rule = AdamRule(1e-3, 0.9, 0.999, 1e-8, 0.0, True, False, 1)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 1501):
        gradient = torch.randn(count, generator=generator)
        segment = Segment(gradient, master, None, moments, 0, 0, scales)
        update(pool(), [segment], replace(rule, step=step), 1.0)
        exact.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
    relative = shown(segment)[1].float() / exact - 1
    mean, size = (0.002, 0.05) if kind == "bf16" else (0.01, 0.2)  # the 1000 latest roundings add up
    assert abs(float(relative.mean())) < mean
    assert float(relative.abs().mean()) < size


@pytest.mark.parametrize("simd", NATIVE)
def test_inf_and_nan_stay_and_nothing_finite_becomes_inf(simd: Simd) -> None:
    largest, edge = torch.finfo(torch.float32).max, torch.finfo(torch.bfloat16).max
    kinds = torch.tensor([torch.inf, -torch.inf, torch.nan, largest, -largest, 1e19, 1.8e19])
    buffer = torch.zeros(7000, dtype=torch.bfloat16)  # SGD's first is the gradient itself
    rule = replace(SGD, step=1, weight_decay=0.0)
    update(pool(simd), [Segment(kinds.repeat(1000), torch.zeros(7000), None, (buffer,), 0, 0)], rule, 1.0)
    columns = buffer.reshape(1000, 7).float().unbind(1)
    assert columns[0].isposinf().all()
    assert columns[1].isneginf().all()
    assert columns[2].isnan().all()
    assert (columns[3] == edge).all()
    assert (columns[4] == -edge).all()
    squares = rounded(kinds.repeat(1000), simd=simd)[1].reshape(1000, 7)
    assert squares[:, [0, 1, 3, 4]].isposinf().all()  # they overflow in fp32, as torch's do
    assert squares[:, 2].isnan().all()
    assert squares[:, 5:].isfinite().all()
