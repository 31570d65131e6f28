"""The plan of a Hugging Face configuration has the memory of the model, as the real runtime uses it."""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import zeroshard
from tests.matrix import matrix, quick
from tests.plan.architectures import ARCHITECTURES, FusedAttention, configuration, loss_of, with_memory
from zeroshard.config.offload import Offload
from zeroshard.plan.dryrun import DryRun, dry_run
from zeroshard.plan.memory.budget import budget
from zeroshard.plan.model.lora import with_adapters
from zeroshard.plan.model.model import Model
from zeroshard.plan.model.source import find_model
from zeroshard.plan.setup import ModelError, Setup
from zeroshard.plan.volume import volume

BATCH, SEQUENCE, WORLD = 4, 64, 8


def folder_of(values: dict[str, Any], folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps(values))
    return str(folder)


def planned(kind: str, folder: Path, **changes: Any) -> Model:
    return find_model(folder_of(configuration(kind, **changes), folder)).model


def seen(module: nn.Module, setup: Setup) -> DryRun:
    """One rank of the real runtime, in which tensors have no values."""
    gc.collect()  # tensors on the meta device would count when they are freed
    with FusedAttention():
        return dry_run(
            lambda: with_memory(module),
            lambda model: torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=True),
            lambda model: loss_of(model, setup.batch, setup.sequence),
            world=setup.world,
            real=False,
            stage=setup.stage,
            precision="bf16",
            activations=setup.activations,
            offload=setup.offload,
        )


