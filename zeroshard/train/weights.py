"""Whole weights on disk: `model.safetensors` beside a `config.json` that says which GPT they belong to."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from zeroshard.train.gpt import GPT, ModelConfig

WEIGHTS = "model.safetensors"
CONFIG = "config.json"


def save_weights(folder: Path, config: ModelConfig, weights: Mapping[str, Tensor]) -> Path:
    """Write a model's whole parameters and its shape; returns the file of weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(asdict(config), indent=2) + "\n")
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / WEIGHTS)
    return folder / WEIGHTS


def load_weights(folder: Path, device: torch.device) -> GPT:
    """Return the plain, unsharded GPT that `save_weights` wrote."""
    with torch.device("meta"):
        model = GPT(ModelConfig(**json.loads((folder / CONFIG).read_text())))
    model.load_state_dict(load_file(folder / WEIGHTS, device=str(device)), assign=True)
    return model.eval()
