"""Moments in 8 bits: which numbers codes stand for, what becomes of all other numbers, and how close training stays."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.offload.host import ADAMW, CODES, NATIVE, SGD, Format, pool, random_segment, update
from zeroshard.offload import codes as coding
from zeroshard.offload.codes import TILE, CodedMoment, decode, encode
from zeroshard.offload.kernel import Segment
from zeroshard.offload.library import Simd
from zeroshard.offload.rules import AdamRule, Rule

SIGNED, POSITIVE = CODES
# SGD's first step makes the gradient the momentum. With beta2 = 0 the second moment is the square of the gradient.
TAKES_GRADIENT = replace(SGD, step=1, weight_decay=0.0, lr=0.0)
TAKES_SQUARE = replace(ADAMW, beta1=0.0, beta2=0.0, lr=0.0)


def encoded(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    codes = torch.empty(len(values), dtype=dtype)
    scales = torch.empty(-(-len(values) // TILE), dtype=torch.uint8)
    encode(values, codes, scales)
    return codes, scales


def through(values: Tensor, dtype: torch.dtype) -> Tensor:
    """What is left of values in 8 bits."""
    return decode(*encoded(values, dtype)).float()


def all_codes(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Tiles with every code below every scale. The first element of each tile has the largest code that fits it."""
    most = 0x78 if dtype is SIGNED else 0xF8
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & (0x7F if dtype is SIGNED else 0xFF)) < most].reshape(-1, 60 if dtype is SIGNED else 62)
    tiles = torch.nn.functional.pad(codes, (1, TILE - 1 - codes.shape[1]), value=most)
    scales = torch.arange(255, dtype=torch.uint8).repeat_interleave(len(tiles))
    return tiles.repeat(255, 1).flatten().view(dtype), scales


