"""The same scripts with a library as it is and with sharding, on a tiny model that the test makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests import huggingface

Options = dict[str, Any]
LENGTH = 12


def llama(**more: Any) -> Any:
    """A Llama with the same random weights on every rank and in every test."""
    torch.manual_seed(3)
    return huggingface.llama(pad_token_id=0, **more)


def with_lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def rows(number: int, seed: int = 5) -> list[dict[str, Any]]:
    """Rows of tokens that can be learnt: each token follows from the one before."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(3, huggingface.VOCABULARY - LENGTH, (number, 1), generator=generator)
    tokens = (first + torch.arange(LENGTH)).tolist()
    return [{"input_ids": row, "labels": row} for row in tokens]


# -- Transformers -----------------------------------------------------------------------------------------------------

STEPS = 4


def arguments(folder: Path, kind: Any = None, **more: Any) -> Any:
    from transformers import TrainingArguments

    settings: Options = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return (kind or TrainingArguments)(**(settings | more))


def trainer(folder: Path, zeroshard: Options | None, model: Any = None, **more: Any) -> Any:
    """A trainer: sharded with these options, or plain without."""
    from transformers import Trainer

    from zeroshard.integrations.transformers import ShardedTrainer

    if model is None and "model_init" not in more:
        model = llama()
    kind, options = (Trainer, {}) if zeroshard is None else (ShardedTrainer, {"zeroshard": zeroshard})
    options["model_init"] = more.pop("model_init", None)
    return kind(model, arguments(folder, **more), train_dataset=rows(40), eval_dataset=rows(8, seed=6), **options)


def logged(trained: Any, name: str = "loss") -> list[float]:
    return [entry[name] for entry in trained.state.log_history if name in entry]


def ran(folder: Path, zeroshard: Options | None, lora: bool = False, **more: Any) -> Any:
    trained = trainer(folder, zeroshard, with_lora(llama()) if lora else None, **more)
    trained.train()
    return trained


# -- Accelerate -------------------------------------------------------------------------------------------------------


class Run:
    """A script as people write it with Accelerate. The lines are the same, whatever the accelerator."""

    def __init__(self, zeroshard: Options | None, clip: str | None = "norm", batch: int = 2, **more: Any) -> None:
        from accelerate import Accelerator

        from zeroshard.integrations.accelerate import ShardedAccelerator

        kind, options = (Accelerator, {}) if zeroshard is None else (ShardedAccelerator, {"zeroshard": zeroshard})
        self.clip, self.losses, self.rates, self.norms = clip, list[float](), list[float](), list[float]()
        self.accelerator = accelerator = kind(**options, **{"cpu": True, **more})
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
        loader = DataLoader(rows(32), batch_size=batch, collate_fn=_tensors)  # type: ignore[arg-type]
        prepared = accelerator.prepare(model, optimizer, loader, scheduler)
        self.model, self.optimizer, self.loader, self.scheduler = prepared

    def train(self, batches: int, skip: int = 0) -> Run:
        accelerator, model = self.accelerator, self.model
        model.train()
        loader = accelerator.skip_first_batches(self.loader, skip)
        for batch, _ in zip(loader, range(batches), strict=False):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients and self.clip == "norm":
                    self.norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                if accelerator.sync_gradients and self.clip == "value":
                    accelerator.clip_grad_value_(model.parameters(), 0.01)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.losses.append(float(accelerator.gather(loss.detach()).mean()))
            self.rates.append(self.scheduler.get_last_lr()[0])
        return self


def _tensors(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {name: torch.tensor([row[name] for row in batch]) for name in batch[0]}
