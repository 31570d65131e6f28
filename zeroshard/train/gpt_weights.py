"""Whole weights on disk: `model.safetensors`, or shards and an index, and a `config.json` with the shape of the GPT."""

import math
import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from ..config.job import ModelConfig
from ..init.safetensors_file import Elements
from ..init.weights import contents_of
from ..runtime import runtime_of
from ..storage.format import CheckpointError
from ..storage.output import SHARD_BYTES, Output, Shards, WholeTensor, as_json
from ..storage.output import WEIGHTS as LIKE_WEIGHTS
from ..storage.save import on_rank_zero
from ..system.parse import parse_json, read_start
from .gpt import GPT

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
CONFIG = "config.json"
LARGEST_CONFIG = 100_000
"""Bytes of a configuration that a run may have written. A larger one is of another program."""
OWN_WEIGHTS = re.compile(rf"model(-\d+-of-\d+)?\.safetensors|{re.escape(INDEX)}")


def earlier_weights(folder: Path) -> list[Path]:
    """Return the weights of an earlier run in this folder. The next run replaces them.

    Raises:
        CheckpointError: the folder has weights of another program, which must not be deleted.
    """
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file, and weights go into a folder; choose another with --out")
    names = sorted(entry.name for entry in folder.iterdir()) if folder.exists() else []
    ours = _is_ours(folder / CONFIG)
    found = [name for name in names if LIKE_WEIGHTS.fullmatch(name)]
    foreign = [name for name in found if not (ours and OWN_WEIGHTS.fullmatch(name))]
    if not ours and CONFIG in names:
        foreign.append(CONFIG)
    if foreign:
        raise CheckpointError(
            f"{folder} holds {foreign[0]!r}, which no run of `zeroshard train` wrote; choose another folder with "
            "--out, or move that away"
        )
    return [folder / name for name in found]


def _is_ours(config: Path) -> bool:
    """Return whether `save_weights` wrote this file: it has the fields of a GPT and no others."""
    try:
        found = parse_json(read_start(config, LARGEST_CONFIG))
    except (OSError, ValueError):
        return False
    known = {field.name for field in fields(ModelConfig)}
    return isinstance(found, dict) and {"layers", "hidden", "heads"} <= found.keys() <= known


def save_weights(folder: Path, config: ModelConfig, model: nn.Module, shard_bytes: int = SHARD_BYTES) -> list[Path]:
    """Write the whole parameters of a sharded model, and its shape. Returns the files on rank 0, the main one last.

    Every rank calls this. Rank 0 writes parameter by parameter as units are gathered, so no rank ever has the whole
    model. An error of rank 0 is raised on all ranks.
    """
    runtime = runtime_of(model)
    names = {id(tensor): name for name, tensor in model.state_dict(keep_vars=True).items()}
    parameters = [parameter for unit in runtime.units for flat in unit.flats for parameter in flat.parameters]
    assert len(parameters) == len(names), "the GPT has no buffers in its state dict, and no parameter under two names"
    wholes = [WholeTensor(names[id(parameter)], tuple(parameter.shape), parameter.dtype) for parameter in parameters]
    with Output(folder) as output:
        writer = _Writer(output, config, wholes, shard_bytes)
        on_rank_zero(runtime.fabric, writer.begin)
        for parameter, values in runtime.whole_parameters():
            if runtime.fabric.rank == 0:
                values = values.cpu()
            on_rank_zero(runtime.fabric, partial(writer.write, names[id(parameter)], values))
        on_rank_zero(runtime.fabric, writer.end)
    return output.files


class _Writer:
    """The work of rank 0, in three steps."""

    def __init__(self, output: Output, config: ModelConfig, wholes: Sequence[WholeTensor], shard_bytes: int) -> None:
        self._output, self._config, self._wholes, self._shard_bytes = output, config, wholes, shard_bytes
        self._shards: Shards | None = None

    def begin(self) -> None:
        self._output.replace(earlier_weights(self._output.folder))
        self._output.new(CONFIG, as_json(asdict(self._config)))
        self._shards = Shards(self._output, self._wholes, self._shard_bytes)

    def write(self, name: str, values: Tensor) -> None:
        assert self._shards is not None
        self._shards.write(name, values)

    def end(self) -> None:
        assert self._shards is not None
        self._shards.finish()
        self._output.show()


def load_weights(folder: Path, device: torch.device) -> GPT:
    """Return the plain, unsharded GPT that `save_weights` wrote."""
    with torch.device("meta"):
        model = GPT(ModelConfig(**parse_json(read_start(folder / CONFIG, LARGEST_CONFIG))))
    weights: dict[str, Tensor] = {}
    for name, entry in contents_of(folder).items():
        with closing(Elements(entry.file)) as elements:
            weights[name] = elements.read(entry, 0, math.prod(entry.shape)).view(entry.shape).to(device)
    model.load_state_dict(weights, assign=True)
    return model.eval()
