"""Views of a record at the end of a run: what was traced, and the closing table beside the papers."""

from collections.abc import Sequence

from rich.table import Table

from ..observe.ledger import Memory
from ..plan.papers.formulas import (
    PaperRow,
    paper_memory,
    paper_traffic,
    paper_volume,
    ranks_that_update,
    total_bytes,
)
from .record import Record, StepTrace


def trace_line(trace: StepTrace) -> str:
    """Return what was traced, and the share of the time that copies cost."""
    verdict = "nothing is offloaded, so nothing was copied"
    if trace.exposed_copies is not None:
        verdict = f"copies hidden by neither device nor host work took {trace.exposed_copies:.1%} of the time"
    first, last = trace.steps[0], trace.steps[-1]
    steps = f"steps {first} to {last}" if first < last else f"step {first}"
    return f"traced {steps} in {trace.file}: {verdict}"


def closing_table(record: Record) -> Table:
    """Return the table that ends a run: what this rank measured beside the papers' formulas."""
    stats, offload = record.stats, record.offload
    assert stats is not None, "a step was measured"
    ranks, size = str(record.world), f"Ψ = {stats.parameters / 1e6:,.1f}M parameters"
    if record.tensor_parallel > 1:
        ranks, size = f"{ranks} × {record.tensor_parallel}", f"{size} a tensor-parallel rank"
    setting = [f"stage {stats.stage}", f"{ranks} ranks", record.precision, *(["offload cpu"] if offload else []), size]
    table = Table(title=" · ".join(setting), title_justify="left", caption_justify="left")
    for name in ("per rank", "measured", "paper", "formula"):
        table.add_column(name, justify="right" if name in ("measured", "paper") else "left")
    kept, parameters = stats.kept_parameters / stats.padded_parameters, stats.parameters
    part = None if offload is None else offload.part
    times = record.micro_batches
    paper = paper_memory(stats.stage, record.world, record.precision, part, times)
    if offload is None:
        _add_memory(table, "", parameters, paper.device, record.memory)
    else:
        _add_memory(table, "device", parameters, paper.device, offload.device)
        _add_memory(table, "host", parameters, paper.host, offload.host)
        traffic, formula = paper_traffic(record.precision, offload.part, kept, times)
        each = parameters / ranks_that_update(stats.stage, record.world)
        counted = None if offload.traffic is None else offload.traffic / each
        table.add_row("traffic, bytes a parameter", _number(counted), _number(traffic), formula)
        symbols = {term.symbol: term.share for row in (*paper.device, *paper.host) for term in row.terms}
        shares = [f"{symbol} = {share:.3f} Ψ" for symbol, share in symbols.items() if symbol != "Ψ"]
        table.caption = " · ".join(shares) or None
    volume, formula = paper_volume(stats.stage, record.world, kept, times)
    table.add_row("volume per step, Ψ", _number(record.volume), _number(volume), formula, end_section=True)
    table.add_row("training loss", f"{record.losses[0]:.3f} → {record.losses[-1]:.3f}")
    table.add_row("held-out loss", f"{record.held_out[0]:.3f} → {record.held_out[-1]:.3f}")
    table.add_row("tokens/s, all ranks", "–" if record.tokens_a_second is None else f"{record.tokens_a_second:,.0f}")
    return table


def _add_memory(table: Table, place: str, parameters: int, rows: Sequence[PaperRow], measured: Memory) -> None:
    """Add a row for each kind of state, and one for all of them together."""
    whole = measured.model_states + measured.accumulators
    for row in rows:
        size = getattr(measured, row.kind) + (measured.accumulators if row.kind == "gradients" else 0)
        table.add_row(f"{place} {row.title}, MB".lstrip(), _mb(size), _mb(row.bytes(parameters)), str(row))
    together = f"all on the {place}, MB" if place else "all model states, MB"
    table.add_row(together, _mb(whole), _mb(total_bytes(rows, parameters)))


def _mb(number: float) -> str:
    return f"{number / 1e6:,.2f}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
