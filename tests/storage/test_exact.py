"""What a checkpoint keeps comes back as it was, and what it cannot keep is named before anything is written."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from zeroshard import Offload
from zeroshard.offload.host_buffers import join
from zeroshard.offload.pinned import aligned
from zeroshard.runtime import runtime_of
from zeroshard.storage.background import RESERVE, Snapshots
from zeroshard.storage.contents import collect


def train(model: Any, optimizer: Any, dtype: torch.dtype = torch.float32) -> None:
    x = torch.linspace(-1, 1, 8).view(2, 4).to(dtype)
    model(x).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


# -- optimizers that somebody vouches for -----------------------------------------------------------------------------


class Own(torch.optim.Optimizer):
    """Keeps a momentum in fp32, whatever the parameters are; a count for all; a vector for each parameter."""

    def __init__(self, parameters: Any, history: int = 0) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.history = history

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        common: dict[Any, Any] = self.state
        common["all"] = {"calls": common.get("all", {}).get("calls", 0) + 1}
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                momentum = state.setdefault("momentum", torch.zeros_like(p, dtype=torch.float32))
                momentum.mul_(0.9).add_(p.grad.float() / 3)
                if self.history:
                    state.setdefault("history", torch.zeros(self.history)).add_(1)
                p.sub_((momentum * group["lr"]).to(p.dtype))


def own(dtype: torch.dtype, history: int = 0) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4).to(dtype)
    return zeroshard.shard(model, Own(model.parameters(), history), elementwise=True)


def test_states_of_an_optimizer_of_ones_own_keep_their_dtype_and_what_belongs_to_no_parameter(tmp_path: Path) -> None:
    model, optimizer = own(torch.bfloat16, history=3)
    for _ in range(3):
        train(model, optimizer, torch.bfloat16)
    zeroshard.save(tmp_path / "saved", model, optimizer)
    other, resumed = own(torch.bfloat16, history=3)
    zeroshard.load(tmp_path / "saved", other, resumed)
    whole, restored = optimizer.state_dict()["state"], resumed.state_dict()["state"]
    assert list(whole) == list(restored) == [0, 1, "all"]
    for mine, theirs in ((restored[number], whole[number]) for number in range(2)):
        assert mine["momentum"].dtype is torch.float32
        assert torch.equal(mine["momentum"], theirs["momentum"])
        assert torch.equal(mine["history"], theirs["history"])
    assert resumed.state["all"] == optimizer.state["all"] == {"calls": 3}


def test_a_state_dict_has_what_belongs_to_no_parameter_as_torchs_has() -> None:
    model, optimizer = own(torch.float32)
    for _ in range(3):
        train(model, optimizer)
    _, resumed = own(torch.float32)
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.state["all"] == {"calls": 3}
    plain = nn.Linear(4, 4)
    unsharded = Own(plain.parameters())
    unsharded.load_state_dict(optimizer.state_dict())
    assert unsharded.state_dict()["state"]["all"] == {"calls": 3}
    _, again = zeroshard.shard(plain, unsharded, elementwise=True)
    assert again.state["all"] == {"calls": 3}


def test_a_state_that_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    model, optimizer = own(torch.float32, history=500)
    train(model, optimizer)
    with pytest.raises(ValueError, match=r"state of '(weight|bias)' has a tensor of shape \[500\]"):
        zeroshard.save(tmp_path / "saved", model, optimizer)
    assert not (tmp_path / "saved").exists()


# -- models -----------------------------------------------------------------------------------------------------------


def test_a_buffer_of_complex_numbers_is_named_before_anything_is_written(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("turns", torch.ones(3, dtype=torch.complex64))
    model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(ValueError, match=r"buffer 'turns' is of torch.complex64.*view_as_real"):
        zeroshard.save(tmp_path / "saved", model, optimizer)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stage", [1, 3])
def test_a_write_that_is_not_in_the_master_yet_is_not_saved_over(stage: int, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), stage=stage, precision="bf16")
    train(model, optimizer, torch.bfloat16)
    with zeroshard.gathered(model, write=True):
        with torch.no_grad():
            model[0].weight.fill_(7.0)
        with pytest.raises(RuntimeError, match=r"save\(\) inside `with zeroshard.gathered"):
            zeroshard.save(tmp_path / "saved", model, optimizer)
    zeroshard.save(tmp_path / "saved", model, optimizer)
    with pytest.raises(RuntimeError, match=r"would write to parameter '0\.weight'"), torch.no_grad():
        model[0].weight.fill_(8.0)


class Two(nn.Module):
    """Uses its second layer or not."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.both = True

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) if self.both else self.a(x)


