"""The corpus: which files, which side, which windows."""

from pathlib import Path

import pytest
import torch

from zeroshard.config.job import DataConfig
from zeroshard.train.gpt.corpus import Corpus, is_held_out, text_files


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("corpus")
    for index in range(40):
        (root / f"part{index % 3}").mkdir(exist_ok=True)
        (root / f"part{index % 3}" / f"{index}.txt").write_text(f"file {index} " * 50)
    (root / "site-packages").mkdir()
    (root / "site-packages" / "other.txt").write_text("installed")
    (root / "image.png").write_bytes(b"\x89PNG")
    return root


def config(folder: Path, held_out: float = 0.3) -> DataConfig:
    return DataConfig(folder=str(folder), suffixes=(".txt",), held_out=held_out)


def test_by_default_it_reads_megabytes_of_the_standard_library() -> None:
    corpus = Corpus.read(DataConfig())
    assert len(corpus.training) > 5_000_000
    assert corpus.training.dtype is torch.uint8
    assert 0.01 < len(corpus.held_out) / len(corpus.training) < 0.2


def test_installed_packages_and_other_suffixes_are_left_out(folder: Path) -> None:
    files = text_files(folder, (".txt",))
    assert len(files) == 40
    assert files == sorted(files)


def test_every_file_is_on_exactly_one_side_and_whole(folder: Path) -> None:
    corpus = Corpus.read(config(folder))
    training, held_out = (set(bytes(side.numpy()).split(b"\0")[:-1]) for side in (corpus.training, corpus.held_out))
    assert not training & held_out
    assert training | held_out == {file.read_bytes() for file in folder.glob("part*/*.txt")}


def test_a_file_keeps_its_side_when_others_come_and_go() -> None:
    names = [Path(f"{index}.py") for index in range(2000)]
    share = sum(is_held_out(name, 0.1) for name in names) / len(names)
    assert share == pytest.approx(0.1, abs=0.03)
    assert all(is_held_out(name, 0.2) for name in names if is_held_out(name, 0.1))


def test_batches_are_distinct_by_rank_and_step_and_reproducible(folder: Path) -> None:
    corpus = Corpus.read(config(folder))

    def batch(seed: int = 0, step: int = 0, rank: int = 0) -> list[int]:
        made = corpus.training_share(of_ranks=2, of_batch=4, ranks=2, sequence=32, seed=seed, step=step, rank=rank)
        assert torch.equal(made.tokens[:, 1:], made.targets[:, :-1])
        assert made.tokens.dtype is torch.int64
        return made.tokens.flatten().tolist()

    assert batch() == batch()
    assert len({tuple(batch(*which)) for which in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)]}) == 5


def test_any_number_of_ranks_trains_on_the_same_windows(folder: Path) -> None:
    corpus = Corpus.read(config(folder))

    def windows(ranks: int) -> list[list[int]]:
        parts = [
            corpus.training_share(of_ranks=2, of_batch=6, ranks=ranks, sequence=16, seed=0, step=5, rank=rank)
            for rank in range(ranks)
        ]
        assert all(len(part.tokens) == 12 // ranks for part in parts)
        return [row.tolist() for part in parts for row in part.tokens]

    assert windows(1) == windows(2) == windows(3) == windows(4) == windows(12)


def test_ranks_together_evaluate_on_the_same_windows_as_one_rank(folder: Path) -> None:
    corpus = Corpus.read(config(folder))

    def windows(ranks: int, batches: int) -> set[tuple[int, ...]]:
        parts = [
            list(corpus.held_out_batches(batches=batches, batch=2, sequence=16, rank=rank, ranks=ranks))
            for rank in range(ranks)
        ]
        assert all(len(part) == batches for part in parts)
        return {tuple(row.tolist()) for part in parts for batch in part for row in batch.tokens}

    assert windows(ranks=1, batches=6) == windows(ranks=3, batches=2)


def test_a_folder_without_such_files_is_named(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"data.folder: no file in .* ends in .rst"):
        Corpus.read(DataConfig(folder=str(folder), suffixes=(".rst",)))


def test_a_corpus_with_one_side_empty_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="none fall to the held-out side"):
        Corpus.read(config(folder, held_out=1e-9))
