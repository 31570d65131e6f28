"""The updates of a step, by place: what the device and the host have in common.

``optim/device_updates.py`` updates on the device, ``offload/step.py`` on the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..config.layout import Piece
from .flat import Flat


class FlatStates(ABC):
    """The optimizer's states of one flat, by piece."""

    @abstractmethod
    def room_for(self, piece: Piece, name: str, dtype: torch.dtype) -> Tensor | None:
        """Memory for one state of a piece, to be filled; None if this optimizer has no such state."""

    @abstractmethod
    def take_scalars(self, piece: Piece, scalars: dict[str, Any], *, moments: bool) -> None:
        """Takes states that belong to the parameter as a whole. Called after the memory of ``room_for`` was filled.

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

    steered_by: torch.optim.Optimizer
    """The optimizer whose ``param_groups`` count. Users may replace the groups, so they are read in every step."""

    @property
    @abstractmethod
    def states_of(self) -> dict[Flat, FlatStates]:
        """The flats that live here, and the states of each."""

    @abstractmethod
    def update(self, order: list[Flat], step: int) -> Iterator[list[Flat]]:
        """Updates and publishes. Yields flats whose new values the next forward may gather already."""

    def before_step(self) -> None:
        """Called first in every step."""
        return

    def skip(self) -> None:
        """Called in place of ``update`` if a step is left out."""
        return

    def finish(self) -> None:
        """Publishes everything and waits until it is published."""
        return

    def wait(self) -> None:
        """Waits for updates, and publishes nothing."""
        return

    def settle(self) -> None:
        """Waits until nothing is under way on the host or the device."""
        return

    def progress(self) -> dict[str, int] | None:
        """Facts, apart from states, that the next step needs from the last one. None if there are none."""
        return None

    def load_progress(self, progress: dict[str, int]) -> None:
        """Takes what ``progress`` returned when a checkpoint was saved."""
        return
