"""Machine profiles: the numbers that predicted times follow from, in data files with their sources (``machines/``).

A profile has the values that are reached, not those of the data sheet. Bandwidths are those of large messages, and
``efficiency`` is the share of the peak that the matrix products of a large transformer block reach.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from ...config.checks import nearest
from ...config.offload import Offload
from ...system import machine as facts
from ...system.parse import LARGEST_TOML, parse_toml, read_start
from ...system.words import quoted, word

FOLDER = Path(__file__).parent / "machines"
MOST_DEVICES = 1 << 20
"""Devices of a node."""
LARGEST, SMALLEST = 1e24, 1e-15
"""Bounds of the numbers in a profile, apart from 0. A number beyond them is a typing mistake."""
LONGEST_TITLE = 200
DEVICE_UPDATE_BYTES = 77
"""Bytes of memory traffic a parameter of a foreach AdamW on fp32 masters, with its temporaries; measured on an H200."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, or the processor cores of one rank."""

    memory: float
    """Bytes."""
    peak_16bit: float
    """FLOPs a second in bf16 and fp16."""
    peak_fp32: float
    """FLOPs a second in fp32."""
    bandwidth: float
    """Bytes a second of its memory. A calibrated value is the bandwidth that the update reaches."""
    efficiency: float
    """The share of the peak that very large products of a transformer reach."""
    half_work: float
    """The size of a 16-bit product, in multiply-adds (tokens · hidden² / M), that reaches half of this share."""
    traffic: float = 0.0
    """Bytes of memory traffic for every byte of activations that a forward writes. 0: ``efficiency`` includes it."""

    def rate(self, work: float, *, half: bool) -> float:
        """FLOPs a second in products of ``work`` multiply-adds.

        Small products lose a time that is the same in every precision. So a slower precision comes closer to its peak.
        """
        peak = self.peak_16bit if half else self.peak_fp32
        return peak * self.efficiency * work / (work + self.half_work * peak / self.peak_16bit)


@dataclass(frozen=True, kw_only=True)
class Link:
    """The connection between devices of a node, or between nodes."""

    latency: float
    """Seconds of one step of a ring, for messages of any size."""
    bandwidth: float
    """Bytes a second in each direction: of one device inside a node, of a whole node between nodes."""


@dataclass(frozen=True, kw_only=True)
class Pcie:
    """Bytes a second between one device and its host."""

    down: float
    """From device to host."""
    up: float
    """From host to device."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """The host memory that the devices of a node share."""

    memory: float
    """Bytes."""
    bandwidth: float
    """Bytes a second that the update reaches on all sockets together."""
    sockets: int = 1
    """Processor sockets. A process uses the memory of one socket."""
    cores: int = 0
    """The cores that update, on all sockets together. 0: not known, and memory alone bounds the update."""
    update_fp32: float = 0.0
    """Seconds in which one thread updates one parameter whose moments are in fp32. 0: not known."""
    update_bf16: float = 0.0
    """The same with moments in bf16."""
    update_8bit: float = 0.0
    """The same with moments in 8 bits."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Seconds that the thread which drives the device needs for one block, even if the block computes almost nothing.

    If the blocks of a model compute for less time than this, launching bounds the step. 0 seconds or a factor of 1
    mean: not known.
    """

    block: float = 0.0
    """Forward and backward."""
    recompute: float = 0.0
    """The additional seconds in the backward of a recomputed block."""
    communicate: float = 0.0
    """One gather or reduce, with the work around it."""
    host: float = 0.0
    """Seconds of the host's own threads for the update of a block, without the time of its memory traffic."""
    crowded: float = 1.0
    """Factor on launching while the host updates on the other cores."""

    def slower(self, factor: float) -> Launch:
        """The launching of a processor that takes ``factor`` times as long for it."""
        return replace(
            self,
            block=factor * self.block,
            recompute=factor * self.recompute,
            communicate=factor * self.communicate,
        )


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A node, and the links between nodes of this kind.

    >>> load("v100").devices_per_node
    16
    """

    name: str
    """The name of the file, which ``--machine`` takes."""
    title: str
    """What tables call this machine."""
    devices_per_node: int
    """Accelerators of a node, or ranks on a machine without any."""
    half: str = "bf16"
    """The 16-bit precision that this machine trains in."""
    accelerator: bool = True
    """True if devices have their own memory. Otherwise devices are ranks that share host memory."""
    device: Device
    """One accelerator, or the cores of one rank."""
    inside: Link
    """The links inside a node."""
    between: Link
    """The links between nodes."""
    pcie: Pcie
    """The connection between a device and its host."""
    host: Host
    """The host memory of a node."""
    launch: Launch = Launch()
    """How long the host needs to start the work of a device."""
    spread: tuple[float, float] = (1.0, 1.0)
    """The least and the most that a step of a machine like this took, divided by the planned time. A calibrated profile
    has 1 and 1."""

    def host_bandwidth(self, ranks: int) -> float:
        """Bytes a second for one rank, if this number of ranks of a node update at once."""
        return self.host.bandwidth / max(ranks, self.host.sockets)

    def host_arithmetic(self, ranks: int, offload: Offload) -> float:
        """Seconds that one rank's threads need for one parameter, however fast memory is. 0: not known."""
        threads = offload.threads or self.host.cores / max(ranks, self.host.sockets)
        wide = self.host.update_fp32 if offload.moments is torch.float32 else self.host.update_bf16
        return (self.host.update_8bit if offload.moments == "8bit" else wide) / threads if threads else 0.0

    def nodes(self, devices: int) -> int:
        return math.ceil(devices / self.devices_per_node)


