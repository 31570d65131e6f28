"""Reads the shape of a transformer from a Hugging Face ``config.json``, for the known model families.

Weights are not read, and the package ``transformers`` is not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ..config.checks import nearest
from ..system.parse import parse_json, read_start
from ..system.words import quoted, word
from .shape import MOST_LAYERS, Activation, Habits, ModelError, Transformer

LARGEST_CONFIG = 10_000_000
"""Bytes of a configuration."""
LARGEST_SIZE = 1 << 31
"""The largest value of a size."""

REMEDY = "Any other is planned from a function that builds it: --model module:factory"

ONE_KERNEL, FROM_ITS_RESULT = Activation(), Activation(saved=1, backward_extra=2)
TANH_BY_HAND = Activation(saved=5, forward_peak=4, backward_extra=2, written=8)
ACTIVATIONS: Mapping[str, Activation] = {
    **dict.fromkeys(("gelu", "gelu_pytorch_tanh", "silu", "swish", "mish", "hardswish", "leaky_relu"), ONE_KERNEL),
    **dict.fromkeys(("relu", "tanh", "sigmoid"), FROM_ITS_RESULT),
    **dict.fromkeys(("gelu_new", "gelu_accurate", "gelu_python_tanh"), TANH_BY_HAND),
    "gelu_fast": Activation(saved=8, forward_peak=5, backward_extra=2, written=9),
    "gelu_python": Activation(saved=4, forward_peak=4, backward_extra=4, written=5),
    "quick_gelu": Activation(saved=3, forward_peak=3, backward_extra=2, written=3),
    "relu2": Activation(saved=2, forward_peak=3, backward_extra=3, written=2),
}
"""The activation functions that configurations name, as the package ``transformers`` computes them."""


class ConfigReader:
    """Reads values from a configuration, and collects the missing and the wrong ones."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self.missing: list[str] = []
        """Keys that are missing or whose values are of a wrong kind."""
        self.wrong: list[str] = []
        """Sentences about values that are unknown or contradict each other."""

    def __call__(self, key: str, most: int = LARGEST_SIZE) -> int:
        return self.optional(key, most, missing=True) or 1

    def optional(self, key: str, most: int = LARGEST_SIZE, *, missing: bool = False) -> int | None:
        value = self._values.get(key)
        if value is None and not missing:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.missing.append(key if value is None else f"{key} (a positive whole number, not {quoted(value)})")
            return None
        if value > most:
            shown = f"{value:,}" if value < 1 << 63 else quoted(value)
            self.missing.append(f"{key} of at most {most:,} (not {shown})")
            return None
        return value

    def flag(self, key: str, default: bool) -> bool:
        """True or false. A missing key gives the default; null is false, as in ``transformers``."""
        value = self._values.get(key, default)
        if value is not None and not isinstance(value, bool):
            self.missing.append(f"{key} (true or false, not {quoted(value)})")
        return bool(value)

    def activation(self, key: str, default: str) -> Activation:
        name = self._values.get(key, default)
        if not isinstance(name, str) or name not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            close = nearest(name, list(ACTIVATIONS)) if isinstance(name, str) else ""
            self.wrong.append(f"{key} {quoted(name)} is not known{close}; known: {known}. {REMEDY}")
            return ONE_KERNEL
        return ACTIVATIONS[name]

    def drops(self, key: str, default: float) -> bool:
        """True if this dropout is above 0."""
        value = self._values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            self.missing.append(f"{key} (a number from 0 to 1, not {quoted(value)})")
            return False
        return value > 0

    def heads_of_keys(self, key: str, heads: int) -> int | None:
        """The number of key and value heads. It must divide the number of query heads."""
        found = self.optional(key)
        if found is not None and heads % found:
            self.wrong.append(f"{key} {found} must divide the {heads} heads that share them")
        return found

    def check_equal(self, key: str, other: str, why: str) -> None:
        """Refuses a configuration in which two sizes differ."""
        value, expected = self.optional(key), self.optional(other)
        if value is not None and value != expected:
            self.wrong.append(f"{key} {value} differs from {other} {expected}: {why}")

    @property
    def problems(self) -> str:
        """All that is wrong, as one text; empty if nothing is wrong."""
        needs = [f"needs {', '.join(dict.fromkeys(self.missing))}"] if self.missing else []
        return "; ".join([*needs, *self.wrong])


def _gpt2(read: ConfigReader) -> Transformer:
    return Transformer(
        layers=read("n_layer", MOST_LAYERS),
        hidden=read("n_embd"),
        heads=read("n_head"),
        vocabulary=read("vocab_size"),
        positions=read("n_positions"),
        intermediate=read.optional("n_inner"),
        tied=read.flag("tie_word_embeddings", True),
        habits=Habits(
            activation=read.activation("activation_function", "gelu_new"),
            # Keys and values are copied; the storage of the queries contains all three.
            cached_copies=2 if read.flag("use_cache", True) else 0,
            dropouts=2 * read.drops("resid_pdrop", 0.1),
            embedding_dropout=read.drops("embd_pdrop", 0.1),
        ),
    )


