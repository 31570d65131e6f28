"""Models of the package ``transformers``, built from a ``config.json`` on the meta device. Weights are not read."""

from __future__ import annotations

import copy
import inspect
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...config.checks import DTYPES, nearest
from ...config.layout import UNLIMITED, find_units
from ...system.parse import parse_json, read_start
from ...system.words import quoted, word
from ..setup import MOST_LAYERS, ModelError, Setup
from .blocks import Sample
from .divide import check_heads, divide
from .known_values import KnownValues
from .model import Model, error_text
from .tracer import Built, Uninitialised

LARGEST_CONFIG = 10_000_000
"""Bytes of a configuration."""
LARGEST_SIZE = 1 << 31
"""The largest number of a configuration."""
LARGEST_PARAMETER = 1 << 45
"""Elements of the largest parameter. More is a mistake."""
MOST_LABELS = 1 << 20
"""The most classes of a classifier. ``transformers`` makes a name for each."""
EXECUTION = (
    *("quantization_config", "auto_map", "dtype", "torch_dtype"),
    *("_attn_implementation", "attn_implementation", "_experts_implementation", "experts_implementation"),
)
"""Fields of a configuration that are not about the model."""
OFFSETS = ("roberta", "camembert", "longformer")
"""Parts of the names of architectures whose positions begin after that of the padding."""
TASKS = ("AutoModelForMaskedLM", "AutoModelForCausalLM", "AutoModelForImageClassification", "AutoModel")
"""Classes that a configuration without ``architectures`` may belong to; the first that knows it is taken."""
INSTALL = 'it is built with the package transformers: pip install "transformers>=5"'
REMEDY = "; plan it from a function that builds the model, and its inputs if they are no tokens: --model module:factory"


@dataclass(frozen=True)
class Configuration:
    """A checked ``config.json``."""

    name: str
    values: Mapping[str, Any]

    @property
    def longest(self) -> int | None:
        """The longest sequence that the model takes; None without a limit."""
        text = self.values.get("text_config")
        text = text if isinstance(text, Mapping) else self.values
        kind = str(self.values["model_type"])
        known = (text.get(key) for key in ("n_positions", "max_position_embeddings") if "t5" not in kind)
        found = next((value for value in known if isinstance(value, int) and value > 0), None)
        if found is not None and any(part in kind for part in OFFSETS):
            padding = self.values.get("pad_token_id", 1)
            return max(1, found - 1 - (padding if isinstance(padding, int) else 1))
        return found

    @property
    def sequence(self) -> int:
        """The usual length of a sequence."""
        return min(1024, self.longest) if self.longest else 1024


def read_config(file: Path) -> Configuration:
    """Reads a ``config.json``. Numbers in it are bounded, because building a model takes time."""
    try:
        values = parse_json(read_start(file, LARGEST_CONFIG))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ModelError(f"--model {file}: {reason}") from None
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise ModelError(f"--model {file}: no Hugging Face configuration; it has no 'model_type'")
    for key, value in _numbers(values):
        name = key.split(".")[-1]
        most = MOST_LAYERS if any(part in name for part in ("layer", "depth", "block")) else LARGEST_SIZE
        most = MOST_LABELS if name == "num_labels" else most
        if isinstance(value, int) and abs(value) > most:
            shown = f"{value:,}" if abs(value) < 1 << 63 else quoted(value)
            raise ModelError(f"--model {file}: {word(key)} must be at most {most:,}, not {shown}")
    return Configuration(word(_name(file, values)), values)


def _numbers(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, int | float]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{path}{key}.")
        elif isinstance(value, list):
            yield from ((f"{path}{key}", entry) for entry in value if isinstance(entry, int | float))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{path}{key}", value


def _name(file: Path, values: Mapping[str, Any]) -> str:
    """The name of a model: the name it was loaded by, the folder's name, or the architecture's name."""
    given = values.get("_name_or_path")
    if isinstance(given, str) and given.strip(" ./"):
        return Path(given).name if given.startswith(("/", ".", "~")) else given.strip()
    if file.name != "config.json":
        return file.stem
    architectures = values.get("architectures")
    known = architectures[0] if isinstance(architectures, list) and architectures else values["model_type"]
    return file.absolute().parent.name or str(known)


def from_configuration(found: Configuration, where: str) -> Model:
    """The model of a configuration. ``where`` is the file, for messages. Equal configurations share their traces."""
    return replace(_model(json.dumps(found.values, sort_keys=True), where), name=found.name, sequence=found.sequence)


