"""Where the process group that the library starts listens."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

STARTS = """
import ipaddress, os, psutil, torch
import torch.distributed as dist
from zeroshard.comm.process_group import start_process_group

start_process_group(torch.device("cpu"))
dist.new_group([0], backend="gloo")
print(os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"])
ports = {one.laddr.port: one.laddr.ip for one in psutil.Process().net_connections("inet") if one.status == "LISTEN"}
del ports[int(os.environ["MASTER_PORT"])]  # torch's own store
print([ipaddress.ip_address(address).is_loopback for address in ports.values()])
"""


def start(**variables: str) -> list[str]:
    """What a single rank prints, whose process group the library starts."""
    from tests.nccl.processes import free_port

    port = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", **port, **variables}
    kept = {name: value for name, value in os.environ.items() if not name.endswith("SOCKET_IFNAME")}
    done = subprocess.run([sys.executable, "-c", STARTS], env=kept | alone, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.slow
def test_gloo_listens_on_the_loopback_interface_alone_if_all_ranks_are_here() -> None:
    names, loopback = start()
    assert names == "lo =lo"
    assert "True" in loopback
    assert "False" not in loopback


@pytest.mark.slow
def test_the_interfaces_that_the_user_has_chosen_count() -> None:
    names, _ = start(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="eth")
    assert names == "lo eth"
