"""Memory of the three stages: figure 1 of the ZeRO paper, measured.

    python -m docs.pictures.memory     # from the root of the repository; under a minute

Each stage is a dry run: the library's runtime as one rank of 64 with 7.5 billion parameters. With a GPU of 130 GB its
memory is real. Without one, tensors have shapes and no values, and the storages that are alive are counted.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from typing import Any

import torch

from docs.pictures import data
from docs.pictures.svg import MARGIN, WIDTH, Drawing, paragraph_height

COMMAND = "zeroshard dryrun zero-7.5b --world 64 --stage {stage} --json"
SIZE = 7.5  # billions, as the claims of the papers name the model
KINDS = {"optimizer_states": "green", "gradients": "orange", "parameters": "blue"}
DIVIDED = ("nothing divided", "optimizer states", "+ gradients", "+ parameters")
LEFT, RIGHT, TOP, ROW, BAR = 190, 480, 104, 38, 24


def measure() -> None:
    """Runs all stages and writes the data."""
    claims = tomllib.loads((data.ROOT / "zeroshard/plan/papers/claims.toml").read_text())["claims"]
    (claim,) = (claim for claim in claims if claim["source"] == "ZeRO, figure 1")
    assert claim["size"] == SIZE
    rows = []
    for stage, printed in zip(claim["stage"], claim["printed"], strict=True):
        words = COMMAND.format(stage=stage).split()
        done = subprocess.run([sys.executable, "-m", *words], cwd=data.ROOT, capture_output=True, text=True, check=True)
        rows.append({"stage": stage, "paper_gb": printed, "dryrun": json.loads(done.stdout)})
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    about = data.About(COMMAND.format(stage="0 (1, 2, 3)"), f"{machine}, torch {torch.__version__}", data.commit())
    data.write("memory", about, {"world": claim["gpus"], "rows": rows})


def picture() -> Drawing:
    """A bar for each stage, divided by kind of state, with the paper's number beside it."""
    about, content = data.read("memory")
    rows: list[dict[str, Any]] = content["rows"]
    world, billions = content["world"], rows[0]["dryrun"]["parameters"] / 1e9
    sums = [row["dryrun"]["at_step"]["model_states"] / 1e9 for row in rows]
    scale = (RIGHT - LEFT) / max(sums)
    real = rows[0]["dryrun"]["real"]
    how = (
        "allocated on the GPU"
        if real
        else "counted are the tensors that are alive, which have shapes and no values here"
    )
    caption = (
        f"Model states between backward and step, and the peak of a step with activations and gathered units; {how}. "
        f"One rank of {world} in a dry run of the library's runtime; bf16, Adam with fp32 masters. "
        f"{about.machine}, commit {about.commit}."
    )
    below = TOP + len(rows) * ROW + 18
    said = "; ".join(
        f"stage {row['stage']}: {total:.1f} GB, paper {row['paper_gb']:g} GB"
        for row, total in zip(rows, sums, strict=True)
    )
    title = f"Memory of one rank of {world}, stages 0 to 3"
    subtitle = f"{billions:.1f} billion parameters; figure 1 of the ZeRO paper, {'measured' if real else 'counted'}"
    drawing = Drawing(below + paragraph_height(caption), title, f"{subtitle}. Model states by {said}. {caption}")
    drawing.heading(subtitle)
    drawing.legend(TOP - 32, {kind.replace("_", " "): colour for kind, colour in KINDS.items()}, MARGIN)
    columns = (RIGHT + 78, RIGHT + 140, WIDTH - MARGIN)
    for x, words in zip(columns, ("states, GB", "paper", "peak, GB"), strict=True):
        drawing.text(x, TOP - 12, words, "quiet", size=12, anchor="end")
    for number, (row, total) in enumerate(zip(rows, sums, strict=True)):
        y = TOP + number * ROW
        drawing.line(MARGIN, y - 6, WIDTH - MARGIN, y - 6)
        drawing.text(MARGIN, y + 17, f"stage {row['stage']}", bold=True)
        drawing.text(MARGIN + 58, y + 17, DIVIDED[row["stage"]])
        x: float = LEFT
        for kind, colour in KINDS.items():
            size = row["dryrun"]["at_step"][kind] / 1e9
            drawing.box(x, y, size * scale, BAR, colour, f"{kind.replace('_', ' ')}: {size:.2f} GB")
            x += size * scale
        peak = row["dryrun"]["peak"] / 1e9
        values = (f"{total:.1f}", f"{row['paper_gb']:g}", f"{peak:.1f}")
        for column, (words, bold) in zip(columns, zip(values, (True, False, False), strict=True), strict=True):
            drawing.text(column, y + 17, words, "ink" if bold else "quiet", anchor="end", bold=bold)
    drawing.paragraph(below, caption)
    return drawing


if __name__ == "__main__":
    measure()
