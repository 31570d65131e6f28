"""The folder of a reader: the files that commands on the pages name, so that the commands can be run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import zeroshard
from tests.docs.given import preamble
from zeroshard.config.job import presets

MACHINES = Path(zeroshard.__file__).parent / "plan/machine/machines"
PROGRAM = """
model, optimizer = zeroshard.shard(model, optimizer, stage=3)
for batch in batches:
    model(batch).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
RECORDED = """
import sys
model, optimizer = zeroshard.shard(model, optimizer)
with zeroshard.record(model, sys.argv[1]):
    for batch in batches:
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
"""
MODELS = """
import torch
from torch import nn


def build():
    return nn.Sequential(nn.Embedding(64, 32), *(nn.Linear(32, 32) for _ in range(4)))
"""


def furnish(folder: Path) -> None:
    """Writes every file: small models and few documents, under the names of the pages."""
    from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM  # seconds to import

    (folder / "my.toml").write_text(presets()["tiny"].read_text())
    (folder / "machine.toml").write_text((MACHINES / "h100.toml").read_text())
    (folder / "train.py").write_text(preamble("model, optimizer, batches") + PROGRAM)
    recorded = preamble("model, optimizer, batches") + RECORDED
    for name in ("runs/mine", "runs/a", "runs/b"):
        subprocess.run([sys.executable, "-c", recorded, name], cwd=folder, check=True, capture_output=True)
    (folder / "my_project").mkdir()
    (folder / "my_project" / "models.py").write_text(MODELS)
    tokenizer = ByT5Tokenizer()
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=len(tokenizer),
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
    )
    for name in ("models/llama", "llama", "qwen3"):
        LlamaForCausalLM(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    sums = [{"prompt": f"{a} + {b} = ", "completion": f"{a + b}"} for a in range(9) for b in range(9)]
    (folder / "chats.jsonl").write_text("\n".join(json.dumps(line) for line in sums))
