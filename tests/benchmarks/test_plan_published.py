"""Published speeds beside the plan: a row for each, and a slower card is foreseen slower."""

from __future__ import annotations

import pytest

from benchmarks.plan_published import LLAMA_8B, PUBLISHED, limited, main
from zeroshard.plan.machine.profile import load
from zeroshard.plan.model.huggingface import Configuration, from_configuration


def test_every_published_run_has_a_row_and_limited_cards_have_one_more(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    rows = capsys.readouterr().out.splitlines()[2:]
    of_h100 = [run for run in PUBLISHED if run.machine == "h100"]
    assert len(rows) == len(PUBLISHED) + len(of_h100)
    speeds = [float(row.split("|")[5].split("/")[0].replace(",", "")) for row in rows]
    assert all(slow < 0.9 * fast for fast, slow in zip(speeds[: 2 * len(of_h100) : 2], speeds[1::2], strict=False))


def test_the_shapes_are_those_of_the_models() -> None:
    assert from_configuration(Configuration("llama", LLAMA_8B), "llama").parameters == 8_030_261_248


def test_a_limited_card_is_slower_in_products_and_in_memory() -> None:
    card, machine = load("h100").device, limited(load("h100")).device
    assert machine.bandwidth < 0.8 * card.bandwidth
    assert machine.efficiency < 0.9 * card.efficiency
