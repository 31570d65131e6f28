"""The claims of the two papers beside our numbers. ``claims.toml`` has the claims, ``runs`` computes our numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from ...config.offload import Offload
from ...system.parse import LARGEST_TOML, parse_toml, read_start
from ..machine.profile import Machine, load
from .runs import GROUPS, Run

FILE = Path(__file__).with_name("claims.toml")
OF_THE_CLAIM = ("source", "text", "unit", "printed", "kind", "note", "group", "quotients", "model", "method", "gpus")
"""All other keys of a claim are fields of its run."""


class Kind(Enum):
    """The kind of a claim."""

    THEORY = "formula"
    MEASURED = "measured"
    FITTED = "fitted"
    REACHED = "reached"
    """The paper did this, so our number must be at least as large."""


@dataclass(frozen=True)
class PaperClaim:
    """A number that a paper prints, and our number."""

    source: str
    about: str
    unit: str
    printed: float
    ours: float
    kind: Kind
    note: str

    @property
    def error(self) -> float:
        """The relative error of our number; 0 for a ``REACHED`` claim that we reach."""
        if self.kind is Kind.REACHED and self.ours >= self.printed:
            return 0.0
        return self.ours / self.printed - 1


@cache
def paper_data() -> dict[str, Any]:
    """The content of ``claims.toml``."""
    return parse_toml(read_start(FILE, LARGEST_TOML))


def paper_claims(data: Mapping[str, Any]) -> list[PaperClaim]:
    """All claims in the order of the data. Raises ValueError for a claim with an unknown key or name."""
    machine, claims, numbers = load(data["machine"]), [], dict[str, float]()
    for values in (values for entry in data["claims"] for values in _cells(entry)):
        about = values["text"].format(**values)
        try:
            run = _run(values, data, machine)
            if "quotients" in values:
                ours = min(numbers[faster] / numbers[slower] for faster, slower in values["quotients"].items())
            else:
                ours = GROUPS[values["group"]](run)
            kind = Kind.FITTED if about in data["fitted"] else Kind(values.get("kind", "measured"))
            note = values.get("note", "").format(run=run, **values)
            claims.append(PaperClaim(values["source"], about, values["unit"], values["printed"], ours, kind, note))
        except KeyError as error:
            raise ValueError(f"claim {about!r}: {error} is unknown or missing") from error
        except (TypeError, ValueError) as error:
            raise ValueError(f"claim {about!r}: {error}") from error
        numbers[about] = ours
    return claims


def mean_error(claims: list[PaperClaim]) -> float:
    """The mean error of measured claims, without fitted claims and without formulas, which are exact."""
    errors = [abs(claim.error) for claim in claims if claim.kind is Kind.MEASURED]
    return sum(errors) / len(errors)


def _cells(entry: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The keys and values of each claim of an entry."""
    single = {key: value for key, value in entry.items() if key not in ("columns", "rows")}
    for row in entry.get("rows", [[]]):
        values = single | dict(zip(entry.get("columns", []), row, strict=True))
        lists = {key: value for key, value in values.items() if isinstance(value, list)}
        for items in zip(*lists.values(), strict=True) if lists else [()]:
            yield values | dict(zip(lists, items, strict=True))


def _run(values: Mapping[str, Any], data: Mapping[str, Any], machine: Machine) -> Run:
    """The run that a claim is about."""
    given = {key: value for key, value in values.items() if key not in OF_THE_CLAIM}
    given["world"] = max(1, values.get("gpus", 1) // values.get("model_parallel", 1))
    for key in ("model", "method"):
        given |= data[f"{key}s"][values[key]] if key in values else {}
    if "offload" in given:
        given["offload"] = Offload(**given["offload"])
    if given.get("batch") == "largest":
        given["batch"] = Run(machine=machine, **given | {"batch": 1}).largest_batch()
    return Run(machine=machine, **given)
