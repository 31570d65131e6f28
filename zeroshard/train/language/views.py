"""How a fine-tuning ends: what was measured beside the plan, where the result is, and how it is loaded."""

from pathlib import Path

import torch
from rich.table import Table

from ..record import Record
from .forecast import Forecast

KINDS = ("parameters", "gradients", "accumulators", "optimizer_states")


def plan_table(record: Record, forecast: Forecast, device: torch.device) -> Table:
    """Return what this rank measured, beside what the plan said before the run."""
    stats, row = record.stats, forecast.row
    assert stats is not None, "a step was measured"
    setting = [f"stage {stats.stage}", f"offload {row.variant.name}", f"{record.world} rank(s)", record.precision]
    table = Table(title=" · ".join(setting), title_justify="left")
    for name, side in (("per rank", "left"), ("measured", "right"), ("plan", "right")):
        table.add_column(name, justify="right" if side == "right" else "left")
    at_step = record.memory
    for kind in KINDS:
        measured, planned = getattr(at_step, kind), getattr(row.budget.at_step, kind)
        if measured or planned:
            table.add_row(f"{kind.replace('_', ' ')}, MB", _mb(measured), _mb(planned))
    if row.budget.host.total and stats.host_memory is not None:
        table.add_row("on the host, MB", _mb(stats.host_memory.total), _mb(row.budget.host.total))
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        table.add_row("peak of the device, MB", _mb(peak), _mb(row.budget.peak.total))
    if row.traced.blocks:
        table.add_row("recomputed blocks", str(stats.recomputed_blocks), str(row.recomputed))
    volume = "–" if record.volume is None else f"{record.volume * stats.padded_parameters / 1e6:,.3f}"
    planned_volume = f"{row.volume.elements / 1e6:,.3f}"
    table.add_row("volume per step, million elements", volume, planned_volume)
    planned_speed = "–" if row.tokens_a_second is None else f"{row.tokens_a_second:,.0f}"
    speed = "–" if record.tokens_a_second is None else f"{record.tokens_a_second:,.0f}"
    table.add_row("tokens/s, all ranks, with padding", speed, planned_speed, end_section=True)
    table.add_row("training loss", f"{record.losses[0]:.3f} → {record.losses[-1]:.3f}")
    if record.held_out:
        table.add_row("held-out loss", f"{record.held_out[0]:.3f} → {record.held_out[-1]:.3f}")
    return table


def closing_lines(folder: Path, *, lora: bool) -> list[str]:
    """Return where the result is, and the lines of Python that load it."""
    library, name = ("peft", "AutoPeftModelForCausalLM") if lora else ("transformers", "AutoModelForCausalLM")
    return [
        f"the {'adapter' if lora else 'model'} is in {folder}; in Python:",
        f"  import {'peft, ' if lora else ''}transformers",
        f'  model = {library}.{name}.from_pretrained("{folder}")',
        f'  tokenizer = transformers.AutoTokenizer.from_pretrained("{folder}")',
    ]


def _mb(size: float) -> str:
    return f"{size / 1e6:,.2f}"
