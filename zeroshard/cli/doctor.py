"""`zeroshard doctor`: what this machine offers a training run, and what to do about each finding."""

import argparse
import os
import platform
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from ..offload.library import VARIABLE, Simd, choose
from ..system import cgroups, machine
from ..system.cores import share
from ..system.device import available_memory
from ..system.machine import Amx

HELP = "explain this machine: cores, memory, torch, GPUs, backends, host optimizer, AMX, and what to do"
DESCRIPTION = "Explain this machine and what to do about each finding. Exits with 1 if training cannot work."
EXAMPLES = None
OLDEST_TORCH = (2, 11)
SMALL_SHARED_MEMORY = 2**30  # bytes; NCCL's ranks on one node exchange data through /dev/shm


@dataclass(frozen=True)
class Finding:
    """One fact about the machine, and what to do about it."""

    subject: str
    fact: str
    remedy: str = ""
    """Empty if nothing needs to be done."""
    bad: bool = False
    """Whether training cannot work because of this fact."""

    def __str__(self) -> str:
        verdict = "BAD" if self.bad else "note" if self.remedy else "ok"
        line = f"{verdict:<5} {self.subject:<12} {self.fact}"
        return f"{line}\n{'':<18} -> {self.remedy}" if self.remedy else line


def define(parser: argparse.ArgumentParser) -> None:
    """Add the options of `doctor`: none."""


def run(arguments: argparse.Namespace) -> int:
    """Print every finding; return 1 if training cannot work because of one."""
    bad = False
    for finding in findings():
        print(finding, flush=True)
        bad |= finding.bad
    return 1 if bad else 0


def findings() -> Iterator[Finding]:
    """Examine the machine, the quick things first."""
    yield Finding("python", f"{platform.python_version()} at {sys.executable}")
    yield from _host()
    yield _torch()
    yield from _gpus()
    yield from _backends()
    yield _host_optimizer()
    yield _amx(machine.probe_amx())


def _host() -> Iterator[Finding]:
    cpu = machine.Cpu.parse(machine.read_cpuinfo())
    yield Finding("machine", f"{platform.system()} {platform.release()} {platform.machine()}, {cpu.model}")
    cores, usable, quota = os.cpu_count() or 1, machine.usable_cores(), cgroups.cores()
    why = f", the container's quota is {quota:g}" if quota is not None else ""
    alone = "`zeroshard train` runs one rank here; --ranks 2 works too, and shares the core" if usable < 2 else ""
    yield Finding("cores", f"{usable} of {cores} usable{why}", alone)
    usable_memory, free_memory = machine.usable_memory() / 1e9, machine.available_memory() / 1e9
    yield Finding("memory", f"{usable_memory:.1f} GB usable, {free_memory:.1f} GB of it free now")
    yield _host_name()


def _host_name() -> Finding:
    """Gloo listens on the address of the host name. A name without an address ends in a hang."""
    name = socket.gethostname()
    try:
        return Finding("host name", f"{name} is {socket.gethostbyname(name)}")
    except OSError:
        interfaces = ", ".join(interface for _, interface in socket.if_nameindex())
        remedy = f"add it to /etc/hosts, or set GLOO_SOCKET_IFNAME to one of {interfaces}"
        return Finding("host name", f"{name} does not resolve to an address", remedy)


def _torch() -> Finding:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    fact = f"{torch.__version__} ({build}), {torch.get_num_threads()} threads"
    old = version < OLDEST_TORCH
    remedy = "zeroshard needs torch 2.11 or later: pip install --upgrade torch" if old else ""
    return Finding("torch", fact, remedy, bad=old)


def _gpus() -> Iterator[Finding]:
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            free = available_memory(torch.device("cuda", index)) / 2**30
            yield Finding(
                f"gpu {index}", f"{device.name}, {device.total_memory / 2**30:.0f} GiB, {free:.0f} GiB free now"
            )
    elif shutil.which("nvidia-smi") or Path("/dev/nvidia0").exists():
        remedy = (
            "compare the driver that `nvidia-smi` shows with the CUDA version above"
            if torch.version.cuda
            else "this torch is a CPU build: install a CUDA one, see https://pytorch.org/get-started"
        )
        yield Finding("gpu", "there is one, but torch cannot use it", remedy)
    else:
        yield Finding("gpu", "none; training runs on the CPU")


def _backends() -> Iterator[Finding]:
    if not dist.is_available():
        yield Finding("backends", "torch.distributed is missing", "install a torch built with it", bad=True)
        return
    there = [name for name, built in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available())) if built]
    needed = "nccl" if torch.cuda.is_available() else "gloo"
    missing = needed not in there
    remedy = f"ranks here need {needed}: install a torch built with it" if missing else ""
    yield Finding("backends", ", ".join(there) or "none", remedy, bad=missing)
    shared = Path("/dev/shm")
    if torch.cuda.device_count() > 1 and shared.exists():
        size = shutil.disk_usage(shared).total
        if size < SMALL_SHARED_MEMORY:
            yield Finding("/dev/shm", f"{size / 2**20:.0f} MiB", "small for NCCL: give the container --shm-size=1g")


def _host_optimizer() -> Finding:
    """Which code updates parameters in host memory. The question builds the native library if it is missing."""
    try:
        choice, threads = choose(), share().threads
    except ValueError as error:
        return Finding("host step", str(error), f"unset {VARIABLE}, or name another path", bad=True)
    if choice.simd is Simd.TORCH:
        fact = f"torch's fused optimizers ({choice.reason}): slower, no moments in 16 or 8 bits, no split master"
    else:
        name = {Simd.AVX512: "AVX-512", Simd.AVX2: "AVX2"}.get(choice.simd, "portable")
        fact = f"native, {name} ({choice.reason}), {threads} threads for one rank"
    return Finding("host step", fact, choice.remedy)


def _amx(amx: Amx) -> Finding:
    setting = f"{machine.ISA_VARIABLE}={machine.ISA_WITHOUT_AMX}"
    remedies = {
        Amx.FAULTS: f"nothing: `zeroshard train` and `shard()` set {setting}; "
        "set it yourself for other programs that multiply in bf16 on this CPU",
        Amx.UNKNOWN: f"if bf16 on the CPU faults, set {setting}",
    }
    why = f": {machine.ISA_VARIABLE} is set" if amx is Amx.CAPPED else ""
    return Finding("AMX", f"{amx.value}{why}", remedies.get(amx, ""))
