"""A dry run beside the plan and the papers' formulas: what ``zeroshard dryrun`` prints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from ..config.job import Job
from ..config.options import Config
from ..observe.ledger import Memory
from .dryrun import DryRun
from .memory.budget import WORKSPACE, Budget, budget
from .memory.device_memory import DeviceMemory
from .memory.rank_units import host_share, place
from .model.gpt import from_config
from .model.module import gathering
from .papers.formulas import HostPart, paper_memory, paper_volume, ranks_that_update, total_bytes
from .setup import Setup
from .volume import Volume, volume


@dataclass(frozen=True)
class Comparison:
    """A dry run beside the plan and the papers' formulas."""

    job: Job
    config: Config
    world: int
    rank: int
    run: DryRun

    @property
    def _data_ranks(self) -> int:
        return self.world // self.job.train.tensor_parallel

    @property
    def _setup(self) -> Setup:
        config = self.config
        return Setup(
            stage=int(config.stage),
            world=self._data_ranks,
            model_parallel=self.job.train.tensor_parallel,
            activations=config.activations,
            offload=self.run.offload,
            precision=self.job.precision,  # type: ignore[arg-type]
            batch=self.job.train.batch,
            sequence=self.job.gpt.sequence,
            micro_batches=self.job.train.micro_batches,
            checkpointing=self.job.gpt.checkpointing or (config.activations is not None),
            **gathering(config),
        )

    def plan(self) -> tuple[Budget, Volume]:
        """What the plan says of this rank."""
        model = from_config(self.job.gpt)
        return budget(model, self._setup, WORKSPACE if self.run.real else 0), volume(model, self._setup)

    def as_json(self) -> dict[str, Any]:
        run, (needs, moved) = self.run, self.plan()
        return {name: getattr(run, name) for name in IN_JSON} | {
            "at_step": {kind: getattr(run.at_step, kind) for kind in (*KINDS, "model_states")},
            "host": None if run.host is None else {kind: getattr(run.host, kind) for kind in (*KINDS, "checkpoints")},
            "host_traffic": dict(run.host_traffic),
            "checkpoint_traffic": dict(run.checkpoint_traffic),
            "plan": {
                "model_states": needs.at_step.model_states,
                "host": needs.host.total,
                "peak": needs.peak.total,
                "at_rest": needs.at_rest.total,
                "volume_elements": moved.elements,
                "volume_model_elements": moved.checkpoints_gathered,
                "host_traffic": {"to the host": moved.to_host, "to the device": moved.to_device},
                "checkpoint_traffic": {
                    "to the host": moved.checkpoints_to_host,
                    "to the device": moved.checkpoints_to_device,
                },
            },
        }

    def table(self) -> Table:
        degree = self.job.train.tensor_parallel
        traced = from_config(self.job.gpt).trace(self._setup)
        title = [
            self.job.name,
            f"{self.run.parameters / 1e9:.2f}B parameters" + (" a tensor-parallel rank" if degree > 1 else ""),
            f"stage {self.config.stage}",
            *(["offload cpu"] if self.config.offload is not None else []),
            *([f"tensor parallel {degree}"] if degree > 1 else []),
            *([f"{traced.blocks - len(traced.kept)} of {traced.blocks} blocks recomputed"] if traced.kept else []),
            f"rank {self.rank} of {self.world}",
            "memory of this GPU" if self.run.real else "shapes without values",
        ]
        table = Table(title=" · ".join(title), title_justify="left")
        for name in ("", "this run", "plan", "paper", "formula"):
            table.add_column(name, justify="left" if name in ("", "formula") else "right")
        needs, moved = self.plan()
        for cells in self._rows(needs, moved):
            table.add_row(*cells)
        table.add_section()
        for cells in _peak(self.run, needs):
            table.add_row(*cells)
        table.add_row("between two steps, GB", _gb(self.run.at_rest), _gb(needs.at_rest.total))
        return table

    def _rows(self, needs: Budget, moved: Volume) -> Iterator[tuple[str, ...]]:
        """The rows about model states and communication."""
        run, psi, stage, ranks = self.run, self.run.parameters, int(self.config.stage), self._data_ranks
        paper = paper_memory(stage, ranks, self.job.precision, self._host_part(), self.job.train.micro_batches)
        for row in paper.device:
            sizes = _bytes(run.at_step, row.kind), _bytes(needs.at_step, row.kind), row.bytes(psi)
            yield (f"{row.title}, GB", *map(_gb, sizes), str(row))
        mine, planned = (at_step.model_states + at_step.accumulators for at_step in (run.at_step, needs.at_step))
        sizes = mine, planned, total_bytes(paper.device, psi)
        yield ("all model states, GB", *map(_gb, sizes))
        if run.host is not None and self.config.offload is not None:
            states, planned = run.host.total - run.host.checkpoints, needs.host.total - needs.host_checkpoints
            formula = " + ".join(str(row) for row in paper.host if row.terms)
            yield ("on the host, GB", *map(_gb, (states, planned, total_bytes(paper.host, psi))), formula)
            crossed = sum(run.host_traffic.values()), moved.to_host + moved.to_device
            own = psi / ranks_that_update(stage, ranks)
            yield ("to and from the host, bytes a parameter", *(f"{number / own:.3f}" for number in crossed))
        if run.host is not None and run.host.checkpoints:
            yield ("checkpoints on the host, GB", _gb(run.host.checkpoints), _gb(needs.host_checkpoints))
            crossed = sum(run.checkpoint_traffic.values()), moved.checkpoints_to_host + moved.checkpoints_to_device
            yield ("checkpoints to and from the host, GB", *map(_gb, crossed))
        whole, formula = paper_volume(stage, ranks, run.kept / psi, self.job.train.micro_batches)
        counted = run.volume_elements / psi, moved.elements / psi, whole
        yield ("volume per step, Ψ", *(f"{number:.3f}" for number in counted), formula)
        if run.volume_model or moved.checkpoints_gathered:
            gathered = run.volume_model_elements, moved.checkpoints_gathered
            yield ("checkpoints gathered (P_a), Ψ", *(f"{number / psi:.3f}" for number in gathered))

    def _host_part(self) -> HostPart | None:
        if self.run.offload is None:
            return None
        units = place(self._setup, from_config(self.job.gpt).trace(self._setup).units)
        return HostPart(options=self.run.offload, share=host_share(units))


KINDS = ("parameters", "gradients", "optimizer_states", "gathered", "buffers", "accumulators")
IN_JSON = ("parameters", "real", "peak", "at_rest", "volume_elements", "volume_model_elements")


def _bytes(memory: Memory | DeviceMemory, kind: str) -> int:
    """The bytes of a kind. The sum of several micro-batches' gradients counts as gradients."""
    more = memory.accumulators if kind == "gradients" else 0
    return int(getattr(memory, kind)) + more


def _peak(result: DryRun, needs: Budget) -> Iterator[tuple[str, ...]]:
    seen, planned = result.at_peak, needs.peak
    for kind in KINDS:
        sizes = getattr(seen, kind), getattr(planned, kind)
        if any(sizes):
            yield (f"at the peak: {kind.replace('_', ' ')}, GB", *map(_gb, sizes))
    rest = planned.activations + planned.temporary
    yield ("at the peak: activations and temporaries, GB", _gb(result.peak - seen.total), _gb(rest))
    yield ("peak, GB", _gb(result.peak), _gb(planned.total))


def _gb(size: float) -> str:
    return f"{size / 1e9:,.3f}"
