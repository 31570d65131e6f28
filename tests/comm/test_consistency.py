"""What ranks must have in common before they shard, and what may differ between them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.models import Block, net
from tests.ranks import on_ranks
from tests.training import sgd, train
from zeroshard import Offload
from zeroshard.comm.consistency import check_same_everywhere, facts, first_difference
from zeroshard.comm.fabric import Fabric
from zeroshard.config.job import load_job
from zeroshard.config.options import Config
from zeroshard.runtime import runtime_of
from zeroshard.system.machine import device_of_rank
from zeroshard.train.gpt import GPT
from zeroshard.train.gpt.task import shard_options
from zeroshard.train.rank import Rank
from zeroshard.train.task import parameter_groups

CPU = torch.device("cpu")


Given = tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]


def given(model: nn.Module, **options: Any) -> Given:
    return model, torch.optim.SGD(model.parameters(), lr=0.1), options


def facts_of(model: nn.Module, **options: Any) -> list[str]:
    config = Config.parse(options)
    return facts(model, torch.optim.AdamW(model.parameters()), config, config.device or CPU)


@pytest.mark.parametrize("rank", range(8))
def test_a_rank_without_a_device_of_its_own_choice_has_the_gpu_of_its_local_rank(rank: int) -> None:
    assert device_of_rank(torch.device("cuda"), {"LOCAL_RANK": str(rank)}, gpus=8) == torch.device("cuda", rank)


@pytest.mark.parametrize(
    ("wanted", "environment", "gpus", "found"),
    [
        ("cpu", {"LOCAL_RANK": "3"}, 8, "cpu"),
        ("cpu:1", {"LOCAL_RANK": "1"}, 0, "cpu"),
        ("cuda:5", {"LOCAL_RANK": "3"}, 8, "cuda:5"),
        ("cuda", {"LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "6"}, 1, "cuda:0"),
    ],
)
def test_other_choices_of_a_device(wanted: str, environment: dict[str, str], gpus: int, found: str) -> None:
    assert device_of_rank(torch.device(wanted), environment, gpus) == torch.device(found)


@pytest.mark.parametrize(
    ("wanted", "environment", "gpus", "message"),
    [
        ("cuda", {"LOCAL_RANK": "4"}, 4, "LOCAL_RANK=4, but this process sees 4 GPUs; start fewer ranks a node"),
        ("cuda", {"LOCAL_RANK": "1"}, 1, "LOCAL_RANK=1, but this process sees 1 GPU; start fewer"),
        ("cuda:2", {}, 2, "device='cuda:2', but this process sees 2 GPUs; name one of cuda:0 to cuda:1"),
        ("cuda", {"LOCAL_RANK": "0"}, 0, "sees no GPU; leave device= out"),
    ],
)
def test_a_gpu_that_is_not_there_is_refused(wanted: str, environment: dict[str, str], gpus: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        device_of_rank(torch.device(wanted), environment, gpus)


def test_what_the_ready_made_job_gives_to_shard_is_the_same_on_all_gpus_of_a_node() -> None:
    """Calls ``shard()`` as each rank of a node with eight GPUs does."""
    job = load_job("stdlib-10m", {"shard.stage": 2, "shard.offload": "cpu", "model.layers": 2})
    found = []
    for local in range(8):
        device = device_of_rank(torch.device("cuda"), {"LOCAL_RANK": str(local)}, gpus=8)
        here = Rank(local, 8, device)
        with torch.device("meta"):
            model = GPT(job.built_model)
        optimizer = torch.optim.AdamW(parameter_groups(model, job.train.weight_decay), lr=job.train.lr)
        config = Config.parse(shard_options(job, here))
        assert config.device == torch.device("cuda", local)
        found.append(facts(model, optimizer, config, device))
    assert all(one == found[0] for one in found)


def test_what_belongs_to_one_rank_is_no_fact() -> None:
    model = net()
    ranks = [
        facts_of(
            model,
            device=f"cuda:{rank}",
            offload=Offload(threads=rank + 1, host_memory=rank + 1),
            weights=Path(f"/scratch/{rank}"),
            init=partial(Block.forward, torch.device("cuda", rank)),
        )
        for rank in range(2)
    ]
    assert ranks[0] == ranks[1]


def wider(rank: int) -> Given:
    return given(net(width=13 + rank))


def of_another_dtype(rank: int) -> Given:
    return given(net().to([torch.float32, torch.float64][rank]))


def with_another_parameter(rank: int) -> Given:
    model = net()
    if rank:
        model.zzz = nn.Parameter(torch.ones(3))
    return given(model)


def partly_frozen(rank: int) -> Given:
    model = net()
    model.last.bias.requires_grad_(rank == 0)
    return given(model)


def with_a_buffer(rank: int) -> Given:
    model = net()
    model.register_buffer("table", torch.ones(3 + rank))
    return given(model)


def with_another_buffer(rank: int) -> Given:
    model = net()
    if rank:
        model.register_buffer("table", torch.ones(3))
    return given(model)


def with_another_optimizer(rank: int) -> Given:
    model = net()
    return model, [torch.optim.SGD, torch.optim.AdamW][rank](model.parameters(), lr=0.1), {}


def with_swapped_groups(rank: int) -> Given:
    model = net()
    members = list(model.parameters())
    halves = [members[: len(members) // 2], members[len(members) // 2 :]]
    groups = [{"params": halves[rank], "lr": 0.1}, {"params": halves[1 - rank], "lr": 0.2}]
    return model, torch.optim.SGD(groups), {}


def options(zeroth: dict[str, Any], other: dict[str, Any]) -> Callable[[int], Given]:
    return lambda rank: given(net(), **[zeroth, other][rank])


DIFFERENT: list[tuple[Callable[[int], Given], str, str]] = [
    (options({"stage": 1}, {"stage": 2}), "stage=1", "stage=2"),
    (options({"precision": "bf16"}, {}), "precision=Precision(parameters=torch.bfloat16", "parameters=None"),
    (options({"offload": "auto"}, {}), "offload=auto, allow=(), seed=0", "offload=None"),
    (options({"offload": "cpu"}, {"offload": Offload(seed=1)}), "offload.seed=0", "offload.seed=1"),
    (options({"offload": "cpu"}, {}), "offload.parameters='device'", "offload=None"),
    (options({"weights": "/a"}, {}), "weights=", "no weights="),
    (options({"clip_grad_norm": 1.0}, {}), "clip_grad_norm=1.0", "clip_grad_norm=None"),
    (wider, "parameter first.weight (13, 7)", "parameter first.weight (14, 7)"),
    (of_another_dtype, "torch.float32", "torch.float64"),
    (with_another_parameter, "parameter first.weight", "parameter zzz"),
    (partly_frozen, "last.bias (5,) torch.float32, trained", "last.bias (5,) torch.float32, frozen"),
    (with_a_buffer, "buffer table (3,)", "buffer table (4,)"),
    (with_another_buffer, "nothing more", "buffer table (3,)"),
    (with_another_optimizer, "optimizer SGD", "optimizer AdamW"),
    (with_swapped_groups, "trained, in group 0", "trained, in group 1"),
]
"""What rank 0 and rank 1 are given, and words of the first fact in which they differ."""


@pytest.mark.parametrize(("give", "zeroth", "other"), DIFFERENT, ids=[other for *_, other in DIFFERENT])
def test_what_all_ranks_must_share_is_a_fact_by_name(give: Callable[[int], Given], zeroth: str, other: str) -> None:
    found = []
    for rank in range(2):
        model, optimizer, given_options = give(rank)
        found.append(facts(model, optimizer, Config.parse(given_options), CPU))
    difference = first_difference(*found)
    assert difference is not None
    assert zeroth in difference[0]
    assert other in difference[1]


def test_settings_of_the_optimizer_are_facts_by_value_and_not_by_device_or_address() -> None:
    def described(**settings: Any) -> list[str]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters(), **settings)
        optimizer.param_groups[0] |= {"rule": lambda step: step, "limits": {"low": torch.empty(2, device="meta")}}
        return facts(model, optimizer, Config(), CPU)

    assert described() == described()
    assert described(lr=torch.tensor(0.5), foreach=False) == described(lr=torch.tensor(0.5), foreach=False)
    assert described(lr=torch.tensor(0.5), foreach=False) != described(lr=torch.tensor(0.25), foreach=False)


@on_ranks(2)
def test_ranks_may_have_devices_threads_and_limits_of_their_own() -> None:
    rank = torch.distributed.get_rank()
    model = net()
    offload = Offload(threads=1 + rank, host_memory=(1 << 30) + rank)
    optimizer = torch.optim.AdamW(model.parameters())
    model, _ = zeroshard.shard(model, optimizer, stage=2, device=f"cpu:{rank}", offload=offload)
    assert runtime_of(model).config.offload == offload


@on_ranks(2)
def test_a_stage_that_the_plan_chooses_leaves_a_rank_its_own_limits() -> None:
    rank = torch.distributed.get_rank()
    model = net()
    offload = Offload(threads=1 + rank)
    model, _ = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), stage="auto", offload=offload)
    assert runtime_of(model).config.offload == offload


@on_ranks(2)
def test_the_rank_that_differs_is_named_and_only_a_line_of_each_is_sent() -> None:
    sent: list[object] = []
    gather = Fabric.gather_objects

    def counted(fabric: Fabric, value: object) -> list[Any]:
        sent.append(value)
        return gather(fabric, value)

    model = net(depth=2 + torch.distributed.get_rank())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fabric, "gather_objects", counted)
        with pytest.raises(zeroshard.DisagreementError, match=r"rank 0 has parameter last.*rank 1 has .* blocks\.2"):
            zeroshard.shard(model, torch.optim.AdamW(model.parameters()), stage=2)
    assert len(sent) == 1
    assert sent[0] is None or len(str(sent[0])) < 500


@on_ranks(2)
def test_ranks_that_agree_send_no_facts() -> None:
    model = net()
    fabric = Fabric(CPU, 30.0)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("gather_objects", "from_rank_zero"):
            patch.delattr(Fabric, name)
        check_same_everywhere(model, torch.optim.AdamW(model.parameters()), Config(), fabric)


@on_ranks(2)
def test_ranks_that_were_told_can_shard_afterwards() -> None:
    model = net()
    with pytest.raises(zeroshard.DisagreementError, match="rank 0 has stage=1, rank 1 has stage=2"):
        zeroshard.shard(model, sgd(model.parameters()), stage=1 + torch.distributed.get_rank(), stall_timeout=5)
    model, optimizer = zeroshard.shard(model, sgd(model.parameters()), stage=1)
    train(model, optimizer, 0)
    assert not torch.equal(zeroshard.full_state_dict(model)["first.weight"], net().first.weight)
