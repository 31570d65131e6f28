"""Every block of code on every page is checked; ``pages.py`` says how."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import zeroshard
from tests.docs import commands
from tests.docs.given import preamble
from tests.docs.pages import COMMENTS, LANGUAGES, ROOT, Block, blocks, blocks_of, pages
from tests.docs.pages import commands as lines_of
from tests.docs.reader import furnish
from zeroshard.config.checks import fields_of
from zeroshard.config.job import job_of
from zeroshard.train.language.documents import read_documents

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
"""The environment of one rank, for programs that start a process group or a mesh by themselves."""
TIMEOUT = 300  # DeepSpeed builds its CPU optimizer when it is first used
SECTIONS = ("Config", "Offload", "Activations", "Precision", "LossScale")


def each(*found: Block) -> pytest.MarkDecorator:
    """A test for each of these blocks."""
    return pytest.mark.parametrize("block", found, ids=str)


def whole_programs() -> list[Block]:
    """The last block of each program in Python, and the changes of programs."""
    found = blocks("python")
    continued = {block.before for block in found if "continued" in block.needs}
    return [*(block for block in found if block not in continued), *blocks("diff")]


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_has_a_language_and_comments_that_are_known(page: Path) -> None:
    for block in blocks_of(page):
        assert block.language in LANGUAGES, f"{block} has the language {block.language!r}; known: {LANGUAGES}"
        unknown = block.needs.keys() - set(COMMENTS[block.language])
        assert not unknown, f"{block} has unknown comments {unknown}"
        assert block.language != "text" or block.needs, f"{block}: say what this text is, output or a drawing"


# -- programs ---------------------------------------------------------------------------------------------------------


def programs(block: Block) -> list[str]:
    code = [block.program] if block.language == "python" else [block.side("-"), block.side("+")]
    given = block.first.needs.get("given")
    return [(preamble(given) if given else "") + text for text in code]


@each(*blocks("python"), *blocks("diff"))
def test_a_program_uses_names_and_options_that_exist(block: Block) -> None:
    for program in programs(block):
        for node in ast.walk(ast.parse(program)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "zeroshard":
                assert hasattr(zeroshard, node.attr) or _is_module(node.attr), f"zeroshard.{node.attr}"
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func).removeprefix("zeroshard.")
                kind = "Config" if name == "shard" else name
                if kind in SECTIONS and ast.unparse(node.func) == f"zeroshard.{name}":
                    known = {entry.name for entry in fields_of(getattr(zeroshard, kind))} | {"model", "optimizer"}
                    assert {keyword.arg for keyword in node.keywords if keyword.arg} <= known, ast.unparse(node)


def _is_module(name: str) -> bool:
    return (ROOT / "zeroshard" / name).exists() or (ROOT / f"zeroshard/{name}.py").exists()


@pytest.mark.slow
@each(*whole_programs())
def test_a_program_runs(block: Block, tmp_path: Path) -> None:
    outputs = [_run_program(program, block, tmp_path) for program in programs(block)]
    if block.language == "diff":  # a migration changes no result
        before, after = (re.findall(r"loss ([\d.]+)", output) for output in outputs)
        assert before, f"{block} prints no loss"
        assert before == after, f"{block}: losses before and after the change differ"
    for shown in _outputs_below(block):
        _assert_shown(shown, outputs[-1])


def _run_program(program: str, block: Block, folder: Path) -> str:
    file = folder / "program.py"
    file.write_text(program)
    ranks = block.first.needs.get("ranks")
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks] if ranks else []
    done = subprocess.run(
        [sys.executable, *run, str(file)],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        timeout=TIMEOUT,
        env=_environment() | ({} if ranks else ALONE),
    )
    words = block.needs.get("raises")
    if words is None:
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode != 0, f"{block} raised nothing"
        assert words in done.stderr, done.stderr
    return done.stdout + done.stderr


def _environment() -> dict[str, str]:
    named = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **named, "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"}


# -- commands ---------------------------------------------------------------------------------------------------------


@each(*blocks("bash"))
def test_every_command_can_be_read_by_its_program(block: Block) -> None:
    found = list(lines_of(block.text))
    assert found, f"{block} is empty"
    for command in found:
        commands.check(command)


@pytest.mark.slow
@each(*(block for block in blocks("bash") if "run" in block.needs))
def test_a_command_runs(block: Block, tmp_path: Path) -> None:
    if "continued" in block.needs:
        assert block.before is not None
        _run_program(programs(block.before)[-1], block.before, tmp_path)
    output = ""
    for command in lines_of(block.text):
        done = _run_command(command, tmp_path)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        output += done.stdout + done.stderr
    for shown in _outputs_below(block):
        _assert_shown(shown, output)


def small_commands() -> list[str]:
    """The commands that no comment asks to run, as they can be run here, each once."""
    left = [block for block in blocks("bash") if "run" not in block.needs]
    found = (commands.small(command) for block in left for command in lines_of(block.text))
    return sorted({command for command in found if command is not None})


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the pages name."""
    folder = tmp_path_factory.mktemp("reader")
    furnish(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("command", small_commands())
def test_a_command_of_a_reader_runs(command: str, reader: Path, tmp_path: Path) -> None:
    shutil.copytree(reader, tmp_path, dirs_exist_ok=True)
    done = _run_command(command, tmp_path)
    # A plan that finds no setting that fits exits with 1. It has answered.
    assert done.returncode in ((0, 1) if " plan " in command else (0,)), f"{command}\n{done.stdout}{done.stderr}"
    assert "Traceback" not in done.stderr


def _run_command(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a command of a page in a folder, with the programs of this environment."""
    real = re.sub(r"(^|\s)zeroshard(?=\s)", rf"\1{sys.executable} -m zeroshard", command, count=1)
    real = re.sub(r"^torchrun(?=\s)", f"{sys.executable} -m torch.distributed.run", real)
    real = re.sub(r"^python(?=\s)", sys.executable, real)
    return subprocess.run(
        real,
        shell=True,
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        timeout=TIMEOUT,
        env=_environment(),
    )


# -- output -----------------------------------------------------------------------------------------------------------


def _outputs_below(block: Block) -> list[Block]:
    """The blocks that show what a program or a command prints: they stand right below one of its blocks."""
    parts = [block]
    while "continued" in parts[-1].needs and parts[-1].before is not None:
        parts.append(parts[-1].before)
    return [other for other in blocks_of(block.page) if other.needs.get("output") == "" and other.before in parts]


def _assert_shown(shown: Block, output: str) -> None:
    """The words of a shown output are in the real one. Numbers differ from machine to machine."""
    printed = set(_words(output))
    missing = [word for word in _words(shown.text) if word not in printed]
    assert not missing, f"{shown} shows {missing}, which was not printed:\n{output}"


def _words(text: str) -> list[str]:
    return re.findall(r"[A-Za-z_]{3,}", text)


@each(*blocks("text"))
def test_a_shown_output_has_a_command_that_exists_or_a_block_above_that_is_run(block: Block) -> None:
    told = block.needs.get("output")
    if told is None:
        return
    if told:
        assert told.startswith("of "), f"{block}: write `<!-- output of COMMAND, where -->`"
        commands.check(told.removeprefix("of ").partition(",")[0])
    else:
        above = block.before
        assert above is not None, f"{block} is the output of nothing"
        assert above.language == "python" or "run" in above.needs, f"{block}: the block above is not run"


# -- configurations ---------------------------------------------------------------------------------------------------


@each(*blocks("json"))
def test_every_json_block_has_documents_to_fine_tune_on(block: Block, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text(block.text)
    assert len(list(read_documents([tmp_path / "data.jsonl"]))) == len(block.text.splitlines())


@each(*blocks("toml"))
def test_a_configuration_has_no_mistake(block: Block, tmp_path: Path) -> None:
    job_of(tomllib.loads(block.text), str(block), "a page")
