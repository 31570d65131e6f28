"""The data of a language model: documents encoded once, held out or trained on by their content, and packed."""

import contextlib
import hashlib
import json
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...config.finetune import FilesConfig
from .documents import DataError, find_files, read_documents
from .encoding import Encoder
from .packing import IGNORED, Excerpt, Sequences

CACHE = "tokens"
FORMAT = 1
FEW = 10
"""With fewer documents none is held out, unless its content decides so."""


@dataclass(frozen=True)
class Dataset:
    """Packed documents on two sides."""

    training: Sequences
    held_out: Sequences | None
    """None if no document is held out."""
    documents: tuple[int, int]
    """How many are trained on, and how many are held out."""
    tokens: int
    skipped: int
    """Documents without a token to predict."""
    cut: int
    """Documents that are longer than a sequence."""
    digest: str
    """A fingerprint of all tokens and targets."""
    stored: Path | None
    """The file with the tokens, from which other ranks and later runs read them. None if there is no folder for it."""
    prompt: list[int]
    """The tokens with which a held-out document begins, before what is predicted; of a training document if need be."""


@dataclass(frozen=True)
class _Encoded:
    tokens: Tensor
    targets: Tensor
    documents: Tensor
    """For each document: where it begins, its tokens, and whether it is held out."""
    skipped: int


def read_dataset(
    config: FilesConfig, sequence: int, seed: int, encoder: Encoder, cache: Path | None, key: Sequence[str]
) -> Dataset:
    """Read, encode, divide and pack the files of a job.

    Args:
        config: the job's `[data]` table.
        sequence: the tokens of a sequence.
        seed: decides the order in which documents are packed.
        encoder: turns documents into tokens.
        cache: a folder for tokens, so that other ranks and later runs need not encode again; None for none.
        key: what tokens depend on, beside the files.

    Raises:
        DataError: the files have a mistake, or nothing to train on.
    """
    files = find_files(config.files)
    facts = [(str(file.absolute()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    name = _hash(json.dumps([FORMAT, facts, config.held_out, *key]).encode()).hex()
    stored = None if cache is None else cache / f"{CACHE}-{name[:16]}.safetensors"
    found = None if stored is None else _load(stored)
    if found is None:
        found = _encode(files, config.held_out, encoder)
        if stored is not None:
            _store(found, stored)
    sides: list[list[Excerpt]] = [[], []]
    for start, length, held_out in found.documents.tolist():
        sides[held_out].append(Excerpt(start, length))
    training = Sequences.pack(found.tokens, found.targets, sides[0], sequence, seed)
    held_out = Sequences.pack(found.tokens, found.targets, sides[1], sequence, seed) if sides[1] else None
    if not training.packs:
        raise DataError(f"data: {', '.join(map(str, files[:3]))} has nothing to train on")
    return Dataset(
        training=training,
        held_out=held_out,
        documents=(len(sides[0]), len(sides[1])),
        tokens=found.tokens.numel(),
        skipped=found.skipped,
        cut=int((found.documents[:, 1] > sequence).sum()),
        digest=_hash(found.tokens, found.targets).hex(),
        stored=stored,
        prompt=_prompt(found, (sides[1] or sides[0])[0], sequence),
    )


def remove_stored(cache: Path, used: Collection[Path | None]) -> None:
    """Remove stored tokens that no rank uses: of other files, of another tokenizer, and what a killed process left.

    One rank calls this, when all ranks have read their tokens.
    """
    keep = {file.name for file in used if file is not None}
    for file in cache.glob(f"{CACHE}-*.safetensors*"):
        if file.name not in keep:
            with contextlib.suppress(OSError):  # a folder that cannot be written does not matter
                file.unlink()


def _encode(files: Sequence[Path], share: float, encoder: Encoder) -> _Encoded:
    tokens, targets, hashes = [], [], list[int]()
    documents: list[tuple[int, int]] = []
    start = skipped = 0
    for document in read_documents(files):
        found = encoder.encode(document)
        if not any(found.trained[1:]):
            skipped += 1
            continue
        mine = torch.tensor(found.tokens, dtype=torch.int32)
        following = torch.full_like(mine, IGNORED)
        following[:-1] = torch.where(torch.tensor(found.trained[1:]), mine[1:], IGNORED)
        tokens.append(mine)
        targets.append(following)
        documents.append((start, len(mine)))
        hashes.append(int.from_bytes(_hash(mine)[:8]))
        start += len(mine)
    if not documents:
        named = ", ".join(map(str, files[:3]))
        raise DataError(f"data: {named} has no document with a token to predict ({skipped} without one)")
    held_out = [number < share * 2**64 for number in hashes]
    if share and not any(held_out) and len(documents) >= FEW:
        held_out[hashes.index(min(hashes))] = True
    if all(held_out):
        raise DataError(f"data.held_out: all {len(documents)} document(s) would be held out; say less, or 0")
    rows = [[*document, int(out)] for document, out in zip(documents, held_out, strict=True)]
    return _Encoded(torch.cat(tokens), torch.cat(targets), torch.tensor(rows), skipped)


def _prompt(found: _Encoded, excerpt: Excerpt, sequence: int) -> list[int]:
    """Return the first tokens of a document: up to the first that is predicted, or a few words of a text."""
    learned = (found.targets[excerpt.start : excerpt.start + excerpt.length] != IGNORED).nonzero()
    first = int(learned[0]) + 1
    size = first if first > 1 else min(16, max(1, excerpt.length // 2))
    return [int(token) for token in found.tokens[excerpt.start : excerpt.start + min(size, sequence // 2)]]


def _hash(*contents: bytes | Tensor) -> bytes:
    """Return a fingerprint of some contents, one after the other. Copies none of them."""
    found = hashlib.blake2b(digest_size=32)
    for content in contents:
        found.update(content if isinstance(content, bytes) else content.numpy().data)
    return found.digest()


def _store(found: _Encoded, file: Path) -> None:
    """Write tokens where other ranks and runs find them. A folder that cannot be written does not matter."""
    partial = file.with_name(f"{file.name}.{os.getpid()}")
    tensors = {"tokens": found.tokens, "targets": found.targets, "documents": found.documents}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, partial, {"skipped": str(found.skipped)})
        os.replace(partial, file)
    except (OSError, SafetensorError):  # the second where a disk is full
        partial.unlink(missing_ok=True)


def _load(file: Path) -> _Encoded | None:
    if not file.is_file():
        return None
    try:
        with safe_open(file, "pt") as opened:
            tensors: dict[str, Any] = {name: opened.get_tensor(name) for name in ("tokens", "targets", "documents")}
            return _Encoded(**tensors, skipped=int(opened.metadata()["skipped"]))
    except (OSError, SafetensorError, KeyError, ValueError):
        return None  # a file that is damaged is written again
