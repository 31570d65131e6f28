"""A dry run is the real runtime without peers: what it holds is the paper's formula, what it moves is counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zeroshard.cli.main import main
from zeroshard.plan.dryrun import DryRun, dry_run
from zeroshard.train.gpt import GPT, ModelConfig

BILLIONS = ModelConfig(layers=4, hidden=12288, heads=96, sequence=512, vocabulary=256, checkpointing=True)


def run(config: ModelConfig, world: int, **options: Any) -> DryRun:
    def loss(model: nn.Module) -> Tensor:
        tokens = torch.zeros(1, config.sequence, dtype=torch.long)
        return model(tokens, tokens)  # type: ignore[no-any-return]

    return dry_run(
        lambda: GPT(config),
        lambda model: torch.optim.AdamW(model.parameters()),
        loss,
        world=world,
        real=False,
        precision="bf16",
        **options,
    )


def test_a_rank_of_64_holds_what_figure_1_says_of_a_model_that_no_machine_here_could_hold() -> None:
    for stage, bytes_a_parameter in ((0, 16), (1, 4 + 12 / 64), (2, 2 + 14 / 64), (3, 16 / 64)):
        result = run(BILLIONS, 64, stage=stage)
        assert result.parameters > 7e9
        assert result.at_step.model_states == pytest.approx(bytes_a_parameter * result.parameters, rel=0.01)
        volume = 2 if stage < 3 else 3 - result.kept / result.parameters
        assert result.volume_elements == pytest.approx(volume * result.parameters, rel=0.01)
        assert result.at_rest < result.peak


def test_splitting_units_lowers_the_peak_of_a_checkpointed_model() -> None:
    whole = run(BILLIONS, 1024, stage=3, max_unit_bytes=1 << 40)
    split = run(BILLIONS, 1024, stage=3, max_unit_bytes=1 << 28)
    assert split.peak < 0.6 * whole.peak


def test_what_cannot_be_run_dry_is_refused() -> None:
    with pytest.raises(ValueError, match="world of 4"):
        dry_run(nn.Module, torch.optim.SGD, torch.sum, world=4, rank=4, real=False)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="offload needs a GPU"):
        run(BILLIONS, 4, offload="cpu")


def test_the_command_prints_the_table_and_names_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dryrun", "tiny", "--world", "8", "--stage", "2", "--without-gpu"]) == 0
    assert "all model states" in capsys.readouterr().out
    assert main(["dryrun", "tinny", "--world", "8"]) == 2
    assert "tinny" in capsys.readouterr().err
