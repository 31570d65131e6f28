"""Predicted times: compared with measurements on an H200 (benchmarks/RESULTS.md), and what the schedule implies."""

from __future__ import annotations

from dataclasses import replace
from time import process_time
from typing import Any

import pytest
import torch

from tests.plan.gpts import gpt, step_time, work_of
from zeroshard.config.offload import Offload
from zeroshard.plan.machine.profile import Launch, Link, Machine, load
from zeroshard.plan.memory.budget import budget
from zeroshard.plan.model.model import Model
from zeroshard.plan.papers.shape import Transformer
from zeroshard.plan.setup import Setup
from zeroshard.plan.time import step_time as time
from zeroshard.plan.time.collective_time import ring
from zeroshard.plan.time.step_time import LAUNCHING, Bottleneck, StepTime, step_span
from zeroshard.plan.time.timeline import Interval, Resource, Timeline
from zeroshard.plan.time.unit_costs import LOSS_BYTES, UnitCosts

H200 = replace(load("h200"), launch=Launch())
ETHERNET = replace(H200, devices_per_node=1, between=Link(latency=50e-6 / 7, bandwidth=25e9))
"""One link of 25 GB/s, and 50 µs for a collective of eight ranks, as in benchmarks/delayed_group.py."""
GPT = Transformer(layers=48, hidden=1600, heads=25, vocabulary=50304, positions=1024)
TIED, UNTIED = (gpt(48, 1600, 25, 50304, tied=tied) for tied in (True, False))
SMALL: dict[str, Any] = {"moments": torch.bfloat16, "split_master": True}


@pytest.mark.parametrize(
    ("seconds", "model", "setup", "machine"),
    [
        (0.2613, TIED, Setup(stage=0, batch=8), H200),
        (0.2615, TIED, Setup(stage=3, batch=8, prefetch=1), H200),
        (0.8670, UNTIED, Setup(stage=0, batch=32), H200),
        (0.3590, TIED, Setup(stage=0, batch=8, world=8), ETHERNET),
        (0.3119, TIED, Setup(stage=1, batch=8, world=8), ETHERNET),
        (0.2993, TIED, Setup(stage=2, batch=8, world=8), ETHERNET),
        (0.3627, TIED, Setup(stage=3, batch=8, world=8, prefetch=1), ETHERNET),
        (0.3622, TIED, Setup(stage=3, batch=8, world=8, prefetch=2), ETHERNET),
        (0.471, UNTIED, Setup(stage=2, batch=8, offload=Offload()), H200),
        (0.415, UNTIED, Setup(stage=2, batch=8, offload=Offload(update_in_backward=True)), H200),
        (0.445, UNTIED, Setup(stage=2, batch=8, offload=Offload(delayed_update_after=0)), H200),
        (0.388, UNTIED, Setup(stage=2, batch=8, offload=Offload(**SMALL)), H200),
        (0.321, UNTIED, Setup(stage=2, batch=8, offload=Offload(**SMALL, delayed_update_after=0)), H200),
        (0.954, UNTIED, Setup(stage=2, batch=32, offload=Offload()), H200),
        (0.859, UNTIED, Setup(stage=2, batch=32, offload=Offload(delayed_update_after=0)), H200),
    ],
)
def test_measurements_on_an_h200_are_predicted_within_a_fifth(
    seconds: float, model: Model, setup: Setup, machine: Machine
) -> None:
    assert step_time(model, setup, machine).total == pytest.approx(seconds, rel=0.2)


def times(machine: Machine = ETHERNET, model: Transformer = GPT, **options: Any) -> StepTime:
    return step_time(model, Setup(**{"stage": 2, "batch": 8, "world": 8} | options), machine)


def test_the_parts_add_up() -> None:
    step = times(model_parallel=2, offload=Offload())
    parts = (
        step.compute,
        step.launching,
        step.update,
        step.exposed_node_links,
        step.exposed_network,
        step.exposed_pcie,
    )
    assert step.total == pytest.approx(sum(parts))
    assert min(parts) >= 0


