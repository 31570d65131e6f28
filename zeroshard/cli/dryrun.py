"""`zeroshard dryrun`: runs one rank of N alone on this machine, and prints its memory and its volume."""

import argparse
import json
import math
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from ..config.job import Job, load_job
from ..config.options import Config
from ..plan.budget import WORKSPACE, Budget, budget
from ..plan.dryrun import DryRun, dry_run
from ..plan.formulas import HostPart, paper_memory, paper_volume, ranks_that_update, total_bytes
from ..plan.models import from_config
from ..plan.module import gathering
from ..plan.rank_units import host_share, place
from ..plan.shape import Setup
from ..plan.units import transformer_units
from ..plan.volume import Volume, volume
from ..train.gpt import GPT
from ..train.loop import parameter_groups
from ..train.tensor_parallel import parallelise
from .job_options import add_job_options, overrides

HELP = "run one rank of N on this machine, and see its memory and what it would send"
DESCRIPTION = """\
Run rank r of a world of N for a few steps on this machine: the real runtime with the real shapes, and
nobody to talk to. With a GPU its memory is real; without one, tensors have shapes and no values, and what is
counted is what would be alive. Sets memory by kind and volume beside the plan and the paper's formulas.
"""
EXAMPLES = """\
examples:
  zeroshard dryrun zero-7.5b --world 64 --stage 1      figure 1 of the ZeRO paper; stages 2 and 3 likewise
  zeroshard dryrun zero-1000b --world 1024 --memory-cap 32   a rank of a trillion parameters, in minutes
  zeroshard dryrun zero-8b --world 4 --offload cpu     what is on the device, and what on the host
  zeroshard dryrun zero-100b --world 400 --rank 7 --set train.batch=1
"""
TOO_MUCH = 1
GIB = 2**30
WIDTH = 110  # characters of a line where there is no terminal


def define(parser: argparse.ArgumentParser) -> None:
    """Add the options of `dryrun`."""
    add_job_options(parser, auto=False, precision="bf16")
    parser.add_argument("--world", type=int, required=True, metavar="N", help="ranks that there would be")
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="which of them to run (default: 0)")
    parser.add_argument("--without-gpu", action="store_true", help="shapes without values, also where there is a GPU")
    parser.add_argument("--memory-cap", type=float, metavar="GIB", help="fail if it takes more of the device")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(arguments: argparse.Namespace) -> int:
    """Check the configuration, run the rank, print the table."""
    job, world, rank = load_job(arguments.config, overrides(arguments)), arguments.world, arguments.rank
    if world < 1:
        raise ValueError(f"--world must be at least 1, is {world}")
    if not 0 <= rank < world:
        raise ValueError(f"--rank {rank} does not exist in a world of {world}")
    config = Config.parse(job.shard)
    if config.stage == "auto" or config.chooses_offload:
        raise ValueError('"auto" is chosen where a job starts; name a stage and an offload, or ask `zeroshard plan`')
    real = torch.cuda.is_available() and not arguments.without_gpu
    cap = _cap(arguments.memory_cap, real)
    try:
        with redirect_stdout(sys.stderr):  # messages of the run are no part of the answer
            seen = _Comparison(job, config, world, rank, _run(job, world, rank, real))
    except torch.OutOfMemoryError as error:
        return _fail("\n".join([str(error), *getattr(error, "__notes__", [])]))
    if arguments.json:
        print(json.dumps(seen.as_json(), indent=2))
    else:
        console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
        console.print(seen.table())
    if seen.run.peak > cap:
        peak = seen.run.peak / GIB
        return _fail(f"its peak of {peak:.2f} GiB is above --memory-cap {arguments.memory_cap:g}")
    return 0


def _fail(why: str) -> int:
    print(f"zeroshard dryrun: {why}", file=sys.stderr)
    return TOO_MUCH


def _cap(asked: float | None, real: bool) -> float:
    """Return the cap in bytes. Where memory is real, torch's allocator raises above it."""
    if asked is None:
        return math.inf
    if not 0 < asked < math.inf:
        raise ValueError(f"--memory-cap {asked:g} must be above 0")
    if real:
        whole = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, asked * GIB / whole))
    return asked * GIB


def _run(job: Job, world: int, rank: int, real: bool) -> DryRun:
    shape = (job.train.batch, job.model.sequence)

    def loss(model: nn.Module) -> Tensor:
        tokens = torch.zeros(shape, dtype=torch.long, device="cuda" if real else "cpu")
        output: Tensor = model(tokens, tokens)
        return output

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        # foreach=True is what torch chooses on a GPU. It has temporaries that a loop over parameters has not.
        return torch.optim.AdamW(parameter_groups(model, job.train.weight_decay), lr=job.train.lr, foreach=True)

    return dry_run(
        lambda: GPT(job.built_model),
        optimizer,
        loss,
        world=world,
        rank=rank,
        real=real,
        tensor_parallel=job.train.tensor_parallel,
        parallelise=parallelise,
        **job.shard,
    )


@dataclass(frozen=True)
class _Comparison:
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
            sequence=self.job.model.sequence,
            checkpointing=self.job.model.checkpointing or (config.activations is not None),
            **gathering(config),
        )

    def plan(self) -> tuple[Budget, Volume]:
        """What the plan says of this rank."""
        model = from_config(self.job.model)
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
        title = [
            self.job.name,
            f"{self.run.parameters / 1e9:.2f}B parameters" + (" a tensor-parallel rank" if degree > 1 else ""),
            f"stage {self.config.stage}",
            *(["offload cpu"] if self.config.offload is not None else []),
            *([f"tensor parallel {degree}"] if degree > 1 else []),
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
        paper = paper_memory(stage, ranks, self.job.precision, self._host_part())
        for row in paper.device:
            sizes = getattr(run.at_step, row.kind), getattr(needs.at_step, row.kind), row.bytes(psi)
            yield (f"{row.title}, GB", *map(_gb, sizes), str(row))
        sizes = run.at_step.model_states, needs.at_step.model_states, total_bytes(paper.device, psi)
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
        whole, formula = paper_volume(stage, ranks, run.kept / psi)
        counted = run.volume_elements / psi, moved.elements / psi, whole
        yield ("volume per step, Ψ", *(f"{number:.3f}" for number in counted), formula)
        if run.volume_model or moved.checkpoints_gathered:
            gathered = run.volume_model_elements, moved.checkpoints_gathered
            yield ("checkpoints gathered (P_a), Ψ", *(f"{number / psi:.3f}" for number in gathered))

    def _host_part(self) -> HostPart | None:
        if self.run.offload is None:
            return None
        units = place(self._setup, transformer_units(from_config(self.job.model), self._setup))
        return HostPart(options=self.run.offload, share=host_share(units))


KINDS = ("parameters", "gradients", "optimizer_states", "gathered", "buffers", "accumulators")
IN_JSON = ("parameters", "real", "peak", "at_rest", "volume_elements", "volume_model_elements")


def _peak(result: DryRun, needs: Budget) -> Iterator[tuple[str, ...]]:
    held, planned = result.at_peak, needs.peak
    for kind in KINDS:
        sizes = getattr(held, kind), getattr(planned, kind)
        if any(sizes):
            yield (f"at the peak: {kind.replace('_', ' ')}, GB", *map(_gb, sizes))
    rest = planned.activations + planned.temporary
    yield ("at the peak: activations and temporaries, GB", _gb(result.peak - held.total), _gb(rest))
    yield ("peak, GB", _gb(result.peak), _gb(planned.total))


def _gb(size: float) -> str:
    return f"{size / 1e9:,.3f}"
