"""Whether two values of mathematics are equal, exactly: nothing is equal because its difference is small.

Two expressions are equal if their difference, evaluated with as many digits as its cancellation asks for, has no digit
that is not zero among the first 1,000. Expressions with letters are compared so at three points. No equation is solved.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import sympy

from megatron_brorl.rewards.math_values import Group, Named, Number, Relation, Value, as_set, expression
from megatron_brorl.rewards.plain_number import equal, names_clash, units_clash

_DIGITS = 1000
_GAMMA_DIGITS = 100  # of what holds factorials of fractions, which take seconds for more
_DECIMALS = 6  # correct digits of a decimal that stands for an irrational number


def same(reference: Value, given: Value) -> bool:
    """Whether a given value is the reference's."""
    # Names count where both sides have one.
    if isinstance(reference, Relation) or isinstance(given, Relation):
        return _same_relation(_as_relation(reference), _as_relation(given))
    if isinstance(reference, Named) and isinstance(given, Named) and names_clash(reference.name, given.name):
        return _same_relation(_as_relation(reference), _as_relation(given))
    if isinstance(reference, Named) or isinstance(given, Named):
        return same(*(value.value if isinstance(value, Named) else value for value in (reference, given)))

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


def _single(value: Value) -> Value:
    """Return the number in a set of one number; any other value as it is."""
    one = isinstance(value, Group) and len(value.items) == 1 and not isinstance(value.items[0], (Group, sympy.Set))
    return value.items[0] if one else value


def _same_groups(a: Group, b: Group) -> bool:
    # `x = 1, y = 2` is the tuple (1, 2) next to values without names. Between two such lists the order does not count.
    if (_all_named(a) and not _any_named(b)) or (_all_named(b) and not _any_named(a)):
        a, b = (Group("(", tuple(i.value for i in g.items)) if _all_named(g) else g for g in (a, b))
    elif _all_named(a) and _all_named(b):
        a, b = Group("", a.items), Group("", b.items)
    if len(a.items) != len(b.items) and "{" not in (a.bracket, b.bracket):
        return False
    brackets = {a.bracket, b.bracket}
    if brackets <= {"", "{"}:
        return _same_items(a.items, b.items)
    return brackets in ({"("}, {"["}, {"", "("}) and all(map(same, a.items, b.items))


def _same_items(a: Sequence[Value], b: Sequence[Value]) -> bool:
    """Whether each item has an equal one on the other side."""
    return all(any(same(x, y) for y in b) for x in a) and all(any(same(x, y) for x in a) for y in b)


def _all_named(group: Group) -> bool:
    names = [item.name for item in group.items if isinstance(item, Named)]
    return 1 < len(names) == len(group.items) == len(set(names))


def _any_named(group: Group) -> bool:
    return any(isinstance(item, Named) for item in group.items)


def _same_sets(a: Any, b: Any) -> bool:
    """Whether two sets of numbers are equal, piece by piece."""
    if a == b:
        return True
    pieces = [s.args if isinstance(s, sympy.Union) else (s,) for s in (a, b)]
    return len(pieces[0]) == len(pieces[1]) and all(
        any(_same_piece(piece, other) for other in pieces[1]) for piece in pieces[0]
    )


def _same_piece(a: Any, b: Any) -> bool:
    if isinstance(a, sympy.Interval) and isinstance(b, sympy.Interval):
        ends = a.left_open == b.left_open and a.right_open == b.right_open
        return ends and _same_numbers(a.start, b.start) and _same_numbers(a.end, b.end)
    if isinstance(a, sympy.FiniteSet) and isinstance(b, sympy.FiniteSet):
        return len(a) == len(b) and _same_items(a.args, b.args)
    return bool(a == b)


def _as_relation(value: Value) -> Relation | None:
    """`y = 2x + 1` as an equation without a name; None for what is solved, `x = 3`, and for anything else."""
    if isinstance(value, Named) and isinstance(value.value, sympy.Expr) and value.value.free_symbols:
        return Relation("=", sympy.Symbol(value.name, real=True) - value.value)
    return value if isinstance(value, Relation) else None


def _same_relation(a: Relation | None, b: Relation | None) -> bool:
    """Whether the differences have a constant quotient, a positive one for an inequality."""
    if a is None or b is None or a.sign != b.sign or a.difference.free_symbols != b.difference.free_symbols:
        return False

    # The quotient at one point is the only constant that can make them equal.
    point = next(_points(a.difference.free_symbols))
    quotient = a.difference.xreplace(point) / b.difference.xreplace(point)
    usable = quotient.is_finite and (a.sign in ("=", "!=") or quotient.is_positive)
    return bool(usable) and _same_expressions(a.difference, quotient * b.difference)


def _same_numbers(reference: Value, given: Value) -> bool:
    if isinstance(reference, Number) and isinstance(given, Number):
        return equal(reference.number, given.number) and not units_clash(reference.number.unit, given.number.unit)
    a, b = expression(reference), expression(given)
    if isinstance(a, sympy.MatrixBase) and isinstance(b, sympy.MatrixBase):
        return a.shape == b.shape and all(map(_same_expressions, a.flat(), b.flat()))
    if not isinstance(a, sympy.Expr) or not isinstance(b, sympy.Expr):
        return bool(a == b)
    if isinstance(given, Number) and given.digits >= _DECIMALS and a.is_number and not a.is_Rational:
        return _is_rounded(a, Fraction(int(b.p), int(b.q)), given.digits)
    return _same_expressions(a, b)


def _same_expressions(a: Any, b: Any) -> bool:
    if a == b:
        return True
    difference = a - b
    if difference.is_Rational:
        return bool(difference == 0)
    return all(_is_zero(difference.xreplace(point)) for point in _points(difference.free_symbols))


def _points(symbols: set[Any]) -> Any:
    """Fixed values for the letters of an expression: all positive, all negative, then of both signs."""
    draw = random.Random(0)
    for signs in ((1, 1), (-1, -1), (1, -1)) if symbols else ((1, 1),):
        ordered = sorted(symbols, key=lambda symbol: symbol.name)
        yield {
            symbol: sympy.Rational(signs[i % 2] * draw.randrange(100, 1000), draw.randrange(100, 1000))
            for i, symbol in enumerate(ordered)
        }


def _is_zero(number: Any) -> bool:
    """Whether a number without letters has no digit before the thousandth; evalf tells how many of them are certain."""
    if number.is_zero:
        return True
    if number.is_Rational:
        return False
    digits = _GAMMA_DIGITS if number.has(sympy.gamma, sympy.factorial, sympy.binomial) else _DIGITS
    parts = number.evalf(6, maxn=digits).as_real_imag()
    return all(part == 0 or (part.is_Float and part.is_finite and part._prec <= 2) for part in parts)


def _is_rounded(exact: Any, given: Fraction, digits: int) -> bool:
    """Whether a decimal is an irrational number with six correct digits, or all of its digits cut off."""
    value = exact.evalf(digits + 20)
    if not value.is_Float or not value:
        return False

    # The place of its first digit decides what one unit of the sixth digit is.
    size = Fraction(str(abs(value)))
    exponent = len(str(int(size))) - 1 if size >= 1 else -len(str(int(1 / size)))
    error = abs(size - abs(given))
    cut_off = abs(given) < size and error < Fraction(10) ** (exponent - digits + 1)
    rounded = 2 * error <= Fraction(10) ** (exponent - _DECIMALS + 1)
    return (value > 0) == (given > 0) and (rounded or cut_off)
