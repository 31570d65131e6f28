"""The claims of the two papers next to the numbers of this plan (ZeRO, arXiv 1910.02054; ZeRO-Offload, 2101.06840).

The machine is ``machines/v100.toml``. Three of its numbers are fitted, each to one claim, and these claims are marked.
All other measurements of the papers are predicted, and the error of each is shown. Speeds are those of this runtime's
schedule, which overlaps more than the papers' schedule. If the batch of a speed is not known, the largest batch that
fits is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

from ...config.offload import Offload
from ..machine.profile import Machine, load
from ..setup import Setup
from ..time.step_time import StepTime, step_time
from ..time.unit_costs import host_update_bytes
from .devices import (
    BASELINE,
    BILLION,
    GB,
    ZERO_R,
    Residual,
    device_bytes,
    fits,
    gpt,
    largest_batch,
    largest_model,
)
from .formulas import paper_memory, total_bytes
from .shape import Transformer


class Kind(Enum):
    """The kind of a claim."""

    THEORY = "formula"
    MEASURED = "measured"
    FITTED = "fitted"
    REACHED = "reached"
    """The paper did this, so our number must be at least as large."""


@dataclass(frozen=True)
class PaperClaim:
    """A number that a paper prints, and our number."""

    source: str
    about: str
    unit: str
    printed: float
    ours: float
    kind: Kind = Kind.MEASURED
    note: str = ""

    @property
    def error(self) -> float:
        """The relative error of our number; 0 for a ``REACHED`` claim that we reach."""
        if self.kind is Kind.REACHED and self.ours >= self.printed:
            return 0.0
        return self.ours / self.printed - 1

    @property
    def fitted(self) -> bool:
        return self.kind is Kind.FITTED


# -- theory -------------------------------------------------------------------------------------------------------

FIGURE_1 = (120, 31.4, 16.6, 1.9)
TABLE_1: dict[float, dict[int, tuple[float, float, float]]] = {
    7.5e9: {
        1: (120, 120, 120),
        4: (52.5, 41.3, 30),
        16: (35.6, 21.6, 7.5),
        64: (31.4, 16.6, 1.88),
        256: (30.4, 15.4, 0.47),
        1024: (30.1, 15.1, 0.12),
    },
    128e9: {
        1: (2048, 2048, 2048),
        4: (896, 704, 512),
        16: (608, 368, 128),
        64: (536, 284, 32),
        256: (518, 263, 8),
        1024: (513, 257, 2),
    },
    1e12: {
        1: (16000, 16000, 16000),
        4: (7000, 5500, 4000),
        16: (4750, 2875, 1000),
        64: (4187, 2218, 250),
        256: (4046, 2054, 62.5),
        1024: (4011, 2013, 15.6),
    },
}
TABLE_2 = {1: (2, 7.6, 14.4, 128), 2: (4, 15.2, 28.8, 256), 4: (8, 30.4, 57.6, 500), 8: (16, 60.8, 115.2, 1000),
           16: (32, 121.6, 230.4, 2000)}  # fmt: skip
TABLE_2_MEASURED = {1: (1.3, 6.2), 2: (2.5, 12.5), 4: (5, 25), 8: (10, 50), 16: (20, 100)}


def state_gigabytes(parameters: float, stage: int, world: int) -> float:
    """Model states of one rank with Adam in mixed precision."""
    return total_bytes(paper_memory(stage, world, "fp16").device, parameters) / GB


def _theory() -> Iterator[PaperClaim]:
    for stage, printed in enumerate(FIGURE_1):
        ours = state_gigabytes(7.5e9, stage, 64)
        yield PaperClaim("ZeRO, figure 1", "7.5B on 64", "GB", printed, ours, Kind.THEORY, "stages 0 to 3")
    for parameters, rows in TABLE_1.items():
        for world, row in rows.items():
            for stage, printed in enumerate(row, start=1):
                about = f"{parameters / BILLION:g}B on {world}"
                ours = state_gigabytes(parameters, stage, world)
                yield PaperClaim("ZeRO, table 1", about, "GB", printed, ours, Kind.THEORY, "stages 1 to 3")
    for degree, largest in TABLE_2.items():
        for stage, printed in enumerate(largest):
            about = f"largest on {64 * degree}, MP {degree}"
            ours = degree * 32 / state_gigabytes(1e9, stage, 64)
            yield PaperClaim("ZeRO, table 2", about, "B", printed, ours, Kind.THEORY, "stages 0 to 3")
    yield PaperClaim(
        "ZeRO, section 9", "1T on 1024: stage 3", "GB", 15.6, state_gigabytes(1e12, 3, 1024), Kind.THEORY, "of 32"
    )


# -- sizes --------------------------------------------------------------------------------------------------------


def _sizes(machine: Machine) -> Iterator[PaperClaim]:
    for degree, (baseline, divided) in TABLE_2_MEASURED.items():
        setup = Setup(stage=0, world=64, model_parallel=degree)
        hidden = 1600 if degree == 1 else 4096
        about = f"on {64 * degree}, MP {degree}"
        ours = largest_model(hidden, setup, machine, BASELINE)
        yield PaperClaim("ZeRO, table 2", f"largest {about}, no ZeRO", "B", baseline, ours)
        ours = largest_model(4096, replace(setup, stage=1), machine)
        yield PaperClaim("ZeRO, table 2", f"largest {about}, stage 1", "B", divided, ours)
    ours = largest_model(1600, Setup(stage=0, world=128), machine, BASELINE)
    yield PaperClaim("ZeRO, figure 4", "largest on 128, no model parallelism: plain", "B", 1.38, ours)
    ours = largest_model(4096, Setup(stage=2, world=128), machine)
    yield PaperClaim("ZeRO, figure 4", "largest on 128, no model parallelism: stage 2", "B", 13, ours)
    for name, stage, residual, degree in (("Megatron-LM", 0, BASELINE, 16), ("stage 1", 1, ZERO_R, 4)):
        lowest = _lowest_degree(gpt(78, 4256), 256, stage, residual, machine)
        yield PaperClaim("Turing-NLG", f"17B on 256: least model parallelism, {name}", "GPUs", degree, lowest)
    trillion = gpt(128, 25600)
    setup = Setup(stage=3, world=64, model_parallel=16)
    needed = device_bytes(trillion, setup) / GB
    note = f"{needed:.1f} GB with MP 16"
    reached = trillion.parameters / BILLION if fits(trillion, setup, machine) else 0.0
    yield PaperClaim("ZeRO, section 9", "1T on 1024 of 32 GB, stage 3", "B", 1000, reached, Kind.REACHED, note)

    offload = Offload()
    for gpus, printed in ((4, 3.9), (16, 8)):
        ours = largest_model(3072, Setup(stage=2, world=gpus), machine)
        yield PaperClaim("Offload, sizes", f"largest on {gpus}, stage 2", "B", printed, ours)
    for gpus, printed in ((4, 4.5), (16, 15)):
        ours = largest_model(3072, Setup(stage=0, model_parallel=gpus), machine, BASELINE)
        yield PaperClaim("Offload, sizes", f"largest on {gpus}, Megatron-LM", "B", printed, ours)
    ours = largest_model(4096, Setup(stage=2, offload=offload), machine)
    yield PaperClaim("Offload, sizes", "largest on 1, offload", "B", 13, ours)
    for gpus, printed in ((4, 30), (16, 70)):
        ours = largest_model(8192, Setup(stage=2, model_parallel=gpus, offload=offload), machine)
        yield PaperClaim("Offload, sizes", f"trains on {gpus}, offload, MP {gpus}", "B", printed, ours, Kind.REACHED)


def _lowest_degree(model: Transformer, gpus: int, stage: int, residual: Residual, machine: Machine) -> int:
    degrees = (1 << power for power in range(9))
    return next(
        degree
        for degree in degrees
        if fits(model, Setup(stage=stage, world=gpus // degree, model_parallel=degree), machine, residual)
    )


CONFIGURATIONS = {
    # stage, parts of ZeRO-R, billions of the largest model, maximum of GB cached with 40B
    "C1": (1, Residual(partitioned=False), 40, 29.5),
    "C2": (1, Residual(), 60, 24.0),
    "C3": (2, Residual(partitioned=False), 50, 25.3),
    "C4": (2, Residual(), 140, 20.0),
    "C5": (2, Residual(on_host=True), 150, 20.0),
}


def _residual_states(machine: Machine) -> Iterator[PaperClaim]:
    for name, (stage, residual, largest, _) in CONFIGURATIONS.items():
        ours = largest_model(8192, Setup(stage=stage, world=25, model_parallel=16), machine, residual)
        yield PaperClaim("ZeRO, figure 6", f"largest on 400, MP 16, {name}", "B", largest, ours)
    for name, (stage, residual, _, cached) in CONFIGURATIONS.items():
        setup = Setup(stage=stage, world=25, model_parallel=16, batch=16)
        ours = device_bytes(gpt(50, 8192), setup, residual) / GB
        yield PaperClaim("ZeRO, figure 7", f"40B on 400, MP 16, {name}: cached", "GB", cached, ours)


# -- speed --------------------------------------------------------------------------------------------------------

ZERO_RUNS = {
    # size: ((GPUs, MP, layers, hidden, batch), MP of Megatron-LM), (ZeRO, Megatron-LM) in TFLOPS
    1.5: ((400, 1, 48, 1600, 24), 2, (30.3, 26.3)),
    8: ((400, 4, 72, 3072, 64), 8, (36.9, 23.1)),
    40: ((400, 4, 88, 6144, 12), 32, (35.9, 4.9)),
    60: ((400, 16, 132, 6144, 64), 64, (36.5, 6.2)),
    80: ((400, 16, 100, 8192, 32), 128, (37.6, 5.1)),
    100: ((400, 16, 125, 8192, 32), 128, (38.7, 3.6)),
    120: ((400, 16, 150, 8192, 24), 128, (28.2, 3.6)),
    140: ((400, 16, 175, 8192, 16), 128, (26.9, 3.7)),
    170: ((400, 16, 212, 8192, 12), 256, (21.0, 2.1)),
}
SUPER_LINEAR = {64: 25.6, 128: 37.6, 256: 39.1, 400: 36.6}
WITHOUT_MP = {
    # size: (layers, hidden), TFLOPS; the paper does not print the shapes of this figure, so these are ours
    1.5: ((48, 1600), 40.4),
    2.5: ((54, 1920), 42.0),
    4: ((64, 2304), 43.6),
    6: ((53, 3072), 47.0),
    8: ((72, 3072), 47.0),
    10: ((50, 4096), 41.2),
    11: ((55, 4096), 35.8),
    12: ((60, 4096), 33.0),
    13: ((65, 4096), 21.2),
}
PLAIN = {1.16: ((35, 1600), 39.2), 1.38: ((42, 1600), 17.8)}
OFFLOAD_RUNS = {
    # size: (layers, hidden, batch), TFLOPS on one GPU
    1: ((20, 2048, 32), 36.1),
    2: ((40, 2048, 32), 36.0),
    4: ((64, 2304, 32), 37.0),
    6: ((53, 3072, 16), 37.3),
    8: ((72, 3072, 16), 41.8),
    10: ((50, 4096, 10), 41.1),
    11: ((55, 4096, 8), 36.0),
    12: ((60, 4096, 4), 34.0),
    13: ((65, 4096, 4), 34.5),
}
OFFLOAD_BATCH = 512
OFFLOAD_SCALING = {1: 35.1, 2: 31.8, 4: 30.1, 8: 29.9, 16: 30.9, 32: 34.0, 64: 33.3, 128: 31.4}
STAGE_2_SCALING = {32: 29.9, 64: 34.2, 128: 39.7}
DELAYED = {2: (27.0, 31.4), 6: (29.4, 36.5), 8: (34.5, 37.8), 10: (34.7, 39.0)}
CPU_ADAM = {1: 0.22, 2: 0.51, 4: 1.03, 8: 2.41, 10: 2.57}
FITTED = {"10B on 1 GPU, offload", "13B on 1 GPU, offload", "100B on 400, Megatron-LM"}
"""The claims that three numbers of the profile are fitted to: efficiency, half_work, bandwidth between nodes."""


def _speed(source: str, about: str, printed: float, time: StepTime, note: str = "") -> PaperClaim:
    kind = Kind.FITTED if about in FITTED else Kind.MEASURED
    return PaperClaim(source, about, "TFLOPS", printed, time.tflops_per_device, kind, note)


def _time(model: Transformer, setup: Setup, machine: Machine) -> StepTime:
    return step_time(model.work(setup), setup, machine)


def _with_largest_batch(model: Transformer, setup: Setup, machine: Machine, residual: Residual = ZERO_R) -> Setup:
    return replace(setup, batch=max(1, largest_batch(model, setup, machine, residual)))


def _zero_speeds(machine: Machine) -> Iterator[PaperClaim]:
    ours, theirs = {}, {}
    for size, ((gpus, degree, layers, hidden, batch), baseline, (zero, megatron)) in ZERO_RUNS.items():
        model = gpt(layers, hidden)
        setup = Setup(stage=2, world=gpus // degree, model_parallel=degree, batch=batch)
        ours[size] = _speed("ZeRO, figure 2", f"{size:g}B on {gpus}, ZeRO", zero, _time(model, setup, machine))
        plain = Setup(stage=0, world=max(1, gpus // baseline), model_parallel=baseline)
        plain = _with_largest_batch(model, plain, machine, BASELINE)
        time = _time(model, plain, machine)
        about = f"{size:g}B on {gpus}, Megatron-LM"
        theirs[size] = _speed("ZeRO, figure 2", about, megatron, time, f"batch {plain.batch}")
    yield from ours.values()
    yield from theirs.values()
    hundred = ours[100]
    note = "38 TFLOPS a GPU on 400"
    yield PaperClaim("ZeRO, section 10.2", "100B on 400, in all", "PFLOPS", 15, 0.4 * hundred.ours, note=note)
    faster = min(ours[size].ours / theirs[size].ours for size in (40, 60, 80, 100))
    yield PaperClaim("ZeRO, section 10.2", "40B to 100B: times Megatron-LM, at least", "×", 5, faster, Kind.REACHED)
    for gpus, printed in SUPER_LINEAR.items():
        model = gpt(75, 8192)
        setup = Setup(stage=2, world=gpus // 16, model_parallel=16)
        setup = _with_largest_batch(model, setup, machine)
        time = _time(model, setup, machine)
        yield _speed("ZeRO, figure 3", f"60B on {gpus}, the batch that fits", printed, time, f"batch {setup.batch}")
    for shapes, stage, residual, name in ((WITHOUT_MP, 2, ZERO_R, "stage 2"), (PLAIN, 0, BASELINE, "plain")):
        for size, ((layers, hidden), printed) in shapes.items():
            model = gpt(layers, hidden)
            setup = _with_largest_batch(model, Setup(stage=stage, world=128), machine, residual)
            time = _time(model, setup, machine)
            yield _speed("ZeRO, figure 4", f"{size:g}B on 128, {name}, no MP", printed, time, f"batch {setup.batch}")


def _offload_speeds(machine: Machine) -> Iterator[PaperClaim]:
    # In the papers the host update ended before the next forward began.
    waiting = Offload(blocking=True)

    def setup(gpus: int, batch: int, offload: Offload | None) -> Setup:
        batch = min(batch, OFFLOAD_BATCH // gpus)
        return Setup(stage=2, world=gpus, batch=batch, micro_batches=OFFLOAD_BATCH // gpus // batch, offload=offload)

    for size, ((layers, hidden, batch), printed) in OFFLOAD_RUNS.items():
        time = _time(gpt(layers, hidden), setup(1, batch, waiting), machine)
        yield _speed("Offload, one GPU", f"{size}B on 1 GPU, offload", printed, time)
    ten = gpt(50, 4096)
    for gpus, printed in OFFLOAD_SCALING.items():
        time = _time(ten, setup(gpus, 10, waiting), machine)
        yield _speed("Offload, scaling", f"10B on {gpus}, offload", printed, time)
    for gpus, printed in STAGE_2_SCALING.items():
        time = _time(ten, setup(gpus, 10, None), machine)
        yield _speed("Offload, scaling", f"10B on {gpus}, stage 2", printed, time)
    for size, pair in DELAYED.items():
        layers, hidden, _ = OFFLOAD_RUNS[size][0]
        for name, offload, printed in zip(
            ("waiting", "delayed"), (waiting, Offload(delayed_update_after=40)), pair, strict=True
        ):
            time = _time(gpt(layers, hidden), Setup(stage=2, batch=8, offload=offload), machine)
            yield _speed("Offload, delayed update", f"{size}B on 1, batch 8, update {name}", printed, time)
    for size, printed in CPU_ADAM.items():
        seconds = size * BILLION * host_update_bytes(Offload(), 2) / machine.host_bandwidth(1)
        yield PaperClaim("Offload, CPU-Adam", f"{size}B, Adam on the host", "s", printed, seconds)


# -- the table ----------------------------------------------------------------------------------------------------


def table(machine: Machine | None = None) -> list[PaperClaim]:
    """All claims: formulas, sizes, speeds."""
    machine = machine or load("v100")
    return [
        *_theory(),
        *_sizes(machine),
        *_residual_states(machine),
        *_zero_speeds(machine),
        *_offload_speeds(machine),
    ]


def mean_error(claims: list[PaperClaim]) -> float:
    """The mean error of measured claims, without fitted claims and without formulas, which are exact."""
    errors = [abs(claim.error) for claim in claims if claim.kind is Kind.MEASURED]
    return sum(errors) / len(errors)
