"""The interface of whoever answers questions about gradients. ``optim/answers.py`` implements it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from ..shown.question import Question

if TYPE_CHECKING:
    from .gradient import FlatGradient


class Answers(Protocol):
    """Answers what user code asks of the gradients of one model."""

    @property
    def scale(self) -> float:
        """The loss scale that the averaged gradients are multiplied by. 1 without loss scaling."""

    def answer(self, gradient: FlatGradient, index: int, question: Question) -> Tensor:
        """The answer for one parameter's whole gradient, in fp64. Collective, unless it is known."""

    def agree(self, what: str) -> None:
        """Brings all ranks to the same averaged gradients, if they are not there yet. Collective then."""

    def changed(self, gradient: FlatGradient, index: int) -> None:
        """A gradient has changed, so that earlier answers about it do not hold."""

    def forget(self) -> None:
        """All gradients have changed, so that no answer holds."""
