"""Measures activations and FLOPs of any module: one forward and backward on the meta device, counting storages.

Nothing is computed and no memory is used, except for small constants that a model may read (``known_values``). In a
long row of equal blocks only some are traced (``blocks``). Attention counts as in the fused kernels of a GPU: they save
queries, keys, values, the result and one number a row, but not the scores. Attention that returns its weights is not
fused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from ...config.bounds import DEPOSIT_BYTES, ON_THEIR_WAY
from ...config.checks import DTYPES
from ...config.layout import UNLIMITED, UnitSpec, find_units
from ...config.options import Activations
from ...system import compat
from .blocks import Sample, take_sample
from .gpu_functions import GpuFunctions
from .known_values import KnownValues
from .recomputation import Recomputation
from .recording import Moment, Outline, Recording, trace_of
from .units import buffer_bytes, module_units

FIRST = 3
"""The first blocks of each kind that are traced. What is alive before a block is the same from the third on."""


AGREEMENT = 0.01
"""The largest error of a trace of a few blocks, as a share, before all blocks are traced."""


@dataclass(frozen=True)
class Built:
    """A module on the meta device that is ready to be traced, and the arguments of its forward."""

    module: nn.Module
    arguments: tuple[Any, ...] = ()
    named: Mapping[str, Any] = field(default_factory=dict)
    values: KnownValues = field(default_factory=KnownValues)
    """The known values of inputs on the meta device."""
    divided: frozenset[int] = frozenset()
    """Ids of the parameters of which the module has only one model-parallel rank's part."""
    logits: int | None = None
    """Elements of the logits. None: counted in the call of ``cross_entropy``."""
    tokens_known: bool = True
    """True if inputs are sequences of tokens; False if they are samples of another kind."""
    uniform: bool = False
    """True if forward treats all blocks alike."""
    shorten: Callable[[Sample], None] = lambda _: None
    """Called after blocks were removed. Shortens the lists that have an entry for each block."""


