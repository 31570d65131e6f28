"""Scripts and configurations that were written for DeepSpeed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
import zeroshard.integrations.deepspeed as deepspeed
from tests.integrations.deepspeed_page import PAGE, table
from tests.models import Net, batch, net
from tests.ranks import on_ranks
from zeroshard import Activations, LossScale, Offload, Precision

ROOT = Path(__file__).parents[2]
SIZE = {"train_micro_batch_size_per_gpu": 4}


def read(**config: Any) -> deepspeed.Configuration:
    return deepspeed.from_config({**SIZE, **config})


def nested(name: str, value: Any) -> dict[str, Any]:
    for part in reversed(name.split(".")):
        value = {part: value}
    return value


# -- the configuration ------------------------------------------------------------------------------------------------


def test_the_page_shows_the_table() -> None:
    assert table() in PAGE.read_text(), "python -m tests.integrations.deepspeed_page writes it"


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ({}, {"stage": 0, "clip_grad_norm": 1.0}),
        ({"zero_optimization": {"stage": 2}, "gradient_clipping": 0.5}, {"stage": 2, "clip_grad_norm": 0.5}),
        ({"gradient_clipping": 0}, {"stage": 0, "clip_grad_norm": float("inf")}),
        ({"gradient_clipping": 0, "zero_optimization": {"compute_grad_norm": False}}, {"stage": 0}),
        (
            {"bf16": {"enabled": True}},
            {
                "stage": 0,
                "clip_grad_norm": 1.0,
                "precision": Precision(parameters=torch.bfloat16),
                "on_nonfinite": "skip",
            },
        ),
        (
            {"bfloat16": {"enabled": True, "check_grad_overflow": False}, "communication_data_type": "fp32"},
            {
                "stage": 0,
                "clip_grad_norm": 1.0,
                "precision": Precision(parameters=torch.bfloat16, reduce=torch.float32),
            },
        ),
        (
            {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 7, "min_loss_scale": 2}},
            {
                "stage": 0,
                "clip_grad_norm": 1.0,
                "precision": Precision(
                    parameters=torch.float16,
                    loss_scale=LossScale(initial=16.0, growth_interval=7, minimum=2.0, hysteresis=2),
                ),
            },
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
            {"stage": 3, "clip_grad_norm": 1.0, "offload": Offload(host_fraction=0.5)},
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
            {"stage": 3, "clip_grad_norm": 1.0, "offload": Offload(parameters="cpu")},
        ),
        (
            {"zero_optimization": {"stage": 2, "cpu_offload": True}},
            {"stage": 2, "clip_grad_norm": 1.0, "offload": Offload()},
        ),
        (
            {"activation_checkpointing": {"cpu_checkpointing": True, "number_checkpoints": 3}},
            {"stage": 0, "clip_grad_norm": 1.0, "activations": Activations(recompute=0, offload=True)},
        ),
        ({"gradient_clipping": None, "zero_optimization": {"stage": None}}, {"stage": 0, "clip_grad_norm": 1.0}),
        ({"zeroshard": {"stage": 3, "keep": ()}}, {"stage": 3, "clip_grad_norm": 1.0, "keep": ()}),
    ],
)
def test_keys_are_mapped_to_options_of_shard(config: dict[str, Any], options: dict[str, Any]) -> None:
    assert read(**config).options == options
    zeroshard.Config.parse(options)


def test_remedies_of_the_table_are_options() -> None:
    """A reason that names a section of zeroshard's shows one that works."""
    written = [key.why.split('"zeroshard": ')[1] for key in deepspeed.keys().values() if '"zeroshard": ' in key.why]
    assert written
    for text in written:
        config = {"bf16": {"enabled": True}, "zeroshard": json.loads(text)}
        zeroshard.Config.parse(read(**config).options)


def test_a_fixed_loss_scale_stays() -> None:
    scale = read(fp16={"enabled": True, "loss_scale": 128}).options["precision"].loss_scale
    assert (scale.initial, scale.minimum) == (128.0, 128.0)
    assert scale.growth_interval > 10**15


@pytest.mark.parametrize("name", [name for name, key in deepspeed.keys().items() if key.what == "accepted"])
def test_what_is_accepted_takes_any_value(name: str) -> None:
    for value in (True, 5, "auto", {"a": 1}):
        read(**nested(name, value))


