"""``gathered`` and ``full_state_dict``: the whole parameters, for reading and for writing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zeroshard
from tests.matrix import Stages, in_stages
from tests.models import Net, loss_of, net
from tests.ranks import on_ranks
from tests.training import (
    INNER,
    adamw,
    assert_nobody_noticed,
    assert_same,
    is_released,
    refused,
    sgd,
    shard,
    train,
    trained_plainly,
    trained_plainly_from,
    weights,
)
from zeroshard.runtime import runtime_of

# -- gathered ---------------------------------------------------------------------------------------------------------


def targets(model: Net) -> dict[str, Any]:
    return {
        "model": model,
        "module": model.blocks[0],
        "parameter": model.blocks[0].up.weight,
        "list": [model.blocks[0].up.weight, model.first.weight],
        "generator": (p for p in model.blocks[0].parameters()),
    }


@pytest.mark.parametrize("offload", [None, "cpu", zeroshard.Offload(parameters="cpu")], ids=str)
@on_ranks(2)
def test_inside_gathered_one_rank_may_run_forwards_alone_as_for_generation(offload: Any) -> None:
    model, optimizer = shard(stage=3, offload=offload, stall_timeout=5)
    for step in range(2):
        train(model, optimizer, step)
        with zeroshard.gathered(model), torch.no_grad():
            for time in range(3 * dist.get_rank()):
                loss_of(model, time)


@in_stages
@on_ranks(2)
def test_gathered_takes_a_model_a_part_a_parameter_or_several(stages: Stages) -> None:
    expected = trained_plainly(1).get_parameter(INNER)
    for stage in stages:
        model, optimizer = shard(stage=stage)
        train(model, optimizer, 0)
        for name, target in targets(model).items():
            with zeroshard.gathered(target):
                assert torch.equal(model.get_parameter(INNER), expected), name
            if stage == 3:
                assert is_released(model.get_parameter(INNER)), name


@in_stages
@on_ranks(2)
def test_gathered_blocks_can_be_nested_in_any_way(stages: Stages) -> None:
    for stage in stages:
        model, optimizer = shard(stage=stage)
        train(model, optimizer, 0)
        inner = model.get_parameter(INNER)
        expected = trained_plainly(1).get_parameter(INNER).detach()
        with zeroshard.gathered(model):
            with zeroshard.gathered(inner):
                assert torch.equal(inner, expected)
            assert torch.equal(inner, expected)
            with zeroshard.gathered(model.blocks[0], write=True), torch.no_grad():
                inner.add_(1)
            assert torch.equal(inner, expected + 1)
        with zeroshard.gathered([inner]):
            assert torch.equal(inner, expected + 1)


@in_stages
@on_ranks(2)
def test_the_model_can_be_called_inside_gathered(stages: Stages) -> None:
    for stage in stages:
        model, optimizer = shard(stage=stage)
        train(model, optimizer, 0)
        with zeroshard.gathered(model):
            train_loss = loss_of(model, 1)
            assert torch.equal(model.get_parameter(INNER), trained_plainly(1).get_parameter(INNER))
            train_loss.backward()
            assert not bool(torch.isnan(model.get_parameter(INNER)).any())
        optimizer.step()
        assert_same(weights(model), dict(trained_plainly(2).state_dict()))


@in_stages
@on_ranks(2)
def test_what_rank_zero_alone_writes_reaches_every_rank_and_survives_steps(stages: Stages) -> None:
    plain = trained_plainly(1)
    with torch.no_grad():
        plain.get_parameter(INNER).mul_(-2)
        plain.last.bias.fill_(0.25)
    expected = dict(plain.state_dict())
    later = trained_plainly_from(expected, 1)
    for stage in stages:
        model, optimizer = shard(stage=stage)
        train(model, optimizer, 0)
        with zeroshard.gathered(model, write=True), torch.no_grad():
            if dist.get_rank() == 0:
                model.get_parameter(INNER).mul_(-2)
                model.last.bias.data.fill_(0.25)
        assert_same(weights(model), expected)
        train(model, optimizer, 1)
        assert_same(weights(model), later)


@in_stages
@on_ranks(2)
def test_rank_zeros_values_count_where_another_rank_writes_too(stages: Stages) -> None:
    for stage in stages:
        model, optimizer = shard(stage=stage)
        with zeroshard.gathered(model, write=True), torch.no_grad():
            model.get_parameter(INNER).fill_(float(dist.get_rank() + 1))
        assert bool((weights(model)[INNER] == 1).all())
        train(model, optimizer, 0)


@in_stages
@on_ranks(2)
def test_new_data_inside_gathered_counts_or_raises(stages: Stages) -> None:
    for stage in stages:
        model, _ = shard(stage=stage)
        parameter = model.get_parameter(INNER)
        before = weights(model)[INNER]
        wanted = before * 2
        try:
            with zeroshard.gathered(parameter, write=True):
                parameter.data = parameter.data * 2
        except RuntimeError:
            wanted = before
        assert torch.equal(weights(model)[INNER], wanted), f"lost in stage {stage}"


@in_stages
@on_ranks(2)
def test_writing_inside_gathered_without_write_raises_when_the_block_ends_and_is_undone(stages: Stages) -> None:
    for stage in stages:
        model, optimizer = shard(stage=stage)
        train(model, optimizer, 0)
        before = weights(model)
        with refused(f"a write in stage {stage}", f"{INNER}.*write=True"), zeroshard.gathered(model), torch.no_grad():
            model.get_parameter(INNER).add_(1)
        if stage == 3:
            assert is_released(model.get_parameter(INNER))
            assert_nobody_noticed(model, optimizer, before)


@on_ranks(2)
def test_a_write_on_one_rank_inside_gathered_without_write_does_not_part_the_ranks() -> None:
    model, optimizer = shard(stage=3, stall_timeout=5)
    before = weights(model)
    try:
        with zeroshard.gathered(model), torch.no_grad():
            if dist.get_rank() == 1:
                model.get_parameter(INNER).add_(1)
    except RuntimeError:
        assert dist.get_rank() == 1
    else:
        assert dist.get_rank() == 0
    assert_nobody_noticed(model, optimizer, before)


@in_stages
@on_ranks(2)
def test_masters_keep_their_low_bits_where_nothing_was_written(stages: Stages) -> None:
    for stage in stages:
        model, optimizer = shard(adamw, stage=stage, precision="bf16")
        train(model, optimizer, 0)
        before = {key: state["master"].clone() for key, state in optimizer.state_dict()["state"].items()}
        number = [name for name, _ in model.named_parameters()].index(INNER)
        with zeroshard.gathered(model, write=True), torch.no_grad():
            model.get_parameter(INNER)[2:4] = 0.5
        after = {key: state["master"] for key, state in optimizer.state_dict()["state"].items()}
        expected = before[number].clone()
        expected[2:4] = 0.5
        assert not torch.equal(expected, expected.bfloat16().float())
        for key, value in before.items():
            assert torch.equal(after[key], expected if key == number else value)


class Mine(Exception):  # noqa: N818
    """An error of the user's own."""


