"""Changes of files, drawn at random: of bytes, and of the values inside JSON, TOML and safetensors."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from random import Random
from typing import Any

DEEP = "@deep@"
"""Stands for a value that is nested too deeply for ``json.dumps``."""
DEPTH = 20_000
LONG = "@long@"
"""Stands for a number that has too many digits for Python to write."""
DIGITS = 5000

NASTY: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 7, 2**31, 2**32, 2**62, 2**63, 2**64, -(2**63), 10**400),
    *(0.5, -0.5, -0.0, 1e308, -1e308, 5e-324, math.nan, math.inf, -math.inf),
    *(
        "",
        "x",
        "0",
        "nan",
        "../../outside",
        "/etc/passwd",
        "a" * 100_000,
        "\x1b[2J\x1b[31mred",
        "\x00",
        "\ud800",
        "é" * 50,
    ),
    *([], {}, [[]], [None], [0] * 10_000, [2**62] * 60, {"": {}}, {"a": {"b": {"c": []}}}, DEEP, LONG),
    *("(a+)+$", "(.*)*", "(x+x+)+y", "[", "float64", "F32", "BF16", "I64"),
]
"""Values that readers should refuse, or can live with."""


def mutate_value(value: Any, chance: Random) -> Any:
    """Changes one place in a tree of JSON values: replaces, deletes, renames, doubles or swaps."""
    places = list(_places(value))
    if not places:
        return chance.choice(NASTY)
    holder, key = chance.choice(places)
    kind = chance.randrange(8)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[str(chance.choice(NASTY))[:50]] = holder.pop(key)
    elif kind == 2 and isinstance(holder, list):
        holder.insert(chance.randrange(len(holder) + 1), holder[key])
    elif kind == 3:
        other, place = chance.choice(places)
        if _has(other, place) and _has(holder, key):
            holder[key], other[place] = other[place], holder[key]
    elif kind == 4 and isinstance(holder[key], int) and not isinstance(holder[key], bool):
        holder[key] += chance.choice([-1, 1, 8, -8, 2**40])
    else:
        holder[key] = chance.choice(NASTY)
    return value


def _places(value: Any) -> Any:
    """Every place in a tree, as its holder and the key or index there."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    for key in keys:
        yield value, key
        yield from _places(value[key])


def _has(holder: Any, key: Any) -> bool:
    return key in holder if isinstance(holder, dict) else key < len(holder)


def as_json(value: Any) -> bytes:
    """JSON text, with what Python writes beyond the standard: NaN, infinities, lone surrogates."""
    text = json.dumps(value)
    text = text.replace(f'"{DEEP}"', "[" * DEPTH + "]" * DEPTH).replace(f'"{LONG}"', "9" * DIGITS)
    return text.encode("utf-8", "surrogatepass")


def mutate_json(data: bytes, chance: Random) -> bytes:
    """Changes a value inside JSON, or gives an object two entries of one name."""
    value = json.loads(data)
    if isinstance(value, dict) and value and chance.random() < 0.05:
        key = chance.choice(list(value))
        double = json.dumps({key: chance.choice(NASTY[:20])})[1:-1]
        return data.rstrip()[:-1] + b", " + double.encode() + b"}"
    return as_json(mutate_value(value, chance))


def mutate_bytes(data: bytes, chance: Random) -> bytes:
    """Cuts off, flips, inserts or repeats bytes."""
    place = chance.randrange(len(data) + 1)
    length = chance.choice([1, 1, 8, 100, 5000])
    changes: list[Callable[[], bytes]] = [
        lambda: data[:place],
        lambda: data[:place] + chance.randbytes(length) + data[place + length :],
        lambda: data[:place] + chance.randbytes(length) + data[place:],
        lambda: data[:place] + data[place + length :],
        lambda: data + data[place:],
        lambda: data[:place] + bytes(length) + data[place + length :],
        lambda: b"",
    ]
    return chance.choice(changes)()


def mutate_safetensors(data: bytes, chance: Random) -> bytes:
    """Changes the header of safetensors, whose length is then right, or not."""
    size = int.from_bytes(data[:8], "little")
    header, rest = data[8 : 8 + size], data[8 + size :]
    kind = chance.randrange(6)
    if kind == 0:
        return chance.choice([0, 1, size - 1, size + 1, 2**31, 2**62, 2**64 - 1]).to_bytes(8, "little") + data[8:]
    if kind == 1:
        return data[: 8 + size] + mutate_bytes(rest, chance)
    changed = mutate_json(header, chance)
    return len(changed).to_bytes(8, "little") + changed + rest


def mutate_toml(data: bytes, chance: Random) -> bytes:
    """Changes one line of TOML."""
    lines = data.decode().splitlines()
    settings = [number for number, line in enumerate(lines) if "=" in line and not line.lstrip().startswith("#")]
    number = chance.choice(settings)
    key = lines[number].partition("=")[0].strip()
    kind = chance.randrange(6)
    if kind == 0:
        del lines[number]
    elif kind == 1:
        lines.insert(number, lines[number])
    elif kind == 2:
        lines[number] = f"{key[:-1]}_ = 1"
    else:
        lines[number] = f"{key} = {chance.choice(TOML_VALUES)}"
    return "\n".join(lines).encode("utf-8", "surrogatepass")


TOML_VALUES = [
    *("0", "-1", "1", "9" * 400, "-" + "9" * 30, "1e400", "-1e400", "nan", "inf", "-inf", "1e308", "5e-324", "0.0"),
    *("true", "false", '""', '"x"', '"' + "a" * 100_000 + '"', '"\\u001b[2J"', "[]", "[[]]", "{}", "{a = {b = 1}}"),
    *("1979-05-27", "[" * 500 + "]" * 500, "0x" + "f" * 400, "1_000_000_000_000_000_000_000", '"cpu"', '"auto"', "="),
]
