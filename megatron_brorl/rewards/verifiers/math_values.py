r"""Parse LaTeX to values, and compare two values exactly.

This module parses lists, brackets and relations, because latex2sympy drops parts of them or evaluates them: it reads
the pair (2, 1) as an empty interval. latex2sympy parses the expressions inside. `read` raises an exception for text
that it cannot parse, so that no part of an answer is ignored in the comparison.

Two expressions are equal if the first 1,000 digits of their difference are zero. sympy raises the working precision
until cancellation no longer matters. Expressions with variables are compared at three points. Equations are not solved.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Iterator
from decimal import ROUND_DOWN, ROUND_HALF_EVEN, Context, Decimal
from typing import Any, NamedTuple

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
from mpmath.libmp import prec_to_dps
from sympy.core.function import AppliedUndef

from megatron_brorl.rewards import answer_text
from megatron_brorl.rewards.answer_text import NAME, THIN, PlainNumber, Unit, names_clash, plain_number, units_clash

# A sympy expression, matrix or set, or a Group, Named or Relation. A Float has the digits of a decimal in the text.
Value = Any

_DIGITS = 1000  # of a difference, see above
_GAMMA_DIGITS = 100  # for factorials of fractions, which would take seconds with more digits
_DECIMALS = 6  # fewest digits with which a decimal can match an irrational number

_LATEX2SYMPY = functools.partial(
    latex2sympy, is_real=True, normalization_config=None, conversion_config=ConversionConfig(lowercase_symbols=False)
)
# latex2sympy ignores the base of a numeral, a modulus, a prime and the T of A^T. It multiplies adjacent numbers. It
# reads 1:2:3 as 1/6 and 0x1F as a product.
_MISREAD = re.compile(
    r"[\d)}]\s*_|\d\s+[\d.]|\\[a-z]*mod|['?#]|\.\.|:|[A-Za-z]\s*\^\s*\{?\s*(?:T|\\top)(?!\w)|(?<![\w.])0[A-Za-z]\w"
)
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)")
_WITH_ARGUMENTS = re.compile(r"\\(?:frac|binom|(sqrt))(?![A-Za-z])(?:\s*\[[^\[\]]*\])?")

# A numeral with its base: 2516_9, (A3)_{16}, 101_\text{two}, 101 (base 2). A single letter with an index is a variable.
_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10,
          "twelve": 12, "sixteen": 16}  # fmt: skip
_BASE = rf"\d{{1,2}}(?!\d)|{'|'.join(sorted(_BASES, reverse=True))}"  # "sixteen" before "six"
_BASED = re.compile(
    r"(?<![\w.\\])[({]?\s*0*(?=[A-Fa-f]*\d|[A-F]{2})(?P<whole>[0-9A-Fa-f]+)(?P<decimals>\.[0-9A-Fa-f]+)?\s*[)}]?\s*(?:"
    rf"_[\s{{(]*(?:base\s*)?(?P<base>{_BASE})[\s)}}]*|\(?\s*(?:in\s+)?base\s+(?P<base2>{_BASE})\s*\)?)"
)

# Equivalent spellings, replaced in this order.
_FONT = re.compile(r"\\(?:text|math)(?:rm|it|bf|sf|normal)?(?![A-Za-z])\s*\{([^{}]*)\}|\\[mh]box\s*\{([^{}]*)\}")
_UNWRAPPED = re.compile(rf"or|and|(?:in\s+)?base\s*(?:\d+|{'|'.join(_BASES)})?|{'|'.join(_BASES)}|[A-F]{{2,}}")
_COMMANDS = f"pi|infty|(?:sin|cos|tan)h?|cot|sec|csc|ln|log|exp|sqrt|gcd|lcm|max|min|{answer_text.GREEK}"  # without \\
_SPELLINGS = [
    (re.compile(pattern), spelling)
    for pattern, spelling in (
        (r":=", "="),
        (r",?\s*\bor\b", r" \\lor "),
        (r"\\wedge(?![A-Za-z])|,?\s*\band\b", " ; "),
        (r"\\operatorname\s*\{([a-z]+)\}", r"\\\1 "),
        (r"(?<![\\A-Za-z])a(?:rc?)?(sin|cos|tan|cot|sec|csc)(h?)(?![A-Za-z])", r"\\arc\1\2 "),
        (r"(?<![\\A-Za-z])log(2|10)(?=\s*\()", r"\\log_{\1}"),
        (rf"(?<![\\A-Za-z])({_COMMANDS})(?![A-Za-z])", r"\\\1 "),
        (r"(?<![\\A-Za-z])inf(?:inity)?(?![A-Za-z])", r"\\infty "),
        (r"\\log\s*_\s*(\d+(?=\s)|\w)", r"\\log_{\1}"),
        (r"(\\sqrt\s*|\^\s*)\(([^()]*)\)", r"\1{\2}"),
        (rf"(?<=\d){THIN}(?=\d{{3}}(?!\d))", ""),
        (THIN, " "),
        (r"(?<=[\w)}])\*\*(?=[\w({])", "^"),
        (r"(?<![\\A-Za-z])([A-Za-z])'(?!')", r"\1_{p}"),
    )
]
# Functions with an argument in brackets, and the signs around it in LaTeX.
_FUNCTION = re.compile(r"(?<![\\A-Za-z])(abs|floor|ceil|cbrt)(?:ing)?\s*(?=\()")
_SIGNS_AROUND = {"abs": "|{}|", "floor": r"\lfloor {}\rfloor ", "ceil": r"\lceil {}\rceil ", "cbrt": r"\sqrt[3]{{{}}}"}
_DELIMITER = re.compile(r"(?<!\\)(?:\$|\\[()\[\]])|\\\$")
_BRACED_COMMA = re.compile(r"(?<=\d)\{,\}(?=\d{3}(?!\d))")
_GROUPED = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,])")
_NAME = re.compile(rf"\s*({NAME})\s*")
_REALS = r"\\in\s*(?:\\(?:mathbb|Bbb)\s*)?\{?\s*\\?R\s*\}?\s*"
_SUCH_THAT = re.compile(rf"\s*{NAME}\s*(?:{_REALS})?(?:\\mid(?![a-z])|[|:]|\\text\{{such that\}})(.*)", re.DOTALL)
_TUPLE_OF_NAMES = re.compile(rf"\s*\(({NAME}(?:\s*,\s*{NAME})+)\s*\)\s*")

# Patterns that split a text outside brackets.
_BRACKETS = re.compile(r"(?P<open>\\?[{(\[])|(?P<close>\\?[})\]])|\\[A-Za-z]+|\\?\S", re.DOTALL)
_OR = r"\\lor(?![A-Za-z])"
_LIST = "[,;]"
_RELATION = r"[<>!]=|[<>=]|\\(?:in|approx|le|ge|ne)(?![A-Za-z])"
_SIGNS = {r"\le": "<=", r"\ge": ">=", r"\ne": "!="}


class Group(NamedTuple):
    """Values in brackets. `bracket` is "" for a list without brackets."""

    bracket: str
    items: tuple[Value, ...]


class Named(NamedTuple):
    """`x = value`, or `x` in a set of numbers."""

    name: str
    value: Value


class Relation(NamedTuple):
    """An equation or inequality that is not solved for a variable: `difference` `sign` 0, with sign =, !=, < or <=."""

    sign: str
    difference: Any


def same_value(reference: str, answer: str) -> bool:
    """Return whether two texts have equal values and compatible units. Raises the exceptions of `read`."""
    names = answer_text.has_letters(reference)
    (expected, unit), (value, other_unit) = read(reference, names), read(answer, names)
    return not units_clash(unit, other_unit) and same(expected, value)


@functools.lru_cache(maxsize=256)
def read(text: str, names: bool = False) -> tuple[Value, Unit | None]:
    """Parse a text. Return its value and the unit of measurement at its end, if there is one.

    names: whether the reference has letters that are text, such as `XI` (answer_text.mark_letters).
    """
    text = answer_text.commands(_BRACED_COMMA.sub("", answer_text.ascii_text(text)))
    text, measured = answer_text.without_unit(_DELIMITER.sub("", text))
    text = _FONT.sub(_without_font, text)
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    for function in reversed(list(_FUNCTION.finditer(text))):
        end = _group_end(text, function.end())
        argument = text[function.end() + 1 : end - 1]
        text = text[: function.start()] + _SIGNS_AROUND[function[1]].format(argument) + text[end:]
    # Inside brackets, a comma between digits separates items of a tuple or set.
    if not re.search(r"[(\[]|\\\{", text):
        text = _GROUPED.sub(lambda m: m[0].replace(",", ""), text)
    return _value(answer_text.mark_letters(_BASED.sub(_numeral, text), names)), measured


def _without_font(match: re.Match[str]) -> str:
    r"""Keep words as \text{...}, which latex2sympy reads as one symbol. Remove the font around other text."""
    inside = (match[1] or match[2] or "").strip()
    is_word = re.fullmatch(r"[A-Za-z][A-Za-z .'-]+", inside) and not _UNWRAPPED.fullmatch(inside)
    return rf"\text{{{inside}}}" if is_word else f" {inside} "


def _numeral(match: re.Match[str]) -> str:
    """Return a numeral as one symbol of its digits and base, or as plain digits in base ten."""
    name = match["base"] or match["base2"]
    base = _BASES.get(name) or int(name)
    decimals = (match["decimals"] or "").rstrip(".0")
    if base == 10:
        return f" {match['whole']}{decimals} "
    return rf"\variable{{n{match['whole'].upper()}o{decimals[1:].upper()}base{base}}}"


def _value(text: str) -> Value:
    text = text.strip().rstrip(".,;").strip()
    parts, cuts = _split(text, _OR)
    if cuts:
        return _union([_value(part) for part in parts])
    parts, cuts = _split(text, _LIST)
    parts = [variant for part in parts for variant in _plus_minus(part)]
    if len(parts) > 1:
        return _list([_value(part) for part in parts], strict=";" in cuts)
    parts, cuts = _split(text, _RELATION)
    return _relation(parts, [_SIGNS.get(cut, cut) for cut in cuts]) if cuts else _atom(text)


def _split(text: str, cut: str) -> tuple[list[str], list[str]]:
    """Split a text at a pattern outside brackets. Return the parts and the separators."""
    tokens = re.compile(rf"(?P<cut>{cut})|{_BRACKETS.pattern}", re.DOTALL)
    parts = []
    cuts = []
    depth = 0
    start = 0
    for token in tokens.finditer(text):
        depth += bool(token["open"]) - bool(token["close"])
        if token["cut"] and depth == 0:
            parts.append(text[start : token.start()])
            cuts.append(token["cut"])
            start = token.end()
    return [*parts, text[start:]], cuts


def _group_end(text: str, start: int = 0) -> int:
    """Return the end of the first token after `start`, or of the group in brackets that it opens."""
    depth = 0
    for token in _BRACKETS.finditer(text, start):
        depth += bool(token["open"]) - bool(token["close"])
        if depth == 0:
            return token.end()
    raise ValueError("brackets that are not closed, or no argument")


def _plus_minus(text: str) -> list[str]:
    if r"\pm" not in text or text.lstrip().startswith(r"\{"):
        return [text]
    signs = (("+", "-"), ("-", "+"))
    return [re.sub(r"\\pm(?![a-z])", plus, re.sub(r"\\mp(?![a-z])", minus, text)) for plus, minus in signs]


def _union(values: list[Value]) -> Value:
    """Return the union of values separated by "or", such as inequalities. A number counts as a set of one element.

    Return a list instead if all values are numbers or Groups, or if they have different names.
    """
    names = {value.name for value in values if isinstance(value, Named)}
    sets = [as_set(value) for value in values]
    pairs = list(zip(sets, values, strict=True))
    if len(names) > 1 or all(numbers is None or isinstance(value, Group) for numbers, value in pairs):
        return _list(values, strict=True)
    points = [sympy.FiniteSet(exact(_without_name(value))) for numbers, value in pairs if numbers is None]
    union = sympy.Union(*points, *(numbers for numbers in sets if numbers is not None))
    return Named(names.pop(), union) if names else union


def _list(values: list[Value], strict: bool) -> Value:
    """Return a list. Inequalities of one variable become their intersection, or if empty and not strict their union."""
    sets = [value.value for value in values if isinstance(value, Named) and isinstance(value.value, sympy.Set)]
    names = {value.name for value in values if isinstance(value, Named)}
    if len(sets) == len(values) and len(names) == 1:
        common = sympy.Intersection(*sets)
        return Named(names.pop(), sympy.Union(*sets) if common is sympy.S.EmptySet and not strict else common)
    return Group("", tuple(item for value in values for item in (value.items if _is_bare(value) else [value])))


def _is_bare(value: Value) -> bool:
    return isinstance(value, Group) and not value.bracket


def _relation(sides: list[str], signs: list[str]) -> Value:
    if not sides[0].strip() and signs[0] in ("=", r"\approx"):
        return _relation(sides[1:], signs[1:]) if signs[1:] else _value(sides[1])

    # Of "\pi/4 \approx 0.785", take the left side. Of "x \approx 0.785", take the right side.
    if r"\approx" in signs:
        first = signs.index(r"\approx")
        if first or not _NAME.fullmatch(sides[0]):
            sides, signs = sides[: first + 1], signs[:first]
        if not signs:
            return _value(sides[0])
    named = _named(sides[0], sides[-1]) if set(signs) <= {"=", r"\approx", r"\in"} else None
    return _unsolved([exact(_atom(side)) for side in sides], signs) if named is None else named


def _named(left: str, right: str) -> Value | None:
    """Return the right side of an equation whose left side is a name or a tuple of names, otherwise None."""
    name = _NAME.fullmatch(left)
    names = _TUPLE_OF_NAMES.fullmatch(left)
    if name:
        return Named(_plain_name(name[1]), _value(right))
    if not names:
        return None
    # (x, y) = (1, 2) assigns a value to each name. (x, y) can also be an element of a set of points.
    value = _value(right)
    if not isinstance(value, Group) or value.bracket != "(":
        return value
    pairs = zip(names[1].split(","), value.items, strict=True)
    return Group("(", tuple(Named(_plain_name(variable), item) for variable, item in pairs))


def _unsolved(terms: list[Any], signs: list[str]) -> Value:
    """Return the solution set of bounds on one variable, such as 1 < x < 2. Otherwise return a Relation."""
    symbols = set().union(*(term.free_symbols for term in terms))
    if "=" not in signs and len(symbols) == 1 and all(term in symbols or not term.free_symbols for term in terms):
        bounds = [sympy.Rel(*pair) for pair in zip(terms, terms[1:], signs, strict=False)]
        return Named(_plain_name(symbols.pop().name), sympy.And(*bounds).as_set())

    # A true equation of two numbers has their value.
    (left, right) = terms
    (sign,) = signs
    if sign == "=" and left == right:
        return right
    return Relation(sign.replace(">", "<"), right - left if sign[0] == ">" else left - right)


def _plain_name(name: str) -> str:
    return re.sub(r"[\\{}\s]", "", name)


def _atom(text: str) -> Value:
    """Parse a text without separators outside brackets."""
    text = text.strip()
    if number := plain_number(text):
        return _number(number, text)
    opened = re.match(r"\\?[{(\[]", text)
    if not opened or _group_end(text) < len(text):
        return _expression(text)

    # Different brackets delimit a half-open interval. A single value in brackets is that value, in braces a set.
    bracket = opened[0][-1] if opened[0] != "{" else ""
    inside = text[opened.end() : -2 if text.endswith("\\}") else -1]
    if not inside.strip():
        return _expression(text)
    if {bracket, text[-1]} in ({"(", "]"}, {"[", ")"}):
        start, end = map(exact, _value(inside).items)
        return sympy.Interval(start, end, left_open=bracket == "(", right_open=text[-1] == ")")
    condition = _SUCH_THAT.fullmatch(inside) if bracket in ("", "{") else None
    if condition:
        return as_set(_value(condition[1]))
    value = _value(inside)
    items = value.items if _is_bare(value) else (value,)
    return value if not bracket or (len(items) == 1 and bracket != "{") else Group(bracket, items)


def _number(number: PlainNumber, text: str) -> Any:
    value = sympy.Rational(number.value.numerator, number.value.denominator) / (100 if number.percent else 1)
    # A decimal may be rounded, so keep its number of digits. A fraction is exact.
    decimal = re.fullmatch(r"\D*?([\d,]*\.\d+)(?:[^.\d/].*)?", text, re.DOTALL)
    if decimal:
        value = sympy.Float(value, max(1, len(re.sub(r"[,.]", "", decimal[1]).lstrip("0"))))
    units = {name: power for name, power in (number.unit or {}).items() if name != "°"}
    return value * sympy.Symbol(f"unit {units}") if units else value


def _expression(text: str) -> Any:
    """Parse an expression with latex2sympy. Decimals become fractions, and i becomes the imaginary unit."""
    if _MISREAD.search(text):
        raise ValueError("a notation that latex2sympy misreads")

    # Convert degrees only with trigonometric functions. Elsewhere, both sides are in degrees.
    degree = r"(\1\\cdot\\frac{\\pi}{180})" if _TRIGONOMETRIC.search(text) else r"\1"
    parsed = _LATEX2SYMPY(re.sub(r"([\d.]+)\s*°", degree, _braced(text)))
    if not isinstance(parsed, (sympy.Expr, sympy.MatrixBase, sympy.MatrixExpr, sympy.Set)):
        raise ValueError("no expression")
    parsed = exact(parsed)
    parsed = parsed.replace(lambda e: isinstance(e, AppliedUndef), lambda e: sympy.Symbol(str(e), real=True)).doit()

    # In a sum or product, i is an index.
    i = sympy.Symbol("i", real=True)
    is_index = i not in parsed.free_symbols or parsed.has(sympy.Sum, sympy.Product)
    return parsed if is_index else parsed.xreplace({i: sympy.I})


def _braced(text: str) -> str:
    r"""Add braces around the arguments of \frac, \binom and \sqrt."""
    for command in reversed(list(_WITH_ARGUMENTS.finditer(text))):
        arguments = ""
        end = command.end()
        for _ in range(1 if command[1] else 2):
            start, end = end, _group_end(text, end)
            argument = text[start:end].strip()
            arguments += argument if argument.startswith("{") else f"{{{argument}}}"
        text = text[: command.end()] + arguments + text[end:]
    return text


def as_set(value: Value) -> Any:
    """Return a value as a set of numbers, or None. A pair in brackets is an interval."""
    if isinstance(value, Named):
        return as_set(value.value)
    if not isinstance(value, Group):
        return value if isinstance(value, sympy.Set) else None
    if any(isinstance(item, Group) for item in value.items):
        pieces = [as_set(item) for item in value.items]
        return None if value.bracket or None in pieces else sympy.Union(*pieces)
    if any(isinstance(item, (Named, Relation, sympy.Set)) for item in value.items):
        return None
    if value.bracket == "{":
        return sympy.FiniteSet(*map(exact, value.items))
    if value.bracket and len(value.items) == 2:
        return sympy.Interval(*map(exact, value.items), value.bracket == "(", value.bracket == "(")
    return None


def exact(value: Value) -> Any:
    """Replace the decimals of an expression by fractions. Raises ValueError for a list or a relation."""
    if isinstance(value, tuple):  # a Group, Named or Relation
        raise ValueError("a list or a relation where a number is expected")
    return value.replace(lambda e: e.is_Float, lambda e: sympy.Rational(str(e))) if value.has(sympy.Float) else value


def same(reference: Value, answer: Value) -> bool:
    """Return whether a value equals the reference."""
    # Names are compared only if both sides have one.
    clash = isinstance(reference, Named) and isinstance(answer, Named) and names_clash(reference.name, answer.name)
    if clash or isinstance(reference, Relation) or isinstance(answer, Relation):
        return _same_relations(_as_relation(reference), _as_relation(answer))
    if isinstance(reference, Named) or isinstance(answer, Named):
        return same(_without_name(reference), _without_name(answer))

    # Compare groups item by item. A pair in brackets may be an interval.
    if isinstance(reference, Group) and isinstance(answer, Group):
        return _same_groups(reference, answer)
    sets = as_set(reference), as_set(answer)
    if sets[0] is not None and sets[1] is not None:
        return sets[0] == sets[1] or _same_groups(_parts(sets[0]), _parts(sets[1]))
    reference, answer = _single(reference), _single(answer)
    if isinstance(reference, (Group, sympy.Set)) or isinstance(answer, (Group, sympy.Set)):
        return False
    return _same_numbers(reference, answer)


def _without_name(value: Value) -> Value:
    return value.value if isinstance(value, Named) else value


def _single(value: Value) -> Value:
    """Return the number in a set of one number. Return other values unchanged."""
    single = isinstance(value, Group) and len(value.items) == 1 and not isinstance(value.items[0], (Group, sympy.Set))
    return value.items[0] if single else value


def _parts(numbers: Any) -> Group:
    """Return a set as a Group of its parts. The parts of an interval are start, end, left_open, right_open."""
    if isinstance(numbers, sympy.Union):
        return Group("{", tuple(map(_parts, numbers.args)))
    return Group("(" if isinstance(numbers, sympy.Interval) else "{", numbers.args)


def _same_groups(a: Group, b: Group) -> bool:
    # Compared with values without names, `x = 1, y = 2` is the tuple (1, 2). Two lists with names may differ in order.
    name_counts = [sum(isinstance(item, Named) for item in group.items) for group in (a, b)]
    if _all_named(a) and _all_named(b):
        a, b = Group("", a.items), Group("", b.items)
    elif 0 in name_counts and (_all_named(a) or _all_named(b)):
        a, b = (Group("(", tuple(map(_without_name, g.items))) if _all_named(g) else g for g in (a, b))
    brackets = {a.bracket, b.bracket}
    if len(a.items) != len(b.items) and "{" not in brackets:
        return False
    if brackets <= {"", "{"}:
        # Each item has an equal item on the other side.
        return all(any(same(x, y) for y in b.items) for x in a.items) and all(
            any(same(x, y) for x in a.items) for y in b.items
        )
    return brackets in ({"("}, {"["}, {"", "("}) and all(map(same, a.items, b.items))


def _all_named(group: Group) -> bool:
    names = [item.name for item in group.items if isinstance(item, Named)]
    return 1 < len(names) == len(group.items) == len(set(names))


def _as_relation(value: Value) -> Relation | None:
    """Return `y = 2x + 1` as a Relation. Return None for a solved equation, `x = 3`, and for other values."""
    if isinstance(value, Named) and isinstance(value.value, sympy.Expr) and value.value.free_symbols:
        return Relation("=", sympy.Symbol(value.name, real=True) - value.value)
    return value if isinstance(value, Relation) else None


def _same_relations(a: Relation | None, b: Relation | None) -> bool:
    """Return whether the quotient of both differences is constant and, for inequalities, positive."""
    if a is None or b is None or a.sign != b.sign or a.difference.free_symbols != b.difference.free_symbols:
        return False
    # If the quotient is constant, it has the same value at any point.
    point = next(_points(a.difference.free_symbols))
    quotient = a.difference.xreplace(point) / b.difference.xreplace(point)
    usable = quotient.is_finite and (a.sign in ("=", "!=") or quotient.is_positive)
    return bool(usable) and _same_expressions(a.difference, quotient * b.difference)


def _same_numbers(reference: Value, answer: Value) -> bool:
    a, b = exact(reference), exact(answer)
    if isinstance(a, sympy.MatrixBase) and isinstance(b, sympy.MatrixBase):
        return a.shape == b.shape and all(map(_same_expressions, a.flat(), b.flat()))
    if not isinstance(a, sympy.Expr) or not isinstance(b, sympy.Expr):
        return bool(a == b)
    digits = prec_to_dps(answer._prec) if answer.is_Float else 0
    if digits >= _DECIMALS and a.is_number and a.is_real and not a.is_Rational:
        return _is_rounded(a, Decimal(str(answer)), digits)
    return _same_expressions(a, b)


def _same_expressions(a: Any, b: Any) -> bool:
    difference = a - b if a != b else sympy.S.Zero
    if difference.is_Rational:
        return bool(difference == 0)
    return all(_is_zero(difference.xreplace(point)) for point in _points(difference.free_symbols))


def _points(symbols: set[Any]) -> Iterator[dict[Any, Any]]:
    """Yield three fixed assignments of values to variables: all positive, all negative, and mixed signs."""
    draw = random.Random(0)
    ordered = sorted(symbols, key=lambda symbol: symbol.name)
    for signs in ((1, 1), (-1, -1), (1, -1)) if symbols else ((1, 1),):
        yield {
            symbol: sympy.Rational(signs[i % 2] * draw.randrange(100, 1000), draw.randrange(100, 1000))
            for i, symbol in enumerate(ordered)
        }


def _is_zero(number: Any) -> bool:
    """Return whether a number is zero to the precision that evalf reaches."""
    if number.is_zero or number.is_Rational:
        return bool(number.is_zero)
    digits = _GAMMA_DIGITS if number.has(sympy.gamma, sympy.factorial, sympy.binomial) else _DIGITS
    parts = number.evalf(6, maxn=digits).as_real_imag()
    # The precision of a result of evalf is the number of its accurate bits, at least 1.
    return all(part == 0 or (part.is_Float and part.is_finite and part._prec <= 2) for part in parts)


def _is_rounded(irrational: Any, decimal: Decimal, digits: int) -> bool:
    """Return whether a decimal is an irrational number rounded or truncated to `digits` digits."""
    value = str(irrational.evalf(digits + 20))
    contexts = (Context(prec=digits, rounding=rounding) for rounding in (ROUND_HALF_EVEN, ROUND_DOWN))
    return any(context.create_decimal(value) == decimal for context in contexts)