def raise_mine(after_writing_to: Tensor | None = None) -> None:
    if after_writing_to is not None and dist.get_rank() == 0:
        with torch.no_grad():
            after_writing_to.add_(1)
    raise Mine


@in_stages
@pytest.mark.parametrize("write", [False, True])
@on_ranks(2)
def test_an_exception_inside_gathered_comes_through_and_everything_is_released(stages: Stages, write: bool) -> None:
    for stage in stages:
        model, optimizer = shard(stage=stage)
        train(model, optimizer, 0)
        before = weights(model)
        with pytest.raises(Mine), zeroshard.gathered(model, write=write):
            raise_mine()
        if stage == 3:
            assert all(is_released(p) for p in model.parameters())
        assert_nobody_noticed(model, optimizer, before)


@in_stages
@pytest.mark.parametrize("write", [False, True])
@on_ranks(2)
def test_an_exception_after_a_write_inside_gathered_comes_through_and_the_ranks_stay_together(
    stages: Stages, write: bool
) -> None:
    for stage in stages:
        model, optimizer = shard(stage=stage, stall_timeout=5)
        train(model, optimizer, 0)
        before = weights(model)
        with pytest.raises(Mine), zeroshard.gathered(model, write=write):
            raise_mine(after_writing_to=model.first.weight)
        if stage == 3:
            assert all(is_released(p) for p in model.parameters())
        if stage == 3 and not write:
            assert_same(weights(model), before)
        if stage < 3 and not write:
            continue  # without write=True, one rank alone wrote to the memory of the parameter itself
        # With write=True the write may count or not, but never on one rank only.
        mine = weights(model)["first.weight"]
        everybody = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(everybody, mine)
        assert torch.equal(*everybody), f"ranks differ in stage {stage}"
        train(model, optimizer, 1)


@on_ranks(2)
def test_gathered_refuses_what_belongs_to_no_sharded_model() -> None:
    shard(stage=3)
    with pytest.raises(ValueError, match="no sharded model"), zeroshard.gathered(nn.Linear(2, 2)):
        pass


# -- full_state_dict --------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Tied weights, a persistent buffer and one that is not, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(7, 7, bias=False)
        self.blocks = nn.Sequential(nn.Linear(7, 7), nn.BatchNorm1d(7), nn.Linear(7, 7))
        self.head = nn.Linear(7, 7)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(x))) + self.frozen.sum()


