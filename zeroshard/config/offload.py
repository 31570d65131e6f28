"""The options of ZeRO-Offload, and the conflicts among them.

Conflicts with other options of ``shard()`` are listed by ``Config`` in ``options.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, Self, cast

import torch

from ..system.cores import MOST_THREADS
from .checks import AUTO, Mistake, Options, list_of, must, unsigned, whole
from .layout import ALIGNMENT

ALLOWANCES = ("moments", "update_in_backward", "delayed_update_after")
"""The options that change results, or what a training loop may do."""

_fraction = must('be a number from 0 to 1, or "auto"', lambda value: value == "auto" or 0 <= value <= 1)
_moments = must(
    'be torch.float32, torch.bfloat16 or "8bit"', lambda value: value in (torch.float32, torch.bfloat16, "8bit")
)
_allowances = must(f"name only {', '.join(ALLOWANCES)}", lambda names: set(names) <= set(ALLOWANCES))


@dataclass(frozen=True, kw_only=True)
class Offload(Options):
    """Optimizer states and gradients live in host memory, and the host updates them (ZeRO-Offload).

    ``offload="cpu"`` stands for ``Offload()``. Results are those of a step that waits for the host, except with
    ``delayed_update_after``.
    """

    path = "offload."
    accepted = '"cpu", "auto", a zeroshard.Offload, zeroshard.Offload.auto(...), or None'

    parameters: Literal["device", "cpu"] = "device"
    """Stage 3: with "cpu" the parameters' shards rest in host memory too. A unit comes to the device when needed."""
    update_in_backward: bool = False
    """Update a unit as soon as its gradient is in host memory, while backward goes on.

    Saves time, and the host's buffer of gradients (2 bytes a parameter). The global norm is not known at that moment.
    So this option excludes clipping, loss scaling and accumulation: there is one backward a step.
    """
    delayed_update_after: Annotated[int | None, whole(least=0)] = None
    """After this many steps, each step runs on parameters that are one update older, while the host makes the newest.

    This is the delayed parameter update of the ZeRO-Offload paper, which used 40. None never delays.
    """
    host_fraction: Annotated[float | Literal["auto"], _fraction] = 1.0
    """Share of the parameters whose states live on the host. The states that forward needs first stay on the device.

    With "auto" as many states stay on the device as ``device_memory`` has room for.
    """
    device_memory: Annotated[int | None, whole(least=1)] = None
    """With ``host_fraction="auto"``: bytes of device memory for model states. By default 60% of the free memory."""
    moments: Annotated[torch.dtype | Literal["8bit"], _moments] = torch.float32
    """How the optimizer's moments are stored: ``torch.float32``, ``torch.bfloat16`` or ``"8bit"``.

    They take 8, 4 or 2.03 bytes a parameter. bf16 and 8 bits are rounded stochastically. In 8 bits every 64 elements
    share a scale; state dicts and checkpoints have the same numbers in bf16.
    """
    split_master: bool = False
    """Store the fp32 master as the bf16 parameter and a 16-bit remainder: the same bits, with less memory traffic.

    Needs ``precision="bf16"``. Also saves 2 bytes a parameter with ``delayed_update_after``, ``parameters="cpu"`` or
    ``read_back``.
    """
    read_back: bool = False
    """With ``split_master``: the update reads the parameter from the device, so the host needs no copy of it.

    Saves 2 bytes of host memory a parameter. A step moves 6 bytes a parameter over PCIe instead of 4.
    """
    threads: Annotated[int | None, whole(least=1, most=MOST_THREADS)] = None
    """Threads that update. By default the cores that this rank may use, divided by the ranks on this machine.

    With a GPU the default is one thread fewer. If the host updates during backward and there are many cores, the
    default is three threads fewer.
    """
    host_memory: Annotated[int | None, whole(least=1)] = None
    """Bytes of host memory that this rank may use. By default the free memory, divided by the ranks on this machine."""
    seed: Annotated[int, unsigned] = 0
    """Seed of the stochastic rounding of moments in bf16 and 8 bits. Moments in fp32 do not use it."""
    blocking: bool = False
    """``step()`` waits for the host. The results are the same. For timing and debugging."""

    @property
    def moment_bytes(self) -> float:
        """Bytes of one element of a moment, with its part of a scale."""
        return 1 + 1 / ALIGNMENT if isinstance(self.moments, str) else float(self.moments.itemsize)

    @property
    def beside_backward(self) -> bool:
        """Whether the host updates while backward goes on."""
        return self.update_in_backward or self.delayed_update_after is not None

    @classmethod
    def parse(cls, value: object) -> Self | None:
        """The offload that a value stands for: "cpu" has all defaults, "auto" or a table with ``allow`` is a choice."""
        if isinstance(value, OffloadChoice):
            return cast(Self, value)  # ``Config`` takes the choice out at once
        if value == AUTO or (isinstance(value, Mapping) and "allow" in value):
            return cast(Self, OffloadChoice.parse({} if value == AUTO else value))
        return cls() if value == "cpu" else super().parse(value)

    @staticmethod
    def auto(allow: Sequence[str] = (), **limits: Any) -> OffloadChoice:
        """``offload="auto"``, and what it may change beyond places: names of options of ``Offload``.

        ``allow`` names "moments", "update_in_backward" or "delayed_update_after". Without a name, results and the
        training loop stay as they are. ``threads``, ``host_memory`` and ``seed`` are limits, as in ``Offload``.

        >>> Offload.auto(allow=("moments",), host_memory=64 << 30).allow
        ('moments',)
        """
        return cast(OffloadChoice, OffloadChoice.parse({"allow": allow, **limits}))

    def conflicts(self) -> Iterator[Mistake]:
        fraction, delayed = self.host_fraction, self.delayed_update_after is not None
        if fraction == 0:
            for entry in fields(self):
                if entry.name != "host_fraction" and getattr(self, entry.name) != entry.default:
                    yield Mistake(
                        (entry.name, "host_fraction"),
                        f"offload.{entry.name} has no effect with host_fraction=0, which leaves all states on the "
                        "device; leave it out, or raise host_fraction",
                    )
            return
        if self.device_memory is not None and fraction != "auto":
            yield Mistake(
                ("device_memory", "host_fraction"),
                'offload.device_memory has no effect without host_fraction="auto"; leave it out',
            )
        if self.read_back and not self.split_master:
            yield Mistake(
                ("read_back", "split_master"),
                "offload.read_back needs split_master=True: only the high half of a split master is on the device",
            )
        if self.read_back and self.parameters == "cpu":
            yield Mistake(
                ("read_back", "parameters"),
                'offload.read_back has nothing to read back with parameters="cpu"; leave it out',
            )
        if self.parameters == "cpu" and fraction != 1:
            yield Mistake(
                ("host_fraction", "parameters"),
                f"offload.host_fraction={fraction!r} leaves states on the device whose parameters are on the host with "
                'parameters="cpu"; leave one out',
            )
        if delayed and fraction != 1:
            yield Mistake(
                ("delayed_update_after", "host_fraction"),
                f"offload.delayed_update_after delays what the host updates alone; with host_fraction={fraction!r} the "
                "rest would run ahead; leave one out",
            )
        if self.read_back and delayed:
            yield Mistake(
                ("read_back", "delayed_update_after"),
                "offload.read_back would read parameters that a delayed update has not reached; leave one out",
            )
        if self.update_in_backward and delayed:
            yield Mistake(
                ("update_in_backward", "delayed_update_after"),
                "offload.update_in_backward and delayed_update_after exclude each other; leave one out (with clipping "
                "or accumulation: update_in_backward)",
            )


