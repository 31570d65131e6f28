"""Each rule: numbers in, a sentence and a setting out; and nothing where the numbers do not show the cause."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import zeroshard
from tests.report.runs import GB, OFFLOADED_STEP, head, row, summary, write
from zeroshard.report.advice import Advice, advice_for
from zeroshard.report.journal import Journal, read
from zeroshard.report.summary import Summary


def advice(
    folder: Path, spans: list[list[Any]] | None, extra: dict[str, dict[str, Any]] | None = None, **changes: Any
) -> list[Advice]:
    """The advice for a run with these spans in a step of 0.6 s. ``extra`` lines, by kind, replace earlier ones."""
    write(folder, spans=spans, **changes)
    journal = Journal(folder)
    for kind, values in (extra or {}).items():
        journal.write(kind, **values)
    journal.close()
    return advice_for(Summary(read(folder)))


def memory(peak: float, capacity: float) -> dict[str, Any]:
    return {"step": 4, "device": {"parameters": 2e6}, "host": {}, "peak": peak, "capacity": capacity}


def test_a_wait_for_the_host_update_names_what_hides_it(tmp_path: Path) -> None:
    found = advice(tmp_path, OFFLOADED_STEP, offload={}, batch=8)
    assert len(found) == 1
    sentence, setting = found[0]
    assert sentence.startswith("205 ms of 600 ms waits for the host update: a batch of 45 hides it")  # 8 · 0.25 / 0.045
    assert "the delayed update hides 250 ms behind 390 ms of computing, and changes results" in sentence
    assert (
        setting
        == "offload=zeroshard.Offload(moments=torch.bfloat16), or offload=zeroshard.Offload(delayed_update_after=40)"
    )


def test_what_is_set_already_is_not_advised(tmp_path: Path) -> None:
    offload = {"moments": "bfloat16", "delayed_update_after": 40}
    (found,) = advice(tmp_path, OFFLOADED_STEP, offload=offload)
    assert found == (
        "205 ms of 600 ms waits for the host update: 5.6 times the batch hides it, if computing grows with the batch.",
        "",
    )


def test_what_is_advised_is_an_offload_that_exists(tmp_path: Path) -> None:
    given: list[dict[str, Any]] = [{}, {"host_fraction": 0.5}, {"split_master": True, "read_back": True}]
    for number, offload in enumerate(given):
        (found,) = advice(tmp_path / str(number), OFFLOADED_STEP, offload=offload)
        for setting in found.setting.split(", or "):
            advised = eval(setting.removeprefix("offload="), {"zeroshard": zeroshard, "torch": torch})
            changed = {
                name: value for name, value in vars(advised).items() if value != getattr(zeroshard.Offload(), name)
            }
            zeroshard.Offload(**{**offload, **changed})  # and it goes with what the run has


def test_no_batch_is_named_where_computing_hides_nothing_of_the_update(tmp_path: Path) -> None:
    spans = [["host update", "a", 0.0, 0.3], ["compute", "forward", 0.3, 0.6]]
    (found,) = advice(tmp_path, spans, offload={}, batch=8)
    assert "batch" not in found.sentence


def test_a_delayed_update_is_not_advised_where_it_would_not_hide_the_update(tmp_path: Path) -> None:
    spans = [["host update", "a", 0.0, 0.5], ["compute", "forward", 0.5, 0.6]]
    (found,) = advice(tmp_path, spans, offload={})
    assert found.setting == "offload=zeroshard.Offload(moments=torch.bfloat16)"


def test_a_short_wait_is_not_worth_a_word(tmp_path: Path) -> None:
    assert advice(tmp_path, [["host update", "a", 0.0, 0.02], ["compute", "forward", 0.02, 0.6]], offload={}) == []


GATHERED = [["gather", "a", 0.0, 0.1], ["compute", "forward", 0.1, 0.6]]


def test_in_stage_3_gathers_that_are_waited_for_lead_to_stage_2_where_it_fits(tmp_path: Path) -> None:
    plan = {"rows": [row(3, own=True, peak=20 * GB), row(2, peak=30 * GB)]}
    (found,) = advice(tmp_path, GATHERED, {"plan": plan, "memory": memory(22 * GB, 80 * GB)}, stage=3)
    assert found == (
        "100 ms of 600 ms waits for parameters of other ranks. Stage 2 gathers once a step, not twice, and needs 32 GB "
        "a rank by the plan.",
        "stage=2",
    )


@pytest.mark.parametrize(
    "extra",
    [
        {"plan": {"rows": [row(3, own=True, peak=20 * GB), row(2, peak=79 * GB)]}, "memory": memory(22 * GB, 80 * GB)},
        {"plan": {"rows": [row(3, own=True, peak=20 * GB), row(2, peak=30 * GB)]}},  # nobody knows how much there is
        {"plan": {"rows": [row(3, own=True), row(2, fits=False)]}, "memory": memory(22 * GB, 80 * GB)},
    ],
)
def test_stage_2_is_not_advised_unless_it_surely_fits(tmp_path: Path, extra: dict[str, Any]) -> None:
    (found,) = advice(tmp_path, GATHERED, extra, stage=3)
    assert found.setting == ""
    assert found.sentence.endswith("A larger micro-batch moves no more, so the wait becomes a smaller share of a step.")


def test_gathers_of_several_micro_batches_lead_to_fewer_and_larger_ones_in_stage_3(tmp_path: Path) -> None:
    (found,) = advice(tmp_path, GATHERED, stage=3, micro_batches=4)
    assert found.sentence.endswith(
        "and each of the 4 micro-batches of a step gathers them anew. Fewer and larger micro-batches wait less."
    )


REDUCED = [["compute", "backward", 0.0, 0.4], ["reduce", "a", 0.1, 0.6]]


def test_reduces_of_several_micro_batches_lead_to_no_sync(tmp_path: Path) -> None:
    (found,) = advice(tmp_path, REDUCED, micro_batches=4)
    assert found.sentence.startswith(
        "200 ms of 600 ms waits for gradients to be reduced, and each of the 4 micro-batches"
    )
    assert found.setting == "with zeroshard.no_sync(model): ..."


def test_reduces_of_one_micro_batch_do_not(tmp_path: Path) -> None:
    (found,) = advice(tmp_path, REDUCED)
    assert found.setting == ""


COPIED = [["to the device", "a", 0.0, 0.1], ["compute", "forward", 0.1, 0.5], ["to the host", "a", 0.4, 0.6]]


def test_copies_lead_to_states_on_the_device_where_it_has_room(tmp_path: Path) -> None:
    plan = {"rows": [row(2, own=True, offload="cpu", peak=20 * GB)]}
    (found,) = advice(tmp_path, COPIED, {"plan": plan, "memory": memory(20 * GB, 80 * GB)}, offload={})
    assert found == (
        "200 ms of 600 ms waits for copies between host and device (100 ms to the host, 100 ms to the device), and "
        "53.6 GB of the device are free for a part of the states.",
        'offload=zeroshard.Offload(host_fraction="auto")',
    )


def test_copies_do_not_where_there_is_no_room(tmp_path: Path) -> None:
    found = advice(tmp_path, COPIED, {"memory": memory(79 * GB, 80 * GB)}, offload={})
    assert all("host_fraction" not in each.setting for each in found)


def test_offload_that_is_not_needed_is_told(tmp_path: Path) -> None:
    plan = {"rows": [row(2, own=True, offload="cpu", peak=20 * GB), row(2, peak=40 * GB)]}
    found = advice(tmp_path, OFFLOADED_STEP, {"plan": plan, "memory": memory(20 * GB, 80 * GB)}, offload={})
    assert (
        "208 ms of 600 ms waits for the host or for copies. Without offload a rank needs 40 GB by the plan, and 80 GB "
        "are there.",
        "offload=None",
    ) in found


def test_offload_that_is_needed_is_not_questioned(tmp_path: Path) -> None:
    plan = {"rows": [row(2, own=True, offload="cpu", peak=20 * GB), row(2, peak=90 * GB, fits=False)]}
    found = advice(tmp_path, OFFLOADED_STEP, {"plan": plan, "memory": memory(20 * GB, 80 * GB)}, offload={})
    assert all(each.setting != "offload=None" for each in found)


def test_time_in_which_nothing_ran_points_to_the_loop(tmp_path: Path) -> None:
    (found,) = advice(tmp_path, [["compute", "forward", 0.3, 0.6]])
    assert found.sentence.startswith(
        "In 300 ms of 600 ms no lane did anything: the loop itself, its data, or another rank"
    )


def test_a_full_device_names_the_stage_that_takes_less(tmp_path: Path) -> None:
    plan = {"rows": [row(2, own=True, peak=78 * GB), row(3, peak=50 * GB)]}
    (found,) = advice(tmp_path, None, {"plan": plan, "memory": memory(78 * GB, 80 * GB)})
    assert found == (
        "The peak is 78 GB of 80 GB on the device. Stage 3 takes 28 GB less of a rank, by the plan.",
        "stage=3",
    )


def test_a_full_device_names_none_where_the_plan_sees_no_difference(tmp_path: Path) -> None:
    plan = {"rows": [row(2, own=True, peak=78 * GB), row(3, peak=77 * GB)]}
    (found,) = advice(tmp_path, None, {"plan": plan, "memory": memory(78 * GB, 80 * GB)})
    assert found == ("The peak is 78 GB of 80 GB on the device.", "")


def test_a_loss_that_is_not_finite_comes_first(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write("run", **head())
    for step, loss in enumerate((5.0, math.nan, math.inf), 1):
        journal.write("step", step=step, loss=loss)
    (found,) = advice_for(Summary(read(tmp_path)))
    assert found.sentence.startswith("The loss is not finite at step 2, and 2 in all.")
    assert found.setting == 'on_nonfinite="stop"'
    journal.write("run", **head(after=3, on_nonfinite="skip"))
    (found,) = advice_for(Summary(read(tmp_path)))
    assert found == ("The loss is not finite at step 2, and 2 in all.", "")


def test_without_a_trace_and_with_nothing_wrong_nothing_is_said(tmp_path: Path) -> None:
    assert advice_for(summary(tmp_path)) == []


def test_an_empty_run_gives_no_advice(tmp_path: Path) -> None:
    Journal(tmp_path).write("run", format=1, after=0)
    assert advice_for(Summary(read(tmp_path))) == []
