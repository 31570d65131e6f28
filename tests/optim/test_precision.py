"""Mixed precision: masters, casts at the border, loss scaling, and the dtypes of reduction and accumulation."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.matrix import Stages, in_stages
from tests.models import batch, loss_of, net
from tests.ranks import on_ranks
from zeroshard import LossScale, Precision

STAGES = (0, 1, 2, 3)


def build(**options: Any) -> tuple[Any, Any]:
    model = net()
    return zeroshard.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), **options)


def run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> list[float]:
    losses = []
    for step in range(steps):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@on_ranks(2)
def test_all_stages_give_the_same_bits_in_16_bit_and_follow_fp32(precision: str) -> None:
    reference = run(*build(stage=0))
    zeroth = build(stage=0, precision=precision, clip_grad_norm=1.0)
    losses = run(*zeroth)
    assert losses == pytest.approx(run(*build(stage=0, clip_grad_norm=1.0)), rel=0.05)
    assert len(losses) == len(reference)
    weights = zeroshard.full_state_dict(zeroth[0])
    for stage in (1, 2, 3):
        other = build(stage=stage, precision=precision, clip_grad_norm=1.0)
        assert run(*other) == losses
        for name, value in zeroshard.full_state_dict(other[0]).items():
            assert torch.equal(value, weights[name])


@in_stages
@on_ranks(2)
def test_updates_too_small_for_bf16_add_up_in_the_master(stages: Stages) -> None:
    for stage in stages:
        model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1.0)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=2.0**-12)
        model, optimizer = zeroshard.shard(model, optimizer, stage=stage, precision="bf16")
        for _ in range(64):  # each moves a weight by about 2**-12, far below bf16's 2**-8
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert float(zeroshard.full_state_dict(model)["0.weight"]) == pytest.approx(1 - 64 * 2.0**-12, abs=2.0**-8)
        assert float(zeroshard.full_state_dict(model)["0.weight"]) < 1


@on_ranks(2)
def test_floating_inputs_are_cast_buffers_kept_and_outputs_cast_if_asked() -> None:
    class Recorder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7))
            self.register_buffer("table", torch.ones(7))
            self.seen: dict[str, torch.dtype] = {}

        def forward(self, x: torch.Tensor, index: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
            self.seen = {"x": x.dtype, "index": index.dtype, "scale": scale.dtype, "table": self.table.dtype}
            return {"y": self.layers(x) * scale, "index": index}

    def outputs(precision: Precision) -> tuple[Recorder, dict[str, torch.Tensor]]:
        model = Recorder()
        model, _ = zeroshard.shard(model, torch.optim.SGD(model.parameters()), precision=precision)
        return model, model(batch(0), torch.arange(3), scale=torch.ones(1))

    model, output = outputs(Precision(parameters=torch.bfloat16))
    assert model.seen == {
        "x": torch.bfloat16,
        "index": torch.int64,
        "scale": torch.bfloat16,
        "table": torch.float32,
    }
    assert output["y"].dtype is torch.bfloat16
    assert output["index"].dtype is torch.int64
    _, output = outputs(Precision(parameters=torch.bfloat16, output=torch.float32))
    assert output["y"].dtype is torch.float32
    _, output = outputs(Precision(parameters=torch.float16))
    assert output["y"].dtype is torch.float32, "fp16 outputs are cast by default, or their gradients would vanish"
    model = Recorder()
    model, _ = zeroshard.shard(
        model, torch.optim.SGD(model.parameters()), precision=Precision(parameters=torch.bfloat16, cast_inputs=False)
    )
    with pytest.raises(RuntimeError, match="dtype"):
        model(batch(0), torch.arange(3), scale=torch.ones(1))


@in_stages
@on_ranks(2)
def test_overflowing_fp16_steps_are_skipped_counted_and_lower_the_scale(stages: Stages) -> None:
    for stage in stages:
        scale = LossScale(initial=2.0**30, growth_interval=3)
        model, optimizer = build(stage=stage, precision=Precision(parameters=torch.float16, loss_scale=scale))
        start = zeroshard.full_state_dict(model)
        loss_of(model, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        stats = zeroshard.stats(model)
        assert stats.skipped_steps == 1
        assert stats.loss_scale == 2.0**29
        assert stats.grad_norm is not None
        assert not math.isfinite(stats.grad_norm)
        after = zeroshard.full_state_dict(model)
        assert all(torch.equal(start[name], after[name]) for name in start)
        run(model, optimizer, steps=30)
        stats = zeroshard.stats(model)
        assert stats.skipped_steps < 29
        assert stats.loss_scale is not None
        assert stats.loss_scale < 2.0**29
        assert stats.grad_norm is not None
        assert math.isfinite(stats.grad_norm)


@on_ranks(2)
def test_with_hysteresis_the_first_overflows_leave_the_scale_also_across_a_checkpoint(tmp_path: Path) -> None:
    scale = LossScale(initial=2.0**40, hysteresis=3)
    precision = Precision(parameters=torch.float16, loss_scale=scale)
    model, optimizer = build(stage=1, precision=precision)
    scales = []
    for step in range(5):
        if step == 2:
            zeroshard.save(tmp_path / "saved", model, optimizer)
            model, optimizer = build(stage=1, precision=precision)
            zeroshard.load(tmp_path / "saved", model, optimizer)
        run(model, optimizer, steps=1)
        scales.append(zeroshard.stats(model).loss_scale)
    assert scales == [2.0**40, 2.0**40, 2.0**39, 2.0**38, 2.0**37]
    assert zeroshard.stats(model).skipped_steps == 5


@on_ranks(2)
def test_the_loss_scale_grows_after_good_steps_and_changes_no_result() -> None:
    def at(initial: float) -> tuple[list[float], float | None]:
        scale = LossScale(initial=initial, growth_interval=2)
        model, optimizer = build(stage=3, precision=Precision(parameters=torch.float16, loss_scale=scale))
        losses = run(model, optimizer)
        return losses, zeroshard.stats(model).loss_scale

    low, grown = at(64.0)
    high, _ = at(1024.0)
    assert grown == 64.0 * 4
    assert low == pytest.approx(high, rel=1e-3)


@in_stages
@on_ranks(3)
def test_reducing_in_fp32_adds_exactly_what_16_bit_would_round(stages: Stages) -> None:
    def gradient_sum(precision: Precision, stage: int) -> float:
        model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1.0)
        model, optimizer = zeroshard.shard(
            model, torch.optim.SGD(model.parameters(), lr=1.0), stage=stage, precision=precision
        )
        value = 256.0 if torch.distributed.get_rank() == 0 else 1.0
        model(torch.full((1, 1), value)).sum().backward()
        norm = float(optimizer.clip_grad_norm_(1e9))
        return norm

    for stage in stages:
        # 256 + 1 + 1: in bf16 the ones vanish one after the other.
        coarse = gradient_sum(Precision(parameters=torch.bfloat16), stage)
        assert coarse == pytest.approx(math.sqrt(2) * 85.5, rel=1e-3)
        exact = gradient_sum(Precision(parameters=torch.bfloat16, reduce=torch.float32), stage)
        assert exact == pytest.approx(math.sqrt(2) * 86.0, rel=1e-3)
    volumes = []
    for reduce in (torch.bfloat16, torch.float32):
        model, optimizer = build(stage=2, precision=Precision(parameters=torch.bfloat16, reduce=reduce))
        run(model, optimizer, steps=3)
        volumes.append(zeroshard.stats(model).volume["reduce_scatter"].bytes)
    assert volumes[1] == 2 * volumes[0]


@in_stages
@on_ranks(2)
def test_without_precision_parameters_keep_their_dtypes_and_get_no_master(stages: Stages) -> None:
    for stage in stages:
        model = net()
        model.blocks[1].to(torch.bfloat16)

        def widen(module: nn.Module, args: Any) -> Any:
            return (args[0].to(torch.bfloat16),)

        model.blocks[1].register_forward_pre_hook(widen)
        model.blocks[1].register_forward_hook(lambda module, args, output: output.float())
        model, optimizer = zeroshard.shard(
            model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), stage=stage
        )
        run(model, optimizer, steps=2)
        state = zeroshard.full_state_dict(model)
        assert state["blocks.1.up.weight"].dtype is torch.bfloat16
        assert state["blocks.2.up.weight"].dtype is torch.float32


@on_ranks(2)
def test_casting_on_gather_saves_the_16_bit_shard_and_changes_no_bit() -> None:
    plain = build(stage=3, precision="bf16", clip_grad_norm=1.0)
    losses = run(*plain)
    lean = build(stage=3, precision=Precision(parameters=torch.bfloat16, cast_on_gather=True), clip_grad_norm=1.0)
    assert run(*lean) == losses
    theirs = zeroshard.full_state_dict(plain[0])
    assert all(torch.equal(value, theirs[name]) for name, value in zeroshard.full_state_dict(lean[0]).items())
    stats = zeroshard.stats(lean[0])
    assert stats.memory.parameters == 0
    before = zeroshard.stats(plain[0]).memory
    assert before.total - stats.memory.total == 2 * stats.padded_parameters / 2

    with zeroshard.gathered(lean[0], write=True), torch.no_grad():
        lean[0].last.bias.fill_(3.0)
    assert run(*lean, steps=1) != losses[:1]
    assert float(zeroshard.full_state_dict(lean[0])["last.bias"].mean()) == pytest.approx(3.0, abs=0.05)


def test_casting_on_gather_is_refused_where_it_has_no_effect() -> None:
    with pytest.raises(ValueError, match="no master to cast from"):
        Precision(cast_on_gather=True)
    model = net()
    with pytest.raises(ValueError, match=r"cast_on_gather=True has no effect in stage 2"):
        zeroshard.shard(
            model,
            torch.optim.SGD(model.parameters()),
            stage=2,
            precision=Precision(parameters=torch.bfloat16, cast_on_gather=True),
        )
