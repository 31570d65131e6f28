"""The kinds of files that zeroshard reads: how good ones are made, how they are changed, and what must hold then."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import zeroshard
from tests.fuzz.mutation import as_json, mutate_bytes, mutate_json, mutate_safetensors, mutate_toml, mutate_value
from tests.models import loss_of, net
from tests.report.runs import OFFLOADED_STEP
from tests.report.runs import write as write_record
from tests.storage.runs import difference
from zeroshard import CheckpointError
from zeroshard.config.job import Job, load_job, presets
from zeroshard.plan.machine import profile as machine_profile
from zeroshard.plan.model.source import find_model
from zeroshard.report import journal, page
from zeroshard.storage.export import export
from zeroshard.storage.format import CHUNK, INDEX, MARKER, Entry, Marker, data_file


class Refusal(NamedTuple):
    """The error of a reader that did not take a file."""

    error: Exception
    names: tuple[str, ...]
    """One of these must be in the message: the file that was changed, or its folder."""


@dataclass(frozen=True)
class Subject:
    """A kind of files."""

    make: Callable[[Path], None]
    """Writes good files into an empty folder."""
    change: Callable[[Path, Random], Path]
    """Changes one of them. Returns which."""
    read: Callable[[Path, Path], Refusal | None]
    """Reads a folder in which one file was changed. Raises AssertionError if what was read makes no sense."""


def changed(file: Path, change: Callable[[bytes, Random], bytes], chance: Random) -> Path:
    """Changes a file: mostly in its own way, now and then any bytes of it."""
    content = file.read_bytes()
    file.write_bytes((mutate_bytes if chance.random() < 0.2 else change)(content, chance))
    return file


# -- checkpoints ------------------------------------------------------------------------------------------------------


def small(model: nn.Module | None = None) -> tuple[Any, Any]:
    """A sharded model of one rank, with an optimizer."""
    model = net(depth=1) if model is None else model
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return zeroshard.shard(model, torch.optim.AdamW(trained, lr=1e-2), stage=3, device="cpu")


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int = 0) -> None:
    loss_of(model, step).backward()
    optimizer.step()
    optimizer.zero_grad()


def state(model: Any, optimizer: Any) -> dict[str, Any]:
    whole = optimizer.state_dict()
    return {"weights": zeroshard.full_state_dict(model), **whole["state"], "groups": whole["param_groups"]}


def make_checkpoint(folder: Path) -> None:
    torch.manual_seed(3)
    model, optimizer = small()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for step in range(2):
        train(model, optimizer, step)
        scheduler.step()
    extra = {"text": "x", "numbers": torch.ones(3)}
    zeroshard.save(folder / "saved", model, optimizer, scheduler=scheduler, extra=extra)


@cache
def saved_state() -> dict[str, Any]:
    """What the good checkpoint holds."""
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder))
        model, optimizer = small()
        zeroshard.load(Path(folder, "saved"), model, optimizer)
        return state(model, optimizer)


def damage(folder: Path, chance: Random) -> Path:
    """Changes a file, and no checksum with it."""
    file = chance.choice(sorted((folder / "saved").iterdir()))
    change = {".json": mutate_json, ".safetensors": mutate_safetensors}.get(file.suffix, mutate_json)
    return changed(file, change, chance)


def forge(folder: Path, chance: Random) -> Path:
    """Changes the index, and the marker with it: every checksum is right."""
    index = folder / "saved" / INDEX
    text = as_json(mutate_value(json.loads(index.read_bytes()), chance))
    index.write_bytes(text)
    (folder / "saved" / MARKER).write_bytes(Marker.of(text, 1, 1).to_json())
    return index


def forge_numbers(folder: Path, chance: Random) -> Path:
    """Changes elements of one tensor: every checksum is right."""
    index, data = folder / "saved" / INDEX, folder / "saved" / data_file(0)
    value = json.loads(index.read_bytes())
    part = value["parts"][0]
    entry = chance.choice(part["entries"])
    there = Entry.from_json(entry)
    content = bytearray(data.read_bytes())
    start = part["header"] + there.offset
    elements = torch.frombuffer(content, dtype=there.dtype, count=there.region.numel, offset=start)
    if elements.is_floating_point():
        elements[chance.randrange(elements.numel())] = chance.choice([math.nan, math.inf, -math.inf, -1.0, 0.0, 10.0])
    else:
        elements[chance.randrange(elements.numel())] = chance.choice([0, 1])
    chunk = content[start : start + there.nbytes]
    entry["crc32"] = [zlib.crc32(chunk[place : place + CHUNK]) for place in range(0, len(chunk), CHUNK)]
    data.write_bytes(content)
    text = as_json(value)
    index.write_bytes(text)
    (folder / "saved" / MARKER).write_bytes(Marker.of(text, 1, 1).to_json())
    return data


def read_checkpoint(folder: Path, file: Path) -> Refusal | None:
    """A checkpoint that loads can be trained with. One that is refused has changed nothing."""
    model, optimizer = small()
    train(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    before = state(model, optimizer)
    try:
        zeroshard.load(folder / "saved", model, optimizer, scheduler=scheduler)
    except CheckpointError as error:
        assert difference(state(model, optimizer), before) is None, "a refused checkpoint changed the model"
        return Refusal(error, (file.name, str(folder / "saved")))
    train(model, optimizer, 1)
    scheduler.step()
    weights = zeroshard.full_state_dict(model)
    assert all(bool(value.isfinite().all()) for value in weights.values()), "the step after the load was not finite"
    return None


def read_damaged(folder: Path, file: Path) -> Refusal | None:
    """As ``read_checkpoint``; and what loads is what was saved."""
    refusal = read_checkpoint(folder, file)
    if refusal is None:
        model, optimizer = small()
        zeroshard.load(folder / "saved", model, optimizer)
        assert difference(state(model, optimizer), saved_state()) is None, "other values were loaded than were saved"
    return refusal


# -- adapters ---------------------------------------------------------------------------------------------------------


class _Adapted(nn.Module):
    """A linear layer with a LoRA adapter, as PEFT names its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(4, 4)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(4, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 4, bias=False)})


