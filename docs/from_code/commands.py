"""Writes the command line: each command with its options and examples, from the parsers of argparse."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from zeroshard.cli.main import COMMANDS, parser

from .texts import cell


def subparsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of each command."""
    (found,) = (action for action in parser()._actions if isinstance(action, argparse._SubParsersAction))
    return dict(found.choices)


def options_of(command: argparse.ArgumentParser) -> Iterator[tuple[str, list[argparse.Action]]]:
    """The titles of a command's groups of options, and the options."""
    for group in command._action_groups:
        shown = [action for action in group._group_actions if not isinstance(action, argparse._HelpAction)]
        if shown:
            yield group.title or "", shown


def write() -> str:
    """Every command."""
    return "\n".join(_command(name, found) for name, found in subparsers().items())


def _command(name: str, found: argparse.ArgumentParser) -> str:
    module = COMMANDS[name]
    lines = [f"## `zeroshard {name}`", "", found.description or "", ""]
    for title, actions in options_of(found):
        usual = {"positional arguments": "arguments"}.get(title, title)
        lines += [f"| {usual} | |", "|---|---|"]
        lines += [f"| {_names(action)} | {_text(name, action)} |" for action in actions]
        lines += [""]
    if module.EXAMPLES:
        lines += ["```text", module.EXAMPLES.strip(), "```", ""]
    return "\n".join(lines)


def _names(action: argparse.Action) -> str:
    value = ""
    if action.nargs != 0 and not isinstance(action, argparse.BooleanOptionalAction):
        usual = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper()
        metavar = action.metavar if isinstance(action.metavar, str) else usual
        value = metavar if action.nargs != "?" or not action.option_strings else f"[{metavar}]"
    if not action.option_strings:
        return _code(value + (" …" if action.nargs == "+" else ""))
    return ", ".join(_code(f"{option} {value}".strip()) for option in action.option_strings)


def _code(text: str) -> str:
    return f"`{cell(text)}`"


def _text(command: str, action: argparse.Action) -> str:
    if not action.help:
        named = " ".join(action.option_strings) or action.dest
        raise ValueError(f"zeroshard {command}: {named} has no text")
    return cell(action.help % vars(action))
