"""Documents from files, and what is told of files that cannot be trained on."""

import json
import sys
import tracemalloc
from pathlib import Path

import pytest

from zeroshard.train.language.documents import DataError, find_files, read_documents


def told(file: Path, content: str | bytes) -> str:
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(DataError) as caught:
        list(read_documents([file]))
    return str(caught.value)


def test_a_text_file_is_one_document_and_a_line_of_json_is_one(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    rows = [{"text": "three"}, {"prompt": "four", "completion": "five", "score": 1}]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    found = list(read_documents(find_files([str(tmp_path)])))
    assert [document.row for document in found] == [{"text": "one\ntwo\n"}, *rows]
    assert [document.where for document in found] == [
        f"{tmp_path}/a.txt",
        f"{tmp_path}/b.jsonl:1",
        f"{tmp_path}/b.jsonl:2",
    ]


def test_parquet_has_the_same_columns(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    parquet.write_table(pyarrow.table({"messages": [messages, messages], "text": [None, None]}), tmp_path / "a.parquet")
    found = list(read_documents([tmp_path / "a.parquet"]))
    assert [document.row["messages"] for document in found] == [messages, messages]
    assert found[1].where == f"{tmp_path}/a.parquet, row 2"
    assert "cannot be read" in told(tmp_path / "b.parquet", "no parquet")


def test_a_line_without_end_is_told_and_never_read_whole(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    with open(file, "w") as opened:
        opened.write('{"text": "a"}\n')
        opened.truncate(10 << 30)  # a sparse file
    tracemalloc.start()
    with pytest.raises(DataError, match=r"a\.jsonl:2: is longer than 64 MiB; write one JSON object a line"):
        list(read_documents([file]))
    assert tracemalloc.get_traced_memory()[1] < 200 << 20
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{", "is no JSON, from character 2 on: Expecting property name"),
        ('{"text": "a\x00"}', "is no JSON, from character 12 on: Invalid control character"),
        ('{"text": ' + "[" * 10**5, "has too many brackets in brackets"),
        ('{"text": ' + "1" * 5000 + "}", "has a number with too many digits"),
        (r'{"text": "a \ud83d"}', r"has one half of a \ud… pair without the other"),
        ('{"messages": [{"role": "user", "content": ["a"]}]}', """message 1: "content" must be a string, is ['a']"""),
        ("[1]", "must be a JSON object, is [1]"),
        ('{"txt": "a"}', 'has txt; it needs "text", "prompt" and "completion", or "messages"'),
        ("{}", "has nothing; it needs"),
        ('{"text": 5}', '"text" must be a string, is 5'),
        ('{"text": ""}', '"text" is empty'),
        ('{"prompt": "a"}', '"completion" must be a string, is None'),
        ('{"completion": "a"}', '"prompt" must be a string, is None'),
        ('{"messages": []}', '"messages" must be a list of messages, is []'),
        ('{"messages": [{"content": "a"}]}', 'message 1 must be {"role", "content"}'),
        ('{"messages": [{"role": "assistant"}]}', 'message 1: "content" must be a string, is None'),
        ('{"messages": [{"role": "user", "content": "a"}]}', "has no message of the assistant"),
    ],
)
def test_a_mistake_is_told_by_file_and_line(line: str, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    assert f"{file}:2: {expected}" in told(file, '{"text": "good"}\n' + line + "\n")


def test_the_first_mistakes_of_a_file_are_told_at_once(tmp_path: Path) -> None:
    found = told(tmp_path / "a.jsonl", "1\n" * 50)
    assert [line.split(":")[1] for line in found.splitlines()[1:]] == ["1", "2", "3", "4", "5"]


def test_text_that_is_no_utf_8_is_told_by_line(tmp_path: Path) -> None:
    assert f"{tmp_path}/a.txt:2: is no UTF-8 text" in told(tmp_path / "a.txt", b"good\nb\xff\n")
    assert f"{tmp_path}/a.jsonl:1: is no UTF-8 text" in told(tmp_path / "a.jsonl", b'{"text": "\xff"}\n')


def test_paths_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[]")
    (tmp_path / "inner").mkdir()
    for path, expected in (
        (tmp_path / "none.txt", "no such file"),
        (tmp_path / "a.json", "write one JSON object a line, as .jsonl"),
        (tmp_path / "inner", "no file in"),
    ):
        with pytest.raises(DataError, match=expected):
            find_files([str(path)])


def test_a_character_in_two_halves_is_one(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "🙂"}))
    assert [document.row["text"] for document in read_documents([tmp_path / "a.jsonl"])] == ["🙂"]


def test_parquet_without_pyarrow_is_told_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "a.parquet needs pyarrow, which is not installed; pip install pyarrow" in told(tmp_path / "a.parquet", "")


def test_files_of_a_folder_are_found_in_any_case_and_hidden_ones_are_not(tmp_path: Path) -> None:
    for name in ("b/C.TXT", "a.txt", ".hidden.txt", ".cache/a.txt", "b/.cache/a.txt", "a.py"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("red")
    found = find_files([str(tmp_path)])
    assert [str(file.relative_to(tmp_path)) for file in found] == ["a.txt", "b/C.TXT"]
    assert [document.row for document in read_documents(found)] == [{"text": "red"}] * 2
    with pytest.raises(DataError, match=r"a\.txt is there twice"):
        find_files([str(tmp_path), str(tmp_path / "a.txt")])
