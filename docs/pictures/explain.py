"""Draws the pictures of the explanation: they show an order or a rule, and nothing measured.

python -m docs.pictures.explain     # from the root of the repository
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from docs.pictures.data import HERE
from docs.pictures.svg import MARGIN, WIDTH, Drawing, paragraph_height
from zeroshard.config.offload import Offload
from zeroshard.config.table import AtRest, Extent, Place, StateTable, state_table

COLOURS = {Place.DEVICE: "sky", Place.HOST: "orange"}
TEXT = 12


def labelled(drawing: Drawing, x: float, y: float, width: float, height: float, colour: str, words: str) -> None:
    """A box with words in its middle."""
    drawing.box(x, y, width, height, colour)
    drawing.text(x + width / 2, y + height / 2 + 4, words, "label", size=TEXT, anchor="middle")


# -- the one idea -----------------------------------------------------------------------------------------------------

RANKS = 4
SETTINGS: Mapping[str, StateTable] = {
    "stage 0": state_table(0, RANKS),
    "stage 1": state_table(1, RANKS),
    "stage 2": state_table(2, RANKS),
    "stage 3": state_table(3, RANKS),
    "2, offload": state_table(2, RANKS, Offload()),
    "3, all on host": state_table(3, RANKS, Offload(parameters="cpu")),
}
STATES = ("optimizer", "gradients", "parameters")


def extents_and_places() -> Drawing:
    """What the first of four ranks stores between two steps, and where, by the table that the runtime consults."""
    note = f"Each box is a quarter of the elements. The picture is of rank 0 of {RANKS}."
    title = "What one rank stores between two steps"
    said = "; ".join(f"{name}: {', '.join(_in_words(table))}" for name, table in SETTINGS.items())
    drawing = Drawing(182 + paragraph_height(note), title, f"{said}. {note}")
    left, top, column, row, part = 124, 62, 96, 30, 20
    for number, (name, table) in enumerate(SETTINGS.items()):
        x = left + number * column
        drawing.text(x, 46, name, size=TEXT, bold=True)
        for line, state in enumerate(STATES):
            if number == 0:
                drawing.text(
                    MARGIN, top + line * row + 16, {"optimizer": "optimizer states"}.get(state, state), size=TEXT
                )
            _row(drawing, x, top + line * row, part, getattr(table, state))
    drawing.legend(168, {"on the device": "sky", "in host memory": "orange", "on other ranks": "faint"}, MARGIN)
    drawing.text(MARGIN, 24, title, bold=True)
    drawing.paragraph(190, note)
    return drawing


def _row(drawing: Drawing, x: float, y: float, part: float, state: AtRest) -> None:
    for rank in range(RANKS):
        held = state.extent is Extent.WHOLE or rank == 0
        drawing.box(x + rank * part, y, part - 2, 22, COLOURS[state.place] if held else "faint")


def _in_words(table: StateTable) -> list[str]:
    return [
        f"{state} {getattr(table, state).extent.value} on the {getattr(table, state).place.value}" for state in STATES
    ]


# -- the life of a unit -----------------------------------------------------------------------------------------------

STEPS = ("gather", "forward", "release", "gather", "backward", "reduce", "stash", "update", "publish")
COMMUNICATES = ("gather", "reduce", "publish")
DOES: Mapping[int, Sequence[str]] = {
    0: ("", "runs", "", "", "runs", "all-red.", "whole", "whole", ""),
    1: ("", "runs", "", "", "runs", "scatter", "shard", "shard", "gather"),
    2: ("", "runs", "", "", "runs", "scatter", "shard", "shard", "gather"),
    3: ("gather", "runs", "frees", "gather", "runs", "scatter", "shard", "shard", ""),
}
"""For each stage what happens in each step, in a word. Nothing: the step has nothing to do."""


def life_of_a_unit() -> Drawing:
    """The nine steps, and in which stage each of them has something to do."""
    title = "The life of a unit in one step"
    note = (
        "An empty box: nothing to do. Green: the ranks communicate. "
        "all-red. is an all-reduce, scatter a reduce-scatter."
    )
    said = "; ".join(
        f"stage {stage}: {', '.join(step for step, what in zip(STEPS, done, strict=True) if what)}"
        for stage, done in DOES.items()
    )
    drawing = Drawing(222 + paragraph_height(note), title, f"{said}. {note}")
    drawing.text(MARGIN, 24, title, bold=True)
    left, width, gap = 74, 64, 4
    for number, step in enumerate(STEPS):
        x = left + number * (width + gap)
        drawing.text(x + width / 2, 56, step, size=TEXT, anchor="middle", bold=True)
        for stage, done in DOES.items():
            y = 68 + stage * 34
            if number == 0:
                drawing.text(MARGIN, y + 18, f"stage {stage}", size=TEXT)
            colour = "mint" if step in COMMUNICATES else "sky"
            labelled(drawing, x, y, width, 26, colour if done[number] else "faint", done[number])
    drawing.paragraph(222, note)
    return drawing


# -- timelines --------------------------------------------------------------------------------------------------------

Span = tuple[float, float, str]
"""Begin, end and name of a piece of work. The durations are invented."""


def offloaded_step(units: int = 4) -> dict[str, list[Span]]:
    """One offloaded step and the next forward."""
    forward, backward, copy, update = 1.0, 2.0, 0.8, 1.6
    gpu: list[Span] = []
    down: list[Span] = []
    host: list[Span] = []
    up: list[Span] = []
    now = wire = 0.0
    for unit in range(1, units + 1):
        gpu.append((now, now + forward, f"F{unit}"))
        now += forward
    for unit in range(units, 0, -1):
        gpu.append((now, now + backward, f"B{unit}"))
        now += backward
        begin = max(now, wire)
        wire = begin + copy
        down.append((begin, wire, f"g{unit}"))
    begin = free = wire  # clipping needs the norm of all gradients
    for unit in range(1, units + 1):  # in the order of the next forward
        host.append((begin, begin + update, f"U{unit}"))
        begin += update
        free = max(free, begin) + copy
        up.append((free - copy, free, f"p{unit}"))
        now = max(now, free)
        gpu.append((now, now + forward, f"F{unit}"))
        now += forward
    return {"GPU": gpu, "to the host": down, "host update": host, "to the device": up}


def delayed_steps() -> dict[str, list[Span]]:
    """Three steps without the delay, and three with it."""
    compute, update = 3.0, 2.5
    plain: tuple[list[Span], list[Span]] = ([], [])
    late: tuple[list[Span], list[Span]] = ([], [])
    for step in range(3):
        begin = step * (compute + update)
        plain[0].append((begin, begin + compute, f"F{step + 1} B{step + 1}"))
        plain[1].append((begin + compute, begin + compute + update, f"U{step + 1}"))
        late[0].append((step * compute, (step + 1) * compute, f"F{step + 1} B{step + 1}"))
        late[1].append(((step + 1) * compute, (step + 1) * compute + update, f"U{step + 1}"))
    return {"GPU": plain[0], "host": plain[1], "GPU, delayed": late[0], "host, delayed": late[1]}


LANES = {"GPU": "sky", "host": "orange", "host update": "orange", "to the host": "mint", "to the device": "mint"}


def timeline(title: str, lanes: Mapping[str, Sequence[Span]], note: str) -> Drawing:
    """A row for each lane, with its pieces of work."""
    left, top, row = 118.0, 42.0, 34.0
    scale = (WIDTH - MARGIN - left) / max(stop for spans in lanes.values() for _, stop, _ in spans)
    foot = top + len(lanes) * row + 16
    said = "; ".join(f"{lane}: {', '.join(name for _, _, name in spans)}" for lane, spans in lanes.items())
    drawing = Drawing(foot + paragraph_height(note), title, f"{said}. {note}")
    drawing.text(MARGIN, 24, title, bold=True)
    for number, (lane, spans) in enumerate(lanes.items()):
        y = top + number * row
        drawing.text(MARGIN, y + 18, lane, size=TEXT)
        for begin, end, name in spans:
            colour = LANES[lane.removesuffix(", delayed")]
            labelled(drawing, left + begin * scale, y, (end - begin) * scale - 1, 26, colour, name)
    drawing.paragraph(foot, note)
    return drawing


def offload_pipeline() -> Drawing:
    """What the GPU, the copies and the host do when."""
    return timeline(
        "One offloaded step, and the next forward",
        offloaded_step(),
        "F forward, B backward, g gradient, U update and p parameters of units 1 to 4. Updates follow in the order of "
        "the next forward, and each of its units waits for its own parameters alone.",
    )


def delayed_update() -> Drawing:
    """Three steps without and with the delay."""
    return timeline(
        "Three steps without and with the delayed update",
        delayed_steps(),
        "F forward, B backward, U update of steps 1 to 3. With the delay F3 runs on the parameters that U1 made, while "
        "U2 goes on.",
    )


PICTURES = {
    "extents_and_places": extents_and_places,
    "life_of_a_unit": life_of_a_unit,
    "offload_pipeline": offload_pipeline,
    "delayed_update": delayed_update,
}


def main() -> None:
    """Writes every picture beside this file."""
    for name, picture in PICTURES.items():
        (HERE / f"{name}.svg").write_text(str(picture()))


if __name__ == "__main__":
    main()
