"""Lines of code by room: blank lines, comments, docstrings and imports do not count.

python benchmarks/code_lines.py [FOLDER]
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

SKIPPED = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def code_lines(text: str) -> int:
    """The number of lines of a module that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SKIPPED:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.Import | ast.ImportFrom) or (is_text and isinstance(node.value.value, str)):
            lines.difference_update(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def main() -> None:
    """Prints a row for each room, and the sum."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else "zeroshard")
    files: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for file in root.rglob("*.py"):
        parts = file.relative_to(root).parts
        room = parts[0] if len(parts) > 1 else "(top)"
        files[room] += 1
        lines[room] += code_lines(file.read_text())
    for room in sorted(files):
        print(f"{room:14}{files[room]:4} files {lines[room]:7,} lines of code")
    print(f"{'all':14}{files.total():4} files {lines.total():7,} lines of code")


if __name__ == "__main__":
    main()
