"""A StallError names the call that only some ranks made, says that it is collective, and where the missing rank is."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeroshard
from tests.comm.test_disagreement import quick_beats
from tests.matrix import quick
from tests.models import loss_of
from tests.ranks import on_ranks
from tests.training import adamw, shard, train

SHORT = 1.0
"""``stall_timeout`` in seconds. A healthy collective takes milliseconds here."""
EVALUATION = r"a forward without gradients, as in evaluation or generate\(\)"


def evaluate(model: Any, optimizer: Any) -> None:
    with torch.no_grad():
        loss_of(model, 0)


def look(model: Any, optimizer: Any) -> None:
    with zeroshard.gathered(model):
        pass


def save(model: Any, optimizer: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        zeroshard.save(f"{folder}/step", model, optimizer)


ALONE: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "evaluation": (EVALUATION, evaluate),
    "gathered": (r"gathered\(\)", look),
    "full_state_dict": (r"full_state_dict\(\)", lambda model, _: zeroshard.full_state_dict(model)),
    "the optimizer's state": (r"optimizer\.state_dict\(\)", lambda _, optimizer: optimizer.state_dict()),
    "save": (r"save\(\)", save),
    "step": (r"step\(\)", lambda _, optimizer: optimizer.step()),
}


def stall(alone: Callable[[Any, Any], Any], model: Any, optimizer: Any) -> str:
    """What the error says to a rank that does something alone."""
    with pytest.raises(zeroshard.StallError) as caught:
        alone(model, optimizer)
    return str(caught.value)


@pytest.mark.parametrize("name", quick(ALONE, "evaluation", "full_state_dict", "save"))
@on_ranks(2)
def test_what_rank_zero_does_alone_is_named_and_called_collective(name: str) -> None:
    call, alone = ALONE[name]
    with quick_beats():
        model, optimizer = shard(adamw, stage=3, prefetch=1, stall_timeout=SHORT)  # else all is gathered
        train(model, optimizer, 0)
        if dist.get_rank() == 0:
            text = stall(alone, model, optimizer)
            assert re.match(rf"rank 0 waited in {call}, which is collective: every rank must make it; ", text), text
            assert "; rank 1 is in no such call; its last one was step(); " in text
            assert re.search(rf"the same calls so far: {call} \(\d on rank 0, \d on rank 1\)\. In detail: ", text), text
            assert re.search(r"In detail: rank 0 waited for .* \(stall_timeout=.*; rank 1 is alive", text), text
        dist.barrier()


@on_ranks(2)
def test_both_ranks_are_told_of_an_evaluation_that_only_rank_zero_made() -> None:
    """The gathers of the evaluation meet those of the other rank's training, so the ranks stall later."""
    with quick_beats():
        model, optimizer = shard(adamw, stage=3, prefetch=1, stall_timeout=SHORT)  # else all is gathered
        train(model, optimizer, 0)
        if dist.get_rank() == 0:
            evaluate(model, optimizer)
        text = stall(lambda model, optimizer: train(model, optimizer, 1), model, optimizer)
        assert re.search(rf"the same calls so far: .*{EVALUATION} \((1 on rank 0, 0|0 on rank 1, 1) on rank ", text), (
            text
        )
        assert re.search(
            r"\brank \d waited in a (for|back)ward, which is collective.*; rank \d is in a (for|back)ward; ", text
        )


@on_ranks(2)
def test_a_read_that_rank_zero_makes_alone_while_the_host_updates_names_the_remedy_and_the_remedy_holds() -> None:
    with quick_beats():
        model, optimizer = shard(stage=2, offload="cpu", stall_timeout=SHORT)
        train(model, optimizer, 0)
        zeroshard.synchronize(model)
        if dist.get_rank() == 0:
            assert bool(model.first.weight.norm().isfinite())
        train(model, optimizer, 1)
        if dist.get_rank() == 0:
            said = stall(lambda model, _: model.first.weight.norm(), model, optimizer)
            assert re.search(r"norm\(\) needs.*'first\.weight'.*zeroshard\.synchronize\(model\) on all ranks", said), (
                said
            )
        dist.barrier()
