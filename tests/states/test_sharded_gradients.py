"""Gradients that are shards: what torch's own functions do with them, beside the same loop under DDP."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zeroshard
from tests.matrix import matrix, slow
from tests.models import Block, Net, loss_of, net
from tests.ranks import on_ranks
from tests.training import (
    INNER,
    SHARDED_GRADIENTS,
    STAGES,
    Scaled,
    adamw,
    assert_close,
    assert_same,
    refused,
    sgd,
    shard,
    train,
    trained_plainly,
    weights,
)
from zeroshard.offload.transfer import Transfer
from zeroshard.system import compat_groups

PLACES = (None, "cpu")
"""Where optimizer states and gradients live (option ``offload``)."""

Loop = Callable[[nn.Module, Net, torch.optim.Optimizer], Any]
"""Trains: the module that is called, the model that has the parameters, the optimizer. Returns what it logged."""


_ddp: dict[tuple[str, int], tuple[Any, dict[str, Tensor]]] = {}
"""What a loop logged under DDP, and the weights it ended with, by the name of the case and the rank."""


def beside_ddp(
    loop: Loop, stage: int, make: Any = adamw, offload: Any = None, case: str | None = None, **options: Any
) -> Net:
    """Runs the same loop under DDP and sharded. What both log, and the weights, must be equal within rounding.

    ``case`` names a loop that is the same in every stage. It runs once under DDP.
    """
    key = (case or "", dist.get_rank())
    if case is None or key not in _ddp:
        plain = choosing_net()
        ddp = DistributedDataParallel(plain, find_unused_parameters=True)
        _ddp[key] = loop(ddp, plain, make(plain.parameters())), dict(plain.state_dict())
    expected, expected_weights = _ddp[key]
    model = choosing_net()
    model, optimizer = zeroshard.shard(model, make(model.parameters()), stage=stage, offload=offload, **options)
    logged = loop(model, model, optimizer)
    torch.testing.assert_close(logged, expected, rtol=1e-6, atol=1e-7)
    assert_close(weights(model), expected_weights)
    return model


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def plain_gradients() -> list[Tensor]:
    """The averaged gradients of the first step, under DDP."""
    plain = net(depth=2)
    ddp = DistributedDataParallel(plain)
    loss_of(ddp, 0).backward()
    return gradients(plain)


# -- clipping ----------------------------------------------------------------------------------------------------------

CLIPPINGS: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "norm": lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 0.01),
    "norm foreach": lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 0.01, foreach=True),
    "norm of order 1": lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 0.01, norm_type=1),
    "norm of order 3.5": lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 0.01, norm_type=3.5),
    "norm of order inf": lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 0.01, math.inf, foreach=True),
    "norm and error": lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 0.01, error_if_nonfinite=True),
    "value": lambda parameters: torch.nn.utils.clip_grad_value_(parameters, 1e-3),
    "value foreach": lambda parameters: torch.nn.utils.clip_grad_value_(parameters, 1e-3, foreach=True),
    "by parts": lambda parameters: [
        torch.nn.utils.clip_grad_norm_(parameters[:3], 0.01),
        torch.nn.utils.clip_grad_norm_(parameters[3:], 0.02),
    ],
    "each by itself": lambda parameters: [torch.nn.utils.clip_grad_norm_([p], 0.01) for p in parameters],
}


@matrix(stage=STAGES, offload=PLACES)
@on_ranks(2)
def test_torchs_clipping_clips_as_under_ddp(stage: int, offload: str | None) -> None:
    for way in CLIPPINGS:
        with named(way):
            check_clipping(way, stage, offload)


@contextmanager
def named(way: str) -> Iterator[None]:
    """Says which of many cases failed. They share a test, because they are short."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"case: {way}")
        raise


def check_clipping(way: str, stage: int, offload: str | None) -> None:
    def loop(module: nn.Module, model: Net, optimizer: torch.optim.Optimizer) -> Any:
        logged = []
        for step in range(3):
            loss = loss_of(module, step)
            loss.backward()
            logged += [loss.detach(), CLIPPINGS[way](list(model.parameters()))]
            optimizer.step()
            optimizer.zero_grad()
        return logged

    beside_ddp(loop, stage, offload=offload, case=f"clipping: {way}")


