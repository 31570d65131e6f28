"""Issue "Bad input": every option of offload has an effect or is refused, with its name, its value and what to do."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.models import loss_of, net
from tests.offload.scenarios import SCENARIOS, adamw, assert_close_result, assert_same_result
from zeroshard import Config, Offload, Precision
from zeroshard.config.checks import read_table
from zeroshard.system import machine

pytestmark = pytest.mark.usefixtures("one_thread")


def shard(model: nn.Module | None = None, make: Any = adamw, **options: Any) -> Any:
    model = net(depth=2) if model is None else model
    return zeroshard.shard(model, make(model), **options)


def problems(options: dict[str, Any], path: str) -> list[str]:
    """The mistakes in the ``shard`` options of a configuration file."""
    return read_table(Config, options, path)[1]


BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"parameters": "gpu"}, r"offload\.parameters='gpu' must be \"device\" or \"cpu\""),
    ({"parameters": None}, r"offload\.parameters=None"),
    ({"update_in_backward": 1}, r"offload\.update_in_backward=1 must be True or False"),
    ({"split_master": "yes"}, r"offload\.split_master='yes' must be"),
    ({"read_back": None}, r"offload\.read_back=None must be"),
    ({"blocking": 0}, r"offload\.blocking=0 must be"),
    ({"delayed_update_after": -1}, r"offload\.delayed_update_after=-1 must be a whole number, at least 0"),
    ({"delayed_update_after": 1.5}, r"offload\.delayed_update_after=1\.5"),
    ({"delayed_update_after": True}, r"offload\.delayed_update_after=True"),
    ({"threads": 0}, r"offload\.threads=0 must be a whole number, at least 1 and at most 4096"),
    ({"threads": 2**32}, r"offload\.threads=4294967296 must be a whole number, at least 1 and at most 4096"),
    ({"host_memory": 0}, r"offload\.host_memory=0"),
    ({"host_memory": 1e9}, r"offload\.host_memory=1000000000\.0"),
    ({"device_memory": 0, "host_fraction": "auto"}, r"offload\.device_memory=0"),
    ({"device_memory": 1 << 30}, r"offload\.device_memory has no effect without host_fraction=\"auto\"; leave it out"),
    ({"seed": -1}, r"offload\.seed=-1"),
    ({"seed": "a"}, r"offload\.seed='a'"),
    ({"host_fraction": -0.1}, r"offload\.host_fraction=-0\.1 must be a number from 0 to 1, or \"auto\""),
    ({"host_fraction": 1.0001}, r"offload\.host_fraction=1\.0001"),
    ({"host_fraction": math.nan}, r"offload\.host_fraction=nan"),
    ({"host_fraction": True}, r"offload\.host_fraction=True"),
    ({"host_fraction": "half"}, r"offload\.host_fraction='half'"),
    ({"host_fraction": None}, r"offload\.host_fraction=None"),
    ({"moments": torch.float16}, r'offload\.moments=torch\.float16 must be torch\.float32, torch\.bfloat16 or "8bit"'),
    ({"moments": "bf16"}, r"offload\.moments='bf16' must be"),
    ({"moments": "8-bit"}, r"offload\.moments='8-bit' is unknown \(did you mean '8bit'\?\); known: fp32, bf16"),
    ({"read_back": True}, r"offload\.read_back needs split_master=True"),
    ({"read_back": True, "split_master": True, "parameters": "cpu"}, r"offload\.read_back .*parameters=\"cpu\"; leave"),
    ({"read_back": True, "split_master": True, "delayed_update_after": 1}, r"offload\.read_back .*delayed.*leave one"),
    ({"parameters": "cpu", "host_fraction": 0.5}, r"offload\.host_fraction=0\.5 .*parameters=\"cpu\"; leave one out"),
    ({"parameters": "cpu", "host_fraction": "auto"}, r"offload\.host_fraction='auto' .*leave one out"),
    ({"update_in_backward": True, "delayed_update_after": 0}, r"update_in_backward and delayed_update_after exclude"),
]


@pytest.mark.parametrize(("options", "message"), BAD_FIELDS, ids=lambda value: str(value)[:50])
def test_a_bad_field_is_refused_with_its_value_and_the_remedy(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Offload(**options)


BAD_TOGETHER: list[tuple[dict[str, Any], str]] = [
    ({"offload": "gpu"}, r"offload='gpu' must be \"cpu\", \"auto\", a zeroshard\.Offload, "),
    ({"offload": True}, r"offload=True must be"),
    ({"offload": {"fraction": 1}}, r"offload\.fraction is unknown \(did you mean 'host_fraction'\?\); known: "),
    ({"offload": {"moments": "fp8"}}, r"offload\.moments='fp8' is unknown.*known: fp32, bf16, .*8bit"),
    ({"offload": {"moments": "8bits"}}, r"offload\.moments='8bits' is unknown \(did you mean '8bit'\?\)"),
    ({"offload": {"moments": "fp16"}}, r"offload\.moments=torch\.float16"),
    ({"offload": Offload(split_master=True)}, r"offload\.split_master needs precision='bf16', not None"),
    (
        {"offload": Offload(split_master=True), "precision": "fp16"},
        r"split_master needs precision='bf16', not .*float16",
    ),
    (
        {"offload": Offload(split_master=True), "precision": "fp32"},
        r"split_master needs precision='bf16', not .*float32",
    ),
    (
        {"offload": Offload(update_in_backward=True), "clip_grad_norm": 1.0},
        r"offload\.update_in_backward .*excludes clip_grad_norm; leave one",
    ),
    (
        {"offload": Offload(update_in_backward=True), "clip_grad_norm": math.inf},
        r"offload\.update_in_backward .*excludes clip_grad_norm",
    ),
    (
        {"offload": Offload(update_in_backward=True), "precision": "fp16"},
        r"offload\.update_in_backward .*excludes loss scaling",
    ),
    (
        {"offload": "cpu", "precision": Precision(parameters=torch.bfloat16, cast_on_gather=True)},
        r"precision\.cast_on_gather .*leave it out with offload=",
    ),
]


@pytest.mark.parametrize(("options", "message"), BAD_TOGETHER, ids=lambda value: str(value)[:60])
def test_options_that_leave_each_other_without_sense_are_refused_at_shard(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        shard(**options)


@pytest.mark.parametrize("stage", [0, 1, 2, "auto"])
def test_parameters_on_the_host_need_stage_3(stage: int | str) -> None:
    with pytest.raises(ValueError, match=r"offload\.parameters='cpu' has .*use stage=3"):
        shard(stage=stage, offload=Offload(parameters="cpu"))


def test_an_optimizer_without_a_host_kernel_is_refused_at_shard() -> None:
    model = net(depth=2)
    with pytest.raises(ValueError, match="RMSprop has no host kernel"):
        zeroshard.shard(model, torch.optim.RMSprop(model.parameters()), offload="cpu")
    with pytest.raises(ValueError, match="amsgrad"):
        zeroshard.shard(model, torch.optim.AdamW(model.parameters(), amsgrad=True), offload="cpu")
    zeroshard.shard(model, adamw(model), offload="cpu")  # the model was not touched


def test_a_model_without_an_optimizer_has_no_states_to_offload() -> None:
    model = net(depth=2).requires_grad_(False)
    with pytest.raises(ValueError, match=r"offload=Offload.* has no effect without an optimizer; leave it out"):
        zeroshard.shard(model, stage=3, offload="cpu")


def test_parameters_without_an_fp32_master_are_refused_with_the_remedy() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        with pytest.raises(ValueError, match=rf"offload: parameter 'first.weight' is {dtype} .*precision=\"bf16\""):
            shard(net(depth=2).to(dtype), offload="cpu")


@pytest.mark.parametrize("stage", [0, 3])
def test_a_host_that_is_too_small_is_said_at_shard_with_the_numbers(stage: int) -> None:
    model = net(width=256, depth=2)
    expected = zeroshard.stats(shard(net(width=256, depth=2), stage=stage, precision="bf16", offload="cpu")[0])
    assert expected.host_memory is not None
    needed = expected.host_memory.total
    message = (
        r"offload needs 11\.1 MB .*\(1\.59 MB of it pinned\), but 11\.1 MB are allowed by offload\.host_memory; "
        r"use moments=torch\.bfloat16 or \"8bit\", update_in_backward=True.*host_fraction=.*add ranks"
    )
    with pytest.raises(ValueError, match=message):
        shard(model, stage=stage, precision="bf16", offload=Offload(host_memory=needed - 1))
    shard(model, stage=stage, precision="bf16", offload=Offload(host_memory=needed))


def test_more_than_the_machine_has_is_refused_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_memory", lambda: 1000)
    with pytest.raises(ValueError, match=r"but 1 KB are available; use"):
        shard(offload="cpu")
    with pytest.raises(ValueError, match=r"but 1 KB are available; use"):
        shard(offload=Offload(host_memory=1 << 40))


def test_without_the_native_kernel_what_needs_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROSHARD_KERNEL", "torch")
    for options in ({"moments": torch.bfloat16}, {"moments": "8bit"}, {"split_master": True}):
        with pytest.raises(
            ValueError, match=r"offload\.split_master and offload\.moments need the native kernel.*leave"
        ):
            shard(precision="bf16", offload=Offload(**options))


def test_without_the_native_kernel_torch_gives_the_same_within_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("micro-batches", "clipping", "momentum", "groups"):
        native = SCENARIOS[name].run(2, Offload())
        with monkeypatch.context() as patch:
            patch.setenv("ZEROSHARD_KERNEL", "torch")
            assert_close_result(SCENARIOS[name].run(2, Offload()), native, name)


def test_options_may_come_as_a_table_of_a_configuration_file() -> None:
    table = {"moments": "bf16", "split_master": True, "host_fraction": 0.5}
    assert Config(offload=table, precision="bf16").offload == Offload(
        moments=torch.bfloat16, split_master=True, host_fraction=0.5
    )
    assert Config(offload="cpu").offload == Offload()
    assert Config(offload=None).offload is None


def test_a_configuration_files_mistakes_are_found_with_their_key() -> None:
    assert problems({"offload": {"threds": 1}}, "shard")[0].startswith("shard.offload: offload.threds is unknown")
    assert problems({"offload": {"host_fraction": 2}}, "shard")[0].startswith("shard.offload: offload.host_fraction=2")


def test_other_options_that_do_not_go_together_are_told_too() -> None:
    precision = {"parameters": "bf16", "cast_on_gather": True}
    found = problems({"stage": 2, "precision": precision, "offload": {"threads": 2, "threds": 1}}, "shard")
    assert [text for text in found if "threds is unknown" in text]
    assert [text for text in found if "cast_on_gather" in text]


def test_what_is_wrong_with_one_option_is_not_told_of_another() -> None:
    (found,) = problems({"offload": {"host_fraction": "autoo", "device_memory": 10**9}}, "shard")
    assert "autoo" in found


def test_all_mistakes_of_an_offload_table_are_found_at_once() -> None:
    table = {
        "threds": 1,
        "threads": 0,
        "moments": "fp8",
        "parameters": "cpu",
        "read_back": True,
        "update_in_backward": True,
        "delayed_update_after": 40,
    }
    found = problems({"stage": 2, "clip_grad_norm": 1.0, "offload": table}, "shard")
    assert all(text.startswith("shard.offload: ") for text in found)
    for part in (
        "offload.threds is unknown (did you mean 'threads'?)",
        "offload.threads=0 must be",
        "offload.moments='fp8' is unknown",
        "read_back needs split_master",
        "nothing to read back",
        "read_back would read parameters that a delayed update has not reached",
        "update_in_backward and delayed_update_after exclude each other",
        "offload.parameters='cpu' has no effect in stage 2",
        "excludes clip_grad_norm",
    ):
        assert sum(part in text for text in found) == 1, part
    assert len(found) == 9


def test_a_bad_value_of_an_offload_table_brings_no_mistakes_of_others_with_it() -> None:
    found = problems({"offload": {"host_fraction": "half", "delayed_update_after": 1}}, "shard")
    assert len(found) == 1
    assert found[0].startswith("shard.offload: offload.host_fraction='half'")


def test_ranks_that_got_different_options_are_told_apart_by_all_of_them() -> None:
    assert repr(Offload(seed=1)) != repr(Offload(seed=2))


def test_threads_are_as_many_as_asked_for_and_change_nothing() -> None:
    scenario = SCENARIOS["clipping in bf16"]
    assert_same_result(scenario.run(2, Offload(threads=1)), scenario.run(2, Offload(threads=3)), "threads")


def test_the_seed_of_the_rounding_counts_and_reproduces() -> None:
    scenario = SCENARIOS["plain in bf16"]
    for moments in (torch.bfloat16, "8bit"):
        runs = [scenario.run(2, Offload(moments=moments, seed=seed)) for seed in (0, 0, 1)]
        assert_same_result(runs[0], runs[1], "same seed")
        assert any(not torch.equal(runs[0].states[name], runs[2].states[name]) for name in runs[0].states)


def test_a_refused_offload_leaves_the_model_as_it_was() -> None:
    model = net(depth=2)
    with pytest.raises(ValueError, match="host_memory"):
        shard(model, offload=Offload(host_memory=10))
    loss_of(model, 0).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.zero_grad()
    shard(model, offload="cpu")
