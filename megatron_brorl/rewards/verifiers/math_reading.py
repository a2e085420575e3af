r"""Read LaTeX as a value that can be compared: an expression, a set, a tuple, an equation or an inequality.

Lists, brackets and relations are read here, because latex2sympy drops parts of them or evaluates them: it reads the
pair (2, 1) as an empty interval. latex2sympy reads the expressions between them. `read` raises an exception for a text
that it does not understand, so no part of an answer is dropped before the comparison.
"""

from __future__ import annotations

import functools
import re
from fractions import Fraction
from typing import Any, NamedTuple

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
from sympy.core.function import AppliedUndef

from megatron_brorl.rewards.answer_text import THIN, ascii_text, commands
from megatron_brorl.rewards.plain_number import NAME, PlainNumber, Unit, only_words, plain_number, unit

# A number or an expression of sympy (a Float is a decimal with its digits as written), a matrix, a set, Group, Named or
# Relation.
Value = Any

_LATEX2SYMPY = functools.partial(
    latex2sympy, is_real=True, normalization_config=None, conversion_config=ConversionConfig(lowercase_symbols=False)
)
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)")
# latex2sympy drops a part of these: the base of a numeral, a modulus, a prime, the T of A^T. It multiplies numbers in a
# row, reads 1:2:3 as 1/6 and 0x1F as a product.
_MISREAD = re.compile(
    r"[\d)}]\s*_|\d\s+[\d.]|\\[a-z]*mod|['?#]|\.\.|:|[A-Za-z]\s*\^\s*\{?\s*(?:T|\\top)(?!\w)|(?<![\w.])0[A-Za-z]\w"
)

# A numeral with its base: 2516_9, (A3)_{16}, 101_\text{two}, 101 (base 2).
_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10,
          "twelve": 12, "sixteen": 16}  # fmt: skip
_BASE = rf"(?P<{{}}>\d{{{{1,2}}}}(?!\d)|{'|'.join(_BASES)})"
_BASED = re.compile(
    r"(?<![\w.\\])[({]?\s*(?P<digits>[0-9A-Fa-f]+(?:\.[0-9A-Fa-f]+)?)\s*[)}]?\s*(?:"
    rf"_[\s{{(]*(?:base\s*)?{_BASE.format('base')}[\s)}}]*|\(?\s*(?:in\s+)?base\s+{_BASE.format('base2')}\s*\)?)"
)

# Different ways to write the same, in the order in which they are replaced.
_FONT = re.compile(r"\\(?:text|math)(?:rm|it|bf|sf|normal)?(?![A-Za-z])\s*\{([^{}]*)\}|\\[mh]box\s*\{([^{}]*)\}")
_UNWRAPPED = re.compile(rf"or|and|(?:in\s+)?base\s*(?:\d+|{'|'.join(_BASES)})?|{'|'.join(_BASES)}|[A-F]{{2,}}")
_SPELLINGS = [
    (re.compile(pattern), spelling)
    for pattern, spelling in (
        (r"\\imath(?![A-Za-z])", "i"),
        (r"\\[lr]?vert(?![A-Za-z])", "|"),
        (r"\\langle(?![A-Za-z])", "("),
        (r"\\rangle(?![A-Za-z])", ")"),
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset "),
        (r"\\(?:le|leqslant)(?![A-Za-z])", "<="),
        (r"\\(?:ge|geqslant)(?![A-Za-z])", ">="),
        (r"\\neq?(?![A-Za-z])", "!="),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r":=", "="),
        (r"\\vee(?![A-Za-z])|,?\s*\bor\b", r" \\lor "),
        (r"\\wedge(?![A-Za-z])|\\land(?![A-Za-z])|,?\s*\band\b", " ; "),
        (r"\\operatorname\s*\{([a-z]+)\}", r"\\\1 "),
        (r"(?<![\\A-Za-z])(pi|infty|sin|cos|tan|ln|log|exp|sqrt)(?![A-Za-z])", r"\\\1 "),
        (r"(?<![\\A-Za-z])inf(?:inity)?(?![A-Za-z])", r"\\infty "),
        (r"\\log\s*_\s*(\d+(?=\s)|\w)", r"\\log_{\1}"),
        (r"(\\sqrt\s*|\^\s*)\(([^()]*)\)", r"\1{\2}"),
        (rf"(?<=\d){THIN}(?=\d{{3}}(?!\d))", ""),
        (THIN, " "),
        (r"(?<=[\w)}])\*\*(?=[\w({])", "^"),
        (r"(?<![\\A-Za-z])([A-Za-z])'(?!')", r"\1_{p}"),
    )
]
_ROW_END = re.compile(r"\\\\\s+")
_DELIMITER = re.compile(r"(?<!\\)(?:\$|\\[()\[\]])|\\\$")
_BRACED_COMMA = re.compile(r"(?<=\d)\{,\}(?=\d{3}(?!\d))")
_GROUPED = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,])")
_LAST_WORDS = re.compile(
    r"(?:\\(?:text|mathrm|mbox)\s*\{([^{}\\]+)\}|(?<=[\s})\d])((?:[A-Za-z]{2,}[ /]+){0,3}[A-Za-z]{2,}))"
    r"\s*(\^\s*\{?\s*\d\s*\}?)?[\s.]*$"
)
_NO_UNITS = ("unit", "units", "square unit", "square units", "cubic units", "sq units")
_NAME = re.compile(rf"\s*({NAME})\s*")
_SUCH_THAT = re.compile(rf"\s*{NAME}\s*(?:\\mid(?![a-z])|[|:])(.*)", re.DOTALL)
_TUPLE_OF_NAMES = re.compile(rf"\s*\(({NAME}(?:\s*,\s*{NAME})+)\s*\)\s*")

