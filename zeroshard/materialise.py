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

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from . import compat, parallel
from .comm import Fabric
from .config import EMPTY, Config
from .flat import Flat, Presence
from .unit import Unit
from .weights import Weights


def adopt_values(model: nn.Module, units: list[Unit], fabric: Fabric, config: Config) -> None:
    """Fills every flat, and takes rank 0's buffers."""
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    if config.init is not None and not on_meta:
        raise ValueError(
            f"init={config.init!r} has no effect on a model that has values; leave it out, or build the model under "
            "torch.device('meta')"
        )
    with torch.no_grad(), _meta_again_after_an_error(model):
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
        fabric.broadcast(parallel.local(buffer.data), divided=True)


def _adopt(flat: Flat) -> None:
    origin = flat.new_origin()
    for view, parameter in zip(flat.views_of(origin), flat.parameters, strict=True):
        view.copy_(parallel.local(parameter.data))
        compat.point(parameter, view)  # the old memory is given back now, not when the whole model has moved
    flat.adopt(origin)


# -- memory for tensors on meta ---------------------------------------------------------------------------------------


def _give_memory(tensor: Tensor, memory: Tensor) -> None:
    """Takes a tensor off the meta device and keeps the object: the optimizer, the user and tied modules hold it."""
    if isinstance(tensor, DTensor):
        compat.point(tensor, memory.data)
        return
    if isinstance(tensor, nn.Parameter):
        real: Tensor = nn.Parameter(memory.data, requires_grad=tensor.requires_grad)  # .data: a version of its own
    else:
        real = memory.data
    real.__dict__.update(tensor.__dict__)
    torch.utils.swap_tensors(tensor, real)


def _point_at(flat: Flat, origin: Tensor) -> None:
    for view, parameter in zip(flat.views_of(origin), flat.parameters, strict=True):
        if parameter.is_meta:
            _give_memory(parameter, view)
        else:
            compat.point(parameter, view)


def _take_off_meta(flat: Flat, device: torch.device) -> Tensor:
    """Memory for what this rank keeps of a flat; its parameters have none of their own before that is filled."""
    for parameter in flat.parameters:
        if parameter.is_meta:
            nothing = torch.empty((), dtype=parameter.dtype, device=device)
            _give_memory(parameter, nothing.expand(parallel.local(parameter).shape))
    return torch.zeros(flat.kept.numel, dtype=flat.master_dtype, device=device)


@contextmanager
def _meta_again_after_an_error(model: nn.Module) -> Iterator[None]:
    """What shard() refuses, it leaves as it was."""
    parameters = [(p, torch.empty_like(parallel.local(p), device="meta")) for p in model.parameters() if p.is_meta]
    buffers = [(m, name, b) for m in model.modules() for name, b in m.named_buffers(recurse=False) if b.is_meta]
    try:
        yield
    except BaseException:
        for parameter, memory in parameters:
            if not parameter.is_meta:
                _give_memory(parameter, memory)
        for module, name, buffer in buffers:
            if not buffer.is_meta:
                _give_memory(buffer, torch.empty_like(buffer, device="meta"))
            setattr(module, name, buffer)
        raise


# -- values that nobody wrote -----------------------------------------------------------------------------------------


class _Blank(NamedTuple):
    """A buffer that got memory, and how to tell whether somebody wrote to it."""

    module: nn.Module
    name: str
    value: Tensor
    version: int

    def written(self) -> bool:
        now = getattr(self.module, self.name)
        if now is None or now.is_meta or now.numel() == 0:
            return now is None or not now.is_meta
        if now is not self.value or compat.version(now) != self.version:
            return not _has_nan(now)
        return not bool((now == _blank_value(now.dtype)).all()) and not _has_nan(now)


