"""What is refused before a computer algebra system sees it: text that is made to be slow rather than to be an answer.

A bound of this file is far above what answers need and far below what takes seconds. What slips through costs a
worker its deadline, no more.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_CHARS = 1000
_MAX_DEPTH = 20  # of brackets
_MAX_DIGITS = 100  # of one number
_MAX_POWER = 4000  # the product of the exponents over one base
_MAX_FACTORIAL = 1000
_MAX_PARTS = 200  # of a list or a matrix
_MAX_RELATIONS = 8
_CAP = 10**9  # a product of numbers is not followed further

_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|\d+|[A-Za-z]|[{(\[\])}^!]|\*\*|[^\s]", re.DOTALL)
_CLOSES = {"}": "{", ")": "([", "]": "(["}  # an interval may open with one and close with the other
_GREEK = re.compile(r"\\(?:alpha|beta|gamma|delta|theta|lambda|mu|rho|sigma|tau|phi|omega|text|mathrm)")
_DONE_LATER = re.compile(r"\\(?:sum|prod|i{1,3}nt|oint|lim|limsup|liminf|bigcup|bigcap)(?![a-z])|\\frac\{d\}")
_RELATION = re.compile(r"[<>=]|\\[lg]eq?(?![a-z])|\\ne")
_BINOMIAL = re.compile(r"\\[dt]?binom\s*\{?[^{}]*\d{5}|\\[dt]?binom\s*\{[^{}]*\}\s*\{?[^{}]*\d{5}")


def refusal(text: str) -> str:
    """Why a text is not handed to computer algebra, in a few words; "" where it is."""
    if len(text) > MAX_CHARS:
        return f"too long to be an answer: {len(text)} characters, at most {MAX_CHARS}"
    if max(text.count(","), text.count("&")) >= _MAX_PARTS:
        return f"a list or matrix of more than {_MAX_PARTS} parts"
    if len(_RELATION.findall(text)) > _MAX_RELATIONS:
        return f"a chain of more than {_MAX_RELATIONS} relations"
    if _BINOMIAL.search(text):
        return "a binomial of numbers of five digits or more"
    return _Walk().refusal(text)


def restates(answer: str, reference: str) -> str:
    """The first sum, product, integral or limit of an answer that its reference does not have; "" if there is none.

    An answer that repeats the question's integral is worth as much as the number, and nobody has computed it.
    """
    found = _DONE_LATER.search(answer)
    return found[0] if found and found[0] not in reference else ""


@dataclass
class _Part:
    """A number, a letter or what stands in brackets."""

    opened: str = ""  # its bracket
    base: _Part | None = None  # what it is the exponent of
    symbolic: bool = False  # it has a letter
    product: int = 1  # of its numbers
    power: int = 1  # the largest product of exponents over one base in it
    depth: int = 0  # how often an exponent stands in an exponent
    grown: bool = False  # it has a power or a factorial of numbers alone


class _Walk:
    """One pass over the tokens of a text, with the brackets that are open."""

    def __init__(self) -> None:
        self._open = [_Part()]
        self._last: _Part | None = None  # what an exponent or an exclamation mark would be of
        self._base: _Part | None = None  # what the next part is an exponent of

    def refusal(self, text: str) -> str:
        for match in _TOKEN.finditer(text):
            why = self._take(match[0])
            if why:
                return why
        return "" if len(self._open) == 1 else "brackets that do not match"

    def _take(self, token: str) -> str:
        # Brackets; \{ and \} print one and count as well.
        bracket = token[-1]
        if bracket in "{([":
            self._open.append(_Part(opened=bracket, base=self._base))
            self._base = self._last = None
            return f"brackets nested deeper than {_MAX_DEPTH}" if len(self._open) > _MAX_DEPTH + 1 else ""
        if bracket in "})]":
            if self._open[-1].opened not in tuple(_CLOSES[bracket]):
                return "brackets that do not match"
            return self._finish(self._open.pop())

        # What makes the part before it large.
        if token in ("^", "**"):
            twice = self._base is not None or (self._last is not None and self._last.base is not None)
            self._base = self._last or _Part()
            return "a tower of powers" if twice else ""
        if token == "!":
            return self._factorial()

        # Numbers and letters; anything else parts what stands on its sides.
        if token.isdigit():
            if len(token) > _MAX_DIGITS:
                return f"a number of {len(token)} digits"
            return self._finish(_Part(base=self._base, product=min(int(token), _CAP)))
        if token.isalpha() or _GREEK.match(token):
            return self._finish(_Part(base=self._base, symbolic=True))
        if token not in "+-":  # the sign of an exponent
            self._base = None
        self._last = None
        return ""

    def _finish(self, part: _Part) -> str:
        """A part is complete: the power that it is raised to, or raises the part before it to."""
        base, self._base = part.base, None
        if base is not None:
            part.power = min(base.power * max(part.product, 1), _CAP)
            part.depth += 1
            if part.power > _MAX_POWER or part.grown or part.depth > 2:
                return "a tower of powers" if part.grown or part.depth > 2 else "a power above the 4000th"
            part.grown = not (part.symbolic or base.symbolic)
        self._last = part

        # What the brackets around it hold by now.
        around = self._open[-1]
        around.symbolic |= part.symbolic
        around.product = min(around.product * max(part.product, 1), _CAP)
        around.power = max(around.power, part.power)
        around.depth = max(around.depth, part.depth)
        around.grown |= part.grown
        return ""

    def _factorial(self) -> str:
        part = self._last
        if part is None or part.grown or (not part.symbolic and part.product > _MAX_FACTORIAL):
            return "the factorial of a large number or of another power or factorial"
        part.grown = self._open[-1].grown = not part.symbolic
        return ""
