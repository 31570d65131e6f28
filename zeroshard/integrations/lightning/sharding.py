"""What strategies for ``Trainer`` and ``Fabric`` share: options, precision, and Lightning's part of a checkpoint."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies.fsdp import _move_torchmetrics_to_device as move_metrics
from torch import Tensor, nn

from ...api import shard
from ...config.options import Config
from ...optim.optimizer import ShardedOptimizer

SETTINGS = (
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
    "process_group_backend",
    "timeout",
)
"""Arguments of a strategy that are Lightning's. The others are options of ``shard()``."""
PRECISIONS = ("32-true", "64-true", "bf16-mixed", "16-mixed")
"""Precisions that stay Lightning's. "bf16-true" becomes ``precision="bf16"``, with fp32 masters."""


class Sharding:
    """What both strategies share: options of ``shard()``, and the precision that Lightning was given."""

    _plugin_name: str
    """Lightning's name for the precision plugin."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """``options``: those of ``zeroshard.shard``, and arguments of Lightning's strategies such as ``timeout``."""
        settings = {name: options.pop(name) for name in (*SETTINGS, self._plugin_name) if name in options}
        if "device" in options:
            raise ValueError("Lightning chooses the device of each rank; leave device= out of the strategy")
        self._config = Config.parse(options)
        if self._config.precision.loss_scale is not None:
            raise ValueError(
                'precision="fp16" is for loops of your own; use precision="bf16-true" of the Trainer or of Fabric, or '
                '"16-mixed", which is autocast with Lightning\'s loss scale'
            )
        self._options = options
        super().__init__(*args, **settings)

    def _sharding_plugin(self, plugin: Any) -> Any:
        """Lightning's precision plugin, or the one that leaves 16-bit parameters to ``shard()``."""
        asked = getattr(plugin, "precision", "32-true")
        if asked not in (*PRECISIONS, "bf16-true"):
            raise ValueError(f'precision={asked!r} does not go with zeroshard; use "bf16-true" or "bf16-mixed"')
        if asked != "32-true" and "precision" in self._options:
            raise ValueError(
                f"precision={self._options['precision']!r} of the strategy and precision={asked!r} of Lightning both "
                "say what forward computes in; leave one out"
            )
        if asked == "bf16-true":  # a plugin that casts the model would leave no fp32 master
            plugin = type(plugin).__bases__[0]()
            plugin.precision = asked
        return plugin

    def _shard(
        self, module: nn.Module, optimizer: torch.optim.Optimizer | None, plugin: Any, device: torch.device
    ) -> ShardedOptimizer | None:
        precision = {"precision": "bf16"} if plugin.precision == "bf16-true" else {}
        move_metrics(module, device)
        return shard(module, optimizer, **{**self._options, **precision, "device": device})[1]


def folder(path: Any) -> Path:
    """The folder of a checkpoint."""
    if "://" in str(path):
        raise ValueError(f"{path}: ranks save their shards to a folder that all of them see; name one")
    return Path(path)


def packed(values: object) -> Tensor:
    """Lightning's part of a checkpoint: what ``torch.save`` writes, as bytes."""
    file = io.BytesIO()
    torch.save(values, file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def unpacked(extra: Any, weights_only: bool | None) -> dict[str, Any]:
    """What was packed."""
    if not isinstance(extra, Tensor):
        raise ValueError("the checkpoint was not saved by Lightning, so it has no progress; use zeroshard.load")
    file = io.BytesIO(extra.cpu().numpy().tobytes())
    found: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=weights_only)
    return found


def refuse(**arguments: Any) -> None:
    """Raises if one of the arguments was given."""
    for name, value in arguments.items():
        if value is not None:
            raise TypeError(f"{name}= is for checkpoints in one file; a sharded model is saved by shards")


def register(registry: Any, strategy: type) -> None:
    """Makes a strategy known by name, as in ``strategy="zeroshard_stage_3_offload"``."""
    for stage in range(4):
        name, options = f"zeroshard_stage_{stage}", {"stage": stage}
        registry.register(name, strategy, description=f"zeroshard in stage {stage}", override=True, **options)
        if stage:
            more = {**options, "offload": "cpu"}
            registry.register(f"{name}_offload", strategy, description="states on the host", override=True, **more)
    registry.register("zeroshard", strategy, description="zeroshard in stage 3", override=True)