def _blank_value(dtype: torch.dtype) -> float | bool:
    """What stands in memory that nobody has written to: NaN, or what comes nearest."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype is torch.bool else torch.iinfo(dtype).min


def _has_nan(tensor: Tensor) -> bool:
    if tensor.itemsize == 1 and tensor.is_floating_point():
        tensor = tensor.float()
    return bool(tensor.isnan().any())


def _blank_buffers(model: nn.Module, device: torch.device) -> list[_Blank]:
    """Gives memory to all buffers on meta. They are whole on every rank, as they stay."""
    blanks = []
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                _give_memory(buffer, torch.full_like(buffer, _blank_value(buffer.dtype), device=device))
                blanks.append(_Blank(module, name, buffer, compat.version(buffer)))
    return blanks


def _refuse_unset(model: nn.Module, unset: Iterable[tuple[str, str]], fabric: Fabric) -> None:
    """Raises if rank 0, whose values count, lacks any: names the tensors by module."""
    found: list[tuple[str, str]] = fabric.gather_objects(list(unset))[0]
    if not found:
        return
    by_module: dict[str, list[str]] = {}
    for module, name in found:
        by_module.setdefault(module, []).append(name)
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    listed = "; ".join(
        f"module {name or '(root)'!r} ({kinds[name]}): {', '.join(tensors)}" for name, tensors in by_module.items()
    )
    raise ValueError(
        f"on the meta device and without an initialiser that sets them: {listed}. Give each module a "
        "reset_parameters() that sets its parameters and computes its buffers, pass init=, or build the model on the "
        "CPU"
    )


# -- initialisers -----------------------------------------------------------------------------------------------------


class _Step(NamedTuple):
    """One turn of the loop."""

    module: nn.Module
    initialise: Callable[[], object] | None
    """None: the module has no initialiser, nor has any module around it."""


def _steps(model: nn.Module, config: Config) -> list[_Step]:
    if callable(config.init):
        return [_Step(module, partial(config.init, module)) for module in model.modules()]
    return list(_visit(model, None, False, set()))


def _visit(
    module: nn.Module, of_model: Callable[[nn.Module], object] | None, covered: bool, seen: set[nn.Module]
) -> Iterator[_Step]:
    """The modules below and including one; ``of_model`` is the ``_init_weights`` of the model around them."""
    if module in seen:
        return
    seen.add(module)
    of_model = _init_weights_of(module) or of_model
    own = getattr(module, "reset_parameters", None)
    if of_model is None and callable(own):
        yield _Step(module, own)
    # torch's attention has only this, runs it when its children exist, and means to have the last word on them.
    late = (
        getattr(module, "_reset_parameters", None) if next(module.parameters(recurse=False), None) is not None else None
    )
    for child in module.children():
        yield from _visit(child, of_model, covered or of_model is not None or callable(own) or callable(late), seen)
    if of_model is not None:
        yield _Step(module, partial(of_model, module))
    elif not callable(own):
        yield _Step(module, late if callable(late) else (_nothing if covered else None))


def _nothing() -> None:
    """A module around this one has an initialiser, which may set its parameters: those of a ParameterList, say."""


def _init_weights_of(module: nn.Module) -> Callable[[nn.Module], object] | None:
    """A model's way to initialise any one of its modules. Others call a method without arguments by that name."""
    method = getattr(module, "_init_weights", None)
    if not callable(method):
        return None
    try:
        inspect.signature(method).bind(module)
    except TypeError:
        return None
    found: Callable[[nn.Module], object] = method
    return found


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
                    view.fill_(_blank_value(view.dtype))
            _point_at(flat, origin)
            self._open[unit].append(origin)
            for slot, view, parameter in zip(flat.layout.slots, flat.views_of(origin), flat.parameters, strict=True):
                if isinstance(parameter, DTensor):
                    whole = torch.full(slot.whole_shape, _blank_value(view.dtype), dtype=view.dtype, device=view.device)
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
                if _has_nan(view):
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
    steps = _steps(model, config)
    names = {module: name for name, module in model.named_modules()}
    _refuse_unset(model, [entry for step in steps for entry in _certainly_unset(step, names)], fabric)
    blanks = _blank_buffers(model, fabric.device)
    open_units = _OpenUnits(units, fabric)
    members = {unit: set(unit.module.modules()) for unit in units}  # of the root unit: all
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        if step.initialise is not None:
            with open_units:
                _call(step.initialise, names[step.module])
        for unit in units:  # in the same order on all ranks
            inside = following is not None and following.module in members[unit]
            if not inside and (step.module in members[unit] or open_units.has(unit)):
                open_units.leave(unit)
    fabric.meter.take()  # units that were opened twice are no step's volume
    unset = [(names[blank.module], blank.name) for blank in blanks if not blank.written()]
    _refuse_unset(model, [*open_units.unset, *unset], fabric)


def _read(model: nn.Module, units: list[Unit], fabric: Fabric, path: Path, config: Config) -> None:
    with _one_for_all(fabric):
        weights = Weights(path, model)
    if len(set(fabric.gather_objects(weights.checksum))) > 1:
        raise ValueError(
            f"weights={str(path)!r} has other names, shapes or dtypes on some ranks; all must see the same"
        )
    names = {module: name for name, module in model.named_modules()}
    blanks = _blank_buffers(model, fabric.device)
    not_there = [blank for blank in blanks if not weights.holds(blank.value)]
    if config.init is not None and not not_there:
        raise ValueError(f"init={config.init!r} has no effect: weights= holds every parameter and buffer; leave it out")
    for step in _steps(model, config):
        if step.initialise is not None and any(blank.module is step.module for blank in not_there):
            # Parameters are on meta still: what an initialiser does to them has no effect and draws no numbers.
            _call(step.initialise, names[step.module])
    _refuse_unset(model, [(names[blank.module], blank.name) for blank in not_there if not blank.written()], fabric)
    with _one_for_all(fabric):
        for flat in (flat for unit in units for flat in unit.flats):
            values = _take_off_meta(flat, fabric.device)
            weights.read_flat(flat, values)
            flat.keep(values)
        for buffer in model.buffers():
            if weights.holds(buffer):
                weights.read_buffer(buffer)


def _leave_empty(model: nn.Module, units: list[Unit], fabric: Fabric) -> None:
    for flat in (flat for unit in units for flat in unit.flats):
        flat.keep(_take_off_meta(flat, fabric.device))
    for blank in _blank_buffers(model, fabric.device):
        blank.value.zero_()


def _call(initialise: Callable[[], object], name: str) -> None:
    try:
        initialise()
    except Exception as error:
        error.add_note(f"while zeroshard initialised module {name or '(root)'!r}, which was on the meta device")
        raise


def _certainly_unset(step: _Step, names: dict[nn.Module, str]) -> list[tuple[str, str]]:
    if step.initialise is not None:
        return []
    own = [*step.module.named_parameters(recurse=False), *step.module.named_buffers(recurse=False)]
    return [(names[step.module], name) for name, tensor in own if tensor.is_meta]


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
