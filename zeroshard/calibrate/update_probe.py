"""The update of the host on made-up parameters: to measure its time, or to make the host busy."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Literal

import torch

from ..config.offload import Offload
from ..offload.codes import TILE
from ..offload.kernel import Pool, Segment
from ..offload.pinned import HostBlock
from ..offload.pipeline import default_threads
from ..offload.rules import AdamRule
from ..plan.time.unit_costs import host_update_bytes
from .stopwatch import seconds_once

RULE = AdamRule(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, decoupled=True, maximize=False, step=100)
UPDATE_BYTES = host_update_bytes(Offload(), width=2)
"""Bytes of traffic in host memory for each parameter: 28."""


class UpdateProbe:
    """An Adam update: masters in fp32, moments as the options have them, gradients and parameters in bf16.

    ``threads``: by default those that update beside this device.
    """

    def __init__(
        self,
        device: torch.device,
        parameters: int,
        moments: torch.dtype | Literal["8bit"] = torch.float32,
        threads: int | None = None,
    ) -> None:
        block = HostBlock(15 * parameters, pinned=False)  # the kind of memory that states live in
        gradient = block.take(parameters, torch.bfloat16).fill_(0.01)
        master = block.take(parameters, torch.float32).fill_(0.01)
        kinds = (torch.int8, torch.uint8) if isinstance(moments, str) else (moments, moments)
        pair = tuple(block.take(parameters, kind).fill_(1) for kind in kinds)
        scales = tuple(block.take(-(-parameters // TILE), torch.uint8).fill_(110) for _ in pair)
        segment = Segment(
            gradient=gradient,
            master=master,
            parameter=gradient,
            moments=pair,
            key=0,
            start=0,
            scales=scales if isinstance(moments, str) else (),
        )
        self._pool = Pool(threads or default_threads(device))
        self._batch = self._pool.prepare([segment])

    @property
    def threads(self) -> int:
        return self._pool.threads

    @property
    def is_native(self) -> bool:
        """False where torch's fused optimizer does the work of the kernel, which then knows no moments in 8 bits."""
        return self._pool.native

    def run(self) -> None:
        self._pool.update([(self._batch, [RULE])], 1.0)

    def __enter__(self) -> UpdateProbe:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._pool.close()


class BusyHost:
    """A context in which a second thread repeats an update, on all cores that the host updates with."""

    def __init__(self, update: UpdateProbe) -> None:
        self._update = update
        self._repeats = False
        self._thread = threading.Thread()
        self._error: BaseException | None = None
        self.taken: list[float] = []
        """Seconds of each finished update."""

    def __enter__(self) -> None:
        self._repeats = True
        self._thread = threading.Thread(target=self._repeat, daemon=True)
        self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._repeats = False
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _repeat(self) -> None:
        try:
            while self._repeats:
                self.taken.append(seconds_once(self._update.run, torch.device("cpu")))
        except BaseException as error:  # ``__exit__`` raises it
            self._error = error
