"""The events of a run. Their fields are the keys of the JSON lines, and may be added to, but not renamed."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Protocol, Self

from ...observe.ledger import Memory
from ..record import Record

FORMAT = 1
"""The version of the JSON lines. It rises if a key changes its meaning or goes away."""

Bytes = Mapping[str, int]
"""Bytes by kind: the fields of `Memory`."""


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """A run begins, or goes on from a checkpoint."""

    format: int = FORMAT
    name: str
    """The name of the folder."""
    folder: str
    """Where the run writes."""
    step: int
    """The steps that were made before: 0, or those of the checkpoint."""
    of: int
    """The last step."""
    stage: int
    ranks: int
    precision: str
    parameters: int
    """Ψ, the parameters of the model."""
    tokens_per_step: int
    """Of all ranks."""


@dataclass(frozen=True, kw_only=True)
class StepEvent:
    """A step whose loss was read: the first one, every `train.report_every`-th, and the last one."""

    step: int
    of: int
    loss: float
    """The training loss, averaged over ranks."""
    held_out_loss: float | None
    """Of the last evaluation; None if there was none."""
    lr: float
    """The learning rate of this step."""
    tokens_per_second: float | None
    """Of all ranks, since the first measured step, without evaluations. None in that step."""
    seconds_left: float | None
    """At that speed, without evaluations. None in the first measured step."""
    device_memory: Bytes
    """This rank's model states on the device, between backward and step."""
    host_memory: Bytes | None
    """This rank's states in host memory; None without offload."""
    volume: float | None
    """Elements communicated in a step, in Ψ; None while every measured step followed an evaluation."""
    exposed_waits: Mapping[str, float] | None
    """Seconds a step in which rank 0 had nothing to do, by cause, since the last measured step. None in the first."""
    gradient_norm: float | None
    """Before clipping; None if nothing asked for it."""

    @classmethod
    def of_record(cls, record: Record, step: int, of: int, lr: float) -> Self:
        """Return the event of the step that a record measured last."""
        assert record.stats is not None, "a step was measured"
        seconds = record.seconds_a_step
        return cls(
            step=step,
            of=of,
            loss=record.losses[-1],
            held_out_loss=record.held_out[-1] if record.held_out else None,
            lr=lr,
            tokens_per_second=record.tokens_a_second,
            seconds_left=None if seconds is None else seconds * (of - step),
            device_memory=by_kind(record.memory),
            host_memory=None if record.stats.host_memory is None else by_kind(record.stats.host_memory),
            volume=record.volume,
            exposed_waits=record.waits,
            gradient_norm=record.stats.grad_norm,
        )


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A loss on held-out data."""

    step: int
    """After this step; 0 is before the first one."""
    held_out_loss: float


@dataclass(frozen=True, kw_only=True)
class RunEnd:
    """A run ends in good order. A run that fails has no such event."""

    step: int
    """The last step that was made."""
    of: int
    stopped: str | None
    """Why the run ended before its last step; None if it did not."""
    loss: float | None
    """The last training loss that was read, before a resume too; None if there was none."""
    held_out_loss: float | None
    tokens_per_second: float | None
    device_memory: Bytes | None
    host_memory: Bytes | None
    volume: float | None
    host_traffic: int | None
    """With offload: bytes that crossed between host and device in one late step."""
    weights: tuple[str, ...]
    """The files of the trained model, the main one last. Empty if the run was stopped."""
    checkpoint: str | None
    """The checkpoint that a stopped run can go on from."""

    @classmethod
    def of_record(
        cls,
        record: Record,
        step: int,
        of: int,
        *,
        stopped: str | None,
        weights: tuple[str, ...],
        checkpoint: str | None,
    ) -> Self:
        """Return the event of a run that ends after a step."""
        stats = record.stats
        host = None if stats is None else stats.host_memory
        return cls(
            step=step,
            of=of,
            stopped=stopped,
            loss=record.losses[-1] if record.losses else None,
            held_out_loss=record.held_out[-1] if record.held_out else None,
            tokens_per_second=record.tokens_a_second,
            device_memory=None if stats is None else by_kind(record.memory),
            host_memory=None if host is None else by_kind(host),
            volume=record.volume,
            host_traffic=None if record.offload is None else record.offload.traffic,
            weights=weights,
            checkpoint=checkpoint,
        )


Event = RunStart | StepEvent | Evaluation | RunEnd
NAMES: Mapping[type[Event], str] = {RunStart: "start", StepEvent: "step", Evaluation: "evaluation", RunEnd: "end"}
"""What the JSON lines call the events."""


class Sink(Protocol):
    """Whoever is told the events."""

    def receive(self, event: Event) -> None:
        """Show or write an event."""

    def close(self) -> None:
        """Write what is left. No event comes after this."""


def by_kind(memory: Memory) -> Bytes:
    """Return the bytes of each kind.

    >>> by_kind(Memory(parameters=4, gradients=2))["gradients"]
    2
    """
    return {entry.name: getattr(memory, entry.name) for entry in fields(memory) if entry.name != "place"}
