"""A training job as a TOML file: four tables, read into frozen dataclasses, with every error reported at once.

    [model]   the GPT's shape             ModelConfig
    [data]    what to train on            DataConfig
    [train]   how long, how fast          TrainConfig, below
    [shard]   options of zeroshard.shard  Config, in options.py

A key that is missing has the default written in its dataclass.
"""

import tomllib
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final, Protocol, TypeVar

import torch

from . import options as shard_config
from .checks import DTYPES, nearest

DEFAULT_PRESET: Final = "stdlib-10m"
DEVICES: Final = ("auto", "cpu", "cuda")
OFFLOAD_TO_HOST: Final = "cpu"  # stands for an offload with the default of every option
NONE: Final = "none"  # on the command line: no value, so that the default holds


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a GPT: the `[model]` table of a configuration."""

    layers: int = 6
    hidden: int = 384
    heads: int = 6
    sequence: int = 256
    """Longest context in tokens; there is one learned position for each."""
    vocabulary: int = 256
    """256 for bytes. A larger one is allowed (the corpus then leaves the rest unused), a smaller one is not."""
    tied: bool = True
    """The head is the transposed token embedding, which saves vocabulary × hidden parameters."""
    checkpointing: bool = False
    """Keep one tensor a block from forward to backward and recompute the rest: 33% more compute, far less memory."""

    def problems(self) -> list[tuple[str, str]]:
        """Return (key, what is wrong with it) for every value that makes no model."""
        found = [
            (key, f"must be at least 1, is {value}")
            for key in ("layers", "hidden", "heads", "sequence")
            if (value := getattr(self, key)) < 1
        ]
        if self.vocabulary < 256:
            found.append(("vocabulary", f"must be at least 256, as the corpus is bytes; is {self.vocabulary}"))
        if self.heads >= 1 and self.hidden % self.heads:
            found.append(("heads", f"must divide hidden = {self.hidden}, is {self.heads}"))
        return found

    @property
    def parameters(self) -> int:
        """Return Ψ without building the model: 12 · layers · hidden² and the lower-order terms.

        >>> ModelConfig(layers=48, hidden=1600, heads=25, sequence=1024, vocabulary=50257).parameters
        1557611200
        """
        block = 12 * self.hidden**2 + 13 * self.hidden
        embeddings = (self.vocabulary * (1 if self.tied else 2) + self.sequence) * self.hidden
        return self.layers * block + embeddings + 2 * self.hidden


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What to train on: the `[data]` table of a configuration."""

    folder: str = ""
    """A folder of text files; empty for the Python standard library's source."""
    suffixes: tuple[str, ...] = (".py",)
    """Only files whose names end so are read."""
    held_out: float = 0.05
    """The share of files kept for evaluation."""

    def problems(self) -> list[tuple[str, str]]:
        """Return (key, what is wrong with it) for every value that makes no corpus."""
        found = []
        if self.folder and not Path(self.folder).is_dir():
            found.append(("folder", f"no such folder: {self.folder}"))
        if not self.suffixes:
            found.append(("suffixes", "must name at least one, for example ['.txt']"))
        if not 0 < self.held_out < 1:
            found.append(("held_out", f"must be between 0 and 1, is {self.held_out}"))
        return found


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long and how fast to train: the `[train]` table of a configuration."""

    steps: int = 160
    batch: int = 4
    """Sequences per rank and step."""
    lr: float = 8e-4
    """The highest learning rate, reached after the warm-up and followed by a cosine to a tenth of it."""
    warmup: float = 0.1
    """The share of the steps over which the learning rate rises linearly."""
    weight_decay: float = 0.1
    seed: int = 0
    """Decides the initial parameters, every batch and the sample."""
    evaluate_every: int = 40
    """Steps between evaluations on held-out files; there is also one before the first step and one after the last."""
    evaluate_batches: int = 8
    """Batches per rank in an evaluation."""
    report_every: int = 10
    """Steps between two lines of progress."""
    sample: int = 200
    """Bytes of text to sample from the saved weights; 0 for none."""
    device: str = "auto"
    """`cpu`, `cuda`, or `auto` for the GPUs where there are some."""
    tensor_parallel: int = 1
    """Ranks that share each replica of the model: they divide its matrices, and see the same batches."""

    save_every: int = 0
    """Steps between checkpoints, written to `checkpoints` in the run's folder behind training; 0 for none."""
    keep: int = 3
    """Checkpoints that are kept; older ones are removed."""

    def problems(self) -> list[tuple[str, str]]:
        """Return (key, what is wrong with it) for every value that makes no training run."""
        found = [
            (key, f"must be at least {least}, is {value}")
            for key, least in {
                "save_every": 0,
                "keep": 1,
                "steps": 1,
                "batch": 1,
                "evaluate_every": 1,
                "evaluate_batches": 1,
                "report_every": 1,
                "sample": 0,
                "seed": 0,
                "weight_decay": 0,
                "tensor_parallel": 1,
            }.items()
            if (value := getattr(self, key)) < least
        ]
        if not self.lr > 0:
            found.append(("lr", f"must be above 0, is {self.lr}"))
        if not 0 <= self.warmup < 1:
            found.append(("warmup", f"is a share of the steps, from 0 to below 1; is {self.warmup}"))
        if self.device not in DEVICES:
            found.append(("device", f"must be one of {', '.join(DEVICES)}, is {self.device!r}"))
        return found


