"""One rank's training run: an ordinary PyTorch loop, with one line that shards."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

import torch
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
from .live.audience import Audience
from .live.events import Evaluation, RunEnd, RunStart, StepEvent
from .live.json_lines import JsonLines
from .live.loggers import LoggedRun, add_loggers, settings_of
from .live.terminal import rank_zero_console
from .probe import Probe
from .rank import Rank
from .record import Record
from .stopping import BY_SIGNAL, FINISHED, tell_launcher
from .task import Task, mean
from .views import trace_line

LOWEST_LR = 0.1  # the end of the cosine, as a share of the highest learning rate


def train(
    job: Job, out: Path, trace_file: Path | None = None, resume: str = NEVER, json_lines: TextIO | None = None
) -> None:
    """Train, evaluate, save to `out`, sample, and show the closing table. Every rank calls this. A trace is of rank 0.

    `resume` is `auto`, `never` or the path of a checkpoint. No other job can write to `out` meanwhile. With a stream
    for `json_lines`, rank 0 writes its events there, and prints everything else on standard error.
    """
    here = Rank.from_environment(job.train.device, job.train.tensor_parallel)
    console = rank_zero_console(here.rank, errors=json_lines is not None)
    with (
        claimed(out.absolute()) if here.rank == 0 else nullcontext(),
        Audience(console, job.train.steps) as audience,
    ):
        if json_lines is not None:
            audience.add("--json", JsonLines(json_lines))
        _train(here, job, out, trace_file, resume, audience)


def task_of(job: Job, out: Path, here: Rank) -> Task:
    """Return what a job trains. Reads its data."""
    if isinstance(job.model, LanguageModelConfig):
        return LanguageTask(job, out, here)
    return GPTTask(job, here)


def _train(here: Rank, job: Job, out: Path, trace_file: Path | None, resume: str, audience: Audience) -> None:
    task = task_of(job, out, here)
    start = Start.find(job, out, resume, here.data_ranks, task.identity)
    if start.job.shard.get("defragment", here.device.type == "cuda"):
        defragment(here.device)  # before anything is put on the GPU
    job = task.start(start.job, start.origin, here)
    audience.bar.expect(job.train.steps)
    audience.say(task.headline)

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
    with checkpoints:
        with recorder, probe, audience.bar:
            saved = checkpoints.load()
            done = 0 if saved is None else int(saved["step"])
            _begin(here, job, out, audience, model, done, task.tokens_a_step)
            if saved is None:
                if resume != NEVER:
                    audience.say("no checkpoint to resume from: training begins at the first step")
                _evaluate(task, model, 0, record, recorder, audience)
                _say_sample(task, model, "before", audience)
                record.disturbed(0)
            else:
                record.resume(done, saved["journal"])
                audience.say(f"resumed after step {done}/{job.train.steps}")
            step = done
            loss = total = torch.zeros((), device=here.device)
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
                lr = float(optimizer.param_groups[0]["lr"])
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                probe.end(step)
                audience.bar.reach(step)

                last = step == job.train.steps
                # Reading the loss waits for the device.
                if step == done + 1 or step % job.train.report_every == 0 or last:
                    record.measured(step, mean(model, total), zeroshard.stats(model))
                    recorder.log(loss=record.losses[-1])
                    audience.tell(StepEvent.of_record(record, step, job.train.steps, lr))
                if last:
                    zeroshard.synchronize(model)  # publishes a delayed update
                if step % job.train.evaluate_every == 0 or last:
                    with record.stopwatch.paused(), recorder.paused():
                        _evaluate(task, model, step, record, recorder, audience)
                if checkpoints.after_step(step, record.state_dict()):
                    assert checkpoints.stopped is not None
                    tell_launcher(BY_SIGNAL if checkpoints.stopped_by_signal else checkpoints.stopped)
                    recorder.reason = f"stopped: {checkpoints.stopped}"
                    audience.say(
                        f"stopped after step {step} ({checkpoints.stopped}); saved {checkpoints.path_of(step)}"
                    )
                    break
            checkpoints.finish()

        stopped, weights = checkpoints.stopped, list[Path]()
        if stopped is None:
            if _is_finite(record.losses):  # the same on all ranks, which sample together
                _say_sample(task, model, "after", audience)
            weights = task.save(model, out)
            tell_launcher(FINISHED)
    end = RunEnd.of_record(
        record,
        step,
        job.train.steps,
        stopped=stopped,
        weights=tuple(map(str, weights)),
        checkpoint=None if stopped is None else str(checkpoints.path_of(step)),
    )
    end_process_group(runtime_of(model).fabric)
    if here.rank != 0:
        return
    if recorder.report is not None:
        audience.say(f"report: {recorder.report}")
    if stopped is not None:
        if checkpoints.stopped_by_signal:
            audience.say("go on with the same command and --resume auto")
        audience.tell(end)
        return
    del model, optimizer, scheduler, probe, checkpoints, recorder, loss, total  # room for the sample
    if record.trace is not None:
        audience.say(trace_line(record.trace))
    audience.say(f"saved {weights[-1]}")
    if not (_is_finite(record.losses) and _is_finite(record.held_out)):
        audience.say("no sample: the last loss is not finite")
    elif (text := task.sample_saved(out, here.device)) is not None:
        audience.say(text)
    if record.stats is None:
        audience.say(f"all {job.train.steps} steps were made before, so there is nothing measured to show")
    else:
        for part in task.closing(record, out):
            audience.show(part)
    audience.tell(end)  # last: a run that fails has no end


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


def _begin(
    here: Rank, job: Job, out: Path, audience: Audience, model: nn.Module, done: int, tokens_a_step: int
) -> None:
    """Open the loggers that the job names, and tell everybody that the run begins."""
    if not audience.listens:
        return
    stats = zeroshard.stats(model)
    start = RunStart(
        name=out.absolute().name,
        folder=str(out),
        step=done,
        of=job.train.steps,
        stage=stats.stage,
        ranks=here.world,
        precision=job.precision,
        parameters=stats.parameters,
        tokens_per_step=tokens_a_step,
    )
    settings = settings_of(start, asdict(job.train), job.shard)
    add_loggers(
        audience, job.train.log, LoggedRun(name=start.name, folder=out.absolute(), step=done, settings=settings)
    )
    audience.tell(start)


def _evaluate(task: Task, model: nn.Module, step: int, record: Record, recorder: Recorder, audience: Audience) -> None:
    waits = runtime_of(model).fabric.waits
    before = waits.seconds()
    loss = task.evaluate(model)
    record.waited_elsewhere(before, waits.seconds())
    if loss is not None:
        record.evaluated(step, loss)
        recorder.evaluated(loss, step)
        audience.tell(Evaluation(step=step, held_out_loss=loss))


def _is_finite(losses: Sequence[float]) -> bool:
    """Return whether the last of these losses, if there is one, is a number."""
    return not losses or math.isfinite(losses[-1])


def _say_sample(task: Task, model: nn.Module, when: str, audience: Audience) -> None:
    text = task.sample_sharded(model)
    if text is not None:
        audience.say(f"a sample {when} training:\n{text}")
