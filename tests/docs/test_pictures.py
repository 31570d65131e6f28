"""The pictures of the explanation are what their script draws, and stay inside their frames."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from docs.pictures import explain, svg
from docs.pictures.data import HERE

SVG = "{http://www.w3.org/2000/svg}"
each = pytest.mark.parametrize("name", explain.PICTURES)


@each
def test_a_picture_is_what_its_script_draws(name: str) -> None:
    assert (HERE / f"{name}.svg").read_text() == str(explain.PICTURES[name]()), "run python -m docs.pictures.explain"


@each
def test_a_picture_stays_inside_its_frame(name: str) -> None:
    root = ElementTree.fromstring(str(explain.PICTURES[name]()))
    for text in root.iter(f"{SVG}text"):
        width = len(text.text or "") * float(text.attrib["font-size"]) * svg.LETTER
        left = float(text.attrib["x"]) - {"start": 0, "middle": width / 2, "end": width}[text.attrib["text-anchor"]]
        assert left >= 0
        assert left + width <= svg.WIDTH, text.text
    for box in root.iter(f"{SVG}rect"):
        x, y, width, height = (float(box.get(key, 0)) for key in ("x", "y", "width", "height"))
        assert x + width <= svg.WIDTH
        assert y + height <= float(root.attrib["height"])


def test_the_next_forward_waits_for_each_unit_alone() -> None:
    lanes = explain.offloaded_step()
    published = {name: stop for _, stop, name in lanes["to the device"]}
    last_backward = max(stop for _, stop, name in lanes["GPU"] if name.startswith("B"))
    second = [(start, name) for start, _, name in lanes["GPU"] if name.startswith("F") and start >= last_backward]
    assert [name for _, name in second] == ["F1", "F2", "F3", "F4"]
    for start, name in second:
        assert start >= published[name.replace("F", "p")]
    assert second[0][0] < lanes["host update"][-1][1], "the first unit does not wait for the last update"
