"""A tiny Llama with a tokenizer that the tests make, and documents for it. Nothing is downloaded."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
WORDS = ["red", "green", "blue", "one", "two", "three", "cat", "dog", "sun", "moon"]
VOCABULARY = 320


def make_tokenizer(template: str | None = TEMPLATE) -> Any:
    """A byte-level BPE, as of Llama 3 and Qwen."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([" ".join(WORDS)] * 10, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>", pad_token="<|pad|>")
    tokenizer.chat_template = template
    return tokenizer


def make_model(folder: Path, template: str | None = TEMPLATE, *, kind: str = "llama", **changes: Any) -> Path:
    """Writes a model with random weights and its tokenizer into a folder."""
    import torch
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 128, "eos_token_id": 1}
    config = transformers.AutoConfig.for_model(kind, **{**sizes, **more, **changes})
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    make_tokenizer(template).save_pretrained(folder)
    return folder


def text(words: int, seed: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def chats(count: int) -> list[dict[str, Any]]:
    """Conversations with something to learn: the assistant says the user's first word twice."""
    found = []
    for number in range(count):
        question = text(3 + number % 5, number)
        first = question.split()[0]
        found.append(
            {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": f"{first} {first}"}]}
        )
    return found


def write_lines(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
