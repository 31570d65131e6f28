"""Events for tests of whoever is told them."""

from __future__ import annotations

from dataclasses import replace

from zeroshard.observe.ledger import Memory
from zeroshard.train.live.events import StepEvent, by_kind

EVENT = StepEvent(
    step=8,
    of=12,
    loss=4.25,
    held_out_loss=4.5,
    lr=3e-4,
    tokens_per_second=12345.6,
    seconds_left=83.0,
    device_memory=by_kind(Memory(parameters=2_000_000, gradients=1_000_000, optimizer_states=4_000_000)),
    host_memory=None,
    volume=2.586,
    exposed_waits={"host_update": 0.011, "gradient_copies": 0.001, "collectives": 0.0, "agreement": 0.0},
    gradient_norm=0.98,
)
OFFLOADED = replace(EVENT, host_memory=by_kind(Memory(gradients=3_000_000, optimizer_states=12_000_000)))
FIRST = replace(
    EVENT, step=1, held_out_loss=None, tokens_per_second=None, seconds_left=None, volume=None, exposed_waits=None
)
