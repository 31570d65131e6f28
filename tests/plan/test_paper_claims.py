"""The papers' claims compared with our numbers."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from zeroshard.plan.machine.profile import load
from zeroshard.plan.papers import claims as paper_claims
from zeroshard.plan.papers import table as paper_table
from zeroshard.plan.papers.claims import Kind, PaperClaim, table
from zeroshard.plan.papers.devices import gpt, largest_batch
from zeroshard.plan.setup import Setup

CLAIMS = table()


def claim(about: str) -> PaperClaim:
    (found,) = (claim for claim in CLAIMS if claim.about == about)
    return found


@pytest.mark.parametrize("source", ["ZeRO, figure 1", "ZeRO, table 1", "ZeRO, table 2"])
def test_formulas_give_every_cell_of_the_papers_tables(source: str) -> None:
    cells = [claim for claim in CLAIMS if claim.source == source and claim.kind is Kind.THEORY]
    assert len(cells) == {"ZeRO, figure 1": 4, "ZeRO, table 1": 54, "ZeRO, table 2": 20}[source]
    for cell in cells:
        # The papers print two digits or more and truncate large numbers. 0.5T, 1T and 2T stand for 512B and so on.
        assert cell.ours == pytest.approx(cell.printed, rel=0.025), cell


def test_three_claims_are_fitted_and_no_more() -> None:
    fitted = [claim for claim in CLAIMS if claim.fitted]
    assert {claim.about for claim in fitted} == paper_claims.FITTED
    assert len(fitted) == 3
    assert all(abs(claim.error) < 0.02 for claim in fitted)


def test_measured_claims_that_are_not_fitted_are_predicted_within_15_percent_on_average() -> None:
    measured = [claim for claim in CLAIMS if claim.kind is Kind.MEASURED]
    assert len(measured) > 75
    assert paper_claims.mean_error(CLAIMS) < 0.15


def test_models_that_the_papers_trained_are_reached() -> None:
    reached = [claim for claim in CLAIMS if claim.kind is Kind.REACHED]
    assert len(reached) == 4
    assert all(claim.ours >= claim.printed for claim in reached)


def test_without_model_parallelism_stage_2_trains_nine_times_what_plain_data_parallelism_can() -> None:
    plain = claim("largest on 128, no model parallelism: plain").ours
    divided = claim("largest on 128, no model parallelism: stage 2").ours
    assert plain == pytest.approx(1.38, rel=0.1)
    assert divided == pytest.approx(13, rel=0.1)


def test_the_five_configurations_are_in_the_order_of_the_papers_figures() -> None:
    order = ("C1", "C3", "C2", "C4", "C5")
    largest = [claim(f"largest on 400, MP 16, {name}").ours for name in order]
    cached = [claim(f"40B on 400, MP 16, {name}: cached").ours for name in order]
    assert largest == sorted(largest)
    assert cached == sorted(cached, reverse=True)


def test_60b_is_super_linear_because_a_larger_batch_fits() -> None:
    machine, model = load("v100"), gpt(75, 8192)
    worlds = [gpus // 16 for gpus in paper_claims.SUPER_LINEAR]
    batches = [largest_batch(model, Setup(stage=2, world=world, model_parallel=16), machine) for world in worlds]
    speeds = [claim(f"60B on {gpus}, the batch that fits").ours for gpus in paper_claims.SUPER_LINEAR]
    assert batches == sorted(batches)
    assert batches[0] < batches[-1] / 2
    assert speeds == sorted(speeds)


def test_a_delayed_update_gains_at_every_size() -> None:
    for size in paper_claims.DELAYED:
        waiting, delayed = (claim(f"{size}B on 1, batch 8, update {name}").ours for name in ("waiting", "delayed"))
        assert 1.05 < delayed / waiting < 1.25


def test_the_table_has_every_error_and_the_reasons_of_large_errors() -> None:
    text = io.StringIO()
    paper_table.render(Console(file=text, width=200))
    for entry in CLAIMS:
        assert entry.about in text.getvalue()
    assert f"Mean error {paper_claims.mean_error(CLAIMS):.1%}" in text.getvalue()
    assert "Reasons of large errors" in text.getvalue()
