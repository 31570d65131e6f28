"""An update on the host as the runtime has it, of nobody's parameters: to be timed, or to be worked beside."""

from __future__ import annotations

import threading
import time
from types import TracebackType

import torch

from ..offload.kernel import Pool, Segment
from ..offload.pinned import Block
from ..offload.pipeline import default_threads
from ..offload.rules import AdamRule

RULE = AdamRule(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, decoupled=True, maximize=False, step=100)
BYTES = 28
"""Traffic in host memory for each parameter."""


class HostUpdate:
    """Adam on masters and moments in fp32, gradients and parameters in bf16."""

    def __init__(self, device: torch.device, parameters: int) -> None:
        arena = Block(14 * parameters, pinned=False)  # the memory that states live in
        gradient = arena.take(parameters, torch.bfloat16).fill_(0.01)
        master, first, second = (arena.take(parameters, torch.float32).fill_(0.01) for _ in range(3))
        segment = Segment(gradient=gradient, master=master, parameter=gradient, moments=(first, second), key=0, start=0)
        self._pool = Pool(default_threads(device))
        self._batch = self._pool.prepare([segment])

    def run(self) -> None:
        self._pool.update([(self._batch, [RULE])], 1.0)

    def __enter__(self) -> HostUpdate:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._pool.close()


class Repeated:
    """Inside it, another thread runs an update over and over, on all the cores that the host updates with."""

    def __init__(self, update: HostUpdate) -> None:
        self._update = update
        self._wanted = False
        self._thread = threading.Thread()
        self._error: BaseException | None = None
        self.taken: list[float] = []
        """Seconds of each update so far."""

    def __enter__(self) -> None:
        self._wanted = True
        self._thread = threading.Thread(target=self._repeat, daemon=True)
        self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._wanted = False
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _repeat(self) -> None:
        try:
            while self._wanted:
                begin = time.perf_counter()
                self._update.run()
                self.taken.append(time.perf_counter() - begin)
        except BaseException as error:  # raised where it is waited for
            self._error = error
