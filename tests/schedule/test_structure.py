"""A sharded model whose set of parameters changes says so at the next forward or step, by name."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize

import zeroshard
from tests.matrix import Stages, in_stages
from tests.models import Block, Net, batch, loss_of, net
from tests.ranks import on_ranks
from tests.training import STAGES, assert_same, refused, sgd, shard, train, trained_plainly, weights
from zeroshard.schedule import structure

# -- what is refused --------------------------------------------------------------------------------------------------


def add_a_layer(model: Net) -> None:
    model.extra = nn.Linear(2, 2)


def add_a_layer_deep_inside(model: Net) -> None:
    model.blocks[1].up.extra = nn.Sequential(nn.ReLU())
    model.blocks[1].up.extra.append(nn.Linear(2, 2))


def append_a_block(model: Net) -> None:
    model.blocks.append(Block(13))


def insert_a_block(model: Net) -> None:
    model.blocks.insert(1, Block(13))


def replace_the_head(model: Net) -> None:
    model.last = nn.Linear(13, 5)


def replace_a_parameter(model: Net) -> None:
    model.blocks[0].norm.weight = nn.Parameter(torch.ones(13))


def register_a_parameter(model: Net) -> None:
    model.blocks[0].register_parameter("scale", nn.Parameter(torch.ones(1)))


def normalise_weights(model: Net) -> None:
    with zeroshard.gathered(model):
        parametrizations.weight_norm(model.last)


def normalise_weights_as_of_old(model: Net) -> None:
    with zeroshard.gathered(model):
        torch.nn.utils.weight_norm(model.last)


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def parametrise(model: Net) -> None:
    with zeroshard.gathered(model, write=True):
        parametrize.register_parametrization(model.last, "bias", Doubled())


CHANGES: dict[Callable[[Net], None], str] = {
    add_a_layer: r"parameter 'extra\.weight' was added",
    add_a_layer_deep_inside: r"parameter 'blocks\.1\.up\.extra\.1\.weight' was added",
    append_a_block: r"parameter 'blocks\.2\.norm\.weight' was added",
    insert_a_block: r"parameter 'blocks\.1\.norm\.weight' was replaced",
    replace_the_head: r"parameter 'last\.weight' was replaced",
    replace_a_parameter: r"parameter 'blocks\.0\.norm\.weight' was replaced",
    register_a_parameter: r"parameter 'blocks\.0\.scale' was added",
    normalise_weights: r"'last\.parametrizations\.weight': a parametrisation",
    normalise_weights_as_of_old: r"parameter 'last\.weight_g' was added",
    parametrise: r"'last\.parametrizations\.bias': a parametrisation",
}


def assert_refused(change: Callable[[Net], None], stage: int) -> None:
    model, optimizer = shard(stage=stage)
    train(model, optimizer, 0)
    loss_of(model, 1).backward()
    change(model)
    says = f"{CHANGES[change]}.* before zeroshard.shard\\(\\)"
    for _ in range(2):
        with refused(f"forward after {change.__name__}", says):
            loss_of(model, 2)
        with refused(f"step after {change.__name__}", says):
            optimizer.step()
        with refused(f"evaluation after {change.__name__}", says), torch.no_grad():
            loss_of(model, 2)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("change", CHANGES)
def test_a_parameter_that_comes_after_shard_is_refused_at_the_next_forward_and_step(
    change: Callable[[Net], None],
) -> None:
    for stage in STAGES:
        assert_refused(change, stage)


@on_ranks(2)
def test_a_parameter_that_comes_after_shard_is_refused_on_all_ranks() -> None:
    for stage in STAGES:
        assert_refused(replace_the_head, stage)


@in_stages
@on_ranks(2)
def test_a_change_that_is_undone_is_as_if_it_never_was(stages: Stages) -> None:
    expected = dict(trained_plainly(2).state_dict())
    for stage in stages:
        model, optimizer = shard(stage=stage)
        train(model, optimizer, 0)
        head = model.last
        model.last = nn.Linear(13, 5)
        model.extra = nn.Linear(2, 2)
        with refused("a replaced head", r"'last\.weight'"):
            loss_of(model, 1)
        model.last = head
        del model.extra
        train(model, optimizer, 1)
        assert_same(weights(model), expected)


# -- what is allowed --------------------------------------------------------------------------------------------------


@in_stages
@on_ranks(2)
def test_what_brings_no_parameter_stays_allowed(stages: Stages) -> None:
    expected = dict(trained_plainly(3).state_dict())
    for stage in stages:
        model, optimizer = shard(stage=stage)
        train(model, optimizer, 0)
        model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
        model.blocks[1].compile(backend="eager")
        model.last = model.last
        model.first.weight = model.first.weight
        model.dropout = nn.Sequential(nn.Dropout(0.0))
        model.blocks[1].register_buffer("seen", torch.zeros(1), persistent=False)
        train(model, optimizer, 1)
        train(model, optimizer, 2)
        found = {name.replace("_orig_mod.", ""): value for name, value in weights(model).items()}
        assert_same(found, expected)
        model.dropout.append(nn.Linear(2, 2))
        with refused("a layer in a module that came later", r"'dropout\.1\.weight' was added"):
            loss_of(model, 3)


class Skipping(Net):
    """Trains without the parts that are gone, as the plain model does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x) if hasattr(self, "last") else x


