r"""Read LaTeX as a value that can be compared: a number, an expression, a set, a tuple, an equation, an inequality.

Brackets, lists, unions and relations are read here, and latex2sympy reads the expressions between them. `read` raises
an exception for a text that it does not understand, so no part of an answer is dropped before the comparison.
"""

from __future__ import annotations

import functools
import re
from typing import Any, NamedTuple

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
from sympy.core.function import AppliedUndef

from megatron_brorl.rewards.math_spelling import braced, spell
from megatron_brorl.rewards.plain_number import NAME, PlainNumber, plain_number
from megatron_brorl.rewards.units import Unit

Value = Any  # Number, Group, Named, Relation, or a set, an expression or a matrix of sympy

_LATEX2SYMPY = functools.partial(
    latex2sympy, is_real=True, normalization_config=None, conversion_config=ConversionConfig(lowercase_symbols=False)
)
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)")
# latex2sympy drops a part of these: the base of a numeral, a modulus, a prime, the T of A^T. It multiplies numbers in a
# row and reads 1:2:3 as 1/6.
_DROPPED = re.compile(r"[\d)}]\s*_|\d\s+[\d.]|\\[a-z]*mod|['?#]|\.\.|:.*:|[A-Za-z]\s*\^\s*\{?\s*(?:T|\\top)(?!\w)")
_SETS = {r"\mathbb{R}": "Reals", r"\mathbb{Z}": "Integers", r"\mathbb{N}": "Naturals", r"\mathbb{Q}": "Rationals",
         r"\mathbb{C}": "Complexes", r"\emptyset": "EmptySet", r"\{\}": "EmptySet"}  # fmt: skip

# The signs at which a text is split outside brackets.
_UNION, _LIST, _RELATION, _BAR, _MINUS = (
    re.compile(rf"(?P<open>\\?[{{(\[])|(?P<close>\\?[}})\]])|(?P<cut>{cut})|\\[A-Za-z]+|\\?.", re.DOTALL)
    for cut in (
        r"\\(?:cup|lor)(?![A-Za-z])",
        r"[,;]|\\land(?![A-Za-z])",
        r"[<>!:]=|[<>=]|\\(?:le|ge|ne|lt|gt|leqslant|geqslant|neq|in|approx)(?![A-Za-z])",
        r"\\mid(?![A-Za-z])|[|:]",
        r"\\(?:setminus|backslash|cap)(?![A-Za-z])",
    )
)
_SIGNS = {r"\le": "<=", r"\leqslant": "<=", r"\ge": ">=", r"\geqslant": ">=", r"\ne": "!=", r"\neq": "!=", r"\lt": "<",
          r"\gt": ">", ":=": "="}  # fmt: skip
_NAME = re.compile(rf"\s*({NAME})\s*")
_TUPLE_OF_NAMES = re.compile(rf"\s*\(({NAME}(?:\s*,\s*{NAME})+)\s*\)\s*")


class Number(NamedTuple):
    """A plain number, with its count of significant digits where it is written as a decimal, else 0."""

    number: PlainNumber
    digits: int


class Group(NamedTuple):
    """Values between brackets; `bracket` is empty for a bare list."""

    bracket: str
    items: tuple[Value, ...]


class Named(NamedTuple):
    """`x = value`, or `x` in a set of numbers."""

    name: str
    value: Value


class Relation(NamedTuple):
    """An equation or inequality that is not solved for a name: `difference` is =, !=, < or <= 0."""

    sign: str
    difference: Any


def read(text: str) -> tuple[Value, Unit | None]:
    """Return the value that a text means, and its unit of measurement if it ends with one."""
    text, measured = spell(text)
    value = _value(text)
    return value, value.number.unit if isinstance(value, Number) else measured


def as_set(value: Value) -> Any:
    """Return the set of numbers that a value means, a pair in brackets being an interval; None if it means none."""
    if isinstance(value, Named):
        return as_set(value.value)
    if not isinstance(value, Group):
        return value if isinstance(value, sympy.Set) else None

    # Groups of numbers, and lists of intervals.
    if any(isinstance(item, Group) for item in value.items):
        pieces = [as_set(item) for item in value.items]
        return None if value.bracket or None in pieces else sympy.Union(*pieces)
    if any(isinstance(item, (Named, Relation, sympy.Set)) for item in value.items):
        return None
    if value.bracket == "{":
        return sympy.FiniteSet(*map(expression, value.items))
    if value.bracket and len(value.items) == 2:
        low, high = map(expression, value.items)
        return sympy.Interval(low, high, value.bracket == "(", value.bracket == "(")
    return None


def expression(value: Value) -> Any:
    """Return a number or an expression as an object of sympy."""
    if isinstance(value, Number):
        exact = value.number.value / 100 if value.number.percent else value.number.value
        rational = sympy.Rational(exact.numerator, exact.denominator)
        return rational * sympy.pi / 180 if value.number.unit == {"°": 1} else rational
    if isinstance(value, tuple):
        raise ValueError("a list or a relation where a number is expected")
    return value