@in_stages
@on_ranks(2)
def test_a_full_state_dict_is_that_of_the_plain_model_with_tied_names_buffers_and_frozen_parameters(
    stages: Stages,
) -> None:
    torch.manual_seed(0)
    plain = Tied()
    ddp, optimizer = DistributedDataParallel(plain, broadcast_buffers=False), sgd([*plain.parameters()])
    train(ddp, optimizer, 0)
    for buffer in plain.buffers():  # our step ends with rank 0's values
        torch.distributed.broadcast(buffer, 0)
    for stage in stages:
        torch.manual_seed(0)
        model = Tied()
        model, sharded = zeroshard.shard(model, sgd(model.parameters()), stage=stage)
        train(model, sharded, 0)
        state = zeroshard.full_state_dict(model)
        assert list(state) == list(plain.state_dict())
        assert "scratch" not in state
        assert torch.equal(state["head.weight"], state["embed.weight"])
        assert_same(state, dict(plain.state_dict()))
        assert all(value.device.type == "cpu" and not value.requires_grad for value in state.values())
        with torch.no_grad():
            state["embed.weight"].zero_()
        assert bool((zeroshard.full_state_dict(model)["embed.weight"] != 0).any())


@in_stages
@on_ranks(2)
def test_a_full_state_dict_for_one_rank_is_empty_on_the_others(stages: Stages) -> None:
    expected = dict(net(depth=2).state_dict())
    for stage in stages:
        model, _ = shard(stage=stage)
        for rank in (0, 1):
            state = zeroshard.full_state_dict(model, rank=rank)
            if dist.get_rank() == rank:
                assert_same(state, expected)
            else:
                assert state == {}


@on_ranks(2)
def test_a_full_state_dict_for_a_rank_that_does_not_exist_is_refused() -> None:
    model, _ = shard(stage=2)
    for rank in (2, -1):
        with pytest.raises(ValueError, match="rank"):
            zeroshard.full_state_dict(model, rank=rank)


@on_ranks(2)
def test_a_full_state_dict_of_a_model_that_is_not_sharded_is_refused() -> None:
    model, _ = shard(stage=2)
    with pytest.raises(ValueError, match="not sharded"):
        zeroshard.full_state_dict(model.blocks[0])
    with pytest.raises(ValueError, match="not sharded"):
        zeroshard.full_state_dict(net())


@in_stages
@on_ranks(2)
def test_a_full_state_dict_of_some_tensors_gathers_no_others(stages: Stages) -> None:
    for stage in stages:
        model = net(depth=2)
        expected = dict(model.state_dict())
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.endswith("bias"))
        model, optimizer = zeroshard.shard(model, sgd([p for p in model.parameters() if p.requires_grad]), stage=stage)
        fabric = runtime_of(model).fabric
        fabric.take_volume()
        found = zeroshard.full_state_dict(model, rank=1, only=lambda name: name.endswith("bias"))
        biases = {name: value for name, value in expected.items() if name.endswith("bias")}
        moved = sum(traffic.elements for traffic in fabric.take_volume().shards.values())
        if dist.get_rank() == 1:
            assert list(found) == list(biases)
            assert_same(found, biases)
        else:
            assert found == {}
        trained = sum(flat.layout.numel for flat in runtime_of(model).flats if flat.trainable)
        assert moved == (trained if stage == 3 else 0)
        assert_same(zeroshard.full_state_dict(model), expected)
        train(model, optimizer, 0)  # nothing stays gathered or hidden
        assert zeroshard.full_state_dict(model, only=lambda _: False) == {}


# -- the compiled model -----------------------------------------------------------------------------------------------


@in_stages
@on_ranks(2)
def test_the_compiled_model_is_as_good_as_the_model_for_every_function(stages: Stages, tmp_path: Any) -> None:
    expected = dict(trained_plainly(2).state_dict())
    for stage in stages:
        model, optimizer = shard(stage=stage)
        compiled: Any = torch.compile(model, backend="eager")
        train(model, optimizer, 0)
        folder = f"{tmp_path}/{stage}"
        zeroshard.save(folder, compiled, optimizer)
        with zeroshard.no_sync(compiled):
            loss_of(model, 1).backward()
        optimizer.zero_grad()
        zeroshard.load(folder, compiled, optimizer)
        train(model, optimizer, 1)
        zeroshard.synchronize(compiled)
        assert zeroshard.stats(compiled).steps == 2
        assert_same(zeroshard.full_state_dict(compiled), expected)
        with zeroshard.gathered(compiled):
            assert torch.equal(model.get_parameter(INNER), expected[INNER])
    with pytest.raises(ValueError, match="not sharded"):
        zeroshard.stats(torch.compile(net()))
