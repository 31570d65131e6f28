"""The examples run, alone and under torchrun; sharding changes a few of their lines and none of their losses."""

from __future__ import annotations

import ast
import difflib
import os
import re
import secrets
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
README = (EXAMPLES / "README.md").read_text()
FENCED = re.findall(r"^```(\w*)\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
COMMANDS = [line for language, text in FENCED if not language for line in text.splitlines()]
STEPS = 4
SMALL = ["--steps", str(STEPS), "--report-every", "1", "--batch", "2", "--sequence", "32"]
TIMEOUT = 180
LOCAL_RAY = {"RAY_ADDRESS": "local", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
"""Ray sends no statistics, connects to no cluster, and writes no token into the home folder."""


@dataclass(frozen=True)
class Example:
    """A script, its sharded twin, and what both save."""

    original: Path
    sharded: Path
    saved: str
    changed: int = 8
    """At most so many lines of code."""

    def weights(self, out: Path) -> dict[str, torch.Tensor]:
        if self.saved.endswith(".safetensors"):
            return load_file(out / self.saved)
        loaded: dict[str, torch.Tensor] = torch.load(out / self.saved, weights_only=True)
        return loaded.get("state_dict", loaded)  # type: ignore[return-value] # Lightning's files have more


EXAMPLE_PAIRS = [
    Example(EXAMPLES / "nanogpt/train.py", EXAMPLES / "nanogpt/train_zeroshard.py", "weights.pt"),
    Example(
        EXAMPLES / "huggingface/finetune.py", EXAMPLES / "huggingface/finetune_zeroshard.py", "out/model.safetensors"
    ),
]
LIBRARY_PAIRS = [
    Example(EXAMPLES / f"{script}.py", EXAMPLES / f"{script}_zeroshard.py", saved, changed=3)
    for script, saved in (
        ("transformers/clm", "out/model.safetensors"),
        ("transformers/sft", "out/adapter_model.safetensors"),
        ("accelerate/finetune", "out/model.safetensors"),
        ("lightning/train", "weights.ckpt"),
    )
]
"""Both scripts run on several ranks: a library makes the model data-parallel, by DDP or by sharding."""


DEEPSPEED = Example(EXAMPLES / "deepspeed/train.py", EXAMPLES / "deepspeed/train_zeroshard.py", "saved/weights.pt")
RAY = Example(EXAMPLES / "ray/train.py", EXAMPLES / "ray/train_zeroshard.py", "weights.pt", changed=16)


def named(*examples: Example) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "example", examples, ids=lambda example: f"{example.original.parent.name}-{example.original.stem}"
    )


def run(command: str, example: Example, folder: Path, small: list[str] = SMALL) -> list[float]:
    """Runs a command of the examples' README, small, and returns the losses it printed."""
    return output(command, example, folder, small)[0]


def output(command: str, example: Example, folder: Path, small: list[str]) -> tuple[list[float], str]:
    """Runs a command, and returns the losses and all that it printed."""
    program, *arguments = shlex.split(command)
    start = {"python": [], "torchrun": ["-m", "torch.distributed.run", "--standalone"]}[program]
    out = folder / Path(example.saved).parts[0]
    done = subprocess.run(
        [sys.executable, *start, *arguments, *small, "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
        cwd=ROOT,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": str(ROOT),
            **LOCAL_RAY,
        },
    )
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"^step (\d+): loss ([\d.]+)$", done.stdout, re.MULTILINE)
    assert [int(step) for step, _ in lines] == list(range(1, STEPS + 1))  # one rank speaks
    return [float(loss) for _, loss in lines], done.stdout + done.stderr


def commands_of(example: Example) -> tuple[str, str, str]:
    """The README's three commands for an example: the original, one rank, two ranks."""
    original, one, two = (line for line in COMMANDS if f"examples/{example.original.parent.name}/" in line)
    assert original.split() == ["python", f"{example.original.relative_to(ROOT)}"]
    assert one.split() == ["python", f"{example.sharded.relative_to(ROOT)}"]
    assert two.split()[:3] == ["torchrun", "--nproc-per-node", "2"]
    return original, one, two


def code_lines(path: Path) -> list[str]:
    """A script's code without docstring, comments and blank lines."""
    tree = ast.parse(path.read_text())
    tree.body = tree.body[1:]
    text = ast.unparse(tree).replace(":\n    ...", ": ...")  # a class without a body of its own is one line
    return [line for line in text.splitlines() if line]


def changes(before: list[str], after: list[str]) -> list[str]:
    compared = list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]
    return [line for line in compared if line[0] in "+-" and line[1:].strip()]


