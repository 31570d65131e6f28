"""What is odd to save: no elements, names that mean something else, dtypes, memory that is shared. All of it loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard
from tests.ranks import Pool
from tests.storage.runs import difference


class Odd(nn.Module):
    """Parameters without elements, trained and frozen, alone in a module and not; a buffer made by ``expand()``."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.alone = nn.ParameterList([nn.Parameter(torch.empty(3, 0)), nn.Parameter(torch.empty(0))])
        self.frozen = nn.Parameter(torch.empty(0), requires_grad=False)
        self.register_buffer("expanded", torch.ones(1).expand(4))
        self.register_parameter("random#0", nn.Parameter(torch.ones(4)))  # as tensors inside values are called

    def forward(self, x: Tensor) -> Tensor:
        empty = self.nothing.sum() + sum(parameter.sum() for parameter in self.alone)
        return self.linear(x) * self.expanded * self.get_parameter("random#0") + empty


class Momentum(torch.optim.Optimizer):
    """Calls its state as it is told."""

    def __init__(self, parameters: Any, state: Any = "momentum", dtype: torch.dtype | None = None) -> None:
        self.name, self.dtype = state, dtype
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    zeros = torch.zeros_like(parameter, dtype=self.dtype)
                    momentum = self.state[parameter].setdefault(self.name, zeros)
                    momentum.copy_(momentum.to(parameter.dtype) * 0.9 + parameter.grad)
                    parameter.sub_(momentum.to(parameter.dtype), alpha=group["lr"])


def made(stage: int, seed: int = 0, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = Odd()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if options:
        return zeroshard.shard(model, Momentum(trained, **options), stage=stage, elementwise=True)
    return zeroshard.shard(model, torch.optim.AdamW(trained, lr=0.1), stage=stage)


def train(model: nn.Module, optimizer: Any, steps: int) -> None:
    torch.manual_seed(7)
    for _ in range(steps):
        model(torch.randn(3, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def goes_on(folder: Path, stage: int, into: int, **options: Any) -> None:
    """A run that was saved and one that loaded it train alike."""
    model, optimizer = made(stage, **options)
    train(model, optimizer, 2)
    zeroshard.save(folder, model, optimizer)
    other, its = made(into, seed=1, **options)
    train(other, its, 1)
    zeroshard.load(folder, other, its)
    for one, its_optimizer in ((model, optimizer), (other, its)):
        train(one, its_optimizer, 2)
    assert difference(zeroshard.full_state_dict(other), zeroshard.full_state_dict(model)) is None
    assert difference(its.state_dict(), optimizer.state_dict()) is None


@pytest.mark.parametrize("stage", range(4))
def test_parameters_without_elements_and_expanded_buffers_load(stage: int, tmp_path: Path) -> None:
    goes_on(tmp_path / "saved", stage, 3 - stage)


def two_ranks(folder: str) -> None:
    goes_on(Path(folder), 3, 1)


def test_parameters_without_elements_load_on_several_ranks(tmp_path: Path) -> None:
    Pool.shared().run(two_ranks, 2, {"folder": str(tmp_path / "saved")})


@pytest.mark.parametrize("name", ["value", "shown", "buffer", "tensor of rank 0", "state x", "a|b", ""])
def test_an_optimizer_may_call_its_state_anything(name: str, tmp_path: Path) -> None:
    goes_on(tmp_path / "saved", 2, 1, state=name)


def test_a_state_whose_name_is_no_string_is_refused(tmp_path: Path) -> None:
    model, optimizer = made(1, state=5)
    train(model, optimizer, 1)
    with pytest.raises(ValueError, match="a state called 5, which is no string; call it '5'"):
        zeroshard.save(tmp_path / "saved", model, optimizer)


def test_any_dtype_may_be_a_value(tmp_path: Path) -> None:
    model, optimizer = made(1)
    optimizer.param_groups[0]["compute"] = torch.float8_e4m3fn
    extra = {"dtype": torch.complex64, "dtypes": [torch.float8_e5m2, torch.uint16]}
    zeroshard.save(tmp_path / "saved", model, optimizer, extra=extra)
    optimizer.param_groups[0]["compute"] = None
    assert zeroshard.load(tmp_path / "saved", model, optimizer) == extra
    assert optimizer.param_groups[0]["compute"] is torch.float8_e4m3fn


def test_a_dtype_that_no_file_can_hold_is_named_with_the_remedy(tmp_path: Path) -> None:
    model: Any = nn.Linear(3, 3)
    model.scale = nn.Parameter(torch.zeros(3, dtype=torch.float8_e4m3fn), requires_grad=False)
    optimizer = torch.optim.SGD([model.weight, model.bias])
    model, optimizer = zeroshard.shard(model, optimizer)
    with pytest.raises(ValueError, match=r"parameter 'scale' is of torch\.float8_e4m3fn.*as a buffer of its bits"):
        zeroshard.save(tmp_path / "saved", model, optimizer)
    model, optimizer = made(1, state="m", dtype=torch.float8_e5m2)
    train(model, optimizer, 1)
    with pytest.raises(ValueError, match=r"state m '.*' is of torch\.float8_e5m2.*store it in another dtype"):
        zeroshard.save(tmp_path / "saved", model, optimizer)


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (10**5000, r"extra\.x is an integer of \d+ bits"),
        (torch.empty(3, device="meta"), r"extra\.x is a tensor on the meta"),
    ],
    ids=["int", "meta"],
)
def test_an_extra_that_cannot_be_written_is_named(value: object, match: str, tmp_path: Path) -> None:
    model, optimizer = made(1)
    with pytest.raises(ValueError, match=match):
        zeroshard.save(tmp_path / "saved", model, optimizer, extra={"x": value})


class Ragged:
    """A loader whose state has another shape on every rank."""

    def __init__(self) -> None:
        self.queue = torch.arange(1000 + dist.get_rank())

    def state_dict(self) -> dict[str, Tensor]:
        return {"queue": self.queue}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.queue = state["queue"]


def ragged(folder: str) -> None:
    model, optimizer = made(2)
    saved, loaded = Ragged(), Ragged()
    loaded.queue = torch.zeros(1)
    zeroshard.save(folder, model, optimizer, loader=saved)
    zeroshard.load(folder, model, optimizer, loader=loaded)
    assert torch.equal(loaded.queue, saved.queue)


def test_large_tensors_of_a_loader_may_differ_in_shape_between_ranks(tmp_path: Path) -> None:
    Pool.shared().run(ragged, 2, {"folder": str(tmp_path / "saved")})