@on_ranks(2)
def test_clipping_accumulated_gradients_clips_their_sum() -> None:
    def loop(module: nn.Module, model: Net, optimizer: torch.optim.Optimizer) -> Any:
        logged = []
        for step in range(2):
            for micro in range(3):
                loss_of(module, 10 * step + micro).backward()
                if step == 1:  # a factor is for the gradients that came before
                    logged.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05))
            logged.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01))
            optimizer.step()
            optimizer.zero_grad()
        return logged

    for stage in STAGES:
        for offload in PLACES:
            beside_ddp(loop, stage, offload=offload, case="clipping sums")


@on_ranks(2)
def test_gradients_that_were_not_synchronised_are_clipped_after_the_ranks_have_added_them_up() -> None:
    def loop(module: Any, model: Net, optimizer: torch.optim.Optimizer) -> Any:
        with module.no_sync() if isinstance(module, DistributedDataParallel) else zeroshard.no_sync(module):
            loss_of(module, 0).backward()
        loss_of(module, 1).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        return norm

    for stage in STAGES:
        for offload in PLACES:
            beside_ddp(loop, stage, offload=offload, case="clipping without synchronisation")
    for stage in STAGES:  # all of it without synchronisation: the question itself adds up
        model, optimizer = shard(stage=stage)
        with zeroshard.no_sync(model):
            loss_of(model, 0).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        torch.testing.assert_close(norm, torch.nn.utils.get_total_norm(plain_gradients()), rtol=1e-6, atol=0)
        optimizer.step()


@on_ranks(2)
def test_our_own_clipping_agrees_with_torchs_and_both_apply_in_order() -> None:
    def clip_twice(module: nn.Module, model: Net, optimizer: torch.optim.Optimizer) -> Any:
        loss_of(module, 0).backward()
        norms = [torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)]
        if isinstance(optimizer, zeroshard.ShardedOptimizer):
            norms.append(optimizer.clip_grad_norm_(0.1).float())
        else:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.02)  # the option does this
        optimizer.step()
        return norms

    for stage in STAGES:
        for offload in PLACES:
            model = beside_ddp(clip_twice, stage, sgd, offload, case="clipping twice", clip_grad_norm=0.02)
            if stage == 0 and offload is None:
                continue  # gradients are ordinary tensors, so nobody sees that torch clips them
            norm = torch.nn.utils.get_total_norm(plain_gradients())
            assert zeroshard.stats(model).grad_norm == pytest.approx(float(norm), rel=1e-6), "before any clipping"


@on_ranks(2)
def test_parameters_of_a_single_element_are_clipped_too() -> None:
    def loop(module: nn.Module, model: Any, optimizer: torch.optim.Optimizer) -> Any:
        loss_of(module, 0).backward()
        norm = torch.nn.utils.clip_grad_norm_([model.scale, model.offset], 0.01)
        optimizer.step()
        return norm

    def make() -> tuple[Scaled, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = Scaled()
        return model, sgd(model.parameters())

    plain, plain_optimizer = make()
    expected = loop(DistributedDataParallel(plain), plain, plain_optimizer)
    for stage in SHARDED_GRADIENTS:
        model, optimizer = zeroshard.shard(*make(), stage=stage)
        torch.testing.assert_close(loop(model, model, optimizer), expected, rtol=1e-6, atol=0)
        assert_close(weights(model), dict(plain.state_dict()))


# -- reading -----------------------------------------------------------------------------------------------------------

READINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": lambda g: g.norm(),
    "norm of order 3": lambda g: g.norm(3),
    "norm of order 0": lambda g: torch.linalg.vector_norm(g, 0),
    "norm of order -inf": lambda g: torch.linalg.vector_norm(g, -math.inf),
    "torch.norm": lambda g: torch.norm(g.detach(), p=2),
    "torch.linalg.norm": lambda g: torch.linalg.norm(g),
    "data": lambda g: g.data.norm(2),
    "float": lambda g: g.detach().float().norm(p=1),
    "sum of squares": lambda g: (g**2).sum(),
    "product with itself": lambda g: (g * g).sum(),
    "mean": lambda g: g.mean(),
    "abs, mean": lambda g: g.abs().mean(),
    "abs, max": lambda g: g.abs().max(),
    "min": lambda g: torch.min(g),
    "amax": lambda g: g.amax(),
    "isfinite": lambda g: torch.isfinite(g).all(),
    "isnan": lambda g: g.isnan().any(),
    "not isnan": lambda g: (~torch.isnan(g)).all(),
    "differs from itself": lambda g: (g != g).any(),
    "count": lambda g: torch.count_nonzero(g > 0),
    "sum of booleans": lambda g: (g.abs() < 1e-3).sum(),
    "scaled": lambda g: (2 * g / 3 - 1).pow(2).mean(),
}


