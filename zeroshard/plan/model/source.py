"""Finds the model of a plan: a preset, a TOML configuration, a Hugging Face ``config.json``, or a user's module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...config.checks import nearest
from ...config.job import JobError, ModelConfig, load_job, presets
from ...config.options import Activations
from ..setup import MOST_LAYERS, ModelError
from .factory import Factory
from .gpt import from_config
from .huggingface import from_configuration, read_config
from .model import Model


@dataclass(frozen=True)
class Subject:
    """The model of a plan, with the training settings that its source contains."""

    model: Model
    config: ModelConfig | None = None
    """The shape of a GPT of ours."""
    factory: Factory | None = None
    batch: int = 1
    micro_batches: int = 1
    sequence: int = 1024
    longest: int | None = None
    """The longest sequence that the model takes; None without a limit."""
    checkpointing: bool = True
    model_parallel: int = 1
    activations: Activations | None = None
    shard: Mapping[str, object] = field(default_factory=dict)
    """Options of ``shard()`` from the configuration."""
    preset: str | None = None
    """The name of the model for ``zeroshard train``."""

    @property
    def name(self) -> str:
        return self.model.name


def find_model(source: str) -> Subject:
    """Finds the model that ``plan`` names.

    >>> find_model("zero-1.5b").config.layers
    48
    """
    if source.endswith(".json"):
        return _from_huggingface(Path(source))
    if Path(source).is_dir():
        return _from_huggingface(Path(source) / "config.json")
    if ":" in source:
        factory = Factory(source)
        return Subject(factory.model, factory=factory, checkpointing=False)
    try:
        job = load_job(source)
    except JobError as error:
        if source.endswith(".toml") or source in presets():
            raise ModelError(str(error)) from None
        if "/" in source:
            raise ModelError(
                f"--model {source}: there is no such folder, and plan downloads nothing; give the folder of a "
                "downloaded model, or its config.json alone"
            ) from None
        known = list(presets())
        raise ModelError(
            f"--model {source}: no such preset{nearest(source, known)}; give one of {', '.join(known)}, a .toml "
            "configuration, a Hugging Face config.json or model folder, or module:factory"
        ) from None
    if job.gpt.layers > MOST_LAYERS:
        raise ModelError(f"--model {source}: model.layers {job.gpt.layers:,}: plans go up to {MOST_LAYERS:,} layers")
    return Subject(
        from_config(job.gpt, job.name),
        config=job.gpt,
        batch=job.train.batch,
        micro_batches=job.train.micro_batches,
        sequence=job.gpt.sequence,
        checkpointing=job.gpt.checkpointing or job.shard.get("activations") is not None,
        model_parallel=job.train.tensor_parallel,
        activations=Activations.parse(job.shard.get("activations")),
        shard=job.shard,
        preset=source,
    )


def _from_huggingface(file: Path) -> Subject:
    """The model of a ``config.json``. Weights are not read."""
    found = read_config(file)
    return Subject(from_configuration(found, str(file)), sequence=found.sequence, longest=found.longest)
