"""What a user may ask of ZeRO-Offload, and all that can be wrong with it by itself.

What other options leave without effect or sense is refused by ``config.py``, which sees them all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, Self

import torch

from .checks import dtype_named, nearest, require_count, require_flag

LEAST = {"delayed_update_after": 0, "device_memory": 1, "threads": 1, "host_memory": 1, "seed": 0}
"""What options that count something are at least."""


class Conflict(NamedTuple):
    """What is wrong with values that are right each for itself."""

    between: tuple[str, ...]
    """Options."""
    text: str


@dataclass(frozen=True, kw_only=True)
class Offload:
    """Optimizer states and gradients live in host memory, and the host updates them (ZeRO-Offload).

    ``offload="cpu"`` stands for ``Offload()``. Results are those of a step that waits for the host, whatever overlaps.
    """

    parameters: Literal["device", "cpu"] = "device"
    """Stage 3: "cpu" keeps the parameters' shards in host memory too; units come to the device as they are needed."""
    update_in_backward: bool = False
    """Update a unit as soon as its gradient has landed, while backward goes on.

    Saves the host's buffer of gradients (2 bytes a parameter) and time. There is no global norm yet at that moment, so
    it excludes clipping, loss scaling and accumulation: one backward a step.
    """
    delayed_update_after: int | None = None
    """After this many steps, run each step on parameters that are one update older, while the host makes the newest.

    The paper's delayed parameter update; it used 40. None never delays.
    """
    host_fraction: float | Literal["auto"] = 1.0
    """Share of the parameters whose states live on the host; those that forward needs first stay on the device.

    "auto" leaves as many on the device as ``device_memory`` has room for.
    """
    device_memory: int | None = None
    """With ``host_fraction="auto"``: bytes of the device's memory for model states. By default 60% of what is free."""
    moments: torch.dtype = torch.float32
    """Of the optimizer's moments. bf16 takes 4 bytes a parameter instead of 8, rounded stochastically."""
    split_master: bool = False
    """Keep the fp32 master as the bf16 parameter and a 16-bit remainder: the same bits, with less traffic in memory.

    Saves 2 bytes a parameter where the parameter is kept anyway: delayed, with ``parameters="cpu"``, or ``read_back``.
    """
    read_back: bool = False
    """With ``split_master``: read the parameter back from the device for the update instead of keeping it on the host.

    Saves 2 bytes a parameter of host memory for 2 more over PCIe, 6 in all.
    """
    threads: int | None = None
    """Threads that update. By default the cores this rank may use, divided by the ranks on this machine; where a GPU is
    to be driven one less, and three less of many where backward goes on meanwhile."""
    host_memory: int | None = None
    """Bytes of host memory that this rank may use. By default what is available, divided by the ranks here."""
    seed: int = 0
    """Of the stochastic rounding of bf16 moments."""
    blocking: bool = False
    """``step()`` waits for the host. The results are the same; for timing and debugging."""

    def __post_init__(self) -> None:
        for mistake in self._mistakes():
            raise ValueError(mistake)

    @property
    def beside_backward(self) -> bool:
        """Whether the host updates while backward goes on."""
        return self.update_in_backward or self.delayed_update_after is not None

    @classmethod
    def parse(cls, value: object) -> Self | None:
        if value is None or isinstance(value, cls):
            return value
        if value == "cpu":
            return cls()
        if isinstance(value, Mapping):
            _, mistakes = cls.examine(value)
            if mistakes:
                raise ValueError(mistakes[0])
            return cls(**_with_dtype(value))
        raise ValueError(f'offload={value!r} must be "cpu", "auto", a zeroshard.Offload, or None')

    @classmethod
    def examine(cls, table: Mapping[str, Any]) -> tuple[Self, list[str]]:
        """All that is wrong with a table of a configuration file, and what is left of it without those values."""
        known = [entry.name for entry in fields(cls)]
        mistakes, good = [], {}
        for name, value in table.items():
            if name not in known:
                mistakes.append(f"offload.{name} is unknown{nearest(str(name), known)}; known: {', '.join(known)}")
                continue
            try:
                good_value = _with_dtype({name: value})[name]
                _check_value(name, good_value)
            except ValueError as error:
                mistakes.append(str(error))
            else:
                good[name] = good_value
        left = object.__new__(cls)  # not by its constructor, which raises at the first mistake
        for entry in fields(cls):
            object.__setattr__(left, entry.name, good.get(entry.name, entry.default))
        rejected = {name for name in table if name in known and name not in good}
        return left, [*mistakes, *(one.text for one in left.conflicts() if rejected.isdisjoint(one.between))]

    def _mistakes(self) -> Iterator[str]:
        for entry in fields(self):
            try:
                _check_value(entry.name, getattr(self, entry.name))
            except ValueError as error:
                yield str(error)
        yield from (conflict.text for conflict in self.conflicts())

    def conflicts(self) -> Iterator[Conflict]:
        """Good values that leave each other without effect or sense."""
        fraction, delayed = self.host_fraction, self.delayed_update_after is not None
        if fraction == 0:
            for entry in fields(self):
                if entry.name != "host_fraction" and getattr(self, entry.name) != entry.default:
                    yield Conflict(
                        (entry.name, "host_fraction"),
                        f"offload.{entry.name} has no effect with host_fraction=0, which leaves all states on the "
                        "device; leave it out, or raise host_fraction",
                    )
            return
        if self.device_memory is not None and fraction != "auto":
            yield Conflict(
                ("device_memory", "host_fraction"),
                'offload.device_memory has no effect without host_fraction="auto"; leave it out',
            )
        if self.read_back and not self.split_master:
            yield Conflict(
                ("read_back", "split_master"),
                "offload.read_back needs split_master=True: only the high half of a split master is on the device",
            )
        if self.read_back and self.parameters == "cpu":
            yield Conflict(
                ("read_back", "parameters"),
                'offload.read_back has nothing to read back with parameters="cpu"; leave it out',
            )
        if self.parameters == "cpu" and fraction != 1:
            yield Conflict(
                ("host_fraction", "parameters"),
                f"offload.host_fraction={fraction!r} keeps states on the device whose parameters rest on the host with "
                'parameters="cpu"; leave one out',
            )
        if delayed and fraction != 1:
            yield Conflict(
                ("delayed_update_after", "host_fraction"),
                f"offload.delayed_update_after delays what the host updates alone; with host_fraction={fraction!r} the "
                "rest would run ahead; leave one out",
            )
        if self.read_back and delayed:
            yield Conflict(
                ("read_back", "delayed_update_after"),
                "offload.read_back would read parameters that a delayed update has not reached; leave one out",
            )
        if self.update_in_backward and delayed:
            yield Conflict(
                ("update_in_backward", "delayed_update_after"),
                "offload.update_in_backward and delayed_update_after exclude each other; leave one out (with clipping "
                "or accumulation: update_in_backward)",
            )


def _check_value(name: str, value: Any) -> None:
    """Refuses what no option of this name can be, whatever the others are."""
    if name in ("update_in_backward", "split_master", "read_back", "blocking"):
        require_flag(f"offload.{name}", value)
    elif name in LEAST:
        if value is not None or name == "seed":
            require_count(f"offload.{name}", value, LEAST[name])
    elif name == "parameters":
        if value not in ("device", "cpu"):
            raise ValueError(f'offload.parameters={value!r} must be "device" or "cpu"')
    elif name == "host_fraction":
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value != "auto" and not (is_number and 0 <= value <= 1):
            raise ValueError(f'offload.host_fraction={value!r} must be a number from 0 to 1, or "auto"')
    elif value not in (torch.float32, torch.bfloat16):
        raise ValueError(f"offload.{name}={value!r} must be torch.float32 or torch.bfloat16")


def _with_dtype(table: Mapping[str, Any]) -> dict[str, Any]:
    """Of a configuration file, where dtypes are strings."""
    moments = table.get("moments")
    return {**table, "moments": dtype_named("offload.moments", moments)} if isinstance(moments, str) else dict(table)
