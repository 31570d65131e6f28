"""An element's bits depend on nothing but its own values: no SIMD path, thread, slice, alignment or tail shows."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.offload.host import (
    ADAM,
    ADAMW,
    CODES,
    NATIVE,
    SGD,
    Format,
    assert_same_bits,
    clone,
    cut,
    joined,
    pool,
    random_segment,
    split,
    update,
)
from zeroshard.offload.codes import TILE
from zeroshard.offload.rules import AdamRule, SGDRule

GRADIENTS = (torch.bfloat16, torch.float16, torch.float32)
MASTERS = (
    Format(parameter=None),
    Format(parameter=torch.bfloat16),
    Format(parameter=torch.float16),
    Format(parameter=torch.bfloat16, split=True),
)
MOMENTS = (*itertools.product((torch.float32, torch.bfloat16), repeat=2), CODES)
SGD_MOMENTS = ((), (torch.float32,), (torch.bfloat16,), CODES[:1])

FORMATS = [
    *(
        (ADAMW, replace(master, gradient=gradient, moments=moments))
        for gradient, master, moments in itertools.product(GRADIENTS, MASTERS, MOMENTS)
    ),
    *(
        (SGD if moments else replace(SGD, momentum=0.0), replace(master, gradient=gradient, moments=moments))
        for gradient, master, moments in itertools.product(GRADIENTS, MASTERS, SGD_MOMENTS)
    ),
    *((ADAM, Format(dtype, dtype, over_gradient=True)) for dtype in (torch.bfloat16, torch.float16)),
]


def name(value: object) -> str | None:
    if isinstance(value, Format):
        dtypes = (value.gradient, "split" if value.split else value.parameter, *value.moments)
        return "-".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    return type(value).__name__.removesuffix("Rule") if isinstance(value, AdamRule | SGDRule) else None


@pytest.mark.parametrize(("rule", "form"), FORMATS, ids=name)
def test_every_path_gives_the_same_bits(rule: AdamRule | SGDRule, form: Format) -> None:
    for special in (True, False):
        start = random_segment(1021, form, special=special)
        if start.moments and not start.scales:
            start.moments[0].abs_()
        reference = clone(start)
        update(pool(NATIVE[-1], 1), [reference], rule, 0.37, seed=3)
        for simd in NATIVE[:-1]:
            other = clone(start)
            update(pool(simd), [other], rule, 0.37, seed=3)
            assert_same_bits(other, reference)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_slices_threads_and_alignment_do_not_show(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 300) | st.just(40_003))
    rule, form = data.draw(st.sampled_from(FORMATS))
    begin = data.draw(st.sampled_from([0, 5, 2**32 - 100, 2**40 + 1]))
    places = data.draw(st.lists(st.integers(0, length), max_size=6))
    if CODES[0] in form.moments:  # a tile has one scale, so no segment ends within a tile
        begin, places = begin // TILE * TILE, [place // TILE * TILE for place in places]
    start = replace(random_segment(length, form, special=True), start=begin)
    whole = clone(start)
    update(pool(threads=1), [whole], rule, 0.37, seed=3)
    other = clone(start, offset=data.draw(st.integers(0, 17)))
    chosen = pool(data.draw(st.sampled_from(NATIVE)), data.draw(st.integers(1, 3)))
    update(chosen, cut(other, *places), rule, 0.37, seed=3)
    assert_same_bits(other, whole)


@pytest.mark.parametrize("moments", [(torch.bfloat16, torch.bfloat16), CODES], ids=str)
def test_many_segments_of_one_call_are_those_of_many_calls(moments: tuple[torch.dtype, ...]) -> None:
    form = Format(moments=moments)
    lengths = [1, 0, 63, 64, 65, 16384, 3, 16385, 40_000, 7]
    rules = [replace(ADAMW, lr=0.1 * (index + 1), step=index + 1) for index in range(len(lengths))]
    segments = [random_segment(length, form, seed=index) for index, length in enumerate(lengths)]
    others = [clone(segment) for segment in segments]
    update(pool(), segments, rules, 0.5, seed=1)
    for segment, other, rule in zip(segments, others, rules, strict=True):
        update(pool(), [other], rule, 0.5, seed=1)
        assert_same_bits(segment, other)


def test_a_prepared_batch_is_updated_with_each_steps_rules() -> None:
    segments = [random_segment(1000, Format(), seed=seed) for seed in range(3)]
    others = [clone(segment) for segment in segments]
    batch = pool().prepare(segments)
    for step in range(1, 4):
        rules = [replace(ADAMW, lr=10.0**-step, step=step)] * 3
        pool().update([(batch, rules)], 0.5)
        update(pool(), others, rules, 0.5)
    for segment, other in zip(segments, others, strict=True):
        assert_same_bits(segment, other)


@pytest.mark.parametrize("moments", [(torch.float32,) * 2, (torch.bfloat16,) * 2, CODES], ids=str)
@pytest.mark.parametrize("rule", [ADAMW, ADAM, SGD])
def test_a_split_master_is_an_fp32_master_bit_for_bit(
    rule: AdamRule | SGDRule, moments: tuple[torch.dtype, ...]
) -> None:
    states = moments if isinstance(rule, AdamRule) else moments[:1]
    plain = random_segment(3001, Format(moments=states), special=True)
    high, low = split(plain.master)
    halves = replace(clone(plain), master=low, parameter=high)
    for step in range(1, 31):
        gradient = torch.randn(3001, generator=torch.Generator().manual_seed(step)).bfloat16()
        for segment in (plain, halves):
            segment.gradient.copy_(gradient)
            update(pool(), [segment], replace(rule, step=step), 0.5, seed=1)
    assert torch.equal(joined(high, low).view(torch.int32), plain.master.view(torch.int32))
    assert plain.parameter is not None
    assert torch.equal(high.view(torch.int16), plain.parameter.view(torch.int16))
    for one, other in zip((*plain.moments, *plain.scales), (*halves.moments, *halves.scales), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_a_parameter_in_its_gradients_memory_gets_the_same_bits_as_one_in_its_own() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        same = random_segment(5003, Format(dtype, dtype, over_gradient=True), special=True)
        apart = replace(clone(same), parameter=torch.zeros(5003, dtype=dtype))
        update(pool(), [same, apart], ADAMW, 0.5)
        assert_same_bits(same, apart)
