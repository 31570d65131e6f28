"""Reads a DeepSpeed configuration: each key is mapped, accepted because it changes no result, or refused.

``keys.toml`` says what happens to each key. ``docs/reference/deepspeed.md`` shows the same table.
"""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...config.checks import nearest
from ...config.offload import Offload
from ...config.options import Activations, LossScale, Precision
from ...system.parse import parse_json
from ...system.words import quoted
from .schedulers import scheduler_of

DTYPES = {
    **dict.fromkeys(("fp32", "float32", "float"), torch.float32),
    **dict.fromkeys(("bf16", "bfloat16"), torch.bfloat16),
    **dict.fromkeys(("fp16", "float16", "half"), torch.float16),
}
OTHER_OPTIMIZERS = ("lamb", "lion", "muon", "muadam", "muadamw", "musgd")
SECTIONS = ("optimizer.params", "scheduler.params", "zeroshard")
WORDS = (
    *("optimizer.type", "scheduler.type", "communication_data_type", "data_types.grad_accum_dtype"),
    *("torch_autocast.dtype", "zero_optimization.offload_optimizer.device", "zero_optimization.offload_param.device"),
)
SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

NUMBERS = (
    *(*SIZES, "steps_per_print", "gradient_clipping", "zero_optimization.stage"),
    *("zero_optimization.offload_optimizer.ratio", "fp16.loss_scale", "fp16.initial_scale_power"),
    *("fp16.loss_scale_window", "fp16.hysteresis", "fp16.min_loss_scale"),
)
"""Mapped keys with numbers, beside those with words and sections. All others are true or false."""


class Key(NamedTuple):
    """What happens to one key of a configuration."""

    what: str
    """"mapped", "accepted" or "refused"."""
    why: str
    fine: tuple[Any, ...] = ()
    """Values of a refused key that ask for nothing."""


def keys() -> dict[str, Key]:
    """Every key that is known, with the names of its sections before it."""
    rows = tomllib.loads(Path(__file__).with_name("keys.toml").read_text())["keys"]
    return {name: Key(row["what"], row["why"], tuple(row.get("fine", ()))) for row in rows for name in row["names"]}


@dataclass(frozen=True)
class Configuration:
    """What a DeepSpeed configuration asks for."""

    options: dict[str, Any]
    """Options of ``zeroshard.shard()``."""
    settings: dict[str, Any]
    """The values of mapped keys."""
    train_batch_size: int
    train_micro_batch_size_per_gpu: int
    gradient_accumulation_steps: int

    def optimizer(self, parameters: Iterable[Any]) -> torch.optim.Optimizer | None:
        """The optimizer that the configuration names, if any."""
        name, given = self.settings.get("optimizer.type"), dict(self.settings.get("optimizer.params") or {})
        if name is None:
            return None
        if "max_grad_norm" in given:
            raise ValueError("optimizer.params has max_grad_norm, which DeepSpeed refuses too; use gradient_clipping")
        if name.lower() in OTHER_OPTIMIZERS:
            raise ValueError(f"optimizer.type={name!r} is not there; pass an element-wise optimizer to initialize()")
        if name.lower() in ("adam", "adamw"):
            decoupled = given.pop("adam_w_mode", True) or name.lower() == "adamw"
            if not given.pop("bias_correction", True):
                raise ValueError("optimizer.params: bias_correction=false is not there; leave it out")
            if not given.pop("torch_adam", False):
                given.setdefault("weight_decay", 0.0)
            given.pop("fp32_optimizer_states", None)  # the master's dtype, which is fp32
            return (torch.optim.AdamW if decoupled else torch.optim.Adam)(parameters, **given)
        kind = torch.optim.Adagrad if name.lower() == "adagrad" else getattr(torch.optim, name, None)
        if kind is None:
            raise ValueError(f"optimizer.type={name!r} is not in torch.optim{nearest(name, dir(torch.optim))}")
        made: torch.optim.Optimizer = kind(parameters, **given)
        return made

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        """The scheduler that the configuration names, if any."""
        name, given = self.settings.get("scheduler.type"), self.settings.get("scheduler.params") or {}
        return None if name is None else scheduler_of(name, given, optimizer)