REFUSED = {name: key for name, key in deepspeed.keys().items() if key.what == "refused"}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_named_with_the_reason_unless_it_asks_for_nothing(name: str) -> None:
    for value in (*REFUSED[name].fine, None, {"enabled": False}):
        read(**nested(name, value))
    for value in ({"enabled": True}, 7):
        with pytest.raises(ValueError, match="refused") as error:
            read(**nested(name, value))
        assert name in str(error.value)
        assert REFUSED[name].why in str(error.value)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"zero_optimisation": {"stage": 2}}, ["'zero_optimisation'", "zero_optimization"]),
        ({"zero_optimization": {"offload_optimiser": {"device": "cpu"}}}, ["zero_optimization.offload_optimizer"]),
        ({"zero_optimization": True}, ["zero_optimization=True", "section"]),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, ["nvme", "cpu"]),
        ({"bf16": {"enabled": "auto"}}, ["bf16.enabled", "auto="]),
        ({"optimizer": {"type": "Adam", "params": {"lr": "auto"}}}, ["optimizer.params.lr", "auto="]),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, ["exclude"]),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, ["fp16 section"]),
        ({"torch_autocast": {"enabled": True, "dtype": "float32"}}, ["bfloat16"]),
        ({"torch_autocast": {"enabled": True}}, ["torch_autocast.dtype=None"]),
        ({"gradient_clipping": "1.0"}, ["gradient_clipping='1.0'", "a number"]),
        ({"bf16": {"enabled": "true"}}, ["bf16.enabled='true'", "true or false"]),
        ({"optimizer": {"type": 3}}, ["optimizer.type=3", "a string"]),
        ({"optimizer": {"type": "SGD", "params": [1]}}, ["optimizer.params=[1]", "braces"]),
        ({"train_batch_size": "auto", "gradient_accumulation_steps": "auto"}, ["train_batch_size", "auto="]),
        ({"train_batch_size": "auto"}, ["train_batch_size", "auto="]),
        ({"train_batch_size": 5}, ["batch=5", "micro-batch 4"]),
        ({"train_micro_batch_size_per_gpu": None}, ["train_batch_size"]),
        ({"communication_data_type": "int8"}, ["communication_data_type", "bf16"]),
    ],
)
def test_a_wrong_configuration_is_refused_by_name(config: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the words are compared below
        read(**config)
    for word in words:
        assert word in str(error.value)


def test_all_refused_and_unknown_keys_of_a_configuration_are_told_at_once() -> None:
    with pytest.raises(ValueError, match="3 mistakes in the DeepSpeed configuration:") as error:
        read(tensorboard={"enabled": True}, comms_logger={"enabled": True}, gradient_cliping=1.0, steps_per_print=5)
    told = str(error.value)
    assert "tensorboard=" in told
    assert "comms_logger=" in told
    assert "did you mean 'gradient_clipping'?" in told


def test_auto_is_taken_where_the_caller_gives_the_value(tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "optimizer": {"type": "SGD", "params": {"lr": "auto"}},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
    }
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(config))
    found = deepspeed.from_config(file, {"train_micro_batch_size_per_gpu": 3, "optimizer.params.lr": 0.25})
    optimizer = found.optimizer(nn.Linear(1, 1).parameters())
    assert found.train_micro_batch_size_per_gpu == 3
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize(
    ("given", "world", "sizes"),
    [
        ({"train_batch_size": 24}, 2, (24, 12, 1)),
        ({"train_batch_size": 24, "gradient_accumulation_steps": 3}, 2, (24, 4, 3)),
        ({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2}, 2, (24, 2, 6)),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, 4, (24, 2, 3)),
        (
            {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3.0},
            4,
            (24, 2, 3),
        ),
    ],
)
def test_batch_sizes_complete_each_other(given: dict[str, int], world: int, sizes: tuple[int, int, int]) -> None:
    found = deepspeed.from_config(given, world=world)
    assert (
        found.train_batch_size,
        found.train_micro_batch_size_per_gpu,
        found.gradient_accumulation_steps,
    ) == sizes


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        ("Adam", {}, (torch.optim.AdamW, 0.0)),
        ("Adam", {"adam_w_mode": False, "weight_decay": 0.5}, (torch.optim.Adam, 0.5)),
        ("AdamW", {"torch_adam": True}, (torch.optim.AdamW, 0.01)),
        ("Adagrad", {}, (torch.optim.Adagrad, 0)),
        ("RMSprop", {"weight_decay": 0.25}, (torch.optim.RMSprop, 0.25)),
    ],
)
def test_optimizers_are_those_of_deepspeed(kind: str, given: dict[str, Any], expected: tuple[type, float]) -> None:
    made = read(optimizer={"type": kind, "params": given}).optimizer(nn.Linear(1, 1).parameters())
    assert made is not None
    assert (type(made), made.defaults["weight_decay"]) == expected