@in_stages
@on_ranks(2)
def test_parameters_that_are_deleted_are_not_used_any_more_and_in_no_state_dict(stages: Stages) -> None:
    def delete(model: Skipping) -> None:
        del model.last
        del model.blocks[1]
        model.first.bias = None

    def build() -> Skipping:
        torch.manual_seed(1)
        return Skipping(depth=2)

    plain = build()
    optimizer = sgd(plain.parameters())
    train(DistributedDataParallel(plain), optimizer, 0)
    delete(plain)
    train(DistributedDataParallel(plain), optimizer, 1)
    for stage in stages:
        model = build()
        model, optimizer = zeroshard.shard(model, sgd(model.parameters()), stage=stage)
        train(model, optimizer, 0)
        delete(model)
        train(model, optimizer, 1)
        assert_same(weights(model), dict(plain.state_dict()))
        with zeroshard.gathered(model):
            assert_same(model.state_dict(), dict(plain.state_dict()))


def test_functional_call_with_other_tensors_is_no_change_of_the_model() -> None:
    model, optimizer = shard(stage=2)
    model.last = model.last  # noted, and looked at in the next forward
    others = {name: value.detach() * 2 for name, value in model.named_parameters()}
    torch.func.functional_call(model, others, (batch(0),))
    train(model, optimizer, 0)


def test_other_models_are_built_as_ever_and_nothing_is_kept() -> None:
    before = set(structure._structure_of)
    model, optimizer = shard(stage=1)
    other = net(depth=1)
    other.extra = nn.Linear(2, 2)
    train(model, optimizer, 0)
    assert set(structure._structure_of) - before == {id(module) for module in model.modules()}
    del model, optimizer
    gc.collect()
    assert set(structure._structure_of) <= before


# -- torch's own data parallelism -------------------------------------------------------------------------------------

WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "DistributedDataParallel": DistributedDataParallel,
    "DataParallel": DataParallel,
    "FullyShardedDataParallel": lambda module: FullyShardedDataParallel(module, device_id=torch.device("cpu")),
    "fully_shard": fully_shard,
}


@on_ranks(2)
def test_torchs_data_parallelism_around_a_sharded_model_is_refused_at_its_construction() -> None:
    for stage in STAGES:
        for name in ("DistributedDataParallel", "DataParallel"):
            model, optimizer = shard(stage=stage)
            for wrapped in (model, model.blocks[0], nn.Sequential(torch.compile(model)), model.last):
                with refused(f"{name} in stage {stage}", f"{name} was put around a sharded model.*leave {name} out"):
                    WRAPPERS[name](wrapped)
            with refused("DDP, as Accelerate makes it", "ShardedAccelerator.*ShardedTrainer"):
                DistributedDataParallel(model)
            train(model, optimizer, 0)
            other = nn.Linear(2, 2)
            assert WRAPPERS[name](other).module is other
    model, _ = shard(stage=0)
    with refused("FSDP", "FullyShardedDataParallel was put around a sharded model"):
        WRAPPERS["FullyShardedDataParallel"](model)
    model, _ = shard(stage=0)
    fully_shard(model.blocks[0])
    with refused("FSDP2", r"'blocks\.0' was given to fully_shard after zeroshard\.shard\(\); leave"):
        loss_of(model, 0)


@pytest.mark.parametrize("name", WRAPPERS)
@on_ranks(2)
def test_torchs_data_parallelism_inside_a_model_is_refused_by_shard(name: str) -> None:
    model = net(depth=2)
    model.blocks[0] = WRAPPERS[name](model.blocks[0])
    with pytest.raises(ValueError, match=rf"'blocks\.0' was given to {name} before shard\(\); leave {name} out"):
        zeroshard.shard(model, sgd(model.parameters()))
    whole = WRAPPERS[name](net(depth=2))
    with pytest.raises(ValueError, match=f"the model was given to {name} before"):
        zeroshard.shard(whole, sgd(whole.parameters()))


def test_adapters_that_come_after_shard_are_refused_by_name() -> None:
    peft = pytest.importorskip("peft")
    model, optimizer = shard(stage=2)
    config = peft.LoraConfig(target_modules=["up"], r=2)
    with suppress(ImportError):
        peft.inject_adapter_in_model(config, model)
    with refused("LoRA after shard", r"'blocks\.0\.up\.lora_A\.default\.weight' was added"):
        loss_of(model, 0)
    with refused("LoRA after shard", r"'blocks\.0\.up\.lora_A\.default\.weight' was added"):
        optimizer.step()
