"""One rank's training run: an ordinary PyTorch loop, with one line that shards."""

import math
from contextlib import nullcontext
from pathlib import Path

import torch
from rich.console import Console
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import zeroshard

from ..comm.process_group import end_process_group
from ..config.finetune import LanguageModelConfig
from ..config.job import Job
from ..recorder.recorder import Recorder
from ..runtime import runtime_of
from ..storage.claim import claimed
from ..system.allocator import defragment
from .checkpoints import NEVER, RunCheckpoints, Start
from .gpt.task import GPTTask
from .language.task import LanguageTask
from .probe import Probe
from .rank import Rank
from .record import Record
from .stopping import BY_SIGNAL, tell_launcher
from .task import Task, mean
from .views import Bar, evaluation_line, rank_zero_console, say, trace_line

LOWEST_LR = 0.1  # the end of the cosine, as a share of the highest learning rate


def train(job: Job, out: Path, trace_file: Path | None = None, resume: str = NEVER) -> None:
    """Train, evaluate, save to `out`, sample, and show the closing table. Every rank calls this. A trace is of rank 0.

    `resume` is `auto`, `never` or the path of a checkpoint. No other job can write to `out` meanwhile.
    """
    here = Rank.from_environment(job.train.device, job.train.tensor_parallel)
    with claimed(out.absolute()) if here.rank == 0 else nullcontext():
        _train(here, job, out, trace_file, resume)


def task_of(job: Job, out: Path, here: Rank) -> Task:
    """Return what a job trains. Reads its data."""
    if isinstance(job.model, LanguageModelConfig):
        return LanguageTask(job, out, here)
    return GPTTask(job, here)


def _train(here: Rank, job: Job, out: Path, trace_file: Path | None, resume: str) -> None:
    task = task_of(job, out, here)
    start = Start.find(job, out, resume, here.data_ranks, task.identity)
    if start.job.shard.get("defragment", here.device.type == "cuda"):
        defragment(here.device)  # before anything is put on the GPU
    job = task.start(start.job, start.origin, here)
    console = rank_zero_console(here.rank)
    say(console, task.headline)

    model, optimizer, scheduler = _build(task, job)
    task.prepare(model)
    record = Record(
        world=here.data_ranks,
        tensor_parallel=here.tensor_parallel,
        precision=job.precision,
        tokens_a_step=task.tokens_a_step,
    )
    probe = Probe(model, job.train, record, trace_file if here.rank == 0 else None)
    checkpoints = RunCheckpoints(start, out, model, optimizer, scheduler)
    recorder = Recorder(model, out, tokens=task.tokens_a_step, batch=job.train.batch)
    with recorder, probe, Bar(job.train.steps, console) as bar, checkpoints:
        saved = checkpoints.load()
        done = 0 if saved is None else int(saved["step"])
        if saved is None:
            if resume != NEVER:
                say(console, "no checkpoint to resume from: training begins at the first step")
            _evaluate(task, model, 0, record, recorder, console)
            _say_sample(task, model, "before", console)
            record.disturbed(0)
        else:
            record.resume(done, saved["journal"])
            bar.reach(done)
            say(console, f"resumed after step {done}/{job.train.steps}")
        for step in range(done + 1, job.train.steps + 1):
            batches = task.micro_batches(step)
            record.micro_batches = len(batches)
            probe.begin(step)
            total = torch.zeros((), device=here.device)
            for batch in batches:
                loss = task.loss(model, batch)
                loss.backward()
                total += loss.detach()
            probe.before_update(step)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            probe.end(step)
            bar.reach(step)

            last = step == job.train.steps
            if step == done + 1 or step % job.train.report_every == 0 or last:  # reading the loss waits for the device
                record.measured(step, mean(model, total), zeroshard.stats(model))
                recorder.log(loss=record.losses[-1])
                bar.show(step, record)
            if last:
                zeroshard.synchronize(model)  # publishes a delayed update
            if step % job.train.evaluate_every == 0 or last:
                with record.stopwatch.paused(), recorder.paused():
                    _evaluate(task, model, step, record, recorder, console)
            if checkpoints.after_step(step, record.state_dict()):
                say(console, f"stopped after step {step} ({checkpoints.stopped}); saved {checkpoints.path_of(step)}")
                break
        checkpoints.finish()

    stopped, weights = checkpoints.stopped, list[Path]()
    if stopped is None:
        _say_sample(task, model, "after", console)
        weights = task.save(model, out)
    end_process_group(runtime_of(model).fabric)
    if here.rank != 0:
        return
    if stopped is not None:
        if recorder.report is not None:
            say(console, f"report: {recorder.report}")
        if checkpoints.stopped_by_signal:
            say(console, "go on with the same command and --resume auto")
        tell_launcher(BY_SIGNAL if checkpoints.stopped_by_signal else stopped)
        return
    del model, optimizer, scheduler, probe, checkpoints  # room for the sample
    if record.trace is not None:
        say(console, trace_line(record.trace))
    say(console, f"saved {weights[-1]}")
    if (text := task.sample_saved(out, here.device)) is not None:
        say(console, text)
    if record.stats is None:
        say(console, f"all {job.train.steps} steps were made before, so there is nothing measured to show")
        return
    for part in task.closing(record, out):
        console.print(part, highlight=False, soft_wrap=isinstance(part, str))
    if recorder.report is not None:
        say(console, f"report: {recorder.report}")


def _build(task: Task, job: Job) -> tuple[nn.Module, torch.optim.Optimizer, LambdaLR]:
    """Return the sharded model, its optimizer and its schedule of learning rates."""
    torch.manual_seed(job.train.seed)
    whole = task.build()
    model, optimizer = zeroshard.shard(whole, task.optimizer(whole), **task.shard_options())
    warmup = round(job.train.warmup * job.train.steps)
    return model, optimizer, LambdaLR(optimizer, lambda step: lr_share(step, job.train.steps, warmup))


def lr_share(step: int, steps: int, warmup: int) -> float:
    """Return the learning rate of a step as a share of the highest: a linear warm-up, then a cosine.

    >>> [round(lr_share(step, steps=10, warmup=4), 2) for step in (0, 3, 4, 7, 10)]
    [0.25, 1.0, 1.0, 0.55, 0.1]
    """
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / (steps - warmup)
    return LOWEST_LR + (1 - LOWEST_LR) * (1 + math.cos(math.pi * min(done, 1.0))) / 2


def _evaluate(task: Task, model: nn.Module, step: int, record: Record, recorder: Recorder, console: Console) -> None:
    loss = task.evaluate(model)
    if loss is not None:
        record.evaluated(step, loss)
        recorder.evaluated(loss, step)
        say(console, evaluation_line(step, record))


def _say_sample(task: Task, model: nn.Module, when: str, console: Console) -> None:
    text = task.sample_sharded(model)
    if text is not None:
        say(console, f"a sample {when} training:\n{text}")