def calibrated_file(title: str) -> Path:
    """The file of the profile that was measured on this machine. ``title`` is the device's own name."""
    name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "unknown"
    return facts.cache_folder() / f"machine-{name}.toml"


def names() -> list[str]:
    """The names of the profiles that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load(name: str | Path) -> Machine:
    """Loads a profile of the package by its name, or any file in the same format.

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
        data = parse_toml(read_start(path, LARGEST_TOML))
    except OSError as error:
        raise ValueError(f"machine profile {str(path)!r} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"machine profile {str(path)!r}: {error}") from error
    return parse(path.stem, data, path)


def parse(name: str, data: Mapping[str, Any], file: Path | None = None) -> Machine:
    """Makes a machine from the content of a profile. An error names the file, if there is one, and the wrong key."""
    where = f"machine {name!r}" if file is None else f"machine profile {str(file)!r}"
    tables: dict[str, type[Device | Link | Pcie | Host | Launch]] = {
        "device": Device,
        "inside": Link,
        "between": Link,
        "pcie": Pcie,
        "host": Host,
        "launch": Launch,
    }
    known = ["title", "devices_per_node", "half", "accelerator", "spread", *tables]
    for key in data:
        if key not in known:
            raise ValueError(f"{where}: {word(key)} is unknown{nearest(key, known)}; known: {', '.join(known)}")
    parts: dict[str, Any] = {}
    mistakes = []
    for key, kind in tables.items():
        try:
            parts[key] = _table(kind, key, data.get(key))
        except ValueError as error:
            mistakes.append(str(error))
    if mistakes:
        raise ValueError(f"{where}: {'; '.join(mistakes)}")
    count = data.get("devices_per_node")
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_DEVICES:
        raise ValueError(
            f"{where}: devices_per_node={quoted(count)} must be a whole number, from 1 to {MOST_DEVICES:,}"
        )
    half = data.get("half", "bf16")
    if half not in ("bf16", "fp16"):
        raise ValueError(f'{where}: half={quoted(half)} must be "bf16" or "fp16"')
    accelerator = data.get("accelerator", True)
    if not isinstance(accelerator, bool):
        raise ValueError(f"{where}: accelerator={quoted(accelerator)} must be true or false")
    if parts["launch"].crowded < 1:
        raise ValueError(f"{where}: launch.crowded is how many times as long, so at least 1")
    efficiency = parts["device"].efficiency
    if efficiency > 1:
        raise ValueError(f"{where}: device.efficiency={efficiency!r} must be at most 1")
    title = data.get("title", name)
    if not isinstance(title, str) or not title.isprintable() or len(title) > LONGEST_TITLE:
        raise ValueError(f"{where}: title={quoted(title)} must be a short text of one line")
    spread = _spread(data.get("spread", [1.0, 1.0]), where)
    return Machine(
        name=name, title=title, devices_per_node=count, half=half, accelerator=accelerator, spread=spread, **parts
    )  # fmt: skip


def _spread(value: object, where: str) -> tuple[float, float]:
    """The two factors of ``spread``: the first at most 1, the second at least 1."""
    if isinstance(value, list) and len(value) == 2 and all(type(factor) in (int, float) for factor in value):
        least, most = value
        if 0.1 <= least <= 1 <= most <= 10:
            return float(least), float(most)
    raise ValueError(f"{where}: spread={quoted(value)} must be two factors, such as [0.9, 1.2], around 1")


def _table(kind: type[Device | Link | Pcie | Host | Launch], path: str, values: object) -> Any:
    optional = [entry.name for entry in fields(kind) if entry.default is not MISSING]
    if values is None:
        values = {}
    if not isinstance(values, Mapping):
        raise ValueError(f"{path} must be a table")
    known = [entry.name for entry in fields(kind)]
    for key, value in values.items():
        if key not in known:
            raise ValueError(f"{path}.{word(key)} is unknown{nearest(key, known)}; known: {', '.join(known)}")
        number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
        if not number or (value == 0 and key not in optional):
            raise ValueError(f"{path}.{key}={quoted(value)} must be a positive number")
        if value != 0 and not SMALLEST <= value <= LARGEST:
            raise ValueError(f"{path}.{key}={quoted(value)} must be from {SMALLEST:g} to {LARGEST:g}")
        least = 1 if key == "sockets" else 0
        if key in ("sockets", "cores") and not (value % 1 == 0 and least <= value <= MOST_DEVICES):
            raise ValueError(f"{path}.{key}={quoted(value)} must be a whole number, from {least} to {MOST_DEVICES:,}")
    missing = [key for key in known if key not in values and key not in optional]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}")
    return kind(**values)
