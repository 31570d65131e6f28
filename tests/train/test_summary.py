"""The closing table's formulas, against the figures the papers print."""

import pytest
from rich.console import Console

from zeroshard.train.summary import Outcome, StateBytes, closing_table, paper_memory, paper_volume


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_figure_one_of_the_zero_paper(stage: int, gigabytes: float) -> None:
    total = sum(row.bytes(7_500_000_000) for row in paper_memory(stage, world=64, precision="bf16"))
    assert total / 1e9 == pytest.approx(gigabytes, abs=0.05)


def test_fp32_has_no_master_and_one_rank_divides_nothing() -> None:
    assert [str(row) for row in paper_memory(stage=3, world=1, precision="fp32")] == ["4Ψ", "4Ψ", "8Ψ"]
    assert [str(row) for row in paper_memory(stage=3, world=4, precision="fp16")] == ["2Ψ/4", "2Ψ/4", "12Ψ/4"]


def test_volume_is_two_psi_below_stage_three_and_three_less_what_is_kept_in_it() -> None:
    assert [paper_volume(stage, 2, kept=0.25)[0] for stage in range(4)] == [2, 2, 2, 2.75]
    assert paper_volume(3, world=1, kept=0.25)[0] == 0


def test_the_table_shows_measured_beside_paper() -> None:
    outcome = Outcome(
        parameters=1_000_000,
        stage=3,
        world=2,
        precision="fp32",
        measured=StateBytes(2_000_000, 2_010_000, 4_000_000),
        volume=2.6,
        kept=0.4,
        first_loss=5.5,
        last_loss=2.5,
        held_out_before=5.6,
        held_out_after=2.6,
        tokens_per_second=1234.0,
    )
    console = Console(width=120)
    with console.capture() as capture:
        console.print(closing_table(outcome))
    shown = capture.get()
    for text in ("2.01", "4Ψ/2", "8Ψ/2", "8.01", "2.600", "3Ψ − Ψ_kept", "5.600 → 2.600", "1,234"):
        assert text in shown
