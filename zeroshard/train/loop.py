"""One rank's training run: an ordinary PyTorch loop, with one line that shards."""

import contextlib
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard
from zeroshard.config import Config
from zeroshard.machine import usable_cores
from zeroshard.train.data import Corpus
from zeroshard.train.gpt import GPT, sample
from zeroshard.train.job import Job
from zeroshard.train.progress import StepReport, TrainingProgress, rank_zero_console
from zeroshard.train.summary import Outcome, StateBytes, closing_table
from zeroshard.train.weights import load_weights, save_weights

PROMPT = b"import "
DEFAULT_STAGE = Config().stage
LOWEST_LR = 0.1  # of the highest; where the cosine ends


@dataclass(frozen=True)
class Rank:
    """Which rank this process is, as torchrun's environment says, and the device it trains on."""

    rank: int
    world: int
    device: torch.device

    @classmethod
    def from_environment(cls, device: str) -> "Rank":
        """Read torchrun's variables; `device` is a job's `train.device`."""
        chosen = torch.device("cpu")
        if resolve_device(device) == "cuda":
            chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(chosen)
        return cls(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), chosen)

    def mean(self, value: Tensor) -> float:
        """Return the mean of a scalar over all ranks; every rank calls this."""
        total = value.detach().float().clone()
        if self.world > 1:
            dist.all_reduce(total)
        return total.item() / self.world


class Throughput:
    """Tokens per second over every step but the first, which pays for set-up; what is not a step is not counted."""

    def __init__(self, tokens_per_step: int) -> None:
        self.tokens_per_step = tokens_per_step
        self.steps = 0
        self.seconds = 0.0

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Count what runs inside as one step."""
        began = time.perf_counter()
        yield
        self.steps += 1
        if self.steps > 1:
            self.seconds += time.perf_counter() - began

    @property
    def tokens_per_second(self) -> float:
        """Return the mean so far; not a number after a single step."""
        return self.tokens_per_step * (self.steps - 1) / self.seconds if self.seconds else math.nan


def train(job: Job, out: Path) -> None:
    """Train, evaluate, save to `out`, sample, and show the closing table. Every rank calls this."""
    began = time.perf_counter()
    here = Rank.from_environment(job.train.device)
    corpus = Corpus.read(job.data)
    precision = str(job.shard.get("precision") or ("fp32" if here.device.type == "cpu" else "bf16"))
    console = rank_zero_console(here.rank)
    console.print(_headline(job, here, precision, corpus), highlight=False, soft_wrap=True)

    torch.manual_seed(job.train.seed)
    with torch.device("meta"):  # never whole anywhere: shard() initialises it unit by unit
        model: nn.Module = GPT(job.model)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(
        parameter_groups(model, job.train.weight_decay), lr=job.train.lr, betas=(0.9, 0.95)
    )
    model, optimizer = zeroshard.shard(model, optimizer, **{**job.shard, "precision": precision, "device": here.device})
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: lr_share(step, job.train.steps, round(job.train.warmup * job.train.steps))
    )

    throughput = Throughput(job.train.batch * job.model.sequence * here.world)
    with TrainingProgress(job.train.steps, console) as progress:
        before = held_out = evaluate(model, job, corpus, here)
        progress.say(f"held-out loss {before:.3f} before training")
        first_loss = last_loss = math.nan
        evaluated = True  # since the last step: then its gathers count to the volume of the next one
        for step in range(1, job.train.steps + 1):
            with throughput.step():
                batch = corpus.training_batch(
                    batch=job.train.batch, sequence=job.model.sequence, seed=job.train.seed, step=step, rank=here.rank
                ).to(here.device)
                loss = model(batch.tokens, batch.targets)
                loss.backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                reported = step in (1, job.train.steps) or step % job.train.report_every == 0
                if reported:  # reading the loss waits for the device, so not at every step
                    last_loss = here.mean(loss)
                    first_loss = last_loss if step == 1 else first_loss
            progress.advance()
            if reported:
                stats = zeroshard.stats(model)
                progress.report(_step_report(step, last_loss, throughput, stats, evaluated))
            evaluated = step == job.train.steps or step % job.train.evaluate_every == 0
            if evaluated:
                held_out = evaluate(model, job, corpus, here)
                progress.say(f"held-out loss {held_out:.3f} after {step} steps")

    weights = zeroshard.full_state_dict(model, rank=0)
    del model, optimizer, scheduler
    if dist.is_initialized():
        dist.barrier()  # a rank that leaves early would look like one that failed
        dist.destroy_process_group()
    if here.rank != 0:
        return
    file = save_weights(out, job.model, weights)
    progress.say(f"saved {file}")
    progress.say(_sampled_text(job, out, here.device))
    console.print(
        closing_table(
            Outcome(
                parameters=stats.parameters,
                stage=int(str(job.shard.get("stage", DEFAULT_STAGE))),
                world=here.world,
                precision=precision,
                measured=_state_bytes(stats),
                volume=volume,
                kept=stats.kept_parameters / stats.padded_parameters,
                first_loss=first_loss,
                last_loss=last_loss,
                held_out_before=before,
                held_out_after=held_out,
                tokens_per_second=throughput.tokens_per_second,
                seconds=time.perf_counter() - began,
            )
        )
    )


def resolve_device(device: str) -> str:
    """Return "cpu" or "cuda" for a job's `train.device`."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Return the optimizer's groups: matrices decay, biases and norms do not."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def lr_share(step: int, steps: int, warmup: int) -> float:
    """Return the learning rate of a step as a share of the highest: a linear warm-up, then a cosine.

    >>> [round(lr_share(step, steps=10, warmup=4), 2) for step in (0, 3, 4, 7, 10)]
    [0.25, 1.0, 1.0, 0.55, 0.1]
    """
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / (steps - warmup)
    return LOWEST_LR + (1 - LOWEST_LR) * (1 + math.cos(math.pi * min(done, 1.0))) / 2


