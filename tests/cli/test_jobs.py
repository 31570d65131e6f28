"""Jobs of `zeroshard train` beside other jobs, strangers on the network, and launchers and terminals that go away."""

import ipaddress
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import Popen

import psutil
import pytest

from tests.cli.test_train import TIMEOUT, rank_processes, start_endless, train
from zeroshard.cli.main import main


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


@pytest.mark.slow
def test_a_folder_in_which_a_job_runs_is_refused_to_another_and_taken_over_when_the_job_has_died(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "tiny", "--device", "cpu", "--out", str(tmp_path), "--steps", "1"]
    with endless(tmp_path) as process:
        first = rank_processes(process)[0]
        for more in ([], ["--resume", "auto", "--save-every", "5"]):
            assert main([*command, *more]) == 2
            told = capsys.readouterr().err
            assert f"{tmp_path} is being written by another job (process {first.pid} on " in told
            assert "give every job a folder of its own, or end that one" in told
        under_torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "-m", "zeroshard", *command]
        refused = subprocess.run(under_torchrun, capture_output=True, text=True, timeout=TIMEOUT, check=False)
        assert refused.returncode != 0
        assert f"{tmp_path} is being written by another job (process {first.pid} on " in refused.stderr
    done = train("--out", str(tmp_path), "--steps", "1")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "claim").exists()
