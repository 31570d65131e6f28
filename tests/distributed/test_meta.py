"""Models on the meta device get the weights that the unsharded model would, and are never whole anywhere."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zeroshard
from tests.models import Net, loss_of
from tests.ranks import Pool, on_ranks


def initialised_by_the_loop() -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = Net()
    model.to_empty(device="cpu")
    torch.manual_seed(5)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model.state_dict()


def check() -> None:
    expected = initialised_by_the_loop()
    for stage in (0, 1, 2, 3):
        with torch.device("meta"):
            model = Net()
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(parameters)
        torch.manual_seed(5)
        model, sharded = zeroshard.shard(model, optimizer, stage=stage)
        assert all(mine is theirs for mine, theirs in zip(model.parameters(), parameters, strict=True))
        state = zeroshard.full_state_dict(model)
        assert all(torch.equal(state[name], value) for name, value in expected.items())
        loss_of(model, 0).backward()
        sharded.step()
        after = zeroshard.full_state_dict(model)
        assert not torch.equal(after["blocks.1.up.weight"], expected["blocks.1.up.weight"])


@pytest.mark.parametrize("world", [1, 2, 3])
def test_one_seed_gives_the_same_weights_in_every_stage_and_world(world: int) -> None:
    Pool.shared().run(check, world, {})


@on_ranks(2)
def test_a_model_on_meta_is_never_whole_anywhere_in_stage_3() -> None:
    largest = 0
    original = nn.Linear.reset_parameters

    def watched(self: nn.Linear) -> None:
        nonlocal largest
        original(self)
        whole = [p for p in model.parameters() if not p.is_meta and p.untyped_storage().nbytes() >= 4 * p.numel()]
        largest = max(largest, sum(p.numel() for p in whole))

    with torch.device("meta"):
        model = Net(width=32, depth=8)
    total = sum(p.numel() for p in model.parameters())
    nn.Linear.reset_parameters = watched  # type: ignore[method-assign]
    try:
        zeroshard.shard(model, torch.optim.AdamW(model.parameters()), stage=3)
    finally:
        nn.Linear.reset_parameters = original  # type: ignore[method-assign]
    assert 0 < largest < total / 4


@on_ranks(2)
def test_a_module_without_an_initialiser_is_named() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3))

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), Bare())
    with pytest.raises(ValueError, match=r"module '1' \(Bare\).*reset_parameters"):
        zeroshard.shard(model, torch.optim.AdamW(model.parameters()))
