"""Which modules of a unit are searched for tensors that a forward left in attributes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import zeroshard
from tests.models import Block, net
from zeroshard.runtime import runtime_of
from zeroshard.schedule.outputs import AttributeOutputs


def test_layers_of_torch_are_left_alone_until_somebody_may_have_written_to_them() -> None:
    block = Block(3)
    left = AttributeOutputs(block.modules())
    assert left.modules == [block]
    block.up.seen = None  # as a parent's forward may do
    assert left.modules == [block, block.up]
    handle = block.down.register_forward_hook(lambda module, args, output: None)
    assert left.modules == [block, block.up, block.down]
    handle.remove()
    assert left.modules == [block, block.up]
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    assert set(left.modules) == set(block.modules())
    handle.remove()


def test_only_what_may_hold_tensors_is_found() -> None:
    class Expert(Block):
        def forward(self, x: Tensor) -> Tensor:
            self.loss, self.losses, self.calls, self._own = x.sum(), [x.mean()], 1, x
            return super().forward(x)

    expert = Expert(3)
    left = AttributeOutputs(expert.modules())
    assert not left.values()
    expert(expert.up.weight.new_ones(2, 3))
    assert left.values() == [expert.loss, expert.losses]


def test_a_layer_in_which_somebody_prepared_a_place_is_looked_at() -> None:
    block = Block(3)
    block.up.aux = None
    assert AttributeOutputs(block.modules()).modules == [block, block.up]


def test_of_a_sharded_model_only_modules_that_are_not_torchs_are_looked_at() -> None:
    model = net(depth=2)
    zeroshard.shard(model, torch.optim.SGD(model.parameters()), stage=3)
    schedule = runtime_of(model).schedule
    assert [left.modules for left in schedule._attributes.values()] == [[block] for block in model.blocks]
