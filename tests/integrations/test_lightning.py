"""Lightning trains a sharded module as it trains one under DistributedDataParallel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard
from tests.integrations.lightning_runs import ROWS, SEED, devices, fitted, kind, loader, module, quietly, trainer
from tests.integrations.runs import Options
from tests.matrix import slow
from tests.ranks import Pool, on_ranks

SETTINGS: dict[str, tuple[Options, Options]] = {
    # name: options of zeroshard, arguments of both trainers
    "stage 1": ({"stage": 1}, {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}),
    "stage 2, accumulation": ({"stage": 2}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}),
    "stage 3, offload": ({"stage": 3, "offload": "cpu"}, {"gradient_clip_val": 0.5}),
    "stage 0": ({"stage": 0}, {}),
    "stage 1, accumulation": ({"stage": 1}, {"accumulate_grad_batches": 2}),
    "stage 3, accumulation": ({"stage": 3}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}),
    "stage 2, offload": ({"stage": 2, "offload": "cpu"}, {"accumulate_grad_batches": 2}),
    "stage 3": ({"stage": 3}, {}),
    "stage 3, in backward": ({"stage": 3, "offload": zeroshard.Offload(update_in_backward=True)}, {}),
    "stage 3, autocast": ({"stage": 3}, {"precision": "bf16-mixed"}),
    "stage 3, float64": ({"stage": 3}, {"precision": "64-true"}),
}
VOLUMES = {"stage 1, accumulation": 2, "stage 2, accumulation": 3}
"""Elements that a step of two micro-batches moves, in parameters: where gradients are whole, only one is reduced."""
QUICK = ("stage 1", "stage 2, accumulation", "stage 3, offload")


def sharding(**options: Any) -> Any:
    from zeroshard.integrations.lightning import ZeroshardStrategy

    return ZeroshardStrategy(**options)


@pytest.mark.parametrize("name", [name if name in QUICK else slow(name) for name in SETTINGS])
@on_ranks(2)
def test_losses_and_rates_are_those_of_ddp(name: str) -> None:
    options, more = SETTINGS[name]
    with quietly():
        plain = fitted("ddp", **more)
        sharded = fitted(sharding(**options), **more)
    stats = zeroshard.stats(sharded)
    assert stats.stage == options["stage"]
    if name in VOLUMES:
        assert stats.volume_elements == VOLUMES[name] * stats.padded_parameters
    assert len(plain.losses) == ROWS // 4
    assert sharded.losses == pytest.approx(plain.losses, rel=1e-2 if "autocast" in name else 1e-5)
    assert sharded.rates == plain.rates
    assert len(set(plain.rates)) > 1


def losses_of(folder: str, stage: int, epochs: int, resume: bool = False) -> list[float]:
    """On each rank of some world. The batch of all ranks together is the same in every world."""
    with quietly():
        run = fitted(sharding(stage=stage), epochs, Path(folder, "1.ckpt") if resume else None)
        run.trainer.save_checkpoint(Path(folder, f"{epochs}.ckpt"))
        assert run.trainer.current_epoch == epochs
    losses = torch.tensor(run.losses)
    dist.all_reduce(losses)
    return (losses / dist.get_world_size()).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("before", "after"), [((2, 3), (1, 1)), slow((1, 2), (2, 3)), slow((2, 1), (2, 2))])
def test_training_goes_on_in_another_world_and_stage(
    before: tuple[int, int], after: tuple[int, int], tmp_path: Path
) -> None:
    def run(world: int, stage: int, **more: Any) -> list[float]:
        return Pool.shared().run(losses_of, world, {"folder": str(tmp_path), "stage": stage, **more})[0]  # type: ignore[no-any-return]

    run(*before, epochs=1)
    resumed = run(*after, epochs=2, resume=True)
    whole = run(*before, epochs=2)
    assert len(resumed) == ROWS // 4
    assert resumed == pytest.approx(whole[ROWS // 4 :], rel=1e-5)


@on_ranks(2)
def test_model_checkpoint_has_its_best_and_its_last(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    with quietly():
        saving = ModelCheckpoint(tmp_path, "{epoch}", monitor="validation", save_top_k=2, save_last=True)
        made = module()
        run = trainer(sharding(stage=3), 3, callbacks=[saving], enable_checkpointing=True)
        run.fit(made, loader(), loader(shuffle=False))
        dist.barrier()
        names = sorted(path.name for path in tmp_path.iterdir())
        assert len(names) == 3
        assert names[-1] == "last.ckpt"
        now = run.validate(made, loader(shuffle=False), verbose=False)[0]["validation"]
        (best,) = run.validate(dataloaders=loader(shuffle=False), ckpt_path="best", verbose=False)
        assert best["validation"] == pytest.approx(float(saving.best_model_score), rel=1e-6)
        (last,) = run.validate(dataloaders=loader(shuffle=False), ckpt_path=saving.last_model_path, verbose=False)
        assert last["validation"] == pytest.approx(now, rel=1e-6)


@on_ranks(2)
def test_weights_alone_are_a_file_of_lightnings(tmp_path: Path) -> None:
    import lightning

    with quietly():
        made = fitted(sharding(stage=3))
        made.trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
        whole = zeroshard.full_state_dict(made)
        loaded = kind(lightning).load_from_checkpoint(tmp_path / "weights.ckpt")
        assert loaded.hparams.width == 16
        assert loaded.state_dict().keys() == whole.keys()
        assert all(torch.equal(value, whole[name]) for name, value in loaded.state_dict().items())
        another = trainer(sharding(stage=2))
        (found,) = another.validate(module(), loader(), ckpt_path=tmp_path / "weights.ckpt", verbose=False)
        (wanted,) = made.trainer.validate(made, loader(), verbose=False)
        assert found == pytest.approx(wanted, rel=1e-6)


@pytest.mark.slow
@on_ranks(2)
def test_training_goes_on_within_an_epoch_as_with_ddp(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    with quietly():
        runs = []
        for strategy in ("ddp", "zeroshard_stage_3_offload"):
            saving = ModelCheckpoint(tmp_path / strategy, "{step}", every_n_train_steps=2, save_top_k=-1)
            more: Options = {"accumulate_grad_batches": 2}
            fitted(strategy, callbacks=[saving], enable_checkpointing=True, **more)
            runs.append(fitted(strategy, 2, tmp_path / strategy / "step=2.ckpt", **more))
    plain, sharded = runs
    assert len(plain.losses) > ROWS // 4  # the rest of the epoch, and the next one
    assert sharded.trainer.global_step == plain.trainer.global_step
    assert sharded.losses == pytest.approx(plain.losses, rel=1e-5)
    assert sharded.rates == plain.rates


@pytest.mark.slow
@on_ranks(2)
def test_a_checkpoint_of_ddp_is_taken(tmp_path: Path) -> None:
    with quietly():
        fitted("ddp").trainer.save_checkpoint(tmp_path / "plain.ckpt")
        plain = fitted("ddp", 2, tmp_path / "plain.ckpt")
        sharded = fitted(sharding(stage=3, offload="cpu"), 2, tmp_path / "plain.ckpt")
    assert len(plain.losses) == ROWS // 4
    assert sharded.losses == pytest.approx(plain.losses, rel=1e-5)


@on_ranks(2)
def test_evaluation_before_and_after_training_and_training_anew() -> None:
    with quietly():
        found = []
        for strategy in ("ddp", "zeroshard_stage_3"):
            made = module()
            run = trainer(strategy)
            before = run.validate(made, loader(shuffle=False), verbose=False)[0]["validation"]
            run.fit(made, loader())
            after = run.test(made, loader(shuffle=False), verbose=False)[0]["test"]
            predicted = torch.cat(run.predict(made, loader(shuffle=False)))
            trainer(strategy).fit(made, loader())  # a new optimizer and a new scheduler
            assert len(made.losses) == 2 * ROWS // 4
            assert made.rates[ROWS // 4 :] == made.rates[: ROWS // 4]
            found.append([before, after, *predicted.flatten().tolist(), *made.losses])
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[0][1] < found[0][0]


@pytest.mark.slow
@on_ranks(2)
def test_bf16_true_has_fp32_masters() -> None:
    with quietly():
        plain = fitted("ddp")
        sharded = fitted(sharding(stage=3), precision="bf16-true")
    assert next(sharded.parameters()).dtype == torch.bfloat16
    assert sharded.trainer.precision == "bf16-true"
    count = sum(parameter.numel() for parameter in sharded.parameters())
    states = torch.tensor(zeroshard.stats(sharded).memory.optimizer_states)
    dist.all_reduce(states)
    assert int(states) >= 12 * count  # master and two moments, over all ranks
    assert sharded.losses == pytest.approx(plain.losses, rel=5e-2)


@on_ranks(2)
def test_a_module_built_without_memory_gets_the_first_values_of_its_seed() -> None:
    with quietly():
        run = trainer(sharding(stage=3))
        with run.init_module(empty_init=True):
            made = module()
        assert next(made.parameters()).is_meta
        run.validate(made, loader(shuffle=False), verbose=False)
        with torch.random.fork_rng():
            torch.manual_seed(SEED)
            wanted = type(made)().state_dict()
        found = zeroshard.full_state_dict(made)
        assert all(torch.equal(value, wanted[name]) for name, value in found.items())
        run.fit(made, loader())
    assert len(made.losses) == ROWS // 4


@pytest.mark.slow
@on_ranks(2)
def test_manual_optimization() -> None:
    import lightning

    class Manual(kind(lightning)):  # type: ignore[misc]
        automatic_optimization = False

        def training_step(self, batch: list[Tensor], index: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, index))
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()

    with quietly():
        runs = []
        for strategy in ("ddp", sharding(stage=1), sharding(stage=3)):
            torch.manual_seed(3)
            runs.append(Manual())
            trainer(strategy).fit(runs[-1], loader())
    for run in runs[1:]:
        assert run.losses == pytest.approx(runs[0].losses, rel=1e-5)


@pytest.mark.slow
@on_ranks(2)
def test_the_other_package_of_lightning() -> None:
    import pytorch_lightning

    from zeroshard.integrations.lightning import ZeroshardStrategyMixin

    class Strategy(ZeroshardStrategyMixin, pytorch_lightning.strategies.DDPStrategy):  # type: ignore[misc]
        pass

    with quietly():
        runs = []
        for strategy in ("ddp", Strategy(stage=3)):
            torch.manual_seed(3)
            runs.append(kind(pytorch_lightning)())
            more: Options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
            run = pytorch_lightning.Trainer(
                accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, gradient_clip_val=0.5, **more
            )
            run.fit(runs[-1], loader())
    assert runs[1].losses == pytest.approx(runs[0].losses, rel=1e-5)


@on_ranks(1)
def test_what_does_not_go_together_is_told_at_once() -> None:
    import lightning

    class Two(kind(lightning)):  # type: ignore[misc]
        automatic_optimization = False  # else Lightning refuses them itself

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.net, self.head)]

    class Nothing(kind(lightning)):  # type: ignore[misc]
        def configure_optimizers(self) -> None:
            return None

    with quietly():
        for words, options, more in (
            ("no option 'stgae'", {"stgae": 3}, {}),
            ("Lightning chooses the device", {"device": "cpu"}, {}),
            ("bf16-true", {"precision": "fp16"}, {}),
            ('use "bf16-true"', {}, {"precision": "16-true"}),
            ("leave one out", {"precision": "bf16"}, {"precision": "bf16-mixed"}),
            ("leave one out", {"clip_grad_norm": 1.0}, {"gradient_clip_val": 1.0}),
        ):
            with pytest.raises(ValueError, match=words):
                fitted(sharding(**options), **more)
        for words, made in (
            ("returned 2 optimizers", Two()),
            ("returned no optimizer", Nothing()),
            ("block.compile", torch.compile(module())),
        ):
            with pytest.raises(ValueError, match=words):
                trainer(sharding()).fit(made, loader())
        used = fitted(sharding())
        used.configure_optimizers = lambda: torch.optim.SGD(used.parameters(), lr=0.1)
        with pytest.raises(ValueError, match="sharded for another optimizer"):
            trainer(sharding()).fit(used, loader())


# -- Fabric -----------------------------------------------------------------------------------------------------------


class Run:
    """A loop as people write it with Fabric."""

    def __init__(self, strategy: Any, accumulate: int = 1, **more: Any) -> None:
        import lightning

        self.fabric = lightning.Fabric(**devices(), strategy=strategy, **more)
        self.fabric.launch()
        self.accumulate, self.losses, self.step = accumulate, list[float](), 0
        torch.manual_seed(3)
        made = nn.Sequential(nn.Linear(6, 16), *(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)))
        model = nn.Sequential(made, nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.model, self.optimizer = self.fabric.setup(model, optimizer)
        self.loader = self.fabric.setup_dataloaders(loader(shuffle=False))

    def train(self) -> Run:
        for number, (x, y) in enumerate(self.loader, 1):
            waits = number % self.accumulate != 0
            with self.fabric.no_backward_sync(self.model, enabled=waits):
                loss = nn.functional.mse_loss(self.model(x), y)
                self.fabric.backward(loss / self.accumulate)
            if not waits:
                self.fabric.clip_gradients(self.model, self.optimizer, max_norm=0.5)
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.step += 1
            self.losses.append(float(self.fabric.all_reduce(loss.detach())))
        return self

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "step": self.step}


def fabric_sharding(**options: Any) -> Any:
    from zeroshard.integrations.lightning import ZeroshardFabricStrategy

    return ZeroshardFabricStrategy(**options)


@pytest.mark.parametrize(
    ("options", "accumulate"),
    [({"stage": 3, "offload": "cpu"}, 1), ({"stage": 1}, 2), slow({"stage": 2}, 2), slow({"stage": 3}, 2)],
)
@on_ranks(2)
def test_fabric_has_the_losses_of_ddp_and_goes_on(options: Options, accumulate: int, tmp_path: Path) -> None:
    with quietly():
        plain = Run("ddp", accumulate).train().train()
        sharded = Run(fabric_sharding(**options), accumulate).train()
        sharded.fabric.save(tmp_path / "at.ckpt", sharded.state())
        resumed = Run("zeroshard_stage_2", accumulate)
        state = resumed.state()
        assert resumed.fabric.load(tmp_path / "at.ckpt", state) == {}
        assert state["step"] == sharded.step
        resumed.train()
        sharded.train()
    assert sharded.losses == pytest.approx(plain.losses, rel=1e-5)
    assert resumed.losses == pytest.approx(plain.losses[ROWS // 4 :], rel=1e-5)


@pytest.mark.slow
@on_ranks(2)
def test_fabric_in_bf16_from_a_model_without_memory(tmp_path: Path) -> None:
    import lightning

    with quietly():
        fabric = lightning.Fabric(
            accelerator="cpu", devices=2, strategy=fabric_sharding(stage=3), precision="bf16-true"
        )
        fabric.launch()
        with fabric.init_module(empty_init=True):
            model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
        assert next(model.parameters()).is_meta
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
        for _ in range(3):
            loss = model(torch.ones(2, 6)).square().mean()
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        assert next(model.module.parameters()).dtype == torch.bfloat16
        assert loss.isfinite()
        fabric.save(tmp_path / "at.ckpt", {"model": model, "more": 1})
        assert fabric.load(tmp_path / "at.ckpt") == {"more": 1}


@on_ranks(1)
def test_fabric_tells_what_to_do_instead() -> None:
    import lightning

    with quietly():
        fabric = lightning.Fabric(accelerator="cpu", devices=1, strategy=fabric_sharding(stage=3))
        fabric.launch()
        model = nn.Linear(2, 2)
        optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()]
        with pytest.raises(ValueError, match=r"fabric.setup\(model, optimizer\)"):
            fabric.setup(model)
        with pytest.raises(ValueError, match="2 optimizers"):
            fabric.setup(model, *optimizers)
        with pytest.raises(ValueError, match="in one call"):
            fabric.setup_optimizers(optimizers[0])
        frozen = fabric.setup(model.requires_grad_(False))
        assert zeroshard.stats(frozen.module).stage == 3
