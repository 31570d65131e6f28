"""What a checkpoint says of its model beside tensors, so that it can be exported where the model's code is not."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from ..config.table import Place
from ..runtime import Runtime
from .format import CheckpointError
from .names import name_of


def describe(runtime: Runtime) -> dict[str, Any]:
    """Configuration (Hugging Face's, a dataclass, or none), adapters, and how parameters come from masters."""
    model: Any = runtime.model
    adapters = getattr(model, "peft_config", None)
    inner = model.get_base_model() if adapters is not None and hasattr(model, "get_base_model") else model
    dtype = runtime.config.precision.parameters
    flats = [flat for unit in runtime.units for flat in unit.flats]
    return {
        "class": type(inner).__name__,
        "config": _plain(getattr(inner, "config", None)),
        "generation_config": _plain(getattr(inner, "generation_config", None)),
        "adapters": None if adapters is None else {str(name): _plain(config) for name, config in adapters.items()},
        "parameter_dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        "rounded_on_host": [
            name_of(slot.name)
            for flat in flats
            if flat.trainable and flat.home.place is Place.HOST
            for slot in flat.layout.slots
        ],
    }


def _plain(config: Any) -> Any:
    """A configuration as JSON values; None where there is none that can be written so."""
    try:
        if hasattr(config, "to_json_string"):
            return json.loads(config.to_json_string())
        if hasattr(config, "to_dict"):
            return json.loads(json.dumps(config.to_dict(), default=_listed))
        if dataclasses.is_dataclass(config) and not isinstance(config, type):
            return json.loads(json.dumps(dataclasses.asdict(config)))
    except (TypeError, ValueError, CheckpointError):
        return None
    return None


def _listed(value: object) -> Any:
    """Sets, as adapters' configurations have them, and enumerations."""
    if isinstance(value, set | frozenset | tuple):
        return sorted(value, key=str)
    return str(getattr(value, "value", value))