@matrix(stage=STAGES, offload=PLACES)
@on_ranks(2)
def test_reductions_answer_for_the_whole_gradient(stage: int, offload: str | None) -> None:
    def loop(module: nn.Module, model: Net, optimizer: torch.optim.Optimizer) -> Any:
        logged = []
        for step in range(2):
            loss_of(module, step).backward()
            logged += [read(p.grad) for read in READINGS.values() for p in model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
        return logged

    beside_ddp(loop, stage, offload=offload, case="reductions")


@on_ranks(2)
def test_facts_need_no_other_rank_and_new_tensors_are_ordinary() -> None:
    for stage in SHARDED_GRADIENTS:
        model, _ = shard(stage=stage)
        loss_of(model, 0).backward()
        if dist.get_rank() == 0:
            for name, p in model.named_parameters():
                g = p.grad
                assert g is not None
                assert (g.shape, g.dtype, g.device, g.numel(), g.dim()) == (
                    p.shape,
                    p.dtype,
                    p.device,
                    p.numel(),
                    p.ndim,
                )
                assert g.is_leaf
                assert not g.requires_grad
                assert not g.is_sparse
                assert name in repr(g)
                assert name in f"{g}"
                assert g.data is g.detach() is g
                assert hash(g) == hash(p.grad)
                noise = torch.randn_like(g)
                assert type(noise) is Tensor
                assert noise.shape == p.shape
                assert bool(torch.isfinite(noise).all())
                assert torch.zeros_like(g).is_contiguous()


REFUSED: dict[str, Callable[[Net, Tensor], Any]] = {
    "clone": lambda model, g: g.clone(),
    "rows": lambda model, g: g[0],
    "norm of rows": lambda model, g: g.norm(dim=1),
    "matrix norm": lambda model, g: torch.linalg.norm(g, 2),
    "flatten": lambda model, g: g.flatten(),
    "item": lambda model, g: g.tolist(),
    "numpy": lambda model, g: g.numpy(),
    "transposed": lambda model, g: g.T,
    "step by hand": lambda model, g: torch.ones(39, 13).sub_(g, alpha=0.1),
    "product": lambda model, g: (g * torch.ones(39, 13)).sum(),
    "condition": lambda model, g: bool(g),
    "sorted": lambda model, g: torch.sort(g),
    "of another gradient": lambda model, g: g.add_(model.get_parameter("blocks.1.up.weight").grad),
}


@on_ranks(2)
def test_what_needs_the_whole_gradient_is_refused_with_the_remedy() -> None:
    for stage in SHARDED_GRADIENTS:
        model, optimizer = shard(stage=stage)
        loss_of(model, 0).backward()
        parameter = model.get_parameter(INNER)
        g = parameter.grad
        assert g is not None
        for name, use in REFUSED.items():
            with refused(f"{name} in stage {stage}", r"blocks\.0\.up\.weight.*gathered_gradients"):
                use(model, g)
        with refused("a change of what is no gradient", "would change no gradient"):
            g.abs().mul_(2)
        before = g.abs()
        g.mul_(2)
        with refused("old values", "has changed since"):
            before.max()
        optimizer.step()
        with refused("a gradient that is gone", r"blocks\.0\.up\.weight.*gone"):
            g.norm()


def test_a_gradient_that_a_user_keeps_does_not_keep_the_model() -> None:
    model, optimizer = shard(stage=2, offload="cpu")  # a stand-in on one rank, too
    loss_of(model, 0).backward()
    kept, seen = model.first.weight.grad, weakref.ref(model)
    assert kept is not None
    kept.norm()
    del model, optimizer
    gc.collect()
    assert seen() is None
    with refused("a gradient of nothing", "gone"):
        kept.norm()


def test_one_rank_shows_gradients_of_used_parameters_alone() -> None:
    for offload in PLACES:
        model, optimizer = shard(stage=2, offload=offload)
        torch.autograd.backward(loss_of(model, 0), inputs=[model.get_parameter(INNER)])
        assert [name for name, p in model.named_parameters() if p.grad is not None] == [INNER]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        before = weights(model)
        optimizer.step()
        after = weights(model)
        assert [name for name in before if not torch.equal(before[name], after[name])] == [INNER]


# -- ranks that differ -------------------------------------------------------------------------------------------------


def call_some_blocks(module: nn.Module, model: Net, step: int, stage: int) -> Tensor:
    """A loss that uses block 0 on rank 0, block 1 on rank 1, and ``last`` on neither.

    In stage 3 all ranks gather every block in backward, so the other rank uses the block's norm.
    """

    def forward(x: Tensor) -> Tensor:
        x = model.first(x)
        for place, block in enumerate(model.blocks):
            if place == dist.get_rank():
                x = block(x)
            elif stage == 3:
                x = x + block(x, only_norm=True)
        return x

    model.forward = forward  # type: ignore[method-assign]
    return loss_of(module, step)


class Choosing(Block):
    def forward(self, x: Tensor, only_norm: bool = False) -> Tensor:
        return self.norm(x) if only_norm else super().forward(x)


def choosing_net() -> Net:
    model = net(depth=2)
    for block in model.blocks:
        block.__class__ = Choosing
    return model


@matrix(stage=STAGES, offload=PLACES)
@on_ranks(2)
def test_clipping_sees_the_gradients_that_only_other_ranks_have(stage: int, offload: str | None) -> None:
    def loop(module: nn.Module, model: Net, optimizer: torch.optim.Optimizer) -> Any:
        logged = []
        for step in range(3):
            call_some_blocks(module, model, step, stage).backward()
            logged.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01))
            optimizer.step()
            optimizer.zero_grad()
        return logged

    beside_ddp(loop, stage, offload=offload)  # AdamW decays what it does not skip


