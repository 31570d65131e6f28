"""Jobs of `zeroshard train` beside other jobs, strangers on the network, and launchers and terminals that go away."""

import ipaddress
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import Popen

import psutil
import pytest

from tests.cli.test_train import rank_processes, start_endless


@contextmanager
def endless(out: Path) -> Iterator[Popen[str]]:
    """A job that trains, until the block ends."""
    process = start_endless(out)
    everybody = [psutil.Process(process.pid), *rank_processes(process)]
    try:
        yield process
    finally:
        for one in everybody:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        process.communicate(timeout=60)


def listening(process: psutil.Process) -> list[str]:
    """The addresses at which a process accepts connections."""
    return [str(one.laddr.ip) for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN]


@pytest.mark.slow
def test_no_other_machine_can_connect_to_a_job_on_one_node(tmp_path: Path) -> None:
    with endless(tmp_path) as process:
        ranks = rank_processes(process)
        launcher, *rest = [psutil.Process(process.pid), *ranks]
        found = {one.pid: listening(one) for one in (launcher, *rest)}
    assert all(found.values()), "the launcher has the store, and ranks connect to each other"
    addresses = {address for addresses in found.values() for address in addresses}
    assert all(ipaddress.ip_address(address).is_loopback for address in addresses), addresses
