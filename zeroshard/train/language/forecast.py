"""What the plan says of a job before it starts: stage, offload and micro-batch for the memory that ranks have."""

import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...config.offload import Offload
from ...config.options import Config
from ...plan.advice import Row, Variant
from ...plan.foresee import Foresight, name_of
from ...plan.room import Room
from ...system.sizes import size_text

MOST_TOKENS = 1 << 16
"""A larger micro-batch than this is no faster, and takes longer to trace."""
COLUMNS = 96
"""The width of what the plan says."""
AS_FAST = 0.99
"""A way with this share of the best speed counts as equally fast."""


@dataclass(frozen=True)
class Forecast:
    """One way to run a job."""

    stage: int
    offload: Offload | None
    batch: int
    """The most sequences of a micro-batch."""
    micro_batches: int
    told: str
    """What was chosen and why, in a few lines."""
    row: Row
    """The plan of it."""
    fits: bool


def forecast(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    options: Mapping[str, Any],
    room: Room,
    example: Callable[[int], Mapping[str, Any]],
    *,
    ranks: int,
    sequences: int,
    sequence: int,
    most: int,
) -> Forecast:
    """Return the fastest way that fits, and of those that are as fast the one that takes least memory.

    Without times it is the largest micro-batch that fits.

    Args:
        model: the model, on the meta device.
        optimizer: its optimizer.
        options: of `shard()`. A stage or an offload that is no "auto" stays as it is.
        room: the memory of a rank.
        example: returns a micro-batch of so many sequences, as forward takes it.
        ranks: the ranks of the job.
        sequences: of a rank in a step.
        sequence: tokens of a sequence.
        most: the most sequences of a micro-batch; 0 leaves that open.
    """
    offload = Config.parse(options).offload
    if offload is not None and offload.update_in_backward:
        if 0 < most < sequences:
            raise ValueError(
                f"train.batch: {most} sequences are a part of the {sequences} of a rank and step, and "
                "shard.offload.update_in_backward updates in the first backward of a step; leave one out, or say a "
                "smaller train.tokens_per_step"
            )
        most = sequences
    found = [
        _with_batch(model, optimizer, options, room, example(batch), ranks, sequences, sequence, batch)
        for batch in _batches(sequences, sequence, most)
    ]
    fitting = [each for each in found if each.fits]
    if not fitting:
        return found[-1]
    times = [each.row.time.total for each in fitting if each.row.time is not None]
    if len(times) < len(fitting):
        return max(fitting, key=lambda each: each.batch)
    as_fast = [each for each, time in zip(fitting, times, strict=True) if AS_FAST * time <= min(times)]
    return min(as_fast, key=lambda each: each.row.budget.peak.total + each.row.budget.host.total)


def _batches(sequences: int, sequence: int, most: int) -> Iterator[int]:
    """Yield micro-batches to consider, the largest first: those of a step in 1, 2, 4, 8 ... parts."""
    if most:
        yield min(most, sequences)
        return
    size = min(sequences, max(1, MOST_TOKENS // sequence))
    while size > 1:
        yield size
        size = -(-size // 2)
    yield 1


def _with_batch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    options: Mapping[str, Any],
    room: Room,
    example: Mapping[str, Any],
    ranks: int,
    sequences: int,
    sequence: int,
    batch: int,
) -> Forecast:
    times = -(-sequences // batch)
    config = Config.parse({**_allowed(options, times), "example": example})
    foresight = Foresight(model, optimizer, config, ranks, room)
    foresight.expect(times)
    advice = foresight.advise()
    row = foresight.row(advice.stage, Variant(name_of(advice.offload), advice.offload))
    asked = f"stage {advice.stage}, offload {row.variant.name}, as asked"
    reason = advice.problem or advice.warning or advice.chosen or asked
    told = f"plan: {reason.removeprefix('zeroshard: ')}"
    seconds = f", {row.time.total:.3g} s a step" if row.time is not None else ""
    blocks = f", {row.recomputed} of {row.traced.blocks} blocks recomputed" if row.traced.blocks else ""
    parts = f"micro-batch: {batch} × {sequence} tokens, {times} a step{blocks}{seconds}; a rank at its peak: "
    return Forecast(
        advice.stage,
        advice.offload,
        batch,
        times,
        f"{_wrapped(told)}\n{parts}{size_text(row.budget.peak.total)}",
        row,
        advice.problem is None and row.fits,
    )


def _wrapped(text: str) -> str:
    """Return a text in lines that a terminal shows whole. Words stay whole, however long they are."""
    lines = [
        textwrap.fill(line, COLUMNS, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        for line in text.splitlines()
    ]
    return "\n".join(lines)


def _allowed(options: Mapping[str, Any], micro_batches: int) -> Mapping[str, Any]:
    """Return the options without what excludes several backward passes a step."""
    offload = options.get("offload")
    if micro_batches == 1 or not isinstance(offload, Mapping) or "allow" not in offload:
        return options
    allowed = [name for name in offload["allow"] if name != "update_in_backward"]
    return {**options, "offload": {**offload, "allow": allowed}}
