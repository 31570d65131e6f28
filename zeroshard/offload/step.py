"""A step of the flats whose home is the host: which flats are updated, in which order, with which rules."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..config.offload import Offload
from ..shown.factors import multiplier
from ..states.flat import Flat
from ..states.unit import Unit, check_no_block_open
from ..states.updates import FlatStates, Updates
from ..system.waits import Cause
from .home import HostHome
from .pipeline import HostFactor, Pipeline
from .rules import Rule, moment_names, rule_of
from .update import Update


class HostStep(Updates):
    """The updates of one model on the host."""

    def __init__(self, pipeline: Pipeline, units: Sequence[Unit], optimizer: torch.optim.Optimizer | None) -> None:
        self.pipeline, self._units, self._optimizer = pipeline, units, optimizer
        self._options: Offload = pipeline.options
        self.homes: dict[Flat, HostHome] = {}
        """The homes of the trainable flats whose states live on the host."""
        self._delaying = False
        """Whether this step's updates are held back."""
        self._micro_batches = 1
        """Micro-batches of the last step."""
        self._settings: list[dict[str, Any]] | None = None
        """Hyper-parameters at the first update of this backward, with ``update_in_backward``."""
        self._moments = () if optimizer is None else moment_names(optimizer)
        groups = [] if optimizer is None else optimizer.param_groups
        self._number = {id(parameter): number for number, group in enumerate(groups) for parameter in group["params"]}

    # -- called by homes, in backward -----------------------------------------------------------------------------

    @property
    def in_backward(self) -> bool:
        """Whether updates are made in backward."""
        return self._options.update_in_backward

    @property
    def counts_matter(self) -> bool:
        """Whether step counts belong to the state: Adam needs them, and stochastic rounding of moments too."""
        return "exp_avg" in self._moments or self._options.moments is not torch.float32

    def publishes_with(self, home: HostHome) -> bool:
        """Whether a held update is published when this gradient comes: the device does not need the old values then.

        All micro-batches of a step must see the same parameters. So if the last step had several, the held update is
        published in ``step()`` instead.
        """
        if home.held and self._micro_batches == 1:
            check_no_block_open(self._units, "a backward that publishes a delayed update")
            home.held = False
            return True
        if self._delaying and self._micro_batches == 1 and home.received:
            self._micro_batches = home.received + 1
            warnings.warn(
                "offload.delayed_update_after: this step has more micro-batches than the one before, so the later "
                "ones ran on newer parameters than the first; this happens once",
                stacklevel=2,
            )
        return False

    def begin_updates(self) -> None:
        """Called before every update in backward. From now on hyper-parameters may not change until the step."""
        check_no_block_open(self._units, "a backward that updates")
        if self._settings is None:
            self._settings = self._read_settings()

    def rules(self, home: HostHome, used: Sequence[bool]) -> dict[int, Rule]:
        """This step's rules, for the parameters in use that this rank has a piece of. Counts the step."""
        assert self._optimizer is not None
        rules: dict[int, Rule] = {}
        made: dict[tuple[int, int], Rule] = {}  # most pieces of a group have made the same number of steps
        for piece in home.counts:
            if used[piece.slot]:
                home.counts[piece] += 1
                group = self.steered_by.param_groups[self._number[id(home.flat.parameters[piece.slot])]]
                key = (id(group), home.counts[piece])
                if key not in made:
                    made[key] = rule_of(self._optimizer, group, home.counts[piece])
                rules[piece.slot] = made[key]
        return rules

    # -- called by the optimizer, in step() -----------------------------------------------------------------------

    @property
    def states_of(self) -> dict[Flat, FlatStates]:
        return dict(self.homes)

    def before_step(self) -> None:
        """Waits for the last update of flats that no forward has used since."""
        for flat, home in self.homes.items():
            if not home.has_gradient:
                flat.wait_if_whole()

    def update(self, order: list[Flat], step: int) -> Iterator[list[Flat]]:
        """Asks for the updates of all flats that have a gradient, in the order in which the next forward needs them.

        Delayed updates are asked for in the order in which the next backward brings new gradients. The updates are
        still running when this returns, so it yields nothing.
        """
        after = self._options.delayed_update_after
        self._delaying = after is not None and step > after
        self.skip()  # flats that got no gradient, or several, since the last step still have a held update
        self._micro_batches = max([1, *(home.received for home in self.homes.values())])
        self._check_settings()
        homes = [self.homes[flat] for flat in (order if self._delaying else order[::-1]) if flat in self.homes]
        waiting = [home for home in homes if not home.updated_early and any(home.flat.gradient.used)]
        for home in waiting:
            if not home.has_gradient:
                raise home.flat.gradient.missing()
        for home in homes:
            if home.updated_early:
                home.acknowledge()
        if self._options.update_in_backward:
            for home in waiting:
                home.update_late()
        else:
            self._update_all(waiting)
            self.pipeline.part_norms.end_step()
        if self._options.blocking:
            began = self.pipeline.waits.begin()
            self.pipeline.wait()
            self.pipeline.waits.end(Cause.HOST_UPDATE, began)
        return iter(())

    def _update_all(self, homes: list[HostHome]) -> None:
        groups = [home.factors.groups(home.flat.gradient.there) or {(): []} for home in homes]
        rules = [self.rules(home, home.flat.gradient.used) for home in homes]
        device = self.pipeline.device
        # One object for equal factors of all flats: flats with the same factor are updated together.
        made = {scaling: HostFactor(multiplier(scaling, device)) for group in groups for scaling in group}
        factors = [[(made[scaling], slots) for scaling, slots in group.items()] for group in groups]
        with self.pipeline.failing_together():  # from here on a forward may wait for these updates
            publications = [home.expect_step(delayed=self._delaying) for home in homes]
            free = self.pipeline.now()
            updates = [
                Update(home.transfer, rule, factor, free, publication)
                for home, rule, factor, publication in zip(homes, rules, factors, publications, strict=True)
            ]
            for update, following in pairwise(updates):
                update.following = following.transfer
            for home, update in zip(homes, updates, strict=True):
                home.update(update)

    def skip(self) -> None:
        """Publishes held updates. They belong to the last step, so they count even if this step is left out."""
        for home in self.homes.values():
            home.publish_held()

    def finish(self) -> None:
        self.skip()
        self.pipeline.wait()

    def wait(self) -> None:
        self.pipeline.wait()

    def settle(self) -> None:
        self.pipeline.settle()

    def _read_settings(self) -> list[dict[str, Any]]:
        return [
            {key: float(v) if isinstance(v, Tensor) else v for key, v in group.items() if key != "params"}
            for group in self.steered_by.param_groups
        ]

    def _check_settings(self) -> None:
        before, self._settings = self._settings, None
        if before is None:
            return
        for old, new in zip(before, self._read_settings(), strict=True):
            for name, value in new.items():
                if old.get(name) != value:
                    raise RuntimeError(
                        f"offload.update_in_backward: {name!r} was changed after backward had begun to update with it; "
                        "change hyper-parameters after step(), or leave the option out"
                    )

    # -- for checkpoints ------------------------------------------------------------------------------------------

    def progress(self) -> dict[str, int]:
        return {"delaying": int(self._delaying), "micro_batches": self._micro_batches}

    def load_progress(self, progress: dict[str, int]) -> None:
        self._delaying, self._micro_batches = bool(progress["delaying"]), progress["micro_batches"]
