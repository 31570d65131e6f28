"""The first values: the parameters of a unit move into its flats, one unit at a time.

Values come from the model itself, from files (``weights=``), or, for a model on the meta device, from initialisers.
Initialisers run as one of these loops would on the unsharded model. So one seed gives the same weights in every stage
and world size:

- with ``init=`` a function, ``for module in model.modules(): init(module)``;
- else ``for module in model.modules(): module.reset_parameters()``, for modules that have it;
- inside a Hugging Face model, its ``_init_weights(module)`` on every module, children before parents as its own
  ``initialize_weights()`` does. (In GPT-2 the attention scales down the new weights of its child.)

A parameter that tensor parallelism divides is initialised whole: initialisers get a plain tensor in place of the
DTensor, and each rank takes its part. So the degree of tensor parallelism makes no difference either.

A unit gets memory for its whole flats when an initialiser first touches one of its parameters. It gives the memory back
when the loop leaves the unit. So at most the root unit and one other unit are whole. (If one initialiser touches
several units, all of them are whole while it runs.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from ..comm import parallel
from ..comm.fabric import Fabric
from ..config.options import EMPTY, Config
from ..states.flat import Flat, Presence
from ..states.unit import Unit
from ..system import compat
from ..system.structures import map_tensors, tensors_in
from .initialisers import call, certainly_unset, visits_of
from .meta import blank_buffers, blank_value, has_nan, meta_again_after_an_error, point_at, refuse_unset, take_off_meta
from .weights import Weights


def adopt_values(model: nn.Module, units: list[Unit], fabric: Fabric, config: Config) -> None:
    """Fills every flat with its first values, and takes the buffers of rank 0."""
    flats = [flat for unit in units for flat in unit.flats]
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    if config.init is not None and not on_meta:
        raise ValueError(
            f"init={config.init!r} has no effect on a model that has values; leave it out, or build the model under "
            "torch.device('meta')"
        )
    with torch.no_grad(), meta_again_after_an_error(model):
        if config.weights is not None:
            _read(model, flats, fabric, config.weights, config)
        elif config.init == EMPTY:
            _leave_empty(model, flats, fabric)
        elif on_meta:
            _initialise(model, units, fabric, config)
        else:
            for flat in flats:
                _adopt(flat)
    for buffer in model.buffers():
        if not isinstance(buffer, DTensor):
            buffer.data = buffer.data.to(fabric.device)
    fabric.broadcast_together([parallel.local(buffer.data) for buffer in model.buffers()], divided=True)


def _adopt(flat: Flat) -> None:
    origin = flat.new_origin()
    for view, parameter in zip(flat.views_of(origin), flat.parameters, strict=True):
        view.copy_(parallel.local(parameter.data))
        compat.point(parameter, view)  # the old memory is given back now, not when the whole model has moved
    flat.adopt(origin)


class _OpenUnits(TorchFunctionMode):
    """The units whose parameters are whole now. An operation inside the ``with`` block opens every unit it touches."""

    def __init__(self, units: list[Unit], fabric: Fabric) -> None:
        super().__init__()
        self._fabric = fabric
        self._unit_of = {id(p): unit for unit in units for flat in unit.flats for p in flat.parameters}
        self._open: dict[Unit, list[Tensor]] = {}
        """The whole flats of each open unit."""
        self._unset: dict[Unit, list[str]] = {}
        """Of each unit that was closed: the parameters that still have elements without a value."""
        self._stand_ins: dict[int, Tensor] = {}
        """By id of a DTensor of an open unit: the plain whole tensor that initialisers get."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tensors_in((args, kwargs)):
            unit = self._unit_of.get(id(tensor))
            if unit is not None:
                self.open(unit)
        if self._stand_ins:
            args, kwargs = map_tensors(lambda tensor: self._stand_ins.get(id(tensor), tensor), (args, kwargs))
        return func(*args, **(kwargs or {}))

    def has(self, unit: Unit) -> bool:
        return unit in self._open

    def open(self, unit: Unit) -> None:
        if unit in self._open:
            return
        self._open[unit] = []
        for flat in unit.flats:
            # In the dtype that the model was built with: another dtype draws other random numbers.
            origin = torch.zeros(flat.layout.numel, dtype=flat.origin_dtype, device=self._fabric.device)
            if unit in self._unset:
                origin.copy_(self._whole_master(flat))
            else:
                for view in flat.views_of(origin):
                    view.fill_(blank_value(view.dtype))
            point_at(flat, origin)
            self._open[unit].append(origin)
            for slot, view, parameter in zip(flat.layout.slots, flat.views_of(origin), flat.parameters, strict=True):
                if isinstance(parameter, DTensor):
                    whole = torch.full(slot.whole_shape, blank_value(view.dtype), dtype=view.dtype, device=view.device)
                    if unit in self._unset:
                        whole.copy_(parallel.whole(parameter, view))
                    self._stand_ins[id(parameter)] = nn.Parameter(whole, requires_grad=parameter.requires_grad)

    def close(self, unit: Unit) -> None:
        """Takes the values of rank 0 and gives the whole flats back. The unit can be opened again."""
        self._unset[unit] = []
        for flat, origin in zip(unit.flats, self._open.pop(unit), strict=True):
            for slot, view, parameter in zip(flat.layout.slots, flat.views_of(origin), flat.parameters, strict=True):
                whole = self._stand_ins.pop(id(parameter), None)
                if whole is not None:
                    self._fabric.broadcast(whole.data)
                    view.copy_(slot.part(whole.data))
                if has_nan(view):
                    self._unset[unit].append(slot.name)
            flat.presence = Presence.PRESENT
            flat.adopt(origin.to(flat.master_dtype))

    def leave(self, unit: Unit) -> None:
        """Closes a unit, also a unit that no initialiser touched here, for example if ``init`` acts on rank 0 alone."""
        if unit not in self._unset:
            self.open(unit)
        if unit in self._open:
            self.close(unit)

    @property
    def unset(self) -> list[str]:
        """Names of the parameters that still have elements without a value."""
        return [name for names in self._unset.values() for name in names]

    def _whole_master(self, flat: Flat) -> Tensor:
        master = flat.home.master().to(self._fabric.device)
        if master.numel() == flat.layout.numel:
            return master
        whole = torch.empty(flat.layout.numel, dtype=master.dtype, device=master.device)
        self._fabric.gathers.all_gather(whole, master, flat.label).wait()
        return whole