@dataclass
class _LoraConfig:
    peft_type: str = "LORA"
    r: int = 2
    lora_alpha: float = 4.0
    use_rslora: bool = False
    rank_pattern: Any = None
    alpha_pattern: Any = None
    target_modules: Any = ("up", "down")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"rank_pattern": {"down": 2}, "alpha_pattern": {"layer.up": 3}}


class _Peft(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = nn.Module()
        self.base_model.model.layer = nn.ModuleDict({"up": _Adapted(), "down": _Adapted()})
        self.peft_config = {"default": _LoraConfig()}


def make_adapters(folder: Path) -> None:
    torch.manual_seed(3)
    model, optimizer = small(_Peft())
    zeroshard.save(folder / "saved", model, optimizer)


def forge_adapters(folder: Path, chance: Random) -> Path:
    """Changes the description of the model in the index, or anything in it."""
    index = folder / "saved" / INDEX
    value = json.loads(index.read_bytes())
    adapters = _about(value)
    if not adapters or chance.random() < 0.3:
        return forge(folder, chance)
    mutate_value(adapters, chance)
    text = as_json(value)
    index.write_bytes(text)
    (folder / "saved" / MARKER).write_bytes(Marker.of(text, 1, 1).to_json())
    return index


def _about(value: Any) -> Any:
    """The description of the model, wherever the index has it."""
    if isinstance(value, dict) and "adapters" in value:
        return value["adapters"]
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((found for entry in entries if (found := _about(entry)) is not None), None)


def read_adapters(folder: Path, file: Path) -> Refusal | None:
    """What is exported can be read, and is finite."""
    out = folder / "out"
    try:
        files = export(folder / "saved", out, merge=True)
    except CheckpointError as error:
        assert not list(out.glob("*.safetensors")), "a refused export left weights"
        return Refusal(error, (file.name, str(folder / "saved"), "adapter"))
    for each in (each for each in files if each.suffix == ".safetensors"):
        weights: dict[str, Tensor] = load_file(each)
        assert weights, "nothing was exported"
        assert all(bool(value.isfinite().all()) for value in weights.values()), "the export is not finite"
    return None


# -- weights= ---------------------------------------------------------------------------------------------------------


def make_weights(folder: Path) -> None:
    torch.manual_seed(3)
    values = net(depth=2).state_dict()
    names = sorted(values)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, members in parts.items():
        save_file({name: values[name].contiguous() for name in members}, folder / file)
    where = {name: file for file, members in parts.items() for name in members}
    index = {"metadata": {"total_size": sum(value.nbytes for value in values.values())}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def change_weights(folder: Path, chance: Random) -> Path:
    file = chance.choice(sorted(folder.iterdir()))
    return changed(file, mutate_json if file.suffix == ".json" else mutate_safetensors, chance)


def read_weights(folder: Path, file: Path) -> Refusal | None:
    """The model has its shapes, and every value comes from the files."""
    with torch.device("meta"):
        model = net(depth=2)
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    try:
        sharded: Any = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), weights=folder, device="cpu")
    except ValueError as error:
        return Refusal(error, (file.name, str(folder)))
    values = zeroshard.full_state_dict(sharded[0])
    assert {name: value.shape for name, value in values.items()} == shapes
    return None


