"""What a person sees of a run: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
from collections.abc import Mapping

import pytest
from rich.console import Console

from tests.train.live.events import EVENT, FIRST, OFFLOADED
from zeroshard.train.live.audience import Audience
from zeroshard.train.live.events import Evaluation
from zeroshard.train.live.terminal import Bar, draws, step_line


class Screen(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO, environment: Mapping[str, str]) -> str:
    terminal = stream.isatty()
    console = Console(file=stream, force_terminal=terminal, no_color=True, width=100, height=40, legacy_windows=False)
    with Bar(12, console, environment) as bar:
        bar.receive(Evaluation(step=0, held_out_loss=5.5))
        bar.reach(7)
        bar.receive(OFFLOADED)
        bar.refresh()
    bar.close()
    return stream.getvalue()


def test_a_terminal_has_a_bar_with_rate_time_left_memory_by_kind_and_waits() -> None:
    text = shown(Screen(), {"TERM": "xterm-256color"})
    for part in (
        " 8/12",
        "1:23 left",
        "loss 4.250 · held-out 4.500 · lr 0.0003 · gradient norm 0.98 · 12,346 tokens/s",
        "device: parameters 2.0, gradients 1.0, optimizer states 4.0 MB",
        "host: parameters 0.0, gradients 3.0, optimizer states 12.0 MB",
        "volume 2.59 Ψ · waits 0.012 s a step, most for host update",
        "held-out loss 5.500 before training",
    ):
        assert part in text
    assert "step 8/12" not in text


@pytest.mark.parametrize(
    ("stream", "environment"),
    [(io.StringIO(), {}), (Screen(), {"TERM": "dumb"}), (Screen(), {"NO_COLOR": "1", "TERM": "xterm"})],
    ids=["no terminal", "a dumb terminal", "NO_COLOR"],
)
def test_elsewhere_every_measured_step_is_a_plain_line(stream: io.StringIO, environment: Mapping[str, str]) -> None:
    assert shown(stream, environment).splitlines() == [
        "held-out loss 5.500 before training",
        "step 8/12 · loss 4.250 · 12,346 tokens/s · device: parameters 2.0, gradients 1.0, optimizer states 4.0 MB · "
        "host: parameters 0.0, gradients 3.0, optimizer states 12.0 MB · volume 2.59 Ψ · "
        "waits 0.012 s a step, most for host update · 1:23 left",
    ]


def test_the_first_step_has_no_rate_and_no_time_left() -> None:
    line = "step 1/12 · loss 4.250 · parameters 2.0, gradients 1.0, optimizer states 4.0 MB"
    assert step_line(FIRST) == line
    assert step_line(EVENT).startswith("step 8/12 · loss 4.250 · 12,346 tokens/s · parameters 2.0")


def test_other_ranks_draw_nothing_and_an_empty_no_color_means_nothing() -> None:
    assert not draws(Console(file=Screen(), force_terminal=True, quiet=True), {})
    assert draws(Console(file=Screen(), force_terminal=True), {"NO_COLOR": ""})


def test_a_line_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    line = "model = X.from_pretrained('runs/[red]x[/foo]')"
    Audience(Console(), steps=1).show(line)
    assert capsys.readouterr().out == f"{line}\n"
