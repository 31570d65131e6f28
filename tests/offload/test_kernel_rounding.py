"""Moments in bf16 are rounded stochastically: reproducibly, without bias, and without getting stuck."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.offload.host import ADAMW, NATIVE, SGD, pool, update
from zeroshard.offload.kernel import Segment
from zeroshard.offload.library import Simd
from zeroshard.offload.rules import AdamRule

# With both betas 0 the moments are the gradient and its square, so that any value can be rounded.
PLAIN = replace(ADAMW, beta1=0.0, beta2=0.0, lr=0.0)


def rounded(
    values: Tensor, seed: int = 0, key: int = 1, step: int = 1, start: int = 0, simd: Simd = NATIVE[0]
) -> tuple[Tensor, Tensor]:
    """Values and their squares, as bf16 moments."""
    moments = tuple(torch.zeros(len(values), dtype=torch.bfloat16) for _ in range(2))
    rule = replace(PLAIN, step=step)
    update(pool(simd), [Segment(values, torch.zeros(len(values)), None, moments, key, start)], rule, 1.0, seed)
    return moments[0], moments[1]


@pytest.mark.parametrize("fraction", [0.0, 1 / 65536, 0.01, 0.25, 0.5, 0.9, 65535 / 65536])
def test_a_value_goes_up_as_often_as_it_is_near(fraction: float) -> None:
    count = 200_000
    for below in (1.0, -3.0, 2.0**-100, 2.0**-133, 0.0):  # the last two among denormals
        bits = torch.tensor(below).view(torch.int32) + round(fraction * 65536)
        value = bits.view(torch.float32)
        above = ((bits & -65536) + 65536).view(torch.float32)
        first, _ = rounded(value.repeat(count), seed=5)
        got = first.float()
        assert torch.logical_or(got == below, got == above).all()
        ups = int((got != below).sum())
        deviation = (count * fraction * (1 - fraction)) ** 0.5
        assert abs(ups - count * fraction) <= 5 * deviation + 1e-9


def test_an_elements_roundings_are_unbiased_over_the_steps() -> None:
    values = 1.0 + torch.rand(512) * 2**-7
    steps = 4000
    first, second = torch.zeros(512, dtype=torch.float64), torch.zeros(512, dtype=torch.float64)
    for step in range(1, steps + 1):
        one, two = rounded(values, step=step)
        first += one.double() - values.double()
        second += two.double() - (values * values).double()
    deviation = 2**-7 / 2 / steps**0.5  # of the mean of one element, at most
    assert (first / steps).abs().max() < 5 * deviation
    assert (second / steps).abs().max() < 5 * deviation
    assert (first / steps).mean().abs() < 4 * deviation / 512**0.5
    assert (second / steps).mean().abs() < 4 * deviation / 512**0.5


def test_roundings_of_neighbours_moments_steps_seeds_and_keys_are_unrelated() -> None:
    values = torch.full((100_000,), 1 + 2**-8)  # half way, and its square nearly so
    one, two = rounded(values)
    first, second = one.float() > 1, two.float() > 1 + 2**-7
    others = {
        "the next element": first.roll(1),
        "the next cache line": first.roll(32),
        "the other moment": second,
        "another step": rounded(values, step=2)[0].float() > 1,
        "another seed": rounded(values, seed=1)[0].float() > 1,
        "another key": rounded(values, key=2)[0].float() > 1,
        "elements further on": rounded(values, start=2**32)[0].float() > 1,
    }
    assert abs(float(first.float().mean()) - 0.5) < 0.01
    for name, other in others.items():
        agreement = float((first == other).float().mean())
        assert abs(agreement - 0.5) < 0.01, name


def test_the_same_seed_gives_the_same_bits() -> None:
    values = torch.randn(10_000)
    for one, other in zip(rounded(values, seed=9), rounded(values, seed=9), strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(rounded(values, seed=9)[0], rounded(values, seed=10)[0])


def test_the_second_moment_does_not_stick_at_beta2_0_999() -> None:
    """A decay by 0.1% is less than half a bf16 step, so rounding to nearest would never leave 1."""
    assert torch.tensor(1.0, dtype=torch.bfloat16) * 0.999 == 1.0
    count, steps = 20_000, 1000
    moments = (torch.zeros(count, dtype=torch.bfloat16), torch.ones(count, dtype=torch.bfloat16))
    gradient, master = torch.zeros(count, dtype=torch.bfloat16), torch.zeros(count)
    batch = pool().prepare([Segment(gradient, master, None, moments, 0, 0)])
    for step in range(1, steps + 1):
        pool().update([(batch, [replace(ADAMW, step=step)])], 1.0)
    assert float(moments[1].float().mean()) == pytest.approx(0.999**steps, rel=0.005)


def test_the_second_moment_finds_the_mean_of_the_squares() -> None:
    count = 4096
    moments = (torch.zeros(count, dtype=torch.bfloat16), torch.zeros(count, dtype=torch.bfloat16))
    exact = torch.zeros(count)
    master = torch.zeros(count)
    rule = AdamRule(1e-3, 0.9, 0.999, 1e-8, 0.0, True, False, 1)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 1501):
        gradient = torch.randn(count, generator=generator)
        update(pool(), [Segment(gradient, master, None, moments, 0, 0)], replace(rule, step=step), 1.0)
        exact.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
    relative = moments[1].float() / exact - 1
    assert abs(float(relative.mean())) < 0.002
    assert float(relative.abs().mean()) < 0.05


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
