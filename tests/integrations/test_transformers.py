"""Transformers' ``Trainer`` trains a sharded model as it trains one under DistributedDataParallel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.huggingface_ranks import as_torchrun, llama, rows, with_lora
from tests.matrix import slow
from tests.ranks import Pool, on_ranks

Losses = list[float]


def arguments(folder: Path, **more: Any) -> Any:
    from transformers import TrainingArguments

    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return TrainingArguments(**(settings | more))


def trainer(folder: Path, zeroshard: dict[str, Any] | None, model: Any = None, **more: Any) -> Any:
    """A trainer: sharded with these options, or plain without."""
    from transformers import Trainer

    from zeroshard.integrations.transformers import ShardedTrainer

    model = llama() if model is None else model
    kind, options = (Trainer, {}) if zeroshard is None else (ShardedTrainer, {"zeroshard": zeroshard})
    return kind(model, arguments(folder, **more), train_dataset=rows(40), eval_dataset=rows(8, seed=6), **options)


def logged(trained: Any, name: str) -> list[float]:
    return [entry[name] for entry in trained.state.log_history if name in entry]


@on_ranks(2)
def test_it(tmp_path: Path) -> None:
    with as_torchrun():
        results = []
        for zeroshard in (None, {"stage": 3}):
            trained = trainer(tmp_path, zeroshard)
            trained.train()
            results.append(trained)
        plain, sharded = results
        assert logged(sharded, "loss") == pytest.approx(logged(plain, "loss"), rel=1e-5)
        assert logged(sharded, "grad_norm") == pytest.approx(logged(plain, "grad_norm"), rel=1e-5)
        print(logged(plain, "loss"), logged(sharded, "loss"), type(plain.model_wrapped), type(sharded.model_wrapped))
