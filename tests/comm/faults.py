"""A training program in which one rank breaks at a chosen place, and what the other ranks then say.

    python -m tests.comm.faults '{"fault": "stop", "place": "forward", "rank": 0, ...}'

runs one rank of it. ``run`` starts all ranks, waits until every rank but the broken one has ended, and tells how.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, NamedTuple

from tests.nccl.processes import start

STALL_TIMEOUT = 5.0
GRACE = 10.0
"""Seconds in which a rank says what it knows, after ``stall_timeout``, and its process ends."""
START = 100.0
"""Seconds until the rank must have broken."""
HANG = STALL_TIMEOUT + 4.0
"""Seconds that a rank hangs: until the others have found it missing."""
OWN_ERRORS = {"raise": "BrokenError", "exhaust": "OutOfMemoryError"}
"""What the rank that breaks raises."""
PRINTED = "printed"
"""The file with what all ranks print. NCCL's errors have many lines."""
BREAKING_STEP = 3
STEPS = 6


@dataclass(frozen=True)
class Case:
    """What breaks, where and on which rank."""

    fault: str
    """kill, stop, raise, exhaust (memory), hang (for a while) or disagree."""
    place: str
    """forward, backward, step or save."""
    rank: int = 1
    stage: int = 3
    world: int = 2
    device: str = "cpu"
    offload: bool = False
    reads_loss: bool = False
    """Whether the loop reads the loss in every step, and so waits for the device there."""
    launcher: bool = False
    """Whether torchrun's agent, which has the store, is stopped too. CPU only."""

    def on(self, device: str) -> Case:
        """The same on another device."""
        return replace(self, device=device)

    def __str__(self) -> str:
        extras = [name for name in ("offload", "reads_loss", "launcher") if getattr(self, name)]
        return "-".join([self.fault, self.place, f"rank{self.rank}of{self.world}", f"stage{self.stage}", *extras])


class End(NamedTuple):
    """How one rank ended."""

    seconds: float
    """After the fault, until the process was gone."""
    code: int
    kind: str
    """The name of the exception."""
    text: str


def run(case: Case) -> dict[int, End]:
    """Runs the program. Returns how each rank ended, but for a rank that was killed or stopped."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.comm.faults", json.dumps(asdict(case)), folder]
        begin = _under_torchrun if case.launcher else start
        with Path(folder, PRINTED).open("w") as printed:
            processes = begin(command, case.world, printed)
        try:
            return _watch(case, Path(folder), processes)
        finally:
            for process in processes:
                process.kill()
            for pid in Path(folder).glob("pid-*"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid.read_text()), signal.SIGKILL)
            for process in processes:
                process.wait()


def _under_torchrun(command: list[str], world: int, printed: IO[str]) -> list[subprocess.Popen[str]]:
    torchrun = [command[0], "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", "--no-python"]
    return [subprocess.Popen([*torchrun, *command], text=True, stdout=printed, stderr=subprocess.STDOUT)]


def _watch(case: Case, folder: Path, processes: list[subprocess.Popen[str]]) -> dict[int, End]:
    lasting = case.fault in ("kill", "stop")  # such a rank cannot tell how it ended
    expected = [rank for rank in range(case.world) if not (lasting and rank == case.rank)]
    broken = folder / "broken"
    everybody = [process.pid for process in processes]
    _wait(broken.exists, START, lambda: f"the rank did not break\n{_stacks(folder, everybody)}")
    since = float(broken.read_text())
    if case.launcher:
        processes[0].send_signal(signal.SIGSTOP)
    pids = {rank: int((folder / f"pid-{rank}").read_text()) for rank in expected}
    ended: dict[int, float] = {}

    def all_ended() -> bool:
        for rank, pid in pids.items():
            if rank not in ended and _is_gone(pid):
                ended[rank] = time.time() - since
        return len(ended) == len(pids)

    late = STALL_TIMEOUT + GRACE

    def why() -> str:
        stacks = _stacks(folder, [pid for rank, pid in pids.items() if rank not in ended])
        return f"ranks {set(pids) - set(ended)} have not ended in {late} s\n{stacks}"

    _wait(all_ended, since + late - time.time(), why)
    found = {}
    for rank in expected:
        told = json.loads((folder / f"end-{rank}").read_text())
        code = 1 if case.launcher else processes[rank].wait()
        found[rank] = End(ended[rank], code, told["kind"], told["text"])
    return found


def _stacks(folder: Path, pids: list[int]) -> str:
    """Where ranks are, and what all have printed."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    time.sleep(1.0)
    return (folder / PRINTED).read_text()


