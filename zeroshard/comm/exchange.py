"""Small values that the hosts of all ranks exchange, without the device.

The host knows the values that the ranks must agree on. The device may still compute the backward before. So these
values travel between the hosts, over Gloo, also where model states travel over NCCL.

The ranks exchange by *recursive doubling*. In every round, each rank swaps what it knows with one partner, and the
distance to the partner doubles. So a thousand ranks need ten rounds, and a rank talks to ten others. Gloo's own
all-reduce is a ring of two thousand hops there.

Every message says what it is about. Ranks that exchange different things find out at once.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .watchdog import Watchdog

HEAD_BYTES = 4096
"""Bytes of a message that travel at once. A longer message has a second part, whose size the first part tells."""
SIZE_BYTES = 8
ABOUT_BYTES = 248
"""Bytes of the head that say what the message is about."""
HEAD, TAIL = 1, 2
"""Tags of the two parts."""

Join = Callable[[Tensor, Tensor], Tensor]
"""Makes one message of two. The order of joining does not count."""


class DisagreementError(RuntimeError):
    """Ranks did different things. The message names the rank, the unit and the cause."""


class Exchange:
    """The hosts of all ranks. All its methods are collective, and block until the last rank has come."""

    def __init__(self, group: Any, rank: int, world: int, patience: float, watchdog: Watchdog) -> None:
        """``group`` carries single messages between two ranks. A rank is waited for ``patience`` seconds."""
        self._group, self._rank, self._world = group, rank, world
        self._patience, self._watchdog = patience, watchdog
        self._doubling = 1 << (world.bit_length() - 1)
        """The largest power of two that is not above the world.

        A rank from this number on gives its values to the rank that is lower by this number, and gets the result there.
        """

    def maximum(self, values: list[int], where: str) -> list[int]:
        """The element-wise maximum over all ranks. All ranks give the same number of values."""
        mine = torch.tensor(values, dtype=torch.int64, device="cpu").view(torch.uint8)

        def higher(one: Tensor, other: Tensor) -> Tensor:
            return torch.maximum(one.view(torch.int64), other.view(torch.int64)).view(torch.uint8)

        found: list[int] = self._joined(mine, higher, where, f"{len(values)} numbers").view(torch.int64).tolist()
        return found

    def gather(self, value: object, where: str) -> list[Any]:
        """Every rank's Python value, in rank order."""

        def both(one: Tensor, other: Tensor) -> Tensor:
            return _pack({**_unpack(one), **_unpack(other)})

        values = _unpack(self._joined(_pack({self._rank: value}), both, where, "values"))
        return [values[rank] for rank in range(self._world)]

    def from_first(self, value: object, where: str) -> Any:
        """Rank 0's Python value."""
        mine = _pack(value) if self._rank == 0 else torch.empty(0, dtype=torch.uint8, device="cpu")
        return _unpack(self._joined(mine, lambda one, other: one if one.numel() else other, where, "a value"))

    def _joined(self, known: Tensor, join: Join, where: str, kind: str) -> Tensor:
        """Joins the messages of all ranks, in rounds."""
        self._watchdog.note(where)
        about = f"{where.partition(',')[0]} ({kind})"
        deadline = time.monotonic() + self._patience
        with self._watchdog.blaming(where, half_done=True):
            if self._rank >= self._doubling:
                return self._swap(self._rank - self._doubling, known, about, deadline)
            follower = self._rank + self._doubling
            if follower < self._world:
                known = join(known, self._receive(follower, about, deadline))
            distance = 1
            while distance < self._doubling:
                known = join(known, self._swap(self._rank ^ distance, known, about, deadline))
                distance *= 2
            if follower < self._world:
                self._complete(self._send(follower, known, about), follower, deadline)
            return known

    def _swap(self, partner: int, mine: Tensor, about: str, deadline: float) -> Tensor:
        sends = self._send(partner, mine, about)
        try:
            found = self._receive(partner, about, deadline)
        except DisagreementError:
            self._complete(sends, partner, deadline)  # the partner must hear of it, too
            raise
        self._complete(sends, partner, deadline)
        return found

    def _send(self, partner: int, message: Tensor, about: str) -> list[tuple[dist.Work, Tensor]]:
        """Starts to send a message. Returns what is under way."""
        text = about.encode()[:ABOUT_BYTES].ljust(ABOUT_BYTES)
        start = torch.frombuffer(bytearray(message.numel().to_bytes(SIZE_BYTES, "little") + text), dtype=torch.uint8)
        first = message[: HEAD_BYTES - start.numel()]
        head = torch.zeros(HEAD_BYTES, dtype=torch.uint8, device="cpu")
        head[: start.numel()] = start
        head[start.numel() : start.numel() + first.numel()] = first
        rest = message[first.numel() :].contiguous()
        parts = [(head, HEAD), (rest, TAIL)] if rest.numel() else [(head, HEAD)]
        with _naming(partner):
            return [(self._group.send([part], partner, tag), part) for part, tag in parts]

    def _receive(self, partner: int, about: str, deadline: float) -> Tensor:
        head = self._receive_part(partner, HEAD_BYTES, HEAD, deadline)
        start = _bytes_of(head[: SIZE_BYTES + ABOUT_BYTES])
        size, text = int.from_bytes(start[:SIZE_BYTES], "little"), start[SIZE_BYTES:]
        if text != about.encode()[:ABOUT_BYTES].ljust(ABOUT_BYTES):
            theirs = text.decode(errors="replace").rstrip()
            raise DisagreementError(
                f"rank {self._rank} came to {about}, and rank {partner} came to {theirs}: all ranks must make the same "
                "calls, in the same order"
            )
        first = head[len(start) : len(start) + size]
        if size == first.numel():
            return first
        return torch.cat([first, self._receive_part(partner, size - first.numel(), TAIL, deadline)])

    def _receive_part(self, partner: int, size: int, tag: int, deadline: float) -> Tensor:
        part = torch.empty(size, dtype=torch.uint8, device="cpu")
        with _naming(partner):
            work = self._group.recv([part], partner, tag)
        self._complete([(work, part)], partner, deadline)
        return part

    def _complete(self, works: list[tuple[dist.Work, Tensor]], partner: int, deadline: float) -> None:
        with _naming(partner):
            for work, _ in works:
                work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))


@contextmanager
def _naming(partner: int) -> Iterator[None]:
    """Says in an error of Gloo which rank the message was for, or from."""
    try:
        yield
    except RuntimeError as error:
        raise dist.DistNetworkError(f"no message passed between this rank and rank {partner}: {error}") from error


def _pack(value: object) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _unpack(message: Tensor) -> Any:
    return pickle.loads(_bytes_of(message))


def _bytes_of(message: Tensor) -> bytearray:
    content = bytearray(message.numel())
    torch.frombuffer(content, dtype=torch.uint8).copy_(message)
    return content
