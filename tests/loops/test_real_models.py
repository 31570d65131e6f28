"""Hugging Face models, unchanged: each trains in every stage as under DDP, and generates in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zeroshard
from tests.comparison import assert_equal_states, assert_trains_as_ddp, run, trained_with_ddp
from tests.huggingface import CASES, END, Case, tokens
from tests.matrix import Stages, in_stages, quick
from tests.ranks import on_ranks
from tests.training import STAGES, adamw
from zeroshard.config.layout import find_units


def loss_of(case: Case) -> Any:
    return lambda model, step: model(**case.batch(step)).loss


@pytest.mark.parametrize("name", quick(CASES, "llama", "t5"))
@on_ranks(2)
def test_a_hugging_face_model_trains_as_under_ddp(name: str) -> None:
    case = CASES[name]
    assert [unit.name for unit in find_units(case.build())] == ["", *case.units]
    assert_trains_as_ddp(case.build, loss_of(case))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "t5"])
@on_ranks(2)
def test_gradient_checkpointing_of_a_hugging_face_model_changes_nothing(name: str) -> None:
    case = CASES[name]

    def build() -> Any:
        model = case.build()
        model.gradient_checkpointing_enable()
        return model

    assert_trains_as_ddp(build, loss_of(case))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@on_ranks(2)
def test_hugging_face_outputs_survive_16_bit_precision_and_stages_agree(precision: str) -> None:
    case = CASES["gpt2"]
    plain, _ = trained_with_ddp(case.build, loss_of(case), steps=2)
    states = []
    for stage in STAGES:
        torch.manual_seed(1)
        model = case.build()
        model, optimizer = zeroshard.shard(model, adamw(model.parameters()), stage=stage, precision=precision)
        losses = run(model, optimizer, loss_of(case), 2)
        assert losses == pytest.approx(plain, rel=0.02)
        states.append(zeroshard.full_state_dict(model))
        assert_equal_states(states[-1], states[0], f"stage {stage}")
    output = model(**case.batch(0))
    assert type(output).__name__ == "CausalLMOutputWithCrossAttentions"
    assert output["loss"] is output.loss is output[0]


def generated(model: Any, **options: Any) -> Tensor:
    """Greedy generation; ranks have prompts of other lengths, and end after other numbers of tokens."""
    was_training = model.training
    model.eval()
    rank = dist.get_rank()
    prompt = tokens(77, rows=2, length=4 + rank)
    found: Tensor = model.generate(prompt, do_sample=False, max_new_tokens=6 + 5 * rank, pad_token_id=END, **options)
    model.train(was_training)
    return found


@in_stages
@pytest.mark.parametrize("name", quick(["gpt2", "llama", "t5"], "llama"))
@on_ranks(2)
def test_generation_between_steps_and_amid_accumulation_gives_the_plain_models_tokens(
    stages: Stages, name: str
) -> None:
    case = CASES[name]
    torch.manual_seed(1)
    plain = case.build()
    for stage in stages:
        torch.manual_seed(1)
        model = case.build()
        model, optimizer = zeroshard.shard(model, adamw(model.parameters()), stage=stage)
        torch.manual_seed(100)
        for step in range(2):
            for micro_batch in range(2):
                before = zeroshard.full_state_dict(model)
                plain.load_state_dict(before)
                rng = torch.get_rng_state()
                ours = generated(model, synced_gpus=stage == 3)
                assert torch.equal(ours, generated(plain)), f"stage {stage}, step {step}, {micro_batch}"
                torch.set_rng_state(rng)
                (model(**case.batch(2 * step + micro_batch)).loss / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        final = zeroshard.full_state_dict(model)
        if stage == stages[0]:
            expected = final
        assert_equal_states(final, expected, f"stage {stage}")
    assert_equal_states(expected, _accumulated_without_generation(case), "ddp", exact=False)


def _accumulated_without_generation(case: Case) -> dict[str, Tensor]:
    torch.manual_seed(1)
    model = case.build()
    ddp = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = adamw(model.parameters())
    torch.manual_seed(100)
    for step in range(2):
        for micro_batch in range(2):
            (ddp(**case.batch(2 * step + micro_batch)).loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())
