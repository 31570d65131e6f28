"""What the tests of Hugging Face's libraries share: ranks as torchrun starts them, a tiny model, and its data."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from tests import huggingface

LENGTH = 12


@contextmanager
def as_torchrun() -> Iterator[None]:
    """Sets the variables by which Accelerate finds its rank, and makes it forget the last test."""
    from accelerate.state import AcceleratorState, GradientState

    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    variables |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "OMP_NUM_THREADS": "1"}
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def llama(**more: Any) -> Any:
    """A Llama with the same random weights on every rank and in every test."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    settings = {
        "vocab_size": huggingface.VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "bos_token_id": 1,
        "eos_token_id": huggingface.END,
        "pad_token_id": 0,
    }
    return LlamaForCausalLM(LlamaConfig(**(settings | more)))


def with_lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def rows(number: int, seed: int = 5) -> list[dict[str, Any]]:
    """Rows of tokens that can be learnt: each token follows from the one before."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(3, huggingface.VOCABULARY - LENGTH, (number, 1), generator=generator)
    tokens = (first + torch.arange(LENGTH)).tolist()
    return [{"input_ids": row, "labels": row} for row in tokens]
