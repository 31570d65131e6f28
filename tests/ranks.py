"""One pool of rank processes for all distributed tests.

``@on_ranks(2)`` turns a test into one whose body runs on two ranks, in a fresh Gloo group; what it returns on each
rank is checked by the body itself, so a test fails if it raises on any rank. Processes live as long as the session.
``tests/nccl/processes.py`` has a second pool, of ranks with NCCL.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch.distributed as dist

PATIENCE = 120.0
"""Seconds after which a test that does not end on some rank fails, and the pool is replaced."""
WRITING = 1.0
"""Seconds in which a late rank writes down where it is, when it is asked to."""

Environment = Callable[[int, int], dict[str, str]]
"""The variables of a rank, from its number and the size of the world."""


def on_ranks(world: int, pool: Callable[[], Pool] | None = None) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Runs a test's body on ``world`` ranks. Arguments come from pytest's parametrisation and fixtures."""

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**arguments: Any) -> None:
            (pool or Pool.shared)().run(body, world, arguments)

        return test

    return decorate


class Group(NamedTuple):
    """Who a rank is in one test."""

    rank: int
    world: int
    port: int
    """Of the store by which ranks find each other."""
    name: str
    """Tells tests apart in that store."""
    backend: str
    environment: dict[str, str]
    """Variables that this rank sets before it starts the group."""


class Pool:
    """Rank processes that wait for work. A process has the same rank in every test."""

    _shared: Pool | None = None

    @classmethod
    def shared(cls) -> Pool:
        if cls._shared is None:
            cls._shared = cls()
        return cls._shared

    def __init__(
        self,
        backend: str = "gloo",
        environment: Environment = lambda rank, world: {},
        *,
        patience: float = PATIENCE,
        grace: float | None = None,
    ) -> None:
        """``grace``: seconds that the other ranks have left when one has failed. By default ``patience``."""
        # Forked from a process that has imported what every rank needs, and nothing that cannot be forked.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch.distributed", "zeroshard", "zeroshard.plan.foresee"])
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._runs = 0
        # Over TCP, for ranks that wait for each other at a file look at it every so often.
        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self._backend, self._environment = backend, environment
        self.patience, self._grace = patience, grace

    def run(
        self, body: Callable[..., Any], world: int, arguments: dict[str, Any], expect_death: int | None = None
    ) -> list[Any]:
        """Runs ``body`` on ranks 0..world-1 and returns what each returned; raises if any raised."""
        while len(self._workers) < world:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs, list(sys.path)), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        self._runs += 1
        notes = os.path.join(self._folder.name, f"run-{self._runs}")
        workers = self._workers[:world]
        for rank, (_, connection) in enumerate(workers):
            names = (body.__code__.co_filename, body.__qualname__)
            variables = self._environment(rank, world)
            group = Group(rank, world, self._store.port, f"run-{self._runs}", self._backend, variables)
            job = (*names, arguments, group, notes, expect_death is None)
            connection.send_bytes(pickle.dumps(job))
        results: dict[int, tuple[bool, Any]] = {}
        waiting = {connection: rank for rank, (_, connection) in enumerate(workers)}
        failures: dict[int, str] = {}
        while waiting:
            limit = self.patience if not failures or self._grace is None else self._grace
            ready = wait(list(waiting), timeout=limit)
            if not ready:
                late = sorted(waiting.values())
                for rank in late:
                    pid = workers[rank][0].pid
                    if pid is not None and os.path.exists(_place(notes, rank)):
                        os.kill(pid, signal.SIGUSR1)
                time.sleep(WRITING)
                self.close()
                where = {rank: _told(_place(notes, rank)) for rank in late} | failures
                raise AssertionError(f"ranks {late} did not end within {limit:g} s\n{_by_rank(where)}")
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    results[rank] = pickle.loads(connection.recv_bytes())
                except EOFError:
                    process = workers[rank][0]
                    process.join(self.patience)
                    where = _told(_place(notes, rank))
                    results[rank] = (False, f"rank {rank} died with exit code {process.exitcode}\n{where}")
                good, value = results[rank]
                if not good and rank != expect_death:
                    failures[rank] = value
        if failures or expect_death is not None:
            self.close()  # a failed group may be in any state: start afresh
        if failures:
            raise AssertionError(_by_rank(failures))
        return [value for _, (_, value) in sorted(results.items())]

    def close(self) -> None:
        for process, connection in self._workers:
            process.kill()
            process.join()
            connection.close()
        self._workers = []


def _by_rank(texts: dict[int, str]) -> str:
    return "\n".join(f"--- rank {rank} ---\n{text}" for rank, text in sorted(texts.items()))


def _place(notes: str, rank: int) -> str:
    """Where a rank writes down where it is."""
    return f"{notes}-rank-{rank}"


def _told(path: str) -> str:
    """What it wrote."""
    if not os.path.exists(path):
        return "it has not begun"
    with open(path) as file:
        return file.read() or "it could not write down where it is"


def _forget_meshes() -> None:
    """DTensor remembers results with the mesh they were found on, which equals that of another test's dead groups."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug

        debug._clear_sharding_prop_cache()


def _serve(connection: Connection, path: list[str]) -> None:
    sys.path[:] = path
    import torch

    torch.set_num_threads(1)
    modules: dict[str, Any] = {}
    server: dist.TCPStore | None = None
    while True:
        try:
            filename, name, arguments, group, notes, together = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        place = open(_place(notes, group.rank), "w")  # noqa: SIM115 - closed below, when nothing writes to it any more
        faulthandler.enable(place)
        faulthandler.register(signal.SIGUSR1, place)
        try:
            if filename not in modules:
                spec = importlib.util.spec_from_file_location(f"on_ranks_{len(modules)}", filename)
                assert spec is not None
                assert spec.loader is not None
                module = importlib.util.module_from_spec(spec)
                sys.modules[spec.name] = module
                spec.loader.exec_module(module)
                modules[filename] = module
                gc.collect()
                gc.freeze()  # what was imported stays, so the collector need not look at it again
            body = functools.reduce(getattr, name.split("."), modules[filename])
            body = getattr(body, "__wrapped__", body)
            torch.manual_seed(0)
            _forget_meshes()
            if server is None:  # connected to once: torch asks the resolver for the name of every peer
                server = dist.TCPStore("localhost", group.port, is_master=False)
            store = dist.PrefixStore(group.name, server)
            os.environ.update(group.environment)
            dist.init_process_group(
                group.backend,
                store=store,
                rank=group.rank,
                world_size=group.world,
                timeout=timedelta(seconds=60),
                device_id=torch.device("cuda", 0) if group.backend == "nccl" else None,
            )
            value = body(**arguments)
            if together:
                dist.barrier()
            answer = (True, value)
        except BaseException:
            answer = (False, traceback.format_exc())
        finally:
            # NCCL ends a group on all ranks at once, so a rank that failed alone leaves that to the end of the pool.
            if dist.is_initialized() and (group.backend == "gloo" or answer[0]):
                dist.destroy_process_group()
            gc.collect()  # models of this test, and the connections between their hosts
            faulthandler.unregister(signal.SIGUSR1)
            faulthandler.disable()
            place.close()
        connection.send_bytes(pickle.dumps(answer))
