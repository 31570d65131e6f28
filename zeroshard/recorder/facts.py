"""What the lines of a journal say of a sharded model: its settings, memory, volume and traced steps."""

from __future__ import annotations

import datetime
import platform
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from ..config.checks import DTYPES
from ..observe.ledger import Memory
from ..plan.papers.formulas import paper_volume
from ..report.journal import FORMAT, MOST_SPANS
from ..runtime import Runtime
from ..system.machine import device_title
from ..system.trace import MARK, Trace


def run_facts(runtime: Runtime, name: str, folder: Path, done: int, **known: int | None) -> dict[str, Any]:
    """The line ``run``, after so many steps. ``known`` are numbers that the model does not know."""
    config, fabric = runtime.config, runtime.fabric
    on_host = runtime.pipeline is not None
    options = (
        None
        if config.offload is None or not on_host
        else {
            entry.name: _plain(getattr(config.offload, entry.name))
            for entry in fields(config.offload)
            if getattr(config.offload, entry.name) != entry.default
        }
    )
    layouts = [flat.layout for flat in runtime.flats]
    return {
        "format": FORMAT,
        "after": done,
        "began": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "name": name or folder.absolute().name,
        "stage": runtime.stage,
        "offload": options,
        "precision": ", ".join(sorted({_dtype(parameter.dtype) for parameter in runtime.model.parameters()})),
        "ranks": fabric.world,
        "shards": fabric.shards,
        "device": device_title(fabric.device) or fabric.device.type,
        "device_type": fabric.device.type,
        "parameters": sum(layout.parameters for layout in layouts),
        "padded": sum(layout.numel for layout in layouts),
        **known,
        "clipping": config.clip_grad_norm is not None,
        "on_nonfinite": config.on_nonfinite,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def memory_facts(runtime: Runtime) -> dict[str, Any]:
    """The line ``memory``: between backward and update of the last step, and the peak so far. Nothing waits."""
    at_step, host, device = runtime.ledger.at_step(), runtime.host_memory(), runtime.fabric.device
    peak = capacity = None
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        capacity = torch.cuda.get_device_properties(device).total_memory
    return {
        "device": {} if at_step is None else _kinds(at_step),
        "host": {} if host is None else _kinds(host),
        "peak": peak,
        "capacity": capacity,
    }


def volume_facts(runtime: Runtime, micro_batches: int) -> dict[str, Any]:
    """The line ``volume``, of the last step."""
    traffic, padded = runtime.traffic, sum(flat.layout.numel for flat in runtime.flats)
    kept = runtime.kept_parameters / padded if padded else 0.0
    expected, formula = paper_volume(runtime.stage, runtime.fabric.shards, kept, micro_batches)
    return {
        "elements": {kind: each.elements for kind, each in traffic.volume.items()},
        "expected": expected,
        "formula": formula,
        "host": dict(traffic.host_traffic),
    }


def trace_facts(recording: Trace, first: int) -> dict[str, Any]:
    """The line ``trace``. The first mark of a trace is the end of the step before ``first``."""
    marks = [span.start for span in recording.spans if span.track == MARK]
    spans = [span for span in recording.spans if span.track != MARK and span.stop > marks[0] and span.start < marks[-1]]
    kept = [[span.track, span.name, round(span.start, 7), round(span.stop, 7)] for span in spans[:MOST_SPANS]]
    return {
        "steps": list(range(first, first + len(marks) - 1)),
        "marks": marks,
        "spans": kept,
        "dropped": len(spans) - len(kept),
    }


def _kinds(memory: Memory) -> dict[str, int]:
    return {
        entry.name: size for entry in fields(memory) if entry.name != "place" and (size := getattr(memory, entry.name))
    }


def _dtype(dtype: torch.dtype) -> str:
    """A dtype as options name it."""
    return next((name for name, each in DTYPES.items() if each is dtype), str(dtype).removeprefix("torch."))


def _plain(value: object) -> Any:
    """An option as JSON has it."""
    return value if isinstance(value, int | float | str | None) else str(value).removeprefix("torch.")
