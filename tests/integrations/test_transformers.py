"""Transformers' ``Trainer`` trains a sharded model as it trains one under DistributedDataParallel."""

from __future__ import annotations

import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.huggingface import under_torchrun
from tests.integrations.runs import STEPS, Options, arguments, llama, logged, ran, rows, trainer, with_lora
from tests.matrix import slow
from tests.ranks import Pool, on_ranks
from zeroshard.storage.format import CheckpointError

SETTINGS: dict[str, tuple[Options, Options]] = {
    # name: options of zeroshard, arguments of both trainers
    "stage 1": ({"stage": 1}, {}),
    "stage 2, accumulation": ({"stage": 2}, {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5}),
    "stage 3, offload": ({"stage": 3, "offload": "cpu"}, {"weight_decay": 0.1}),
    "stage 3, LoRA": ({"stage": 3}, {"lora": True}),
    "stage 0": ({"stage": 0}, {}),
    "stage 1, accumulation": ({"stage": 1}, {"gradient_accumulation_steps": 2}),
    "stage 3, accumulation": ({"stage": 3}, {"gradient_accumulation_steps": 2}),
    "stage 1, offload, accumulation": ({"stage": 1, "offload": "cpu"}, {"gradient_accumulation_steps": 2}),
    "stage 2, LoRA, offload": ({"stage": 2, "offload": "cpu"}, {"lora": True}),
    "stage 3, recomputed": ({"stage": 3}, {"gradient_checkpointing": True}),
    "stage 3, recomputed by zeroshard": ({"stage": 3, "activations": {}}, {}),
    "stage 3, no clipping": ({"stage": 3}, {"max_grad_norm": 0.0}),
    "stage 3, SGD": ({"stage": 3}, {"optim": "sgd"}),
    "stage 2, Adagrad": ({"stage": 2}, {"optim": "adagrad"}),
    "stage 3, noise on embeddings": ({"stage": 3}, {"neftune_noise_alpha": 5.0}),
    "stage 3, recomputed by reentrant calls": (
        {"stage": 3},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    ),
    "stage 3, autocast": ({"stage": 3}, {"bf16": True}),
    "stage 2, from a function": ({"stage": 2}, {"model_init": lambda: llama()}),
    "stage 3, smoothed labels": ({"stage": 3}, {"label_smoothing_factor": 0.1}),
    "stage 2, tokens counted by rank": ({"stage": 2}, {"average_tokens_across_devices": False}),
}
QUICK = ("stage 1", "stage 2, accumulation", "stage 3, offload", "stage 3, LoRA")


@pytest.mark.parametrize("name", [name if name in QUICK else slow(name) for name in SETTINGS])
@on_ranks(2)
def test_losses_and_norms_are_those_of_ddp(name: str, tmp_path: Path) -> None:
    options, more = SETTINGS[name]
    with under_torchrun():
        plain, sharded = (ran(tmp_path, zeroshard, **more) for zeroshard in (None, options))
    precision = 1e-2 if "bf16" in more else 1e-5
    assert len(logged(plain)) == STEPS
    assert logged(sharded) == pytest.approx(logged(plain), rel=precision)
    assert logged(sharded, "grad_norm") == pytest.approx(logged(plain, "grad_norm"), rel=max(precision, 1e-4))
    assert logged(sharded, "learning_rate") == logged(plain, "learning_rate")
    assert type(plain.model_wrapped) is not type(plain.model)
    assert sharded.model_wrapped is sharded.model


