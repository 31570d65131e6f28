"""Runs cases in a child process, with limits on the time and the memory of each.

The child says which case it begins, so that a case that kills or hangs the child is known.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any, NamedTuple

SECONDS = 20
"""How long one case may take. Good files take well under a second, on a machine that has nothing else to do."""
START_SECONDS = 120
MEGABYTES = 400
"""How much memory one case may use beyond what the process had."""
LINE, LINES = 600, 20
"""How long a message may be."""
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")


class Failure(NamedTuple):
    """A case that did not end as it must."""

    subject: str
    seed: int
    what: str


def run(subjects: Sequence[str], seeds: Sequence[int]) -> tuple[Counter[str], list[Failure]]:
    """Runs one case for each seed, the subjects in turn. Returns how many cases ended how, and the failures."""
    cases = [(subjects[number % len(subjects)], seed) for number, seed in enumerate(seeds)]
    counts: Counter[str] = Counter()
    failures: list[Failure] = []
    while cases:
        done = 0
        for subject, seed, outcome, what in _in_child(cases):
            done += 1
            counts[f"{subject}: {outcome}"] += 1
            if outcome == "failed":
                failures.append(Failure(subject, seed, what))
        cases = cases[done:]
    return counts, failures


def _in_child(cases: Sequence[tuple[str, int]]) -> Iterator[tuple[str, int, str, str]]:
    """The outcomes of cases, until all are done or one has ended the child."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_serve, args=(list(cases), theirs), daemon=True)
    child.start()
    theirs.close()
    try:
        patience: float = START_SECONDS
        for subject, seed in cases:
            try:
                if not ours.poll(patience + SECONDS):  # the alarm comes first, unless it cannot
                    yield subject, seed, "failed", f"did not end in {SECONDS} s"
                    return
                yield subject, seed, *ours.recv()
            except EOFError:
                child.join(5)
                yield subject, seed, "failed", f"ended the process with {child.exitcode}"
                return
            patience = SECONDS
    finally:
        child.kill()
        child.join()


class _Late(BaseException):
    """A case takes too long."""


def _serve(cases: Sequence[tuple[str, int]], connection: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    from tests.fuzz.subjects import SUBJECTS

    good: dict[str, Path] = {}
    with tempfile.TemporaryDirectory() as root:
        for name in dict.fromkeys(subject for subject, _ in cases):
            good[name] = Path(root, name.replace(" ", "-"))
            good[name].mkdir()
            SUBJECTS[name].make(good[name])
            untouched = next(iter(sorted(path for path in good[name].rglob("*") if path.is_file())))
            assert SUBJECTS[name].read(_copied(good[name]), untouched) is None, f"the good files of {name} are refused"
        signal.signal(signal.SIGALRM, _raise_late)
        for subject, seed in cases:
            connection.send(_outcome(SUBJECTS[subject], good[subject], seed))


def _copied(good: Path) -> Path:
    copy = good.parent / "case"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(good, copy)
    return copy


def _outcome(subject: Any, good: Path, seed: int) -> tuple[str, str]:
    folder, chance = _copied(good), Random(seed)
    file = subject.change(folder, chance)
    for _ in range(chance.choice([0, 0, 0, 1, 2])):
        try:
            file = subject.change(folder, chance)
        except (ValueError, IndexError, RecursionError):  # too damaged to be changed in its own way
            break
    before = _forget_peak()
    signal.alarm(SECONDS)
    try:
        refusal = subject.read(folder, file)
        signal.alarm(0)
        problem = None if refusal is None else _wrong(str(refusal.error), refusal.names)
        outcome = "loaded" if refusal is None else "refused"
    except _Late:
        return "failed", f"{file.name}: took more than {SECONDS} s"
    except BaseException as error:
        signal.alarm(0)
        return "failed", f"{file.name}: {type(error).__name__}: {error!s:.300}\n{traceback.format_exc(limit=-4)[:3000]}"
    used = (_peak() - before) >> 10
    if used > MEGABYTES:
        return "failed", f"{file.name}: {outcome}, but used {used} MB"
    return ("failed", f"{file.name}: {problem}") if problem else (outcome, "")


def _wrong(message: str, names: Sequence[str]) -> str | None:
    """What is wrong with a message that refuses a file."""
    lines = message.splitlines()
    if not any(name in message for name in names):
        return f"the message does not name the file: {message[:300]!r}"
    if len(lines) > LINES or any(len(line) > LINE for line in lines):
        return f"the message is too long ({len(message)} characters): {message[:300]!r}"
    if CONTROL.search(message):
        return f"the message has control characters: {message[:300]!r}"
    return None


def _raise_late(number: int, frame: FrameType | None) -> None:
    raise _Late


def _forget_peak() -> int:
    """Sets the process's peak memory back to its present memory, in KB, and returns it."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    status = Path("/proc/self/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(found[1]) if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> int:
    """Runs as many cases as asked for, and prints the failures with the command that repeats each."""
    from tests.fuzz.subjects import SUBJECTS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the first case; the next has the next")
    parser.add_argument("--only", nargs="+", choices=list(SUBJECTS), default=list(SUBJECTS), help="kinds of files")
    asked = parser.parse_args()
    print(f"{asked.cases} cases from seed {asked.seed}", flush=True)
    counts, failures = run(asked.only, range(asked.seed, asked.seed + asked.cases))
    for failure in failures:
        print(f"--only '{failure.subject}' --cases 1 --seed {failure.seed}: {failure.what}\n")
    print(json.dumps(dict(sorted(counts.items())), indent=1))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
