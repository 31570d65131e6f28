"""How torchrun brings the ranks of one node together, without a port that another machine can reach.

torchrun's own ways (`--standalone`, `--master-addr`) serve the store of the ranks on all addresses of the machine, to
everybody who connects. Here the store is served on the loopback address alone.
"""

import socket
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from ..system.machine import LOOPBACK

NAME = "zeroshard-one-node"


class OneNodeRendezvous(RendezvousHandler):
    """The rendezvous of a job on one node. torchrun's agent serves the store, for all restarts of the ranks."""

    def __init__(self, run_id: str) -> None:
        self._run_id, self._rounds, self._closed = run_id, 0, False
        listening = socket.create_server((LOOPBACK, 0))
        self._port = int(listening.getsockname()[1])
        stores: Any = dist  # its annotations do not list the stores
        self._store = stores.TCPStore(
            LOOPBACK, self._port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )

    def get_backend(self) -> str:
        """Return the name under which torchrun finds this rendezvous."""
        return NAME

    @property
    def use_agent_store(self) -> bool:
        """Return True: ranks connect to this store, and serve none of their own."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the one node of the job, and where its ranks find the store. Called at the start and each restart."""
        self._rounds += 1
        stores: Any = dist
        store = stores.PrefixStore(f"agent {self._rounds}", self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, self._port))

    def is_closed(self) -> bool:
        """Return whether the job has ended."""
        return self._closed

    def set_closed(self) -> None:
        """Remember that the job has ended."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """Return 0: no other node joins."""
        return 0

    def get_run_id(self) -> str:
        """Return the name of the run."""
        return self._run_id

    def shutdown(self) -> bool:
        """Return True: the store ends with this process."""
        return True


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    return OneNodeRendezvous(parameters.run_id)


def one_node_options(run_id: str) -> list[str]:
    """Return torchrun's options for a job on one node that no other machine can reach."""
    rendezvous_handler_registry.register(NAME, _create)
    return [f"--rdzv-backend={NAME}", f"--rdzv-id={run_id}", f"--local-addr={LOOPBACK}"]
