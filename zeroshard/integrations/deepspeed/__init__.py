"""Runs scripts that were written for DeepSpeed: ``import zeroshard.integrations.deepspeed as deepspeed``.

``from_config`` (``configuration.py``) reads a configuration. ``initialize`` (``start.py``) returns an engine with the
methods that scripts call (``engine.py``). DeepSpeed itself is not needed. Start with ``docs/reference/deepspeed.md``.
"""

from types import SimpleNamespace

import torch.distributed as comm

from ...recompute.checkpoint import checkpoint
from . import zero
from .configuration import Configuration, from_config, keys
from .engine import Engine
from .start import add_config_arguments, init_distributed, initialize

DeepSpeedEngine = Engine
checkpointing = SimpleNamespace(checkpoint=checkpoint, configure=lambda *_, **__: None, is_configured=lambda: True)

__all__ = [
    "Configuration",
    "DeepSpeedEngine",
    "Engine",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "from_config",
    "init_distributed",
    "initialize",
    "keys",
    "zero",
]
