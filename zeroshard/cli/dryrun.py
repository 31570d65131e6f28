"""`zeroshard dryrun`: one rank of a world that is not there, run for real."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from ..config.job import DEFAULT_PRESET, OFFLOAD_TO_HOST, Job, load_job, parse_override
from ..config.options import Config
from ..config.table import state_table
from ..observe.ledger import Memory
from ..plan.budget import WORKSPACE, Budget, budget
from ..plan.device_memory import DeviceMemory
from ..plan.dryrun import DryRun, dry_run
from ..plan.models import from_config
from ..plan.module import gathering
from ..plan.rank_units import host_share, place
from ..plan.shape import Setup
from ..plan.units import transformer_units
from ..plan.volume import Volume, volume
from ..train.gpt import GPT
from ..train.loop import parameter_groups
from ..train.paper import OnHost, PaperRow, paper_memory, paper_offload_memory, paper_volume
from ..train.tensor_parallel import parallelise

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
BAD_INPUT = 2
TOO_MUCH = 1
GIB = 2**30
WIDTH = 110  # of what is printed where there is no terminal


def define(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Add `dryrun` to the command line."""
    parser = add_parser(
        "dryrun",
        help="run one rank of N on this machine, and see what it holds and would send",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("config", nargs="?", default=DEFAULT_PRESET, help="as for `zeroshard train`")
    parser.add_argument("--world", type=int, required=True, metavar="N", help="ranks that there would be")
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="which of them to run (default: 0)")
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), help="short for --set shard.stage=N")
    parser.add_argument(
        "--tensor-parallel",
        type=int,
        metavar="M",
        help="ranks that share each replica; short for --set train.tensor_parallel=M",
    )
    parser.add_argument("--offload", choices=(OFFLOAD_TO_HOST, "none"), help="short for --set shard.offload=cpu")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="bf16", help="(default: bf16)")
    parser.add_argument("--without-gpu", action="store_true", help="shapes without values, also where there is a GPU")
    parser.add_argument("--set", action="append", default=[], metavar="TABLE.KEY=VALUE", help="change one value")
    parser.add_argument("--memory-cap", type=float, metavar="GIB", help="fail if it takes more of the device")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(arguments: argparse.Namespace) -> int:
    """Check the configuration, run the rank, print the table."""
    overrides: dict[str, object] = {"shard.precision": arguments.precision}
    if arguments.stage is not None:
        overrides["shard.stage"] = arguments.stage
    if arguments.tensor_parallel is not None:
        overrides["train.tensor_parallel"] = arguments.tensor_parallel
    if arguments.offload is not None:
        overrides["shard.offload"] = None if arguments.offload == "none" else arguments.offload
    try:
        job = load_job(arguments.config, overrides | dict(parse_override(text) for text in arguments.set))
        if arguments.world < 1:
            raise ValueError(f"--world must be at least 1, is {arguments.world}")
        if not 0 <= arguments.rank < arguments.world:
            raise ValueError(f"--rank {arguments.rank} does not exist in a world of {arguments.world}")
        if arguments.world % job.train.tensor_parallel:
            raise ValueError(f"tensor parallelism of {job.train.tensor_parallel} does not divide --world")
        config = Config.parse(job.shard)
        if config.stage == "auto" or config.chooses_offload:
            raise ValueError(
                '"auto" is chosen where a job starts; name a stage and an offload, or ask `zeroshard plan`'
            )
        real = torch.cuda.is_available() and not arguments.without_gpu
        cap = _cap(arguments.memory_cap, real)
        with redirect_stdout(sys.stderr):  # what a run says is no part of the answer
            result = _run(job, arguments.world, arguments.rank, real)
    except ValueError as error:
        print(f"zeroshard dryrun: {error}", file=sys.stderr)
        return BAD_INPUT
    except torch.OutOfMemoryError as error:
        told = "\n".join([str(error), *getattr(error, "__notes__", [])])
        print(f"zeroshard dryrun: {told}", file=sys.stderr)
        return TOO_MUCH
    seen = _Seen(job, config, arguments.world, arguments.rank, result)
    if arguments.json:
        print(json.dumps(seen.as_json(), indent=2))
    else:
        console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
        console.print(seen.table())
    if cap is not None and result.peak > cap:
        print(
            f"zeroshard dryrun: its peak of {result.peak / GIB:.2f} GiB is above --memory-cap {arguments.memory_cap:g}",
            file=sys.stderr,
        )
        return TOO_MUCH
    return 0


