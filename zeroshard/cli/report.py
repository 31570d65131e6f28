"""`zeroshard report`: one HTML file that shows a run, or several side by side."""

import argparse
from pathlib import Path

from ..report.journal import read
from ..report.page import render

HELP = "show recorded runs in one HTML file"
DESCRIPTION = """\
Write one HTML file that shows recorded runs: loss, speed, memory beside the plan and beside other
stages, one step on its lanes, volume, where the time of a step goes, and advice that follows from
the numbers. The file stands alone and fetches nothing. Several runs stand side by side.

RUN is the folder of a run. `zeroshard train` and `zeroshard finetune` record theirs; a loop of your
own does with `with zeroshard.record(model, folder) as run:`. A run that goes on can be shown, too.
"""
EXAMPLES = """\
examples:
  zeroshard report runs/stdlib-10m                       writes runs/stdlib-10m/report.html
  zeroshard report runs/a runs/b -o report.html          two runs side by side
"""
NAME = "report.html"


def define(parser: argparse.ArgumentParser) -> None:
    """Add the options of `report`."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs")
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        metavar="FILE",
        help=f"the page (default: {NAME} in the folder of the run; with several runs, in this folder)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Read the journals, and write the page."""
    found = [read(folder) for folder in arguments.runs]
    out: Path = arguments.out or (Path(found[0].folder) / NAME if len(found) == 1 else Path(NAME))
    text = render(found)
    try:
        if out.is_dir():
            raise ValueError(f"--out {out}: is a folder; name a file in it, such as {out / NAME}")
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--out {out}: {error.strerror}") from None
    for each in found:
        if each.damaged:
            print(f"{each.folder}: {each.damaged} line(s) of its record cannot be read, and are left out")
    print(f"report: {out}")
    return 0
