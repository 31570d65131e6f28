"""Checks that ``shard()`` was given the same model, optimizer and options on all ranks.

Ranks that shard different things would later swap data silently. Some facts may differ from rank to rank: the GPU, the
number of threads, the memory limits, the path of the weights.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import fields
from itertools import chain, zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from ..config.offload import Offload
from ..config.options import Config
from ..system import compat
from .fabric import DisagreementError, Fabric

OF_ONE_RANK = ("device", "mesh", "weights", "example", "offload", "choice", "init")
"""Options that are not compared as they are. ``_facts_of_options`` picks the parts of them that must agree."""
OF_ONE_RANK_OFFLOADING = ("threads", "host_memory", "device_memory")
"""Options of ``Offload`` that are not compared, because results do not depend on them."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
HASH_BYTES = 7
"""With 7 bytes, a hash and its negative both fit into a signed 64-bit integer."""


def check_same_everywhere(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, config: Config, fabric: Fabric
) -> None:
    """Raises ``DisagreementError`` on all ranks if the facts of one rank differ from rank 0's.

    Collective. Ranks first compare a hash. Only if the hashes differ, rank 0 sends its facts, and every rank answers
    with one line: the facts of a large model, gathered from a thousand ranks, would fill the host's memory.
    """
    mine = facts(model, optimizer, config, fabric.device)
    digest = int.from_bytes(hashlib.sha256("\n".join(mine).encode()).digest()[:HASH_BYTES], "big")
    highest, lowest = fabric.maximum([digest, -digest], "the comparison of what shard() was given")
    if highest == -lowest:
        return
    differences = fabric.gather_objects(first_difference(fabric.from_rank_zero(mine), mine))
    rank, (zeroth, other) = next((rank, pair) for rank, pair in enumerate(differences) if pair is not None)
    raise DisagreementError(f"ranks were given different things to shard: rank 0 has {zeroth}, rank {rank} has {other}")


def first_difference(zeroth: list[str], other: list[str]) -> tuple[str, str] | None:
    """The first pair of facts in which two ranks differ. None if all are equal.

    >>> first_difference(["stage=2", "parameter bias"], ["stage=2"])
    ('parameter bias', 'nothing more')
    """
    pairs = zip_longest(zeroth, other, fillvalue="nothing more")
    return next((pair for pair in pairs if pair[0] != pair[1]), None)


def facts(model: nn.Module, optimizer: torch.optim.Optimizer | None, config: Config, device: torch.device) -> list[str]:
    """Everything that must be the same on all ranks, one line each: options, optimizer, parameters, buffers.

    >>> facts(nn.Linear(2, 1, bias=False), None, Config(stage=2), torch.device("cuda", 3))[-3:]
    ["device of type 'cuda'", 'no optimizer', 'parameter weight (1, 2) torch.float32, trained, in no group']
    """
    found = chain(_facts_of_options(config, device), _facts_of_optimizer(optimizer), _facts_of_model(model, optimizer))
    return [_ADDRESS.sub("", fact) for fact in found]


def _facts_of_options(config: Config, device: torch.device) -> Iterator[str]:
    for option in fields(config):
        if option.name not in OF_ONE_RANK:
            yield f"{option.name}={getattr(config, option.name)!r}"
    if config.choice is not None:
        yield f"offload=auto, allow={config.choice.allow!r}, seed={config.choice.seed}"
    elif config.offload is None:
        yield "offload=None"
    else:
        for option in fields(Offload):
            if option.name not in OF_ONE_RANK_OFFLOADING:
                yield f"offload.{option.name}={getattr(config.offload, option.name)!r}"
    yield f"init={'a function' if callable(config.init) else config.init}"  # it may be bound to objects of one rank
    yield "no mesh" if config.mesh is None else f"mesh of shape {tuple(config.mesh.mesh.shape)}"
    yield "no weights=" if config.weights is None else "weights="  # their checksum is compared when they are read
    yield f"device of type {device.type!r}"


def _facts_of_optimizer(optimizer: torch.optim.Optimizer | None) -> Iterator[str]:
    if optimizer is None:
        yield "no optimizer"
        return
    yield f"optimizer {type(optimizer).__name__}"
    for number, group in enumerate(optimizer.param_groups):
        settings = {name: _without_device(value) for name, value in group.items() if name != "params"}
        yield f"group {number} with {settings!r}"


def _without_device(value: Any) -> Any:
    """A setting of a group. A tensor, such as a learning rate on the GPU, is replaced by its values if it has any."""
    if isinstance(value, Tensor):
        has_values = not (value.is_meta or compat.is_fake(value))
        return value.tolist() if has_values else f"{tuple(value.shape)} {value.dtype}"
    if isinstance(value, list | tuple):
        return [_without_device(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_device(item) for key, item in value.items()}
    return value


def _facts_of_model(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[str]:
    groups = [] if optimizer is None else optimizer.param_groups
    group_of = {id(parameter): number for number, group in enumerate(groups) for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        trained = "trained" if parameter.requires_grad else "frozen"
        member = f"in group {group_of[id(parameter)]}" if id(parameter) in group_of else "in no group"
        divided = f" {parameter.placements}" if hasattr(parameter, "placements") else ""  # of a DTensor
        yield f"parameter {name} {tuple(parameter.shape)} {parameter.dtype}{divided}, {trained}, {member}"
    for name, buffer in model.named_buffers():
        yield f"buffer {name} {tuple(buffer.shape)} {buffer.dtype}"
