"""Checkpoints on a real device: the same bits after a resume, snapshots while it trains, and to the CPU and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from tests.models import Block
from tests.ranks import Pool
from tests.storage.runs import difference
from zeroshard import Offload

BF16 = {"precision": "bf16"}
SETUPS: dict[str, dict[str, Any]] = {
    "stage 2": {"stage": 2, **BF16},
    "stage 3": {"stage": 3, **BF16, "clip_grad_norm": 1.0},
    "fp16": {"stage": 2, "precision": "fp16"},
    "offload": {"stage": 2, **BF16, "offload": "cpu"},
    "16-bit states": {"stage": 3, **BF16, "offload": Offload(split_master=True, moments=torch.bfloat16)},
    "8-bit moments": {"stage": 2, **BF16, "offload": Offload(split_master=True, moments="8bit")},
    "read back": {"stage": 2, **BF16, "offload": Offload(split_master=True, read_back=True)},
    "in backward": {"stage": 2, **BF16, "offload": Offload(update_in_backward=True)},
    "half on the host": {"stage": 2, **BF16, "offload": Offload(host_fraction=0.5)},
    "delayed": {"stage": 2, **BF16, "offload": Offload(delayed_update_after=1)},
    "delayed split": {"stage": 3, **BF16, "offload": Offload(delayed_update_after=1, split_master=True)},
    "parameters on the host": {"stage": 3, **BF16, "offload": Offload(parameters="cpu")},
    "delayed on the host": {"stage": 3, **BF16, "offload": Offload(parameters="cpu", delayed_update_after=1)},
}
WIDTH = 256


class Noisy(nn.Module):
    """Draws random numbers on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(6))
        self.last = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.dropout(block(x), 0.2, self.training)
        return self.last(x)


class Run:
    def __init__(self, options: dict[str, Any], seed: int = 1) -> None:
        torch.manual_seed(seed)
        model = Noisy()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
        self.model, self.optimizer = zeroshard.shard(model, optimizer, **options)
        self.device = next(self.model.parameters()).device
        self.step = 0
        torch.manual_seed(10 * seed)

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            generator = torch.Generator().manual_seed(self.step)
            x = torch.randn(64, 7, generator=generator).to(self.device)
            loss = self.model(x).float().square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(float(loss.detach()))
            self.step += 1
        return losses

    def everything(self) -> dict[str, Any]:
        zeroshard.synchronize(self.model)
        state = self.optimizer.state_dict()["state"]
        on_cpu = {
            key: {k: v.cpu() if isinstance(v, Tensor) else v for k, v in one.items()} for key, one in state.items()
        }
        return {"weights": zeroshard.full_state_dict(self.model), "state": on_cpu}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("setup", SETUPS)
def test_resumed_training_has_the_same_bits(setup: str, asynchronous: bool, tmp_path: Path) -> None:
    whole = Run(SETUPS[setup])
    expected = whole.train(6)
    first = Run(SETUPS[setup])
    first.train(3)
    saving = zeroshard.save(
        tmp_path / "saved", first.model, first.optimizer, extra=first.step, asynchronous=asynchronous
    )
    first.train(2)  # while it is written; none of it may reach the checkpoint
    saving.wait()
    other = Run(SETUPS[setup], seed=2)
    other.step = zeroshard.load(tmp_path / "saved", other.model, other.optimizer)
    assert other.train(3) == expected[3:]
    assert difference(other.everything(), whole.everything()) is None


@pytest.mark.parametrize("setup", ["stage 3", "offload", "16-bit states", "parameters on the host"])
def test_what_a_gpu_saved_loads_on_the_cpu_and_comes_back(setup: str, tmp_path: Path) -> None:
    run = Run(SETUPS[setup])
    run.train(3)
    zeroshard.save(tmp_path / "saved", run.model, run.optimizer)
    expected = run.everything()
    on_cpu = Run({**SETUPS[setup], "device": "cpu"}, seed=2)
    zeroshard.load(tmp_path / "saved", on_cpu.model, on_cpu.optimizer)
    assert difference(on_cpu.everything(), expected) is None
    zeroshard.save(tmp_path / "again", on_cpu.model, on_cpu.optimizer)
    back = Run(SETUPS[setup], seed=3)
    zeroshard.load(tmp_path / "again", back.model, back.optimizer)
    assert difference(back.everything(), expected) is None


def on_two_ranks(folder: str, expected: dict[str, Any], setups: list[str]) -> None:
    for setup in setups:
        run = Run({**SETUPS[setup], "device": "cuda:0"}, seed=2)
        zeroshard.load(folder, run.model, run.optimizer)
        different = difference(run.everything(), expected)
        assert different is None, (setup, different)
        run.train(1)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [("stage 2", ["stage 3", "stage 2"]), ("offload", ["delayed", "parameters on the host"])],
)
def test_two_ranks_that_share_the_device_load_what_one_saved(saved: str, loaded: list[str], tmp_path: Path) -> None:
    """From device to device and from host to host: the two round ties of a 16-bit parameter differently."""
    run = Run(SETUPS[saved])
    run.train(3)
    zeroshard.save(tmp_path / "saved", run.model, run.optimizer)
    arguments = {"folder": str(tmp_path / "saved"), "expected": run.everything(), "setups": loaded}
    Pool.shared().run(on_two_ranks, 2, arguments)


def test_a_snapshot_is_pinned_and_used_again(tmp_path: Path) -> None:
    from zeroshard.storage.save import snapshots_of

    run = Run(SETUPS["stage 2"])
    run.train(1)
    addresses = []
    for number in range(3):
        zeroshard.save(tmp_path / str(number), run.model, run.optimizer, asynchronous=True).wait()
        memory = snapshots_of(run.model).memory
        assert memory is not None
        assert memory.is_pinned()
        addresses.append(memory.data_ptr())
    assert len(set(addresses)) == 1


@pytest.mark.parametrize("policy", ["skip", "raise", "stop"])
def test_nan_is_found_on_the_device_and_never_enters_the_states(policy: str) -> None:
    for options in (SETUPS["stage 3"], SETUPS["offload"], SETUPS["stage 2"]):
        run = Run({**options, "on_nonfinite": policy})
        run.train(2)
        before = run.everything()
        loss = run.model(torch.full((4, 7), float("inf"), device=run.device)).float().square().mean()
        loss.backward()
        if policy == "raise":
            with pytest.raises(zeroshard.NonFiniteError, match=r"the output of unit 'blocks.0' is not finite"):
                run.optimizer.step()
        else:
            with pytest.warns(UserWarning, match=r"the output of unit 'blocks.0' is not finite"):
                run.optimizer.step()
        run.optimizer.zero_grad()
        assert difference(run.everything(), before) is None
        assert (zeroshard.stats(run.model).stop_reason is not None) == (policy == "stop")
