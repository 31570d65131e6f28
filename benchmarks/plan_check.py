"""Plan against reality: memory, volume and step time of many configurations, and whether the recommended is fastest.

    PYTHONPATH=. python benchmarks/plan_check.py [--profile mine.toml] [--out FILE] [--device cpu]
                                                     [--measure times|memory|nothing] [--add FILE ...]

On a GPU every configuration runs for real, alone or as one rank of a fake world (whose collectives move nothing and
take no time: the plan's links are then infinitely fast). Model states are the storages of live tensors between backward
and step, peaks are torch's ``max_memory_allocated``, volume is counted by the process group, steps are timed from one
to the next, all configurations in turn and twice. Nothing is read from the runtime's own ledger. Without a GPU, small
models: states from live tensors, peaks from runs without values, no times.

Times and memory may be measured by two runs, whose files a third one adds up.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

import zeroshard
from benchmarks.delayed_group import LINKS, DelayedGroup, delayed_world
from benchmarks.plan_cases import Case, Measured, cases
from benchmarks.plan_compare import Compared, Recommendation, as_json, compare, recommendations, show, verdicts
from zeroshard.calibrate import measure as calibrate
from zeroshard.plan.dryrun import dry_run
from zeroshard.plan.machine.profile import load
from zeroshard.system import compat
from zeroshard.train.gpt import GPT

WARM, TIMED = 3, 6
"""Steps. The first two learn the order of units and make the optimizer's states."""


def live(device: torch.device) -> dict[int, int]:
    """Storages of live tensors on a device, asked from the garbage collector."""
    gc.collect()
    found = {}
    with compat.plain():  # absent parameters stay absent
        for thing in gc.get_objects():
            if issubclass(type(thing), Tensor) and thing.device.type == device.type and not compat.is_fake(thing):
                storage = thing.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    return found


@contextmanager
def ranks(world: int) -> Iterator[None]:
    """One rank of a world whose other ranks are not there and take no time, or nobody but this process."""
    with delayed_world(world, LINKS[""]) if world > 1 else nullcontext():
        yield


class Run:
    """One configuration under way."""

    def __init__(self, case: Case, device: torch.device, *, empty: bool = True, **offload: Any) -> None:
        """``empty``: of zeros, which start the sooner; but a device is quicker to multiply them, so not for times."""
        self.device, config = device, case.job.config
        options = None if case.offload is None else replace(case.offload, **offload)
        with torch.device("meta"):
            model = GPT(config)
        self.model, self.optimizer = zeroshard.shard(
            model,
            torch.optim.AdamW(model.parameters(), foreach=True),
            stage=case.stage,
            precision=case.precision,
            offload=options,
            init="empty" if empty else None,
            device=device,
        )
        shape = (case.job.batch, config.sequence)
        self.tokens = torch.randint(config.vocabulary, shape, device=device)

    def backward(self) -> None:
        self.model(self.tokens, self.tokens).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def settle(self) -> None:
        """Until neither host nor device has anything to do."""
        zeroshard.synchronize(self.model)
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def measure(case: Case, device: torch.device) -> Measured:
    """Runs a configuration step by step, for memory and volume."""
    cuda, cpu = device.type == "cuda", torch.device("cpu")
    _clean()
    before, before_host = live(device), live(cpu)
    allocated = torch.cuda.memory_allocated() if cuda else 0
    with ranks(case.world):
        run = Run(case, device, blocking=True)
        for _ in range(WARM):
            run.settle()
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            run.backward()
            run.step()
            run.settle()
        peak = torch.cuda.max_memory_allocated() - allocated if cuda else 0
        DelayedGroup.asked.clear()
        run.backward()
        run.step()
        run.settle()
        volume = DelayedGroup.asked[_dtype(case)]
        run.backward()
        if case.offload is None or not case.offload.update_in_backward:
            run.optimizer.clip_grad_norm_(1e9)  # settles reduces under way
        run.settle()
        states = _new(before, live(device)) - run.tokens.nbytes
        host = _new(before_host, live(cpu)) if cuda else None
        run.step()
        run.settle()
        del run
    _clean()
    return Measured(states, host, peak if cuda else _peak_without_values(case), volume)


