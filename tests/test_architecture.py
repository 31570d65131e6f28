"""Design rules that the code must keep, checked in its text."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "zeroshard"

JOBS = ["cli", "integrations", "calibrate", "train", "api", "recorder", "report"]
ABOVE = [*JOBS, "refusals", "storage", "plan", "runtime", "observe"]
ROOMS = [*ABOVE, "schedule", "optim", "recompute", "init", "offload", "states", "shown", "comm", "config", "system"]
"""From top to bottom: a room imports the rooms below it."""

EXCEPTIONS = {("plan/dryrun.py", "api")}
"""The dry run is a client of the api."""


def imported(file: Path) -> list[list[str]]:
    """The parts of every name that a file imports, by relative or absolute imports, at its top or inside functions."""
    here = ["zeroshard", *file.relative_to(PACKAGE).parts[:-1]]
    found: list[list[str]] = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = here[: len(here) + 1 - node.level] if node.level else []
            module = [*base, *(node.module.split(".") if node.module else [])]
            found += [[*module, alias.name] for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name.split(".") for alias in node.names]
    return found


def imported_rooms(file: Path) -> set[str]:
    """The rooms that a file imports from."""
    return {parts[1] for parts in imported(file) if parts[0] == "zeroshard" and len(parts) > 1}


def test_a_room_imports_only_rooms_below_it() -> None:
    for file in PACKAGE.rglob("*.py"):
        name = file.relative_to(PACKAGE).as_posix()
        if name in ("__init__.py", "__main__.py"):
            continue
        room = name.partition("/")[0].removesuffix(".py")
        for other in imported_rooms(file):
            assert other in ROOMS, f"{name} imports {other}, which is no room"
            below = ROOMS.index(room) <= ROOMS.index(other)
            assert below or (name, other) in EXCEPTIONS, f"{name} imports {other}, which stands above it"


def test_the_ready_made_jobs_do_not_know_each_other_and_only_the_loop_knows_them() -> None:
    train, jobs = PACKAGE / "train", {"gpt", "language"}
    for file in train.rglob("*.py"):
        own = {file.parent.name} & jobs
        others = jobs - own | ({"loop", "launch"} if own else set())
        known = {parts[2] for parts in imported(file) if parts[:2] == ["zeroshard", "train"] and parts[2:]}
        assert file == train / "loop.py" or known.isdisjoint(others), f"{file.relative_to(PACKAGE)}: {known & others}"


def test_private_names_of_torch_are_only_in_compat() -> None:
    for path in PACKAGE.rglob("*.py"):
        if path.name in ("compat.py", "compat_compile.py", "compat_groups.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if ast.unparse(node) == "os._exit":  # a public function of Python
                continue
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                root = node
                while isinstance(root, ast.Attribute):
                    root = root.value  # type: ignore[assignment]
                owner = root.id if isinstance(root, ast.Name) else ast.unparse(root)
                assert owner in ("self", "cls", "super()", "watchdog"), (
                    f"{path.name}:{node.lineno} uses {ast.unparse(node)}"
                )
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
                assert not any(name.startswith("_") for name in names), f"{path.name}:{node.lineno}"


NAMES = ("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "randint", "as_tensor")
FACTORIES = {f"torch.{name}" for name in NAMES}
"""Functions of torch that make a tensor on the device that the user has set as default, unless they are told."""


def test_tensors_are_made_on_a_device_that_is_named() -> None:
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).parts[0] in ("plan", "train", "calibrate", "cli"):  # they run in their own process
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in FACTORIES:
                named = any(keyword.arg == "device" for keyword in node.keywords)
                assert named, f"{path.name}:{node.lineno} makes a tensor wherever the user's default device is"


def test_the_plans_maths_import_no_distributed() -> None:
    for path in (PACKAGE / "plan").glob("*.py"):
        if path.stem != "dryrun":  # which runs things
            assert "torch.distributed" not in path.read_text(), path.name


def test_the_layout_imports_no_distributed() -> None:
    assert "distributed" not in (PACKAGE / "config/layout.py").read_text()


def test_importing_the_package_starts_no_process_sets_no_variable_and_needs_no_other_library() -> None:
    program = (
        "import os, subprocess, sys, multiprocessing.process as p\n"
        "before = dict(os.environ)\n"
        "def refuse(*a, **k): raise SystemExit('a process was started')\n"
        "subprocess.Popen.__init__ = refuse\n"
        "p.BaseProcess.start = refuse\n"
        "import torch\n"
        "middle = dict(os.environ)\n"
        "import zeroshard\n"
        "assert dict(os.environ) == middle, 'a variable was set'\n"
        "libraries = {'accelerate', 'deepspeed', 'lightning', 'ray', 'transformers', 'trl'}\n"
        "assert libraries.isdisjoint(sys.modules), 'a library of an integration was imported'\n"
        "import torch.distributed as dist\n"
        "assert not dist.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
