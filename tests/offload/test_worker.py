"""A thread that does jobs in order, whose failure is heard, and which never outlives its owner."""

from __future__ import annotations

import gc
import signal
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


def test_waiting_for_a_job_waits_for_no_later_one() -> None:
    worker, go, done = Worker("numbers"), threading.Event(), threading.Event()
    first = worker.submit(lambda: None)
    last = worker.submit(lambda: go.wait(5) and done.set())
    worker.wait(first)
    assert not done.is_set()
    go.set()
    worker.wait(last)
    worker.wait(0)
    assert done.is_set()


def test_a_worker_without_jobs_has_no_thread_and_never_waits() -> None:
    worker = Worker("unused")
    worker.wait()
    worker.check()
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


def test_a_worker_that_fails_before_its_first_job_is_heard_by_whoever_waits() -> None:
    told: list[str] = []

    def prepare() -> None:
        raise OSError("no such device")

    worker = Worker("unprepared", prepare, told.append)
    with pytest.raises(OffloadError, match=r"unprepared failed \(OSError: no such device\)"):
        worker.wait(worker.submit(lambda: None))
    assert told == ["the host's unprepared failed (OSError: no such device)"]


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


# -- the end of a process --------------------------------------------------------------------------------------------

WORKER_ALONE = """
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

BUSY_MODELS = """
import time, torch, zeroshard
from tests.models import loss_of, net
from zeroshard.offload.kernel import Pool
torch.set_num_threads(1)
original = Pool.update
def slow(*args):
    time.sleep(0.2)
    original(*args)
def fail(*args):
    raise ArithmeticError("the kernel is ill")
def begun(**options):
    model = net(depth=7)
    offload = zeroshard.Offload(**options)
    model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), stage=2, offload=offload)
    loss_of(model, 0).backward()
    optimizer.step()
    return model, optimizer
"""
"""Models whose host is slow, so that nearly all of a step is still to be done when it returns."""

ENDS = {
    "after a step": """
Pool.update = slow
models = [begun(), begun(delayed_update_after=0), begun(update_in_backward=True)]
loss_of(models[1][0], 1).backward()  # waits, on the host, for the update that has hardly begun
print("leaving", flush=True)
""",
    "after a failure": """
Pool.update = fail
models = []
for options in ({}, {"update_in_backward": True}, {"split_master": True, "read_back": True}):
    try:
        models.append(begun(**options))
        zeroshard.synchronize(models[-1][0])
    except (zeroshard.OffloadError, ValueError):
        pass
print("leaving", flush=True)
""",
    "by Ctrl-C": """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it
Pool.update = slow
models = [begun(), begun(delayed_update_after=0)]
print("leaving", flush=True)
zeroshard.synchronize(models[0][0])
time.sleep(30)
""",
}


def start(script: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-X", "faulthandler", "-c", script]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def leave(process: subprocess.Popen[str], interrupt: bool = False) -> tuple[float, str]:
    """Waits for a process that prints a line when it is about to end: how long that took, and what it said."""
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "leaving", process.communicate()[1]
    begin = time.monotonic()
    if interrupt:
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    return time.monotonic() - begin, errors


def test_a_process_may_end_while_jobs_wait() -> None:
    process = start(WORKER_ALONE)
    seconds, errors = leave(process)
    assert process.returncode == 0
    assert not errors
    assert seconds < 3


@pytest.mark.slow
def test_a_process_ends_at_once_whatever_the_host_is_doing() -> None:
    processes = {how: start(BUSY_MODELS + script) for how, script in ENDS.items()}
    for how, process in processes.items():
        seconds, errors = leave(process, interrupt="Ctrl-C" in how)
        assert seconds < 10, (
            f"{how}: {seconds:.0f} s, exit code {process.returncode}, {errors}"
        )  # a thread that hangs is waited for half a minute
        if "Ctrl-C" in how:
            assert process.returncode in (1, 130, -signal.SIGINT), f"{how}: {errors}"
            assert "KeyboardInterrupt" in errors
        else:
            assert process.returncode == 0, f"{how}: {errors}"
            assert not errors, how
        assert "Fatal" not in errors, how
