"""`zeroshard finetune` as a user runs it, with a tiny Llama and tokenizer that the test makes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.train.language.chats import chats, make_model, text, write_lines
from zeroshard.cli.main import main
from zeroshard.config.job import load_job
from zeroshard.train.loop import train
from zeroshard.train.stopping import command_title

ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
SMALL = ["--device", "cpu", "--sequence", "32", "--tokens-per-step", "160", "--set", "train.report_every=2"]
TIMEOUT = 180


class Made:
    """A model and data."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = str(make_model(folder / "llama"))
        self.chats = str(write_lines(folder / "chats.jsonl", chats(80)))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("made"))


def finetune(*arguments: str) -> str:
    command = [sys.executable, "-m", "zeroshard", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False, env=ONE_THREAD)
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"step \d+/\d+ · loss ([\d.]+)", output)]


def held_out(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"held-out loss ([\d.]+) (?:before|after)", output)]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A world of one rank in this process."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)


CONFIGURATION = """
[model]
huggingface = "{model}"

[data]
files = ["{data}"]
sequence = 32
held_out = 0.1

[train]
steps = 6
tokens_per_step = 160
lr = 1e-2
device = "cpu"
sample = 4

[shard]
stage = "auto"
offload = "auto"
clip_grad_norm = 1.0
"""


@pytest.mark.usefixtures("alone")
def test_a_job_on_one_rank_plans_learns_and_ends_with_a_folder_that_transformers_loads(
    made: Made, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import transformers

    file = tmp_path / "finetune.toml"
    file.write_text(CONFIGURATION.format(model=made.model, data=made.chats))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "tokens-0123456789abcdef.safetensors").write_text("of earlier data")
    train(load_job(str(file)), tmp_path)
    (stored,) = (tmp_path / "cache").iterdir()
    assert stored.stat().st_size > 1000
    shown = capfd.readouterr().out
    order = ["llama: 0.04M parameters", "plan: stage", "micro-batch: 5 × 32 tokens", "held-out loss", "before training"]
    order += ["step 1/6", "step 6/6", "a sample after training", "per rank", "import transformers", "from_pretrained("]
    assert all(part in shown for part in order), shown
    places = [shown.index(part) for part in order]
    assert places == sorted(places), shown
    before, after = held_out(shown)
    assert after < before - 0.5
    measured, planned = re.findall(r"optimizer states, MB +│ +([\d.]+) +│ +([\d.]+)", shown)[0]
    assert measured == planned
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "red cat"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert model.generate(**prompt, max_new_tokens=3).shape[1] > prompt["input_ids"].shape[1]


