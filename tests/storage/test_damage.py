"""Checkpoints that are damaged, forged or cut short: detected, named, harmless."""

from __future__ import annotations

import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.models import loss_of, net
from tests.ranks import Pool
from tests.storage.forging import forge, index_of
from tests.storage.runs import Positions, Run, difference
from zeroshard import CheckpointError
from zeroshard.storage import load as load_module
from zeroshard.storage.folder import complete_in
from zeroshard.storage.format import Marker

DATA, INDEX, MARKER = "rank-00000.safetensors", "index.json", "COMPLETE"


def small(seed: int = 0) -> tuple[Any, Any]:
    model = net(depth=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += seed
    return zeroshard.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), stage=3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for step in range(steps):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original") / "saved"
    model, optimizer = small()
    train(model, optimizer, 2)
    zeroshard.save(folder, model, optimizer, extra={"big": torch.arange(4000)})
    return folder


@pytest.fixture
def saved(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "saved"))


def state(model: Any, optimizer: Any) -> dict[str, Any]:
    return {"weights": zeroshard.full_state_dict(model), **optimizer.state_dict()["state"]}


def refused(folder: Path, match: str) -> None:
    """Loading raises, names the file and says what it is."""
    model, optimizer = small(seed=1)
    with pytest.raises(CheckpointError, match=match):
        zeroshard.load(folder, model, optimizer)


def untouched(folder: Path, match: str) -> None:
    """And leaves the model as it was."""
    model, optimizer = small(seed=1)
    train(model, optimizer)
    before = state(model, optimizer)
    with pytest.raises(CheckpointError, match=match):
        zeroshard.load(folder, model, optimizer)
    assert difference(state(model, optimizer), before) is None


# -- files --------------------------------------------------------------------------------------------------------


def test_a_truncated_file_is_named(saved: Path) -> None:
    with open(saved / DATA, "r+b") as file:
        file.truncate(os.path.getsize(saved / DATA) - 1)
    untouched(saved, f"{DATA} has .* bytes instead of .*truncated")


