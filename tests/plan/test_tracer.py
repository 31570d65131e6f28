"""Tracing any module on the meta device: the activations that it saves and has alive."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from tests.matrix import matrix
from tests.plan.architectures import FusedAttention
from tests.plan.gpts import gpt
from tests.plan.traces import trace
from zeroshard.config.job import ModelConfig
from zeroshard.config.options import Activations
from zeroshard.plan.machine.profile import load
from zeroshard.plan.model.trace import Trace
from zeroshard.plan.papers.shape import Transformer
from zeroshard.plan.setup import Setup
from zeroshard.plan.time.step_time import step_time
from zeroshard.plan.volume import volume
from zeroshard.system import compat
from zeroshard.train.gpt import GPT

SHAPE = {"layers": 4, "hidden": 256, "heads": 4, "sequence": 128, "vocabulary": 3000}
STREAM = 4 * 128 * 256 * 2
"""Bytes of what one block gives to the next, in a batch of 4."""


def small(**changes: Any) -> Callable[[], nn.Module]:
    """Builds a GPT."""
    return lambda: GPT(ModelConfig(**{**SHAPE, **changes}))


def saved_by_autograd(model: nn.Module, *inputs: Tensor) -> int:
    """Bytes of all storages that torch saves for backward, except parameters, buffers and inputs."""
    own = {compat.storage_key(tensor) for tensor in (*model.parameters(), *model.buffers(), *inputs)}
    sizes: dict[int, int] = {}
    kept = []

    def pack(tensor: Tensor) -> Tensor:
        if compat.storage_key(tensor) not in own:
            sizes[compat.storage_key(tensor)] = tensor.untyped_storage().nbytes()
            kept.append(tensor)  # so that no other storage gets its place
        return tensor

    with FusedAttention(), saved_tensors_hooks(pack, lambda tensor: tensor):
        model(*inputs)
    return sum(sizes.values())


class Convolutions(nn.Sequential):
    """Layers of many kinds, without attention."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.Flatten(), nn.Linear(8 * 36, 64), nn.LayerNorm(64)
        )


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_trace_finds_saved_what_autograd_saves(precision: str, tied: bool) -> None:
    with torch.device("meta"):
        model = small(tied=tied)().to({"bf16": torch.bfloat16, "fp32": torch.float32}[precision])
        tokens = torch.zeros(4, 128, dtype=torch.long)
    expected = saved_by_autograd(model, tokens, tokens)
    seen = trace(small(tied=tied), None, precision, batch=4, sequence=128)
    assert seen.activations.saved == pytest.approx(expected, rel=1e-3)
    assert seen.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_a_trace_of_layers_of_many_kinds_finds_saved_what_autograd_saves() -> None:
    with torch.device("meta"):
        model, images = Convolutions(), torch.empty(5, 3, 8, 8)
    expected = saved_by_autograd(model, images)
    seen = trace(Convolutions, (images,), "fp32")
    result = 4 * 5 * 64  # nothing of the result is saved, but it is alive
    assert seen.activations.saved == pytest.approx(expected + result, rel=1e-3)


def test_a_block_that_is_recomputed_has_its_tensors_alive_one_block_at_a_time() -> None:
    plain, recomputed = (
        trace(small(checkpointing=checkpointing), None, batch=4, sequence=128).activations
        for checkpointing in (False, True)
    )
    one_block = (plain.saved - recomputed.saved) / 4 + STREAM
    after = recomputed.after_backward[1:]
    assert [later - first for first, later in pairwise(after)] == [STREAM] * 3
    assert recomputed.backward[1] > recomputed.after_backward[1] + one_block
    assert recomputed.backward[1] < recomputed.after_backward[1] + 1.5 * one_block


def test_buffers_count_and_inputs_may_be_anything() -> None:
    images = torch.empty(5, 3, 8, 8, device="meta")
    seen = trace(Convolutions, (images,), "fp32")
    model = Convolutions()
    assert seen.buffers == sum(buffer.nbytes for buffer in model.buffers())
    assert seen.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_attention_saves_no_scores() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.project(x)
            return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)

    saved = [trace(Attention, (torch.empty(1, 1, rows, 64, device="meta"),)).activations.saved for rows in (512, 1024)]
    assert saved[1] == pytest.approx(2 * saved[0], rel=0.01)


@pytest.mark.parametrize("mask", [False, True])
def test_attention_in_a_layer_of_torch_saves_no_scores_either(mask: bool) -> None:
    def build() -> nn.Module:
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True), 2)

    def seen(rows: int) -> Trace:
        inputs = {"src": torch.empty(2, rows, 64, device="meta")}
        if mask:
            inputs["mask"] = torch.zeros(rows, rows)  # the layer reads whether the mask is causal
        return trace(build, inputs)

    short, long = seen(512), seen(1024)
    masks = 2 * (1024 * 1024 - 2 * 512 * 512) if mask else 0  # bytes
    assert long.activations.saved - masks == pytest.approx(2 * short.activations.saved, rel=0.01)
    assert sum(long.forward_flops) - 2 * sum(short.forward_flops) == 2 * 4 * 2 * 64 * (1024**2 - 2 * 512**2)


