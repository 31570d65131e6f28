"""What ``offload="auto"`` takes, with what the user allows, and which call it names where nothing exact fits."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from tests.models import net
from tests.ranks import on_ranks
from zeroshard.config.job import ModelConfig
from zeroshard.config.offload import Offload, OffloadChoice
from zeroshard.config.options import Config
from zeroshard.plan import room as room_module
from zeroshard.plan.advice import Row, Variant
from zeroshard.plan.foresee import Advice, Foresight
from zeroshard.plan.memory.device_memory import Phase
from zeroshard.plan.room import Room, least, room_of
from zeroshard.runtime import runtime_of
from zeroshard.system import device, machine
from zeroshard.train.gpt import GPT

GPT2 = ModelConfig(layers=12, hidden=768, heads=12, sequence=512, vocabulary=50257, checkpointing=True)
EXAMPLE = (torch.zeros(8, 512, dtype=torch.long, device="meta"),) * 2
DEEP = ModelConfig(layers=24, hidden=512, heads=8, sequence=256, vocabulary=2048, checkpointing=True)
PSI = 76_900_000
"""A little more than the parameters of ``DEEP``."""
SMALL = 0.275
"""GB of a device that has room for the parameters of ``DEEP``, and for no states."""
ALL = ("moments", "update_in_backward", "delayed_update_after")
GIB = 1 << 30


def foresee(gigabytes: float, host: float, shape: ModelConfig = GPT2, **options: Any) -> Foresight:
    with torch.device("meta"):
        model = GPT(shape)
    room = Room(int(gigabytes * 1e9), int(host * 1e9), title="NVIDIA H200")
    config = Config.parse({"precision": "bf16", "stage": 0, **options})
    return Foresight(model, torch.optim.AdamW(model.parameters(), lr=1e-3), config, 1, room)


def advise(gigabytes: float, host: float, *allow: str, **options: Any) -> Advice:
    return foresee(gigabytes, host, offload=Offload.auto(allow), **options).advise()


def test_less_host_memory_changes_more_and_only_as_much_as_it_must() -> None:
    halves = {"split_master": True, "read_back": True}
    for bytes_a_parameter, needed in (
        (15, Offload()),
        (13, Offload(**halves)),
        (11, Offload(split_master=True, moments=torch.bfloat16)),
        (8.8, Offload(**halves, moments=torch.bfloat16)),
        (8, Offload(**halves, moments="8bit")),
        (5.5, Offload(**halves, moments="8bit", update_in_backward=True)),
    ):
        advice = advise(SMALL, bytes_a_parameter * PSI / 1e9, *ALL, shape=DEEP)
        assert (advice.problem, advice.offload) == (None, needed)


def test_states_stay_on_the_device_as_far_as_there_is_room() -> None:
    fractions = []
    for gigabytes in (2.6, 2.0, 1.0, 0.6):
        offload = advise(gigabytes, 100).offload
        assert offload is not None
        assert offload.moments is torch.float32
        fractions.append(offload.host_fraction)
    assert fractions == sorted(fractions)
    assert fractions[0] < 0.3
    assert fractions[-1] == 1


def test_blocks_keep_their_activations_before_states_stay_on_the_device() -> None:
    shallow, recompute = replace(DEEP, layers=4, checkpointing=False), zeroshard.Activations(recompute="auto")
    example = (torch.zeros(8, 256, dtype=torch.long, device="meta"),) * 2
    foresight = foresee(0.4, 10, shape=shallow, offload="auto", example=example, activations=recompute)
    advice = foresight.advise()
    every, taken = (foresight.row(0, Variant("", offload)) for offload in (Offload(), advice.offload))
    assert advice.offload is not None
    assert advice.offload.host_fraction in [percent / 100 for percent in range(30, 70)]
    assert every.recomputed == taken.recomputed == 0, "with fewer states on the host, blocks would be recomputed"
    assert every.time is not None
    assert taken.time is not None
    assert taken.time.total < 0.9 * every.time.total


def test_where_blocks_must_be_recomputed_no_share_of_the_states_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each share costs a plan for many numbers of blocks, which takes minutes in a deep model."""
    tried: list[float | str] = []
    row = Foresight.row

    def counted(self: Foresight, stage: int, variant: Variant) -> Row:
        tried.append(0 if variant.offload is None else variant.offload.host_fraction)
        return row(self, stage, variant)

    monkeypatch.setattr(Foresight, "row", counted)
    example = (torch.zeros(2, 256, dtype=torch.long, device="meta"),) * 2
    recompute = zeroshard.Activations(recompute="auto")
    advice = advise(0.35, 10, shape=replace(DEEP, checkpointing=False), example=example, activations=recompute)
    assert advice.decision is not None
    assert advice.decision.recomputed > 0
    assert set(tried) == {0, 1.0}


