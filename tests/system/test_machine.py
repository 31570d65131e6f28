"""The machine's facts, and AMX that faults, with the CPU and the child process injected."""

import ipaddress
import os
import signal
from pathlib import Path

import psutil
import pytest

from zeroshard.system import machine
from zeroshard.system.machine import Amx, Cpu, address_for_ranks, ensure_bf16_matmul, probe_amx

AMX = "processor : 0\nmodel name\t: Example CPU\nflags\t\t: fpu avx512f amx_bf16 avx512_bf16 amx_tile amx_int8\n"
PLAIN = "processor : 0\nmodel name\t: Example CPU\nflags\t\t: fpu avx512f avx512_bf16\n"


class Probe:
    """Stands for the child process, and counts how often it was asked."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.calls = 0

    def __call__(self) -> int:
        self.calls += 1
        return self.status


@pytest.fixture(autouse=True)
def _no_isa_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    # setenv first, so that whatever the code under test sets is undone afterwards.
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_a_cpu_without_amx_is_not_probed(tmp_path: Path) -> None:
    probe = Probe(-signal.SIGILL)
    assert ensure_bf16_matmul(PLAIN, probe, tmp_path) is None
    assert probe.calls == 0
    assert "ONEDNN_MAX_CPU_ISA" not in os.environ


@pytest.mark.parametrize("name", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
def test_a_variable_the_user_set_is_left_alone(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "AVX2")
    probe = Probe(-signal.SIGILL)
    assert ensure_bf16_matmul(AMX, probe, tmp_path) is None
    assert probe.calls == 0
    assert os.environ[name] == "AVX2"


def test_amx_that_faults_is_switched_off_and_said_in_one_line(tmp_path: Path) -> None:
    message = ensure_bf16_matmul(AMX, Probe(-signal.SIGILL), tmp_path)
    assert message is not None
    assert "AMX" in message
    assert "\n" not in message
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_BF16"


def test_amx_that_works_is_left_on(tmp_path: Path) -> None:
    assert ensure_bf16_matmul(AMX, Probe(0), tmp_path) is None
    assert "ONEDNN_MAX_CPU_ISA" not in os.environ


@pytest.mark.parametrize(("status", "verdict"), [(0, Amx.WORKS), (-signal.SIGILL, Amx.FAULTS)])
def test_the_child_is_asked_once_per_cpu_model_and_torch_version(status: int, verdict: Amx, tmp_path: Path) -> None:
    probe = Probe(status)
    assert [probe_amx(AMX, probe, tmp_path) for _ in range(3)] == [verdict] * 3
    assert probe.calls == 1
    assert probe_amx(AMX.replace("Example", "Other"), probe, tmp_path) is verdict
    assert probe.calls == 2


def test_a_child_killed_by_accident_is_not_remembered(tmp_path: Path) -> None:
    probe = Probe(-signal.SIGKILL)
    assert probe_amx(AMX, probe, tmp_path) is Amx.FAULTS
    probe.status = 0
    assert probe_amx(AMX, probe, tmp_path) is Amx.WORKS


def test_a_child_that_failed_otherwise_changes_nothing(tmp_path: Path) -> None:
    assert probe_amx(AMX, Probe(1), tmp_path) is Amx.UNKNOWN
    assert ensure_bf16_matmul(AMX, Probe(1), tmp_path) is None


def test_a_cache_that_cannot_be_written_is_not_fatal(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert ensure_bf16_matmul(AMX, Probe(-signal.SIGILL), blocked / "cache") is not None


def test_the_cache_honours_the_users_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    probe_amx(AMX, Probe(0))
    assert [file.read_text() for file in (tmp_path / "zeroshard").iterdir()] == ["works"]


def test_the_real_child_multiplies_on_this_machine(tmp_path: Path) -> None:
    # On a machine whose AMX faults this is FAULTS, on every other one WORKS; never an unknown, never a crash here.
    assert probe_amx(AMX, None, tmp_path) in (Amx.WORKS, Amx.FAULTS)


def test_an_empty_cpuinfo_has_no_amx() -> None:
    assert Cpu.parse("") == Cpu("unknown", frozenset())


def test_the_machine_has_cores_and_memory() -> None:
    assert 1 <= machine.usable_cores() <= (os.cpu_count() or 1)
    assert machine.usable_memory() > 2**28


def test_ranks_of_one_host_meet_at_its_loopback_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "somewhere"}.items():
        monkeypatch.setenv(name, value)
    assert address_for_ranks() == "127.0.0.1"


@pytest.mark.parametrize(
    ("master", "here"), [("localhost", True), ("::1", True), ("127.0.1.1", True), ("node0", False)]
)
def test_without_a_count_of_local_ranks_the_address_of_rank_zero_tells_whether_all_ranks_are_here(
    master: str, here: bool
) -> None:
    assert machine.all_ranks_are_here({"WORLD_SIZE": "2", "MASTER_ADDR": master}) == here


def test_the_loopback_interface_has_the_loopback_address() -> None:
    name = machine.loopback_interface()
    assert name is not None
    assert "127.0.0.1" in {address.address for address in psutil.net_if_addrs()[name]}


@pytest.mark.parametrize("master", ["localhost", "127.0.0.1", "no-such-host.invalid", None])
def test_ranks_of_several_hosts_are_never_given_an_address_that_only_one_host_can_reach(
    master: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    if master is not None:
        monkeypatch.setenv("MASTER_ADDR", master)
    found = address_for_ranks()
    assert found is None or not ipaddress.ip_address(found).is_loopback  # None: a host without a network