@pytest.fixture(autouse=True)
def masks_without_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for packed sequences needs values, which a run without values does not have."""
    monkeypatch.setattr(transformers.masking_utils, "find_packed_sequence_indices", lambda *_, **__: None)


def assert_as_planned(model: Model) -> None:
    """In every stage, with and without offload. Every stage and every offload meets recomputation, and its absence."""
    for stage, offload in product(range(4), (None, Offload())):
        recomputed = (stage + (offload is not None)) % 2 == 1
        setup = Setup(
            stage=stage,
            world=WORLD,
            batch=BATCH,
            sequence=SEQUENCE,
            offload=offload,
            checkpointing=recomputed,
            activations=zeroshard.Activations() if recomputed else None,
        )
        needs, found = budget(model, setup, workspace=0), seen(model.build(setup).module, setup)
        about = f"stage {stage}, offload {offload is not None}, recomputed {recomputed}: {needs}"
        assert needs.at_step.model_states == pytest.approx(found.at_step.model_states, rel=0.02), about
        assert needs.peak.total == pytest.approx(found.peak, rel=0.02), about
        assert needs.host.total == (0 if found.host is None else found.host.total), about
        assert volume(model.trace(setup), setup).elements == found.volume_elements, about


@pytest.mark.parametrize("kind", quick(ARCHITECTURES, "llama"))
def test_states_peak_and_volume_are_those_of_the_runtime(kind: str, tmp_path: Path) -> None:
    assert_as_planned(planned(kind, tmp_path))


def test_at_least_twenty_architectures_are_compared() -> None:
    assert len(ARCHITECTURES) >= 20


@pytest.mark.slow
def test_adapters_on_a_frozen_model_are_planned_as_the_runtime_trains_them(tmp_path: Path) -> None:
    assert_as_planned(with_adapters(planned("llama", tmp_path), rank=8))


@pytest.mark.parametrize("kind", quick(("gemma3_text", "gpt_oss", "deepseek_v3", "llama"), "llama"))
def test_a_deep_model_is_planned_from_a_few_of_its_blocks(kind: str, tmp_path: Path) -> None:
    """Blocks of several kinds alternate, or the first ones differ."""
    model = planned(kind, tmp_path, num_hidden_layers=14)
    setup = Setup(stage=2, world=WORLD, batch=BATCH, sequence=SEQUENCE, activations=zeroshard.Activations())
    found = seen(model.build(setup).module, setup)
    needs = budget(model, setup, workspace=0)
    assert len(set(model.trace(setup).kinds)) < len(model.trace(setup).units) - 4
    assert needs.peak.total == pytest.approx(found.peak, rel=0.02)
    assert needs.at_step.model_states == pytest.approx(found.at_step.model_states, rel=0.02)


def test_experts_count_by_the_tokens_that_are_routed_to_them(tmp_path: Path) -> None:
    setup = Setup(stage=0, batch=1, sequence=64, checkpointing=False)

    def flops(experts: int, each: int) -> float:
        model = planned("qwen3_moe", tmp_path, num_experts=experts, num_experts_per_tok=each)
        return sum(model.trace(setup).matrix_flops[1:])

    assert flops(8, 2) == pytest.approx(flops(16, 2), rel=0.05)  # the router is all that grows
    assert flops(8, 4) - flops(8, 2) == pytest.approx(flops(8, 6) - flops(8, 4), rel=0.01)
    assert flops(8, 4) > 1.1 * flops(8, 2)


# -- what is refused --------------------------------------------------------------------------------------------------


def test_an_architecture_that_transformers_does_not_know_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model_type 'nobodys'.*--model module:factory"):
        find_model(folder_of({"model_type": "nobodys"}, tmp_path))


def test_without_transformers_the_install_command_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError, match=r"pip install \"transformers"):
        find_model(folder_of(configuration("llama"), tmp_path))


def test_a_configuration_that_contradicts_itself_is_refused_in_one_line(tmp_path: Path) -> None:
    values = configuration("llama", hidden_size=100, num_attention_heads=3)
    with pytest.raises(ModelError, match=r"config\.json") as caught:
        find_model(folder_of(values, tmp_path)).model.trace(Setup(stage=0))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_what_a_file_says_is_not_printed_at_any_length(tmp_path: Path) -> None:
    values = configuration("llama", hidden_size=[1 << 62] * 1000, num_attention_heads="x" * 1000)
    with pytest.raises(ModelError, match=r"config\.json") as caught:
        find_model(folder_of(values, tmp_path)).model.trace(Setup(stage=0))
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "values",
    [
        configuration("bert", architectures=["BertForSequenceClassification"]),
        configuration("llama", architectures=["LlamaForSequenceClassification"]),
        {"model_type": "convnext", "architectures": ["ConvNextForImageClassification"], "image_size": 32}
        | {"hidden_sizes": [16, 32, 64, 128], "depths": [1, 1, 2, 1]},
        {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "image_token_index": 299}
        | {
            "text_config": configuration("llama"),
            "vision_config": {"model_type": "clip_vision_model", "hidden_size": 96},
        },
    ],
    ids=lambda values: values["architectures"][0],
)
@pytest.mark.parametrize("recomputed", [True, False])
def test_models_for_other_tasks_are_planned(values: dict[str, Any], recomputed: bool, tmp_path: Path) -> None:
    model = find_model(folder_of(values, tmp_path)).model
    seen = model.trace(Setup(stage=2, batch=4, sequence=32, checkpointing=recomputed))
    assert sum(seen.forward_flops) > 0
    assert seen.parameters == model.parameters


def test_inputs_that_are_not_known_are_refused_by_their_name(tmp_path: Path) -> None:
    values = {"model_type": "wav2vec2", "architectures": ["Wav2Vec2ForCTC"]}
    with pytest.raises(ModelError, match=r"its input 'input_values' is not known to the plan.*--model module:factory"):
        find_model(folder_of(values, tmp_path)).model.trace(Setup(stage=0))


@pytest.mark.parametrize("key", ["_attn_implementation", "dtype", "torch_dtype", "_experts_implementation"])
def test_fields_on_kernels_and_stored_weights_change_nothing(key: str, tmp_path: Path) -> None:
    setup = Setup(stage=0, sequence=32)
    changed = planned("qwen3_moe", tmp_path, **{key: "eager" if "impl" in key else "float8_e4m3fn"}).trace(setup)
    assert changed == planned("qwen3_moe", tmp_path).trace(setup)


def test_a_decoder_that_has_no_first_token_is_planned_all_the_same(tmp_path: Path) -> None:
    setup = Setup(stage=0, sequence=32)
    without = planned("t5", tmp_path, decoder_start_token_id=None, pad_token_id=None).trace(setup)
    assert without == planned("t5", tmp_path).trace(setup)


def test_a_name_of_an_architecture_that_is_no_model_is_passed_over(tmp_path: Path) -> None:
    model = planned("llama", tmp_path, architectures=["pipeline", "Trainer"])
    assert model.parameters == planned("llama", tmp_path).parameters


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_hidden_layers": 10**6}, "num_hidden_layers must be at most"),
        ({"depths": [2, 2_000_000]}, "depths must be at most"),
        ({"num_labels": 2_000_000_000}, "num_labels must be at most"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_numbers_that_would_take_all_time_or_memory_are_refused(
    changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=told):
        planned("llama", tmp_path, **changes)


@pytest.mark.parametrize(
    ("kind", "changes", "longest"),
    [
        ("llama", {"max_position_embeddings": 4096}, 4096),
        ("roberta", {"max_position_embeddings": 514}, 512),
        ("t5", {"n_positions": 512}, None),
        ("gpt2", {"n_positions": 128}, 128),
    ],
)
def test_the_longest_sequence_is_that_of_the_positions(
    kind: str, changes: dict[str, Any], longest: int | None, tmp_path: Path
) -> None:
    values = configuration(kind, **changes, **({"pad_token_id": 1} if kind == "roberta" else {}))
    assert find_model(folder_of(values, tmp_path)).longest == longest


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize("lora", [False, True])
def test_experts_are_planned_in_every_precision_and_with_adapters(precision: Any, lora: bool, tmp_path: Path) -> None:
    model = planned("mixtral", tmp_path)
    seen = (with_adapters(model, 8) if lora else model).trace(Setup(stage=2, sequence=32, precision=precision))
    assert sum(seen.forward_flops) > 0
    assert seen.backward_ratio > (1.9 if lora else 2.5)


CHOICES: tuple[Any, ...] = (0.3, 0.75, "*.layers.[13]", ("*.layers.0", "*.layers.4"))


@pytest.mark.slow
@matrix(stage=range(4), offload=(None, Offload()))
def test_a_part_of_the_blocks_that_is_recomputed_is_planned(
    stage: int, offload: Offload | None, tmp_path: Path
) -> None:
    """The first blocks by a share, or any blocks by name, with their checkpoints on the device or on the host."""
    model = planned("llama", tmp_path, num_hidden_layers=5)
    for choice, away in ((CHOICES[stage], offload is None), (CHOICES[stage - 1], offload is not None)):
        activations = zeroshard.Activations(recompute=choice, offload=away)
        setup = Setup(
            stage=stage, world=WORLD, batch=BATCH, sequence=SEQUENCE, offload=offload, activations=activations
        )
        needs, found = budget(model, setup, workspace=0), seen(model.build(setup).module, setup)
        about = f"recompute={choice}, on the host {away}, {needs}"
        assert needs.peak.total == pytest.approx(found.peak, rel=0.02), about
        assert needs.host.total == (0 if found.host is None else found.host.total), about
        moved = volume(model, setup)
        assert {"to the host": moved.checkpoints_to_host, "to the device": moved.checkpoints_to_device} == (
            dict(found.checkpoint_traffic) or {"to the host": 0, "to the device": 0}
        ), about


def test_the_first_blocks_are_the_ones_to_recompute(tmp_path: Path) -> None:
    """Of all ways to recompute half of the blocks, recomputing the first half has the lowest peak, up to 1%."""
    model = planned("llama", tmp_path, num_hidden_layers=6)
    for stage, offload, batch in product((0, 2, 3), (None, Offload()), (1, 4, 16)):
        setup = Setup(stage=stage, world=WORLD, batch=batch, sequence=SEQUENCE, offload=offload)

        def peak(choice: Any, setup: Setup = setup) -> int:
            chosen = zeroshard.Activations(recompute=choice)
            return budget(model, dataclasses.replace(setup, activations=chosen), workspace=0).peak.total

        others = [tuple(f"*.layers.{n}" for n in numbers) for numbers in combinations(range(6), 3)]
        assert peak(0.5) <= 1.01 * min(map(peak, others)), (stage, offload, batch)
