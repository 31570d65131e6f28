"""Prints the papers' claims and our numbers as a table, and explains large errors."""

from __future__ import annotations

from dataclasses import asdict
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table

from .claims import Kind, PaperClaim, mean_error, paper_claims, paper_data

FAR = 0.25
"""Errors above this are printed in red."""


def render(console: Console) -> None:
    """Prints all claims and the summary. Claims of formulas share a line if they share a row in the paper."""
    claims = paper_claims(paper_data())
    formulas, others = _empty("Formulas of the papers, and ours"), _empty("What the papers did, and ours")
    for (source, theory), group in groupby(claims, key=lambda claim: (claim.source, claim.kind is Kind.THEORY)):
        shown = formulas if theory else others
        shown.add_section()
        shown.add_row(f"[bold]{source}[/bold]")
        for about, cells in groupby(group, key=lambda claim: claim.about):
            row = list(cells)
            fitted, far = row[0].kind is Kind.FITTED, max(abs(claim.error) for claim in row)
            style = "bold red" if far > FAR else "dim" if fitted else ""
            note = ", ".join(filter(None, (row[0].unit, "fitted" if fitted else "", row[0].note)))
            numbers = ([claim.printed for claim in row], [claim.ours for claim in row])
            columns = ("/".join(map(_short, values)) for values in numbers)
            shown.add_row(f"  {about}", *columns, f"{far:.1%}" if theory else _verdict(row[0]), note, style=style)
    console.print(formulas)
    console.print(others)
    console.print(summary(claims))


def as_json() -> dict[str, Any]:
    """The claims as JSON, for programs."""
    claims = paper_claims(paper_data())
    return {
        "claims": [asdict(claim) | {"kind": claim.kind.value, "error": claim.error} for claim in claims],
        "mean_error": mean_error(claims),
    }


def _empty(title: str) -> Table:
    shown = Table(title=title, title_justify="left")
    shown.add_column("claim")
    for name in ("paper", "ours", "error"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("")
    return shown


def _verdict(claim: PaperClaim) -> str:
    if claim.kind is Kind.REACHED:
        return "reached" if claim.error == 0 else "missed"
    return f"{claim.error:+.0%}"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def summary(claims: list[PaperClaim]) -> str:
    """The mean error, the fitted claims, and the reasons of large errors."""
    measured = [claim for claim in claims if claim.kind is Kind.MEASURED]
    far = sum(abs(claim.error) > FAR for claim in measured)
    paragraphs = (
        f"Mean error {mean_error(claims):.1%} over {len(measured)} measured claims that nothing was fitted to; "
        f"{far} of them are off by more than {FAR:.0%}. Fitted: {'; '.join(paper_data()['fitted'])}.",
        *paper_data()["reasons"],
    )
    return "\n".join(paragraphs)