@on_ranks(2)
def test_every_parameter_shows_a_gradient_and_unused_ones_count_as_zero() -> None:
    for stage in STAGES:
        model = choosing_net()
        model, optimizer = zeroshard.shard(model, adamw(model.parameters()), stage=stage)
        for step in range(2):  # in the second step idle flats are known
            call_some_blocks(model, model, step, stage).backward()
            assert len(gradients(model)) == len(list(model.parameters()))
            assert model.last.weight.grad is not None
            assert float(model.last.weight.grad.norm()) == 0
            assert all(float(g.norm()) > 0 for block in model.blocks for g in gradients(block))
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(weights(model)["last.weight"], net(depth=2).last.weight), "the optimizer skips it"


@on_ranks(2)
def test_dropping_a_part_that_only_the_other_rank_used_drops_that_part() -> None:
    for stage in STAGES:

        def loop(module: nn.Module, model: Net, optimizer: torch.optim.Optimizer, stage: int = stage) -> None:
            for step in range(2):
                call_some_blocks(module, model, step, stage).backward()
                model.blocks[1].up.zero_grad()
                optimizer.step()
                optimizer.zero_grad()

        for offload in PLACES:
            beside_ddp(loop, stage, offload=offload)


ASKED: dict[str, tuple[Callable[[Net, Any], Any], Callable[[Net, Any], Any], str]] = {
    "norms of different orders": (
        lambda model, _: torch.nn.utils.get_total_norm(gradients(model)),
        lambda model, _: torch.nn.utils.get_total_norm(gradients(model), 1.0),
        r"rank 0: norm of order 2.*rank 1: norm of order 1",
    ),
    "a norm, and a step": (
        lambda model, _: model.first.weight.grad.norm(),
        lambda _, optimizer: optimizer.step(),
        r"rank 0: norm of order 2.*rank 1: step\(\)",
    ),
    "a step after a norm too many": (
        lambda model, optimizer: (model.first.weight.grad.sum(), optimizer.step()),
        lambda _, optimizer: optimizer.step(),
        r"rank 0: sum.*rank 1: step\(\)",
    ),
    "a factor": (
        lambda model, optimizer: (model.first.weight.grad.mul_(0.5), optimizer.step()),
        lambda _, optimizer: optimizer.step(),
        r"changed.*\(root\)",
    ),
    "a gradient that is dropped": (
        lambda model, optimizer: (setattr(model.first.weight, "grad", None), optimizer.step()),
        lambda _, optimizer: optimizer.step(),
        r"changed.*\(root\)",
    ),
}


