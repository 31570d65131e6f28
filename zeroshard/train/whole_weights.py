"""Writes the whole parameters of a sharded model as safetensors, unit by unit: no rank ever has the whole model."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from torch import Tensor, nn

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
    rename: Callable[[str], str | None] = lambda name: name,
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
        rename: returns the name under which a tensor is written; None leaves it out.
        shard_bytes: the size of the largest file, unless one tensor is larger.
        stem: what the names of the safetensors files begin with.
    """
    runtime = runtime_of(model)
    names: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():  # the first name of a tied weight
        if isinstance(tensor, Tensor) and (written := rename(name)) is not None:
            names.setdefault(id(tensor), written)
    parameters = [p for unit in runtime.units for flat in unit.flats for p in flat.parameters]
    buffers = [(names[id(buffer)], buffer) for _, buffer in buffers_of(runtime) if id(buffer) in names]
    wholes = [WholeTensor(names[id(p)], tuple(p.shape), p.dtype) for p in parameters if id(p) in names]
    wholes += [WholeTensor(name, tuple(buffer.shape), buffer.dtype) for name, buffer in buffers]
    with Output(folder) as output:
        writer = _Writer(output, files, replaced, wholes, shard_bytes, stem)
        on_rank_zero(runtime.fabric, writer.begin)
        for parameter, values in runtime.whole_parameters(names.keys()):
            if runtime.fabric.rank == 0:
                values = values.cpu()
            on_rank_zero(runtime.fabric, partial(writer.write, names[id(parameter)], values))
        on_rank_zero(runtime.fabric, lambda: writer.end(buffers))
    return output.files


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

    def write(self, name: str, values: Tensor) -> None:
        assert self._shards is not None
        self._shards.write(name, values)

    def end(self, buffers: Sequence[tuple[str, Tensor]]) -> None:
        assert self._shards is not None
        for name, buffer in buffers:
            self._shards.write(name, buffer.detach().cpu())
        self._shards.finish()
        self._output.show()
