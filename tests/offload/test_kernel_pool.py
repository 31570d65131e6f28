"""The pool of threads: shared, forked, closed, asked for the impossible."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.offload.host import ADAMW, CODES, NATIVE, SGD, Format, assert_same_bits, clone, pool, random_segment, update
from zeroshard.offload import pipeline
from zeroshard.offload.kernel import Pool, Segment
from zeroshard.offload.library import Simd, load
from zeroshard.offload.rules import Rule
from zeroshard.system import cores, machine

ROOT = Path(__file__).parents[2]


def segment(length: int = 40_000) -> Segment:
    return random_segment(length, Format())


def test_threads_of_a_program_may_share_a_pool_or_have_their_own() -> None:
    reference = segment()
    update(pool(threads=1), [reference], ADAMW, 1.0)
    mine = Pool(threads=2)
    segments = [clone(segment()) for _ in range(8)]

    def work(index: int) -> None:
        update(mine if index % 2 else pool(threads=3), [segments[index]], ADAMW, 1.0)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(segments))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    mine.close()
    for other in segments:
        assert_same_bits(other, reference)


def test_a_closed_pool_says_so() -> None:
    closed = Pool(threads=2)
    closed.close()
    closed.close()
    with pytest.raises(RuntimeError, match="closed"):
        update(closed, [segment()], ADAMW, 1.0)
    with pytest.raises(RuntimeError, match="closed"):
        closed.square_sum(torch.ones(3))


def test_threads_end_with_their_pool() -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/task"))

    before = count()
    several = [Pool(threads=3) for _ in range(4)]
    assert count() == before + 12
    several[0].close()
    several[1].close()
    del several
    assert count() == before


def test_a_waiting_pool_uses_no_processor_time() -> None:
    with_threads = Pool(threads=2)
    update(with_threads, [segment()], ADAMW, 1.0)
    threading.Event().wait(0.05)
    before = os.times()
    threading.Event().wait(0.3)
    after = os.times()
    with_threads.close()
    assert after.user + after.system - before.user - before.system < 0.1


FORKS = """
import os, sys, threading, warnings
import torch
from zeroshard.offload.kernel import Pool
warnings.simplefilter("ignore")  # that threads and forks do not mix is the point
values = torch.ones(100_000)
pool = Pool(threads=2)
assert pool.square_sum(values) == 100_000
stop = threading.Event()
busy = threading.Thread(target=lambda: [pool.square_sum(values) for _ in iter(stop.is_set, True)])
busy.start()  # forks while a call holds the pool's locks
children = []
for _ in range(10):
    child = os.fork()
    if child == 0:
        assert pool.square_sum(values) == 100_000
        if len(children) % 2:
            os._exit(0)
        sys.exit(0)  # with the handlers that run at exit
    children.append(child)