def seconds_of_a_step(case: Case, device: torch.device) -> float:
    """Runs a configuration freely, from one point of a step to the same: what one leaves to the next is paid for."""
    _clean()
    with ranks(case.world):
        run = Run(case, device, empty=False)
        for _ in range(WARM):
            run.backward()
            run.step()
        marks = []
        for number in range(TIMED + 1):
            run.backward()
            if number in (0, TIMED):
                torch.cuda.synchronize()
                marks.append(time.perf_counter())
            run.step()
        run.settle()
        del run
    _clean()
    return (marks[-1] - marks[0]) / TIMED


def _peak_without_values(case: Case) -> int:
    shape = (case.job.batch, case.job.config.sequence)

    def loss(model: nn.Module) -> Tensor:
        tokens = torch.zeros(shape, dtype=torch.long)
        output: Tensor = model(tokens, tokens)
        return output

    return dry_run(
        lambda: GPT(case.job.config),
        lambda model: torch.optim.AdamW(model.parameters(), foreach=True),
        loss,
        world=case.world,
        real=False,
        stage=case.stage,
        precision=case.precision,
        offload=case.offload,
    ).peak


def _new(before: dict[int, int], after: dict[int, int]) -> int:
    return sum(size for pointer, size in after.items() if pointer not in before)


def _dtype(case: Case) -> torch.dtype:
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[case.precision]


def _clean() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def recorded(files: Sequence[Path]) -> dict[str, Measured]:
    """What earlier runs have measured; the later counts."""
    found: dict[str, Measured] = {}
    for file in files:
        for case in json.loads(file.read_text())["cases"]:
            known = {name: value for name, value in case["measured"].items() if value is not None}
            found[case["name"]] = replace(found.get(case["name"], Measured()), **known)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, compares, prints; 1 if a bound was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), help="by default the GPU, if there is one")
    parser.add_argument("--profile", type=Path, help="a calibrated profile; without one this machine is measured first")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with it in their name, such as 'world 8'")
    parser.add_argument("--measure", choices=("all", "times", "memory", "nothing"), default="all")
    parser.add_argument("--rounds", type=int, default=2, help="how often each is timed, all in turn (default: 2)")
    parser.add_argument("--add", type=Path, nargs="*", default=[], help="what earlier runs have written")
    parser.add_argument("--out", type=Path, help="write all numbers here, as JSON")
    given = parser.parse_args(arguments)
    begin = time.perf_counter()
    device = torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and given.measure != "nothing":
        device = torch.device("cuda", torch.cuda.current_device())
    machine = None
    if device.type == "cuda":
        machine = load(given.profile) if given.profile is not None else calibrate.calibrate(device).machine
    on_gpu = device.type == "cuda"
    wanted = [case for case in cases(on_gpu) if given.only in case.name]
    known = recorded(given.add)
    found = {case: known.get(case.name, Measured()) for case in wanted}

    def told(what: str, number: int) -> None:
        spent = time.perf_counter() - begin
        print(f"{number} of {len(wanted)}, {spent:.0f} s: {what}", file=sys.stderr, flush=True)

    def kept(found: dict[Case, Measured]) -> tuple[list[Compared], list[Recommendation]]:
        """Written as it grows, so that a run that is cut short has not been for nothing."""
        compared = [compare(case, measured, device, machine) for case, measured in found.items()]
        advised = recommendations(compared)
        if given.out is not None:
            given.out.write_text(json.dumps(as_json(compared, advised, time.perf_counter() - begin), indent=2))
        return compared, advised

    if on_gpu and given.measure in ("all", "times"):
        seconds_of_a_step(wanted[0], device)  # the first of a process is slower
        taken: dict[Case, list[float]] = {case: [] for case in wanted}
        for turn in range(given.rounds):
            for number, case in enumerate(wanted, 1):
                taken[case].append(seconds_of_a_step(case, device))
                told(f"round {turn + 1}, {case.name}: {1e3 * taken[case][-1]:.1f} ms", number)
            found = {case: replace(found[case], seconds=statistics.mean(taken[case])) for case in wanted}
            kept(found)
    if given.measure in ("all", "memory"):
        for number, case in enumerate(wanted, 1):
            found[case] = replace(measure(case, device), seconds=found[case].seconds)
            told(f"memory, {case.name}", number)
            kept(found)
    compared, advised = kept(found)
    show(compared, advised, Console() if sys.stdout.isatty() else Console(width=170))
    return 0 if all(held for held, _ in verdicts(compared, advised).values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
