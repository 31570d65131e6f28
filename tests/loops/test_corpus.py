"""Every loop of the corpus gives what DDP gives, in every stage and with offload, or is refused as its table says."""

from __future__ import annotations

from tests.loops.harness import SETTINGS, Setting, check
from tests.loops.table import LOOPS
from tests.matrix import matrix
from tests.ranks import on_ranks


@matrix(name=LOOPS, setting=SETTINGS)
@on_ranks(2)
def test_a_loop_gives_what_ddp_gives_or_the_refusal_that_is_listed(name: str, setting: Setting) -> None:
    check(LOOPS[name], setting)
