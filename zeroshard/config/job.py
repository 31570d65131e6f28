"""A training job as a TOML file: four tables, read into frozen dataclasses, with every mistake reported at once.

    [model]   the shape of the GPT        ModelConfig    or a Hugging Face model  LanguageModelConfig, in finetune.py
    [data]    the text to train on        DataConfig     its files                FilesConfig, in finetune.py
    [train]   how long, how fast          TrainConfig                             FinetuneConfig
    [shard]   options of zeroshard.shard  Config, in options.py

A key that is missing has the default of its dataclass.
"""

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Final

import torch

from ..system.parse import LARGEST_TOML, parse_toml, read_start
from ..system.words import quoted, word
from .checks import AUTO, DTYPES, Mistake, Section, at_least, list_of, must, nearest, read_table, unsigned
from .finetune import FilesConfig, LanguageModelConfig
from .options import Config, Precision

DEFAULT_PRESET: Final = "stdlib-10m"
DEVICES: Final = ("auto", "cpu", "cuda")
LOGGERS: Final = ("tensorboard", "wandb", "trackio")
"""Libraries that a run may give its scalars to. Each name is also the one that is imported and installed."""
OFFLOAD_TO_HOST: Final = "cpu"  # an offload with the default of every option
CONFIGURATION: Final = "finetune.toml"
"""The configuration that `zeroshard finetune` writes into the folder of its run."""
LORA_LR: Final = 2e-4
NONE: Final = "none"  # on the command line: takes a key away, so that its default applies


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """The shape of a GPT: the `[model]` table of a configuration."""

    layers: Annotated[int, at_least(1)] = 6
    """Transformer blocks."""
    hidden: Annotated[int, at_least(1)] = 384
    """The width of the model: numbers for each token between two blocks."""
    heads: Annotated[int, at_least(1)] = 6
    """Attention heads of a block. Their number divides ``hidden``."""
    sequence: Annotated[int, at_least(1)] = 256
    """Longest context in tokens. Each position has a learned embedding."""
    vocabulary: Annotated[
        int, must("be at least 256, as the corpus is bytes", lambda value: value >= 256), at_least(256)
    ] = 256
    """256 for bytes. A larger vocabulary is allowed, and the corpus then leaves the rest unused."""
    tied: bool = True
    """The head is the transposed token embedding, which saves vocabulary × hidden parameters."""
    checkpointing: bool = False
    """Store one tensor a block from forward to backward and recompute the rest: 33% more compute, far less memory."""

    def conflicts(self) -> Iterator[Mistake]:
        if self.hidden % self.heads:
            yield Mistake(("heads", "hidden"), f"must divide hidden = {self.hidden}, is {self.heads}")

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
class DataConfig(Section):
    """The text to train on: the `[data]` table of a configuration."""

    folder: Annotated[str, must("be an existing folder", lambda value: not value or os.path.isdir(value))] = ""
    """A folder of text files; empty for the source of Python's standard library."""
    suffixes: Annotated[tuple[str, ...], list_of("strings", str), must("name at least one, as ['.txt']", bool)] = (
        ".py",
    )
    """Only files whose names end with one of these are read."""
    held_out: Annotated[float, must("be between 0 and 1", lambda value: 0 < value < 1)] = 0.05
    """The share of the files that is used for evaluation only."""


