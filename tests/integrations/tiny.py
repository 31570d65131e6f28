"""A tiny model of Hugging Face, and data that it learns. Nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch

from tests import huggingface

LENGTH = 12


def llama(**more: Any) -> Any:
    """A Llama with the same random weights on every rank and in every test."""
    torch.manual_seed(3)
    return huggingface.llama(pad_token_id=0, **more)


def with_lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def rows(number: int, seed: int = 5) -> list[dict[str, Any]]:
    """Rows of tokens that can be learnt: each token follows from the one before."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(3, huggingface.VOCABULARY - LENGTH, (number, 1), generator=generator)
    tokens = (first + torch.arange(LENGTH)).tolist()
    return [{"input_ids": row, "labels": row} for row in tokens]
