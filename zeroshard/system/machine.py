"""Facts about the machine: its cores, its memory, its GPUs, and whether its AMX works.

Some virtual machines advertise AMX in their CPU flags but fault on it: the first bf16 matrix product on the CPU ends
the process with an illegal instruction. A process cannot catch that, so a child process tries the product. Importing
this module starts no process and sets no variable.
"""

import contextlib
import enum
import fcntl
import hashlib
import ipaddress
import math
import os
import re
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from . import cgroups
from .cgroups import read

ISA_VARIABLE: Final = "ONEDNN_MAX_CPU_ISA"
ISA_WITHOUT_AMX: Final = "AVX512_CORE_BF16"
_ISA_VARIABLES: Final = (ISA_VARIABLE, "DNNL_MAX_CPU_ISA")  # oneDNN still reads its old name too

# The matrices are large enough that torch gives the product to oneDNN: below 16³ it does not. The fault is expected, so
# the child leaves no core file.
_PROBE: Final = """
import resource, torch
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
a = torch.ones(128, 128, dtype=torch.bfloat16)
assert (a @ a)[0, 0].item() == 128
"""
LOOPBACK: Final = "127.0.0.1"
ANYWHERE: Final = "192.0.2.1"  # RFC 5737: an address of documentation, where nobody is
_GET_FLAGS, _UP, _LOOPBACK = 0x8913, 0x1, 0x8  # Linux: SIOCGIFFLAGS, IFF_UP, IFF_LOOPBACK
_PROBE_TIMEOUT: Final = 120.0  # seconds; importing torch from a cold disk is slow, the product is not