def test_one_rank_communicates_nothing() -> None:
    assert times(world=1).exposed == 0


def test_the_all_reduce_of_stage_0_overlaps_only_with_backward() -> None:
    zero, one = times(stage=0), times(stage=1)
    assert zero.total > 0.22 + 0.06 + zero.update  # the link, forward and the whole update
    assert one.total < zero.total


def test_stage_3_is_bound_by_half_as_much_again_on_a_slow_link() -> None:
    slow = replace(ETHERNET, between=Link(latency=1e-6, bandwidth=1e9))
    assert times(slow, stage=3).total / times(slow, stage=2).total == pytest.approx(1.5, rel=0.06)
    assert times(slow, stage=3).bottleneck is Bottleneck.NETWORK


def test_more_prefetch_never_costs_time() -> None:
    assert times(stage=3, prefetch=2).total <= times(stage=3, prefetch=1).total * 1.001
    assert times(stage=3, prefetch=1).total < times(stage=3, prefetch=0).total


def test_a_block_that_exceeds_a_unit_is_gathered_in_parts() -> None:
    whole, parts = times(stage=3), times(stage=3, max_unit_bytes=16 << 20)
    assert parts.total == pytest.approx(whole.total, rel=0.1)
    assert parts.flops == pytest.approx(whole.flops)


def test_forward_overlaps_with_the_hosts_update_and_a_delayed_update_with_the_whole_step() -> None:
    def offloaded(**options: Any) -> float:
        return times(H200, UNTIED, world=1, batch=32, offload=Offload(**options)).total

    assert offloaded(blocking=True) > 1.1 * offloaded() > 1.1 * offloaded(delayed_update_after=0)
    there = times(H200, UNTIED, world=1, batch=32)
    assert offloaded(delayed_update_after=0) == pytest.approx(there.total - there.update, rel=0.03)


def test_few_threads_bound_the_hosts_update_by_their_arithmetic() -> None:
    def update(threads: int | None, moments: Any = "8bit") -> float:
        host = replace(load("h200").host, cores=8 * 16, update_fp32=1e-9, update_8bit=4e-9)
        setup = Setup(stage=2, world=1, batch=32, offload=Offload(moments=moments, threads=threads))
        work = work_of(UNTIED, setup)
        seconds = sum(UnitCosts(work, setup, replace(H200, host=host)).host_update)
        return seconds / sum(work.trained)

    assert update(4) == pytest.approx(2 * update(8))
    assert update(None) == update(16) == pytest.approx(4e-9 / 16, rel=0.02)
    assert update(16, torch.float32) < update(4, torch.float32), "four threads cannot use all of the memory's bandwidth"
    assert update(16, torch.float32) == update(None, torch.float32) == update(12, torch.float32), "memory is the bound"


def test_a_head_of_its_own_is_reduced_behind_backward() -> None:
    setup = Setup(stage=2, world=8, batch=8)
    large = gpt(8, 4096, 32, 128256, tied=False)
    work = work_of(large, setup)
    assert work.head == pytest.approx(0.5, abs=0.01)
    together = time.step_time(work._replace(head=0.0), setup, ETHERNET).total
    assert time.step_time(work, setup, ETHERNET).total < together
    in_backward = replace(setup, world=1, offload=Offload(update_in_backward=True))
    assert time.step_time(work, in_backward, H200) == time.step_time(work._replace(head=0.0), in_backward, H200)
    assert work_of(UNTIED, setup).head == 0, "its root is one flat"


def test_states_that_stay_on_the_device_leave_the_host_less_to_do() -> None:
    half = times(H200, UNTIED, world=1, offload=Offload(host_fraction=0.5)).total
    assert times(H200, UNTIED, world=1).total < half < times(H200, UNTIED, world=1, offload=Offload()).total


def test_parameters_on_the_host_come_up_during_forward_and_backward() -> None:
    step = times(H200, UNTIED, stage=3, world=1, batch=32, offload=Offload(parameters="cpu"))
    assert step.total < 1.1 * times(H200, UNTIED, stage=3, world=1, batch=32, offload=Offload()).total


