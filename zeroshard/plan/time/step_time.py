"""How long a step takes and what it waits for: the runtime's schedule, laid out on the resources of a machine.

The overlap is that of the runtime:

- Stage 0 reduces (all-reduce) during backward. Stages 1 and 2 reduce during backward, and publish updated parameters
  during the next forward. Stage 3 gathers during forward and backward, ``prefetch`` units ahead, and reduces during
  backward. The update begins when all gradients are reduced, because it needs their norm.
- Offload: gradients go to the host during backward. The host updates units in the order in which forward needs them,
  and forward waits for each unit. With ``update_in_backward`` the update of a unit begins when its gradient is on the
  host. A delayed update must be finished when the next gradient of its unit comes.
- Tensor parallelism overlaps with nothing: its all-reduces stand between two matrix products.
- One thread launches all work of the device. It is ahead of the device by as much as the device's queue can store. It
  waits for the host if new parameters are not ready or if there is no free slot for a gradient. It is slower while the
  host updates.
- Checkpoints that are divided among model-parallel ranks (P_a) or on the host (P_a+cpu) leave during forward. During
  backward they come back and are gathered (``checkpoint_time``).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, fields, replace
from enum import Enum
from itertools import chain, islice

from ...config.bounds import IN_FLIGHT
from ...offload.pipeline import LANDING
from ..machine.profile import Machine
from ..setup import Setup
from .checkpoint_time import checkpoint_time
from .timeline import Interval, Resource, Timeline
from .unit_costs import UnitCosts
from .work import Work

STEPS = 4
"""The largest number of steps that are laid out. The result is the last step. Fewer are enough if two steps leave the
same to the next."""
SETTLED = 1e-10
"""Two steps are equal if all times that they leave to the next differ by less than this share of a step."""
AHEAD = 16
"""The largest number of units that the thread is ahead of the device. A queue stores about a thousand kernels."""
LAUNCHING = (0.75, 1.7)
"""The least and the most time that launching took, divided by the time of the profile. A processor whose cores other
programs use too changes its speed from second to second: on one machine the same step took 81 to 132 ms in a minute."""
NOTICED = 0.05
"""A range that is narrower than this share of the planned time is shown as one number."""
IDLE = 0.5
"""A slow thread that is busy for less than this share of a step is always ahead of the device."""
LAID_OUT_MICRO_BATCHES = 3
"""The smallest number of micro-batches that are laid out. Each further one takes as long as the last."""
LAID_OUT_BLOCKS = 1024
"""The largest number of blocks that are laid out. Each further block takes the average time of the second half."""


class Bottleneck(Enum):
    """The part of a step that takes most time."""

    COMPUTE = "compute"
    LAUNCH = "launching"
    UPDATE = "update"
    NODE_LINKS = "communication inside a node"
    NETWORK = "communication between nodes"
    PCIE = "copies between host and device"


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step on one rank. The parts add up to the total."""

    compute: float
    """Forward, recomputation and backward."""
    launching: float
    """The device waits for the thread that drives it."""
    update: float
    """The optimizer: on the device, or on the host while the device waits."""
    exposed_node_links: float
    """Communication inside a node that overlaps with nothing."""
    exposed_network: float
    """Communication between nodes that overlaps with nothing."""
    exposed_pcie: float
    """Copies between host and device that overlap with nothing."""
    flops: float
    """FLOPs of one rank, with recomputation, as the papers count."""

    @property
    def total(self) -> float:
        exposed = self.exposed_node_links + self.exposed_network + self.exposed_pcie
        return self.compute + self.launching + self.update + exposed

    @property
    def exposed(self) -> float:
        """Communication between devices that overlaps with nothing."""
        return self.exposed_node_links + self.exposed_network

    @property
    def tflops_per_device(self) -> float:
        return self.flops / self.total / 1e12

    @property
    def bottleneck(self) -> Bottleneck:
        parts = {
            Bottleneck.COMPUTE: self.compute,
            Bottleneck.LAUNCH: self.launching,
            Bottleneck.UPDATE: self.update,
            Bottleneck.NODE_LINKS: self.exposed_node_links,
            Bottleneck.NETWORK: self.exposed_network,
            Bottleneck.PCIE: self.exposed_pcie,
        }
        return max(parts, key=lambda part: parts[part])


