"""Several NCCL ranks on one GPU: processes with a host name each, so that NCCL takes them for separate machines.

``@on_nccl(2)`` turns a test into one whose body runs in two processes of its own.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PATIENCE = 140.0
"""Seconds in which all ranks must have ended."""


def start(command: Sequence[str], world: int) -> list[subprocess.Popen[str]]:
    """Starts a command on every rank; output and errors go to one pipe a rank."""
    port = free_port()
    return [
        subprocess.Popen(
            command,
            env=os.environ | environment(rank, world, port),
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
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
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "PYTHONPATH": str(ROOT),
    }


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


def on_nccl(world: int) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Runs a test's body on ``world`` NCCL ranks."""

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(body)
        def test() -> None:
            command = [sys.executable, __file__, body.__code__.co_filename, body.__qualname__]
            outputs(start(command, world))

        return test

    return decorate


def _run(file: str, name: str) -> None:
    import torch
    import torch.distributed as dist

    spec = importlib.util.spec_from_file_location("on_nccl", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    torch.manual_seed(0)
    getattr(module, name).__wrapped__()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _run(*sys.argv[1:])
