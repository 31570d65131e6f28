"""One step of an offloaded run: what the device computes, what is copied, and what the host updates, when.

    zeroshard train --offload cpu --trace step.json
    python -m docs.pictures.step step.json --machine "NVIDIA H200, torch 2.13.0" --title "10.8M parameters" \
        --command "zeroshard train --offload cpu --trace step.json"
    python -m docs.pictures.draw

Any trace of `zeroshard.trace` will do. The last step is taken that has another one after it: from the beginning of its
forward to the beginning of the next. So what stands at the left end may belong to the update of the step before.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

from docs.pictures import data
from docs.pictures.svg import MARGIN, WIDTH, Drawing, paragraph_height

LANES = ("compute", "gather", "reduce", "to the host", "host update", "to the device")
"""In this order from top to bottom. Tracks of other names come below."""
WORDS = {"compute": "device computes", "host update": "host updates", "gather": "gathers", "reduce": "reduces"}
KINDS = {"forward": "pale", "backward": "blue", "loss": "grey", "to the host": "orange", "to the device": "orange"}
KINDS |= {"host update": "green"}
LEFT, TOP, LANE, BAR = 152, 98, 36, 24
GAP = 0.6  # between two phases, where there is room


class Phase(NamedTuple):
    """What a track did, in microseconds."""

    track: str
    name: str
    start: float
    stop: float


def phases_of(trace: dict[str, Any]) -> list[Phase]:
    """The phases of a trace file, in the order of their beginnings."""
    events = trace["traceEvents"]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    found = [
        Phase(tracks[event["tid"]], event["name"], event["ts"], event["ts"] + event["dur"])
        for event in events
        if event["ph"] == "X"
    ]
    return sorted(found, key=lambda phase: phase.start)


def beginnings(phases: list[Phase]) -> list[float]:
    """When the forward of each step begins: the first one after the backward of the step before."""
    computed = [phase for phase in phases if phase.track == "compute"]
    found: list[float] = []
    begin: float | None = None
    for phase in computed:
        word = phase.name.split()[0]
        if word == "backward":
            begin = None  # a forward between two backwards is recomputation: a loss does not follow
        elif word == "forward" and begin is None:
            begin = phase.start
        elif word == "loss" and begin is not None:
            found.append(begin)
    return found


def one_step(trace: dict[str, Any]) -> dict[str, Any]:
    """The intervals of one step, in milliseconds since its beginning, by track.

    Raises:
        ValueError: the trace has no whole step.
    """
    phases = phases_of(trace)
    begins = beginnings(phases)
    if len(begins) < 2:
        raise ValueError(f"the trace holds {len(begins)} forwards; it takes two, to show what lies between them")
    start, stop = begins[-2], begins[-1]
    tracks: dict[str, list[list[float | str]]] = {}
    for phase in phases:
        if phase.stop > start and phase.start < stop:
            kind = phase.name.split()[0] if phase.track == "compute" else phase.track
            inside = [round((min(max(moment, start), stop) - start) / 1e3, 3) for moment in (phase.start, phase.stop)]
            tracks.setdefault(phase.track, []).append([*inside, kind])
    return {"milliseconds": round((stop - start) / 1e3, 3), "tracks": tracks}


def picture() -> Drawing:
    """A lane for each track, over the time of the step."""
    about, content = data.read("offload_step")
    length, tracks = content["milliseconds"], content["tracks"]
    lanes = [lane for lane in (*LANES, *(name for name in tracks if name not in LANES)) if lane in tracks]
    scale = (WIDTH - MARGIN - LEFT) / length
    title = "One step with the optimizer on the host"
    subtitle = f"{content['title']}: {length:.0f} ms"
    busy = {lane: sum(stop - start for start, stop, _ in tracks[lane]) / length for lane in lanes}
    said = ", ".join(f"{WORDS.get(lane, 'copies ' + lane)} {share:.0%} of the time" for lane, share in busy.items())
    caption = (
        "From the beginning of one forward to that of the next. The gradients of a unit go to the host, the host "
        f"updates, and new parameters come back. {about.machine}, commit {about.commit}."
    )
    bottom = TOP + len(lanes) * LANE
    drawing = Drawing(bottom + 42 + paragraph_height(caption), title, f"{subtitle}. {said}. {caption}")
    drawing.heading(subtitle)
    drawing.legend(TOP - 28, {"forward": "pale", "backward": "blue", "copies": "orange", "update": "green"}, MARGIN)
    for tick in _ticks(length):
        x = LEFT + tick * scale
        drawing.line(x, TOP - 8, x, bottom)
        drawing.text(x, bottom + 14, f"{tick:g}" + (" ms" if tick == 0 else ""), "quiet", size=12, anchor="middle")
    for number, lane in enumerate(lanes):
        y = TOP + number * LANE
        drawing.text(MARGIN, y + 16, WORDS.get(lane, "copies " + lane))
        for start, stop, kind in tracks[lane]:
            width = (stop - start) * scale
            colour = KINDS.get(kind, "grey")
            drawing.box(LEFT + start * scale, y, max(0.7, width - (GAP if width > 3 * GAP else 0)), BAR, colour)
    drawing.paragraph(bottom + 42, caption)
    return drawing


def _ticks(length: float) -> list[float]:
    """Round numbers from 0 to the end, at most ten."""
    step = next(
        digit * 10.0**power for power in range(-3, 6) for digit in (1, 2, 5) if length / (digit * 10.0**power) <= 9
    )
    return [number * step for number in range(int(length / step) + 1)]


def main() -> None:
    """Reduces a trace to the data of the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--title", required=True, help="what was trained, in a few words")
    parser.add_argument("--command", required=True, help="the command that made the trace")
    parser.add_argument("--machine", required=True)
    parser.add_argument("--commit", default=None, help="this checkout's, if it is left out")
    args = parser.parse_args()
    about = data.About(args.command, args.machine, args.commit or data.commit())
    data.write("offload_step", about, {"title": args.title, **one_step(json.loads(args.trace.read_text()))})


if __name__ == "__main__":
    main()
