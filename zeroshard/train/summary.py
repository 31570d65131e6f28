"""The closing table: what this rank measured beside what the ZeRO paper says it should be (sections 5 and 7)."""

from dataclasses import dataclass

from rich.table import Table

from zeroshard.config import Extent, state_table

MOMENTS = 8  # bytes a parameter: Adam's momentum and variance in fp32
MASTER = 4  # bytes a parameter: the fp32 copy behind 16-bit parameters


@dataclass(frozen=True)
class StateBytes:
    """Bytes of model states on one rank, by kind."""

    parameters: float
    gradients: float
    optimizer_states: float

    @property
    def total(self) -> float:
        """Return the sum of the kinds."""
        return self.parameters + self.gradients + self.optimizer_states


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
    tokens_per_second: float


def paper_memory(parameters: int, stage: int, world: int, precision: str) -> StateBytes:
    """Return the paper's bytes per rank with Adam, by kind (ZeRO, section 5 and figure 1).

    >>> paper_memory(7_500_000_000, stage=2, world=64, precision="bf16").total / 1e9
    16.640625
    """
    table = state_table(stage, world)

    def divided(extent: Extent) -> float:
        return parameters / world if extent is Extent.SHARD else parameters

    size = 4 if precision == "fp32" else 2
    states = MOMENTS if precision == "fp32" else MOMENTS + MASTER
    return StateBytes(
        parameters=size * divided(table.parameters.extent),
        gradients=size * divided(table.gradients.extent),
        optimizer_states=states * divided(table.optimizer.extent),
    )


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
    expected = paper_memory(outcome.parameters, outcome.stage, outcome.world, outcome.precision)
    for name, measured, paper in (
        ("parameters", outcome.measured.parameters, expected.parameters),
        ("gradients", outcome.measured.gradients, expected.gradients),
        ("optimizer states", outcome.measured.optimizer_states, expected.optimizer_states),
        ("all model states", outcome.measured.total, expected.total),
    ):
        formula = f"{paper / outcome.parameters:g}Ψ"
        table.add_row(f"{name}, MB", f"{measured / 1e6:,.2f}", f"{paper / 1e6:,.2f}", formula)
    volume, written = paper_volume(outcome.stage, outcome.world, outcome.kept)
    counted = "–" if outcome.volume is None else f"{outcome.volume:.3f}"
    table.add_row("volume per step, Ψ", counted, f"{volume:.3f}", written, end_section=True)
    for name, text in (
        ("training loss", f"{outcome.first_loss:.3f} → {outcome.last_loss:.3f}"),
        ("held-out loss", f"{outcome.held_out_before:.3f} → {outcome.held_out_after:.3f}"),
        ("tokens/s, all ranks", f"{outcome.tokens_per_second:,.0f}"),
    ):
        table.add_row(name, text)
    return table
