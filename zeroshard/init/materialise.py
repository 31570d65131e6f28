"""The first values: a unit's parameters move from wherever they are into its flats, one unit at a time.

They come from the model itself, from files (``weights=``), or, for a model on the meta device, from initialisers. The
latter run as this loop would on the unsharded model, so that one seed gives the same weights in every stage and world:

- with ``init=`` a callable, ``for module in model.modules(): init(module)``;
- else ``for module in model.modules(): module.reset_parameters()``, for those that have it;
- inside a Hugging Face model, its ``_init_weights(module)`` on every module, children before parents as its own
  ``initialize_weights()`` does: GPT-2's attention, for one, scales down what its child has just been given.

A parameter that tensor parallelism divides is initialised whole, and each rank takes its part, so that the degree makes
no difference either: initialisers get a plain tensor in place of the DTensor.

A unit's whole memory comes into being when an initialiser first touches one of its parameters, and is given back when
the loop leaves it, so that no more than the root unit and one other is whole. (An initialiser that by itself touches
more than one unit has them all, as long as it runs.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from ..comm import parallel
from ..comm.fabric import Fabric
from ..config.options import EMPTY, Config
from ..states.flat import Flat, Presence
from ..states.unit import Unit
from ..system import compat
from .initialisers import call, certainly_unset, steps_of
from .meta import blank_buffers, blank_value, has_nan, meta_again_after_an_error, point_at, refuse_unset, take_off_meta
from .weights import Weights


def adopt_values(model: nn.Module, units: list[Unit], fabric: Fabric, config: Config) -> None:
    """Fills every flat, and takes rank 0's buffers."""
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    if config.init is not None and not on_meta:
        raise ValueError(
            f"init={config.init!r} has no effect on a model that has values; leave it out, or build the model under "
            "torch.device('meta')"
        )
    with torch.no_grad(), meta_again_after_an_error(model):
        if config.weights is not None:
            _read(model, units, fabric, config.weights, config)
        elif config.init == EMPTY:
            _leave_empty(model, units, fabric)
        elif on_meta:
            _initialise(model, units, fabric, config)
        else:
            for unit in units:
                for flat in unit.flats:
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
    """The units whose parameters are whole at the moment: any that an operation inside the ``with`` block touches."""

    def __init__(self, units: list[Unit], fabric: Fabric) -> None:
        super().__init__()
        self._fabric = fabric
        self._unit_of = {id(p): unit for unit in units for flat in unit.flats for p in flat.parameters}
        self._open: dict[Unit, list[Tensor]] = {}
        self._unset: dict[Unit, list[tuple[str, str]]] = {}
        self._stand_ins: dict[int, Tensor] = {}
        """By id of a DTensor of an open unit: the plain whole tensor that initialisers get."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors_in((args, kwargs)):
            unit = self._unit_of.get(id(tensor))
            if unit is not None:
                self.open(unit)
        if self._stand_ins:
            args, kwargs = self._replaced(args), self._replaced(kwargs)
        return func(*args, **(kwargs or {}))

    def _replaced(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._stand_ins.get(id(value), value)
        if isinstance(value, dict):
            return {key: self._replaced(entry) for key, entry in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._replaced(entry) for entry in value)
        return value

    def has(self, unit: Unit) -> bool:
        return unit in self._open

    def open(self, unit: Unit) -> None:
        if unit in self._open:
            return
        self._open[unit] = []
        for flat in unit.flats:
            # In the dtype that the model was built with: others draw other random numbers.
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
        """Takes rank 0's values and gives the whole back. It can be opened again."""
        self._unset[unit] = []
        for flat, origin in zip(unit.flats, self._open.pop(unit), strict=True):
            for slot, view, parameter in zip(flat.layout.slots, flat.views_of(origin), flat.parameters, strict=True):
                whole = self._stand_ins.pop(id(parameter), None)
                if whole is not None:
                    self._fabric.broadcast(whole.data)
                    view.copy_(slot.part(whole.data))
                if has_nan(view):
                    module, _, name = slot.name.rpartition(".")
                    self._unset[unit].append((module, name))
            flat.presence = Presence.PRESENT
            flat.adopt(origin.to(flat.master_dtype))

    def leave(self, unit: Unit) -> None:
        """Closes a unit, also one that no initialiser has touched, say because ``init`` acts on rank 0 alone."""
        if unit not in self._unset:
            self.open(unit)
        if unit in self._open:
            self.close(unit)

    @property
    def unset(self) -> list[tuple[str, str]]:
        """Module and name of the parameters that still have elements nobody wrote to."""
        return [entry for entries in self._unset.values() for entry in entries]

    def _whole_master(self, flat: Flat) -> Tensor:
        if flat.master.numel() == flat.layout.numel:
            return flat.master
        whole = torch.empty(flat.layout.numel, dtype=flat.master.dtype, device=flat.master.device)
        self._fabric.gathers.all_gather(whole, flat.master, flat.label).wait()
        return whole


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _tensors_in(entry)


