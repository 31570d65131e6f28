"""The page: a function from runs to the text of one HTML file.

Every word of a run is escaped on its way into the text, and data for the charts is JSON in an element that is not run.
Beyond that, the page has a policy: the browser runs two scripts, which are named by their hashes, and fetches nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from .advice import advice_for
from .figures import Figure, Table, figures
from .journal import Run
from .summary import Summary, count_text, number_text, seconds_text, size_text

MOST_RUNS = 8
"""More runs side by side cannot be told apart."""
POLICY = "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
"""What a browser may do beyond the page's scripts: nothing is fetched, and images are in the page itself."""
LICENCES = ("NOTICE", "LICENSE", "LICENSE-d3")


def render(runs: Sequence[Run]) -> str:
    """The report of one run, or of several side by side.

    Raises:
        ValueError: there are too many runs, or none.
    """
    if not 1 <= len(runs) <= MOST_RUNS:
        raise ValueError(f"a report shows 1 to {MOST_RUNS} runs side by side, not {len(runs)}")
    summaries = [Summary(run) for run in _told_apart(runs)]
    shown = figures(summaries)
    scripts = [_part("library", "echarts.min.js"), _part("page.js")]
    sources = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    policy = f"default-src 'none'; script-src {sources}; {POLICY}"
    title = " and ".join(summary.run.name for summary in summaries[:3]) + (" …" if len(summaries) > 3 else "")
    data = {figure.id: figure.chart for figure in shown}
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(title)} – zeroshard report</title>",
            f"<style>{_part('page.css')}</style>",
            "</head>",
            "<body>",
            '<a class="skip" href="#figures">Skip to the charts</a>',
            *_header(summaries),
            "<main>",
            *_runs(summaries),
            *_advice(summaries),
            '<div id="figures">',
            *(line for figure in shown for line in _figure(figure)),
            "</div>",
            "</main>",
            *_footer(),
            f'<script type="application/json" id="data">{_json(data)}</script>',
            *(f"<script>{script}</script>" for script in scripts),
            "</body>",
            "</html>",
            "",
        ]
    )


def _told_apart(runs: Sequence[Run]) -> list[Run]:
    """The runs under names that differ: their own, those of their folders, or their paths, and else with a number."""
    for names in (
        [run.name for run in runs],
        [Path(run.folder).absolute().name for run in runs],
        [run.folder for run in runs],
        [f"{run.name} ({number})" for number, run in enumerate(runs, 1)],
    ):
        if len(set(names)) == len(names) and all(names):
            break
    return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]


# -- parts of the page --------------------------------------------------------------------------------------------


def _header(runs: Sequence[Summary]) -> Iterator[str]:
    yield "<header>"
    title = runs[0].run.name if len(runs) == 1 else f"{len(runs)} runs side by side"
    yield f"<h1>{escape(title)}</h1>"
    yield '<button type="button" id="theme" aria-pressed="false" hidden>Dark</button>'
    yield "</header>"


def _runs(runs: Sequence[Summary]) -> Iterator[str]:
    """The numbers of each run, in columns."""
    yield '<section class="runs" aria-label="Runs">'
    for number, run in enumerate(runs):
        yield f'<article class="run" data-run="{number}">'
        if len(runs) > 1:
            yield f'<h2><span class="swatch" data-run="{number}"></span>{escape(run.run.name)}</h2>'
        yield f"<p>{escape(_subtitle(run))}</p>"
        yield "<dl>"
        for name, value in _numbers(run):
            yield f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        yield "</dl>"
        for note in _notes(run):
            yield f'<p class="note">{escape(note)}</p>'
        yield "</article>"
    yield "</section>"


def _subtitle(run: Summary) -> str:
    parameters = run.run.number("parameters")
    size = "" if not parameters else f"Ψ = {count_text(parameters)} parameters"
    return " · ".join(word for word in (run.setting, size, run.run.text("device")) if word)


