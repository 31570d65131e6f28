"""The papers' claims compared with our numbers."""

from __future__ import annotations

import io
import tomllib
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from zeroshard.plan.papers import table as paper_table
from zeroshard.plan.papers.claims import Kind, PaperClaim, mean_error, paper_claims, paper_data

DATA = paper_data()
CLAIMS = paper_claims(DATA)


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
    fitted = [claim for claim in CLAIMS if claim.kind is Kind.FITTED]
    assert {claim.about for claim in fitted} == set(DATA["fitted"])
    assert len(fitted) == 3
    assert all(abs(claim.error) < 0.02 for claim in fitted)


def test_measured_claims_that_are_not_fitted_are_predicted_within_15_percent_on_average() -> None:
    measured = [claim for claim in CLAIMS if claim.kind is Kind.MEASURED]
    assert len(measured) > 75
    assert mean_error(CLAIMS) < 0.15


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
    by_gpus = [claim(f"60B on {gpus}, the batch that fits") for gpus in (64, 128, 256, 400)]
    batches = [int(entry.note.removeprefix("batch ")) for entry in by_gpus]
    speeds = [entry.ours for entry in by_gpus]
    assert batches == sorted(batches)
    assert batches[0] < batches[-1] / 2
    assert speeds == sorted(speeds)


def test_a_delayed_update_gains_at_every_size() -> None:
    for size in (2, 6, 8, 10):
        waiting, delayed = (claim(f"{size}B on 1, batch 8, update {name}").ours for name in ("waiting", "delayed"))
        assert 1.05 < delayed / waiting < 1.25


def test_the_table_has_every_error_and_the_reasons_of_large_errors() -> None:
    text = io.StringIO()
    paper_table.render(Console(file=text, width=200))
    for entry in CLAIMS:
        assert entry.about in text.getvalue()
    assert f"Mean error {mean_error(CLAIMS):.1%}" in text.getvalue()
    assert "Reasons of large errors" in text.getvalue()


def test_the_data_file_has_no_unknown_key_and_every_name_is_used() -> None:
    assert set(DATA) == {"machine", "fitted", "reasons", "methods", "models", "claims"}
    for kind in ("method", "model"):
        used = set()
        for entry in DATA["claims"]:
            for row in entry.get("rows", [[]]):
                value = (entry | dict(zip(entry.get("columns", []), row, strict=True))).get(kind, [])
                used |= set(value if isinstance(value, list) else [value])
        assert used == set(DATA[f"{kind}s"])


def test_the_data_file_is_packaged() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert "plan/papers/*.toml" in project["tool"]["setuptools"]["package-data"]["zeroshard"]


SPEED = {
    "source": "a paper",
    "text": "{model} on {gpus}",
    "unit": "TFLOPS",
    "group": "speed",
    "model": "8B",
    "method": "stage 2",
    "gpus": 64,
    "printed": 40,
}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"group": "sped"}, "'sped' is unknown"),
        ({"method": "stage 4"}, "'stage 4' is unknown"),
        ({"quotients": {"8B on 1": "8B on 2"}}, "'8B on 1' is unknown"),
        ({"layer": 3}, "'layer'"),
        ({"kind": "guessed"}, "'guessed'"),
        ({"offload": {"block": True}}, "block"),
    ],
    ids=lambda value: str(value),
)
def test_a_claim_with_an_unknown_key_or_name_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"claim '8B on 64': .*{named}"):
        paper_claims(DATA | {"claims": [SPEED | change]})


def test_a_list_stands_for_a_claim_for_each_item_and_a_row_is_read_by_its_columns() -> None:
    rows = {"columns": ["gpus", "method", "printed"], "rows": [[64, ["stage 1", "stage 2"], [1, 2]], [1, "stage 2", 3]]}
    claims = paper_claims(DATA | {"claims": [SPEED | rows]})
    assert [(entry.about, entry.printed) for entry in claims] == [("8B on 64", 1), ("8B on 64", 2), ("8B on 1", 3)]
    with pytest.raises(ValueError, match="shorter"):
        paper_claims(DATA | {"claims": [SPEED | {"method": ["stage 1", "stage 2"], "printed": [1]}]})


def test_the_table_fits_a_terminal_and_nothing_is_cut() -> None:
    text = io.StringIO()
    paper_table.render(Console(file=text, width=80))
    assert max(map(len, text.getvalue().splitlines())) == 80
    assert "…" not in text.getvalue()
