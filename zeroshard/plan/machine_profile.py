"""What a machine can do: the numbers that the time model takes, from data files with their sources (``machines/``).

A profile says what is reached, not what is printed on the box: bandwidths are those of large messages, and
``efficiency`` is what of the peak the products of a large transformer block get.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from ..config.checks import nearest
from ..system import machine as facts

FOLDER = Path(__file__).parent / "machines"
DEVICE_UPDATE_BYTES = 77
"""Traffic a parameter of a foreach AdamW on fp32 masters, passes over temporaries included; measured on an H200."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, or the cores of one rank."""

    memory: float
    """Bytes."""
    peak_16bit: float
    """FLOPs a second in bf16 and fp16."""
    peak_fp32: float
    bandwidth: float
    """Of its memory, bytes a second; what is calibrated is what the update reaches."""
    efficiency: float
    """What of the peak the products of a transformer reach as they grow."""
    half_work: float
    """Multiply-adds (tokens · hidden² / M) of a product in 16 bits that reaches half of that."""
    traffic: float = 0.0
    """Bytes that pass its memory for every byte of activations that a forward writes. 0 is: in the efficiency."""

    def rate(self, work: float, *, half: bool) -> float:
        """FLOPs a second in products of so many multiply-adds.

        What keeps small products from their full speed takes as long in every precision: a slower one comes closer.
        """
        peak = self.peak_16bit if half else self.peak_fp32
        return peak * self.efficiency * work / (work + self.half_work * peak / self.peak_16bit)


@dataclass(frozen=True, kw_only=True)
class Link:
    """What connects devices of a node, or nodes."""

    latency: float
    """Seconds of one step of a ring, whatever it moves."""
    bandwidth: float
    """Bytes a second each way: of a device inside a node, of a whole node between nodes."""


@dataclass(frozen=True, kw_only=True)
class Pcie:
    """Between one device and its host, bytes a second."""

    down: float
    """From the device."""
    up: float


@dataclass(frozen=True, kw_only=True)
class Host:
    """What the devices of a node share."""

    memory: float
    """Bytes."""
    bandwidth: float
    """Bytes a second that the update reaches with all sockets at work."""
    sockets: int = 1
    """Memories of which one process uses one."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What the thread that drives the device needs for one unit, however little there is to compute; seconds.

    A model whose units compute for less time than that is as fast as they are launched. Zero is: not known, as is
    a factor of 1.
    """

    forward: float = 0.0
    backward: float = 0.0
    recompute: float = 0.0
    """Of a checkpointed block, what its backward takes longer."""
    communicate: float = 0.0
    """One gather or reduce, and what surrounds it."""
    offload: float = 0.0
    """Sending a gradient off and waiting for new parameters."""
    crowded: float = 1.0
    """How many times as long a unit's launching takes while the host updates on its other cores."""
    interrupted: float = 1.0
    """How many times as long again in backward, where the host updates beside it and shares the interpreter."""
    hand_over: float = 0.0
    """In a step: telling the host to update."""
    host: float = 0.0
    """Of the host's own threads, from being told on: a unit's update, apart from what its memory takes."""
    update: float = 0.0
    """On the device."""
    step: float = 0.0
    """Of a step, not of a unit: the agreement, and what begins and ends it."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A node and what connects it with others of its kind.

    >>> load("v100").devices_per_node
    16
    """

    name: str
    title: str
    devices_per_node: int
    half: str = "bf16"
    """The 16-bit precision that it trains in."""
    accelerator: bool = True
    """Whether its devices have memory of their own; else they are ranks that share the host's."""
    device: Device
    inside: Link
    between: Link
    pcie: Pcie
    host: Host
    launch: Launch = Launch()

    def host_bandwidth(self, ranks: int) -> float:
        """Of one rank where so many of a node update at once."""
        return self.host.bandwidth / max(ranks, self.host.sockets)

    def nodes(self, devices: int) -> int:
        return math.ceil(devices / self.devices_per_node)


def calibrated_file(title: str) -> Path:
    """Where the measured profile of the machine at hand is kept, by what its device calls itself."""
    name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "unknown"
    return facts.cache_folder() / f"machine-{name}.toml"


def names() -> list[str]:
    """Of the profiles that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load(name: str | Path) -> Machine:
    """A profile that comes with the package, or any file in their format.

    >>> load("v10")
    Traceback (most recent call last):
    ...
    ValueError: machine 'v10' is unknown (did you mean 'v100'?); known: a100, cpu, h100, h200, v100, or a .toml file
    """
    path = Path(name)
    if path.suffix != ".toml":
        path = FOLDER / f"{str(name).lower()}.toml"
        if path.stem not in names():
            known = names()
            raise ValueError(
                f"machine {str(name)!r} is unknown{nearest(str(name).lower(), known)}; "
                f"known: {', '.join(known)}, or a .toml file"
            )
    try:
        data = tomllib.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"machine profile {str(path)!r} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"machine profile {str(path)!r} is not TOML: {error}") from error
    return parse(path.stem, data)


def parse(name: str, data: Mapping[str, Any]) -> Machine:
    """From the content of a profile; what is wrong with it is named by its key."""
    tables: dict[str, type[Device | Link | Pcie | Host | Launch]] = {
        "device": Device,
        "inside": Link,
        "between": Link,
        "pcie": Pcie,
        "host": Host,
        "launch": Launch,
    }
    known = ["title", "devices_per_node", "half", "accelerator", *tables]
    for key in data:
        if key not in known:
            raise ValueError(f"machine {name!r}: {key} is unknown{nearest(key, known)}; known: {', '.join(known)}")
    parts = {key: _table(kind, f"machine {name!r}: {key}", data.get(key)) for key, kind in tables.items()}
    count = data.get("devices_per_node")
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"machine {name!r}: devices_per_node={count!r} must be a whole number, at least 1")
    half = data.get("half", "bf16")
    if half not in ("bf16", "fp16"):
        raise ValueError(f'machine {name!r}: half={half!r} must be "bf16" or "fp16"')
    accelerator = data.get("accelerator", True)
    if not isinstance(accelerator, bool):
        raise ValueError(f"machine {name!r}: accelerator={accelerator!r} must be true or false")
    for key in ("crowded", "interrupted"):
        if getattr(parts["launch"], key) < 1:
            raise ValueError(f"machine {name!r}: launch.{key} is how many times as long, so at least 1")
    efficiency = parts["device"].efficiency
    if efficiency > 1:
        raise ValueError(f"machine {name!r}: device.efficiency={efficiency!r} must be at most 1")
    title = str(data.get("title", name))
    return Machine(
        name=name, title=title, devices_per_node=count, half=half, accelerator=accelerator, **parts
    )  # fmt: skip


def _table(kind: type[Device | Link | Pcie | Host | Launch], path: str, values: object) -> Any:
    optional = [entry.name for entry in fields(kind) if entry.default is not MISSING]
    if values is None and len(optional) == len(fields(kind)):
        values = {}
    if not isinstance(values, Mapping):
        raise ValueError(f"{path} must be a table")
    known = [entry.name for entry in fields(kind)]
    for key, value in values.items():
        if key not in known:
            raise ValueError(f"{path}.{key} is unknown{nearest(key, known)}; known: {', '.join(known)}")
        number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
        if not number or (value == 0 and key not in optional):
            raise ValueError(f"{path}.{key}={value!r} must be a positive number")
    missing = [key for key in known if key not in values and key not in optional]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}")
    return kind(**values)
