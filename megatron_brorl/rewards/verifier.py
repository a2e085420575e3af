"""Types of verifiers, and validation of the scores that they return.

A verifier is a function from an answer and its data row to a score. The score is a Score, a number, or a dict with the
keys reward, reason and parts. A number is any object that converts to one float, such as a Fraction or a one-element
tensor. A string is not a number. registry.py has an entry for each verifier.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, TypedDict

from megatron_brorl.user_functions import describe


def holds_object(text: object) -> bool:
    """Return whether a reference has the arguments of a check: a dict, or text of a JSON object or list of objects."""
    return isinstance(text, dict) or re.match(r"""\s*\[?\s*\{\s*["'][^"']*["']\s*:""", str(text)) is not None


class VerifierRow(TypedDict):
    """The data row of a prompt, as a verifier receives it."""

    id: str
    prompt: str  # the text that the model received
    answer: str | None  # the reference answer, if the row has one
    metadata: Mapping[str, Any]
    columns: Mapping[str, Any]  # the columns of the file that data.columns does not name, by name


MAX_REWARD = 1e30  # Also the limit of configuration values. Rewards are stored as float32.
MAX_REASON = 300  # characters
MAX_PARTS = 16
_MAX_NAME = 64  # characters of a part's name


class Score(NamedTuple):
    """The score of an answer."""

    reward: float  # absolute value at most MAX_REWARD; the answer is correct if reward >= reward.correct_at
    reason: str = ""  # explains a reward below 1 to a person
    parts: Mapping[str, float] = MappingProxyType({})  # components of the reward, by name


Verifier = Callable[[str, VerifierRow], Score]
Find = Callable[[str], str | None]  # maps a response to the answer in it, or None


@dataclass(frozen=True)
class Entry:
    """Properties of a verifier that are known without loading it."""

    load: Callable[[], Verifier]  # called in a worker process; imports heavy libraries
    find: Find = lambda response: response  # called in the trainer; must take linear time and execute nothing
    check_row: Callable[[VerifierRow, str], None] = lambda row, where: None  # raises UserError that names file:row
    max_chars: int = 4096  # a longer answer scores 0 without a call of the verifier
    executes: bool = False  # It runs programs that the model wrote, in a sandbox unless reward.unsandboxed.
    accepts_reference: bool = False  # It accepts the reference answer of every correct row.
    is_custom: bool = False  # A user's function: rewards may be negative, and it may reject a bare reference answer.


class NoScore(Exception):
    """Raised for a returned value that is not a score."""


class Judge:
    """Wraps a verifier in a worker process. A call returns [status, reward, reason, parts] and never raises."""

    def __init__(self, verifier: Callable[[str, VerifierRow], Any]) -> None:
        self._verifier = verifier

    def __call__(self, answer: str, row: VerifierRow) -> list[Any]:
        """Score one answer.

        Statuses: "ok"; "invalid": the verifier did not return a score; "error": it raised; "broken": it also raises on
        the reference answer. The reward is 0 unless the status is "ok".
        """
        try:
            reward, reason, parts = score_of(self._verifier(answer, row))
            return ["ok", reward, printable(reason), dict(parts)]
        except NoScore as e:
            return ["invalid", 0.0, printable(str(e)), {}]
        except BaseException as e:  # includes SystemExit: a verifier must not end its worker
            reason = printable(describe(e, self._verifier))

        # Many verifiers raise on malformed answers. A verifier that also raises on the reference is broken.
        try:
            if row["answer"] is not None:
                self._verifier(row["answer"], row)
        except BaseException as e:
            return ["broken", 0.0, printable(describe(e, self._verifier)), {}]
        return ["error", 0.0, reason, {}]


def score_of(returned: Any) -> Score:
    """Convert a returned value to a Score. Raises NoScore unless all of its numbers are finite and real."""
    if isinstance(returned, Score):
        returned = returned._asdict()
    elif not isinstance(returned, dict):
        returned = {"reward": returned}
    if "reward" not in returned or returned.keys() - {"reward", "reason", "parts"}:
        raise NoScore(f"returned a dict with keys {_shown(sorted(map(str, returned)))}, not reward, reason, parts")
    reason = returned.get("reason", "")
    parts = returned.get("parts", {})
    if not isinstance(reason, str):
        raise NoScore(f"returned the reason {_shown(reason)}, not a string")
    if not isinstance(parts, Mapping) or not all(isinstance(name, str) for name in parts):
        raise NoScore(f"returned the parts {_shown(parts)}, not a dict of numbers by name")
    if len(parts) > MAX_PARTS or any(len(name) > _MAX_NAME for name in parts):
        raise NoScore(f"returned over {MAX_PARTS} parts, or a part with a name of over {_MAX_NAME} characters")
    numbers = {name: number(value, f"for part {name!r}") for name, value in parts.items()}
    return Score(number(returned["reward"], "for a reward"), reason, numbers)


def number(value: Any, what: str) -> float:
    """Return a returned value as a float. Raises NoScore, with `what` in its message, unless it is finite."""
    # Objects of a user's class may raise any exception here.
    with contextlib.suppress(Exception):
        value = value.item() if hasattr(value, "item") else value
        # float() accepts strings, so require __float__. The comparison is false for NaN.
        if hasattr(type(value), "__float__") and abs(result := float(value)) <= MAX_REWARD:
            return result
    raise NoScore(f"returned {_shown(value)} {what}, not a finite number ({MAX_REWARD:g} at most)")


def _shown(value: Any) -> str:
    """Return a short repr of builtin types. The repr of another type would run its own code."""
    if isinstance(value, (str, list)):
        value = value[:60]
    plain = value is None or type(value) in (bool, int, float, str, list)
    return repr(value)[:60] if plain else f"an object of type {type(value).__name__}"


def printable(reason: str, max_chars: int = MAX_REASON) -> str:
    """Return at most `max_chars` characters of a text, with "?" for those that are not printable."""
    return "".join(c if c.isprintable() else "?" for c in reason[:max_chars])
