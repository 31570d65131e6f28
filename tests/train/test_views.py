"""How a record is shown."""

from dataclasses import replace

import pytest
import torch
from rich.console import Console
from torch import nn

import zeroshard
from zeroshard import Offload
from zeroshard.observe.ledger import Memory, Stats
from zeroshard.plan.papers.formulas import HostPart
from zeroshard.train.record import OffloadStep, Record
from zeroshard.train.views import closing_table


@pytest.fixture(scope="module")
def stats() -> Stats:
    model = nn.Linear(2, 2)
    model, _ = zeroshard.shard(model, torch.optim.AdamW(model.parameters()))
    return replace(
        zeroshard.stats(model),
        stage=3,
        parameters=1_000_000,
        padded_parameters=1_000_000,
        kept_parameters=400_000,
        memory_at_step=Memory(parameters=2_000_000, gradients=2_010_000, optimizer_states=4_000_000),
    )


def shown(stats: Stats, offload: OffloadStep | None = None) -> str:
    record = Record(
        world=2,
        precision="fp32",
        tokens_a_step=1,
        losses=[5.5, 2.5],
        held_out=[5.6, 2.6],
        stats=stats,
        volume=2.6,
        tokens_a_second=1234.0,
        offload=offload,
    )
    console = Console(width=80)
    with console.capture() as capture:
        console.print(closing_table(record))
    return capture.get()


def test_the_table_shows_measured_beside_paper(stats: Stats) -> None:
    text = shown(stats)
    for part in ("2.01", "4Ψ/2", "8Ψ/2", "8.01", "2.600", "3Ψ − Ψ_kept", "5.600 → 2.600", "1,234"):
        assert part in text
    for word in ("host", "device", "offload", "traffic"):
        assert word not in text


def test_with_offload_it_shows_both_places_and_what_crosses_between_them(stats: Stats) -> None:
    measured = OffloadStep(
        part=HostPart(options=Offload(host_fraction=0.7), share=0.75),
        device=Memory(parameters=2_000_000, gradients=500_000, optimizer_states=1_000_000),
        host=Memory(gradients=1_500_000, optimizer_states=4_500_000),
        traffic=3_000_000,
    )
    lines = shown(stats, measured).splitlines()
    rows = {cells[0]: cells[1:] for line in lines if len(cells := [cell.strip() for cell in line.split("│")[1:-1]]) > 1}
    assert rows["device parameters, MB"] == ["2.00", "2.00", "4Ψ/2"]
    assert rows["device gradients, MB"] == ["0.50", "0.50", "4Ψ_device/2"]
    assert rows["device optimizer states, MB"] == ["1.00", "1.00", "8Ψ_device/2"]
    assert rows["all on the device, MB"] == ["3.50", "3.50", ""]
    assert rows["host gradients, MB"] == ["1.50", "1.50", "4Ψ_host/2"]
    assert rows["host optimizer states, MB"] == ["4.50", "4.50", "12Ψ_host/2"]
    assert rows["all on the host, MB"] == ["6.00", "6.00", ""]
    assert rows["traffic, bytes a parameter"] == ["6.000", "6.000", "8Ψ_host/Ψ"]
    assert "offload cpu" in lines[0]
    assert lines[-1].strip() == "Ψ_device = 0.250 Ψ · Ψ_host = 0.750 Ψ"
