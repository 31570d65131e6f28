"""Prints the papers' claims and our numbers as a table, and explains large errors."""

from __future__ import annotations

from dataclasses import asdict
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table

from .claims import Kind, PaperClaim, mean_error, table

FAR = 0.25
"""Errors above this are printed in red."""


def render(console: Console) -> None:
    """Prints all claims and the summary. Claims of formulas share a line if they share a row in the paper."""
    claims = table()
    formulas, others = _empty("Formulas of the papers, and ours"), _empty("What the papers did, and ours")
    for (source, theory), group in groupby(claims, key=lambda claim: (claim.source, claim.kind is Kind.THEORY)):
        shown = formulas if theory else others
        shown.add_section()
        shown.add_row(f"[bold]{source}[/bold]")
        for about, cells in groupby(group, key=lambda claim: claim.about):
            row = list(cells)
            far = max(abs(claim.error) for claim in row)
            style = "bold red" if far > FAR else "dim" if row[0].fitted else ""
            note = ", ".join(filter(None, (row[0].unit, "fitted" if row[0].fitted else "", row[0].note)))
            error = f"{far:.1%}" if theory else _verdict(row[0])
            shown.add_row(f"  {about}", *_columns(row), error, note, style=style)
    console.print(formulas)
    console.print(others)
    console.print(summary(claims))


def as_json() -> dict[str, Any]:
    """The claims as JSON, for programs."""
    claims = table()
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


def _columns(row: list[PaperClaim]) -> tuple[str, str]:
    """The numbers of the paper, and our numbers."""
    pairs = ([claim.printed for claim in row], [claim.ours for claim in row])
    printed, ours = (" / ".join(_short(value) for value in values) for values in pairs)
    return printed, ours


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def summary(claims: list[PaperClaim]) -> str:
    """The mean error, the fitted claims, and the reasons of large errors."""
    measured = [claim for claim in claims if claim.kind is Kind.MEASURED]
    far = [claim for claim in measured if abs(claim.error) > FAR]
    fitted = ", ".join(claim.about for claim in claims if claim.fitted)
    return (
        f"Mean error {mean_error(claims):.1%} over {len(measured)} measured claims that nothing was fitted to; "
        f"{len(far)} of them are off by more than {FAR:.0%}. Fitted: {fitted}.\n{ERROR_REASONS}"
    )


ERROR_REASONS = """Two choices are not fitted, but were made with the papers at hand: sizes are for a batch of 4 a
replica, or for a batch equal to the degree of model parallelism if that is more (with a batch of 1 the sizes are
larger, and the mean error is 16%); a process updates on one socket.
Reasons of large errors:
- Beyond 100B ZeRO's speed falls faster than its batch explains. The same holds for the last size before memory ends
  (13B on 128). An allocator that is short of memory may be the reason; the plan does not model this.
- 60B on 64 ran with a batch of 16; by our count 34 fit. Our speed grows faster than the number of GPUs too, but less.
- The batches of Megatron-LM are not known here. Small batches over 64 and more devices come out too slow.
- 10B with offload reached 35.1 TFLOPS on one GPU in one figure and 41.1 in another. The profile follows the second, so
  all numbers of the first come out too fast, most on 2 to 16 GPUs of one node: the paper lost 15% there, the plan 2%.
- With divided checkpoints stage 1 (C2) reached smaller models than memory allows by our count. C2, C4 and C5 cached
  more than their tensors take; the plan does not model what their allocator cached in addition.
- Stage 2 and Megatron-LM on 4 GPUs reached smaller models than memory allows by our count."""
