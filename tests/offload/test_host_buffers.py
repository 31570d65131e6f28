"""DESIGN, "Offload": host bytes a parameter, pinned and pageable, counted exactly; and the halves of a split master."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zeroshard
from tests.models import net
from tests.offload.scenarios import adamw, micro_batches, momentum, plain, sgd
from zeroshard import Offload
from zeroshard.offload.host_buffers import SCALES, HostBuffers, HostBytes, bytes_of, join, remainder, round_to, wanted
from zeroshard.offload.pinned import ALIGNMENT, HostBlock
from zeroshard.offload.pipeline import HIGH_HALVES, RING

pytestmark = pytest.mark.usefixtures("one_thread")


ADAM = ("exp_avg", "exp_avg_sq")
SLIM: dict[str, Any] = {"moments": torch.bfloat16, "split_master": True}
SMALL: dict[str, Any] = {"moments": "8bit", "split_master": True}
N = 64 * ALIGNMENT
MOMENTS = 2 + 2 / 64  # codes and scales
BYTES: dict[str, tuple[dict[str, Any], int, float]] = {
    "fp32 states": ({}, 2, 12),
    "16-bit moments": ({"moments": torch.bfloat16}, 2, 8),
    "split master": ({"split_master": True}, 4, 10),
    "16-bit moments and split master": (SLIM, 4, 6),
    "8-bit moments": ({"moments": "8bit"}, 2, 4 + MOMENTS),
    "8-bit moments and split master": (SMALL, 4, 2 + MOMENTS),
    "8-bit moments, in backward and read back": (
        SMALL | {"read_back": True, "update_in_backward": True},
        0,
        2 + MOMENTS,
    ),
    "in backward": ({"update_in_backward": True}, 0, 12),
    "in backward, 16-bit moments and split master": (SLIM | {"update_in_backward": True}, 2, 6),
    "read back": (SLIM | {"read_back": True}, 2, 6),
    "in backward and read back": (SLIM | {"read_back": True, "update_in_backward": True}, 0, 6),
    "delayed": ({"delayed_update_after": 0}, 4, 12),
    "delayed with split master": (SLIM | {"delayed_update_after": 0}, 4, 6),
    "parameters on the host": ({"parameters": "cpu"}, 4, 12),
    "parameters on the host with split master": (SLIM | {"parameters": "cpu"}, 4, 6),
    "parameters on the host, in backward": (SLIM | {"parameters": "cpu", "update_in_backward": True}, 2, 6),
}
"""Options, pinned and pageable bytes a parameter in bf16. Their sums are DESIGN's 14, 10, 12, 8 and 6."""


@pytest.mark.parametrize("name", BYTES)
def test_a_16_bit_parameter_takes_designs_bytes_on_the_host(name: str) -> None:
    options, pinned, pageable = BYTES[name]
    buffers = wanted(Offload(**options), torch.bfloat16, ADAM)
    assert bytes_of(buffers, N) == HostBytes(pinned * N, pageable * N)


