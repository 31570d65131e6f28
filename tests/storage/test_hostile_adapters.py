"""`zeroshard export` of LoRA adapters that somebody edited: an error of one line, or weights that are right."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import zeroshard
from tests.storage.forging import forge, forge_entries, index_of
from zeroshard.cli.main import main

ESCAPE = "\x1b]0;owned\x07"
SHOWN = r"'\x1b]0;owned\x07'"
FOREVER = "(a|a)*" * 20 + "b"
"""A regular expression that never ends on a name of some length."""


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.last = nn.Linear(6, 2)
        self.register_buffer("mask", torch.full((2,), -torch.inf))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x)))  # type: ignore[no-any-return]


def adapted(**options: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(2)
    modules = {"target_modules": ["first", "second"], "modules_to_save": ["last"]}
    return get_peft_model(Layers(), LoraConfig(r=3, lora_alpha=6, init_lora_weights=False, **modules, **options))


def save(folder: Path, model: Any) -> None:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer = zeroshard.shard(model, torch.optim.SGD(trained, lr=0.1))
    zeroshard.save(folder, model, optimizer)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save(tmp_path / "saved", adapted())
    return tmp_path / "saved"


def adapters_of(index: Any) -> Any:
    return index["parts"][0]["values"]["about"]["adapters"]


def change_adapter(folder: Path, **values: Any) -> None:
    forge(folder, lambda index: adapters_of(index)["default"].update(values))


def refused(saved: Path, capsys: pytest.CaptureFixture[str], told: str, *options: str) -> None:
    """The command fails with one line, and leaves nothing behind."""
    out = saved.parent / "out"
    assert main(["export", str(saved), str(out), *(options or ["--merge"])]) in (1, 2)
    error = capsys.readouterr().err
    assert told in error
    assert error.endswith("\n")
    assert error[:-1].isprintable()
    assert len(error) < 1000
    assert not out.exists()


def merged(saved: Path) -> dict[str, Tensor]:
    out = saved.parent / "out"
    assert main(["export", str(saved), str(out), "--merge"]) == 0
    return load_file(out / "model.safetensors")


NOT_ALPHA = ", not a number of at most 1e+09"
NOT_RANK = ", not a whole number, from 1 to below 2147483648"

CONFIGURATIONS: list[tuple[dict[str, Any], str]] = [
    ({"lora_alpha": {"$": "float", "value": "nan"}}, f"lora_alpha = nan{NOT_ALPHA}"),
    ({"lora_alpha": {"$": "float", "value": "inf"}}, f"lora_alpha = inf{NOT_ALPHA}"),
    ({"lora_alpha": float("nan")}, f"lora_alpha = nan{NOT_ALPHA}"),
    ({"lora_alpha": 10**400}, f"lora_alpha = (an integer of 1329 bits){NOT_ALPHA}"),
    ({"lora_alpha": 1e308}, f"lora_alpha = 1e+308{NOT_ALPHA}"),
    ({"lora_alpha": -1e308}, f"lora_alpha = -1e+308{NOT_ALPHA}"),
    ({"lora_alpha": True}, f"lora_alpha = True{NOT_ALPHA}"),
    ({"lora_alpha": ESCAPE}, f"lora_alpha = {SHOWN}{NOT_ALPHA}"),
    ({"alpha_pattern": {"first": 10**400}}, f"alpha_pattern['first'] = (an integer of 1329 bits){NOT_ALPHA}"),
    ({"alpha_pattern": {ESCAPE: "x"}}, f"alpha_pattern[{SHOWN}] = 'x'{NOT_ALPHA}"),
    ({"alpha_pattern": [ESCAPE]}, f"alpha_pattern = [{SHOWN}], not a table"),
    ({"r": 0}, f"r = 0{NOT_RANK}"),
    ({"r": -3}, f"r = -3{NOT_RANK}"),
    ({"r": True}, f"r = True{NOT_RANK}"),
    ({"r": 3.5}, f"r = 3.5{NOT_RANK}"),
    ({"r": 1 << 63}, f"r = {1 << 63}{NOT_RANK}"),
    ({"r": 10**400}, f"r = (an integer of 1329 bits){NOT_RANK}"),
    ({"rank_pattern": {"first": 0}}, f"rank_pattern['first'] = 0{NOT_RANK}"),
    ({"rank_pattern": ESCAPE}, f"rank_pattern = {SHOWN}, not a table"),
    ({"use_rslora": "false"}, "use_rslora = 'false', not true or false"),
    ({"fan_in_fan_out": ESCAPE}, f"fan_in_fan_out = {SHOWN}, not true or false"),
    ({"peft_type": ESCAPE}, f"adapter 'default' is {SHOWN}, and only LoRA is exported"),
]


@pytest.mark.parametrize(("values", "told"), CONFIGURATIONS, ids=lambda value: ascii(value)[:60])
def test_a_value_that_makes_no_sense_is_refused(
    values: dict[str, Any], told: str, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change_adapter(saved, **values)
    refused(saved, capsys, told)
    refused(saved, capsys, told, "--adapter-only")


# -- patterns ---------------------------------------------------------------------------------------------------------


def test_a_regular_expression_that_never_ends_is_not_run(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forge_entries(saved, lambda entry: entry | {"name": entry["name"].replace(".first.", f".{'a' * 60}.")})
    change_adapter(saved, rank_pattern={FOREVER: 5})
    merged(saved)
    change_adapter(saved, alpha_pattern={FOREVER: 5})
    (saved.parent / "out").rename(saved.parent / "before")
    refused(saved, capsys, "in alpha_pattern, a regular expression, and none is run here; write the names of modules")


@pytest.mark.parametrize("key", ["target_modules", "exclude_modules", "layers_pattern"])
def test_patterns_that_an_export_does_not_need_are_not_run(key: str, saved: Path) -> None:
    change_adapter(saved, **{key: FOREVER})
    merged(saved)


@pytest.mark.parametrize(
    "key", ["first", "^first", "^first$", "block.first", "irst", "^irst", "first.", "second", r"block\.first", "^block"]
)
@pytest.mark.parametrize("module", ["first", "block.first"])
@pytest.mark.filterwarnings("ignore:The following alpha_pattern keys did not match")
def test_a_pattern_of_names_means_what_it_means_to_peft(key: str, module: str, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    def build() -> Any:
        torch.manual_seed(2)
        layers = Layers() if module == "first" else nn.ModuleDict({"block": Layers()})
        options: dict[str, Any] = {"target_modules": ["first"], "alpha_pattern": {key: 11}}
        return get_peft_model(layers, LoraConfig(r=2, lora_alpha=6, init_lora_weights=False, **options))

    save(tmp_path / "saved", build())
    expected = build().merge_and_unload().state_dict()[f"{module}.weight"]
    torch.testing.assert_close(merged(tmp_path / "saved")[f"{module}.weight"], expected)


# -- tensors ----------------------------------------------------------------------------------------------------------

BASE = "base_model.model."


def renamed(before: str, after: str) -> Callable[[Any], Any]:
    return lambda entry: entry | {"name": after} if entry["name"] == before else entry


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (
            f"{BASE}mask",
            f"{BASE}first.weight",
            "'base_model.model.first.base_layer.weight' and 'base_model.model.first.weight' would both be written as "
            "'first.weight'",
        ),
        (f"{BASE}mask", "first.weight", "would both be written as 'first.weight'"),
        (f"{BASE}mask", f"{BASE}__metadata__", "no tensor of the name '__metadata__'"),
        (f"{BASE}mask", BASE, "no tensor of the name ''"),
        (f"{BASE}mask", "\ud800", r"no tensor of the name '\ud800'"),
        (f"{BASE}first.lora_B.default.weight", "other", "without 'base_model.model.first.lora_B.default.weight'"),
        (f"{BASE}first.lora_A.default.weight", "other", "without 'base_model.model.first.lora_A.default.weight'"),
        (f"{BASE}first.base_layer.weight", "other", "'base_model.model.first.lora_A.default.weight' belongs to no"),
        (
            f"{BASE}mask",
            f"{BASE}first.lora_A.{ESCAPE}.weight",
            r"lora_A.\x1b]0;owned\x07.weight' belongs to no adapter",
        ),
        (f"{BASE}mask", f"{BASE}first.lora_diag.default", "lora_diag.default' belongs to no adapter"),
        (f"{BASE}mask", f"{BASE}x.token_adapter.base_layer", "makes this more than plain LoRA"),
    ],
)
def test_tensors_that_would_be_lost_or_written_over_are_named(
    before: str, after: str, told: str, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forge_entries(saved, renamed(before, after))
    refused(saved, capsys, told)


def test_a_name_that_is_of_a_parameter_and_of_a_buffer_is_refused(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forge_entries(saved, renamed(f"{BASE}mask", f"{BASE}last.original_module.bias"))
    refused(saved, capsys, "would both be written as 'last.bias'")
    forge(saved, lambda index: index["parts"][0]["values"]["about"].pop("adapters") and None)
    told = "'base_model.model.last.original_module.bias' and 'base_model.model.last.original_module.bias' would both"
    refused(saved, capsys, told, "--shard-size=1")


@pytest.mark.parametrize(
    ("name", "shape", "told"),
    [
        ("first.lora_A.default.weight", [2, 9], "has rank 2, and 'base_model.model.first.lora_B.default.weight' has"),
        ("first.lora_A.default.weight", [18], "is no matrix, as of a convolution; merge it with PEFT"),
        ("first.lora_A.default.weight", [3, 6, 1, 1], "is no matrix, as of a convolution; merge it with PEFT"),
        ("first.base_layer.weight", [9, 4], "changes a tensor of shape [6, 6], and"),
        ("first.base_layer.weight", [1, 36], "changes a tensor of shape [6, 6], and"),
        ("last.modules_to_save.default.weight", [3, 4], "changes a tensor of shape [3, 4], and"),
    ],
)
def test_shapes_that_do_not_fit_together_are_named(
    name: str, shape: list[int], told: str, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forge_entries(saved, lambda entry: entry | {"shape": shape} if entry["name"] == BASE + name else entry)
    refused(saved, capsys, told)


def test_a_rank_that_no_matrix_has_is_refused(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change_adapter(saved, r=4, rank_pattern={"second": 5})
    refused(saved, capsys, "has matrices of rank 3 for 'base_model.model.first', and its configuration has r = [4, 5]")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "name",
    [
        "first.base_layer.weight",
        "second.lora_A.default.weight",
        "second.lora_B.default.weight",
        "last.modules_to_save.default.bias",
    ],
)
def test_values_that_are_not_finite_are_not_merged(
    name: str, value: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = adapted()
    with torch.no_grad():
        model.get_parameter(BASE + name).view(-1)[1] = value
    save(tmp_path / "saved", model)
    refused(tmp_path / "saved", capsys, f"'{BASE}{name}' has values that are NaN or infinite")


def test_weights_that_a_dtype_cannot_hold_are_not_merged(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change_adapter(saved, lora_alpha=1e9)
    told = "first.base_layer.weight' and its adapters add up to values that are infinite in torch.float16"
    refused(saved, capsys, told, "--merge", "--dtype", "fp16")


def test_an_infinite_mask_is_no_parameter_and_is_merged(saved: Path) -> None:
    assert merged(saved)["mask"].tolist() == [-torch.inf] * 2


# -- names of adapters ------------------------------------------------------------------------------------------------


def test_the_names_of_adapters_do_nothing_to_a_terminal(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forge(saved, lambda index: adapters_of(index).update({ESCAPE: adapters_of(index).pop("default")}))
    refused(saved, capsys, f"there is no adapter 'default'; there are [{SHOWN}]", "--adapter-only")
    refused(saved, capsys, f"there is no adapter 'x\\x1b'; there are [{SHOWN}]", "--adapter-only", "--adapter=x\x1b")
    assert main(["export", str(saved), str(saved.parent / "out")]) == 1
    assert f"holds adapters ([{SHOWN}]) on a base model" in capsys.readouterr().err
    refused(saved, capsys, "has no tensor of what is to be exported", "--adapter-only", f"--adapter={ESCAPE}")


def test_more_adapters_than_anybody_has_are_refused(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = adapters_of(index_of(saved))["default"]
    forge(saved, lambda index: adapters_of(index).update({f"n{number}": one for number in range(300)}))
    refused(saved, capsys, "there are 301 adapters; at most 256 are exported")


@pytest.mark.parametrize("dtype", ["int8", "complex64", "float8_e4m3fn", "quint8", "nonsense", ESCAPE])
def test_a_dtype_that_no_parameter_has_is_refused(dtype: str, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forge(saved, lambda index: index["parts"][0]["values"]["about"].update(parameter_dtype=dtype))
    refused(saved, capsys, "about.parameter_dtype is ")


def test_what_is_exported_is_json_that_everybody_reads(saved: Path) -> None:
    out = saved.parent / "out"
    assert main(["export", str(saved), str(out), "--adapter-only"]) == 0
    json.loads((out / "adapter_config.json").read_text(), parse_constant=pytest.fail)
