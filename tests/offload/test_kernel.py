"""The host optimizer computes what torch's do, element by element, in units of the last place, on every SIMD path."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from tests.offload.host import ADAM, ADAMW, CODES, NATIVE, SGD, Format, pool, random_segment, split, ulps, update
from zeroshard.offload.codes import TILE, decode
from zeroshard.offload.kernel import Segment
from zeroshard.offload.library import Simd
from zeroshard.offload.rules import AdamRule, SGDRule

LENGTH = 5003
FACTOR = 0.37
BOUNDS = (2, 2, 4)
"""Ulps of Adam's master and moments. The second squares a gradient that weight decay has already rounded twice."""
FP32 = Format(torch.float32, parameter=None)

ADAM_RULES = [
    ADAMW,
    ADAM,
    replace(ADAMW, weight_decay=0.0, step=1),
    replace(ADAM, weight_decay=0.0, maximize=True, step=1000),
    replace(ADAM, maximize=True),
    replace(ADAMW, maximize=True, beta1=0.3, beta2=0.95, eps=1e-6),
    replace(ADAM, beta1=0.0, lr=0.0),
]
SGD_RULES = [
    SGD,
    replace(SGD, nesterov=True, dampening=0.0),
    replace(SGD, step=1),
    replace(SGD, step=1, nesterov=True, dampening=0.0, weight_decay=0.0),
    replace(SGD, maximize=True, weight_decay=0.0),
    replace(SGD, momentum=0.0),
    replace(SGD, momentum=0.0, weight_decay=0.0, maximize=True),
]


def sgd_format(rule: SGDRule) -> Format:
    return replace(FP32, moments=(torch.float32,) if rule.momentum else ())


def scaled(segment: Segment, factor: float = FACTOR) -> Tensor:
    """The gradient as the rules see it: converted and multiplied in fp32, which both sides do alike."""
    return (segment.gradient.float() * factor).double()


class Exact(NamedTuple):
    """A result in fp64, and the size of the terms it was added up from: what is lost is a part of these."""

    value: Tensor
    size: Tensor


def exact_adam(segment: Segment, rule: AdamRule) -> tuple[Exact, Exact, Exact]:
    """Master, first and second moment."""
    gradient, master = scaled(segment), segment.master.double()
    first, second = (moment.double() for moment in segment.moments)
    gradient = -gradient if rule.maximize else gradient
    size = gradient.abs()
    if rule.decoupled:
        master = master * (1 - rule.lr * rule.weight_decay)
    else:
        gradient = gradient + rule.weight_decay * master
        size = size + (rule.weight_decay * master).abs()
    first_size = torch.maximum(first.abs(), size)
    second_size = rule.beta2 * second + (1 - rule.beta2) * size * size
    first = first + (1 - rule.beta1) * (gradient - first)
    second = rule.beta2 * second + (1 - rule.beta2) * gradient * gradient
    root = (second / (1 - rule.beta2**rule.step)).sqrt()
    rate = rule.lr / (1 - rule.beta1**rule.step) / (root + rule.eps)
    master_size = torch.maximum(master.abs(), rate * first_size)
    return Exact(master - rate * first, master_size), Exact(first, first_size), Exact(second, second_size)


def exact_sgd(segment: Segment, rule: SGDRule) -> tuple[Exact, Exact]:
    """Master and momentum buffer."""
    gradient, master = scaled(segment), segment.master.double()
    gradient = -gradient if rule.maximize else gradient
    size = gradient.abs() + (rule.weight_decay * master).abs()
    gradient = gradient + rule.weight_decay * master
    buffer = gradient
    if rule.momentum:
        if rule.step > 1:
            size = size + segment.moments[0].double().abs()
            buffer = rule.momentum * segment.moments[0].double() + (1 - rule.dampening) * gradient
        gradient = gradient + rule.momentum * buffer if rule.nesterov else buffer
    master_size = torch.maximum(master.abs(), 2 * rule.lr * size)
    return Exact(master - rule.lr * gradient, master_size), Exact(buffer, size)


@pytest.mark.parametrize("simd", NATIVE)
@pytest.mark.parametrize("rule", ADAM_RULES)
def test_adam_is_within_a_few_ulps_of_exact_arithmetic(rule: AdamRule, simd: Simd) -> None:
    segment = random_segment(LENGTH, FP32)
    exact = exact_adam(segment, rule)
    update(pool(simd), [segment], rule, FACTOR)
    for got, (value, size), bound in zip((segment.master, *segment.moments), exact, BOUNDS, strict=True):
        assert ulps(got, value, size) <= bound


@pytest.mark.parametrize("simd", NATIVE)
@pytest.mark.parametrize("rule", SGD_RULES)
def test_sgd_is_within_two_ulps_of_exact_arithmetic(rule: SGDRule, simd: Simd) -> None:
    segment = random_segment(LENGTH, sgd_format(rule))
    exact = exact_sgd(segment, rule)
    update(pool(simd), [segment], rule, FACTOR)
    for got, (value, size) in zip((segment.master, *segment.moments), exact, strict=False):
        assert ulps(got, value, size) <= 2


