"""Loops of the corpus on two NCCL ranks that share a GPU give what DDP gives."""

from __future__ import annotations

import traceback

import torch.distributed as dist

from tests.loops.harness import Setting, assert_equal, run
from tests.loops.table import LOOPS
from tests.nccl.processes import device, on_nccl

TOLERANCE = 1e-4
"""Relative distance from DDP. The GPU's kernels may add in no fixed order, and Adam enlarges small differences."""
GRADIENTS = ["nanogpt", "clip_by_value", "log_gradient_norms", "gradient_noise", "scale_gradients", "grad_scaler"]
WEIGHTS = ["log_weights", "ema_by_hand", "averaged_model", "wgan", "early_stopping", "l2_term", "forward_hooks"]
PASSES = ["sam", "gradient_penalty", "double_backward", "gan", "several_heads", "functional", "recompute"]


def give_what_ddp_gives(names: list[str], *settings: Setting) -> None:
    with device():  # loops make their tensors without naming one
        failed = _different(names, settings)
    assert not failed, "\n".join(failed)


def _different(names: list[str], settings: tuple[Setting, ...]) -> list[str]:
    failed = []
    for loop in map(LOOPS.__getitem__, names):
        expected = run(loop, None)
        for setting in settings:
            problem = ""
            try:
                assert_equal(run(loop, setting, line=loop.refusal(setting) is not None), expected, TOLERANCE)
            except Exception:
                problem = traceback.format_exc(limit=-5)
            problems = ["", ""]
            dist.all_gather_object(problems, problem)
            failed += [f"{loop.name} in {setting}: {each}" for each in problems if each][:1]
    return failed


@on_nccl(2)
def test_loops_that_look_at_gradients() -> None:
    give_what_ddp_gives(GRADIENTS, Setting(2, offload=True), Setting(3, offload=False))


@on_nccl(2)
def test_loops_that_look_at_weights() -> None:
    give_what_ddp_gives(WEIGHTS, Setting(1, offload=False), Setting(3, offload=True))


@on_nccl(2)
def test_loops_with_unusual_passes() -> None:
    give_what_ddp_gives(PASSES, Setting(2, offload=False), Setting(3, offload=False))
