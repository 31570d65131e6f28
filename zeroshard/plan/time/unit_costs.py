"""The seconds that each unit takes on every resource of a machine, without waiting. ``time`` lays them out.

Lists go by unit, the root first. A block that is larger than ``max_unit_bytes`` is several units.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ...config.offload import Offload
from ..machine.profile import DEVICE_UPDATE_BYTES, Machine
from ..setup import Setup
from .collective_time import CollectiveRing, ring
from .work import Work

LOSS_BYTES = 28
"""Bytes of memory traffic for each logit of a softmax in fp32: cast and normalisation, and the backward of both."""


def host_update_bytes(offload: Offload, width: int, moments: int = 2) -> int:
    """Bytes of traffic in host memory for the update of one parameter.

    >>> host_update_bytes(Offload(), 2), host_update_bytes(Offload(moments="8bit", split_master=True), 2)
    (28, 14)
    """
    # The master is read and written. The upper half of a split master is the published parameter, which counts below.
    master = 6 if offload.split_master else 8
    states = 2 * moments * offload.moment_bytes
    return round(master + states + (2 * width if width == 2 else width))


@dataclass(frozen=True)
class UnitCosts:
    """The costs of one rank."""

    work: Work
    setup: Setup
    machine: Machine

    @property
    def parts(self) -> int:
        """The number of units in a block."""
        return self.work.parts

    @property
    def count(self) -> int:
        return len(self.work.parameters)

    # -- the device, and who drives it ----------------------------------------------------------------------------

    @cached_property
    def forward(self) -> list[float]:
        """Matrix products, and the memory traffic of activations."""
        device = self.machine.device
        rate = device.rate(self.work.product, half=self.setup.width == 2)
        write = self.setup.width * device.traffic / device.bandwidth
        return [
            flops / rate + written * write
            for flops, written in zip(self.work.forward, self.work.written, strict=True)
        ]  # fmt: skip

    @cached_property
    def backward(self) -> list[float]:
        """The backward, with recomputation."""
        head, *blocks = self.forward
        return [2 * head, *(self.work.backward * seconds for seconds in blocks)]

    @property
    def loss(self) -> float:
        """The loss in forward; backward takes the same time once more."""
        return self.work.logits * LOSS_BYTES / 2 / self.machine.device.bandwidth

    @property
    def flops(self) -> float:
        """FLOPs of a step, with recomputation."""
        head, *blocks = self.work.forward
        return self.setup.micro_batches * (3 * head + (1 + self.work.backward) * sum(blocks))

    def launch(self, *, backward: bool) -> float:
        """Launching one unit of a block."""
        launch, setup, offload = self.machine.launch, self.setup, self.setup.offload
        fetches = setup.stage == 3 or (not backward and setup.stage > 0)
        collectives = fetches + backward if setup.world > 1 else int(setup.stage == 3 and self._rest_on_host)
        block = launch.block * (2 / 3 if backward else 1 / 3)  # as measured
        if backward and setup.checkpointing:
            block += self.work.recomputed * launch.recompute
        seconds = block / self.parts + collectives * launch.communicate
        if offload is None or backward != offload.beside_backward:
            return seconds
        # A host that updates during backward shares the interpreter, too.
        return float(seconds * launch.crowded ** (2 if backward else 1))

    @property
    def launching(self) -> float:
        """Launching all units in all passes of a step."""
        passes = self.launch(backward=False) + self.launch(backward=True)
        return self.setup.micro_batches * (self.count - 1) * passes

    @cached_property
    def device_update(self) -> list[float]:
        per_parameter = DEVICE_UPDATE_BYTES / self.machine.device.bandwidth
        return [
            (size / self._shards - on_host) * per_parameter
            for size, on_host in zip(self.work.trained, self._on_host, strict=True)
        ]  # fmt: skip

    # -- other devices --------------------------------------------------------------------------------------------

    @cached_property
    def data_ring(self) -> CollectiveRing:
        """The ring of data-parallel ranks."""
        return ring(self.machine, self.setup.world, self.setup.model_parallel)

    @cached_property
    def tensor_ring(self) -> CollectiveRing:
        """The ring of the ranks that share a block."""
        return ring(self.machine, self.setup.model_parallel, 1)

    @cached_property
    def gather(self) -> list[float]:
        return [self.data_ring.seconds(size * self.setup.width) for size in self.work.parameters]

    @cached_property
    def reduce(self) -> list[float]:
        passes = 2 if self.setup.stage == 0 else 1
        return [self.data_ring.seconds(size * self.setup.width, passes) for size in self.work.trained]

    @cached_property
    def tensor(self) -> float:
        """Tensor parallelism: two all-reduces for a block in each pass. Recomputation is a pass too."""
        return self.tensor_ring.seconds(self.work.stream, passes=2) * 2 / self.parts

    # -- the host -------------------------------------------------------------------------------------------------

    @property
    def _shards(self) -> int:
        """The number of shards that optimizer states are divided into."""
        return self.setup.world if self.setup.stage >= 1 else 1

    @property
    def _rest_on_host(self) -> bool:
        """True if parameters are on the host at rest."""
        return self.setup.offload is not None and self.setup.offload.parameters == "cpu"

    @cached_property
    def _on_host(self) -> list[float]:
        """Elements that the host updates, by unit. Those that forward needs first are the device's."""
        fraction = 0.0 if self.setup.offload is None else self.setup.offload.host_fraction
        on_device, sizes = 0.0 if fraction == "auto" else 1 - fraction, []
        left = on_device * sum(self.work.trained)
        for size in self.work.trained:
            sizes.append(max(0.0, size - left) / self._shards)
            left = max(0.0, left - size)
        return sizes

    @cached_property
    def down(self) -> list[float]:
        """Copies to the host: gradients, and with ``read_back`` the high halves of masters."""
        twice = 2 if self.setup.offload is not None and self.setup.offload.read_back else 1
        return [twice * size * self.setup.width / self.machine.pcie.down for size in self._on_host]

    @cached_property
    def up(self) -> list[float]:
        """Copies of updated parameters to the device, if parameters rest on the device."""
        return [0.0] * self.count if self._rest_on_host else self._upwards

    @cached_property
    def fetch(self) -> list[float]:
        """Copies of parameters to the device before a gather, if parameters rest on the host."""
        return self._upwards if self._rest_on_host else [0.0] * self.count

    @property
    def _upwards(self) -> list[float]:
        return [size * self.setup.width / self.machine.pcie.up for size in self._on_host]

    @property
    def _host_bandwidth(self) -> float:
        return self.machine.host_bandwidth(min(self.setup.devices, self.machine.devices_per_node))

    @cached_property
    def host_update(self) -> list[float]:
        offload, width = self.setup.offload, self.setup.width
        if offload is None:
            return [0.0] * self.count
        # Copies during the update use the same memory: parameters to the device, high halves that are read back, and
        # gradients, if backward runs at the same time.
        crossing = width * (1 + offload.beside_backward + offload.read_back)
        traffic = host_update_bytes(offload, width, self.setup.moments) + crossing
        ranks = min(self.setup.devices, self.machine.devices_per_node)
        element = max(traffic / self._host_bandwidth, self.machine.host_arithmetic(ranks, offload))
        return [size and size * element + self.machine.launch.host for size in self._on_host]

    @cached_property
    def host_add(self) -> list[float]:
        """Adding a gradient to those of earlier micro-batches, in fp32."""
        if self.setup.offload is None or self.setup.micro_batches == 1:
            return [0.0] * self.count
        return [size * (8 + 2 * self.setup.width) / self._host_bandwidth for size in self._on_host]
