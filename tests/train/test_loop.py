"""The pieces of the training loop that need no ranks."""

import pytest
import torch

from zeroshard.config.job import ModelConfig, load_job
from zeroshard.train.gpt import GPT
from zeroshard.train.gpt.task import shard_options
from zeroshard.train.loop import lr_share
from zeroshard.train.rank import Rank
from zeroshard.train.record import Stopwatch
from zeroshard.train.task import parameter_groups


def test_the_learning_rate_rises_then_falls_to_a_tenth() -> None:
    shares = [lr_share(step, steps=100, warmup=10) for step in range(101)]
    assert shares[:10] == sorted(shares[:10])
    assert max(shares) == shares[10] == 1
    assert shares[10:] == sorted(shares[10:], reverse=True)
    assert shares[-1] == 0.1


def test_without_warm_up_it_starts_at_the_top() -> None:
    assert lr_share(0, steps=1, warmup=0) == 1


def test_every_parameter_is_in_one_group_and_only_matrices_decay() -> None:
    model = GPT(ModelConfig(layers=1, hidden=32, heads=2, sequence=8))
    decayed, other = parameter_groups(model, 0.1)
    assert {id(p) for p in decayed["params"]} | {id(p) for p in other["params"]} == {id(p) for p in model.parameters()}
    assert all(p.dim() == 2 for p in decayed["params"])
    assert torch.optim.AdamW([decayed, other]).param_groups[1]["weight_decay"] == 0


@pytest.mark.parametrize(("device", "used"), [("cuda:1", True), ("cpu", False)])
def test_gpu_memory_is_defragmented_unless_the_job_says_otherwise(device: str, used: bool) -> None:
    here = Rank(0, 1, torch.device(device))
    assert shard_options(load_job("tiny"), here)["defragment"] is used
    for said in (True, False):
        assert shard_options(load_job("tiny", {"shard.defragment": said}), here)["defragment"] is said


def test_a_paused_stopwatch_stands_still() -> None:
    stopwatch = Stopwatch()
    stopwatch.start()
    with stopwatch.paused():
        torch.randn(500, 500) @ torch.randn(500, 500)
        inside = stopwatch.seconds
    assert stopwatch.seconds < inside
