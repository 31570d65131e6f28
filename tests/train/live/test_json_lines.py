"""JSON lines: one object a line, with a fixed set of keys, and nothing else on standard output."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

from tests.train.live.events import OFFLOADED
from zeroshard.observe.ledger import Memory
from zeroshard.system.waits import Cause
from zeroshard.train.live.events import NAMES
from zeroshard.train.live.json_lines import JsonLines

PAGE = (Path(__file__).parents[3] / "docs/how-to/live.md").read_text()


def test_a_line_is_an_object_with_the_values_of_the_event() -> None:
    stream = io.StringIO()
    lines = JsonLines(stream)
    lines.receive(OFFLOADED)
    lines.receive(replace(OFFLOADED, loss=float("nan"), gradient_norm=float("inf"), host_memory=None))
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert first["event"] == "step"
    assert first["loss"] == 4.25
    assert first["tokens_per_second"] == 12345.6
    assert first["exposed_waits"]["host_update"] == 0.011
    assert first["device_memory"]["parameters"] == 2_000_000
    assert first["host_memory"]["optimizer_states"] == 12_000_000
    assert second["loss"] is second["gradient_norm"] is second["host_memory"] is None
    assert first.keys() == second.keys() == {"event", *(entry.name for entry in fields(OFFLOADED))}


def test_the_documentation_names_every_key_of_every_event_and_no_other() -> None:
    for event, name in NAMES.items():
        (table,) = re.findall(rf"^### `{name}`\n(.*?)(?=^##|\Z)", PAGE, re.DOTALL | re.MULTILINE)
        assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [entry.name for entry in fields(event)]
    for kind in [entry.name for entry in fields(Memory) if entry.name != "place"] + [cause.value for cause in Cause]:
        assert f"`{kind}`" in PAGE


def test_what_a_process_prints_goes_to_standard_error_once_standard_output_is_taken() -> None:
    program = (
        "import os\n"
        "from zeroshard.train.live.json_lines import take_stdout\n"
        "print('before')\n"
        "lines = take_stdout()\n"
        "print('from python', flush=True)\n"
        "os.write(1, b'from elsewhere')\n"
        "lines.write('{}')\n"
        "lines.flush()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "before\n{}"
    assert "from python\nfrom elsewhere" in done.stderr
