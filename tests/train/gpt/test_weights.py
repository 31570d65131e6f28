"""The weights of a sharded GPT are written parameter by parameter, and come back as a plain model."""

import errno
import json
import os
import re
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zeroshard
from tests.ranks import Pool
from zeroshard import CheckpointError
from zeroshard.cli.main import main
from zeroshard.config.job import ModelConfig
from zeroshard.runtime import runtime_of
from zeroshard.storage import background, output
from zeroshard.storage.save import on_rank_zero
from zeroshard.train.gpt import GPT
from zeroshard.train.gpt.weights import load_weights, save_weights

CONFIG = ModelConfig(layers=3, hidden=32, heads=2, sequence=8, tied=False)
LARGEST = 4 * 4 * 32 * 32  # bytes of a block's largest matrix


def sharded(stage: int) -> Any:
    torch.manual_seed(0)
    model = GPT(CONFIG)
    return zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)[0]


def write(folder: str, stage: int, shard_bytes: int) -> dict[str, Tensor]:
    """Checks on the way that of what was written before, nothing is kept."""
    alive: list[weakref.ref[Tensor]] = []
    real = output.Shards.write

    def watched(self: output.Shards, name: str, values: Tensor) -> None:
        assert not [one for one in alive if one() is not None], f"before {name}"
        alive.append(weakref.ref(values))
        real(self, name, values)

    model = sharded(stage)
    expected = zeroshard.full_state_dict(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output.Shards, "write", watched)
        patch.setattr(zeroshard, "full_state_dict", None)
        files = save_weights(Path(folder), CONFIG, model, shard_bytes)
    assert bool(files) == (dist.get_rank() == 0)
    assert bool(alive) == (dist.get_rank() == 0)
    return expected


@pytest.mark.parametrize(("stage", "shard_bytes"), [(3, LARGEST), (1, 10**9)])
def test_saved_weights_come_back_as_the_same_model_and_are_never_whole_in_memory(
    stage: int, shard_bytes: int, tmp_path: Path
) -> None:
    folder = tmp_path / "new" / "folder"
    expected = Pool.shared().run(write, 2, {"folder": str(folder), "stage": stage, "shard_bytes": shard_bytes})[0]
    assert json.loads((folder / "config.json").read_text())["hidden"] == 32
    assert (len(list(folder.glob("model*.safetensors"))) > 1) == (stage == 3)
    loaded = load_weights(folder, torch.device("cpu")).state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_weights_that_are_written_anew_replace_all_of_those_before(tmp_path: Path) -> None:
    model = sharded(3)
    files = save_weights(tmp_path, CONFIG, model, LARGEST)
    assert files[-1].name == "model.safetensors.index.json"
    assert sorted(tmp_path.iterdir()) == sorted(files)
    assert [file.name for file in save_weights(tmp_path, CONFIG, model)] == ["config.json", "model.safetensors"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def on_a_full_disk(folder: str) -> str:
    calls: list[int] = []

    def full(values: Tensor) -> Any:
        calls.append(1)
        if len(calls) > 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(values)

    real = output.bytes_of
    model = sharded(3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output, "bytes_of", full)
        with pytest.raises(CheckpointError) as raised:
            save_weights(Path(folder), CONFIG, model)
    dist.barrier()  # rank 0 clears up on its own
    assert not os.listdir(folder)
    dist.barrier()  # before rank 0 fills it again
    save_weights(Path(folder), CONFIG, model)
    return str(raised.value)


def test_a_disk_that_is_full_is_told_on_all_ranks_and_leaves_nothing(tmp_path: Path) -> None:
    told = Pool.shared().run(on_a_full_disk, 2, {"folder": str(tmp_path)})
    assert "make room, or write to another disk" in told[0]
    assert "rank 0 failed: OSError: [Errno 28] No space left" in told[1]
    load_weights(tmp_path, torch.device("cpu"))


def slow_disk() -> None:
    model = torch.nn.Linear(4, 4)
    model, _ = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stall_timeout=0.6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(background, "TURN_SECONDS", 0.1)
        fabric = runtime_of(model).fabric
        on_rank_zero(fabric, lambda: time.sleep(1.5))


def test_a_disk_that_is_slower_than_ranks_wait_for_each_other_is_waited_for() -> None:
    Pool.shared().run(slow_disk, 2, {})


FOREIGN = ["pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin", "pytorch_model.bin.index.json"]


@pytest.mark.parametrize("name", FOREIGN)
def test_weights_of_another_program_are_never_touched(name: str, tmp_path: Path) -> None:
    model = sharded(0)
    for ours_beside in (False, True):
        folder = tmp_path / str(ours_beside)
        if ours_beside:
            save_weights(folder, CONFIG, model)
        folder.mkdir(exist_ok=True)
        (folder / name).write_text("precious")
        before = {file.name: file.read_bytes() for file in folder.iterdir()}
        with pytest.raises(CheckpointError, match=f"holds '{name}', which no run of .* wrote; choose another folder"):
            save_weights(folder, CONFIG, model)
        assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_a_model_is_ours_only_if_its_configuration_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model-00001-of-00002.safetensors").write_text("precious")
    with pytest.raises(CheckpointError, match=r"holds 'model-00001-of-00002\.safetensors'"):
        save_weights(tmp_path, CONFIG, sharded(0))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "layers": 1, "hidden": 2, "heads": 1}))
    assert main(["train", "--out", str(tmp_path)]) == 2  # before anything is trained
    assert "choose another folder with --out" in capsys.readouterr().err
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    for content in (None, "[" * 90_000, "{}" + " " * 200_000):
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        assert main(["train", "--out", str(tmp_path)]) == 2
        assert "holds 'config.json'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["replace", "sync_folder"])
def test_once_the_weights_before_are_gone_the_new_ones_stay_whatever_happens(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = sharded(0)
    save_weights(tmp_path, CONFIG, model)
    calls: list[Any] = []

    def fails(*arguments: Any) -> None:
        calls.append(arguments)
        if name != "replace" or len(calls) > 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        os.rename(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os if name == "replace" else output, name, fails)
        with pytest.raises(CheckpointError) as raised:
            save_weights(tmp_path, CONFIG, model)
    if name == "replace":
        found = re.search(r"rename (\S+) to (\S+)$", str(raised.value))
        assert found is not None
        (tmp_path / found[1]).rename(tmp_path / found[2])
    else:
        assert "all files are there" in str(raised.value)
    loaded = load_weights(tmp_path, torch.device("cpu")).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in zeroshard.full_state_dict(model).items())
    save_weights(tmp_path, CONFIG, model)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
