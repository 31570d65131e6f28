"""The tables of a job that trains a Hugging Face model on files: its `[model]` and its `[data]`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from .checks import Mistake, Section, at_least, list_of, must

USUAL_SEQUENCE = 2048


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig(Section):
    """A causal language model of Hugging Face: the `[model]` table of a configuration."""

    huggingface: Annotated[str, must("be a folder, or a name on the Hugging Face hub", bool)] = "model"
    """A folder with configuration, safetensors and tokenizer, or a name on the hub."""
    lora: Annotated[int, at_least(0)] = 0
    """Train adapters of this rank beside all linear layers but the head. The model itself is frozen. 0 trains it."""
    lora_alpha: Annotated[int, at_least(0)] = 0
    """The adapters' product counts alpha / rank times; 0 for twice the rank."""
    attention: str = ""
    """How attention is computed, as transformers names it: "sdpa", "flash_attention_2"; empty for its own choice."""

    def conflicts(self) -> Iterator[Mistake]:
        if self.lora_alpha and not self.lora:
            yield Mistake(("lora_alpha", "lora"), "has no effect without lora; leave it out, or say a rank")


@dataclass(frozen=True, kw_only=True)
class FilesConfig(Section):
    """The files to train a language model on: the `[data]` table of a configuration."""

    files: Annotated[tuple[str, ...], list_of("paths", str), must("name at least one file", bool)] = ("data.jsonl",)
    """Text, JSON lines or Parquet, and folders of these."""
    sequence: Annotated[int, must("be at least 2, or 0", lambda value: value == 0 or value >= 2), at_least(0)] = 0
    """Tokens of a sequence, into which documents are packed; 0 for 2048, or for the model's positions if fewer."""
    held_out: Annotated[float, must("be from 0 to below 1", lambda value: 0 <= value < 1)] = 0.02
    """The share of the documents that is used for evaluation only. The content of a document decides its side."""
