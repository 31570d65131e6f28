"""Documents to train a language model on: text, JSON lines and Parquet. A mistake is told by file and line."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...system.words import quoted, word

TEXT, LINES, PARQUET = (".txt", ".md"), (".jsonl", ".ndjson"), (".parquet",)
SUFFIXES = (*TEXT, *LINES, *PARQUET)
TEXT_KEY, PROMPT, COMPLETION, MESSAGES, TOOLS = "text", "prompt", "completion", "messages", "tools"
FORMS = (
    '"text", "prompt" and "completion", or "messages" (a list of {"role", "content"}); other columns are not trained on'
)
SURROGATE = rb"\ud"
"""How JSON begins one half of a character beyond 16 bits."""
LONGEST_LINE = 64 << 20
"""The most bytes of a line of JSON. Longer ones are of files that are no JSON lines."""
MOST_TOLD = 5
"""The most mistakes that are told at once."""


class DataError(ValueError):
    """Data that cannot be trained on. The message names files and lines."""


class Document(NamedTuple):
    """One text, one prompt with its completion, or one conversation."""

    where: str
    """The file, and the line or row."""
    row: Mapping[str, Any]


def find_files(paths: Sequence[str]) -> list[Path]:
    """Return the files to read: those that are named, and those inside folders, in an order that does not vary.

    Raises:
        DataError: a path is not there, is there twice, is of another kind, or a folder has nothing to train on.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if _is_data(file, path) and file.is_file())
            if not inside:
                raise DataError(f"data: no file in {path} ends in {', '.join(SUFFIXES)}")
            found += inside
        elif not path.is_file():
            raise DataError(f"data: no such file: {path}")
        elif path.suffix.lower() not in SUFFIXES:
            remedy = "; write one JSON object a line, as .jsonl" if path.suffix == ".json" else ""
            raise DataError(f"data: {path} is none of {', '.join(SUFFIXES)}{remedy}")
        else:
            found.append(path)
    twice = next((file for file, count in Counter(file.resolve() for file in found).items() if count > 1), None)
    if twice is not None:
        raise DataError(f"data: {twice} is there twice; name it once, or its folder, and say train.epochs for more")
    return found


def _is_data(file: Path, folder: Path) -> bool:
    """Return whether a file inside a folder is trained on, by its name. A hidden file is another program's."""
    hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    return file.suffix.lower() in SUFFIXES and not hidden


def read_documents(files: Sequence[Path]) -> Iterator[Document]:
    """Yield every document, in the order of files and lines. A text file is one document.

    Raises:
        DataError: with the first mistakes of the first file that has some.
    """
    for file in files:
        mistakes: list[str] = []
        for where, row in _rows(file):
            problem = row if isinstance(row, str) else _problem(row)
            if problem is not None:
                mistakes.append(f"{where}: {problem}")
                if len(mistakes) == MOST_TOLD:
                    break
            elif not mistakes and not isinstance(row, str):
                yield Document(where, row)
        if mistakes:
            raise DataError("data cannot be used:\n" + "\n".join(f"  {mistake}" for mistake in mistakes))


def _rows(file: Path) -> Iterator[tuple[str, Mapping[str, Any] | str]]:
    """Yield the rows of a file, each with its place; a text in place of a row says what is wrong with it."""
    if file.suffix.lower() in PARQUET:
        yield from _parquet(file)
        return
    if file.suffix.lower() in TEXT:
        try:
            yield str(file), {TEXT_KEY: file.read_text(encoding="utf-8")}
        except UnicodeDecodeError as error:
            line = file.read_bytes()[: error.start].count(b"\n") + 1
            yield f"{file}:{line}", "is no UTF-8 text"
        return
    with open(file, "rb") as lines:
        for number, content in enumerate(iter(lambda: lines.readline(LONGEST_LINE + 1), b""), start=1):
            if len(content) > LONGEST_LINE:
                remedy = "write one JSON object a line, and a long text as several"
                yield f"{file}:{number}", f"is longer than {LONGEST_LINE >> 20} MiB; {remedy}"
                return  # what follows is the rest of this line
            if content.strip():
                yield f"{file}:{number}", _parsed(content)


def _parsed(line: bytes) -> Mapping[str, Any] | str:
    try:
        row = json.loads(line.strip())
        if SURROGATE in line.lower():
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeDecodeError:
        return "is no UTF-8 text"
    except UnicodeEncodeError:
        return r"has one half of a \ud… pair without the other, which is no character"
    except json.JSONDecodeError as error:
        return f"is no JSON, from character {error.pos + 1} on: {error.msg.removesuffix(' at')}"
    except ValueError:
        return "has a number with too many digits"
    except RecursionError:
        return "has too many brackets in brackets"
    return row if isinstance(row, dict) else f"must be a JSON object, is {quoted(row, 40)}"


def _parquet(file: Path) -> Iterator[tuple[str, Mapping[str, Any] | str]]:
    try:
        import pyarrow  # type: ignore[import-untyped]
        from pyarrow import parquet
    except ImportError:
        raise DataError(f"data: {file} needs pyarrow, which is not installed; pip install pyarrow") from None
    number = 0
    try:
        for batch in parquet.ParquetFile(file).iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield f"{file}, row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        yield str(file), f"cannot be read: {error}"


def _problem(row: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a row; None if it can be trained on."""
    if row.get(MESSAGES) is not None:
        return _problem_of_messages(row[MESSAGES])
    if row.get(PROMPT) is not None or row.get(COMPLETION) is not None:
        keys: tuple[str, ...] = (PROMPT, COMPLETION)
    elif row.get(TEXT_KEY) is not None:
        keys = (TEXT_KEY,)
    else:
        names = ", ".join(map(word, list(row)[:8])) or "nothing"
        return f"has {names}; it needs {FORMS}"
    for key in keys:
        if not isinstance(row.get(key), str):
            return f'"{key}" must be a string, is {quoted(row.get(key), 40)}'
    if not row[keys[-1]]:
        return f'"{keys[-1]}" is empty'
    return None


def _problem_of_messages(messages: object) -> str | None:
    if not isinstance(messages, list) or not messages:
        return f'"messages" must be a list of messages, is {quoted(messages, 40)}'
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f'message {number} must be {{"role", "content"}}, is {quoted(message, 40)}'
        content = message.get("content")
        if not (isinstance(content, str) or _is_text_parts(content) or (content is None and message.get("tool_calls"))):
            return f'message {number}: "content" must be a string, is {quoted(content, 40)}'
    if not any(message["role"] == "assistant" for message in messages):
        return "has no message of the assistant, so there is nothing to train on"
    return None


def _is_text_parts(content: object) -> bool:
    return isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == TEXT_KEY and isinstance(part.get(TEXT_KEY), str)
        for part in content
    )


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as chat templates expect them: content that is parts of text is one text, and no key is empty.

    Most templates would write a list as Python does. Parquet has every key of a column in every message.

    >>> plain_messages([{"role": "user", "content": [{"type": "text", "text": "red"}], "tool_calls": None}])
    [{'role': 'user', 'content': 'red'}]
    """
    found = []
    for message in messages:
        given = {key: value for key, value in message.items() if value is not None or key == "content"}
        if isinstance(given.get("content"), list):
            given["content"] = "".join(part[TEXT_KEY] for part in given["content"])
        found.append(given)
    return found