@on_ranks(2)
def test_ranks_that_differ_in_what_they_ask_or_change_are_all_told() -> None:
    for case, (zero, one, message) in ASKED.items():
        for stage in SHARDED_GRADIENTS:
            model, optimizer = shard(stage=stage)
            loss_of(model, 0).backward()
            with named(case), pytest.raises(zeroshard.DisagreementError, match=message):
                (zero if dist.get_rank() == 0 else one)(model, optimizer)


@on_ranks(2)
def test_one_question_is_one_collective_for_all_parameters() -> None:
    model, optimizer = shard(stage=2)
    loss_of(model, 0).backward()
    asked = []
    fabric = model._zeroshard_runtime.fabric
    maximum = fabric.maximum
    fabric.maximum = lambda *args: (asked.append(args[1]), maximum(*args))[1]
    first = [g.norm() for g in gradients(model)]
    assert len(asked) == 1
    gradients(model)[0].mul_(3.0)
    assert [g.norm() for g in gradients(model)[1:]] == first[1:], "they did not change"
    assert len(asked) == 1
    torch.testing.assert_close(gradients(model)[0].norm(), 3 * first[0])
    assert len(asked) == 2
    optimizer.step()
    assert len(asked) == 3, "a step always agrees"


@on_ranks(2)
def test_the_gradients_of_several_models_are_clipped_together() -> None:
    plain = [net(depth=2), net(depth=1, width=8)]
    ddp = [DistributedDataParallel(each) for each in plain]
    for each in ddp:
        loss_of(each, 0).backward()
    expected = torch.nn.utils.clip_grad_norm_([p for each in plain for p in each.parameters()], 0.1, foreach=True)
    for stage in STAGES:
        models, optimizers = [], []
        for each in (net(depth=2), net(depth=1, width=8)):
            model, optimizer = zeroshard.shard(each, sgd(each.parameters()), stage=stage)
            models.append(model)
            optimizers.append(optimizer)
            loss_of(model, 0).backward()
        ordinary = nn.Parameter(torch.zeros(3))
        ordinary.grad = torch.zeros(3)
        everything = [ordinary, *(p for model in models for p in model.parameters())]
        norm = torch.nn.utils.clip_grad_norm_(everything, 0.1, foreach=True)
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
        for optimizer in optimizers:
            optimizer.step()


def test_one_rank_of_a_world_without_the_others_clips_too() -> None:
    with compat_groups.one_rank_of(4, 1):
        for stage in STAGES:
            model, optimizer = shard(stage=stage)
            loss_of(model, 0).backward()
            assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).dim() == 0
            optimizer.step()


# -- writing -----------------------------------------------------------------------------------------------------------


def noise_for(g: Tensor) -> Tensor:
    return torch.randn(g.shape, generator=torch.Generator().manual_seed(5)).to(g.dtype)


def used(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.grad is not None]


