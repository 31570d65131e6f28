"""The hardware that a plan is for: from options, from a machine profile, or this machine."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace

import torch

from ...config.bounds import FRAGMENTS
from ...system import machine as here
from ...system.device import available_memory
from .profile import Machine, calibrated_file, load, names

GB = 1e9
CPU_RANKS = 2
"""Ranks on a machine without GPUs, as many as ``zeroshard train`` starts."""
CONTEXT = 0.6e9
"""Bytes of a GPU that the driver, libraries and NCCL take. torch's allocator does not count them."""
GUESSED = (0.3, 3.0)
"""The spread of a profile that was chosen by the size of its memory alone. It is of another device."""
LARGEST_GPU, LARGEST_NODE, MOST_IN_A_NODE, MOST = 1e12, 1e14, 128, 1 << 20
"""Limits of the options: more than this is a typing mistake."""


class HardwareError(ValueError):
    """Hardware options that are impossible or contradict each other."""


@dataclass(frozen=True)
class Hardware:
    """Devices, nodes and their memory."""

    gpus: int
    """GPUs of all nodes together; without GPUs, ranks."""
    nodes: int
    device_memory: float
    """Bytes of one device."""
    host_memory: float
    """Bytes of one node."""
    machine: Machine | None = None
    """The profile for predicting times."""
    guessed: bool = False
    """True if the profile was chosen only because its memory has a similar size."""
    on_cpu: bool = False
    """True if ranks compute in host memory. Then there is nothing to offload."""
    reserved: float = CONTEXT
    """Bytes of a device that cannot be used; 0 if ``device_memory`` is what was found free."""
    node_size: int = 0
    """Devices of a full node; 0 if the nodes here are full."""

    @property
    def per_node(self) -> int:
        return math.ceil(self.gpus / self.nodes)

    def grown(self, gpus: int) -> Hardware:
        """Hardware with another number of devices, of the same kind and in nodes of the same size."""
        a_node = self.node_size or self.per_node
        machine = None if self.machine is None else replace(self.machine, devices_per_node=a_node)
        found = replace(self, gpus=gpus, nodes=math.ceil(gpus / a_node), machine=machine)
        return replace(found, device_memory=found.host_memory_per_rank) if self.on_cpu else found

    @property
    def usable_device_memory(self) -> float:
        """The largest peak that a rank may have."""
        if self.on_cpu:
            return self.device_memory
        return max(0.0, self.device_memory * (1 - FRAGMENTS) - self.reserved)

    @property
    def host_memory_per_rank(self) -> float:
        return self.host_memory / self.per_node

    def __str__(self) -> str:
        kind = "rank" if self.on_cpu else "GPU"
        nodes = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        times = ""
        if self.machine is not None:
            times = f"; times as on {self.machine.title}" + (
                " (guessed: name one with --machine)" if self.guessed else ""
            )
        count = f"{self.gpus} {kind}{'s' if self.gpus > 1 else ''}"
        return (
            f"{count} of {self.device_memory / GB:.4g} GB{nodes}, {self.host_memory / GB:.4g} GB of host memory a node"
            f"{times}"
        )


def find_hardware(
    *,
    gpus: int | None = None,
    nodes: int | None = None,
    gpu_memory: float | None = None,
    host_memory: float | None = None,
    profile: str | None = None,
) -> Hardware:
    """The hardware that the options describe, sizes in GB. Missing options come from a profile or from this machine."""
    _check_numbers(gpus, nodes, gpu_memory, host_memory)
    machine = _profile(profile)
    if machine is not None and not machine.accelerator:
        return _other_cpu(machine, gpus, nodes, gpu_memory, host_memory)
    if machine is None and not any((gpus, nodes, gpu_memory)) and not torch.cuda.is_available():
        return _this_cpu(host_memory)
    if machine is not None and gpu_memory is not None and gpu_memory * GB > 1.05 * machine.device.memory:
        raise HardwareError(
            f"--gpu-memory {gpu_memory:g}: a device of {machine.name} ({machine.title}) has "
            f"{machine.device.memory / GB:.4g} GB; leave one of the two out"
        )
    memory, reserved = gpu_memory * GB if gpu_memory is not None else _device_memory(machine), CONTEXT
    guessed = False
    if machine is None:
        title = here.device_title(torch.device("cuda", 0)) if torch.cuda.is_available() else ""
        machine, guessed = profile_of(title, memory)
        assert machine is not None
        machine = replace(machine, spread=GUESSED) if guessed else machine
    a_node = machine.devices_per_node
    count = gpus or (nodes * a_node if nodes else torch.cuda.device_count() or 1)
    node_count = _nodes(count, nodes, machine)
    if host_memory is not None:
        host = host_memory * GB
    elif profile is None and torch.cuda.is_available():
        host = float(here.usable_memory())
    else:
        host = machine.host.memory
    found = replace(
        machine,
        devices_per_node=count // node_count,
        device=replace(machine.device, memory=memory),
        host=replace(machine.host, memory=host),
    )
    whole = count // node_count if nodes else a_node
    if torch.cuda.is_available() and not any((profile, gpus, nodes, gpu_memory)):  # a job that would start here, now
        memory, reserved = float(available_memory(torch.device("cuda", 0))), 0.0
    return Hardware(count, node_count, memory, host, found, guessed, reserved=reserved, node_size=whole)


