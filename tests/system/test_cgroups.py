"""Limits of control groups, from folders as the kernel has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeroshard.system import cgroups, machine
from zeroshard.system.cgroups import MemoryLimit

GIB = 1 << 30


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


@pytest.fixture
def own_groups(tmp_path: Path) -> Path:
    return tmp_path / "own_groups"


def test_version_2_counts_usage_but_not_cached_files(tmp_path: Path, own_groups: Path) -> None:
    own_groups.write_text("0::/\n")
    write(tmp_path, memory__max=8 * GIB, memory__current=6 * GIB, memory__stat=f"anon 5\ninactive_file {GIB}")
    assert list(cgroups.memory_limits(tmp_path, own_groups)) == [MemoryLimit(8 * GIB, 3 * GIB)]


def test_version_1_has_other_names(tmp_path: Path, own_groups: Path) -> None:
    own_groups.write_text("4:memory:/\n1:cpu,cpuacct:/\n")
    write(
        tmp_path / "memory",
        memory__limit_in_bytes=8 * GIB,
        memory__usage_in_bytes=6 * GIB,
        memory__stat=f"inactive_file 1\ntotal_inactive_file {GIB}",
    )
    write(tmp_path / "cpu", cpu__cfs_quota_us=250000, cpu__cfs_period_us=100000)
    assert list(cgroups.memory_limits(tmp_path, own_groups)) == [MemoryLimit(8 * GIB, 3 * GIB)]
    assert cgroups.cores(tmp_path, own_groups) == 2.5


@pytest.mark.parametrize("version", [1, 2])
def test_every_group_around_the_process_counts(version: int, tmp_path: Path, own_groups: Path) -> None:
    if version == 2:
        own_groups.write_text("0::/slice/job/step\n")
        base, limit, used = tmp_path, "memory__max", "memory__current"
        quotas: list[dict[str, object]] = [{"cpu__max": "max 100000"}, {"cpu__max": "300000 100000"}]
    else:
        own_groups.write_text("7:cpu:/slice/job/step\n3:memory:/slice/job/step\n0::/elsewhere\n")
        base, limit, used = tmp_path / "memory", "memory__limit_in_bytes", "memory__usage_in_bytes"
        period = {"cpu__cfs_period_us": 100000}
        quotas = [{"cpu__cfs_quota_us": -1, **period}, {"cpu__cfs_quota_us": 300000, **period}]
    write(base / "slice/job/step", **{limit: 16 * GIB, used: GIB})
    write(base / "slice/job", **{limit: 12 * GIB, used: 10 * GIB})
    write(base / "slice/other", **{limit: GIB, used: GIB})
    cpu = tmp_path if version == 2 else tmp_path / "cpu"
    write(cpu / "slice/job/step", **quotas[0])
    write(cpu / "slice", **quotas[1])
    limits = list(cgroups.memory_limits(tmp_path, own_groups))
    assert (min(limit.most for limit in limits), min(limit.free for limit in limits)) == (12 * GIB, 2 * GIB)
    assert cgroups.cores(tmp_path, own_groups) == 3


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path, own_groups: Path) -> None:
    own_groups.write_text("0::/../../docker/0123\n")  # the place on the host, which is not in this folder
    write(tmp_path, memory__max=GIB, memory__current=0, cpu__max="50000 100000")
    (tmp_path.parent / "docker").mkdir(exist_ok=True)
    assert list(cgroups.memory_limits(tmp_path, own_groups)) == [MemoryLimit(GIB, GIB)]
    assert cgroups.cores(tmp_path, own_groups) == 0.5


def test_a_group_is_slowed_down_above_its_high_mark(tmp_path: Path, own_groups: Path) -> None:
    write(tmp_path, memory__max="max", memory__high=2 * GIB, memory__current=GIB)
    assert list(cgroups.memory_limits(tmp_path, own_groups)) == [MemoryLimit(2 * GIB, GIB)]


def test_without_limits_there_is_none(tmp_path: Path, own_groups: Path) -> None:
    write(tmp_path, memory__max="max", memory__current=GIB, cpu__max="max 100000")
    assert list(cgroups.memory_limits(tmp_path, own_groups)) == []
    assert cgroups.cores(tmp_path, own_groups) is None


def test_the_machine_has_what_its_groups_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "memory_limits", lambda: iter([MemoryLimit(3 * GIB // 2, GIB // 2)]))
    monkeypatch.setattr(cgroups, "cores", lambda: 1.5)
    assert machine.usable_memory() == 3 * GIB // 2
    assert machine.available_memory() == GIB // 2
    assert machine.usable_cores() == 1
