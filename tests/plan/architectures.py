"""Small models of many architectures of Hugging Face: the plan of each is compared with a dry run."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zeroshard.system import compat

HIDDEN = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 300}
MLP = HIDDEN | {"intermediate_size": 384}
GROUPED = MLP | {"num_key_value_heads": 2, "pad_token_id": 0}
HEADS = GROUPED | {"head_dim": 48}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
NO_DROPOUT = {
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout", "attention_dropout", "dropout"), 0.0),
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout_rate", "activation_dropout"), 0.0),
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 4, "n_embd": 128, "n_head": 4, "vocab_size": 300, "n_positions": 128},
    "gpt_neox": MLP,
    "bloom": {"hidden_size": 128, "n_layer": 4, "n_head": 4, "vocab_size": 300},
    "falcon": HIDDEN,
    "llama": HEADS,
    "mistral": HEADS,
    "qwen2": GROUPED,
    "qwen3": HEADS,
    "gemma": HEADS,
    "gemma3_text": HEADS | {"sliding_window": 32},
    "phi": MLP,
    "phi3": GROUPED,
    "olmo2": GROUPED,
    "cohere": GROUPED,
    "starcoder2": GROUPED,
    "granite": GROUPED,
    "glm4": HEADS,
    "smollm3": GROUPED,
    "mixtral": GROUPED | {"num_local_experts": 4},
    "qwen3_moe": HEADS | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "gpt_oss": HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": MLP
    | {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    | {"first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16}
    | {"qk_nope_head_dim": 16, "v_head_dim": 32, "num_key_value_heads": 4},
    "bert": MLP | {"max_position_embeddings": 128},
    "roberta": MLP | {"max_position_embeddings": 130},
    "t5": {"d_model": 128, "d_kv": 32, "d_ff": 384, "num_layers": 3, "num_heads": 4, "vocab_size": 300}
    | {"decoder_start_token_id": 0, "pad_token_id": 0},
    "vit": MLP | {"image_size": 32, "patch_size": 4},
}


def configuration(kind: str, **changes: Any) -> dict[str, Any]:
    """The content of a ``config.json``. Nothing drops out, because masks differ without a GPU."""
    return {"model_type": kind, **ENDS, **NO_DROPOUT, **ARCHITECTURES[kind], **changes}


class FusedAttention(TorchFunctionMode):
    """Attention as on a GPU, where the kernel saves no scores. Without one torch may choose another kernel."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            query, key, value = args[:3] if args else (kwargs[name] for name in ("query", "key", "value"))
            return FusedKernel.apply(query, key, value)
        if func is Tensor.backward:  # a mode is off inside what it handles, and recomputation needs it
            with self:
                return compat.run_backward(args[0])
        return func(*args, **(kwargs or {}))


class FusedKernel(torch.autograd.Function):
    """Saves queries, keys, values, the result and one number a row."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        batch, heads, rows, _ = query.shape
        result = query.new_empty(batch, rows, heads, value.shape[-1]).transpose(1, 2)
        ctx.save_for_backward(query, key, value, result, query.new_empty(batch, heads, rows, dtype=torch.float32))
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


def with_memory(model: nn.Module) -> nn.Module:
    """A copy of a model on the meta device whose tensors are on the CPU. Their values are not defined."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.empty(parameter.shape, dtype=parameter.dtype)
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.zeros(buffer.shape, dtype=buffer.dtype)
    return copy.deepcopy(model, memo)


def loss_of(model: Any, batch: int, sequence: int) -> Tensor:
    """One forward pass, of the kind that the plan traces."""
    if model.main_input_name == "pixel_values":
        inputs = {"pixel_values": torch.zeros(batch, 3, 32, 32), "labels": torch.zeros(batch, dtype=torch.long)}
    else:
        tokens = torch.zeros(batch, sequence, dtype=torch.long)
        inputs = {"input_ids": tokens, "labels": tokens}
    loss: Tensor = model(**inputs).loss
    return loss
