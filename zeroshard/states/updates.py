"""The updates of a step, by place. What the device and the host have in common stands here.

``optim/device_updates.py`` updates on the device, ``offload/step.py`` on the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..config.layout import Piece
from ..config.table import Place
from .flat import Flat


class StateKeeper(ABC):
    """The optimizer's states of one flat, by piece."""

    @abstractmethod
    def load(self, piece: Piece, state: dict[str, Any]) -> None:
        """Takes one parameter's whole state, as torch's optimizers have it. The master is loaded apart."""

    @abstractmethod
    def room_for(self, piece: Piece, name: str, dtype: torch.dtype) -> Tensor | None:
        """Memory for one state of a piece, to be filled; None where this optimizer has no such state."""

    @abstractmethod
    def take_scalars(self, piece: Piece, scalars: dict[str, Any], *, moments: bool) -> None:
        """Takes state that belongs to the parameter as a whole, after ``room_for`` was filled.

        ``moments`` tells whether there was anything to fill.
        """

    @abstractmethod
    def forget_states(self) -> None:
        """Forgets all states, before others are loaded."""

    def takes(self, name: str) -> bool:
        """Whether there is room for a state of this name."""
        return True

    def states(self) -> dict[Tensor, dict[str, Any]]:
        """States that torch's own optimizer does not have, as torch would show them."""
        return {}

    def device_states(self) -> list[Tensor]:
        """States in device memory, for the ledger."""
        return []


class Updates(ABC):
    """The updates of all flats that live in one place."""

    place: Place
    delays = False
    """Whether updates may be held back."""

    @property
    @abstractmethod
    def keepers(self) -> dict[Flat, StateKeeper]:
        """The flats that live here, and what keeps the states of each."""

    @abstractmethod
    def update(self, order: list[Flat], step: int) -> Iterator[list[Flat]]:
        """Updates and publishes. Yields flats whose new values the next forward may gather already."""

    def before_step(self) -> None:
        """Called first in every step."""
        return

    def skip(self) -> None:
        """Called in place of ``update`` where a step is left out."""
        return

    def finish(self) -> None:
        """Publishes everything and waits for it."""
        return

    def wait(self) -> None:
        """Waits for updates, and publishes nothing."""
        return

    def settle(self) -> None:
        """Waits until nothing is under way on the host or the device."""
        return

    def progress(self) -> dict[str, int]:
        """What the next step takes from the last one, besides states."""
        return {}

    def load_progress(self, progress: dict[str, int]) -> None:
        """Goes on from what ``progress`` returned."""
        return
