"""What the optimizer asks of the host: rules by value, one update a unit, and states that wait to be read."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..comm.fabric import DisagreementError
from ..config.offload import Offload
from ..offload.kernel import Rule
from ..offload.pipeline import Factor, Pipeline
from ..offload.rules import moment_names, rule_of
from ..offload.shard import HostShard
from ..states.flat import Flat, MasterPiece, gradient_of


class HostUpdate:
    """Updates of the flats whose states live on the host."""

    def __init__(
        self,
        flats: Iterable[Flat],
        pipeline: Pipeline,
        optimizer: torch.optim.Optimizer,
        rank: int,
        group_of: Callable[[Flat, MasterPiece], dict[str, Any]],
        state: defaultdict[Tensor, dict[str, Any]],
        check_nothing_held: Callable[[str], None],
    ) -> None:
        self.flats = [flat for flat in flats if flat.host is not None]
        self.pipeline, self._rank = pipeline, rank
        self._optimizer, self._group_of, self._state = optimizer, group_of, state
        self._options: Offload = pipeline.options
        self._check_nothing_held = check_nothing_held
        self._moments = moment_names(optimizer)
        self._counts: dict[Tensor, int] = {}
        """Steps that each piece has made."""
        self._delaying = False
        self._micro_batches = 1
        """Backward passes that made up the last step."""
        self._frozen: list[dict[str, Any]] | None = None
        """Hyper-parameters as they were when a backward that updates began."""
        for flat in self.flats:
            gradient_of(flat).live_on(_host_of(flat), partial(self.deliver, flat))

    # -- in backward ----------------------------------------------------------------------------------------------

    def deliver(self, flat: Flat, gradient: Tensor, complete: bool) -> bool:
        """Takes a gradient in backward. False if it must wait for the step."""
        host = _host_of(flat)
        if not self._options.update_in_backward:
            # All micro-batches of a step see one version of the parameters: what the device still needs is published
            # in step() instead.
            if host.held and self._micro_batches == 1:
                self._check_nothing_held("a backward that publishes a delayed update")
                host.held = False
                host.receive(gradient, flat.expect_update())
                return True
            if self._delaying and self._micro_batches == 1 and host.received:
                self._micro_batches = host.received + 1
                warnings.warn(
                    "offload.delayed_update_after: this step has more micro-batches than the one before, so the later "
                    "ones ran on newer parameters than the first; this happens once",
                    stacklevel=2,
                )
            host.receive(gradient)
            return True
        host.check_not_updated()
        if not complete or gradient_of(flat).present:
            # Some rank may have used what this one has not: the ranks agree on that in step(). Or it comes in parts.
            return False
        self._check_nothing_held("a backward that updates")
        if self._frozen is None:
            self._frozen = self._settings()
        self._update_early(flat, gradient)
        return True

    def _update_early(self, flat: Flat, gradient: Tensor) -> None:
        host = _host_of(flat)
        host.update_early(gradient, self._rules(flat, [True] * len(flat.parameters)), flat.expect_update())

    # -- in step() ------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Before a step: parameters that no forward asked for since the last one are brought where they belong."""
        for flat in self.flats:
            if not gradient_of(flat).present:
                flat.wait_if_whole()

    def update(self, order: list[Flat], step: int) -> None:
        """Updates all flats that have a gradient, in the order in which the next forward needs them.

        Where the update is delayed, it is in the order in which the next backward brings new gradients.
        """
        after = self._options.delayed_update_after
        delayed = after is not None and step > after
        self._delaying = delayed
        self.publish_held()  # of units that got no gradient since, or several
        self._micro_batches = max([1, *(_host_of(flat).received for flat in self.flats)])
        self._check_settings()
        flats = [flat for flat in (order if delayed else order[::-1]) if flat.host is not None]
        early = [flat for flat in flats if _host_of(flat).updated_early]
        waiting = [flat for flat in flats if not _host_of(flat).updated_early and any(gradient_of(flat).used)]
        for flat in waiting:
            if not gradient_of(flat).present:
                raise missing_gradient(flat, self._rank)
        for flat in early:
            _host_of(flat).acknowledge()
        if self._options.update_in_backward:
            for flat in waiting:
                self._update_late(flat)
        else:
            self._update_all(waiting, delayed)
        if self._options.blocking:
            self.pipeline.wait()

    def _update_all(self, flats: list[Flat], delayed: bool) -> None:
        values = [gradient_of(flat).take_for_host()[1] for flat in flats]
        factors = {value: Factor(value) for value in dict.fromkeys(values)}
        rules = [self._rules(flat, gradient_of(flat).used) for flat in flats]
        hosts = [_host_of(flat) for flat in flats]
        with self.pipeline.failing_together():  # from here on somebody may wait for what is asked for
            publications = [None if delayed else flat.expect_update() for flat in flats]
            over = self.pipeline.now()
            for host, rule, value, publication, following in zip(
                hosts, rules, values, publications, [*hosts, None][1:], strict=True
            ):
                host.update(rule, factors[value], over, publication, following)

    def _update_late(self, flat: Flat) -> None:
        gradient = gradient_of(flat)
        held, _ = gradient.take_for_host()
        assert held is not None
        host = _host_of(flat)
        host.update_early(held, self._rules(flat, gradient.used), flat.expect_update())
        host.acknowledge()

    def _settings(self) -> list[dict[str, Any]]:
        return [
            {key: float(v) if isinstance(v, Tensor) else v for key, v in group.items() if key != "params"}
            for group in self._optimizer.param_groups
        ]

    def _check_settings(self) -> None:
        before, self._frozen = self._frozen, None
        if before is None:
            return
        for old, new in zip(before, self._settings(), strict=True):
            for name, value in new.items():
                if old.get(name) != value:
                    raise RuntimeError(
                        f"offload.update_in_backward: {name!r} was changed after backward had begun to update with it; "
                        "change hyper-parameters after step(), or leave the option out"
                    )

    # -- rules and states -----------------------------------------------------------------------------------------

    def _rules(self, flat: Flat, used: Sequence[bool]) -> dict[int, Rule]:
        """This step's rule for the parameters in use, of those that this rank has a piece of."""
        rules: dict[int, Rule] = {}
        made: dict[tuple[int, int], Rule] = {}  # pieces of one group have mostly made as many steps
        for piece in flat.pieces:
            if used[piece.slot]:
                count = self._counts[piece.tensor] = self._counts.get(piece.tensor, 0) + 1
                group = self._group_of(flat, piece)
                key = (id(group), count)
                if key not in made:
                    made[key] = rule_of(self._optimizer, group, count)
                rules[piece.slot] = made[key]
                if count == 1:
                    self._show_moments(flat, piece)
        return rules

    def _show_moments(self, flat: Flat, piece: MasterPiece) -> None:
        self._state[piece.tensor].update({name: self._moment(flat, piece, name) for name in self._moments})

    def show_steps(self) -> None:
        """Brings the step numbers in the optimizer's state up to date, which no update needs.

        Moments in 16 bits are rounded by them, so that whoever loads the state needs them, also SGD's.
        """
        if "exp_avg" in self._moments or self._options.moments is not torch.float32:
            for piece, count in self._counts.items():
                self._state[piece]["step"] = torch.tensor(float(count))

    def _moment(self, flat: Flat, piece: MasterPiece, name: str) -> Tensor:
        return _host_of(flat).states.tensors[name][piece.offset :][: piece.tensor.numel()]

    def load(self, flat: Flat, piece: MasterPiece, state: dict[str, Any]) -> None:
        """Takes one parameter's whole state, as torch's optimizers have it. The master is loaded apart."""
        count = int(state.get("step", 1 if state.get("momentum_buffer") is not None else 0))
        if count:
            self._counts[piece.tensor] = count
            self._show_moments(flat, piece)
        for name in self._moments:
            value = state.get(name)
            if value is not None:
                part = flat.layout.slots[piece.slot].part(value).reshape(-1)[piece.start :][: piece.tensor.numel()]
                self._moment(flat, piece, name).copy_(part)

    def has_moment(self, name: str) -> bool:
        """Whether the host keeps this."""
        return name in self._moments

    def room_for(self, flat: Flat, piece: MasterPiece, name: str) -> Tensor | None:
        """The memory of one moment of a piece; None if there is no such moment."""
        return self._moment(flat, piece, name) if name in self._moments else None

    def set_count(self, flat: Flat, piece: MasterPiece, count: int) -> None:
        """After the moments of a piece were filled."""
        if count:
            self._counts[piece.tensor] = count
            self._show_moments(flat, piece)

    def progress(self) -> dict[str, int]:
        """What the next step takes from the last one, besides states."""
        return {"delaying": int(self._delaying), "micro_batches": self._micro_batches}

    def load_progress(self, progress: dict[str, int]) -> None:
        """Goes on from what ``progress`` gave."""
        self._delaying, self._micro_batches = bool(progress["delaying"]), progress["micro_batches"]

    @property
    def delays(self) -> bool:
        """Whether updates may be held back."""
        return self._options.delayed_update_after is not None

    def forget_states(self) -> None:
        """Before a state is loaded."""
        self.pipeline.wait()
        self._counts.clear()
        for flat in self.flats:
            for name in self._moments:
                _host_of(flat).states.tensors[name].zero_()

    def publish_held(self) -> None:
        """Makes delayed updates visible now. The next step then runs on them."""
        for flat in self.flats:
            host = _host_of(flat)
            if host.held:
                host.held = False
                host.publish_held(flat.expect_update())


def missing_gradient(flat: Flat, rank: int) -> DisagreementError:
    """What a rank says that has nothing to update with when others have."""
    return DisagreementError(
        f"rank {rank} has no gradient of {flat.label!r} and another rank has: it was zeroed here and not there; call "
        "zero_grad() on all ranks alike"
    )


def _host_of(flat: Flat) -> HostShard:
    assert flat.host is not None
    return flat.host