def _cap(asked: float | None, real: bool) -> float | None:
    """Return the cap in bytes; torch's allocator is held to it where memory is real."""
    if asked is None:
        return None
    if not 0 < asked < float("inf"):
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
        # As torch chooses by itself on a GPU; it makes temporaries that a loop over parameters does not.
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
class _Seen:
    """A dry run beside what was planned and what the papers say."""

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
        """What was to be expected."""
        model = from_config(self.job.model)
        return budget(model, self._setup, WORKSPACE if self.run.real else 0), volume(model, self._setup)

    def as_json(self) -> dict[str, Any]:
        needs, moved = self.plan()
        held = {kind: getattr(self.run.at_step, kind) for kind in KINDS}
        return {
            "parameters": self.run.parameters,
            "real": self.run.real,
            "at_step": {**held, "model_states": self.run.at_step.model_states},
            "host": None if self.run.host is None else {kind: getattr(self.run.host, kind) for kind in ON_HOST},
            "peak": self.run.peak,
            "at_rest": self.run.at_rest,
            "volume_elements": self.run.volume_elements,
            "volume_model_elements": self.run.volume_model_elements,
            "host_traffic": dict(self.run.host_traffic),
            "checkpoint_traffic": dict(self.run.checkpoint_traffic),
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
        result, stage, offload = self.run, int(self.config.stage), self.config.offload
        how = "memory of this GPU" if result.real else "shapes without values"
        size = f"{result.parameters / 1e9:.2f}B parameters"
        where = "" if offload is None else " · offload cpu"
        if self.job.train.tensor_parallel > 1:
            size += " a tensor-parallel rank"
            where += f" · tensor parallel {self.job.train.tensor_parallel}"
        title = f"{self.job.name} · {size} · stage {stage}{where} · rank {self.rank} of {self.world} · {how}"
        table = Table(title=title, title_justify="left")
        for name in ("", "this run", "plan", "paper", "formula"):
            table.add_column(name, justify="left" if name in ("", "formula") else "right")
        needs, moved = self.plan()
        on_device, on_host = self._paper()
        for cells in _states(result.at_step, needs.at_step, on_device, result.parameters):
            table.add_row(*cells)
        if result.host is not None and offload is not None:
            every = sum(row.bytes(result.parameters) for row in on_host)
            held, foreseen = result.host.total - result.host.checkpoints, needs.host.total - needs.host_checkpoints
            formula = " + ".join(str(row) for row in on_host if row.terms)
            table.add_row("on the host, GB", _gb(held), _gb(foreseen), _gb(every), formula)
            ranks = self._data_ranks
            share = ranks if state_table(stage, ranks).optimizer.extent.value == "shard" else 1
            counted = sum(result.host_traffic.values()) * share / result.parameters
            planned = (moved.to_host + moved.to_device) * share / result.parameters
            table.add_row("to and from the host, bytes a parameter", f"{counted:.3f}", f"{planned:.3f}")
        if result.host is not None and result.host.checkpoints:
            table.add_row("checkpoints on the host, GB", _gb(result.host.checkpoints), _gb(needs.host_checkpoints))
            planned = moved.checkpoints_to_host + moved.checkpoints_to_device
            crossed = sum(result.checkpoint_traffic.values())
            table.add_row("checkpoints to and from the host, GB", _gb(crossed), _gb(planned))
        whole, written = paper_volume(stage, self._data_ranks, result.kept / result.parameters)
        counted, planned = result.volume_elements / result.parameters, moved.elements / result.parameters
        table.add_row("volume per step, Ψ", f"{counted:.3f}", f"{planned:.3f}", f"{whole:.3f}", written)
        if result.volume_model or moved.checkpoints_gathered:
            counted = result.volume_model_elements / result.parameters
            planned = moved.checkpoints_gathered / result.parameters
            table.add_row("checkpoints gathered (P_a), Ψ", f"{counted:.3f}", f"{planned:.3f}")
        table.add_section()
        for cells in _peak(result, needs):
            table.add_row(*cells)
        table.add_row("between two steps, GB", _gb(result.at_rest), _gb(needs.at_rest.total))
        return table

    def _paper(self) -> tuple[list[PaperRow], list[PaperRow]]:
        stage, offload = int(self.config.stage), self.run.offload
        if offload is None:
            return paper_memory(stage, self._data_ranks, self.job.precision), []
        units = place(self._setup, transformer_units(from_config(self.job.model), self._setup))
        on_host = OnHost(options=offload, share=host_share(units))
        return paper_offload_memory(stage, self._data_ranks, self.job.precision, on_host)


KINDS = ("parameters", "gradients", "optimizer_states", "gathered", "buffers", "accumulators")
ON_HOST = (*KINDS, "checkpoints")


def _states(held: Memory, planned: DeviceMemory, paper: list[PaperRow], parameters: int) -> Iterator[tuple[str, ...]]:
    for row, kind in zip(paper, KINDS, strict=False):
        sizes = (getattr(held, kind), getattr(planned, kind), row.bytes(parameters))
        yield (f"{row.kind}, GB", *map(_gb, sizes), str(row))
    total = sum(row.bytes(parameters) for row in paper)
    yield ("all model states, GB", _gb(held.model_states), _gb(planned.model_states), _gb(total))


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
