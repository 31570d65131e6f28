"""Design rules that the code must keep, checked in its text."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "zeroshard"

LAYERS = [
    {"plan.calibrate"},
    {"plan.block_speed", "plan.dryrun", "plan.launching"},
    {"plan.host_update", "plan.stopwatch"},
    {"checkpoint.load", "checkpoint.export"},
    {"checkpoint.save"},
    {"checkpoint.background", "checkpoint.snapshot"},
    {"checkpoint.fill", "checkpoint.shards"},
    {
        "checkpoint.checked",
        "checkpoint.contents",
        "checkpoint.folder",
        "checkpoint.lora",
        "checkpoint.output",
        "checkpoint.read",
    },
    {
        "checkpoint.agreement",
        "checkpoint.claim",
        "checkpoint.describe",
        "checkpoint.random_state",
        "checkpoint.removal",
        "checkpoint.values",
        "checkpoint.write",
    },
    {"checkpoint.names", "checkpoint.index"},
    {"checkpoint.marker"},
    {"checkpoint.plain"},
    {"checkpoint.format"},
    {"checkpoint.boxes"},
    {"api"},
    {"consistency"},
    {"guards", "shortage"},
    {"runtime"},
    {"observe.ledger", "optimizer"},
    {"piece_states"},
    {"hosted", "schedule", "shardable"},
    {"nonfinite", "order", "outputs"},
    {"activations.checkpoint"},
    {"materialise", "precision"},
    {"initialisers", "meta", "reducer", "weights", "offload.place"},
    {"unit"},
    {"flat"},
    {"gradient", "pointing"},
    {"shown_gradients"},
    {"activations.kept", "buffers", "placeholder"},
    {"comm"},
    {"lane", "messages", "observe.watchdog", "process_group"},
    {"hook", "traffic"},
    {"plan.as_json", "plan.foresee", "plan.report"},
    {"plan.choice", "plan.module"},
    {"plan.hardware", "plan.models"},
    {"plan.factory"},
    {"plan.huggingface", "plan.trace", "plan.volume"},
    {"plan.budget", "plan.known_values", "plan.recomputing"},
    {"plan.rank_memory", "plan.traced"},
    {"plan.activations", "plan.arena", "plan.device_memory", "plan.placed"},
    {"plan.paper_table"},
    {"plan.paper", "plan.scale"},
    {"plan.paper_devices"},
    {"plan.time"},
    {"plan.checkpoint_time", "plan.unit_costs"},
    {"plan.ring", "plan.units"},
    {"plan.machine_profile", "plan.timeline"},
    {"plan.memory", "plan.shape", "train.gpt", "train.job", "train.vocabulary"},
    {"offload.shard"},
    {"offload.pipeline"},
    {"offload.dry"},
    {"activations.host", "offload.landed", "offload.tables"},
    {"offload.states", "offload.rules", "offload.kernel"},
    {"offload.arena", "offload.placement", "offload.ring"},
    {"offload.worker"},
    {"offload.fallback", "offload.library"},
    {"offload.segment", "offload.cores", "offload.native.build"},
    {"activations.arena", "activations.part", "observe.trace"},
    {"parallel"},
    {"config", "table"},
    {"offload.options"},
    {"bounds", "checks", "layout", "compat", "machine"},
]
"""Upper layers import lower ones, never the other way round, and nothing imports its equals."""


def imports_of(path: Path) -> set[str]:
    """Modules of this package that a file imports, as dotted names below ``zeroshard``."""
    here = list(path.relative_to(PACKAGE).with_suffix("").parts)
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = here[: len(here) - node.level]
            if node.module:
                found |= {_module(".".join([*base, node.module]), alias.name) for alias in node.names}
            else:
                found |= {".".join([*base, alias.name]) for alias in node.names}
    return found


def _module(module: str, name: str) -> str:
    """What ``from module import name`` imports: a module of that name, if there is one."""
    inside = PACKAGE / module.replace(".", "/") / f"{name}.py"
    return f"{module}.{name}" if inside.exists() else module


def test_lower_layers_never_import_upper_ones() -> None:
    level = {name: number for number, names in enumerate(LAYERS) for name in names}
    for name, number in level.items():
        for other in imports_of(PACKAGE / (name.replace(".", "/") + ".py")):
            assert other in level, f"{name} imports {other}, which has no layer"
            assert level[other] > number, f"{name} imports {other}, which is not below it"


def test_every_core_module_has_a_layer() -> None:
    modules = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
    assert modules <= {name for names in LAYERS for name in names}


def test_private_names_of_torch_are_only_in_compat() -> None:
    for path in PACKAGE.rglob("*.py"):
        if path.name == "compat.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                root = node
                while isinstance(root, ast.Attribute):
                    root = root.value  # type: ignore[assignment]
                owner = root.id if isinstance(root, ast.Name) else ""
                assert owner in ("self", "cls", "watchdog"), f"{path.name}:{node.lineno} uses {ast.unparse(node)}"
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
                assert not any(name.startswith("_") for name in names), f"{path.name}:{node.lineno}"


def test_the_plans_maths_import_no_distributed() -> None:
    for path in (PACKAGE / "plan").glob("*.py"):
        if path.stem not in ("dryrun", "calibrate", "launching"):  # which run and measure things
            assert "torch.distributed" not in path.read_text(), path.name


def test_the_layout_imports_no_distributed() -> None:
    assert "distributed" not in (PACKAGE / "layout.py").read_text()


def test_importing_the_package_starts_no_process_and_sets_no_variable() -> None:
    program = (
        "import os, subprocess, multiprocessing.process as p\n"
        "before = dict(os.environ)\n"
        "def refuse(*a, **k): raise SystemExit('a process was started')\n"
        "subprocess.Popen.__init__ = refuse\n"
        "p.BaseProcess.start = refuse\n"
        "import torch\n"
        "middle = dict(os.environ)\n"
        "import zeroshard\n"
        "assert dict(os.environ) == middle, 'a variable was set'\n"
        "import torch.distributed as dist\n"
        "assert not dist.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