@pytest.mark.parametrize(
    ("stage", "more"),
    [
        (1, {"torch_compile_backend": "aot_eager"}),
        (3, {"torch_compile_backend": "aot_eager"}),
        slow(3, {"torch_compile": True}),
        slow(3, {"torch_compile": True, "torch_compile_mode": "max-autotune-no-cudagraphs"}),
        slow(3, {"torch_compile_backend": "aot_eager", "gradient_checkpointing": True}),
        slow(3, {"torch_compile_backend": "aot_eager", "lora": True}),
        slow(3, {"torch_compile_backend": "aot_eager", "bf16": True}),
        slow(2, {"torch_compile_backend": "aot_eager", "gradient_accumulation_steps": 2}),
    ],
)
@on_ranks(2)
def test_a_compiled_model_trains_as_an_uncompiled_one(stage: int, more: Options, tmp_path: Path) -> None:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    rest = {name: value for name, value in more.items() if not name.startswith("torch_compile")}
    settings: Options = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": STEPS}
    with under_torchrun():
        plain = ran(tmp_path / "plain", {"stage": stage}, **settings, **rest)
        assert not torch._dynamo.utils.counters["stats"]["unique_graphs"]
        compiled = ran(tmp_path / "compiled", {"stage": stage}, **settings, **more)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert 2 <= graphs <= 6, "of the blocks, all alike: one to train, one to evaluate, a few for other shapes"
    precision = 1e-2 if "bf16" in more else 1e-5
    assert logged(compiled) == pytest.approx(logged(plain), rel=precision)
    assert logged(compiled, "eval_loss") == pytest.approx(logged(plain, "eval_loss"), rel=precision)
    assert compiled.model_wrapped is compiled.model, "there is no wrapper"
    names = [
        sorted(path.name for path in (tmp_path / name / "checkpoint-4").iterdir()) for name in ("plain", "compiled")
    ]
    assert names[0] == names[1]


def losses_of(
    folder: str, stage: int, lora: bool = False, dropout: float = 0.0, resume: str | bool = False, **more: Any
) -> list[float]:
    """On each rank of some world. The batch of all ranks together is the same in every world."""
    batch = 4 // dist.get_world_size()
    with under_torchrun():
        model = llama(attention_dropout=dropout)
        model = with_lora(model) if lora else model
        trained = trainer(Path(folder), {"stage": stage}, model, per_device_train_batch_size=batch, **more)
        trained.train(resume_from_checkpoint=resume)
    return logged(trained)


@pytest.mark.parametrize(
    ("before", "after", "lora"),
    [((2, 3), (1, 1), False), slow((1, 2), (2, 3), False), slow((2, 3), (2, 1), True), slow((2, 1), (1, 3), True)],
)
def test_training_goes_on_in_another_world_and_stage(
    before: tuple[int, int], after: tuple[int, int], lora: bool, tmp_path: Path
) -> None:
    def run(world: int, stage: int, **more: Any) -> list[float]:
        return Pool.shared().run(losses_of, world, {"folder": str(tmp_path), "stage": stage, "lora": lora, **more})[0]

    whole = run(*before, save_strategy="steps", save_steps=2)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    rest = run(*after, resume=str(tmp_path / "checkpoint-2"))
    assert rest[:2] == whole[:2]  # from the log in the checkpoint
    assert rest[2:] == pytest.approx(whole[2:], rel=1e-5)


@on_ranks(2)
def test_the_newest_checkpoint_is_found_and_random_numbers_go_on(tmp_path: Path) -> None:
    folder, more = str(tmp_path), {"stage": 3, "dropout": 0.3, "max_steps": 3}
    whole = losses_of(folder, save_strategy="steps", save_steps=2, **more)
    if dist.get_rank() == 0:
        shutil.rmtree(tmp_path / "checkpoint-3")
    dist.barrier()
    assert losses_of(folder, resume=True, **more) == whole


@on_ranks(2)
def test_a_checkpoint_of_the_plain_trainer_is_gone_on_from(tmp_path: Path) -> None:
    with under_torchrun():
        plain = ran(tmp_path, None, save_strategy="steps", save_steps=2)
        sharded = trainer(tmp_path, {"stage": 3})
        sharded.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert logged(sharded) == pytest.approx(logged(plain), rel=1e-5)


