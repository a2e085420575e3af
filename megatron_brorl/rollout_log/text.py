"""What a model wrote, made fit for a terminal: it may hold anything, control characters among it."""

from __future__ import annotations

_SPACE = " "


def printable(text: str) -> str:
    """The text with a replacement character for what does not print, but for line breaks; tabs are spaces."""
    return "".join(c if c.isprintable() or c == "\n" else _SPACE if c == "\t" else "\ufffd" for c in text)


def one_line(text: str, most: int = 0) -> str:
    """The text on one line, of at most so many characters: what is too much is left out of its middle. 0: all of it."""
    line = _SPACE.join(printable(text).split())
    if not most or len(line) <= most:
        return line
    # A response ends with its answer, and a prompt with its question.
    head = (most - 5) // 3
    return f"{line[:head]} ... {line[len(line) - (most - 5 - head) :]}"