class Uninitialised(TorchFunctionMode):
    """In this context ``torch.nn.init`` does nothing: on the meta device there are no values, and it takes time."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


def record(
    build: Callable[[], Built],
    precision: str,
    max_unit_bytes: int,
    *,
    chosen: Sequence[str | type[nn.Module]] | None = None,
    activations: Activations | None = None,
    degree: int = 1,
    keeping: bool = False,
) -> tuple[Recording, Outline]:
    """Traces a module: some of its blocks, and all of them if it cannot run with some.

    A forward may treat blocks differently by their number. So the module is traced once more with one more block of
    each kind, and if the two traces say different things of the whole, all blocks are traced.

    If the model returns no loss, its outputs are summed to one. ``activations``: the option of ``shard()``. ``degree``:
    the ranks that divide checkpoints among them, if ``activations`` says so. ``keeping``: no block is recomputed after
    all, but the same blocks are traced.
    """

    def recorded(first: int | None) -> tuple[Recording, Outline]:
        return _record(
            built if first == FIRST else build(), precision, max_unit_bytes, chosen, activations, degree, first, keeping
        )

    built = build()
    try:
        found = recorded(FIRST)
        if not found[1].sampled or built.uniform or _agree(found, recorded(FIRST + 1), DTYPES[precision].itemsize):
            return found
    except Exception:  # a forward may raise anything if blocks are missing
        pass
    return recorded(None)


def _agree(one: tuple[Recording, Outline], other: tuple[Recording, Outline], width: int) -> bool:
    """True if two recordings say the same of the whole model, even if every block that was not traced adds as much."""

    def sizes(found: tuple[Recording, Outline]) -> list[float]:
        whole = trace_of(*found, width)
        seen = whole.activations
        return [seen.saved, seen.loss, max(seen.forward), max(seen.backward), sum(whole.forward_flops)]

    traced, more, blocks = len(one[1].sample.traced), len(other[1].sample.traced), len(one[1].sample.stands_for)
    steps = max(1.0, (blocks - traced) / max(1, more - traced))
    return all(steps * abs(a - b) <= AGREEMENT * max(a, b) for a, b in zip(sizes(one), sizes(other), strict=True))


def _record(
    built: Built,
    precision: str,
    max_unit_bytes: int,
    chosen: Sequence[str | type[nn.Module]] | None,
    activations: Activations | None,
    degree: int,
    first: int | None,
    keeping: bool,
) -> tuple[Recording, Outline]:
    """``first``: the first blocks of each kind that are traced, at least; None: all blocks."""
    model, dtype = built.module, DTYPES[precision]
    buffers = buffer_bytes(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    blocks = find_units(model, chosen=chosen, max_unit_bytes=UNLIMITED)[1:]
    units = module_units(
        model,
        dtype.itemsize,
        max_unit_bytes,
        chosen,
        blocks=[block.name for block in blocks],
        is_divided=lambda parameter: id(parameter) in built.divided,
    )
    ahead = 0 if activations is None else max(activations.prefetch, ON_THEIR_WAY)
    modules = [block.module for block in blocks]
    sample = Sample.whole(len(blocks)) if first is None else take_sample(model, modules, first + max(0, ahead - 2))
    built.shorten(sample)
    kept = {id(modules[number]) for number in sample.traced}
    here = [name for name, module in model.named_modules() if id(module) in kept]
    traced = find_units(model, chosen=here or chosen, max_unit_bytes=max_unit_bytes, itemsize=dtype.itemsize)
    watch = _Tracer(model, traced, here)
    recomputation = Recomputation(activations or Activations(), degree, 1 + len(sample.traced))
    recomputed = [modules[number] for number in sample.traced] if activations is not None and not keeping else []
    try:
        known = built.values
        known.forget(model.parameters())
        with known, watch, GpuFunctions(watch), recomputation.recompute(recomputed):
            output = model(*built.arguments, **built.named)
            watch.end_forward()
            loss = _loss(output)
            del output
            compat.run_backward(loss)
    finally:
        watch.remove_hooks()
    if first is not None and not watch.all_ran:
        raise ValueError("a block did not run; which blocks run may depend on their number")
    seen = replace(
        watch.recording(),
        logits=watch.logits if built.logits is None else built.logits,
        checkpoints=recomputation.stored,
        recomputes=watch.recomputes or bool(recomputed),
        tokens_known=built.tokens_known,
    )
    return seen, Outline(units, sample, buffers, tuple(block.name for block in blocks))


def tokens_of(inputs: Any) -> tuple[int, int]:
    """Batch and sequence of the first tensor of token ids; zeros if there is none."""
    for value in _tensors(inputs):
        if value.dim() == 2 and not value.is_floating_point():
            return value.shape[0], value.shape[1]
    return 0, 0


def samples_of(inputs: Any) -> int:
    """The number of samples in a micro-batch: the first dimension of the first tensor."""
    return next((value.shape[0] for value in _tensors(inputs) if value.dim()), 1)


def _loss(output: Any) -> Tensor:
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    tensors = [tensor for tensor in _tensors(output) if tensor.grad_fn is not None]
    if not tensors:
        raise ValueError("no output of it depends on its parameters")
    if len(tensors) == 1 and tensors[0].dim() == 0:
        return tensors[0]
    return torch.stack([tensor.float().mean() for tensor in tensors]).sum()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _tensors(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _tensors(entry)


class _Tracer(compat.OperationWatch):
    """Counts the bytes of storages that are alive, without parameters and buffers, and finds the maxima by unit."""

    def __init__(self, model: nn.Module, units: Sequence[UnitSpec], blocks: Sequence[str]) -> None:
        """``blocks``: the names of the modules that units are made of."""
        super().__init__()  # type: ignore[no-untyped-call]
        last = f"{blocks[-1]}." if blocks else ""
        self._ending = {number for number, unit in enumerate(units) if number and f"{unit.name}.".startswith(last)}
        """The units of the last block that have not run."""
        self._known: dict[int, int] = {}
        self._own = {compat.storage_key(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._alive = 0
        self._count = len(units)
        self._after, self._growth, self._stream = ([0] * len(units) for _ in range(3))
        self._moments: dict[tuple[Moment, int], list[int]] = {}
        self._saved = self._early = 0
        self.recomputes = False
        """True if the module itself recomputes blocks in backward."""
        self._turned = False
        """True after the model has returned. From then on the loss or backward is computed."""
        self._last = 0
        """The unit that ran last."""
        self._left: int | None = None
        """Bytes alive when the last unit ended its forward, or when the first one began."""
        self._now: list[int] = []
        self._waiting = 0
        """Bytes of gradients of the unit in backward that have arrived and are not yet in a buffer."""
        self._depositing = False
        """True if the gradients of the unit in backward have a buffer."""
        self._awaited = [0] * len(units)
        """Gradients that have not arrived, by unit."""
        self._at(Moment.ROOT_FORWARD, 0)
        self.attention_flops = self.logits = 0.0
        """FLOPs of attention in forward passes, which torch's counter does not see; and the elements of logits."""
        self._forward_flops, self._matrix_flops = [0.0] * len(units), [0.0] * len(units)
        self.forward_written = [0] * len(units)
        """Bytes of activations, by unit."""
        self._unit = 0
        self._counted = (0.0, 0.0)
        self._backward_flops = [0.0] * len(units)
        self._hooks: list[RemovableHandle] = []
        for number, unit in enumerate(units):
            if number:
                self._hooks.append(
                    unit.module.register_forward_pre_hook(self._enter(number), prepend=True, with_kwargs=True)
                )
                self._hooks.append(unit.module.register_forward_hook(self._leave(number)))
            for _, parameter in unit.parameters:
                if parameter.requires_grad:
                    self._awaited[number] += 1
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(self._take(number)))

    def remove_hooks(self) -> None:
        """Removes all hooks from the model."""
        for hook in self._hooks:
            hook.remove()

    def see(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            key, storage = compat.storage_key(tensor), tensor.untyped_storage()
            if key not in self._known and key not in self._own:
                self._known[key] = storage.nbytes()
                self._alive += storage.nbytes()
                if not self._turned:
                    self.forward_written[self._unit] += storage.nbytes()
                self._append()
                weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self._alive -= self._known.pop(key, 0)

    # -- where the pass is ----------------------------------------------------------------------------------------

    def _enter(self, number: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if compat.in_backward():
                self.recomputes = True
                self._at(Moment.BACKWARD, number)
                self._count_for(number)
                return
            if self._left is None:
                self._left = self._alive
            given = {id(one): one.nbytes for one in _tensors((args, kwargs)) if one.grad_fn is not None}
            self._stream[number] = sum(given.values())
            self._at(Moment.FORWARD, number)
            self._count_for(number)

        return hook

    def _leave(self, number: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if compat.in_backward():
                return
            assert self._left is not None
            self._growth[number] += self._alive - self._left
            self._left, self._last = self._alive, number
            # What follows belongs to the root, or is the loss.
            self._ending.discard(number)
            last = not self._ending
            self._at(*((Moment.LOSS, 0) if last else (Moment.ROOT_FORWARD, number)))
            self._count_for(0 if last else number)  # a block of several units also works between them
            for tensor in _tensors(output):
                if tensor.grad_fn is not None:
                    tensor.register_hook(lambda _: self._begin_backward(number))

        return hook

    def _begin_backward(self, number: int) -> None:
        if number != self._last:
            self._end_backward()
        self._last = number
        self._at(Moment.BACKWARD, number)
        self._count_for(number)

    def _take(self, number: int) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            assert parameter.grad is not None
            size = parameter.grad.nbytes
            if number == 0 and not any(self._after[1:]):
                self._early += size
            parameter.grad = None  # the plan counts gradients by itself, in their buffers
            self._after[number] = self._alive
            self._awaited[number] -= 1
            if number and number == self._last:
                self._wait_for_deposit(size)
            if number == 0 and (any(self._after[1:]) or self._count == 1):  # before that, the loss is being computed
                self._at(Moment.ROOT_BACKWARD, self._last)

        return hook

    def _at(self, moment: Moment, number: int) -> None:
        if moment is Moment.BACKWARD and number == self._last and self._depositing:
            moment = Moment.DEPOSITING
        self._now = self._moments.setdefault((moment, number), [])
        self._append()

    def _append(self) -> None:
        self._now.append(self._alive + self._waiting)

    def _end_backward(self) -> None:
        """The backward of the last unit is over. Gradients that wait for one that did not come are copied at last."""
        if self._waiting and not self._depositing:
            found = self._moments.setdefault((Moment.DEPOSITING, self._last), [])
            found.append(self._after[self._last] + self._waiting)
        self._waiting, self._depositing = 0, False

    def _wait_for_deposit(self, size: int) -> None:
        """Does with the size of a gradient that has arrived what the runtime does with the gradient."""
        self._waiting += size
        if self._waiting >= DEPOSIT_BYTES or not self._awaited[self._last]:
            self._depositing = True
            self._at(Moment.BACKWARD, self._last)
            self._waiting = 0

    def end_forward(self) -> None:
        """Notes that the model has returned. The loss is computed next, if the model returned none."""
        self._count_for(0)
        self._turned = True
        self._saved = self._alive
        self._at(Moment.LOSS, 0)

    def _count_for(self, unit: int) -> None:
        """Adds the FLOPs since the last call to the unit of the last call, and goes on with ``unit``."""
        products, attention = self.flops - self._counted[0], self.attention_flops - self._counted[1]
        if self._turned:
            self._backward_flops[self._unit] += products + attention
        else:
            self._matrix_flops[self._unit] += products
            self._forward_flops[self._unit] += products + attention
        self._unit, self._counted = unit, (self.flops, self.attention_flops)

    @property
    def all_ran(self) -> bool:
        """True if every unit had a forward."""
        return all((Moment.FORWARD, number) in self._moments for number in range(1, self._count))

    # -- what was found -------------------------------------------------------------------------------------------

    def recording(self) -> Recording:
        """What was seen. The backward of attention counts as two of its forwards."""
        self._count_for(0)
        self._end_backward()
        works = zip(self._backward_flops, self._forward_flops, self._matrix_flops, strict=True)
        return Recording(
            alive=self._moments,
            growth=self._growth,
            after=self._after,
            stream=self._stream,
            written=self.forward_written,
            forward_flops=self._forward_flops,
            matrix_flops=self._matrix_flops,
            backward_flops=[backward + 2 * (forward - products) for backward, forward, products in works],
            logits=self.logits,
            saved=self._saved,
            early=self._early,
            checkpoints=(),
            recomputes=self.recomputes,
            tokens_known=True,
        )
