"""Says how to install a library that an integration needs, if it is missing."""

from __future__ import annotations

from importlib.util import find_spec


def require(library: str, what: str, extra: str | None = None) -> None:
    """Raises if a library cannot be imported.

    Args:
        library: the name that is imported.
        what: what needs the library, as the user wrote it.
        extra: the extra of this package that installs the library. Without one, the library's own name is given.
    """
    found = find_spec(library)
    if found is None or found.origin is None:  # a folder of this name, such as the one W&B writes to, is no library
        command = f"pip install {library}" if extra is None else f"pip install 'zeroshard[{extra}]'"
        raise ImportError(f"{what} needs {library}, which is not installed; {command}", name=library)
