"""Saved weights come back as a plain model."""

import json
from pathlib import Path

import torch

from zeroshard.train.gpt import GPT, ModelConfig
from zeroshard.train.weights import load_weights, save_weights


def test_saved_weights_come_back_as_the_same_model(tmp_path: Path) -> None:
    config = ModelConfig(layers=1, hidden=32, heads=2, sequence=8, tied=False)
    model = GPT(config)
    file = save_weights(tmp_path / "new" / "folder", config, model.state_dict())
    assert file.name == "model.safetensors"
    assert json.loads(file.with_name("config.json").read_text())["hidden"] == 32
    loaded = load_weights(file.parent, torch.device("cpu"))
    tokens = torch.arange(8)[None]
    assert torch.equal(loaded(tokens), model(tokens))
