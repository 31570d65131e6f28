"""Everything that belongs to one sharded model, and the way from a model or a parameter back to it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .comm import parallel
from .comm.fabric import Fabric
from .config.layout import UNLIMITED, find_units
from .config.options import AUTO, Activations, Config
from .config.table import Extent, state_table
from .init.materialise import adopt_values
from .observe.ledger import Ledger, Memory, Stats, StepTraffic
from .observe.shortage import Answer
from .offload.pipeline import Pipeline
from .offload.place import place_on_host
from .optim.answers import Answers
from .optim.loss_scale import LossScaler
from .optim.nonfinite import Faults
from .optim.optimizer import ShardedOptimizer
from .optim.treatment import Treatment
from .recompute.checkpoint import ActivationCheckpoints
from .recompute.choice import Choice, Sizes
from .schedule.gathering import Gathering
from .schedule.guards import Guards
from .schedule.hooks import Schedule
from .schedule.reads import Reads
from .schedule.reducer import Reducer
from .schedule.sleep import Sleep
from .schedule.structure import Structure
from .shown.placeholder import Placeholders
from .states.buffers import Buffers, make_ordinary
from .states.flat import SLEEPING, Flat
from .states.turns import Turns
from .states.unit import Unit, check_no_block_open
from .system import compat, compat_compile
from .system.hook import NotCopyable

_ATTRIBUTE = "_zeroshard_runtime"
_runtimes: weakref.WeakSet[Runtime] = weakref.WeakSet()


class Runtime(NotCopyable):
    """One sharded model: its units, its lanes to the other ranks, its schedule and its optimizer."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, config: Config, fabric: Fabric
    ) -> None:
        self.model, self.config, self.fabric = model, config, fabric
        assert config.stage != "auto", "chosen by shard()"
        self.stage = config.stage
        self.table = state_table(config.stage, fabric.shards, config.offload)
        placeholders = Placeholders(fabric.device)
        precision = config.precision
        itemsize = precision.parameters.itemsize if precision.parameters is not None else None
        specs = find_units(
            model,
            chosen=config.units,
            max_unit_bytes=config.max_unit_bytes,
            itemsize=itemsize,
            numel=parallel.share_numel,
        )
        self.units = [
            Unit(
                spec,
                table=self.table,
                precision=precision,
                max_bytes=config.max_unit_bytes,
                fabric=fabric,
                placeholders=placeholders,
            )
            for spec in specs
        ]
        self._check_keep()
        self.flats = [flat for unit in self.units for flat in unit.flats]
        self.unit_of = {id(p): unit for unit in self.units for flat in unit.flats for p in flat.parameters}
        self.scaler = LossScaler(precision.loss_scale) if precision.loss_scale is not None else None
        self._traffic = StepTraffic()
        self.plan_beside: Callable[[int], dict[str, Any]] | None = None
        """Says what the plan expects of this run and of other stages, given the micro-batches of a step."""

        turns = Turns()
        self.host = place_on_host(self.units, optimizer, config, fabric, turns)
        """The updates on the host, if any."""
        make_ordinary(model)
        adopt_values(model, self.units, fabric, config)
        self._buffers = Buffers(model, fabric)
        sharded_parameters = any(flat.sharded for flat in self.flats)
        root_last = config.offload is not None and config.offload.beside_backward
        self.reducer = Reducer(self.units, fabric, self._buffers, by_position=sharded_parameters, root_last=root_last)
        turns.order = self.reducer.publishing_order
        self.faults = Faults(config.on_nonfinite, fabric, self._buffers)
        self._structure = Structure(model, self.units)
        self.schedule = Schedule(
            model,
            self.units,
            self._structure,
            table=self.table,
            config=config,
            reducer=self.reducer,
            scaler=self.scaler,
            faults=self.faults,
            watchdog=fabric.watchdog,
        )
        self.answers = Answers(self.reducer.flats, fabric, self.scaler, self.agree, lambda: self.reducer.agreed)
        self.optimizer = None if optimizer is None else self._shard_optimizer(optimizer)
        self.ledger = Ledger(model, self.units, None if self.optimizer is None else self.optimizer.piece_states)
        self.checkpoints = self._watch_checkpoints()
        self._reads = Reads(self.units, self.schedule.lifetimes, fabric, refuse=config.reads == "raise")
        self.gathering = Gathering(self.units, fabric, check_awake=self.check_awake, finish_updates=self.finish_updates)
        self.sleep = Sleep(self.units, self.schedule, fabric, self.optimizer)
        self.guards = Guards(model, self.units, fabric.device, self.finish_updates)
        title = f"rank {fabric.rank}, in stage {self.stage}"
        self.shortage = Answer(model, self.units, self.ledger, title=title, device=fabric.device)
        object.__setattr__(model, _ATTRIBUTE, self)
        _runtimes.add(self)

    def _shard_optimizer(self, optimizer: torch.optim.Optimizer) -> ShardedOptimizer:
        flats = self.reducer.flats
        treatment = Treatment(flats, self.fabric, self.config.clip_grad_norm, self.scaler, self.faults)
        self.answers.told_norm = treatment.note_norm
        elsewhere = [] if self.host is None else [self.host]
        return ShardedOptimizer(optimizer, flats, self.fabric, passes=self, treatment=treatment, elsewhere=elsewhere)

    def _check_keep(self) -> None:
        names = {name for unit in self.units for name in (unit.name, unit.title)}
        for name in self.config.keep or ():
            if name not in names:
                titles = [unit.title for unit in self.units]
                raise ValueError(f"keep names {name!r}, which is no unit; units: {', '.join(titles)}")

    def _watch_checkpoints(self) -> ActivationCheckpoints | None:
        options = self.config.activations
        if options is None:
            return None
        if options.recompute and len(self.units) == 1:
            raise ValueError(
                "activations.recompute is about units, and the model has only the root unit; name its blocks with "
                "units=, or call zeroshard.checkpoint in its forward and pass Activations(recompute=0, ...)"
            )
        # Whole blocks, also those that are several units: every recomputed module stores its inputs.
        blocks = find_units(self.model, chosen=self.config.units, max_unit_bytes=UNLIMITED)[1:]
        chosen = options.recomputed([block.name for block in blocks])
        checkpoints = ActivationCheckpoints(options, self.fabric)
        checkpoints.attach(
            self.model,
            [(block.name, block.module) for block, is_recomputed in zip(blocks, chosen, strict=True) if is_recomputed],
        )
        if options.recompute == AUTO:
            checkpoints.choice = self._choice([block.module for block in blocks], options)
        return checkpoints

    def _choice(self, blocks: list[nn.Module], options: Activations) -> Choice:
        """For ``recompute="auto"``."""
        if self.table.parameters.extent is Extent.SHARD and len(blocks) < len(self.units) - 1:
            raise ValueError(
                'activations.recompute="auto" lets each rank choose by its own inputs, and in stage 3 a block that is '
                "larger than max_unit_bytes makes other collectives where it is recomputed; raise max_unit_bytes, or "
                "give a share or names of blocks"
            )
        optimizer, fabric = self.optimizer, self.fabric
        return Choice(
            blocks,
            fabric.device,
            fabric.device_ranks,
            inputs_count=options.offload or (options.partition and fabric.model.world > 1),
            has_states=lambda: optimizer is not None and optimizer.steps > optimizer.skipped_steps,
            backwards=lambda: self.reducer.backwards,
        )

    # -- parameters -----------------------------------------------------------------------------------------------

    def finish_updates(self) -> None:
        """Waits for updates on the host, and publishes delayed ones."""
        if self.optimizer is not None:
            self.optimizer.finish_updates()

    def synchronize(self) -> None:
        """Waits for updates that are under way, so that parameters that are whole at rest can be read."""
        with self.fabric.watchdog.during("synchronize()"):
            self.finish_updates()
            for flat in self.flats:
                flat.wait_if_whole()

    @contextmanager
    def gathered_gradients(self) -> Iterator[None]:
        """Inside, ``parameter.grad`` shows whole averaged gradients. What the user does to them counts."""
        for flat in self.reducer.flats:
            flat.home.check_readable()
        with self.fabric.watchdog.during("gathered_gradients()"):
            self.agree("gathered_gradients()")
        with self.reducer.gathered():
            yield

    # -- statistics -----------------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        optimizer = self.optimizer
        norm = optimizer.grad_norm if optimizer is not None else None
        memory, host_memory = self.ledger.now(), self.host_memory()
        if self.sleep.asleep:
            memory, host_memory = memory.asleep(host_memory)
        return Stats(
            **vars(self._traffic),
            stage=self.stage,
            parameters=sum(flat.layout.parameters for flat in self.flats),
            padded_parameters=sum(flat.layout.numel for flat in self.flats),
            kept_parameters=self.kept_parameters,
            memory=memory,
            host_memory=host_memory,
            memory_at_step=self.ledger.at_step(),
            grad_norm=None if norm is None or compat.is_fake(norm) else float(norm),
            steps=0 if optimizer is None else optimizer.steps,
            skipped_steps=0 if optimizer is None else optimizer.skipped_steps,
            loss_scale=None if self.scaler is None else self.scaler.scale,
            stop_reason=self.faults.stop_reason,
            recomputed_blocks=0 if self.checkpoints is None else self.checkpoints.recomputed,
            exposed_waits=self.fabric.waits.seconds(),
            recompute_reason=None if self._chooses is None else self._chooses.reason,
        )

    @property
    def kept_parameters(self) -> int:
        """Ψ_kept: flat elements of units that stay gathered from forward to backward."""
        kept = [u for u in self.units if self.schedule.lifetimes.kept(u) and any(flat.sharded for flat in u.flats)]
        return sum(unit.numel for unit in kept)

    @property
    def traffic(self) -> StepTraffic:
        """What the last completed step moved."""
        return self._traffic

    def start_recomputing(self, blocks: int, sizes: Sizes, reason: str) -> None:
        """Takes the plan's decision on how many blocks to recompute, for inputs of these sizes."""
        if self._chooses is not None:
            self._chooses.start(blocks, sizes, reason)
            if self.fabric.rank == 0:
                print(f"zeroshard: {reason}")

    @property
    def _chooses(self) -> Choice | None:
        return None if self.checkpoints is None else self.checkpoints.choice

    @property
    def pipeline(self) -> Pipeline | None:
        """The host's threads and streams, if states live there."""
        return None if self.host is None else self.host.pipeline

    def host_memory(self) -> Memory | None:
        """This rank's states and activation checkpoints in host memory; None if there are none."""
        pool = None if self.checkpoints is None else self.checkpoints.store.host
        if self.host is None and pool is None:
            return None
        ring = 0 if self.host is None else self.host.pipeline.ring_bytes
        return self.ledger.on_host(ring, 0 if pool is None else pool.bytes)

    # -- for the optimizer's step (``optim.optimizer.Passes``) ----------------------------------------------------

    @property
    def order(self) -> list[Flat]:
        return self.reducer.publishing_order()[::-1]

    def check_ready(self, doing: str) -> None:
        check_no_block_open(self.units, doing)
        self.check_awake(doing)

    def check_awake(self, doing: str) -> None:
        """Raises while states wait in host memory."""
        if self.sleep.asleep:
            raise RuntimeError(f"{doing} while {SLEEPING}")

    def check_structure(self) -> None:
        self._structure.check()

    def agree(self, purpose: str) -> None:
        self.schedule.discard_failed_backward()
        if self._chooses is not None:
            self.reducer.recompute_asked = self._chooses.vote
        with compat.label("zeroshard.agree"):
            is_new = self.reducer.agree(purpose)
        if self._chooses is not None:
            told = self._chooses.settle(self.reducer.recompute_agreed)
            if told is not None and self.fabric.rank == 0:
                print(f"zeroshard: {told}")
        if is_new and self.optimizer is not None:
            self.optimizer.gradients_came()

    def begin_step(self) -> None:
        self.schedule.lifetimes.begin_step()
        self.ledger.note_step()

    def updated(self, outdated: Set[Flat]) -> None:
        self.schedule.lifetimes.prepare_forward(outdated)

    def failed(self, error: Exception) -> None:
        self.shortage.note(error)

    def end_step(self) -> None:
        self.reducer.clear()
        self.schedule.lifetimes.end_step()
        if self._chooses is not None:
            self._chooses.end_step()
        self._buffers.follow_rank_zero()
        self.fabric.waits.read()
        volume = self.fabric.take_volume()
        self._traffic = StepTraffic(
            volume=volume.shards,
            volume_between=volume.replicas,
            volume_model=volume.model,
            host_traffic={} if self.host is None else self.host.pipeline.take_traffic(),
            checkpoint_traffic={} if self.checkpoints is None else self.checkpoints.store.take_traffic(),
        )


