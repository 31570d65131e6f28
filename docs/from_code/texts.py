"""Reads the texts below the fields of dataclasses and below constants."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, fields
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple


class Described(NamedTuple):
    """One field of a dataclass."""

    name: str
    kind: str
    """Its type, as the code writes it."""
    default: str | None
    """Its default, as the code writes it; None if there is none."""
    text: str


def thing(path: str) -> Any:
    """The class or module with a path such as ``zeroshard.config.job.TrainConfig``."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def described_fields(kind: type) -> Iterator[Described]:
    """The fields of a dataclass or a NamedTuple that a user sets or reads.

    A field without a text has that of the class that it overrides.

    Raises:
        ValueError: a field has no text.
    """
    found: dict[str, tuple[str, str | None, str]] = {}
    for part in reversed(kind.__mro__):
        if part not in (object, tuple):
            for name, (annotation, default, text) in _declared(part).items():
                usual = found.get(name, ("", None, ""))
                found[name] = (annotation, default or usual[1], text or usual[2])
    names = [name for name in found if _is_set_by_user(kind, name)]
    for name in names:
        annotation, default, text = found[name]
        if not text:
            raise ValueError(f"{kind.__module__}.{kind.__qualname__}.{name} has no text below it")
        yield Described(name, annotation, default, text)


def text_of_constant(module: ModuleType, name: str) -> str:
    """The text below a constant of a module.

    Raises:
        ValueError: the constant has no text, or does not exist.
    """
    for node, after in _pairs(ast.parse(inspect.getsource(module)).body):
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == name for target in targets) and (text := _text(after)):
            return text
    raise ValueError(f"{module.__name__}.{name} has no text below it")


def paragraph(text: str) -> str:
    """A text of several lines as one paragraph of Markdown; blank lines stay."""
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def cell(text: str) -> str:
    """A text in a cell of a table."""
    return text.replace("|", "\\|").replace("\n\n", " ")


def _is_set_by_user(kind: type, name: str) -> bool:
    entries: dict[str, Field[Any]] = {entry.name: entry for entry in fields(kind)} if _is_dataclass(kind) else {}
    return name in getattr(kind, "_fields", ()) or (name in entries and entries[name].init)


def _is_dataclass(kind: type) -> bool:
    return hasattr(kind, "__dataclass_fields__")


def _declared(kind: type) -> dict[str, tuple[str, str | None, str]]:
    """For each annotated name in the body of a class: its type, its default and the text below it."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for node, after in _pairs(body.body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            default = _default(kind, node.target.id, node.value)
            found[node.target.id] = (_type(node.annotation), default, _text(after) or "")
    return found


def _pairs(body: Sequence[ast.stmt]) -> Iterator[tuple[ast.stmt, ast.stmt | None]]:
    yield from zip(body, [*body[1:], None], strict=True)


def _text(node: ast.stmt | None) -> str | None:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return inspect.cleandoc(node.value.value)
    return None


def _type(annotation: ast.expr) -> str:
    """The type in an annotation, without the requirements of ``Annotated``."""
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Annotated":
        assert isinstance(annotation.slice, ast.Tuple)
        annotation = annotation.slice.elts[0]
    return ast.unparse(_Choices().visit(annotation))


class _Choices(ast.NodeTransformer):
    """Writes `Literal["a", "b"]` as `"a" | "b"`."""

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:  # a name of ast
        if ast.unparse(node.value) != "Literal":
            return node
        choices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        joined = choices[0]
        for choice in choices[1:]:
            joined = ast.BinOp(joined, ast.BitOr(), choice)
        return joined


def _default(kind: type, name: str, value: ast.expr | None) -> str | None:
    """The default as a user would write it."""
    if value is None:
        return None
    entry = getattr(kind, "__dataclass_fields__", {}).get(name)
    if entry is None:
        return ast.unparse(value)
    if entry.default_factory is not MISSING:
        made = entry.default_factory()
        return f"{type(made).__name__}()" if _is_dataclass(type(made)) else repr(made)
    return repr(entry.default) if not isinstance(value, ast.BinOp) else ast.unparse(value)
