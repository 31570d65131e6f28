"""Reading masks and positions in the trace of a module without values."""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.plan.traces import trace
from zeroshard.plan.model.known_values import MOST_ELEMENTS, KnownValues
from zeroshard.system import compat

os.environ["HF_HUB_OFFLINE"] = "1"
META = torch.device("meta")


@pytest.mark.parametrize(
    "look",
    [
        lambda ones: ones.all(),
        lambda ones: ones.cumsum(-1).max() - 4,
        lambda ones: (torch.arange(8, device=ones.device).view(2, 4).t()[1:, 1] == 6).any(),
        lambda ones: ones.expand(3, 4).sum(0).float().mean(),
        lambda ones: torch.full((1,), 2.5, device=ones.device).expand(4)[ones[:2]].sum(),
        lambda ones: ones.fill_(7).view(2, 2).mul_(2)[0, 1] + ones[3],
        lambda ones: ones.nonzero().shape[0],
        lambda ones: torch.equal(ones, torch.full((4,), 1, device=ones.device)),
    ],
)
def test_values_that_follow_from_constants_can_be_read(look: Callable[[Tensor], Any]) -> None:
    told = look(torch.ones(4, dtype=torch.long))
    with KnownValues():
        assert bool(look(torch.ones(4, dtype=torch.long, device=META))) == bool(told)
        seen = look(torch.ones(4, dtype=torch.long, device=META))
        assert (seen.item() if isinstance(seen, Tensor) else seen) == (
            told.item() if isinstance(told, Tensor) else told
        )


@pytest.mark.parametrize(
    "made",
    [
        lambda: torch.empty(4, device=META),
        lambda: torch.rand(4, device=META),
        lambda: torch.ones(4, device=META) * torch.empty(4, device=META),
        lambda: torch.ones(4, device=META).mul_(torch.empty(4, device=META)),
        lambda: torch.ones(4, device=META).uniform_(),
        lambda: torch.zeros(MOST_ELEMENTS + 1, device=META),
    ],
)
def test_other_values_cannot_be_read(made: Callable[[], Tensor]) -> None:
    with KnownValues(), pytest.raises(RuntimeError, match="meta tensors"):
        made().sum().item()


def test_a_view_that_was_overwritten_with_unknown_values_cannot_be_read() -> None:
    with KnownValues():
        ones = torch.ones(2, 4, device=META)
        row = ones[0]
        assert row.sum().item() == 4
        ones.copy_(torch.empty(2, 4, device=META))
        with pytest.raises(RuntimeError, match="meta tensors"):
            row.sum().item()


def test_values_of_an_example_decide_what_a_module_does() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            for layer in self.layers[: int(mask.sum())]:
                x = layer(x).relu()
            return x

    saved = [
        trace(Masked, (torch.ones(16, 8), torch.tensor(mask)), "fp32").activations.saved
        for mask in ([1, 0, 0, 0], [1, 1, 0, 0])
    ]
    assert saved[1] - saved[0] == 16 * 8 * 4


class _Live(compat.OperationWatch):
    """Bytes of storages that operations made and that are still alive."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._own = {compat.storage_key(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self.sizes: dict[int, int] = {}

    def see(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            key, storage = compat.storage_key(tensor), tensor.untyped_storage()
            if key not in self._own and key not in self.sizes:
                self.sizes[key] = storage.nbytes()
                weakref.finalize(storage, self.sizes.pop, key, None)


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Mistral"])
@pytest.mark.parametrize("checkpointing", ["no", "reentrant", "not reentrant"])
def test_decoders_of_hugging_face_save_as_much_as_with_values(kind: str, checkpointing: str) -> None:
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        vocab_size=200,
        hidden_size=32,
        intermediate_size=88,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config).train()
    if checkpointing != "no":
        options = {"use_reentrant": checkpointing == "reentrant"}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        model.enable_input_require_grads()
    tokens = torch.randint(200, (2, 64))
    live = _Live(model)
    with live:
        output = model(tokens, labels=tokens)
        alive = sum(live.sizes.values())
    del output
    seen = trace(lambda: copy.deepcopy(model).to(META), {"input_ids": tokens, "labels": tokens}, "fp32").activations
    assert seen.saved == pytest.approx(alive, rel=0.02)
    stream = 2 * 64 * 32 * 4
    if checkpointing != "no":
        assert seen.after_backward[3] - seen.after_backward[2] == pytest.approx(stream, rel=0.05)
