"""``Activations(recompute="auto")``: as few blocks are recomputed as the device has room for."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard
from tests.matrix import Stages, in_stages, slow
from tests.ranks import on_ranks
from tests.recompute.test_activations import Net, assert_same_bits, mesh_of, trained
from tests.training import adamw
from zeroshard import Activations
from zeroshard.config.bounds import FRAGMENTS
from zeroshard.config.options import Config
from zeroshard.plan.advice import Variant
from zeroshard.plan.dryrun import _LiveStorages
from zeroshard.plan.foresee import Foresight
from zeroshard.plan.room import Room
from zeroshard.recompute.choice import Choice
from zeroshard.runtime import runtime_of
from zeroshard.system import device, machine
from zeroshard.system.sizes import size_text

AUTO = Activations(recompute="auto")
DEPTH, ROWS = 6, 50
BASE = 1_000_000
"""The peak of the device below, while every block is recomputed."""


@contextmanager
def room(*free: int) -> Iterator[None]:
    """A device on which so many bytes stay free at the peak. With several sizes: on each rank its own."""
    mine = free[dist.get_rank() % len(free)]
    there = int((BASE + mine) / (1 - FRAGMENTS)) + 1
    originals = device.used_memory, device.available_memory, device.peak_memory
    device.used_memory = lambda _: 0
    device.available_memory = lambda *_: there
    device.peak_memory = lambda _: BASE
    try:
        yield
    finally:
        device.used_memory, device.available_memory, device.peak_memory = originals


def built(**options: Any) -> tuple[Net, zeroshard.ShardedOptimizer]:
    torch.manual_seed(1)
    model = Net(depth=DEPTH)
    return zeroshard.shard(model, adamw(model.parameters()), **{"stage": 2, "activations": AUTO, **options})


def step(model: nn.Module, optimizer: Any, rows: int = ROWS, micro_batches: int = 1) -> int:
    """One step. Returns how often blocks ran again in backward."""
    with runs(model) as ran:
        for _ in range(micro_batches):
            model(torch.ones(rows, 7)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return len(ran) - micro_batches * DEPTH


@contextmanager
def runs(model: Any) -> Iterator[list[int]]:
    """Collects the numbers of the blocks whose forward runs."""
    ran: list[int] = []
    hooks = [
        block.up.register_forward_pre_hook(lambda *_, number=number: ran.append(number))
        for number, block in enumerate(model.blocks)
    ]
    try:
        yield ran
    finally:
        for hook in hooks:
            hook.remove()


def bytes_of_a_block(rows: int = ROWS) -> int:
    """What autograd keeps of a block, by the storages that are alive after a forward."""
    kept = []
    for share in (0.5, 1):
        model, _ = built(activations=Activations(recompute=share))
        with _LiveStorages() as live:
            output = model(torch.ones(rows, 7))
            kept.append(live.now())
            del output
    return (kept[0] - kept[1]) // (DEPTH // 2)


@on_ranks(1)
def test_as_many_blocks_keep_their_activations_as_there_is_room_for() -> None:
    block = bytes_of_a_block()
    assert block > ROWS * 2 * 10 * 4, "the inner activations alone are as large"
    for free, expected in ((0, 6), (block, 6), (2 * block, 5), (4 * block + block // 2, 3), (7 * block, 0)):
        with room(free):  # one block more than is kept must fit
            model, optimizer = built()
            assert [step(model, optimizer) for _ in range(5)] == [6, 6, expected, expected, expected], free / block
            assert zeroshard.stats(model).recomputed_blocks == expected


@on_ranks(1)
def test_bytes_are_those_that_autograd_keeps() -> None:
    model, optimizer = built()
    sizes: list[int] = []
    settle = Choice.settle

    def watched(self: Choice, agreed: int) -> str | None:
        if agreed >= 0:
            sizes.append(self._largest)
        return settle(self, agreed)

    Choice.settle = watched  # type: ignore[method-assign]
    try:
        with room(0):
            for _ in range(2):
                step(model, optimizer)
    finally:
        Choice.settle = settle  # type: ignore[method-assign]
    assert sizes == [bytes_of_a_block()]


@on_ranks(2)
def test_ranks_with_different_room_take_one_decision_which_is_told_once() -> None:
    block = bytes_of_a_block()
    with room(8 * block, 3 * block), redirect_stdout(StringIO()) as told:
        model, optimizer = built()
        assert [step(model, optimizer) for _ in range(4)] == [6, 6, 4, 4]
    reason = zeroshard.stats(model).recompute_reason
    if dist.get_rank():
        assert not told.getvalue()
        taken, free = size_text(2 * block), size_text(3 * block)
        assert reason == f"recomputes 4 of 6 blocks: the others' activations take {taken} of the {free} free"
    else:
        assert reason == "recomputes 4 of 6 blocks: another rank has no room for less"
        assert told.getvalue() == f"zeroshard: {reason}\n"


@pytest.mark.parametrize("stage", [slow(0), 1, slow(2), 3])
@on_ranks(2)
def test_auto_changes_no_bit(stage: int) -> None:
    """Whatever it chooses, with larger inputs on one rank between."""
    block = bytes_of_a_block(6)

    def run(**options: Any) -> tuple[list[float], dict[str, Tensor]]:
        torch.manual_seed(1)
        model = Net(depth=DEPTH)
        model, optimizer = zeroshard.shard(model, adamw(model.parameters()), stage=stage, **options)
        losses = []
        for number in range(7):
            rows = 9 if (number, dist.get_rank()) == (4, 1) else 6
            torch.manual_seed(number)
            loss = model(torch.randn(rows, 7)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, zeroshard.full_state_dict(model)

    for offload in (None, "cpu"):
        plain = run(offload=offload)
        for free, away in ((0, False), (5 * block, False), (9 * block, True)):
            options = Activations(recompute="auto", offload=away)
            with room(free):
                assert_same_bits(run(offload=offload, activations=options), plain, (offload, free, away))


@in_stages
@on_ranks(2)
def test_larger_inputs_are_recomputed_by_their_rank_and_lead_to_a_new_decision(stages: Stages) -> None:
    """A rank that recomputes more than the others makes the same collectives, also in stage 3."""
    block = bytes_of_a_block()
    for stage in stages:
        with room(5 * block):
            model, optimizer = built(stage=stage)
            assert [step(model, optimizer) for _ in range(3)] == [6, 6, 2]
            assert step(model, optimizer, rows=ROWS // 2) == 2, "smaller inputs need no measuring"
            ours = ROWS * 2 if dist.get_rank() else ROWS
            assert step(model, optimizer, rows=ours) == (6 if dist.get_rank() else 2)
            expected = 5  # of twice the size only one fits, and another must
            assert zeroshard.stats(model).recomputed_blocks == expected
            assert step(model, optimizer, rows=ours) == expected
            assert step(model, optimizer, rows=3 * ROWS) == 6
            assert step(model, optimizer, rows=3 * ROWS) == zeroshard.stats(model).recomputed_blocks == 6


@on_ranks(2)
def test_gradients_that_add_up_are_measured_before_they_are_counted_on() -> None:
    block = bytes_of_a_block()
    with room(5 * block):
        model, optimizer = built()
        assert [step(model, optimizer) for _ in range(3)] == [6, 6, 2]
        assert step(model, optimizer, micro_batches=3) == 2 + 6 + 6
        assert step(model, optimizer, micro_batches=3) == 3 * 2
        model, optimizer = built()
        assert [step(model, optimizer, micro_batches=2) for _ in range(4)] == [12, 12, 4, 4]
        with runs(model) as ran:
            with zeroshard.no_sync(model):
                model(torch.ones(ROWS, 7)).sum().backward()
            model(torch.ones(ROWS, 7)).sum().backward()
        assert len(ran) == 2 * (DEPTH + 2)


@on_ranks(2)
def test_several_forwards_before_one_backward_need_room_for_all() -> None:
    block = bytes_of_a_block()

    def two(model: nn.Module, optimizer: Any) -> int:
        with runs(model) as ran:
            (model(torch.ones(ROWS, 7)) + model(torch.ones(ROWS, 7))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return len(ran) - 2 * DEPTH

    with room(5 * block):
        model, optimizer = built()
        assert [step(model, optimizer) for _ in range(3)] == [6, 6, 2]
        assert two(model, optimizer) == 2 + 6, "the second forward was not foreseen"
        model, optimizer = built()
        assert [two(model, optimizer) for _ in range(3)] == [12, 12, 8], "two blocks of each fit, and one more must"


@on_ranks(1)
def test_evaluation_and_forwards_without_a_backward_change_nothing() -> None:
    block = bytes_of_a_block()
    with room(5 * block):
        model, optimizer = built()
        for _ in range(3):
            model.eval()
            with torch.no_grad():
                model(torch.ones(9 * ROWS, 7))
            model.train()
            step(model, optimizer)
        assert zeroshard.stats(model).recomputed_blocks == 2
        alive = [model(torch.ones(ROWS, 7)) for _ in range(3)]  # of a validation that forgot no_grad()
        with runs(model) as ran:
            alive[0].sum().backward()
        assert len(ran) == 2, "the first was foreseen"
        with runs(model) as ran:
            alive[2].sum().backward()
        assert len(ran) == DEPTH, "the others were not, and hold no more than their inputs"


@on_ranks(1)
def test_a_block_that_is_called_by_itself_is_recomputed() -> None:
    with room(10**9):
        model, optimizer = built()
        for _ in range(3):
            step(model, optimizer)
        assert zeroshard.stats(model).recomputed_blocks == 0
        with runs(model) as ran:
            x = torch.ones(ROWS, 10, requires_grad=True) * 2
            model.blocks[0](x).sum().backward()
        assert ran == [0, 0]


@on_ranks(1)
def test_a_run_that_goes_on_measures_its_own_second_step() -> None:
    with room(10**9), TemporaryDirectory() as folder:
        model, optimizer = built()
        step(model, optimizer)
        zeroshard.save(folder, model, optimizer)
        model, optimizer = built()
        zeroshard.load(folder, model, optimizer)
        assert [step(model, optimizer) for _ in range(3)] == [6, 6, 0]


@on_ranks(1)
def test_where_everything_fits_a_step_makes_the_calls_of_torch_that_it_makes_without_the_option() -> None:
    found = []
    for options in (None, AUTO, Activations()):
        with room(10**9):
            model, optimizer = built(activations=options)
            for _ in range(3):
                step(model, optimizer)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
                model(torch.ones(ROWS, 7)).sum().backward()
        found.append(sum(event.count for event in profiler.key_averages()))
    assert found[0] == found[1] < found[2]


@on_ranks(2)
def test_what_auto_cannot_decide_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"larger than max_unit_bytes makes other collectives.*raise max_unit_bytes"):
        built(stage=3, max_unit_bytes=700)
    built(stage=2, max_unit_bytes=700)

    class Constant(Net):
        def forward(self, rows: int) -> Tensor:  # type: ignore[override]
            return super().forward(torch.ones(rows, 7))

    model = Constant()
    model, _ = zeroshard.shard(model, adamw(model.parameters()), stage=2, activations=AUTO)
    with pytest.raises(ValueError, match=r"is given none; give a share or names of blocks"):
        model(3)
    one = nn.Linear(7, 3)
    with pytest.raises(ValueError, match=r"has only the root unit; name its blocks with units="):
        zeroshard.shard(one, adamw(one.parameters()), activations=AUTO, example=torch.ones(ROWS, 7))


@on_ranks(1)
def test_the_example_is_not_kept() -> None:
    example = torch.ones(ROWS, 7)
    kept = weakref.ref(example)
    model, _ = built(example=example)
    del example
    gc.collect()
    assert zeroshard.stats(model).recompute_reason is not None, "the plan has decided"
    assert kept() is None


@on_ranks(1)
def test_on_a_cpu_the_process_memory_is_measured() -> None:
    model, optimizer = built()
    steps = [step(model, optimizer) for _ in range(3)]
    assert steps[:2] == [6, 6]
    assert steps[2] == zeroshard.stats(model).recomputed_blocks == 0, "a few kilobytes fit"
    assert device.used_memory(torch.device("cpu")) <= device.peak_memory(torch.device("cpu"))


# -- decided by the plan ----------------------------------------------------------------------------------------------


@contextmanager
def host_of(size: int) -> Iterator[None]:
    """A machine whose memory is so large, for each rank of it."""
    original = machine.usable_memory
    machine.usable_memory = lambda: size * dist.get_world_size()
    try:
        yield
    finally:
        machine.usable_memory = original


def planned_peak(share: float, stage: int) -> int:
    torch.manual_seed(1)
    model = Net(depth=DEPTH)
    options = Activations(recompute=share) if share else None
    config = Config(stage=stage, activations=options, example=torch.ones(ROWS, 7))
    found = Foresight(model, adamw(model.parameters()), config, 2, Room(10**9, 10**9, 2, on_cpu=True))
    return found.row(stage, Variant("none", None)).budget.peak.total


@in_stages
@on_ranks(2)
def test_with_an_example_the_plan_decides_before_the_first_step(stages: Stages) -> None:
    for stage in stages:
        example = torch.ones(ROWS, 7)
        peaks = {first: planned_peak(Activations.share(first, DEPTH), stage) for first in range(DEPTH + 1)}
        assert len(set(peaks.values())) > 3
        for expected in (0, 2, 5):
            size = peaks[expected] + (peaks[0] - peaks[DEPTH]) // DEPTH + 1
            with host_of(size), redirect_stdout(StringIO()) as told:
                model, optimizer = built(stage=stage, example=example)
                spare = (peaks[0] - peaks[DEPTH]) / DEPTH  # one block more must fit
                least = min(first for first, peak in peaks.items() if peak + spare <= size or first == DEPTH)
                assert zeroshard.stats(model).recomputed_blocks == least
            with room(0):
                assert step(model, optimizer) == least
                assert step(model, optimizer, rows=2 * ROWS) == 6, "more than the example"
            reason = zeroshard.stats(model).recompute_reason
            assert reason is not None
            assert f"recomputes {least} of 6 blocks: " in told.getvalue() or dist.get_rank()


@on_ranks(2)
def test_stage_and_recomputation_are_chosen_together() -> None:
    room_there = planned_peak(0.5, 3)
    with host_of(room_there), redirect_stdout(StringIO()) as told:
        model, optimizer = built(stage="auto", example=torch.ones(ROWS, 7))
    seen = zeroshard.stats(model)
    assert planned_peak(Activations.share(seen.recomputed_blocks, DEPTH), seen.stage) <= room_there
    assert step(model, optimizer) == seen.recomputed_blocks
    assert dist.get_rank() or "chosen" in told.getvalue()


@on_ranks(1)
def test_an_example_that_cannot_be_traced_leaves_the_decision_to_the_second_step() -> None:
    class Valued(Net):
        def forward(self, x: Tensor) -> Tensor:
            assert x.sum().item() > 0
            return super().forward(x)

    with room(10**9):
        model = Valued(depth=DEPTH)
        model, optimizer = zeroshard.shard(
            model, adamw(model.parameters()), stage=2, activations=AUTO, example=torch.ones(ROWS, 7, device="meta")
        )
        assert [step(model, optimizer) for _ in range(3)] == [6, 6, 0]


# -- beside other features --------------------------------------------------------------------------------------------


@pytest.mark.slow
@on_ranks(1)
def test_compiled_blocks_are_measured_too() -> None:
    torch.compiler.reset()
    with room(10**9):
        torch.manual_seed(1)
        model: Any = Net(depth=DEPTH)
        for number in range(DEPTH):
            model.blocks[number] = torch.compile(model.blocks[number], backend="aot_eager")
        model, optimizer = zeroshard.shard(model, adamw(model.parameters()), stage=2, activations=AUTO)
        kept = []
        for _ in range(3):
            model(torch.ones(ROWS, 7)).sum().backward()
            kept.append(runtime_of(model).checkpoints.choice._largest)
            optimizer.step()
            optimizer.zero_grad()
    assert kept[0] == kept[2] == 0, "neither the first step is measured, nor steps after the decision"
    assert kept[1] > ROWS * 2 * 10 * 4
    assert zeroshard.stats(model).recomputed_blocks == 0


@pytest.mark.slow
@on_ranks(4)
def test_tensor_parallel_ranks_choose_together() -> None:
    mesh = mesh_of(2, 2)
    plain = trained(mesh, stage=2)
    for free in (0, 1 << 30):
        with room(free, 1 << 30):  # the ranks of a group have different room
            for partition in (False, True):
                options = Activations(recompute="auto", partition=partition)
                ours = trained(mesh, stage=2, activations=options)
                assert_same_bits(ours, plain, (free, partition))
                assert zeroshard.stats(ours[2]).recomputed_blocks == (0 if free else 3)


@on_ranks(1)
def test_a_cap_of_the_process_counts() -> None:
    """On a GPU; here its functions are stood in for."""
    numbers = {"mem_get_info": (60, 100), "memory_allocated": 20, "memory_reserved": 30}
    originals = {name: getattr(torch.cuda, name) for name in (*numbers, "get_per_process_memory_fraction")}
    for cap, sharing, expected in ((1.0, 1, 70), (1.0, 2, 40), (0.5, 1, 30), (0.1, 1, 0)):
        for name, value in (numbers | {"get_per_process_memory_fraction": cap}).items():
            setattr(torch.cuda, name, lambda _, value=value: value)
        try:
            assert device.available_memory(torch.device("cuda"), sharing) == expected
        finally:
            for name, original in originals.items():
                setattr(torch.cuda, name, original)


@on_ranks(1)
def test_where_states_fill_the_device_the_plan_leaves_the_decision_to_the_second_step() -> None:
    example = torch.ones(ROWS, 7)
    for fraction, decided in (("auto", False), (1.0, True)):
        offload = zeroshard.Offload(host_fraction=fraction)
        config = Config(stage=2, activations=AUTO, offload=offload, example=example, precision="fp32")
        model = Net(depth=DEPTH)
        advice = Foresight(model, adamw(model.parameters()), config, 1, Room(10**9, 10**9)).advise()
        assert (advice.decision is not None) == decided


@pytest.mark.parametrize("rows", [slow(4), slow(60), 400], ids=lambda rows: f"{rows} rows")
@in_stages
@on_ranks(2)
def test_the_peak_that_is_foreseen_is_the_peak_that_comes(stages: Stages, rows: int) -> None:
    """By the storages that are alive at every operation, where gradients weigh more, and where activations do."""
    foreseen: dict[int, list[int]] = {}
    settle, originals = Choice.settle, (device.peak_memory, device.begin_peak)

    def watched(self: Choice, agreed: int) -> str | None:
        if self._measured:
            foreseen[stage] = list(self._peaks)
        return settle(self, agreed)

    def peak(stage: int, options: Activations | None) -> int:
        torch.manual_seed(1)
        with _LiveStorages() as live:
            model = Net(width=48, depth=DEPTH)
            model, optimizer = zeroshard.shard(model, adamw(model.parameters()), stage=stage, activations=options)
            flats = [flat for unit in runtime_of(model).units for flat in unit.flats if flat.sharded]
            live.watch(flats, lambda: runtime_of(model).fabric.gathers.hash)
            device.peak_memory, device.begin_peak = lambda _: live.peak, lambda _: setattr(live, "peak", live.now())
            for _ in range(3):
                live.peak = live.now()
                step(model, optimizer, rows=rows)
            return live.peak

    Choice.settle = watched  # type: ignore[method-assign]
    try:
        for stage in stages:
            peak(stage, AUTO)
            for first in range(DEPTH + 1):
                real = peak(stage, Activations(recompute=Activations.share(first, DEPTH)) if first else None)
                assert real <= 1.001 * foreseen[stage][first], (stage, first, "would not fit")
                assert real >= 0.92 * foreseen[stage][first], (stage, first, "is far from what was foreseen")
    finally:
        Choice.settle = settle  # type: ignore[method-assign]
        device.peak_memory, device.begin_peak = originals
