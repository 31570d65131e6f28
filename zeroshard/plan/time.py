"""How long a step takes and what it waits for: the runtime's schedule, laid out on the lanes of a machine.

What overlaps with what is what the runtime does (DESIGN: "The life of a unit"):

- Stage 0 reduces (all-reduce) behind backward alone; stages 1 and 2 reduce behind backward and publish updated
  parameters behind the next forward; stage 3 gathers behind forward and backward, ``prefetch`` units ahead, and reduces
  behind backward. The update begins when all is reduced, for the norm.
- Offload: gradients go down behind backward; the host updates in the order in which forward needs units, and forward
  waits for each. Updating in backward begins as a gradient lands; a delayed update has until that unit's next gradient.
- Tensor parallelism hides nothing: its all-reduces stand between two products.
- One thread launches all that the device does, and is ahead of it by as much as the device's queue holds. It waits
  for the host where that has parameters to send or no room for a gradient, and is slower while the host updates.
- Checkpoints that are divided among model-parallel ranks (P_a) or on the host (P_a+cpu): down behind forward, up and
  gathered behind backward (``checkpoint_time``).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from enum import Enum

import torch

from ..bounds import IN_FLIGHT
from ..offload.options import Offload
from ..offload.pipeline import LANDING
from .checkpoint_time import checkpoint_time
from .machine_profile import DEVICE_UPDATE_BYTES, Machine
from .ring import ring
from .shape import Setup, Transformer, Work
from .timeline import Lane, Span, Timeline

STEPS = 4
"""Steps that are laid out; the last one is taken, when what one leaves to the next has settled."""
LOSS_BYTES = 28
"""Traffic a logit of a softmax in fp32: cast, normalised, and both ways back."""
AHEAD = 16
"""Units that are launched ahead of the device, at most: a queue holds about a thousand kernels."""
LAID_OUT = 3
"""Micro-batches that are laid out; more of them take as long as the last one each."""


class Bottleneck(Enum):
    """What a step spends most of its time on."""

    COMPUTE = "compute"
    LAUNCH = "launching"
    UPDATE = "update"
    INSIDE = "communication inside a node"
    BETWEEN = "communication between nodes"
    PCIE = "copies between host and device"


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step on one rank; the parts add up to the total."""

    compute: float
    """Forward, recomputation and backward."""
    launching: float
    """What the device waits for the thread that drives it."""
    update: float
    """Of the optimizer: on the device, or on the host while the device waits."""
    exposed_inside: float
    """Communication inside a node that nothing hides."""
    exposed_between: float
    exposed_pcie: float
    flops: float
    """Of one rank, recomputation included, as the papers count."""

    @property
    def total(self) -> float:
        exposed = self.exposed_inside + self.exposed_between + self.exposed_pcie
        return self.compute + self.launching + self.update + exposed

    @property
    def exposed(self) -> float:
        """Communication between devices that nothing hides."""
        return self.exposed_inside + self.exposed_between

    @property
    def tflops_per_device(self) -> float:
        return self.flops / self.total / 1e12

    @property
    def bottleneck(self) -> Bottleneck:
        parts = {
            Bottleneck.COMPUTE: self.compute,
            Bottleneck.LAUNCH: self.launching,
            Bottleneck.UPDATE: self.update,
            Bottleneck.INSIDE: self.exposed_inside,
            Bottleneck.BETWEEN: self.exposed_between,
            Bottleneck.PCIE: self.exposed_pcie,
        }
        return max(parts, key=lambda part: parts[part])


def host_update_bytes(offload: Offload, width: int, moments: int = 2) -> int:
    """Traffic in host memory of updating one parameter.

    >>> host_update_bytes(Offload(), 2), host_update_bytes(Offload(moments=torch.bfloat16, split_master=True), 2)
    (28, 18)
    """
    master = 6 if offload.split_master else 8  # read and written; of a split one the upper half is the parameter sent
    states = 2 * moments * (4 if offload.moments is torch.float32 else 2)
    return master + states + (2 * width if width == 2 else width)


def work_of(model: Transformer, setup: Setup) -> Work:
    """What one rank computes. A block above the largest unit is several, as it is gathered and reduced in parts."""
    tensor, tokens = setup.model_parallel, setup.batch * setup.sequence
    count = model.layers * _parts(model, setup)
    units = (model.root / tensor, *[model.layers * model.block / tensor / count] * count)
    head = 2.0 * tokens * model.vocabulary * model.hidden / tensor
    blocks = model.forward_flops(setup.batch, setup.sequence) / tensor - head
    return Work(
        parameters=units,
        trained=units,
        forward=(head, *[blocks / count] * count),
        backward=3 if setup.checkpointing else 2,
        written=(0.0, *[tokens * model.layers * model.block_written(tensor) / count] * count),
        product=tokens * model.hidden**2 / tensor,
        logits=tokens * model.vocabulary / tensor,
    )


