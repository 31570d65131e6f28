"""The page: it stands alone, says what the run says, and does nothing that a run's words want."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import zeroshard.report
from tests.report.runs import OFFLOADED_STEP, head, run, write
from zeroshard.report.journal import Journal, read
from zeroshard.report.page import MOST_RUNS, render

ROOM = Path(zeroshard.report.__file__).parent
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"
LIBRARY = "b66b25aeb4df84e33199dc21694014d336d222cbd9deb0e5a7c14bd6aa0d0fd0"
"""SHA-256 of echarts.min.js 6.1.0, as npm has it."""


class Elements(HTMLParser):
    """What elements a page has, and the text of its scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        (self.scripts if self.found and self.found[-1][0] == "script" else self.texts).append(data)


def chart_data(page: str) -> dict[str, Any]:
    """The data that the page's charts are drawn from."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


@pytest.fixture
def page(tmp_path: Path) -> str:
    return render([run(tmp_path, spans=OFFLOADED_STEP)])


def test_the_page_is_small_and_names_no_address_to_fetch(page: str) -> None:
    assert len(page.encode()) < 2_000_000
    for tag, attributes in Elements(page).found:
        assert tag not in ("link", "iframe", "object", "embed", "img", "base"), tag
        assert not {"src", "srcset", "onload", "onerror", "style"} & set(attributes), (tag, attributes)
        assert (attributes.get("href") or "#").startswith("#")


def test_the_policy_allows_the_pages_own_scripts_alone(page: str) -> None:
    elements = Elements(page)
    policy = next(a["content"] for tag, a in elements.found if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")
    run_scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in run_scripts]
    assert re.findall(r"'sha256-([^']+)'", policy) == hashes
    assert len(hashes) == 2


def test_the_same_runs_give_the_same_text(tmp_path: Path) -> None:
    write(tmp_path)
    assert render([read(tmp_path)]) == render([read(tmp_path)])


def test_charts_and_tables_have_the_runs_values(page: str) -> None:
    data = chart_data(page)
    assert set(data) == {"loss", "lr", "speed", "memory", "step", "lanes-0", "volume", "ranks"}
    loss, held_out = data["loss"]["series"]
    assert loss["points"] == [[step, 5 - 0.1 * step] for step in range(1, 11)]
    assert held_out["points"] == [[10, 4.5]]
    assert [point[1] for point in data["speed"]["series"][0]["points"]] == [2000.0] * 9 + [2000.0]
    memory = {series["kind"]: series["values"] for series in data["memory"]["series"]}
    assert data["memory"]["rows"] == ["measured", "planned, stage 2", "stage 0", "stage 1", "stage 3"]
    assert memory["optimizer_states"] == [6e6] * 5
    volume = {series["kind"]: series["values"] for series in data["volume"]["series"]}
    assert volume["all_gather"][0] + volume["reduce_scatter"][0] == volume["formula"][1] == volume["planned"][2] == 2.0
    step = {series["kind"]: series["values"][0] for series in data["step"]["series"]}
    assert data["step"]["rows"] == ["step 5", "planned"]
    assert sum(step.values()) == pytest.approx(0.6)
    assert data["step"]["series"][-1]["values"] == [0, 0.4]
    assert step["wait: host update"] == pytest.approx(0.205)
    text = " ".join(Elements(page).texts)
    for value in ("4.900 → 4.000", "4.9", "2,000", "6 MB", "205 ms", "2 Ψ"):
        assert value in text, value


def test_every_chart_has_a_title_a_sentence_and_a_table(page: str) -> None:
    figures = re.findall(r"<figure .*?</figure>", page, re.DOTALL)
    assert len(figures) == len(chart_data(page))
    for figure in figures:
        assert re.search(r"<h2 [^>]*>[^<]+</h2>", figure)
        assert re.search(r"<figcaption>[^<]{20,}</figcaption>", figure)
        assert re.search(r'class="chart"[^>]* tabindex="0" role="img" aria-label="[^"]+"', figure)
        assert re.search(r"<details>.*<tbody>.*<td>[^<]+</td>", figure, re.DOTALL)


def test_words_of_a_run_are_shown_and_not_obeyed(tmp_path: Path) -> None:
    spans = [["compute", HOSTILE, 0.0, 0.3], [HOSTILE, "x", 0.0, 0.1]]
    words = dict.fromkeys(("name", "device", "precision"), HOSTILE)
    found = run(tmp_path, spans=spans, **words)
    plan = [
        {
            "stage": 1,
            "offload": HOSTILE,
            "own": False,
            "fits": True,
            "at_step": {HOSTILE: 1},
            "peak": {},
            "host": 0,
            "volume": 0,
        }
    ]
    journal = Journal(tmp_path)
    journal.write("plan", rows=[*plan, {**plan[0], "own": True}])
    journal.write("volume", elements={HOSTILE: 1}, expected=1, formula=HOSTILE)
    journal.write("end", reason=HOSTILE)
    page = render([found, read(tmp_path)])
    ours = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)  # the library has such words in its strings
    assert "<img" not in ours
    assert "alert(1)" in ours
    assert page.count("</script") == 3
    assert [attributes for tag, attributes in Elements(page).found if tag == "script"] == [
        {"type": "application/json", "id": "data"},
        {},
        {},
    ]
    assert HOSTILE in " ".join(Elements(page).texts)  # shown as the text that it is


def test_losses_that_are_not_finite_are_gaps(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write("run", **head())
    for step, loss in enumerate((5.0, math.nan, math.inf, 4.0), 1):
        journal.write("step", step=step, loss=loss, lr=math.nan)
    page = render([read(tmp_path)])
    assert chart_data(page)["loss"]["series"][0]["points"] == [[1, 5.0], [2, None], [3, None], [4, 4.0]]
    assert "Losses that are NaN or infinite are gaps" in page


def test_a_run_without_steps_and_one_with_damage_say_so(tmp_path: Path) -> None:
    (tmp_path / "record.jsonl").write_text('{"kind": "run", "format": 1, "after": 0}\n{"kind": "st\n')
    page = render([read(tmp_path)])
    assert chart_data(page) == {}
    assert "The record has no steps." in page
    assert "1 line(s) of the record could not be read and are left out." in page
    assert "The record has no end: the run goes on, or it was killed." in page


def test_a_long_run_is_thinned_and_stays_a_small_page(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write("run", **head())
    for step in range(1, 20_001):
        journal.write("step", step=step, seconds=0.5, loss=float(step), lr=1.0, tokens=10)
    page = render([read(tmp_path)])
    points = chart_data(page)["loss"]["series"][0]["points"]
    assert len(points) <= 1200
    assert points[0] == [17, 9.0]  # the mean of the first 17
    assert points[-1][0] == 20_000
    assert len(page.encode()) < 1_500_000


def test_runs_stand_side_by_side_under_names_that_differ(tmp_path: Path) -> None:
    runs = [run(tmp_path / name, steps=steps) for name, steps in (("a", 5), ("b", 8))]
    page = render(runs)
    assert "<h1>2 runs side by side</h1>" in page
    data = chart_data(page)
    assert [series["name"] for series in data["loss"]["series"]] == ["a", "b", "a · held out", "b · held out"]
    assert [len(series["points"]) for series in data["loss"]["series"]] == [5, 8, 1, 1]
    assert data["memory"]["rows"][0] == "a · measured"
    assert len(set(data["memory"]["rows"])) == 10


def test_no_runs_and_too_many_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a report shows 1 to 8 runs side by side, not 0"):
        render([])
    with pytest.raises(ValueError, match="not 9"):
        render([run(tmp_path)] * (MOST_RUNS + 1))


def test_the_library_is_the_published_file_and_its_licence_is_beside_it() -> None:
    assert hashlib.sha256((ROOM / "library/echarts.min.js").read_bytes()).hexdigest() == LIBRARY
    assert "Apache License" in (ROOM / "library/LICENSE").read_text()
    assert "Apache ECharts" in (ROOM / "library/NOTICE").read_text()
    assert "Bostock" in (ROOM / "library/LICENSE-d3").read_text()


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed, and it checks the script's syntax")
def test_the_script_is_javascript() -> None:
    done = subprocess.run(["node", "--check", str(ROOM / "page.js")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "changes",
    [
        {"batch": "inf", "offload": {}},
        {"batch": "nan", "offload": {}},
        {"batch": 1.7e308, "offload": {}},
        {"padded": 1e-320},
        {"padded": "nan", "parameters": "inf", "ranks": "inf", "stage": "nan", "micro_batches": "inf"},
    ],
    ids=str,
)
def test_odd_numbers_of_a_run_make_no_error(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert "<html" in render([run(tmp_path, spans=OFFLOADED_STEP, **changes)])


def test_numbers_whose_sum_is_infinite_make_no_error(tmp_path: Path) -> None:
    folder = write(tmp_path)
    journal = Journal(folder)
    for step in range(11, 5000):  # so many that each point is a mean
        journal.write("step", step=step, seconds=1e-300, loss=1.7e308, lr=1.7e308, tokens=1.7e308)
    journal.write("memory", step=2, device={"parameters": 1.7e308, "gradients": 1.7e308}, host={})
    journal.close()
    assert "<html" in render([read(folder)])


def test_many_evaluations_are_a_small_page(tmp_path: Path) -> None:
    folder = write(tmp_path)
    alone = len(render([read(folder)]))
    journal = Journal(folder)
    for step in range(11, 20_000):
        journal.write("evaluation", step=step, loss=2.123456789)
    journal.close()
    assert len(render([read(folder)])) < alone + 60_000