@pytest.mark.parametrize("simd", NATIVE)
@pytest.mark.parametrize("rule", ADAM_RULES)
def test_adam_with_8_bit_moments_rounds_these_alone(rule: AdamRule, simd: Simd) -> None:
    """The master is as exact as with fp32 moments. A moment is one of the two codes beside the exact value."""
    segment = random_segment(LENGTH, replace(FP32, moments=CODES))
    numbers = tuple(decode(*pair).float() for pair in zip(segment.moments, segment.scales, strict=True))
    (value, size), *moments = exact_adam(replace(segment, moments=numbers, scales=()), rule)
    update(pool(simd), [segment], rule, FACTOR)
    assert ulps(segment.master, value, size) <= BOUNDS[0]
    for moment, codes, scales in zip(moments, segment.moments, segment.scales, strict=True):
        got, exact = decode(codes, scales).double(), moment.value
        largest = torch.nn.functional.pad(exact.abs(), (0, -LENGTH % TILE)).view(-1, TILE).amax(1)
        common = exact.abs() > 2**-14 * largest.repeat_interleave(TILE)[:LENGTH]
        assert common.float().mean() > 0.99
        unit = torch.exp2(exact[common].abs().log2().floor() - 3)
        assert ((got - exact)[common].abs() / unit).max() < 1 + 1e-4


@pytest.mark.parametrize("rule", ADAM_RULES)
def test_adam_is_within_a_few_ulps_of_torch(rule: AdamRule) -> None:
    segment = random_segment(LENGTH, FP32)
    sizes = [exact.size for exact in exact_adam(segment, rule)]
    expected = [tensor.clone() for tensor in (segment.master, *segment.moments)]
    (adamw if rule.decoupled else adam)(
        [expected[0]],
        [segment.gradient * FACTOR],
        [expected[1]],
        [expected[2]],
        [],
        [torch.tensor(rule.step - 1.0)],
        foreach=False,
        amsgrad=False,
        beta1=rule.beta1,
        beta2=rule.beta2,
        lr=rule.lr,
        weight_decay=rule.weight_decay,
        eps=rule.eps,
        maximize=rule.maximize,
    )
    update(pool(), [segment], rule, FACTOR)
    for got, theirs, size, bound in zip((segment.master, *segment.moments), expected, sizes, BOUNDS, strict=True):
        assert ulps(got, theirs.double(), size) <= bound


@pytest.mark.parametrize("rule", SGD_RULES)
def test_sgd_is_within_two_ulps_of_torch(rule: SGDRule) -> None:
    segment = random_segment(LENGTH, sgd_format(rule))
    size = exact_sgd(segment, rule)[0].size
    master = segment.master.clone()
    buffers = [segment.moments[0].clone() if rule.momentum and rule.step > 1 else None]
    sgd(
        [master],
        [segment.gradient * FACTOR],
        buffers,
        foreach=False,
        weight_decay=rule.weight_decay,
        momentum=rule.momentum,
        lr=rule.lr,
        dampening=rule.dampening,
        nesterov=rule.nesterov,
        maximize=rule.maximize,
    )
    update(pool(), [segment], rule, FACTOR)
    assert ulps(segment.master, master.double(), size) <= 2


def test_fifty_steps_follow_torch() -> None:
    """Through the public optimizer: roundings add up, and still stay small."""
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(LENGTH))
    optimizer = torch.optim.AdamW([parameter], lr=1e-2, weight_decay=0.1, foreach=False)
    master, moments = parameter.detach().clone(), (torch.zeros(LENGTH), torch.zeros(LENGTH))
    for step in range(1, 51):
        parameter.grad = torch.randn(LENGTH)
        optimizer.step()
        rule = AdamRule(1e-2, 0.9, 0.999, 1e-8, 0.1, True, False, step)
        update(pool(), [Segment(parameter.grad, master, None, moments, 0, 0)], rule, 1.0)
    assert ulps(master, parameter.detach().double(), torch.ones(LENGTH)) <= 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_16_bits_are_read_exactly(dtype: torch.dtype) -> None:
    everything = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    finite = everything[everything.isfinite()]
    narrow = Segment(finite, torch.zeros(len(finite)), None, (), 0, 0)
    for simd in NATIVE:
        update(pool(simd), [narrow], replace(SGD, momentum=0.0, lr=1.0), -1.0)
        assert torch.equal(narrow.master, finite.float())
        narrow.master.zero_()


def interesting_floats() -> Tensor:
    """All exponents and signs, with mantissas around what rounding to 16 bits decides on; infinities and NaN."""
    exponents = torch.arange(512, dtype=torch.int64)[:, None] << 23
    mantissas = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x7FFF, 0x8000, 0x8001, 0x17FFF, 0x18000])
    mantissas = torch.cat([mantissas, 0x7FFFFF - mantissas])
    return (exponents | mantissas).flatten().to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("simd", NATIVE)