def _are_loggers(names: Sequence[str]) -> bool:
    return set(names) <= set(LOGGERS) and len(set(names)) == len(names)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Section):
    """How long and how fast to train: the `[train]` table of a configuration."""

    steps: Annotated[int, at_least(1)] = 160
    """Updates of the model in the whole run."""
    batch: Annotated[int, at_least(1)] = 4
    """Sequences per rank and micro-batch."""
    micro_batches: Annotated[int, at_least(1)] = 1
    """Micro-batches per rank and step: their gradients add up, and one update uses the sum."""
    lr: Annotated[float, must("be above 0, and finite", lambda value: 0 < value < math.inf)] = 8e-4
    """The highest learning rate, reached after the warm-up. A cosine then lowers it to a tenth."""
    warmup: Annotated[float, must("be a share of the steps, from 0 to below 1", lambda value: 0 <= value < 1)] = 0.1
    """The share of the steps over which the learning rate rises linearly."""
    weight_decay: Annotated[float, at_least(0)] = 0.1
    """AdamW's weight decay. Parameters of one dimension, such as biases, do not decay."""
    seed: Annotated[int, unsigned] = 0
    """Decides the initial parameters, every batch and the sample."""
    evaluate_every: Annotated[int, at_least(1)] = 40
    """Steps between evaluations on held-out files. There is also one before the first step and one after the last."""
    evaluate_batches: Annotated[int, at_least(1)] = 8
    """Batches per rank in an evaluation."""
    report_every: Annotated[int, at_least(1)] = 10
    """Steps between two lines of progress."""
    sample: Annotated[int, at_least(0)] = 200
    """Bytes of text to sample from the saved weights; 0 for none."""
    device: Annotated[str, must(f"be one of {', '.join(DEVICES)}", DEVICES.__contains__)] = "auto"
    """`cpu`, `cuda`, or `auto` for the GPUs where there are some."""
    tensor_parallel: Annotated[int, at_least(1)] = 1
    """Ranks that share each replica of the model. They divide its matrices and see the same batches."""
    save_every: Annotated[int, at_least(0)] = 0
    """Steps between checkpoints; 0 for none. They are written to `checkpoints` in the run's folder during training."""
    keep: Annotated[int, at_least(1)] = 3
    """How many checkpoints stay; older ones are removed."""
    log: Annotated[
        tuple[str, ...],
        list_of("names", str),
        must(f"name some of {', '.join(LOGGERS)}, each once", _are_loggers),
    ] = ()
    """Libraries that draw curves of the run's scalars: "tensorboard", "wandb", "trackio"."""


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(TrainConfig):
    """The `[train]` table of a job that trains a Hugging Face model."""

    steps: Annotated[int, at_least(0)] = 0
    """0 for as many as `epochs` take."""
    epochs: Annotated[float, at_least(0)] = 0.0
    """How often each document is trained on; 0 for once, unless `steps` says how long."""
    tokens_per_step: Annotated[int, at_least(1)] = 32768
    """Tokens of all ranks in a step, with padding. Ranks and micro-batches divide them, so results do not depend on the
    hardware."""
    batch: Annotated[int, at_least(0)] = 0
    """The most sequences per rank and micro-batch; 0 for what the plan finds best for this machine."""
    lr: Annotated[float, must("be above 0, and finite", lambda value: 0 < value < math.inf)] = 2e-5
    """As in every job; without this key 2e-5, and 2e-4 for adapters."""
    warmup: Annotated[float, must("be a share of the steps, from 0 to below 1", lambda value: 0 <= value < 1)] = 0.03
    weight_decay: Annotated[float, at_least(0)] = 0.0
    evaluate_every: Annotated[int, at_least(1)] = 100
    evaluate_batches: Annotated[int, at_least(1)] = 4
    """Batches in an evaluation, each as large as a step."""
    report_every: Annotated[int, at_least(1)] = 1
    sample: Annotated[int, at_least(0)] = 48
    """Tokens to sample before and after; 0 for none."""

    def conflicts(self) -> Iterator[Mistake]:
        if self.steps and self.epochs:
            yield Mistake(("steps", "epochs"), "steps and epochs both say how long to train; leave one out")
        if self.micro_batches != 1:
            yield Mistake(
                ("micro_batches", "tokens_per_step"),
                "follows from tokens_per_step and batch here; leave it out, and say batch",
            )
        if self.tensor_parallel != 1:
            yield Mistake(("tensor_parallel", "model"), "is for the built-in GPT; leave it out with model.huggingface")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A validated configuration."""

    name: str
    model: ModelConfig | LanguageModelConfig = field(default_factory=ModelConfig)
    data: DataConfig | FilesConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    shard: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    """Keyword options of `zeroshard.shard`, as the file gives them. A precision is added if the file gives none."""

    @property
    def gpt(self) -> ModelConfig:
        """The shape of the GPT.

        Raises:
            JobError: the job trains a Hugging Face model.
        """
        if isinstance(self.model, ModelConfig):
            return self.model
        folder = self.model.huggingface
        raise JobError(
            self.name,
            [f"model.huggingface: this is for the built-in GPT; use `zeroshard plan {folder}`, or `finetune`"],
        )

    @property
    def corpus(self) -> DataConfig:
        """The text that the GPT is trained on."""
        assert isinstance(self.data, DataConfig)
        return self.data

    @property
    def language_model(self) -> LanguageModelConfig:
        """The Hugging Face model, in a job that trains one."""
        assert isinstance(self.model, LanguageModelConfig)
        return self.model

    @property
    def files(self) -> FilesConfig:
        """The files that the Hugging Face model is trained on."""
        assert isinstance(self.data, FilesConfig)
        return self.data

    @property
    def finetune(self) -> FinetuneConfig:
        """How the Hugging Face model is trained."""
        assert isinstance(self.train, FinetuneConfig)
        return self.train

    @property
    def built_model(self) -> ModelConfig:
        """The GPT as it is built. If `shard.activations` recomputes its blocks, the model does not."""
        given = self.shard.get("activations") is not None
        return replace(self.gpt, checkpointing=False) if given else self.gpt

    @property
    def precision(self) -> str:
        """The parameters' precision by name: "bf16", "fp16" or "fp32"."""
        dtype = Precision.parse(self.shard["precision"]).parameters
        return next((name for name, known in DTYPES.items() if known is dtype), "fp32")