def _parts(model: Transformer, setup: Setup) -> int:
    return math.ceil(model.block * setup.width / setup.model_parallel / setup.max_unit_bytes)


def step_time(model: Transformer | Work, setup: Setup, machine: Machine) -> StepTime:
    """The time of a step once it is under way.

    >>> from .machine_profile import load
    >>> gpt = Transformer(layers=48, hidden=1600, heads=25, vocabulary=50304, positions=1024)
    >>> step_time(gpt, Setup(stage=0, batch=8), load("h200")).bottleneck
    <Bottleneck.COMPUTE: 'compute'>
    """
    if setup.micro_batches <= LAID_OUT:
        return _Step(model, setup, machine).measure()
    fewer, most = (
        _Step(model, replace(setup, micro_batches=count), machine).measure() for count in (LAID_OUT - 1, LAID_OUT)
    )
    more = setup.micro_batches - LAID_OUT
    parts = {
        entry.name: getattr(most, entry.name) + more * (getattr(most, entry.name) - getattr(fewer, entry.name))
        for entry in fields(StepTime)
    }
    return StepTime(**{name: max(0.0, value) for name, value in parts.items()})


class _Step:
    """Steps of one rank on a timeline. Unit 0 is the root, which is computed last in forward (its head)."""

    def __init__(self, model: Transformer | Work, setup: Setup, machine: Machine) -> None:
        self.setup, self.offload = setup, setup.offload
        tensor, width = setup.model_parallel, setup.width
        work = work_of(model, setup) if isinstance(model, Transformer) else model
        parts = _parts(model, setup) if isinstance(model, Transformer) else 1
        self.layers, self.keep = len(work.parameters) - 1, setup.keep * parts
        self.units = list(work.parameters)
        self.timeline = Timeline()
        self.data = ring(machine, setup.world, tensor)
        self.tensor = ring(machine, tensor, 1)

        rate = machine.device.rate(work.product, half=width == 2)
        rest = width * machine.device.traffic / machine.device.bandwidth
        self.forward_seconds = [
            flops / rate + written * rest for flops, written in zip(work.forward, work.written, strict=True)
        ]
        self.loss_seconds = work.logits * LOSS_BYTES / 2 / machine.device.bandwidth  # in forward, and in backward
        self.launch, self.parts = machine.launch, parts
        self.done: deque[float] = deque(maxlen=AHEAD)
        """When the device was through with the last units."""
        self.backward_blocks = work.backward
        head, blocks = work.forward[0], sum(work.forward[1:])
        self.flops = setup.micro_batches * (3 * head + (1 + self.backward_blocks) * blocks)
        self.tensor_seconds = 0.0
        if isinstance(model, Transformer):  # two all-reduces a block and pass, the recomputing one included
            stream = setup.batch * setup.sequence * model.hidden * width
            self.tensor_seconds = self.tensor.seconds(stream, passes=2) * 2 / parts
        self.checkpoints = checkpoint_time(model, setup, machine, self.tensor, self.timeline)

        ranks = min(setup.devices, machine.devices_per_node)
        shard = setup.world if setup.stage >= 1 else 1
        fraction = 0.0 if self.offload is None else self.offload.host_fraction
        fraction = 1.0 if fraction == "auto" else fraction
        on_host = [size / shard * fraction for size in work.trained]
        self.device_update = [
            (size / shard - hosted) * DEVICE_UPDATE_BYTES / machine.device.bandwidth
            for size, hosted in zip(work.trained, on_host, strict=True)
        ]
        self.down = [size * width / machine.pcie.down for size in on_host]
        self.up = [size * width / machine.pcie.up for size in on_host]
        self.host_update = [0.0] * len(self.units)
        self.host_add = [0.0] * len(self.units)
        self.from_host = [0.0] * len(self.units)
        if self.offload is not None:
            # What crosses while the host updates goes over the same memory: parameters up, and where backward goes on
            # meanwhile gradients down.
            crossing = width * (2 if self._beside_backward else 1)
            bytes_a_parameter = host_update_bytes(self.offload, width, setup.moments) + crossing
            if self.offload.read_back:
                bytes_a_parameter += width
                self.down = [2 * seconds for seconds in self.down]
            bandwidth = machine.host_bandwidth(ranks)
            self.host_update = [size and size * bytes_a_parameter / bandwidth + machine.launch.host for size in on_host]
            if setup.micro_batches > 1:
                self.host_add = [size * (width + 8 + width) / bandwidth for size in on_host]
            if self.offload.parameters == "cpu":
                self.from_host, self.up = self.up, [0.0] * len(self.units)
        self.wire = [size * width for size in self.units]
        self.reduced_wire = [size * width for size in work.trained]
        count = len(self.units)
        self.ready = [0.0] * count  # when forward may use a unit (or gather it)
        self.sent = [0.0] * count  # when the thread may launch that
        self.updated = [0.0] * count  # when its gradient's slot on the host is free
        self.landed = [0.0] * count
        self.reduced = [0.0] * count

    @property
    def _beside_backward(self) -> bool:
        return self.offload is not None and self.offload.beside_backward

    @property
    def _from_host(self) -> bool:
        """Whether parameters rest there, so that a unit is fetched even where no other rank has a part of it."""
        return self.offload is not None and self.offload.parameters == "cpu" and self.setup.stage == 3

    @property
    def _delayed(self) -> bool:
        return self.offload is not None and self.offload.delayed_update_after is not None

    def measure(self) -> StepTime:
        ends = []
        for _ in range(STEPS):
            for _ in range(self.setup.micro_batches):
                self._forward()
                self._backward()
            ends.append(self.timeline.free(Lane.DEVICE))
            self._update()
        window = Span(ends[-2], ends[-1])
        order = (Lane.DEVICE, Lane.THREAD, Lane.HOST, Lane.BETWEEN, Lane.INSIDE, Lane.UP, Lane.DOWN)
        spent = self.timeline.exposed(window, *order)
        on_device = sum(self.device_update)
        return StepTime(
            compute=spent[Lane.DEVICE] - on_device,
            launching=spent[Lane.THREAD],
            update=spent[Lane.HOST] + on_device,
            exposed_inside=spent[Lane.INSIDE],
            exposed_between=spent[Lane.BETWEEN],
            exposed_pcie=spent[Lane.UP] + spent[Lane.DOWN],
            flops=self.flops,
        )

    # -- the life of a unit ---------------------------------------------------------------------------------------

    def _forward(self) -> None:
        blocks = range(1, self.layers + 1)
        there = self._pass([0, *blocks], gathers=[0, *blocks], seconds=self.forward_seconds, head=False)
        self._compute(self.forward_seconds[0] + self.loss_seconds, there[0])

    def _backward(self) -> None:
        blocks = range(self.layers, 0, -1)
        backward = [2 * self.forward_seconds[0], *(self.backward_blocks * s for s in self.forward_seconds[1:])]
        self._compute(backward[0] + self.loss_seconds)
        gathers = [block for block in blocks if block <= self.layers - self.keep]
        self._pass(list(blocks), gathers=gathers, seconds=backward, head=True)
        self._reduce(0)

    def _pass(self, order: list[int], gathers: Iterable[int], seconds: list[float], head: bool) -> dict[int, float]:
        """Units in order, each gathered ahead of need; in backward (``head``) each is reduced behind the next."""
        there: dict[int, float] = {}
        waiting = [unit for unit in order if unit in set(gathers)] if self.setup.stage == 3 else []
        if self.setup.stage < 3:
            there = {} if head else {unit: self.ready[unit] for unit in order}
        recent: list[int] = []
        for position, unit in enumerate(order):
            ahead = order[: position + 1 + self.setup.prefetch]
            while waiting and waiting[0] in ahead:
                following = waiting.pop(0)
                there[following] = self._gather(following)
            if unit == 0:
                continue  # the embedding is looked up, not multiplied
            waits = [there.get(unit, 0.0), there.get(0, 0.0)]
            if head and len(recent) >= IN_FLIGHT:
                waits.append(self.reduced[recent[-IN_FLIGHT]])
            held_up = self.landed[recent[-LANDING]] if head and len(recent) >= LANDING else 0.0
            if not head:
                held_up = max(self.sent[unit], self.sent[0])
            if self.checkpoints is not None:
                block, part = divmod(unit - 1, self.parts)
                if head and part == self.parts - 1:
                    waits.append(self.checkpoints.take(block))
                elif not head and part == 0:
                    waits.append(self.checkpoints.keep())
            passes = (self.backward_blocks - 1) if head else 1
            started = self._launch(self._launch_seconds(head), held_up)
            self._compute(seconds[unit], started, *waits, tensor=passes * self.tensor_seconds)
            self.timeline.hold(Lane.DEVICE, self.timeline.free(Lane.THREAD))
            if head:
                self._reduce(unit)
                recent.append(unit)
        return there

    def _launch_seconds(self, backward: bool) -> float:
        """Of one block, in forward or in backward."""
        launch, setup = self.launch, self.setup
        gathers = setup.stage == 3 or (not backward and setup.stage > 0)
        collectives = gathers + backward if setup.world > 1 else int(self._from_host)
        block = launch.forward if not backward else launch.backward
        if backward and setup.checkpointing:
            block += launch.recompute
        unit = collectives * launch.communicate
        if backward and self.offload is not None:
            unit += (launch.beside or launch.offload) if self._beside_backward else launch.offload
        crowded = self.offload is not None and (backward == self._beside_backward)
        return (block / self.parts + unit) * (launch.crowded if crowded else 1.0)

    def _launch(self, seconds: float, after: float = 0.0) -> float:
        """Has the thread launch something; returns when it begins."""
        ahead = self.done[0] if len(self.done) == AHEAD else 0.0
        return self.timeline.run(Lane.THREAD, seconds, after, ahead) - seconds

    def _compute(self, seconds: float, *after: float, tensor: float = 0.0) -> None:
        done = self.timeline.run(Lane.DEVICE, seconds, *after)
        self.done.append(done)
        if tensor:
            # The device waits for every one of them: its next work comes after.
            self._wait(self.timeline.run(self.tensor.lane, tensor, done))

    def _wait(self, until: float) -> None:
        self.timeline.hold(Lane.DEVICE, until)

    def _gather(self, unit: int) -> float:
        now = self.timeline.free(Lane.DEVICE)
        here = self.timeline.run(Lane.UP, self.from_host[unit], self.ready[unit], now)
        return self.timeline.run(self.data.lane, self.data.seconds(self.wire[unit]), here)

    def _reduce(self, unit: int) -> None:
        passes = 2 if self.setup.stage == 0 else 1
        seconds = self.data.seconds(self.reduced_wire[unit], passes)
        done = self.timeline.run(self.data.lane, seconds, self.timeline.free(Lane.DEVICE))
        self.reduced[unit] = done
        if self.offload is None:
            return
        landed = self.timeline.run(Lane.DOWN, self.down[unit], done, self.updated[unit])
        if self._delayed:
            self.ready[unit] = self._publish(unit, landed)
        self.landed[unit] = self.timeline.run(Lane.HOST, self.host_add[unit], landed) if self.host_add[unit] else landed
        if self.offload.update_in_backward:
            self._update_on_host(unit, self.landed[unit])

    def _update(self) -> None:
        """After a step's last backward: all is reduced, the ranks agree and find the norm, units are updated."""
        agree = self.data.seconds(0.0, passes=2) * 2
        known = self.timeline.run(self.data.lane, agree, max(self.reduced))
        self._launch(self.launch.step)
        forward, backward = range(len(self.units)), [*range(self.layers, 0, -1), 0]
        for unit in forward:
            if self.device_update[unit]:
                launched = self._launch(self.launch.update)
                done = self.timeline.run(Lane.DEVICE, self.device_update[unit], known, launched)
                self.ready[unit] = self._send(unit, done)
        self._wait(self.timeline.free(Lane.THREAD))
        if self.offload is None or self.offload.update_in_backward:
            return
        known = max(known, *self.landed)
        for unit in backward if self._delayed else forward:
            self._launch(self.launch.hand_over)
            self._update_on_host(unit, max(known, self.timeline.free(Lane.THREAD)))
        if self.offload.blocking:
            self._wait(max(self.ready))
            self.timeline.hold(Lane.THREAD, max(self.ready))

    def _update_on_host(self, unit: int, after: float) -> None:
        self.updated[unit] = self.timeline.run(Lane.HOST, self.host_update[unit], after)
        if not self._delayed:
            self.sent[unit] = self.updated[unit]
            self.ready[unit] = self._publish(unit, self.updated[unit])

    def _publish(self, unit: int, after: float) -> float:
        return self._send(unit, self.timeline.run(Lane.UP, self.up[unit], after))

    def _send(self, unit: int, after: float) -> float:
        """Updated parameters to the other ranks, where they are whole at rest."""
        if self.setup.stage not in (1, 2):
            return after
        return self.timeline.run(self.data.lane, self.data.seconds(self.wire[unit]), after)
