"""The papers' formulas for one rank: bytes of model states, volume, and traffic between host and device.

ZeRO sections 5 and 7, ZeRO-Offload section 3. The papers know neither fp32 nor 16-bit moments nor parameters on the
host. These are counted in the same way: bytes for each parameter, divided by the ranks that share the bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...config.offload import Offload
from ...config.table import Extent, state_table
from ...offload.pipeline import HIGH_HALVES, RING
from ..setup import WIDTHS

KINDS = ("parameters", "gradients", "optimizer_states")
"""Fields of ``Memory`` and ``DeviceMemory`` that the papers have a formula for."""
MOMENTS = 8  # bytes a parameter: Adam's momentum and variance in fp32
ACCUMULATED = 4  # bytes a parameter: gradients of several micro-batches, in fp32
MASTER = 4  # bytes a parameter: the fp32 copy behind 16-bit parameters


class Term(NamedTuple):
    """Bytes for each parameter of a part of the model."""

    per_parameter: float
    symbol: str = "Ψ"
    share: float = 1.0
    """The size of that part, in Ψ."""


class PaperRow(NamedTuple):
    """The formula of one kind of model state."""

    kind: str
    terms: tuple[Term, ...]
    divisor: int
    """Ranks that divide the state among them."""

    @property
    def title(self) -> str:
        return self.kind.replace("_", " ")

    def __str__(self) -> str:
        divided = f"/{self.divisor}" if self.divisor > 1 else ""
        return " + ".join(f"{round(term.per_parameter, 2):g}{term.symbol}{divided}" for term in self.terms) or "0"

    def bytes(self, parameters: float) -> float:
        """Bytes on one rank for a model of so many parameters."""
        return sum(term.per_parameter * term.share for term in self.terms) * parameters / self.divisor


class PaperMemory(NamedTuple):
    """The formulas for the device and for the host, always in the order of ``KINDS``."""

    device: list[PaperRow]
    host: list[PaperRow]
    """Empty without offload."""


@dataclass(frozen=True, kw_only=True)
class HostPart:
    """The part of the model states that an offload puts on the host."""

    options: Offload
    share: float = 1.0
    """Ψ_host in Ψ: the parameters whose states live on the host. Units are placed whole, so the share may be larger
    than ``host_fraction``."""
    largest_unit: float = 0.0
    """Ψ_unit in Ψ: the largest unit. It sets the size of the buffers that units use in turn."""


def ranks_that_update(stage: int, world: int) -> int:
    """How many ranks divide the optimizer's states among them."""
    return _divisors(stage, world)[-1]


def paper_memory(
    stage: int, world: int, precision: str, part: HostPart | None = None, micro_batches: int = 1
) -> PaperMemory:
    """The formulas with Adam, by kind (ZeRO, section 5 and figure 1; ZeRO-Offload, section 3).

    Several micro-batches add up in fp32.

    >>> memory = paper_memory(stage=2, world=64, precision="bf16")
    >>> total_bytes(memory.device, 7_500_000_000) / 1e9
    16.640625
    >>> memory = paper_memory(stage=2, world=4, precision="bf16", part=HostPart(options=Offload()))
    >>> [str(row) for row in memory.device], [str(row) for row in memory.host]
    (['2Ψ', '0', '0'], ['0', '2Ψ/4', '12Ψ/4'])
    """
    size, divisors = WIDTHS[precision], _divisors(stage, world)
    states = MOMENTS + (MASTER if size < MASTER else 0)
    gradients = size if micro_batches == 1 else ACCUMULATED
    if micro_batches > 1 and size < ACCUMULATED:  # a rank adds up its own part of them; in fp32 where they are anyway
        divisors[1] = divisors[2]
    if part is None:
        return PaperMemory(_rows([[Term(size)], [Term(gradients)], [Term(states)]], divisors), [])
    resting = size if part.options.parameters == "device" else 0
    stay = 1 - part.share
    staying = [[Term(number if stay else 0, "Ψ_device", stay)] for number in (gradients, states)]
    terms = _host_terms(size, part)
    terms[1].append(Term(ACCUMULATED if micro_batches > 1 else 0, terms[1][0].symbol, part.share))
    on_host = _rows(terms, divisors[-1:] * len(KINDS))
    return PaperMemory(_rows([[Term(resting)], *staying], divisors), on_host)


