"""zeroshard: train models that do not fit, from an unchanged PyTorch model and an unchanged training loop."""

from .api import (
    full_state_dict,
    gathered,
    gathered_gradients,
    no_sync,
    offload_states,
    record,
    restore_states,
    shard,
    stats,
    synchronize,
    whole_parameters,
)
from .comm.fabric import DisagreementError
from .comm.traffic import Traffic
from .comm.watchdog import StallError
from .config.offload import Offload
from .config.options import Activations, Config, LossScale, Precision
from .observe.ledger import Memory, Stats
from .offload.worker import OffloadError
from .optim.nonfinite import NonFiniteError
from .optim.optimizer import ShardedOptimizer
from .recompute.checkpoint import checkpoint
from .recorder.recorder import Recorder
from .storage.format import CheckpointError
from .storage.load import load
from .storage.save import save
from .system.trace import Trace, trace

__version__ = "0.2.0"

__all__ = [
    "Activations",
    "CheckpointError",
    "Config",
    "DisagreementError",
    "LossScale",
    "Memory",
    "NonFiniteError",
    "Offload",
    "OffloadError",
    "Precision",
    "Recorder",
    "ShardedOptimizer",
    "StallError",
    "Stats",
    "Trace",
    "Traffic",
    "checkpoint",
    "full_state_dict",
    "gathered",
    "gathered_gradients",
    "load",
    "no_sync",
    "offload_states",
    "record",
    "restore_states",
    "save",
    "shard",
    "stats",
    "synchronize",
    "trace",
    "whole_parameters",
]
