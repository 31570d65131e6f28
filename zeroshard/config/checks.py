"""The one validator of options: it finds every mistake in a set of options at once.

A set of options is a frozen dataclass that derives from ``Section``. It states what may be asked for in three places:

- the annotation of a field is the type of the option: ``int``, ``bool | None``, ``Literal["device", "cpu"]``, or
  another ``Section``;
- ``Annotated[int, whole(least=1)]`` adds requirements to the type: ranges, conversions;
- ``conflicts()`` lists values that are each right but contradict each other.

``Options`` are checked when they are made, and raise ``OptionError``. ``read_table`` reads a table of a TOML file.
"""

from __future__ import annotations

import difflib
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from functools import cache
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Self,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import torch

from ..system.words import quoted, word

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtypes by the names that configuration files and command lines use."""

AUTO: Literal["auto"] = "auto"
"""The value of an option that leaves a choice to the plan."""

Requirement = Callable[[Any], Any]
"""Returns the value that is stored, or raises ``ValueError`` with a text such as "must be at least 1"."""

LARGEST_FLOAT = int(sys.float_info.max)
LIMIT = 1 << 63
"""Every number that has a lower bound, such as a count or a size, must be below this."""

WORDS = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a string",
    torch.dtype: "a torch.dtype",
    NoneType: "None",
}
"""The types that the validator checks by itself. A field of another type states a requirement."""


class Mistake(NamedTuple):
    """One thing that is wrong with a set of options."""

    options: tuple[str, ...]
    """One name: the value of this option is wrong. Several names: the values of these options contradict each other."""
    text: str


class OptionError(ValueError):
    """Options that cannot be used, with every mistake in them."""

    def __init__(self, mistakes: Sequence[Mistake], repaired: object = None) -> None:
        super().__init__(mistakes)
        self.mistakes = mistakes
        self.repaired = repaired
        """The same options with the default in place of each wrong value."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.mistakes,)  # options may contain a function or a mesh, which cannot be pickled

    def __str__(self) -> str:
        first, *others = (mistake.text for mistake in self.mistakes)
        return "\n  ".join([f"{len(self.mistakes)} mistakes in the options:", first, *others]) if others else first


class UnknownOptionError(OptionError, TypeError):
    """As ``OptionError``, where a name is unknown: Python raises ``TypeError`` for an unknown keyword too."""


class Section:
    """A set of options that can find its own mistakes."""

    path: ClassVar[str] = ""
    """What stands before the names of these options in messages."""
    wording: ClassVar[str] = "{problem}, is {value}"
    """The message for a wrong value."""
    unknown: ClassVar[str] = "unknown key{nearest}"
    """The message for an unknown name."""
    gone: ClassVar[Mapping[str, str]] = {}
    """Options of earlier versions, and what to do in their place."""

    def conflicts(self) -> Iterator[Mistake]:
        """Values that are each right but contradict each other, or leave each other without effect."""
        yield from ()


class Options(Section):
    """A set of options that is checked when it is made."""

    wording = "{path}{name}={value} {problem}"
    unknown = "{path}{name} is unknown{nearest}; known: {known}"
    accepted: ClassVar[str] = "a table of options"
    """What may be given for the whole set."""

    def __new__(cls, *_: object, **given: object) -> Self:
        for name in cls.gone:
            if name in given:
                raise TypeError(cls.gone[name])
        return super().__new__(cls)

    def __post_init__(self) -> None:
        mistakes = examine(self)
        if mistakes:
            raise OptionError(mistakes, self)

    @classmethod
    def parse(cls, value: object) -> Self | None:
        """The options that a value stands for: options already made, a table of them, or None."""
        if value is None or isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(f"must be {cls.accepted}")
        options, mistakes = read(cls, value, cls.unknown)
        if mistakes:
            known = [entry.name for entry in fields_of(cls)]
            error = OptionError if all(name in known for name in value) else UnknownOptionError
            raise error(mistakes, options)
        return options


S = TypeVar("S", bound=Section)


def read_table(kind: type[S], table: object, path: str) -> tuple[S, list[str]]:
    """A section from a table of a configuration file, and one line for each mistake, which begins with its key path."""
    if not isinstance(table, Mapping):
        return kind(), [f"{path}: must be a table, is {quoted(table)}"]
    section, mistakes = read(kind, table, Section.unknown)
    return section, [f"{path}.{word(mistake.options[0].partition('.')[0])}: {mistake.text}" for mistake in mistakes]


def read(kind: type[S], table: Mapping[str, Any], unknown: str) -> tuple[S, list[Mistake]]:
    """A section from names and values, with the default in place of each wrong value, and every mistake."""
    known = {entry.name: entry for entry in fields_of(kind)}
    listed = ", ".join(known)
    mistakes = [
        Mistake(
            (name,),
            kind.gone.get(name)
            or unknown.format(
                path=kind.path,
                name=word(str(name)),
                quoted=quoted(name),
                nearest=nearest(str(name), known),
                known=listed,
            ),
        )
        for name in table
        if name not in known
    ]
    values = {name: value for name, value in table.items() if name in known}
    types = _types(kind)
    for name, value in values.items():
        if isinstance(value, str) and torch.dtype in types[name].kinds:
            values[name] = DTYPES.get(value, value)
    try:
        section = kind(**values)
    except OptionError as error:
        section = cast(S, error.repaired)
        return section, [*mistakes, *error.mistakes]
    return section, [*mistakes, *examine(section)]


