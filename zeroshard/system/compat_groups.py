"""The private names of torch that process groups, their stores and meshes need."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def one_rank_of(world: int, rank: int) -> Iterator[None]:
    """In this context this process is one rank of a world without other ranks. Collectives move nothing."""
    from torch.distributed.tensor import debug  # here, because the import sets a variable of the environment
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # DTensor caches results by mesh. A new mesh may equal an old mesh whose process groups are gone.
    debug._clear_sharding_prop_cache()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def mesh_ranks(mesh: DeviceMesh) -> Any:
    """The ranks of a mesh as lists. Modes are off, because a mesh computes its ranks, and a dry run has no values."""
    with _disable_current_modes():
        return mesh.mesh.tolist()


def completed(tensor: Tensor) -> Tensor:
    """Waits for the functional collective that fills a tensor, if there is one, and returns the tensor."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


_connections: list[tuple[weakref.ref[Any], Any]] = []


def default_store() -> Any:
    """The key-value store of the default process group, where ranks post their progress.

    The connection is separate, so that no other use can block it. All models of a process share one connection, because
    opening it takes time and resources at rank 0.
    """
    store: Any = dist.distributed_c10d._get_default_store()
    if not _connections or _connections[0][0]() is not store:
        try:
            own = store.clone()
        except (AttributeError, RuntimeError):
            own = store
        if own is store:
            return own
        _connections[:] = [(weakref.ref(store), own)]  # weak, so that the store and its server end with their group
    return _connections[0][1]


def private_store() -> Any:
    """A key-value store that no other process has."""
    stores: Any = dist  # its annotations do not list the stores
    return stores.HashStore()


def host_messages(name: str, rank: int, world: int, address: str | None, patience: timedelta) -> Any:
    """A group of Gloo for single messages between the hosts of two ranks, which torch does not know of.

    Two ranks connect when they first talk. Connections between all of thousands of ranks would take long to make.
    ``address`` is where the other ranks reach this one. Without it, or if GLOO_SOCKET_IFNAME is set, torch decides.
    """
    gloo: Any = dist.ProcessGroupGloo
    interface, _, _ = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")
    where = {"interface": interface} if interface else {} if address is None else {"hostname": address}
    options = gloo._Options()
    options._devices = [gloo.create_device(**where, lazy_init=True) if where else gloo.create_default_device(True)]
    options._timeout, options._threads = patience, 1
    stores: Any = dist
    return gloo(stores.PrefixStore(name, dist.distributed_c10d._get_default_store()), rank, world, options)


def together(group: dist.ProcessGroup) -> AbstractContextManager[Any]:
    """All-gathers of NCCL that begin inside are one operation of the device, which begins at the end."""
    return cast(AbstractContextManager[Any], dist.distributed_c10d._coalescing_manager(group))


@contextmanager
def errors_left_to_caller() -> Iterator[None]:
    """Groups of NCCL that are made inside do not end the process when a collective fails. The user's setting counts.

    A group that finds an error would also wait for a minute before it can be ended, so that debug files can be written.
    """
    with _variables({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0"}):
        yield


@contextmanager
def errors_of_earlier_starts_ignored() -> Iterator[None]:
    """A default group of NCCL that is made inside does not look for errors of other groups. The user's setting counts.

    It would look for a key in the store that a group with an error writes. torchrun keeps the store when it restarts
    ranks: they find the key of the failed start, wait for eight minutes, and end the process.
    """
    with _variables({"TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0"}):
        yield


@contextmanager
def _variables(settings: dict[str, str]) -> Iterator[None]:
    """Inside, environment variables have these values. Those that the user has set keep theirs."""
    added = settings.keys() - os.environ.keys()
    os.environ.update({name: settings[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def error_of_earlier_start() -> bool:
    """Whether the store has the key by which a group of NCCL tells all ranks of an error."""
    store: Any = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return bool(store.check(["exception_dump"]))


def abort(group: dist.ProcessGroup) -> None:
    """Ends the collectives of a group of NCCL on this rank's device, whatever the other ranks do."""
    cast(Any, group).abort()
