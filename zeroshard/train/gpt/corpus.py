"""The corpus: bytes of text files, by default the source of the Python standard library, which every machine has.

A whole file is either for training or held out, so that no held-out line has a neighbour in training. The name of a
file decides its side, so every rank, machine and run agrees without communication.
"""

import hashlib
import math
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...config.job import DataConfig

END_OF_FILE = b"\0"  # follows every file; no text contains it
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})  # differ from machine to machine


@dataclass(frozen=True)
class Batch:
    """Tokens, and the token that follows each: both [batch, sequence] of int64."""

    tokens: Tensor
    targets: Tensor

    def to(self, device: torch.device) -> "Batch":
        """Return the same batch on a device."""
        return Batch(self.tokens.to(device), self.targets.to(device))


@dataclass(frozen=True)
class Corpus:
    """The files' bytes, one after the other, as two uint8 tensors."""

    training: Tensor
    held_out: Tensor
    files: int

    @classmethod
    def read(cls, config: DataConfig) -> "Corpus":
        """Read every file of the configured folder.

        Raises:
            ValueError: if either side would be empty.
        """
        root = Path(config.folder or sysconfig.get_paths()["stdlib"])
        training, held_out = bytearray(), bytearray()
        files = text_files(root, config.suffixes)
        for file in files:
            side = held_out if is_held_out(file, config.held_out) else training
            side += (root / file).read_bytes() + END_OF_FILE
        if not files:
            raise ValueError(f"data.folder: no file in {root} ends in {', '.join(config.suffixes)}; see data.suffixes")
        if not training or not held_out:
            raise ValueError(
                f"data.folder: of the {len(files)} files ending in {', '.join(config.suffixes)} in {root}, "
                f"{'all' if held_out else 'none'} fall to the held-out side; name a folder with more files, other "
                "data.suffixes or another data.held_out"
            )
        return cls(_tensor(training), _tensor(held_out), len(files))

    def training_share(
        self, *, of_ranks: int, of_batch: int, ranks: int, sequence: int, seed: int, step: int, rank: int
    ) -> Batch:
        """Return this rank's part of the random windows that all ranks train on in a step.

        A step has `of_ranks` · `of_batch` windows, and the seed and the step alone decide which. Any number of ranks
        divides the same windows.
        """
        each = of_ranks * of_batch // ranks
        first = rank * each
        origins = range(first // of_batch, math.ceil((first + each) / of_batch))
        starts = torch.cat([self._starts(of_batch, sequence, f"{seed}/{step}/{origin}") for origin in origins])
        first -= origins[0] * of_batch
        return _cut(self.training, starts[first : first + each], sequence)

    def _starts(self, count: int, sequence: int, key: str) -> Tensor:
        """Return where random windows start, always the same for the same key."""
        digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest))
        return torch.randint(_windows(self.training, sequence), (count,), generator=generator)

    def held_out_batches(self, *, batches: int, batch: int, sequence: int, rank: int, ranks: int) -> Iterator[Batch]:
        """Yield this rank's part of windows that are spread evenly over the held-out files, always the same windows.

        Every rank gets the same number, because every rank must take part in the forward of a sharded model.
        """
        spread = torch.linspace(0, _windows(self.held_out, sequence) - 1, ranks * batches * batch, dtype=torch.float64)
        for starts in spread.long()[rank::ranks].view(batches, batch):
            yield _cut(self.held_out, starts, sequence)


def text_files(root: Path, suffixes: Sequence[str]) -> list[Path]:
    """Return the files under a folder, relative to it, in an order that does not depend on the file system."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
        found += [Path(folder, name).relative_to(root) for name in names if name.endswith(tuple(suffixes))]
    return sorted(found)


def is_held_out(file: Path, share: float) -> bool:
    """Return whether a file is held out. Only its name and the share decide."""
    digest = hashlib.sha256(file.as_posix().encode(errors="surrogateescape")).digest()
    return int.from_bytes(digest[:8]) < share * 2**64


def _tensor(text: bytearray) -> Tensor:
    return torch.frombuffer(text, dtype=torch.uint8)


def _windows(text: Tensor, sequence: int) -> int:
    """Return how many windows of sequence + 1 bytes a text has."""
    if (windows := len(text) - sequence) < 1:
        raise ValueError(f"model.sequence: {sequence} is longer than the corpus of {len(text)} bytes")
    return windows


def _cut(text: Tensor, starts: Tensor, sequence: int) -> Batch:
    windows = text[starts[:, None] + torch.arange(sequence + 1)].long()  # [batch, sequence + 1]
    return Batch(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())