@lru_cache(maxsize=64)
def _model(text: str, where: str) -> Model:
    config = _make_config(json.loads(text), where)

    def build(setup: Setup) -> Built:
        wanted = copy.deepcopy(config)
        if setup.checkpointing:  # a block that is recomputed would write its keys and values to the cache twice
            for part in _configs(wanted):
                part.use_cache = False
        values = KnownValues()
        with torch.device("meta"), Uninitialised(), values:
            model = _make_model(wanted, where).train()
            named = _inputs(model, wanted, setup, where)
        divided: frozenset[int] = frozenset()
        if setup.model_parallel > 1:
            heads = (getattr(wanted, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
            check_heads(setup.model_parallel, *heads)
            divided = divide(model, getattr(model, "tp_plan", None) or {}, setup.model_parallel)
            blocks = find_units(model, max_unit_bytes=UNLIMITED)[1:]
            if divided.isdisjoint(id(one) for block in blocks for one in block.module.parameters()):
                raise ModelError(
                    f"--model-parallel {setup.model_parallel}: transformers has no plan to divide "
                    f"the blocks of {type(model).__name__} of {where}; leave --model-parallel out"
                )
        return Built(
            model,
            named=named,
            values=values,
            divided=divided,
            tokens_known="pixel_values" not in named,
            shorten=lambda sample: _shorten(model, sample),
        )

    return Model("", build, remedy=REMEDY, source=where)


def _shorten(model: nn.Module, sample: Sample) -> None:
    """Shortens the lists of a configuration that have an entry for each block, such as ``layer_types``."""
    blocks = len(sample.stands_for)
    for config in {
        id(found): found for module in model.modules() if (found := getattr(module, "config", None))
    }.values():
        facts = vars(config)
        for name, value in facts.items():
            if isinstance(value, list) and len(value) == blocks:
                facts[name] = [value[number] for number in sample.traced]  # setattr would compare it with other fields


def _make_config(values: Mapping[str, Any], where: str) -> Any:
    try:
        import transformers
    except ImportError:
        raise ModelError(f"--model {where}: {INSTALL}") from None
    logging.getLogger("transformers").setLevel(logging.ERROR)  # its remarks are on generating text, and on kernels
    given = _without_execution(values)
    kind = given.pop("model_type")
    known = list(transformers.CONFIG_MAPPING)
    if kind not in known:
        raise ModelError(
            f"--model {where}: model_type {quoted(kind)} cannot be read by transformers {transformers.__version__}, "
            f"which does not know it{nearest(kind, known)}{REMEDY}"
        )
    try:
        config = transformers.AutoConfig.for_model(kind, **given)
        config.use_cache = getattr(config, "use_cache", True)
    except Exception as error:
        reason = f"transformers {transformers.__version__}: {error_text(error)}"
        raise ModelError(f"--model {where}: model_type {quoted(kind)} cannot be read by {reason}{REMEDY}") from None
    return config


def _without_execution(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values without those on how weights are stored and which kernels compute: the plan decides that."""
    kept = {key: value for key, value in values.items() if key not in EXECUTION}
    return {key: _without_execution(value) if isinstance(value, dict) else value for key, value in kept.items()}


def _make_model(config: Any, where: str) -> nn.Module:
    import transformers

    named = [name for name in config.architectures or () if _is_model(getattr(transformers, str(name), None))]
    tasks = ("AutoModelForSeq2SeqLM", *TASKS) if config.is_encoder_decoder else TASKS
    last: Exception = ValueError("no class of the package takes it")
    for name in (*named[:1], *tasks):
        kind = getattr(transformers, name)
        try:
            model: nn.Module = kind.from_config(config) if name in tasks else kind(config)
        except Exception as error:
            last = error
            if isinstance(error, ValueError) and "Unrecognized configuration class" in str(error):
                continue
            break
        large = [name for name, parameter in model.named_parameters() if parameter.numel() > LARGEST_PARAMETER]
        if large:
            raise ModelError(f"--model {where}: {large[0]} would have more than {LARGEST_PARAMETER:,} elements")
        return model
    raise ModelError(f"--model {where}: building it on the meta device failed: {error_text(last)}{REMEDY}")


def _is_model(kind: Any) -> bool:
    """True for a class of models: the name in a configuration could be that of anything in the package."""
    import transformers

    return isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)


def _inputs(model: Any, config: Any, setup: Setup, where: str) -> dict[str, Any]:
    """One micro-batch, with targets if the model has a loss. Models of text and images get text alone."""
    main, known = model.main_input_name, inspect.signature(model.forward).parameters
    tokens = torch.zeros(setup.batch, setup.sequence, dtype=torch.long)
    if main == "input_ids":
        given = {main: tokens}
    elif main == "pixel_values" and "input_ids" not in known:
        height, width = _pair(config.image_size)
        given = {main: torch.zeros(setup.batch, config.num_channels, height, width, dtype=DTYPES[setup.precision])}
    else:
        raise ModelError(f"--model {where}: its input {main!r} is not known to the plan{REMEDY}")
    if "labels" in known:
        of_samples = main == "pixel_values" or type(model).__name__.endswith("SequenceClassification")
        given["labels"] = torch.zeros(setup.batch, dtype=torch.long) if of_samples else tokens
        if of_samples and main == "input_ids" and model.config.pad_token_id is None:
            model.config.pad_token_id = 0  # tells where a sequence ends
        if getattr(config, "is_encoder_decoder", False):  # the decoder's tokens are the targets, moved by one
            model.config.pad_token_id = getattr(config, "pad_token_id", None) or 0
            model.config.decoder_start_token_id = getattr(config, "decoder_start_token_id", None) or 0
    return given


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _configs(config: Any) -> Iterator[Any]:
    """A configuration and those inside it, such as that of the text of a model that sees images too."""
    yield config
    for part in vars(config).values():
        if hasattr(type(part), "model_type"):
            yield from _configs(part)