def test_the_fp16_parameter_is_the_master_to_nearest_even(simd: Simd) -> None:
    master = interesting_floats()
    expected = master.half()
    still = replace(SGD, momentum=0.0, lr=0.0, weight_decay=0.0)
    segment = Segment(torch.zeros_like(master), master, torch.zeros_like(expected), (), 0, 0)
    update(pool(simd), [segment], still, 1.0)
    assert segment.parameter is not None
    number = ~expected.isnan()
    assert torch.equal(segment.parameter.view(torch.int16)[number], expected.view(torch.int16)[number])
    assert torch.equal(segment.parameter.isnan(), ~number)


@pytest.mark.parametrize("simd", NATIVE)
def test_the_bf16_parameter_is_the_master_rounded_half_away_from_zero(simd: Simd) -> None:
    master = interesting_floats()
    expected, _ = split(master)
    still = replace(SGD, momentum=0.0, lr=0.0, weight_decay=0.0)
    segment = Segment(torch.zeros_like(master), master.clone(), torch.zeros_like(expected), (), 0, 0)
    update(pool(simd), [segment], still, 1.0)
    assert segment.parameter is not None
    assert torch.equal(segment.parameter.view(torch.int16), expected.view(torch.int16))
    assert torch.equal(segment.parameter.isnan(), master.isnan())
    finite = master.abs() < torch.finfo(torch.bfloat16).max
    nearest = master[finite].bfloat16()  # to even: the same but for ties
    assert ((segment.parameter[finite].float() - nearest.float()) == 0).float().mean() > 0.8


@pytest.mark.parametrize("simd", NATIVE)
def test_denormals_are_kept_whatever_the_caller_does_with_his_own(simd: Simd) -> None:
    tiny = torch.tensor([1e-40, -2e-42, 3e-45, 5e-39]).repeat(9000)  # more than one part, so that threads do it too
    still = replace(SGD, momentum=0.0, lr=1.0, weight_decay=0.0)
    results = []
    for count in (len(tiny), 12):
        for flush in (False, True):
            torch.set_flush_denormal(flush)
            try:
                segment = Segment(tiny[:count], torch.zeros(count), None, (), 0, 0)
                update(pool(simd), [segment], still, 1.0)
            finally:
                torch.set_flush_denormal(False)
            results.append(segment.master)
            assert torch.equal(segment.master, -tiny[:count])
    assert math.isclose(results[0][0].item(), -1e-40, rel_tol=1e-4)


@pytest.mark.parametrize("simd", NATIVE)
def test_nan_and_inf_stay_where_they_are(simd: Simd) -> None:
    segment = random_segment(100, Format(torch.float32))
    segment.gradient[3] = torch.nan
    segment.gradient[5] = torch.inf
    segment.gradient[7] = 1e30  # whose square is inf: Adam takes no step from it
    before = segment.master.clone()
    update(pool(simd), [segment], ADAMW, 1.0)
    assert segment.parameter is not None
    assert segment.master.isnan().nonzero().flatten().tolist() == [3, 5]
    assert segment.parameter.isnan().nonzero().flatten().tolist() == [3, 5]
    assert segment.moments[1].isinf().nonzero().flatten().tolist() == [5, 7]
    assert segment.master[7] == before[7] * torch.tensor(1 - ADAMW.lr * ADAMW.weight_decay)


@pytest.mark.parametrize("simd", NATIVE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [0, 1, 17, 16384, 50001])
def test_gradients_accumulate_in_fp32(length: int, dtype: torch.dtype, simd: Simd) -> None:
    first, second = (torch.randn(length).to(dtype) for _ in range(2))
    total = torch.full((length,), torch.nan)
    pool(simd).accumulate(total, first, first=True)
    assert torch.equal(total, first.float())
    pool(simd).accumulate(total, second, first=False)
    assert torch.equal(total, first.float() + second.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_sum_of_squares_is_right_and_the_same_on_all_paths_and_threads(dtype: torch.dtype) -> None:
    for length in (0, 1, 15, 16384, 16385, 100003):
        values = torch.randn(length).to(dtype)
        sums = {pool(simd, threads).square_sum(values) for simd in NATIVE for threads in (1, 2, 3)}
        assert len(sums) == 1
        assert sums.pop() == pytest.approx(float(values.double().square().sum()), rel=1e-13)


def test_the_sum_of_squares_does_not_overflow_and_shows_nan() -> None:
    assert pool().square_sum(torch.tensor([3e38, 3e38])) == pytest.approx(1.8e77, rel=1e-6)
    assert math.isnan(pool().square_sum(torch.tensor([1.0, torch.nan])))
    assert pool().square_sum(torch.tensor([1.0, -torch.inf])) == math.inf