# -- text files -------------------------------------------------------------------------------------------------------


def make_job(folder: Path) -> None:
    shutil.copy(presets()["tiny"], folder / "job.toml")


def make_profile(folder: Path) -> None:
    shutil.copy(machine_profile.FOLDER / "h200.toml", folder / "machine.toml")


def make_config(folder: Path) -> None:
    values = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "max_position_embeddings": 64,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    }
    (folder / "config.json").write_text(json.dumps(values))


def change_toml(folder: Path, chance: Random) -> Path:
    return changed(next(folder.glob("*.toml")), mutate_toml, chance)


def change_config(folder: Path, chance: Random) -> Path:
    return changed(folder / "config.json", mutate_json, chance)


def read_with(read: Callable[[Path], Any]) -> Callable[[Path, Path], Refusal | None]:
    """Reads one file. All numbers of what it says are finite."""

    def reader(folder: Path, file: Path) -> Refusal | None:
        try:
            found = read(file)
        except ValueError as error:
            return Refusal(error, (file.name,))
        assert all(math.isfinite(number) for number in _numbers(found)), f"a number is not finite: {found!r:.500}"
        return None

    return reader


def _numbers(value: Any) -> list[float]:
    if isinstance(value, float | int):
        return [value]
    if hasattr(value, "__dataclass_fields__"):
        return [number for name in value.__dataclass_fields__ for number in _numbers(getattr(value, name))]
    if isinstance(value, dict):
        return [number for entry in value.values() for number in _numbers(entry)]
    if isinstance(value, list | tuple):
        return [number for entry in value for number in _numbers(entry)]
    return []


# -- records of runs --------------------------------------------------------------------------------------------------


def make_record(folder: Path) -> None:
    write_record(folder, spans=OFFLOADED_STEP, offload={})


def change_record(folder: Path, chance: Random) -> Path:
    """Changes one line of the record, or bytes of it."""

    def one_line(content: bytes, chance: Random) -> bytes:
        lines = content.splitlines()
        number = chance.randrange(len(lines))
        lines[number] = mutate_json(lines[number], chance).replace(b"\n", b" ")
        return b"\n".join(lines) + b"\n"

    return changed(folder / journal.FILE, one_line, chance)


def read_record(folder: Path, file: Path) -> Refusal | None:
    """Whatever a record says, its page is small, its data is JSON, and no element comes from it."""
    try:
        found = journal.read(folder)
    except ValueError as error:
        return Refusal(error, (file.name,))
    text = page.render([found])
    assert len(text) < 2_000_000
    assert text.count("</script>") == 3
    data = text.split('id="data">')[1].split("</script>")[0]
    figures = json.loads(data, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert text.count("<figure ") == len(figures)
    return None


def job_of(file: Path) -> Job:
    return load_job(str(file))


SUBJECTS: dict[str, Subject] = {
    "damaged checkpoint": Subject(make_checkpoint, damage, read_damaged),
    "forged checkpoint": Subject(make_checkpoint, forge, read_checkpoint),
    "forged numbers": Subject(make_checkpoint, forge_numbers, read_checkpoint),
    "adapters": Subject(make_adapters, forge_adapters, read_adapters),
    "weights": Subject(make_weights, change_weights, read_weights),
    "job": Subject(make_job, change_toml, read_with(job_of)),
    "machine": Subject(make_profile, change_toml, read_with(machine_profile.load)),
    "record": Subject(make_record, change_record, read_record),
    "config": Subject(make_config, change_config, read_with(lambda file: find_model(str(file)).model.parameters)),
}
