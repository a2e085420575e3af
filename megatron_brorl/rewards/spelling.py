r"""One spelling for what an answer can be written in: Unicode look-alikes, LaTeX's wrappers, Markdown's stars.

Everything here is linear in the text; the meaning of what is written is for others.
"""

from __future__ import annotations

import re
import unicodedata

THIN = "\u2009"  # stands for every space that may stand between groups of digits

_CHARACTERS = {
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\ufe63", "-"),
    **dict.fromkeys("\u00a0\u2007\u2008\u202f", THIN),
    **dict.fromkeys("\u2044\u2215", "/"),
    **dict.fromkeys("\u2019\u2018\u02bc", "'"),
    "\u00d7": "\\times ",
    "·": "\\cdot ",
    "⋅": "\\cdot ",
    "÷": "/",
    "π": "\\pi ",
    "∞": "\\infty ",
    "≤": "\\le ",
    "≥": "\\ge ",
    "≠": "\\ne ",
    "≈": "\\approx ",
    "\u222a": "\\cup ",
    "∩": "\\cap ",
    "∈": "\\in ",
    "∅": "\\emptyset ",
    "±": "\\pm ",
    "√": "\\sqrt ",
    "º": "°",
    "。": ".",
    "、": ",",
}
_SUPERSCRIPT = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207a\u207b\u207f]+")
# Longest first: what LaTeX writes that is nothing, a space, or another command of the same meaning.
_LATEX = (
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\(?:left|right|displaystyle|textstyle|limits|bigl|bigr|big|Big)(?![A-Za-z])"), ""),
    (re.compile(r"\{,\}|\\text\{,\}"), ","),
    (re.compile(r"\\!"), ""),
    (re.compile(r"\\[,;:]|~|\\ |\\thinspace(?![A-Za-z])"), THIN),
    (re.compile(r"\\q?quad(?![A-Za-z])"), " "),
    (re.compile(r"\\leq(?![A-Za-z])"), r"\\le"),
    (re.compile(r"\\geq(?![A-Za-z])"), r"\\ge"),
    (re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|\\degree(?![A-Za-z])"), "°"),
    (re.compile(r"\\%"), "%"),
    (re.compile(r"\\lbrace(?![A-Za-z])"), r"\\{"),
    (re.compile(r"\\rbrace(?![A-Za-z])"), r"\\}"),
    (re.compile(r"\\lbrack(?![A-Za-z])"), "["),
    (re.compile(r"\\rbrack(?![A-Za-z])"), "]"),
)
_FONT = r"\\(?:text|textbf|textit|textrm|textsf|mathrm|mathbf|mathit|mathsf|mbox|hbox|emph|boxed|fbox|boldsymbol|bm)\s*"
_WRAPPED = re.compile(_FONT + r"\{((?:[^{}]|\{[^{}]*\})*)\}")
_MARKS = re.compile(r"(?<!\\)\\[()\[\]]|`")
_BOLD = re.compile(r"(?<![\w)*])\*\*(?=\S)([^*]*)(?<=\S)\*\*(?![\w(*])")  # a power stands between its two numbers
_DOLLAR = re.compile(r"(?<!\\)\$")
_BEFORE = " \t\r\n\u2009:*_"
_BEHIND = _BEFORE + ".,;"


def ascii_text(text: str) -> str:
    """The text with Unicode's digits, signs, spaces and fractions as ASCII or LaTeX writes them; the rest stays."""
    if text.isascii():
        return text
    text = _SUPERSCRIPT.sub(lambda m: "^{" + unicodedata.normalize("NFKC", m[0]).replace("\u2212", "-") + "}", text)
    return "".join(c if c.isascii() else _character(c) for c in text)


def tidy(text: str) -> str:
    """An answer without what only dresses it: fonts, boxes, dollar signs of mathematics, stars, stops at its ends."""
    # An even number of dollar signs delimits mathematics; a single one is money.
    text = ascii_text(text)
    if len(_DOLLAR.findall(text)) % 2 == 0:
        text = _DOLLAR.sub("", text)
    text = _BOLD.sub(r"\1", _MARKS.sub("", text))

    if "\\" in text or "~" in text:
        text = commands(text)
        for _ in range(3):  # a font in a font in a box; more is no way to write an answer
            text, count = _WRAPPED.subn(r" \1 ", text)
            if not count:
                break
        text = text.replace("\\$", "$")
    return text.lstrip(_BEFORE).rstrip(_BEHIND)


def commands(text: str) -> str:
    """The text with one command for each meaning, and without those that print nothing or a space."""
    for pattern, spelling in _LATEX:
        text = pattern.sub(spelling, text)
    return text


def plain_text(text: str) -> str:
    """`tidy` for comparison as text: white space of any kind is one space between words and nothing elsewhere."""
    return re.sub(r"(?<!\w) | (?!\w)", "", " ".join(tidy(text).split()))


def quote(text: str) -> str:
    """A few characters of an answer, on one line, for a reason."""
    text = " ".join(text.split())
    return text if len(text) <= 40 else f"{text[:37]}..."


def _character(c: str) -> str:
    if c in _CHARACTERS:
        return _CHARACTERS[c]
    category = unicodedata.category(c)
    if category == "Nd":
        return str(unicodedata.decimal(c))
    if category == "Zs":
        return THIN
    if category == "Cf":  # zero width, or the direction of writing
        return ""
    if "\uff01" <= c <= "\uff5e":  # the full-width forms of ASCII
        return chr(ord(c) - 0xFEE0)
    parts = unicodedata.decomposition(c)
    if parts.startswith("<fraction>"):
        return " " + unicodedata.normalize("NFKC", c).replace("\u2044", "/")
    return c
