"""Machine profiles: data files with sources, and the errors for bad profiles."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from zeroshard.cli.main import main
from zeroshard.plan.machine.profile import FOLDER, load, names, parse


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
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert "plan/machine/machines/*.toml" in project["tool"]["setuptools"]["package-data"]["zeroshard"]


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
        ("= 3", "not TOML"),
        ("devices_per_nod = 3", r"devices_per_nod is unknown \(did you mean 'devices_per_node'\?\)"),
        ("device = 8", "device must be a table"),
        ("devices_per_node = 8", "device lacks memory, peak_16bit"),
        ("[device]\nmemory = 1", "device lacks .*; inside lacks latency, bandwidth; .*; host lacks memory, bandwidth"),
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


HUGE = "1" + "0" * 400


def profile_with(line: str) -> str:
    """A profile that is right apart from one line, which begins with a key as ``device.memory``."""
    data = tomllib.loads((FOLDER / "h200.toml").read_text())
    tables = {
        f"{table}.{key}": value for table in data if isinstance(data[table], dict) for key, value in data[table].items()
    }
    values = {key: value for key, value in data.items() if not isinstance(value, dict)} | tables
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items() if key != line.partition(" =")[0]]
    return "\n".join([line, *lines])


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (f"device.memory = {HUGE}", "device.memory=(an integer of 1329 bits) must be from 1e-15 to 1e+24"),
        ("device.memory = 1e400", "device.memory=inf must be a positive number"),
        ("device.memory = nan", "device.memory=nan must be a positive number"),
        ("device.memory = true", "device.memory=True must be a positive number"),
        ("device.memory = 1e300", "device.memory=1e+300 must be from 1e-15 to 1e+24"),
        ("inside.bandwidth = 1e-320", "inside.bandwidth=1e-320 must be from 1e-15 to 1e+24"),
        ('pcie.up = "\\u001b[2J"', r"pcie.up='\x1b[2J' must be a positive number"),
        ("host.sockets = 2.5", "host.sockets=2.5 must be a whole number"),
        ("host.sockets = 0", "host.sockets=0 must be a whole number"),
        (f"host.sockets = {1 << 63}", f"host.sockets={1 << 63} must be a whole number, from 1 to 1,048,576"),
        ("launch.crowded = 1e400", "launch.crowded=inf must be a positive number"),
        (f"devices_per_node = {HUGE}", "devices_per_node=(an integer of 1329 bits) must be a whole number, from 1 to"),
        (f"devices_per_node = {1 << 63}", f"devices_per_node={1 << 63} must be a whole number, from 1 to 1,048,576"),
        ("spread = [1.2, 0.9]", "spread=[1.2, 0.9] must be two factors, such as [0.9, 1.2], around 1"),
        ("spread = [nan, 1.2]", "spread=[nan, 1.2] must be two factors"),
        ("spread = 1.5", "spread=1.5 must be two factors"),
        ("title = 3", "title=3 must be a short text of one line"),
        ('title = "\\u001b]0;owned\\u0007"', r"title='\x1b]0;owned\x07' must be a short text"),
        (f"title = '{'x' * 3000}'", "title='xxx"),
        ('half = "\\u001b[2J"', r"half='\x1b[2J' must be"),
        ('"\\u001b[2J" = 1', r"'\x1b[2J' is unknown"),
        ('device."\\u001b[2J" = 1', r"device.'\x1b[2J' is unknown"),
        (f"title = {'[' * 3000}", "not TOML: it is nested too deep"),
        (f"title = {'1' * 5000}", "line 1 has more than 4,000 bytes"),
        ("#\n" * 60_000, "it has more than 100,000 bytes"),
    ],
    ids=lambda text: ascii(text[:40]),
)
def test_a_number_that_no_machine_has_is_refused_by_its_key(
    line: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text(profile_with(line))
    assert main(["plan", "--model", "tiny", "--gpus", "8", "--machine", str(mine)]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert "mine" in error
    assert error.rstrip("\n").isprintable()
    assert len(error) < 1000


def test_brackets_in_a_title_are_no_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text(profile_with('title = "[/bold]"'))
    assert main(["plan", "--model", "tiny", "--gpus", "8", "--machine", str(mine)]) == 0
    assert "times as on [/bold]" in capsys.readouterr().out


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
