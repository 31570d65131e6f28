"""Loops that belong to a library. Under torchrun such a library puts DDP around the model by itself."""

from __future__ import annotations

import tempfile

import torch

from tests.huggingface import gpt2, under_torchrun
from tests.loops.corpus.models import GPT, sentences
from tests.loops.harness import EVERYWHERE, Corpus, Log, Parallel, Refusal

corpus = Corpus()
REFUSED = "DistributedDataParallel was put around.*ShardedAccelerator.*ShardedTrainer"


@corpus.loop(
    "Accelerate: `accelerator.prepare(model, optimizer)`, `accumulate`, `backward`, `clip_grad_norm_`",
    Refusal(
        EVERYWHERE,
        REFUSED,
        "`ShardedAccelerator(...)` of `zeroshard.integrations.accelerate` in place of `Accelerator(...)`",
    ),
    clips=True,
    slow=True,
)
def accelerate(parallel: Parallel, line: bool = False) -> Log:
    from accelerate import Accelerator

    from zeroshard.integrations.accelerate import ShardedAccelerator

    net = GPT()
    model, optimizer = parallel.unwrapped(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    losses, norms = [], []
    with under_torchrun():
        kind = ShardedAccelerator if line else Accelerator
        accelerator = kind(cpu=True, gradient_accumulation_steps=2)
        model, optimizer = accelerator.prepare(model, optimizer)
        for step in range(6):
            with accelerator.accumulate(model):
                _, loss = model(*sentences(step))
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return {"losses": losses, "norms": norms}


@corpus.loop(
    "Hugging Face's Trainer with `optimizers=(optimizer, scheduler)`, accumulation and its own clipping",
    Refusal(
        EVERYWHERE,
        REFUSED,
        "`ShardedTrainer(...)` of `zeroshard.integrations.transformers` in place of `Trainer(...)`",
    ),
    clips=True,
    slow=True,
)
def trainer(parallel: Parallel, line: bool = False) -> Log:
    from transformers import Trainer, TrainingArguments

    from zeroshard.integrations.transformers import ShardedTrainer

    net = gpt2()
    model, optimizer = parallel.unwrapped(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    generator = torch.Generator().manual_seed(0)
    texts = [{"input_ids": row, "labels": row} for row in torch.randint(3, 100, (24, 9), generator=generator)]
    with under_torchrun(), tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=3,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_grad_norm=0.5,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        kind = ShardedTrainer if line else Trainer
        loop = kind(model, arguments, train_dataset=texts, optimizers=(optimizer, scheduler))
        loop.train()
    logs = [entry for entry in loop.state.log_history if "grad_norm" in entry]
    return {"losses": [entry["loss"] for entry in logs], "norms": [entry["grad_norm"] for entry in logs]}