# Where a text is split outside brackets.
_BRACKETS = re.compile(r"(?P<open>\\?[{(\[])|(?P<close>\\?[})\]])|\\[A-Za-z]+|\\?.", re.DOTALL)
_OR, _LIST = r"\\lor(?![A-Za-z])", "[,;]"
_RELATION = r"[<>!]=|[<>=]|\\(?:in|approx)(?![A-Za-z])"


class Group(NamedTuple):
    """Values in brackets; `bracket` is empty for a bare list."""

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
    """Return the value of a text, and the unit of measurement at its end, if there is one."""
    text = commands(_ROW_END.sub(r"\\\\", _BRACED_COMMA.sub("", ascii_text(text))))
    text, measured = _without_unit(_DELIMITER.sub("", text))
    text = _FONT.sub(_without_font, text)
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    # In brackets, a comma between digits separates the members of a tuple or a set.
    if not re.search(r"[(\[]|\\\{", text):
        text = _GROUPED.sub(lambda m: m[0].replace(",", ""), text)
    return _value(_BASED.sub(_numeral, text)), measured


def as_set(value: Value) -> Any:
    """Return the set of numbers that a value means, or None. A pair in brackets is an interval."""
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
    """Return an expression with decimals as fractions. Raises ValueError for a list or a relation."""
    if isinstance(value, tuple):
        raise ValueError("a list or a relation where a number is expected")
    return value.replace(lambda e: e.is_Float, lambda e: sympy.Rational(str(e))) if value.has(sympy.Float) else value


def _split(text: str, cut: str) -> tuple[list[str], list[str]]:
    """Return the parts of a text between the cuts outside brackets, and the cuts."""
    tokens = re.compile(rf"(?P<cut>{cut})|{_BRACKETS.pattern}", re.DOTALL)
    parts, cuts, depth, start = [], [], 0, 0
    for token in tokens.finditer(text):
        depth += bool(token["open"]) - bool(token["close"])
        if token["cut"] and depth == 0:
            parts.append(text[start : token.start()])
            cuts.append(token["cut"])
            start = token.end()
    return [*parts, text[start:]], cuts


def _value(text: str) -> Value:
    text = text.strip().rstrip(".,;").strip()
    parts, cuts = _split(text, _OR)
    if cuts:
        return _union([_value(part) for part in parts])
    parts, cuts = _split(text, _LIST)
    parts = [sign for part in parts for sign in _plus_minus(part)]
    if len(parts) > 1:
        return _list([_value(part) for part in parts], ";" in cuts)
    parts, cuts = _split(text, _RELATION)
    return _relation(parts, cuts) if cuts else _atom(text)


def _plus_minus(text: str) -> list[str]:
    if r"\pm" not in text or text.lstrip().startswith(r"\{"):
        return [text]
    signs = (("+", "-"), ("-", "+"))
    return [re.sub(r"\\pm(?![a-z])", plus, re.sub(r"\\mp(?![a-z])", minus, text)) for plus, minus in signs]


