"""A module and scripts as people write them with Lightning. The lines are the same, whatever the strategy."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.huggingface import under_torchrun

BATCH = 4
"""Rows of all ranks together."""
ROWS = 24
SEED = 1
"""Lightning's own: of its processes, when they start, and of samplers."""


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Linear(6, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return x


@cache
def kind(lightning: Any) -> Any:
    """The class of the module, of ``lightning`` or of ``pytorch_lightning``."""

    class Regression(lightning.LightningModule):  # type: ignore[misc, name-defined]
        """Calls parts of itself, so its own forward is not called."""

        def __init__(self, width: int = 16) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net, self.head = Net(width), nn.Linear(width, 1)
            self.losses, self.rates = list[float](), list[float]()

        def loss(self, batch: list[Tensor]) -> Tensor:
            x, y = batch
            return nn.functional.mse_loss(self.head(self.net(x)), y)

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            loss = self.loss(batch)
            self.losses.append(float(loss.detach()))
            self.rates.append(self.optimizers().param_groups[0]["lr"])
            return loss

        def validation_step(self, batch: list[Tensor], index: int) -> None:
            self.log("validation", self.loss(batch), sync_dist=True)

        def test_step(self, batch: list[Tensor], index: int) -> None:
            self.log("test", self.loss(batch), sync_dist=True)

        def predict_step(self, batch: list[Tensor], index: int) -> Tensor:
            return self.head(self.net(batch[0]))  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            decayed = [p for p in self.parameters() if p.ndim > 1]
            others = [{"params": [p for p in self.parameters() if p.ndim < 2], "weight_decay": 0.0}]
            optimizer = torch.optim.AdamW([{"params": decayed}, *others], lr=1e-2)
            scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    return Regression


def module(**more: Any) -> Any:
    import lightning

    torch.manual_seed(3)
    return kind(lightning)(**more)


def rows(seed: int = 5) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, 6, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def loader(shuffle: bool = True) -> DataLoader[Any]:
    return DataLoader(rows(), batch_size=BATCH // dist.get_world_size(), shuffle=shuffle)


@contextmanager
def quietly() -> Iterator[None]:
    """Inside, Lightning finds the environment of torchrun, knows our strategies by name, and says nothing."""
    import zeroshard.integrations.lightning  # noqa: F401

    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    settings = {"TORCHELASTIC_RUN_ID": "test", "PL_GLOBAL_SEED": str(SEED)}
    with under_torchrun(), mock.patch.dict(os.environ, settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning|pytorch_lightning|torch.utils.data")
        yield


def devices() -> dict[str, Any]:
    """Where a Trainer or Fabric runs. Ranks of tests that have a GPU share one, as nodes of their own."""
    if dist.get_backend() == "nccl":
        return {"accelerator": "gpu", "devices": 1, "num_nodes": dist.get_world_size()}
    return {"accelerator": "cpu", "devices": dist.get_world_size()}


def trainer(strategy: Any, epochs: int = 1, **more: Any) -> Any:
    import lightning

    torch.manual_seed(7)
    settings = {
        **devices(),
        "max_epochs": epochs,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return lightning.Trainer(strategy=strategy, **(settings | more))


def fitted(strategy: Any, epochs: int = 1, ckpt_path: Any = None, **more: Any) -> Any:
    """A module after ``fit``. Its trainer is ``module.trainer``."""
    made = module()
    trainer(strategy, epochs, **more).fit(made, loader(), ckpt_path=ckpt_path)
    return made
