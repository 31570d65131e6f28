"""Finds the model of a plan: a preset, a TOML configuration, a Hugging Face ``config.json``, or a user's module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from ..config.checks import nearest
from ..config.job import JobError, ModelConfig, load_job, presets
from ..config.options import Activations
from .factory import Factory
from .huggingface import HUGGINGFACE, ConfigReader, architecture, read_config
from .module_trace import ModuleTrace
from .shape import MOST_LAYERS, ModelError, Setup, Transformer


@dataclass(frozen=True)
class Subject:
    """The model of a plan, with the training settings that its source contains."""

    name: str
    transformer: Transformer | None
    """None for a module of the user, which is traced."""
    factory: Factory | None = None
    batch: int = 1
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

    def model(self, setup: Setup) -> Transformer | ModuleTrace:
        """The model in the form that the plan needs. A module is traced once for each batch, sequence and precision."""
        if self.transformer is not None:
            return self.transformer
        assert self.factory is not None
        return self.factory.trace(setup.precision, setup.batch, setup.sequence, setup.max_unit_bytes, setup.activations)


def find_model(source: str) -> Subject:
    """Finds the model that ``--model`` names.

    >>> find_model("zero-1.5b").transformer.layers
    48
    """
    if source.endswith(".json"):
        return from_huggingface(Path(source))
    if Path(source).is_dir():
        return from_huggingface(Path(source) / "config.json")
    if ":" in source:
        return Subject(source, None, Factory(source), batch=1, checkpointing=False)
    try:
        job = load_job(source)
    except JobError as error:
        if source.endswith(".toml") or source in presets():
            raise ModelError(str(error)) from None
        known = list(presets())
        raise ModelError(
            f"--model {source}: no such preset{nearest(source, known)}; give one of {', '.join(known)}, a .toml "
            "configuration, a Hugging Face config.json, or module:factory"
        ) from None
    if job.model.layers > MOST_LAYERS:
        raise ModelError(f"--model {source}: model.layers {job.model.layers:,}: plans go up to {MOST_LAYERS:,} layers")
    return Subject(
        job.name,
        from_config(job.model, job.name),
        batch=job.train.batch,
        sequence=job.model.sequence,
        longest=job.model.sequence,
        checkpointing=job.model.checkpointing or job.shard.get("activations") is not None,
        model_parallel=job.train.tensor_parallel,
        activations=Activations.parse(job.shard.get("activations")),
        shard=job.shard,
        preset=source,
    )


def from_config(config: ModelConfig, name: str = "") -> Transformer:
    """The GPT of ``zeroshard train``.

    >>> config = ModelConfig(layers=48, hidden=1600, heads=25, sequence=1024, vocabulary=50257)
    >>> from_config(config).parameters == config.parameters
    True
    """
    return Transformer(
        name=name,
        layers=config.layers,
        hidden=config.hidden,
        heads=config.heads,
        vocabulary=config.vocabulary,
        positions=config.sequence,
        tied=config.tied,
    )


TOLERANCE = 0.02
"""The largest relative difference between the parameters of a module and those of its description."""


def from_huggingface(file: Path) -> Subject:
    """The model of a ``config.json``. Weights are not read."""
    model, longest = read_config(file)
    sequence = min(1024, longest) if longest else 1024
    return Subject(model.name, model, sequence=sequence, longest=longest)


def describe(module: nn.Module) -> Transformer | None:
    """The shape of a GPT of ours or of a known Hugging Face model, if all its parameters are trained; else None."""
    config: Any = getattr(module, "config", None)
    found: Transformer | None = None
    if isinstance(config, ModelConfig):
        found = from_config(config)
    elif hasattr(config, "to_dict") and getattr(config, "model_type", None) in HUGGINGFACE:
        read = ConfigReader(config.to_dict())
        found = architecture(config.model_type, read).transformer
        found = None if read.problems else found
    trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    if found is None or not found.layers or abs(trained - found.parameters) > TOLERANCE * found.parameters:
        return None
    return found