# -- the three ways off the meta device -------------------------------------------------------------------------------


def _initialise(model: nn.Module, units: list[Unit], fabric: Fabric, config: Config) -> None:
    visits = visits_of(model, config)
    names = {module: name for name, module in model.named_modules()}
    refuse_unset(model, [name for visit in visits for name in certainly_unset(visit, names[visit.module])], fabric)
    blanks = blank_buffers(model, fabric.device)
    open_units = _OpenUnits(units, fabric)
    members = {unit: set(unit.module.modules()) for unit in units}  # all modules are members of the root unit
    for visit, following in zip(visits, [*visits[1:], None], strict=True):
        if visit.initialise is not None:
            with open_units:
                call(visit.initialise, names[visit.module])
        for unit in units:  # in the same order on all ranks
            inside = following is not None and following.module in members[unit]
            if not inside and (visit.module in members[unit] or open_units.has(unit)):
                open_units.leave(unit)
    fabric.take_volume()  # the volume of units that were opened twice belongs to no step
    refuse_unset(model, [*open_units.unset, *(blank.name for blank in blanks if not blank.written())], fabric)


def _read(model: nn.Module, flats: list[Flat], fabric: Fabric, path: Path, config: Config) -> None:
    with _one_for_all(fabric):
        weights = Weights(path, model)
    if len(set(fabric.gather_objects(weights.checksum))) > 1:
        raise ValueError(
            f"weights={str(path)!r} has other names, shapes or dtypes on some ranks; all must see the same"
        )
    names = {module: name for name, module in model.named_modules()}
    blanks = blank_buffers(model, fabric.device)
    not_there = [blank for blank in blanks if not weights.has(blank.value)]
    if config.init is not None and not not_there:
        raise ValueError(f"init={config.init!r} has no effect: weights= has every parameter and buffer; leave it out")
    for visit in visits_of(model, config):
        if visit.initialise is not None and any(blank.module is visit.module for blank in not_there):
            # Parameters are still on the meta device: setting them has no effect and draws no random numbers.
            call(visit.initialise, names[visit.module])
    refuse_unset(model, [blank.name for blank in not_there if not blank.written()], fabric)
    kept = [parameter for flat in flats for parameter in flat.parameters if weights.keeps(parameter)]
    for parameter in kept:
        parameter.data = parameter.data.to(fabric.device)
    fabric.broadcast_together([parameter.data for parameter in kept])
    with _one_for_all(fabric):
        for flat in flats:
            values = take_off_meta(flat, fabric.device)
            weights.read_flat(flat, values)
            flat.start_from(values)
        for buffer in model.buffers():
            if weights.has(buffer):
                weights.read_buffer(buffer)


def _leave_empty(model: nn.Module, flats: list[Flat], fabric: Fabric) -> None:
    for flat in flats:
        flat.start_from(take_off_meta(flat, fabric.device))
    for blank in blank_buffers(model, fabric.device):
        blank.value.zero_()


@contextmanager
def _one_for_all(fabric: Fabric) -> Iterator[None]:
    """If reading files fails on one rank, raises on all ranks. Otherwise the other ranks would wait for that rank."""
    problem = ""
    try:
        yield
    except (ValueError, OSError) as error:
        problem = str(error)
    everybody = fabric.gather_objects(problem)
    rank = next((rank for rank, text in enumerate(everybody) if text), None)
    if rank is not None:
        raise ValueError(everybody[rank] if all(everybody) else f"rank {rank}: {everybody[rank]}")
