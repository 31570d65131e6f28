"""Machine profiles: data files with sources, and the errors for bad profiles."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from zeroshard.plan import machine_profile
from zeroshard.plan.machine_profile import FOLDER, load, names, parse


def test_there_are_profiles_of_the_papers_machine_and_of_machines_of_today() -> None:
    assert names() == ["a100", "cpu", "h100", "h200", "v100"]


@pytest.mark.parametrize("name", names())
def test_every_profile_loads(name: str) -> None:
    machine = load(name)
    assert machine.name == name
    assert 0 < machine.device.efficiency <= 1
    assert machine.device.rate(1e15, half=True) <= machine.device.peak_16bit


@pytest.mark.parametrize("name", names())
def test_every_number_of_a_device_or_link_has_its_source_beside_it(name: str) -> None:
    above = ""
    for line in (FOLDER / f"{name}.toml").read_text().splitlines():
        if re.match(r"(memory|peak|bandwidth|efficiency|half_work|latency|down)", line):
            assert "#" in line or "#" in above, line
        above = line if line.startswith("[") else above


def test_profiles_are_packaged() -> None:
    project = tomllib.loads((Path(machine_profile.__file__).parents[2] / "pyproject.toml").read_text())
    assert "plan/machines/*.toml" in project["tool"]["setuptools"]["package-data"]["zeroshard"]


def test_names_are_not_case_sensitive_and_files_are_taken_by_path(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text((FOLDER / "h200.toml").read_text())
    assert load("H200").device == load(mine).device == load(str(mine)).device
    assert load(mine).name == "mine"


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"'H20' is unknown \(did you mean 'h200'\?\)"):
        load("H20")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("= 3", "is not TOML"),
        ("devices_per_nod = 3", r"devices_per_nod is unknown \(did you mean 'devices_per_node'\?\)"),
        ("devices_per_node = 8", "device must be a table"),
        ("[device]\nmemory = 1", "device lacks peak_16bit"),
        ("[device]\nmemory = -1", r"device.memory=-1 must be a positive number"),
        ("[device]\nmemry = 1", r"device.memry is unknown \(did you mean 'memory'\?\)"),
    ],
)
def test_a_bad_profile_is_refused_by_the_key_that_is_wrong(text: str, says: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text(text)
    with pytest.raises(ValueError, match=says):
        load(bad)


def test_an_error_names_a_missing_profile() -> None:
    with pytest.raises(ValueError, match=r"'nowhere/x.toml' cannot be read"):
        load("nowhere/x.toml")


@pytest.mark.parametrize(("count", "says"), [(0, "devices_per_node=0"), (2.5, "devices_per_node=2.5")])
def test_a_node_has_whole_devices(count: float, says: str) -> None:
    data = tomllib.loads((FOLDER / "h200.toml").read_text())
    with pytest.raises(ValueError, match=says):
        parse("mine", data | {"devices_per_node": count})


def test_one_rank_gets_a_socket_and_many_share_all() -> None:
    machine = load("v100")
    assert machine.host_bandwidth(1) == machine.host_bandwidth(2) == machine.host.bandwidth / 2
    assert machine.host_bandwidth(16) == machine.host.bandwidth / 16
