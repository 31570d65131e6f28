"""Accelerate trains a sharded model as it trains one under DistributedDataParallel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from tests.huggingface import under_torchrun
from tests.integrations.runs import Options, Run, llama
from tests.matrix import slow
from tests.ranks import Pool, on_ranks
from zeroshard.storage.format import CheckpointError

SETTINGS: dict[str, tuple[Options, Options]] = {
    # name: options of zeroshard, arguments of both runs
    "stage 1": ({"stage": 1}, {"clip": "value"}),
    "stage 2, accumulation": ({"stage": 2}, {"gradient_accumulation_steps": 2}),
    "stage 3, offload": ({"stage": 3, "offload": "cpu"}, {}),
    "stage 0": ({"stage": 0}, {}),
    "stage 1, accumulation": ({"stage": 1}, {"gradient_accumulation_steps": 2}),
    "stage 3, accumulation": ({"stage": 3}, {"gradient_accumulation_steps": 2, "clip": "value"}),
    "stage 2, offload, accumulation": ({"stage": 2, "offload": "cpu"}, {"gradient_accumulation_steps": 2}),
    "stage 3, offload, by value": ({"stage": 3, "offload": "cpu"}, {"clip": "value"}),
    "stage 3, no clipping": ({"stage": 3}, {"clip": None}),
    "stage 3, autocast": ({"stage": 3}, {"mixed_precision": "bf16"}),
}
QUICK = ("stage 1", "stage 2, accumulation", "stage 3, offload")


@pytest.mark.parametrize("name", [name if name in QUICK else slow(name) for name in SETTINGS])
@on_ranks(2)
def test_losses_norms_and_rates_are_those_of_ddp(name: str) -> None:
    options, more = SETTINGS[name]
    runs = []
    for zeroshard_options in (None, options):
        with under_torchrun():
            runs.append(Run(zeroshard_options, **more).train(6))
    plain, sharded = runs
    precision = 1e-2 if "mixed_precision" in more else 1e-5
    assert isinstance(plain.model, nn.parallel.DistributedDataParallel)
    assert len(plain.losses) == 6
    assert plain.losses[-1] < plain.losses[0]
    assert sharded.losses == pytest.approx(plain.losses, rel=precision)
    assert sharded.norms == pytest.approx(plain.norms, rel=max(precision, 1e-4))
    assert sharded.rates == plain.rates


@pytest.mark.parametrize("stage", [3, slow(1)])
@on_ranks(2)
def test_a_compiled_backend_compiles_the_blocks(stage: int) -> None:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    with under_torchrun():
        expected = Run({"stage": stage}).train(3).losses
    assert not torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with under_torchrun():
        run = Run({"stage": stage}, dynamo_backend="aot_eager").train(3)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    assert run.losses == pytest.approx(expected, rel=1e-5)
    assert type(run.model).__name__ == "LlamaForCausalLM", "there is no wrapper"


def losses_of(folder: str, stage: int, save_after: int = 0, batches: int = 0, skip: int = 0) -> list[float]:
    """On each rank of some world. The batch of all ranks together is the same in every world."""
    with under_torchrun():
        run = Run({"stage": stage}, batch=4 // dist.get_world_size(), step_scheduler_with_optimizer=False)
        counter = _Counter()
        run.accelerator.register_for_checkpointing(counter)
        if skip:
            run.accelerator.load_state(folder)
            assert counter.value == skip
            run.train(batches, skip)
        else:
            run.train(save_after)
            counter.value = save_after
            run.accelerator.save_state(folder)
            run.train(batches, save_after)
    return run.losses


class _Counter:
    value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


@pytest.mark.parametrize(("stage", "volume"), [(1, 2), slow(0, 2), slow(2, 3), slow(3, 6)])
@on_ranks(2)
def test_micro_batches_are_reduced_where_gradients_are_shards(stage: int, volume: int) -> None:
    options: Options = {"stage": stage} if stage < 3 else {"stage": stage, "keep": ()}
    with under_torchrun():
        run = Run(options, gradient_accumulation_steps=2).train(4)
        stats = zeroshard.stats(run.model)
    assert stats.volume_elements == volume * stats.padded_parameters


@pytest.mark.parametrize(("before", "after"), [((2, 3), (1, 1)), slow((1, 2), (2, 3)), slow((2, 1), (2, 2))])
def test_training_goes_on_in_another_world_and_stage(
    before: tuple[int, int], after: tuple[int, int], tmp_path: Path
) -> None:
    def run(world: int, stage: int, **more: Any) -> list[float]:
        return Pool.shared().run(losses_of, world, {"folder": str(tmp_path / "at"), "stage": stage, **more})[0]

    whole = run(*before, save_after=2, batches=2)
    assert run(*after, skip=2, batches=2) == pytest.approx(whole[2:], rel=1e-5)


@on_ranks(2)
def test_states_with_numbers_and_the_newest_of_them(tmp_path: Path) -> None:
    from accelerate.utils import ProjectConfiguration

    with under_torchrun():
        naming = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
        run = Run({"stage": 3}, project_config=naming, gradient_accumulation_steps=2)
        for _ in range(3):
            run.train(2).accelerator.save_state()
        dist.barrier()
        assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_1", "checkpoint_2"]
        assert run.accelerator.step == 6
        kept = zeroshard.full_state_dict(run.model)
        run.train(2)
        run.accelerator.load_state()
        assert run.accelerator.step == 6
        for name, value in zeroshard.full_state_dict(run.model).items():
            assert torch.equal(value, kept[name]), name


@on_ranks(2)
def test_whole_weights_are_on_the_main_process(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    with under_torchrun():
        run = Run({"stage": 3}).train(1)
        state = run.accelerator.get_state_dict(run.model)
        names = set(state)
        unwrapped = run.accelerator.unwrap_model(run.model)
        assert unwrapped is run.model
        main = run.accelerator.is_main_process
        unwrapped.save_pretrained(tmp_path / "out", is_main_process=main, state_dict=state)
        run.accelerator.save_model(run.model, tmp_path / "model")
        run.accelerator.wait_for_everyone()
    whole = zeroshard.full_state_dict(run.model)
    assert names == (set(whole) if main else set())
    for file in ("out/model.safetensors", "model/model.safetensors"):
        saved = load_file(tmp_path / file)
        assert saved.keys() <= whole.keys()
        assert all(torch.equal(saved[name], whole[name]) for name in saved), file
        assert len(saved) > 10


@on_ranks(2)
def test_all_ranks_are_told_that_the_first_cannot_save(tmp_path: Path) -> None:
    with under_torchrun():
        run = Run({"stage": 3}).train(1)
        if dist.get_rank() == 0:
            (tmp_path / "taken").touch()
        with pytest.raises((CheckpointError, OSError), match="taken"):
            run.accelerator.save_model(run.model, tmp_path / "taken" / "here")


@on_ranks(2)
def test_two_models_with_their_optimizers_and_a_frozen_one() -> None:
    from zeroshard.integrations.accelerate import ShardedAccelerator

    with under_torchrun(), torch.random.fork_rng():
        accelerator = ShardedAccelerator(cpu=True, zeroshard={"stage": 1})
        nets = [nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))) for _ in range(3)]
        nets[2].requires_grad_(False)
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets[:2]]
        first, second, frozen, one, two = accelerator.prepare(*nets, *optimizers)
        assert frozen is nets[2]
        assert zeroshard.stats(first).stage == zeroshard.stats(second).stage == 1
        before = [zeroshard.full_state_dict(net)["0.weight"] for net in (first, second)]
        accelerator.backward(second(frozen(first(torch.ones(2, 4)))).square().sum())
        one.step()
        two.step()
        after = [zeroshard.full_state_dict(net)["0.weight"] for net in (first, second)]
    assert not any(torch.equal(old, new) for old, new in zip(before, after, strict=True))


@on_ranks(2)
def test_a_step_that_was_skipped_is_told_and_the_scheduler_waits() -> None:
    with under_torchrun():
        run = Run({"stage": 2, "on_nonfinite": "skip"}, clip=None).train(1)
        rate = run.scheduler.get_last_lr()
        batch = next(iter(run.loader))
        run.accelerator.backward(run.model(**batch).loss * float("nan"))
        run.optimizer.step()
        run.scheduler.step()
        assert run.accelerator.optimizer_step_was_skipped
        assert run.scheduler.get_last_lr() == rate
        run.optimizer.zero_grad()
        run.train(1)
        assert not run.accelerator.optimizer_step_was_skipped


@on_ranks(2)
def test_a_plain_accelerator_is_refused_by_name() -> None:
    from accelerate import Accelerator

    with under_torchrun():
        model = llama()
        model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), stage=3)
        with pytest.raises(RuntimeError, match="ShardedAccelerator"):
            Accelerator(cpu=True).prepare(model, optimizer)


@on_ranks(2)
def test_ranks_that_would_train_alone_are_told() -> None:
    from zeroshard.integrations.accelerate import ShardedAccelerator

    with under_torchrun(), pytest.raises(ValueError, match=r"2 processes were started.*counts 1.*cpu=True"):
        ShardedAccelerator()  # Accelerate takes CPUs for one process, if it is not told


@on_ranks(1)
def test_what_does_not_go_together_is_told_at_once() -> None:
    from zeroshard.integrations.accelerate import ShardedAccelerator

    def accelerator(zeroshard: Options | None = None, **more: Any) -> Any:
        return ShardedAccelerator(cpu=True, zeroshard=zeroshard, **more)

    for error, words, options, more in (
        (ValueError, "no option 'stgae'", {"stgae": 3}, {}),
        (TypeError, "must be a dict of options", "stage 3", {}),
        (ValueError, "chooses the device", {"device": "cpu"}, {}),
        (ValueError, 'precision="fp16" computes', {"precision": "fp16"}, {"mixed_precision": "bf16"}),
        (ValueError, 'backend "cudagraphs" does not go', {}, {"dynamo_backend": "cudagraphs"}),
    ):
        with pytest.raises(error, match=words), under_torchrun():
            accelerator(options, **more)  # type: ignore[arg-type]
    model, sharded = nn.Linear(2, 2), nn.Linear(2, 2)
    zeroshard.shard(sharded, torch.optim.SGD(sharded.parameters()))
    for given, words in (
        ((model,), "Linear without its optimizer; .*one call"),
        ((torch.optim.SGD(model.parameters()),), "optimizer without its model; .*one call"),
        ((sharded,), "sharded already, so zeroshard= has no effect"),
    ):
        with pytest.raises(ValueError, match=words), under_torchrun():
            accelerator({"stage": 1}).prepare(*given)
    for call in ("join_uneven_inputs", "register_save_state_pre_hook", "register_load_state_pre_hook"):
        with pytest.raises(RuntimeError, match=r"even_batches|register_for_checkpointing"), under_torchrun():
            getattr(accelerator(), call)(None)