def _union(values: list[Value]) -> Value:
    """Return the union of values that "or" separates, such as inequalities; a number counts as a set of one element.

    Return a list instead if all values are numbers or Groups, or if they belong to different names.
    """
    names = {value.name if isinstance(value, Named) else "" for value in values} - {""}
    sets = [as_set(value) for value in values]
    points = all(one is None or isinstance(value, Group) for one, value in zip(sets, values, strict=True))
    if len(names) > 1 or points:
        return _list(values, True)
    numbers = [value.value if isinstance(value, Named) else value for value in values]
    found = [sympy.FiniteSet(exact(n)) if one is None else one for one, n in zip(sets, numbers, strict=True)]
    return Named(names.pop(), sympy.Union(*found)) if names else sympy.Union(*found)


def _list(values: list[Value], strict: bool) -> Value:
    """Return a bare list; inequalities of one name as their intersection, or as their union if that is empty."""
    names = {value.name if isinstance(value, Named) and isinstance(value.value, sympy.Set) else "" for value in values}
    if len(names) == 1 and "" not in names:
        both = sympy.Intersection(*(value.value for value in values))
        either = sympy.Union(*(value.value for value in values))
        return Named(names.pop(), either if both is sympy.S.EmptySet and not strict else both)
    return Group("", tuple(item for value in values for item in (value.items if _is_bare(value) else [value])))


def _is_bare(value: Value) -> bool:
    return isinstance(value, Group) and not value.bracket


def _relation(sides: list[str], signs: list[str]) -> Value:
    if not sides[0].strip() and signs[0] in ("=", r"\approx"):
        return _value(sides[1]) if len(sides) == 2 else _relation(sides[1:], signs[1:])

    # "\pi/4 \approx 0.785" is its left side. A name has no value: "x \approx 0.785" is its right side.
    if r"\approx" in signs:
        first = signs.index(r"\approx")
        if first or not _NAME.fullmatch(sides[0]):
            sides, signs = sides[: first + 1], signs[:first]
        if not signs:
            return _value(sides[0])
    named = _named(sides[0], sides[-1]) if set(signs) <= {"=", r"\approx", r"\in"} else None
    return _unsolved([exact(_atom(side)) for side in sides], signs) if named is None else named


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
        return Named(_plain_name(variable.name), sympy.Intersection(*(_bound(variable, *pair) for pair in pairs)))

    # A true equation of numbers is their value.
    (left, right), (sign,) = terms, signs
    if sign == "=" and left == right:
        return right
    return Relation(sign.replace(">", "<"), right - left if sign[0] == ">" else left - right)


def _bound(variable: Any, left: Any, sign: str, right: Any) -> Any:
    """Return the numbers on one side of a bound."""
    if left != variable:
        left, right, sign = right, left, sign.translate(str.maketrans("<>", "><"))
    if left != variable:
        raise ValueError("an inequality of two numbers")
    if sign == "!=":
        return sympy.S.Reals - sympy.FiniteSet(right)
    is_open = "=" not in sign
    return sympy.Interval(-sympy.oo, right, True, is_open) if "<" in sign else sympy.Interval(right, sympy.oo, is_open)


def _plain_name(name: str) -> str:
    return re.sub(r"[\\{}\s]", "", name)


def _atom(text: str) -> Value:
    """Read a text that has no parts outside brackets."""
    text = text.strip()
    number = plain_number(text)
    if number:
        return _number(number, text)
    opened = re.match(r"\\?[{(\[]", text)
    if not opened or not _closes_last(text):
        return _expression(text)

    # Different brackets make a half-open interval. One value in brackets is that value, and in braces a set.
    bracket = opened[0][-1] if opened[0] != "{" else ""
    inside = text[opened.end() : -2 if text.endswith("\\}") else -1]
    if {bracket, text[-1]} in ({"(", "]"}, {"[", ")"}) or not inside.strip():
        return _expression(text)
    condition = _SUCH_THAT.fullmatch(inside) if bracket == "{" else None
    if condition:
        return as_set(_value(condition[1]))
    value = _value(inside)
    items = value.items if _is_bare(value) else (value,)
    return value if not bracket or (len(items) == 1 and bracket != "{") else Group(bracket, items)


def _closes_last(text: str) -> bool:
    """Return whether the first bracket of a text is closed by its last character."""
    depth = 0
    for token in _BRACKETS.finditer(text):
        depth += bool(token["open"]) - bool(token["close"])
        if depth == 0:
            return token.end() == len(text)
    return False


