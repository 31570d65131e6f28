"""What the recorder writes of a loop, and that the loop does not notice."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zeroshard
from tests.models import loss_of
from tests.ranks import on_ranks
from tests.training import adamw, shard
from zeroshard.config.offload import Offload
from zeroshard.observe.ledger import Ledger
from zeroshard.recorder import recorder
from zeroshard.recorder.recorder import Recorder
from zeroshard.report import page
from zeroshard.report.journal import FILE, Journal, read
from zeroshard.report.timeline import COMPUTE, DOWN, GATHER, REDUCE, UP, UPDATE, typical
from zeroshard.runtime import runtime_of
from zeroshard.system import trace


def loop(steps: int, folder: Path | str | None, **options: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Trains some steps and records them. Returns the losses and the weights."""
    model, optimizer = shard(adamw, **options)
    losses = []
    with zeroshard.record(model, folder, tokens=100) if folder is not None else tempfile.TemporaryDirectory() as run:
        for step in range(steps):
            loss = loss_of(model, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if isinstance(run, Recorder):
                run.log(loss=loss)
    return losses, zeroshard.full_state_dict(model)


def lines(folder: Path | str) -> Iterator[dict[str, Any]]:
    for line in (Path(folder) / FILE).read_text().splitlines():
        yield json.loads(line)


def test_a_loop_of_ones_own_is_recorded_step_by_step(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    losses, _ = loop(9, tmp_path, stage=1)
    run = read(tmp_path)
    assert [step.step for step in run.steps] == list(range(1, 10))
    assert [step.loss for step in run.steps] == losses
    assert {step.lr for step in run.steps} == {1e-2}
    assert all(step.seconds is not None and step.seconds > 0 for step in run.steps[1:])
    assert (run.steps[0].tokens, run.end, run.head["ranks"], run.head["stage"]) == (100, "finished", 1, 1)
    assert (tmp_path / "report.html").stat().st_size < 2_000_000
    assert capfd.readouterr().out.strip().endswith(f"zeroshard: report: {tmp_path / 'report.html'}")


@on_ranks(2)
@pytest.mark.parametrize("stage", range(4))
def test_memory_volume_plan_and_lanes_are_those_of_the_run(stage: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        loop(8, folder, stage=stage)
        if dist.get_rank() != 0:
            assert not (Path(folder) / FILE).exists()
            return
        run = read(folder)
    assert run.memory is not None
    assert run.plan is not None
    assert run.plan.own is not None
    assert run.plan.own.stage == stage
    for kind in ("parameters", "gradients", "optimizer_states"):
        assert run.memory.device[kind] == pytest.approx(run.plan.own.at_step[kind], rel=0.01), kind
    assert {row.stage for row in run.plan.rows} == {0, 1, 2, 3}
    assert run.volume is not None
    moved, padded = sum(run.volume.elements.values()), run.number("padded")
    assert padded is not None
    assert run.volume.expected is not None
    assert moved == pytest.approx(run.volume.expected * padded)
    assert moved == run.plan.own.volume
    assert len(run.states_of_ranks) == 2
    window = typical(run.traced)
    assert window is not None
    lanes = {span.lane for span in window.spans}
    assert lanes == {COMPUTE, REDUCE, *([GATHER] if stage else [])}
    parts = {span.name.replace(",", " ").split()[0] for span in window.spans if span.lane == COMPUTE}
    assert {"forward", "backward", "update"} <= parts


@on_ranks(2)
def test_the_plan_of_several_micro_batches_counts_their_accumulators() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model, optimizer = shard(adamw, stage=2, precision="bf16")
        with zeroshard.record(model, folder):
            for step in range(4):
                for _ in range(3):
                    loss_of(model, step).backward()
                optimizer.step()
                optimizer.zero_grad()
        if dist.get_rank() == 0:
            run = read(folder)
            assert run.plan is not None
            assert run.plan.own is not None
            assert run.memory is not None
            assert run.number("micro_batches") == 3
            assert run.memory.device["accumulators"] == run.plan.own.at_step["accumulators"] > 0


def test_with_offload_all_six_lanes_have_their_work_and_the_host_its_memory(tmp_path: Path) -> None:
    loop(8, tmp_path, stage=2, offload=Offload(), precision="bf16")
    run = read(tmp_path)
    assert run.traced is not None
    assert {span.lane for span in run.traced.spans} == {COMPUTE, DOWN, UPDATE, UP}  # one rank has no collectives
    assert run.memory is not None
    assert run.plan is not None
    assert run.plan.own is not None
    assert sum(run.memory.host.values()) == run.plan.own.host > 0
    assert [row.offload for row in run.plan.rows].count("none") == 1
    assert run.volume is not None
    assert set(run.volume.host) == {"to the host", "to the device"}
    assert run.head["offload"] == {}


@on_ranks(2)
@pytest.mark.parametrize("offload", [None, Offload(), Offload(delayed_update_after=2)], ids=["none", "cpu", "delayed"])
def test_recording_changes_no_bit_of_the_training(offload: Offload | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        plain = loop(12, None, stage=3, offload=offload)
        recorded = loop(12, folder, stage=3, offload=offload)
    assert plain[0] == recorded[0]
    assert all(torch.equal(plain[1][name], recorded[1][name]) for name in plain[1])


def test_what_is_logged_before_a_step_belongs_to_it_and_after_it_too(tmp_path: Path) -> None:
    model, optimizer = shard(adamw)
    with zeroshard.record(model, tmp_path) as run:
        run.log(tokens=7)  # before everything: the first step
        for step in range(6):
            loss = loss_of(model, step)
            loss.backward()
            if step % 2:
                run.log(loss=step)
            optimizer.step()
            optimizer.zero_grad()
            if not step % 2 and step != 4:
                run.log(loss=torch.tensor(step), lr=0.5)
    steps = read(tmp_path).steps
    assert [step.loss for step in steps] == [0, 1, 2, 3, None, 5]
    assert [step.lr for step in steps] == [0.5, 1e-2, 0.5, 1e-2, 1e-2, 1e-2]
    assert [step.tokens for step in steps] == [7, None, None, None, None, None]


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_loss_logged_between_forward_and_backward_belongs_to_the_step_that_comes(
    tmp_path: Path, micro_batches: int, training: bool
) -> None:
    model, optimizer = shard(adamw)
    model.train(training)
    losses = []
    with zeroshard.record(model, tmp_path) as run:
        for step in range(4):
            for micro_batch in range(micro_batches):
                loss = loss_of(model, 10 * step + micro_batch)
                run.log(loss=loss)
                loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    assert [step.loss for step in read(tmp_path).steps] == losses


def test_a_loss_logged_after_its_step_is_not_moved_by_an_evaluation_without_gradients(tmp_path: Path) -> None:
    model, optimizer = shard(adamw)
    losses = []
    with zeroshard.record(model, tmp_path) as run:
        for step in range(4):
            for _ in range(2):
                loss = loss_of(model, step)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                loss_of(model, 99)
            run.log(loss=0.0)
            run.log(loss=loss)  # the later one counts
            losses.append(loss.item())
    assert [step.loss for step in read(tmp_path).steps] == losses


def test_a_loss_with_several_elements_is_refused(tmp_path: Path) -> None:
    model, _ = shard(adamw)
    with (
        zeroshard.record(model, tmp_path) as run,
        pytest.raises(ValueError, match=r"loss must be one number, .*\(3,\)"),
    ):
        run.log(loss=torch.zeros(3))


def test_a_model_without_an_optimizer_is_refused(tmp_path: Path) -> None:
    model, _ = zeroshard.shard(torch.nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(ValueError, match="sharded without an optimizer, so it makes no steps"):
        zeroshard.record(model, tmp_path)


def test_pauses_belong_to_no_step(tmp_path: Path) -> None:
    model, optimizer = shard(adamw)
    with zeroshard.record(model, tmp_path) as run:
        run.evaluated(3.5)
        began = time.perf_counter()
        for step in range(3):
            loss_of(model, step).backward()
            optimizer.step()
            with run.paused():
                time.sleep(0.3)
            run.evaluated(2.5)
        elapsed = time.perf_counter() - began
    found = read(tmp_path)
    assert [(each.step, each.loss) for each in found.evaluations] == [(0, 3.5), (1, 2.5), (2, 2.5), (3, 2.5)]
    seconds = [step.seconds for step in found.steps[1:] if step.seconds is not None]
    assert len(seconds) == 2
    assert sum(seconds) <= elapsed - 2 * 0.3


def test_a_run_goes_on_in_its_folder(tmp_path: Path) -> None:
    model, optimizer = shard(adamw)

    def train(until: int) -> None:
        with zeroshard.record(model, tmp_path / "run") as run:
            while optimizer.steps < until:
                loss = loss_of(model, optimizer.steps)
                loss.backward()
                optimizer.step()
                run.log(loss=loss)

    train(5)
    zeroshard.save(tmp_path / "checkpoint", model, optimizer)
    train(8)
    zeroshard.load(tmp_path / "checkpoint", model, optimizer)
    train(7)
    found = read(tmp_path / "run")
    assert [step.step for step in found.steps] == [1, 2, 3, 4, 5, 6, 7]
    assert found.starts == 3
    assert [line["after"] for line in lines(tmp_path / "run") if line["kind"] == "run"] == [0, 5, 5]


def test_a_killed_run_keeps_its_lines(tmp_path: Path) -> None:
    program = f"""
import os, signal, torch, zeroshard
model = torch.nn.Linear(2, 2)
model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters()))
with zeroshard.record(model, {str(tmp_path)!r}) as run:
    for step in range(6):
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], check=False)
    assert done.returncode == -9
    run = read(tmp_path)
    assert len(run.steps) == 5  # the last one was still open for a loss
    assert (run.damaged, run.end) == (0, None)


def test_an_error_in_the_loop_passes_and_the_report_says_so(tmp_path: Path) -> None:
    model, optimizer = shard(adamw)

    def train() -> None:
        with zeroshard.record(model, tmp_path):
            loss_of(model, 0).backward()
            optimizer.step()
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        train()
    assert read(tmp_path).end == "ended by KeyError"
    assert "The run ended by KeyError." in (tmp_path / "report.html").read_text()
    loss_of(model, 1).backward()
    optimizer.step()  # nobody records it
    assert len(read(tmp_path).steps) == 1


def test_a_full_disk_ends_the_recording_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = shard(adamw)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with zeroshard.record(model, tmp_path) as run:
        for step in range(3):
            if step == 1:
                monkeypatch.setattr(Journal, "write", full)
            loss_of(model, step).backward()
            told = pytest.warns(UserWarning, match="the recording of this run ends: .*No space left")
            with told if step == 1 else nullcontext():
                optimizer.step()
            run.log(loss=1.0)
    assert optimizer.steps == 3
    assert not (tmp_path / "report.html").exists()


def steps_of(model: torch.nn.Module, optimizer: Any, run: Recorder | None = None, steps: int = 3) -> None:
    """Makes some steps, whose losses are logged."""
    for step in range(steps):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if run is not None:
            run.log(loss=loss)


def test_the_name_of_a_folder_may_be_no_utf_8(tmp_path: Path) -> None:
    model, optimizer = shard(adamw)
    folder = tmp_path / os.fsdecode(b"run\xff")
    with zeroshard.record(model, folder) as run:
        steps_of(model, optimizer, run)
    assert read(folder).name == "run?"
    assert run.report is not None
    assert "run?" in run.report.read_text()


def test_counts_may_be_numbers_of_numpy(tmp_path: Path) -> None:
    model, optimizer = shard(adamw)
    with zeroshard.record(model, tmp_path, tokens=np.int64(512)) as run:  # type: ignore[arg-type]
        steps_of(model, optimizer, run)
        run.log(tokens=torch.tensor(5))
    assert [step.tokens for step in read(tmp_path).steps] == [512, 512, 5]


def test_a_plan_that_fails_is_left_out(tmp_path: Path) -> None:
    model, optimizer = shard(adamw)

    def broken(_: int) -> dict[str, Any]:
        raise KeyError("no such profile")

    runtime_of(model).plan_beside = broken
    with (
        pytest.warns(UserWarning, match="will have no plan: KeyError: 'no such profile'"),
        zeroshard.record(model, tmp_path) as run,
    ):
        steps_of(model, optimizer, run)
    assert len(read(tmp_path).steps) == 3


@pytest.mark.parametrize("name", ["memory_facts", "volume_facts"])
def test_an_error_of_the_recorder_ends_the_recording_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model, optimizer = shard(adamw)

    def broken(*_: object) -> dict[str, Any]:
        raise KeyError("facts")

    monkeypatch.setattr(recorder, name, broken)
    with warnings.catch_warnings(record=True) as told, zeroshard.record(model, tmp_path) as run:
        warnings.simplefilter("always")
        steps_of(model, optimizer, run)
    assert [str(each.message) for each in told] == ["the recording of this run ends: KeyError: 'facts'"]
    assert optimizer.steps == 3


def test_a_report_that_cannot_be_made_is_no_error_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = shard(adamw)

    def broken(_: object) -> str:
        raise ZeroDivisionError("page")

    monkeypatch.setattr(page, "render", broken)
    with (
        pytest.warns(UserWarning, match="no report was written: ZeroDivisionError: page"),
        zeroshard.record(model, tmp_path) as run,
    ):
        steps_of(model, optimizer, run)
    assert run.report is None


def test_a_broken_trace_hides_no_error_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = shard(adamw)

    def broken(_: object) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    def train() -> None:
        with zeroshard.record(model, tmp_path) as run:
            steps_of(model, optimizer, run, steps=5)  # in the middle of its trace
            monkeypatch.setattr(trace.Trace, "finish", broken)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        train()
    assert read(tmp_path).end == "ended by KeyError"
    recording = trace.begin()
    assert recording is not None, "the recorder has left none behind"
    with pytest.raises(RuntimeError, match="device-side assert"):
        trace.end(recording)
    last = trace.begin()
    assert last is not None, "a trace that could not be read has ended"
    trace.drop(last)


@on_ranks(2)
def test_if_rank_0_cannot_write_all_ranks_say_so_and_keep_no_hook() -> None:
    model, optimizer = shard(adamw, stage=1)
    hooks = len(optimizer._optimizer_step_post_hooks)
    with tempfile.TemporaryDirectory() as folder:
        taken = Path(folder) / "taken"
        taken.write_text("a file")
        with pytest.raises(OSError, match=r"record: cannot write to .*taken"), zeroshard.record(model, taken):
            pass
    assert len(optimizer._optimizer_step_post_hooks) == hooks
    steps_of(model, optimizer)


def test_a_loop_that_stops_early_says_why(tmp_path: Path) -> None:
    model, optimizer = shard(adamw)
    with zeroshard.record(model, tmp_path) as run:
        steps_of(model, optimizer, run)
        run.reason = "stopped: SIGTERM"
    assert read(tmp_path).end == "stopped: SIGTERM"
    assert "The run stopped: SIGTERM." in (tmp_path / "report.html").read_text()


def test_a_learning_rate_that_is_a_tensor_is_that_of_its_step(tmp_path: Path) -> None:
    model, optimizer = shard(lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(1.0)))
    rates = []
    with zeroshard.record(model, tmp_path):
        for step in range(4):
            loss_of(model, step).backward()
            rates.append(float(optimizer.param_groups[0]["lr"]))
            optimizer.step()
            optimizer.param_groups[0]["lr"].mul_(0.5)  # in place, as schedulers of torch do
    assert [step.lr for step in read(tmp_path).steps] == rates == [1, 0.5, 0.25, 0.125]


@pytest.mark.parametrize("saved", [0, 3])
def test_a_loop_may_go_back_to_a_checkpoint(tmp_path: Path, saved: int) -> None:
    model, optimizer = shard(adamw)
    with zeroshard.record(model, tmp_path / "run") as run:
        steps_of(model, optimizer, run, steps=saved)
        zeroshard.save(tmp_path / "checkpoint", model, optimizer)
        steps_of(model, optimizer, run, steps=4)
        zeroshard.load(tmp_path / "checkpoint", model, optimizer)
        steps_of(model, optimizer, run, steps=9)
    found = read(tmp_path / "run")
    assert found.damaged == 0
    assert [step.step for step in found.steps] == list(range(1, saved + 10))
    assert found.plan is not None
    assert found.traced is not None
    assert found.traced.steps[0] > saved


def test_a_recorder_whose_block_has_ended_holds_no_model(tmp_path: Path) -> None:
    model, optimizer = shard(adamw)
    with zeroshard.record(model, tmp_path) as run:
        steps_of(model, optimizer, run)
    runtime = weakref.ref(runtime_of(model))
    del model, optimizer
    gc.collect()
    assert runtime() is None
    assert run.report == tmp_path / "report.html"


def test_outside_its_block_a_recorder_refuses_to_log(tmp_path: Path) -> None:
    model, optimizer = shard(adamw)
    run = zeroshard.record(model, tmp_path)
    with pytest.raises(RuntimeError, match=r"log\(\) outside the block .* `with zeroshard.record"):
        run.log(loss=1.0)
    with run:
        steps_of(model, optimizer, run)
    with pytest.raises(RuntimeError, match=r"evaluated\(\) outside the block"):
        run.evaluated(1.0)
    with pytest.raises(RuntimeError, match=r"was used; call zeroshard.record\(\) again"), run:
        pass
    with pytest.raises(TypeError, match="a ShardedOptimizer is no model; pass the model"):
        zeroshard.record(optimizer, tmp_path)


def test_a_trace_of_the_users_takes_the_place_of_the_recorders(tmp_path: Path) -> None:
    model, optimizer = shard(adamw)
    with zeroshard.record(model, tmp_path):
        for step in range(12):
            if step == 5:  # the recorder is tracing
                with zeroshard.trace(tmp_path / "mine.json") as mine:
                    loss_of(model, step).backward()
                    optimizer.step()
                continue
            loss_of(model, step).backward()
            optimizer.step()
    assert {span.name.split()[0] for span in mine.spans if span.track == COMPUTE} >= {"forward", "backward", "update"}
    traced = read(tmp_path).traced
    assert traced is not None
    assert traced.steps == [8, 9, 10]  # tried again when the user's was over


def test_recording_leaves_no_trace_and_no_hook_behind(tmp_path: Path) -> None:
    model, optimizer = shard(adamw)
    hooks = len(optimizer._optimizer_step_post_hooks)
    with zeroshard.record(model, tmp_path):
        for step in range(5):  # in the middle of its trace
            loss_of(model, step).backward()
            optimizer.step()
    assert len(optimizer._optimizer_step_post_hooks) == hooks
    recording = trace.begin()
    assert recording is not None
    assert trace.end(recording)
    assert read(tmp_path).traced is not None


def test_an_ordinary_step_costs_one_line_and_asks_nobody_for_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = {"lines": 0, "memory": 0, "stats": 0}

    def counting(name: str, function: Any) -> Any:
        def counted_function(*args: Any, **kwargs: Any) -> Any:
            counted[name] += 1
            return function(*args, **kwargs)

        return counted_function

    model, optimizer = shard(adamw)
    with zeroshard.record(model, tmp_path) as run:
        for step in range(40):
            if step == 33:  # no power of two, no trace until step 64
                monkeypatch.setattr(Journal, "write", counting("lines", Journal.write))
                monkeypatch.setattr(Ledger, "at_step", counting("memory", Ledger.at_step))
                monkeypatch.setattr(type(runtime_of(model)), "stats", counting("stats", type(runtime_of(model)).stats))
            loss = loss_of(model, step)
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
        assert counted == {"lines": 7, "memory": 0, "stats": 0}