@pytest.mark.slow
@named(*EXAMPLE_PAIRS)
def test_one_rank_gives_the_original_losses_and_two_ranks_learn(example: Example, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("original", "one", "two")]
    for folder in folders:
        folder.mkdir()
    losses = [run(command, example, folder) for command, folder in zip(commands_of(example), folders, strict=True)]
    original, one, two = losses
    assert one[0] == original[0]
    assert one == pytest.approx(original, rel=1e-6)  # the norms of clipping round differently
    assert two[-1] < two[0]
    plain, *shardeds = (example.weights(folder) for folder in folders)
    for weights in shardeds:
        assert {name: value.shape for name, value in weights.items()} == {
            name: value.shape for name, value in plain.items()
        }
    for name, value in shardeds[0].items():
        torch.testing.assert_close(value, plain[name], rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.slow
@named(*LIBRARY_PAIRS)
def test_a_librarys_script_gives_the_losses_of_ddp(example: Example, tmp_path: Path) -> None:
    losses, weights = [], []
    for script in (example.original, example.sharded):
        (command,) = (line for line in COMMANDS if line.endswith(str(script.relative_to(ROOT))))
        (tmp_path / script.stem).mkdir()
        losses.append(run(command, example, tmp_path / script.stem))
        weights.append(example.weights(tmp_path / script.stem))
    plain, sharded = weights
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert sharded.keys() == plain.keys()
    for name, value in sharded.items():
        torch.testing.assert_close(value, plain[name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.slow
def test_a_script_for_deepspeed_gives_the_same_losses_and_weights(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    small = ["--steps", str(STEPS), "--report-every", "1", "--hidden", "64", "--layers", "2"]
    losses, weights = [], []
    for command in (line for line in COMMANDS if "examples/deepspeed/" in line):
        folder = tmp_path / Path(command).stem
        losses.append(run(command, DEEPSPEED, folder, small))
        weights.append(DEEPSPEED.weights(folder))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.slow
def test_a_worker_of_ray_dies_and_the_run_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    small = [*SMALL, "--save-every", "2"]
    (plain, sharded) = (line for line in COMMANDS if "examples/ray/" in line)
    losses, weights, said = [], [], ""
    for name, command, more in (("plain", plain, []), ("sharded", sharded, []), ("broken", sharded, ["--die-at", "4"])):
        found, said = output(command, RAY, tmp_path / name, [*small, *more])
        losses.append(found)
        weights.append(RAY.weights(tmp_path / name))
    assert "goes on after step 2" in said
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == losses[1]
    assert weights[1].keys() == weights[0].keys()
    for name, value in weights[1].items():
        assert (value - weights[0][name]).abs().mean() < 1e-5, name  # Adam turns noise around 0 into single steps
        assert torch.equal(value, weights[2][name]), name


@named(*EXAMPLE_PAIRS, *LIBRARY_PAIRS, DEEPSPEED, RAY)
def test_few_lines_of_code_change(example: Example) -> None:
    changed = changes(code_lines(example.original), code_lines(example.sharded))
    assert sum(line.startswith("+") for line in changed) <= example.changed
    assert sum(line.startswith("-") for line in changed) <= example.changed


@named(*EXAMPLE_PAIRS, *LIBRARY_PAIRS, DEEPSPEED, RAY)
def test_the_readme_shows_every_changed_line(example: Example) -> None:
    name = str(example.original.relative_to(EXAMPLES))
    (shown,) = (text for language, text in FENCED if language == "diff" and name in text)
    shown_lines = [line for line in shown.splitlines()[2:] if line[:1] in ("+", "-") and line[1:].strip()]
    before, after = (path.read_text().splitlines() for path in (example.original, example.sharded))
    assert shown_lines == changes(before, after)


ONE_GPU = {
    "train_32b.py": "--layers 8 --hidden 256 --vocabulary 512 --sequence 128 --steps 12 --lr 1e-3 --device-gib 0.04",
    "personal_8b.py": "--layers 2 --hidden 64 --vocabulary 512 --tokens 512 --sequence 64 --steps 16 --lr 5e-3",
}


@pytest.mark.slow
@pytest.mark.parametrize("script", ONE_GPU)
def test_what_one_gpu_holds_learns_when_it_is_small(script: str) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "one_gpu" / script), *ONE_GPU[script].split()],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)", done.stdout, re.MULTILINE)]
    assert losses[-1] < losses[0] - 1
    assert "nothing is offloaded" not in done.stdout