class JobError(ValueError):
    """A configuration that cannot be used, with every mistake in it."""

    def __init__(self, source: str, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(f"{source} cannot be used:\n" + "\n".join(f"  {problem}" for problem in self.problems))


def load_job(source: str, overrides: Mapping[str, object] = MappingProxyType({})) -> Job:
    """Read a configuration file or a preset.

    Args:
        source: a path to a TOML file, or the name of a preset.
        overrides: values by key path, for example `{"train.lr": 1e-3}` or `{"shard.offload.moments": "bf16"}`. They
            replace the values of the file. None takes a key away.

    Raises:
        JobError: naming every unknown key, wrong type and impossible value at once.

    >>> load_job("stdlib-10m", {"shard.stage": 2}).shard["stage"]
    2
    """
    file = _find(source)
    try:
        tables: dict[str, object] = parse_toml(read_start(file, LARGEST_TOML))
    except ValueError as error:
        raise JobError(source, [str(error)]) from None
    return job_of(tables, source, file.stem, overrides)


def job_of(
    tables: dict[str, object], source: str, name: str, overrides: Mapping[str, object] = MappingProxyType({})
) -> Job:
    """Return the job that the tables of a configuration describe. `overrides` change the tables.

    Raises:
        JobError: naming every unknown key, wrong type and impossible value at once. It calls the tables `source`.
    """
    problems = _override(tables, overrides)
    known = [entry.name for entry in fields(Job) if entry.name != "name"]
    problems += [f"{word(key)}: unknown key{nearest(key, known)}" for key in tables if key not in known]
    model, data, train, problems_of_tables = _sections(tables)
    given = tables.get("shard", {})
    shard = {"precision": _default_precision(train.device), **given} if isinstance(given, dict) else {}
    _, of_shard = read_table(Config, shard or given, "shard")
    problems += problems_of_tables + of_shard
    wrong_model = any(problem.startswith("model") for problem in problems_of_tables)
    if isinstance(model, ModelConfig) and not wrong_model and model.heads % train.tensor_parallel:
        problems.append(f"train.tensor_parallel: must divide model.heads = {model.heads}, is {train.tensor_parallel}")
    activations = shard.get("activations")
    if isinstance(activations, Mapping) and not activations.get("recompute", True):
        problems.append("shard.activations.recompute: the model leaves recomputing to it; say a share above 0")
    offload = shard.get("offload")
    if train.micro_batches > 1 and isinstance(offload, Mapping) and offload.get("update_in_backward"):
        problems.append(
            f"train.micro_batches: {train.micro_batches} backward passes a step exclude "
            "shard.offload.update_in_backward, which updates in the first; leave one out"
        )
    if "device" in shard:
        problems.append("shard.device: every rank has its own here; say train.device = 'cpu' or 'cuda'")
    if problems:
        raise JobError(source, problems)
    return Job(name=name, model=model, data=data, train=train, shard=MappingProxyType(shard))


def _sections(
    tables: Mapping[str, object],
) -> tuple[ModelConfig | LanguageModelConfig, DataConfig | FilesConfig, TrainConfig, list[str]]:
    """The tables but `[shard]`, and their mistakes. `model.huggingface` decides which kind of job they describe."""
    given = [tables.get(name, {}) for name in ("model", "data", "train")]
    model: ModelConfig | LanguageModelConfig
    data: DataConfig | FilesConfig
    train: TrainConfig
    if not (isinstance(given[0], Mapping) and "huggingface" in given[0]):
        model, of_model = read_table(ModelConfig, given[0], "model")
        data, of_data = read_table(DataConfig, given[1], "data")
        train, of_train = read_table(TrainConfig, given[2], "train")
        return model, data, train, of_model + of_data + of_train
    language_model, of_model = read_table(LanguageModelConfig, given[0], "model")
    data, of_data = read_table(FilesConfig, given[1], "data")
    if isinstance(given[1], Mapping) and "files" not in given[1]:
        of_data.append("data.files: name the files to train on")
    table = {"lr": LORA_LR, **given[2]} if language_model.lora and isinstance(given[2], Mapping) else given[2]
    train, of_train = read_table(FinetuneConfig, table, "train")
    return language_model, data, train, of_model + of_data + of_train


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
    """Read `key=value` from the command line. The value is TOML; if it is not, it is a plain string.

    `none` stands for None, which takes the key away.

    >>> parse_override("train.lr=1e-3"), parse_override("shard.precision=bf16")
    (('train.lr', 0.001), ('shard.precision', 'bf16'))
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ValueError(f"{quoted(text)} is not of the form table.key=value")
    try:
        return key.strip(), parse_toml(f"value = {value}".encode(errors="surrogateescape"))["value"]
    except ValueError:
        return key.strip(), None if value.strip() == NONE else value.strip()


def _default_precision(device: str) -> str:
    return "bf16" if resolve_device(device) == "cuda" else "fp32"


def changed(tables: dict[str, object], source: str, overrides: Mapping[str, object]) -> dict[str, object]:
    """Return the tables of a configuration with these changes made.

    Raises:
        JobError: a change names no table and key.
    """
    problems = _override(tables, overrides)
    if problems:
        raise JobError(source, problems)
    return tables


def _override(tables: dict[str, object], overrides: Mapping[str, object]) -> list[str]:
    problems = []
    for path, value in overrides.items():
        *names, key = path.split(".")
        table = _table_at(tables, names)
        if not names or not key or table is None:
            problems.append(f"{word(path)}: an override names a table and a key, for example train.lr=1e-3")
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
        if name == "offload" and inner in (OFFLOAD_TO_HOST, AUTO):
            inner = here[name] = {} if inner == OFFLOAD_TO_HOST else {"allow": []}
        if not isinstance(inner, dict):
            return None
        here = inner
    return here


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
