"""Starts the process group from torchrun's environment, and ends it."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..system import compat_groups, machine

if TYPE_CHECKING:
    from .fabric import Fabric


def start_process_group(device: torch.device) -> None:
    """Starts a group with the device's backend, if there is none yet and torchrun has set the rank."""
    if not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        _stay_off_the_network()
        backend, index = ("nccl", device) if device.type == "cuda" else ("gloo", None)
        given: dict[str, Any] = {}
        store = _store_of_restart()
        if store is not None:
            given = {"store": store, "rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
        with compat_groups.errors_of_earlier_starts_ignored():
            dist.init_process_group(backend, device_id=index, **given)
    elif dist.is_initialized():
        _warn_of_earlier_start(device)


def _warn_of_earlier_start(device: torch.device) -> None:
    """Warns if a process group of the user's would end the process, for an error of the ranks before a restart."""
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    wanted = os.environ.get("TORCH_NCCL_DUMP_ON_TIMEOUT", "1").lower() in ("y", "yes", "1", "t", "true")
    if again and wanted and backend_for(None, device) == "nccl" and compat_groups.error_of_earlier_start():
        warnings.warn(
            "the ranks before this restart left a signal in torchrun's store, for which torch ends every rank after "
            "eight minutes; set TORCH_NCCL_DUMP_ON_TIMEOUT=0 for torchrun, or let shard() start the process group",
            stacklevel=3,
        )


def _stay_off_the_network() -> None:
    """Lets Gloo and NCCL listen where no other machine reaches them, if all ranks are here. The user's choice counts.

    Both would take the address of the machine's name, or of its first network, and let everybody connect.
    """
    interface = machine.loopback_interface() if machine.all_ranks_are_here() else None
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # without "=" NCCL takes any name that begins so


def _store_of_restart() -> Any:
    """A store with names of its own for a restart under torchrun. None if it is not needed or not possible.

    torchrun's agent has one store for all restarts, and torch looks up the addresses of ranks there under fixed names.
    A restarted rank would find the address of a dead rank. Only on a single node do all ranks know the number of the
    restart.
    """
    known = os.environ.get
    restart, local, world = known("TORCHELASTIC_RESTART_COUNT", "0"), known("LOCAL_WORLD_SIZE"), known("WORLD_SIZE")
    if restart == "0" or local != world or known("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        return None
    stores: Any = dist  # its annotations do not list the stores
    store = stores.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    return stores.PrefixStore(f"restart {restart}", store)


def end_process_group(fabric: Fabric | None = None) -> None:
    """Ends the process group, if there is one, after all ranks have come here. ``fabric`` names a missing rank."""
    if dist.is_initialized():
        if fabric is None:
            dist.barrier()
        else:
            fabric.maximum([0], "the end of the job")
        dist.destroy_process_group()


def warn_of_gloo(backend: str, device: torch.device, degree: int) -> None:
    """Warns of tensor parallelism on GPUs without NCCL: torch crashes where DTensor gathers a tensor."""
    if degree > 1 and backend == "gloo" and device.type == "cuda":
        warnings.warn(
            "tensor parallelism of CUDA tensors over Gloo: where DTensor gathers one, torch ends the process with a "
            "segmentation fault (pytorch/pytorch#152645); use NCCL, with a GPU for each rank",
            stacklevel=2,
        )


def backend_for(group: dist.ProcessGroup | None, device: torch.device) -> str:
    """The backend for tensors of this device. A group may have several, written as "cpu:gloo,cuda:nccl"."""
    config = str(dist.get_backend_config(group))
    for part in config.split(","):
        kind, _, backend = part.rpartition(":")
        if kind in ("", device.type):
            return backend
    raise ValueError(
        f"the process group serves {config}, not tensors on {device.type}; initialise it with a backend for that device"
    )
