"""Jobs of `zeroshard train` beside other jobs, strangers on the network, and launchers and terminals that go away."""

import fcntl
import ipaddress
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import Popen

import psutil
import pytest

from tests.cli.test_train import COMMAND, ENDLESS, ONE_THREAD, TIMEOUT, rank_processes, start_endless, train
from tests.nccl.processes import free_port
from zeroshard.cli.main import main


@pytest.fixture(autouse=True)
def hang_ups_end_children() -> Iterator[None]:
    """Under nohup this process ignores SIGHUP, and its children would too."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@contextmanager
def endless(out: Path, *arguments: str, preexec: Callable[[], object] | None = None) -> Iterator[Popen[str]]:
    """A job that trains, until the block ends."""
    process = start_endless(out, *arguments, preexec=preexec)
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


def alive_after(seconds: float, processes: list[psutil.Process]) -> list[psutil.Process]:
    """Wait until processes have ended, and return those that have not in time. Not everywhere somebody reaps them."""
    deadline = time.monotonic() + seconds
    while alive := [one for one in processes if one.is_running() and status_of(one) != psutil.STATUS_ZOMBIE]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    return alive


def status_of(process: psutil.Process) -> str:
    try:
        return str(process.status())
    except psutil.NoSuchProcess:
        return psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_ranks_end_soon_after_their_launcher_and_leave_no_half_of_a_checkpoint(tmp_path: Path) -> None:
    process = start_endless(tmp_path, "--save-every", "2")
    ranks = rank_processes(process)
    process.kill()
    alive = alive_after(20.0, ranks)
    for rank in alive:
        rank.kill()
    assert not alive, "ranks train on without their launcher"
    _, told = process.communicate(timeout=60)
    for rank in range(2):
        assert f"zeroshard train: rank {rank} ends: its launcher, process {process.pid}, is gone" in told
    saved = list((tmp_path / "checkpoints").iterdir())
    assert saved
    assert all((folder / "COMPLETE").exists() for folder in saved)


@pytest.mark.slow
def test_a_rank_that_a_shell_started_in_the_background_outlives_the_shell(tmp_path: Path) -> None:
    command = f"{shlex.join([*COMMAND, '--steps', '2', '--out', str(tmp_path)])} &"
    alone = {**ONE_THREAD, "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shell = subprocess.Popen(["sh", "-c", command], env=alone, stdout=subprocess.PIPE, text=True)
    assert shell.stdout is not None
    shell.wait(60)
    told = shell.stdout.read()  # until the rank has ended
    assert (tmp_path / "model.safetensors").exists(), told


@pytest.mark.slow
def test_a_closed_terminal_saves_and_ends_the_run(tmp_path: Path) -> None:
    terminal, inside = pty.openpty()
    command = [*COMMAND, "--ranks", "2", "--out", str(tmp_path), *ENDLESS, "--set", "train.report_every=1"]
    process = subprocess.Popen(
        command,
        stdin=inside,
        stdout=inside,
        stderr=inside,
        start_new_session=True,
        env=ONE_THREAD,
        preexec_fn=own_terminal,
    )
    os.close(inside)
    seen = b""
    while b"held-out loss" not in seen:
        seen += os.read(terminal, 4096)
    os.close(terminal)
    assert process.wait(TIMEOUT) == 0
    (saved,) = (tmp_path / "checkpoints").iterdir()
    assert (saved / "COMPLETE").exists()


def own_terminal() -> None:
    """Make the terminal of standard input the one whose end ends this process."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.slow
def test_sighup_saves_as_sigterm_does_and_does_nothing_under_nohup(tmp_path: Path) -> None:
    with endless(tmp_path / "stops") as process:
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGHUP)  # a shell sends it, and the system once more
        told, complained = process.communicate(timeout=60)
    assert process.returncode == 0, told + complained
    stopped = re.search(r"stopped after step \d+ \(SIGHUP\); saved (\S+)", told)
    assert stopped is not None, told
    assert (Path(stopped[1]) / "COMPLETE").exists()
    with endless(tmp_path / "goes on", preexec=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)) as process:
        for one in (psutil.Process(process.pid), *rank_processes(process)):
            one.send_signal(signal.SIGHUP)
        assert process.stdout is not None
        for _ in range(2):  # a line for every five steps
            assert process.stdout.readline().startswith("step ")


@pytest.mark.slow
def test_ranks_end_soon_after_a_torchrun_of_ones_own(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, *COMMAND[1:], *ENDLESS, "--out", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=ONE_THREAD)
    assert process.stdout is not None
    assert any(line.startswith("step 5/") for line in process.stdout)
    ranks = rank_processes(process)
    assert len(ranks) == 2
    process.kill()
    alive = alive_after(20.0, ranks)
    for rank in alive:
        rank.kill()
    process.communicate(timeout=60)
    assert not alive, "ranks train on without their launcher"


@pytest.mark.slow
def test_a_rank_that_dies_is_started_anew_in_the_same_folder(tmp_path: Path) -> None:
    with endless(tmp_path, "--restarts", "1", "--resume", "auto", "--save-every", "2") as process:
        for rank in rank_processes(process)[:1]:
            rank.kill()
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        assert any(line.startswith("resumed after step ") for line in lines)
        ranks = rank_processes(process)
        assert len(ranks) == 2
        assert any(line.startswith("step ") for line in lines)
        assert f"process {ranks[0].pid} on " in (tmp_path / "claim").read_text()
        for rank in ranks:
            assert all(ipaddress.ip_address(address).is_loopback for address in listening(rank))