def test_states_on_the_device_make_a_small_host_do() -> None:
    assert advise(2.2, 1.2).problem is None, "less than half of the states go to the host"
    assert advise(1.0, 1.2).problem is not None


@pytest.mark.parametrize("allow", [(), ("moments",), ("update_in_backward",), ALL])
@pytest.mark.parametrize("host", [0.9, 1.2, 1.7, 3])
def test_nothing_is_changed_that_is_not_allowed(allow: tuple[str, ...], host: float) -> None:
    offload = advise(1.5, host, *allow, example=EXAMPLE).offload
    if offload is not None:
        assert "moments" in allow or offload.moments is torch.float32
        assert "update_in_backward" in allow or not offload.update_in_backward
        assert "delayed_update_after" in allow or offload.delayed_update_after is None


@pytest.mark.parametrize(
    "forbidding",
    [{"clip_grad_norm": 1.0}, {"on_nonfinite": "skip"}, {"precision": "fp16"}],
    ids=["clipping", "looking for NaN", "loss scaling"],
)
def test_options_that_need_all_gradients_exclude_an_update_in_backward(forbidding: dict[str, Any]) -> None:
    for host in (1.0, 1.7, 3):
        offload = advise(1.2, host, *ALL, **forbidding).offload
        assert offload is None or not offload.update_in_backward


def test_times_decide_if_they_are_known() -> None:
    exact, free = advise(3.0, 100, example=EXAMPLE), advise(3.0, 100, *ALL, example=EXAMPLE)
    assert exact.chosen is not None
    assert free.chosen is not None
    assert "chosen, the fastest that fits (" in exact.chosen

    def seconds(advice: Advice) -> float:
        foresight = foresee(3.0, 100, offload="auto", example=EXAMPLE)
        time = foresight.row(0, Variant("", advice.offload)).time
        assert time is not None
        return time.total

    assert seconds(free) < 0.95 * seconds(exact)


def test_the_reason_names_each_allowance_that_was_used() -> None:
    said = advise(SMALL, 5.5 * PSI / 1e9, *ALL, shape=DEEP).chosen
    assert said is not None
    assert re.search(r"Used as allowed: 8-bit moments, because with bf16 ones a rank needs .* of host memory", said)
    assert "Used as allowed: update_in_backward, because without it " in said
    said = advise(3.0, 100, *ALL, example=EXAMPLE).chosen
    assert said is not None
    assert re.search(r"Used as allowed: .* a step takes [\d.]+ s and not [\d.]+ s", said)
    exact = advise(80, 100, *ALL).chosen
    assert exact is not None
    assert "allowed" not in exact


def named_call(problem: str) -> OffloadChoice:
    """The argument of ``shard()`` that a message names."""
    found = re.search(r"offload=zeroshard\.Offload\.auto\((.*?)\) \(stage", problem)
    assert found is not None, problem
    call = ast.parse(f"f({found[1]})", mode="eval").body
    assert isinstance(call, ast.Call)
    return Offload.auto(**{keyword.arg or "": ast.literal_eval(keyword.value) for keyword in call.keywords})


@pytest.mark.parametrize(
    ("bytes_a_parameter", "allow"),
    [(11.5, ("moments",)), (8, ("moments",)), (5.5, ("moments", "update_in_backward"))],
)
@pytest.mark.parametrize("counted", [False, True], ids=["states", "activations"])
def test_the_error_names_a_call_that_fits(bytes_a_parameter: float, allow: tuple[str, ...], counted: bool) -> None:
    example = (torch.zeros(8, 256, dtype=torch.long, device="meta"),) * 2 if counted else None
    device_memory, host = 0.36 if counted else SMALL, bytes_a_parameter * PSI / 1e9

    def of(choice: OffloadChoice) -> Advice:
        return foresee(device_memory, host, shape=DEEP, offload=choice, example=example).advise()

    problem = of(Offload.auto()).problem
    assert problem is not None
    assert 'nothing that "auto" may choose fits here' in problem
    choice = named_call(problem)
    assert choice.allow == allow
    advice = of(choice)
    assert advice.problem is None
    assert advice.warning is None
    assert advice.offload is not None