def test_micro_batches_amortise_the_update_and_are_counted_without_laying_out_each() -> None:
    one, four, forty = (times(H200, offload=Offload(), world=1, micro_batches=count) for count in (1, 4, 40))
    assert one.tflops_per_device < four.tflops_per_device < forty.tflops_per_device
    assert forty.flops == pytest.approx(40 * one.flops)
    three, five = (times(H200, world=1, micro_batches=count).total for count in (3, 5))
    assert five - three == pytest.approx(2 * times(H200, world=1).compute, rel=0.01)


def test_larger_batches_compute_more_efficiently() -> None:
    rates = [times(H200, world=1, batch=batch).tflops_per_device for batch in (1, 2, 4, 8, 16, 32)]
    assert rates == sorted(rates)
    assert rates[-1] < H200.device.efficiency * H200.device.peak_16bit / 1e12


def test_recomputation_costs_a_third_more() -> None:
    with_it, without = (times(H200, world=1, checkpointing=flag).compute for flag in (True, False))
    assert with_it / without == pytest.approx(4 / 3, rel=0.02)


def test_tensor_parallelism_across_nodes_is_bound_by_the_network() -> None:
    v100 = load("v100")
    wide = replace(GPT, hidden=8192, heads=64)
    inside = times(v100, wide, world=1, model_parallel=16)
    across = times(v100, wide, world=1, model_parallel=32)
    assert inside.exposed_network == 0 < inside.exposed_node_links
    assert across.exposed_network > 2 * inside.exposed_node_links


def test_groups_of_one_node_share_its_network_links() -> None:
    alone, shared = ring(H200, 64, 1), ring(H200, 8, 8)
    assert alone.resource is shared.resource is Resource.NETWORK
    assert shared.bandwidth == pytest.approx(H200.between.bandwidth / 8)
    assert ring(H200, 8, 1).resource is Resource.NODE_LINKS
    assert ring(H200, 1, 8).seconds(1e9) == 0


def test_a_world_of_thousands_is_laid_out_at_once() -> None:
    large = Transformer(layers=128, hidden=25600, heads=160, vocabulary=50257, positions=1024)
    step = times(load("v100"), large, stage=3, world=1024, batch=1)
    assert step.total > 0


def test_exposed_time_is_time_in_which_no_earlier_resource_is_busy() -> None:
    timeline = Timeline()
    timeline.run(Resource.NODE_LINKS, 3.0)
    timeline.run(Resource.DEVICE, 1.0, 1.0)
    timeline.run(Resource.DEVICE, 1.0, 4.0)
    assert timeline.exposed(Interval(0.5, 5.0), Resource.DEVICE, Resource.NODE_LINKS) == {
        Resource.DEVICE: 2.0,
        Resource.NODE_LINKS: 1.5,
    }


LAUNCHED = replace(H200, launch=Launch(block=3e-3, recompute=3e-3, communicate=1e-4))


def test_a_small_model_is_as_fast_as_it_is_launched() -> None:
    tiny = Transformer(layers=24, hidden=256, heads=4, vocabulary=1000, positions=128)
    setup = Setup(stage=0, batch=1, sequence=128)
    step = step_time(tiny, setup, LAUNCHED)
    assert step.bottleneck is Bottleneck.LAUNCH
    assert step.total == pytest.approx(24 * 6e-3, rel=0.05)
    without = step_time(tiny, replace(setup, checkpointing=False), LAUNCHED)
    assert step.total - without.total == pytest.approx(24 * 3e-3, rel=0.05)
    divided = replace(LAUNCHED, inside=Link(latency=0.0, bandwidth=1e15))
    two, three = (step_time(tiny, replace(setup, stage=stage, world=8), divided).total for stage in (2, 3))
    assert three - two == pytest.approx(24e-4, rel=0.05), "a gather more in backward"


