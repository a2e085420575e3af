r"""Normalise the text of answers: Unicode variants, LaTeX that changes only the appearance, and Markdown.

Every function takes time linear in the text.
"""

from __future__ import annotations

import re
import unicodedata

THIN = "\u2009"  # stands for every space that may separate groups of digits

_COMMANDS = "\u00d7times ·cdot ⋅cdot πpi ∞infty ≤le ≥ge ≠ne ≈approx \u222acup ∩cap ∈in ∅emptyset ±pm √sqrt"
_CHARACTERS = {
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\ufe63", "-"),
    **dict.fromkeys("\u00a0\u2007\u2008\u202f", THIN),
    **dict.fromkeys("\u2044\u2215÷", "/"),
    **dict.fromkeys("\u2019\u2018\u02bc", "'"),
    **{command[0]: f"\\{command[1:]} " for command in _COMMANDS.split()},
    **dict(zip("º。、", "°.,", strict=True)),
}
_SUPERSCRIPT = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207a\u207b\u207f]+")
# Commands that print nothing, a space, or the same as another command.
_LATEX = (
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\(?:left|right|displaystyle|textstyle|limits|bigl|bigr|big|Big)(?![A-Za-z])|\\!"), ""),
    (re.compile(r"\{,\}|\\text\{,\}"), ","),
    (re.compile(r"\\[,;:]|~|\\ |\\thinspace(?![A-Za-z])"), THIN),
    (re.compile(r"\\q?quad(?![A-Za-z])"), " "),
    (re.compile(r"\\(le|ge)q(?![A-Za-z])"), r"\\\1"),
    (re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|\\degree(?![A-Za-z])"), "°"),
    (re.compile(r"\\%"), "%"),
    (re.compile(r"\\lbrace(?![A-Za-z])"), r"\\{"),
    (re.compile(r"\\rbrace(?![A-Za-z])"), r"\\}"),
    (re.compile(r"\\lbrack(?![A-Za-z])"), "["),
    (re.compile(r"\\rbrack(?![A-Za-z])"), "]"),
)
_FONT = r"\\(?:text|textbf|textit|textrm|textsf|mathrm|mathbf|mathit|mathsf|mbox|hbox|emph|boxed|fbox|boldsymbol|bm)\s*"
_WRAPPED = re.compile(_FONT + r"\{((?:[^{}]|\{[^{}]*\})*)\}")
_DELIMITERS = re.compile(r"(?<!\\)\\[()\[\]]|`")
_BOLD = re.compile(r"(?<![\w)*])\*\*(?=\S)([^*]*)(?<=\S)\*\*(?![\w(*])")  # A power has a number on both sides.
_DOLLAR = re.compile(r"(?<!\\)\$")
_LEADING = " \t\r\n\u2009:*_"
_TRAILING = _LEADING + ".,;"


def ascii_text(text: str) -> str:
    """Write Unicode digits, signs, spaces and fractions as ASCII or LaTeX. Other characters stay."""
    if text.isascii():
        return text
    text = _SUPERSCRIPT.sub(lambda m: "^{" + unicodedata.normalize("NFKC", m[0]).replace("\u2212", "-") + "}", text)
    return "".join(c if c.isascii() else _character(c) for c in text)


def commands(text: str) -> str:
    """Write LaTeX commands with the same meaning in the same way."""
    for pattern, spelling in _LATEX:
        text = pattern.sub(spelling, text)
    return text


def tidy(text: str) -> str:
    """Remove fonts, boxes, delimiters of mathematics, Markdown, and punctuation at both ends."""
    # An even number of dollar signs delimits mathematics. A single one is money.
    text = ascii_text(text)
    if len(_DOLLAR.findall(text)) % 2 == 0:
        text = _DOLLAR.sub("", text)
    text = _BOLD.sub(r"\1", _DELIMITERS.sub("", text))
    if "\\" in text or "~" in text:
        text = commands(text)
        for _ in range(3):  # a font in a font in a box
            text = _WRAPPED.sub(r" \1 ", text)
        text = text.replace("\\$", "$")
    return text.lstrip(_LEADING).rstrip(_TRAILING)


def plain_text(text: str) -> str:
    """Return `tidy` for comparison as text: white space only between words, as single spaces."""
    return re.sub(r"(?<!\w) | (?!\w)", "", " ".join(tidy(text).split()))


def quote(text: str) -> str:
    """Return the beginning of an answer on one line, for a message."""
    text = " ".join(text.split())
    return text if len(text) <= 40 else f"{text[:37]}..."


def _character(c: str) -> str:
    category = unicodedata.category(c)
    if c in _CHARACTERS:
        return _CHARACTERS[c]
    if category == "Nd":
        return str(unicodedata.decimal(c))
    if category == "Zs":
        return THIN
    if category == "Cf":  # zero width, or the direction of writing
        return ""
    if "\uff01" <= c <= "\uff5e":  # full-width ASCII
        return chr(ord(c) - 0xFEE0)
    if unicodedata.decomposition(c).startswith("<fraction>"):
        return " " + unicodedata.normalize("NFKC", c).replace("\u2044", "/")
    return c
