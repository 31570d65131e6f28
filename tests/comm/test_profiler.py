"""A profiler around training, on two ranks."""

from __future__ import annotations

import gc

import torch

import zeroshard
from tests.ranks import on_ranks
from tests.training import shard, train


@on_ranks(2)
def test_a_profile_may_end_while_messages_are_under_way() -> None:
    """Parameters are published after ``step()``. torch once wrote the end of those messages into freed memory."""
    for _ in range(3):
        model, optimizer = shard(stage=2)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for step in range(3):
                train(model, optimizer, step)
        zeroshard.full_state_dict(model)
        assert "zeroshard.agree" in {event.key for event in profile.key_averages()}
        del profile, model, optimizer
        gc.collect()