@dataclass(frozen=True)
class Cpu:
    """What `/proc/cpuinfo` says about the first processor."""

    model: str
    flags: frozenset[str]

    @classmethod
    def parse(cls, cpuinfo: str) -> "Cpu":
        r"""Read the text of `/proc/cpuinfo`.

        >>> Cpu.parse("model name : Some CPU\nflags : avx2 amx_tile amx_bf16\n").has_amx
        True
        """
        model = re.search(r"^model name\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
        flags = re.search(r"^flags\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
        return cls(
            model=model.group(1).strip() if model else "unknown",
            flags=frozenset(flags.group(1).split()) if flags else frozenset(),
        )

    @property
    def has_amx(self) -> bool:
        """Whether the CPU advertises what bf16 matrix products in AMX need."""
        return {"amx_tile", "amx_bf16"} <= self.flags


class Amx(enum.Enum):
    """What is known about bf16 matrix products in AMX on this machine."""

    ABSENT = "not advertised by this CPU"
    WORKS = "advertised, and works"
    FAULTS = "advertised, but faults"
    CAPPED = "switched off by the environment"
    UNKNOWN = "advertised, but the probe could not tell"


def read_cpuinfo() -> str:
    """Return the text of `/proc/cpuinfo`, empty where there is none."""
    return read(Path("/proc/cpuinfo")) or ""


def probe_amx(cpuinfo: str | None = None, probe: Callable[[], int] | None = None, cache: Path | None = None) -> Amx:
    """Say whether AMX works here. A child process is asked at most once per CPU model and torch version.

    Args:
        cpuinfo: text in the format of `/proc/cpuinfo`; this machine's when not given.
        probe: tries a bf16 product in another process. Returns an exit status as `subprocess`, negative for a signal.
        cache: folder that remembers the answer; `$XDG_CACHE_HOME/zeroshard` when not given.
    """
    cpu = Cpu.parse(read_cpuinfo() if cpuinfo is None else cpuinfo)
    if not cpu.has_amx:
        return Amx.ABSENT
    if any(os.environ.get(name) for name in _ISA_VARIABLES):
        return Amx.CAPPED
    # The answer depends on the CPU and on torch. Another CPU or another torch gives another file name.
    key = hashlib.sha256(f"{cpu.model}\n{torch.__version__}".encode()).hexdigest()[:16]
    remembered = (cache or cache_folder()) / f"amx-{key}"
    known = {"works": Amx.WORKS, "faults": Amx.FAULTS}
    answer = read(remembered)
    if answer not in known:
        status = (probe or _probe_in_child)()
        answer = {0: "works", -signal.SIGILL: "faults"}.get(status)
        if answer is None:  # another signal may be an accident, such as a kill for memory: not remembered
            return Amx.FAULTS if status < 0 else Amx.UNKNOWN
        remember(remembered, answer)
    return known[answer]


def ensure_bf16_matmul(
    cpuinfo: str | None = None, probe: Callable[[], int] | None = None, cache: Path | None = None
) -> str | None:
    """Make bf16 matrix products on the CPU safe; call it before the first one.

    Where AMX faults, a variable tells oneDNN not to use it. oneDNN reads the variable when it first multiplies, so
    torch may already be imported. Every rank of a job may call this at once. Arguments are those of `probe_amx`.

    Returns:
        One line to print when something was changed, otherwise None.
    """
    if probe_amx(cpuinfo, probe, cache) is not Amx.FAULTS:
        return None
    os.environ[ISA_VARIABLE] = ISA_WITHOUT_AMX
    return f"this machine advertises AMX but faults on it: set {ISA_VARIABLE}={ISA_WITHOUT_AMX} for bf16 on the CPU"


def usable_cores() -> int:
    """Return how many cores this process may use: its affinity, capped by the container's quota."""
    allowed, quota = len(os.sched_getaffinity(0)), cgroups.cores()
    return allowed if quota is None else max(1, min(allowed, math.floor(quota)))


def usable_memory() -> int:
    """Return the host memory in bytes that this process may use: the machine's, capped by the container's limit."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([memory, *(limit.most for limit in cgroups.memory_limits())])


def available_memory() -> int:
    """Return the host memory in bytes that is free for use now, in this container too."""
    free = cgroups.number(Path("/proc/meminfo"), "MemAvailable:")
    limits = [limit.free for limit in cgroups.memory_limits()]
    return max(0, min([usable_memory(), *limits, *([] if free is None else [free * 1024])]))


def _probe_in_child() -> int:
    """Try a bf16 product in a child process and return its exit status, 1 where it could not be asked."""
    # -P: a file called torch.py in the current folder must not be taken for torch.
    command = [sys.executable, "-P", "-c", _PROBE]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=_PROBE_TIMEOUT
        )
    except (OSError, subprocess.TimeoutExpired):
        return 1
    return done.returncode


def device_of_rank(
    wanted: torch.device, environment: Mapping[str, str] = os.environ, gpus: int | None = None
) -> torch.device:
    """Return the device of this rank: the CPU, the GPU that `wanted` names, or the one that `LOCAL_RANK` numbers.

    Args:
        wanted: a device with or without an index.
        environment: torchrun's variables. Without `LOCAL_RANK` the device is the GPU that torch uses now.
        gpus: how many GPUs this process sees; torch is asked when not given.

    Raises:
        ValueError: there is no such GPU, with the remedy.

    >>> device_of_rank(torch.device("cuda"), {"LOCAL_RANK": "3"}, gpus=8)
    device(type='cuda', index=3)
    """
    if wanted.type != "cuda":
        return torch.device(wanted.type)  # there is one CPU, whatever index it was given
    count = torch.cuda.device_count() if gpus is None else gpus
    if not count:
        raise ValueError(f"device={str(wanted)!r} is not there: this torch sees no GPU; leave device= out")
    index = wanted.index
    if index is not None:
        source, remedy = f"device={str(wanted)!r}", f"name one of cuda:0 to cuda:{count - 1}, or leave device= out"
    elif count == 1 and environment.get("CUDA_VISIBLE_DEVICES"):
        return torch.device("cuda", 0)  # the launcher shows each rank only its own GPU, as Slurm can
    elif "LOCAL_RANK" in environment:
        index = int(environment["LOCAL_RANK"])
        source, remedy = f"LOCAL_RANK={index}", "start fewer ranks a node, or pass device="
    else:
        return torch.device("cuda", torch.cuda.current_device())
    if index >= count:
        raise ValueError(f"{source}, but this process sees {count} GPU{'s' * (count > 1)}; {remedy}")
    return torch.device("cuda", index)


def device_title(device: torch.device) -> str:
    """Return the name of a GPU, or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return Cpu.parse(read_cpuinfo()).model


def cache_folder() -> Path:
    """Return the folder for answers about this machine and for libraries that are built on it."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "zeroshard"


def make_private(folder: Path) -> bool:
    """Make a folder in which only this user writes, or take the right of others away. Return whether that worked."""
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not is_private(folder) and folder.lstat().st_uid == os.geteuid() and not folder.is_symlink():
            folder.chmod(folder.stat().st_mode & ~0o022)  # a umask of 002 gives the group a right that nobody meant
        return is_private(folder)
    return False


def is_private(path: Path) -> bool:
    """Return whether only this user and root can have written a file or a folder. A symbolic link counts as foreign."""
    found = path.lstat()
    return not stat.S_ISLNK(found.st_mode) and found.st_uid in (os.geteuid(), 0) and not found.st_mode & 0o022


def remember(file: Path, text: str) -> None:
    """Write a small file whole or not at all, because other ranks may write it too. Errors only make things slower."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as temporary:
            temporary.write(text)
        os.replace(temporary.name, file)


def all_ranks_are_here(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether all ranks run on this machine, by torchrun's variables. False if the variables do not tell.

    >>> all_ranks_are_here({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"})
    True
    >>> all_ranks_are_here({"WORLD_SIZE": "8", "MASTER_ADDR": "localhost"})  # no other machine would find rank 0
    True
    """
    local, host = environment.get("LOCAL_WORLD_SIZE"), environment.get("MASTER_ADDR", "")
    if local is not None:  # then rank 0 may call its own host "localhost", although others are elsewhere
        return local == environment.get("WORLD_SIZE")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name: it may resolve to the loopback address on its own machine alone
        return False


def loopback_interface() -> str | None:
    """Return the name of the network interface that no other machine reaches. None if it is not found."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            answer = fcntl.ioctl(asked, _GET_FLAGS, struct.pack("256s", name.encode()))
            (flags,) = struct.unpack_from("H", answer, 16)
            if flags & _UP and flags & _LOOPBACK:
                return name
    return None


def address_for_ranks() -> str | None:
    """The address at which the other ranks reach this host. None if the environment does not tell.

    The host's own name often resolves to an address that only the host itself can reach. So the address is the one
    that the system would use towards the host of rank 0. Nothing is sent to find it out.
    """
    if all_ranks_are_here():
        return LOOPBACK
    for target in filter(None, (os.environ.get("MASTER_ADDR"), ANYWHERE)):
        with contextlib.suppress(OSError):
            family, kind, protocol, _, where = socket.getaddrinfo(target, 1, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(where)
                address = str(probe.getsockname()[0])
            if not ipaddress.ip_address(address).is_loopback:  # else this is the host of rank 0
                return address
    return None
