"""What the papers say of a run: bytes of model states per rank, volume, and traffic between host and device.

ZeRO sections 5 and 7, ZeRO-Offload section 3. What the papers did not have (fp32, 16-bit moments, parameters on the
host and so on) is counted the same way: so many bytes a parameter, divided by the ranks that share them.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..config.offload import Offload
from ..config.table import Extent, state_table
from ..offload.pipeline import HIGH_HALVES, RING

MOMENTS = 8  # bytes a parameter: Adam's momentum and variance in fp32
MASTER = 4  # bytes a parameter: the fp32 copy behind 16-bit parameters


class Term(NamedTuple):
    """So many bytes for each of some of the parameters."""

    per_parameter: int
    symbol: str = "Ψ"
    share: float = 1.0
    """How many these are, in Ψ."""


class PaperRow(NamedTuple):
    """The paper's bytes of one kind of state: so many a parameter, divided by so many ranks."""

    kind: str
    terms: tuple[Term, ...]
    divisor: int

    def __str__(self) -> str:
        divided = f"/{self.divisor}" if self.divisor > 1 else ""
        return " + ".join(f"{term.per_parameter}{term.symbol}{divided}" for term in self.terms) or "0"

    def bytes(self, parameters: int) -> float:
        """Return the row's bytes for a model of so many parameters."""
        return sum(term.per_parameter * term.share for term in self.terms) * parameters / self.divisor


@dataclass(frozen=True, kw_only=True)
class OnHost:
    """What an offload has put on the host."""

    options: Offload
    share: float = 1.0
    """Ψ_host in Ψ: the parameters whose states live there. Units are placed whole, so it may exceed what was asked."""
    largest_unit: float = 0.0
    """Ψ_unit in Ψ: the unit that sets the size of buffers that units take turns with."""

    @property
    def symbol(self) -> str:
        """How the parameters whose states live on the host are written."""
        return "Ψ" if self.share == 1 else "Ψ_host"


class PaperMemory(NamedTuple):
    """The paper's rows in each of the two places, always in the order parameters, gradients, optimizer states."""

    device: list[PaperRow]
    host: list[PaperRow]


def width(precision: str) -> int:
    """Return the bytes of a parameter, which are also those of its gradient."""
    return 4 if precision == "fp32" else 2


def shared_by(extent: Extent, world: int) -> int:
    """Return how many ranks divide a state of this extent among them."""
    return world if extent is Extent.SHARD else 1


def paper_memory(stage: int, world: int, precision: str) -> list[PaperRow]:
    """Return the paper's bytes per rank with Adam, by kind (ZeRO, section 5 and figure 1).

    >>> sum(row.bytes(7_500_000_000) for row in paper_memory(stage=2, world=64, precision="bf16")) / 1e9
    16.640625
    """
    table = state_table(stage, world)
    size = width(precision)
    states = MOMENTS if precision == "fp32" else MOMENTS + MASTER
    return [
        PaperRow("parameters", (Term(size),), shared_by(table.parameters.extent, world)),
        PaperRow("gradients", (Term(size),), shared_by(table.gradients.extent, world)),
        PaperRow("optimizer states", (Term(states),), shared_by(table.optimizer.extent, world)),
    ]


def paper_offload_memory(stage: int, world: int, precision: str, on_host: OnHost) -> PaperMemory:
    """Return the paper's bytes per rank on the device and on the host (ZeRO-Offload, section 3).

    >>> memory = paper_offload_memory(stage=2, world=4, precision="bf16", on_host=OnHost(options=Offload()))
    >>> [str(row) for row in memory.device], [str(row) for row in memory.host]
    (['2Ψ', '0', '0'], ['0', '2Ψ/4', '12Ψ/4'])
    """
    plain = paper_memory(stage, world, precision)
    parameters, *states = plain
    stay = 1 - on_host.share
    at_rest = parameters.terms if on_host.options.parameters == "device" else ()
    device = [PaperRow(parameters.kind, at_rest, parameters.divisor)]
    for kind, terms, divisor in states:
        staying = tuple(Term(term.per_parameter, "Ψ_device", stay) for term in terms if stay)
        device.append(PaperRow(kind, staying, divisor))
    ranks = shared_by(state_table(stage, world).optimizer.extent, world)
    return PaperMemory(
        device=device,
        host=[
            PaperRow(row.kind, terms, ranks)
            for row, terms in zip(plain, _host_terms(width(precision), on_host), strict=True)
        ],
    )


def _host_terms(size: int, on_host: OnHost) -> tuple[tuple[Term, ...], ...]:
    options = on_host.options
    half, delayed = size == 2, options.delayed_update_after is not None
    separate = half and not options.split_master  # the parameter is a buffer beside the master, not a part of it
    fresh = delayed and separate  # where the new parameters wait for their turn
    resting = options.parameters == "cpu" and (delayed or separate)
    parameters = size * (fresh + resting)
    gradients = 0 if options.update_in_backward else size
    turns = size * (RING * options.update_in_backward + HIGH_HALVES * options.read_back)
    master = MASTER - 2 * options.read_back  # of a split one, the half that is read back is not kept
    moments = MOMENTS if options.moments is torch.float32 else MOMENTS // 2

    def term(per_parameter: int) -> tuple[Term, ...]:
        return (Term(per_parameter, on_host.symbol, on_host.share),) if per_parameter else ()

    ring = (Term(turns, "Ψ_unit", on_host.largest_unit),) if turns else ()
    return term(parameters), term(gradients) + ring, term(master + moments)


def paper_volume(stage: int, world: int, kept: float) -> tuple[float, str]:
    """Return the paper's volume of a step in Ψ, and how it is written (ZeRO, section 7)."""
    if world == 1:
        return 0.0, "one rank: 0"
    return (2.0, "2Ψ") if stage < 3 else (3.0 - kept, "3Ψ − Ψ_kept")


def paper_traffic(precision: str, on_host: OnHost, kept: float) -> tuple[float, str]:
    """Return the bytes a parameter that cross between host and device in a step, and how they are written.

    Gradients go down and parameters come up; a high half that is read back goes down too, and parameters that rest on
    the host come up twice, for forward and backward, but for units that are held between the two.

    >>> paper_traffic("bf16", OnHost(options=Offload()), kept=0.0)
    (4.0, '2 down + 2 up')
    """
    size = width(precision)
    if on_host.options.parameters == "cpu":
        return 3 * size - size * kept, f"{3 * size} − {size}Ψ_kept/Ψ"
    down = 2 * size if on_host.options.read_back else size
    if on_host.share == 1:
        return float(down + size), f"{down} down + {size} up"
    return (down + size) * on_host.share, f"{down + size}Ψ_host/Ψ"
