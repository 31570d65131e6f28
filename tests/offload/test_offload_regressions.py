"""Faults that a review of the offload found, each as a test."""

from __future__ import annotations

import os
from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard
from tests.models import Net, batch, loss_of, net
from tests.offload.scenarios import adamw, momentum
from tests.ranks import on_ranks
from zeroshard import Offload, OffloadError
from zeroshard.config.table import Place
from zeroshard.runtime import runtime_of

BF16 = torch.bfloat16


def shard(model: nn.Module | None = None, **options: Any) -> tuple[Any, Any]:
    model = net() if model is None else model
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    return zeroshard.shard(model, optimizer, **{"stage": 2, "precision": "bf16", "offload": "cpu", **options})


def step(model: nn.Module, optimizer: Any, number: int) -> None:
    loss_of(model, number).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_write_to_frozen_parameters_that_rest_on_the_host_stays() -> None:
    model = net()
    model.blocks[0].requires_grad_(False)
    model, _ = shard(model, stage=3, offload=Offload(parameters="cpu"))
    with zeroshard.gathered(model, write=True), torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7)
    assert all(bool((value == 7).all()) for value in zeroshard.full_state_dict(model).values())


class Skipping(Net):
    """Rank 1 leaves a block out."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            if number != 2 or dist.get_rank() == 0:
                x = block(x)
        return self.last(x)


@on_ranks(2)
def test_ranks_that_call_different_units_do_not_wait_for_each_other_in_a_circle() -> None:
    results = []
    for offload in (None, "cpu"):
        for stage in (1, 2):
            torch.manual_seed(1)
            model, optimizer = shard(Skipping(), stage=stage, precision="fp32", offload=offload)
            for number in range(4):
                step(model, optimizer, number)
            results.append(zeroshard.full_state_dict(model))
    for other in results[1:]:
        for name, value in results[0].items():
            torch.testing.assert_close(other[name], value)


def test_a_step_that_fails_is_heard_by_the_next_forward() -> None:
    model, optimizer = shard()
    step(model, optimizer, 0)
    loss_of(model, 1).backward()
    runtime = runtime_of(model)
    assert runtime.pipeline is not None
    broken = runtime.units[1].flats[0]
    broken.outdate = lambda publication: 1 / 0  # type: ignore[method-assign, assignment]
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert runtime.units[0].flats[0].home.place is Place.HOST
    with pytest.raises(OffloadError, match="division by zero"):
        loss_of(model, 2)


def test_a_wait_that_was_interrupted_is_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for interrupted in (False, True):
        model, optimizer = shard(stage=3, offload=Offload(parameters="cpu"))
        step(model, optimizer, 0)
        if interrupted:
            with monkeypatch.context() as patch:
                patch.setattr("zeroshard.offload.pipeline.SentParameters.wait", _interrupt)
                with pytest.raises(KeyboardInterrupt):
                    loss_of(model, 1)
        results.append(float(loss_of(model, 1).detach()))
    assert results[0] == results[1]


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_what_is_loaded_into_the_model_is_not_overwritten_by_a_delayed_update() -> None:
    model, optimizer = shard(offload=Offload(delayed_update_after=0))
    for number in range(3):
        step(model, optimizer, number)
    model.load_state_dict({name: torch.full_like(value, 0.5) for name, value in model.state_dict().items()})
    loss_of(model, 3).backward()
    zeroshard.synchronize(model)
    assert all(bool((value == 0.5).all()) for value in zeroshard.full_state_dict(model).values())


def test_the_norm_counts_micro_batches_that_were_added_up_before() -> None:
    norms = []
    for offload in (None, "cpu"):
        model, optimizer = shard(precision="fp32" if offload is None else "bf16", offload=offload, clip_grad_norm=1.0)
        for number in range(2):
            loss_of(model, number).backward()
        with zeroshard.no_sync(model):
            (30 * loss_of(model, 2)).backward()
        (30 * loss_of(model, 3)).backward()
        optimizer.step()
        norms.append(zeroshard.stats(model).grad_norm)
    assert norms[1] == pytest.approx(norms[0], rel=0.02)


@pytest.mark.parametrize("stage", [0, 2])
def test_a_part_of_the_root_can_be_called_alone_after_a_step(stage: int) -> None:
    model, optimizer = shard(stage=stage)
    step(model, optimizer, 0)
    assert not model.first(batch(1).to(BF16)).isnan().any()


def test_the_budget_holds_for_sums_too() -> None:
    model, _ = shard()
    needed = runtime_of(model).pipeline.bytes.total  # type: ignore[union-attr]
    model, _ = shard(offload=Offload(host_memory=needed + 100))
    loss_of(model, 0).backward()
    with pytest.raises(ValueError, match="adding up micro-batches"):
        loss_of(model, 1).backward()


@on_ranks(2)
def test_host_memory_is_divided_among_the_ranks_of_a_host() -> None:
    model, _ = shard()
    assert runtime_of(model).pipeline.local_ranks == int(os.environ.get("LOCAL_WORLD_SIZE", 2))  # type: ignore[union-attr]


def test_reading_gathered_parameters_keeps_no_copy_of_the_masters() -> None:
    model, _ = shard(offload=Offload(split_master=True, read_back=True))
    with zeroshard.gathered(model):
        pass
    assert all(flat.home._before_write is None for unit in runtime_of(model).units for flat in unit.flats)


def test_state_cannot_be_assigned() -> None:
    _, optimizer = shard()
    with pytest.raises(RuntimeError, match="load_state_dict"):
        optimizer.state = defaultdict(dict)


def test_a_forked_process_is_told_that_the_threads_stayed_behind() -> None:
    model, optimizer = shard()
    step(model, optimizer, 0)
    zeroshard.synchronize(model)
    pipeline = runtime_of(model).pipeline
    assert pipeline is not None
    child = os.fork()
    if child == 0:  # nothing but this: torch's own threads stayed behind as well
        try:
            pipeline.mover.submit(lambda: None)
        except OffloadError:
            os._exit(0)
        except BaseException:
            os._exit(2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    step(model, optimizer, 1)


@pytest.mark.parametrize("offload", [Offload(update_in_backward=True), Offload(delayed_update_after=0)])
def test_a_backward_that_would_change_what_a_gathered_block_shows_is_refused(offload: Offload) -> None:
    model, optimizer = shard(offload=offload)
    step(model, optimizer, 0)
    step(model, optimizer, 1)
    with zeroshard.gathered(model), pytest.raises(RuntimeError, match=r"gathered.*leave the block"):
        loss_of(model, 2).backward()


def test_state_from_before_shard_is_encoded_in_8_bits() -> None:
    model = net()
    optimizer = adamw(model)
    for number in range(3):
        loss_of(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()
    before = [{name: value.clone() for name, value in state.items()} for state in optimizer.state.values()]
    model, sharded = zeroshard.shard(model, optimizer, stage=2, precision="bf16", offload=Offload(moments="8bit"))
    for mine, theirs in zip(sharded.state_dict()["state"].values(), before, strict=True):
        assert mine["step"] == theirs["step"] == 3
        for name in ("exp_avg", "exp_avg_sq"):
            large = theirs[name].abs() > 1e-3 * theirs[name].abs().max()
            assert ((mine[name].float() / theirs[name])[large] - 1).abs().max() <= 2**-4
            assert (mine[name] != 0).any()


@pytest.mark.parametrize("moments", [BF16, "8bit"], ids=str)
@pytest.mark.parametrize("make", [momentum, adamw])
def test_small_moments_round_after_a_load_as_they_would_have_without(make: Any, moments: Any) -> None:
    def sharded() -> tuple[Any, Any]:
        model = net()
        return zeroshard.shard(model, make(model), stage=2, precision="bf16", offload=Offload(moments=moments))

    model, optimizer = sharded()
    for number in range(3):
        step(model, optimizer, number)
    resumed, resumed_optimizer = sharded()
    step(resumed, resumed_optimizer, 9)  # what was trained before goes
    resumed.load_state_dict(zeroshard.full_state_dict(model))
    resumed_optimizer.load_state_dict(optimizer.state_dict())
    for number in range(3, 6):
        step(model, optimizer, number)
        step(resumed, resumed_optimizer, number)
    for one, other in zip(
        optimizer.state_dict()["state"].values(), resumed_optimizer.state_dict()["state"].values(), strict=True
    ):
        assert all(torch.equal(one[name], other[name]) for name in one)
