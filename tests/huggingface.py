"""Tiny Hugging Face models from their configurations: random weights, nothing is downloaded.

``transformers`` takes seconds to import, so only the functions that build a model do it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

os.environ["HF_HUB_OFFLINE"] = "1"

VOCABULARY = 100
END = 2


class Case(NamedTuple):
    """A model, the units that are expected in it, and how a batch of a step is made."""

    build: Callable[[], Any]
    units: list[str]
    batch: Callable[[int], dict[str, Tensor]]


@contextmanager
def under_torchrun() -> Iterator[None]:
    """Inside, Accelerate finds the environment of torchrun. Afterwards it forgets all it knew.

    Ranks of tests that have a GPU share one.
    """
    from accelerate.state import AcceleratorState, GradientState

    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # not looked up: the process group is there already
    environment = {
        "RANK": rank,
        "LOCAL_RANK": "0" if dist.get_backend() == "nccl" else rank,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        **address,
    }
    with mock.patch.dict(os.environ, environment):
        try:
            yield
        finally:
            AcceleratorState._reset_state(True)
            GradientState._reset_state()


def tokens(step: int, rows: int = 3, length: int = 9) -> Tensor:
    """Other tokens for every step and rank; none of the first three, which have a meaning."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randint(3, VOCABULARY, (rows, length), generator=generator)


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=END
        )
    ).train()


def llama(**more: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**(_decoder() | more))).train()


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(**_decoder(), num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)
    ).train()


def bert() -> Any:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**_sizes(), vocab_size=VOCABULARY, max_position_embeddings=32)).train()


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
            pad_token_id=0,
            eos_token_id=END,
        )
    ).train()


def vit() -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(**_sizes(), image_size=16, patch_size=4, num_labels=5)).train()


def causal(step: int) -> dict[str, Tensor]:
    return {"input_ids": tokens(step), "labels": tokens(step)}


def sequence_to_sequence(step: int) -> dict[str, Tensor]:
    return {"input_ids": tokens(step), "labels": tokens(step + 500, length=5)}


def images(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return {
        "pixel_values": torch.randn(3, 3, 16, 16, generator=generator),
        "labels": torch.randint(5, (3,), generator=generator),
    }


CASES = {
    "gpt2": Case(gpt2, ["transformer.h.0", "transformer.h.1"], causal),
    "llama": Case(llama, ["model.layers.0", "model.layers.1"], causal),
    "mixtral": Case(mixtral, ["model.layers.0", "model.layers.1"], causal),
    "bert": Case(bert, ["bert.encoder.layer.0", "bert.encoder.layer.1"], causal),
    "t5": Case(t5, ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"], sequence_to_sequence),
    "vit": Case(vit, ["vit.layers.0", "vit.layers.1"], images),
}


def _sizes() -> dict[str, int]:
    return {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def _decoder() -> dict[str, int]:
    more = {"num_key_value_heads": 2, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": END}
    return {**_sizes(), **more, "vocab_size": VOCABULARY}
