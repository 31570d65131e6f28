"""The closing table's layout."""

from rich.console import Console

from zeroshard import Offload
from zeroshard.train.paper import OnHost
from zeroshard.train.summary import Offloaded, Outcome, StateBytes, closing_table


def outcome(offloaded: Offloaded | None = None) -> Outcome:
    return Outcome(
        parameters=1_000_000,
        stage=3,
        world=2,
        precision="fp32",
        measured=StateBytes(2_000_000, 2_010_000, 4_000_000),
        offloaded=offloaded,
        volume=2.6,
        kept=0.4,
        first_loss=5.5,
        last_loss=2.5,
        held_out_before=5.6,
        held_out_after=2.6,
        tokens_per_second=1234.0,
    )


def shown(of: Outcome) -> str:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(closing_table(of))
    return capture.get()


def test_the_table_shows_measured_beside_paper() -> None:
    text = shown(outcome())
    for part in ("2.01", "4Ψ/2", "8Ψ/2", "8.01", "2.600", "3Ψ − Ψ_kept", "5.600 → 2.600", "1,234"):
        assert part in text
    for word in ("host", "device", "offload", "traffic"):
        assert word not in text


def test_with_offload_it_shows_both_places_and_what_crosses_between_them() -> None:
    measured = Offloaded(
        on_host=OnHost(options=Offload(host_fraction=0.7), share=0.75),
        device=StateBytes(2_000_000, 500_000, 1_000_000),
        host=StateBytes(0, 1_500_000, 4_500_000),
        traffic=3_000_000,
    )
    lines = shown(outcome(measured)).splitlines()
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
