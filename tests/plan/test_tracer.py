"""Tracing any module on the meta device: the activations that it saves and has alive."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from zeroshard.plan.model.activations import transformer_activations

from tests.matrix import matrix
from zeroshard.config.job import ModelConfig
from zeroshard.config.options import Activations
from zeroshard.plan.machine.profile import load
from zeroshard.plan.model.gpt import from_config
from zeroshard.plan.model.trace import ModuleTrace
from zeroshard.plan.model.tracer import trace
from zeroshard.plan.model.units import transformer_units
from zeroshard.plan.setup import Setup
from zeroshard.plan.time.step_time import step_time
from zeroshard.plan.time.unit_costs import work_of
from zeroshard.plan.volume import volume
from zeroshard.system import compat
from zeroshard.train.gpt import GPT


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_a_traced_gpt_is_the_transformer_of_its_shape(precision: str, checkpointing: bool, tied: bool) -> None:
    config = ModelConfig(
        layers=4, hidden=256, heads=4, sequence=128, vocabulary=3000, tied=tied, checkpointing=checkpointing
    )
    with torch.device("meta"):
        model = GPT(config)
    seen = trace(model, None, precision, batch=4, sequence=128, max_unit_bytes=1 << 30)
    setup = Setup(stage=0, batch=4, sequence=128, precision=precision, checkpointing=checkpointing)  # type: ignore[arg-type]
    shape = from_config(config)
    planned = transformer_activations(shape, setup)
    assert seen.parameters == shape.parameters
    assert seen.units == transformer_units(shape, setup)
    assert planned.saved == pytest.approx(seen.activations.saved, rel=0.01)
    assert planned.loss == pytest.approx(seen.activations.loss, rel=0.01)
    assert planned.forward[1:] == pytest.approx(seen.activations.forward[1:], rel=0.02)
    weight = setup.width * 4 * 256 * 256  # a trace sees its gradient for a moment; the plan counts it with gradients
    assert [size + weight for size in planned.backward[1:]] == pytest.approx(seen.activations.backward[1:], rel=0.02)
    assert planned.after_backward[1:] == pytest.approx(seen.activations.after_backward[1:], rel=0.02)


def test_buffers_count_and_inputs_may_be_anything() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
    images = torch.empty(5, 3, 8, 8, device="meta")
    seen = trace(model, (images,), "fp32", batch=5, sequence=1, max_unit_bytes=1 << 30)
    assert seen.buffers == sum(buffer.nbytes for buffer in model.buffers())
    assert seen.activations.saved >= 4 * 5 * 8 * 36
    assert seen.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_attention_saves_no_scores() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.project(x)
            return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)

    with torch.device("meta"):
        model = Attention()
    saved = [
        trace(model, (torch.empty(1, 1, rows, 64, device="meta"),), "bf16", 1, rows, 1 << 30).activations.saved
        for rows in (512, 1024)
    ]
    assert saved[1] == pytest.approx(2 * saved[0], rel=0.01)


@pytest.mark.parametrize("mask", [False, True])
def test_attention_in_a_layer_of_torch_saves_no_scores_either(mask: bool) -> None:
    with torch.device("meta"):
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True), 2)

    def seen(rows: int) -> ModuleTrace:
        inputs = {"src": torch.empty(2, rows, 64, device="meta")}
        if mask:
            inputs["mask"] = torch.zeros(rows, rows)  # the layer reads whether the mask is causal
        return trace(model.train(), inputs, "bf16", 2, rows, 1 << 30)

    short, long = seen(512), seen(1024)
    masks = 2 * (1024 * 1024 - 2 * 512 * 512) if mask else 0  # bytes
    assert long.activations.saved - masks == pytest.approx(2 * short.activations.saved, rel=0.01)
    assert sum(long.forward_flops) - 2 * sum(short.forward_flops) == 2 * 4 * 2 * 64 * (1024**2 - 2 * 512**2)


def test_attention_that_returns_its_weights_saves_them() -> None:
    with torch.device("meta"):
        model, x = nn.MultiheadAttention(64, 4, batch_first=True), torch.empty(2, 512, 64)
    assert trace(model, (x, x, x), "bf16", 2, 512, 1 << 30).activations.saved > 2 * 2 * 4 * 512 * 512


@pytest.mark.parametrize("tied", [False, True])
def test_blocks_recomputed_by_shard_save_as_much_as_blocks_that_recompute_themselves(tied: bool) -> None:
    shape = {"layers": 4, "hidden": 256, "heads": 4, "sequence": 128, "vocabulary": 3000, "tied": tied}
    with torch.device("meta"):
        themselves, model = GPT(ModelConfig(**shape, checkpointing=True)), GPT(ModelConfig(**shape))  # type: ignore[arg-type]
    expected = trace(themselves, None, "bf16", 4, 128, 1 << 30)
    seen = trace(model, None, "bf16", 4, 128, 1 << 30, activations=Activations())
    assert seen.activations == expected.activations
    assert seen.backward_flops == expected.backward_flops
    assert seen.recomputes
    assert expected.recomputes
    assert seen.checkpoints == 4 * 4 * 128 * 256 * 2
    again = trace(model, None, "bf16", 4, 128, 1 << 30)
    assert not again.recomputes
    assert again.activations.saved > 2 * seen.activations.saved


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_checkpoints_on_the_host_of_a_traced_gpt_are_those_of_its_description(prefetch: int) -> None:
    config = ModelConfig(layers=6, hidden=256, heads=4, sequence=128, vocabulary=300)
    with torch.device("meta"):
        model = GPT(config)
    options = Activations(offload=True, prefetch=prefetch)
    seen = trace(model, None, "bf16", 4, 128, 1 << 30, activations=options)
    setup = Setup(stage=0, batch=4, sequence=128, activations=options)
    shape = from_config(config)
    planned = transformer_activations(shape, setup)
    assert seen.activations.host == planned.host
    leaving = 2 * 2 * 4 * 128 * 256  # bytes of the two checkpoints that are being copied to the host
    assert seen.activations.saved == pytest.approx(planned.saved + leaving, rel=0.02)
    assert seen.activations.forward[3:] == pytest.approx(planned.forward[3:], rel=0.05)
    weight = 2 * 4 * 256 * 256
    assert seen.activations.backward[3:] == pytest.approx([size + weight for size in planned.backward[3:]], rel=0.05)
    assert volume(seen, setup) == volume(shape, setup)
    work, machine = seen.work, load("h200")
    assert work is not None
    slow = replace(machine, pcie=replace(machine.pcie, down=1e6, up=1e6))
    assert step_time(work, setup, slow).total == pytest.approx(step_time(shape, setup, slow).total, rel=0.01)


@matrix(stage=(0, 2, 3), checkpointing=(False, True))
def test_times_of_a_traced_module_are_those_of_its_description(stage: int, checkpointing: bool) -> None:
    shape = ModelConfig(layers=12, hidden=768, heads=12, sequence=1024, vocabulary=50304, checkpointing=checkpointing)
    with torch.device("meta"):
        work = trace(GPT(shape), None, "bf16", 8, 1024, 1 << 30).work
    assert work is not None
    setup = Setup(stage=stage, world=8, batch=8, checkpointing=checkpointing)
    described, machine = from_config(shape), load("h200")
    # Recomputation ends before the last product of a block. The description does not know this.
    assert work.backward == pytest.approx(3 - 8 / (24 + 4 * 1024 / 768) if checkpointing else 2, rel=0.01)
    assert work.forward == pytest.approx(work_of(described, setup).forward, rel=0.01)
    assert step_time(work, setup, machine).total == pytest.approx(step_time(described, setup, machine).total, rel=0.15)


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
