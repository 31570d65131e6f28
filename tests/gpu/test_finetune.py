"""`zeroshard finetune` on a GPU: the plan's choices train, and take the memory that the plan says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.cli.test_finetune import CONFIGURATION, Made, alone, held_out, made
from zeroshard.config.job import load_job
from zeroshard.train.loop import train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
__all__ = ["alone", "made"]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("lora", [0, 4])
@pytest.mark.parametrize("offload", ["auto", "cpu"])
def test_a_job_on_a_gpu_learns_within_the_planned_memory(
    offload: str, lora: int, made: Made, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = CONFIGURATION.format(model=made.model, data=made.chats).replace('device = "cpu"', 'device = "cuda"')
    text = text.replace("[shard]", '[shard]\nprecision = "bf16"\ndefragment = false')
    text = text.replace("steps = 6", "steps = 12").replace('offload = "auto"', f'offload = "{offload}"')
    file = tmp_path / "finetune.toml"
    file.write_text(text.replace("[data]", f"lora = {lora}\n[data]"))
    torch.cuda.reset_peak_memory_stats()
    train(load_job(str(file)), tmp_path)
    shown = capfd.readouterr().out
    before, after = held_out(shown)
    assert after < before - (0.05 if lora else 0.5)
    measured, planned = re.findall(r"peak of the device, MB +│ +([\d.]+) +│ +([\d.]+)", shown)[0]
    assert float(measured) <= 1.1 * float(planned) + 64, "less than 64 MB are of libraries and small tensors"
