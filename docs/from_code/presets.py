"""Writes the presets of ``zeroshard train``, as ``zeroshard train --list`` shows them."""

from __future__ import annotations

from zeroshard.config.job import load_job, presets


def write() -> str:
    """One row for each preset, the smallest model first."""
    lines = ["| preset | parameters | layers × hidden | stage | offload |", "|---|---|---|---|---|"]
    for job in sorted((load_job(name) for name in presets()), key=lambda job: job.gpt.parameters):
        shape = f"{job.gpt.layers} × {job.gpt.hidden}"
        offload = "to the host" if "offload" in job.shard else ""
        millions = job.gpt.parameters / 1e6
        size = f"{millions / 1e3:,.1f}B" if millions > 1000 else f"{millions:.1f}M"
        lines.append(f"| `{job.name}` | {size} | {shape} | {job.shard['stage']} | {offload} |")
    return "\n".join(lines)
