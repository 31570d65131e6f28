"""Where the wire idles in a profiled step, and what the device did meanwhile.

    PYTHONPATH=. python benchmarks/gpu_step.py --worlds 8 --link ethernet --only "stage 3" --profile "stage 3@8"
    python benchmarks/gaps.py gpu_step.json.zeroshard-stage-3.trace.json

The delayed group (benchmarks/delayed_group.py) keeps its wire busy with one kernel a collective, so an idle wire is a
gap between those. Each gap is laid against the kernels that ran on the device, by the phase that launched them.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

WIRE_KERNEL = "spin_kernel"
"""What ``torch.cuda._sleep`` launches."""


class Span(NamedTuple):
    """Microseconds from and to."""

    start: float
    stop: float

    @property
    def length(self) -> float:
        """How long it lasts."""
        return self.stop - self.start

    def overlap(self, other: Span) -> float:
        """How long both last."""
        return max(0.0, min(self.stop, other.stop) - max(self.start, other.start))


def union(spans: Iterable[Span]) -> list[Span]:
    """The same time as spans that do not touch, in order."""
    merged: list[Span] = []
    for span in sorted(spans):
        if merged and span.start <= merged[-1].stop:
            merged[-1] = Span(merged[-1].start, max(merged[-1].stop, span.stop))
        else:
            merged.append(span)
    return merged


def main() -> None:
    """Prints the gaps of one trace, the longest first, and their sum."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--least", type=float, default=200.0, help="microseconds below which gaps are only summed")
    args = parser.parse_args()
    events: list[dict[str, Any]] = json.loads(args.trace.read_text())["traceEvents"]
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    wire = union(_span(e) for e in kernels if WIRE_KERNEL in e["name"])
    compute = [e for e in kernels if WIRE_KERNEL not in e["name"]]
    whole = Span(min(e["ts"] for e in kernels), max(e["ts"] + e["dur"] for e in kernels))
    computing = union(map(_span, compute))
    print(f"step {whole.length / 1e3:.1f} ms, wire busy {_total(wire):.1f}, device computing {_total(computing):.1f}")
    edges = [whole.start, *(edge for span in wire for edge in span), whole.stop]
    gaps = [Span(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a]
    print(f"wire idle {_total(gaps):.1f} ms in {len(gaps)} gaps; those of {args.least / 1e3} ms and more:")
    for gap in sorted((g for g in gaps if g.length >= args.least), key=lambda g: -g.length):
        busy: Counter[str] = Counter()
        for event in compute:
            busy[event["name"][:60]] += int(gap.overlap(_span(event)))
        most = ", ".join(f"{name} {time / 1e3:.2f}" for name, time in busy.most_common(3) if time)
        idle = gap.length - sum(gap.overlap(span) for span in computing)
        start = (gap.start - whole.start) / 1e3
        print(f"  at {start:7.1f}: {gap.length / 1e3:6.2f} ms, device idle {idle / 1e3:.2f}; {most}")


def _span(event: dict[str, Any]) -> Span:
    return Span(event["ts"], event["ts"] + event["dur"])


def _total(spans: Iterable[Span]) -> float:
    return sum(span.length for span in spans) / 1e3


if __name__ == "__main__":
    main()
