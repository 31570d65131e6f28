"""DESIGN: "never dangling, never stale, never silent". Reading a parameter gives its value; a lost write is refused."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import re
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zeroshard
from tests.matrix import Stages, in_stages, slow
from tests.models import batch, loss_of, net
from tests.ranks import on_ranks
from tests.schedule.moments import MOMENTS, at_moment
from tests.training import (
    INNER,
    SHARDED_GRADIENTS,
    adamw,
    assert_nobody_noticed,
    assert_same,
    refused,
    sgd,
    shard,
    train,
    trained_plainly,
    weights,
)
from zeroshard.runtime import runtime_of
from zeroshard.shown import absent

# -- reading ----------------------------------------------------------------------------------------------------------

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
@pytest.mark.parametrize("stage", [1, slow(2), 3])
@on_ranks(2)
def test_reading_a_parameter_gives_its_value_in_every_way_at_every_moment(stage: int, moment: str) -> None:
    model, _, _ = at_moment(moment, stage)
    expected = nn.Parameter(weights(model)[INNER])
    for name, read in READINGS.items():
        value, wanted = read(model.get_parameter(INNER)), read(expected)
        assert type(value) is type(wanted), name
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(wanted)), name
        model.get_parameter("last.bias").sum()  # releases what was read before, so that each reading is the first


@on_ranks(2)
def test_facts_about_a_parameter_need_neither_its_value_nor_the_other_ranks() -> None:
    model, optimizer, _ = at_moment("step", stage=3)
    parameter, plain = model.get_parameter(INNER), net(depth=2).get_parameter(INNER)
    assert isinstance(parameter, nn.Parameter)
    if dist.get_rank() == 0:
        for fact in FACTS:
            assert fact(parameter) == fact(plain)
        assert f"'{INNER}' (its value is not here; shape=(39, 13)" in repr(parameter)
        assert bool(torch.equal(torch.zeros_like(parameter), torch.zeros(39, 13)))
        torch.manual_seed(5)
        random = torch.randn_like(parameter)
        torch.manual_seed(5)
        assert torch.equal(random, torch.randn_like(plain))
        handle = parameter.register_hook(lambda gradient: None)
        handle.remove()
        parameter.requires_grad_(True)
        parameter.grad = None
    assert_nobody_noticed(model, optimizer, dict(trained_plainly(1).state_dict()))


def test_a_parameter_that_is_here_is_printed_with_its_values_also_if_it_has_a_master() -> None:
    model, _ = shard(adamw, stage=0, precision="bf16")
    parameter = model.get_parameter(INNER)
    assert absent.is_absent(parameter)  # a write to it would be lost, so every use is seen
    assert repr(parameter) == repr(nn.Parameter(parameter.detach().clone()))


FACTS: list[Callable[[nn.Parameter], Any]] = [
    lambda p: p.shape,
    lambda p: p.size(),
    lambda p: p.stride(),
    lambda p: p.is_contiguous(),
    lambda p: p.numel(),
    lambda p: p.dim(),
    lambda p: p.dtype,
    lambda p: p.device,
    lambda p: p.requires_grad,
    lambda p: p.is_leaf,
    lambda p: p.grad_fn,
    lambda p: p.grad,
    lambda p: p.is_floating_point(),
    lambda p: p.element_size(),
    lambda p: p.nbytes,
    lambda p: len(p),
    lambda p: p.type(),
    lambda p: p.new_zeros(3).tolist(),
    lambda p: type(p.is_sparse),
]


@in_stages
@pytest.mark.parametrize("moment", MOMENTS)
@on_ranks(2)
def test_every_parameter_reads_as_current(stages: Stages, moment: str) -> None:
    for stage in stages:
        model, _, _ = at_moment(moment, stage)
        seen = {name: p.detach().clone() for name, p in model.named_parameters()}
        assert_same(seen, weights(model))


@on_ranks(2)
def test_what_user_code_has_read_stays_valid_when_the_parameter_changes_or_is_released() -> None:
    for stage in SHARDED_GRADIENTS:
        for moment in ("forward", "step"):  # after forward the root is still gathered
            model, optimizer, loss = at_moment(moment, stage)
            seen = {name: p.detach() for name, p in model.named_parameters()}
            if moment == "step":
                assert_same({name: value.clone() for name, value in seen.items()}, weights(model))
            if loss is not None and moment == "forward":
                loss.backward()
                optimizer.step()
            train(model, optimizer, 1)
            assert all(bool(value.isfinite().all()) for value in seen.values())


@on_ranks(2)
def test_reading_one_unit_after_another_gathers_one_unit_at_a_time() -> None:
    model, _, _ = at_moment("step", stage=3)
    for parameter in model.parameters():
        parameter.norm()
        present = {flat.label for flat in runtime_of(model).flats if flat.present}
        assert present == {absent.source_of(parameter).label}  # type: ignore[union-attr]
    loss_of(model, 1)
    assert not absent.source_of(model.get_parameter(INNER)).present  # type: ignore[union-attr]


@on_ranks(2)
def test_a_read_that_rank_zero_makes_alone_works_where_parameters_are_whole_at_rest() -> None:
    for stage in (0, 1, 2):
        for offload in (None, "cpu"):
            expected = [trained_plainly(step + 1, adamw).get_parameter(INNER).detach() for step in range(2)]
            model, optimizer = shard(adamw, stage=stage, offload=offload)
            for step in range(2):
                train(model, optimizer, step)
                if dist.get_rank() == 0:
                    torch.testing.assert_close(model.get_parameter(INNER).detach(), expected[step])
                    torch.testing.assert_close(model.state_dict()[INNER], expected[step])
            loss_of(model, 3)


@on_ranks(2)
def test_a_read_that_rank_zero_makes_alone_in_stage_three_is_named_within_seconds() -> None:
    expected = dict(trained_plainly(1).state_dict())
    model, optimizer, _ = at_moment("step", stage=3, prefetch=1)
    begin = time.monotonic()
    if dist.get_rank() == 0:
        with refused(
            "a read", r"norm\(\) needs the value of parameter 'blocks\.1\.up\.bias'.*rank 1 did not.*gathered\("
        ):
            model.blocks[1].up.bias.norm()  # the first block is gathered already, for the next forward
        assert time.monotonic() - begin < 8
    assert_nobody_noticed(model, optimizer, expected)


@on_ranks(2)
def test_ranks_that_read_different_units_are_named() -> None:
    model, _ = shard(stage=3, stall_timeout=1.0)
    other = 1 - dist.get_rank()
    with pytest.raises(RuntimeError, match=rf"rank {other} did not \(it is at blocks\.{other}\)"):
        model.blocks[dist.get_rank()].up.weight.norm()


@on_ranks(2)
def test_the_first_read_of_a_divided_parameter_warns_of_its_cost_and_can_be_refused() -> None:
    model, _, _ = at_moment("backward", stage=3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.get_parameter(INNER).norm()
        model.get_parameter("blocks.1.up.weight").norm()
    assert len(caught) == (dist.get_rank() == 0), caught
    for warning in caught:
        text = str(warning.message)
        assert re.search(rf"norm\(\) used parameter '{INNER}'.*gathered 'blocks\.0' \(.*reads=\"raise\"", text)
        assert warning.filename == __file__, "the line of the user"
    model, _ = shard(stage=3, reads="raise")
    with pytest.raises(RuntimeError, match=rf"norm\(\).*{INNER}.*reads=\"raise\".*zeroshard\.gathered\(model\)"):
        model.get_parameter(INNER).norm()
    with zeroshard.gathered(model):
        model.get_parameter(INNER).norm()


@on_ranks(2)
def test_a_parameter_of_a_model_that_is_gone_says_so() -> None:
    model, _, _ = at_moment("step", stage=3)
    parameter = model.get_parameter(INNER)
    del model, _
    gc.collect()
    with pytest.raises(RuntimeError, match=r"shape \(39, 13\) belonged to a sharded model that is gone"):
        parameter.norm()
    assert parameter.shape == (39, 13)


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
def test_arithmetic_in_place_on_a_divided_parameter_is_refused_by_name() -> None:
    model, optimizer, _ = at_moment("step", stage=3)
    for name, write in ARITHMETIC.items():
        with torch.no_grad(), refused(name, rf"would write to parameter '{INNER}'.*gathered\(model, write=True\)"):
            write(model.get_parameter(INNER))
    assert_nobody_noticed(model, optimizer, dict(trained_plainly(1).state_dict()))


@in_stages
@pytest.mark.parametrize("options", [{"precision": "bf16"}, {"offload": "cpu"}], ids=str)
@on_ranks(2)
def test_a_write_to_a_parameter_with_a_master_is_refused_at_every_moment(stages: Stages, options: Any) -> None:
    for stage in stages:
        model, optimizer = shard(adamw, stage=stage, **options)
        for step in range(2):
            loss = loss_of(model, step)
            for _ in range(2):  # after forward, and after step
                parameter = model.get_parameter(INNER)
                with torch.no_grad(), refused("clamp_", rf"clamp_\(\).*{INNER}.*gathered\(model, write=True\)"):
                    parameter.clamp_(-1, 1)
                assert bool(parameter.detach().isfinite().all())
                if loss is not None:
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    loss = None


@in_stages
@pytest.mark.parametrize("options", [{"precision": "bf16"}, {"offload": "cpu"}], ids=str)
@on_ranks(2)
def test_data_of_a_parameter_with_a_master_can_be_read_and_a_write_to_it_is_found_out(
    stages: Stages, options: Any
) -> None:
    for stage in stages:
        model, optimizer = shard(adamw, stage=stage, **options)
        for moment in ("forward", "backward", "step"):
            loss = loss_of(model, 0)
            if moment in ("backward", "step"):
                loss.backward()
            if moment == "step":
                optimizer.step()
            expected = weights(model)[INNER]
            assert torch.equal(model.get_parameter(INNER).data, expected)
            model.get_parameter(INNER).data.mul_(0.5)
            with refused(f"{moment} in stage {stage}", r"written to through \.data.*gathered\(model, write=True\)"):
                if moment == "backward":
                    optimizer.step()
                else:
                    loss_of(model, 1)
            optimizer.zero_grad()
            loss_of(model, 2)  # the next pass can begin
            optimizer.zero_grad()


@on_ranks(2)
def test_clamping_weights_after_a_step_as_a_critic_does_is_as_under_ddp() -> None:
    for write in (lambda p: p.data.clamp_(-0.1, 0.1), lambda p: torch.no_grad()(p.clamp_)(-0.1, 0.1)):
        plain = net(depth=2)
        ddp, plain_optimizer = DistributedDataParallel(plain), sgd(plain.parameters())
        for step in range(3):
            train(ddp, plain_optimizer, step)
            for parameter in plain.parameters():
                write(parameter)
        for stage in (0, 1, 2):
            model, optimizer = shard(stage=stage)
            for step in range(3):
                train(model, optimizer, step)
                for parameter in model.parameters():
                    write(parameter)
            assert_same(weights(model), dict(plain.state_dict()))


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
def test_a_write_to_a_divided_parameter_is_refused_or_found_out_by_the_next_step(way: str) -> None:
    expected = dict(trained_plainly(1).state_dict())
    model, optimizer, _ = at_moment("step", stage=3)
    with refused(way, r"gathered\(model, write=True\)"):
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
