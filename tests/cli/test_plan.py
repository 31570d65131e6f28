"""`zeroshard plan`: what it prints, what it answers programs, and bad input with exit code 2."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import zeroshard
from tests.cli.test_main import exit_code
from tests.matrix import slow
from tests.plan.architectures import configuration
from zeroshard.cli.job_options import overrides
from zeroshard.cli.main import parser
from zeroshard.config.job import load_job
from zeroshard.config.options import Activations, Config
from zeroshard.plan.machine.hardware import find_hardware

HARDWARE = ("--gpus", "64", "--gpu-memory", "32", "--host-memory", "1500")
KINDS = ("parameters", "gradients", "optimizer_states", "activations", "gathered", "temporary")


def asked(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> Any:
    assert exit_code("plan", *argv, "--json") == code
    return json.loads(capsys.readouterr().out)


def test_every_stage_and_offload_has_a_row_and_one_is_recommended(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zeroshard.cli.plan.WIDTH", 132)  # narrower lines have no bars
    assert exit_code("plan", "--model", "zero-8b", *HARDWARE) == 0
    shown = capsys.readouterr().out
    for text in ("8.16B parameters", "cpu, 16-bit states", "cpu, small", "cpu, parameters too", "PPPP", "AAAA"):
        assert text in shown
    assert "zeroshard.shard(model, optimizer, stage=" in shown
    assert "torchrun --nnodes 4" in shown


def test_a_model_is_named_with_or_without_its_option(capsys: pytest.CaptureFixture[str]) -> None:
    short, long = (asked(capsys, *model, *HARDWARE) for model in (["zero-8b"], ["--model", "zero-8b"]))
    assert short == long
    assert exit_code("plan", "zero-8b", "--model", "zero-4b", *HARDWARE) == 2
    assert "two models are named, zero-8b and --model zero-4b; give one" in capsys.readouterr().err
    assert asked(capsys, "tests.plan.factory:gpt", "--seq", "64", *HARDWARE)["recommended"]["stage"] == 0


def test_the_recommendation_stands_before_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("plan", "zero-8b", *HARDWARE) == 0
    shown = capsys.readouterr().out
    parts = ("zero-8b: 8.16B parameters", "on 64 GPUs", "Take stage", "zeroshard.shard(", "torchrun", "stage offload")
    places = [shown.index(part) for part in (*parts, "GB of one rank in stage")]
    assert places == sorted(places)
    assert exit_code("plan", "zero-170b", "--gpus", "1", "--gpu-memory", "16", "--host-memory", "64") == 1
    shown = capsys.readouterr().out
    assert shown.index("Nothing fits") < shown.index("stage offload")


LONG = {
    "a preset": ["zero-8b", *HARDWARE],
    "the largest batch": ["zero-7.5b", "--gpus", "64", "--machine", "v100", "--batch", "max"],
    "shared by ranks": [
        *("zero-100b", "--gpus", "400", "--machine", "v100", "--model-parallel", "8"),
        *("--partition", "--activation-offload"),
    ],
    "a module": ["tests.plan.factory:sequences", "--seq", "128", "--checkpointing", "--gpus", "8", "--machine", "h100"],
    "some recomputed": ["zero-1.5b", "--gpus", "8", "--machine", "h100", "--batch", "48", "--recompute", "auto"],
    "questions": ["zero-8b", "--gpus", "64", "--machine", "h100", "--tokens", "3e11", "--scale", "8..8192"],
    "adapters": ["zero-1.5b", "--gpus", "8", "--machine", "h100", "--lora", "16"],
    "nothing fits": ["zero-170b", "--gpus", "1", "--gpu-memory", "16", "--host-memory", "64"],
    "the largest model": ["--max-model", "--gpus", "16", "--machine", "h100"],
    "the papers": ["--paper"],
}


@pytest.mark.parametrize("case", [slow(case) if case == "the largest model" else case for case in LONG])
def test_no_line_is_wider_than_80_characters_without_a_terminal(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("plan", *LONG[case]) == (1 if case == "nothing fits" else 0)
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert [line for line in shown.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize("case", ["a preset", "shared by ranks", "questions"])
def test_text_and_json_say_the_same(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    answer = asked(capsys, *LONG[case])
    assert exit_code("plan", *LONG[case]) == 0
    shown = capsys.readouterr().out
    best = answer["recommended"]
    assert f"Take stage {best['stage']}, offload {best['offload']}: " in shown
    words = " ".join(shown.replace("\\\n", " ").split())
    assert best["command"] in words
    assert best["shard"].replace(" ", "") in shown.replace("\n", "").replace(" ", "")
    table = shown[shown.index("stage offload") :].splitlines()[1 : 1 + len(answer["rows"])]
    for line, row in zip(table, answer["rows"], strict=True):
        cells = line.split()
        assert cells[0] == str(row["stage"])
        assert line.split(maxsplit=1)[1].startswith(row["offload"])
        assert ("yes" in cells, "no" in cells) == (row["fits"], not row["fits"])
        size = row["peak"]["total"] / 1e9
        assert any(cell.replace(",", "") in (f"{size:.1f}", f"{size:.2f}", f"{size:.3f}") for cell in cells), line
        if case != "shared by ranks":  # whose Ψ is that of one rank
            assert f"{row['volume']['elements'] / answer['model']['parameters']:.2f}Ψ" in cells
    if "training" in answer:
        assert f"{answer['training']['steps']:,} steps" in shown
        assert all(f"{point['efficiency']:.0%}" in shown for point in answer["scale"])


def test_a_program_gets_every_number(capsys: pytest.CaptureFixture[str]) -> None:
    answer = asked(capsys, "--model", "zero-8b", *HARDWARE)
    assert {(row["stage"], row["offload"]) for row in answer["rows"]} >= {
        (s, o) for s in range(4) for o in ("none", "cpu")
    }
    for row in answer["rows"]:
        assert row["peak"]["total"] == sum(row["peak"][kind] for kind in row["peak"] if kind not in ("total", "phase"))
        assert all(row["peak"][kind] >= 0 for kind in KINDS)
        assert row["fits"] == (row["room"] >= 0 and (row["offload"] == "none" or row["host_room"] >= 0))
        assert row["time"]["step"] > 0
    best = answer["recommended"]
    chosen = next(row for row in answer["rows"] if (row["stage"], row["offload"]) == (best["stage"], best["offload"]))
    assert chosen["fits"]
    fastest = min(row["time"]["step"] for row in answer["rows"] if row["fits"])
    assert chosen["time"]["step"] <= 1.02 * fastest


def test_the_recommended_call_is_one_that_shard_takes(capsys: pytest.CaptureFixture[str]) -> None:
    class Recorder:
        Offload = zeroshard.Offload

        @staticmethod
        def shard(model: None, optimizer: None, **options: Any) -> Config:
            return Config.parse(options)

    for gpu, host in (("16", "400"), ("16", "30"), ("24", "400"), ("80", "400")):
        hardware = ("--gpus", "1", "--gpu-memory", gpu, "--host-memory", host)
        best = asked(capsys, "--model", "offload-4b", "--batch", "4", *hardware)["recommended"]
        config = eval(best["shard"], {"zeroshard": Recorder, "torch": torch, "model": None, "optimizer": None})
        assert config.stage == best["stage"]
        assert (config.offload is None) == (best["offload"] == "none")


def test_the_recommended_command_of_a_preset_is_one_that_train_takes(capsys: pytest.CaptureFixture[str]) -> None:
    hardware = ("--gpus", "1", "--gpu-memory", "16", "--host-memory", "30")
    best = asked(capsys, "--model", "offload-4b", "--batch", "4", *hardware)["recommended"]
    words = best["command"].split()
    arguments = parser().parse_args(words[words.index("train") :])
    job = load_job(arguments.config, overrides(arguments))
    assert job.shard["stage"] == best["stage"]
    assert job.shard["offload"]["update_in_backward"], "host memory leaves no other"  # type: ignore[index]


@pytest.mark.parametrize("preset", ["zero-8b", "zero-100b"])
def test_the_recommended_command_trains_what_was_planned(preset: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--gpus", "256", "--machine", "h200", "--seq", "512", "--batch", "2", "--no-checkpointing")
    answer = asked(capsys, "--model", preset, *options, "--model-parallel", "1")
    words = answer["recommended"]["command"].split()
    arguments = parser().parse_args(words[words.index("train") :])
    job = load_job(arguments.config, overrides(arguments))
    assert (job.model.sequence, job.train.batch, job.train.tensor_parallel) == (512, 2, 1)
    assert not job.built_model.checkpointing
    assert job.shard.get("activations") is None
    assert answer["model"]["parameters"] == job.model.parameters, "positions are those of the sequence planned"


def test_a_preset_whose_checkpoints_are_divided_is_planned_and_trained_alike(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ("--gpus", "256", "--machine", "h200", "--batch", "1", "--model-parallel", "1")
    best = asked(capsys, "--model", "zero-100b", *options)["recommended"]
    assert "--set shard.activations.partition=false" in best["command"], "there is nobody to divide them among"


def test_as_few_blocks_are_recomputed_as_fit(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--model", "zero-1.5b", "--gpus", "8", "--gpu-memory", "40", "--machine", "h100", "--batch", "32")
    answer = asked(capsys, *options, "--recompute", "auto")
    best = answer["recommended"]
    row = next(r for r in answer["rows"] if (r["stage"], r["offload"]) == (best["stage"], best["offload"]))
    assert 0 < row["recomputed_blocks"] < 48
    share = re.search(r"Activations\(recompute=([\d.]+)\)", best["shard"])
    assert share is not None
    assert round(48 * float(share[1])) == row["recomputed_blocks"]

    def of(more: str) -> Any:
        assert exit_code("plan", *options, "--recompute", more, "--json") in (0, 1)
        rows = json.loads(capsys.readouterr().out)["rows"]
        return next(r for r in rows if (r["stage"], r["offload"]) == (best["stage"], best["offload"]))

    assert of(share[1]) == row
    fewer = of(str((row["recomputed_blocks"] - 1) / 48))
    assert not fewer["fits"], "one block less does not fit"
    assert fewer["time"]["step"] < row["time"]["step"] < of("1")["time"]["step"]
    assert of("1")["recomputed_blocks"] == 48
    assert of("0")["recomputed_blocks"] == 0
    words = best["command"].split()
    arguments = parser().parse_args(words[words.index("train") :])
    job = load_job(arguments.config, overrides(arguments))
    assert Config.parse(job.shard).activations == Activations(recompute=float(share[1]))
    assert exit_code("plan", *options, "--recompute", "auto") == 0
    told = capsys.readouterr().out
    assert f"It recomputes {row['recomputed_blocks']} of 48 blocks: there is room for the activations" in told
    assert f" {row['recomputed_blocks']}/48 " in told


def test_a_model_of_hugging_face_recomputes_what_must_be_by_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(configuration("llama", num_hidden_layers=6, max_position_embeddings=4096)))
    options = ("--model", str(file), "--gpus", "8", "--machine", "h100", "--seq", "4096")
    for batch, expected in (("1", False), ("2000", True)):
        rows = asked(capsys, *options, "--batch", batch)["rows"]
        assert any(row["recomputed_blocks"] for row in rows) == expected
        every = asked(capsys, *options, "--batch", batch, "--checkpointing")["rows"]
        assert all(row["recomputed_blocks"] == 6 for row in every)
    best = asked(capsys, *options, "--batch", "1")["recommended"]
    assert "activations=" not in best["shard"]


def test_several_micro_batches_are_an_option_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--model", "zero-8b", "--gpus", "8", "--machine", "h100", "--micro-batches", "4")
    assert exit_code("plan", *options) == 0
    shown = " ".join(capsys.readouterr().out.replace("\\", "").split())
    assert "torchrun --nproc-per-node 8 -m zeroshard train zero-8b" in shown
    assert "--set train.micro_batches=4" in shown


def test_nothing_fits_is_told_with_what_comes_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("plan", "--model", "zero-170b", "--gpus", "1", "--gpu-memory", "16", "--host-memory", "64") == 1
    assert "Nothing fits" in capsys.readouterr().out


def test_what_is_lacking_is_told_of_device_and_host(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--gpus", "2", "--gpu-memory", "16", "--host-memory", "64", "--batch", "1")
    assert exit_code("plan", "--model", "zero-100b", *options) == 1
    told = " ".join(capsys.readouterr().out.split())
    assert "Stage 3, offload cpu, small comes nearest" in told
    assert "GB of device memory and" in told
    assert "GB of host memory. Use more GPUs or a smaller --seq." in told, "the batch is 1, and checkpointing is on"


def test_a_row_says_whether_it_fits_where_there_are_no_colours(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("plan", "--model", "zero-7.5b", "--gpus", "64", "--machine", "v100") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = {(line[0], line[1]): line for line in lines if line[:1] in (["0"], ["1"], ["2"], ["3"])}
    assert "no" in rows["0", "cpu"], "the host is too small"
    assert "yes" in rows["1", "none"]


@pytest.mark.parametrize("width", [80, 100, 132])
def test_no_number_is_cut_off_in_a_narrow_terminal(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zeroshard.cli.plan.WIDTH", width)
    assert exit_code("plan", "--model", "zero-7.5b", "--gpus", "64", "--machine", "v100", "--batch", "max") == 0
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert ("PPPP" in shown) == (width == 132)
    parallel = ("--model-parallel", "25", "--gpus", "25", "--nodes", "1", "--partition", "--activation-offload")
    assert exit_code("plan", "--model", "zero-1.5b", "--machine", "h100", *parallel) == 0
    assert width == 80 or "…" not in capsys.readouterr().out


def test_machines_without_accelerators_have_ranks_that_share_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    answer = asked(capsys, "--model", "zero-1.5b", "--machine", "cpu", "--gpus", "8", "--host-memory", "400")
    assert answer["hardware"]["nodes"] == 4
    assert answer["hardware"]["device_memory"] == 200e9
    assert {row["offload"] for row in answer["rows"]} == {"none"}
    assert 'precision="fp32"' in answer["recommended"]["shard"]
    assert "--set train.device=cpu" in answer["recommended"]["command"]
    assert "defragment" not in answer["recommended"]["command"]
    answer = asked(capsys, "--model", "zero-40b-c1", "--machine", "cpu", "--gpus", "16", "--host-memory", "4000")
    assert "--set train.device=cpu --set shard.defragment=false" in answer["recommended"]["command"]


def test_on_machines_without_accelerators_device_and_host_are_the_same_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ("--model", "zero-1.5b", "--machine", "cpu")
    points = asked(capsys, *options, "--gpus", "1", "--host-memory", "40", "--scale", "1..4")["scale"]
    assert [point["fits"] for point in points] == [True, False, False], "the ranks of a node divide its memory"
    kept = asked(capsys, *options, "--host-memory", "44", "--batch", "64", "--activation-offload", code=1)["rows"][-1]
    assert kept["host"]["pinned"] > 0
    assert kept["room"] == 22e9 - kept["peak"]["total"] - sum(kept["host"].values())


def test_what_a_configuration_says_of_gathering_is_planned_and_taken_back_in_other_stages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.toml"
    shape = "[model]\nlayers = 4\nhidden = 64\nheads = 4\nsequence = 64\n"
    file.write_text(shape + "[shard]\nstage = 3\nprefetch = 3\nkeep = []\n")
    answer = asked(capsys, "--model", str(file), "--gpus", "8", "--machine", "h100")
    assert answer["recommended"]["stage"] == 0
    words = answer["recommended"]["command"].split()
    arguments = parser().parse_args(words[words.index("train") :])
    assert not {"prefetch", "keep"} & set(load_job(arguments.config, overrides(arguments)).shard)
    nothing_kept = answer["rows"][-1]
    file.write_text(shape + "[shard]\nstage = 3\n")
    usual = asked(capsys, "--model", str(file), "--gpus", "8", "--machine", "h100")["rows"][-1]
    assert nothing_kept["volume"]["all_gather"] > usual["volume"]["all_gather"]


def test_options_of_checkpoints_that_a_configuration_has_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[shard]\nstage = 1\n[shard.activations]\noffload = true\nprefetch = 3\n")
    answer = asked(capsys, "--model", str(file), "--gpus", "8", "--machine", "h100", "--activation-offload")
    assert "zeroshard.Activations(offload=True, prefetch=3)" in answer["recommended"]["shard"]


def test_the_largest_batch_fits_and_one_more_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    answer = asked(capsys, "--model", "zero-1.5b", "--gpus", "8", "--gpu-memory", "32", "--batch", "max")
    row = next(row for row in answer["rows"] if (row["stage"], row["offload"]) == (2, "none"))
    assert row["fits"]
    more = asked(capsys, "--model", "zero-1.5b", "--gpus", "8", "--gpu-memory", "32", "--batch", str(row["batch"] + 1))
    assert not next(r for r in more["rows"] if (r["stage"], r["offload"]) == (2, "none"))["fits"]


def test_the_largest_model_grows_with_stage_and_offload(capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(capsys, "--max-model", "--gpus", "16", "--gpu-memory", "32", "--host-memory", "1500")["largest"]
    sizes = {(row["stage"], row["offload"]): row["parameters"] for row in found}
    plain = [sizes[stage, "none"] for stage in range(4)]
    assert plain == sorted(plain)
    assert 1.2e9 < plain[0] < 2e9, "the papers: 1.4B with plain data parallelism"
    assert 8e9 < sizes[2, "cpu"] < 16e9, "the papers: 13B"
    assert sizes[3, "cpu, small"] > sizes[3, "cpu"] > sizes[3, "none"], "host memory is what bounds it"
    assert exit_code("plan", "--max-model", "--gpus", "16", "--gpu-memory", "32") == 0
    assert "layers × hidden" in capsys.readouterr().out


@pytest.mark.parametrize("degree", [4, 16, 64])
def test_the_heads_of_the_largest_model_go_evenly_to_the_ranks_that_share_it(
    degree: int, capsys: pytest.CaptureFixture[str]
) -> None:
    hardware = ("--gpus", "64", "--gpu-memory", "32", "--host-memory", "1500", "--model-parallel", str(degree))
    found = asked(capsys, "--max-model", *hardware)["largest"]
    assert {row["heads"] % degree for row in found} == {0}
    assert {row["hidden"] // row["heads"] for row in found} <= {64, 128}
    sizes = [row["parameters"] for row in found if row["offload"] == "none"]
    assert sizes == sorted(sizes)


def test_heads_of_keys_that_the_ranks_cannot_share_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.json"
    values = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 300}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    file.write_text(json.dumps({"model_type": "llama", **values, **heads}))
    options = ("--model", str(file), "--gpus", "8", "--gpu-memory", "32")
    assert exit_code("plan", *options, "--model-parallel", "4") == 2
    assert "--model-parallel 4 does not divide the 2 heads of keys and values" in capsys.readouterr().err
    assert exit_code("plan", *options, "--model-parallel", "2") == 0
    assert f"{tmp_path.name}: " in capsys.readouterr().out


def test_tokens_and_scale_are_answered(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--model", "zero-8b", "--machine", "h100", "--gpus", "64", "--tokens", "3e11", "--scale", "8..128")
    answer = asked(capsys, *options)
    assert answer["training"]["days"] * 24 * 64 == pytest.approx(answer["training"]["gpu_hours"])
    assert [point["gpus"] for point in answer["scale"]] == [8, 16, 32, 64, 128]
    assert exit_code("plan", *options) == 0
    assert "GPU-hours" in capsys.readouterr().out


def test_scale_says_where_it_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--model", "zero-7.5b", "--machine", "v100", "--seq", "512", "--batch", "1")
    points = asked(capsys, *options, "--gpus", "64", "--scale", "1..64")["scale"]
    alone = asked(capsys, *options, "--gpus", "1")
    assert not any(row["fits"] for row in alone["rows"] if row["offload"] == "none")
    assert [point["fits"] for point in points] == [False] * 6 + [True]


def test_devices_grow_in_nodes_of_the_machine_or_of_the_size_that_was_given() -> None:
    assert find_hardware(gpus=2, profile="h100").grown(64) == find_hardware(gpus=64, profile="h100")
    four_a_node = find_hardware(gpus=8, nodes=2, profile="h100").grown(64)
    assert (four_a_node.nodes, four_a_node.per_node) == (16, 4)
    assert four_a_node.machine is not None
    assert four_a_node.machine.devices_per_node == 4


def test_without_hardware_it_is_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("plan", "--model", "tiny") == 0
    assert "Take stage 0, offload none" in capsys.readouterr().out


def test_any_module_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    answer = asked(capsys, "--model", "tests.plan.factory:gpt", "--gpus", "8", "--gpu-memory", "16", "--seq", "64")
    assert answer["recommended"]["stage"] == 0
    assert answer["rows"][0]["time"]["bottleneck"] == "compute"


@pytest.mark.parametrize(
    "asked_for",
    [
        "--model zero-1000b --machine v100",
        slow("--model zero-1000b --machine v100 --batch max"),
        slow("--model zero-1000b --machine v100 --scale 64..8192"),
        slow("--max-model --machine h100"),
        "--max-model --machine h200 --micro-batches 16",
    ],
)
def test_a_world_of_1024_is_planned_in_under_ten_seconds(asked_for: str) -> None:
    started = time.process_time()
    assert exit_code("plan", *asked_for.split(), "--gpus", "1024") == 0
    assert time.process_time() - started < 6, "two to five seconds are usual"


def test_the_papers_claims_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("plan", "--paper") == 0
    assert "Formulas of the papers, and ours" in capsys.readouterr().out
    answer = asked(capsys, "--paper")
    assert answer["mean_error"] < 0.15
    assert {claim["kind"] for claim in answer["claims"]} == {"formula", "measured", "fitted", "reached"}


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ([], "a model is needed: a preset, "),
        (["tiny", "--model", "tiny"], "two models are named"),
        (["tiny", "--lora", "0"], "--lora 0: must be above 0"),
        (["--max-model", "--gpu-memory", "32", "--lora", "8"], "--lora is about one model"),
        (["--paper", "--lora", "8"], "--lora would have no effect"),
        (["--model", "zero-8c"], "did you mean 'zero-8b'?"),
        (["--model", "nowhere.json"], "No such file"),
        (
            ["--model", "tests.models:net", "--gpu-memory", "32"],
            "--model tests.models:net: tracing it on the meta device failed",
        ),
        (["--model", "tiny", "--gpus", "0"], "--gpus 0: must be above 0"),
        (["--model", "tiny", "--gpus", "-8"], "--gpus -8: must be above 0"),
        (["--model", "tiny", "--gpus", "10", "--nodes", "4", "--gpu-memory", "32"], "evenly over --nodes 4"),
        (["--model", "tiny", "--gpus", "2", "--nodes", "4", "--gpu-memory", "32"], "is more than --gpus 2"),
        (["--model", "tiny", "--gpus", "4096", "--nodes", "1", "--gpu-memory", "32"], "there is no such"),
        (["--model", "tiny", "--gpu-memory", "0"], "--gpu-memory 0: must be above 0"),
        (["--model", "tiny", "--gpu-memory", "32e9"], "is in GB"),
        (["--model", "tiny", "--gpu-memory", "nan"], "must be above 0"),
        (["--model", "tiny", "--host-memory", "-1"], "--host-memory -1"),
        (["--model", "tiny", "--machine", "v10"], "did you mean 'v100'?"),
        (["--model", "tiny", "--machine", "v100", "--gpu-memory", "80"], "leave one of the two out"),
        (["--model", "tiny", "--gpu-memory", "32", "--batch", "0"], "at least 1, or max"),
        (["--model", "tiny", "--gpus", "9", "--machine", "h100"], "say how they are spread with --nodes"),
        (["--model", "tiny", "--gpus", "1000000000000", "--machine", "h100"], "nothing has more than"),
        (["--model", "tiny", "--machine", "cpu", "--gpu-memory", "32"], "its memory is --host-memory"),
        (["--model", "tiny", "--gpu-memory", "inf"], "and finite"),
        (["--model", "tiny", "--gpu-memory", "32", "--partition", "--no-checkpointing"], "--no-checkpointing leaves"),
        (["--model", "tiny", "--gpu-memory", "32", "--recompute", "2"], "must be a share from 0 to 1, or auto"),
        (["--model", "tiny", "--gpu-memory", "32", "--recompute", "1", "--checkpointing"], "both say which blocks"),
        (["--model", "tiny", "--gpu-memory", "32", "--recompute", "0", "--partition"], "--no-checkpointing leaves"),
        (["--max-model", "--gpu-memory", "32", "--recompute", "0.5"], "--recompute is about one model"),
        (["--max-model", "--gpu-memory", "32", "--tokens", "1e9"], "--tokens is about one model"),
        (["--max-model", "--gpu-memory", "32", "--scale", "1..8"], "--scale is about one model"),
        (["--paper", "--model", "tiny"], "--model would have no effect"),
        (["--calibrate", "mine.toml", "--no-checkpointing"], "--no-checkpointing would have no effect"),
        (["--model", "tiny", "--gpu-memory", "32", "--seq", "0"], "--seq 0: must be above 0"),
        (["--model", "tiny", "--gpu-memory", "32", "--tokens", "-3"], "--tokens -3: must be above 0"),
        (["--model", "tiny", "--gpu-memory", "32", "--scale", "64..8"], "the smaller first"),
        (["--model", "tiny", "--gpu-memory", "32", "--scale", "1..99999999999"], "nobody has more than"),
        (["--model", "tiny", "--gpus", "8", "--gpu-memory", "32", "--model-parallel", "3"], "does not divide 8"),
        (["--max-model", "--gpu-memory", "32", "--batch", "max"], "both ask for the largest"),
        (["--calibrate", "nowhere/mine.toml"], "in a folder that exists"),
    ],
)
def test_bad_input_exits_with_two_and_names_it(argv: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("plan", *argv) == 2
    assert told in capsys.readouterr().err