def test_optimizers_and_schedulers_that_are_not_there_are_refused() -> None:
    parameters = list(nn.Linear(1, 1).parameters())
    for section, words in (
        ({"type": "Lamb"}, "element-wise"),
        ({"type": "AdamX"}, "did you mean"),
        ({"type": "Adam", "params": {"max_grad_norm": 1}}, "gradient_clipping"),
        ({"type": "Adam", "params": {"bias_correction": False}}, "leave it out"),
    ):
        with pytest.raises(ValueError, match=words):
            read(optimizer=section).optimizer(parameters)
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    for section, words in (
        ({"type": "OneCycle"}, "OneCycleLR"),
        ({"type": "WarmupLLR"}, "unknown"),
        ({"type": "WarmupDecayLR"}, "total_num_steps"),
        ({"type": "WarmupLR", "params": {"warmup_max": 1}}, "warmup_max"),
    ):
        with pytest.raises(ValueError, match=words):
            read(scheduler=section).scheduler(optimizer)


# -- the engine -------------------------------------------------------------------------------------------------------


def make(model: nn.Module | None = None, *, stage: int = 2, **config: Any) -> deepspeed.Engine:
    base = {
        **SIZE,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = deepspeed.initialize(model=net(depth=2) if model is None else model, config=base | config)
    return engine


def train(engine: deepspeed.Engine, micro_batches: range) -> list[float]:
    losses = []
    for number in micro_batches:
        loss = engine(batch(number)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def trained_by_ddp(micro_batches: int) -> list[float]:
    model = net(depth=2)
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses, rates = [], [0.0, 0.0, 0.0025, 0.005]
    for number in range(micro_batches):
        loss = ddp(batch(number)).square().mean()
        (loss / 2).backward()
        losses.append(loss.item())
        if number % 2:
            optimizer.param_groups[0]["lr"] = rates[number // 2]
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_the_engine_trains_as_ddp_does(stage: int) -> None:
    engine = make(stage=stage)
    assert engine.zero_optimization_stage() == stage
    assert engine.get_batch_info() == (16, 4, 2)
    assert train(engine, range(8)) == pytest.approx(trained_by_ddp(8), rel=1e-5)
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (4, 8, 64)
    assert engine.get_lr() == [pytest.approx(0.0075)]
    assert engine.get_global_grad_norm() == pytest.approx(zeroshard.stats(engine.module).grad_norm)
    assert (engine.global_rank, engine.world_size, engine.skipped_steps) == (dist.get_rank(), 2, 0)


@on_ranks(2)
def test_a_backward_without_the_engine_divides_too() -> None:
    class TwoOutputs(Net):
        def forward(self, x: torch.Tensor) -> Any:
            output = super().forward(x)
            return {"output": output, "loss": output.square().mean()}  # one output comes from another

    torch.manual_seed(1)
    engine = make(TwoOutputs(depth=2))
    losses = []
    for number in range(8):
        loss = engine(batch(number))["loss"]
        loss.backward()
        engine.step()
        losses.append(loss.item())
    assert losses == pytest.approx(trained_by_ddp(8), rel=1e-5)


@on_ranks(2)
def test_a_step_is_made_where_the_script_says() -> None:
    engine = make()
    assert not engine.is_gradient_accumulation_boundary()
    engine.set_gradient_accumulation_boundary(True)
    train(engine, range(1))
    assert engine.global_steps == 1
    assert engine.was_step_applied()
    engine.set_gradient_accumulation_boundary(False)
    train(engine, range(3))
    assert engine.global_steps == 1
    assert not engine.was_step_applied()


@on_ranks(2)
def test_a_step_that_overflows_is_skipped_and_leaves_the_scheduler_where_it_is() -> None:
    engine = make(bf16={"enabled": True}, gradient_accumulation_steps=1)
    engine.backward(engine(batch(0)).sum() * float("inf"))
    with pytest.warns(UserWarning, match="left out") if dist.get_rank() == 0 else nullcontext():
        engine.step()
    assert (engine.global_steps, engine.skipped_steps, engine.lr_scheduler.last_batch_iteration) == (1, 1, -1)
    train(engine, range(1))
    assert (engine.global_steps, engine.skipped_steps, engine.lr_scheduler.last_batch_iteration) == (2, 1, 0)


@on_ranks(2)
def test_a_checkpoint_goes_on_with_the_same_bits_in_another_stage(tmp_path: Path) -> None:
    engine = make(stage=2)
    train(engine, range(4))
    engine.save_checkpoint(str(tmp_path), tag="two", client_state={"epoch": 1})
    expected = train(engine, range(4, 8))
    resumed = make(stage=3)
    folder, state = resumed.load_checkpoint(str(tmp_path))
    assert folder == str(tmp_path / "two")
    assert state == {"epoch": 1}
    assert (resumed.global_steps, resumed.micro_steps) == (2, 4)
    assert train(resumed, range(4, 8)) == expected
    assert resumed.get_lr() == engine.get_lr()
    zeroshard.save(tmp_path / "without an engine", engine.module, engine.optimizer)
    assert resumed.load_checkpoint(str(tmp_path), "without an engine", load_lr_scheduler_states=False)[1] == {}
    assert (resumed.global_steps, resumed.micro_steps, resumed.global_samples) == (4, 8, 64)
    fresh = make(stage=1)
    fresh.load_checkpoint(str(tmp_path), tag="two", load_module_only=True)
    assert fresh.optimizer.steps == 0
    with pytest.raises(ValueError, match="load_module_strict"):
        fresh.load_checkpoint(str(tmp_path), load_module_strict=False)
    with pytest.warns(UserWarning, match="latest"):
        assert fresh.load_checkpoint(str(tmp_path / "nothing")) == (None, None)


@on_ranks(2)
def test_a_file_that_rank_0_cannot_write_is_told_on_all_ranks(tmp_path: Path) -> None:
    engine = make()
    (tmp_path / "latest").mkdir(exist_ok=True)
    (tmp_path / "weights.bin").mkdir(exist_ok=True)
    with pytest.raises((OSError, RuntimeError), match="latest"):
        engine.save_checkpoint(str(tmp_path), tag="one")
    with pytest.raises((OSError, RuntimeError), match="weights"):
        engine.save_16bit_model(str(tmp_path), "weights.bin")


@on_ranks(2)
def test_weights_are_written_for_torch_load(tmp_path: Path) -> None:
    engine = make(stage=3)
    train(engine, range(2))
    engine.save_16bit_model(str(tmp_path), "model.bin")
    written = torch.load(tmp_path / "model.bin", weights_only=True)
    expected = zeroshard.full_state_dict(engine.module)
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)


@on_ranks(2)
def test_parameters_are_gathered_and_written_before_and_after_sharding() -> None:
    with deepspeed.zero.Init():
        model = net(depth=2)
    with deepspeed.zero.GatheredParameters(model.first.bias, modifier_rank=0):
        if dist.get_rank() == 0:
            nn.init.constant_(model.first.bias, 2.0)
    engine = make(model, stage=3)
    with deepspeed.zero.GatheredParameters([model.first.bias, model.last.bias], modifier_rank=0):
        assert model.first.bias.tolist() == [2.0] * 13
        if dist.get_rank() == 0:
            nn.init.constant_(model.last.bias, 3.0)
    assert zeroshard.full_state_dict(engine.module)["last.bias"].tolist() == [3.0] * 5
    with pytest.raises(ValueError, match="modifier_rank=0"), deepspeed.zero.GatheredParameters([], modifier_rank=1):
        pass


@on_ranks(2)
def test_the_loader_has_this_ranks_part_of_the_data() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(20.0).view(20, 1))
    model = nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 1))
    config = {**SIZE, "dataloader_drop_last": True}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    _, ours, loader, mine = deepspeed.initialize(
        model=model, optimizer=optimizer, training_data=data, lr_scheduler=scheduler, config=config
    )
    assert ours.param_groups is optimizer.param_groups
    assert mine is scheduler
    assert [len(rows) for (rows,) in loader] == [4, 4]
    seen = {row for (rows,) in loader for row in rows.flatten().tolist()}
    everybody: list[Any] = [None, None]
    dist.all_gather_object(everybody, seen)
    assert everybody[0].isdisjoint(everybody[1])