def step_time(work: Work, setup: Setup, machine: Machine) -> StepTime:
    """The time of a step, after the first steps.

    >>> from ..machine.profile import load
    >>> from ..papers.shape import Transformer
    >>> setup = Setup(stage=0, batch=8)
    >>> gpt = Transformer(layers=48, hidden=1600, heads=25, vocabulary=50304, positions=1024)
    >>> step_time(gpt.work(setup), setup, load("h200")).bottleneck
    <Bottleneck.COMPUTE: 'compute'>
    """
    blocks = (len(work.forward) - 1) // work.parts
    if blocks > LAID_OUT_BLOCKS:
        fewer, most = (
            step_time(work.first(count), setup, machine) for count in (LAID_OUT_BLOCKS // 2, LAID_OUT_BLOCKS)
        )
        return _continued(fewer, most, (blocks - LAID_OUT_BLOCKS) / (LAID_OUT_BLOCKS // 2))
    laid_out = LAID_OUT_MICRO_BATCHES
    if setup.micro_batches > LAID_OUT_MICRO_BATCHES:  # enough for the thread to be as far ahead as possible
        laid_out += math.ceil(2 * AHEAD / UnitCosts(work, setup, machine).count)
    if setup.micro_batches <= laid_out:
        return _Step(work, setup, machine).measure()
    fewer, most = (
        _Step(work, replace(setup, micro_batches=count), machine).measure() for count in (laid_out - 1, laid_out)
    )
    return _continued(fewer, most, setup.micro_batches - laid_out)


def step_span(planned: StepTime, work: Work, setup: Setup, machine: Machine) -> tuple[float, float]:
    """The least and the most seconds of a step to expect. They are equal if nothing makes the planned time uncertain.

    >>> from ..machine.profile import load
    >>> from ..papers.shape import Transformer
    >>> tiny = Transformer(layers=12, hidden=256, heads=4, vocabulary=1000, positions=128)
    >>> setup, machine = Setup(stage=0), load("h200")
    >>> work = tiny.work(setup)
    >>> least, most = step_span(step_time(work, setup, machine), work, setup, machine)
    >>> round(most / least, 1)  # launching is most of this step, and the machine was not measured
    3.2
    """
    least, most = machine.spread

    def seconds(factor: float) -> float:
        return step_time(work, setup, replace(machine, launch=machine.launch.slower(factor))).total

    if LAUNCHING[1] * UnitCosts(work, setup, machine).launching < IDLE * planned.total:
        return least * planned.total, most * planned.total
    quick, slow = map(seconds, LAUNCHING)
    if slow - quick < NOTICED * planned.total:
        return least * planned.total, most * planned.total
    return least * quick, most * slow


def _continued(fewer: StepTime, most: StepTime, more: float) -> StepTime:
    """Extrapolates: adds ``more`` times the difference between ``most`` and ``fewer`` to ``most``."""
    parts = {
        entry.name: getattr(most, entry.name) + more * (getattr(most, entry.name) - getattr(fewer, entry.name))
        for entry in fields(StepTime)
    }
    return StepTime(**{name: max(0.0, value) for name, value in parts.items()})


class _Step:
    """The steps of one rank on a timeline. Unit 0 is the root; its head is computed last in forward."""

    def __init__(self, work: Work, setup: Setup, machine: Machine) -> None:
        self.setup, self.offload, self.machine = setup, setup.offload, machine
        self.delayed = self.offload is not None and self.offload.delayed_update_after is not None
        self.costs = UnitCosts(work, setup, machine)
        self.layers = self.costs.count - 1
        self.timeline = Timeline()
        self.checkpoints = checkpoint_time(work, setup, machine, self.costs.tensor_ring, self.timeline)
        self.done: deque[float] = deque(maxlen=AHEAD)
        """The times when the device finished the last units."""
        self.ready = [0.0] * self.costs.count  # when forward may use the unit or gather it
        self.sent = [0.0] * self.costs.count  # when the thread may launch that forward
        self.updated = [0.0] * self.costs.count  # when the slot of its gradient on the host is free
        self.landed = [0.0] * self.costs.count  # when its gradient is on the host
        self.reduced = [0.0] * self.costs.count  # when its gradient is reduced

    def measure(self) -> StepTime:
        window, left = Interval(0.0, 0.0), list[float]()
        for _ in range(STEPS):
            for _ in range(self.setup.micro_batches):
                self._forward()
                self._backward()
            window = Interval(window.end, self.timeline.free(Resource.DEVICE))
            before, left = left, self._left()
            self._update()
            if _equal(before, left, SETTLED * (window.end - window.start)):
                break
        spent = self.timeline.exposed(window, *Resource)
        on_device = sum(self.costs.device_update)
        return StepTime(
            compute=spent[Resource.DEVICE] - on_device,
            launching=spent[Resource.THREAD],
            update=spent[Resource.HOST] + on_device,
            exposed_node_links=spent[Resource.NODE_LINKS],
            exposed_network=spent[Resource.NETWORK],
            exposed_pcie=spent[Resource.PCIE_UP] + spent[Resource.PCIE_DOWN],
            flops=self.costs.flops,
        )

    def _left(self) -> list[float]:
        """All times that later work may wait for, relative to the end of the last backward.

        Times before the earliest possible begin of new work count as that begin, because they make no difference.
        """
        end = self.timeline.free(Resource.DEVICE)
        earliest = min(end, max(self.timeline.free(Resource.THREAD), self._ahead))
        resources = (self.timeline.free(resource) for resource in Resource)
        known = chain(resources, self.done, self.ready, self.sent, self.updated, self.landed, self.reduced)
        return [max(moment, earliest) - end for moment in known]

    # -- the life of a unit ---------------------------------------------------------------------------------------

    def _forward(self) -> None:
        units = range(self.layers + 1)
        there = self._pass(units, gathers=units, seconds=self.costs.forward, backward=False)
        self._compute(self.costs.forward[0] + self.costs.loss, there[0])

    def _backward(self) -> None:
        self._compute(self.costs.backward[0] + self.costs.loss)
        # In stage 3 a unit is reduced as a whole. An offload that publishes during backward has the root last.
        together = self.setup.stage == 3 or (self.offload is not None and self.offload.beside_backward)
        head = 0.0 if together else self.costs.work.head
        if head:
            self._reduce(0, head)
        kept = self.setup.keep * self.costs.parts
        gathers = range(self.layers - kept, 0, -1)
        self._pass(range(self.layers, 0, -1), gathers=gathers, seconds=self.costs.backward, backward=True)
        self._reduce(0, 1 - head)

    def _pass(self, order: range, gathers: range, seconds: list[float], backward: bool) -> list[float]:
        """One forward or backward: units in order, gathered early, and in backward reduced.

        Returns for each unit the time when its parameters were gathered.
        """
        launch = self.costs.launch(backward=backward)
        tensor = self.costs.tensor * (self.costs.work.backward - 1 if backward else 1)
        there = self.ready if self.setup.stage < 3 and not backward else [0.0] * self.costs.count
        coming = iter(order if self.setup.stage == 3 else ())
        for position, unit in enumerate(order):
            for following in islice(coming, 1 if position else 1 + self.setup.prefetch):
                if following in gathers:
                    there[following] = self._gather(following)
            if unit == 0:
                continue  # the embedding is a lookup, not a product
            begun, launch_after = 0.0, 0.0
            if not backward:
                launch_after = max(self.sent[unit], self.sent[0])
            else:
                if position >= IN_FLIGHT:
                    begun = self.reduced[order[position - IN_FLIGHT]]
                if position >= LANDING:
                    launch_after = self.landed[order[position - LANDING]]
            started = self._launch(launch, launch_after)
            moved = self._checkpoint(unit, backward) if self.checkpoints is not None else 0.0
            self._compute(seconds[unit], started, there[unit], there[0], begun, moved, tensor=tensor)
            self._wait(self.timeline.free(Resource.THREAD))
            if backward:
                self._reduce(unit)
        return there

    def _checkpoint(self, unit: int, backward: bool) -> float:
        """Sends the checkpoint of a block at its first unit, or brings it back. Returns when the unit may begin."""
        assert self.checkpoints is not None
        block, part = divmod(unit - 1, self.costs.parts)
        if block >= round(self.costs.work.recomputed * self.layers / self.costs.parts):
            return 0.0
        if backward:
            return self.checkpoints.bring_back(block) if part == self.costs.parts - 1 else 0.0
        return self.checkpoints.send() if part == 0 else 0.0

    def _launch(self, seconds: float, after: float = 0.0) -> float:
        """The thread launches something. Returns when launching begins."""
        return self.timeline.run(Resource.THREAD, seconds, after, self._ahead) - seconds

    @property
    def _ahead(self) -> float:
        """The time from which on the device's queue has room for more."""
        return self.done[0] if len(self.done) == AHEAD else 0.0

    def _compute(self, seconds: float, *after: float, tensor: float = 0.0) -> None:
        done = self.timeline.run(Resource.DEVICE, seconds, *after)
        self.done.append(done)
        if tensor:
            # The device waits for every all-reduce: its next work needs the result.
            self._wait(self.timeline.run(self.costs.tensor_ring.resource, tensor, done))

    def _wait(self, until: float) -> None:
        self.timeline.idle_until(Resource.DEVICE, until)

    def _gather(self, unit: int) -> float:
        now = self.timeline.free(Resource.DEVICE)
        here = self.timeline.run(Resource.PCIE_UP, self.costs.fetch[unit], self.ready[unit], now)
        return self.timeline.run(self.costs.data_ring.resource, self.costs.gather[unit], here)

    def _reduce(self, unit: int, share: float = 1.0) -> None:
        """Reduces a share of a unit's gradients, and sends it to the host."""
        costs, timeline = self.costs, self.timeline
        done = timeline.run(costs.data_ring.resource, share * costs.reduce[unit], timeline.free(Resource.DEVICE))
        self.reduced[unit] = done
        if self.offload is None:
            return
        landed = timeline.run(Resource.PCIE_DOWN, share * costs.down[unit], done, self.updated[unit])
        if self.delayed:
            self.ready[unit] = self._publish(unit, landed, share)
        if costs.host_add[unit]:
            landed = timeline.run(Resource.HOST, share * costs.host_add[unit], landed)
        self.landed[unit] = landed
        if self.offload.update_in_backward:
            self._update_on_host(unit, self.landed[unit], share)

    def _update(self) -> None:
        """After the last backward: all is reduced, the ranks agree and compute the norm, and units are updated."""
        data = self.costs.data_ring
        known = self.timeline.run(data.resource, 2 * data.seconds(0.0, passes=2), max(self.reduced))
        forward, backward = range(self.layers + 1), [*range(self.layers, 0, -1), 0]
        for unit in forward:
            if self.costs.device_update[unit]:
                done = self.timeline.run(Resource.DEVICE, self.costs.device_update[unit], known)
                self.ready[unit] = self._send(unit, done)
        self._wait(self.timeline.free(Resource.THREAD))
        if self.offload is None or self.offload.update_in_backward:
            return
        known = max(known, *self.landed)
        for unit in backward if self.delayed else forward:
            self._update_on_host(unit, max(known, self.timeline.free(Resource.THREAD)))
        if self.offload.blocking:
            self._wait(max(self.ready))
            self.timeline.idle_until(Resource.THREAD, max(self.ready))

    def _update_on_host(self, unit: int, after: float, share: float = 1.0) -> None:
        self.updated[unit] = self.timeline.run(Resource.HOST, share * self.costs.host_update[unit], after)
        if not self.delayed:
            self.sent[unit] = self.updated[unit]
            self.ready[unit] = self._publish(unit, self.updated[unit], share)

    def _publish(self, unit: int, after: float, share: float) -> float:
        return self._send(unit, self.timeline.run(Resource.PCIE_UP, share * self.costs.up[unit], after), share)

    def _send(self, unit: int, after: float, share: float = 1.0) -> float:
        """Sends updated parameters to the other ranks, if parameters are whole at rest."""
        if self.setup.stage not in (1, 2):
            return after
        return self.timeline.run(self.costs.data_ring.resource, share * self.costs.gather[unit], after)


def _equal(before: list[float], now: list[float], tolerance: float) -> bool:
    return len(before) == len(now) and all(abs(a - b) <= tolerance for a, b in zip(before, now, strict=True))
