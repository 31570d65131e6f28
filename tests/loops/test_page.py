"""The page on training loops says what the tests show. `tests/docs` runs its code."""

from __future__ import annotations

from tests.loops.harness import EVERYWHERE
from tests.loops.page import PAGE, tables
from tests.loops.table import LOOPS

TEXT = PAGE.read_text()


def test_the_tables_of_the_page_are_those_of_the_corpus() -> None:
    assert tables() in TEXT, "run `python -m tests.loops.page`"


def test_there_are_thirty_loops_and_more_that_work_unchanged_in_every_stage_and_with_offload() -> None:
    assert len([loop for loop in LOOPS.values() if not loop.refusals]) >= 30


def test_only_what_no_line_can_mend_is_refused_for_good() -> None:
    for_good = {loop.name: refusal for loop in LOOPS.values() for refusal in loop.refusals if refusal.line is None}
    assert for_good.keys() == {"lbfgs"}
    assert for_good["lbfgs"].where == EVERYWHERE