def test_states_sleep_between_phases() -> None:
    engine = make()
    train(engine, range(2))
    with pytest.raises(ValueError, match="include="):
        engine.offload_states(include=["lp_params"])
    engine.offload_states()
    with pytest.raises(RuntimeError, match="restore_states"):
        engine(batch(0))
    engine.reload_states()
    train(engine, range(2))


def test_autocast_leaves_the_parameters_in_fp32() -> None:
    engine = make(torch_autocast={"enabled": True, "dtype": "bfloat16"})
    assert engine(batch(0)).dtype is torch.bfloat16
    assert engine.first.weight.dtype is torch.float32  # a name that the engine does not have is the model's


def test_progress_is_printed_and_unknown_names_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    engine = make(steps_per_print=2)
    train(engine, range(4))
    assert capsys.readouterr().out.count("step=2, skipped=0, lr=[") == 1
    with pytest.raises(AttributeError, match="'flops_profiler_enabled'"):
        _ = engine.flops_profiler_enabled


def test_a_frozen_model_needs_no_optimizer() -> None:
    model = net(depth=2).requires_grad_(False)
    engine, optimizer, *_ = deepspeed.initialize(model=model, config={**SIZE, "zero_optimization": {"stage": 3}})
    assert optimizer is None
    assert engine.eval()(batch(0)).shape == (6, 5)