@pytest.mark.parametrize(("seam", "after"), [("check_fits", "nothing was loaded"), ("_fill", "loaded in part")])
def test_a_file_that_becomes_shorter_while_it_is_read_is_named(
    seam: str, after: str, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is open by then. Where a file is mapped, the system ends the process at the first byte that is gone."""
    real = getattr(load_module, seam)

    def cuts(*arguments: Any) -> Any:
        os.truncate(saved / DATA, index_of(saved)["parts"][0]["header"])
        return real(*arguments)

    model, optimizer = small(seed=1)
    monkeypatch.setattr(load_module, seam, cuts)
    with pytest.raises(CheckpointError, match=f"{DATA} became shorter while it was read.*{after}"):
        zeroshard.load(saved, model, optimizer)


def test_a_file_that_was_written_after_it_was_checked_is_checked_again(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, part = load_module._fill, index_of(saved)["parts"][0]
    entry = next(entry for entry in part["entries"] if entry["kind"] == "value")

    def writes(*arguments: Any) -> Any:
        with open(saved / DATA, "r+b") as file:
            file.seek(part["header"] + entry["offset"])
            file.write(b"\x7f" * 4)
        os.utime(saved / DATA)
        return real(*arguments)

    model, optimizer = small(seed=1)
    monkeypatch.setattr(load_module, "_fill", writes)
    with pytest.raises(CheckpointError, match=f"{DATA} is damaged.*loaded in part"):
        zeroshard.load(saved, model, optimizer)


def test_a_missing_file_is_named(saved: Path) -> None:
    os.remove(saved / DATA)
    untouched(saved, f"{DATA} cannot be read")


def test_a_flipped_bit_anywhere_is_found(saved: Path) -> None:
    model, optimizer = small(seed=1)
    assert zeroshard.load(saved, model, optimizer) is not None
    chance = random.Random(3)
    for file in sorted(saved.iterdir()):
        whole = file.read_bytes()
        places = {0, 1, 7, 8, 9, len(whole) - 1, *(chance.randrange(len(whole)) for _ in range(30))}
        for place in sorted(places):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << chance.randrange(8)
            file.write_bytes(damaged)
            try:
                zeroshard.load(saved, model, optimizer)
            except CheckpointError:
                pass
            else:
                pytest.fail(f"{file.name}, byte {place}")
        file.write_bytes(whole)


def test_a_flipped_bit_in_data_names_the_parameter(saved: Path) -> None:
    entry = next(entry for entry in index_of(saved)["parts"][0]["entries"] if entry["kind"] == "state exp_avg")
    header = index_of(saved)["parts"][0]["header"]
    with open(saved / DATA, "r+b") as file:
        file.seek(header + entry["offset"] + 5)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 16]))
    refused(saved, rf"{DATA} is damaged: '{entry['name']}' \(state exp_avg\).*nothing was loaded")


def test_a_file_of_another_checkpoint_is_known(saved: Path, tmp_path: Path) -> None:
    model, optimizer = small()
    train(model, optimizer, 2)
    zeroshard.save(tmp_path / "other", model, optimizer, extra={"big": torch.arange(4000)})
    shutil.copy(tmp_path / "other" / DATA, saved / DATA)
    untouched(saved, f"{DATA} belongs to another checkpoint")
    shutil.copy(tmp_path / "other" / INDEX, saved / INDEX)
    untouched(saved, f"{INDEX} is not the one that {MARKER} was written for")


def test_a_link_is_not_followed(saved: Path, tmp_path: Path) -> None:
    os.rename(saved / DATA, tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", saved / DATA)
    untouched(saved, f"{DATA} is a link")


class Bomb:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("name", [DATA, INDEX, MARKER])
def test_a_pickle_in_disguise_is_not_run(name: str, saved: Path, tmp_path: Path) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "exploded"))
    size = (saved / name).stat().st_size
    (saved / name).write_bytes(bomb + b"\0" * max(0, size - len(bomb)))
    untouched(saved, "never loaded" if name == DATA else "damaged|not the one")
    assert not (tmp_path / "exploded").exists()
    for file in saved.iterdir():
        torch.save(nn.Linear(2, 2), file)
    untouched(saved, "damaged")


def test_no_file_that_is_written_is_a_pickle(saved: Path) -> None:
    for file in saved.iterdir():
        with pytest.raises((pickle.UnpicklingError, ValueError, KeyError, EOFError, IndexError, AttributeError)):
            pickle.loads(file.read_bytes())
    from safetensors import safe_open

    with safe_open(saved / DATA, "pt") as opened:
        assert any(key.startswith("first.weight|value|") for key in opened.keys())  # noqa: SIM118


# -- an index that was made up ----------------------------------------------------------------------------------------


def entry(value: Any, number: int = 0) -> Any:
    return value["parts"][0]["entries"][number]


def double_last(value: Any) -> None:
    part = value["parts"][0]
    last = part["entries"][-1]
    size = part["size"] - part["header"] - last["offset"]
    part["entries"].append({**last, "offset": last["offset"] + size})
    part["size"] += size


def deep(value: Any) -> Any:
    nested: Any = 0
    for _ in range(500):
        nested = [nested]
    value["parts"][0]["values"]["extra"] = nested


FORGERIES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a rank that is a path": (lambda v: v["parts"][0].update(rank="../../etc"), "is no count"),
    "a rank outside": (lambda v: v["parts"][0].update(rank=7), "parts are not those of ranks"),
    "no parts": (lambda v: v.update(parts=[]), "parts are not those of ranks"),
    "ranges twice": (double_last, "overlap"),
    "a range that is too long": (lambda v: entry(v)["range"].__setitem__(1, 10**12), "not inside"),
    "a range that is too short": (lambda v: entry(v)["range"].__setitem__(0, 1), "expected|checksums|missing"),
    "a negative range": (lambda v: entry(v)["range"].__setitem__(0, -1), "is no count"),
    "an absurd shape": (lambda v: entry(v).update(shape=[2**62, 2**62]), "is no count"),
    "more dimensions than torch has": (lambda v: entry(v).update(shape=[2**62] * 200_000), "of 200000 dimensions"),
    "an absurd number": (lambda v: entry(v).update(offset=2**80), "is no count"),
    "another offset": (lambda v: entry(v).update(offset=64), "where 0 is expected"),
    "an absurd header": (lambda v: v["parts"][0].update(header=2**60), "a header of"),
    "an unknown dtype": (lambda v: entry(v).update(dtype="OBJ"), "KeyError"),
    "a box outside": (lambda v: entry(v).update(box=[[0, 10**6], [0, 10**6]]), "not inside|box"),
    "no checksums": (lambda v: entry(v).update(crc32=[]), "0 checksums"),
    "a name that is none": (lambda v: entry(v).update(name=["x"]), "must be strings"),
    "another version": (lambda v: v.update(version=99), "version 99"),
    "a list": (lambda v: [1, 2], "no index"),
    "a token that is a path": (lambda v: v.update(checkpoint="../x"), "names no checkpoint"),
    "deep nesting": (deep, "nested more than"),
    "an unknown value": (lambda v: v["parts"][0]["values"].update(extra={"$": "pickle", "value": "x"}), "not know"),
    "a large tensor that is not there": (
        lambda v: v["parts"][0]["values"].update(extra={"$": "large", "name": "../../x"}),
        "no tensor",
    ),
    "a small tensor of absurd shape": (
        lambda v: v["parts"][0]["values"].update(extra={"$": "tensor", "dtype": "F32", "shape": [2**60], "bits": ""}),
        "with 0 bytes",
    ),
    "a parameter too few": (
        lambda v: [e.update(name="other") for e in v["parts"][0]["entries"] if e["name"] == "first.bias"] and None,
        "lacks parameter 'first.bias'|another header",
    ),
}


@pytest.mark.parametrize("what", FORGERIES)
def test_an_index_that_was_made_up_is_refused(what: str, saved: Path) -> None:
    edit, match = FORGERIES[what]
    forge(saved, edit)
    untouched(saved, match)


def test_an_index_deeper_than_the_parser_goes_is_refused(saved: Path) -> None:
    text = b"[" * 200_000
    (saved / INDEX).write_bytes(text)
    (saved / MARKER).write_bytes(Marker.of(text, 1, 1).to_json())
    untouched(saved, "is no index")


# -- which checkpoint is taken ----------------------------------------------------------------------------------------


def test_an_incomplete_checkpoint_is_not_taken(saved: Path) -> None:
    os.remove(saved / MARKER)
    untouched(saved, "holds no complete checkpoint")


def test_an_older_good_one_is_taken_where_allowed_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = small()
    for step in range(3):
        train(model, optimizer)
        zeroshard.save(tmp_path / f"step-{step}", model, optimizer, extra=step)
    os.remove(tmp_path / "step-2" / MARKER)
    assert zeroshard.load(tmp_path, model, optimizer) == 1
    with open(tmp_path / "step-1" / DATA, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    with pytest.raises(CheckpointError, match=r"step-1.*is damaged"):
        zeroshard.load(tmp_path, model, optimizer)
    assert zeroshard.load(tmp_path, model, optimizer, allow_older=True) == 0
    told = capsys.readouterr().out
    assert "step-1" in told
    assert f"taking the one before, {tmp_path / 'step-0'}" in told


def test_whatever_a_crash_leaves_one_of_two_is_there(original: Path, tmp_path: Path) -> None:
    """A checkpoint that replaces another is renamed twice; a crash may come before, between and after."""
    path, removing = tmp_path / "latest", ".zeroshard.0123456789abcdef.removing"
    model, optimizer = small()
    for names in (
        [removing, ".latest.00ff.partial"],
        [removing, "latest"],
        ["latest", ".latest.00ff.partial"],
    ):
        for name in names:
            shutil.copytree(original, tmp_path / name)
        zeroshard.load(path, model, optimizer)
        zeroshard.save(path, model, optimizer)
        assert [one.folder for one in complete_in(tmp_path)] == [path], names
        zeroshard.load(path, model, optimizer)
        shutil.rmtree(path)


def test_only_the_newest_are_kept_and_nothing_else_is_removed(tmp_path: Path) -> None:
    model, optimizer = small()
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "data").write_text("x")
    for step in range(4):
        zeroshard.save(tmp_path / f"step-{step}", model, optimizer, keep=2)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["precious", "step-2", "step-3"]
    with pytest.raises(ValueError, match="keep=0 must be"):
        zeroshard.save(tmp_path / "step-9", model, optimizer, keep=0)


# -- folders that cannot be written -----------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    model, optimizer = small()
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "saved", Path("/proc/zeroshard/saved")):
        with pytest.raises(CheckpointError, match=f"{path} cannot be written"):
            zeroshard.save(path, model, optimizer)
    train(model, optimizer)


class LargePositions(Positions):
    """Makes every rank's file larger than anything else that a rank writes, the store of the group among it."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "ballast": torch.zeros(1 << 20, dtype=torch.uint8)}


def full_disk(folder: str) -> None:
    """Rank 1 may write no more than half of its part to a file."""
    import resource

    run = Run({"stage": 3})
    run.loader = LargePositions()
    run.train(1)
    run.save(folder, extra="good")
    good = run.everything()
    run.train(1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if torch.distributed.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, limits[1]))
    try:
        for asynchronous in (False, True):
            with pytest.raises(
                CheckpointError,
                match=r"was not saved: rank 0: rank 1 failed: OSError: .*File too large: '.*rank-00001.safetensors'; "
                "make room there, or save to another disk",
            ):
                run.save(folder, asynchronous=asynchronous).wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    after = run.everything()
    other = Run({"stage": 2}, seed=2)
    other.loader = LargePositions()
    assert other.load(folder) == "good"  # what was there is there
    assert difference(other.everything(), good) is None
    run.save(folder, extra="again")
    assert other.load(folder) == "again"
    assert difference(other.everything(), after) is None


