"""A causal language model of Hugging Face in a folder: its checks, its tokenizer, the model on the meta device."""

import copy
import hashlib
import inspect
import logging
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...config.finetune import USUAL_SEQUENCE, LanguageModelConfig
from ...init.weights import Weights, contents_of
from ...system.words import quoted
from .token_loss import loss_function

NEEDED = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt")
"""Files of a model on the hub that are downloaded."""
TOKENIZER = re.compile("token|vocab|merges|special_tokens|added_tokens|chat_template|spiece|sentencepiece")
"""How the names of a tokenizer's files begin."""
LOCAL: Mapping[str, bool] = {"local_files_only": True, "trust_remote_code": False}
"""Without the second, transformers asks at the terminal whether to run code of the folder."""
FOREIGN_CODE = "custom code"
"""What transformers says of a folder that it cannot read without the folder's own code."""
NO_FOREIGN_CODE = "it needs Python code from its folder, which is never run; take a model that transformers has itself"
TOKENIZER_SUFFIXES = (".json", ".model", ".jinja", ".txt")


@dataclass(frozen=True)
class LanguageModel:
    """A model's folder. Nothing is read before it is asked for; weights never are: `shard()` reads them."""

    config: LanguageModelConfig

    def check(self) -> None:
        """Raise if the model cannot be trained here.

        Raises:
            ValueError: naming what is wrong with the folder.
        """
        _ = self.causal_class, self.tokenizer
        contents_of(self.folder)

    def check_weights(self) -> None:
        """Raise if the files' names, shapes and dtypes are not the model's.

        Raises:
            ValueError: naming what does not fit.
        """
        Weights(self.folder, self.build(0))

    @cached_property
    def folder(self) -> Path:
        """The folder with configuration, weights and tokenizer."""
        given = self.config.huggingface
        path = Path(given).expanduser()
        if path.is_dir():
            if not (path / "config.json").is_file():
                raise ValueError(f"model {given}: the folder has no config.json, so it is no model of Hugging Face")
            return path.absolute()
        if path.is_absolute() or given.startswith(".") or given.count("/") > 1:
            raise ValueError(f"model {given}: no such folder")
        import huggingface_hub

        try:
            return Path(huggingface_hub.snapshot_download(given, allow_patterns=list(NEEDED), ignore_patterns="*/*"))
        except Exception as error:  # no network, no such name, no permission
            reason = " ".join(str(error).split())[:200]
            raise ValueError(
                f"model {given}: no such folder, and the Hugging Face hub did not give it ({type(error).__name__}: "
                f"{reason}); where there is a network, `hf download {given} --local-dir DIR` makes a folder"
            ) from None

    @cached_property
    def settings(self) -> Any:
        """The configuration of transformers."""
        import transformers

        logging.getLogger("transformers").setLevel(logging.ERROR)  # its remarks are on generating text, and on kernels
        try:
            found = transformers.AutoConfig.from_pretrained(self.folder, **LOCAL)
        except Exception as error:
            if FOREIGN_CODE in str(error):
                raise ValueError(f"model {self.folder}: {NO_FOREIGN_CODE}") from None
            raise ValueError(f"model {self.folder}: config.json cannot be read: {error}") from None
        if getattr(found, "quantization_config", None) is not None:
            raise ValueError(f"model {self.folder}: its weights are quantised; train the model that they were made of")
        return found

    @cached_property
    def causal_class(self) -> type:
        """The class of the model.

        Raises:
            ValueError: it is no causal language model.
        """
        import transformers

        known: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        found: type | None = known.get(type(self.settings), None)
        named = getattr(self.settings, "architectures", None) or []
        if found is None or self.settings.is_encoder_decoder or (named and found.__name__ not in named):
            kind = named[0] if named else self.settings.model_type
            raise ValueError(f"model {self.folder}: {quoted(kind)} is no causal language model, as `finetune` trains")
        return found

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the folder."""
        import transformers

        try:
            return transformers.AutoTokenizer.from_pretrained(self.folder, **LOCAL)
        except Exception as error:
            if FOREIGN_CODE in str(error):
                raise ValueError(f"model {self.folder}: its tokenizer: {NO_FOREIGN_CODE}") from None
            raise ValueError(
                f"model {self.folder}: it has no tokenizer that can be read (tokenizer.json, tokenizer_config.json): "
                f"{' '.join(str(error).split())[:200]}"
            ) from None

    @property
    def tokenizer_files(self) -> dict[str, bytes]:
        """The files of the tokenizer, by name, with their content."""
        files = [file for file in sorted(self.folder.iterdir()) if file.suffix in TOKENIZER_SUFFIXES]
        return {file.name: file.read_bytes() for file in files if TOKENIZER.match(file.name)}

    @property
    def tokenizer_key(self) -> list[str]:
        """What the tokens of a text depend on, as text."""
        return [hashlib.blake2b(content, digest_size=16).hexdigest() for content in self.tokenizer_files.values()]

    @cached_property
    def vocabulary(self) -> int:
        """The number of tokens that the model knows."""
        return int(self.settings.get_text_config().vocab_size)

    def sequence(self, asked: int) -> int:
        """Return the tokens of a sequence.

        Raises:
            ValueError: the model has not so many positions.
        """
        text = self.settings.get_text_config()
        longest = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
        if longest is not None and asked > longest:
            raise ValueError(f"data.sequence: {asked} is more than the {longest} positions of {self.folder.name}")
        return asked or min(USUAL_SEQUENCE, longest or USUAL_SEQUENCE)

    def inputs(self, tokens: Tensor, positions: Tensor | None = None) -> dict[str, Any]:
        """Return what the model's forward is given. A model without positions has none to be told.

        Flash attention looks for documents only in a batch of one, so there all sequences become one row.
        """
        takes = inspect.signature(self.causal_class.forward).parameters  # type: ignore[attr-defined]
        if positions is None or "position_ids" not in takes:
            return {"input_ids": tokens}
        if "flash" in self.config.attention:
            tokens, positions = tokens.reshape(1, -1), positions.reshape(1, -1)
        return {"input_ids": tokens, "position_ids": positions}

    def example(self, batch: int, sequence: int) -> dict[str, Any]:
        """Return one micro-batch for the plan, with two documents a sequence: transformers looks at their positions."""
        tokens = torch.zeros(batch, sequence, dtype=torch.long, device="meta")
        positions = torch.cat([torch.arange(sequence // 2), torch.arange(sequence - sequence // 2)])
        return {**self.inputs(tokens, positions.expand(batch, sequence)), "labels": tokens}

    def build(self, seed: int) -> nn.Module:
        """Return the model on the meta device. Adapters, which are small, have values, the same on every rank.

        Raises:
            ValueError: transformers cannot build it.
        """
        import transformers

        settings = copy.deepcopy(self.settings)
        for part in (settings, settings.get_text_config()):
            part.use_cache = False  # blocks that are recomputed would write to a cache twice
        options = {"attn_implementation": self.config.attention} if self.config.attention else {}
        try:
            with torch.device("meta"):
                automatic: Any = transformers.AutoModelForCausalLM
                model: Any = automatic.from_config(settings, **options)
        except Exception as error:
            raise ValueError(f"model {self.folder}: transformers cannot build it: {error}") from None
        model.loss_function = loss_function
        built: nn.Module = self._with_adapters(model, seed) if self.config.lora else model
        return built.train()

    def _with_adapters(self, model: Any, seed: int) -> nn.Module:
        import peft

        rank = self.config.lora
        settings = peft.LoraConfig(
            r=rank,
            lora_alpha=self.config.lora_alpha or 2 * rank,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
            base_model_name_or_path=str(self.folder),
        )
        with torch.device("meta"), warnings.catch_warnings(action="ignore"):
            adapted: Any = peft.get_peft_model(model, settings)
        torch.manual_seed(seed)
        for module in adapted.modules():
            for adapter, down in getattr(module, "lora_A", {}).items():
                for matrix in (down, module.lora_B[adapter]):
                    matrix.to_empty(device="cpu")
                module.reset_lora_parameters(adapter, True)
        return adapted  # type: ignore[no-any-return]