@pytest.mark.parametrize("name", BYTES)
def test_the_ledger_finds_the_same_bytes_in_a_trained_model(name: str) -> None:
    options, pinned, pageable = BYTES[name]
    model = net(width=32, depth=3)
    stage = 3 if "parameters" in options else 2
    model, optimizer = zeroshard.shard(model, adamw(model), stage=stage, precision="bf16", offload=Offload(**options))
    plain(model, optimizer)
    zeroshard.synchronize(model)
    stats = zeroshard.stats(model)
    assert stats.host_memory is not None
    turns = RING * options.get("update_in_backward", False) + HIGH_HALVES * options.get("read_back", False)
    block = 2 * -(-sum(-(-p.numel() // 64) * 64 for p in net(width=32).blocks[0].parameters()) // 128) * 128
    expected = (pinned + pageable) * stats.padded_parameters
    assert expected <= stats.host_memory.total <= expected + turns * (block + ALIGNMENT)
    assert turns or stats.host_memory.total == expected
    assert stats.memory.optimizer_states == 0, "nothing of it is on the device"
    assert stats.memory.gradients == 0
    assert stats.memory.parameters == (0 if "parameters" in options else 2 * stats.padded_parameters)


def test_in_fp32_the_master_is_what_is_sent_so_it_is_pinned() -> None:
    assert bytes_of(wanted(Offload(), torch.float32, ADAM), N) == HostBytes(8 * N, 8 * N)
    assert bytes_of(wanted(Offload(update_in_backward=True), torch.float32, ADAM), N) == HostBytes(4 * N, 8 * N)
    assert bytes_of(wanted(Offload(delayed_update_after=3), torch.float32, ADAM), N) == HostBytes(8 * N, 8 * N)
    assert bytes_of(wanted(Offload(parameters="cpu"), torch.float32, ADAM), N) == HostBytes(8 * N, 8 * N)


def test_sgd_has_one_moment_or_none() -> None:
    for make, total in ((momentum, 10), (sgd, 6)):
        model = net(depth=2)
        model, _ = zeroshard.shard(model, make(model), stage=2, precision="bf16", offload="cpu")
        stats = zeroshard.stats(model)
        assert stats.host_memory is not None
        assert stats.host_memory.total == total * stats.padded_parameters


def test_frozen_parameters_take_host_memory_only_where_they_rest_there() -> None:
    assert wanted(Offload(), torch.bfloat16, None) == []
    assert bytes_of(wanted(Offload(parameters="cpu"), torch.bfloat16, None), N) == HostBytes(2 * N, 0)
    assert bytes_of(wanted(Offload(parameters="cpu", split_master=True), torch.bfloat16, None), N).total == 2 * N


def test_several_micro_batches_add_four_bytes_once() -> None:
    model = net(depth=2)
    model, optimizer = zeroshard.shard(model, adamw(model), stage=2, precision="bf16", offload="cpu")
    for _ in range(2):
        micro_batches(model, optimizer)
        zeroshard.synchronize(model)
        stats = zeroshard.stats(model)
        assert stats.host_memory is not None
        assert stats.host_memory.accumulators == 4 * stats.padded_parameters
        assert stats.host_memory.total == 18 * stats.padded_parameters


def test_buffers_fill_their_blocks_to_the_last_byte() -> None:
    for options, _, _ in BYTES.values():
        for numel in (1, 63, 64, 1000):
            states = HostBuffers(Offload(**options), torch.bfloat16, numel, moments=ADAM)
            blocks = [HostBlock(size, pinned=False) for size in (states.bytes.pinned, states.bytes.pageable)]
            states.bind(*blocks)
            tiles = -(-numel // 64)
            for name, tensor in states.tensors.items():
                assert tensor.numel() == (tiles if name.endswith(SCALES) else numel)
            for block in blocks:
                with pytest.raises(AssertionError, match="more was taken"):
                    block.take(1, torch.uint8)


# -- split masters -------------------------------------------------------------------------------------------------


def every_kind_of_number() -> torch.Tensor:
    """Random bits, every exponent with every tie and its neighbours, denormals, infinities and the largest numbers."""
    generator = torch.Generator().manual_seed(0)
    bits = [torch.randint(-(2**31), 2**31, (100_000,), generator=generator, dtype=torch.int64)]
    highs = torch.arange(2**16, dtype=torch.int64) << 16
    bits += [highs + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    values = torch.cat(bits).to(torch.int32).view(torch.float32)
    return values[~values.isnan()]


def test_halves_of_a_master_are_its_bits_again_ties_included() -> None:
    values = every_kind_of_number()
    high, low = round_to(values, torch.bfloat16), remainder(values)
    assert low.dtype is torch.int16
    assert torch.equal(join(high, low).view(torch.int32), values.view(torch.int32))


def test_the_high_half_is_the_nearest_16_bit_number_halves_away_from_zero() -> None:
    values = every_kind_of_number()
    values = values[values.abs() < 3e38]
    high = round_to(values, torch.bfloat16)
    nearest = values.to(torch.bfloat16)
    other = high != nearest
    tie = (values.view(torch.int32) & 0xFFFF) == 0x8000
    assert bool(tie[other].all()), "only ties differ from rounding to even"
    assert bool((high[other].abs() > nearest[other].abs()).all())


def test_a_nan_stays_one() -> None:
    bits = torch.tensor([0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0x7FFF8000, -1, -0x00400000], dtype=torch.int32)
    values = bits.view(torch.float32)
    assert bool(values.isnan().all())
    assert bool(round_to(values, torch.bfloat16).isnan().all())


def test_other_dtypes_are_rounded_as_torch_rounds() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(round_to(values, torch.float16), values.half())
    assert torch.equal(round_to(values, torch.float32), values)
