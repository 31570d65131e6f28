"""The closing table: what this rank measured beside what the papers say it should be."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from rich.table import Table

from ..config.table import state_table
from ..observe.ledger import Memory
from .paper import OnHost, PaperRow, paper_memory, paper_offload_memory, paper_traffic, paper_volume, shared_by


class StateBytes(NamedTuple):
    """Bytes of model states on one rank, by kind."""

    parameters: int
    gradients: int
    optimizer_states: int

    @classmethod
    def of(cls, memory: Memory) -> Self:
        """Return what the papers count of the memory in one place."""
        return cls(memory.parameters, memory.gradients, memory.optimizer_states)


@dataclass(frozen=True, kw_only=True)
class Offloaded:
    """What a run with offload measured in a step during which the host was waited for."""

    on_host: OnHost
    device: StateBytes
    """Between backward and step, when all gradients have landed."""
    host: StateBytes
    traffic: int | None
    """Bytes that crossed between host and device; None if the step shared its count with an evaluation."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run measured."""

    parameters: int
    """Ψ; with tensor parallelism, of this rank's part of the model."""
    stage: int
    world: int
    """Data-parallel ranks."""
    tensor_parallel: int = 1
    precision: str
    measured: StateBytes
    """Between the last backward and its step."""
    offloaded: Offloaded | None = None
    """None if everything is on the device."""
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


def closing_table(outcome: Outcome) -> Table:
    """Lay out a run's outcome for a terminal."""
    offload = "" if outcome.offloaded is None else "offload cpu · "
    ranks, part = str(outcome.world), ""
    if outcome.tensor_parallel > 1:
        ranks, part = f"{outcome.world} × {outcome.tensor_parallel}", " a tensor-parallel rank"
    table = Table(
        title=f"stage {outcome.stage} · {ranks} ranks · {outcome.precision} · {offload}"
        f"Ψ = {outcome.parameters / 1e6:,.1f}M parameters{part}",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("per rank")
    table.add_column("measured", justify="right")
    table.add_column("paper", justify="right")
    table.add_column("formula")
    if outcome.offloaded is None:
        rows = paper_memory(outcome.stage, outcome.world, outcome.precision)
        _add_memory(table, outcome.parameters, rows, outcome.measured)
    else:
        _add_both_places(table, outcome, outcome.offloaded)
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


def _add_both_places(table: Table, outcome: Outcome, offloaded: Offloaded) -> None:
    on_host = offloaded.on_host
    paper = paper_offload_memory(outcome.stage, outcome.world, outcome.precision, on_host)
    _add_memory(table, outcome.parameters, paper.device, offloaded.device, "device")
    _add_memory(table, outcome.parameters, paper.host, offloaded.host, "host")
    traffic, written = paper_traffic(outcome.precision, on_host, outcome.kept)
    counted = "–"
    if offloaded.traffic is not None:
        ranks = shared_by(state_table(outcome.stage, outcome.world).optimizer.extent, outcome.world)
        counted = f"{offloaded.traffic * ranks / outcome.parameters:.3f}"
    table.add_row("traffic, bytes a parameter", counted, f"{traffic:.3f}", written)
    symbols = {term.symbol: term.share for row in (*paper.device, *paper.host) for term in row.terms}
    shares = [f"{symbol} = {share:.3f} Ψ" for symbol, share in symbols.items() if symbol != "Ψ"]
    table.caption = " · ".join(shares) or None


def _add_memory(
    table: Table, parameters: int, rows: Sequence[PaperRow], measured: StateBytes, place: str | None = None
) -> None:
    """Add a row for each kind of state and one for all of them together."""
    before = "" if place is None else f"{place} "
    for row, size in zip(rows, measured, strict=True):
        table.add_row(f"{before}{row.kind}, MB", _mb(size), _mb(row.bytes(parameters)), str(row))
    every = "all model states, MB" if place is None else f"all on the {place}, MB"
    table.add_row(every, _mb(sum(measured)), _mb(sum(row.bytes(parameters) for row in rows)))


def _mb(number: float) -> str:
    return f"{number / 1e6:,.2f}"
