"""Writes the whole parameters of a sharded model as safetensors, unit by unit: no rank ever has the whole model."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from ..init.joined import Part
from ..runtime import runtime_of
from ..storage.contents import buffers_of
from ..storage.output import SHARD_BYTES, Output, Shards, WholeTensor
from ..storage.save import on_rank_zero


def save_whole(
    folder: Path,
    model: nn.Module,
    files: Mapping[str, bytes],
    replaced: Callable[[], Sequence[Path]],
    *,
    divide: Callable[[str, tuple[int, ...]], Sequence[Part]] = lambda name, _: [Part(name, ())],
    shard_bytes: int = SHARD_BYTES,
    stem: str = "model",
) -> list[Path]:
    """Write a model's parameters and buffers. Returns the files on rank 0, the main one last.

    Every rank calls this. Rank 0 writes parameter by parameter as units are gathered. An error of rank 0 is raised on
    all ranks.

    Args:
        folder: where to write; it may be new.
        model: the sharded model.
        files: other files of the folder, by name.
        replaced: returns the files of an earlier run, which go when the new ones are there. Rank 0 calls it.
        divide: returns the tensors that are written for a tensor of the model, by its name and shape; none leaves it
            out.
        shard_bytes: the size of the largest file, unless one tensor is larger.
        stem: what the names of the safetensors files begin with.
    """
    runtime = runtime_of(model)
    parts: dict[int, Sequence[Part]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():  # the first name of a tied weight
        if isinstance(tensor, Tensor) and (written := divide(name, tuple(tensor.shape))):
            parts.setdefault(id(tensor), written)
    parameters = [p for unit in runtime.units for flat in unit.flats for p in flat.parameters]
    buffers = [buffer for _, buffer in buffers_of(runtime) if id(buffer) in parts]
    wholes = [
        WholeTensor(part.name, _shape(tensor, part), tensor.dtype)
        for tensor in [*parameters, *buffers]
        for part in parts.get(id(tensor), ())
    ]
    with Output(folder) as output:
        writer = _Writer(output, files, replaced, wholes, shard_bytes, stem)
        on_rank_zero(runtime.fabric, writer.begin)
        for parameter, values in runtime.gathering.whole_parameters(parts.keys()):
            if runtime.fabric.rank == 0:
                values = values.cpu()
            on_rank_zero(runtime.fabric, partial(writer.write, parts[id(parameter)], values))
        on_rank_zero(runtime.fabric, lambda: writer.end([(parts[id(buffer)], buffer) for buffer in buffers]))
    return output.files


def _shape(tensor: Tensor, part: Part) -> tuple[int, ...]:
    return tuple(torch.empty(tensor.shape, device="meta")[part.region].shape)


class _Writer:
    """The work of rank 0, in three steps."""

    def __init__(
        self,
        output: Output,
        files: Mapping[str, bytes],
        replaced: Callable[[], Sequence[Path]],
        wholes: Sequence[WholeTensor],
        shard_bytes: int,
        stem: str,
    ) -> None:
        self._output, self._files, self._replaced = output, files, replaced
        self._wholes, self._shard_bytes, self._stem = wholes, shard_bytes, stem
        self._shards: Shards | None = None

    def begin(self) -> None:
        self._output.replace(self._replaced())
        for name, content in self._files.items():
            self._output.new(name, content)
        self._shards = Shards(self._output, self._wholes, self._shard_bytes, self._stem)

    def write(self, parts: Sequence[Part], values: Tensor) -> None:
        assert self._shards is not None
        for part in parts:
            self._shards.write(part.name, values[part.region])

    def end(self, buffers: Sequence[tuple[Sequence[Part], Tensor]]) -> None:
        assert self._shards is not None
        for parts, buffer in buffers:
            self.write(parts, buffer.detach().cpu())
        self._shards.finish()
        self._output.show()
