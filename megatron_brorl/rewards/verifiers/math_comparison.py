"""Compare two values of mathematics exactly: they are not equal because their difference is small.

Two expressions are equal if their difference, evaluated with as many digits as its cancellation needs, has only zeros
among the first 1,000 digits. Expressions with letters are compared so at three points. No equation is solved.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import sympy
from mpmath.libmp import prec_to_dps

from megatron_brorl.rewards.plain_number import names_clash
from megatron_brorl.rewards.verifiers.math_reading import Group, Named, Relation, Value, as_set, exact

_DIGITS = 1000
_GAMMA_DIGITS = 100  # of factorials of fractions, which take seconds for more
_DECIMALS = 6  # correct digits of a decimal that stands for an irrational number


def same(reference: Value, given: Value) -> bool:
    """Return whether a given value is the value of the reference."""
    # Names count if both sides have one.
    clash = isinstance(reference, Named) and isinstance(given, Named) and names_clash(reference.name, given.name)
    if clash or isinstance(reference, Relation) or isinstance(given, Relation):
        return _same_relations(_as_relation(reference), _as_relation(given))
    if isinstance(reference, Named) or isinstance(given, Named):
        return same(_without_name(reference), _without_name(given))

    # Lists, tuples and sets of single values; an interval may be written as a pair.
    if isinstance(reference, Group) and isinstance(given, Group):
        return _same_groups(reference, given)
    sets = as_set(reference), as_set(given)
    if sets[0] is not None and sets[1] is not None:
        return _same_sets(*sets)
    reference, given = _single(reference), _single(given)
    if isinstance(reference, (Group, sympy.Set)) or isinstance(given, (Group, sympy.Set)):
        return False
    return _same_numbers(reference, given)


def _without_name(value: Value) -> Value:
    return value.value if isinstance(value, Named) else value


def _single(value: Value) -> Value:
    """Return the number in a set of one number, or any other value as it is."""
    one = isinstance(value, Group) and len(value.items) == 1 and not isinstance(value.items[0], (Group, sympy.Set))
    return value.items[0] if one else value


def _same_groups(a: Group, b: Group) -> bool:
    # `x = 1, y = 2` is the tuple (1, 2) next to values without names. Between two such lists the order does not count.
    if _all_named(a) and _all_named(b):
        a, b = Group("", a.items), Group("", b.items)
    elif any(_all_named(one) and not any(isinstance(i, Named) for i in other.items) for one, other in ((a, b), (b, a))):
        a, b = (Group("(", tuple(map(_without_name, g.items))) if _all_named(g) else g for g in (a, b))
    brackets = {a.bracket, b.bracket}
    if len(a.items) != len(b.items) and "{" not in brackets:
        return False
    if brackets <= {"", "{"}:
        return _same_items(a.items, b.items)
    return brackets in ({"("}, {"["}, {"", "("}) and all(map(same, a.items, b.items))


def _same_items(a: Sequence[Value], b: Sequence[Value]) -> bool:
    """Return whether each item has an equal one on the other side."""
    return all(any(same(x, y) for y in b) for x in a) and all(any(same(x, y) for x in a) for y in b)


def _all_named(group: Group) -> bool:
    names = [item.name for item in group.items if isinstance(item, Named)]
    return 1 < len(names) == len(group.items) == len(set(names))


def _same_sets(a: Any, b: Any) -> bool:
    """Return whether two sets of numbers are equal piece by piece."""
    pieces = [s.args if isinstance(s, sympy.Union) else (s,) for s in (a, b)]
    same_count = len(pieces[0]) == len(pieces[1])
    return a == b or (same_count and all(any(_same_pieces(x, y) for y in pieces[1]) for x in pieces[0]))


def _same_pieces(a: Any, b: Any) -> bool:
    if isinstance(a, sympy.Interval) and isinstance(b, sympy.Interval):
        ends = a.left_open == b.left_open and a.right_open == b.right_open
        return ends and _same_expressions(a.start, b.start) and _same_expressions(a.end, b.end)
    if isinstance(a, sympy.FiniteSet) and isinstance(b, sympy.FiniteSet):
        return len(a) == len(b) and _same_items(a.args, b.args)
    return bool(a == b)


def _as_relation(value: Value) -> Relation | None:
    """Return `y = 2x + 1` as an equation without a name; None for a solved one, `x = 3`, and for anything else."""
    if isinstance(value, Named) and isinstance(value.value, sympy.Expr) and value.value.free_symbols:
        return Relation("=", sympy.Symbol(value.name, real=True) - value.value)
    return value if isinstance(value, Relation) else None


def _same_relations(a: Relation | None, b: Relation | None) -> bool:
    """Return whether the differences have a constant quotient, which is positive for an inequality."""
    if a is None or b is None or a.sign != b.sign or a.difference.free_symbols != b.difference.free_symbols:
        return False
    # The quotient at one point is the only constant that can make them equal.
    point = next(_points(a.difference.free_symbols))
    quotient = a.difference.xreplace(point) / b.difference.xreplace(point)
    usable = quotient.is_finite and (a.sign in ("=", "!=") or quotient.is_positive)
    return bool(usable) and _same_expressions(a.difference, quotient * b.difference)


def _same_numbers(reference: Value, given: Value) -> bool:
    a, b = exact(reference), exact(given)
    if isinstance(a, sympy.MatrixBase) and isinstance(b, sympy.MatrixBase):
        return a.shape == b.shape and all(map(_same_expressions, a.flat(), b.flat()))
    if not isinstance(a, sympy.Expr) or not isinstance(b, sympy.Expr):
        return bool(a == b)
    digits = prec_to_dps(given._prec) if given.is_Float else 0
    if digits >= _DECIMALS and a.is_number and not a.is_Rational:
        return _is_rounded(a, Fraction(int(b.p), int(b.q)), digits)
    return _same_expressions(a, b)


def _same_expressions(a: Any, b: Any) -> bool:
    difference = a - b if a != b else sympy.S.Zero
    if difference.is_Rational:
        return bool(difference == 0)
    return all(_is_zero(difference.xreplace(point)) for point in _points(difference.free_symbols))


def _points(symbols: set[Any]) -> Iterator[dict[Any, Any]]:
    """Yield fixed values for the letters of an expression: all positive, all negative, then of both signs."""
    draw = random.Random(0)
    ordered = sorted(symbols, key=lambda symbol: symbol.name)
    for signs in ((1, 1), (-1, -1), (1, -1)) if symbols else ((1, 1),):
        yield {
            symbol: sympy.Rational(signs[i % 2] * draw.randrange(100, 1000), draw.randrange(100, 1000))
            for i, symbol in enumerate(ordered)
        }


def _is_zero(number: Any) -> bool:
    """Return whether a number without letters has only zeros as digits; evalf tells how many of them are certain."""
    if number.is_zero or number.is_Rational:
        return bool(number.is_zero)
    digits = _GAMMA_DIGITS if number.has(sympy.gamma, sympy.factorial, sympy.binomial) else _DIGITS
    parts = number.evalf(6, maxn=digits).as_real_imag()
    return all(part == 0 or (part.is_Float and part.is_finite and part._prec <= 2) for part in parts)


def _is_rounded(irrational: Any, given: Fraction, digits: int) -> bool:
    """Return whether a decimal is an irrational number with six correct digits, or with all of its digits cut off."""
    value = irrational.evalf(digits + 20)
    if not value.is_Float or not value:
        return False
    # The place of the first digit decides the size of one unit of the sixth digit.
    size = Fraction(str(abs(value)))
    exponent = len(str(int(size))) - 1 if size >= 1 else -len(str(int(1 / size)))
    error = abs(size - abs(given))
    cut_off = abs(given) < size and error < Fraction(10) ** (exponent - digits + 1)
    rounded = 2 * error <= Fraction(10) ** (exponent - _DECIMALS + 1)
    return (value > 0) == (given > 0) and (rounded or cut_off)