def _number(number: PlainNumber, text: str) -> Any:
    value = sympy.Rational(number.value.numerator, number.value.denominator) / (100 if number.percent else 1)
    # A decimal may be a rounded value, so its digits count. A fraction never is.
    decimal = re.fullmatch(r"\D*?([\d,]*\.\d+)(?:[^.\d/].*)?", text, re.DOTALL)
    if decimal:
        value = sympy.Float(value, max(1, len(re.sub(r"[,.]", "", decimal[1]).lstrip("0"))))
    others = {name: power for name, power in (number.unit or {}).items() if name != "°"}
    return value * sympy.Symbol(f"unit {others}") if others else value


def _expression(text: str) -> Any:
    """Return what latex2sympy reads, with decimals as fractions and with i as the imaginary unit."""
    if _MISREAD.search(text):
        raise ValueError("a notation that latex2sympy misreads")

    # Degrees count only in a trigonometric function. Elsewhere both sides are in degrees.
    degree = r"(\1\\cdot\\frac{\\pi}{180})" if _TRIGONOMETRIC.search(text) else r"\1"
    parsed = _LATEX2SYMPY(re.sub(r"([\d.]+)\s*°", degree, _braced(text)))
    if not isinstance(parsed, (sympy.Expr, sympy.MatrixBase, sympy.MatrixExpr, sympy.Set)):
        raise ValueError("no expression")
    parsed = exact(parsed)
    parsed = parsed.replace(lambda e: isinstance(e, AppliedUndef), lambda e: sympy.Symbol(str(e), real=True)).doit()

    # i is an index in a sum.
    i = sympy.Symbol("i", real=True)
    is_index = i not in parsed.free_symbols or parsed.has(sympy.Sum, sympy.Product)
    return parsed if is_index else parsed.xreplace({i: sympy.I})


def _braced(text: str) -> str:
    r"""Return LaTeX with braces around the arguments of \frac, \binom and \sqrt."""
    out, at = "", 0
    for command in re.finditer(r"\\(?:frac|binom|sqrt)(?![A-Za-z])(?:\s*\[[^\[\]]*\])?", text):
        if command.start() < at:
            continue
        out += text[at : command.end()]
        at = command.end()
        for _ in range(1 if command[0].startswith(r"\sqrt") else 2):
            depth = 0
            for token in re.compile(r"\\[A-Za-z]+|\\.|\S", re.DOTALL).finditer(text, at):
                depth += {"{": 1, "}": -1}.get(token[0], 0)
                if depth == 0:
                    break
            else:
                raise ValueError("an argument is missing")
            argument = re.sub(r"^\{(.*)\}$", r"\1", text[at : token.end()].strip(), flags=re.DOTALL)
            out, at = out + "{" + _braced(argument) + "}", token.end()
    return out + text[at:]


def _without_unit(text: str) -> tuple[str, Unit | None]:
    r"""Remove the words, or the unit, from the end of `6\pi \text{ cm}^2`. The unit is None for other words."""
    match = _LAST_WORDS.search(text)
    if not match or not re.search(r"[\w)}\]]\s*$", text[: match.start()]):
        return text, None
    words = (match[1] or match[2]).strip()
    measured = unit(f"{words} {match[3] or ''}".strip())
    if measured or words in _NO_UNITS or (match[1] and only_words(words)):
        return text[: match.start()], measured
    return text, None


def _without_font(match: re.Match[str]) -> str:
    r"""Keep words as \text{...}, which is one symbol. Take anything else out of the font."""
    inside = (match[1] if match[1] is not None else match[2]).strip()
    is_word = re.fullmatch(r"[A-Za-z][A-Za-z .'-]+", inside) and not _UNWRAPPED.fullmatch(inside)
    return rf"\text{{{inside}}}" if is_word else f" {inside} "


def _numeral(match: re.Match[str]) -> str:
    """Return a numeral as one symbol for its value and its base, or as digits if the base is ten."""
    digits, name = match["digits"], match["base"] or match["base2"]
    base = _BASES.get(name) or int(name)
    # One letter with an index is a variable, and so are digits that the base does not have.
    if not re.search(r"\d", digits) and not re.fullmatch("[A-F]{2,}", digits):
        return match[0]
    whole, _, decimals = digits.partition(".")
    try:
        value = Fraction(int(whole + decimals, base), base ** len(decimals))
    except ValueError:
        return match[0]
    return f" {digits} " if base == 10 else rf"\variable{{n{value.numerator}o{value.denominator}base{base}}}"
