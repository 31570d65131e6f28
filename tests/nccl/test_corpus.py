"""The corpus of loops on two NCCL ranks that share a GPU gives what DDP gives."""

from __future__ import annotations

import traceback

import torch
import torch.distributed as dist

from tests.loops.harness import Setting, assert_equal, run
from tests.loops.table import LOOPS
from tests.nccl.processes import on_nccl

TOLERANCE = 1e-4
"""Relative distance from DDP. The GPU's kernels may add in no fixed order, and Adam enlarges small differences."""
SETTINGS = [Setting(1, False), Setting(2, True), Setting(3, False), Setting(3, True)]
LEFT_OUT = ("profiler", "anomaly_mode", "compile_model", "compile_blocks", "trainer", "accelerate", "lightning")
"""Loops around libraries and compilers, which take long and show nothing about a GPU."""


@on_nccl(2)
def test_the_loops_of_the_corpus_give_what_ddp_gives() -> None:
    torch.set_default_device("cuda")
    failed = []
    for loop in LOOPS.values():
        if loop.name in LEFT_OUT:
            continue
        expected = run(loop, None)
        for setting in SETTINGS:
            refusal = loop.refusal(setting)
            if refusal is not None and refusal.line is None:
                continue
            problem = ""
            try:
                assert_equal(run(loop, setting, line=refusal is not None), expected, TOLERANCE)
            except Exception:
                problem = traceback.format_exc(limit=-5)
            problems = ["", ""]
            dist.all_gather_object(problems, problem)
            failed += [f"{loop.name} in {setting}: {each}" for each in problems if each][:1]
    assert not failed, "\n".join(failed)