def _is_gone(pid: int) -> bool:
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def _wait(true: Callable[[], bool], seconds: float, why: Callable[[], str]) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, why()
        time.sleep(0.05)


# -- one rank ---------------------------------------------------------------------------------------------------------


class BrokenError(RuntimeError):
    """What a rank raises that is to raise."""


def break_here(case: Case, folder: Path) -> None:
    """Breaks this rank."""
    import torch

    Path(folder, "new").write_text(str(time.time()))
    Path(folder, "new").rename(folder / "broken")
    if case.fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif case.fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif case.fault == "hang":
        time.sleep(HANG)
    elif case.fault == "raise":
        raise BrokenError("on purpose")
    elif case.fault == "exhaust":
        torch.cuda.set_per_process_memory_fraction(0.01)
        torch.empty(2**35, dtype=torch.uint8, device="cuda")


@contextlib.contextmanager
def breaking(case: Case, folder: Path, model: Any) -> Iterator[None]:
    """Inside, the pass through the chosen place breaks this rank."""
    import pytest

    from zeroshard.optim.treatment import Treatment
    from zeroshard.storage import save

    def broken(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            break_here(case, folder)
            return original(*args, **kwargs)

        return call

    def hook(module: Any, args: Any, output: Any) -> None:
        if case.place == "forward":
            break_here(case, folder)
        else:
            output.register_hook(lambda gradient: break_here(case, folder))

    with pytest.MonkeyPatch.context() as patch:
        if case.place in ("forward", "backward"):
            handle = model.blocks[1].register_forward_hook(hook)
            yield
            handle.remove()
            return
        target, name = (Treatment, "apply") if case.place == "step" else (save, "collect")
        patch.setattr(target, name, broken(getattr(target, name)))
        yield


def train(case: Case, folder: Path) -> None:
    import torch

    import zeroshard
    from tests.models import batch, net

    model: Any = net(width=64, depth=4)
    rank = int(os.environ["RANK"])
    offload = {"offload": "cpu"} if case.offload else {}
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = zeroshard.shard(
        model,
        optimizer,
        stage=case.stage,
        device=case.device,
        stall_timeout=STALL_TIMEOUT,
        clip_grad_norm=1.0,
        **offload,
    )
    for step in range(1, STEPS + 1):
        breaks = step == BREAKING_STEP and rank == case.rank
        with breaking(case, folder, model) if breaks else contextlib.nullcontext():
            loss = model(batch(step).to(case.device)).square().mean()
            if case.fault == "disagree" and breaks:
                break_here(case, folder)
                loss = model(batch(step).to(case.device)).square().mean() + loss
            if case.reads_loss:
                loss.item()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            zeroshard.save(folder / f"step-{step}", model, optimizer) if case.place == "save" else None


def main() -> None:
    case, folder = Case(**json.loads(sys.argv[1])), Path(sys.argv[2])
    rank = int(os.environ["RANK"])
    faulthandler.register(signal.SIGUSR1)
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    kind, text = "none", ""
    try:
        train(case, folder)
    except BaseException as error:
        kind, text = type(error).__name__, str(error)
        raise
    finally:
        (folder / f"end-{rank}").write_text(json.dumps({"kind": kind, "text": text}))


def assert_ended_well(case: Case, ends: dict[int, End]) -> None:
    """Every rank ended with an error, which names the rank that broke if it is not that rank's own."""
    for rank, end in ends.items():
        print(f"{case}: rank {rank} ended after {end.seconds:.1f} s with {end.code}: {end.kind}: {end.text}")
    for rank, end in ends.items():
        assert end.code > 0, f"rank {rank} ended with {end.code}"  # below zero: by a signal
        if rank == case.rank and case.fault in OWN_ERRORS:
            assert end.kind == OWN_ERRORS[case.fault]
        elif case.launcher:
            assert "has the store of the process group, does not answer" in end.text
        else:
            assert end.kind in ("StallError", "DisagreementError", "CheckpointError"), end
            assert re.search(rf"\brank {case.rank}(,| has| is| failed|:)", end.text), end.text
            if end.kind == "StallError" and case.fault != "disagree":
                missing = re.findall(r"; rank (\d+)(?: is alive| has died|, which has the store)", end.text)
                assert {*missing} <= {str(case.rank)}, f"rank {rank} misses another rank: {end.text}"


if __name__ == "__main__":
    main()
