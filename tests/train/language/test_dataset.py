"""Data of a job: which documents are held out, what is stored for other ranks, and what is refused."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest

from tests.train.language.chats import VOCABULARY, chats, make_tokenizer, text, write_lines
from zeroshard.config.finetune import FilesConfig
from zeroshard.train.language.dataset import Dataset, read_dataset, remove_stored
from zeroshard.train.language.documents import DataError
from zeroshard.train.language.encoding import Encoder


def read(files: Path, cache: Path | None = None, *, share: float = 0.2, sequence: int = 32) -> Dataset:
    config = FilesConfig(files=(str(files),), held_out=share)
    return read_dataset(config, sequence, 0, Encoder(make_tokenizer(), VOCABULARY), cache, [])


def test_the_content_of_a_document_decides_its_side(tmp_path: Path) -> None:
    rows = [{"text": text(5, seed)} for seed in range(100)]
    found = read(write_lines(tmp_path / "a.jsonl", rows))
    again = read(write_lines(tmp_path / "b.jsonl", [*rows[::-1], *rows]))
    assert found.documents[1] in range(10, 31)
    assert [2 * number for number in found.documents] == list(again.documents), "copies are on one side"


def test_one_document_is_held_out_of_a_few_and_none_of_less(tmp_path: Path) -> None:
    rows = [{"text": text(5, seed)} for seed in range(12)]
    assert read(write_lines(tmp_path / "a.jsonl", rows), share=1e-9).documents == (11, 1)
    assert read(write_lines(tmp_path / "a.jsonl", rows), share=0).held_out is None
    assert read(write_lines(tmp_path / "a.jsonl", rows[:3]), share=1e-9).held_out is None


def test_tokens_are_stored_for_the_next_process_and_anew_for_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, encoded = write_lines(tmp_path / "a.jsonl", chats(20)), []
    original = Encoder.encode

    def encode(self: Encoder, document: Any) -> Any:
        encoded.append(document)
        return original(self, document)

    monkeypatch.setattr(Encoder, "encode", encode)
    first = read(file, tmp_path / "cache")
    assert len(encoded) == 20
    assert read(file, tmp_path / "cache").digest == first.digest
    assert len(encoded) == 20
    (stored,) = (tmp_path / "cache").iterdir()
    stored.write_bytes(stored.read_bytes()[:100])
    assert read(file, tmp_path / "cache").digest == first.digest
    assert len(encoded) == 40, "a damaged file is made again"
    assert read(write_lines(file, chats(21)), tmp_path / "cache").digest != first.digest


def test_stored_tokens_that_no_rank_uses_are_removed(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    found = [read(write_lines(tmp_path / f"{number}.jsonl", chats(20 + number)), cache) for number in range(3)]
    stored = [each.stored for each in found]
    (cache / "tokens-0000000000000000.safetensors.4711").write_text("of a process that was killed")
    (cache / "notes.txt").write_text("of the user")
    remove_stored(cache, [stored[1], stored[2], None])
    assert {file.name for file in cache.iterdir()} == {"notes.txt", *(file.name for file in stored[1:] if file)}
    remove_stored(tmp_path / "not there", [])


def test_the_prompt_of_the_sample_ends_where_the_assistant_begins(tmp_path: Path) -> None:
    found = read(write_lines(tmp_path / "a.jsonl", chats(20)))
    prompt = make_tokenizer().decode(found.prompt)
    assert prompt.startswith("<|user|>")
    assert prompt.endswith("<|end|><|assistant|>")


def test_data_without_anything_to_learn_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "a.jsonl"
    empty.write_text("")
    with pytest.raises(DataError, match="has no document with a token to predict"):
        read(empty)
    one = write_lines(tmp_path / "b.jsonl", [{"text": "red cat"}])
    with pytest.raises(DataError, match=r"all 1 document\(s\) would be held out"):
        read(one, share=1 - 1e-12)


def test_a_disk_without_room_for_stored_tokens_does_not_matter(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", chats(20))
    expected = read(file).digest
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, former[1]))
    try:
        found = read(file, tmp_path / "cache")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
    assert found.digest == expected
    assert list((tmp_path / "cache").iterdir()) == []


def test_documents_longer_than_a_sequence_are_counted(tmp_path: Path) -> None:
    rows = [{"text": text(words, words)} for words in (3, 4, 40, 50)]
    assert read(write_lines(tmp_path / "a.jsonl", rows), share=0).cut == 2
