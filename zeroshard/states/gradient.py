"""The gradients of one flat in one step: computed on this rank, reduced by all ranks, taken by the flat's home.

- **local**: a whole flat that receives this rank's gradients as autograd produces them (``local_gradient.py``).
- **stash**: the averaged gradient of the range that this rank updates, in the flat's home (``stash.py``). Where the
  table says whole, the stash is a view of the whole local buffer, which is reduced in place. Elsewhere the stash is a
  shard, and the local buffer is freed at once.

``parameter.grad`` shows the gradient itself if that is whole, averaged and unscaled, else a stand-in. If there are
several ranks, every parameter shows a gradient after a backward that used the model: this rank cannot know which
parameters other ranks used. The gradient of a parameter that nobody used counts as zero, and the optimizer skips it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..comm import parallel
from ..comm.fabric import DisagreementError, Fabric
from ..shown.factors import Factor
from ..shown.gradients import ShownGradients
from ..shown.placeholder import Placeholders
from ..shown.question import Elementwise, Question
from ..shown.sharded_gradient import REMEDY, Change, Cut, ShardedGradient
from ..system import compat
from .answers import Answers
from .local_gradient import LocalGradient
from .reduction import Reduction

if TYPE_CHECKING:
    from .flat import Flat


class FlatGradient:
    """The way of one flat's gradients: from autograd into the local buffer, through a reduce, to the home."""

    def __init__(self, flat: Flat, fabric: Fabric, placeholders: Placeholders) -> None:
        self._flat, self._fabric = flat, fabric
        self.label = flat.label
        precision = flat.precision
        self._reduce_dtype = flat.dtype if flat.alone else precision.reduce or flat.dtype
        accumulate = torch.promote_types(flat.dtype, precision.accumulate)
        self._local = LocalGradient(flat.layout, dtype=self._reduce_dtype, accumulate=accumulate, device=fabric.device)
        self._reduction: Reduction | None = None
        self._shown = ShownGradients(self, flat.parameters, flat.layout.slots, flat.dtype, placeholders)
        self.used = [False] * len(flat.parameters)
        """Which parameters got a gradient since the last step: on this rank; after the agreement, on any rank."""
        self.there = [False] * len(flat.parameters)
        """Which gradients users may see: of a backward since the last step, and not discarded."""
        self._generations = [0] * len(flat.parameters)
        """How often each gradient has changed."""
        self.changes = 0
        """A number for what the user did to gradients since the last step. The order does not count."""
        self.awaited = False
        """The ranks agreed that one of them has gradients that are not reduced, so all must reduce."""
        self._mapped: dict[int, Elementwise] = {}
        """Element-wise functions of gradients that users assigned, as in ``p.grad = p.grad * 2``, not applied yet."""
        self.lent = False
        """``parameter.grad`` shows whole gradients, inside a ``gathered_gradients`` block."""
        self.answers: Answers | None = None
        """Answers what users ask of these gradients. None until the model is sharded."""

    @property
    def device(self) -> torch.device:
        return self._fabric.device

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
        home = self._flat.home
        self._forget_answers()
        self._generations = [count + 1 for count in self._generations]
        if self._mapped:
            self.settle()
            self._check_reduced("an assignment of a function of parameter.grad")
            self.apply_mapped()
        if home.factors:  # they are for gradients that came before, and not for those that come now
            self.settle()
            self._local.scale(home.factors)
        home.begin_backward()
        self._local.begin_backward()

    def add(self, index: int, gradient: Tensor) -> bool:
        """Takes one parameter's gradient from autograd. If a parameter comes more than once, the sum counts.

        Returns True if every parameter has its gradient of this backward pass.
        """
        if gradient.is_sparse:
            raise RuntimeError(
                f"parameter {self._flat.layout.slots[index].name!r} got a sparse gradient, which zeroshard cannot "
                "shard; build the embedding with sparse=False"
            )
        self.used[index] = True
        return self._local.add(index, gradient.detach() if gradient.requires_grad else gradient)

    def reduce(self) -> None:
        """Starts averaging the gradients over all ranks. A rank that has none contributes zeros."""
        self.settle()
        with compat.label("zeroshard.reduce", self.label):
            self._reduction = self._start_reduction()

    def _start_reduction(self) -> Reduction:
        complete = self.complete
        local, self.awaited = self._local.take(), False
        if local.dtype is not self._reduce_dtype and not self._flat.alone:
            local = local.to(self._reduce_dtype)
        return Reduction.start(self._flat, self._fabric, local, complete=complete)

    def settle(self) -> None:
        """Waits for a reduce under way and brings its result home."""
        if self._reduction is not None:
            self._reduction.pending.wait()
            reduction, self._reduction = self._reduction, None
            with compat.label("zeroshard.stash", self.label):
                self._flat.home.take(reduction.out, complete=reduction.complete)

    # -- between backward and step --------------------------------------------------------------------------------

    def expose(self, *, everything: bool) -> None:
        """Lets users see the gradients of a backward that is over. ``everything``: also those that nobody used here."""
        self.there = [everything or used for used in self.used]
        if not any(self.there):
            self.settle()
            self._flat.home.forget()
        self.show()

    def show(self) -> None:
        """Lets the user see in ``parameter.grad`` that there is a gradient; and its values, if they are averaged."""
        if not self.lent and self._shown.lacks(self.there):
            settled = not self.unreduced and self._reduction is None
            self._shown.show(self.there, self._flat.home.visible() if settled else None)

    def rescaled(self) -> None:
        """Called when all gradients of the flat were multiplied."""
        self._forget_answers()
        self._flat.home.visible()  # a gradient that users see is multiplied at once

    def read_changes(self) -> None:
        """Follows what the user did to ``parameter.grad``."""
        if self.lent:
            return  # the end of the block does that
        changes = self._shown.changes()
        if not changes:
            return
        for index, assigned in changes.items():
            if assigned is not None:
                self._take_from_user(index, assigned)
        discarded = [index for index, assigned in changes.items() if assigned is None]
        if discarded:
            self._discard(discarded)

    def hide(self) -> None:
        """Takes ``parameter.grad`` back before autograd adds to it, and follows what the user did to it."""
        self.read_changes()
        self._shown.hide()

    def _take_from_user(self, index: int, gradient: Tensor) -> None:
        if isinstance(gradient, ShardedGradient):
            self._take_mapped(index, gradient)
            return
        parameter, slot = self._flat.parameters[index], self._flat.layout.slots[index]
        part = parallel.local_gradient(parameter, gradient)
        if part.shape != slot.shape:
            part = slot.part(part)
        self.settle()
        self._local.drop(index)  # otherwise a gradient that is not reduced yet would be added to the user's
        self._flat.home.assign(index, part.detach(), self._scale)
        self.used[index] = self.there[index] = True
        self._note(index, "assigned")

    def _take_mapped(self, index: int, gradient: ShardedGradient) -> None:
        """Takes a function of the same gradient. It is applied when the gradient is reduced."""
        if not gradient.stands_for(self, index):
            raise RuntimeError(
                f"parameter {self.name_of(index)!r} was given the sharded gradient of another parameter; {REMEDY}"
            )
        before, after = self._mapped.get(index), gradient.subject.mapping
        if after is not None:
            gradient.check_current()
            self._mapped[index] = after if before is None else lambda values: after(before(values))
            self._note(index, f"assigned {gradient.subject.text}")
            gradient.become_gradient()

    def apply_mapped(self) -> None:
        """Applies the functions that users assigned, when all gradients are reduced."""
        mapped, self._mapped = self._mapped, {}
        for index, mapping in mapped.items():

            def change(part: Tensor, cut: Cut, mapping: Elementwise = mapping) -> None:
                part.copy_(mapping(part))

            if self.used[index]:
                self._flat.home.change(index, change, self._scale)

    def _check_reduced(self, what: str) -> None:
        if self.unreduced:
            raise RuntimeError(
                f"{what} cannot wait for a second backward while gradients of {self.label!r} are not reduced; call "
                "step() or clip before, or change parameter.grad in place"
            )

    def _discard(self, indices: list[int]) -> None:
        self.settle()  # otherwise a reduce under way would bring the gradients back
        for index in indices:
            self.used[index] = self.there[index] = False
            self._note(index, "discarded")
        if not any(self.there):
            self._local.clear()
            self._flat.home.forget()
            return
        for index in indices:
            self._local.drop(index)
            self._flat.home.discard(index)

    def _note(self, index: int, what: str) -> None:
        """Notes a change for the agreement: all ranks must make the same changes."""
        self._generations[index] += 1
        self.changes += zlib.crc32(f"{self.name_of(index)} {what}".encode())
        if self.answers is not None:
            self.answers.changed(self, index)

    def _forget_answers(self) -> None:
        if self.answers is not None:
            self.answers.forget()

    @property
    def _scale(self) -> float:
        return 1.0 if self.answers is None else self.answers.scale

    # -- whole gradients for users --------------------------------------------------------------------------------

    @torch.no_grad()
    def lend(self) -> None:
        """Shows the whole averaged gradients in ``parameter.grad``, after an agreement. Collective."""
        self.lent = True
        self._shown.hide()
        if any(self.used):
            self._shown.show(self.used, self._gathered())

    def _gathered(self) -> Tensor:
        visible = self._flat.home.visible()
        if visible is not None:
            return visible
        own = self._flat.home.averaged(self._scale)
        if own is None:
            raise self.missing()
        own = own.to(self.device)
        if own.numel() == self._flat.layout.numel:
            return own
        whole = torch.empty(self._flat.layout.numel, dtype=own.dtype, device=own.device)
        self._fabric.gathers.all_gather(whole, own, f"{self.label} gradients").wait()
        return whole

    @torch.no_grad()
    def take_lent(self) -> None:
        """Takes this rank's part of what the user did to whole gradients, and shows stand-ins again."""
        self.lent = False
        shown, visible = self._shown.take_back(), self._flat.home.visible() is not None
        before = None if visible or not any(self.used) else self._flat.home.averaged(self._scale)
        for index, (display, gradient) in enumerate(shown):
            if gradient is None:
                if display is not None:
                    self._discard([index])
            elif gradient is not display:
                self._take_from_user(index, gradient)
            elif before is not None:
                self._follow(index, parallel.local(gradient), before)
        self._forget_answers()
        self.show()

    def _follow(self, index: int, gradient: Tensor, before: Tensor) -> None:
        """Takes the elements that differ from ``before``. The others may be there in more precision."""
        pieces = [piece for piece in self._flat.layout.pieces(self._flat.own) if piece.slot == index]

        def follow(part: Tensor, cut: Cut) -> None:
            for piece in pieces:
                old, new = before[piece.offset :][: piece.numel].to(part.device), cut(gradient).to(part.device)
                part.copy_(torch.where(old == new, part, new.to(part.dtype)))

        self._flat.home.change(index, follow, self._scale)

    # -- what users do to stand-ins (``sharded_gradient.Owner``) --------------------------------------------------

    def name_of(self, index: int) -> str:
        return self._flat.layout.slots[index].name

    def ask(self, index: int, question: Question) -> Tensor:
        self.check_there(index)
        self._flat.home.check_readable()
        assert self.answers is not None
        return self.answers.answer(self, index, question)

    def multiply(self, index: int, factor: Factor) -> None:
        self.check_there(index)
        self._flat.home.check_readable()
        if index in self._mapped:
            assert self.answers is not None
            self.answers.agree("a factor")
        self._flat.home.scale_one(index, factor)
        self._note(index, "multiplied")

    def zero(self, index: int) -> None:
        self.check_there(index)
        self._flat.home.check_readable()
        self.settle()
        self._local.drop(index)
        self._flat.home.discard(index)
        self._note(index, "zeroed")

    def change(self, index: int, what: str, change: Change) -> None:
        self.check_there(index)
        self._flat.home.check_readable()
        assert self.answers is not None
        self.answers.agree(f"{what} on the gradient of {self.name_of(index)!r}")
        self.check_there(index)
        if self.used[index]:  # else nobody used the parameter, and the optimizer skips it
            self._flat.home.change(index, change, self._scale)
        self._note(index, what)

    def generation(self, index: int) -> int:
        return self._generations[index]

    def take_if_assigned(self, index: int) -> None:
        assigned = self._shown.assigned(index)
        if isinstance(assigned, ShardedGradient) and not self.lent:
            self._take_mapped(index, assigned)
            self._shown.show_again(index)

    def check_there(self, index: int) -> None:
        """Raises if a gradient that a user kept is gone."""
        if not self._shown.shows(index):
            raise RuntimeError(
                f"the gradient of {self.name_of(index)!r} is gone, because of step(), zero_grad() or a backward that "
                "runs; use it between backward() and step()"
            )

    def clear(self) -> None:
        """Forgets everything: after the optimizer has taken it, or when a backward failed."""
        if self._reduction is not None:  # peers wait for our messages, so a reduce that was started is finished
            self._reduction.pending.wait()
            self._reduction = None
        self._flat.home.forget()
        self._forget_answers()
        self._shown.clear()
        self._local.clear()
        self._mapped.clear()
        self.awaited = self.lent = False
        self.changes = 0
        self.used, self.there = [False] * len(self.used), [False] * len(self.there)

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
    """Takes ``parameter.grad`` back in the whole model."""
    for gradient in gradients:
        gradient.hide()


def read_user_changes(gradients: Sequence[FlatGradient]) -> None:
    """Looks at what the user did to ``parameter.grad`` in the whole model, and shows the gradients again."""
    for gradient in gradients:
        gradient.read_changes()
        gradient.show()
