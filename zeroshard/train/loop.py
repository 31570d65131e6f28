"""One rank's training run: an ordinary PyTorch loop, with one line that shards."""

import math
import os
import statistics
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.lr_scheduler import LambdaLR

import zeroshard

from ..comm.process_group import end_process_group, start_process_group
from ..config.job import Job, resolve_device
from ..config.options import Config
from ..runtime import runtime_of
from ..storage.claim import claimed
from ..system.allocator import defragment
from ..system.device import available_memory
from ..system.machine import device_of_rank, usable_cores
from .checkpoints import NEVER, RunCheckpoints, Start
from .data import Corpus
from .gpt import GPT, sample
from .gpt_weights import load_weights, save_weights
from .probe import Probe
from .record import Record
from .stopping import BY_SIGNAL, tell_launcher
from .tensor_parallel import parallelise
from .views import Bar, closing_table, evaluation_line, rank_zero_console, say, trace_line

PROMPT = b"import "
LOWEST_LR = 0.1  # the end of the cosine, as a share of the highest learning rate


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


def train(job: Job, out: Path, trace_file: Path | None = None, resume: str = NEVER) -> None:
    """Train, evaluate, save to `out`, sample, and show the closing table. Every rank calls this. A trace is of rank 0.

    `resume` is `auto`, `never` or the path of a checkpoint. No other job can write to `out` meanwhile.
    """
    here = Rank.from_environment(job.train.device, job.train.tensor_parallel)
    with claimed(out.absolute()) if here.rank == 0 else nullcontext():
        _train(here, job, out, trace_file, resume)


def _train(here: Rank, job: Job, out: Path, trace_file: Path | None, resume: str) -> None:
    start = Start.find(job, out, resume, here.data_ranks)
    job = start.job
    console = rank_zero_console(here.rank)
    options = shard_options(job, here)
    if options["defragment"]:
        defragment(here.device)  # before anything is put on the GPU
    corpus = Corpus.read(job.data)
    say(console, _headline(job, here, corpus))

    model, optimizer, scheduler = _build(job, here, options)
    record = Record(
        world=here.data_ranks,
        tensor_parallel=here.tensor_parallel,
        precision=job.precision,
        tokens_a_step=here.data_ranks * job.train.batch * job.model.sequence,
    )
    probe = Probe(model, job.train, record, trace_file if here.rank == 0 else None)
    checkpoints = RunCheckpoints(start, out, model, optimizer, scheduler)
    with probe, Bar(job.train.steps, console) as bar, checkpoints:
        saved = checkpoints.load()
        done = 0 if saved is None else int(saved["step"])
        if saved is None:
            if resume != NEVER:
                say(console, "no checkpoint to resume from: training begins at the first step")
            record.evaluated(0, evaluate(model, job, corpus, here))
            say(console, evaluation_line(0, record))
        else:
            record.resume(done, saved["journal"])
            bar.reach(done)
            say(console, f"resumed after step {done}/{job.train.steps}")
        for step in range(done + 1, job.train.steps + 1):
            batch = corpus.training_share(
                of_ranks=start.origin.ranks,
                of_batch=start.origin.batch,
                ranks=here.data_ranks,
                sequence=job.model.sequence,
                seed=job.train.seed,
                step=step,
                rank=here.data_rank,
            ).to(here.device)
            probe.begin(step)
            loss = model(batch.tokens, batch.targets)
            loss.backward()
            probe.before_update(step)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            probe.end(step)
            bar.reach(step)

            last = step == job.train.steps
            if step == done + 1 or step % job.train.report_every == 0 or last:  # reading the loss waits for the device
                record.measured(step, mean(model, loss), zeroshard.stats(model))
                bar.show(step, record)
            if last:
                zeroshard.synchronize(model)  # publishes a delayed update
            if step % job.train.evaluate_every == 0 or last:
                with record.stopwatch.paused():
                    record.evaluated(step, evaluate(model, job, corpus, here))
                say(console, evaluation_line(step, record))
            if checkpoints.after_step(step, record.state_dict()):
                say(console, f"stopped after step {step} ({checkpoints.stopped}); saved {checkpoints.path_of(step)}")
                break
        checkpoints.finish()

    stopped = checkpoints.stopped
    weights = save_weights(out, job.model, model) if stopped is None else []
    end_process_group(runtime_of(model).fabric)
    if here.rank != 0:
        return
    if stopped is not None:
        if checkpoints.stopped_by_signal:
            say(console, "go on with the same command and --resume auto")
        tell_launcher(BY_SIGNAL if checkpoints.stopped_by_signal else stopped)
        return
    del model, optimizer, scheduler, probe, checkpoints  # room for the sample
    if record.trace is not None:
        say(console, trace_line(record.trace))
    say(console, f"saved {weights[-1]}")
    say(console, _sampled_text(job, out, here.device))
    if record.stats is None:
        say(console, f"all {job.train.steps} steps were made before, so there is nothing measured to show")
    else:
        console.print(closing_table(record))


