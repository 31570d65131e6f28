"""Draws the pictures of the explanation. ``python docs/pictures/explain.py`` writes them beside this file.

Each picture is a small SVG that is readable on a light and on a dark page: it brings its own background, and follows
the reader's colour scheme. The timelines are computed below, with invented durations: they show an order.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).parent
STYLE = """
  .page { fill: #ffffff } text { fill: #1f2328; font: 13px sans-serif } .small { font-size: 11px }
  .head { font-weight: bold }
  .faint { fill: #656d76 } .line { stroke: #8c959f; fill: none } .empty { fill: #eaeef2; stroke: #8c959f }
  .device { fill: #54aeff; stroke: #0969da } .host { fill: #ffb77c; stroke: #bc4c00 }
  .copy { fill: #b1e5b8; stroke: #1a7f37 } .wire { fill: #d8b9ff; stroke: #8250df } .bar { fill: #1f2328 }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117 } text { fill: #e6edf3 } .faint { fill: #9198a1 } .line { stroke: #656d76 }
    .empty { fill: #21262d; stroke: #656d76 } .device { fill: #1f4e8c; stroke: #58a6ff }
    .host { fill: #7a3d12; stroke: #f0883e } .copy { fill: #1f5c2e; stroke: #56d364 }
    .wire { fill: #4c2a85; stroke: #bc8cff } .bar { fill: #e6edf3 }
  }
"""


class Picture:
    """An SVG that grows as things are drawn on it."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.parts: list[str] = []
        self.width = self.height = 0.0

    def _grow(self, right: float, bottom: float) -> None:
        self.width, self.height = max(self.width, right), max(self.height, bottom)

    def box(self, x: float, y: float, width: float, height: float, kind: str, text: str = "") -> None:
        """A box with a text in its middle."""
        self.parts.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2"/>')
        self._grow(x + width, y + height)
        if text:
            self.text(x + width / 2, y + height / 2 + 4, text, "small", anchor="middle")

    def text(self, x: float, y: float, text: str, kind: str = "", *, anchor: str = "start") -> None:
        """A line of text. `y` is its foot."""
        self.parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>')
        if anchor == "start":
            self._grow(x + 6.4 * len(text), y)

    def arrow(self, x: float, y: float, length: float) -> None:
        """A short arrow to the right."""
        end = x + length
        self.parts.append(f'<path class="line" d="M{x:g} {y:g} H{end:g} m-4 -3 l4 3 l-4 3"/>')
        self._grow(end, y)

    def svg(self) -> str:
        """The whole file."""
        width, height = self.width + 12, self.height + 14
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'height="{height:g}" role="img" aria-label="{escape(self.title)}">\n<title>{escape(self.title)}</title>\n'
            f'<style>{STYLE}</style>\n<rect class="page" width="100%" height="100%" rx="6"/>\n'
            + "\n".join(self.parts)
            + "\n</svg>\n"
        )


# -- the one idea -----------------------------------------------------------------------------------------------------

RANKS = 4
SETTINGS = (
    ("stage 0", ("whole", "whole", "whole"), ("device", "device", "device")),
    ("stage 1", ("shard", "whole", "whole"), ("device", "device", "device")),
    ("stage 2", ("shard", "shard", "whole"), ("device", "device", "device")),
    ("stage 3", ("shard", "shard", "shard"), ("device", "device", "device")),
    ("stage 2, offload", ("shard", "shard", "whole"), ("host", "host", "device")),
    ("stage 3, all on the host", ("shard", "shard", "shard"), ("host", "host", "host")),
)
"""For each setting the extent and the place of optimizer states, gradients and parameters."""
KINDS = ("optimizer states", "gradients", "parameters")


def extents_and_places() -> Picture:
    """What the first of four ranks stores between two steps, and where."""
    picture = Picture("What one of four ranks stores in each stage, and where")
    left, top, column, row, part = 130, 50, 150, 34, 28
    for line, kind in enumerate(KINDS):
        picture.text(12, top + line * row + 17, kind)
    for number, (title, extents, places) in enumerate(SETTINGS):
        x = left + number * column
        picture.text(x, 34, title, "head" if len(title) < 20 else "head small")
        for line, (extent, place) in enumerate(zip(extents, places, strict=True)):
            for rank in range(RANKS):
                held = extent == "whole" or rank == 0
                picture.box(x + rank * part, top + line * row, part - 2, 24, place if held else "empty")
    foot = top + 3 * row + 22
    for x, kind, words in (
        (12, "device", "on the device"),
        (130, "host", "in host memory"),
        (260, "empty", "on other ranks"),
    ):
        picture.box(x, foot - 11, 14, 12, kind)
        picture.text(x + 20, foot, words, "small")
    picture.text(400, foot, "Each box is a quarter of the elements. The picture is of rank 0 of 4.", "small faint")
    return picture


# -- the life of a unit -----------------------------------------------------------------------------------------------

STEPS = ("gather", "forward", "release", "gather", "backward", "reduce", "stash", "update", "publish")
NOTHING_TO_DO = {0: {0, 2, 3, 8}, 1: {0, 2, 3}, 2: {0, 2, 3}, 3: {8}}
"""For each stage, the steps in which nothing happens."""
NOTES = {
    0: ("", "", "", "", "", "all-reduce", "whole", "whole", ""),
    1: ("", "", "", "", "", "scatter", "shard", "shard", "all-gather"),
    2: ("", "", "", "", "", "scatter", "shard", "shard", "all-gather"),
    3: ("all-gather", "", "", "all-gather", "", "scatter", "shard", "shard", ""),
}
"""What happens in each step of each stage, in a word."""
COLOURS = {"gather": "wire", "reduce": "wire", "publish": "wire", "release": "copy", "stash": "copy", "update": "host"}


def life_of_a_unit() -> Picture:
    """The nine steps, and in which stage each of them has something to do."""
    picture = Picture("The life of a unit in one step, and which parts of it each stage needs")
    width, gap, left = 72, 14, 80
    for number, step in enumerate(STEPS):
        x = left + number * (width + gap)
        picture.box(x, 16, width, 28, COLOURS.get(step, "device"), step)
        if number:
            picture.arrow(x - gap + 2, 30, gap - 4)
    for stage in range(4):
        y = 62 + stage * 30
        picture.text(12, y + 16, f"stage {stage}")
        for number in range(len(STEPS)):
            x = left + number * (width + gap)
            idle = number in NOTHING_TO_DO[stage]
            picture.box(
                x, y, width, 22, "empty" if idle else COLOURS.get(STEPS[number], "device"), NOTES[stage][number]
            )
    picture.text(12, 62 + 4 * 30 + 14, "Grey: nothing to do. Violet: the ranks communicate.", "small faint")
    return picture


# -- timelines --------------------------------------------------------------------------------------------------------

Span = tuple[float, float, str]


def pipeline(units: int) -> dict[str, list[Span]]:
    """One offloaded step and the next forward: spans of each lane, in arbitrary units of time."""
    forward, backward, copy, update = 1.0, 2.0, 0.7, 1.5
    lanes: dict[str, list[Span]] = {"GPU": [], "to the host": [], "host update": [], "to the device": []}
    now = 0.0
    for unit in range(units):
        lanes["GPU"].append((now, now + forward, f"F{unit + 1}"))
        now += forward
    landed, wire = {}, 0.0
    for unit in reversed(range(units)):
        lanes["GPU"].append((now, now + backward, f"B{unit + 1}"))
        now += backward
        start = max(now, wire)
        wire = start + copy
        lanes["to the host"].append((start, wire, f"g{unit + 1}"))
        landed[unit] = wire
    host = up = max(landed.values())  # the norm needs all gradients
    gpu = now
    for unit in range(units):
        begin = host
        host += update
        lanes["host update"].append((begin, host, f"U{unit + 1}"))
        up = max(up, host)
        lanes["to the device"].append((up, up + copy, f"p{unit + 1}"))
        up += copy
        gpu = max(gpu, up)
        lanes["GPU"].append((gpu, gpu + forward, f"F{unit + 1}"))
        gpu += forward
    return lanes


def delayed() -> dict[str, list[Span]]:
    """Three steps without delay, then three with it: spans of each lane."""
    compute, update = 3.0, 2.5
    plain_gpu, plain_host, late_gpu, late_host = [], [], [], []
    now = 0.0
    for step in range(1, 4):
        plain_gpu.append((now, now + compute, f"F{step} B{step}"))
        plain_host.append((now + compute, now + compute + update, f"U{step}"))
        now += compute + update
    now = free = 0.0
    for step in range(1, 4):
        late_gpu.append((now, now + compute, f"F{step} B{step}"))
        now += compute
        begin = max(now, free)
        free = begin + update
        late_host.append((begin, free, f"U{step}"))
    return {"GPU": plain_gpu, "host": plain_host, "GPU, delayed": late_gpu, "host, delayed": late_host}


LANE_COLOURS = {"GPU": "device", "host": "host", "host update": "host", "to the host": "copy", "to the device": "copy"}


def timeline(title: str, lanes: dict[str, list[Span]], scale: float, note: str) -> Picture:
    """A row for each lane, with its spans."""
    picture = Picture(title)
    left, y = 120, 16
    for lane, spans in lanes.items():
        picture.text(12, y + 17, lane)
        kind = LANE_COLOURS[lane.removesuffix(", delayed")]
        for start, stop, text in spans:
            picture.box(left + start * scale, y, (stop - start) * scale - 2, 24, kind, text)
        y += 34
    picture.text(12, y + 10, note, "small faint")
    return picture


PICTURES: dict[str, Callable[[], Picture]] = {
    "extents_and_places": extents_and_places,
    "life_of_a_unit": life_of_a_unit,
    "offload_pipeline": lambda: timeline(
        "One offloaded step and the beginning of the next: what the GPU, the copies and the host do when",
        pipeline(4),
        28,
        "F forward, B backward, g gradient, U update, p parameters of unit 1 to 4. The next forward begins with unit 1 "
        "as soon as its parameters are there.",
    ),
    "delayed_update": lambda: timeline(
        "Three steps without and with the delayed update",
        delayed(),
        44,
        "F forward, B backward, U update of step 1 to 3. Delayed: F3 runs on the parameters of U1, while U2 goes on.",
    ),
}


def main() -> None:
    """Write all pictures."""
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main()
