"""`zeroshard report` from the outside."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.report.runs import write
from zeroshard.cli.main import main
from zeroshard.report.journal import read


def test_one_run_is_shown_in_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(write(tmp_path / "a"))]) == 0
    assert capsys.readouterr().out == f"report: {tmp_path / 'a/report.html'}\n"
    assert (tmp_path / "a/report.html").read_text().startswith("<!doctype html>")


def test_several_runs_are_one_page_where_one_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [str(write(tmp_path / name)) for name in ("a", "b")]
    out = tmp_path / "both.html"
    assert main(["report", *folders, "-o", str(out)]) == 0
    assert "2 runs side by side" in out.read_text()
    assert capsys.readouterr().out == f"report: {out}\n"


def test_a_damaged_record_is_told_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path)
    with (tmp_path / "record.jsonl").open("a") as file:
        file.write("{\n")
    assert main(["report", str(tmp_path)]) == 0
    assert "1 line(s) of its record cannot be read, and are left out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["missing"], "missing has no record.jsonl; `zeroshard train` and `zeroshard finetune` write one"),
        (["run", "-o", "."], "--out .: is a folder; name a file in it, such as report.html"),
        (["run", "-o", "no/such/folder.html"], "--out no/such/folder.html: No such file or directory"),
        (["run"] * 9, "a report shows 1 to 8 runs side by side, not 9"),
    ],
)
def test_mistakes_are_told_with_the_remedy(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "run")
    assert main(["report", *arguments]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.slow
def test_train_writes_a_report_that_a_resumed_run_continues(tmp_path: Path) -> None:
    def train(*more: str) -> str:
        common = ["--out", str(tmp_path / "run"), "--save-every", "4", "--resume", "auto", "--stage", "2"]
        sizes = ["model.layers=2", "model.hidden=64", "model.heads=2", "model.sequence=32", "train.sample=0"]
        settings = [
            part for each in [*sizes, "train.evaluate_every=4", "train.report_every=1"] for part in ("--set", each)
        ]
        command = [sys.executable, "-m", "zeroshard", "train", *common, *settings, *more]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    report = tmp_path / "run/report.html"
    assert f"report: {report}" in train("--steps", "8").splitlines()
    first = read(tmp_path / "run")
    assert [step.step for step in first.steps] == list(range(1, 9))
    assert [each.step for each in first.evaluations] == [0, 4, 8]
    output = train("--steps", "12")
    run = read(tmp_path / "run")
    assert [step.step for step in run.steps] == list(range(1, 13))
    assert (run.starts, run.end, run.name) == (2, "finished", "run")
    assert f"{run.steps[-1].loss:.3f}" in output  # the closing table says the same
    assert run.volume is not None
    assert run.volume.formula == "2Ψ"
    data = json.loads(report.read_text().split('id="data">')[1].split("</script>")[0])
    assert [step for step, _ in data["loss"]["series"][0]["points"]] == list(range(1, 13))