def runtime_of(model: nn.Module) -> Runtime:
    """The runtime of a sharded model. ``torch.compile(model)`` is as good as the model."""
    found = model.__dict__.get(_ATTRIBUTE) or compat_compile.uncompiled(model).__dict__.get(_ATTRIBUTE)
    if not isinstance(found, Runtime):
        raise ValueError(f"this {type(model).__name__} is not sharded; pass the model that zeroshard.shard() returned")
    return found


def is_sharded(model: nn.Module) -> bool:
    """Whether a parameter of this module belongs to a sharded model."""
    members = {id(parameter) for parameter in model.parameters()}
    return any(not members.isdisjoint(runtime.unit_of) for runtime in _runtimes)


def runtimes_of_parameters(parameters: Iterable[nn.Parameter]) -> dict[Runtime, list[Unit]]:
    """The units of the given parameters, by runtime. Each unit is there once, in the order of the parameters."""
    found: dict[Runtime, dict[Unit, None]] = {}
    for parameter in parameters:
        for runtime in _runtimes:
            unit = runtime.unit_of.get(id(parameter))
            if unit is not None:
                found.setdefault(runtime, {})[unit] = None
                break
        else:
            raise ValueError(f"a parameter of shape {tuple(parameter.shape)} belongs to no sharded model")
    return {runtime: list(units) for runtime, units in found.items()}
