"""Loggers: what they are told, what is never told, and that none of them ends a run."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from tests.train.live.events import EVENT, OFFLOADED
from zeroshard.cli.main import main
from zeroshard.config.job import LOGGERS, JobError, load_job
from zeroshard.integrations import requirement
from zeroshard.train.live import loggers
from zeroshard.train.live.audience import Audience
from zeroshard.train.live.events import Evaluation, Event, RunStart
from zeroshard.train.live.loggers import LoggedRun, LoggerSink, add_loggers, scalars_of, settings_of

START = RunStart(
    name="tiny",
    folder="/runs/tiny",
    step=0,
    of=12,
    stage=3,
    ranks=2,
    precision="fp32",
    parameters=10,
    tokens_per_step=5,
)


def run_of(folder: Path, step: int = 0) -> LoggedRun:
    return LoggedRun(
        name="tiny", folder=folder, step=step, settings=settings_of(START, {"log": ("wandb",)}, {"stage": 3})
    )


class Recorded(list[tuple[str, tuple[Any, ...], dict[str, Any]]]):
    """The calls of a library, in their order."""

    def of(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(given, named) for called, given, named in self if called == name]

    def function(self, name: str, result: Any = None) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            self.append((name, given, named))
            return result

        return call


def fake(name: str, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """A library of this name that records its calls."""
    calls, module = Recorded(), ModuleType(name)
    methods = {method: calls.function(method) for method in ("log", "finish", "define_metric")}
    for method, function in methods.items():
        setattr(module, method, function)
    module.Settings = calls.function("Settings", "settings")  # type: ignore[attr-defined]
    module.init = calls.function("init", SimpleNamespace(id="abc123", **methods))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    return calls


def tell(run: LoggedRun, name: str, *events: Event) -> None:
    with Audience(Console(width=200), steps=12) as audience:
        add_loggers(audience, [name], run)
        audience.tell(START)
        for event in events:
            audience.tell(event)


def test_the_scalars_of_a_step_are_its_numbers_by_path_without_kinds_that_are_not_there() -> None:
    assert scalars_of(OFFLOADED) == {
        "loss": 4.25,
        "lr": 3e-4,
        "tokens_per_second": 12345.6,
        "device_memory/parameters": 2_000_000,
        "device_memory/gradients": 1_000_000,
        "device_memory/optimizer_states": 4_000_000,
        "host_memory/gradients": 3_000_000,
        "host_memory/optimizer_states": 12_000_000,
        "volume": 2.586,
        "exposed_waits/host_update": 0.011,
        "exposed_waits/gradient_copies": 0.001,
        "gradient_norm": 0.98,
    }


def test_wandb_is_told_scalars_and_settings_and_a_resumed_run_goes_on_in_the_same_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake("wandb", monkeypatch)
    tell(run_of(tmp_path), "wandb", EVENT, Evaluation(step=8, held_out_loss=2.5))
    tell(run_of(tmp_path, step=4), "wandb")
    tell(run_of(tmp_path), "wandb")
    (_, first), (_, resumed), (_, another) = calls.of("init")
    assert (first["project"], first["name"], first["dir"]) == ("zeroshard", "tiny", str(tmp_path))
    assert first["config"]["train"] == {"log": ["wandb"]}
    assert [given["id"] for given in (first, resumed, another)] == [None, "abc123", None]
    assert resumed["resume"] == "allow"
    settings = calls.of("Settings")[0][1]
    assert settings["console"] == "off"
    assert settings["x_disable_meta"]
    assert not settings["save_code"]
    logged = [given[0] for given, _ in calls.of("log")]
    assert [line["step"] for line in logged] == [8, 8]
    assert logged[0]["loss"] == 4.25
    assert logged[1]["held_out_loss"] == 2.5
    assert len(calls.of("finish")) == 3


def test_trackio_is_told_scalars_by_step_and_is_given_no_place_to_upload_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake("trackio", monkeypatch)
    tell(run_of(tmp_path), "trackio", EVENT)
    tell(run_of(tmp_path, step=4), "trackio")
    assert [named["resume"] for _, named in calls.of("init")] == ["never", "allow"]
    assert all(named.keys().isdisjoint({"space_id", "server_url", "bucket_id"}) for _, named in calls.of("init"))
    ((given, named),) = calls.of("log")
    assert given[0]["loss"] == 4.25
    assert named == {"step": 8}
    assert len(calls.of("finish")) == 2


class Broken:
    """A logger that fails where it is told to."""

    def __init__(self, where: str) -> None:
        self._where = where
        self.told = 0

    def open(self, run: LoggedRun) -> None:
        self._fail("open")

    def scalars(self, step: int, values: Any) -> None:
        self.told += 1
        self._fail("scalars")

    def close(self) -> None:
        self._fail("close")

    def _fail(self, where: str) -> None:
        if where == self._where:
            raise OSError("no space left on device")


@pytest.mark.parametrize("where", ["scalars", "close"])
def test_a_logger_that_fails_is_off_with_one_warning(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Broken(where)
    monkeypatch.setitem(loggers.CLASSES, "trackio", lambda: broken)  # type: ignore[arg-type]
    tell(run_of(tmp_path), "trackio", EVENT, EVENT)
    told = capsys.readouterr().out
    assert told.count("warning: trackio is off from now on: OSError: no space left on device\n") == 1
    assert told.count("warning") == 1
    assert broken.told == (1 if where == "scalars" else 2)


def test_a_logger_that_cannot_begin_ends_a_new_run_and_not_a_resumed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(loggers.CLASSES, "wandb", lambda: Broken("open"))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"train.log: wandb could not begin a run \(OSError: no space"):
        tell(run_of(tmp_path), "wandb")
    tell(run_of(tmp_path, step=4), "wandb", EVENT)
    assert capsys.readouterr().out.startswith("warning: wandb is off from now on: OSError")


def test_other_ranks_tell_nobody(tmp_path: Path) -> None:
    logger = Broken("nowhere")
    with Audience(Console(quiet=True), steps=12) as audience:
        audience.add("trackio", LoggerSink(logger))
        audience.tell(EVENT)
    assert not audience.listens
    assert logger.told == 0


def test_every_logger_of_the_configuration_has_a_class() -> None:
    assert tuple(loggers.CLASSES) == LOGGERS


@pytest.mark.parametrize("name", LOGGERS)
def test_a_library_that_is_missing_is_told_before_anything_starts(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = requirement.find_spec
    monkeypatch.setattr(requirement, "find_spec", lambda asked: None if asked == name else find(asked))
    assert main(["train", "tiny", "--device", "cpu", "--log", name, "--out", str(tmp_path / "run")]) == 2
    told = capsys.readouterr().err
    assert f"train.log = '{name}' needs {name}, which is not installed; pip install 'zeroshard[{name}]'" in told
    assert not (tmp_path / "run").exists()


def test_a_folder_with_the_name_of_a_library_is_not_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "some_logger").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="some_logger, which is not installed"):
        requirement.require("some_logger", "train.log")


@pytest.mark.parametrize("given", ["tensorbord", ["wandb", "wandb"], 3])
def test_a_wrong_name_is_refused_with_the_names_there_are(given: object) -> None:
    with pytest.raises(
        JobError, match=r"train.log: must (name some of tensorboard, wandb, trackio|be a list of names)"
    ):
        load_job("tiny", {"train.log": given})
