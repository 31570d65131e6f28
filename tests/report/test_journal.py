"""A journal survives crashes, goes on, and is read whatever it holds."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

from tests.report.runs import head, write
from zeroshard.report.journal import FILE, Journal, read


def test_what_is_written_is_read(tmp_path: Path) -> None:
    run = read(write(tmp_path, steps=3, spans=[["compute", "forward a", 0.0, 0.5]]))
    assert [(step.step, step.loss, step.tokens) for step in run.steps] == [
        (1, 4.9, 1000),
        (2, 4.8, 1000),
        (3, 4.7, 1000),
    ]
    assert [(each.step, each.loss) for each in run.evaluations] == [(3, 4.5)]
    assert run.memory is not None
    assert run.memory.device["optimizer_states"] == 6e6
    assert run.volume is not None
    assert (run.volume.elements["all_gather"], run.volume.expected, run.volume.formula) == (1e6, 2.0, "2Ψ")
    assert run.plan is not None
    assert run.plan.own is not None
    assert (run.plan.own.stage, run.plan.own.peak["activations"]) == (2, 10e6)
    assert run.traced is not None
    assert run.traced.spans[0] == ("compute", "forward a", 0.0, 0.5)
    assert (run.states_of_ranks, run.end, run.damaged, run.name) == ([9e6, 8e6], "finished", 0, "small")


def test_every_line_is_json_of_the_standard_whatever_the_loss(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write("run", **head())
    for step, loss in enumerate((math.nan, math.inf, -math.inf), 1):
        journal.write("step", step=step, loss=loss)
    for line in (tmp_path / FILE).read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    losses = [step.loss for step in read(tmp_path).steps]
    assert math.isnan(losses[0] or 0.0)
    assert losses[1:] == [math.inf, -math.inf]


def test_a_line_is_on_disk_as_soon_as_it_is_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write("run", **head())
    assert read(tmp_path).starts == 1  # the file is still open


def test_after_a_crash_in_the_middle_of_a_line_the_next_line_is_whole(tmp_path: Path) -> None:
    write(tmp_path, steps=2)
    with (tmp_path / FILE).open("a") as file:
        file.write('{"kind": "step", "step": 3, "lo')
    journal = Journal(tmp_path)
    journal.write("run", **head(after=2))
    journal.write("step", step=3, loss=1.0)
    run = read(tmp_path)
    assert [step.step for step in run.steps] == [1, 2, 3]
    assert (run.damaged, run.starts, run.end) == (1, 2, None)


def test_a_run_that_goes_on_forgets_the_steps_that_it_makes_again(tmp_path: Path) -> None:
    write(tmp_path, steps=10)
    journal = Journal(tmp_path)
    journal.write("run", **head(after=6))
    journal.write("step", step=7, loss=1.25)
    run = read(tmp_path)
    assert [step.step for step in run.steps] == [1, 2, 3, 4, 5, 6, 7]
    assert run.steps[-1].loss == 1.25
    assert run.evaluations == []  # that was after step 10
    assert run.memory is not None


def test_a_new_run_in_the_same_folder_shows_nothing_of_the_old_one(tmp_path: Path) -> None:
    write(tmp_path, steps=10)
    journal = Journal(tmp_path)
    journal.write("run", **head(name="again"))
    journal.write("step", step=1, loss=2.0)
    run = read(tmp_path)
    assert (run.name, len(run.steps), run.starts, run.memory, run.plan, run.evaluations) == (
        "again",
        1,
        1,
        None,
        None,
        [],
    )


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe not text",
        b"[]",
        b"{}",
        b'"run"',
        b'{"kind": "step"}',
        b'{"kind": "step", "step": -1}',
        b'{"kind": "step", "step": 1e400}',
        b'{"kind": "evaluation", "step": 1' + b"0" * 400 + b', "loss": 1}',
        b'{"kind": "step", "step": 2}',  # not later than the last one
        b'{"kind": "run", "format": 2, "after": 0}',
        b'{"kind": "run", "format": 1, "after": "0"}',
        b'{"kind": "memory", "device": 7}',
        b'{"kind": "plan", "rows": [{"stage": 1}]}',
        b'{"kind": "trace", "steps": [1], "marks": [1.0], "spans": []}',
        b'{"kind": "trace", "steps": [1], "marks": [1.0, 0.0], "spans": []}',
        b'{"kind": "trace", "steps": [1], "marks": [0.0, 1.0], "spans": [["compute", "x", "nan", 1]]}',
        b"[" * 100_000,
    ],
)
def test_a_damaged_line_is_counted_and_the_rest_is_read(tmp_path: Path, line: bytes) -> None:
    write(tmp_path, steps=4)
    with (tmp_path / FILE).open("ab") as file:
        file.write(line + b"\n")
    run = read(tmp_path)
    assert (len(run.steps), run.damaged) == (4, 1)


def test_kinds_of_a_later_version_are_skipped(tmp_path: Path) -> None:
    write(tmp_path, steps=4)
    with (tmp_path / FILE).open("a") as file:
        file.write('{"kind": "temperature", "degrees": 80}\n')
    assert read(tmp_path).damaged == 0


def test_sizes_that_cannot_be_are_left_out(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write("run", **head())
    journal.write(
        "memory", step=1, device={"parameters": math.nan, "gradients": -1, "buffers": 5, "states": "6"}, peak="x"
    )
    memory = read(tmp_path).memory
    assert memory is not None
    assert (memory.device, memory.peak) == ({"buffers": 5}, None)


def test_a_folder_without_a_journal_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no record\.jsonl; .*zeroshard\.record\(model, folder\)"):
        read(tmp_path)
    (tmp_path / FILE).write_text("")
    with pytest.raises(ValueError, match="no step of this run was made yet"):
        read(tmp_path)
    (tmp_path / FILE).write_text("something else\n")
    with pytest.raises(ValueError, match=r"holds no line of a run \(1 line\(s\) cannot be read\)"):
        read(tmp_path)


def test_no_file_of_the_room_imports_torch() -> None:
    import ast

    import zeroshard.report

    for path in Path(zeroshard.report.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert all(name.partition(".")[0] in {*sys.stdlib_module_names} for name in names), path.name
            assert not (isinstance(node, ast.ImportFrom) and node.level > 1), f"{path.name} imports another room"
