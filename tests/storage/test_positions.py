"""Where the data and the schedule stood: given back to whom it belongs, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeroshard
from tests.models import net
from tests.ranks import Pool


class Shuffled:
    """A loader whose position is an order of the data, of its rank or of all."""

    def __init__(self, seed: int) -> None:
        self.order = torch.randperm(1000, generator=torch.Generator().manual_seed(seed))

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": [{"order": self.order}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order = state["epochs"][0]["order"]


def sharded() -> tuple[Any, Any]:
    model = net()
    return zeroshard.shard(model, torch.optim.AdamW(model.parameters()), stage=2)


def save_positions(folder: str, own: bool) -> None:
    zeroshard.save(folder, *sharded(), loader=Shuffled(dist.get_rank() if own else 5))


@pytest.mark.parametrize("own", [True, False])
def test_a_position_in_large_tensors_is_taken_to_fewer_ranks_only_if_it_is_the_same_on_all(
    own: bool, tmp_path: Path
) -> None:
    folder = str(tmp_path / "saved")
    Pool.shared().run(save_positions, 2, {"folder": folder, "own": own})
    loader = Shuffled(9)
    if own:
        with pytest.raises(zeroshard.CheckpointError, match="of 2 ranks, each its own"):
            zeroshard.load(folder, *sharded(), loader=loader)
    else:
        zeroshard.load(folder, *sharded(), loader=loader)
        assert torch.equal(loader.order, Shuffled(5).order)


def test_a_scheduler_that_cannot_take_what_was_saved_is_named_with_the_remedy(tmp_path: Path) -> None:
    model, optimizer = sharded()
    zeroshard.save(tmp_path / "saved", model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2))

    def chained(count: int) -> Any:
        constants = [torch.optim.lr_scheduler.ConstantLR(optimizer) for _ in range(count)]
        return torch.optim.lr_scheduler.SequentialLR(optimizer, constants, list(range(1, count)))

    with pytest.raises(zeroshard.CheckpointError, match=r"'step_size'.*leave scheduler= out; nothing was loaded"):
        zeroshard.load(tmp_path / "saved", model, optimizer, chained(1))
    zeroshard.save(tmp_path / "saved", model, optimizer, chained(2))
    with pytest.raises(zeroshard.CheckpointError, match=r"SequentialLR\.load_state_dict\(\).*leave scheduler= out"):
        zeroshard.load(tmp_path / "saved", model, optimizer, chained(1))