stop.set()
busy.join()
assert all(os.waitpid(child, 0)[1] == 0 for child in children)
assert pool.square_sum(values) == 100_000
endless = threading.Thread(target=lambda: [pool.square_sum(values) for _ in iter(int, 1)], daemon=True)
endless.start()  # the program ends while calls go on
print("done", flush=True)
"""


@pytest.mark.slow
def test_forked_children_get_threads_of_their_own_and_programs_end() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKS], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "done\n", done.stderr
    assert done.returncode == 0


# -- how many threads -------------------------------------------------------------------------------------------------


@pytest.fixture
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(machine.cgroups, "cores", lambda: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # torchrun's, which is not about this
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)


@pytest.mark.usefixtures("sixteen_cores")
def test_a_process_alone_takes_every_core() -> None:
    assert cores.share() == cores.Share(16, tuple(range(16)))
    assert cores.share(4) == cores.Share(4, (0, 1, 2, 3))


@pytest.mark.usefixtures("sixteen_cores")
def test_ranks_divide_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    taken = []
    for rank in range(3):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        mine = cores.share()
        assert mine.threads == 5
        taken += mine.cores
    assert len(taken) == len(set(taken)) == 15


@pytest.mark.usefixtures("sixteen_cores")
def test_more_ranks_than_cores_get_a_floating_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "40")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert cores.share() == cores.Share(1, ())


@pytest.mark.usefixtures("sixteen_cores")
def test_threads_float_under_a_quota_and_where_they_outnumber_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cores.share(20) == cores.Share(20, ())
    monkeypatch.setattr(machine.cgroups, "cores", lambda: 4.5)
    assert cores.share() == cores.Share(4, ())


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [0, -1, 1.5, True, 4097, 2**31, 2**32, 10**400])
def test_a_senseless_number_of_threads_is_refused(threads: int) -> None:
    with pytest.raises(ValueError, match="threads="):
        Pool(threads)


@pytest.mark.usefixtures("sixteen_cores")
def test_no_more_threads_than_the_machine_can_use_are_started() -> None:
    assert cores.share(64).threads == 64
    with pytest.raises(ValueError, match="threads=65 must be at most 64: this machine has 16 processors"):
        cores.share(65)


@pytest.mark.parametrize(("path", "threads"), [(0, 0), (0, -1), (0, 4097), (0, 2**31 - 1), (3, 1), (-1, 1)])
def test_the_c_interface_opens_no_pool_that_it_could_not_run(path: int, threads: int) -> None:
    assert not load().zeroshard_open(path, threads, None, 0)


def test_the_c_interface_refuses_a_negative_count() -> None:
    library = load()
    handle = library.zeroshard_open(0, 1, None, 0)
    result = ctypes.c_double()
    assert library.zeroshard_update(handle, None, None, -1, 1.0, 0)
    assert library.zeroshard_accumulate(handle, None, None, 1, 1, -1)
    assert library.zeroshard_square_sum(handle, None, 1, -1, result)
    library.zeroshard_close(handle)


def bad_segments() -> dict[str, tuple[Segment, Rule]]:
    """Segments and rules, by a part of the message that refuses them."""
    good = random_segment(100, Format())
    wide = torch.zeros(300, dtype=torch.bfloat16)
    halves = torch.zeros(100, dtype=torch.int16)
    coded = random_segment(100, Format(moments=CODES))
    segments = {
        "master .* on meta; .* on the CPU": replace(good, master=torch.zeros(100, device="meta")),
        r"gradient .* of shape \(10, 10\)": replace(good, gradient=good.gradient.reshape(10, 10)),
        "parameter .* needs 100 contiguous": replace(good, parameter=wide[: 2 * 100 : 2]),
        r"moment .* of shape \(99,\) .* needs 100 ": replace(good, moments=(good.moments[0], good.moments[1][1:])),
        "gradient is torch.float64": replace(good, gradient=torch.zeros(100, dtype=torch.float64)),
        "master is torch.bfloat16": replace(good, master=torch.zeros(100, dtype=torch.bfloat16)),
        "parameter is torch.float32": replace(good, parameter=torch.zeros(100)),
        "moment is torch.float16": replace(good, moments=(torch.zeros(100, dtype=torch.float16), good.moments[1])),
        "parameter is torch.float16 .* of torch.bfloat16 on": replace(
            good, master=halves, parameter=torch.zeros(100, dtype=torch.float16)
        ),
        "split master needs a bf16 parameter": replace(good, master=halves, parameter=None),
        "moment is torch.int8": replace(good, moments=coded.moments),
        "moment is torch.uint8": replace(coded, moments=coded.moments[::-1]),
        "scales is torch.uint8 of shape .* needs 2 ": replace(coded, scales=(coded.scales[0], coded.scales[1][1:])),
        "2 moments in 8 bits from element 0 on have 1 arrays of scales": replace(coded, scales=coded.scales[:1]),
        "from element 65 on .* multiple of 64": replace(coded, start=65),
        "scales and scales overlap": replace(coded, scales=coded.scales[:1] * 2),
        "overlap": replace(good, gradient=wide[:100], parameter=wide[50:150]),
        "Adam needs two moments, this segment has 1": replace(good, moments=good.moments[:1]),
        "Adam needs two moments, this segment has 4": replace(
            good, moments=(*good.moments, *(moment.clone() for moment in good.moments))
        ),
    }
    return {message: (segment, ADAMW) for message, segment in segments.items()} | {
        "SGD with momentum=0.9 needs 1 moments, this segment has 0": (replace(good, moments=()), SGD),
        "SGD with momentum=0.0 needs 0 moments": (replace(good, moments=good.moments[:1]), replace(SGD, momentum=0.0)),
    }


@pytest.mark.parametrize("simd", [NATIVE[0], Simd.TORCH])
@pytest.mark.parametrize("message", bad_segments())
def test_a_segment_that_would_be_read_wrongly_is_refused(message: str, simd: Simd) -> None:
    bad, rule = bad_segments()[message]
    with pytest.raises(ValueError, match=message):
        update(pool(simd), [bad], rule, 1.0)


def test_a_split_master_whose_high_half_is_the_gradients_slot_is_refused() -> None:
    halves = random_segment(100, Format(split=True))
    assert halves.parameter is not None
    with pytest.raises(ValueError, match="overlap"):
        pool().prepare([replace(halves, gradient=halves.parameter)])


def test_a_batch_wants_a_rule_for_each_segment() -> None:
    batch = pool().prepare([segment(), segment()])
    for rules in ([ADAMW], [ADAMW] * 3):
        with pytest.raises(ValueError, match="zip"):
            pool().update([(batch, rules)], 1.0)


def test_accumulate_wants_an_fp32_total_of_the_same_length() -> None:
    with pytest.raises(ValueError, match=r"total is .* of shape \(3,\) .* needs 4 .* torch\.float32"):
        pool().accumulate(torch.zeros(3), torch.zeros(4), first=True)
    with pytest.raises(ValueError, match=r"total is .* needs 4 contiguous"):
        pool().accumulate(torch.zeros(2, 2), torch.zeros(4), first=True)
    with pytest.raises(ValueError, match=r"values is torch\.int64"):
        pool().square_sum(torch.arange(3))


def test_nothing_to_do_is_fine() -> None:
    pool().update([], 1.0)
    update(pool(), [], ADAMW, 1.0)
    update(pool(), [segment(0)], ADAMW, 1.0)


@pytest.mark.parametrize(("mine", "threads", "crowded"), [(16, 15, 13), (8, 7, 5), (4, 3, 3), (2, 2, 2)])
def test_some_of_many_cores_are_left_to_those_who_drive_a_device(
    mine: int, threads: int, crowded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "share", lambda: cores.Share(mine, ()))
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert pipeline.default_threads(cuda) == threads
    assert pipeline.default_threads(cuda, during_backward=True) == crowded
    assert pipeline.default_threads(cpu, during_backward=True) == mine
