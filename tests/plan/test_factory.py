"""`zeroshard plan` for a function that builds a module: every option takes effect, or is refused with a remedy."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cli.test_main import exit_code

HARDWARE = ("--gpus", "8", "--gpu-memory", "32")


def asked(capsys: pytest.CaptureFixture[str], function: str, *argv: str, machine: bool = False) -> Any:
    hardware = ("--gpus", "8", "--machine", "h200") if machine else HARDWARE
    assert exit_code("plan", "--model", f"tests.plan.factory:{function}", *hardware, *argv, "--json") == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("function", "argv", "told"),
    [
        ("fixed", ["--batch", "64"], "--batch would have no effect"),
        ("fixed", ["--batch", "max"], "give the function a parameter called batch"),
        ("fixed", ["--seq", "4096"], "give the function a parameter called sequence"),
        ("fixed", ["--tokens", "1e9"], "--tokens: how many a step takes is not known"),
        ("fixed_tokens", ["--batch", "1"], "--batch would have no effect"),
        ("samples", ["--seq", "64"], "--seq would have no effect"),
        ("samples", ["--tokens", "1e9"], "inputs are no token ids"),
        ("sequences", ["--model-parallel", "2"], "what one of the model-parallel ranks has"),
        ("sequences", ["--partition"], "--partition divides checkpoints among model-parallel ranks"),
        ("sequences", ["--partition", "--model-parallel", "2"], "what one of the model-parallel ranks has"),
        ("one_matrix", ["--checkpointing"], "--checkpointing is about blocks that are recomputed"),
        ("one_matrix", ["--activation-offload"], "--activation-offload is about blocks"),
        ("recomputing", ["--seq", "64", "--no-checkpointing"], "recomputes its blocks itself"),
        ("gpt", ["--max-model"], "leave tests.plan.factory:gpt out"),
        (
            "no_tokens",
            ["--seq", "65"],
            "give --seq if the sequence is too long, and keep values",
        ),
        ("misfit", [], "return (module, inputs) if it does not take token ids"),
        ("without_parameters", [], "ReLU has no parameters"),
        ("leaves", [], "building it on the meta device failed: SystemExit: 5"),
    ],
)
def test_options_without_effect_on_a_module_are_refused(
    function: str, argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("plan", "--model", f"tests.plan.factory:{function}", *HARDWARE, *argv) == 2
    shown = capsys.readouterr()
    assert told in shown.err
    assert not shown.out


@pytest.mark.parametrize(
    ("function", "argv", "told"),
    [
        ("fixed", [], "bf16, batch 6 on 8 GPUs"),
        ("fixed_tokens", [], "bf16, batch 3 × 32 on 8 GPUs"),
        ("samples", ["--batch", "5"], "bf16, batch 5 on 8 GPUs"),
        ("sequences", ["--batch", "2", "--seq", "128"], "bf16, batch 2 × 128 on 8 GPUs"),
        ("sequences", ["--seq", "128", "--checkpointing"], "bf16, batch 1 × 128, checkpointed on 8 GPUs"),
        ("recomputing", ["--seq", "64"], "bf16, batch 1 × 64, checkpointed on 8 GPUs"),
        ("gpt", ["--seq", "64", "--no-checkpointing"], "bf16, batch 1 × 64 on 8 GPUs"),
        ("masked", [], "bf16, batch 4 on 8 GPUs"),
    ],
)
def test_the_title_says_what_is_counted(
    function: str, argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("plan", "--model", f"tests.plan.factory:{function}", *HARDWARE, *argv) == 0
    assert told in " ".join(capsys.readouterr().out.split())


def test_checkpointing_and_the_host_take_activations_off_the_device(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--batch", "64", "--seq", "1024")
    plain, checkpointed, away = (
        asked(capsys, "sequences", *argv, *more) for more in ((), ("--checkpointing",), ("--activation-offload",))
    )
    sizes = [answer["rows"][0]["peak"]["activations"] for answer in (plain, checkpointed, away)]
    stream = 64 * 1024 * 256 * 2
    assert sizes[0] > 2 * sizes[1]
    assert sizes[1] > sizes[2]
    assert plain["rows"][0]["host"]["pinned"] == checkpointed["rows"][0]["host"]["pinned"] == 0
    # The input of the first block needs no gradient, so it is not stored on the host.
    assert away["rows"][0]["host"]["pinned"] == 3 * stream
    assert away["rows"][0]["volume"]["checkpoints_to_host"] == 3 * stream
    assert plain["rows"][0]["time"]["step"] < checkpointed["rows"][0]["time"]["step"]
    calls = [answer["recommended"]["shard"] for answer in (plain, checkpointed, away)]
    assert "activations" not in calls[0]
    assert "activations=zeroshard.Activations()" in calls[1]
    assert "activations=zeroshard.Activations(offload=True)" in calls[2]


def test_checkpoints_that_the_host_has_no_room_for_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--batch", "64", "--seq", "1024", "--activation-offload", "--host-memory", "0.5")
    assert exit_code("plan", "--model", "tests.plan.factory:sequences", *HARDWARE, *argv) == 1
    assert "of host memory" in capsys.readouterr().out


def test_samples_are_counted_where_tokens_are_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    first = asked(capsys, "fixed", "--scale", "8..16", machine=True)["scale"][0]
    assert first["samples_a_second"] == pytest.approx(8 * 6 / first["step_seconds"])
    assert "tokens_a_second" not in first
    assert asked(capsys, "fixed_tokens", "--scale", "8..16", machine=True)["scale"][0]["tokens_a_second"] > 0
    argv = ("--gpus", "8", "--machine", "h200", "--scale", "8..16")
    assert exit_code("plan", "--model", "tests.plan.factory:fixed", *argv) == 0
    assert "samples/s" in capsys.readouterr().out


def test_tokens_are_those_of_the_inputs(capsys: pytest.CaptureFixture[str]) -> None:
    steps = asked(capsys, "fixed_tokens", "--tokens", str(8 * 3 * 32 * 10), machine=True)["training"]["steps"]
    assert steps == 10


def test_the_name_of_a_function_stands_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("plan", "--model", "tests.plan.factory:llama", *HARDWARE) == 0
    assert "tests.plan.factory:llama: 4.2M" in capsys.readouterr().out
