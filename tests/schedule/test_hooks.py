"""Hooks: orders that change, modules called twice, passes that fail, and labels that a profiler shows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import zeroshard
from tests.matrix import Stages, in_stages
from tests.models import Block, batch, loss_of, net
from tests.ranks import on_ranks
from zeroshard.runtime import runtime_of

STAGES = (0, 1, 2, 3)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> None:
    for step in range(steps):
        model(batch(step), step).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_equals_ddp(build: Any, exact: bool = True, **options: Any) -> None:
    """A model class whose forward takes a batch and the step trains as under DDP in every stage."""
    torch.manual_seed(0)
    plain = build()
    train(DistributedDataParallel(plain, find_unused_parameters=True), sgd(plain))
    assert all(value.isfinite().all() for value in plain.state_dict().values())
    for stage in STAGES:
        torch.manual_seed(0)
        model = build()
        model, optimizer = zeroshard.shard(model, sgd(model), stage=stage, **options)
        train(model, optimizer)
        for name, value in zeroshard.full_state_dict(model).items():
            if exact:
                assert torch.equal(value, plain.state_dict()[name]), f"stage {stage}: {name}"
            else:
                torch.testing.assert_close(value, plain.state_dict()[name])


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 9)
        self.blocks = nn.ModuleList(Block(9) for _ in range(4))


@on_ranks(2)
def test_the_order_of_units_may_change_from_step_to_step() -> None:
    class Shuffled(Stack):
        def forward(self, x: Tensor, step: int) -> Tensor:
            x = self.first(x)
            order = torch.randperm(4, generator=torch.Generator().manual_seed(step))
            for number in order.tolist():
                x = self.blocks[number](x)
            return x

    assert_equals_ddp(Shuffled)


@on_ranks(2)
def test_a_module_may_be_called_twice() -> None:
    class Twice(Stack):
        def forward(self, x: Tensor, step: int) -> Tensor:
            x = self.first(x)
            for block in [*self.blocks, *self.blocks[:2]]:
                x = block(x)
            return x

    assert_equals_ddp(Twice)


@on_ranks(2)
def test_weights_may_be_tied_within_and_across_units() -> None:
    class Tied(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(9, 7, bias=False)
            self.last.weight = nn.Parameter(self.first.weight.detach().t().contiguous())
            self.blocks[1].up.weight = self.blocks[2].up.weight
            self.blocks[3].norm.bias = self.blocks[3].down.bias

        def forward(self, x: Tensor, step: int) -> Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
            return self.last(x)

    assert_equals_ddp(Tied)


@in_stages
@pytest.mark.parametrize("reentrant", [True, False])
@on_ranks(2)
def test_checkpointing_works_both_ways_by_block_and_by_segment(stages: Stages, reentrant: bool) -> None:
    class Checkpointed(Stack):
        def forward(self, x: Tensor, step: int) -> Tensor:
            x = self.first(x)
            x = checkpoint(self.blocks[0], x, use_reentrant=reentrant)
            x = checkpoint(lambda y: self.blocks[2](self.blocks[1](y)), x, use_reentrant=reentrant)
            return self.blocks[3](x)

    class Plain(Stack):
        def forward(self, x: Tensor, step: int) -> Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
            return x

    torch.manual_seed(0)
    plain = Plain()
    train(DistributedDataParallel(plain), sgd(plain))
    for stage in stages:
        torch.manual_seed(0)
        model = Checkpointed()
        model, optimizer = zeroshard.shard(model, sgd(model), stage=stage)
        train(model, optimizer)
        for name, value in zeroshard.full_state_dict(model).items():
            assert torch.equal(value, plain.state_dict()[name]), f"stage {stage}: {name}"


@on_ranks(2)
def test_outputs_may_be_dataclasses_dicts_and_tuples_and_changed_in_place() -> None:
    @dataclass
    class Output:
        hidden: dict[str, Tensor]
        pair: tuple[Tensor, Tensor]

    class Structured(Stack):
        def forward(self, x: Tensor, step: int) -> Any:
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
                x += 1
            return Output({"x": x}, (x * 2, x.detach()))

    class Unwrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Structured()

        def forward(self, x: Tensor, step: int) -> Tensor:
            output = self.inner(x, step)
            return output.hidden["x"] + output.pair[0]

    assert_equals_ddp(Unwrapped)
    model = Structured()
    model, optimizer = zeroshard.shard(model, sgd(model), stage=3)
    output = model(batch(0), 0)
    output.pair[0].sum().backward()
    optimizer.step()


@in_stages
@on_ranks(2)
def test_training_goes_on_after_an_exception_in_forward_or_backward(stages: Stages) -> None:
    class Fragile(Stack):
        fail = ""

        def forward(self, x: Tensor, step: int) -> Tensor:
            x = self.first(x)
            for number, block in enumerate(self.blocks):
                x = block(x)
                if number == 1 and self.fail == "forward":
                    raise ZeroDivisionError
                if number == 1 and self.fail == "backward":
                    x.register_hook(lambda _: 1 / 0)
            return x

    torch.manual_seed(0)
    plain = Fragile()
    train(DistributedDataParallel(plain), sgd(plain))
    for stage in stages:
        torch.manual_seed(0)
        model = Fragile()
        model, optimizer = zeroshard.shard(model, sgd(model), stage=stage)
        for step in range(4):
            for failure in ("forward", "backward", ""):
                model.fail = failure
                try:
                    model(batch(step), step).square().mean().backward()
                except ZeroDivisionError:
                    assert failure
                    optimizer.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
        for name, value in zeroshard.full_state_dict(model).items():
            assert torch.equal(value, plain.state_dict()[name]), f"stage {stage}: {name}"


@in_stages
@on_ranks(2)
def test_two_sharded_models_in_one_process_one_of_them_frozen(stages: Stages) -> None:
    teacher = net()
    teacher.requires_grad_(False)
    teacher, none = zeroshard.shard(teacher, stage=3)
    assert none is None
    for stage in stages:
        model = net()
        model, optimizer = zeroshard.shard(model, sgd(model), stage=stage)
        plain, plain_teacher = net(), net()
        ddp, other = DistributedDataParallel(plain), sgd(plain)
        for step in range(3):
            with torch.no_grad():
                target, plain_target = teacher(batch(50 + step)), plain_teacher(batch(50 + step))
            assert torch.equal(target, plain_target)
            (model(batch(step)) - target).square().mean().backward()
            (ddp(batch(step)) - plain_target).square().mean().backward()
            for each in (optimizer, other):
                each.step()
                each.zero_grad()
        for name, value in zeroshard.full_state_dict(model).items():
            assert torch.equal(value, plain.state_dict()[name])


@on_ranks(2)
def test_methods_besides_forward_may_use_the_root_in_stage_3() -> None:
    class Encoder(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return self.encode(x)

        def encode(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
            return x

    torch.manual_seed(0)
    plain = Encoder()
    torch.manual_seed(0)
    model = Encoder()
    model, _ = zeroshard.shard(model, sgd(model), stage=3)
    with torch.no_grad():
        assert torch.equal(model.encode(batch(0)), plain.encode(batch(0)))
        assert torch.equal(model(batch(0)), plain(batch(0)))


@on_ranks(2)
def test_a_profiler_shows_every_phase_with_the_units_name() -> None:
    model = net()
    model, optimizer = zeroshard.shard(model, sgd(model), stage=3, clip_grad_norm=1.0, precision="bf16")
    loss_of(model, 0).backward()
    with torch.profiler.profile() as profile:
        optimizer.step()
        loss_of(model, 1).backward()
        optimizer.step()
    labels = {event.key for event in profile.key_averages()}
    for phase in ("gather", "wait", "stash"):
        assert f"zeroshard.{phase} blocks.2" in labels, phase
    for phase in ("update", "publish"):  # of several units at a time
        assert any(label.startswith(f"zeroshard.{phase} ") and "blocks.2" in label.split() for label in labels)
    assert {"zeroshard.agree", "zeroshard.norm", "zeroshard.reduce blocks.2"} <= labels


@in_stages
@on_ranks(2)
def test_frozen_parameters_train_nothing_and_hold_no_gradient_or_state(stages: Stages) -> None:
    for stage in stages:
        model, plain = net(), net()
        for each in (model, plain):
            each.blocks[1].requires_grad_(False)
            each.blocks[2].up.requires_grad_(False)
            each.first.requires_grad_(False)
        ddp = DistributedDataParallel(plain)
        other = torch.optim.AdamW(plain.parameters())
        model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), stage=stage)
        for step in range(3):
            loss_of(model, step).backward()
            loss_of(ddp, step).backward()
            for each_optimizer in (optimizer, other):
                each_optimizer.step()
                each_optimizer.zero_grad()
        for name, value in zeroshard.full_state_dict(model).items():
            assert torch.equal(value, plain.state_dict()[name]), f"stage {stage}: {name}"
        trained = sum(p.numel() for p in plain.parameters() if p.requires_grad)
        memory = zeroshard.stats(model).memory_at_step
        assert memory is not None
        assert memory.gradients <= 4 * trained * 1.4  # tiny parameters carry much padding


@in_stages
@on_ranks(2)
def test_forward_hooks_of_a_units_own_module_see_its_values_without_another_gather(stages: Stages) -> None:
    def look_at(model: nn.Module, seen: list[Any]) -> None:
        """Hooks that come after shard()'s own: one reads a number, one stores a view, one uses a weight in the loss."""
        for block in model.blocks:  # type: ignore[union-attr]
            block.register_forward_hook(lambda module, args, output: seen.append(module.up.weight.norm().item()))
            block.register_forward_hook(lambda module, args, output: seen.append(module.up.weight.detach()))
        model.blocks[0].register_forward_hook(lambda module, args, output: output + module.down.bias.square().sum())  # type: ignore[index]

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(3):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                loss_of(model, step)

    expected: list[Any] = []
    plain = net(depth=2)
    look_at(plain, expected)
    run(DistributedDataParallel(plain), sgd(plain))
    for stage in stages:
        gathers = []
        for hooked in (True, False):
            seen: list[Any] = []
            model = net(depth=2)
            model, optimizer = zeroshard.shard(model, sgd(model), stage=stage)
            if hooked:
                look_at(model, seen)
            run(model, optimizer)
            volume = zeroshard.stats(model).volume
            gathers.append(volume["all_gather"].calls if stage == 3 else 0)
            if hooked:
                assert seen[::2] == expected[::2], f"stage {stage}: {seen[::2]} {expected[::2]}"
                if stage == 3:
                    views = [view.norm().item() for view in seen[1::2]]
                    assert views == seen[::2], "a view that a hook stored has changed"
                for name, value in zeroshard.full_state_dict(model).items():
                    assert torch.equal(value, plain.state_dict()[name]), f"stage {stage}: {name}"
        assert gathers[0] <= gathers[1]  # fewer, because a unit that is in a graph stays until backward


