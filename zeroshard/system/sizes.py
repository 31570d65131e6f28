"""Numbers of bytes as people read them."""

from __future__ import annotations


def size_text(size: float) -> str:
    """A number of bytes as text, with three digits.

    >>> size_text(31.44e9), size_text(2e6)
    ('31.4 GB', '2 MB')
    """
    unit, name = next(((u, n) for u, n in ((1e9, "GB"), (1e6, "MB")) if size >= 0.9995 * u), (1e3, "KB"))
    return f"{size / unit:.3g} {name}"
