"""The closing table: what this rank measured beside what the ZeRO paper says it should be (sections 5 and 7)."""

from dataclasses import dataclass
from typing import NamedTuple

from rich.table import Table

from zeroshard.config import Extent, state_table

MOMENTS = 8  # bytes a parameter: Adam's momentum and variance in fp32
MASTER = 4  # bytes a parameter: the fp32 copy behind 16-bit parameters


class StateBytes(NamedTuple):
    """Bytes of model states on one rank, by kind."""

    parameters: int
    gradients: int
    optimizer_states: int


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run measured."""

    parameters: int
    """Ψ."""
    stage: int
    world: int
    precision: str
    measured: StateBytes
    """Between the last backward and its step."""
    volume: float | None
    """Of a step, in Ψ; None if every step shared its count with an evaluation."""
    kept: float
    """Ψ_kept: what stage 3 holds from forward to backward, in Ψ."""
    first_loss: float
    last_loss: float
    held_out_before: float
    held_out_after: float
    tokens_per_second: float | None
    """None after a single step."""


class PaperRow(NamedTuple):
    """The paper's bytes of one kind of state: so many a parameter, divided by so many ranks."""

    kind: str
    per_parameter: int
    divisor: int

    def __str__(self) -> str:
        return f"{self.per_parameter}Ψ" + (f"/{self.divisor}" if self.divisor > 1 else "")

    def bytes(self, parameters: int) -> float:
        """Return the row's bytes for a model of so many parameters."""
        return self.per_parameter * parameters / self.divisor


def paper_memory(stage: int, world: int, precision: str) -> list[PaperRow]:
    """Return the paper's bytes per rank with Adam, by kind (ZeRO, section 5 and figure 1).

    >>> sum(row.bytes(7_500_000_000) for row in paper_memory(stage=2, world=64, precision="bf16")) / 1e9
    16.640625
    """
    table = state_table(stage, world)
    size = 4 if precision == "fp32" else 2
    states = MOMENTS if precision == "fp32" else MOMENTS + MASTER
    return [
        PaperRow(kind, per_parameter, world if at_rest.extent is Extent.SHARD else 1)
        for kind, per_parameter, at_rest in (
            ("parameters", size, table.parameters),
            ("gradients", size, table.gradients),
            ("optimizer states", states, table.optimizer),
        )
    ]


def paper_volume(stage: int, world: int, kept: float) -> tuple[float, str]:
    """Return the paper's volume of a step in Ψ, and how it is written (ZeRO, section 7)."""
    if world == 1:
        return 0.0, "one rank: 0"
    return (2.0, "2Ψ") if stage < 3 else (3.0 - kept, "3Ψ − Ψ_kept")


def closing_table(outcome: Outcome) -> Table:
    """Lay out a run's outcome for a terminal."""
    table = Table(
        title=f"stage {outcome.stage} · {outcome.world} ranks · {outcome.precision} · "
        f"Ψ = {outcome.parameters / 1e6:,.1f}M parameters",
        title_justify="left",
    )
    table.add_column("per rank")
    table.add_column("measured", justify="right")
    table.add_column("paper", justify="right")
    table.add_column("formula")
    rows = paper_memory(outcome.stage, outcome.world, outcome.precision)
    for row, measured in zip(rows, outcome.measured, strict=True):
        table.add_row(f"{row.kind}, MB", _mb(measured), _mb(row.bytes(outcome.parameters)), str(row))
    expected = sum(row.bytes(outcome.parameters) for row in rows)
    table.add_row("all model states, MB", _mb(sum(outcome.measured)), _mb(expected))
    volume, written = paper_volume(outcome.stage, outcome.world, outcome.kept)
    counted = "–" if outcome.volume is None else f"{outcome.volume:.3f}"
    table.add_row("volume per step, Ψ", counted, f"{volume:.3f}", written, end_section=True)
    for name, text in (
        ("training loss", f"{outcome.first_loss:.3f} → {outcome.last_loss:.3f}"),
        ("held-out loss", f"{outcome.held_out_before:.3f} → {outcome.held_out_after:.3f}"),
        ("tokens/s, all ranks", "–" if outcome.tokens_per_second is None else f"{outcome.tokens_per_second:,.0f}"),
    ):
        table.add_row(name, text)
    return table


def _mb(number: float) -> str:
    return f"{number / 1e6:,.2f}"
