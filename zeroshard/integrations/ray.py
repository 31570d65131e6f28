"""Ray Train: checkpoints of a sharded model, in the loop that ``TorchTrainer`` runs on its workers.

.. code-block:: python

    import zeroshard
    from zeroshard.integrations.ray import report, resume

    def train_loop():
        model, optimizer = zeroshard.shard(model, optimizer, stage=3, device=ray.train.torch.get_device())
        progress = resume(model, optimizer)  # None in the first run
        ...
        report({"loss": loss}, model, optimizer, extra={"step": step})  # every so many steps

``shard()`` takes the place of ``prepare_model`` and ``prepare_optimizer``. Ray starts workers and their process group,
and starts them again after a failure: ``FailureConfig(max_failures=...)``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from ..optim.optimizer import ShardedOptimizer
from ..runtime import runtime_of
from ..storage.load import load
from ..storage.save import save
from .requirement import require

require("ray", "zeroshard.integrations.ray", "ray")  # before what needs it is imported

import ray.train  # type: ignore[import-untyped, unused-ignore] # noqa: E402
from pyarrow.fs import LocalFileSystem  # type: ignore[import-untyped, unused-ignore] # noqa: E402


def report(
    metrics: dict[str, Any],
    model: nn.Module,
    optimizer: ShardedOptimizer | None = None,
    scheduler: Any = None,
    loader: Any = None,
    extra: object = None,
) -> None:
    """Saves a checkpoint in the run's folder of Ray's storage, and reports it with the metrics. Collective.

    Each rank writes its part, once: nothing is uploaded after that. So ``RunConfig(storage_path=...)`` must be a folder
    that all nodes see. ``CheckpointConfig(num_to_keep=...)`` holds. Other arguments are those of ``zeroshard.save``.
    """
    storage = ray.train.get_context().get_storage()
    if not isinstance(storage.storage_filesystem, LocalFileSystem):
        raise ValueError(
            f"storage_path={storage.storage_fs_path!r} is on a {type(storage.storage_filesystem).__name__}, and ranks "
            "write their shards to a folder that all of them see; give RunConfig(storage_path=) such a folder"
        )
    fabric = runtime_of(model).fabric
    name = fabric.from_rank_zero(storage.make_default_checkpoint_dir_name())
    folder = Path(storage.experiment_fs_path, name)
    save(folder, model, optimizer, scheduler, loader, extra)
    checkpoint = ray.train.Checkpoint.from_directory(str(folder)) if fabric.rank == 0 else None
    ray.train.report(metrics, checkpoint, name, checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD)


def resume(
    model: nn.Module, optimizer: ShardedOptimizer | None = None, scheduler: Any = None, loader: Any = None
) -> Any:
    """Goes on from the checkpoint that was reported last, on any number of workers. Collective.

    Returns the ``extra`` of that ``report()``, or None if there is no checkpoint.
    """
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as folder:
        return load(folder, model, optimizer, scheduler, loader)
