"""The page in a real browser: no errors, nothing fetched, charts with the run's values, keys, colours and print."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.report.runs import OFFLOADED_STEP, head, run
from zeroshard.report.journal import Journal, read
from zeroshard.report.page import render

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: pip install playwright")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium")
HOSTILE = "</script><script>window.hurt = 1</script><img src=x onerror='window.hurt = 2'>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as tool:
        started = tool.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


class Opened:
    """A page that a browser shows, with what went wrong in it."""

    def __init__(self, browser: Any, folder: Path, text: str, **options: Any) -> None:
        file = folder / "shown.html"
        file.write_text(text)
        self.page = browser.new_page(viewport={"width": 1100, "height": 800}, **options)
        self.troubles: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.troubles.append(message.text))
        self.page.on("pageerror", lambda error: self.troubles.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.as_uri())
        self.page.wait_for_selector(".chart svg")

    def option(self, chart: str) -> dict[str, Any]:
        """What ECharts was told to draw."""
        found: dict[str, Any] = self.page.evaluate(
            "name => {"
            " const o = echarts.getInstanceByDom(document.querySelector(`[data-chart='${name}']`)).getOption();"
            " return { series: o.series.map(s => ({ name: s.name, data: s.data })), rows: o.yAxis[0].data }; }",
            chart,
        )
        return found

    def background(self) -> str:
        return str(self.page.evaluate("getComputedStyle(document.body).backgroundColor"))


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Opened]:
    shown = Opened(browser, tmp_path, render([run(tmp_path, spans=OFFLOADED_STEP)]), color_scheme="light")
    yield shown
    shown.page.close()


def test_every_chart_is_drawn_without_an_error_and_nothing_is_fetched(opened: Opened) -> None:
    charts = opened.page.query_selector_all(".chart")
    assert len(charts) == 8
    for chart in charts:
        assert chart.query_selector_all("svg path")
        box = chart.bounding_box()
        assert box is not None
        assert box["width"] > 300
        assert box["height"] > 60
    assert opened.troubles == []
    assert len(opened.requests) == 1  # the file itself


def test_what_is_drawn_is_what_the_run_says(opened: Opened) -> None:
    loss = opened.option("loss")["series"]
    assert loss[0]["data"] == [[step, 5 - 0.1 * step] for step in range(1, 11)]
    assert loss[1]["data"] == [[10, 4.5]]
    memory = opened.option("memory")
    assert memory["rows"][:2] == ["measured", "planned, stage 2"]
    assert {series["name"]: series["data"][0] for series in memory["series"]} == {
        "parameters": 2e6,
        "gradients": 1e6,
        "optimizer states": 6e6,
    }
    waits, boxes, _ = opened.option("lanes-0")["series"]
    assert waits["data"][0] == [0, 0.205, "wait: host update"]
    assert [0, 0.21, 0.3, "forward blocks.0"] in boxes["data"]


def test_the_page_holds_in_dark_colours_and_a_button_changes_them(browser: Any, tmp_path: Path) -> None:
    opened = Opened(browser, tmp_path, render([run(tmp_path, spans=OFFLOADED_STEP)]), color_scheme="dark")
    dark = opened.background()
    assert dark == "rgb(20, 23, 26)"
    opened.page.keyboard.press("Tab")  # the link that skips to the charts
    opened.page.keyboard.press("Tab")
    opened.page.keyboard.press("Enter")
    assert opened.background() == "rgb(255, 255, 255)"
    assert opened.page.get_attribute("#theme", "aria-pressed") == "false"
    labels = opened.page.evaluate("[...document.querySelectorAll('#memory svg text')].map(t => t.getAttribute('fill'))")
    assert "#1a1d21" in labels
    assert opened.troubles == []


def test_arrow_keys_read_a_charts_values(opened: Opened) -> None:
    opened.page.focus("[data-chart='loss']")
    for _ in range(3):
        opened.page.keyboard.press("ArrowRight")
    assert opened.page.text_content("#spoken") == "step 3: training 4.7"
    assert "4.7" in opened.page.inner_text("#loss .chart")  # the tooltip
    opened.page.keyboard.press("End")
    assert opened.page.text_content("#spoken") == "step 10: training 4, held out 4.5"
    opened.page.focus("[data-chart='memory']")
    opened.page.keyboard.press("ArrowDown")
    assert opened.page.text_content("#spoken") == (
        "measured: 9 MB. parameters 2 MB, gradients 1 MB, optimizer states 6 MB"
    )
    opened.page.focus("[data-chart='lanes-0']")
    opened.page.keyboard.press("Home")
    assert opened.page.text_content("#spoken") == "wait: host update, 205 ms, from 0"
    assert opened.troubles == []


def test_tables_open_and_a_narrow_page_does_not_scroll_sideways(opened: Opened) -> None:
    opened.page.set_viewport_size({"width": 380, "height": 700})
    for summary in opened.page.query_selector_all("figure summary"):
        summary.click()
    opened.page.wait_for_timeout(200)
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 380
    assert opened.page.is_visible("#loss table")
    widths = opened.page.evaluate(
        "[...document.querySelectorAll('.chart svg')].map(s => s.getBoundingClientRect().width)"
    )
    assert max(widths) <= 380
    assert opened.troubles == []


def test_a_dark_page_prints_light_and_comes_back(browser: Any, tmp_path: Path) -> None:
    opened = Opened(browser, tmp_path, render([run(tmp_path, spans=OFFLOADED_STEP)]), color_scheme="dark")
    assert opened.page.pdf()[:4] == b"%PDF"
    opened.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert opened.background() == "rgb(255, 255, 255)"
    opened.page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert opened.background() == "rgb(20, 23, 26)"
    assert opened.troubles == []


def test_a_hostile_run_is_shown_and_not_obeyed(browser: Any, tmp_path: Path) -> None:
    spans = [["compute", HOSTILE, 0.0, 0.3], ["gather", HOSTILE, 0.3, 0.5]]
    runs = [run(tmp_path / name, spans=spans, name=HOSTILE + name, device=HOSTILE) for name in ("a", "b")]
    opened = Opened(browser, tmp_path, render(runs))
    for chart in opened.page.query_selector_all(".chart"):  # tooltips are HTML
        chart.focus()
        for key in ("ArrowRight", "ArrowRight", "End"):
            opened.page.keyboard.press(key)
    assert opened.page.evaluate("window.hurt") is None
    assert opened.page.query_selector_all("img") == []
    assert HOSTILE in opened.page.inner_text("main")
    assert opened.troubles == []


def test_a_script_that_got_into_the_page_would_not_run(browser: Any, tmp_path: Path) -> None:
    text = render([run(tmp_path)]).replace("<main>", "<main><script>window.hurt = 1</script>")
    opened = Opened(browser, tmp_path, text)
    assert opened.page.evaluate("window.hurt") is None
    assert any("Content Security Policy" in trouble for trouble in opened.troubles)


def test_a_damaged_run_with_nan_is_a_page_with_gaps(browser: Any, tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write("run", **head())
    for step, loss in enumerate((5.0, math.nan, 4.0, math.inf, 3.0), 1):
        journal.write("step", step=step, loss=loss)
    with (tmp_path / "record.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')
    opened = Opened(browser, tmp_path, render([read(tmp_path)]))
    assert [value for _, value in opened.option("loss")["series"][0]["data"]] == [5.0, None, 4.0, None, 3.0]
    opened.page.focus("[data-chart='loss']")
    opened.page.keyboard.press("ArrowRight")
    opened.page.keyboard.press("ArrowRight")
    assert opened.page.text_content("#spoken") == "step 2: training not finite"
    assert opened.troubles == []
