"""How many blocks ``Activations(recompute="auto")`` recomputes: as few as the device has room for.

Until this is decided, every block is recomputed. The second step is measured: the first one makes the optimizer's
states and learns the order of units. Each forward of a block tells how many bytes autograd would keep of it. Whenever a
block is recomputed, the peak of memory until then, and the bytes of the blocks that would still be kept at that moment,
say what the peak would be if only the first blocks were recomputed.

A forward that may need more than what was measured recomputes every block and is measured itself: one with larger
inputs, with more forwards before it whose backward has not begun, or the first further one in a step. The ranks agree
on a decision in ``step()``. Each rank compares its own inputs, because what it recomputes is nobody else's concern: a
block of one unit makes the same collectives whether or not it is recomputed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..config.bounds import FRAGMENTS, KEPT_FRAGMENTS
from ..system import compat, device
from ..system.sizes import size_text
from ..system.structures import tensors_in

NOTHING = -1
"""The vote of a rank that has measured nothing new."""

Sizes = tuple[tuple[int, ...], ...]


def sizes_of(inputs: object) -> Sizes:
    """The shapes of all tensors that a model is given."""
    return tuple(tuple(tensor.shape) for tensor in tensors_in(inputs))


def fragments(on_gpu: bool) -> float:
    """The share of a device that kept activations leave unused, because free memory is in pieces that are too small."""
    return KEPT_FRAGMENTS if on_gpu and torch.cuda.is_available() and not compat.segments_expand() else FRAGMENTS


class Load(NamedTuple):
    """What the memory of a forward depends on."""

    sizes: Sizes
    waiting: int
    """The forwards that wait for their backward, this one included."""
    further: bool
    """True if the step had a forward before this one. Gradients add up then."""

    def within(self, other: Load) -> bool:
        """True if this forward needs no more memory than the other."""
        return (
            self.waiting <= other.waiting
            and self.further <= other.further
            and [len(shape) for shape in self.sizes] == [len(shape) for shape in other.sizes]
            and all(
                a <= b
                for mine, its in zip(self.sizes, other.sizes, strict=True)
                for a, b in zip(mine, its, strict=True)
            )
        )


class Choice:
    """Decides how many blocks are recomputed, and measures what the decision needs."""

    def __init__(
        self,
        blocks: list[nn.Module],
        place: torch.device,
        sharing: int,
        *,
        inputs_count: bool,
        has_states: Callable[[], bool],
        backwards: Callable[[], int],
    ) -> None:
        """``inputs_count``: inputs of recomputed blocks are not on the device, so a kept block costs its inputs too.

        ``sharing``: ranks on this device. ``has_states``: whether the optimizer has its states, so that steps can be
        measured. ``backwards``: the number of backward passes until now.
        """
        self._modules, self._device, self._sharing = blocks, place, sharing
        self._inputs_count, self._has_states, self._backwards = inputs_count, has_states, backwards
        self.decided: int | None = None
        """The first blocks that are recomputed, so many."""
        self.reason: str | None = None
        self.measuring = False
        self._known: list[Load] = []
        """Forwards that the decision is for."""
        self._measured: list[Load] = []
        """Forwards that were measured since the last decision."""
        self._waiting, self._seen_backwards, self._further = 0, 0, False
        self._steps = 0
        self._forget()

    def _forget(self) -> None:
        self._measured.clear()
        self._kept: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
        """By call: the block and the bytes that would be kept of it now."""
        self._peaks = [0] * (1 + len(self._modules))
        """By the number of blocks that are recomputed: the peak so far, if only these were."""
        self._largest = 0
        """Bytes that the largest block would keep."""

    def start(self, decided: int, sizes: Sizes, reason: str) -> None:
        """Takes a decision of the plan, for inputs of these sizes."""
        self.decided, self.reason, self._known = decided, reason, [Load(sizes, 1, further=False)]

    # -- measuring ------------------------------------------------------------------------------------------------

    def begin_forward(self, inputs: object) -> int:
        """Called as a forward of the model begins that can have a backward. Returns how many blocks it recomputes."""
        backwards = self._backwards()
        self._waiting = self._waiting + 1 if backwards == self._seen_backwards else 1
        self._seen_backwards = backwards
        load, self._further = Load(sizes_of(inputs), self._waiting, self._further), True
        if not load.sizes:
            raise ValueError(
                'activations.recompute="auto" follows the sizes of the tensors that the model is given, and here it is '
                "given none; give a share or names of blocks"
            )
        if self.decided is not None and any(load.within(known) for known in self._known):
            self.measuring = False
            return self.decided
        self.measuring = self._steps > 0 and self._has_states()
        if self.measuring:
            self._note()
            self._measured.append(load)
            device.begin_peak(self._device)
        return len(self._modules)

    def end_forward(self) -> None:
        """Called after the forward of the model."""
        if self.measuring:
            self._note()
        self.measuring = False

    def end_step(self) -> None:
        """The next forward is the first of a step."""
        self._further = False
        self._steps += 1

    @contextmanager
    def saving(self, call: object, block: int, inputs: object) -> Iterator[None]:
        """Counts the bytes that autograd would keep of a block whose forward runs inside."""
        own = self._modules[block]
        exists = {_key(tensor) for tensor in (*own.parameters(), *own.buffers(), *self._free_inputs(inputs))}
        size = 0
        pack, unpack = compat.saved_tensor_hooks()

        def count(tensor: Tensor) -> Any:
            nonlocal size
            key = _key(tensor)
            if key not in exists:
                storage = compat.local_tensor(tensor).untyped_storage()
                size += storage.nbytes()
                exists.add(key)
                weakref.finalize(storage, exists.discard, key)  # a later storage may have the same key
            return pack(tensor)

        with torch.autograd.graph.saved_tensors_hooks(count, unpack):
            yield
        self._kept[call] = block, size
        self._largest = max(self._largest, size)

    def _free_inputs(self, inputs: object) -> Iterable[Tensor]:
        """The inputs of a block that exist on the device whether or not the block is recomputed."""
        for tensor in tensors_in(inputs):
            if not (self._inputs_count and tensor.requires_grad):
                yield tensor

    def recomputes(self, call: object) -> None:
        """Called when a block that was measured is recomputed."""
        if call in self._kept:
            self._note()
            del self._kept[call]

    def _note(self) -> None:
        """Notes the peak until now, if other numbers of blocks were recomputed."""
        if not self._measured:
            return
        sizes = [0] * len(self._peaks)
        for block, size in self._kept.values():
            sizes[block] += size
        extra = list(accumulate(reversed(sizes)))[::-1]  # of this block and of all after it
        now = device.peak_memory(self._device)
        self._peaks = [max(peak, now + more) for peak, more in zip(self._peaks, extra, strict=True)]

    # -- deciding -------------------------------------------------------------------------------------------------

    @property
    def vote(self) -> int:
        """The number of blocks that this rank must recompute, by what it has measured. ``NOTHING`` without news."""
        self._note()
        if not self._measured:
            return NOTHING
        room = self._room() - self._largest
        return next((first for first, peak in enumerate(self._peaks) if peak <= room), len(self._modules))

    def _room(self) -> float:
        """The largest peak that may be planned for."""
        there = device.used_memory(self._device) + device.available_memory(self._device, self._sharing)
        return there * (1 - fragments(self._device.type == "cuda"))

    def settle(self, agreed: int) -> str | None:
        """Takes the largest vote of all ranks. Returns a message if that decides something new."""
        if agreed == NOTHING:
            return None
        before, mine = self.decided, self.vote
        self.decided = max(agreed, before or 0)
        if self.decided != before:
            device.release_cached(self._device)  # it was cut for other blocks to be recomputed
            taken, free = self._peaks[self.decided] - self._peaks[-1], max(0.0, self._room() - self._peaks[-1])
            self.reason = said(self.decided, len(self._modules), taken, free)
            if mine < self.decided:
                self.reason = (
                    f"recomputes {self.decided} of {len(self._modules)} blocks: another rank has no room for less"
                )
        self._known = [load for load in self._known if not any(load.within(new) for new in self._measured)]
        self._known += self._measured
        self._forget()
        return self.reason if self.decided != before else None


def said(recomputed: int, blocks: int, taken: float, free: float) -> str:
    """The decision in words. ``taken``: bytes of the activations that are kept. ``free``: bytes there are for them.

    >>> said(12, 48, 30.1e9, 31.8e9)
    "recomputes 12 of 48 blocks: the others' activations take 30.1 GB of the 31.8 GB free"
    """
    if recomputed == blocks:
        return f"recomputes all {blocks} blocks: {size_text(free)} are free, too little for the activations of one more"
    whose = "the others'" if recomputed else "their"
    sizes = f"{size_text(taken)} of the {size_text(free)} free"
    return f"recomputes {recomputed} of {blocks} blocks: {whose} activations take {sizes}"


def _key(tensor: Tensor) -> int:
    return compat.storage_key(compat.local_tensor(tensor))
