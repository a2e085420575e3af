"""A calculator tool for arithmetic problems: factory = "megatron_brorl.environments.calculator:Calculator"."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

_MAX_CHARS = 200  # of an expression
_MAX_BITS = 1024  # of an integer
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class Calculator:
    """An environment with the tool `calculate`.

    The reward is 1 if the last number in the final turn equals the number row["answer"], else 0.
    """

    def reset(self, row: Mapping[str, Any]) -> None:
        self._answer = str(row["answer"])
        self._text = ""

    def calculate(self, expression: str) -> str:
        """Evaluate an arithmetic expression.

        Args:
            expression: Numbers, the operators + - * / // % ** and parentheses.
        """
        try:
            if len(expression) > _MAX_CHARS:
                raise ValueError(f"the expression has more than {_MAX_CHARS} characters")
            return str(_value(ast.parse(expression.strip(), mode="eval").body))
        except (ArithmeticError, ValueError, SyntaxError, RecursionError, MemoryError) as e:
            return f"error: {e}"

    def final(self, text: str) -> None:
        self._text = text

    def reward(self) -> float:
        numbers = _NUMBER.findall(self._text.replace(",", ""))
        return float(bool(numbers) and Decimal(numbers[-1]) == Decimal(self._answer.replace(",", "")))


def _value(node: ast.AST) -> int | float:
    """Return the value of an expression. Raises ValueError or ArithmeticError with a text for the model."""
    # bool is a subclass of int.
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value: Any = node.value
    elif isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_value(node.operand))
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    else:
        raise ValueError("only numbers, + - * / // % ** and parentheses are allowed")
    if isinstance(value, complex):
        raise ValueError("the power is not a real number")
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise OverflowError(f"a number has more than {_MAX_BITS} bits")
    return value


def _power(base: int | float, exponent: int | float) -> Any:
    # Python would compute an integer power of any size.
    if isinstance(base, int) and abs(exponent) * base.bit_length() > 2 * _MAX_BITS:
        raise OverflowError("the power is too large")
    return base**exponent


_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