def test_the_host_takes_time_for_each_unit_however_small() -> None:
    slow = replace(H200, host=replace(H200.host, bandwidth=1e11), devices_per_node=1)
    setup = Setup(stage=0, batch=8, offload=Offload())
    counted = replace(slow, launch=replace(slow.launch, host=1e-3))
    longer = step_time(GPT, setup, counted).total - step_time(GPT, setup, slow).total
    assert longer == pytest.approx(49 * 1e-3, rel=0.05), "48 blocks and the root"


@pytest.mark.parametrize("layers", [1, 4, 24])
def test_many_micro_batches_take_as_long_as_if_all_were_laid_out(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Transformer(layers=layers, hidden=4096, heads=32, vocabulary=1000, positions=128)
    setup = Setup(stage=3, world=2, batch=1, sequence=128, offload=Offload(blocking=True), micro_batches=60)
    shortened = step_time(model, setup, LAUNCHED).total
    monkeypatch.setattr(time, "LAID_OUT_MICRO_BATCHES", 60)
    assert shortened == pytest.approx(step_time(model, setup, LAUNCHED).total, rel=0.03)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("machine", [ETHERNET, LAUNCHED])
def test_steps_that_leave_the_same_to_the_next_are_not_laid_out_again(
    stage: int, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = (
        None,
        Offload(),
        Offload(update_in_backward=True),
        Offload(delayed_update_after=0),
        Offload(host_fraction=0.5),
    )
    setups = [Setup(stage=stage, world=8, micro_batches=count, offload=way) for way in ways for count in (1, 2)]
    settled = [step_time(GPT, setup, machine).total for setup in setups]
    monkeypatch.setattr(time, "SETTLED", -1.0)  # never equal
    assert settled == pytest.approx([step_time(GPT, setup, machine).total for setup in setups], rel=1e-9)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("offload", [None, Offload(), Offload(update_in_backward=True)])
def test_very_many_layers_take_as_long_as_if_all_were_laid_out(
    stage: int, offload: Offload | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep, setup = replace(GPT, layers=300), Setup(stage=stage, world=8, batch=2, offload=offload)
    whole = step_time(deep, setup, ETHERNET)
    monkeypatch.setattr(time, "LAID_OUT_BLOCKS", 100)
    continued = step_time(deep, setup, ETHERNET)
    assert continued.total == pytest.approx(whole.total, rel=1e-6)
    assert continued.flops == pytest.approx(whole.flops)


def test_two_hundred_thousand_layers_are_planned_in_seconds() -> None:
    deep, setup = replace(GPT, layers=200_000), Setup(stage=3, world=1024, offload=Offload())
    started = process_time()
    assert step_time(deep, setup, H200).total > 0
    assert budget(gpt(2048, 1600, 25), setup).peak.total > 0
    assert process_time() - started < 20, "one or two are usual"


def test_no_block_of_a_paper_is_more_units_than_the_runtime_makes_of_it() -> None:
    setup = Setup(stage=3, world=1024)
    for hidden in (1024, 12800, 51200):
        units = len(gpt(3, hidden, hidden // 128).trace(setup).units)
        paper = Transformer(layers=3, hidden=hidden, heads=hidden // 128, vocabulary=256)
        laid_out = UnitCosts(paper.work(setup), setup, H200).count
        assert laid_out <= units
        assert hidden < 51200 or laid_out == units


def test_the_loss_takes_time_for_its_logits() -> None:
    small, large = (replace(GPT, vocabulary=size) for size in (50_000, 100_000))
    setup = Setup(stage=0, batch=8)
    traffic = 8 * 1024 * 50_000 * LOSS_BYTES / H200.device.bandwidth
    products = 6 * 8 * 1024 * 50_000 * 1600 / H200.device.rate(8 * 1024 * 1600**2, half=True)
    longer = step_time(large, setup, H200).compute - step_time(small, setup, H200).compute
    assert longer == pytest.approx(traffic + products, rel=1e-6)


def test_a_time_is_a_range_where_the_machine_was_not_measured_or_launching_bounds_it() -> None:
    tiny = Transformer(layers=24, hidden=256, heads=4, vocabulary=1000, positions=128)
    measured, guess = replace(LAUNCHED, spread=(1.0, 1.0)), replace(LAUNCHED, spread=(0.5, 2.0))
    large, small = step_time(GPT, Setup(stage=0, batch=32), LAUNCHED), step_time(tiny, Setup(stage=0), LAUNCHED)
    work, setup = work_of(GPT, Setup(stage=0, batch=32)), Setup(stage=0, batch=32)
    assert step_span(large, work, setup, measured) == (large.total, large.total)
    assert step_span(large, work, setup, guess) == (0.5 * large.total, 2 * large.total)
    work, setup = work_of(tiny, Setup(stage=0)), Setup(stage=0)
    least, most = step_span(small, work, setup, measured)
    assert LAUNCHING[0] * small.total <= least < 0.8 * small.total, "all but the update is launching"
    assert 1.6 * small.total < most <= LAUNCHING[1] * small.total
    assert step_span(small, work, setup, guess) == pytest.approx((0.5 * least, 2 * most))


def test_launching_costs_nothing_with_a_large_model() -> None:
    setup = Setup(stage=0, batch=32)
    launched, not_known = (step_time(GPT, setup, machine).total for machine in (LAUNCHED, H200))
    assert launched == pytest.approx(not_known)


def test_blocks_are_launched_while_the_device_is_still_at_the_loss() -> None:
    model = replace(GPT, layers=4, vocabulary=400_000)  # computing a block takes less time than launching it
    blocks = 4 * 6e-3
    step = step_time(model, Setup(stage=0, batch=8), LAUNCHED)
    alone = step_time(model, Setup(stage=0, batch=8), H200)
    assert alone.compute > 1.5 * blocks, "mostly the head"
    assert step.launching < 0.3 * blocks


def test_the_time_of_memory_traffic_is_added_to_that_of_products() -> None:
    setup = Setup(stage=0, batch=8)
    device = replace(H200.device, traffic=H200.device.traffic + 2.0)
    written = 8 * 1024 * 48 * 18 * 1600 * 2  # for one of four passes; recomputation is one of them
    longer = step_time(GPT, setup, replace(H200, device=device)).compute - step_time(GPT, setup, H200).compute
    assert longer == pytest.approx(4 * 2.0 * written / device.bandwidth, rel=1e-6)


def test_launching_is_slower_while_the_host_updates() -> None:
    tiny = Transformer(layers=24, hidden=256, heads=4, vocabulary=1000, positions=128)

    def longer(offload: Offload | None, **launch: float) -> float:
        setup = Setup(stage=0, batch=1, sequence=128, offload=offload)
        slower = replace(LAUNCHED, launch=replace(LAUNCHED.launch, **launch))
        return step_time(tiny, setup, slower).total - step_time(tiny, setup, LAUNCHED).total

    forward, backward = 24 * 1e-3, 24 * 5e-3
    assert longer(None, crowded=2.0) == 0
    assert longer(Offload(), crowded=2.0) == pytest.approx(forward, rel=0.05)
    early = Offload(update_in_backward=True)
    assert longer(early, crowded=2.0) == pytest.approx(3 * backward, rel=0.05), "the interpreter is shared too"


def test_parameters_of_the_host_are_fetched_even_by_a_single_rank() -> None:
    tiny = Transformer(layers=24, hidden=256, heads=4, vocabulary=1000, positions=128)
    fetched, there = (
        step_time(tiny, Setup(stage=3, batch=1, sequence=128, offload=Offload(parameters=place)), LAUNCHED).total
        for place in ("cpu", "device")
    )
    assert fetched - there == pytest.approx(2 * 24 * 1e-4, rel=0.05), "in forward and in backward"


def test_slower_precisions_come_closer_to_their_peak() -> None:
    device, work = H200.device, H200.device.half_work
    assert device.rate(work, half=True) == pytest.approx(0.5 * device.peak_16bit * device.efficiency)
    assert device.rate(work, half=False) > 0.9 * device.peak_fp32 * device.efficiency
