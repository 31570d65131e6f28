"""Answers to what user code asks of averaged gradients: their norms, sums, whether they are finite.

Users ask parameter by parameter. The first question of a kind starts with the agreement of a step, in which the ranks
compare what they ask. Then one collective answers for all parameters of the model at once. Answers hold until a
gradient changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm.fabric import Fabric
from ..shown.factors import multiplier
from ..shown.question import Question
from ..states.flat import Flat
from ..states.gradient import FlatGradient
from ..system import compat
from .loss_scale import LossScaler


@dataclass(frozen=True)
class _AnswerList:
    """The answers to one question: a number for each parameter, in fp64 on the device."""

    numbers: Sequence[Tensor]
    time: int


class Answers:
    """Answers what users ask of the gradients of one model (``states.answers.Answers``)."""

    def __init__(
        self,
        flats: list[Flat],
        fabric: Fabric,
        scaler: LossScaler | None,
        agree: Callable[[str], None],
        agreed: Callable[[], bool],
    ) -> None:
        """``agree`` makes the ranks agree and takes what is asked. ``agreed`` tells if they have since backward."""
        self._flats, self._fabric, self._scaler = flats, fabric, scaler
        self._agree, self._agreed = agree, agreed
        self._first: dict[FlatGradient, int] = {}
        """The place of each flat's first parameter among all parameters."""
        self._count = 0
        for flat in flats:
            self._first[flat.gradient] = self._count
            self._count += len(flat.parameters)
            flat.gradient.answers = self
        self._known: dict[Question, _AnswerList] = {}
        self._time = 0
        self._changed = [0] * self._count
        """When each gradient was last changed."""
        self.told_norm: Callable[[Tensor], None] | None = None
        """Is called with the norm of all gradients, when somebody asks for norms."""

    @property
    def scale(self) -> float:
        return 1.0 if self._scaler is None else self._scaler.scale

    def answer(self, gradient: FlatGradient, index: int, question: Question) -> Tensor:
        place = self._first[gradient] + index
        found = self._known.get(question)
        if found is None or found.time <= self._changed[place]:
            with self._fabric.watchdog.during(f"a question about gradients ({question.text})"):
                self._agree(f"{question.text} ({gradient.name_of(index)})")
                gradient.check_there(index)
                found = self._find(question)
        return found.numbers[place]

    def agree(self, what: str) -> None:
        if not self._agreed():
            with self._fabric.watchdog.during(what):
                self._agree(what)

    def changed(self, gradient: FlatGradient, index: int) -> None:
        self._time += 1
        self._changed[self._first[gradient] + index] = self._time

    def forget(self) -> None:
        self._known.clear()

    @torch.no_grad()
    def _find(self, question: Question) -> _AnswerList:
        with compat.label("zeroshard.answer"):
            numbers = self._joined(question, self._of_this_rank(question))
        self._time += 1
        found = self._known[question] = _AnswerList(numbers.unbind(), self._time)
        if question.is_two_norm and self.told_norm is not None:
            self.told_norm(question.statistic.join(numbers))
        return found

    def _joined(self, question: Question, mine: Tensor) -> Tensor:
        """Joins the numbers of all ranks, in rank order."""
        for lane in (self._fabric.gathers, self._fabric.model):
            if lane.group is not None and self._fabric.backend != "fake":
                self._fabric.watchdog.note(f"what is asked of gradients: {question.text}")
                mine = question.statistic.join(lane.gather_small(mine))
        return mine

    def _of_this_rank(self, question: Question) -> Tensor:
        """The number of this rank's part of each gradient."""
        device = self._fabric.device
        neutral = torch.full((), question.statistic.neutral, dtype=torch.float64, device=device)
        numbers = [neutral] * self._count
        for flat in self._flats:
            if self._fabric.model.rank > 0 and not flat.divided:
                continue  # counts on the first model-parallel rank
            found = self._of_flat(flat, question)
            for slot, number in found.items():
                numbers[self._first[flat.gradient] + slot] = number
        return torch.stack([number.to(device, non_blocking=True) for number in numbers])

    def _of_flat(self, flat: Flat, question: Question) -> dict[int, Tensor]:
        if question.is_two_norm:
            flat.home.expect_norms()
            known = flat.home.known_norms()
            if known is not None:
                return {
                    slot: n if (f := self._factor(flat, slot, n)) is None else n * f.abs() for slot, n in known.items()
                }
        parts = flat.home.parts()
        if not parts:  # nobody used these parameters: their gradients count as zero
            zero = torch.zeros((), dtype=flat.dtype, device=self._fabric.device)
            pieces = flat.layout.pieces(flat.shard_range)
            parts = {piece.slot: zero.expand(piece.numel) for piece in pieces}
        factors = {slot: self._factor(flat, slot, part) for slot, part in parts.items()}
        if question.is_norm:
            order = question.statistic.order
            assert order is not None
            norms = dict(zip(parts, compat.norms(list(parts.values()), torch.float64, order), strict=True))
            return {slot: n if (f := factors[slot]) is None else n * f.abs() for slot, n in norms.items()}
        scaled = {slot: part if (f := factors[slot]) is None else part * f for slot, part in parts.items()}
        return {slot: question.of_part(part) for slot, part in scaled.items()}

    def _factor(self, flat: Flat, slot: int, part: Tensor) -> Tensor | None:
        """What one part is still to be multiplied by."""
        factor = multiplier(flat.home.factors.of(slot), part.device)
        if self._scaler is None:
            return factor
        unscaled = torch.full((), 1.0 / self._scaler.scale, dtype=torch.float32, device=part.device)
        return unscaled if factor is None else factor * unscaled
