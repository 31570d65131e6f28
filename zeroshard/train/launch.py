"""Starts the ranks of this node with torchrun. It runs in this process, so that failures are told in plain words."""

import logging
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import torch.distributed.run as torchrun
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from ..system.machine import usable_cores
from .rendezvous import one_node_options
from .stopping import BY_SIGNAL, FINISHED, LAUNCHER, SAVING_SECONDS, STOP_FILE, command_title, leave_closed_output

FORWARDED = "SIGTERM,SIGQUIT"  # signals that torchrun passes on to the ranks; handlers below pass on SIGHUP and SIGINT
SIGNALS = 128  # the shell's exit code for a command that a signal ended is this and the signal's number
INTERRUPTED = SIGNALS + signal.SIGINT


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """How this node finds the other nodes. The defaults are a job on one node."""

    nnodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int = 29500
    local_addr: str | None = None
    """The address of this node for the other nodes, needed if its host name does not resolve."""

    def torchrun_options(self) -> list[str]:
        """Return torchrun's rendezvous options."""
        if self.nnodes == 1:
            return one_node_options(secrets.token_hex(8))
        given = {name: value for name, value in asdict(self).items() if value is not None}
        return [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]


def under_torchrun() -> bool:
    """Return whether this process is a rank already: torchrun, or a similar launcher, has set its environment."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(ranks: int, nodes: Nodes, arguments: Sequence[str], restarts: int = 0) -> int:
    """Run `zeroshard` with these arguments in every rank of this node and wait for them; returns an exit code."""
    # The default of torchrun is one thread a rank. More threads than cores would make ranks wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // ranks)))
    # Ranks that are told to stop save first. The default of torchrun is to kill them after 30 seconds.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SAVING_SECONDS))
    options = [*nodes.torchrun_options(), f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    options.append(f"--signals-to-handle={FORWARDED}")
    options += ["-m", "--", "zeroshard", *arguments]  # after "--" torchrun takes no argument for an option of its own
    with tempfile.TemporaryDirectory(prefix="zeroshard-") as folder:
        os.environ[LAUNCHER] = str(os.getpid())
        stop_file = os.environ[STOP_FILE] = str(Path(folder, "stopped"))
        try:
            code = _run(options)
        finally:
            del os.environ[LAUNCHER]  # it is not the launcher of ranks that this process starts in another way
        reason = Path(stop_file).read_text() if Path(stop_file).exists() else None
    if reason is None:
        if code > SIGNALS:
            _say(
                "interrupted; all ranks of this node were stopped before they could save. "
                "--resume auto goes on from the newest checkpoint, if --save-every wrote one"
            )
        return code
    if reason == FINISHED:  # a signal came too late to stop it
        return 0 if code > SIGNALS and code != INTERRUPTED else code
    if reason == BY_SIGNAL:
        return code if code == INTERRUPTED else 0
    return 1


def _run(options: list[str]) -> int:
    logging.disable(logging.ERROR)  # torchrun's own messages about a failure; `_tell` prints what matters
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # as under nohup
    former = None if ignored else signal.signal(signal.SIGHUP, _end_ranks)
    former_interrupt = signal.signal(signal.SIGINT, _interrupt_ranks)
    try:
        torchrun.run(torchrun.parse_args(options))
    except ChildFailedError as error:
        _tell(error)
        return 1
    except SignalException as error:
        return SIGNALS + error.sigval
    finally:
        signal.signal(signal.SIGINT, former_interrupt)
        if not ignored:
            signal.signal(signal.SIGHUP, former)
        logging.disable(logging.NOTSET)
        # Shows the cursor: a rank that died may have hidden it. Standard output may be for JSON lines.
        for stream in (sys.stderr, sys.stdout):
            if stream.isatty():
                print("\x1b[?25h", end="", file=stream, flush=True)
                break
    return 0


def _end_ranks(number: int, frame: FrameType | None) -> None:
    """Let torchrun pass SIGHUP on to the ranks. A closed terminal often sends it twice, and the second is ignored.

    torchrun's own handler would raise again, and leave ranks alone that save.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    leave_closed_output()
    raise SignalException("the terminal was closed", signal.SIGHUP)


def _interrupt_ranks(number: int, frame: FrameType | None) -> None:
    """At the first Ctrl-C let torchrun pass it on to the ranks, which save and end. At the next ones end them."""
    leave_closed_output()
    signal.signal(signal.SIGINT, _kill_ranks)
    raise SignalException("interrupted", signal.SIGINT)


def _kill_ranks(number: int, frame: FrameType | None) -> None:
    """End the ranks with all processes that they have started: each rank leads a session. torchrun waits for them."""
    with suppress(OSError):
        for process in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            with suppress(OSError):
                if os.getpgid(int(process)) == int(process):
                    os.killpg(int(process), signal.SIGKILL)


def _tell(error: ChildFailedError) -> None:
    """Print the first failing rank's traceback, then one line for each rank that failed."""
    _, first = error.get_first_failure()
    if isinstance(first.message, dict) and (trace := first.message.get("extraInfo", {}).get("py_callstack")):
        print(trace, file=sys.stderr)
    for rank, failure in sorted(error.failures.items(), key=lambda item: item[1].timestamp):
        _say(f"rank {rank} failed: {_cause(failure)}")


def _cause(failure: ProcessFailure) -> str:
    if failure.exitcode == -signal.SIGKILL:
        return "killed from outside (SIGKILL), most often because the machine ran out of memory"
    if failure.exitcode < 0:
        return f"ended by {failure.signal_name()}"
    if isinstance(failure.message, dict):
        return str(failure.message.get("message", "no message"))
    return f"exit code {failure.exitcode}"


def _say(text: str) -> None:
    print(f"{command_title()}: {text}", file=sys.stderr)