@dataclass(frozen=True, kw_only=True)
class Job:
    """A validated configuration."""

    name: str
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    shard: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    """Keyword options of `zeroshard.shard`, as the file gives them, with a precision where it gives none."""

    @property
    def built_model(self) -> ModelConfig:
        """The model as it is built: where `shard.activations` recomputes its blocks, it does not do so itself."""
        activations = shard_config.Activations.parse(self.shard.get("activations"))
        recomputed = activations is not None and activations.checkpoint
        return replace(self.model, checkpointing=False) if recomputed else self.model

    @property
    def precision(self) -> str:
        """The parameters' precision by name: "bf16", "fp16" or "fp32"."""
        dtype = shard_config.Precision.parse(self.shard["precision"]).parameters
        return next((name for name, known in DTYPES.items() if known is dtype), "fp32")


class JobError(ValueError):
    """A configuration that cannot be used, with everything that is wrong with it."""

    def __init__(self, source: str, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(f"{source} cannot be used:\n" + "\n".join(f"  {problem}" for problem in self.problems))


def load_job(source: str, overrides: Mapping[str, object] = MappingProxyType({})) -> Job:
    """Read a configuration file or a preset.

    Args:
        source: a path to a TOML file, or the name of a preset.
        overrides: values by key path, for example `{"train.lr": 1e-3}` or `{"shard.offload.moments": "bf16"}`, that
            replace those of the file; None takes a key away.

    Raises:
        JobError: naming every unknown key, wrong type and impossible value at once.

    >>> load_job("stdlib-10m", {"shard.stage": 2}).shard["stage"]
    2
    """
    file = _find(source)
    try:
        tables: dict[str, object] = tomllib.loads(file.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise JobError(source, [f"not TOML: {error}"]) from None
    problems = _override(tables, overrides)
    problems += _unknown(tables, [entry.name for entry in fields(Job) if entry.name != "name"], "")
    model = _read_table(ModelConfig, tables, "model", problems)
    data = _read_table(DataConfig, tables, "data", problems)
    train = _read_table(TrainConfig, tables, "train", problems)
    shard = {"precision": _default_precision(train.device), **_mapping(tables, "shard", problems)}
    problems += shard_config.problems(shard, "shard")
    if train.tensor_parallel > 1 and model.heads % train.tensor_parallel:
        problems.append(f"train.tensor_parallel: must divide model.heads = {model.heads}, is {train.tensor_parallel}")
    kept = shard.get("activations")
    if isinstance(kept, Mapping) and kept.get("checkpoint") is False:
        problems.append("shard.activations.checkpoint: the model leaves recomputing to it; say true, or leave it out")
    if "device" in shard:
        problems.append("shard.device: every rank has its own here; say train.device = 'cpu' or 'cuda'")
    if problems:
        raise JobError(source, problems)
    return Job(name=file.stem, model=model, data=data, train=train, shard=MappingProxyType(shard))


def resolve_device(device: str) -> str:
    """Return "cpu" or "cuda" for a job's `train.device`."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def presets() -> dict[str, Path]:
    """Return the presets that come with the package, by name."""
    folder = Path(__file__).parent / "presets"
    return {file.stem: file for file in sorted(folder.glob("*.toml"))}


def parse_override(text: str) -> tuple[str, object]:
    """Read `key=value` from the command line, the value as TOML or, where it is none, as a plain string.

    `none` stands for None, which takes the key away.

    >>> parse_override("train.lr=1e-3"), parse_override("shard.precision=bf16")
    (('train.lr', 0.001), ('shard.precision', 'bf16'))
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ValueError(f"{text!r} is not of the form table.key=value")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), None if value.strip() == NONE else value.strip()


class _Table(Protocol):
    def problems(self) -> list[tuple[str, str]]: ...


_T = TypeVar("_T", bound=_Table)


def _read_table(kind: type[_T], tables: Mapping[str, object], path: str, problems: list[str]) -> _T:
    """Make a dataclass of a table; what is wrong with it goes to `problems`, and a default takes its place."""
    table = _mapping(tables, path, problems)
    types = typing.get_type_hints(kind)
    problems += _unknown(table, list(types), f"{path}.")
    accepted = {}
    for key, value in table.items():
        if key in types:
            try:
                accepted[key] = _convert(value, types[key])
            except TypeError as error:
                problems.append(f"{path}.{key}: {error}")
    made = kind(**accepted)
    # A default that stands in for a rejected value must not be blamed.
    problems += [f"{path}.{key}: {wrong}" for key, wrong in made.problems() if key in accepted or key not in table]
    return made


def _convert(value: object, kind: object) -> object:
    """Return a TOML value as the type of a field, or raise TypeError."""
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind == tuple[str, ...]:
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise TypeError(f"must be a list of strings, is {value!r}")
    assert isinstance(kind, type), "a configuration field is a bool, int, float, str or tuple[str, ...]"
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        words = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
        raise TypeError(f"must be {words[kind]}, is {value!r}")
    return value


def _default_precision(device: str) -> str:
    return "bf16" if resolve_device(device) == "cuda" else "fp32"


def _override(tables: dict[str, object], overrides: Mapping[str, object]) -> list[str]:
    problems = []
    for path, value in overrides.items():
        *names, key = path.split(".")
        table = _table_at(tables, names)
        if not names or not key or table is None:
            problems.append(f"{path}: an override names a table and a key, for example train.lr=1e-3")
        elif value is None:
            table.pop(key, None)
        else:
            table[key] = value
    return problems


def _table_at(tables: dict[str, object], names: Iterable[str]) -> dict[str, object] | None:
    """Return the table that a path leads to, made where it is missing; None if something else is there."""
    here = tables
    for name in names:
        inner = here.setdefault(name, {})
        if (name, inner) == ("offload", OFFLOAD_TO_HOST):
            inner = here[name] = {}
        if not isinstance(inner, dict):
            return None
        here = inner
    return here


def _mapping(tables: Mapping[str, object], name: str, problems: list[str]) -> dict[str, object]:
    table = tables.get(name, {})
    if isinstance(table, dict):
        return table
    problems.append(f"{name}: must be a table, is {table!r}")
    return {}


def _unknown(table: Mapping[str, object], known: list[str], prefix: str) -> list[str]:
    return [f"{prefix}{key}: unknown key{nearest(key, known)}" for key in table if key not in known]


def _find(source: str) -> Path:
    path = Path(source)
    if path.suffix == ".toml" or path.parent != Path():
        if path.is_file():
            return path
        raise JobError(source, [f"no such file: {path}"])
    known = presets()
    if source in known:
        return known[source]
    raise JobError(source, [f"no such preset{nearest(source, list(known))}; the presets are {', '.join(known)}"])
