"""Which tokens of a document are learned, token by token."""

from __future__ import annotations

from typing import Any

import pytest

from tests.train.language.chats import MARKED, TEMPLATE, VOCABULARY, make_tokenizer
from zeroshard.train.language.documents import DataError, Document
from zeroshard.train.language.encoding import Encoded, Encoder

CHAT = [
    {"role": "system", "content": "red"},
    {"role": "user", "content": "one two"},
    {"role": "assistant", "content": "cat dog"},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "sun"},
]
AS_TEXT = (
    "<|system|>red<|end|><|user|>one two<|end|><|assistant|>cat dog<|end|><|user|>three<|end|><|assistant|>sun<|end|>"
)


def encode(tokenizer: Any, **row: Any) -> Encoded:
    return Encoder(tokenizer, VOCABULARY).encode(Document("here:7", row))


def parts(tokenizer: Any, found: Encoded) -> tuple[str, str]:
    """All text, and what is learned of it."""
    learned = [token for token, trained in zip(found.tokens, found.trained, strict=True) if trained]
    return tokenizer.decode(found.tokens), tokenizer.decode(learned)


def test_all_of_a_text_is_learned_and_it_ends_once() -> None:
    tokenizer = make_tokenizer()
    assert parts(tokenizer, encode(tokenizer, text="red cat")) == ("red cat<|end|>", "red cat<|end|>")
    assert parts(tokenizer, encode(tokenizer, text="red<|end|>"))[0] == "red<|end|>"


def test_the_completion_alone_is_learned() -> None:
    tokenizer = make_tokenizer()
    found = encode(tokenizer, prompt="one two", completion=" red cat")
    assert parts(tokenizer, found) == ("one two red cat<|end|>", " red cat<|end|>")
    given = len(tokenizer("one two")["input_ids"])
    assert found.trained == [False] * given + [True] * (len(found.tokens) - given)


@pytest.mark.parametrize("template", [TEMPLATE, MARKED])
def test_of_a_conversation_the_turns_of_the_assistant_are_learned(template: str) -> None:
    tokenizer = make_tokenizer(template)
    found = encode(tokenizer, messages=CHAT)
    assert parts(tokenizer, found) == (AS_TEXT, "cat dog<|end|>sun<|end|>")
    expected: list[bool] = []
    for message in CHAT:  # each piece by itself: special tokens divide them
        for text in (f"<|{message['role']}|>", f"{message['content']}<|end|>"):
            learned = message["role"] == "assistant" and not text.startswith("<|")
            expected += [learned] * len(tokenizer(text)["input_ids"])
    assert found.trained == expected


def test_a_template_that_changes_earlier_turns_is_refused_and_with_marks_it_is_not() -> None:
    changing = (
        "{% for m in messages %}{% if loop.last or m['role'] != 'assistant' %}<|X|>{{ m['content'] }}{% endif %}"
        "{% endfor %}"
    ).replace("<|X|>", "<|user|>")
    with pytest.raises(DataError, match=r"here:7: the chat template renders message 3 in another way.*generation"):
        encode(make_tokenizer(changing), messages=CHAT)
    assert any(encode(make_tokenizer(MARKED), messages=CHAT).trained)


def test_what_a_tokenizer_cannot_do_is_told_by_line() -> None:
    from transformers import ByT5Tokenizer

    with pytest.raises(DataError, match=r"here:7: has \"messages\", and the tokenizer has no chat template"):
        encode(make_tokenizer(None), messages=CHAT)
    with pytest.raises(DataError, match=r"here:7: has \"messages\", and a tokenizer without tokenizer.json"):
        encode(ByT5Tokenizer(), messages=CHAT)  # no template either: the first remedy must be one that helps
    with pytest.raises(DataError, match=r"here:7: the chat template refuses the messages: .*no system"):
        encode(make_tokenizer("{{ raise_exception('no system') }}"), messages=CHAT)
    with pytest.raises(DataError, match=r"here:7: the tokenizer gives token \d+, and the model has 4 of them"):
        Encoder(make_tokenizer(), 4).encode(Document("here:7", {"text": "red"}))


@pytest.mark.parametrize("template", [TEMPLATE, MARKED])
def test_content_in_parts_is_one_text_and_keys_without_a_value_are_not_there(template: str) -> None:
    asking = template.replace("{% endfor %}", "{{ message.keys() | list }}{% endfor %}")
    parts = [
        {**message, "content": [{"type": "text", "text": message["content"]}], "tool_calls": None} for message in CHAT
    ]
    tokenizer = make_tokenizer(asking)
    assert encode(tokenizer, messages=parts) == encode(tokenizer, messages=CHAT)
