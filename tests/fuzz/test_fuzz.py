"""Whatever a file holds, zeroshard refuses it by name, or reads what makes sense; in time, and in little memory."""

from __future__ import annotations

import pytest

from tests.fuzz.run import run
from tests.fuzz.subjects import SUBJECTS

CASES = 70
"""Of each kind of file. `make fuzz` runs any number."""


@pytest.mark.slow
@pytest.mark.parametrize("subject", SUBJECTS)
def test_changed_files_are_refused_by_name_or_make_sense(subject: str) -> None:
    counts, failures = run([subject], range(CASES))
    assert not failures, "\n".join(f"--only {subject!r} --cases 1 --seed {f.seed}: {f.what}" for f in failures)
    least = 0 if subject == "record" else CASES / 5  # of a record, whatever is not damaged is shown
    assert counts[f"{subject}: refused"] > least, counts
