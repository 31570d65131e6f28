"""The entry point of the `zeroshard` command."""

import sys


def main() -> int:
    """Say that there is nothing yet."""
    print("zeroshard: no command yet", file=sys.stderr)
    return 2