def from_config(
    config: str | os.PathLike[str] | Mapping[str, Any],
    auto: Mapping[str, Any] | None = None,
    *,
    world: int | None = None,
    without: Iterable[str] = (),
) -> Configuration:
    """Reads a DeepSpeed configuration: a dict, or the path of a JSON file.

    ``auto`` has the values of keys that are "auto", as ``{"optimizer.params.lr": 1e-4}``. ``world``: number of ranks,
    by default that of the process group or of torchrun. ``without``: sections to leave out, such as "optimizer".

    >>> found = from_config({"train_batch_size": 8, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}})
    >>> found.options["stage"], found.options["precision"].parameters
    (2, torch.bfloat16)
    """
    given: Mapping[str, Any] = config if isinstance(config, Mapping) else parse_json(Path(config).read_bytes())
    if world is None:
        world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
    table = keys()
    settings: dict[str, Any] = {}
    mistakes: list[str] = []
    for name, value in _flat({name: value for name, value in given.items() if name not in without}, table):
        try:
            settings |= _setting(name, value, table, auto or {})
        except ValueError as error:
            mistakes.append(str(error))
    if mistakes:
        head = [f"{len(mistakes)} mistakes in the DeepSpeed configuration:"] if len(mistakes) > 1 else []
        raise ValueError("\n  ".join(head + mistakes))
    return Configuration(_options(settings), settings, *_sizes(settings, world))


def _setting(name: str, value: Any, table: Mapping[str, Key], auto: Mapping[str, Any]) -> dict[str, Any]:
    """A mapped key with its value. Nothing for a key that is accepted."""
    key = table.get(name)
    if key is None:
        raise ValueError(f"the DeepSpeed configuration has the unknown key {quoted(name)}{nearest(name, table)}")
    if key.what != "accepted":
        value = _with_values(name, value, auto)
    if key.what == "mapped" and value is not None:
        return {name.replace("bfloat16.", "bf16."): _checked(name, value)}
    if key.what == "refused" and not _asks_nothing(value, key.fine):
        raise ValueError(f"{name}={quoted(value)} in the DeepSpeed configuration is refused: {key.why}")
    return {}


def _flat(values: Mapping[str, Any], table: Mapping[str, Key], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        name = path + key
        if name not in table and any(known.startswith(f"{name}.") for known in table):
            if not isinstance(value, Mapping | None):
                raise ValueError(f"{name}={quoted(value)} in the DeepSpeed configuration must be a section in braces")
            yield from _flat(value or {}, table, f"{name}.")
        else:
            yield name, value


def _with_values(name: str, value: Any, auto: Mapping[str, Any]) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_values(f"{name}.{key}", each, auto) for key, each in value.items()}
    if value == "auto" and name not in auto and name not in (*SIZES, "data_types.keep_in_fp32_modules"):
        raise _no_value(name)
    return auto.get(name, value) if value == "auto" else value


def _no_value(name: str) -> ValueError:
    return ValueError(f'{name} is "auto", and nobody gives its value; write it there, or pass auto={{"{name}": ...}}')


def _checked(name: str, value: Any) -> Any:
    """The value of a mapped key, if it has the right type. In JSON 1e3 stands for the whole number 1000 too."""
    right, text = (isinstance(value, str), "a string")
    if name in SECTIONS:
        right, text = isinstance(value, Mapping), "a section in braces"
    elif name in NUMBERS:
        value = int(value) if isinstance(value, float) and value.is_integer() else value
        right, text = isinstance(value, int | float) and not isinstance(value, bool), "a number"
    elif name not in WORDS:
        right, text = isinstance(value, bool), "true or false"
    if not right and not (name in SIZES and value == "auto"):
        raise ValueError(f"{name}={quoted(value)} in the DeepSpeed configuration must be {text}")
    return value


def _asks_nothing(value: Any, fine: tuple[Any, ...]) -> bool:
    if isinstance(value, Mapping):
        return not value.get("enabled", False) and ("enabled" in value or not value)
    return value is None or any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in fine)


