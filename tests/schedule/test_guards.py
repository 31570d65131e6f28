"""DESIGN: "never dangling, never stale". What people do to a model besides training it is right, or raises."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zeroshard
from tests.matrix import Stages, in_stages
from tests.models import Net, batch, loss_of, net
from tests.ranks import on_ranks
from tests.training import (
    INNER,
    SHARDED_GRADIENTS,
    adamw,
    another_state,
    assert_nobody_noticed,
    assert_same,
    refused,
    sgd,
    shard,
    train,
    trained_plainly,
    trained_plainly_from,
    weights,
)

# -- reading ----------------------------------------------------------------------------------------------------------

MOMENTS = ("shard", "evaluation", "forward", "backward", "step")


def at_moment(moment: str, stage: int) -> tuple[Net, zeroshard.ShardedOptimizer, Any]:
    model, optimizer = shard(stage=stage)
    loss = None
    if moment == "evaluation":
        with torch.no_grad():
            model(batch(0))
    elif moment != "shard":
        loss = loss_of(model, 0)
    if moment in ("backward", "step"):
        assert loss is not None
        loss.backward()
    if moment == "step":
        optimizer.step()
    return model, optimizer, loss


READINGS: dict[str, Callable[[nn.Parameter], Any]] = {
    "sum": lambda p: p.sum(),
    "clone": lambda p: p.clone(),
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "item": lambda p: p[0, 0].item(),
    "numpy": lambda p: torch.from_numpy(p.detach().numpy().copy()),
    "tolist": lambda p: torch.tensor(p.tolist()),
    "arithmetic": lambda p: p * 2 + 1,
    "matmul": lambda p: torch.ones(3, p.shape[0]) @ p,
    "norm": lambda p: torch.linalg.vector_norm(p),
    "contiguous": lambda p: p.contiguous().view(-1),
    "reshape": lambda p: p.reshape(-1)[3:5],
    "cat": lambda p: torch.cat([p, p]),
    "half": lambda p: p.half(),
    "to": lambda p: p.to(torch.float64),
    "max": lambda p: p.max(),
    "foreach": lambda p: torch._foreach_norm([p])[0],
    "copy.copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "torch.save": lambda p: saved_and_loaded(p),
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "torch.save data": lambda p: saved_and_loaded(p.data),
}


def saved_and_loaded(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("moment", MOMENTS)
@on_ranks(2)
def test_reading_a_released_parameter_gives_nan_in_every_way(moment: str) -> None:
    model, _, _ = at_moment(moment, stage=3)
    assert_reads_as_nan(model.get_parameter(INNER), torch.Size([39, 13]))


@pytest.mark.parametrize("stage", [1, 2])
@on_ranks(2)
def test_reading_a_parameter_between_step_and_publication_gives_nan_in_every_way(stage: int) -> None:
    model, _, _ = at_moment("step", stage)
    assert_reads_as_nan(model.get_parameter(INNER), torch.Size([39, 13]))


def assert_reads_as_nan(parameter: nn.Parameter, shape: torch.Size) -> None:
    assert parameter.shape == shape
    assert parameter.numel() == shape.numel()
    assert parameter.dtype is torch.float32
    assert "nan" in repr(parameter)
    assert "nan" in str(parameter)
    for name, read in READINGS.items():
        value = torch.as_tensor(read(parameter))
        assert bool(torch.isnan(value).all()), f"{name} gave {value}"


@in_stages
@pytest.mark.parametrize("moment", MOMENTS)
@on_ranks(2)
def test_a_parameter_is_either_current_or_nan_and_never_old(stages: Stages, moment: str) -> None:
    for stage in stages:
        model, _, _ = at_moment(moment, stage)
        seen = {name: p.detach().clone() for name, p in model.named_parameters()}
        current = weights(model)
        for name, value in seen.items():
            if not torch.isnan(value).all():
                assert torch.equal(value, current[name]), (stage, name)
            else:
                assert stage == 3 or (stage > 0 and moment == "step"), (stage, name)


@on_ranks(2)
def test_synchronize_makes_parameters_that_are_whole_at_rest_readable() -> None:
    expected = trained_plainly(1).state_dict()
    for stage in (0, 1, 2):
        model, _, _ = at_moment("step", stage)
        zeroshard.synchronize(model)
        assert_same({name: p.detach() for name, p in model.named_parameters()}, dict(expected))


# -- writing ----------------------------------------------------------------------------------------------------------

ARITHMETIC: dict[str, Callable[[Tensor], Any]] = {
    "add_": lambda p: p.add_(1),
    "mul_": lambda p: p.mul_(0.5),
    "copy_": lambda p: p.copy_(torch.ones(p.shape)),
    "clamp_": lambda p: p.clamp_(max=1),
    "normal_": lambda p: p.normal_(),
    "uniform_": lambda p: p.uniform_(),
    "foreach": lambda p: torch._foreach_add_([p], 1.0),
    "lerp_": lambda p: p.lerp_(torch.ones(p.shape), 0.1),
    "xavier": lambda p: nn.init.xavier_uniform_(p),
}


@on_ranks(2)
def test_arithmetic_in_place_on_a_parameter_that_is_not_current_raises() -> None:
    for stage in SHARDED_GRADIENTS:
        model, optimizer, _ = at_moment("step", stage)
        expected = trained_plainly(1).state_dict()
        parameter = model.get_parameter(INNER)
        for name, write in ARITHMETIC.items():
            for target in (parameter, parameter.data):
                with torch.no_grad(), refused(f"{name} in stage {stage}"):
                    write(target)
        assert bool(torch.isnan(parameter).all())
        assert_nobody_noticed(model, optimizer, dict(expected))


def no_grad_fill(p: nn.Parameter) -> None:
    with torch.no_grad():
        p.fill_(3.0)


def no_grad_zero(p: nn.Parameter) -> None:
    with torch.no_grad():
        p.zero_()


def data_fill(p: nn.Parameter) -> None:
    p.data.fill_(3.0)


def data_zero(p: nn.Parameter) -> None:
    p.data.zero_()


def numpy_fill(p: nn.Parameter) -> None:
    p.detach().numpy()[...] = 3.0


def assign_item(p: nn.Parameter) -> None:
    with torch.no_grad():
        p[...] = 3.0


SILENT_WRITES = {
    "fill_": no_grad_fill,
    "zero_": no_grad_zero,
    "nn.init.constant_": lambda p: nn.init.constant_(p, 3.0),
    "nn.init.zeros_": lambda p: nn.init.zeros_(p),
    "assignment to [...]": assign_item,
    "data.fill_": data_fill,
    "data.zero_": data_zero,
    "numpy": numpy_fill,
}


@pytest.mark.parametrize("way", SILENT_WRITES)
@on_ranks(2)
def test_filling_a_parameter_that_is_not_current_is_found_out_by_the_next_step_and_repaired(way: str) -> None:
    for stage in SHARDED_GRADIENTS:
        expected = dict(trained_plainly(1).state_dict())
        model, optimizer, _ = at_moment("step", stage)
        with refused(f"{way} in stage {stage}", "gathered|single memory location"):
            SILENT_WRITES[way](model.get_parameter(INNER))
            train(model, optimizer, 1)
        optimizer.zero_grad()
        # A second call shows that the first one left no trace.
        assert torch.equal(model(batch(3)), plain_output(expected, 3))
        assert_nobody_noticed(model, optimizer, expected)


def plain_output(state: dict[str, Tensor], step: int) -> Tensor:
    plain = net(depth=2)
    plain.load_state_dict(state)
    return plain(batch(step))


@on_ranks(2)
def test_filling_one_parameter_is_named_and_does_not_show_in_another_afterwards() -> None:
    for stage in SHARDED_GRADIENTS:
        model, _, _ = at_moment("step", stage)
        with torch.no_grad():
            model.get_parameter(INNER).fill_(3.0)
        with pytest.raises(RuntimeError, match=INNER):
            loss_of(model, 1)
        for name in ("blocks.1.up.weight", "blocks.1.norm.bias"):
            value = model.get_parameter(name).detach()
            assert not bool((value == 3.0).any()), (stage, name)


@in_stages
@on_ranks(2)
def test_pointing_data_elsewhere_is_found_out_by_the_next_step(stages: Stages) -> None:
    for stage in stages:
        model, optimizer = shard(stage=stage)
        train(model, optimizer, 0)
        loss_of(model, 1)  # parameters that are whole at rest are now current
        parameter = model.get_parameter(INNER)
        with refused(f"new .data in stage {stage}", INNER):
            parameter.data = torch.ones(parameter.shape)
            train(model, optimizer, 1)


@on_ranks(2)
def test_writing_where_parameters_are_whole_and_exact_is_as_in_plain_torch() -> None:
    plain = trained_plainly(1)
    ddp, optimizer = DistributedDataParallel(plain), sgd(plain.parameters())
    with torch.no_grad():
        plain.get_parameter(INNER).mul_(0.5)
    train(ddp, optimizer, 1)
    for stage in (0, 1, 2):
        model, sharded = shard(stage=stage)
        train(model, sharded, 0)
        zeroshard.synchronize(model)
        with torch.no_grad():
            model.get_parameter(INNER).mul_(0.5)
        train(model, sharded, 1)
        assert_same(weights(model), dict(plain.state_dict()))


@in_stages
@on_ranks(2)
def test_writing_to_sixteen_bit_parameters_behind_a_master_raises_by_the_next_step(stages: Stages) -> None:
    for stage in stages:
        model, optimizer = shard(adamw, stage=stage, precision="bf16")
        train(model, optimizer, 0)
        loss = loss_of(model, 1)  # all parameters are current in stages 0 to 2, only the root in stage 3
        before = {name: value.clone() for name, value in weights(model).items()}
        loss.backward()
        if stage == 3:
            with refused("a write in stage 3", r"first\.weight"), zeroshard.gathered(model), torch.no_grad():
                model.first.weight.mul_(2)
        else:
            with torch.no_grad():
                model.first.weight.mul_(2)
            with pytest.raises(RuntimeError, match=r"first\.weight.*gathered"):
                optimizer.step()
        assert before.keys() == weights(model).keys()


@on_ranks(2)
def test_a_refused_step_leaves_all_weights_as_they_were_so_that_it_can_be_repeated() -> None:
    for stage in (0, 1, 2):
        model, optimizer = shard(adamw, stage=stage, precision="bf16")
        train(model, optimizer, 0)
        loss = loss_of(model, 1)
        before = weights(model)
        loss.backward()
        with torch.no_grad():
            model.blocks[1].norm.bias.add_(1)
        with pytest.raises(RuntimeError, match=r"blocks\.1\.norm\.bias"):
            optimizer.step()
        after = weights(model)
        changed = [name for name in after if not torch.equal(after[name], before[name])]
        assert changed in ([], ["blocks.1.norm.bias"]), f"stage {stage}: half a step was made: {changed}"


# -- copies, pickles and conversions ----------------------------------------------------------------------------------

COPIES: dict[str, Callable[[nn.Module], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "torch.save": lambda module: torch.save(module, io.BytesIO()),
}


@in_stages
@pytest.mark.parametrize("way", COPIES)
@on_ranks(2)
def test_a_sharded_model_or_a_part_of_it_refuses_to_be_copied_and_names_the_remedy(stages: Stages, way: str) -> None:
    for stage in stages:
        model, optimizer = shard(stage=stage)
        train(model, optimizer, 0)
        for module in (model, model.blocks, model.blocks[0], model.last):
            with pytest.raises(Exception, match="full_state_dict") as caught:
                COPIES[way](module)
            assert not isinstance(caught.value, AssertionError)
        assert_nobody_noticed(model, optimizer, dict(trained_plainly(1).state_dict()))


@pytest.mark.parametrize("way", COPIES)
def test_a_model_sharded_in_a_world_of_one_refuses_to_be_copied_too(way: str) -> None:
    model, _ = shard(stage=3)
    with pytest.raises(Exception, match="full_state_dict"):
        COPIES[way](model)


CONVERSIONS: dict[str, Callable[[nn.Module], Any]] = {
    "to dtype": lambda m: m.to(torch.float64),
    "to device": lambda m: m.to("meta"),
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "double": lambda m: m.double(),
    "to_empty": lambda m: m.to_empty(device="cpu"),
    "share_memory": lambda m: m.share_memory(),
}


@in_stages
@on_ranks(2)
def test_converting_a_sharded_model_or_a_part_of_it_raises_and_names_the_remedy(stages: Stages) -> None:
    for stage in stages:
        model, optimizer = shard(stage=stage)
        train(model, optimizer, 0)
        for name, convert in CONVERSIONS.items():
            for module in (model, model.blocks, model.blocks[0], model.blocks[0].up):
                with refused(f"{name} in stage {stage}", r"zeroshard\.shard\(\)"):
                    convert(module)
        assert_nobody_noticed(model, optimizer, dict(trained_plainly(1).state_dict()))


@in_stages
@on_ranks(2)
def test_another_memory_format_raises_or_trains_on(stages: Stages) -> None:
    def build() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(16, 2))

    images = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(5))
    for stage in stages:
        model = build()
        model, optimizer = zeroshard.shard(model, sgd(model.parameters()), stage=stage)
        with suppress(RuntimeError):
            model.to(memory_format=torch.channels_last)
        before = weights(model)
        for _ in range(2):
            model(images).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        after = weights(model)
        assert not torch.equal(before["0.weight"], after["0.weight"])
        plain = build()
        plain.load_state_dict(after)
        torch.testing.assert_close(model(images), plain(images))


@in_stages
@on_ranks(2)
def test_conversions_that_change_nothing_are_fine_at_any_moment(stages: Stages) -> None:
    expected = dict(trained_plainly(2).state_dict())
    for stage in stages:
        model, optimizer = shard(stage=stage)

        def convert(model: Net = model) -> None:
            assert model.to("cpu") is model
            assert model.to(torch.float32) is model
            assert model.float() is model
            assert model.cpu() is model
            assert model.blocks[0].to("cpu", torch.float32) is model.blocks[0]

        for step in range(2):
            convert()
            loss = loss_of(model, step)
            convert()
            loss.backward()
            convert()
            optimizer.step()
            convert()
            optimizer.zero_grad()
        assert_same(weights(model), expected)


# -- state dicts of the model -----------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_state_dict_is_right_directly_after_a_step_where_parameters_are_whole_at_rest() -> None:
    expected = dict(trained_plainly(2).state_dict())
    for stage in (0, 1, 2):
        model, optimizer = shard(stage=stage)
        for step in range(2):
            train(model, optimizer, step)
        assert_same(model.state_dict(), expected)
        model, optimizer = shard(stage=stage)
        train(model, optimizer, 0)
        train(model, optimizer, 1)
        part = model.blocks[1].state_dict()
        assert_same(part, {name: expected[f"blocks.1.{name}"] for name in part})


@on_ranks(2)
def test_a_state_dict_in_stage_three_raises_and_names_the_remedy_at_every_moment() -> None:
    for moment in MOMENTS:
        model, _, _ = at_moment(moment, stage=3)
        for module in (model, model.blocks[0]):
            with pytest.raises(RuntimeError, match=r"zeroshard\.full_state_dict"):
                module.state_dict()


@in_stages
@on_ranks(2)
def test_a_state_dict_inside_gathered_is_right_and_can_be_used_afterwards(stages: Stages) -> None:
    expected = dict(trained_plainly(1).state_dict())
    for stage in stages:
        model, optimizer = shard(stage=stage)
        train(model, optimizer, 0)
        with zeroshard.gathered(model):
            state = model.state_dict()
            assert_same(state, expected)
        assert_same(state, expected)


@on_ranks(2)
def test_loading_a_state_dict_in_stage_three_raises_outside_gathered_and_names_the_remedy() -> None:
    other = net(depth=2, width=13)
    for moment in MOMENTS:
        model, _, _ = at_moment(moment, stage=3)
        before = weights(model)
        with pytest.raises(RuntimeError, match=r"gathered\(model, write=True\)"):
            model.load_state_dict(other.state_dict())
        if moment in ("shard", "backward", "step"):
            assert_same(weights(model), before)


@in_stages
@on_ranks(2)
def test_a_state_dict_loaded_inside_gathered_counts_and_survives_the_next_step(stages: Stages) -> None:
    state = another_state()
    expected = trained_plainly_from(state, 1)
    for stage in stages:
        model, optimizer = shard(stage=stage)
        train(model, optimizer, 0)
        with zeroshard.gathered(model, write=True):
            model.load_state_dict(state)
        assert_same(weights(model), state)
        train(model, optimizer, 1)
        assert_same(weights(model), expected)


@on_ranks(2)
def test_a_state_dict_loaded_directly_counts_where_parameters_are_whole_at_rest() -> None:
    state = another_state()
    expected = trained_plainly_from(state, 1)
    for stage in (0, 1, 2):
        model, optimizer = shard(stage=stage)
        train(model, optimizer, 0)
        model.load_state_dict(state)
        assert_same(dict(model.state_dict()), state)
        train(model, optimizer, 1)
        assert_same(weights(model), expected)


@in_stages
@on_ranks(2)
def test_a_loaded_state_dict_reaches_the_masters_of_sixteen_bit_parameters(stages: Stages) -> None:
    state = another_state()
    for stage in stages:
        model, optimizer = shard(stage=stage, precision="bf16")
        train(model, optimizer, 0)
        if stage == 3:
            with zeroshard.gathered(model, write=True):
                model.load_state_dict(state)
        else:
            model.load_state_dict(state)
        rounded = {name: value.bfloat16() for name, value in state.items()}
        assert_same(weights(model), rounded)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        train(model, optimizer, 1)
        assert_same(weights(model), rounded)


@in_stages
@on_ranks(2)
def test_loading_with_assign_raises_and_leaves_the_model_as_it_was(stages: Stages) -> None:
    for stage in stages:
        model, optimizer = shard(stage=stage)
        train(model, optimizer, 0)
        before = weights(model)
        with pytest.raises(RuntimeError, match="assign"):
            model.load_state_dict(another_state(), assign=True)
        with pytest.raises(RuntimeError, match="assign"), zeroshard.gathered(model, write=True):
            model.load_state_dict(another_state(), assign=True)
        assert_nobody_noticed(model, optimizer, before)


# -- memory -----------------------------------------------------------------------------------------------------------


@in_stages
@on_ranks(2)
def test_a_sharded_model_that_nobody_holds_is_freed(stages: Stages) -> None:
    for stage in stages:
        model, optimizer = shard(adamw, stage=stage)
        train(model, optimizer, 0)
        held = weakref.ref(model), weakref.ref(optimizer), weakref.ref(model.blocks[0].up.weight)
        del model, optimizer
        gc.collect()
        assert [reference() for reference in held] == [None] * 3, f"stage {stage}"