def test_a_full_disk_on_one_rank_is_told_on_all_and_the_last_checkpoint_stays(tmp_path: Path) -> None:
    Pool.shared().run(full_disk, 2, {"folder": str(tmp_path / "saved")})


def one_sees_damage(folder: str) -> None:
    run = Run({"stage": 3})
    run.train(1)
    for name in ("a", "b"):
        run.save(f"{folder}/{name}", extra=name)
    if torch.distributed.get_rank() == 0:
        with open(f"{folder}/b/rank-00001.safetensors", "r+b") as file:
            file.seek(-3000, os.SEEK_END)
            file.write(b"\xff" * 100)
    torch.distributed.barrier()
    with pytest.raises(CheckpointError, match=r"rank 1: .*rank-00001\.safetensors is damaged"):
        run.load(f"{folder}/b")
    assert run.load(folder, allow_older=True) == "a"
    run.train(1)


def test_damage_that_one_rank_sees_is_told_on_all(tmp_path: Path) -> None:
    Pool.shared().run(one_sees_damage, 2, {"folder": str(tmp_path)})


def two_folders(folder: str) -> None:
    from zeroshard.storage import save

    save.SEEN_WITHIN_SECONDS = 0.1
    run = Run({"stage": 1})
    with pytest.raises(CheckpointError, match=r"rank 1 cannot see .*; all ranks must save to one folder"):
        run.save(f"{folder}/{torch.distributed.get_rank()}/saved")
    save.SEEN_WITHIN_SECONDS = 10.0
    run.train(1)


def test_ranks_that_see_different_folders_are_named(tmp_path: Path) -> None:
    Pool.shared().run(two_folders, 2, {"folder": str(tmp_path)})
