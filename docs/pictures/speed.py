"""A step with the optimizer on the host, beside DeepSpeed, FSDP2 and torchao.

The data is what `benchmarks/offload_step.py` writes. To renew the picture, on a machine with a GPU:

    PYTHONPATH=. python benchmarks/offload_step.py --batch 8 32 --steps 4 --out docs/pictures/data/speed.json
    python -m docs.pictures.draw
"""

from __future__ import annotations

from typing import Any

from benchmarks.nccl_variants import PEERS_OF_OFFLOAD
from docs.pictures import data
from docs.pictures.svg import MARGIN, WIDTH, Drawing, paragraph_height

NAMES = {
    "plain": "plain torch, all on the GPU",
    "synchronous": "zeroshard, exact",
    "update_in_backward": "zeroshard, updates in backward",
    "delayed": "zeroshard, delayed update",
    "16-bit states": "zeroshard, 16-bit moments",
    "16-bit states, delayed": "zeroshard, 16-bit moments, delayed",
    "8-bit moments": "zeroshard, 8-bit moments",
    "8-bit moments, delayed": "zeroshard, 8-bit moments, delayed",
    "8-bit moments, read back, in backward": "zeroshard, 8-bit, in backward",
}
"""What the benchmark calls a way of training, and what the picture calls it."""
PEERS = {
    "DeepSpeed ZeRO-2, CPU offload": "DeepSpeed ZeRO-2, CPU offload",
    "FSDP2, CPU offload": "FSDP2, CPU offload",
    "torchao: bf16 without a master, no clipping": "torchao, bf16 alone, no clipping",
}
LEFT, RIGHT, TOP, ROW, BAR = 266, 490, 82, 25, 16


def order() -> list[str]:
    """The benchmark's names, from top to bottom: plain torch, the peers, ours."""
    return ["plain", *(variant.name for variant in PEERS_OF_OFFLOAD), *(name for name in NAMES if name != "plain")]


def picture() -> Drawing:
    """A bar for each way of training: seconds a step with the smallest batch."""
    about, content = data.read("speed")
    batch = min(result["batch"] for result in content["results"])
    results = {result["name"]: result for result in content["results"] if result["batch"] == batch}
    shown: list[dict[str, Any]] = [results[name] for name in order() if name in results]
    if not shown:
        raise ValueError("speed.json names no way of training that the benchmark has now")
    scale = (RIGHT - LEFT) / max(result["seconds"] for result in shown)
    if not (model := content.get("model")):
        raise ValueError('speed.json: add "model", a few words on what was trained, as the benchmark writes it now')
    absent = [PEERS.get(name, name) for name in content["left out"]]
    caption = (
        "GPU: the peak of what torch allocated. Host: resident memory of the process. All rows have fp32 masters and "
        "clip gradients, but torchao has no masters, and neither torchao nor updates in backward clip. "
        f"One run: {about.machine}, commit {about.commit}."
        + (f" Could not run there: {'; '.join(absent)}." if absent else "")
    )
    below = TOP + len(shown) * ROW + 20
    title = "Seconds a step with the optimizer on the host"
    subtitle = f"{model}, {batch} a step"
    said = "; ".join(f"{_label(result)}: {result['seconds']:.3f} s" for result in shown)
    drawing = Drawing(below + paragraph_height(caption), title, f"{subtitle}. {said}. {caption}")
    drawing.heading(subtitle)
    columns = (RIGHT + 55, RIGHT + 124, WIDTH - MARGIN)
    for x, words in zip(columns, ("s a step", "GPU, GiB", "host, GiB"), strict=True):
        drawing.text(x, TOP - 12, words, "quiet", size=12, anchor="end")
    for number, result in enumerate(shown):
        y = TOP + number * ROW
        if number == 0 or _group(result) != _group(shown[number - 1]):
            drawing.line(MARGIN, y - 5, WIDTH - MARGIN, y - 5)
        colour, bold = {"plain": ("grey", False), "peer": ("orange", False), "ours": ("blue", True)}[_group(result)]
        seconds, host = result["seconds"], result.get("host_gib")
        drawing.text(MARGIN, y + 13, _label(result))
        drawing.box(LEFT, y, seconds * scale, BAR, colour, f"{result['name']}: {seconds:.4f} s")
        drawing.text(columns[0], y + 13, f"{seconds:.2f}", anchor="end", bold=bold)
        drawing.text(columns[1], y + 13, f"{result['peak_gib']:.1f}", "quiet", anchor="end")
        on_host = "–" if host is None or _group(result) == "plain" else f"{host:.1f}"
        drawing.text(columns[2], y + 13, on_host, "quiet", anchor="end")
    drawing.paragraph(below, caption)
    return drawing


def _group(result: dict[str, Any]) -> str:
    return "plain" if result["name"] == "plain" else "ours" if result["name"] in NAMES else "peer"


def _label(result: dict[str, Any]) -> str:
    name: str = result["name"]
    return NAMES.get(name) or PEERS.get(name, name)