@pytest.mark.parametrize("lora", [[], ["--lora", "4"]])
def test_a_dry_run_says_what_would_run_and_starts_nothing(
    lora: list[str], made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    arguments = ["finetune", made.model, made.chats, *SMALL, *lora, "--dry-run", "--ranks", "2", "--out", str(out)]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert re.search(r"data: \d+ document\(s\) to train on, \d+ held out, [\d,]+ tokens in \d+ sequences of 32", shown)
    assert f"steps of 5 × 32 tokens, lr {'0.0002' if lora else '2e-05'}" in shown
    assert max(len(line) for line in shown.splitlines()) <= 100
    flowing = " ".join(shown.split())
    assert "plan: stage 0, offload none chosen" in flowing
    assert "and the activations of one micro-batch." in flowing
    assert "micro-batch: 3 × 32 tokens, 1 a step, 0 of 2 blocks recomputed" in shown
    assert shown.endswith("a dry run: nothing was started\n")
    assert "warning" not in shown
    assert not out.exists()


def test_data_that_fill_less_than_a_step_are_told_with_a_size_of_step_that_makes_several(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "finetune",
        made.model,
        made.chats,
        *SMALL,
        "--dry-run",
        "--ranks",
        "1",
        "--out",
        str(tmp_path / "run"),
    ]
    assert main([*arguments, "--tokens-per-step", "3200"]) == 0
    shown = capsys.readouterr().out
    found = re.search(r"the data fill less than one step \(([\d,]+) of 3,200 tokens\),", shown)
    assert found is not None
    assert "\n1 step of 100 × 32 tokens" in shown
    better = re.search(r"so all epochs together make 1 step; take --tokens-per-step (\d+)\n", shown)
    assert better is not None
    assert main([*arguments, "--tokens-per-step", better[1]]) == 0
    shown = capsys.readouterr().out
    steps = re.search(r"^(\d+) steps of", shown, re.MULTILINE)
    assert steps is not None
    assert int(steps[1]) >= 4
    assert "warning" not in shown


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--lora", "-1"], "model.lora: must be at least 0, is -1"),
        (["--steps", "5", "--epochs", "2"], "train.steps: steps and epochs both say how long to train"),
        (["--sequence", "4096"], "data.sequence: 4096 is more than the 128 positions of llama"),
        (["--tokens-per-step", "16"], "train.tokens_per_step: 16 is less than one sequence of 32 tokens"),
        (["--set", "model.hidden=5"], "model.hidden: unknown key"),
        (["--set", "train.tensor_parallel=2"], "train.tensor_parallel: is for the built-in GPT"),
        (["--set", "train.micro_batches=2"], "train.micro_batches: follows from tokens_per_step and batch here"),
        (["--set", "shard.stge=2"], "shard.stge: unknown key (did you mean 'stage'?)"),
        (["--nnodes", "0", "--dry-run"], "--nnodes must be at least 1, is 0"),
        (["--restarts", "2"], "--restarts without --resume auto and --save-every"),
    ],
)
def test_bad_options_are_told_before_anything_starts(
    arguments: list[str], told: str, made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(["finetune", made.model, made.chats, *SMALL, *arguments, "--out", str(out)]) == 2
    assert told in capsys.readouterr().err
    assert not (out / "finetune.toml").exists()


def test_a_mistake_in_the_data_is_told_by_line_before_anything_starts(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_lines(tmp_path / "a.jsonl", [{"text": "red"}, {"txt": "blue"}])
    assert main(["finetune", made.model, str(file), *SMALL, "--out", str(tmp_path / "run")]) == 2
    assert f"{file}:2: has txt; it needs" in capsys.readouterr().err


@pytest.mark.usefixtures("alone")
def test_a_rank_can_trace_a_run_whose_steps_follow_from_the_data(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[object] = []
    monkeypatch.setattr("zeroshard.cli.running._be_a_rank", lambda job, out, given: begun.append(given.trace) or 0)
    trace = tmp_path / "trace.json"
    given = [made.model, made.chats, *SMALL, "--trace", str(trace), "--out", str(tmp_path / "run")]
    assert main(["finetune", *given]) == 0
    assert begun == [trace]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--json"], "--json is for the steps of a run, and --dry-run makes none"),
        (["--resume", "nowhere"], "--resume nowhere: no such folder"),
        (["--resume", "{empty}"], "no complete checkpoint there"),
        (["--trace", "{empty}/none/trace.json"], "its folder does not exist"),
        (["--steps", "2", "--trace", "{empty}/trace.json"], "--trace: of 2 step(s) none has settled"),
        (["--set", "train.log=tensorbord"], "train.log: must name some of tensorboard, wandb, trackio"),
    ],
)
def test_a_dry_run_refuses_what_the_run_would_refuse(
    arguments: list[str], told: str, made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [argument.replace("{empty}", str(tmp_path)) for argument in arguments]
    run = ["finetune", made.model, made.chats, *SMALL, "--dry-run", "--ranks", "2", "--out", str(tmp_path / "run")]
    assert main([*run, *given]) == 2
    assert told in capsys.readouterr().err


def test_what_is_told_during_the_run_is_passed_on_to_the_ranks(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr("zeroshard.cli.running.launch", lambda ranks, nodes, argv, restarts: started.append(argv) or 0)
    out = tmp_path / "run"
    given = [made.model, made.chats, *SMALL, "--json", "--log", "tensorboard", "--log", "wandb", "--out", str(out)]
    monkeypatch.setattr("zeroshard.integrations.requirement.find_spec", lambda name: SimpleNamespace(origin=name))
    assert main(["finetune", *given]) == 0
    assert "--json" in started[0]
    assert load_job(str(out / "finetune.toml")).train.log == ("tensorboard", "wandb")
    assert command_title() == "zeroshard finetune"


@pytest.mark.parametrize("library", ["transformers", "peft"])
def test_a_missing_library_is_told_with_the_command_that_installs_it(
    library: str, made: Made, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from zeroshard.integrations import requirement

    find = requirement.find_spec
    monkeypatch.setattr(requirement, "find_spec", lambda name: None if name == library else find(name))
    assert main(["finetune", made.model, made.chats, "--lora", "4", "--dry-run", *SMALL]) == 2
    assert f"needs {library}, which is not installed; pip install" in capsys.readouterr().err


def test_other_commands_say_that_the_job_is_not_the_built_in_gpt(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "finetune.toml"
    file.write_text(CONFIGURATION.format(model=made.model, data=made.chats))
    assert main(["plan", str(file)]) == 2
    assert f"use `zeroshard plan {made.model}`" in capsys.readouterr().err


class Runs:
    """Whole runs, each made when it is first asked for."""

    def __init__(self, made: Made) -> None:
        self._made, self._found = made, dict[str, tuple[str, Path]]()

    def __call__(self, name: str, *arguments: str) -> tuple[str, Path]:
        if name not in self._found:
            out = self._made.folder / name
            given = [self._made.model, self._made.chats, *SMALL, "--lr", "5e-3", "--steps", "8", "--out", str(out)]
            self._found[name] = finetune("finetune", *given, *arguments), out
        return self._found[name]


@pytest.fixture(scope="module")
def runs(made: Made) -> Runs:
    return Runs(made)


def two_ranks(runs: Runs) -> tuple[str, Path]:
    return runs("two", "--ranks", "2", "--stage", "3", "--save-every", "4", "--set", "train.batch=2")


def assert_same(one: Path, other: Path) -> None:
    mine, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (one, other))
    assert mine.keys() == theirs.keys()
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name], atol=2e-5, rtol=1e-4, msg=name)


@pytest.mark.slow
def test_results_depend_neither_on_ranks_nor_stages_nor_micro_batches(runs: Runs) -> None:
    shown, out = two_ranks(runs)
    assert re.search("micro-batch: 2 × 32 tokens, 2 a step", shown)  # of 5 sequences, 3 a rank
    for name, *arguments in (
        ("one", "--ranks", "1", "--stage", "0"),
        ("three", "--ranks", "3", "--stage", "2", "--set", "train.batch=1"),
    ):
        other, folder = runs(name, *arguments)
        assert losses(other) == pytest.approx(losses(shown), abs=2e-3)
        assert held_out(other) == pytest.approx(held_out(shown), abs=2e-3)
        assert_same(out, folder)


@pytest.mark.slow
def test_a_run_resumed_on_another_number_of_ranks_ends_as_if_unbroken(runs: Runs, made: Made) -> None:
    shown, out = two_ranks(runs)
    middle = out / "checkpoints" / "step-00000004"
    again, folder = runs("resumed", "--ranks", "3", "--stage", "1", "--resume", str(middle))
    assert "resumed after step 4/8" in again
    assert losses(again)[-2:] == pytest.approx(losses(shown)[-2:], abs=2e-3)
    assert_same(out, folder)


@pytest.mark.slow
def test_the_configuration_beside_the_run_is_the_same_job(runs: Runs) -> None:
    _, out = two_ranks(runs)
    again = finetune("train", str(out / "finetune.toml"), "--ranks", "2", "--resume", "auto")
    assert "all 8 steps were made before" in again
    assert held_out(again) == []
    assert str(out / "model" / "model.safetensors") in again
    changed = subprocess.run(
        [sys.executable, "-m", "zeroshard", "train", out / "finetune.toml", "--resume=auto", "--set=data.held_out=0.5"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
        env=ONE_THREAD,
    )
    assert changed.returncode == 1
    assert "the run had data." in changed.stderr


@pytest.mark.slow
def test_a_run_that_is_told_to_stop_saves_and_goes_on(runs: Runs, made: Made, tmp_path: Path) -> None:
    shown, out = two_ranks(runs)
    file = tmp_path / "finetune.toml"
    file.write_text((out / "finetune.toml").read_text())
    command = [sys.executable, "-m", "zeroshard", "train", str(file), "--ranks", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**ONE_THREAD, "PYTHONUNBUFFERED": "1"})
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 2/8"):
            break
    process.terminate()
    told = process.communicate(timeout=TIMEOUT)[0]
    assert process.returncode == 0
    assert "go on with the same command and --resume auto" in told
    again = finetune(*command[3:], "--resume", "auto")
    assert re.search(r"resumed after step [2-7]/8", again)
    assert losses(again)[-1] == pytest.approx(losses(shown)[-1], abs=2e-3)
    assert_same(out, tmp_path)


@pytest.mark.slow
def test_with_json_standard_output_has_lines_of_json_alone(made: Made, tmp_path: Path) -> None:
    given = [made.model, made.chats, *SMALL, "--steps", "4", "--ranks", "2", "--json", "--out", str(tmp_path)]
    events = [json.loads(line) for line in finetune("finetune", *given).splitlines()]
    assert [event["step"] for event in events if event["event"] == "step"] == [1, 2, 4]
    assert Path(events[-1]["weights"][-1]).exists()


@pytest.mark.slow
def test_a_finetuning_that_fails_is_told_by_its_own_name(made: Made, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    given = [made.model, made.chats, *SMALL, "--ranks", "1", "--out", str(tmp_path / "run"), "--resume", str(empty)]
    command = [sys.executable, "-m", "zeroshard", "finetune", *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False, env=ONE_THREAD)
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1].startswith("zeroshard finetune: rank 0 failed: ResumeError: --resume ")


@pytest.mark.slow
def test_adapters_learn_and_peft_loads_them(runs: Runs, made: Made) -> None:
    import peft

    shown, out = runs("lora", "--ranks", "2", "--lora", "4", "--stage", "3")
    before, after = held_out(shown)
    assert after < before - 0.1
    assert "peft.AutoPeftModelForCausalLM.from_pretrained(" in shown
    model: Any = peft.AutoPeftModelForCausalLM.from_pretrained(out / "adapter")
    assert model.peft_config["default"].base_model_name_or_path == made.model
    weights = {name: value for name, value in model.named_parameters() if ".lora_B." in name}
    assert len(weights) == 14
    assert all(value.abs().sum() > 0 for value in weights.values())


@pytest.mark.slow
def test_adapters_go_on_from_a_checkpoint_without_the_base(runs: Runs, made: Made) -> None:
    shown, out = runs("adapters", "--ranks", "2", "--lora", "4", "--stage", "3", "--save-every", "4")
    middle = out / "checkpoints" / "step-00000004"
    base = (Path(made.model) / "model.safetensors").stat().st_size
    assert sum(file.stat().st_size for file in middle.glob("*.safetensors")) < base / 2
    again, folder = runs("adapters-again", "--ranks", "1", "--lora", "4", "--stage", "1", "--resume", str(middle))
    assert "resumed after step 4/8" in again
    assert losses(again)[-2:] == pytest.approx(losses(shown)[-2:], abs=2e-3)
    mine, theirs = (load_file(run / "adapter" / "adapter_model.safetensors") for run in (folder, out))
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, atol=2e-5, rtol=1e-4, msg=name)


@pytest.mark.slow
def test_texts_prompts_and_parquet_are_trained_on_too(made: Made, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "book.txt").write_text(text(300, 0))
    rows = [{"prompt": text(3, seed), "completion": " " + text(3, seed)} for seed in range(20)]
    write_lines(folder / "pairs.jsonl", rows)
    parquet.write_table(pyarrow.table({"text": [text(8, seed) for seed in range(20)]}), folder / "texts.parquet")
    shown = finetune(
        *("finetune", made.model, str(folder), *SMALL, "--ranks", "2", "--out", str(tmp_path / "run")),
        *("--lr", "5e-3", "--epochs", "3"),
    )
    assert re.search(r"data: (\d+) document\(s\) to train on, [1-9]\d* held out", shown)
    assert losses(shown)[-1] < losses(shown)[0] - 1
