"""The checks of pages find what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from from_code.project import DOCS, ROOT, relinked

from tests.docs import commands
from tests.docs.given import preamble
from tests.docs.pages import blocks_of

PAGE = """\
<!-- given: model -->
```python
first = model
```

<!-- output -->
```text
words
```

<!-- continued -->
<!-- raises: ValueError -->
```python
second = first
```

```diff
-old = 1
+new = 1
 print(1)
```

```{toctree}
not/code
```
"""


@pytest.mark.parametrize(
    "command",
    [
        "zeroshard train --no-such-option",
        "zeroshard train no-such-preset",
        "zeroshard train tiny --set shard.stage=7",
        "zeroshard plan no-such-preset",
        "python no_such_file.py",
        "python -m no.such.module",
        "torchrun --no-such-option train.py",
        "make no-such-target",
        "pip install 'zeroshard[no-such-extra]'",
        "sbatch no-such-file.sbatch",
        "rm -rf runs",
    ],
)
def test_a_command_that_could_not_run_is_found(command: str) -> None:
    with pytest.raises((AssertionError, SystemExit, ValueError)):
        commands.check(command)


def test_blocks_are_read_with_their_comments_and_what_they_continue(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    first, shown, second, change = blocks_of(page)
    assert first.needs == {"given": "model"}
    assert shown.before is first
    assert second.needs == {"continued": "", "raises": "ValueError"}
    assert second.before is first
    assert second.program == "first = model\n\nsecond = first\n"
    assert second.first is first
    assert change.side("-") == "old = 1\nprint(1)"
    assert change.side("+") == "new = 1\nprint(1)"


def test_a_name_that_nobody_defines_is_refused() -> None:
    with pytest.raises(AssertionError, match="nobody"):
        preamble("model, nobody")


def test_a_name_is_defined_after_what_it_needs() -> None:
    program = preamble("sharded")
    assert program.index("class GPT") < program.index("model = GPT()") < program.index("optimizer = ")
    assert program.index("optimizer = ") < program.index("zeroshard.shard(")


def test_links_to_pages_of_the_project_lead_to_their_copies() -> None:
    page = DOCS / "how-to" / "page.md"
    text = "[one](../../SECURITY.md#files) [two](../../LICENSE) [three](hangs.md) [four](https://arxiv.org/abs/1)"
    after = "[one](../project/security.md#files) two [three](hangs.md) [four](https://arxiv.org/abs/1)"
    assert relinked(text, page, page) == after
    assert relinked("```python\na[0](b)\n```", ROOT / "README.md", page) == "```python\na[0](b)\n```"
