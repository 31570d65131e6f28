from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

MEMORY = Path("/dev/shm")


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """In memory where that is possible: every save waits for the disk several times, which is not what is tested."""
    if not os.access(MEMORY, os.W_OK) or shutil.disk_usage(MEMORY).free < 1 << 30:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=MEMORY, prefix="checkpoint-tests-") as folder:
        yield Path(folder)
