"""A thread that does jobs in order, whose failure is heard, and which never outlives its owner."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest

from zeroshard import OffloadError
from zeroshard.offload.worker import Worker

ROOT = Path(__file__).parents[2]


def alive(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == f"zeroshard {name}"]


def test_jobs_are_done_in_the_order_they_were_given() -> None:
    worker, seen = Worker("order"), []
    for number in range(50):
        worker.submit(lambda number=number: seen.append(number))
    worker.wait()
    assert seen == list(range(50))
    assert worker.idle


def test_waiting_for_a_job_waits_for_no_later_one() -> None:
    worker, go = Worker("numbers"), threading.Event()
    first = worker.submit(lambda: None)
    last = worker.submit(lambda: go.wait(5) and None)
    worker.wait(first)
    assert not worker.idle
    go.set()
    worker.wait(last)
    worker.wait(0)
    assert worker.idle


def test_a_worker_without_jobs_has_no_thread_and_never_waits() -> None:
    worker = Worker("unused")
    worker.wait()
    worker.check()
    assert worker.idle
    assert not alive("unused")


def test_a_failure_is_raised_with_its_cause_by_whoever_waits_and_by_every_later_call() -> None:
    worker = Worker("failing")
    worker.submit(lambda: None)
    failed = worker.submit(lambda: [][1])
    for call in (lambda: worker.wait(failed), worker.wait, worker.check, lambda: worker.submit(lambda: None)):
        for _ in range(2):
            with pytest.raises(
                OffloadError, match=r"failing failed \(IndexError: .*start again from a checkpoint"
            ) as e:
                call()
            assert isinstance(e.value.__cause__, IndexError)


def test_jobs_after_a_failure_are_not_done_and_waiting_for_them_raises() -> None:
    worker, seen, go = Worker("after"), [], threading.Event()

    def fail() -> None:
        go.wait(5)
        raise KeyError("on purpose")

    worker.submit(fail)
    numbers = [worker.submit(lambda: seen.append(1)) for _ in range(3)]
    go.set()
    for number in numbers:
        with pytest.raises(OffloadError, match="on purpose"):
            worker.wait(number)
    assert not seen


def test_several_threads_may_wait_for_one_failure() -> None:
    worker, go, heard = Worker("heard"), threading.Event(), []

    def fail() -> None:
        go.wait(5)
        raise SystemExit("even this")

    worker.submit(fail)

    def listen() -> None:
        try:
            worker.wait()
        except OffloadError:
            heard.append(1)

    listeners = [threading.Thread(target=listen) for _ in range(3)]
    for thread in listeners:
        thread.start()
    go.set()
    for thread in listeners:
        thread.join(5)
    assert len(heard) == 3


def test_a_job_may_give_another_job() -> None:
    worker, seen = Worker("nested"), []
    worker.wait(worker.submit(lambda: worker.submit(lambda: seen.append(1)) and None))
    worker.wait()
    assert seen == [1]


def test_a_job_that_is_done_holds_nothing() -> None:
    class Held:
        pass

    worker, held = Worker("light"), Held()
    gone = weakref.ref(held)
    worker.wait(worker.submit(lambda held=held: None))
    del held
    deadline = time.monotonic() + 5
    while gone() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert gone() is None


def test_the_thread_ends_with_its_owner_and_finishes_only_what_it_has_begun() -> None:
    worker, seen = Worker("ending"), []
    begun, go = threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        go.wait(5)
        seen.append("begun")

    worker.submit(slow)
    worker.submit(lambda: seen.append("never"))
    assert len(alive("ending")) == 1
    begun.wait(5)
    threading.Timer(0.05, go.set).start()
    del worker
    gc.collect()
    assert seen == ["begun"]
    assert not alive("ending")


def leave(script: str) -> float:
    """Runs a script that prints a line when it is about to leave; returns how long leaving took."""
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "leaving", process.communicate()[1]
    begin = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert not errors
    return time.monotonic() - begin


def test_a_process_may_end_while_jobs_wait() -> None:
    script = """
import importlib.util, sys, time
spec = importlib.util.spec_from_file_location("worker", "zeroshard/offload/worker.py")  # without torch: quicker
module = importlib.util.module_from_spec(spec)
sys.modules["worker"] = module
spec.loader.exec_module(module)
worker = module.Worker("x")
for _ in range(200):
    worker.submit(lambda: time.sleep(0.1))
time.sleep(0.05)
print("leaving", flush=True)
"""
    assert leave(script) < 3
