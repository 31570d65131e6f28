"""The plan inside ``shard()``: warnings about settings that cannot fit, and the choice of "auto"."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from tests.models import loss_of, net
from tests.ranks import on_ranks
from zeroshard.config.job import ModelConfig
from zeroshard.config.offload import Offload
from zeroshard.config.options import Config
from zeroshard.plan.foresee import Advice, Foresight
from zeroshard.plan.machine.profile import FOLDER, calibrated_file, load
from zeroshard.plan.room import Room
from zeroshard.system import machine
from zeroshard.train.gpt import GPT

CONFIG = ModelConfig(layers=12, hidden=768, heads=12, sequence=512, vocabulary=50257, checkpointing=True)
EXAMPLE = (torch.zeros(8, 512, dtype=torch.long, device="meta"),) * 2


def advise(room: Room, shards: int = 1, optimizer: str = "AdamW", **options: Any) -> Advice:
    with torch.device("meta"):
        model = GPT(CONFIG)
    made = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-3)
    return Foresight(model, made, Config.parse({"precision": "bf16", **options}), shards, room).advise()


def gpu(gigabytes: float, host: float = 100, title: str = "NVIDIA H200") -> Room:
    return Room(int(gigabytes * 1e9), int(host * 1e9), title=title)


def test_a_setting_that_fits_starts_without_a_message() -> None:
    assert advise(gpu(80), stage=0) == Advice(0, None)


def test_a_warning_names_sizes_by_kind_and_what_would_fit() -> None:
    said = advise(gpu(0.6), 8, stage=1).warning
    assert said is not None
    assert "stage 1, offload none will not fit" in said
    assert "parameters 248 MB, gradients 248 MB, optimizer states" in said
    assert "600 MB are there" in said
    assert 'What would fit: stage=3 (554 MB); stage=2, offload="cpu" (' in said
    assert "not activations, which depend on the batch (pass example=" in said


def test_a_host_without_room_gives_a_warning_too() -> None:
    said = advise(gpu(80, host=1), stage=2, offload="cpu").warning
    assert said is not None
    assert "1.74 GB of host memory" in said
    assert "1 GB are there for it" in said


def test_with_an_example_activations_count() -> None:
    said = advise(gpu(4), stage=0, example=EXAMPLE).warning
    assert said is not None
    assert "activations 2." in said
    assert "and the activations of one micro-batch." in said
    assert advise(gpu(4), stage=0).warning is None


@pytest.mark.slow
def test_activations_that_shard_recomputes_count_too() -> None:
    def told(room: Room, **options: Any) -> str:
        with torch.device("meta"):
            model = GPT(replace(CONFIG, checkpointing=False))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        config = Config.parse({"precision": "bf16", "stage": 0, "example": EXAMPLE, **options})
        return Foresight(model, optimizer, config, 1, room).advise().warning or ""

    assert "activations 3." in told(gpu(5))
    assert not told(gpu(5), activations=zeroshard.Activations())
    assert "activations 2." in told(gpu(4), activations=zeroshard.Activations())
    away = zeroshard.Activations(offload=True)
    assert not told(gpu(5, host=1), activations=away)
    assert "75.5 MB of host memory (75.5 MB of it pinned), and 50 MB are there" in told(
        gpu(5, host=0.05), activations=away
    )
    assert told(gpu(1), activations=away, defragment=True) == told(gpu(1), activations=away)
    untraced = zeroshard.Activations(recompute=0, offload=True)
    assert "not traced with activations= and activations.recompute=0" in told(gpu(1), activations=untraced)


def test_decoders_of_hugging_face_are_traced_as_they_train() -> None:
    import transformers

    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4, use_cache=False
            )
        )
    model.gradient_checkpointing_enable()
    tokens = torch.zeros(2, 64, dtype=torch.long)
    config = Config.parse({"precision": "bf16", "stage": 0, "example": {"input_ids": tokens, "labels": tokens}})
    foresight = Foresight(model, torch.optim.AdamW(model.parameters()), config, 1, gpu(80))
    assert foresight.counts_activations, foresight.activations


def test_a_mask_in_the_example_is_read() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x) if mask.all() else layer(x.relu())
            return x

    model, example = Masked(), (torch.ones(16, 8), torch.tensor([True, False]))
    config = Config.parse({"stage": 0, "example": example})
    foresight = Foresight(model, torch.optim.AdamW(model.parameters()), config, 1, gpu(80))
    assert foresight.counts_activations, foresight.activations


def test_a_message_says_that_an_example_cannot_be_traced() -> None:
    said = advise(gpu(1), stage=0, example=(torch.zeros(3, 7, 5),)).warning
    assert said is not None
    assert "not activations, for tracing GPT with example= failed (" in said


def test_a_message_says_that_no_setting_fits() -> None:
    said = advise(gpu(0.1, host=0.1), 2, stage=3).warning
    assert said is not None
    assert "No stage or offload would fit on 2 rank(s); it takes more ranks" in said
    assert "Nearest comes stage=3, offload=zeroshard.Offload(" in said


@pytest.mark.parametrize(
    ("memory", "shards", "stage", "offload"),
    [
        (80, 1, 0, None),
        (2.2, 1, 0, Offload(host_fraction=0.35)),  # the device has room for the other states
        (1.2, 8, 1, None),
        (0.8, 8, 2, None),
        (0.6, 8, 3, None),
    ],
)
def test_auto_changes_as_little_as_fits(memory: float, shards: int, stage: int, offload: Offload | None) -> None:
    advice = advise(gpu(memory), shards, stage="auto", offload="auto")
    assert (advice.stage, advice.offload) == (stage, offload)
    assert advice.chosen is not None
    named = "none" if offload is None else "cpu, 35% of the states"
    assert f"stage {stage}, offload {named} chosen" in advice.chosen


def test_auto_warns_if_states_fit_and_the_rest_may_not() -> None:
    advice = advise(gpu(0.3, host=0.1), 8, stage="auto", offload="auto")
    assert advice.problem is None
    assert advice.chosen is not None
    assert "and even that may not fit" in advice.chosen
    assert advice.warning is not None
    assert "will not fit: a rank needs at least" in advice.warning


def test_auto_refuses_if_not_even_states_fit() -> None:
    advice = advise(gpu(0.1, host=0.1), 8, stage="auto", offload="auto")
    assert advice.problem is not None
    assert 'nothing that "auto" may choose fits here. Nearest comes stage 3, offload' in advice.problem
    assert "but a rank then needs at least" in advice.problem


def test_auto_never_changes_results_or_what_a_loop_may_do() -> None:
    for memory in (0.2, 0.4, 0.8, 1.6, 3.2):
        found = advise(gpu(memory), 4, stage="auto", offload="auto").offload
        assert found is None or (found.moments is torch.float32 and not found.update_in_backward)


def test_a_stage_that_is_given_stays_and_so_does_an_offload() -> None:
    assert advise(gpu(2.2), 1, stage=2, offload="auto") != Advice(2, None)
    assert advise(gpu(2.2), 1, stage=2, offload="auto").offload == Offload(host_fraction=0.35)
    given = Offload(threads=2)
    assert advise(gpu(80), 4, stage="auto", offload=given).offload is given
    assert advise(gpu(80), 4, stage="auto", offload=given).stage == 2


def test_auto_takes_the_fastest_if_times_are_known() -> None:
    said = advise(gpu(80), 8, stage="auto", offload="auto", example=EXAMPLE).chosen
    assert said is not None
    assert "chosen, the fastest that fits (" in said
    assert "s a step as on 8 x H200" in said


def test_a_measured_profile_of_this_machine_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = calibrated_file("Some GPU")
    file.parent.mkdir(parents=True)
    text = (FOLDER / "a100.toml").read_text()
    file.write_text(text.replace("DGX A100, 8 x A100 80 GB", "the one at hand"))
    assert load(file).title == "the one at hand"
    said = advise(gpu(80, title="Some GPU"), 8, stage="auto", example=EXAMPLE).chosen
    assert said is not None
    assert "as on the one at hand" in said
    file.write_text("nonsense")
    with pytest.warns(UserWarning, match=r"not TOML.*measure anew with `zeroshard plan --calibrate`"):
        advise(gpu(80, title="Some GPU"), 8, stage="auto")


def test_an_optimizer_without_a_host_kernel_is_not_offloaded() -> None:
    assert advise(gpu(1), 1, "RMSprop", stage=0, offload="auto").offload is None


def test_there_is_nothing_to_offload_to_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    model = net()
    model, _ = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), stage=2, offload="auto")
    assert zeroshard.stats(model).host_memory is None
    assert "stage 2, offload none chosen" in capsys.readouterr().out


def test_precisions_without_masters_are_planned_as_they_run() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, dtype=torch.bfloat16) for _ in range(4)))
    made = torch.optim.AdamW(model.parameters())
    foreseen = Foresight(model, made, Config(stage=0), 1, gpu(1))
    needs = foreseen.row(0, foreseen.fitting()[0].variant).budget.at_step
    model, made = zeroshard.shard(model, made, stage=0)
    for _ in range(2):
        model(torch.ones(2, 64, dtype=torch.bfloat16)).sum().backward()
        made.step()
    measured = zeroshard.stats(model).memory_at_step
    assert measured is not None
    assert needs.model_states == pytest.approx(measured.model_states, rel=0.01)


@on_ranks(2)
def test_the_warning_comes_once_on_rank_0_and_the_run_goes_on() -> None:
    original = machine.usable_memory
    machine.usable_memory = lambda: 2 * 300_000
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = net(width=64)
            model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), stage=0)
    finally:
        machine.usable_memory = original
    said = [str(one.message) for one in caught if "will not fit" in str(one.message)]
    assert len(said) == (1 if torch.distributed.get_rank() == 0 else 0)
    loss_of(model, 0).backward()
    optimizer.step()


def test_options_of_the_plan_are_checked() -> None:
    model = net()
    with pytest.raises(ValueError, match=r"example=3 must be what forward takes"):
        zeroshard.shard(model, torch.optim.AdamW(model.parameters()), example=3)
    with pytest.raises(TypeError, match="no option 'chooses_offload'"):
        zeroshard.shard(model, torch.optim.AdamW(model.parameters()), chooses_offload=True)