def _numbers(run: Summary) -> Iterator[tuple[str, str]]:
    losses = [step.loss for step in run.losses if step.loss is not None]
    if losses:
        yield "training loss", f"{losses[0]:.3f} → {losses[-1]:.3f}"
    if run.run.evaluations:
        yield "held-out loss", f"{run.run.evaluations[0].loss:.3f} → {run.run.evaluations[-1].loss:.3f}"
    if run.tokens_a_second is not None:
        yield "tokens/s, all ranks", number_text(run.tokens_a_second)
    if run.step_seconds is not None:
        yield "time of a step, median", seconds_text(run.step_seconds)
    if run.memory is not None and run.memory.device:
        yield "states on the device", size_text(sum(run.memory.device.values()))
    if run.memory is not None and run.memory.peak is not None:
        yield "peak on the device", size_text(run.memory.peak)
    if run.memory is not None and run.memory.host:
        yield "states on the host", size_text(sum(run.memory.host.values()))
    if run.volume is not None and run.ranks > 1:
        yield "volume of a step", f"{number_text(run.volume)} Ψ"
    if run.run.steps:
        yield "steps", f"{run.run.steps[-1].step:,}"


def _notes(run: Summary) -> Iterator[str]:
    if run.run.damaged:
        yield f"{run.run.damaged:,} line(s) of the record could not be read and are left out."
    if run.run.starts > 1:
        yield f"The run was started {run.run.starts:,} times; it went on in this folder."
    if run.run.end is None:
        yield "The record has no end: the run goes on, or it was killed."
    elif run.run.end != "finished":
        yield f"The run {run.run.end}."
    if not run.run.steps:
        yield "The record has no steps."


def _advice(runs: Sequence[Summary]) -> Iterator[str]:
    yield '<section class="advice" aria-labelledby="advice-title">'
    yield '<h2 id="advice-title">Advice</h2>'
    for run in runs:
        found = advice_for(run)
        if len(runs) > 1:
            yield f"<h3>{escape(run.run.name)}</h3>"
        if not found:
            yield f"<p>{escape(_nothing_to_advise(run))}</p>"
            continue
        yield "<ol>"
        for each in found:
            code = f" <code>{escape(each.setting)}</code>" if each.setting else ""
            yield f"<li>{escape(each.sentence)}{code}</li>"
        yield "</ol>"
    yield "</section>"


def _nothing_to_advise(run: Summary) -> str:
    window = run.window
    if window is None:
        return "No step was traced, so it is not known what a step waits for. Steps are traced from the 5th on."
    computing = sum(seconds for part, seconds in window.shares.items() if not part.startswith("wait: "))
    return f"Nothing: computing fills {computing / window.seconds:.0%} of a step, and no wait takes 5% of it."


def _figure(figure: Figure) -> Iterator[str]:
    name = escape(figure.id)
    yield f'<figure id="{name}" class="{escape(figure.chart["type"])}" aria-labelledby="{name}-title">'
    yield f'<h2 id="{name}-title">{escape(figure.title)}</h2>'
    yield f"<figcaption>{escape(figure.caption)}</figcaption>"
    spoken = escape(f"{figure.title}, a chart. Arrow keys read its values; the table below has them all.")
    yield f'<div class="chart" data-chart="{name}" tabindex="0" role="img" aria-label="{spoken}"></div>'
    yield "<details>"
    yield "<summary>The values as a table</summary>"
    yield from _table(figure.table, figure.title)
    yield "</details>"
    yield "</figure>"


def _table(table: Table, title: str) -> Iterator[str]:
    yield f'<div class="scroll" tabindex="0" role="region" aria-label="Values: {escape(title)}"><table>'
    yield "<thead><tr>" + "".join(f'<th scope="col">{escape(cell)}</th>' for cell in table.header) + "</tr></thead>"
    yield "<tbody>"
    for first, *others in table.rows:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in others)
        yield f'<tr><th scope="row">{escape(first)}</th>{cells}</tr>'
    yield "</tbody></table></div>"


def _footer() -> Iterator[str]:
    yield "<footer>"
    yield "<p>Made by <code>zeroshard report</code>. This file stands alone: it fetches nothing.</p>"
    yield "<details><summary>Licence of the charts</summary>"
    yield f"<pre>{escape(chr(10).join(_part('library', name) for name in LICENCES))}</pre>"
    yield "</details>"
    yield "</footer>"
    yield '<div id="spoken" class="spoken" role="status" aria-live="polite"></div>'


# -- text ---------------------------------------------------------------------------------------------------------


@cache
def _part(*path: str) -> str:
    """A file of this room."""
    return files(__package__).joinpath(*path).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _json(data: Any) -> str:
    """JSON that cannot end the element it is in."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
