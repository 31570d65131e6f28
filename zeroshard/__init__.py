"""zeroshard: train models that do not fit, from an unchanged PyTorch model and an unchanged training loop."""

from .activations.checkpoint import checkpoint as _recomputed
from .api import full_state_dict, gathered, no_sync, shard, stats, synchronize
from .checkpoint.format import CheckpointError
from .checkpoint.load import load
from .checkpoint.save import save
from .comm import DisagreementError
from .config import Activations, Config, LossScale, Precision
from .lane import StallError
from .nonfinite import NonFiniteError
from .observe.ledger import Memory, Stats
from .observe.trace import Trace, trace
from .offload.options import Offload
from .offload.worker import OffloadError
from .optimizer import ShardedOptimizer
from .traffic import Traffic

__version__ = "0.1.0"

checkpoint = _recomputed
"""Bound last: importing the package of that name, which saves and loads, binds the name to itself."""

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
    "ShardedOptimizer",
    "StallError",
    "Stats",
    "Trace",
    "Traffic",
    "checkpoint",
    "full_state_dict",
    "gathered",
    "load",
    "no_sync",
    "save",
    "shard",
    "stats",
    "synchronize",
    "trace",
]
