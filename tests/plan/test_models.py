"""Models of a plan: presets, Hugging Face configurations, modules; and the errors for bad models."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from zeroshard.cli.main import main
from zeroshard.plan.model.source import find_model
from zeroshard.plan.setup import ModelError, Setup

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
SETUP = Setup(stage=0, sequence=32)
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
    model = find_model(str(tmp_path / "config.json")).model
    assert model.parameters == expected
    assert model.trace(SETUP).parameters == expected
    folder = find_model(str(tmp_path)).model
    assert (folder.name, folder.parameters) == (model.name, expected)


def test_presets_say_how_they_are_trained() -> None:
    subject = find_model("zero-8b")
    assert subject.config is not None
    assert (subject.config.layers, subject.config.hidden, subject.checkpointing) == (72, 3072, True)
    assert subject.sequence == 1024
    assert subject.longest is None, "a preset has as many positions as its sequence has tokens"


@pytest.mark.parametrize(
    ("values", "longest", "sequence"),
    [
        ({"model_type": "gpt2", "n_positions": 64}, 64, 64),
        ({"model_type": "llama", "max_position_embeddings": 8192}, 8192, 1024),
        ({"model_type": "bloom"}, None, 1024),
    ],
)
def test_a_configuration_says_how_long_a_sequence_may_be(
    values: dict[str, Any], longest: int | None, sequence: int, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(values))
    subject = find_model(str(file))
    assert (subject.longest, subject.sequence, subject.model.sequence) == (longest, sequence, sequence)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("not json", "not JSON"),
        ("[]", "no 'model_type'"),
        ('{"model_type": "lama"}', "model_type 'lama' cannot be read by transformers"),
        ('{"model_type": "lama"}', "module:factory"),
        ('{"model_type": "gpt2", "n_layer": 3, "n_embd": 64, "n_head": 0}', "building it on the meta device failed"),
        (
            '{"model_type": "gpt2", "n_layer": 3, "n_embd": 65, "n_head": 4, "vocab_size": 9, "n_positions": 9}',
            "`embed_dim` must be divisible by num_heads",
        ),
    ],
)
def test_an_unusable_configuration_is_named_with_what_it_lacks(text: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ModelError) as raised:
        find_model(str(file)).model.trace(SETUP)
    assert told in str(raised.value)
    assert str(file) in str(raised.value)


@pytest.mark.parametrize(
    ("kind", "key", "value", "told"),
    [
        ("llama", "num_key_value_heads", 3, "heads"),
        ("llama", "num_key_value_heads", 8, "heads"),
        ("llama", "max_position_embeddings", "2048", "field 'max_position_embeddings'"),
        ("llama", "tie_word_embeddings", "false", "field 'tie_word_embeddings'"),
        ("llama", "num_hidden_layers", 200_000, "num_hidden_layers must be at most 2,048, not 200,000"),
        ("llama", "vocab_size", 1 << 40, "vocab_size must be at most"),
        ("llama", "hidden_size", 1 << 31, "Storage size calculation overflowed"),
        ("llama", "rope_scaling", {"rope_type": "yarnn"}, "'yarnn'"),
        ("llama", "layer_types", ["all"] * 3, "validate_layer_type"),
        ("gpt2", "n_layer", 200_000, "n_layer must be at most 2,048"),
        ("gpt2", "activation_function", "gelu_nw", "'gelu_nw'"),
        ("gpt2", "resid_pdrop", "0.1", "field 'resid_pdrop'"),
        ("gpt2", "use_cache", 1, "field 'use_cache'"),
        ("gpt2", "architectures", ["BertModel"], "'GPT2Config' object has no attribute"),
        ("gpt2", "architectures", 3, "'int' object is not iterable"),
    ],
)
def test_a_configuration_that_contradicts_itself_is_refused_by_the_key(
    kind: str, key: str, value: object, told: str, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": kind, **CONFIGS[kind]}))
    find_model(str(file)).model.trace(SETUP)
    file.write_text(json.dumps({"model_type": kind, **CONFIGS[kind], key: value}))
    with pytest.raises(ModelError) as raised:
        find_model(str(file)).model.trace(SETUP)
    assert told in str(raised.value)
    assert str(file) in str(raised.value)


ESCAPE = "\x1b]0;owned\x07"
SHOWN = r"'\x1b]0;owned\x07'"


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("model_type", ESCAPE, f"model_type {SHOWN} cannot be read"),
        ("n_layer", ESCAPE, "field 'n_layer'"),
        ("n_layer", 10**400, "n_layer must be at most 2,048, not (an integer of 1329 bits)"),
        ("n_layer", True, "field 'n_layer'"),
        ("n_layer", float("nan"), "field 'n_layer'"),
        ("n_embd", "x" * 10**6, "field 'n_embd'"),
        ("use_cache", ESCAPE, "field 'use_cache'"),
        ("resid_pdrop", float("inf"), "dropout probability has to be between 0 and 1, but got inf"),
        ("resid_pdrop", float("nan"), "dropout probability has to be between 0 and 1, but got nan"),
        ("resid_pdrop", ESCAPE, "field 'resid_pdrop'"),
        ("activation_function", ESCAPE, SHOWN),
        ("activation_function", [[ESCAPE]], "field 'activation_function'"),
        (ESCAPE, 10**12, f"{SHOWN} must be at most"),
    ],
)
def test_words_of_a_configuration_do_nothing_to_a_terminal(key: str, value: Any, told: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "gpt2", **CONFIGS["gpt2"], key: value}))
    with pytest.raises(ModelError) as raised:
        find_model(str(file)).model.trace(SETUP)
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


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("quantization_config", {"quant_method": "bitsandbytes"}),
        ("auto_map", {"AutoConfig": "somewhere--code.Config"}),
        ("architectures", ["NobodysModel"]),
        ("architectures", ["GPT2LMHeadModel"]),
        ("not_known", "to transformers"),
    ],
)
def test_words_that_say_nothing_about_training_change_nothing(key: str, value: object, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "gpt2", **CONFIGS["gpt2"]}))
    expected = find_model(str(file)).model.parameters
    file.write_text(json.dumps({"model_type": "gpt2", **CONFIGS["gpt2"], key: value}))
    assert find_model(str(file)).model.parameters == expected


def test_without_transformers_an_error_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "gpt2", **CONFIGS["gpt2"]}))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError, match=r'pip install "transformers') as raised:
        find_model(str(file))
    assert str(file) in str(raised.value)


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
    assert subject.name == subject.model.name == name
    monkeypatch.chdir(tmp_path / "gpt")
    assert find_model(Path(file).name).name == name


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("zero-8c", "did you mean 'zero-8b'?"),
        ("nowhere/config.json", "No such file"),
        ("models/llama", "there is no such folder, and plan downloads nothing"),
        (":build", "must be module:factory"),
        ("tests/models.py:net", "must name a module, not a file; write tests.models:net"),
        ("/a/models.py:net", "write models:net, with PYTHONPATH=/a"),
        ("no_such_module:build", "cannot be imported: ModuleNotFoundError"),
        ("tests.models:nett", "has no 'nett' (did you mean 'net'?)"),
        ("tests.models:__name__", "is no function"),
    ],
)
def test_an_error_names_what_is_no_model(source: str, told: str) -> None:
    with pytest.raises(ModelError) as raised:
        find_model(source)
    assert told in str(raised.value)


def test_a_module_that_is_a_program_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"program_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text("raise SystemExit(2)")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModelError, match="runs a program, which ended with exit code 2; put the model into a module"):
        find_model(f"{name}:Net")


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"factories_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "from zeroshard.config.job import ModelConfig\n"
        "from zeroshard.train.gpt import GPT\n"
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
    small, large = (subject.model.trace(replace(SETUP, batch=batch, checkpointing=False)) for batch in (2, 4))
    assert small.parameters == large.parameters > 0
    assert small.activations.saved < large.activations.saved


@pytest.mark.parametrize(
    ("function", "told"),
    [
        ("peeks", ":peeks: tracing it on the meta device failed"),
        ("fails", "building it on the meta device failed: RuntimeError: out of luck"),
        ("number", "must return an nn.Module"),
    ],
)
def test_a_module_that_cannot_be_traced_is_named(function: str, told: str, factories: str) -> None:
    with pytest.raises(ModelError) as raised:
        find_model(f"{factories}:{function}").model.trace(SETUP)
    assert told in str(raised.value)