def test_the_call_has_the_limits_that_were_given() -> None:
    limited = Offload.auto(threads=2, host_memory=8 * PSI, seed=3)
    problem = foresee(SMALL, 8 * PSI / 1e9, shape=DEEP, offload=limited).advise().problem
    assert problem is not None
    choice = named_call(problem)
    assert choice.limits == limited.limits
    offload = foresee(SMALL, 8 * PSI / 1e9, shape=DEEP, offload=choice).advise().offload
    assert offload is not None
    assert (offload.threads, offload.host_memory, offload.seed) == (2, 8 * PSI, 3)


def test_where_nothing_fits_the_error_says_what_comes_nearest_and_what_would_help() -> None:
    problem = advise(0.2, 0.3).problem
    assert problem is not None
    assert "No stage or offload would fit on 1 rank(s); it takes more ranks, a smaller batch" in problem
    assert 'Nearest comes stage=0, offload=zeroshard.Offload(moments="8bit", split_master=True' in problem


def test_a_choice_that_may_not_fit_names_the_call_too() -> None:
    advice = advise(1.0, 8 * PSI / 1e9, shape=DEEP)  # it fits by the plan, and leaves the host too little
    assert advice.problem is None
    assert advice.chosen is not None
    assert "and even that may not fit" in advice.chosen
    assert named_call(advice.chosen).allow == ("moments",)


def test_initialising_counts() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(100_000, 1024)  # 102 million of 111 million parameters
            self.blocks = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(8))

    with torch.device("meta"):
        model = Wide()
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    offload = Offload(split_master=True, read_back=True, update_in_backward=True)
    config = Config.parse({"precision": "bf16", "stage": 0, "offload": offload})
    foresight = Foresight(model, made, config, 1, Room(10**12, 10**12))
    needs = foresight.row(0, Variant("", offload)).budget
    assert needs.phase is Phase.START
    small = Room(int(0.9 * needs.peak.total), 10**12)
    said = Foresight(model, made, config, 1, small).advise().warning
    assert said is not None
    assert "of device memory in shard() (" in said


class LlamaWithLoss(nn.Module):
    """As in ``examples/one_gpu/personal_8b.py``: the logits are made chunk by chunk."""

    def __init__(self) -> None:
        super().__init__()
        import transformers

        shape = transformers.LlamaConfig(
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            vocab_size=128256,
            tie_word_embeddings=False,
        )
        self.model = transformers.AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.model.get_decoder()(tokens, use_cache=False).last_hidden_state
        chunks = zip(hidden.flatten(0, 1).split(1024), targets.flatten().split(1024), strict=True)
        return torch.stack([zeroshard.checkpoint(self.loss_of, *chunk) for chunk in chunks]).sum()

    def loss_of(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.model.lm_head(hidden).float(), targets, reduction="sum")


def test_a_persons_machine_trains_8_billion_parameters_with_what_is_allowed() -> None:
    with torch.device("meta"):
        model = LlamaWithLoss()
    assert sum(parameter.numel() for parameter in model.parameters()) == 8_030_261_248
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    room = Room(24 * GIB, 64 * GIB, title="NVIDIA H200")

    def advice(tokens: int, *allow: str) -> tuple[Foresight, Advice]:
        example = (torch.zeros(tokens // 2048, 2048, dtype=torch.long, device="meta"),) * 2
        options = {"stage": "auto", "precision": "bf16", "activations": zeroshard.Activations(), "example": example}
        config = Config.parse({**options, "offload": Offload.auto(allow, host_memory=64 * GIB, threads=8)})
        foresight = Foresight(model, optimizer, config, 1, room)
        return foresight, foresight.advise()

    for tokens, stage, on_device in ((2048, 0, 16e9), (16384, 3, 0)):
        exact = advice(tokens)[1].problem
        assert exact is not None
        assert set(named_call(exact).allow) <= {"moments", "update_in_backward"}
        foresight, found = advice(tokens, "moments", "update_in_backward")
        assert (found.problem, found.warning, found.stage) == (None, None, stage)
        needs = foresight.row(found.stage, Variant("", found.offload)).budget
        assert needs.at_rest.parameters == pytest.approx(on_device, rel=0.01)
        assert needs.peak.total < 0.96 * 24 * GIB
        assert needs.host.total < 0.95 * 64 * GIB


@on_ranks(2)
def test_ranks_with_different_limits_agree() -> None:
    rank = torch.distributed.get_rank()
    model = net(width=64)
    choice = Offload.auto(allow=("moments",) if rank else (), threads=1 + rank, host_memory=10**9 + rank)
    with pytest.raises(zeroshard.DisagreementError, match=r"offload=auto, allow=\(\), .* allow=\('moments',\)"):
        zeroshard.shard(model, torch.optim.AdamW(model.parameters()), offload=choice)
    choice = Offload.auto(threads=1 + rank, host_memory=10**9 + rank)
    model, _ = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), stage=2, offload=choice)
    assert zeroshard.stats(model).stage == 2


