"""Things in the response that a program can find: lists, headings, JSON, placeholders, a postscript."""

from __future__ import annotations

import json
import re

_BULLETS = tuple(re.compile(rf"^[^\S\n]*{mark}.*$", re.MULTILINE) for mark in (r"\*[^*]", "-"))
_HIGHLIGHT = re.compile(r"\*([^\n*]*)\*")
_DOUBLE_HIGHLIGHT = re.compile(r"\*\*([^\n*]*)\*\*")
_FENCES = ("```json", "```Json", "```JSON", "```")
_POSTSCRIPTS = {"P.S.": re.compile(r"p\.\s?s\."), "P.P.S": re.compile(r"p\.\s?p\.\s?s")}

ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def number_bullet_lists(response: str, num_bullets: int) -> bool:
    """Exactly so many lines that begin with * or -; ** is no bullet."""
    return sum(len(bullet.findall(response)) for bullet in _BULLETS) == num_bullets


def number_highlighted_sections(response: str, num_highlights: int) -> bool:
    """At least so many *highlights* and **highlights** that hold something."""
    found = [*_HIGHLIGHT.findall(response), *_DOUBLE_HIGHLIGHT.findall(response)]
    return sum(bool(text.strip()) for text in found) >= num_highlights


def multiple_sections(response: str, section_spliter: str, num_sections: int) -> bool:
    """At least so many headings "Section 1", "Section 2", ..., whatever the word is and the numbers are."""
    return len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+", response)) >= num_sections


def title(response: str) -> bool:
    """A title in double angle brackets in one line that holds something."""
    for line in response.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if 0 <= start < end - 2 and line[start : end + 2].lstrip("<").rstrip(">").strip():
            return True
    return False


def json_format(response: str) -> bool:
    """The whole is JSON, be it in a fence of Markdown."""
    text = response.strip()
    for fence in _FENCES:
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):  # nests too deep to be read
        return False
    return True


def constrained_response(response: str) -> bool:
    """One of the three answers is in it."""
    return any(answer in response for answer in ANSWERS)


def number_placeholders(response: str, num_placeholders: int) -> bool:
    """At least so many [placeholders], each in one line."""
    return sum(map(_placeholders, response.split("\n"))) >= num_placeholders


def postscript(response: str, postscript_marker: str) -> bool:
    """The marker occurs, in capitals or not; P.S. and P.P.S with or without spaces."""
    marker, text = postscript_marker.strip(), response.lower()
    pattern = _POSTSCRIPTS.get(marker)
    return pattern.search(text) is not None if pattern else marker.lower() in text


def _placeholders(line: str) -> int:
    """Pairs of square brackets, the first that closes to the first that opens."""
    count, start = 0, line.find("[")
    while start >= 0:
        end = line.find("]", start)
        if end < 0:
            break
        count, start = count + 1, line.find("[", end)
    return count
