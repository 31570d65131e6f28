"""Several NCCL ranks on one GPU: processes with a host name each, so that NCCL takes them for separate machines.

``@on_nccl(2)`` turns a test into one whose body runs on two ranks, in a fresh NCCL group; the processes live as long as
the session, as those of ``tests/ranks.py`` do. ``start`` and ``outputs`` run a whole program on fresh processes.
Without a GPU ``ZEROSHARD_REHEARSE=1`` runs the same tests on the CPU over Gloo, except those marked ``on_the_device``.
"""

from __future__ import annotations

import functools
import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import pytest
import torch

from tests.ranks import Pool, on_ranks

ROOT = Path(__file__).parents[2]
PATIENCE = 140.0
"""Seconds in which all ranks of a program must have ended."""
LONGEST = 90.0
"""Seconds in which all ranks must have ended a test's body."""
GRACE = 10.0
"""Seconds that ranks have left when another has failed: with NCCL they may wait for it for ever."""

on_the_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: it is about the device")


def rehearsing() -> bool:
    """Whether the tests run on the CPU, because there is no GPU and somebody asked for it."""
    return not torch.cuda.is_available() and os.environ.get("ZEROSHARD_REHEARSE") == "1"


def device() -> torch.device:
    """The device of all ranks."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


# -- bodies of tests --------------------------------------------------------------------------------------------------


@functools.cache
def pool() -> Pool:
    """The rank processes of this session. ``pool().run(body, 4, {...})`` runs one body on four of them."""
    few = {"NCCL_MAX_NCHANNELS": "1"}  # a group is made faster, and small messages need no more
    backend = "gloo" if rehearsing() else "nccl"
    return Pool(backend, lambda rank, world: _variables(rank, world) | few, patience=LONGEST, grace=GRACE)


on_nccl = functools.partial(on_ranks, pool=pool)
"""Runs a test's body on so many NCCL ranks. Arguments come from pytest's parametrisation and fixtures."""


def _variables(rank: int, world: int) -> dict[str, str]:
    return {
        "NCCL_HOSTID": f"rank-{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
    }


# -- whole programs ---------------------------------------------------------------------------------------------------


def start(command: Sequence[str], world: int, printed: IO[str] | None = None) -> list[subprocess.Popen[str]]:
    """Starts a command on every rank. Output and errors go to one pipe a rank, or to a file.

    A rank that prints more than a pipe holds waits until somebody reads it. A file has no such limit.
    """
    port = free_port()
    return [
        subprocess.Popen(
            command,
            env=os.environ | environment(rank, world, port),
            cwd=ROOT,
            text=True,
            stdout=printed or subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(world)
    ]


def free_port() -> int:
    """A port on which nobody listens now."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])


def environment(rank: int, world: int, port: int) -> dict[str, str]:
    """The variables of one rank among those that share the GPU."""
    found = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "PYTHONPATH": _path()}
    return _variables(rank, world) | found


def _path() -> str:
    """Where ranks find the package, and what else this process was told to import."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def outputs(processes: Sequence[subprocess.Popen[str]]) -> list[str]:
    """What each rank printed, once all have ended well; raises with all of it otherwise."""
    try:
        found = [process.communicate(timeout=PATIENCE)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    told = "\n".join(f"--- rank {rank} ---\n{text}" for rank, text in enumerate(found))
    assert codes == [0] * len(codes), f"exit codes {codes}\n{told}"
    return found
