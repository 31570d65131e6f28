"""The generated reference has every option and every command, and refuses what has no text."""

from __future__ import annotations

import ast
import re
import tomllib
from dataclasses import dataclass

import from_code
import pytest
from from_code import commands, texts

import zeroshard
from tests.docs.pages import DOCS, ROOT
from zeroshard.config.checks import Options, fields_of
from zeroshard.config.options import Config
from zeroshard.plan.machine import profile


def sections(kind: type[Options]) -> list[type[Options]]:
    return [kind, *(found for other in kind.__subclasses__() for found in sections(other))]


def page(name: str) -> str:
    return from_code.filled((DOCS / "reference" / name).read_text())


@pytest.mark.parametrize("kind", sections(Options)[1:], ids=lambda kind: kind.__name__)
def test_every_option_is_on_the_page_of_options(kind: type[Options]) -> None:
    headings = re.findall(r"^### `([\w.]+)`$", page("options.md"), re.MULTILINE)
    for entry in fields_of(kind):
        assert any(heading.rpartition(".")[2] == entry.name for heading in headings), entry.name
    if kind is Config:
        assert {entry.name for entry in fields_of(Config)} <= set(headings)


def test_every_command_and_option_is_on_the_page_of_the_command_line() -> None:
    text = page("command-line.md")
    for name, parser in commands.subparsers().items():
        assert f"## `zeroshard {name}`" in text
        for _, actions in commands.options_of(parser):
            for action in actions:
                for option in action.option_strings:
                    assert f"`{option}" in text, f"{name} {option}"


def test_every_machine_profile_is_on_its_page() -> None:
    for file in profile.FOLDER.glob("*.toml"):
        assert file.read_text().rstrip() in page("machine-profiles.md")


@dataclass
class Untold:
    told: int = 0
    """A number."""
    untold: int = 0


def test_a_field_without_a_text_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Untold\.untold has no text"):
        list(texts.described_fields(Untold))


def test_a_page_that_asks_for_an_unknown_part_is_refused() -> None:
    with pytest.raises(ValueError, match="nobody writes"):
        from_code.filled("<!-- from code: something -->")


def test_the_documentation_needs_no_more_than_it_names() -> None:
    text = (ROOT / "constraints.txt").read_text().lower()
    for name in ("sphinx==", "myst-parser==", "furo=="):
        assert name in text


OF_OTHERS = {"TORCHELASTIC_", "TORCH_NCCL_", "ZEROSHARD_LAUNCHER", "ZEROSHARD_STOP_FILE", "PYTORCH_CUDA_ALLOC_CONF"}
"""Variables, or their first letters, that launcher and ranks use among themselves. `ALLOC_CONF` has a newer name."""


def test_every_environment_variable_that_the_package_reads_is_on_its_page() -> None:
    text = page("environment.md")
    read = set()
    for file in (ROOT / "zeroshard").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                read |= {node.value} if re.fullmatch(r"[A-Z]+(?:_[A-Z]+)+", node.value) else set()
    variables = {
        name for name in read if re.search(r"_(SIZE|RANK|ADDR|PORT|IFNAME|HOME|ISA|KERNEL|CONF|THREADS)$", name)
    }
    assert len(variables) > 10
    for name in variables:
        assert f"`{name}`" in text or any(name.startswith(other) for other in OF_OTHERS) or name == "SC_PAGE_SIZE", name


def test_every_key_of_a_machine_profile_is_explained() -> None:
    rows = set(
        re.findall(r"^\| (.+?) \| `(\w+)` \|", from_code.filled("<!-- from code: machine-fields -->"), re.MULTILINE)
    )
    for file in profile.FOLDER.glob("*.toml"):
        for key, value in tomllib.loads(file.read_text()).items():
            keys = [(f"`[{key}]`", inner) for inner in value] if isinstance(value, dict) else [("top of the file", key)]
            assert rows >= set(keys), keys


def test_every_public_name_is_in_the_reference() -> None:
    text = (DOCS / "reference" / "api.md").read_text() + (DOCS / "reference" / "options.md").read_text()
    for name in zeroshard.__all__:
        assert re.search(rf"zeroshard\.{name}\b", text), name
