"""Models of a plan: presets, Hugging Face configurations, modules; and the errors for bad models."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from zeroshard.cli.main import main
from zeroshard.config.job import ModelConfig
from zeroshard.plan.model.huggingface import HUGGINGFACE
from zeroshard.plan.model.source import describe, find_model
from zeroshard.plan.setup import ModelError, Setup
from zeroshard.train.gpt import GPT

CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 3, "n_embd": 128, "n_head": 4, "vocab_size": 1000, "n_positions": 64},
    "gpt_neox": {
        "num_hidden_layers": 3,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "intermediate_size": 512,
        "vocab_size": 1000,
    },
    "llama": {
        "num_hidden_layers": 3,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 384,
        "vocab_size": 1000,
    },
    "opt": {
        "num_hidden_layers": 3,
        "hidden_size": 128,
        "word_embed_proj_dim": 128,
        "num_attention_heads": 4,
        "ffn_dim": 512,
        "vocab_size": 1000,
        "max_position_embeddings": 64,
    },
}
CONFIGS["mistral"] = CONFIGS["llama"] | {"head_dim": 48}
CONFIGS["qwen2"] = CONFIGS["llama"] | {"tie_word_embeddings": True}
CONFIGS["qwen3"] = CONFIGS["llama"] | {"head_dim": 64}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_hugging_face_configuration_has_the_parameters_of_its_model(kind: str, tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model(kind, **CONFIGS[kind])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    expected = sum(parameter.numel() for parameter in model.parameters())
    config.save_pretrained(tmp_path)
    subject = find_model(str(tmp_path / "config.json"))
    assert subject.transformer is not None
    close = 0.005 if kind == "qwen2" else 0.0  # its biases are not counted
    assert subject.transformer.parameters == pytest.approx(expected, rel=close, abs=0)
    assert find_model(str(tmp_path)) == subject


def test_the_first_qwen_counts_both_halves_of_its_mlp(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    values = {**CONFIGS["llama"], "model_type": "qwen", "intermediate_size": 768}
    file.write_text(json.dumps(values))
    transformer = find_model(str(file)).transformer
    assert transformer is not None
    assert transformer.mlp_width == 384


def test_presets_say_how_they_are_trained() -> None:
    subject = find_model("zero-8b")
    assert subject.transformer is not None
    assert (subject.transformer.layers, subject.transformer.hidden, subject.checkpointing) == (72, 3072, True)
    assert subject.longest == subject.sequence == 1024


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("not json", "not JSON"),
        ("[]", "no 'model_type'"),
        ('{"model_type": "lama"}', "did you mean 'llama'?"),
        ('{"model_type": "mamba"}', "module:factory"),
        ('{"model_type": "gpt2", "n_layer": 3, "n_embd": 64}', "needs n_head, vocab_size, n_positions"),
        ('{"model_type": "gpt2", "n_layer": 3, "n_embd": 64, "n_head": 0}', "n_head (a positive whole number, not 0)"),
        (
            '{"model_type": "gpt2", "n_layer": 3, "n_embd": 65, "n_head": 4, "vocab_size": 9, "n_positions": 9}',
            "4 heads do not divide",
        ),
    ],
)
def test_an_unusable_configuration_is_named_with_what_it_lacks(text: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ModelError) as raised:
        find_model(str(file))
    assert told in str(raised.value)
    assert str(file) in str(raised.value)


@pytest.mark.parametrize(
    ("kind", "key", "value", "told"),
    [
        ("llama", "num_key_value_heads", 3, "num_key_value_heads 3 must divide the 4 heads"),
        ("llama", "num_key_value_heads", 8, "num_key_value_heads 8 must divide the 4 heads"),
        ("llama", "max_position_embeddings", 0, "max_position_embeddings (a positive whole number, not 0)"),
        ("llama", "max_position_embeddings", "2048", "max_position_embeddings (a positive whole number, not '2048')"),
        ("llama", "tie_word_embeddings", "false", "tie_word_embeddings (true or false, not 'false')"),
        ("llama", "num_hidden_layers", 0, "num_hidden_layers (a positive whole number, not 0)"),
        ("llama", "num_hidden_layers", 200_000, "num_hidden_layers of at most 2,048 (not 200,000)"),
        ("llama", "vocab_size", 1 << 40, "vocab_size of at most"),
        ("gpt2", "n_layer", 200_000, "n_layer of at most 2,048"),
        (
            "gpt2",
            "activation_function",
            "gelu_nw",
            "activation_function 'gelu_nw' is not known (did you mean 'gelu_new'?)",
        ),
        ("gpt2", "resid_pdrop", "0.1", "resid_pdrop (a number from 0 to 1, not '0.1')"),
        ("gpt2", "use_cache", 1, "use_cache (true or false, not 1)"),
        ("opt", "word_embed_proj_dim", 64, "word_embed_proj_dim 64 differs from hidden_size 128"),
    ],
)
def test_a_configuration_that_contradicts_itself_is_refused_by_the_key(
    kind: str, key: str, value: object, told: str, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": kind, **CONFIGS[kind]}))
    find_model(str(file))
    file.write_text(json.dumps({"model_type": kind, **CONFIGS[kind], key: value}))
    with pytest.raises(ModelError) as raised:
        find_model(str(file))
    assert told in str(raised.value)
    assert str(file) in str(raised.value)


ESCAPE = "\x1b]0;owned\x07"
SHOWN = r"'\x1b]0;owned\x07'"


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("model_type", ESCAPE, f"model_type {SHOWN} is not known"),
        ("n_layer", ESCAPE, f"n_layer (a positive whole number, not {SHOWN})"),
        ("n_layer", 10**400, "n_layer of at most 2,048 (not (an integer of 1329 bits))"),
        ("n_layer", True, "n_layer (a positive whole number, not True)"),
        ("n_layer", float("nan"), "n_layer (a positive whole number, not nan)"),
        ("n_embd", "x" * 10**6, "n_embd (a positive whole number, not 'xxx"),
        ("use_cache", ESCAPE, f"use_cache (true or false, not {SHOWN})"),
        ("resid_pdrop", float("inf"), "resid_pdrop (a number from 0 to 1, not inf)"),
        ("resid_pdrop", float("nan"), "resid_pdrop (a number from 0 to 1, not nan)"),
        ("resid_pdrop", ESCAPE, f"resid_pdrop (a number from 0 to 1, not {SHOWN})"),
        ("activation_function", ESCAPE, f"activation_function {SHOWN} is not known"),
        ("activation_function", [[ESCAPE]], f"activation_function [[{SHOWN}]] is not known"),
    ],
)
def test_words_of_a_configuration_do_nothing_to_a_terminal(key: str, value: Any, told: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "gpt2", **CONFIGS["gpt2"], key: value}))
    with pytest.raises(ModelError) as raised:
        find_model(str(file))
    assert told in str(raised.value)
    assert str(file) in str(raised.value)
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize("name", [ESCAPE, f"/{ESCAPE}", "x" * 10**6], ids=["escapes", "path", "long"])
def test_a_name_in_a_configuration_does_nothing_to_a_terminal(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "gpt2", **CONFIGS["gpt2"], "_name_or_path": name}))
    assert main(["plan", "--model", str(file), "--gpus", "8", "--machine", "h200"]) == 0
    told = capsys.readouterr().out
    assert told.replace("\n", "").isprintable()
    assert max(map(len, told.split("\n"))) < 300


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b'{"model_type": "gpt2", "model_type": "llama"}', "a table has the key 'model_type' twice"),
        (b'{"model_type": "\xff"}', "is not UTF-8"),
        (b'{"model_type": ' + b"1" * 5000 + b"}", "not JSON: Exceeds the limit"),
        (b" " * 10_000_001, "it has more than 10,000,000 bytes"),
    ],
    ids=["twice", "no utf-8", "digits", "large"],
)
def test_a_configuration_that_is_no_json_is_named(content: bytes, told: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(ModelError, match=re.escape(told)) as raised:
        find_model(str(file))
    assert str(file) in str(raised.value)


def test_a_file_that_is_nested_without_end_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text("[" * 100_000)
    with pytest.raises(ModelError, match="nested too deep"):
        find_model(str(file))


def test_a_configuration_of_ours_with_too_many_layers_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "deep.toml"
    file.write_text("[model]\nlayers = 200000\n")
    with pytest.raises(ModelError, match=r"model\.layers 200,000: plans go up to 2,048 layers"):
        find_model(str(file))


def test_a_module_without_blocks_is_no_transformer() -> None:
    with torch.device("meta"):
        assert describe(GPT(ModelConfig(layers=0))) is None
        assert describe(GPT(ModelConfig(layers=1))) is not None


@pytest.mark.parametrize(
    ("values", "file", "name"),
    [
        ({"_name_or_path": "org/small-gpt"}, "gpt/config.json", "org/small-gpt"),
        ({"_name_or_path": "/models/small-gpt/"}, "gpt/config.json", "small-gpt"),
        ({"_name_or_path": ""}, "gpt/config.json", "gpt"),
        ({}, "gpt/config.json", "gpt"),
        ({}, "gpt/small.json", "small"),
    ],
)
def test_a_hugging_face_model_has_a_name(
    values: dict[str, Any], file: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gpt").mkdir()
    (tmp_path / file).write_text(json.dumps({"model_type": "gpt2", **CONFIGS["gpt2"], **values}))
    subject = find_model(str(tmp_path / file))
    assert subject.transformer is not None
    assert subject.name == subject.transformer.name == name
    monkeypatch.chdir(tmp_path / "gpt")
    assert find_model(Path(file).name).name == name


def test_every_known_type_is_tested() -> None:
    assert set(HUGGINGFACE) == {*CONFIGS, "qwen"}


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("zero-8c", "did you mean 'zero-8b'?"),
        ("nowhere/config.json", "No such file"),
        (":build", "must be module:factory"),
        ("no_such_module:build", "cannot be imported: ModuleNotFoundError"),
        ("tests.models:nett", "has no 'nett' (did you mean 'net'?)"),
        ("tests.models:__name__", "is no function"),
    ],
)
def test_an_error_names_what_is_no_model(source: str, told: str) -> None:
    with pytest.raises(ModelError) as raised:
        find_model(source)
    assert told in str(raised.value)


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"factories_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "from zeroshard.train.gpt import GPT, ModelConfig\n"
        "def gpt(): return GPT(ModelConfig(layers=2, hidden=64, heads=2, sequence=32))\n"
        "def images(batch): return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()), (torch.empty(batch, 3, 8, 8),)\n"
        "class Peeks(nn.Linear):\n"
        "    def forward(self, x): return super().forward(x) if x.sum() > 0 else x\n"
        "def peeks(): return Peeks(4, 4), (torch.empty(2, 4),)\n"
        "def fails(): raise RuntimeError('out of luck')\n"
        "def number(): return 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


@pytest.mark.parametrize("function", ["gpt", "images"])
def test_any_module_is_planned_from_the_function_that_builds_it(function: str, factories: str) -> None:
    subject = find_model(f"{factories}:{function}")
    small, large = (subject.model(Setup(stage=0, batch=batch, sequence=32)) for batch in (2, 4))
    assert small.parameters == large.parameters > 0
    assert small.activations.saved < large.activations.saved  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("function", "told"),
    [
        ("peeks", "tracing Peeks on the meta device failed"),
        ("fails", "building it on the meta device failed: RuntimeError: out of luck"),
        ("number", "must return an nn.Module"),
    ],
)
def test_a_module_that_cannot_be_traced_is_named(function: str, told: str, factories: str) -> None:
    with pytest.raises(ModelError) as raised:
        find_model(f"{factories}:{function}").model(Setup(stage=0, sequence=32))
    assert told in str(raised.value)
