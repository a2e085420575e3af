"""A calculator tool for arithmetic problems: factory = "megatron_brorl.environments.calculator:Calculator"."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

_MAX_CHARS = 200  # of an expression
_MAX_BITS = 1024  # of an integer result
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")

_OPERATORS: dict[type[ast.AST], Callable[..., int | float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


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
            return str(_value(expression))
        except (ArithmeticError, ValueError, SyntaxError, RecursionError, MemoryError) as e:
            return f"error: {e}"

    def final(self, text: str) -> None:
        self._text = text

    def reward(self) -> float:
        numbers = _NUMBER.findall(self._text)
        return float(bool(numbers) and _decimal(numbers[-1]) == _decimal(self._answer))


def _decimal(number: str) -> Decimal:
    return Decimal(number.replace(",", ""))


def _value(expression: str) -> int | float:
    """Return the value of an expression. Raises ValueError, SyntaxError or ArithmeticError for the model to read."""
    if len(expression) > _MAX_CHARS:
        raise ValueError(f"the expression has more than {_MAX_CHARS} characters")
    return _node_value(ast.parse(expression.strip(), mode="eval").body)


def _node_value(node: ast.AST) -> int | float:
    # bool is excluded, which isinstance would accept as an int.
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and type(node.value) is not bool:
        value: int | float = node.value
    elif isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_node_value(node.operand))
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        value = _power(_node_value(node.left), _node_value(node.right))
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_node_value(node.left), _node_value(node.right))
    else:
        raise ValueError("only numbers, + - * / // % ** and parentheses are allowed")
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise OverflowError(f"a number has more than {_MAX_BITS} bits")
    return value


def _power(base: int | float, exponent: int | float) -> int | float:
    """Return base ** exponent if its size is bounded and it is real."""
    if isinstance(base, int) and abs(exponent) * base.bit_length() > 2 * _MAX_BITS:
        raise OverflowError("the power is too large")
    value = base**exponent
    if isinstance(value, complex):
        raise ValueError("the power is not a real number")
    return value