def test_the_room_is_what_every_rank_has(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr("zeroshard.plan.room.available_memory", lambda asked, sharing: 80 * GIB // sharing)
    monkeypatch.setattr(machine, "available_memory", lambda: 100 * GIB)
    monkeypatch.setattr(machine, "device_title", lambda asked: "some GPU")
    model = net()
    limits = (Config.parse({"offload": Offload.auto(host_memory=limit)}) for limit in (30 * GIB, 70 * GIB))
    rooms = [room_of(model, gpu, config, local_ranks=2, device_ranks=2) for config in limits]
    assert rooms == [Room(40 * GIB, 30 * GIB, 2, "some GPU"), Room(40 * GIB, 50 * GIB, 2, "some GPU")]
    assert least(rooms) == rooms[0]


@on_ranks(2)
def test_ranks_know_how_many_share_their_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from zeroshard.comm.fabric import Fabric

    fabric = Fabric(torch.device("cpu"), 30.0)
    assert fabric.device_ranks == 2, "on CPUs they share the host"
    fabric.device = torch.device("cuda", 0)
    original = device.identity
    try:
        for shared in (True, False):
            name = "GPU-0" if shared else f"GPU-{fabric.rank}"
            monkeypatch.setattr("zeroshard.system.device.identity", lambda asked, name=name: name)
            assert fabric._count_device_ranks() == (2 if shared else 1)
    finally:
        monkeypatch.undo()
    assert device.identity is original


def shard_in(room: Room, **options: Any) -> tuple[nn.Module, Any]:
    """Shards a model of 4.2 million parameters with the memory of a rank with a GPU. It computes on the CPU."""
    original = room_module.room_of
    room_module.room_of = lambda *_, **__: room
    try:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(16)))
        made = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return zeroshard.shard(model, made, precision="bf16", **options)
    finally:
        room_module.room_of = original


def train(model: nn.Module, optimizer: Any) -> list[float]:
    losses = []
    for _ in range(6):
        loss = model(torch.ones(4, 512, dtype=torch.bfloat16)).float().sub(1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@on_ranks(2)
def test_ranks_with_different_rooms_take_one_choice_and_train() -> None:
    rank = torch.distributed.get_rank()
    ample, some, little = (Room(90_000_000, host, 2) for host in (90_000_000, 35_000_000, 15_000_000))
    options: dict[str, Any] = {"stage": 2, "example": (torch.ones(4, 512),)}
    model, optimizer = shard_in(some if rank else ample, offload=Offload.auto(threads=1), **options)
    offload = runtime_of(model).config.offload
    assert offload is not None
    assert (offload.moments, offload.threads) == (torch.float32, 1)
    losses = train(model, optimizer)
    assert losses[-1] < losses[0]

    mine = little if rank else ample
    with pytest.raises(ValueError, match='nothing that "auto" may choose fits here') as refused:
        shard_in(mine, offload="auto", **options)
    model, optimizer = shard_in(mine, offload=named_call(str(refused.value)), **options)
    offload = runtime_of(model).config.offload
    assert offload is not None
    assert offload.moments == "8bit"
    losses = train(model, optimizer)
    assert losses[-1] < losses[0]
    host = zeroshard.stats(model).host_memory
    assert host is not None
    assert host.total < 15_000_000


def test_states_that_auto_leaves_on_the_device_are_there() -> None:
    model, optimizer = shard_in(Room(120_000_000, 200_000_000), stage=0, offload="auto")
    offload = runtime_of(model).config.offload
    assert offload is not None
    assert offload.host_fraction != "auto"
    assert 0.2 < offload.host_fraction < 0.9
    train(model, optimizer)
    stats, block = zeroshard.stats(model), 512 * 512
    staying = int(16 * (1 - offload.host_fraction))
    assert stats.memory.optimizer_states == 12 * staying * block
    assert stats.host_memory is not None
    assert stats.host_memory.total == 14 * (16 - staying) * block
