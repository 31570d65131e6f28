"""Which units' states live on the host."""

from __future__ import annotations

from collections.abc import Sequence


def stay_on_device(sizes: Sequence[int], host_fraction: float) -> list[bool]:
    """For units in the order in which forward needs them: whose states stay on the device.

    The first ones do, because the next forward would wait for them first; as many as make up ``1 - host_fraction``.

    >>> stay_on_device([4, 2, 2, 2], host_fraction=0.3)
    [True, True, False, False]
    """
    return _first(sizes, round((1 - host_fraction) * sum(sizes)))


def stay_within(sizes: Sequence[int], bytes_on_device: float, budget: int) -> list[bool]:
    """The same by what a budget of bytes has room for, at so many bytes an element."""
    return _first(sizes, int(budget / bytes_on_device))


def _first(sizes: Sequence[int], room: int) -> list[bool]:
    """Those that fit, the first ones first; one that is too large does not keep smaller ones out."""
    chosen = []
    for size in sizes:
        chosen.append(size <= room)
        room -= size if chosen[-1] else 0
    return chosen
