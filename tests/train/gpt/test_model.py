"""The GPT of the ready-made job."""

import math

import pytest
import torch
from torch import nn

from zeroshard.config.job import ModelConfig
from zeroshard.train.gpt.model import GPT, sample

SMALL = ModelConfig(layers=2, hidden=32, heads=2, sequence=16)


def tokens(batch: int = 2, sequence: int = 16) -> torch.Tensor:
    return torch.randint(256, (batch, sequence), generator=torch.Generator().manual_seed(0))


def test_with_targets_it_returns_a_loss_and_without_them_logits() -> None:
    model = GPT(SMALL)
    assert model(tokens()).shape == (2, 16, 256)
    assert model(tokens(), tokens()).shape == ()


def test_an_untrained_model_knows_nothing() -> None:
    torch.manual_seed(0)
    assert GPT(SMALL)(tokens(8), tokens(8).flip(0)).item() == pytest.approx(math.log(256), abs=0.1)


def test_a_position_sees_only_those_before_it() -> None:
    model = GPT(SMALL)
    one = tokens(1)
    other = one.clone()
    other[0, 10] += 1
    torch.testing.assert_close(model(one)[:, :10], model(other)[:, :10])
    assert not torch.allclose(model(one)[:, 10:], model(other)[:, 10:])


@pytest.mark.parametrize("tied", [True, False])
def test_the_number_of_parameters_is_known_without_building_the_model(tied: bool) -> None:
    config = ModelConfig(layers=3, hidden=48, heads=4, sequence=20, vocabulary=300, tied=tied)
    assert sum(p.numel() for p in GPT(config).parameters()) == config.parameters


def test_checkpointing_changes_memory_not_gradients() -> None:
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = GPT(ModelConfig(layers=2, hidden=32, heads=2, sequence=16, checkpointing=checkpointing))
        model(tokens(), tokens()).backward()
        gradients.append([p.grad for p in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)


def initialise(module: nn.Module) -> None:
    for child in module.modules():
        if next(child.parameters(recurse=False), None) is not None:
            child.reset_parameters()


def test_a_meta_model_is_initialised_module_by_module() -> None:
    with torch.device("meta"):
        meta = GPT(SMALL)
    meta.to_empty(device="cpu")
    whole = GPT(SMALL)
    for model in (meta, whole):
        torch.manual_seed(1)
        initialise(model)
    for (name, one), other in zip(meta.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(one, other), name
    assert meta.blocks[0].attention.qkv.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert meta.blocks[0].mlp.down.weight.std().item() == pytest.approx(0.02 / 2, rel=0.1)


def test_a_sample_continues_the_prompt_and_depends_on_the_seed_alone() -> None:
    model = GPT(SMALL)
    prompt = torch.tensor(list(b"import "))
    one, again, other = (sample(model, prompt, 30, seed=seed) for seed in (0, 0, 1))
    assert one[:7].tolist() == prompt.tolist()
    assert len(one) == 37  # longer than the context, so the window has moved
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
