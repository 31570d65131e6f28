"""`zeroshard export`: what transformers and PEFT load is the model that was trained."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zeroshard
from tests.huggingface import VOCABULARY, causal, gpt2, llama, mixtral
from tests.ranks import Pool
from tests.training import adamw
from zeroshard.cli.main import main
from zeroshard.storage import export as exporting
from zeroshard.storage import output as outputs
from zeroshard.storage.adapter import Adapter
from zeroshard.storage.export import adapter_tensors
from zeroshard.storage.output import Output, WholeTensor
from zeroshard.system import machine

MODELS: dict[str, Any] = {"llama": llama, "gpt2": gpt2, "mixtral": mixtral}
TOKENS = torch.arange(3, 3 + 2 * 9).reshape(2, 9) % VOCABULARY


def with_adapters(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    names = {module.rsplit(".", 1)[-1] for module, _ in model.named_modules()}
    targets = ["c_attn"] if "c_attn" in names else ["q_proj", "v_proj"]
    config = LoraConfig(
        r=4,
        lora_alpha=6,
        use_rslora=True,
        target_modules=[*targets, *({"embed_tokens"} & names)],  # GPT-2's is tied to its head
        modules_to_save=["ln_f" if "ln_f" in names else "norm"],
        rank_pattern={targets[0]: 3},
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config).train()


def build(name: str, adapters: bool) -> Any:
    torch.manual_seed(4)
    model = MODELS[name]()
    return with_adapters(model) if adapters else model


def train_and_save(folder: str, name: str, adapters: bool, options: dict[str, Any]) -> Tensor:
    model = build(name, adapters)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer = zeroshard.shard(model, adamw(trained), **options)
    for step in range(2):
        model(**causal(step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    zeroshard.save(folder, model, optimizer)
    model.eval()
    with torch.no_grad():
        logits: Tensor = model(input_ids=TOKENS).logits
    return logits


def logits_of(folder: Path, **options: Any) -> Tensor:
    from transformers import AutoModelForCausalLM

    machine.ensure_bf16_matmul()
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    assert not report["missing_keys"], report
    assert not report["unexpected_keys"], report
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks have it
    try:
        with torch.no_grad():
            logits: Tensor = model.eval()(input_ids=TOKENS).logits
    finally:
        torch.set_num_threads(threads)
    return logits


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"stage": 3, "precision": "bf16"}),
        ("gpt2", {"stage": 2, "precision": "bf16", "offload": "cpu"}),
        ("mixtral", {"stage": 3}),
    ],
)
def test_transformers_loads_what_was_exported_with_equal_logits(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    saved, out = tmp_path / "saved", tmp_path / "out"
    arguments = {"folder": str(saved), "name": name, "adapters": False, "options": options}
    expected = Pool.shared().run(train_and_save, 2, arguments)[0]
    assert main(["export", str(saved), str(out), "--shard-size", "0.00003"]) == 0
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    dtype = torch.bfloat16 if "precision" in options else torch.float32
    assert json.loads((out / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    found = logits_of(out)
    assert found.dtype is dtype
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_adapters_are_exported_alone_and_merged(name: str, tmp_path: Path) -> None:
    from peft import PeftModel

    saved, merged, alone = tmp_path / "saved", tmp_path / "merged", tmp_path / "alone"
    arguments = {"folder": str(saved), "name": name, "adapters": True, "options": {"stage": 3}}
    expected = Pool.shared().run(train_and_save, 2, arguments)[0]
    assert main(["export", str(saved), str(alone), "--adapter-only"]) == 0
    adapted = PeftModel.from_pretrained(MODELS[name]().requires_grad_(False), alone)
    whole = build(name, True)
    trained = {key for key, parameter in whole.named_parameters() if parameter.requires_grad}
    assert {key for key, _ in adapted.named_parameters() if ".lora_" in key or ".modules_to_save." in key} == trained
    base = {key: value for key, value in whole.state_dict().items() if key not in trained}
    incompatible = adapted.load_state_dict(base, strict=False)
    assert set(incompatible.missing_keys) == trained
    torch.set_num_threads(1)
    with torch.no_grad():
        assert torch.equal(adapted.eval()(input_ids=TOKENS).logits, expected)
    assert main(["export", str(saved), str(merged), "--merge"]) == 0
    torch.testing.assert_close(logits_of(merged), expected, rtol=1e-5, atol=1e-5)
    by_peft = adapted.merge_and_unload()
    with torch.no_grad():
        torch.testing.assert_close(logits_of(merged), by_peft.eval()(input_ids=TOKENS).logits, rtol=1e-6, atol=1e-6)


def test_adapters_are_not_exported_by_accident(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "saved"
    arguments = {"folder": str(saved), "name": "llama", "adapters": True, "options": {"stage": 3}}
    Pool.shared().run(train_and_save, 1, arguments)
    assert main(["export", str(saved), str(tmp_path / "out")]) == 1
    assert "export with --merge, or with --adapter-only" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "nothing"), str(tmp_path / "out")]) == 1
    assert "holds no complete checkpoint" in capsys.readouterr().err


class Named:
    """A checkpoint of which only names matter."""

    def __init__(self, *names: str) -> None:
        self.names, self.lacking = list(names), list[str]()

    def recipe(self, name: str, new_name: str) -> exporting.Recipe:
        return exporting.Recipe(WholeTensor(new_name, (1,), torch.float32), lambda: torch.zeros(1), name)


@pytest.mark.parametrize("adapter", ["a", "model", "q_proj", "lora_A"])
def test_an_adapter_is_found_by_its_own_place_in_names_whatever_it_is_called(adapter: str) -> None:
    base = "base_model.model.model.q_proj"
    mine = [f"{base}.lora_A.{adapter}.weight", f"{base}.lora_embedding_A.{adapter}"]
    mine += [f"base_model.model.head.modules_to_save.{adapter}.weight"]
    others = [f"{base}.lora_A.b{adapter}.weight", f"{base}.lora_A.{adapter}b.weight", f"{base}.lora_embedding_A.ab"]
    others += [f"base_model.model.head.modules_to_save.{adapter}b.weight", f"{base}.base_layer.weight"]
    found = [recipe.whole.name for recipe in adapter_tensors(Named(*mine, *others), Adapter(adapter, {}))]
    assert found == [f"{base}.lora_A.weight", f"{base}.lora_embedding_A", "base_model.model.head.weight"]


def saved_model(folder: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model, optimizer = zeroshard.shard(model, adamw(list(model.parameters())))
    zeroshard.save(folder, model, optimizer)


def names_in(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_a_folder_never_gets_a_second_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, out = tmp_path / "saved", tmp_path / "out"
    saved_model(saved)
    assert main(["export", str(saved), str(out)]) == 0
    before = (out / "model.safetensors").read_bytes()
    assert main(["export", str(saved), str(out), "--shard-size", "0.00000002"]) == 1
    assert "out has a model already (model.safetensors); export to another folder" in capsys.readouterr().err
    assert names_in(out) == ["model.safetensors"]
    assert (out / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("moment", ["first tensor", "last tensor", "flush", "rename", "index"])
def test_an_export_to_a_full_disk_leaves_nothing_and_says_what_to_do(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, out, config = tmp_path / "saved", tmp_path / "out", tmp_path / "given.json"
    saved_model(saved)
    config.write_text("{}")
    out.mkdir()
    (out / "notes.txt").write_text("precious")
    (out / "config.json").write_text("theirs")
    calls: list[object] = []

    def full_at(count: int, real: Any) -> Any:
        def called(*arguments: Any, **options: Any) -> Any:
            calls.append(arguments)
            if len(calls) == count:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*arguments, **options)

        return called

    with monkeypatch.context() as patch:
        if moment in ("first tensor", "last tensor"):
            patch.setattr(outputs, "bytes_of", full_at(1 if moment == "first tensor" else 4, outputs.bytes_of))
        elif moment == "index":  # configuration, four files, index
            patch.setattr(Path, "write_bytes", full_at(6, Path.write_bytes))
        else:
            name = {"flush": "fsync", "rename": "replace"}[moment]
            patch.setattr(os, name, full_at(3, getattr(os, name)))
        command = ["export", str(saved), str(out), "--shard-size", "0.00000002", "--config", str(config)]
        assert main(command) == 1
    error = capsys.readouterr().err
    assert re.search(
        r"out was not written: .*No space left on device; .* [KMG]B are free there now; make room", error
    ), error
    assert names_in(out) == ["config.json", "notes.txt"]
    assert (out / "config.json").read_text() == ("{}" if moment == "rename" else "theirs")
    assert main(command) == 0
    assert len(list(out.glob("model-*-of-00004.safetensors"))) == 4
    assert len(names_in(out)) == 7


def test_a_folder_that_an_export_made_goes_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_model(tmp_path / "saved")

    def interrupted(_: object) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(outputs, "bytes_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        exporting.export(tmp_path / "saved", tmp_path / "out")
    assert names_in(tmp_path) == ["saved"]


def test_a_configuration_that_is_not_there_is_missed_before_anything_is_written(tmp_path: Path) -> None:
    saved_model(tmp_path / "saved")
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "out"), "--config", str(tmp_path / "none")]) == 1
    assert not (tmp_path / "out").exists()


KILLED = """
import os, sys
from pathlib import Path
from zeroshard.storage import export, output

