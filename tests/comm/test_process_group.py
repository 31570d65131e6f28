"""The process group that the library starts: where it listens, and what it does about older errors."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zeroshard.comm import process_group
from zeroshard.comm.process_group import start_process_group

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


def test_a_group_that_the_library_starts_does_not_look_for_errors_of_ranks_before_a_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[str, str] = {}
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: seen.update(os.environ))
    start_process_group(torch.device("cpu"))
    assert seen["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"
    assert "TORCH_NCCL_DUMP_ON_TIMEOUT" not in os.environ
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    start_process_group(torch.device("cpu"))
    assert seen["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"


@pytest.mark.parametrize(
    ("restart", "key", "backend", "look", "warns"),
    [
        ("1", "exception_dump", "nccl", None, True),
        ("0", "exception_dump", "nccl", None, False),
        ("1", "something else", "nccl", None, False),
        ("1", "exception_dump", "gloo", None, False),
        ("1", "exception_dump", "nccl", "0", False),
    ],
)
def test_a_group_of_the_user_that_will_end_the_process_for_an_older_error_is_warned_of(
    restart: str, key: str, backend: str, look: str | None, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: Any = dist.HashStore()  # type: ignore[attr-defined]
    kept.set(key, "1")
    store = dist.PrefixStore("restart", dist.PrefixStore("worker", kept))  # type: ignore[attr-defined]
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(process_group, "backend_for", lambda *_: backend)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restart)
    if look is not None:
        monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", look)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        start_process_group(torch.device("cpu"))
    assert ["TORCH_NCCL_DUMP_ON_TIMEOUT=0" in str(one.message) for one in caught] == [True] * warns
