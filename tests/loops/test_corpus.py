"""Every loop of the corpus gives what DDP gives, in every stage and with offload, or is refused as its table says."""

from __future__ import annotations

from typing import Any

import pytest

from tests.loops.harness import SETTINGS, Setting, check
from tests.loops.table import LOOPS
from tests.ranks import on_ranks

TURNS = (Setting(3, False), Setting(2, True), Setting(3, True), Setting(1, False), Setting(3, False), Setting(0, True))


def cases() -> list[Any]:
    """Every loop in every setting. ``make test`` runs each in one setting, in turns."""
    found = []
    for number, loop in enumerate(LOOPS.values()):
        chosen = () if loop.slow else (TURNS[number % len(TURNS)],)
        for setting in SETTINGS:
            marks = () if setting in chosen else (pytest.mark.slow,)
            found.append(pytest.param(loop.name, setting, marks=marks, id=f"{loop.name} in {setting}"))
    return found


@pytest.mark.parametrize(("name", "setting"), cases())
@on_ranks(2)
def test_a_loop_gives_what_ddp_gives_or_the_refusal_that_is_listed(name: str, setting: Setting) -> None:
    check(LOOPS[name], setting)