def stops(*_):
    print("writing", flush=True)
    sys.stdin.read()

output.bytes_of = stops
export.export(Path(sys.argv[1]), Path(sys.argv[2]), config=Path(sys.argv[3]))
"""


@pytest.mark.slow
def test_what_a_killed_export_left_goes_and_what_another_one_writes_stays(tmp_path: Path) -> None:
    saved, out, config = tmp_path / "saved", tmp_path / "out", tmp_path / "given.json"
    saved_model(saved)
    config.write_text("{}")
    out.mkdir()
    (out / ".theirs.0123456789abcdef.tmp").touch()
    command = [sys.executable, "-c", KILLED, str(saved), str(out), str(config)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"writing\n"
            during = names_in(out)
            assert {name.split(".")[1] for name in during} == {"theirs", "zeroshard"}
            with Output(out) as output:
                output.new("notes.txt", b"mine")
            assert names_in(out) == [*during, "notes.txt"]
        finally:
            process.kill()
    assert names_in(out) == [*during, "notes.txt"]
    assert exporting.export(saved, out)
    assert names_in(out) == [".theirs.0123456789abcdef.tmp", "model.safetensors", "notes.txt"]


def test_two_that_write_to_one_folder_at_once_share_no_file(tmp_path: Path) -> None:
    with Output(tmp_path) as first:
        one = first.new("config.json", b"first")
        with Output(tmp_path) as second:
            assert second.new("config.json", b"second") != one
        assert (tmp_path / "config.json").read_text() == "second"
    assert (tmp_path / "config.json").read_text() == "first"
    assert names_in(tmp_path) == ["config.json"]


@pytest.mark.parametrize("size", ["inf", "nan", "0", "-1"])
def test_the_size_of_a_shard_is_checked(size: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path), str(tmp_path / "out"), f"--shard-size={size}"]) == 2
    assert "--shard-size must be above 0, and finite" in capsys.readouterr().err
