"""A whole run on one rank, and what everybody was told of it."""

from __future__ import annotations

import gc
import io
import json
import weakref
from pathlib import Path
from typing import Any

import pytest

import zeroshard
from zeroshard.config.job import Job, load_job
from zeroshard.runtime import runtime_of
from zeroshard.train.gpt.task import GPTTask
from zeroshard.train.live import loggers
from zeroshard.train.live.loggers import LoggedRun
from zeroshard.train.loop import lr_share, train

WORLD = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def job_of(**changes: object) -> Job:
    given = {"steps": 8, "report_every": 2, "evaluate_every": 4, "save_every": 4, "sample": 0, "device": "cpu"}
    return load_job("tiny", {f"train.{name}": value for name, value in {**given, **changes}.items()})


class Counting:
    """A logger that notes the steps that it is told, and fails at one of them."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def open(self, run: LoggedRun) -> None:
        pass

    def scalars(self, step: int, values: Any) -> None:
        self.steps.append(step)
        if step == 4:
            raise ConnectionError("the network is gone")

    def close(self) -> None:
        raise AssertionError("it was dropped before")


class Told:
    """A run with TensorBoard and a logger that fails, and the same run resumed in the middle."""

    def __init__(self, out: Path) -> None:
        self.out, self.failing = out, Counting()
        with pytest.MonkeyPatch.context() as patch:
            for name, value in WORLD.items():
                patch.setenv(name, value)
            patch.setitem(loggers.CLASSES, "trackio", lambda: self.failing)  # type: ignore[arg-type]
            self.first = self._run(job_of(log=["trackio", "tensorboard"]), "never")
            middle = out / "checkpoints/step-00000004"
            self.resumed = self._run(job_of(log="tensorboard", report_every=1), str(middle))

    def _run(self, job: Job, resume: str) -> list[dict[str, Any]]:
        lines = io.StringIO()
        train(job, self.out, None, resume, lines)
        return [json.loads(line) for line in lines.getvalue().splitlines()]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return Told(tmp_path_factory.mktemp("run"))


def of(lines: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [line for line in lines if line["event"] == name]


def test_the_lines_tell_the_run_from_its_start_to_its_results(told: Told) -> None:
    names = [line["event"] for line in told.first]
    assert names[:3] == ["start", "evaluation", "step"]
    assert names[-1] == "end"
    start, end = told.first[0], told.first[-1]
    assert (start["format"], start["step"], start["of"], start["stage"], start["ranks"]) == (1, 0, 8, 3, 1)
    assert start["tokens_per_step"] == 4 * 64
    assert start["name"] == told.out.name
    steps = of(told.first, "step")
    assert [line["step"] for line in steps] == [1, 2, 4, 6, 8]
    assert steps[0]["loss"] > steps[-1]["loss"] == end["loss"]
    assert [line["step"] for line in of(told.first, "evaluation")] == [0, 4, 8]
    assert end["held_out_loss"] == of(told.first, "evaluation")[-1]["held_out_loss"]
    assert end["stopped"] is None
    assert [Path(file).name for file in end["weights"]] == ["config.json", "model.safetensors"]
    assert all(Path(file).exists() for file in end["weights"])


def test_a_line_has_the_numbers_of_its_step(told: Told) -> None:
    job, steps = job_of(), of(told.first, "step")
    psi = told.first[0]["parameters"]
    for line in steps:
        assert line["lr"] == pytest.approx(job.train.lr * lr_share(line["step"] - 1, 8, 1))
        assert line["device_memory"]["parameters"] == pytest.approx(4 * psi, rel=0.01)
        assert line["host_memory"] is None
        assert line["gradient_norm"] > 0  # the job clips
    first, later = steps[0], steps[1:]
    assert first["tokens_per_second"] is first["seconds_left"] is first["exposed_waits"] is None
    for line in later:
        assert line["seconds_left"] == pytest.approx((8 - line["step"]) * 256 / line["tokens_per_second"])
        assert line["device_memory"]["optimizer_states"] == pytest.approx(8 * psi, rel=0.01)
        assert set(line["exposed_waits"]) == {"host_update", "gradient_copies", "collectives", "agreement"}
        assert not any(line["exposed_waits"].values())  # one rank without offload waits for nobody
    assert [line["held_out_loss"] for line in steps[:3]] == [told.first[1]["held_out_loss"]] * 3


def test_a_resumed_run_goes_on_with_its_step_numbers(told: Told) -> None:
    start, *_, end = told.resumed
    assert (start["step"], start["of"], end["step"]) == (4, 8, 8)
    assert [line["step"] for line in of(told.resumed, "step")] == [5, 6, 7, 8]
    assert end["loss"] == told.first[-1]["loss"]


def test_tensorboard_has_the_curves_and_a_resumed_run_continues_them(told: Told) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(told.out / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    losses = {line["step"]: line["loss"] for line in of(told.first, "step") + of(told.resumed, "step")}
    points = [(point.step, point.value) for point in found.Scalars("loss")]
    assert [step for step, _ in points] == [1, 2, 4, 5, 6, 7, 8]
    assert [loss for _, loss in points] == pytest.approx([losses[step] for step, _ in points])
    assert [point.step for point in found.Scalars("held_out_loss")] == [0, 4, 8]
    tags = set(found.Tags()["scalars"])
    assert {"lr", "tokens_per_second", "gradient_norm", "volume", "device_memory/parameters"} <= tags


def test_a_logger_that_fails_in_the_middle_does_not_end_the_run(told: Told) -> None:
    assert told.failing.steps == [0, 1, 2, 4]
    assert told.first[-1]["event"] == "end"


def test_a_run_whose_loss_is_no_number_ends_without_a_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in WORLD.items():
        monkeypatch.setenv(name, value)
    lines = io.StringIO()
    train(job_of(steps=3, sample=8, lr=1e30, save_every=0), tmp_path, None, "never", lines)
    assert json.loads(lines.getvalue().splitlines()[-1])["event"] == "end"
    printed = capfd.readouterr().err
    assert "no sample: the last loss is not finite" in printed
    assert printed.index("report: ") < printed.index("no sample")


def test_an_end_is_told_only_if_nothing_failed_and_the_sample_has_the_memory_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in WORLD.items():
        monkeypatch.setenv(name, value)
    runtimes: list[weakref.ref[object]] = []
    shard = zeroshard.shard

    def noting(*args: Any, **options: Any) -> Any:
        model, optimizer = shard(*args, **options)
        runtimes.append(weakref.ref(runtime_of(model)))
        return model, optimizer

    def failing(*_: object) -> str:
        gc.collect()
        assert [runtime() for runtime in runtimes] == [None]
        raise MemoryError("no room")

    monkeypatch.setattr(zeroshard, "shard", noting)
    monkeypatch.setattr(GPTTask, "sample_saved", failing)
    lines = io.StringIO()
    with pytest.raises(MemoryError, match="no room"):
        train(job_of(steps=2, save_every=0), tmp_path, None, "never", lines)
    assert '"event": "end"' not in lines.getvalue()
    assert (tmp_path / "report.html").exists()