def total_bytes(rows: Iterable[PaperRow], parameters: float) -> float:
    """Bytes of all kinds together, for a model of so many parameters."""
    return sum(row.bytes(parameters) for row in rows)


def _divisors(stage: int, world: int) -> list[int]:
    """How many ranks divide each kind of state among them."""
    table = state_table(stage, world)
    return [world if row.extent is Extent.SHARD else 1 for row in (table.parameters, table.gradients, table.optimizer)]


def _rows(terms: Sequence[Sequence[Term]], divisors: Sequence[int]) -> list[PaperRow]:
    """The rows of all kinds, without terms of 0 bytes."""
    present = [tuple(term for term in row if term.per_parameter) for row in terms]
    return [PaperRow(*row) for row in zip(KINDS, present, divisors, strict=True)]


def _host_terms(size: int, part: HostPart) -> list[list[Term]]:
    options, symbol = part.options, "Ψ" if part.share == 1 else "Ψ_host"
    half, delayed = size == 2, options.delayed_update_after is not None
    separate = half and not options.split_master  # the 16-bit parameter is not a part of the master
    fresh = delayed and separate  # a buffer for new parameters that are not published yet
    resting = options.parameters == "cpu" and (delayed or separate)
    gradients = 0 if options.update_in_backward else size
    in_turn = size * (RING * options.update_in_backward + HIGH_HALVES * options.read_back)
    master = MASTER - 2 * options.read_back  # the upper half of a split master is read back from the device
    moments = 2 * options.moment_bytes
    return [
        [Term(size * (fresh + resting), symbol, part.share)],
        [Term(gradients, symbol, part.share), Term(in_turn, "Ψ_unit", part.largest_unit)],
        [Term(master + moments, symbol, part.share)],
    ]


def paper_volume(stage: int, world: int, kept: float, micro_batches: int = 1) -> tuple[float, str]:
    """The volume of a step in Ψ, and its formula (ZeRO, section 7). ``kept`` is Ψ_kept in Ψ.

    Every micro-batch is reduced.

    >>> paper_volume(2, world=4, kept=0.0, micro_batches=3), paper_volume(3, world=4, kept=0.5)
    ((4.0, '4Ψ'), (2.5, '3Ψ − Ψ_kept'))
    """
    if world == 1:
        return 0.0, "one rank: 0"
    if stage == 3:
        times = f"{micro_batches} · (3Ψ − Ψ_kept)" if micro_batches > 1 else "3Ψ − Ψ_kept"
        return micro_batches * (3.0 - kept), times
    elements = 1 + micro_batches if stage else 2 * micro_batches
    return float(elements), f"{elements}Ψ"


def paper_traffic(precision: str, part: HostPart, kept: float, micro_batches: int = 1) -> tuple[float, str]:
    """Bytes a parameter that cross between host and device in a step, and their formula.

    Gradients go down and parameters come up. A high half that is read back goes down too. Parameters that rest on the
    host come up twice, for forward and for backward, except those of kept units.

    >>> paper_traffic("bf16", HostPart(options=Offload()), kept=0.0)
    (4.0, '2 down + 2 up')
    """
    size = WIDTHS[precision]
    if part.options.parameters == "cpu":
        times = size * micro_batches
        return 3 * times - times * kept, f"{3 * times} − {times}Ψ_kept/Ψ"
    down = size * (micro_batches + part.options.read_back)
    if part.share == 1:
        return float(down + size), f"{down} down + {size} up"
    return (down + size) * part.share, f"{down + size}Ψ_host/Ψ"
