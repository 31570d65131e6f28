"""``defragment=True`` changes the allocator of a whole process, so that each case here is a process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from zeroshard.system.allocator import VARIABLE

ROOT = Path(__file__).parent.parent.parent
BEGIN = """
import torch, zeroshard
from torch import nn
from zeroshard.system import compat

def shard(model, **options):
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    return zeroshard.shard(model, optimizer, stage=2, device="cuda:0", **options)

def trained(**options):
    torch.manual_seed(0)
    model, optimizer = shard(nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))), **options)
    for step in range(3):
        model(torch.ones(8, 256, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return zeroshard.full_state_dict(model)

def expandable():
    return [segment["is_expandable"] for segment in torch.cuda.memory_snapshot()]
"""


def run(program: str, **environment: str) -> str:
    """What a program prints. It starts with no settings of the allocator but the given ones."""
    plain = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + program],
        env={**plain, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_all_memory_is_in_expandable_segments_and_no_bit_changes() -> None:
    run(
        "weights = trained(defragment=True)\n"
        "assert compat.segments_expand() and expandable() and all(expandable())\n"
        "again = trained(defragment=True)\n"  # a second model of the process finds it turned on
        "assert all(torch.equal(weights[name], again[name]) for name in weights)\n"
    )


def test_without_it_no_segment_is_expandable() -> None:
    run("trained()\nassert not compat.segments_expand() and not any(expandable())\n")


def test_other_settings_of_the_allocator_stay() -> None:
    run(
        "trained(defragment=True)\n"
        "settings = torch.cuda.memory._snapshot()['allocator_settings']\n"
        "assert settings['max_split_size'] == 64 << 20 and settings['expandable_segments'], settings\n",
        PYTORCH_ALLOC_CONF="max_split_size_mb:64",
    )


def test_a_model_on_the_gpu_comes_too_late_and_leaves_the_allocator_as_it_was() -> None:
    told = run(
        "try:\n    shard(nn.Linear(256, 256).cuda(), defragment=True)\nexcept ValueError as error:\n    print(error)\n"
        "assert not compat.segments_expand()\n"
    )
    assert "defragment=True comes too late" in told
    assert VARIABLE in told


def test_what_the_environment_turned_on_is_accepted_for_a_model_on_the_gpu() -> None:
    name, _, value = VARIABLE.partition("=")
    run("shard(nn.Linear(256, 256).cuda(), defragment=True)\nassert all(expandable())\n", **{name: value})


def test_the_ready_made_job_uses_it(tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
from zeroshard.config.job import load_job
from zeroshard.train.loop import train

train(load_job("tiny", {{"train.steps": 2, "train.device": "cuda"}}), Path({str(tmp_path)!r}))
assert compat.segments_expand() and all(expandable())
"""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    run(program, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
