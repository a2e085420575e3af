"""`brorl metrics`: what the figures of a run mean, in words."""

from __future__ import annotations

import argparse
import difflib
import re
import textwrap
from typing import Any

from megatron_brorl.errors import UserError
from megatron_brorl.glossary.form import Figure, Section
from megatron_brorl.glossary.tables import SECTIONS

_WIDTH = 110


def add_command(commands: Any) -> None:
    """Add `brorl metrics` to the parser."""
    text = "what each figure of metrics.jsonl and summary.json means"
    command = commands.add_parser("metrics", help=text, description=text)
    command.add_argument("words", nargs="*", metavar="WORD", help="a figure, a group of them, or a part of a name")
    command.set_defaults(command=_metrics, name="metrics")


def _metrics(args: argparse.Namespace) -> int:
    # By its name or its group; else every one that has the word in its name.
    all_of_them = [(section, figure) for section in SECTIONS for figure in section.figures]
    words = [word.removeprefix("time.") for word in args.words]
    found = [pair for pair in all_of_them if not words or any(_is_named(*pair, word) for word in words)]
    found = found or [pair for pair in all_of_them if any(word in pair[1].name for word in words)]
    if not found:
        near = difflib.get_close_matches(words[0], [figure.name for _, figure in all_of_them], n=1)
        hint = f"did you mean {near[0]}?" if near else "brorl metrics alone lists all of them"
        raise UserError(f"no figure is called {words[0]!r}; {hint}")

    shown = None
    for section, figure in found:
        # A heading where a section begins.
        if section is not shown:
            shown = section
            print(f"\n{section.title}: {_plain(section.about)}")
        print("\n".join(described(figure)))
    return 0


def _is_named(section: Section, figure: Figure, word: str) -> bool:
    return figure.pattern.fullmatch(word) is not None or word in (section.group, section.title, figure.name)


def described(figure: Figure) -> list[str]:
    """A figure in lines: what it is, what it means, and what a bad value means."""
    of_what = ", ".join(part for part in (figure.unit, figure.range) if part)
    lines = [f"{figure.name}   ({_plain(of_what)})"]
    for text in (figure.meaning, figure.bad and f"bad: {figure.bad}"):
        lines += textwrap.wrap(_plain(text), _WIDTH, initial_indent="    ", subsequent_indent="    ")
    return lines


def _plain(text: str) -> str:
    """Without the marks of a page."""
    return re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", text).replace("`", "")