def assign_twice(p: nn.Parameter) -> None:
    assert p.grad is not None
    p.grad = p.grad * 3
    assert p.grad is not None
    p.grad = p.grad.clamp(-1e-3, 1e-3)


WRITINGS: dict[str, Callable[[Net], Any]] = {
    "mul_": lambda model: [g.mul_(0.5) for g in gradients(model)],
    "div_": lambda model: [g.div_(3) for g in gradients(model)],
    "operators": lambda model: [g.__imul__(0.3).__itruediv__(0.7) for g in gradients(model)],
    "foreach": lambda model: torch._foreach_mul_(gradients(model), torch.tensor(0.25)),
    "foreach by list": lambda model: torch._foreach_div_(
        gradients(model), [2.0 + i for i in range(len(gradients(model)))]
    ),
    "one alone": lambda model: model.first.weight.grad.mul_(0.5),
    "a factor that changes later": lambda model: [
        (g.mul_(f := torch.tensor(0.5)), f.zero_()) for g in gradients(model)
    ],
    "through data": lambda model: [g.data.mul_(0.5) for g in gradients(model)],
    "clamp_": lambda model: [g.clamp_(-1e-3, 1e-3) for g in gradients(model)],
    "factor and clamp_": lambda model: [g.mul_(3).clamp_(-1e-3, 1e-3).mul_(2) for g in gradients(model)],
    "add_ a number": lambda model: [g.add_(1e-3) for g in gradients(model)],
    "noise": lambda model: [g.add_(noise_for(g), alpha=0.1) for g in gradients(model)],
    "mask": lambda model: [g.mul_(noise_for(g) > 0) for g in gradients(model)],
    "rows": lambda model: model.first.weight.grad.mul_(torch.arange(13.0)[:, None]),
    "copy_": lambda model: [g.copy_(noise_for(g)) for g in gradients(model)],
    "copy_ of itself, mapped": lambda model: [g.copy_(g.clamp(-1e-3, 1e-3)) for g in gradients(model)],
    "sign_": lambda model: [g.sign_().mul_(0.01) for g in gradients(model)],
    "nan_to_num_": lambda model: [g.nan_to_num_(0.0) for g in gradients(model)],
    "assigned": lambda model: [setattr(p, "grad", noise_for(p)) for p in model.parameters()],
    "assigned to one": lambda model: setattr(model.first.weight, "grad", torch.ones(13, 7)),
    "assigned a function of itself": lambda model: [setattr(p, "grad", p.grad.clamp(-1e-3, 1e-3)) for p in used(model)],
    "assigned twice": lambda model: [assign_twice(p) for p in used(model)],
    "assigned to data": lambda model: [setattr(p.grad, "data", p.grad.data / 3) for p in used(model)],
    "zero_": lambda model: [g.zero_() for g in gradients(model)[:4]],
    "foreach zero": lambda model: torch._foreach_zero_(gradients(model)),
    "zero_grad to zero": lambda model: model.zero_grad(set_to_none=False),
}


@pytest.mark.parametrize(
    ("stage", "offload"),
    [
        (1, "cpu"),
        (3, None),
        *(slow(*other) for other in product(STAGES, PLACES) if other not in ((1, "cpu"), (3, None))),
    ],
)
@on_ranks(2)
def test_changes_in_place_count_as_under_ddp(stage: int, offload: str | None) -> None:
    for way in WRITINGS:
        with named(way):
            check_writing(way, stage, offload)


def check_writing(way: str, stage: int, offload: str | None) -> None:
    def loop(module: nn.Module, model: Net, optimizer: torch.optim.Optimizer) -> Any:
        logged = []
        for step in range(2):
            for micro in range(1 + step):  # the second step accumulates after a change
                loss_of(module, 10 * step + micro).backward()
                WRITINGS[way](model)
            logged += [g.norm() for g in gradients(model)]
            optimizer.step()
            optimizer.zero_grad()
        return logged

    beside_ddp(loop, stage, sgd, offload, case=f"writing: {way}")


