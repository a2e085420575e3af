"""`brorl metrics`: the documentation of a run's metrics."""

from __future__ import annotations

import argparse
import difflib
import re
import textwrap
from typing import Any

from megatron_brorl.errors import UserError
from megatron_brorl.tracking.metric_docs import Metric, Section, sections

_WIDTH = 110


def add_command(commands: Any) -> None:
    """Add `brorl metrics` to the parser."""
    text = "meaning of each metric of metrics.jsonl and summary.json"
    command = commands.add_parser("metrics", help=text, description=text)
    command.add_argument("words", nargs="*", metavar="WORD", help="a metric, a group, or a part of a name")
    command.set_defaults(command=_metrics, name="metrics")


def _metrics(args: argparse.Namespace) -> int:
    known = [(section, metric) for section in sections() for metric in section.metrics]
    words = [word.removeprefix("time.") for word in args.words]
    # Exact names and groups first, then parts of names.
    found = [pair for pair in known if not words or any(_is_named(*pair, word) for word in words)]
    found = found or [pair for pair in known if any(word in pair[1].name for word in words)]
    if not found:
        near = difflib.get_close_matches(words[0], [metric.name for _, metric in known], n=1)
        hint = f"did you mean {near[0]}?" if near else "`brorl metrics` lists all of them"
        raise UserError(f"no metric is called {words[0]!r}; {hint}")

    for section in dict.fromkeys(section for section, _ in found):
        print(f"\n{section.title}: {_plain(section.about)}")
        for metric in (metric for of, metric in found if of is section):
            print("\n".join(_described(metric)))
    return 0


def _is_named(section: Section, metric: Metric, word: str) -> bool:
    return metric.matches(word) or word in (section.group, section.title, metric.name)


def _described(metric: Metric) -> list[str]:
    lines = [f"{metric.name}   ({metric.unit})"]
    for text in (metric.meaning, metric.bad and f"bad: {metric.bad}"):
        lines += textwrap.wrap(_plain(text), _WIDTH, initial_indent="    ", subsequent_indent="    ")
    return lines


def _plain(text: str) -> str:
    """Return the text without Markdown."""
    return re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", text).replace("`", "")