def _nodes(count: int, nodes: int | None, machine: Machine) -> int:
    """The number of nodes: as given, or as many as the devices fill."""
    found = nodes or math.ceil(count / machine.devices_per_node)
    if count % found and nodes is None:
        raise HardwareError(
            f"--gpus {count}: a node of {machine.title} has {machine.devices_per_node} devices, so not all nodes are "
            f"full; say how they are spread with --nodes"
        )
    if count % found:
        raise HardwareError(f"--gpus {count}, of all nodes, cannot be spread evenly over --nodes {found}")
    if count // found > MOST_IN_A_NODE:
        raise HardwareError(f"--gpus {count} on --nodes {found} are {count // found} a node; there is no such node")
    return found


def _check_numbers(gpus: int | None, nodes: int | None, gpu_memory: float | None, host_memory: float | None) -> None:
    for option, value, most in (
        ("--gpus", gpus, MOST),
        ("--nodes", nodes, MOST),
        ("--gpu-memory", gpu_memory, LARGEST_GPU / GB),
        ("--host-memory", host_memory, LARGEST_NODE / GB),
    ):
        if value is not None and not 0 < value < math.inf:
            raise HardwareError(f"{option} {value:g}: must be above 0, and finite")
        if value is not None and value > most:
            unit = "is in GB, and " if "memory" in option else ""
            raise HardwareError(f"{option} {value:g}: {unit}nothing has more than {most:,.0f}")
    if gpus is not None and nodes is not None and nodes > gpus:
        raise HardwareError(f"--nodes {nodes} is more than --gpus {gpus}, which counts the GPUs of all nodes")


def _profile(name: str | None) -> Machine | None:
    if name is None:
        return None
    try:
        return load(name)
    except ValueError as error:
        raise HardwareError(f"--machine: {error}") from None


def _device_memory(machine: Machine | None) -> float:
    if machine is not None:
        return machine.device.memory
    if torch.cuda.is_available():
        return float(torch.cuda.get_device_properties(0).total_memory)
    raise HardwareError(
        "--gpus and --nodes need --gpu-memory GB or --machine NAME, as there is no GPU here to take it from"
    )


def profile_of(title: str, memory: float, on_cpu: bool = False) -> tuple[Machine | None, bool]:
    """The profile of a device, and whether it is a guess.

    First choice is the profile measured here, then the profile with the device's name, and last the profile with the
    nearest memory size, which is a guess. For a processor nothing is guessed.
    """
    file = calibrated_file(title)
    if file.is_file():
        try:
            return replace(load(file), name="calibrated"), False
        except ValueError as error:
            warnings.warn(f"{error}; measure anew with `zeroshard plan --calibrate`", stacklevel=2)
    if on_cpu:
        return None, False
    known = [machine for machine in map(load, names()) if machine.accelerator]
    for machine in known:
        if machine.name in title.lower():
            return machine, False
    return min(reversed(known), key=lambda machine: abs(machine.device.memory - memory)), True


def _other_cpu(
    machine: Machine, ranks: int | None, nodes: int | None, gpu_memory: float | None, host_memory: float | None
) -> Hardware:
    """Machines of a profile without accelerators; their ranks share host memory."""
    if gpu_memory is not None:
        raise HardwareError(f"--gpu-memory {gpu_memory:g}: {machine.title} has no GPU; its memory is --host-memory")
    count = ranks or (nodes or 1) * machine.devices_per_node
    node_count = _nodes(count, nodes, machine)
    a_node = count // node_count
    memory = host_memory * GB if host_memory is not None else machine.host.memory
    whole = a_node if nodes else machine.devices_per_node
    found = replace(machine, devices_per_node=a_node, host=replace(machine.host, memory=memory))
    return Hardware(count, node_count, memory / a_node, memory, found, on_cpu=True, node_size=whole)


def _this_cpu(host_memory: float | None) -> Hardware:
    memory = host_memory * GB if host_memory is not None else float(here.available_memory())
    ranks = min(CPU_RANKS, here.usable_cores())
    machine, _ = profile_of(here.device_title(torch.device("cpu")), memory, on_cpu=True)
    if machine is not None:
        machine = replace(machine, devices_per_node=ranks)
    return Hardware(ranks, 1, memory / ranks, memory, machine, on_cpu=True)
