"""The pictures of the README are what their scripts make of the data, and can be read."""

from __future__ import annotations

import json
import re
import tomllib
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import offload_step
from docs.pictures import data, draw, speed, step, svg

SVG = "{http://www.w3.org/2000/svg}"
README = (data.ROOT / "README.md").read_text()


def event(track: int, name: str, start: float, stop: float) -> dict[str, object]:
    return {"ph": "X", "pid": 0, "tid": track, "name": name, "ts": start, "dur": stop - start}


def trace_of(*events: dict[str, object]) -> dict[str, list[dict[str, object]]]:
    tracks = enumerate(("compute", "host update", "something new"))
    return {"traceEvents": [{"ph": "M", "tid": number, "args": {"name": name}} for number, name in tracks] + [*events]}


STEPS = trace_of(
    event(0, "forward (root)", 1000, 2000),
    event(0, "loss of GPT", 2000, 2500),
    event(0, "backward blocks.0", 2500, 3000),
    event(0, "forward blocks.0", 3000, 3500),  # recomputed
    event(0, "backward (root)", 3500, 4000),
    event(1, "blocks.0", 900, 1100),  # of the step before
    event(1, "blocks.0", 4100, 5500),  # goes on into the next forward
    event(2, "blocks.0", 5100, 5200),  # wholly of the next step
    event(0, "forward (root)", 5000, 6000),
    event(0, "loss of GPT", 6000, 6500),
    event(0, "backward (root)", 6500, 7000),
)


@pytest.mark.parametrize("name", draw.PICTURES)
def test_a_picture_in_the_repository_is_what_its_script_draws_from_its_data(name: str) -> None:
    assert (data.HERE / f"{name}.svg").read_text() == str(draw.PICTURES[name]())


@pytest.mark.parametrize("name", draw.PICTURES)
def test_a_picture_stays_inside_its_frame_and_says_what_it_shows(name: str) -> None:
    root = ElementTree.fromstring(str(draw.PICTURES[name]()))
    height = float(root.attrib["height"])
    for rectangle in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(rectangle.get(key, 0)) for key in ("x", "y", "width", "height"))
        assert min(x, y, w) >= 0
        assert x + w <= svg.WIDTH
        assert y + h <= height
    for text in root.iter(f"{SVG}text"):
        size = float(text.attrib["font-size"])
        assert size >= 12
        assert float(text.attrib["y"]) <= height - 0.3 * size
        width = len(text.text or "") * size * svg.LETTER
        left = float(text.attrib["x"]) - {"start": 0, "middle": width / 2, "end": width}[text.attrib["text-anchor"]]
        assert left >= 0
        assert left + width <= svg.WIDTH
    description = root.findtext(f"{SVG}desc")
    about, _ = data.read(name)
    assert root.findtext(f"{SVG}title")
    assert description is not None
    assert about.commit in description
    assert re.search(r"\d (GB|s)\b|\d%", description), "the numbers are for those who hear the picture too"


@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
def test_colours_are_told_from_the_page_and_from_each_other_without_their_hue(mode: int) -> None:
    bright = {name: luminance(colours[mode]) for name, colours in svg.COLOURS.items()}

    def contrast(one: str, other: str) -> float:
        low, high = sorted((bright[one], bright[other]))
        return (high + 0.05) / (low + 0.05)

    assert contrast("ink", "page") > 7
    assert contrast("quiet", "page") > 4.5
    for colour in ("blue", "pale", "orange", "green", "grey"):
        assert contrast(colour, "page") > 1.8
    for one, other in [*pairwise(("green", "orange", "blue")), ("pale", "blue")]:  # they touch in a picture
        assert contrast(one, other) > 1.25


def luminance(colour: str) -> float:
    """Of a colour as `#rrggbb`: relative, as the accessibility guidelines define it."""
    channels = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_measured_states_are_those_of_the_paper() -> None:
    _, content = data.read("memory")
    claims = tomllib.loads((data.ROOT / "zeroshard/plan/papers/claims.toml").read_text())["claims"]
    printed = next(claim["printed"] for claim in claims if claim["source"] == "ZeRO, figure 1")
    assert [row["paper_gb"] for row in content["rows"]] == printed
    for row in content["rows"]:
        assert row["dryrun"]["at_step"]["model_states"] / 1e9 == pytest.approx(row["paper_gb"], rel=0.015)


def test_a_step_is_from_forward_to_forward_whatever_is_recomputed_in_it() -> None:
    assert step.beginnings(step.phases_of(STEPS)) == [1000, 5000]
    assert step.one_step(STEPS) == {
        "milliseconds": 4.0,
        "tracks": {
            "host update": [[0.0, 0.1, "host update"], [3.1, 4.0, "host update"]],
            "compute": [
                [0.0, 1.0, "forward"],
                [1.0, 1.5, "loss"],
                [1.5, 2.0, "backward"],
                [2.0, 2.5, "forward"],
                [2.5, 3.0, "backward"],
            ],
        },
    }


def test_a_trace_without_a_whole_step_is_refused() -> None:
    short = {"traceEvents": STEPS["traceEvents"][:9]}
    with pytest.raises(ValueError, match="holds 1 forwards; it takes two"):
        step.one_step(short)


def test_data_that_do_not_say_where_they_come_from_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "DATA", tmp_path)
    data.write("speed", data.About("command", "machine", "abc1234"), {"results": [1]})
    assert data.read("speed")[1]["results"] == [1]
    content = json.loads((tmp_path / "speed.json").read_text())
    content["about"]["commit"] = None  # as the benchmark writes it where git is missing
    (tmp_path / "speed.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r'speed.json: add commit to its "about"'):
        data.read("speed")


def test_the_benchmark_measures_what_the_picture_names() -> None:
    assert set(speed.NAMES) == {"plain", *offload_step.VARIANTS}
    assert set(speed.PEERS) == {variant.name for variant in offload_step.PEERS_OF_OFFLOAD}
    _, content = data.read("speed")
    assert {result["name"] for result in content["results"]} <= set(speed.order())


def test_a_peer_that_could_not_run_is_named_in_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about, content = data.read("speed")
    name = "DeepSpeed ZeRO-2, CPU offload"
    results = [result for result in content["results"] if result["name"] != name]
    monkeypatch.setattr(data, "DATA", tmp_path)
    data.write("speed", about, {"model": content["model"], "results": results, "left out": {name: "left out: no"}})
    assert f"Could not run there: {name}." in str(speed.picture())
    data.write("speed", about, {"results": results, "left out": {}})
    with pytest.raises(ValueError, match='add "model"'):
        speed.picture()


def test_the_readme_shows_every_picture_with_words_in_its_place() -> None:
    for name in draw.PICTURES:
        assert re.search(rf"!\[[^\]]{{20,}}\]\(docs/pictures/{name}\.svg\)", README), name
