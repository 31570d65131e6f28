"""The configurations that the plan is held against, and what is known of one that ran."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from zeroshard.config.job import ModelConfig
from zeroshard.config.offload import Offload
from zeroshard.plan.setup import Setup

BF16 = torch.bfloat16
WAYS: dict[str, Offload | None] = {
    "none": None,
    "cpu": Offload(),
    "cpu, 16-bit states": Offload(moments=BF16),
    "cpu, small": Offload(moments=BF16, split_master=True, read_back=True, update_in_backward=True),
    "cpu, half": Offload(host_fraction=0.5),
    "cpu, delayed": Offload(delayed_update_after=1),
    "cpu, parameters too": Offload(parameters="cpu"),
}


@dataclass(frozen=True)
class Job:
    """A model, and what goes through it."""

    name: str
    config: ModelConfig
    batch: int


@dataclass(frozen=True)
class Case:
    """One configuration."""

    job: Job
    world: int
    stage: int
    way: str = "none"
    precision: str = "bf16"

    @property
    def offload(self) -> Offload | None:
        return WAYS[self.way]

    @property
    def setup(self) -> Setup:
        return Setup(
            stage=self.stage,
            world=self.world,
            offload=self.offload,
            precision=self.precision,  # type: ignore[arg-type]
            batch=self.job.batch,
            sequence=self.job.config.sequence,
            checkpointing=self.job.config.checkpointing,
        )

    @property
    def name(self) -> str:
        """Under which what was measured of it is kept."""
        job = f"{self.job.name}, batch {self.job.batch}"
        return f"{job}, world {self.world}, stage {self.stage}, {self.way}, {self.precision}"

    @property
    def group(self) -> tuple[str, int, int, str]:
        return self.job.name, self.job.batch, self.world, self.precision


def jobs(on_gpu: bool) -> dict[str, Job]:
    """Small ones, so that many fit in minutes; with a batch of four launching is all. Without a GPU tiny ones."""

    def job(name: str, layers: int, hidden: int, heads: int, batch: int, **more: Any) -> Job:
        shape: dict[str, Any] = {"sequence": 1024, "vocabulary": 50304, "checkpointing": True}
        if not on_gpu:
            shape |= {"sequence": 64, "vocabulary": 1000}
            layers, hidden, heads = max(2, layers // 4), hidden // 8, max(1, heads // 4)
        return Job(name, ModelConfig(layers=layers, hidden=hidden, heads=heads, **{**shape, **more}), batch)

    return {
        "124M": job("124M", 12, 768, 12, 32),
        "124M, all kept": job("124M, all kept", 12, 768, 12, 16, checkpointing=False),
        "355M": job("355M", 24, 1024, 16, 4),
        "355M, more": job("355M", 24, 1024, 16, 32),
        "774M": job("774M", 36, 1280, 20, 16),
        "1.5B": job("1.5B", 48, 1600, 25, 8),
    }


def cases(on_gpu: bool) -> list[Case]:
    """Stages × offload × precision × sizes.

    Torch's fake group copies a gather once for each rank, which launching is slower for; a model that is bound by
    launching is therefore one of eight ranks, as that which launching is measured with, and not of 64.
    """
    known = jobs(on_gpu)
    found = [Case(known["124M"], 1, 0, way) for way in ("none", "cpu", "cpu, 16-bit states", "cpu, small")]
    found += [Case(known["355M"], 1, 0, way) for way in ("none", "cpu", "cpu, 16-bit states", "cpu, small")]
    found += [Case(known["355M, more"], 1, 0, way) for way in ("none", "cpu", "cpu, 16-bit states", "cpu, small")]
    found += [Case(known[name], 1, 3, "cpu, parameters too") for name in ("124M", "355M", "355M, more")]
    found += [Case(known["124M"], 1, 0, way) for way in ("cpu, half", "cpu, delayed")]
    found += [Case(known["124M"], 1, 0, "none", "fp32"), Case(known["124M"], 1, 2, "cpu", "fp32")]
    found += [Case(known["124M, all kept"], 1, 0), Case(known["774M"], 1, 0)]
    found += [Case(known["355M, more"], 8, stage) for stage in range(4)] + [Case(known["355M"], 8, 3)]
    found += [Case(known["355M, more"], 8, stage, "cpu") for stage in (2, 3)]
    found += [Case(known["124M"], 8, stage, "none", "fp32") for stage in (2, 3)]
    found += [Case(known["124M"], 8, 2, "none", "fp16"), Case(known["124M, all kept"], 8, 3)]
    found += [Case(known["774M"], 64, stage) for stage in (1, 2, 3)]
    found += [Case(known["1.5B"], 1, 0, way) for way in ("none", "cpu", "cpu, 16-bit states", "cpu, small")]
    found += [Case(known["1.5B"], 8, stage) for stage in (2, 3)]
    return found


@dataclass(frozen=True)
class Measured:
    """What a run had; bytes, elements, seconds. None is: not measured."""

    states: int | None = None
    host: int | None = None
    """None also where there is no device beside the host: it is then counted with the states."""
    peak: int | None = None
    volume: int | None = None
    seconds: float | None = None