def _llama(read: ConfigReader) -> Transformer:
    heads = read("num_attention_heads")
    return Transformer(
        layers=read("num_hidden_layers", MOST_LAYERS),
        hidden=read("hidden_size"),
        heads=heads,
        kv_heads=read.heads_of_keys("num_key_value_heads", heads),
        head_width=read.optional("head_dim"),
        vocabulary=read("vocab_size"),
        intermediate=read("intermediate_size"),
        gated=True,
        biases=False,  # Qwen 2 has a few in its attention, less than a ten-thousandth of all parameters
        tied=read.flag("tie_word_embeddings", False),
        habits=Habits(activation=read.activation("hidden_act", "silu")),
    )


def _qwen3(read: ConfigReader) -> Transformer:
    return replace(_llama(read), head_norms=True)


def _qwen(read: ConfigReader) -> Transformer:
    return Transformer(
        layers=read("num_hidden_layers", MOST_LAYERS),
        hidden=read("hidden_size"),
        heads=read("num_attention_heads"),
        vocabulary=read("vocab_size"),
        intermediate=read("intermediate_size") // 2,  # the first Qwen counts both halves of the gated MLP
        gated=True,
        biases=False,
        tied=read.flag("tie_word_embeddings", False),
    )


def _gpt_neox(read: ConfigReader) -> Transformer:
    return Transformer(
        layers=read("num_hidden_layers", MOST_LAYERS),
        hidden=read("hidden_size"),
        heads=read("num_attention_heads"),
        vocabulary=read("vocab_size"),
        intermediate=read.optional("intermediate_size"),
        tied=read.flag("tie_word_embeddings", False),
        habits=Habits(
            activation=read.activation("hidden_act", "gelu"),
            copies=3,  # the result, and the storage of the values, which contains all three
            cached_copies=1 if read.flag("use_cache", True) else 3,
            one_input=read.flag("use_parallel_residual", True),
            dropouts=2 * read.drops("hidden_dropout", 0.0),
            embedding_dropout=read.drops("hidden_dropout", 0.0),
        ),
    )


def _opt(read: ConfigReader) -> Transformer:
    read.check_equal("word_embed_proj_dim", "hidden_size", f"projections around the blocks are not counted. {REMEDY}")
    return Transformer(
        layers=read("num_hidden_layers", MOST_LAYERS),
        hidden=read("hidden_size"),
        heads=read("num_attention_heads"),
        vocabulary=read("vocab_size"),
        positions=read("max_position_embeddings") + 2,
        intermediate=read("ffn_dim"),
        tied=read.flag("tie_word_embeddings", True),
        habits=Habits(
            activation=read.activation("activation_function", "relu"), dropouts=2 * read.drops("dropout", 0.1)
        ),
    )


HUGGINGFACE: Mapping[str, Callable[[ConfigReader], Transformer]] = {
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "llama": _llama,
    "mistral": _llama,
    "opt": _opt,
    "qwen": _qwen,
    "qwen2": _llama,
    "qwen3": _qwen3,
}
"""By model type: the function that reads its configuration."""


class Architecture(NamedTuple):
    """The content of a configuration."""

    transformer: Transformer
    longest: int | None
    """The longest sequence that the model takes; None without a limit."""


def architecture(kind: str, read: ConfigReader) -> Architecture:
    """The shape of a known model type. ``read.problems`` then says what is wrong with it."""
    model = HUGGINGFACE[kind](read)
    if not read.missing and model.head_width is None and model.hidden % model.heads:
        read.wrong.append(f"{model.heads} heads do not divide a hidden size of {model.hidden}")
    return Architecture(model, read.optional("n_positions") or read.optional("max_position_embeddings"))


def read_config(file: Path) -> Architecture:
    """Reads a ``config.json``."""
    try:
        values = parse_json(read_start(file, LARGEST_CONFIG))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ModelError(f"--model {file}: {reason}") from None
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise ModelError(f"--model {file}: no Hugging Face configuration; it has no 'model_type'")
    kind = values["model_type"]
    if kind not in HUGGINGFACE:
        raise ModelError(
            f"--model {file}: model_type {quoted(kind)} is not known{nearest(kind, list(HUGGINGFACE))}; known: "
            f"{', '.join(HUGGINGFACE)}. {REMEDY}"
        )
    read = ConfigReader(values)
    found = architecture(kind, read)
    if read.problems:
        raise ModelError(f"--model {file}: model_type {kind!r} {read.problems}")
    return Architecture(replace(found.transformer, name=word(_name(file, values))), found.longest)


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
