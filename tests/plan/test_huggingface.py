"""The plan of a Hugging Face configuration has the memory of the model: saved for backward, and at the peak."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.activations import ACT2FN
from zeroshard.plan.model.activations import transformer_activations

import zeroshard
from tests.matrix import quick
from zeroshard.plan.dryrun import dry_run
from zeroshard.plan.memory.budget import WORKSPACE, budget
from zeroshard.plan.model.huggingface import ACTIVATIONS, HUGGINGFACE
from zeroshard.plan.model.source import describe
from zeroshard.plan.setup import Activation, Habits, Setup, Transformer
from zeroshard.system import compat

HIDDEN = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 300}
LLAMA = HIDDEN | {"num_key_value_heads": 2, "head_dim": 48, "intermediate_size": 384}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 4, "n_embd": 128, "n_head": 4, "vocab_size": 300, "n_positions": 128},
    "gpt_neox": HIDDEN | {"intermediate_size": 512, "hidden_dropout": 0.1, "attention_dropout": 0.1},
    "opt": HIDDEN | {"word_embed_proj_dim": 128, "ffn_dim": 512, "max_position_embeddings": 128},
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
}
BATCH, SEQUENCE = 2, 64
BF16 = torch.bfloat16


def built(kind: str, **options: Any) -> Any:
    config = transformers.AutoConfig.for_model(kind, **{**FAMILIES[kind], **options})
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def shape(kind: str, **options: Any) -> Transformer:
    with torch.device("meta"):
        found = describe(built(kind, **options))
    assert found is not None
    return found


class AsOnAGPU(TorchFunctionMode):
    """Dropout as on a GPU: the fused kernel saves a mask of bytes. Dropout in attention, which saves a seed, is off."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            p, training = (kwargs.get("p", 0.5), kwargs.get("training", True)) if len(args) < 3 else args[1:3]
            return torch.native_dropout(args[0], p, train=True)[0] if training and p else args[0]
        if func is F.scaled_dot_product_attention:
            kwargs = {**kwargs, "dropout_p": 0.0}
        return func(*args, **kwargs)


def saved_for_backward(model: nn.Module, run: Callable[[], object]) -> int:
    """Bytes of the storages that autograd saves in a forward pass, without parameters and buffers."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    storages: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage  # stays alive, so that no other storage gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    assert result is not None
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("training", [False, True], ids=["without dropout", "with dropout"])
@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_forward_saves_as_many_bytes_as_planned(kind: str, use_cache: bool, training: bool) -> None:
    off = {} if training else {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "hidden_dropout": 0.0, "dropout": 0.0}
    options = {"use_cache": use_cache, **off}
    model = built(kind, **options).to(BF16).train(training)
    tokens = torch.randint(300, (BATCH, SEQUENCE))
    with AsOnAGPU():
        saved = saved_for_backward(model, lambda: model(tokens, labels=tokens).loss)
    setup = Setup(stage=0, batch=BATCH, sequence=SEQUENCE, checkpointing=False)
    assert transformer_activations(shape(kind, **options), setup).saved == pytest.approx(saved, rel=0.02)


@pytest.mark.parametrize("checkpointing", [True, False], ids=["recomputed", "all saved"])
@pytest.mark.parametrize("kind", quick(FAMILIES, "gpt2", "llama"))
def test_the_peak_is_that_of_a_run_without_values(
    kind: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout is off, because it saves other masks without a GPU. The search for packed sequences needs values."""
    monkeypatch.setattr(transformers.masking_utils, "find_packed_sequence_indices", lambda *_, **__: None)
    batch, sequence = 8, 128
    activations = zeroshard.Activations() if checkpointing else None

    def loss(model: nn.Module) -> Tensor:
        tokens = torch.zeros(batch, sequence, dtype=torch.long)
        result: Tensor = model(tokens, labels=tokens).loss
        return result

    seen = dry_run(
        lambda: built(kind, use_cache=not checkpointing).eval(),
        lambda model: torch.optim.AdamW(model.parameters(), foreach=True),
        loss,
        world=8,
        real=False,
        stage=2,
        precision="bf16",
        activations=activations,
    )
    setup = Setup(
        stage=2, world=8, batch=batch, sequence=sequence, checkpointing=checkpointing, activations=activations
    )
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "hidden_dropout": 0.0, "dropout": 0.0}
    needs = budget(shape(kind, use_cache=not checkpointing, **off), setup)
    assert needs.peak.total - WORKSPACE == pytest.approx(seen.peak, rel=0.02), needs.phase


def test_every_family_is_measured() -> None:
    assert {*FAMILIES, "qwen"} == set(HUGGINGFACE), "the first Qwen is not in transformers"


# -- activations ------------------------------------------------------------------------------------------------------

TOKENS, WIDTH = 4, 1 << 12


class Feed(nn.Module):
    """An MLP whose hidden tensors are far larger than all others."""

    def __init__(self, name: str, gated: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, WIDTH, bias=False), nn.Linear(WIDTH, 8, bias=False)
        self.gate = nn.Linear(8, WIDTH, bias=False) if gated else None
        self.activation = ACT2FN[name]

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is not None:
            return self.down(self.activation(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]
        x = self.up(x)
        x = self.activation(x)
        return self.down(x)  # type: ignore[no-any-return]


class Wide(compat.OperationWatch):
    """Counts tensors of the MLP's width: all that are made, and the maximum that is alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive: set[int] = set()
        self.made = self.most = 0

    def see(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            key = compat.storage_key(tensor)
            if tensor.untyped_storage().nbytes() == 4 * TOKENS * WIDTH and key not in self.alive:
                self.alive.add(key)
                self.made += 1
                weakref.finalize(tensor.untyped_storage(), self.alive.discard, key)
        self.most = max(self.most, len(self.alive))


def measured(name: str, gated: bool) -> Iterator[int]:
    """The fields of ``Activation``, measured, in their order."""
    feed, x = Feed(name, gated), torch.randn(TOKENS, 8, requires_grad=True)
    saved = saved_for_backward(feed, lambda: feed(x)) // (4 * TOKENS * WIDTH)
    yield saved
    with torch.no_grad(), Wide() as forward:
        feed(x)
    yield forward.most
    with Wide() as backward:
        loss = feed(x).sum()
        backward.most = 0
        loss.backward()
    yield backward.most - saved
    yield forward.made - 1  # without the output of the first matrix


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_saves_and_writes_as_many_tensors_as_planned(name: str, gated: bool) -> None:
    habits = Habits(activation=ACTIVATIONS[name])
    model = Transformer(layers=1, hidden=64, heads=1, vocabulary=300, gated=gated, habits=habits)
    assert model.activation == Activation(*measured(name, gated))