@on_ranks(2)
def test_a_single_factor_gives_the_bits_of_ddp() -> None:
    for change in (lambda g: g.mul_(0.3), lambda g: g.div_(3)):
        plain = net(depth=2)
        ddp, optimizer = DistributedDataParallel(plain), sgd(plain.parameters())
        loss_of(ddp, 0).backward()
        for g in gradients(plain):
            change(g)
        optimizer.step()
        for stage in SHARDED_GRADIENTS:
            model, sharded = shard(stage=stage)
            loss_of(model, 0).backward()
            for g in gradients(model):
                change(g)
            sharded.step()
            assert_same(weights(model), dict(plain.state_dict()))


@on_ranks(2)
def test_a_gradient_set_to_zero_is_still_there_and_the_optimizer_decays_its_parameter() -> None:
    for stage in STAGES:
        for offload in PLACES:
            model, optimizer = shard(adamw, stage=stage, offload=offload)
            loss_of(model, 0).backward()
            optimizer.zero_grad(set_to_none=False)
            assert float(torch.nn.utils.get_total_norm(gradients(model))) == 0
            before = weights(model)
            optimizer.step()
            torch.testing.assert_close(weights(model), {n: v * (1 - 1e-2 * 1e-2) for n, v in before.items()})


@on_ranks(2)
def test_gradients_assigned_without_a_backward_are_trained_with() -> None:
    for stage in STAGES:
        for offload in PLACES:
            model, optimizer = shard(stage=stage, offload=offload)
            train(model, optimizer, 0)
            before = weights(model)
            model.get_parameter(INNER).grad = torch.ones(39, 13)
            optimizer.step()
            after = weights(model)
            torch.testing.assert_close(after[INNER], before[INNER] - 0.1)
            assert [name for name in before if not torch.equal(before[name], after[name])] == [INNER]


@on_ranks(2)
def test_sixteen_bit_gradients_are_clipped_in_fp32() -> None:
    for offload in PLACES:
        model, optimizer = shard(stage=2, precision="bf16", offload=offload)
        plain, plain_optimizer = shard(stage=2, precision="bf16", offload=offload, clip_grad_norm=1e-3)
        for each, steps in ((model, optimizer), (plain, plain_optimizer)):
            loss_of(each, 0).backward()
            if each is model:
                assert torch.nn.utils.clip_grad_norm_(each.parameters(), 1e-3).dtype is torch.float32
            steps.step()
        assert_close(weights(model), weights(plain))


UPDATED_IN_BACKWARD = zeroshard.Offload(update_in_backward=True)


def test_with_an_update_in_backward_gradients_can_be_neither_read_nor_changed() -> None:
    model, optimizer = shard(adamw, offload=UPDATED_IN_BACKWARD)
    loss_of(model, 0).backward()
    for use in (
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: model.first.weight.grad.mul_(2),
        lambda: model.zero_grad(set_to_none=False),
        lambda: zeroshard.gathered_gradients(model).__enter__(),
    ):
        with refused("gradients that are used up", "update_in_backward"):
            use()
    optimizer.step()


# -- loss scaling ------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_with_loss_scaling_gradients_are_seen_unscaled() -> None:
    norm = torch.nn.utils.get_total_norm(plain_gradients())
    for stage in STAGES:
        for offload in PLACES:
            model, optimizer = shard(stage=stage, precision="fp16", offload=offload)
            loss_of(model, 0).backward()
            found = torch.nn.utils.get_total_norm(gradients(model))
            torch.testing.assert_close(found, norm, rtol=1e-2, atol=0)
            torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
            assert float(model.first.weight.grad.abs().max()) == pytest.approx(1e-3, rel=1e-3)
            with zeroshard.gathered_gradients(model):
                assert float(model.first.weight.grad.abs().max()) == pytest.approx(1e-3, rel=1e-3)
            before = weights(model)["first.weight"]
            optimizer.step()
            assert float((weights(model)["first.weight"] - before).abs().max()) <= 5e-4, "without clipping, 1e-2"


@on_ranks(2)
def test_a_scaler_beside_our_own_loss_scaling_is_refused() -> None:
    for stage in (0, 3):
        model, optimizer = shard(stage=stage, precision="fp16")
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(loss_of(model, 0)).backward()
        with refused(f"scaling twice in stage {stage}", 'precision="fp16" scales the loss itself'):
            scaler.step(optimizer)


