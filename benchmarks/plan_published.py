"""Published speeds of FSDP2 beside the plan's, and how much of the gap the cards explain.

    PYTHONPATH=. python benchmarks/plan_published.py

The published runs recompute half of the products of a block (torchtitan, "selective"), or do not say what they
recompute. The plan knows all or nothing, so both are printed. The cards of torchtitan's H100 runs had HBM2e of 2.4 TB/s
and a limit of 500 W; the profile is of a card with HBM3 of 3.35 TB/s and 700 W. At its limit the same chip in an H200
was seen at 1.70 to 1.86 GHz of 1.98. With power as the frequency to the 2.5th over 130 W at rest, 500 W leave 0.84 of
the frequency.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from zeroshard.config.options import Activations
from zeroshard.plan.machine.profile import Machine, load
from zeroshard.plan.model.huggingface import Configuration, from_configuration
from zeroshard.plan.model.model import Model
from zeroshard.plan.setup import Setup
from zeroshard.plan.time.step_time import StepTime, step_time

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
QWEN_4B: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Published:
    """Tokens a second and device that others measured, with FSDP2 in bf16 and without torch.compile."""

    about: str
    config: dict[str, Any]
    machine: str
    devices: int
    batch: int
    sequence: int
    tokens: float


PUBLISHED = [
    Published("Llama 3.1 8B, torchtitan", LLAMA_8B, "h100", 8, 2, 8192, 5762),
    Published("Llama 3.1 8B, torchtitan", LLAMA_8B, "h100", 128, 2, 8192, 5605),
    Published("Qwen3-4B", QWEN_4B, "h100", 8, 1, 16384, 6200),
    Published("Llama 3 8B, torchtitan", LLAMA_8B, "a100", 64, 1, 8192, 2973),
]


def limited(machine: Machine) -> Machine:
    """The profile of a card with HBM2e and 500 W."""
    device = machine.device
    return replace(
        machine, device=replace(device, bandwidth=device.bandwidth * 2.4 / 3.35, efficiency=device.efficiency * 0.84)
    )


def planned(run: Published, model: Model, machine: Machine, recomputes: bool) -> StepTime:
    """The plan's step in stage 3."""
    activations = Activations() if recomputes else None
    setup = Setup(
        stage=3,
        world=run.devices,
        batch=run.batch,
        sequence=run.sequence,
        checkpointing=recomputes,
        activations=activations,
    )
    work = model.trace(setup).work
    assert work is not None
    return step_time(work, setup, machine)


def main() -> None:
    """Prints a row for each published run and profile."""
    print("| run | GPUs | published | profile | planned: kept / recomputed | times published | waits for links |")
    print("|---|---|---|---|---|---|---|")
    for run in PUBLISHED:
        model = from_configuration(Configuration(run.about, run.config), run.about)
        profiles = {run.machine: load(run.machine)}
        if run.machine == "h100":
            profiles["h100, HBM2e and 500 W"] = limited(profiles["h100"])
        for name, machine in profiles.items():
            times = [planned(run, model, machine, recomputes) for recomputes in (False, True)]
            speeds = [run.batch * run.sequence / time.total for time in times]
            ratios = [speed / run.tokens for speed in speeds]
            faster = f"{ratios[0]:.2f} / {ratios[1]:.2f}, mean {sum(ratios) / 2:.2f}"
            print(
                f"| {run.about} | {run.devices} | {run.tokens:,.0f} | {name} | {speeds[0]:,.0f} / {speeds[1]:,.0f} | "
                f"{faster} | {times[0].exposed / times[0].total:.1%} |"
            )


if __name__ == "__main__":
    main()
