"""The entry point of the `zeroshard` command; exit codes are 0 for success, 1 for a failure, 2 for bad input."""

import argparse
import os
import sys
from collections.abc import Sequence

from ..system.words import printable
from . import doctor, dryrun, export, finetune, plan, report, train

COMMANDS = {
    "train": train,
    "finetune": finetune,
    "plan": plan,
    "dryrun": dryrun,
    "report": report,
    "export": export,
    "doctor": doctor,
}
BAD_INPUT = 2  # argparse exits with the same code
BROKEN_PIPE = 141  # what a shell reports of programs that end so


def parser() -> argparse.ArgumentParser:
    """Return the command line of `zeroshard`, with a subcommand for each module of `COMMANDS`.

    Such a module has the texts `HELP`, `DESCRIPTION` and `EXAMPLES`, and two functions: `define` adds its options to a
    parser, `run` does the work and returns an exit code.
    """
    whole = argparse.ArgumentParser(
        prog="zeroshard", description="ZeRO stages 0 to 3 for unchanged PyTorch models and training loops."
    )
    subcommands = whole.add_subparsers(required=True, metavar="COMMAND", title="commands", dest="command")
    for name, module in COMMANDS.items():
        command = subcommands.add_parser(
            name,
            help=module.HELP,
            description=module.DESCRIPTION,
            epilog=module.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.define(command)
    return whole


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code; argparse itself exits with 2 on bad input."""
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = parser().parse_args(given)
    arguments.argv = given  # `train` starts its ranks with these arguments
    try:
        code: int = COMMANDS[arguments.command].run(arguments)
    except ValueError as error:
        if os.environ.get("RANK", "0") == "0":  # the other ranks find the same mistake
            print(f"zeroshard {arguments.command}: {printable(str(error))}", file=sys.stderr)
        return BAD_INPUT
    except BrokenPipeError:  # the reader of the output has ended, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would complain at exit
        return BROKEN_PIPE
    return code
