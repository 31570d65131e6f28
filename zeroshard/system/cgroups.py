"""What the control groups of this process allow: host memory and cores, in version 1 and 2, nested groups too.

A group's limit holds for the group and all groups inside it together. So each group counts, from the process's own
group up to the root. A container often sees its own group as the root, although the kernel names the group's place on
the host: a folder that does not exist is passed over.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
"""The groups of this process, one line each: a number, controllers (none in version 2), the group's path."""
MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.high", "memory.current", "inactive_file"),  # above it the kernel slows the group down
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""The limit, the bytes in use, and the key of cached files in ``memory.stat``: twice version 2, then version 1."""


class MemoryLimit(NamedTuple):
    """The limit of one control group, in bytes."""

    most: int
    free: int
    """Bytes of it that are not in use. Cached files are not: the kernel gives their memory back on demand."""


def memory_limits(root: Path = ROOT, own_groups: Path = OWN_GROUPS) -> Iterator[MemoryLimit]:
    """The memory limits of this process's control groups."""
    for folder in _folders("memory", root, own_groups):
        for limit, used, cached in MEMORY_FILES:
            most, now = number(folder / limit), number(folder / used)
            if most is not None and now is not None:
                yield MemoryLimit(most, most - now + (number(folder / "memory.stat", cached) or 0))


def cores(root: Path = ROOT, own_groups: Path = OWN_GROUPS) -> float | None:
    """The smallest quota of this process's control groups, in cores. None if there is no quota."""
    quotas = []
    for folder in _folders("cpu", root, own_groups):
        both = re.match(r"(\d+) (\d+)", read(folder / "cpu.max") or "")  # version 2: "max 100000" or "150000 100000"
        if both:
            quotas.append(int(both[1]) / int(both[2]))
        quota, period = number(folder / "cpu.cfs_quota_us"), number(folder / "cpu.cfs_period_us")
        if quota is not None and period:  # version 1: the quota is -1 if there is none
            quotas.append(quota / period)
    return min(quotas, default=None)


def _folders(controller: str, root: Path, own_groups: Path) -> list[Path]:
    """The folders of this process's groups that this controller may limit."""
    found = [root, root / controller]
    for line in (read(own_groups) or "").splitlines():
        _, controllers, place = line.split(":", 2)
        group = PurePosixPath(place.lstrip("/"))
        if controllers in ("", controller) or controller in controllers.split(","):
            base = root / controller if controllers else root
            found += [base / part for part in (group, *group.parents) if ".." not in part.parts]
    return list(dict.fromkeys(found))


def number(file: Path, key: str = "") -> int | None:
    """The whole number in a file of the kernel, on the line that begins with a key. None if there is none."""
    found = re.search(rf"^{key}\s*(\d+)\b", read(file) or "", re.MULTILINE)
    return None if found is None else int(found.group(1))


def read(file: Path) -> str | None:
    """The text of a file of the kernel, without the white space around it. None if it cannot be read."""
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return None
