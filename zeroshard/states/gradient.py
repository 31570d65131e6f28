"""The gradients of one flat in one step: computed on this rank, reduced by all ranks, taken by the flat's home.

- **local**: a whole flat that receives this rank's gradients as autograd produces them (``local_gradient.py``).
- **stash**: the averaged gradient of the range that this rank updates, in the flat's home (``stash.py``). Where the
  table says whole, the stash is a view of the whole local buffer, which is reduced in place. Elsewhere the stash is a
  shard, and the local buffer is freed at once.

``parameter.grad`` tells what the user wants. A gradient that was shown there and is taken away (``zero_grad``) is
discarded. ``parameter.grad`` shows the gradient itself if that is whole, averaged and unscaled, else a placeholder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..comm import parallel
from ..comm.fabric import DisagreementError, Fabric
from ..comm.lane import Done, Pending
from ..config.table import Extent
from ..system import compat
from .local_gradient import LocalGradient
from .placeholder import Placeholders
from .shown_gradients import ShownGradients

if TYPE_CHECKING:
    from .flat import Flat


@dataclass(frozen=True)
class _Reduction:
    """A reduce under way."""

    pending: Pending
    local: Tensor
    """The collective reads this memory, so it is referenced until the reduce is over."""
    out: Tensor
    complete: bool
    """Whether every parameter had its gradient when the reduce began."""


class FlatGradient:
    """The way of one flat's gradients: from autograd into the local buffer, through a reduce, to the home."""

    def __init__(self, flat: Flat, fabric: Fabric, placeholders: Placeholders) -> None:
        self._flat, self._fabric = flat, fabric
        self.label = flat.label
        precision = flat.precision
        self._reduce_dtype = flat.dtype if flat.alone else precision.reduce or flat.dtype
        accumulate = torch.promote_types(flat.dtype, precision.accumulate)
        self._local = LocalGradient(flat.layout, dtype=self._reduce_dtype, accumulate=accumulate, device=fabric.device)
        self._reduction: _Reduction | None = None
        self._shown = ShownGradients(flat.parameters, flat.layout.slots, flat.dtype, placeholders)
        self.used = [False] * len(flat.parameters)
        """Which parameters got a gradient since the last step: on this rank; after the agreement, on any rank."""
        self.awaited = False
        """The ranks agreed that one of them has gradients that are not reduced, so all must reduce."""

    @property
    def complete(self) -> bool:
        """Every parameter has its gradient of this backward pass."""
        return self._local.complete

    @property
    def unreduced(self) -> bool:
        """This rank has gradients that are not reduced, or another rank has."""
        return not self._local.empty or self.awaited

    # -- during backward ------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """A new backward pass. ``hide_all`` comes before, because the user may have zeroed gradients."""
        self._flat.home.begin_backward()
        self._local.begin_backward()

    def add(self, index: int, gradient: Tensor) -> None:
        """Takes one parameter's gradient from autograd. If a parameter comes more than once, the sum counts."""
        if gradient.is_sparse:
            raise RuntimeError(
                f"parameter {self._flat.layout.slots[index].name!r} got a sparse gradient, which zeroshard cannot "
                "shard; build the embedding with sparse=False"
            )
        self._local.add(index, gradient)
        self.used[index] = True

    def reduce(self) -> None:
        """Starts averaging the gradients over all ranks. A rank that has none contributes zeros."""
        self.settle()
        with compat.label(f"zeroshard.reduce {self.label}"):
            self._reduction = self._start_reduction()

    def _start_reduction(self) -> _Reduction:
        complete = self.complete
        local, self.awaited = self._local.take(), False
        if self._flat.alone:
            return _Reduction(Done(), local, local, complete)
        local = local.to(self._reduce_dtype)
        table, own, lane = self._flat.table, self._flat.own, self._fabric.reduces
        pending: Pending
        if table.optimizer.extent is Extent.WHOLE:
            out, pending = local, Done() if lane.group is None else lane.all_reduce(local, self.label)
        else:
            in_place = table.gradients.extent is Extent.WHOLE
            out = local[own.start : own.stop] if in_place else torch.empty_like(local[: own.numel])
            pending = lane.reduce_scatter(local, out, self.label)
        return _Reduction(self._average_between_replicas(pending, out), local, out, complete)

    def _average_between_replicas(self, inside: Pending, out: Tensor) -> Pending:
        lane = self._fabric.replicas
        if lane.group is None:
            return inside
        if lane.stream is None:
            inside.wait()  # messages are awaited on the host; on a stream the order is enough
        return lane.all_reduce(out, self.label)

    def settle(self) -> None:
        """Waits for a reduce under way and brings its result home."""
        if self._reduction is not None:
            self._reduction.pending.wait()
            reduction, self._reduction = self._reduction, None
            with compat.label(f"zeroshard.stash {self.label}"):
                self._flat.home.take(reduction.out, complete=reduction.complete)

    # -- between backward and step --------------------------------------------------------------------------------

    def show(self) -> None:
        """Lets the user see in ``parameter.grad`` that there is a gradient; and its values, if they are averaged."""
        settled = not self.unreduced and self._reduction is None
        self._shown.show(self.used, self._flat.home.visible() if settled else None)

    def hide(self) -> None:
        """Takes ``parameter.grad`` back before autograd adds to it, and follows what the user did to it."""
        for index, assigned in self._shown.take_back():
            if assigned is None:
                self._discard(index)
            else:
                self._take_from_user(index, assigned)

    def _take_from_user(self, index: int, gradient: Tensor) -> None:
        if not self._flat.home.shows_gradient:
            raise RuntimeError(
                f"the gradient of {self._flat.layout.slots[index].name!r} was assigned by hand, but gradients are "
                "sharded or scaled here and it would be lost; change the loss instead, or use stage=0 without loss "
                "scaling"
            )
        self.settle()
        self._local.drop(index)  # otherwise a gradient that is not reduced yet would be added to the user's
        self._flat.home.assign(index, parallel.local_gradient(self._flat.parameters[index], gradient))
        self.used[index] = True

    def _discard(self, index: int) -> None:
        self.settle()  # otherwise a reduce under way would bring the gradient back
        self.used[index] = False
        if any(self.used):
            self._local.drop(index)
            self._flat.home.discard(index)
        else:
            self._local.clear()
            self._flat.home.forget()

    def clear(self) -> None:
        """Forgets everything: after the optimizer has taken it, or when a backward failed."""
        if self._reduction is not None:  # peers wait for our messages, so a reduce that was started is finished
            self._reduction.pending.wait()
            self._reduction = None
        self._flat.home.forget()
        self._shown.clear()
        self._local.clear()
        self.awaited = False
        self.used = [False] * len(self.used)

    def missing(self) -> DisagreementError:
        """The error of a rank that has no gradient to update with, while other ranks have."""
        return DisagreementError(
            f"rank {self._fabric.rank} has no gradient of {self.label!r} and another rank has: it was zeroed here and "
            "not there; call zero_grad() on all ranks alike"
        )

    def tensors(self) -> list[Tensor]:
        """Gradients that are not home yet, for the memory ledger."""
        reduction = self._reduction
        return [*self._local.tensors(), *([] if reduction is None else [reduction.local, reduction.out])]


def hide_all(gradients: Sequence[FlatGradient]) -> None:
    """Takes ``parameter.grad`` back in the whole model.

    Of parameters that only other ranks used, this rank has a part of the averaged gradient, and ``parameter.grad`` is
    None. A user who drops all gradients that this rank shows drops these gradients too.
    """
    shown = any(any(gradient.used) for gradient in gradients)
    for gradient in gradients:
        gradient.hide()
    if shown and not any(any(gradient.used) for gradient in gradients):
        for gradient in gradients:
            gradient.clear()


def read_user_changes(gradients: Sequence[FlatGradient]) -> None:
    """Looks at what the user did to ``parameter.grad`` in the whole model, and shows the gradients again."""
    hide_all(gradients)
    for gradient in gradients:
        gradient.show()
