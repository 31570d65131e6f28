"""Documents as tokens, each marked as trained on or not: all of a text, the completion, the assistant's turns."""

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from .documents import COMPLETION, MESSAGES, PROMPT, TEXT_KEY, TOOLS, DataError, Document, plain_messages

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Encoded(NamedTuple):
    """The tokens of a document."""

    tokens: list[int]
    trained: list[bool]
    """For each token: whether the model learns to predict it."""


class Encoder:
    """Turns documents into tokens with a model's own tokenizer."""

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        template = getattr(tokenizer, "chat_template", None)
        self._marks = isinstance(template, str) and GENERATION_MARK.search(template) is not None

    def encode(self, document: Document) -> Encoded:
        """Return the tokens of a document.

        Raises:
            DataError: the tokenizer cannot say which tokens are the assistant's, or the model does not know a token.
        """
        row = document.row
        if row.get(MESSAGES) is not None:
            found = self._conversation(document)
        elif row.get(COMPLETION) is not None:
            prompt = self._tokens(row[PROMPT], special=True)
            found = self._ended(prompt, self._tokens(row[COMPLETION], special=False))
        else:
            found = self._ended([], self._tokens(row[TEXT_KEY], special=True))
        highest = max(found.tokens, default=0)
        if highest >= self._vocabulary:
            raise DataError(
                f"{document.where}: the tokenizer gives token {highest}, and the model has {self._vocabulary} of them; "
                "the folder's tokenizer and weights do not belong together"
            )
        return found

    def _tokens(self, text: str, *, special: bool) -> list[int]:
        tokens: list[int] = self._tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        end = self._tokenizer.eos_token_id
        return tokens[:-1] if special and tokens and tokens[-1] == end else tokens  # `_ended` decides where it ends

    def _ended(self, given: list[int], learned: list[int]) -> Encoded:
        """Return tokens that are given and tokens that are learned, the last of them the end of the text."""
        end = self._tokenizer.eos_token_id
        if end is not None and learned[-1:] != [end]:
            learned = [*learned, end]
        return Encoded([*given, *learned], [False] * len(given) + [True] * len(learned))

    def _conversation(self, document: Document) -> Encoded:
        if not getattr(self._tokenizer, "is_fast", False):
            raise DataError(
                f'{document.where}: has "messages", and a tokenizer without tokenizer.json cannot say which tokens '
                'are whose; write "prompt" and "completion"'
            )
        if not getattr(self._tokenizer, "chat_template", None):
            raise DataError(
                f'{document.where}: has "messages", and the tokenizer has no chat template; give the tokenizer one '
                "(chat_template.jinja in its folder; the instruct model of the same family usually has one), or write "
                '"prompt" and "completion"'
            )
        try:
            return self._by_marks(document) if self._marks else self._by_prefixes(document)
        except DataError:
            raise
        except Exception as error:  # a template raises what it likes: roles in an order that it does not know, say
            raise DataError(f"{document.where}: the chat template refuses the messages: {error}") from None

    def _by_marks(self, document: Document) -> Encoded:
        """Return a conversation whose template marks what the assistant says."""
        found = self._tokenizer.apply_chat_template(
            plain_messages(document.row[MESSAGES]),
            tools=document.row.get(TOOLS),
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        return Encoded(list(found["input_ids"]), [bool(mark) for mark in found["assistant_masks"]])

    def _by_prefixes(self, document: Document) -> Encoded:
        """Return a conversation whose turns are found by rendering more and more of it."""
        messages = plain_messages(document.row[MESSAGES])
        whole = self._render(document, messages)
        spans: list[tuple[int, int]] = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(document, messages[:number], reply=True) if number else ""
            after = self._render(document, messages[: number + 1])
            if not after.startswith(before) or not whole.startswith(after):
                raise DataError(
                    f"{document.where}: the chat template renders message {number + 1} in another way when more of the "
                    "conversation is there, so its tokens cannot be told apart; put {% generation %} marks into the "
                    'template, end the conversation with that message, or write "prompt" and "completion"'
                )
            spans.append((len(before), len(after)))
        found = self._tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return Encoded(found["input_ids"], [_inside(offset, spans) for offset in found["offset_mapping"]])

    def _render(self, document: Document, messages: Sequence[Any], reply: bool = False) -> str:
        text: str = self._tokenizer.apply_chat_template(
            messages, tools=document.row.get(TOOLS), tokenize=False, add_generation_prompt=reply
        )
        return text


def _inside(offset: tuple[int, int], spans: Iterable[tuple[int, int]]) -> bool:
    start, end = offset
    return end > start and any(first <= start and end <= last for first, last in spans)
