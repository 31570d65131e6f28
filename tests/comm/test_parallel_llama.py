"""A Hugging Face Llama with PyTorch's tensor parallelism trains the same as one rank, in every stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zeroshard
from tests.huggingface import VOCABULARY, llama
from tests.ranks import on_ranks
from tests.training import STAGES

PLAN = {
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    "model.layers.*.self_attn.q_proj": ColwiseParallel(),
    "model.layers.*.self_attn.k_proj": ColwiseParallel(),
    "model.layers.*.self_attn.v_proj": ColwiseParallel(),
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    "model.layers.*.mlp.gate_proj": ColwiseParallel(),
    "model.layers.*.mlp.up_proj": ColwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
    "lm_head": ColwiseParallel(output_layouts=Replicate()),
}


def batch(step: int, index: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(1000 * step + index))
    return {"input_ids": tokens, "labels": tokens}


def momentum(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.slow
@on_ranks(4)
def test_a_llama_on_two_by_two_ranks_trains_as_on_one() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    index = mesh["dp"].get_local_rank()
    torch.manual_seed(3)
    alone = llama()
    optimizer = momentum(alone)
    losses: list[list[float]] = [[], []]
    for step in range(3):
        for other in range(2):
            loss = alone(**batch(step, other)).loss
            (loss / 2).backward()
            losses[other].append(loss.item())
        norm = float(torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.7))
        optimizer.step()
        optimizer.zero_grad()
    for stage in STAGES:
        torch.manual_seed(3)
        model = llama()
        parallelize_module(model, mesh["tp"], PLAN)
        assert isinstance(model.model.layers[0].self_attn.q_proj.weight, DTensor)
        model, sharded = zeroshard.shard(model, momentum(model), stage=stage, mesh=mesh["dp"], clip_grad_norm=0.7)
        ours = []
        for step in range(3):
            loss = model(**batch(step, index)).loss
            loss.backward()
            sharded.step()
            sharded.zero_grad()
            ours.append(loss.item())
        torch.testing.assert_close(ours, losses[index], rtol=1e-5, atol=1e-6, msg=f"stage {stage}: {ours} {losses}")
        assert zeroshard.stats(model).grad_norm == pytest.approx(norm, rel=1e-5)
        for name, value in zeroshard.full_state_dict(model).items():
            torch.testing.assert_close(value, alone.state_dict()[name], rtol=1e-4, atol=1e-6)


@on_ranks(2)
def test_a_llamas_layers_are_recomputed_from_divided_checkpoints() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    results = []
    for activations in (None, zeroshard.Activations(partition=True)):
        torch.manual_seed(3)
        model = llama()
        model.config.use_cache = False
        parallelize_module(model, mesh["tp"], PLAN)
        model, optimizer = zeroshard.shard(model, momentum(model), stage=3, activations=activations)
        losses = []
        for step in range(2):
            loss = model(**batch(step, 0)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        results.append((losses, zeroshard.full_state_dict(model)))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(value, results[1][1][name]) for name, value in results[0][1].items())
    moved = zeroshard.stats(model).volume_model["all_gather"]
    assert (moved.calls, moved.elements) == (2, 2 * 3 * 9 * 32 + 2 * (-(3 * 9 * 32) % 128))  # padded to whole parts
    model.config.use_cache = True
    with pytest.raises(RuntimeError, match="would write to its key-value cache twice"):
        model(**batch(0, 0))
