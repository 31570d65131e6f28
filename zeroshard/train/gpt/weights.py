"""Whole weights on disk: `model.safetensors`, or shards and an index, and a `config.json` with the shape of the GPT."""

import math
import re
from contextlib import closing
from dataclasses import asdict, fields
from pathlib import Path

import torch
from torch import Tensor, nn

from ...config.job import ModelConfig
from ...init.safetensors_file import Elements
from ...init.weights import contents_of
from ...storage.format import CheckpointError
from ...storage.output import SHARD_BYTES, as_json
from ...storage.output import WEIGHTS as LIKE_WEIGHTS
from ...system.parse import parse_json, read_start
from ..whole_weights import save_whole
from .model import GPT

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

    Every rank calls this. No rank ever has the whole model.
    """
    files = {CONFIG: as_json(asdict(config))}
    return save_whole(folder, model, files, lambda: earlier_weights(folder), shard_bytes=shard_bytes)


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