# -- the three ways off the meta device -------------------------------------------------------------------------------


def _initialise(model: nn.Module, units: list[Unit], fabric: Fabric, config: Config) -> None:
    steps = steps_of(model, config)
    names = {module: name for name, module in model.named_modules()}
    refuse_unset(model, [entry for step in steps for entry in certainly_unset(step, names)], fabric)
    blanks = blank_buffers(model, fabric.device)
    open_units = _OpenUnits(units, fabric)
    members = {unit: set(unit.module.modules()) for unit in units}  # of the root unit: all
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        if step.initialise is not None:
            with open_units:
                call(step.initialise, names[step.module])
        for unit in units:  # in the same order on all ranks
            inside = following is not None and following.module in members[unit]
            if not inside and (step.module in members[unit] or open_units.has(unit)):
                open_units.leave(unit)
    fabric.take_volume()  # units that were opened twice are no step's volume
    unset = [(names[blank.module], blank.name) for blank in blanks if not blank.written()]
    refuse_unset(model, [*open_units.unset, *unset], fabric)


def _read(model: nn.Module, units: list[Unit], fabric: Fabric, path: Path, config: Config) -> None:
    with _one_for_all(fabric):
        weights = Weights(path, model)
    if len(set(fabric.gather_objects(weights.checksum))) > 1:
        raise ValueError(
            f"weights={str(path)!r} has other names, shapes or dtypes on some ranks; all must see the same"
        )
    names = {module: name for name, module in model.named_modules()}
    blanks = blank_buffers(model, fabric.device)
    not_there = [blank for blank in blanks if not weights.holds(blank.value)]
    if config.init is not None and not not_there:
        raise ValueError(f"init={config.init!r} has no effect: weights= holds every parameter and buffer; leave it out")
    for step in steps_of(model, config):
        if step.initialise is not None and any(blank.module is step.module for blank in not_there):
            # Parameters are on meta still: what an initialiser does to them has no effect and draws no numbers.
            call(step.initialise, names[step.module])
    refuse_unset(model, [(names[blank.module], blank.name) for blank in not_there if not blank.written()], fabric)
    with _one_for_all(fabric):
        for flat in (flat for unit in units for flat in unit.flats):
            values = take_off_meta(flat, fabric.device)
            weights.read_flat(flat, values)
            flat.keep(values)
        for buffer in model.buffers():
            if weights.holds(buffer):
                weights.read_buffer(buffer)


def _leave_empty(model: nn.Module, units: list[Unit], fabric: Fabric) -> None:
    for flat in (flat for unit in units for flat in unit.flats):
        flat.keep(take_off_meta(flat, fabric.device))
    for blank in blank_buffers(model, fabric.device):
        blank.value.zero_()


@contextmanager
def _one_for_all(fabric: Fabric) -> Iterator[None]:
    """What goes wrong with files on one rank is raised on all of them, or the others would wait for it."""
    problem = ""
    try:
        yield
    except (ValueError, OSError, SafetensorError) as error:
        problem = str(error)
    everybody = fabric.gather_objects(problem)
    rank = next((rank for rank, text in enumerate(everybody) if text), None)
    if rank is not None:
        raise ValueError(everybody[rank] if all(everybody) else f"rank {rank}: {everybody[rank]}")
