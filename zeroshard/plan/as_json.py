"""The plan as JSON, for programs: what ``zeroshard plan --json`` prints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from ..config.job import ModelConfig
from . import command
from .advice import Row
from .machine.hardware import Hardware
from .model.source import Subject
from .time.scale import cost, doubling, scale
from .time.step_time import step_span


def largest(found: Sequence[tuple[Row, ModelConfig | None]], hardware: Hardware) -> dict[str, Any]:
    """The answer to ``--max-model``: the largest model for each stage and offload."""
    answer = [
        {
            "stage": row.setup.stage,
            "offload": row.variant.name,
            "parameters": model.parameters if model is not None else 0,
            "layers": model.layers if model is not None else 0,
            "hidden": model.hidden if model is not None else 0,
            "heads": model.heads if model is not None else 0,
            "peak": row.budget.peak.total if model is not None else None,
            "host": row.budget.host.total if model is not None else None,
            "step_span": list(row.span) if model is not None and row.span is not None else None,
        }
        for row, model in found
    ]
    return {"hardware": _hardware(hardware), "largest": answer}


def rows(planned: Sequence[Row], best: Row | None, hardware: Hardware, subject: Subject) -> dict[str, Any]:
    """The plan of a model: a row for every stage and offload, and the recommended row."""
    return {
        "model": {"name": subject.name, "parameters": planned[0].parameters},
        "hardware": _hardware(hardware),
        "rows": [_row(row) for row in planned],
        "recommended": None
        if best is None
        else {
            "stage": best.setup.stage,
            "offload": best.variant.name,
            "batch": best.setup.batch,
            "shard": command.shard_call(best.setup),
            "command": command.torchrun_command(best.setup, hardware, subject),
        },
    }


def _hardware(hardware: Hardware) -> dict[str, Any]:
    return {
        "gpus": hardware.gpus,
        "nodes": hardware.nodes,
        "device_memory": hardware.device_memory,
        "host_memory": hardware.host_memory,
        "profile": hardware.machine.name if hardware.machine is not None else None,
        "profile_guessed": hardware.guessed,
    }


def _row(row: Row) -> dict[str, Any]:
    time, needs = row.time, row.budget
    return {
        "stage": row.setup.stage,
        "offload": row.variant.name,
        "batch": row.setup.batch,
        "recomputed_blocks": row.recomputed,
        "fits": row.fits,
        "room": row.room,
        "host_room": row.host_room,
        "at_step": asdict(needs.at_step) | {"total": needs.at_step.total},
        "peak": asdict(needs.peak) | {"total": needs.peak.total, "phase": needs.phase.value},
        "host": asdict(needs.host),
        "volume": asdict(row.volume) | {"elements": row.volume.elements},
        "time": None
        if time is None
        else {
            "step": time.total,
            "least": row.span[0] if row.span is not None else time.total,
            "most": row.span[1] if row.span is not None else time.total,
            "compute": time.compute,
            "launching": time.launching,
            "update": time.update,
            "exposed_communication": time.exposed,
            "exposed_pcie": time.exposed_pcie,
            "tflops_per_device": time.tflops_per_device,
            "bottleneck": time.bottleneck.value,
        },
    }


def extras(row: Row, tokens: float | None, devices: tuple[int, int] | None) -> dict[str, Any]:
    """The answers to ``--tokens`` and ``--scale`` for one row: a price, and the speed on more devices."""
    found: dict[str, Any] = {}
    if tokens is None and devices is None:
        return found
    machine = row.hardware.machine
    work = row.traced.work
    if work is None or machine is None:
        asked = "--tokens" if tokens is not None else "--scale"
        raise ValueError(f"{asked} needs a predicted time: give --machine NAME, or measure this one with --calibrate")
    if tokens is not None:
        if not row.traced.tokens_known:
            raise ValueError(
                "--tokens: how many a step takes is not known of this model, whose inputs are no token ids; if "
                "they are sequences of something, let the function take a parameter called sequence and make them of it"
            )
        price = cost(work, row.setup, machine, tokens)
        assert row.time is not None
        assert row.span is not None
        factors = [end / row.time.total for end in row.span]
        found["training"] = {
            "tokens": tokens,
            "steps": math.ceil(price.steps),
            "days": price.days,
            "gpu_hours": price.device_hours,
            "days_span": [factor * price.days for factor in factors],
            "gpu_hours_span": [factor * price.device_hours for factor in factors],
        }
    if devices is not None:
        found["scale"] = _scaled(row, *devices)
    return found


def _scaled(row: Row, first: int, last: int) -> list[dict[str, Any]]:
    machine = row.hardware.grown(row.hardware.gpus).machine
    work = row.traced.work
    assert work is not None
    assert machine is not None
    unit = "tokens" if row.traced.tokens_known else "samples"
    found = []
    for point in scale(work, row.setup, machine, doubling(first, last)):
        setup = replace(row.setup, world=point.devices // row.setup.model_parallel)
        found.append(
            {
                "gpus": point.devices,
                "fits": replace(row, setup=setup, hardware=row.hardware.grown(point.devices)).fits,
                "step_seconds": point.time.total,
                "step_span": list(step_span(point.time, work, setup, machine)),
                f"{unit}_a_second": point.tokens_a_second,
                "efficiency": point.efficiency,
                "exposed_communication": point.exposed,
            }
        )
    return found