def two(units: list[str] | None) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Two()
    return zeroshard.shard(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        stage=2,
        precision="bf16",
        units=units,
        offload=Offload(delayed_update_after=1),
    )


def test_a_delayed_update_loads_where_units_are_others(tmp_path: Path) -> None:
    def saved_from(folder: Path) -> tuple[Any, Any]:
        model, optimizer = two(["a", "b"])
        for _ in range(3):
            train(model, optimizer, torch.bfloat16)
        model.both = False
        train(model, optimizer, torch.bfloat16)  # a is held back, b is not
        zeroshard.save(folder, model, optimizer)
        model.both = True
        return model, optimizer

    folder = tmp_path / "saved"
    model, _ = saved_from(folder)
    zeroshard.synchronize(model)
    newest = zeroshard.full_state_dict(model)
    model, optimizer = saved_from(folder)
    train(model, optimizer, torch.bfloat16)
    zeroshard.synchronize(model)
    after = zeroshard.full_state_dict(model)
    for units in (None, ["a", "b"]):
        other, resumed = two(units)
        zeroshard.load(folder, other, resumed)
        zeroshard.synchronize(other)
        for name, value in zeroshard.full_state_dict(other).items():
            assert torch.equal(value, newest[name]), f"{units}: {name} is the newest"
        other, resumed = two(units)
        zeroshard.load(folder, other, resumed)
        train(other, resumed, torch.bfloat16)  # runs on the older ones
        zeroshard.synchronize(other)
        for name, value in zeroshard.full_state_dict(other).items():
            assert torch.equal(value, after[name]), f"{units}: {name} after a step"


# -- memory -----------------------------------------------------------------------------------------------------------


def test_a_split_master_is_put_together_once_and_one_at_a_time_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(*(nn.Linear(width, 8) for width in (8, 16, 8)), nn.Flatten())
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-2)
    units = ["0", "1", "2"]
    model, optimizer = zeroshard.shard(
        model, optimizer, precision="bf16", stage=2, units=units, offload=Offload(split_master=True)
    )
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def watched(high: Tensor, low: Tensor) -> Tensor:
        alive.append(sum(reference() is not None for reference in made))
        joined = join(high, low)
        made.append(weakref.ref(joined))
        return joined

    monkeypatch.setattr("zeroshard.offload.home.join", watched)
    zeroshard.save(tmp_path / "saved", model, optimizer, asynchronous=True).wait()
    assert alive == [0] * len(units)

    runtime = runtime_of(model)
    contents = collect(runtime, optimizer, scheduler=None, loader=None, extra=None)
    largest = max(4 * flat.own.numel for unit in runtime.units for flat in unit.flats)  # with padding
    assert largest >= 4 * (16 * 8 + 8)
    assert contents.joined_bytes == largest
    snapshot = sum(aligned(item.entry.nbytes) for item in contents.items)
    for room, fits in ((snapshot + largest, True), (snapshot + largest - 1, False)):
        monkeypatch.setattr("zeroshard.system.machine.available_memory", lambda room=room: RESERVE + room)
        assert (Snapshots(runtime.fabric).lacking(contents) <= 0) is fits
