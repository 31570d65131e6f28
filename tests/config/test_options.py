"""What a user may ask for: every bad value is refused where it is given, with its name and the remedy."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zeroshard import Activations, Config, LossScale, Offload, Precision
from zeroshard.config.checks import read_table
from zeroshard.config.table import Extent, Place, state_table
from zeroshard.plan.setup import Setup


def problems(options: dict[str, Any], path: str) -> list[str]:
    """The mistakes in the ``shard`` options of a configuration file."""
    return read_table(Config, options, path)[1]


# -- the table --------------------------------------------------------------------------------------------------------

W, S = Extent.WHOLE, Extent.SHARD


@pytest.mark.parametrize(
    ("stage", "extents"), [(0, (W, W, W)), (1, (S, W, W)), (2, (S, S, W)), (3, (S, S, S))], ids=lambda value: str(value)
)
def test_a_stage_is_a_row_of_extents(stage: int, extents: tuple[Extent, ...]) -> None:
    table = state_table(stage, world=4)
    assert (table.optimizer.extent, table.gradients.extent, table.parameters.extent) == extents
    assert {row.place for row in (table.optimizer, table.gradients, table.parameters)} == {Place.DEVICE}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_world_of_one_has_nothing_to_divide(stage: int) -> None:
    assert state_table(stage, world=1) == state_table(0, world=8)


# -- options ----------------------------------------------------------------------------------------------------------


def test_nothing_needs_to_be_said() -> None:
    config = Config.parse({})
    assert config.stage == 3
    assert config.precision == Precision()
    assert config == Config()


def test_a_configuration_cannot_be_changed_afterwards() -> None:
    with pytest.raises(FrozenInstanceError):
        Config().stage = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("stages", "stage"),
        ("clip_grad_nrom", "clip_grad_norm"),
        ("precison", "precision"),
        ("max_unit_byte", "max_unit_bytes"),
    ],
)
def test_an_unknown_option_is_refused_with_the_nearest_name(given: str, meant: str) -> None:
    with pytest.raises(TypeError, match=f"'{given}'.*did you mean '{meant}'"):
        Config.parse({given: 1})


def test_an_unknown_option_like_no_other_is_refused_with_all_names() -> None:
    with pytest.raises(TypeError, match="zzz") as caught:
        Config.parse({"zzz": 1})
    assert "did you mean" not in str(caught.value)
    assert all(entry.name in str(caught.value) for entry in fields(Config) if entry.init)


BAD: list[tuple[str, Any]] = [
    *(("stage", value) for value in (-1, 4, 1.0, 2.5, "3", True, None, math.nan)),
    *(("precision", value) for value in ("bf61", "float32", 16, ["bf16"], torch.int64, "")),
    *(("clip_grad_norm", value) for value in (0, 0.0, -1.0, math.nan, True, "1.0", [1.0])),
    *(("stall_timeout", value) for value in (0, -5, math.nan, math.inf, True, "30", None, 1e300)),
    *(("max_unit_bytes", value) for value in (0, -1, 1.5, True, "1GB", None)),
    *(("units", value) for value in (3, [3], ["blocks", 3], {"blocks"}, [None])),
    *(("keep", value) for value in (3, [3], [nn.Linear], [None])),
    *(("prefetch", value) for value in (-1, 1.0, True, "1")),
    *(("elementwise", value) for value in (1, "yes", None)),
    *(("device", value) for value in ("gpu", "cuda:x", 1.5, "meta")),
    *(("init", value) for value in ("zeros", 3, True, "")),
    *(("weights", value) for value in (3, True, "", b"folder", ["folder"])),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda value: repr(value)[:24])
def test_a_bad_value_is_refused_and_named(name: str, value: object) -> None:
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        Config.parse({name: value})
    assert name in str(caught.value)


def test_a_misspelt_precision_is_answered_with_the_nearest_and_all() -> None:
    with pytest.raises(ValueError, match=r"precision='bf61'.*did you mean 'bf16'.*fp32, bf16, fp16"):
        Config.parse({"precision": "bf61"})


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize(("name", "value"), [("keep", ("blocks.0",)), ("keep", ()), ("prefetch", 2), ("prefetch", 0)])
def test_an_option_without_effect_in_a_stage_is_refused_with_the_remedy(stage: int, name: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"{name}=.* has no effect in stage {stage}.*stage=3"):
        Config.parse({"stage": stage, name: value})
    assert getattr(Config.parse({"stage": 3, name: value}), name) == value


@pytest.mark.parametrize(
    ("options", "name", "expected"),
    [
        ({"units": "blocks.*"}, "units", ("blocks.*",)),
        ({"units": ["a", nn.Linear]}, "units", ("a", nn.Linear)),
        ({"units": nn.Linear}, "units", (nn.Linear,)),
        ({"keep": "blocks.0"}, "keep", ("blocks.0",)),
        ({"keep": []}, "keep", ()),
        ({"device": "cpu"}, "device", torch.device("cpu")),
        ({"precision": None}, "precision", Precision()),
        ({"precision": "bf16"}, "precision", Precision(parameters=torch.bfloat16)),
        ({"precision": torch.float32}, "precision", Precision(parameters=torch.float32)),
        ({"clip_grad_norm": math.inf}, "clip_grad_norm", math.inf),
        ({"clip_grad_norm": 1}, "clip_grad_norm", 1),
        ({"weights": "folder"}, "weights", Path("folder")),
        ({"init": "empty"}, "init", "empty"),
    ],
)
def test_short_ways_to_say_things_are_understood(options: dict[str, Any], name: str, expected: object) -> None:
    assert getattr(Config.parse(options), name) == expected


def test_weights_and_empty_memory_exclude_each_other() -> None:
    with pytest.raises(ValueError, match=r"init='empty' and weights= exclude each other"):
        Config.parse({"init": "empty", "weights": "folder"})


# -- precision --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["parameters", "reduce", "accumulate", "output"])
@pytest.mark.parametrize("value", [torch.int32, torch.bool, torch.complex64, "bf16", 16])
def test_a_dtype_that_is_not_floating_point_is_refused_and_named(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"precision.{name}"):
        Precision(**{name: value})


def test_accumulating_needs_a_dtype() -> None:
    with pytest.raises(ValueError, match=r"precision\.accumulate"):
        Precision(accumulate=None)  # type: ignore[arg-type]


def test_eight_bit_parameters_are_refused_for_they_would_train_without_a_master() -> None:
    with pytest.raises(ValueError, match=r"precision\.parameters"):
        Precision(parameters=torch.float8_e4m3fn)


@pytest.mark.parametrize("value", ["no", 0, None])
def test_cast_inputs_is_true_or_false(value: Any) -> None:
    with pytest.raises(ValueError, match=r"precision\.cast_inputs"):
        Precision(parameters=torch.bfloat16, cast_inputs=value)


def test_only_sixteen_bit_parameters_have_masters() -> None:
    keeps = {dtype: Precision(parameters=dtype).keeps_master for dtype in (torch.float32, torch.float64, None)}
    assert not any(keeps.values())
    assert Precision(parameters=torch.bfloat16).keeps_master
    assert Precision(parameters=torch.float16).keeps_master


def test_half_precision_brings_loss_scaling_and_full_precision_outputs() -> None:
    precision = Precision(parameters=torch.float16)
    assert precision.loss_scale == LossScale()
    assert precision.output is torch.float32
    assert Precision(parameters=torch.float16, output=torch.float16).output is torch.float16
    assert Precision(parameters=torch.bfloat16).loss_scale is None
    assert Precision(parameters=torch.bfloat16).output is None


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_loss_scaling_without_half_precision_is_refused(dtype: torch.dtype | None) -> None:
    with pytest.raises(ValueError, match=r"precision\.loss_scale has no effect"):
        Precision(parameters=dtype, loss_scale=LossScale())


@pytest.mark.parametrize("value", [1024.0, "dynamic", True])
def test_a_loss_scale_is_a_loss_scale(value: Any) -> None:
    with pytest.raises(ValueError, match=r"precision\.loss_scale"):
        Precision(parameters=torch.float16, loss_scale=value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in ("initial", "factor", "minimum") for value in (0, -1.0, math.nan, "2", True)),
        ("initial", math.inf),
        ("factor", 1.0),
        ("factor", 0.5),
        ("factor", math.inf),
        *(("growth_interval", value) for value in (0, -3, 2.5, "100", True, math.nan)),
    ],
)
def test_a_bad_value_of_the_loss_scale_is_refused_and_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"loss_scale\.{name}"):
        LossScale(**{name: value})


@pytest.mark.parametrize(
    ("make", "texts"),
    [
        (lambda: Config(stage=7, prefetch=-1), ["stage=7 must be", "prefetch=-1 must be"]),
        (lambda: Offload(threads=0, seed=-1), ["offload.threads=0 must be", "offload.seed=-1 must be"]),
        (lambda: Activations(offload=1, prefetch=-1), ["activations.offload=1 must", "activations.prefetch=-1 must"]),
        (lambda: LossScale(factor=0.5, minimum=-1), ["loss_scale.factor=0.5 must be", "loss_scale.minimum=-1 must be"]),
        (
            lambda: Precision(reduce=torch.int8, loss_scale=LossScale()),
            ["precision.reduce=torch.int8 must be", "precision.loss_scale has no effect"],
        ),
    ],
)
def test_python_too_is_told_every_mistake_at_once(make: Callable[[], object], texts: list[str]) -> None:
    with pytest.raises(ValueError, match="2 mistakes in the options:") as caught:
        make()
    assert all(text in str(caught.value) for text in texts)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_conflict_with_a_bad_value_is_not_told() -> None:
    with pytest.raises(ValueError, match=r"^precision='bf61' is unknown[^\n]*$"):
        Config.parse({"precision": "bf61", "offload": {"split_master": True}})
    with pytest.raises(ValueError, match=r"precision.reduce='bf61' is unknown[^\n]*\n  offload.split_master [^\n]*$"):
        Config.parse({"precision": {"reduce": "bf61"}, "offload": {"split_master": True}})


# -- all errors of a file at once -------------------------------------------------------------------------------------


def test_good_options_have_no_problems() -> None:
    assert problems({}, "shard") == []
    assert problems({"stage": 2, "precision": "bf16", "clip_grad_norm": 1.0, "units": ["blocks.*"]}, "shard") == []


def test_all_problems_of_a_mapping_are_reported_at_once_with_their_key_paths() -> None:
    found = problems(
        {"stage": 7, "precison": "bf16", "clip_grad_norm": -1, "prefetch": -2, "max_unit_bytes": 0, "zzz": 1},
        "job.shard",
    )
    assert len(found) == 6
    for name in ("stage", "precison", "clip_grad_norm", "prefetch", "max_unit_bytes", "zzz"):
        assert sum(text.startswith(f"job.shard.{name}:") for text in found) == 1, name
    assert any("did you mean 'precision'" in text for text in found)


def test_every_option_without_effect_is_a_problem() -> None:
    found = problems({"stage": 1, "keep": [], "prefetch": 2}, "shard")
    for name in ("keep", "prefetch"):
        assert any(name in text and "no effect" in text for text in found), name


def test_an_option_without_effect_is_reported_beside_a_bad_value() -> None:
    found = problems({"stage": 1, "prefetch": 2, "clip_grad_norm": -1}, "shard")
    assert any("prefetch" in text and "no effect" in text for text in found)
    assert any(text.startswith("shard.clip_grad_norm:") for text in found)


@pytest.mark.parametrize(
    ("options", "blamed"),
    [
        ({"on_nonfinite": "skip", "offload": {"update_in_backward": True}}, "on_nonfinite"),
        ({"stage": 2, "precision": {"parameters": "bf16", "cast_on_gather": True}}, "precision"),
        ({"init": "empty", "weights": "folder"}, "init"),
    ],
)
def test_good_options_that_exclude_each_other_are_a_problem(options: dict[str, Any], blamed: str) -> None:
    (found,) = problems(options, "shard")
    with pytest.raises(ValueError, match="leave") as caught:
        Config.parse(options)
    assert found == f"shard.{blamed}: {caught.value}"


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda value: repr(value)[:24])
def test_what_shard_refuses_is_a_problem_of_a_file(name: str, value: object) -> None:
    found = problems({name: value}, "shard")
    assert len(found) == 1
    assert found[0].startswith("shard")
    assert name in found[0]


def test_stage_3_gathers_two_units_ahead_unless_told_otherwise_and_the_plan_counts_them() -> None:
    assert Config(stage=3).units_ahead == Setup(stage=3).prefetch == 2
    assert [Config(stage=3, prefetch=ahead).units_ahead for ahead in (0, 1, 3)] == [0, 1, 3]
    assert Activations().prefetch == 1, "of checkpoints, another option"