def adam_segment(gradient: Tensor) -> Segment:
    count = len(gradient)
    moments = tuple(torch.zeros(count, dtype=dtype) for dtype in CODES)
    scales = tuple(torch.zeros(-(-count // TILE), dtype=torch.uint8) for _ in CODES)
    return Segment(gradient, torch.zeros(count), None, moments, 0, 0, scales)


@pytest.mark.parametrize("dtype", CODES)
def test_every_number_that_a_code_stands_for_has_this_code_in_bf16_too(dtype: torch.dtype) -> None:
    codes, scales = all_codes(dtype)
    numbers = decode(codes, scales)
    again, new_scales = encoded(numbers.float(), dtype)
    assert torch.equal(decode(again, new_scales).view(torch.int16), numbers.view(torch.int16))
    octaves = 15 if dtype is SIGNED else 31
    plain = scales > octaves  # tiles of smaller numbers all have the same codes, whatever their scale says
    assert torch.equal(new_scales[plain], scales[plain])
    whole = plain.repeat_interleave(TILE)
    assert torch.equal(again.view(torch.uint8)[whole], codes.view(torch.uint8)[whole])


@pytest.mark.parametrize("simd", NATIVE)
def test_the_kernel_reads_and_writes_the_same_numbers(simd: Simd) -> None:
    """A step that keeps both moments as they are leaves every code: all numbers are exact, so nothing is rounded."""
    codes, scales = zip(*(all_codes(dtype) for dtype in CODES), strict=True)
    count = min(map(len, codes))
    moments = tuple(code[:count].clone() for code in codes)
    kept = tuple(scale[: count // TILE].clone() for scale in scales)
    before = [decode(*pair) for pair in zip(moments, kept, strict=True)]
    segment = Segment(torch.zeros(count), torch.zeros(count), None, moments, 0, 0, kept)
    update(pool(simd), [segment], replace(ADAMW, beta1=1 - 1e-12, beta2=1.0, lr=0.0), 1.0)
    for old, pair in zip(before, zip(segment.moments, segment.scales, strict=True), strict=True):
        assert torch.equal(decode(*pair), old)


@pytest.mark.parametrize("dtype", CODES)
def test_a_value_near_the_largest_of_its_tile_is_rounded_to_the_nearest_code(dtype: torch.dtype) -> None:
    values = torch.rand(100 * TILE) + torch.rand(100 * TILE)
    values = values if dtype is POSITIVE else values * torch.where(torch.rand(100 * TILE) < 0.5, -1, 1)
    error = (through(values, dtype) / values - 1).abs()
    assert error[values.abs() > 1e-4].max() <= 2**-4
    assert error.mean() > 2**-7, "there is something to round"


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("count", [1, 63, 64, 65, 3 * TILE + 5])
def test_zeros_are_zeros_also_after_the_kernel(dtype: torch.dtype, count: int) -> None:
    assert not through(torch.zeros(count), dtype).any()
    for simd in NATIVE:
        segment = adam_segment(torch.zeros(count))
        for step in range(1, 20):
            update(pool(simd), [segment], replace(ADAMW, step=step), 1.0)
        assert not any(decode(*pair).any() for pair in zip(segment.moments, segment.scales, strict=True))


@pytest.mark.parametrize("simd", NATIVE)
def test_a_second_moment_is_never_0_where_it_was_not(simd: Simd) -> None:
    gradient = torch.logspace(-20, 0, 1000)  # squares from 1e-40 on: many are far below the largest of their tile
    gradient = gradient[torch.randperm(1000, generator=torch.Generator().manual_seed(0))]
    segment = adam_segment(gradient)
    update(pool(simd), [segment], TAKES_SQUARE, 1.0)
    written = decode(segment.moments[1], segment.scales[1])
    assert (written > 0).all()
    assert (through(gradient.square(), POSITIVE)[gradient.square() > 0] > 0).all()
    close = written.float() / gradient.square()
    assert (close[gradient > 1e-4] - 1).abs().max() <= 2**-3
    assert (close > 0.85).all(), "one that is changed is too large, which makes the step smaller"


def test_a_first_moment_below_the_smallest_code_is_not_lost_on_average() -> None:
    tiles = 60_000
    values = torch.rand(tiles, TILE, generator=torch.Generator().manual_seed(0)) * 2.0**-15
    values[:, 1::2] *= -1
    values[:, 0] = 1.0
    gradient = values.flatten()
    momentum, scales = torch.zeros(len(gradient), dtype=SIGNED), torch.zeros(tiles, dtype=torch.uint8)
    update(
        pool(), [Segment(gradient, torch.zeros_like(gradient), None, (momentum,), 0, 0, (scales,))], TAKES_GRADIENT, 1.0
    )
    written = decode(momentum, scales).double().view(tiles, TILE)
    smallest = 1.125 * 2.0**-15
    assert set((written[:, 1:] / smallest).unique().tolist()) == {-1.0, 0.0, 1.0}
    for part in (values < 0.2 * smallest, values < smallest):
        small = part & (values > 0)
        expected = float(values[small].double().sum())
        deviation = smallest * float((values[small] / smallest * (1 - values[small] / smallest)).sum()) ** 0.5
        assert abs(float(written[small].sum()) - expected) < 5 * deviation
        assert 5 * deviation < 0.03 * expected, "the test would see a bias of half a code, which is 3% and more"


@pytest.mark.parametrize("simd", NATIVE)
def test_nan_and_inf_stay_where_they_are_and_nothing_finite_becomes_inf(simd: Simd) -> None:
    largest = torch.finfo(torch.float32).max
    values = torch.ones(5 * TILE)
    for tile, value in enumerate([torch.inf, -torch.inf, torch.nan, largest, -largest]):
        values[tile * TILE + 7] = value
    momentum, scales = torch.zeros(len(values), dtype=SIGNED), torch.zeros(5, dtype=torch.uint8)
    update(
        pool(simd), [Segment(values, torch.zeros_like(values), None, (momentum,), 0, 0, (scales,))], TAKES_GRADIENT, 1.0
    )
    for found in (decode(momentum, scales).float(), through(values, SIGNED)):
        assert found.isnan().nonzero().flatten().tolist() == [2 * TILE + 7]
        assert (found == torch.inf).nonzero().flatten().tolist() == [7]
        assert (found == -torch.inf).nonzero().flatten().tolist() == [TILE + 7]
        assert found[3 * TILE + 7] == -found[4 * TILE + 7] == 1.875 * 2.0**127
    positive = through(values.abs(), POSITIVE)
    assert positive.isnan().nonzero().flatten().tolist() == [2 * TILE + 7]
    assert positive.isinf().nonzero().flatten().tolist() == [7, TILE + 7]


@pytest.mark.parametrize("simd", NATIVE)
@pytest.mark.parametrize("rule", [ADAMW, replace(SGD, weight_decay=0.0)], ids=str)
def test_nan_in_a_master_changes_nothing_else(rule: Rule, simd: Simd) -> None:
    """A tile with NaN is computed by other code than the other tiles."""
    form = Format(parameter=torch.bfloat16, moments=CODES[: 2 if isinstance(rule, AdamRule) else 1])
    plain, spoilt = random_segment(5 * TILE + 9, form), random_segment(5 * TILE + 9, form)
    places = [0, 2 * TILE + 37, 5 * TILE + 8]
    spoilt.master[places] = torch.nan
    for segment in (plain, spoilt):
        update(pool(simd), [segment], rule, 1.0)
    for mine, other in zip((*spoilt.moments, *spoilt.scales), (*plain.moments, *plain.scales), strict=True):
        assert torch.equal(mine, other)
    assert spoilt.master.isnan().nonzero().flatten().tolist() == places
    spoilt.master[places] = plain.master[places]
    assert torch.equal(spoilt.master, plain.master)


def test_a_large_moment_is_encoded_and_decoded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(10 * TILE + 3)
    whole = [encoded(values.abs() if dtype is POSITIVE else values, dtype) for dtype in CODES]
    numbers = [decode(*pair) for pair in whole]
    monkeypatch.setattr(coding, "PART", 2 * TILE)
    for dtype, pair, number in zip(CODES, whole, numbers, strict=True):
        for mine, theirs in zip(encoded(values.abs() if dtype is POSITIVE else values, dtype), pair, strict=True):
            assert torch.equal(mine, theirs)
        assert torch.equal(decode(*pair), number)


@pytest.mark.parametrize(("rule", "bound"), [(ADAMW, 0.08), (replace(ADAMW, beta2=0.95), 0.08), (SGD, 0.03)], ids=str)
def test_training_follows_fp32_moments(rule: Rule, bound: float) -> None:
    """The way of the master in 300 steps, of elements whose gradients differ in size by four orders of magnitude."""
    count, generator = 100 * TILE + 11, torch.Generator().manual_seed(0)
    number = 2 if isinstance(rule, AdamRule) else 1
    kinds = {"fp32": (torch.float32,) * number, "bf16": (torch.bfloat16,) * number, "8bit": CODES[:number]}
    segments = {name: random_segment(count, Format(torch.float32, None, moments=kind)) for name, kind in kinds.items()}
    start = segments["fp32"].master.clone()
    for segment in segments.values():
        for state in (*segment.moments, *segment.scales):
            state.zero_()
    sizes, drift = 10 ** -(4 * torch.rand(count, generator=generator)), torch.randn(count, generator=generator)
    for step in range(1, 301):
        gradient = sizes * (torch.randn(count, generator=generator) + 0.5 * drift)
        for segment in segments.values():
            segment.gradient.copy_(gradient)
            update(pool(), [segment], replace(rule, step=step), 1.0)
    way = segments["fp32"].master - start
    error = {name: float((segment.master - start - way).norm() / way.norm()) for name, segment in segments.items()}
    assert error["bf16"] < error["8bit"] < bound, error


MOMENT: dict[str, Callable[[Any], Any]] = {
    "in place": lambda moment: moment.mul_(2),
    "as an output": lambda moment: torch.add(torch.ones(70), 1, out=moment),
    "in a list": lambda moment: torch._foreach_mul_([moment], 2.0),
    "an element": lambda moment: moment.__setitem__(0, 1.0),
}


@pytest.mark.parametrize("name", MOMENT)
def test_a_moment_in_8_bits_cannot_be_changed_in_place(name: str) -> None:
    moment = CodedMoment(*encoded(torch.randn(70), SIGNED))
    with pytest.raises(RuntimeError, match=r"moment in 8 bits cannot be changed in place; change .*state_dict\(\)"):
        MOMENT[name](moment)


def test_a_moment_in_8_bits_is_read_like_any_tensor() -> None:
    pair = encoded(torch.randn(70), SIGNED)
    moment, numbers = CodedMoment(*pair), decode(*pair)
    assert moment.dtype is torch.bfloat16
    assert moment.shape == (70,)
    assert torch.equal(moment, numbers)
    assert torch.equal(moment[3:9] * 2, numbers[3:9] * 2)
    assert torch.equal(torch.zeros(70).copy_(moment), numbers.float())
    assert float(moment.float().norm()) == float(numbers.float().norm())
    file = io.BytesIO()
    torch.save(moment, file)
    file.seek(0)
    for copied in (copy.deepcopy(moment), torch.load(file, weights_only=True)):
        assert type(copied) is Tensor
        assert torch.equal(copied, numbers)
