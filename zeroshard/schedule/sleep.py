"""When a model's states may fall asleep in host memory, and what must be over before (``states/sleep.py``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm.fabric import Fabric
from ..optim.optimizer import ShardedOptimizer
from ..states.flat import Flat, Presence
from ..states.sleep import fall_asleep, resting_bytes, wake_up
from ..states.unit import Unit, check_no_block_open
from ..system import compat, machine
from ..system.sizes import size_text
from .hooks import Schedule


class Sleep:
    """Puts the states of one model to sleep, and wakes them."""

    def __init__(
        self, units: Sequence[Unit], schedule: Schedule, fabric: Fabric, optimizer: ShardedOptimizer | None
    ) -> None:
        self._units, self._schedule, self._fabric, self._optimizer = units, schedule, fabric, optimizer
        self._flats = [flat for unit in units for flat in unit.flats]
        self._states: dict[Flat, list[Tensor]] = {}
        """The optimizer's states that were on the device when they fell asleep."""

    @property
    def asleep(self) -> bool:
        """Whether states are asleep."""
        return any(flat.presence is Presence.ASLEEP for flat in self._flats)

    @torch.no_grad()
    def begin(self) -> None:
        """Brings all model states on the device to host memory."""
        awake = [flat for flat in self._flats if flat.presence is not Presence.ASLEEP]
        with self._fabric.watchdog.during("offload_states()"):
            self._settle(awake)
            device, on_device = self._fabric.device, self._states_on_device()
            self._states.update({flat: [s for s in on_device.get(flat, ()) if s.device == device] for flat in awake})
            self._check_room(sum(resting_bytes(flat, self._states[flat]) for flat in awake))
            self._wait_for_device()
            for flat in awake:
                fall_asleep(flat, self._states[flat])
            if self._fabric.device.type == "cuda":
                torch.cuda.empty_cache()  # so that other processes can have the memory too

    @torch.no_grad()
    def end(self) -> None:
        """Brings sleeping states back to the device."""
        with self._fabric.watchdog.during("restore_states()"):
            for flat in self._flats:
                wake_up(flat, self._states.get(flat, ()), self._fabric.device)
                self._states.pop(flat, None)  # not before: if memory runs out, the next call needs them
            self._wait_for_device()  # streams of gathers use the memory next

    def _settle(self, awake: Sequence[Flat]) -> None:
        """Waits until nothing is under way. Raises if that would lose something."""
        doing = "offload_states()"
        check_no_block_open(self._units, doing)
        if compat.in_backward():
            raise RuntimeError(f"{doing} inside a backward; call it after step()")
        self._schedule.discard_failed_backward()
        if self._optimizer is not None:
            self._optimizer.settle(doing)
        for flat in awake:
            flat.writes.check()
            flat.wait_if_whole()
        self._schedule.lifetimes.release_all(doing)

    def _states_on_device(self) -> dict[Flat, list[Tensor]]:
        return {} if self._optimizer is None else self._optimizer.piece_states.by_flat()

    def _check_room(self, needed: int) -> None:
        room = machine.available_memory() // self._fabric.local_ranks
        if self._fabric.maximum([int(needed > room)], "the agreement on memory for offload_states()")[0]:
            raise RuntimeError(
                f"offload_states() needs {size_text(needed)} of host memory on rank {self._fabric.rank}, which has "
                f"{size_text(room)}, and on some rank there is too little; free host memory, or use more ranks"
            )

    def _wait_for_device(self) -> None:
        if self._fabric.device.type == "cuda":
            torch.cuda.synchronize(self._fabric.device)