def examine(section: Section) -> list[Mistake]:
    """Every mistake in a section. Puts converted values, and defaults for wrong values, into its fields.

    A conflict with a wrong value is not reported, because the default that takes its place is not the user's choice.
    """
    mistakes: list[Mistake] = []
    types = _types(type(section))
    for entry in fields_of(type(section)):
        value = getattr(section, entry.name)
        try:
            value = _checked(value, *types[entry.name])
        except OptionError as error:
            value = error.repaired
            mistakes += [Mistake(tuple(f"{entry.name}.{o}" for o in m.options), m.text) for m in error.mistakes]
        except ValueError as error:
            text = section.wording.format(path=section.path, name=entry.name, value=quoted(value), problem=error)
            mistakes.append(Mistake((entry.name,), text))
            value = entry.default if entry.default_factory is MISSING else entry.default_factory()
        object.__setattr__(section, entry.name, value)
    wrong = {mistake.options[0] for mistake in mistakes if len(mistake.options) == 1}
    return mistakes + [
        conflict
        for conflict in section.conflicts()
        if not any(f"{option}.".startswith(f"{name}.") for option in conflict.options for name in wrong)
    ]


def fields_of(kind: type[Section]) -> list[Field[Any]]:
    """The options of a section that a user can set."""
    return [entry for entry in fields(kind) if entry.init]  # type: ignore[arg-type]


class _Type(NamedTuple):
    """What the annotation of a field says."""

    kinds: Sequence[Any]
    """The types that the value may have."""
    requirements: Sequence[Requirement]


def _find_types(section: type[Section]) -> dict[str, _Type]:
    found = {}
    for name, hint in get_type_hints(section, include_extras=True).items():
        hint, *requirements = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        found[name] = _Type(get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,), requirements)
    return found


_types: Callable[[Any], dict[str, _Type]] = cache(_find_types)
"""``_find_types``, once a class: "auto" makes hundreds of options."""


def _checked(value: Any, kinds: Sequence[Any], requirements: Sequence[Requirement]) -> Any:
    """The value as it is stored, converted to its type and by its requirements. Raises if one of them refuses it."""
    if value is None and NoneType in kinds:
        return None
    value = _typed(value, kinds)
    for requirement in requirements:
        value = requirement(value)
    return value


def _typed(value: Any, kinds: Sequence[Any]) -> Any:
    """The value as one of these types."""
    words: list[str] = []
    for kind in kinds:
        if get_origin(kind) is Literal:
            if any(type(value) is type(known) and value == known for known in get_args(kind)):
                return value
            words += [json.dumps(known) for known in get_args(kind)]
        elif kind in WORDS:
            is_number = isinstance(value, int) and not isinstance(value, bool)
            if isinstance(value, kind) and (is_number or kind is not int):
                return value
            if kind is float and is_number:
                if abs(value) > LARGEST_FLOAT:
                    raise ValueError("must be a number that fits into 64 bits")
                return float(value)
            words.append(WORDS[kind])
        else:
            return kind.parse(value) if isinstance(kind, type) and issubclass(kind, Options) else value
    if torch.dtype in kinds and isinstance(value, str) and value not in DTYPES:
        others = [name for kind in kinds if get_origin(kind) is Literal for name in get_args(kind)]
        raise ValueError(unknown_dtype(value, *others))
    *first, last = words
    raise ValueError(f"must be {', '.join(first)}{' or ' if first else ''}{last}")


def unknown_dtype(name: str, *others: str) -> str:
    """What a message says of a name that is not in ``DTYPES``. ``others``: names that are allowed, too."""
    known = [*DTYPES, *others]
    return f"is unknown{nearest(name, known)}; known: {', '.join(known)}"


def nearest(name: str, known: Sequence[str] | Mapping[str, object]) -> str:
    """The known name that a misspelt name may mean, as the next words of a message. Empty if no name is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


# -- requirements -----------------------------------------------------------------------------------------------------


def must(text: str, is_right: Callable[[Any], bool]) -> Requirement:
    """A requirement that refuses every value for which ``is_right`` is false. ``text`` says what the value must do."""

    def requirement(value: Any) -> Any:
        if not is_right(value):
            raise ValueError(f"must {text}")
        return value

    return requirement


def whole(least: int, most: int | None = None) -> Requirement:
    """The requirement for a count."""
    if most is None:
        return _from(least, f"be a whole number, at least {least}")
    return must(f"be a whole number, at least {least} and at most {most}", lambda value: least <= value <= most)


def at_least(least: float) -> Requirement:
    """The requirement for a lower bound."""
    return _from(least, f"be at least {least}")


def _from(least: float, text: str) -> Requirement:
    enough = must(text, lambda value: value >= least)
    not_too_much = must("be below 2**63", lambda value: value < LIMIT)
    return lambda value: not_too_much(enough(value))


positive = must("be a positive number", lambda value: 0 < value < math.inf)
unsigned = must("be a whole number, from 0 to below 2**64", lambda value: 0 <= value < 1 << 64)


def list_of(words: str, *kinds: type) -> Requirement:
    """The requirement for several values, stored as a tuple. One value alone counts as a list of one."""

    def requirement(value: Any) -> tuple[Any, ...]:
        values = (value,) if isinstance(value, kinds) else value
        if not isinstance(values, Sequence) or not all(isinstance(entry, kinds) for entry in values):
            raise ValueError(f"must be a list of {words}")
        return tuple(values)

    return requirement
