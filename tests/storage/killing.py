"""A training run under torchrun whose ranks are killed, one at a time, at random moments.

python -m tests.storage.killing --kills 30     # what `make soak` runs
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

STEPS, EVERY = 120, 8
JOB = [
    "-m", "zeroshard", "train", "tiny", "--device", "cpu", "--resume", "auto", "--save-every", str(EVERY),
    "--set", f"train.steps={STEPS}", "--set", "train.evaluate_every=1000000", "--set", "train.report_every=1000000",
    "--set", "train.sample=0",
]  # fmt: skip
BEGUN = ("resumed after step", "held-out loss")
LONGEST_WAIT = 120.0
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}  # so that runs can be compared bit by bit, whatever the cores


class Torchrun:
    """A job under torchrun, and what it prints."""

    def __init__(
        self,
        out: Path,
        restarts: int,
        *arguments: str,
        ranks: int = 2,
        environment: Mapping[str, str] = ENVIRONMENT,
    ) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += [f"--max-restarts={restarts}", "--monitor-interval=0.05", *JOB, "--out", str(out), *arguments]
        self.lines: list[str] = []
        self.begun = threading.Semaphore(0)
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.rstrip())
            if line.startswith(BEGUN):
                self.begun.release()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def kill_rank(self, chance: random.Random) -> bool:
        """Kills one rank; False if there is none left."""
        ranks = [p for p in psutil.Process(self._process.pid).children() if "zeroshard" in " ".join(p.cmdline())]
        if not ranks:
            return False
        chance.choice(ranks).send_signal(signal.SIGKILL)
        return True

    def end(self) -> str:
        """Waits for it; everything it printed."""
        code = self._process.wait(timeout=300)
        self._reader.join()
        text = "\n".join(self.lines)
        assert code == 0, text
        return text


def weights_of(out: Path) -> bytes:
    return (out / "model.safetensors").read_bytes()


def newest(out: Path) -> int:
    """The step of the newest checkpoint."""
    steps = [int(entry.name.removeprefix("step-")) for entry in (out / "checkpoints").glob("step-*")]
    return max(steps, default=0)


def reached(run: Torchrun, out: Path, step: int) -> bool:
    return newest(out) >= step or not run.running


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONGEST_WAIT
    while not true() and time.monotonic() < deadline:
        time.sleep(0.0005)


def kill_often(out: Path, kills: int, seed: int, *arguments: str, environment: Mapping[str, str] = ENVIRONMENT) -> str:
    """Runs the job to its end although a rank is killed so many times; returns what it printed."""
    chance = random.Random(seed)
    run = Torchrun(out, kills, *arguments, environment=environment)
    done = 0
    while done < kills:
        assert run.begun.acquire(timeout=LONGEST_WAIT), "\n".join(run.lines)
        # So many checkpoints later, whatever the machine's speed; the first kill leaves one to resume from.
        more = chance.randint(0, 2) if done else 1
        wait_until(functools.partial(reached, run, out, newest(out) + more * EVERY))
        if done % 2:  # in a save
            wait_until(lambda: any((out / "checkpoints").glob(".*.partial")) or not run.running)
            time.sleep(chance.uniform(0, 0.01))
        else:
            time.sleep(chance.uniform(0, 0.2))
        assert run.running, "the run ended before it was killed often enough"
        done += run.kill_rank(chance)
    return run.end()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    asked = parser.parse_args()
    print(f"seed {asked.seed}")
    longer = ["--set", f"train.steps={max(STEPS, 25 * asked.kills)}"]
    with tempfile.TemporaryDirectory() as folder:
        Torchrun(Path(folder, "whole"), 0, *longer).end()
        told = kill_often(Path(folder, "killed"), asked.kills, asked.seed, *longer)
        print("\n".join(line for line in told.splitlines() if line.startswith(("resumed", "zeroshard:"))))
        same = weights_of(Path(folder, "whole")) == weights_of(Path(folder, "killed"))
    print(f"killed {asked.kills} times; the final weights are {'the same' if same else 'NOT THE SAME'}, bit by bit")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
