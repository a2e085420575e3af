"""What `brorl rollouts` prints: tables and colours on a terminal, plain text with whole lines anywhere else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_brorl.record.text import one_line, printable
from megatron_brorl.report.rollouts import Recorded, Row, a_pair, answer_counts

_COLOURS = {"right": "green", "wrong": "red", "mixed": "yellow", "lost": "magenta"}
_ANSWERS = 20  # distinct ones that are listed
_MOST = 100  # characters of one


class Page(Protocol):
    """Where things are printed."""

    def line(self, text: str, word: str = "") -> None:
        """One or several lines; word: right, wrong or mixed, which gives the colour."""

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[str]) -> None:
        """Rows under their head; words: of each row, as in `line`. The last column is text, of any length."""

    def beside(self, titles: Sequence[str], texts: Sequence[str], words: Sequence[str]) -> None:
        """Texts next to one another where there is room for that."""


class PlainPage:
    """For files, pipes and logs: no colours, nothing cut off, one row per line."""

    def line(self, text: str, word: str = "") -> None:
        """As it is."""
        print(text)

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[str]) -> None:
        """Two spaces between columns."""
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        for row in (head, *rows):
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())

    def beside(self, titles: Sequence[str], texts: Sequence[str], words: Sequence[str]) -> None:
        """One below the other."""
        for title, text in zip(titles, texts, strict=True):
            print(f"\n--- {title}\n{text}")


class RichPage:
    """For a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def line(self, text: str, word: str = "") -> None:
        """In the word's colour."""
        self._console.print(Text(text, style=_COLOURS.get(word, "")))

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[str]) -> None:
        """One line per row: what is too long ends in an ellipsis."""
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", expand=False)
        for name in head[:-1]:
            table.add_column(name, no_wrap=True, justify="left")
        table.add_column(head[-1], no_wrap=True, overflow="ellipsis")
        for row, word in zip(rows, words, strict=True):
            style = _COLOURS.get(word, "")
            table.add_row(*(Text(cell, style=style if i == 0 else "") for i, cell in enumerate(row)))
        self._console.print(table)

    def beside(self, titles: Sequence[str], texts: Sequence[str], words: Sequence[str]) -> None:
        """In columns of equal width."""
        table = Table(expand=True, show_lines=False)
        for title, word in zip(titles, words, strict=True):
            table.add_column(Text(title, style=_COLOURS.get(word, "")), ratio=1, overflow="fold")
        table.add_row(*(Text(text) for text in texts))
        self._console.print(table)


def prompt_list(page: Page, recorded: Recorded, whole: Recorded, limit: int) -> None:
    """The prompts with right of N; whole: `recorded` before filters. limit: lines at most, 0: all."""
    # The hardest first: those are what one looks for.
    groups = sorted(recorded.groups.to_pylist(), key=lambda g: (g["right"] / (g["rollouts"] or 1), g["group"]))
    shown = groups[:limit] if limit else groups
    rows = [
        (
            f"{g['right']}/{g['rollouts']}",
            str(g["distinct"]),
            "" if g["tokens"] is None else f"{g['tokens']:.0f}",
            *([_trained(g)] if recorded.moment.kind == "step" else []),
            one_line(g["prompt_id"]),
            # Of most groups of a step there is nothing but the numbers.
            one_line(g["prompt"], 200) if g["prompt"] is not None else "(not recorded)",
        )
        for g in shown
    ]

    # An evaluation trains on nothing.
    trained = ["trained"] if recorded.moment.kind == "step" else []
    head = ("right", "answers", "tokens", *trained, "id", "prompt")
    if rows:
        page.table(head, rows, [g["outcome"] for g in shown])
    # What is not shown, and how it would be.
    if len(shown) < len(groups):
        page.line(f"{len(groups) - len(shown)} more: --limit 0 shows all")
    page.line(_total(recorded, whole))


def one_prompt(page: Page, moment: object, group: Row, rollouts: list[Row]) -> None:
    """A group: its prompt, the distinct answers with counts, a right and a wrong response side by side."""
    # The group in a line, and what it was asked.
    count = f"right {group['right']} of {group['rollouts']}, {group['distinct']} distinct answers"
    page.line(f"{moment}, prompt {one_line(group['prompt_id'])} ({group['verifier']}): {count}", group["outcome"])
    page.line(f"\n{printable(group['prompt'] or '(not recorded)')}\n")
    if group["reference"] is not None:
        page.line(f"reference answer: {one_line(group['reference'])}\n")

    # Of most groups the numbers alone are kept.
    if not rollouts:
        page.line("no rollout of it is recorded, or passes the filters")
        return
    if len(rollouts) < group["rollouts"]:
        page.line(f"{len(rollouts)} of its {group['rollouts']} rollouts are recorded and pass the filters:")

    # What was answered, by how many.
    counts = answer_counts(rollouts)
    rows, words = [], []
    for answer, number, right in counts[:_ANSWERS]:
        # A verifier may look at more than the answer, so that equal ones can be right and wrong.
        words.append("right" if right == number else "mixed" if right else "wrong")
        verdict = f"{right} right" if words[-1] == "mixed" else words[-1]
        rows.append((str(number), verdict, "(no answer)" if answer is None else one_line(answer, _MOST)))
    page.table(("rollouts", "verdict", "answer"), rows, words)
    if len(counts) > _ANSWERS:
        page.line(f"{len(counts) - _ANSWERS} more answers, of {sum(c for _, c, _ in counts[_ANSWERS:])} rollouts")

    # A right and a wrong one say most beside one another.
    pair = a_pair(rollouts)
    titles = [_title(r) for r in pair]
    page.beside(titles, [printable(r["text"]) for r in pair], [_word(r) for r in pair])


def _title(r: Row) -> str:
    """What is known of a rollout beside its text."""
    parts = [f"{_word(r)} (reward {r['reward']:.3g})", f"sibling {r['sibling']}", f"{r['tokens']} tokens"]
    parts.append("cut off" if r["finish"] == "length" else "ended by itself")
    if r["advantage"] is not None:
        parts.append(f"advantage {r['advantage']:+.2f}")
    if r["reason"] not in (None, "", _word(r), "cut off"):
        parts.append(one_line(r["reason"]))
    parts += [f"{one_line(name)} {value:.3g}" for name, value in r["parts"] or []]
    return ", ".join(parts)


def _word(r: Row) -> str:
    return "right" if r["right"] else "wrong"


def _trained(group: Row) -> str:
    return "yes" if group["trained"] else "no"


def _total(recorded: Recorded, whole: Recorded) -> str:
    """The last line of a list, which is what a terminal shows for sure."""
    groups = recorded.groups.to_pylist()
    text = f"{recorded.moment}: {len(groups)} of {len(whole.groups)} prompts"
    sampled, right = (_sum(g[key] for g in groups) for key in ("rollouts", "right"))
    if sampled:
        text += f", {100 * right / sampled:.1f}% of their {sampled} rollouts right"
    return f"{text}; {len(recorded.rollouts)} rollouts to read"


def _sum(values: Iterable[Any]) -> int:
    return sum(values)