# -- beside DeepSpeed -------------------------------------------------------------------------------------------------


def under(name: str, out: Path) -> dict[str, Any]:
    """What the script measured with this import."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "-m", "tests.integrations.deepspeed_script", name, str(out)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.slow
def test_one_script_has_the_same_losses_under_deepspeed(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    theirs = under("deepspeed", tmp_path / "theirs.json")
    ours = under("zeroshard.integrations.deepspeed", tmp_path / "ours.json")
    assert ours.keys() == theirs.keys()
    for case, steps in theirs.items():
        sixteen_bits = "bf16" in case
        for (loss, rate, norm), (their_loss, their_rate, their_norm) in zip(ours[case], steps, strict=True):
            assert loss == pytest.approx(their_loss, rel=4e-3 if sixteen_bits else 1e-6), case
            assert rate == their_rate, case
            if case != "stage 0":  # where DeepSpeed has no norm
                assert norm == pytest.approx(their_norm, rel=4e-3 if sixteen_bits else 1e-6), case
    assert theirs["clipped by default"] != theirs["not clipped"]


KEYS_OF_DEEPSPEED = """
import json
from deepspeed.runtime import precision_config
from deepspeed.runtime.activation_checkpointing.config import ACT_CHKPT_DEFAULT
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zero import config as zero, offload_config

class Seen(dict):  # notes which keys are read
    names = set()
    def get(self, name, default=None):
        self.names.add(name)
        return super().get(name, default)
    def __contains__(self, name):
        self.names.add(name)
        return super().__contains__(name)
    def keys(self):
        return self

DeepSpeedConfig(Seen(train_batch_size=1))
names = set(Seen.names)
def fields(section, kind):
    for name, field in kind.model_fields.items():
        names.add(section + name)
        if field.alias:
            names.add(section + field.alias)
fields("zero_optimization.", zero.DeepSpeedZeroConfig)
fields("zero_optimization.offload_optimizer.", offload_config.DeepSpeedZeroOffloadOptimizerConfig)
fields("zero_optimization.offload_param.", offload_config.DeepSpeedZeroOffloadParamConfig)
fields("fp16.", precision_config.DeepSpeedFP16Config)
fields("bf16.", precision_config.DeepSpeedBF16Config)
names |= {"activation_checkpointing." + name for name in ACT_CHKPT_DEFAULT}
print(json.dumps(sorted(names)))
"""


@pytest.mark.slow
def test_no_key_of_deepspeed_is_unknown() -> None:
    pytest.importorskip("deepspeed")
    done = subprocess.run(
        [sys.executable, "-c", KEYS_OF_DEEPSPEED],
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    names = json.loads(done.stdout.splitlines()[-1])
    assert len(names) > 120
    known = deepspeed.keys()
    missing = [name for name in names if name not in known and not any(k.startswith(f"{name}.") for k in known)]
    assert not missing
