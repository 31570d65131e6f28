"""The gradients of one flat in one step: what this rank computed, what all ranks reduced, what the optimizer takes.

- **local**: a whole flat that receives this rank's gradients as autograd produces them.
- **stash**: the averaged gradient of the range that this rank updates, where gradients live at rest. Where the table
  says whole, it is a view of the whole local buffer, reduced in place; else it is a shard and local is freed at once.
- **accumulator**: the stash in the accumulation dtype, which exists only while more than one micro-batch adds up.

Where gradients live on the host, the stash is delivered there as soon as it is averaged (offload/pipeline.py).

``parameter.grad`` is the truth about what the user wants: once it was shown, taking it away (``zero_grad``) discards
the gradient. It shows the gradient itself where that is whole, averaged and unscaled, and a placeholder elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..comm import parallel
from ..comm.fabric import Fabric
from ..comm.lane import Done, Pending
from ..config.bounds import DEPOSIT_BYTES
from ..config.layout import FlatLayout, Range
from ..config.options import Precision
from ..config.table import Extent, StateTable
from ..offload.shard import HostShard
from ..recompute.arena import DeviceArena, Slot
from ..system import compat
from .placeholder import Placeholders
from .shown_gradients import ShownGradients


@dataclass
class _Reduction:
    """A reduce under way. ``local`` is held until it is over, because the collective reads it."""

    pending: Pending | None
    local: Tensor
    out: Tensor
    complete: bool
    """Whether every parameter had its gradient when it began."""


class FlatGradient:
    """Buffers and bookkeeping for the gradients of one flat."""

    def __init__(
        self,
        label: str,
        layout: FlatLayout,
        parameters: Sequence[nn.Parameter],
        dtype: torch.dtype,
        *,
        own: Range,
        table: StateTable,
        precision: Precision,
        fabric: Fabric,
        placeholders: Placeholders,
    ) -> None:
        self.label, self.layout, self.parameters, self.dtype = label, layout, parameters, dtype
        self.own = own
        self._table, self._fabric = table, fabric
        self._reduce_dtype = (
            (precision.reduce or dtype) if fabric.data_parallel > 1 else dtype
        )  # alone nothing is added up
        self._accumulate_dtype = torch.promote_types(dtype, precision.accumulate)
        self.visible = table.optimizer.extent is Extent.WHOLE and precision.loss_scale is None
        count = len(parameters)
        self._arrived: dict[int, Tensor] = {}
        self._arrived_bytes = 0
        self._local: Tensor | None = None
        self._written = [False] * count
        self._fired: set[int] = set()
        self._inflight: list[_Reduction] = []
        self._stash: Tensor | None = None
        self._accumulator: Tensor | None = None
        self._factor: Tensor | None = None
        self._shown = ShownGradients(parameters, layout.slots, dtype, placeholders)
        self._arena: DeviceArena | None = None
        self._slot_in_arena: Slot | None = None
        self._host: HostShard | None = None
        self._deliver: Callable[[Tensor, bool], bool] | None = None
        self.used = [False] * count
        """Which parameters got a gradient since the last step: on this rank, and after the agreement on any."""
        self.awaited = False
        """Some rank holds gradients that the others have not seen, so all must reduce."""

    def live_in(self, arena: DeviceArena) -> None:
        """Reduced gradients lie in an arena, where they wait for the step and no user sees them."""
        if not self.visible and not self.on_host:
            self._arena = arena

    def live_on(self, host: HostShard, deliver: Callable[[Tensor, bool], bool]) -> None:
        """Averaged gradients go to the host: ``deliver`` takes one, or returns False if it is to stay for the step.

        It is told whether the gradient is complete, or some parameters were not used or are still to come.
        """
        self._host, self._deliver = host, deliver
        self.visible = False

    @property
    def on_host(self) -> bool:
        """Whether averaged gradients live in host memory."""
        return self._host is not None

    @property
    def complete(self) -> bool:
        """Every parameter has its gradient of this backward."""
        return len(self._fired) == len(self.parameters)

    @property
    def unreduced(self) -> bool:
        """This rank holds gradients that the others have not seen."""
        return self._local is not None or bool(self._arrived) or self.awaited

    # -- during backward ------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """A new backward pass: completeness is asked anew, and autograd gets ``parameter.grad`` to itself."""
        if self._host is not None and self._host.updates_early:
            self._host.check_not_updated(stashed=self.present)
        self.hide()
        self._fired.clear()
        if self._factor is not None:  # what comes now is not clipped by what was asked before
            if self._held is not None:
                self._held.mul_(self._factor)
            if self._host is not None and self._host.received:
                self._host.rescale(self._factor)
        self._factor = None

    def add(self, index: int, gradient: Tensor) -> None:
        """Takes one parameter's gradient from autograd. Additive: a parameter may come more than once."""
        if gradient.is_sparse:
            raise RuntimeError(
                f"parameter {self.layout.slots[index].name!r} got a sparse gradient, which zeroshard cannot shard; "
                "build the embedding with sparse=False"
            )
        if index in self._arrived:
            self._deposit()
        self._arrived[index] = gradient
        self._arrived_bytes += gradient.nbytes
        self._fired.add(index)
        self.used[index] = True
        if self._arrived_bytes >= DEPOSIT_BYTES or self.complete:
            self._deposit()

    def _deposit(self) -> None:
        """Moves what has arrived into the local buffer, many small gradients with one kernel."""
        arrived, self._arrived, self._arrived_bytes = self._arrived, {}, 0
        if not arrived:
            return
        if self._local is None:
            self._local = self._new_local()
            if len(self.layout.padding) > 1:
                self._local.zero_()  # one fill of everything is cheaper than a kernel for each gap
        again = [index for index in arrived if self._written[index]]
        if again and self._local.dtype is not self._accumulate_dtype:
            self._local = self._local.to(self._accumulate_dtype)
        for index in again:
            self._slot(self._local, index).add_(arrived.pop(index))
        if arrived:
            compat.copy_all([self._slot(self._local, index) for index in arrived], list(arrived.values()))
        for index in arrived:
            self._written[index] = True

    def reduce(self) -> None:
        """Starts averaging what this rank has over all ranks; a rank that has nothing contributes zeros."""
        with compat.label(f"zeroshard.reduce {self.label}"):
            self._inflight.append(self._start_reduction())

    def _start_reduction(self) -> _Reduction:
        self._deposit()
        local, self._local, self.awaited = self._local, None, False
        if local is None:
            local = self._new_local().zero_()
        else:
            self._zero_unwritten(local)
        self._written = [False] * len(self._written)
        if self._fabric.data_parallel == 1:
            return _Reduction(None, local, local, self.complete)
        local = local.to(self._reduce_dtype)
        lane = self._fabric.reduces
        pending: Pending
        if self._table.optimizer.extent is Extent.WHOLE:
            out, pending = local, Done() if lane.group is None else lane.all_reduce(local, self.label)
        else:
            if self._table.gradients.extent is Extent.WHOLE:
                out = local[self.own.start : self.own.stop]
            else:
                out = self._new_stash(self.own.numel)
            pending = lane.reduce_scatter(local, out, self.label)
        return _Reduction(self._average_between_replicas(pending, out), local, out, self.complete)

    def _average_between_replicas(self, inside: Pending, out: Tensor) -> Pending:
        lane = self._fabric.replicas
        if lane.group is None:
            return inside
        if lane.stream is None:
            inside.wait()  # messages are awaited on the host; on a stream the order is enough
        return lane.all_reduce(out, self.label)

    def settle(self) -> None:
        """Waits for reduces under way and puts their result where gradients live."""
        while self._inflight:
            reduction = self._inflight[0]
            if reduction.pending is not None:
                reduction.pending.wait()
            self._inflight.pop(0)
            with compat.label(f"zeroshard.stash {self.label}"):
                self._put(reduction.out, reduction.complete)

    def _put(self, out: Tensor, complete: bool) -> None:
        if self._host is not None and self._deliver is not None:
            narrow = out.dtype is not self.dtype and not self._host.received and self._fabric.data_parallel > 1
            if self._deliver(out.to(self.dtype) if narrow else out, complete):
                return
        if self._accumulator is None and self._stash is None:
            if out.dtype is self.dtype:
                self._stash = out
            elif self._fabric.data_parallel == 1 and out.dtype is self._accumulate_dtype:
                self._accumulator = out  # micro-batches that a world of one added up before any reduce
            else:
                self._stash = out.to(self.dtype)
            return
        if self._accumulator is None:
            assert self._stash is not None
            self._accumulator, self._stash = self._stash.to(self._accumulate_dtype), None
        self._accumulator.add_(out)

    # -- between backward and step --------------------------------------------------------------------------------

    def show(self) -> None:
        """Lets the user see, in ``parameter.grad``, that there is a gradient; and the gradient, where that is right."""
        values = self._held
        if not self.visible or self.unreduced or self._inflight or (values is not None and values.dtype != self.dtype):
            values = None
        if values is not None and self._factor is not None:
            values.mul_(self._factor)
            self._factor = None
        self._shown.show(self.used, values)

    def hide(self) -> None:
        """Takes ``parameter.grad`` back before autograd adds to it, and reads off it what the user did."""
        for index, assigned in self._shown.take_back(lambda: self._held):
            if assigned is None:
                self._discard(index)
            else:
                self._take_from_user(index, assigned)

    def _take_from_user(self, index: int, gradient: Tensor) -> None:
        if not self.visible:
            raise RuntimeError(
                f"the gradient of {self.layout.slots[index].name!r} was assigned by hand, but gradients are sharded or "
                "scaled here and it would be lost; change the loss instead, or use stage=0 without loss scaling"
            )
        self.settle()
        if self._held is None:
            self._stash = torch.zeros(self.layout.numel, dtype=self.dtype, device=self._fabric.device)
        assert self._held is not None
        self._slot(self._held, index).copy_(parallel.local_gradient(self.parameters[index], gradient))
        self.used[index] = True

    def scale(self, factor: Tensor) -> None:
        """Multiplies the averaged gradient when it is next touched, so that clipping costs no pass of its own."""
        self._factor = factor if self._factor is None else self._factor * factor

    def take(self, dtype: torch.dtype) -> Tensor | None:
        """The averaged gradient of this rank's range for the optimizer; None if there is none."""
        if self._held is None:
            return None
        held, factor, self._factor = self._held, self._factor, None
        if factor is None:
            return held.to(dtype)
        if held.dtype is dtype:
            return held.mul_(factor)
        wide = torch.promote_types(held.dtype, dtype)
        return (held * factor.to(wide).expand_as(held)).to(dtype)  # widened and scaled in one pass

    def take_for_host(self) -> tuple[Tensor | None, Tensor | None]:
        """What is to be delivered still, and the factor to be applied to all of it."""
        held, factor = self._held, self._factor
        self._stash = self._accumulator = self._factor = None
        return held, factor

    @property
    def present(self) -> bool:
        """Whether there is an averaged gradient, here or on the host."""
        return self._held is not None or (self._host is not None and self._host.received > 0)

    def host_norm(self) -> tuple[Tensor, Tensor | None] | None:
        """The norm of a gradient that is on the host, and a factor still to be applied; None if there is none."""
        norm = None if self._host is None else self._host.norm()
        if norm is None:
            return None
        value = norm if isinstance(norm, Tensor) else torch.tensor(norm, dtype=torch.float64)
        return value.to(self._fabric.device, non_blocking=True), self._factor

    def part(self, shard: Range) -> tuple[Tensor, Tensor | None] | None:
        """The averaged gradient in this rank's shard, and a factor still to be applied; None if there is none."""
        if self._held is None:
            return None
        return self._held[shard.start - self.own.start : shard.stop - self.own.start], self._factor

    def clear(self) -> None:
        """Forgets everything: after the optimizer has taken it, or when a backward failed."""
        for reduction in self._inflight:  # peers wait for our messages, so a reduce that was started is finished
            if reduction.pending is not None:
                reduction.pending.wait()
        self._inflight.clear()
        if self._host is not None:
            self._host.forget()
        self._shown.clear()
        count = len(self.parameters)
        self._let_go()
        self.awaited = False
        self._fired.clear()
        self._written, self.used = [False] * count, [False] * count

    def tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """Live gradient buffers, and live accumulators, for the memory ledger."""
        held = [
            *self._arrived.values(),
            self._local,
            self._stash,
            *(r.local for r in self._inflight),
            *(r.out for r in self._inflight),
            *([] if self._host is None else self._host.landing),
        ]
        extra = [] if self._accumulator is None else [self._accumulator]
        slot = self._slot_in_arena
        if slot is not None and slot.tensor is not None and slot.in_arena:  # whose storage others share
            key = compat.storage_key(slot.tensor)
            held = [t for t in held if t is not None and compat.storage_key(t) != key]
            extra = [t for t in extra if compat.storage_key(t) != key]
        return [tensor for tensor in held if tensor is not None], extra

    @property
    def arena_bytes(self) -> int:
        """Bytes of its place in the arena."""
        slot = self._slot_in_arena
        return slot.tensor.nbytes if slot is not None and slot.tensor is not None and slot.in_arena else 0

    # -- inside ---------------------------------------------------------------------------------------------------

    @property
    def _held(self) -> Tensor | None:
        """The averaged gradient at rest."""
        return self._accumulator if self._accumulator is not None else self._stash

    def _new(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=self._fabric.device)

    def _new_local(self) -> Tensor:
        """Where gradients are whole at rest, this is where they stay."""
        if self._table.gradients.extent is Extent.WHOLE:
            return self._new_stash(self.layout.numel)
        return self._new(self.layout.numel, self._reduce_dtype)

    def _new_stash(self, numel: int) -> Tensor:
        """Memory for what is kept until the step. Of several micro-batches, the first has the place in the arena."""
        if self._arena is None or self._slot_in_arena is not None:
            return self._new(numel, self._reduce_dtype)
        self._slot_in_arena = self._arena.take(numel, self._reduce_dtype)
        assert self._slot_in_arena.tensor is not None
        return self._slot_in_arena.tensor

    def _slot(self, whole: Tensor, index: int) -> Tensor:
        return self.layout.slots[index].view(whole)

    def _zero_unwritten(self, local: Tensor) -> None:
        for index, slot in enumerate(self.layout.slots):
            if not self._written[index]:
                local[slot.start : slot.stop].zero_()
        if len(self.layout.padding) == 1:  # more of them were filled when the buffer was made
            gap = self.layout.padding[0]
            local[gap.start : gap.stop].zero_()

    def _let_go(self) -> None:
        """Of all memory that holds gradients."""
        self._local = self._stash = self._accumulator = self._factor = None
        if self._slot_in_arena is not None:
            self._slot_in_arena.free()
            self._slot_in_arena = None
        self._arrived, self._arrived_bytes = {}, 0

    def _discard(self, index: int) -> None:
        self._deposit()
        self.settle()  # or a reduce under way would bring the gradient back
        self.used[index] = False
        if self._host is not None:
            self._host.discard({index} if any(self.used) else None)
        if not any(self.used):
            self._let_go()
            self._written = [False] * len(self._written)
            return
        for piece in self.layout.pieces(self.own):
            if piece.slot == index:
                for held in (self._stash, self._accumulator):
                    if held is not None:
                        held[piece.offset : piece.offset + piece.numel].zero_()
        if self._local is not None and self._written[index]:
            self._slot(self._local, index).zero_()