class Headed(nn.Module):
    """A language model in small: an embedding that is used first and a head that is used last, both in the root."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(512, 64)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.head = nn.Linear(64, 512)

    def forward(self, tokens: Tensor, step: int) -> Tensor:
        x = self.embedding(tokens.flatten().long().clamp(0, 511))
        for block in self.blocks:
            x = block(x).relu()
        return self.head(x)


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_ranks(2)
def test_the_head_is_reduced_as_backward_begins_and_the_embedding_when_it_ends(stage: int) -> None:
    model = Headed()
    model, optimizer = zeroshard.shard(model, sgd(model), stage=stage, max_unit_bytes=150_000)
    train(model, optimizer, steps=1)
    with torch.profiler.profile() as profile:
        train(model, optimizer, steps=1)
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    reduced = [event.name.split()[1] for event in events if event.name.startswith("zeroshard.reduce ")]
    assert reduced == ["(root)#1", "blocks.2", "blocks.1", "blocks.0", "(root)#0"]


@on_ranks(2)
def test_a_root_of_several_flats_trains_as_under_ddp() -> None:
    assert_equals_ddp(Headed, max_unit_bytes=150_000)


@on_ranks(1)
def test_of_a_root_that_is_too_large_the_flats_that_forward_needs_first_stay_on_the_device() -> None:
    model = Headed()
    sizes = {name: sum(p.numel() for p in part.parameters()) for name, part in model.named_children()}
    offload = zeroshard.Offload(host_fraction=1 - (sizes["embedding"] + 1000) / sum(sizes.values()))
    model, optimizer = zeroshard.shard(
        model, torch.optim.AdamW(model.parameters()), stage=2, max_unit_bytes=150_000, offload=offload
    )
    train(model, optimizer, steps=1)
    assert zeroshard.stats(model).memory.optimizer_states == 8 * sizes["embedding"]


class Peeking(Headed):
    """Every block looks at the head, which gets no gradient from there. Blocks may run again in backward."""

    recomputes = True

    def forward(self, tokens: Tensor, step: int) -> Tensor:
        x = self.embedding(tokens.flatten().long().clamp(0, 511))
        for block in self.blocks:
            run = partial(self.look, block)
            x = checkpoint(run, x, use_reentrant=False) if self.recomputes else run(x)
        return self.head(x)

    def look(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x).relu() * self.head.weight.detach().sum(0)


def losses_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for step in range(5):
        loss = model(batch(step), step).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("options", [{}, {"update_in_backward": True}, {"delayed_update_after": 0}], ids=str)
@on_ranks(1)
def test_a_recomputed_block_reads_the_values_that_its_forward_read(options: dict[str, Any]) -> None:
    def trained(recomputes: bool) -> list[float]:
        torch.manual_seed(0)
        model: nn.Module = Peeking()
        model.recomputes = recomputes
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        offload = zeroshard.Offload(**options)
        return losses_of(*zeroshard.shard(model, optimizer, stage=2, max_unit_bytes=150_000, offload=offload))

    assert trained(recomputes=True) == trained(recomputes=False)


@on_ranks(1)
def test_the_next_forward_gets_the_whole_root_first() -> None:
    model = Headed()
    model, optimizer = zeroshard.shard(model, sgd(model), stage=2, max_unit_bytes=150_000, offload="cpu")
    train(model, optimizer, steps=1)
    assert [flat.label for flat in runtime_of(model).reducer.publishing_order()[:3]] == [
        "(root)#0", "(root)#1", "blocks.0"
    ]  # fmt: skip
