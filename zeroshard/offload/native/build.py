"""Compiles the host optimizer with any C++17 compiler, in a few seconds.

    python -m zeroshard.offload.native.build      # into this folder, for use from a source tree

`pip install` does the same. Its setup.py loads this file by path, so this file imports only the standard library.
The name of the library has a hash of the sources in it, so that an old library is never taken for a current one.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
CXX_VARIABLE: Final = "CXX"
COMPILERS: Final = ("c++", "g++", "clang++")
TIMEOUT: Final = 300.0  # seconds for one file

# No contraction: a fused multiply-add rounds once instead of twice, so paths would differ.
# No errno: otherwise sqrt would be a call instead of an instruction. No flag changes a value.
FLAGS: Final = ("-std=c++17", "-O3", "-fPIC", "-pthread", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno")

# A path may need instructions that a processor does not have. So the path is chosen at run time.
X86: Final = platform.machine().lower() in ("x86_64", "amd64")
INSTRUCTIONS: Final = {
    "path_avx2": ("-mavx2", "-mf16c"),
    "path_avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"),
}


class BuildError(Exception):
    """The library could not be built or loaded. The text says why."""


def library_name() -> str:
    """The file name of the library that these sources make on this machine."""
    digest = hashlib.sha256(f"{platform.system()} {platform.machine()} {FLAGS} {INSTRUCTIONS}".encode())
    for source in sorted([*HERE.glob("*.h"), *HERE.glob("*.cpp")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return f"libzeroshard-{digest.hexdigest()[:16]}.so"


def build(folder: Path) -> Path:
    """Compiles the library into a folder and returns its path. Many processes may do so at once.

    Raises:
        BuildError: there is no compiler, it failed, or the folder cannot be written.
    """
    compiler = _compiler()
    target = folder / library_name()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as work:
            sources = sorted(HERE.glob("*.cpp"))
            with ThreadPoolExecutor(len(sources)) as threads:
                objects = list(threads.map(lambda source: _compile(compiler, source, Path(work)), sources))
            linked = Path(work, target.name)
            _run([*compiler, "-shared", "-pthread", *map(str, objects), "-o", str(linked)])
            linked.chmod(0o755)  # whatever the umask: a library that others can write is not loaded
            os.replace(linked, target)  # in one step, because another rank may load the file at any moment
    except OSError as error:
        raise BuildError(f"{folder} cannot be written: {error}") from error
    return target


def install(folder: Path) -> Path:
    """Compiles the library into a package's folder, and removes libraries of older sources."""
    for old in folder.glob("libzeroshard-*.so"):
        old.unlink()
    return build(folder)


def _compiler() -> list[str]:
    if asked := os.environ.get(CXX_VARIABLE):
        return shlex.split(asked)
    for name in COMPILERS:
        if found := shutil.which(name):
            return [found]
    raise BuildError(f"no C++ compiler found ({', '.join(COMPILERS)}, ${CXX_VARIABLE})")


def _compile(compiler: list[str], source: Path, work: Path) -> Path:
    made = work / f"{source.stem}.o"
    instructions = INSTRUCTIONS.get(source.stem, ()) if X86 else ()
    _run([*compiler, *FLAGS, *instructions, "-c", str(source), "-o", str(made)])
    return made


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=TIMEOUT
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} could not be run: {error}") from error
    if done.returncode != 0:
        complaint = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[-200:])
        raise BuildError(f"{command[0]} failed: {complaint}")


def main() -> int:
    """Builds the library beside the sources. Returns 1 and prints the reason if that fails."""
    try:
        print(install(HERE))
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
