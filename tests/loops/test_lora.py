"""LoRA through PEFT: a frozen base in bf16 with adapters in fp32, each with what it needs and nothing more."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zeroshard
from tests.comparison import assert_equal_states, assert_trains_as_ddp, run
from tests.huggingface import causal, gpt2, llama
from tests.matrix import Stages, in_stages, matrix
from tests.ranks import on_ranks
from tests.training import adamw
from zeroshard.config.layout import find_units
from zeroshard.system import machine

MODELS = {"llama": (llama, ["q_proj", "v_proj"]), "gpt2": (gpt2, ["c_attn"])}


def with_adapters(name: str, base_dtype: torch.dtype = torch.bfloat16) -> Any:
    from peft import LoraConfig, get_peft_model

    machine.ensure_bf16_matmul()  # DDP comes first here
    build, targets = MODELS[name]
    config = LoraConfig(r=4, target_modules=targets, lora_dropout=0.1, task_type="CAUSAL_LM", init_lora_weights=False)
    return get_peft_model(build().to(base_dtype), config).train()


def only_trained(parameters: Any) -> torch.optim.Optimizer:
    return adamw([parameter for parameter in parameters if parameter.requires_grad])


def loss_of(model: Any, step: int) -> Tensor:
    loss: Tensor = model(**causal(step)).loss
    return loss


@matrix(name=MODELS, make=(adamw, only_trained))
@on_ranks(2)
def test_fp32_adapters_on_a_frozen_bf16_base_train_as_under_ddp(name: str, make: Any) -> None:
    model = with_adapters(name)
    trained = {p.dtype for p in model.parameters() if p.requires_grad}
    frozen = {p.dtype for p in model.parameters() if not p.requires_grad}
    assert (trained, frozen) == ({torch.float32}, {torch.bfloat16})
    assert [unit.name.rsplit(".", 1)[-1] for unit in find_units(model)] == ["", "0", "1"]
    assert_trains_as_ddp(lambda: with_adapters(name), loss_of, make=make)


@on_ranks(2)
def test_adapters_train_as_under_ddp_with_checkpointing_where_the_input_needs_no_gradient() -> None:
    def build() -> Any:
        model = with_adapters("llama")
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        return model

    assert_trains_as_ddp(build, loss_of, ddp={"find_unused_parameters": False})  # DDP cannot do both


@in_stages
@on_ranks(2)
def test_the_frozen_base_is_sharded_and_costs_no_gradient_no_state_and_no_reduce(stages: Stages) -> None:
    for stage in stages:
        model = with_adapters("llama")
        adapters = padded(model, trained=True)
        base = padded(model, trained=False)
        model, optimizer = zeroshard.shard(model, adamw(model.parameters()), stage=stage)
        run(model, optimizer, loss_of, 3)
        stats = zeroshard.stats(model)
        memory = stats.memory_at_step
        assert memory is not None
        assert memory.parameters == (2 * base + 4 * adapters) // (2 if stage == 3 else 1), stage
        assert memory.gradients == 4 * adapters // (2 if stage >= 2 else 1), stage
        states = torch.tensor(memory.optimizer_states)
        dist.all_reduce(states)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert states == 8 * trained * (1 if stage >= 1 else 2), stage
        assert memory.accumulators == memory.gathered == 0, stage
        members = {id(p) for p in model.parameters() if p.requires_grad}
        assert len(optimizer.state_dict()["state"]) == len(members)
        assert all((p.grad is None) for p in model.parameters())
        if stage < 3:
            assert stats.volume_elements == 2 * adapters, stage
        else:
            reduced = stats.volume["reduce_scatter"].elements
            assert reduced == adapters
            assert stats.volume_elements <= 2 * (base + adapters) + adapters


def padded(model: Any, *, trained: bool) -> int:
    """Elements of the flats that hold the trained or the frozen parameters, as the layout pads them for two ranks."""
    from zeroshard.config.layout import divide_into_flats, flat_layout

    total = 0
    for unit in find_units(model):
        for members in divide_into_flats(unit.parameters, 1 << 30):
            if members[0][1].requires_grad is trained:
                total += flat_layout([(name, p.shape) for name, p in members], 2).numel
    return total


@in_stages
@on_ranks(2)
def test_the_base_alone_answers_while_adapters_are_disabled_in_the_middle_of_training(stages: Stages) -> None:
    torch.manual_seed(1)
    plain = with_adapters("llama").eval()
    ids = causal(5)["input_ids"]
    for stage in stages:
        torch.manual_seed(1)
        model = with_adapters("llama").eval()
        model, optimizer = zeroshard.shard(model, adamw(model.parameters()), stage=stage)
        loss_of(model, 0).backward()
        with torch.no_grad(), model.disable_adapter(), plain.disable_adapter():
            assert torch.equal(model(ids).logits, plain(ids).logits), stage
        optimizer.step()
        with torch.no_grad():
            assert not torch.equal(model(ids).logits, plain(ids).logits), stage


@in_stages
@on_ranks(2)
def test_adapters_are_saved_from_the_full_state_dict_and_merge_inside_gathered(stages: Stages) -> None:
    from peft import get_peft_model_state_dict

    for stage in stages:
        torch.manual_seed(1)
        model = with_adapters("llama")
        model, optimizer = zeroshard.shard(model, adamw(model.parameters()), stage=stage)
        run(model, optimizer, loss_of, 2)
        whole = zeroshard.full_state_dict(model)
        saved = get_peft_model_state_dict(model, state_dict=whole)
        assert saved
        assert all("lora_" in name for name in saved)

        torch.manual_seed(1)
        plain = with_adapters("llama")
        plain.load_state_dict(whole)
        model.eval()
        plain.eval()
        with zeroshard.gathered(model, write=True):
            model.merge_adapter()
        plain.merge_adapter()
        ids = causal(5)["input_ids"]
        with torch.no_grad():
            assert torch.equal(model(ids).logits, plain(ids).logits), stage
        assert_equal_states(zeroshard.full_state_dict(model), dict(plain.state_dict()), f"stage {stage}")


@on_ranks(1)
def test_adapters_without_values_are_refused_with_the_remedy_which_then_trains() -> None:
    import transformers
    from peft import LoraConfig, get_peft_model

    config = transformers.LlamaConfig(num_hidden_layers=2, hidden_size=32, intermediate_size=64, vocab_size=64)
    with tempfile.TemporaryDirectory() as folder:
        whole = transformers.AutoModelForCausalLM.from_config(config)
        whole.save_pretrained(folder)
        with torch.device("meta"):
            base = transformers.AutoModelForCausalLM.from_config(config)
        model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"]))
        with pytest.raises(ValueError, match=r"adapters that PEFT made on the meta device .* reset_lora_parameters"):
            zeroshard.shard(model, only_trained(model.parameters()), stage=3, weights=folder)
        for module in model.modules():
            for adapter, down in getattr(module, "lora_A", {}).items():
                down.to_empty(device="cpu")
                module.lora_B[adapter].to_empty(device="cpu")
                module.reset_lora_parameters(adapter, True)
        model, _ = zeroshard.shard(model, only_trained(model.parameters()), stage=3, weights=folder)
        tokens = torch.arange(8)[None]
        assert torch.equal(model(tokens).logits, whole(tokens).logits), "a new adapter changes nothing"
