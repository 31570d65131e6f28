"""A dry run is the real runtime without other ranks: its memory follows the paper's formula, its volume is counted."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from tests.matrix import quick, slow
from tests.plan.dry import dry_gpt
from zeroshard.cli.main import main
from zeroshard.config.job import ModelConfig
from zeroshard.config.offload import Offload
from zeroshard.plan.dryrun import dry_run
from zeroshard.plan.memory.budget import budget
from zeroshard.plan.model.gpt import from_config
from zeroshard.plan.setup import Setup
from zeroshard.plan.volume import volume
from zeroshard.system import machine

BILLIONS = ModelConfig(layers=4, hidden=12288, heads=96, sequence=512, vocabulary=256, checkpointing=True)


FIGURE_1 = {0: 16, 1: 4 + 12 / 64, 2: 2 + 14 / 64, 3: 16 / 64}
"""Bytes a parameter on each of 64 ranks, by stage."""


@pytest.mark.parametrize("stage", [slow(0), slow(1), slow(2), 3])
def test_a_rank_of_64_has_the_memory_of_figure_1_for_a_model_that_fits_on_no_machine_here(stage: int) -> None:
    result = dry_gpt(BILLIONS, 64, stage=stage)
    assert result.parameters > 7e9
    assert result.at_step.model_states == pytest.approx(FIGURE_1[stage] * result.parameters, rel=0.01)
    volume = 2 if stage < 3 else 3 - result.kept / result.parameters
    assert result.volume_elements == pytest.approx(volume * result.parameters, rel=0.01)
    assert result.at_rest < result.peak


@pytest.mark.slow
def test_splitting_units_lowers_the_peak_of_a_checkpointed_model() -> None:
    whole = dry_gpt(BILLIONS, 1024, stage=3, max_unit_bytes=1 << 40)
    split = dry_gpt(BILLIONS, 1024, stage=3, max_unit_bytes=1 << 28)
    assert split.peak < 0.6 * whole.peak


def test_what_cannot_be_run_dry_is_refused() -> None:
    with pytest.raises(ValueError, match="world of 4"):
        dry_run(nn.Module, torch.optim.SGD, torch.sum, world=4, rank=4, real=False)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='offload="auto" is chosen where a job starts'):
        dry_run(nn.Module, torch.optim.SGD, torch.sum, world=4, real=False, offload="auto")  # type: ignore[arg-type]


BF16 = torch.bfloat16
OFFLOADED = ModelConfig(layers=5, hidden=512, heads=8, sequence=128, vocabulary=1000, checkpointing=True)
OFFLOADS = {
    "stage 0": (0, "bf16", Offload()),
    "stage 1": (1, "bf16", Offload()),
    "stage 2": (2, "bf16", Offload()),
    "stage 3": (3, "bf16", Offload()),
    "fp32": (2, "fp32", Offload()),
    "fp16": (2, "fp16", Offload(moments=BF16)),
    "in backward": (2, "bf16", Offload(moments=BF16, split_master=True, read_back=True, update_in_backward=True)),
    "8-bit moments": (2, "bf16", Offload(moments="8bit", split_master=True, read_back=True)),
    "parameters too": (3, "bf16", Offload(parameters="cpu")),
    "half": (2, "bf16", Offload(host_fraction=0.5)),
    "half in stage 3": (3, "bf16", Offload(host_fraction=0.5)),
    "a budget": (3, "bf16", Offload(host_fraction="auto", device_memory=13_000_000)),
    "delayed in stage 1": (1, "bf16", Offload(delayed_update_after=2)),
    "delayed": (2, "bf16", Offload(delayed_update_after=3)),
    "delayed in stage 3": (3, "bf16", Offload(delayed_update_after=40)),
}


@pytest.mark.parametrize("world", [slow(1), 8])
@pytest.mark.parametrize(
    "name", quick(OFFLOADS, "stage 2", "in backward", "8-bit moments", "parameters too", "a budget", "delayed")
)
def test_offloads_run_dry_too_and_are_as_planned(name: str, world: int) -> None:
    """No memory is used and no kernel runs. Device and host are counted separately."""
    stage, precision, offload = OFFLOADS[name]
    seen = dry_gpt(OFFLOADED, world, stage=stage, precision=precision, offload=offload)
    setup = Setup(stage=stage, world=world, offload=offload, precision=precision, sequence=128)  # type: ignore[arg-type]
    model = from_config(OFFLOADED)
    needs, moved = budget(model, setup, workspace=0), volume(model, setup)
    assert seen.host is not None
    assert needs.at_step.model_states == pytest.approx(seen.at_step.model_states, rel=0.01)
    assert needs.host.total == pytest.approx(seen.host.total, rel=0.01)
    assert needs.peak.total == pytest.approx(seen.peak, rel=0.03), needs.phase
    assert needs.at_rest.total == pytest.approx(seen.at_rest, rel=0.01, abs=1000)  # a few scalars
    assert moved.elements == seen.volume_elements
    assert {"to the host": moved.to_host, "to the device": moved.to_device} == dict(seen.host_traffic)
    assert seen.at_peak.parameters == seen.at_step.parameters


def test_a_fraction_that_the_run_chooses_is_what_is_planned(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "available_memory", lambda: 4 * 1_200_000)  # model states take six tenths of it
    asked = ["dryrun", "tiny", "--world", "4", "--stage", "2", "--offload", "cpu", "--without-gpu"]
    states = {}
    for fraction in ("0.0", "auto", "1.0"):
        assert main([*asked, "--set", f"shard.offload.host_fraction={fraction}", "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["at_step"]["model_states"] == pytest.approx(told["plan"]["model_states"], rel=0.01)
        assert sum((told["host"] or {}).values()) == told["plan"]["host"]
        assert told["host_traffic"] == told["plan"]["host_traffic"] or fraction == "0.0"
        states[fraction] = told["at_step"]["model_states"]
    assert states["1.0"] < states["auto"] < states["0.0"]
    assert main([*asked, "--set", "shard.offload.host_fraction=auto"]) == 0
    assert "Ψ_host" in capsys.readouterr().out


def test_the_command_prints_the_table_and_names_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dryrun", "tiny", "--world", "8", "--stage", "2", "--without-gpu"]) == 0
    assert "all model states" in capsys.readouterr().out
    assert main(["dryrun", "tinny", "--world", "8"]) == 2
    assert "tinny" in capsys.readouterr().err
    assert main(["dryrun", "tiny", "--world", "8", "--rank", "8"]) == 2
    assert "--rank 8 does not exist in a world of 8" in capsys.readouterr().err
    assert main(["dryrun", "tiny", "--world", "8", "--set", "shard.stage=auto"]) == 2
    assert "name a stage and an offload" in capsys.readouterr().err


def test_a_cap_on_memory_is_respected(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["dryrun", "tiny", "--world", "8", "--without-gpu", "--memory-cap"]
    assert main([*asked, "1"]) == 0
    assert main([*asked, "0.001"]) == 1
    told = capsys.readouterr().err
    assert "is above --memory-cap 0.001" in told
    assert "zeroshard plan" in told
    assert main([*asked, "-1"]) == 2
    assert "--memory-cap -1 must be above 0" in capsys.readouterr().err


def test_the_command_counts_device_and_host_separately_and_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["dryrun", "tiny", "--world", "4", "--stage", "2", "--offload", "cpu", "--without-gpu"]
    assert main(asked) == 0
    assert "on the host, GB" in capsys.readouterr().out
    assert main([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["at_step"]["model_states"] == told["plan"]["model_states"]
    assert told["volume_elements"] == told["plan"]["volume_elements"]
    assert sum(told["host"].values()) == told["plan"]["host"]


def test_messages_of_a_run_are_not_part_of_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--stage", "2", "--offload", "cpu", "--set", "shard.offload.host_fraction=auto", "--without-gpu")
    assert main(["dryrun", "tiny", "--world", "3", *options, "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["parameters"] > 0
    assert "nothing is offloaded" in said.err


@pytest.mark.parametrize("keep", ["[]", '["blocks.0"]', '["(root)"]', '["", "blocks.1"]'])
def test_units_named_in_keep_are_gathered_once(keep: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--stage", "3", "--set", f"shard.keep={keep}", "--without-gpu", "--json")
    assert main(["dryrun", "tiny", "--world", "3", *options]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["volume_elements"] == told["plan"]["volume_elements"]


@pytest.mark.slow
def test_the_command_prints_the_traffic_of_checkpoints_next_to_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["dryrun", "tiny", "--world", "8", "--tensor-parallel", "2", "--without-gpu"]
    asked += ["--set", "shard.activations.partition=true", "--set", "shard.activations.offload=true"]
    assert main(asked) == 0
    printed = capsys.readouterr().out
    assert "checkpoints gathered (P_a), Ψ" in printed
    assert "checkpoints to and from the host, GB" in printed
    assert main([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    for key in ("volume_model_elements", "checkpoint_traffic"):
        assert told[key]
        assert told[key] == told["plan"][key]


def test_a_part_of_the_blocks_is_recomputed_in_a_dry_run_too(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["dryrun", "tiny", "--world", "4", "--stage", "2", "--without-gpu", "--set", "train.batch=64"]
    peaks = {}
    for share in ("1", "0.5", "0.3"):
        chosen = ["--set", f"shard.activations.recompute={share}"]
        assert main([*asked, *chosen, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["peak"] == pytest.approx(told["plan"]["peak"], rel=0.02)
        peaks[share] = told["peak"]
    assert peaks["1"] < peaks["0.5"] < peaks["0.3"]
    assert main([*asked, "--set", "shard.activations.recompute=0.5"]) == 0
    assert "2 of 3 blocks recomputed" in " ".join(capsys.readouterr().out.split())
    assert main([*asked, "--set", "shard.activations.recompute=auto"]) == 2
    assert 'recompute="auto" is decided where a job runs; give a share' in capsys.readouterr().err


@pytest.mark.parametrize("stage", quick(["1", "2", "3"], "2"))
def test_micro_batches_run_dry_with_the_volume_and_the_accumulators_of_the_plan(
    stage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["tiny", "--world", "4", "--stage", stage, "--without-gpu", "--set", "train.micro_batches=3"]
    assert main(["dryrun", *options, "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert seen["volume_elements"] == seen["plan"]["volume_elements"]
    assert seen["at_step"]["gradients"] == 0
    assert seen["peak"] == pytest.approx(seen["plan"]["peak"], rel=0.15)
    assert main(["dryrun", *options]) == 0
    rows = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if "gradients, GB" in line]
    assert rows[0][-1].strip() == "4Ψ/4", "accumulators count as gradients"


@pytest.mark.parametrize("asked", [["zero-7.5b", "--stage", "1"], ["zero-7.5b", "--stage", "3"], ["zero-1000b"]])
def test_gradients_of_wide_blocks_are_planned_from_the_moment_on_at_which_they_have_a_buffer(
    asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A gradient of theirs is larger than ``DEPOSIT_BYTES``. Those of the last preset are divided into units."""
    assert main(["dryrun", *asked, "--world", "64", "--without-gpu", "--json", "--set", "model.layers=2"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["plan"]["peak"] == pytest.approx(told["peak"], rel=1e-3)