def _sizes(settings: Mapping[str, Any], world: int) -> tuple[int, int, int]:
    given: list[Any] = [settings.get(name) for name in SIZES]
    if "auto" in given and (given.count("auto") > 1 or None in given):
        raise _no_value(SIZES[given.index("auto")])
    batch, micro, steps = given = [None if size == "auto" else size for size in given]
    if batch is None and micro is None:
        raise ValueError("the DeepSpeed configuration needs train_batch_size or train_micro_batch_size_per_gpu")
    if batch is None:
        batch = micro * (steps or 1) * world
    if micro is None:
        micro = batch // (world * (steps or 1))
    steps = steps or batch // (micro * world) if micro else 0
    if min(batch, micro, steps) < 1 or batch != micro * steps * world:
        raise ValueError(
            f"{batch=} must be micro-batch {micro} * accumulation {steps} * {world} ranks, each at least 1"
        )
    return batch, micro, steps


def _options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The options of ``shard()``."""
    get, zero = settings.get, "zero_optimization."
    options: dict[str, Any] = {"stage": get(zero + "stage", 0)}
    clip = get("gradient_clipping", 1.0)  # DeepSpeed's default
    if clip > 0 or get(zero + "compute_grad_norm", True):
        options["clip_grad_norm"] = clip if clip > 0 else math.inf
    if get("fp16.enabled") and get("bf16.enabled"):
        raise ValueError("fp16.enabled and bf16.enabled exclude each other; leave one out")
    precision: dict[str, Any] = {}
    if get("bf16.enabled"):
        precision["parameters"] = torch.bfloat16
        options |= {"on_nonfinite": "skip"} if get("bf16.check_grad_overflow", True) else {}
    if get("fp16.enabled"):
        precision |= {"parameters": torch.float16, "loss_scale": _loss_scale(settings)}
    for key, name in (("communication_data_type", "reduce"), ("data_types.grad_accum_dtype", "accumulate")):
        if get(key) is not None:
            precision[name] = _dtype(key, get(key))
    if precision:
        options["precision"] = Precision(**precision)
    optimizer, parameters = (
        ("cpu" if get(f"{zero}{old}") else None) or get(f"{zero}{new}.device") or "none"
        for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param"))
    )
    if not {optimizer, parameters} <= {"cpu", "none"}:
        raise ValueError("offload to nvme in the DeepSpeed configuration is refused: host memory is used; write cpu")
    if "cpu" in (optimizer, parameters):
        fraction = get(zero + "offload_optimizer.ratio", 1.0)
        where = "cpu" if parameters == "cpu" else "device"
        options["offload"] = Offload(parameters=where, host_fraction=fraction)  # type: ignore[arg-type]
    if get("activation_checkpointing.cpu_checkpointing"):
        options["activations"] = Activations(recompute=0, offload=True)
    dtype = get("torch_autocast.dtype")
    if get("torch_autocast.enabled") and DTYPES.get(str(dtype).removeprefix("torch.")) is not torch.bfloat16:
        raise ValueError(
            f"torch_autocast.dtype={quoted(dtype)} in the DeepSpeed configuration is refused: write bfloat16, or use "
            "the fp16 section"
        )
    return options | dict(get("zeroshard") or {})


def _loss_scale(settings: Mapping[str, Any]) -> LossScale:
    get = settings.get
    if fixed := get("fp16.loss_scale", 0):
        return LossScale(initial=float(fixed), minimum=float(fixed), growth_interval=1 << 62)
    return LossScale(
        initial=2.0 ** get("fp16.initial_scale_power", 16),
        growth_interval=get("fp16.loss_scale_window", 1000),
        hysteresis=get("fp16.hysteresis", 2),
        minimum=float(get("fp16.min_loss_scale", 1)),
    )


def _dtype(name: str, value: Any) -> torch.dtype:
    if str(value).removeprefix("torch.") not in DTYPES:
        raise ValueError(f"{name}={quoted(value)} in the DeepSpeed configuration must be fp32, bf16 or fp16")
    return DTYPES[str(value).removeprefix("torch.")]