def test_attention_that_returns_its_weights_saves_them() -> None:
    x = torch.empty(2, 512, 64, device="meta")
    seen = trace(lambda: nn.MultiheadAttention(64, 4, batch_first=True), (x, x, x))
    assert seen.activations.saved > 2 * 2 * 4 * 512 * 512


@pytest.mark.parametrize("tied", [False, True])
def test_blocks_recomputed_by_shard_save_as_much_as_blocks_that_recompute_themselves(tied: bool) -> None:
    expected = trace(small(tied=tied, checkpointing=True), None, batch=4, sequence=128)
    seen = trace(small(tied=tied), None, batch=4, sequence=128, activations=Activations())
    assert seen.activations == expected.activations
    assert seen.backward_ratio == expected.backward_ratio
    assert seen.recomputes
    assert expected.recomputes
    assert seen.checkpoints == 4 * STREAM
    again = trace(small(tied=tied), None, batch=4, sequence=128)
    assert not again.recomputes
    assert again.activations.saved > 2 * seen.activations.saved


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_checkpoints_on_the_host_are_on_the_device_only_while_they_leave_and_from_their_prefetch_on(
    prefetch: int,
) -> None:
    build, options = small(layers=6, vocabulary=300), Activations(offload=True, prefetch=prefetch)
    there = trace(build, None, batch=4, sequence=128, activations=Activations())
    away = trace(build, None, batch=4, sequence=128, activations=options)
    assert there.activations.host == 0
    assert away.activations.host == 6 * STREAM
    assert away.checkpoints == 6 * STREAM
    moved = volume(away, Setup(stage=0, batch=4, sequence=128, activations=options))
    assert moved.checkpoints_to_host == moved.checkpoints_to_device == 6 * STREAM
    leaving = 2 * STREAM  # two checkpoints are being copied to the host
    assert away.activations.saved == there.activations.saved - 6 * STREAM + leaving
    backward = zip(there.activations.backward[1:], away.activations.backward[1:], strict=True)
    less = [(whole - part) / STREAM for whole, part in backward]
    # The n-th block has n checkpoints that are needed no earlier than its own. Its own and those ahead are back.
    assert less[:5] == pytest.approx([max(0, number - 1 - prefetch) for number in range(1, 6)], abs=0.01)


@matrix(stage=(0, 2, 3), checkpointing=(False, True))
def test_times_of_a_traced_gpt_are_close_to_those_of_the_papers_shape(stage: int, checkpointing: bool) -> None:
    model = gpt(12, 768, 12, 50304)
    paper = Transformer(layers=12, hidden=768, heads=12, vocabulary=50304, positions=1024)
    setup = Setup(stage=stage, world=8, batch=8, checkpointing=checkpointing)
    work, machine = model.trace(setup).work, load("h200")
    assert work is not None
    # Recomputation ends before the last product of a block. The paper counts a whole forward.
    assert work.backward == pytest.approx(3 - 8 / (24 + 4 * 1024 / 768) if checkpointing else 2, rel=0.01)
    expected = paper.work(setup)
    assert work.forward == pytest.approx(expected.forward, rel=0.01)
    assert work.trained == pytest.approx(expected.trained, rel=0.01)
    assert (work.logits, work.stream) == (expected.logits, expected.stream)
    assert step_time(work, setup, machine).total == pytest.approx(step_time(expected, setup, machine).total, rel=0.15)


def test_a_model_that_returns_no_loss_is_traced_with_the_mean_of_its_outputs() -> None:
    class Both(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            result = super().forward(x)
            return {"result": result, "twice": [2 * result], "input": x}

    seen = trace(lambda: Both(8, 8), (torch.empty(4, 8, device="meta"),), "fp32")
    assert sum(seen.forward_flops) == 2 * 4 * 8 * 8
    assert seen.activations.after_backward[0] <= seen.activations.saved


def test_a_model_whose_outputs_do_not_depend_on_its_parameters_is_refused() -> None:
    class Constant(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x.detach()

    with pytest.raises(ValueError, match="no output of it depends on its parameters"):
        trace(lambda: Constant(8, 8), (torch.empty(4, 8, device="meta"),))


def test_the_hooks_of_a_trace_are_gone_after_it() -> None:
    made = []

    def build() -> nn.Module:
        made.append(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))))
        return made[-1]

    trace(build, (torch.empty(4, 8, device="meta"),), activations=Activations())
    for module in made[-1].modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
        assert "forward" not in vars(module)
    assert all(not parameter._post_accumulate_grad_hooks for parameter in made[-1].parameters())


def test_attention_with_few_key_heads_counts_although_torch_refuses_to_count_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Watch(compat.OperationWatch):
        def see(self, tensors: list[torch.Tensor]) -> None:
            pass

    def strict(query: torch.Tensor, key: torch.Tensor, *_: object, out_val: object, **__: object) -> float:
        assert query.shape[1] == key.shape[1], "as the formula of torch 2.11 has it"
        return float(query.numel() * key.shape[2])

    attention = torch.ops.aten._scaled_dot_product_flash_attention
    monkeypatch.setitem(compat.flop_registry, attention, strict)
    query, key = torch.empty(2, 8, 16, 32, device="meta"), torch.empty(2, 2, 16, 32, device="meta")
    with Watch() as watch:  # type: ignore[no-untyped-call]
        attention(query, key, key)
    assert watch.flops == 2 * 8 * 16 * 32 * 16
