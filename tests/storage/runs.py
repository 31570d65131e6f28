"""Small training runs with everything that a checkpoint keeps: scheduler, loader, random numbers, buffers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard
from tests.models import Block
from zeroshard import LossScale, Offload, Precision

Options = dict[str, Any]

BF16: Options = {"precision": "bf16"}
FP16: Options = {
    "precision": Precision(parameters=torch.float16, loss_scale=LossScale(initial=2.0**22, growth_interval=2))
}

SETUPS: dict[str, Options] = {
    **{f"stage {stage}": {"stage": stage} for stage in range(4)},
    **{f"stage {stage} bf16": {"stage": stage, **BF16} for stage in range(4)},
    "cast on gather": {"stage": 3, "precision": Precision(parameters=torch.bfloat16, cast_on_gather=True)},
    "fp16": {"stage": 2, **FP16},
    "clipped": {"stage": 3, **BF16, "clip_grad_norm": 0.05},
    "offload": {"stage": 2, **BF16, "offload": "cpu"},
    "offload fp32": {"stage": 1, "offload": "cpu"},
    "offload stage 0": {"stage": 0, **BF16, "offload": "cpu"},
    "offload fp16": {"stage": 3, **FP16, "offload": "cpu"},
    "split": {"stage": 2, **BF16, "offload": Offload(split_master=True)},
    "bf16 moments": {"stage": 3, **BF16, "offload": Offload(split_master=True, moments=torch.bfloat16, seed=5)},
    "8-bit moments": {"stage": 3, **BF16, "offload": Offload(split_master=True, moments="8bit", seed=5)},
    "read back": {"stage": 2, **BF16, "offload": Offload(split_master=True, read_back=True)},
    "in backward": {"stage": 2, **BF16, "offload": Offload(update_in_backward=True)},
    "half on the host": {"stage": 3, **BF16, "offload": Offload(host_fraction=0.5)},
    "parameters on the host": {"stage": 3, **BF16, "offload": Offload(parameters="cpu")},
    "delayed": {"stage": 2, **BF16, "offload": Offload(delayed_update_after=1)},
    "delayed fp32": {"stage": 3, "offload": Offload(delayed_update_after=1)},
    "delayed split": {"stage": 1, **BF16, "offload": Offload(delayed_update_after=1, split_master=True)},
    "delayed, two micro-batches": {"stage": 2, **BF16, "offload": Offload(delayed_update_after=1), "micro_batches": 2},
    "fp16 with a scale that grows": {
        "stage": 1,
        "precision": Precision(parameters=torch.float16, loss_scale=LossScale(initial=8.0, growth_interval=4)),
    },
    "delayed on the host": {"stage": 3, **BF16, "offload": Offload(delayed_update_after=1, parameters="cpu")},
}


class Noisy(nn.Module):
    """Draws random numbers, has a buffer that training writes, a frozen part and one that some steps do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 9)
        self.register_buffer("running_mean", torch.zeros(9))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.blocks = nn.ModuleList(Block(9) for _ in range(3))
        self.blocks[1].up.requires_grad_(False)
        self.rare = nn.Linear(9, 9)
        self.last = nn.Linear(9, 5)
        self.calls = 0

    def forward(self, x: Tensor, step: int) -> Tensor:
        self.calls += 1
        x = self.first(x)
        if self.training:
            self.running_mean.lerp_(x.detach().float().mean(0), 0.1)
        x = x - self.running_mean.to(x.dtype)
        for block in self.blocks:
            x = torch.dropout(block(x), 0.2, self.training)
        return self.last(self.rare(x) if step % 3 == 2 else x)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Positions:
    """A loader: says which batch comes next."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Positions:
        return self

    def __next__(self) -> Tensor:
        rank = dist.get_rank() if dist.is_initialized() else 0
        made = torch.randn(6, 7, generator=torch.Generator().manual_seed(1000 * self.next + rank))
        self.next += 1
        return made + random.random()

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    groups = [{"params": parameters[::2], "lr": 0.03}, {"params": parameters[1::2]}]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)


def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, dampening=0.1)


def asgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.ASGD(parameters, lr=0.05)


class Run:
    """A model in training."""

    def __init__(
        self, options: Options, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = adamw, seed: int = 1
    ) -> None:
        torch.manual_seed(seed)
        model = Noisy()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._micro_batches = options.get("micro_batches", 1)
        options = {name: value for name, value in options.items() if name != "micro_batches"}
        self.model, self.optimizer = zeroshard.shard(model, make(trained), **options)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4], gamma=0.3)
        self.loader = Positions()
        rank = dist.get_rank() if dist.is_initialized() else 0
        torch.manual_seed(100 * seed + rank)
        random.seed(seed + rank)
        self.losses: list[float] = []

    def train(self, steps: int) -> None:
        for _ in range(steps):
            for _ in range(self._micro_batches):
                step = self.loader.next
                loss = self.model(next(self.loader), step).float().square().mean()
                loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.losses.append(float(loss.detach()))

    def save(self, path: str, **options: Any) -> Any:
        return zeroshard.save(path, self.model, self.optimizer, self.scheduler, self.loader, **options)

    def load(self, path: str, **options: Any) -> Any:
        return zeroshard.load(path, self.model, self.optimizer, self.scheduler, self.loader, **options)

    def everything(self) -> dict[str, Any]:
        """The whole state, in a form that does not depend on how it is divided."""
        zeroshard.synchronize(self.model)
        return {
            "weights": zeroshard.full_state_dict(self.model),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "loader": self.loader.state_dict(),
            "steps": self.optimizer.steps,
            "skipped": self.optimizer.skipped_steps,
            "scale": zeroshard.stats(self.model).loss_scale,
            "calls": self.model.calls,
        }


def difference(ours: Any, theirs: Any, where: str = "") -> str | None:
    """Where two structures differ first, bit by bit; None if nowhere."""
    if isinstance(theirs, Tensor):
        same = isinstance(ours, Tensor) and ours.dtype is theirs.dtype and torch.equal(ours, theirs)
        return None if same else where
    if isinstance(theirs, dict):
        if ours.keys() != theirs.keys():
            return f"{where}: {sorted(map(str, ours))} against {sorted(map(str, theirs))}"
        return next((d for key in theirs if (d := difference(ours[key], theirs[key], f"{where}.{key}"))), None)
    if isinstance(theirs, list | tuple):
        pairs = zip(ours, theirs, strict=True)
        return next((d for n, (a, b) in enumerate(pairs) if (d := difference(a, b, f"{where}[{n}]"))), None)
    return None if ours == theirs else f"{where}: {ours!r} against {theirs!r}"
