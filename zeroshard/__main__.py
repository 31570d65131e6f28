"""`python -m zeroshard`, the same command as `zeroshard`; torchrun starts ranks with it."""

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
