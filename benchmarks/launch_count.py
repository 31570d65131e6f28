"""What one unit costs the host that launches a step: calls of Python, operations of torch, calls of CUDA.

    PYTHONPATH=. python benchmarks/launch_count.py [--device cuda] [--stages 2 3] [--files 12] [--operations]
    PYTHONPATH=. python benchmarks/launch_count.py --compile [aot_eager]     # the blocks compiled, each as one graph

A GPT is trained as in benchmarks/gpu_step.py (bf16, foreach AdamW, clipping, activation checkpoints), but so small that
a step is nearly all launching: by plain torch, and by one rank of eight without the others (a fake group). Every
number is the difference between a step of a deep and of a shallow model, divided by the difference in layers: what one
layer, which is one unit, costs in one step. Counts do not depend on what else the machine does; *host µs*, which is
the processor's time on a CPU, does a little.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

import zeroshard
from benchmarks.gpu_step import compile_blocks
from benchmarks.gpu_step import plain as by_hand
from zeroshard.config.job import ModelConfig
from zeroshard.system import compat, compat_groups
from zeroshard.train.gpt import GPT

PACKAGE = Path(zeroshard.__file__).resolve().parent
TORCH = Path(torch.__file__).resolve().parent
WARM_UP, REPEATS = 4, 3
NO_KERNEL = (
    "empty",
    "new_empty",
    "detach",
    "alias",
    "lift_fresh",
    "unbind",
    "split",
    "promote_types",
    "_local_scalar_dense",
)
"""Operations that launch nothing although their schemas do not say that they return a view."""

Step = Callable[[], None]
Counts = Counter[str]


class Operations(compat.OperationMode):
    """Counts the operations of torch by whose they are: zeroshard's, the optimizer's or the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counts = Counter()
        self.names: Counts = Counter()

    def run(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        owner = _owner(sys._getframe(1))
        self.counts[f"operations, {owner}"] += 1
        if not operation.is_view and not compat.operation_name(operation).startswith(NO_KERNEL):
            self.counts[f"kernels, {owner}"] += 1
        if owner == "zeroshard":
            self.names[compat.operation_name(operation)] += 1
        return operation(*args, **kwargs)


def _owner(frame: FrameType | None) -> str:
    """Whose code has asked for an operation: the innermost frame that belongs to anybody decides."""
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(str(TORCH / "optim")):
            return "optimizer"
        if path.startswith(str(PACKAGE / "train")) or path == __file__:
            return "model"
        if path.startswith(str(PACKAGE)) and "compat" not in Path(path).name:
            return "zeroshard"
        frame = frame.f_back
    return "model"


class PythonCalls:
    """Counts calls of Python functions, and calls of functions in C that our files make."""

    def __init__(self) -> None:
        self.counts: Counts = Counter()
        self.files: Counts = Counter()

    def see(self, frame: FrameType, event: str, argument: Any) -> None:
        """Called by the interpreter for every call and return."""
        path = frame.f_code.co_filename
        ours = path.startswith(str(PACKAGE)) and not path.startswith(str(PACKAGE / "train"))
        if event == "call":
            self.counts["Python calls, all"] += 1
            self.counts["Python calls, zeroshard"] += ours
        if ours and event in ("call", "c_call"):
            self.files[str(Path(path).relative_to(PACKAGE))] += 1
            self.counts["C calls, zeroshard"] += event == "c_call"

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts what this thread calls inside the block."""
        sys.setprofile(self.see)
        try:
            yield
        finally:
            sys.setprofile(None)


def build(variant: str, layers: int, device: str, checkpointing: bool, backend: str = "") -> Step:
    """A step of a small GPT: forward, backward, update and zero_grad."""
    config = ModelConfig(layers=layers, hidden=64, heads=2, sequence=16, checkpointing=checkpointing)
    torch.manual_seed(0)
    tokens = torch.randint(0, config.vocabulary, (1, config.sequence), device=device)
    targets = torch.randint(0, config.vocabulary, (1, config.sequence), device=device)
    if variant == "plain":
        return _plain(config, tokens, targets, backend)
    model: Any = GPT(config)
    compile_blocks(model, backend)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    precision = zeroshard.Precision(parameters=torch.bfloat16)
    stage = int(variant.removeprefix("stage "))
    model, optimizer = zeroshard.shard(
        model, optimizer, stage=stage, precision=precision, clip_grad_norm=1.0, device=device
    )

    def step() -> None:
        model(tokens, targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _plain(config: ModelConfig, tokens: Tensor, targets: Tensor, backend: str) -> Step:
    """Mixed precision by hand, as in benchmarks/gpu_step.py."""
    step = by_hand(config, tokens.device.type, backend)
    return lambda: step(tokens, targets)


def count(step: Step, device: str, *, compiled: bool) -> tuple[Counts, Counts, Counts]:
    """What one step costs: all counts, calls by file of ours, operations of ours by name.

    Where blocks are compiled no operations are counted: torch runs no compiled code in a mode that sees operations.
    """
    # One thread for forward and backward, so that it can be watched. On a CPU that is so anyway.
    with torch.autograd.set_multithreading_enabled(False):
        for _ in range(WARM_UP):
            step()
        calls, operations = PythonCalls(), Operations()
        with calls.counting():
            step()
        if not compiled:
            with operations:
                step()
    found: Counts = calls.counts + operations.counts
    if device == "cuda":
        found += _cuda_calls(step)
    found["host µs"] = round(1e6 * statistics.median(_seconds(step, device) for _ in range(REPEATS)))
    return found, calls.files, operations.names


def _seconds(step: Step, device: str, steps: int = 15) -> float:
    """How long the host takes to launch a step, the shortest of some. On a CPU the processor's time counts."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    times = []
    gc.collect()
    for _ in range(steps):
        begin = clock()
        step()
        times.append(clock() - begin)
        if device == "cuda":
            torch.cuda.synchronize()
    return min(times)


def _cuda_calls(step: Step) -> Counts:
    """Calls of CUDA's runtime and driver in one step, as the profiler has them."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    names = (event.key for event in profile.key_averages() for _ in range(event.count))
    return Counter(f"CUDA {name}" for name in names if name.startswith(("cuda", "cuL", "cuM", "cuE", "cuS")))


def measure(variant: str, arguments: argparse.Namespace) -> tuple[Counts, Counts, Counts]:
    """The counts of one layer and step."""
    shallow, deep = arguments.layers
    found = []
    for layers in (shallow, deep):
        with nullcontext() if variant == "plain" else compat_groups.one_rank_of(arguments.world, 0):
            torch.compiler.reset()
            step = build(variant, layers, arguments.device, not arguments.keep_activations, arguments.compile)
            found.append(count(step, arguments.device, compiled=bool(arguments.compile)))
            del step
            gc.collect()
    differences = []
    for few, many in zip(*found, strict=True):
        each = {key: (many[key] - few[key]) / (deep - shallow) for key in few | many}
        differences.append(Counter({key: value for key, value in each.items() if abs(value) >= 0.05}))
    everything, files, names = differences
    return everything, files, names


def _print_table(title: str, columns: dict[str, Counts], most: int | None = None) -> None:
    keys = dict.fromkeys(key for counts in columns.values() for key in counts)
    ordered = (
        list(keys) if most is None else sorted(keys, key=lambda key: -max(c[key] for c in columns.values()))[:most]
    )
    width = max([len(title), *(len(key) for key in ordered)])
    print(f"{title:{width}} " + " ".join(f"{name:>9}" for name in columns))
    for key in ordered:
        print(f"{key:{width}} " + " ".join(f"{counts[key]:9.1f}" for counts in columns.values()))
    print()


def main() -> None:
    """Prints what one unit costs in one step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--world", type=int, default=8)
    parser.add_argument("--layers", type=int, nargs=2, default=[4, 12], help="of the shallow and of the deep model")
    parser.add_argument("--keep-activations", action="store_true", help="recompute nothing in backward")
    backend = {"nargs": "?", "const": "inductor", "default": ""}
    parser.add_argument("--compile", **backend, help="compile the blocks, with this backend")
    parser.add_argument("--files", type=int, default=0, help="also show calls by file, of this many files")
    parser.add_argument("--operations", action="store_true", help="also show operations of zeroshard by name")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    variants = ["plain", *(f"stage {stage}" for stage in arguments.stages)]
    found = {variant: measure(variant, arguments) for variant in variants}
    print(f"torch {torch.__version__}, {arguments.device}, a world of {arguments.world}")
    _print_table("a unit and step", {variant: every for variant, (every, _, _) in found.items()})
    ours = {variant: rest for variant, (_, *rest) in found.items() if variant != "plain"}
    if arguments.files:
        title = "calls of Python and C"
        _print_table(title, {variant: files for variant, (files, _) in ours.items()}, arguments.files)
    if arguments.operations:
        _print_table("operations", {variant: names for variant, (_, names) in ours.items()}, 40)


if __name__ == "__main__":
    main()