def _build(job: Job, here: Rank, options: dict[str, object]) -> tuple[nn.Module, torch.optim.Optimizer, LambdaLR]:
    """Return the sharded model, its optimizer and its schedule of learning rates."""
    torch.manual_seed(job.train.seed)
    with torch.device("meta"):  # no rank ever has the whole model: shard() initialises it unit by unit
        gpt = GPT(job.built_model)
    if here.tensor_parallel > 1:
        start_process_group(here.device)
        ranks = (here.data_ranks, here.tensor_parallel)
        parallelise(gpt, init_device_mesh(here.device.type, ranks, mesh_dim_names=("data", "model"))["model"])
    adamw = torch.optim.AdamW(parameter_groups(gpt, job.train.weight_decay), lr=job.train.lr, betas=(0.9, 0.95))
    model, optimizer = zeroshard.shard(gpt, adamw, **options)
    warmup = round(job.train.warmup * job.train.steps)
    return model, optimizer, LambdaLR(optimizer, lambda step: lr_share(step, job.train.steps, warmup))


def shard_options(job: Job, here: Rank) -> dict[str, object]:
    """Return the options that this rank gives to `shard()`. Only the GPU differs from rank to rank.

    GPU memory is defragmented unless the job says otherwise.
    """
    example = torch.empty(job.train.batch, job.model.sequence, dtype=torch.long, device="meta")
    return {"defragment": here.device.type == "cuda", **job.shard, "device": here.device, "example": (example, example)}


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


def mean(model: nn.Module, value: Tensor) -> float:
    """Return the mean of a scalar over all ranks; every rank calls this. It waits for the device, not for ever."""
    return statistics.fmean(runtime_of(model).fabric.gather_objects(value.item()))


@torch.no_grad()
def evaluate(model: nn.Module, job: Job, corpus: Corpus, here: Rank) -> float:
    """Return the mean loss on held-out files. Every rank calls this and evaluates its part of them."""
    model.eval()
    total = torch.zeros((), device=here.device)
    for batch in corpus.held_out_batches(
        batches=job.train.evaluate_batches,
        batch=job.train.batch,
        sequence=job.model.sequence,
        rank=here.data_rank,
        ranks=here.data_ranks,
    ):
        batch = batch.to(here.device)
        total += model(batch.tokens, batch.targets)
    model.train()
    return mean(model, total) / job.train.evaluate_batches


def _sampled_text(job: Job, out: Path, device: torch.device) -> str:
    """Return text that a plain, unsharded model samples from the saved weights."""
    if not job.train.sample:
        return "no sample was asked for"
    if 5 * job.model.parameters > available_memory(device):
        return "no sample: the whole model is too large for one device"
    torch.set_num_threads(usable_cores())  # the other ranks have ended
    prompt = torch.tensor(list(PROMPT), device=device)
    tokens = sample(load_weights(out, device), prompt, job.train.sample, seed=job.train.seed).clamp(max=255)
    text = bytes(tokens.tolist()).decode(errors="replace")
    # Control characters are replaced: a terminal would obey them.
    text = "".join(sign if sign.isprintable() or sign == "\n" else "\ufffd" for sign in text)
    return "a sample from the saved weights:\n" + "\n".join(f"    {line}" for line in text.splitlines())


def _headline(job: Job, here: Rank, corpus: Corpus) -> str:
    kind = "GPU" if here.device.type == "cuda" else "CPU"
    chosen = Config.parse(job.shard)
    offload = ", offload auto" if chosen.chooses_offload else "" if chosen.offload is None else ", offload cpu"
    if here.tensor_parallel > 1:
        offload += f", tensor parallel {here.tensor_parallel}"
    return (
        f"{job.name}: {job.model.parameters / 1e6:,.1f}M parameters, {job.train.steps} steps of {here.data_ranks} × "
        f"{job.train.batch} × {job.model.sequence} bytes, {job.precision}{offload}, {here.world} {kind} rank(s)\n"
        f"corpus: {corpus.files:,} files, {len(corpus.training) / 1e6:.1f} MB to train on, "
        f"{len(corpus.held_out) / 1e6:.1f} MB held out"
    )
