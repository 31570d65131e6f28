"""The dynamic loss scale of fp16 runs."""

from __future__ import annotations

import math

from ..config.options import LossScale


class LossScaler:
    """The loss scale. A step that overflows lowers it. Many steps in a row without overflow raise it."""

    def __init__(self, config: LossScale) -> None:
        self._config = config
        self.scale = config.initial
        self._good_steps = 0
        self._overflows = 0
        """Overflows since the scale last rose."""

    def state(self) -> dict[str, float]:
        """The values that a checkpoint stores."""
        return {"scale": self.scale, "good_steps": self._good_steps, "overflows": self._overflows}

    def load(self, state: dict[str, float]) -> None:
        """Takes what ``state`` returned."""
        self.scale, self._good_steps = float(state["scale"]), int(state["good_steps"])
        self._overflows = int(state.get("overflows", 0))

    @property
    def can_be_lowered(self) -> bool:
        """Whether an overflow may be due to the scale."""
        return self.scale > self._config.minimum

    def update(self, overflowed: bool) -> None:
        if overflowed:
            self._overflows += 1
            self._good_steps = 0
            if self._overflows >= self._config.hysteresis:
                self.scale = max(self.scale / self._config.factor, self._config.minimum)
            return
        self._good_steps += 1
        if self._good_steps == self._config.growth_interval:
            self._good_steps = self._overflows = 0
            # A scale beyond fp32 would itself be infinite.
            self.scale = min(self.scale * self._config.factor, math.ldexp(1.0, 126))
