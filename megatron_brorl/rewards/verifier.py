"""What a verifier is: a function of an answer and of the row that it answers, to a score with its reason.

A verifier of this package is one file with such a function and one entry in registry.py, which says how the answer is
found in a response, what a row must have and what the pool may count on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, TypedDict


class VerifierRow(TypedDict):
    """The data row that a response answers, as a verifier sees it."""

    id: str
    prompt: str  # as the model got it
    answer: str | None  # the reference answer, if the row has one
    metadata: Mapping[str, Any]


MOST_REWARD = 1e30  # The limit of every number of a configuration; float32, in which rewards are carried, has more.


class Score(NamedTuple):
    """What a verifier says of an answer."""

    reward: float  # any number of at most MOST_REWARD in size; reward.correct_at says from where on it is right
    reason: str = ""  # for a person: why not 1, in a few words
    parts: Mapping[str, float] = MappingProxyType({})  # what the reward is made of, by name; numbers as the reward


Verifier = Callable[[str, VerifierRow], Score]
Find = Callable[[str], str | None]  # a response's text -> the answer in it; None: it has none


@dataclass(frozen=True)
class Entry:
    """What the rest of the package knows of a verifier without importing it."""

    about: str  # one line, for lists of verifiers
    load: Callable[[], Verifier]  # called in a scoring process, which alone pays for the imports
    find: Find  # called in the trainer: linear in the text, executes nothing
    check_row: Callable[[VerifierRow, str], None]  # raises UserError naming `where` (file:row) and what is missing
    max_chars: int = 4096  # a longer answer scores 0 unseen
    executes: bool = False  # it runs what the model wrote: asks for a sandbox, or reward.unsandboxed
    accepts_reference: bool = False  # it calls the reference answer of a row right, or the row is wrong
    foreign: bool = False  # not of this package: its rewards may be negative, and references may be no whole responses
