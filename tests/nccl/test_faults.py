"""A rank that breaks ends all ranks in time, with an error that names it: over NCCL. A restart goes on where it was."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.comm.faults import Case, End, assert_ended_well, run
from tests.nccl.processes import device
from tests.storage.killing import Torchrun, kill_often, weights_of

AT_ONCE = max(1, min(4, (os.cpu_count() or 1) // 2))
"""How many programs run at once. They import, or wait for a rank that does not come. Ranks take turns on the device."""

PLACES = ("forward", "backward", "step", "save")
CASES = [
    *(Case("stop", place, rank=0, stage=3) for place in PLACES),
    *(Case("kill", place, rank=1, stage=3) for place in PLACES),
    *(Case("raise", place, rank=1, stage=2) for place in PLACES),
    Case("stop", "step", rank=1, stage=2),
    Case("kill", "backward", rank=0, stage=1),
    # The host waits for the device, which waits for a rank that does not come.
    Case("stop", "forward", rank=1, stage=3, reads_loss=True),
    Case("kill", "step", rank=1, stage=2, reads_loss=True),
    Case("stop", "backward", rank=0, stage=2, reads_loss=True),
    Case("stop", "step", rank=1, stage=2, offload=True),
    Case("stop", "forward", rank=2, stage=3, world=4),
    Case("exhaust", "forward", rank=1, stage=3),
    Case("exhaust", "backward", rank=0, stage=2),
    Case("disagree", "forward", rank=1, stage=3),
]


@pytest.fixture(scope="module")
def ends(request: pytest.FixtureRequest) -> Iterator[Callable[[Case], dict[int, End]]]:
    """Starts all programs that tests ask for, some at a time. Returns how the ranks of one of them ended."""
    pool = ThreadPoolExecutor(AT_ONCE)
    asked = [item.callspec.params["case"] for item in request.session.items if "ends" in item.fixturenames]
    started: dict[Case, Future[dict[int, End]]] = {case: pool.submit(run, case.on(device().type)) for case in asked}
    yield lambda case: started[case].result()
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_rank_that_breaks_ends_all_ranks_in_time_and_is_named(
    case: Case, ends: Callable[[Case], dict[int, End]]
) -> None:
    if case.fault == "exhaust" and device().type == "cpu":
        pytest.skip("needs a CUDA GPU: it is about the device's memory")
    assert_ended_well(case, ends(case))


OWN_HOST = """
import os
if "RANK" in os.environ:
    os.environ["NCCL_HOSTID"] = os.environ["RANK"]
    import torch
    torch.use_deterministic_algorithms(True, warn_only=True)
"""
"""What the ranks of one launcher do first: NCCL takes each for a host of its own, and two runs give the same bits."""


def test_a_job_whose_ranks_are_killed_restarts_and_ends_with_the_bits_of_an_unbroken_one(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(OWN_HOST)
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    variables = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
    variables |= {
        "NCCL_MAX_NCHANNELS": "1",
        "CUDA_VISIBLE_DEVICES": "0",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "OMP_NUM_THREADS": "1",
    }
    environment = os.environ | variables | {"PYTHONPATH": path}
    where = ["--device", device().type, "--stage", "3"]
    where += ["--set", "shard.stall_timeout=8", "--set", "train.steps=64"]  # ranks that take turns are slow
    whole = Torchrun(tmp_path / "whole", 0, *where, environment=environment)
    kill_often(tmp_path / "killed", 2, 1, *where, environment=environment)
    whole.end()
    assert weights_of(tmp_path / "killed") == weights_of(tmp_path / "whole")