@dataclass(frozen=True, kw_only=True)
class OffloadChoice(Options):
    """What ``offload="auto"`` may choose from, and the limits of what it chooses."""

    path = "offload."
    unknown = "offload.{name} is not given with allow=, by which auto chooses{nearest}; known: {known}"

    allow: Annotated[
        tuple[str, ...],
        list_of("names of options", str),
        _allowances,
    ] = ()
    """Options that may change results or the loop: "moments", "update_in_backward", "delayed_update_after"."""
    threads: Annotated[int | None, whole(least=1, most=MOST_THREADS)] = None
    """Threads that update, as in ``Offload``."""
    host_memory: Annotated[int | None, whole(least=1)] = None
    """Bytes of host memory that this rank may use, as in ``Offload``."""
    seed: Annotated[int, unsigned] = 0
    """Seed of the stochastic rounding, as in ``Offload``."""

    @property
    def limits(self) -> dict[str, Any]:
        """The options that every chosen ``Offload`` has."""
        return {"threads": self.threads, "host_memory": self.host_memory, "seed": self.seed}

    def __str__(self) -> str:
        """The argument of ``shard()``."""
        given = [f"{name}={value}" for name, value in self.limits.items() if value]
        if self.allow:
            names = ", ".join(f'"{name}"' for name in self.allow)
            given.insert(0, f"allow=({names}{',' * (len(self.allow) == 1)})")
        return f"offload=zeroshard.Offload.auto({', '.join(given)})" if given else 'offload="auto"'
