"""Draws all pictures of the README from the data in `docs/pictures/data`.

python -m docs.pictures.draw     # from the root of the repository
"""

from __future__ import annotations

from docs.pictures import memory, speed, step
from docs.pictures.data import HERE

PICTURES = {"memory": memory.picture, "offload_step": step.picture, "speed": speed.picture}


def main() -> None:
    """Writes every picture beside this file."""
    for name, picture in PICTURES.items():
        (HERE / f"{name}.svg").write_text(str(picture()))


if __name__ == "__main__":
    main()