@torch.no_grad()
def evaluate(model: nn.Module, job: Job, corpus: Corpus, here: Rank) -> float:
    """Return the mean loss on held-out files; every rank calls this and takes its part of them."""
    model.eval()
    losses = [
        model(batch.tokens, batch.targets)
        for batch in (
            batch.to(here.device)
            for batch in corpus.held_out_batches(
                batches=job.train.evaluate_batches,
                batch=job.train.batch,
                sequence=job.model.sequence,
                rank=here.rank,
                ranks=here.world,
            )
        )
    ]
    model.train()
    return here.mean(torch.stack(losses).float().mean())


def _sampled_text(job: Job, out: Path, device: torch.device) -> str:
    """Return text from the weights as they were saved, by a model that knows nothing of shards."""
    if not job.train.sample:
        return ""
    if device.type == "cuda" and 5 * job.model.parameters > torch.cuda.mem_get_info(device)[0]:
        return "too large to sample from on one device"
    torch.set_num_threads(usable_cores())  # the other ranks have left
    model = load_weights(out, device)
    prompt = torch.tensor(list(PROMPT), device=device)
    text = bytes(sample(model, prompt, job.train.sample, seed=job.train.seed).clamp(max=255).tolist())
    return f"a sample from {out}:\n" + "\n".join(f"    {line}" for line in text.decode(errors="replace").splitlines())


def _headline(job: Job, here: Rank, precision: str, corpus: Corpus) -> str:
    return (
        f"{job.name}: {job.model.parameters / 1e6:,.1f}M parameters, {job.train.steps} steps of "
        f"{here.world} × {job.train.batch} × {job.model.sequence} bytes, {precision} on {here.world} "
        f"{'GPU' if here.device.type == 'cuda' else 'CPU'} {'rank' if here.world == 1 else 'ranks'}\n"
        f"corpus: {corpus.files:,} files, {len(corpus.training) / 1e6:.1f} MB to train on, "
        f"{len(corpus.held_out) / 1e6:.1f} MB held out"
    )


def _state_bytes(stats: zeroshard.Stats) -> StateBytes:
    memory = stats.memory_at_step
    assert memory is not None, "a step has been made"
    return StateBytes(memory.parameters, memory.gradients, memory.optimizer_states)


def _step_report(step: int, loss: float, throughput: Throughput, stats: zeroshard.Stats) -> StepReport:
    return StepReport(
        step=step,
        loss=loss,
        tokens_per_second=throughput.tokens_per_second,
        memory=_state_bytes(stats),
        volume=stats.volume_elements / stats.padded_parameters,
    )
