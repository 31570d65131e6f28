"""This process as one of the ranks of a job."""

import os
from dataclasses import dataclass

import torch

from ..config.job import resolve_device
from ..system.machine import device_of_rank


@dataclass(frozen=True)
class Rank:
    """This process as one of the ranks, and its device."""

    rank: int
    world: int
    device: torch.device
    tensor_parallel: int = 1
    """Ranks that divide one replica of the model. They are neighbours, and see the same batches."""

    @property
    def data_rank(self) -> int:
        """Return which part of the data this rank trains on."""
        return self.rank // self.tensor_parallel

    @property
    def data_ranks(self) -> int:
        """Return the number of parts that the data is divided into."""
        return self.world // self.tensor_parallel

    @classmethod
    def from_environment(cls, device: str, tensor_parallel: int = 1) -> "Rank":
        """Read torchrun's variables; `device` is a job's `train.device`."""
        chosen = device_of_rank(torch.device(resolve_device(device)))
        if chosen.type == "cuda":
            torch.cuda.set_device(chosen)
        return cls(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), chosen, tensor_parallel)

    @property
    def title(self) -> str:
        """Return how many ranks there are, and of which kind."""
        return f"{self.world} {'GPU' if self.device.type == 'cuda' else 'CPU'} rank(s)"