@pytest.mark.parametrize("lora", [False, slow(True)])
@on_ranks(2)
def test_what_is_saved_is_what_the_plain_trainer_saves(lora: bool, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    file = "adapter_model.safetensors" if lora else "model.safetensors"
    saved, names = [], []
    with under_torchrun():
        for zeroshard in (None, {"stage": 3}):
            folder = tmp_path / str(zeroshard is None)
            trained = ran(folder, zeroshard, lora=lora, save_strategy="steps", save_steps=STEPS, save_only_model=True)
            trained.save_model(str(folder / "end"))
            dist.barrier()
            for place in (folder / "end", folder / f"checkpoint-{STEPS}"):
                saved.append(load_file(place / file))
                names.append({path.name for path in place.iterdir()} - {"trainer_state.json"})
    assert all(each == names[0] for each in names)
    assert all(each.keys() == saved[0].keys() for each in saved)
    for each in saved:
        for name, value in each.items():
            torch.testing.assert_close(value, saved[0][name], rtol=1e-3, atol=1e-4, msg=name)
    assert names[0] >= {file, "training_args.bin"}


@pytest.mark.parametrize("kind", ["peft", "of transformers", "with a trained head", slow("prompts")])
@on_ranks(2)
def test_a_save_of_adapters_gathers_the_adapters_alone(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import LoraConfig, PromptTuningConfig, get_peft_model
    from safetensors.torch import load_file

    from zeroshard.integrations import adapters

    lora: Options = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    gathered: list[set[str]] = []
    whole = adapters.full_state_dict

    def watched(*args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        gathered.append(set(found := whole(*args, **kwargs)))
        return found

    monkeypatch.setattr(adapters, "full_state_dict", watched)
    saved = []
    with under_torchrun():
        for zeroshard in (None, {"stage": 3}):
            model = llama()
            if kind == "of transformers":
                model.add_adapter(LoraConfig(**lora))
            elif kind == "prompts":
                torch.manual_seed(4)
                model = get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
            else:
                modules = {"modules_to_save": ["lm_head"]} if kind == "with a trained head" else {}
                model = get_peft_model(model, LoraConfig(**lora, **modules))
            trained = trainer(tmp_path, zeroshard, model)
            trained.train()
            folder = tmp_path / str(zeroshard is None)
            trained.save_model(str(folder))
            dist.barrier()
            saved.append(load_file(folder / "adapter_model.safetensors"))
    plain, sharded = saved
    assert plain.keys() == sharded.keys()
    for name, value in sharded.items():
        torch.testing.assert_close(value, plain[name], rtol=1e-3, atol=1e-4, msg=name)
    (names,) = gathered
    if dist.get_rank() == 0:
        assert len(names) == (0 if kind == "prompts" else len(plain)), "a prompt is taken from the model itself"
        assert all("lora_" in name or "modules_to_save" in name for name in names)


@on_ranks(2)
def test_all_ranks_are_told_that_the_first_cannot_save(tmp_path: Path) -> None:
    with under_torchrun():
        sharded = ran(tmp_path, {"stage": 3}, max_steps=1)
        if dist.get_rank() == 0:
            (tmp_path / "taken").touch()
        with pytest.raises((CheckpointError, OSError), match="taken"):
            sharded.save_model(str(tmp_path / "taken" / "here"))


@pytest.mark.parametrize("name", ["stage 3", slow("stage 1, offload"), slow("stage 3, weights alone"), slow("LoRA")])
@on_ranks(2)
def test_the_best_model_is_loaded_at_the_end_and_older_ones_are_removed(name: str, tmp_path: Path) -> None:
    options: Options = {"stage": 1, "offload": "cpu"} if "offload" in name else {"stage": 3}
    with under_torchrun():
        results = []
        for zeroshard in (None, options):
            folder = tmp_path / str(zeroshard is None)
            trained = ran(
                folder,
                zeroshard,
                lora=name == "LoRA",
                learning_rate=100.0 if name == "LoRA" else 0.5,  # so that the first is the best
                lr_scheduler_type="constant",
                eval_strategy="steps",
                save_strategy="steps",
                eval_steps=1,
                save_steps=1,
                save_total_limit=2,
                load_best_model_at_end=True,
                save_only_model="alone" in name,
            )
            assert Path(trained.state.best_model_checkpoint).name == "checkpoint-1"
            results.append((logged(trained, "eval_loss"), trained.evaluate()["eval_loss"]))
            dist.barrier()
            assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-1", f"checkpoint-{STEPS}"]
    (plain, plain_best), (sharded, sharded_best) = results
    assert sharded[:2] == pytest.approx(plain[:2], rel=1e-3)
    assert sharded_best == pytest.approx(plain_best, rel=1e-3)
    assert sharded_best == pytest.approx(sharded[0], rel=1e-5) == min(sharded)


@on_ranks(2)
def test_evaluation_comes_before_training_and_training_comes_again(tmp_path: Path) -> None:
    with under_torchrun():
        plain, sharded = (trainer(tmp_path, zeroshard) for zeroshard in (None, {"stage": 3}))
        before = sharded.evaluate()["eval_loss"]  # the plain trainer would not average gradients after an evaluation
        found = []
        for each in (plain, sharded):
            for _ in range(2):
                each.train()
                found.append(logged(each))
        predicted = [each.predict(rows(6)).predictions for each in (plain, sharded)]
        fresh = trainer(tmp_path, None).evaluate()["eval_loss"]
    assert before == pytest.approx(fresh, rel=1e-5)
    assert found[2:] == [pytest.approx(losses, rel=1e-4) for losses in found[:2]]
    torch.testing.assert_close(torch.tensor(predicted[1]), torch.tensor(predicted[0]), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["reduce_lr_on_plateau", slow("cosine_with_restarts")])
@on_ranks(2)
def test_other_schedulers_go_on(kind: str, tmp_path: Path) -> None:
    more: Options = {"lr_scheduler_type": kind, "eval_strategy": "steps", "eval_steps": 1}
    with under_torchrun():
        whole = ran(tmp_path, {"stage": 2}, save_strategy="steps", save_steps=2, **more)
        rest = trainer(tmp_path, {"stage": 2}, **more)
        rest.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert logged(rest) == logged(whole)
    assert logged(rest, "learning_rate") == logged(whole, "learning_rate")


@on_ranks(2)
def test_generation_goes_on_until_all_ranks_are_done(tmp_path: Path) -> None:
    from transformers import TrainerCallback

    class Sampler(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.lengths: list[int] = []

        def on_evaluate(self, args: Any, state: Any, control: Any, model: Any, **more: Any) -> None:
            prompt = torch.tensor([[5, 6, 7]])
            found = model.generate(prompt, max_new_tokens=2 + 3 * dist.get_rank(), do_sample=False, min_new_tokens=1)
            self.lengths.append(found.shape[1])

    sampler = Sampler()
    with under_torchrun():
        sharded = trainer(tmp_path, {"stage": 3}, eval_strategy="steps", eval_steps=2)
        sharded.add_callback(sampler)
        sharded.train()
    assert len(sampler.lengths) == 2
    assert all(4 <= length <= 5 + 3 * dist.get_rank() for length in sampler.lengths)


@on_ranks(2)
def test_metrics_of_generated_text_are_those_of_ddp(tmp_path: Path) -> None:
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    from tests import huggingface
    from zeroshard.integrations.transformers import ShardedTrainerMixin

    class ShardedSeq2SeqTrainer(ShardedTrainerMixin, Seq2SeqTrainer):  # type: ignore[misc]
        pass

    def tokens(prediction: Any) -> dict[str, float]:
        return {"sum": float((prediction.predictions > 0).sum())}

    found = []
    with under_torchrun():
        for kind, options in ((Seq2SeqTrainer, {}), (ShardedSeq2SeqTrainer, {"zeroshard": {"stage": 3}})):
            torch.manual_seed(3)
            settings = arguments(
                tmp_path, Seq2SeqTrainingArguments, predict_with_generate=True, generation_max_length=9, max_steps=2
            )
            made = kind(
                huggingface.t5(),
                settings,
                train_dataset=rows(8),
                eval_dataset=rows(6),
                compute_metrics=tokens,
                **options,
            )
            made.train()
            found.append((logged(made), made.evaluate()["eval_sum"]))
    (plain, plain_sum), (sharded, sharded_sum) = found
    assert sharded == pytest.approx(plain, rel=1e-5)
    assert sharded_sum == plain_sum > 0


@on_ranks(2)
def test_trl_trains_as_under_ddp(tmp_path: Path) -> None:
    found = []
    with under_torchrun():
        from datasets import Dataset
        from transformers import ByT5Tokenizer
        from trl import SFTConfig, SFTTrainer

        from zeroshard.integrations.transformers import ShardedTrainerMixin

        class ShardedSFTTrainer(ShardedTrainerMixin, SFTTrainer):  # type: ignore[misc]
            pass

        data = Dataset.from_list([{"text": f"{number} and {number + 1}"} for number in range(40)])
        for kind, options in ((SFTTrainer, {}), (ShardedSFTTrainer, {"zeroshard": {"stage": 3}})):
            settings = arguments(tmp_path, SFTConfig, max_length=32)
            made = kind(
                llama(vocab_size=384), settings, train_dataset=data, processing_class=ByT5Tokenizer(), **options
            )
            made.train()
            found.append(logged(made))
    assert len(found[0]) == STEPS
    assert found[1] == pytest.approx(found[0], rel=1e-5)


@pytest.mark.parametrize("offload", [{"update_in_backward": True}, {"delayed_update_after": 1}])
@on_ranks(2)
def test_other_kinds_of_updates_train(offload: Options, tmp_path: Path) -> None:
    with under_torchrun():
        plain = ran(tmp_path, None, max_grad_norm=0.0)
        sharded = ran(
            tmp_path, {"stage": 2, "offload": offload}, max_grad_norm=0.0, eval_strategy="steps", eval_steps=2
        )
    same = 2 if "delayed_update_after" in offload else STEPS
    assert logged(sharded)[:same] == pytest.approx(logged(plain)[:same], rel=1e-5)
    assert logged(sharded)[-1] < logged(sharded)[0]


REFUSED: dict[str, tuple[Options, Options]] = {
    # words of the message: options of zeroshard, arguments of the trainer
    "no option 'stgae'": ({"stgae": 3}, {}),
    "Accelerate chooses the device": ({"device": "cpu"}, {}),
    "clip_grad_norm is max_grad_norm=1.0": ({"clip_grad_norm": 1.0}, {}),
    "torch_compile_mode='reduce-overhead' does not go.*addresses.*'default'": (
        {},
        {"torch_compile_mode": "reduce-overhead"},
    ),
    'backend "cudagraphs" does not go.*"inductor"': ({}, {"torch_compile_backend": "cudagraphs"}),
    "auto_find_batch_size=True does not go": ({}, {"auto_find_batch_size": True}),
    "enable_jit_checkpoint=True does not go": ({}, {"enable_jit_checkpoint": True}),
    "bf16_full_eval=True does not go.*precision=": ({}, {"bf16_full_eval": True}),
    "ddp_bucket_cap_mb=25 does not go": ({}, {"ddp_bucket_cap_mb": 25}),
    "fsdp=.*does not go": ({}, {"fsdp": "full_shard"}),
    "both recompute": ({"activations": {}}, {"gradient_checkpointing": True}),
    "max_grad_norm=0": ({"offload": {"update_in_backward": True}}, {}),
    'precision="fp16" computes in fp16': ({"precision": "fp16"}, {"bf16": True}),
}


@on_ranks(1)
def test_what_does_not_go_together_is_told_at_once(tmp_path: Path) -> None:
    with under_torchrun():
        for words, (options, more) in REFUSED.items():
            with pytest.raises(ValueError, match=words):
                trainer(tmp_path, options, **more)


@on_ranks(1)
def test_an_optimizer_that_is_not_elementwise_is_refused_before_training(tmp_path: Path) -> None:
    with under_torchrun():
        sharded = trainer(tmp_path, {"stage": 1}, optim="adafactor")
        with pytest.raises((ValueError, TypeError), match="Adafactor"):
            sharded.train()


@pytest.mark.parametrize(
    ("library", "extra"),
    [("accelerate", "transformers"), ("transformers", "transformers"), ("lightning", "lightning"), ("ray", "ray")],
)
def test_a_missing_library_is_named_with_the_command_that_installs_it(
    library: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zeroshard.integrations.requirement.find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, f"zeroshard.integrations.{library}", raising=False)
    with pytest.raises(ImportError, match=rf"needs {library}.*pip install 'zeroshard\[{extra}\]'"):
        import_module(f"zeroshard.integrations.{library}")
