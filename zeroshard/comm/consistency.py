"""Checks that all ranks were given the same model, optimizer and options to shard.

Ranks that shard different things would later swap data silently. Some facts belong to one rank alone and may differ:
which GPU it has, how many threads and how much memory it may use, where its copy of the weights lies.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import fields
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from ..config.offload import Offload
from ..config.options import Config
from ..system import compat
from .fabric import DisagreementError, Fabric

OF_ONE_RANK = ("device", "mesh", "weights", "example", "offload", "init")
"""Options that are not compared as they are; ``_facts_of_options`` says what of them must agree."""
OF_ONE_RANK_OFFLOADING = ("threads", "host_memory", "device_memory")
"""The same for ``Offload``: results do not depend on them."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
HASH_BYTES = 7
"""A hash and its negative fit a signed 64-bit integer."""


def check_same_everywhere(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, config: Config, fabric: Fabric
) -> None:
    """Raises ``DisagreementError`` on all ranks if one of them has a fact that differs from rank 0's.

    Collective. A hash is compared first. Only where it differs does rank 0 send its facts, and every rank answers with
    one line: the facts of a large model, gathered from a thousand ranks, would fill the host's memory.
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
    """Rank 0's fact and another rank's in its place, where the two lists first differ; None if they are equal.

    >>> first_difference(["stage=2", "parameter bias"], ["stage=2"])
    ('parameter bias', 'nothing more')
    """
    pairs = zip_longest(zeroth, other, fillvalue="nothing more")
    return next((pair for pair in pairs if pair[0] != pair[1]), None)


def facts(model: nn.Module, optimizer: torch.optim.Optimizer | None, config: Config, device: torch.device) -> list[str]:
    """Everything that must be the same on all ranks, a line each: options, then optimizer, parameters and buffers.

    >>> facts(nn.Linear(2, 1, bias=False), None, Config(stage=2), torch.device("cuda", 3))[-3:]
    ["device of type 'cuda'", 'no optimizer', 'parameter weight (1, 2) torch.float32, trained, in no group']
    """
    return [
        _ADDRESS.sub("", fact)
        for fact in (
            *_facts_of_options(config, device),
            *_facts_of_optimizer(optimizer),
            *_facts_of_model(model, optimizer),
        )
    ]


def _facts_of_options(config: Config, device: torch.device) -> Iterator[str]:
    for option in fields(config):
        if option.name not in OF_ONE_RANK:
            yield f"{option.name}={getattr(config, option.name)!r}"
    if config.offload is None:
        yield "offload=None"
    else:
        for option in fields(Offload):
            if option.name not in OF_ONE_RANK_OFFLOADING:
                yield f"offload.{option.name}={getattr(config.offload, option.name)!r}"
    yield f"init={'a function' if callable(config.init) else config.init}"  # which may be bound to a rank's own things
    yield "no mesh" if config.mesh is None else f"mesh of shape {tuple(config.mesh.mesh.shape)}"
    yield "no weights=" if config.weights is None else "weights="  # whose checksum is compared when they are read
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
    """A setting of a group; tensors, such as a learning rate on the GPU, by their values if they have some."""
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