def _split(text: str, tokens: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """Return the parts of a text between the cuts outside brackets, and the cuts."""
    parts, cuts, depth, start = [], [], 0, 0
    for token in tokens.finditer(text):
        depth += bool(token["open"]) - bool(token["close"])
        if token["cut"] and depth == 0:
            parts.append(text[start : token.start()])
            cuts.append(token["cut"])
            start = token.end()
    return [*parts, text[start:]], cuts


def _value(text: str) -> Value:
    # Unions and lists; 3 \pm x is a list of two.
    text = text.strip().rstrip(".,;").strip()
    parts, cuts = _split(text, _UNION)
    if cuts:
        return _union([_value(part) for part in parts], r"\cup" in cuts)
    parts, cuts = _split(text, _LIST)
    parts = [sign for part in parts for sign in _plus_minus(part)]
    if len(parts) > 1:
        return _list([_value(part) for part in parts], r"\land" in cuts)

    # Equations and inequalities, then differences and intersections of sets.
    parts, cuts = _split(text, _RELATION)
    if cuts:
        return _relation(parts, [_SIGNS.get(cut, cut) for cut in cuts])
    parts, cuts = _split(text, _MINUS)
    if cuts:
        left, right = map(as_set, map(_value, parts))
        return left.intersect(right) if cuts == [r"\cap"] else left - right
    return _atom(text)


def _plus_minus(text: str) -> list[str]:
    if r"\pm" not in text or text.lstrip().startswith(r"\{"):
        return [text]
    return [
        re.sub(r"\\pm(?![a-z])", plus, re.sub(r"\\mp(?![a-z])", minus, text))
        for plus, minus in (("+", "-"), ("-", "+"))
    ]


def _union(values: list[Value], of_sets: bool) -> Value:
    """Return the union of sets; the list of values where "or" stands between points or numbers."""
    names = {value.name if isinstance(value, Named) else "" for value in values} - {""}
    sets = [as_set(value) for value in values]
    points = all(one is None or isinstance(value, Group) for one, value in zip(sets, values, strict=True))
    if len(names) > 1 or (points and not of_sets):
        return _list(values, True)
    numbers = [value.value if isinstance(value, Named) else value for value in values]
    union = sympy.Union(
        *(sympy.FiniteSet(expression(n)) if one is None else one for one, n in zip(sets, numbers, strict=True))
    )
    return Named(names.pop(), union) if names else union


def _list(values: list[Value], strict: bool) -> Value:
    """Return a bare list; inequalities of one name as their intersection, or as their union if that is empty."""
    names = {value.name if isinstance(value, Named) and isinstance(value.value, sympy.Set) else "" for value in values}
    if len(names) == 1 and "" not in names:
        both = sympy.Intersection(*(value.value for value in values))
        either = sympy.Union(*(value.value for value in values))
        return Named(names.pop(), either if both is sympy.S.EmptySet and not strict else both)
    return Group("", tuple(item for value in values for item in (value.items if _bare(value) else [value])))


def _bare(value: Value) -> bool:
    return isinstance(value, Group) and not value.bracket


def _relation(sides: list[str], signs: list[str]) -> Value:
    # A sign may come first.
    if not sides[0].strip() and signs[0] in ("=", r"\approx"):
        return _value(sides[1]) if len(sides) == 2 else _relation(sides[1:], signs[1:])

    # "\pi/4 \approx 0.785" is its left side. A name has no value of its own: "x \approx 0.785" is its right side.
    if r"\approx" in signs:
        first = signs.index(r"\approx")
        if first or not _NAME.fullmatch(sides[0]):
            sides, signs = sides[: first + 1], signs[:first]
        if not signs:
            return _value(sides[0])
    named = _named(sides[0], sides[-1]) if set(signs) <= {"=", r"\approx", r"\in"} else None
    return _unsolved([expression(_atom(side)) for side in sides], signs) if named is None else named


def _named(left: str, right: str) -> Value | None:
    """Return the right side of an equation whose left side is a name, or a tuple of names; None for any other."""
    name, names = _NAME.fullmatch(left), _TUPLE_OF_NAMES.fullmatch(left)
    if name:
        return Named(_plain_name(name[1]), _value(right))
    if not names:
        return None

    # (x, y) may be in a set of points; (x, y) = (1, 2) gives each name its value.
    value = _value(right)
    if not isinstance(value, Group) or value.bracket != "(":
        return value
    each = zip(names[1].split(","), value.items, strict=True)
    return Group("(", tuple(Named(_plain_name(one), item) for one, item in each))


def _unsolved(terms: list[Any], signs: list[str]) -> Value:
    """Return the set of an inequality between one name and numbers, or else the difference of both sides."""
    variables = {term for term in terms if isinstance(term, sympy.Symbol)}
    numbers = [term for term in terms if term not in variables]
    if "=" not in signs and len(variables) == 1 and not any(number.free_symbols for number in numbers):
        (variable,) = variables
        pairs = zip(terms, signs, terms[1:], strict=False)
        return Named(_plain_name(variable.name), sympy.Intersection(*(_side(variable, *pair) for pair in pairs)))

    # A true equation of numbers is their value.
    (left, right), (sign,) = terms, signs
    if sign == "=" and left == right:
        return right
    return Relation(sign.replace(">", "<"), right - left if sign[0] == ">" else left - right)


def _plain_name(name: str) -> str:
    return re.sub(r"[\\{}\s]", "", name)


def _side(variable: Any, left: Any, sign: str, right: Any) -> Any:
    """Return the numbers on one side of a bound."""
    if left != variable:
        left, right, sign = right, left, sign.translate(str.maketrans("<>", "><"))
    if left != variable:
        raise ValueError("an inequality of two numbers")
    if sign == "!=":
        return sympy.S.Reals - sympy.FiniteSet(right)
    is_open = "=" not in sign
    return sympy.Interval(-sympy.oo, right, True, is_open) if "<" in sign else sympy.Interval(right, sympy.oo, is_open)


def _atom(text: str) -> Value:
    """Read what has no parts outside brackets."""
    text = text.strip()
    spaceless = re.sub(r"\s", "", text)
    if spaceless in _SETS:
        return getattr(sympy.S, _SETS[spaceless])
    number = plain_number(text)
    if number:
        # The digits of a decimal are counted because a decimal may be a rounded value; a fraction never is.
        decimal = re.fullmatch(r"\D*?([\d,]*\.\d+)(?:[^.\d/].*)?", text, re.DOTALL)
        return Number(number, len(re.sub(r"[,.]", "", decimal[1]).lstrip("0")) if decimal else 0)

    # Brackets around the whole.
    opened, closed = re.match(r"\\?[{(\[]", text), re.search(r"\\?[})\]]$", text)
    if opened and closed and _closes_last(text):
        return _bracketed(opened[0][-1] if opened[0] != "{" else "", closed[0][-1], text[opened.end() : closed.start()])
    return _expression(text)


def _closes_last(text: str) -> bool:
    """Whether the first bracket of a text is closed by its last character."""
    depth = 0
    for token in _BAR.finditer(text):
        depth += bool(token["open"]) - bool(token["close"])
        if depth == 0:
            return token.end() == len(text)
    return False


def _bracketed(opened: str, closed: str, inside: str) -> Value:
    # Set-builder notation: \{x \mid x > 2\}.
    if opened == "{":
        parts, cuts = _split(inside, _BAR)
        domain = re.fullmatch(rf"\s*{NAME}\s*(?:\\in(?![a-z])(.*))?", parts[0], re.DOTALL) if len(cuts) == 1 else None
        if domain:
            numbers = as_set(_value(parts[1]))
            return numbers.intersect(as_set(_value(domain[1]))) if domain[1] else numbers

    # Different brackets make a half-open interval. One value in brackets is that value, and in braces a set.
    value = _value(inside)
    items = value.items if _bare(value) else (value,)
    if (opened, closed) in (("(", "]"), ("[", ")")):
        low, high = map(expression, items)
        return sympy.Interval(low, high, opened == "(", closed == ")")
    return value if not opened or (len(items) == 1 and opened != "{") else Group(opened, items)


def _expression(text: str) -> Any:
    """Return what latex2sympy reads: decimals exactly, and the letter i as the imaginary unit unless it is an index."""
    # Half an answer must not be compared.
    if _DROPPED.search(text):
        raise ValueError("a notation that latex2sympy reads in part")

    # Degrees count only in a trigonometric function; elsewhere both sides are in degrees.
    text = braced(text)
    degree = r"(\1\\cdot\\frac{\\pi}{180})" if _TRIGONOMETRIC.search(text) else r"\1"
    text = re.sub(r"([\d.]+)\s*°", degree, text)
    parsed = _LATEX2SYMPY(text)
    if not isinstance(parsed, (sympy.Expr, sympy.MatrixBase, sympy.MatrixExpr)):
        raise ValueError("no expression")

    # The decimals as they are written, and f(x) as a letter.
    parsed = parsed.replace(lambda e: e.is_Float, lambda e: sympy.Rational(str(e)))
    parsed = parsed.replace(lambda e: isinstance(e, AppliedUndef), lambda e: sympy.Symbol(str(e), real=True)).doit()

    # The letter i is the imaginary unit on both sides, whatever else they hold, unless a sum counts with it.
    unit = sympy.Symbol("i", real=True)
    if unit in parsed.free_symbols and not parsed.has(sympy.Sum, sympy.Product):
        parsed = parsed.xreplace({unit: sympy.I})
    return parsed
