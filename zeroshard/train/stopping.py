"""What ends a run before its last step: a signal, a terminal that is closed, a launcher that is gone."""

import os
import select
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Self

from ..storage.background import abandon_all, finish_all

STOP_FILE = "ZEROSHARD_STOP_FILE"  # environment variable: a file in which a rank tells its launcher how the run ended
LAUNCHER = "ZEROSHARD_LAUNCHER"  # environment variable: the process of `zeroshard train` that started the ranks
COMMAND = "ZEROSHARD_COMMAND"  # environment variable: the command that started the ranks, for what they print
BY_SIGNAL = "a signal"
FINISHED = "finished"
SAVING_SECONDS = 300
"""How long ranks that were told to stop may take to save."""
LOOK_SECONDS = 0.2
FINISH_SECONDS = 3.0
"""How long a rank whose launcher is gone goes on writing a checkpoint that it has begun."""
DROP_SECONDS = 1.0
"""How long the rank then takes at most to remove what it has written."""

_told_to_stop = threading.Event()


class StopSignals:
    """Inside, SIGTERM, SIGHUP and the first SIGINT ask a run to save and to end. The second SIGINT ends it at once.

    A signal that was ignored stays so, as under nohup.
    """

    def __init__(self, ask: Callable[[], None]) -> None:
        self._ask, self._former = ask, dict[int, Any]()
        self.received: str | None = None
        """The signal that this rank got; None if it got none."""

    def __enter__(self) -> Self:
        _told_to_stop.clear()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._former[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        _told_to_stop.set()
        self._ask()
        leave_closed_output()
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            if os.environ.get("RANK", "0") == "0":
                again = "; Ctrl-C once more ends it at once" if LAUNCHER in os.environ else ""
                with suppress(OSError, RuntimeError):  # nobody reads, or the signal came in the middle of another line
                    text = f"Ctrl-C: the run saves and ends{again}"
                    print(f"{command_title()}: {text}", file=sys.stderr, flush=True)


def leave_closed_output() -> None:
    """Send output nowhere if its terminal was closed, or its reader is gone. Else the next line would raise.

    Ctrl-C also ends the reader in `zeroshard train | tee log`.
    """
    for descriptor in (1, 2):
        with suppress(OSError):
            mode = os.fstat(descriptor).st_mode
            closed = stat.S_ISCHR(mode) and not os.isatty(descriptor)
            if closed or (stat.S_ISFIFO(mode) and not _has_reader(descriptor)):
                _send_nowhere(descriptor)


def _has_reader(pipe: int) -> bool:
    poll = select.poll()
    poll.register(pipe, 0)
    return not any(event & select.POLLERR for _, event in poll.poll(0))


def _send_nowhere(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is of another user
        pass
    return True


def name_command(command: str) -> None:
    """Note which command of `zeroshard` this process runs. Ranks inherit the name: those of finetune run `train`."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or COMMAND not in os.environ:
        os.environ[COMMAND] = command


def command_title() -> str:
    """Return what lines of the launcher begin with, as `zeroshard finetune`."""
    return f"zeroshard {os.environ.get(COMMAND, 'train')}"


def tell_launcher(reason: str) -> None:
    """Tell the process that started this node's ranks why the run ended. Every rank calls this."""
    if (file := os.environ.get(STOP_FILE)) and os.environ.get("LOCAL_RANK", "0") == "0":
        Path(file).write_text(reason)


class LauncherWatch:
    """Ends this rank a few seconds after its launcher, however the launcher ends.

    Only a rank of torchrun's agent has a launcher, which waits for its ranks. Whoever starts a process in another way
    may end before the process: a shell in which it runs in the background, say.
    """

    def __init__(self) -> None:
        self._launcher = os.getppid()
        named = os.environ.get(LAUNCHER)
        if named is not None and not _is_alive(int(named)):
            self._launcher = int(named)  # it ended while this rank started
        self._told = threading.Lock()
        if "TORCHELASTIC_RUN_ID" in os.environ:
            threading.Thread(target=self._run, name="zeroshard-launcher", daemon=True).start()

    def is_gone(self) -> bool:
        """Return whether the launcher has ended. Says so on stderr the first time."""
        if "TORCHELASTIC_RUN_ID" not in os.environ or os.getppid() == self._launcher:
            return False
        if self._told.acquire(blocking=False):
            rank = os.environ.get("RANK")
            try:
                text = f"rank {rank} ends: its launcher, process {self._launcher}, is gone"
                print(f"{command_title()}: {text}", file=sys.stderr)
            except OSError:  # the reader of the output is gone, too
                _send_nowhere(2)
        return True

    def _run(self) -> None:
        while not self.is_gone():
            time.sleep(LOOK_SECONDS)
        if _told_to_stop.is_set():  # the rank saves already, and ends by itself
            time.sleep(SAVING_SECONDS)
        finishing = threading.Thread(target=finish_all, name="zeroshard-finish", daemon=True)
        finishing.start()
        finishing.join(FINISH_SECONDS)
        abandon_all()
        finishing.join(DROP_SECONDS)
        os._exit(1)