@matrix(stage=STAGES, offload=PLACES)
@on_ranks(2)
def test_a_grad_scaler_unscales_and_skips_on_all_ranks_together(stage: int, offload: str | None) -> None:
    def loop(module: nn.Module, model: Net, optimizer: torch.optim.Optimizer) -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        logged = []
        for step in range(5):
            loss = loss_of(module, step)
            if step == 2 and dist.get_rank() == 1:  # one rank overflows, all skip
                loss = loss * math.inf
            scaler.scale(loss).backward()
            if step % 2:
                scaler.unscale_(optimizer)
                logged.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            logged.append(torch.tensor(scaler.get_scale()))
        return logged

    beside_ddp(loop, stage, offload=offload, case="a scaler")


def test_norms_that_the_last_step_was_asked_for_do_not_wait_for_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = shard(stage=2, offload="cpu")
    waits = []
    landed = Transfer.landed
    monkeypatch.setattr(Transfer, "landed", lambda transfer: (waits.append(transfer), landed(transfer))[1])
    for step in range(3):
        waits.clear()
        loss_of(model, step).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        assert bool(waits) == (step == 0)
        with zeroshard.gathered_gradients(model):
            clipped = torch.nn.utils.get_total_norm(gradients(model))
        torch.testing.assert_close(clipped, 0.01 * norm / (norm + 1e-6))
        optimizer.step()
        optimizer.zero_grad()


# -- whole gradients ---------------------------------------------------------------------------------------------------


@matrix(stage=STAGES, offload=PLACES)
@on_ranks(2)
def test_gathered_gradients_are_whole_and_changes_count(stage: int, offload: str | None) -> None:
    def loop(module: nn.Module, model: Net, optimizer: torch.optim.Optimizer) -> Any:
        def whole() -> Any:
            if isinstance(optimizer, zeroshard.ShardedOptimizer):
                return zeroshard.gathered_gradients(model)
            return torch.no_grad()

        logged = []
        for step in range(2):
            call_some_blocks(module, model, step, stage).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            with whole():
                logged += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
                model.first.weight.grad[2] = 0.5
                model.first.bias.grad.data.add_(0.25)
                model.blocks[0].up.weight.grad = torch.ones(39, 13)
                model.blocks[1].up.weight.grad = None
            optimizer.step()
            optimizer.zero_grad()
        return [g for g in logged if g is not None], torch.tensor([g is None for g in logged])

    beside_ddp(loop, stage, offload=offload)


@on_ranks(2)
def test_a_step_or_a_backward_inside_gathered_gradients_is_refused() -> None:
    for stage in (0, 3):
        model, optimizer = shard(stage=stage)
        loss_of(model, 0).backward()
        with zeroshard.gathered_gradients(model):
            with refused("a step", "inside `with zeroshard.gathered_gradients"):
                optimizer.step()
            with refused("a block in a block", "inside `with zeroshard.gathered_gradients"):
                zeroshard.gathered_gradients(model).__enter__()
            loss = loss_of(model, 1)
        with pytest.raises(RuntimeError, match="by the user"), zeroshard.gathered_gradients(model):
            raise RuntimeError("by the user")
        loss.backward()
        optimizer.step()
        plain = net(depth=2)
        ddp = DistributedDataParallel(plain)
        for step in range(2):
            loss_of(ddp, step).backward()
        sgd(plain.parameters()).step()
        assert_close(weights(model), dict(plain.state_dict()))


@on_ranks(2)
def test_training_without_questions_gives_the_bits_of_ddp_after_training_with_them() -> None:
    expected = dict(trained_plainly(2).state_dict())
    for stage in STAGES:
        model, optimizer = shard(stage=stage)
        for step in range(2):
            loss_of(model, step).backward()
            torch.nn.utils.get_total_norm(gradients(model))
            optimizer.step()
            optimizer.zero_grad()
        assert_same(weights(model), expected)
