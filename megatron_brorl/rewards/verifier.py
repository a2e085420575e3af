"""Types of verifiers. A verifier is a function from an answer and its data row to a score.

A verifier of this package consists of a file with such a function and an entry in registry.py. The entry defines how
to find the answer in a response and how to check a row. It also lists properties of the verifier, such as whether it
needs a sandbox.
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
    """The score of an answer, as a verifier returns it."""

    reward: float  # at most MOST_REWARD in size; correct from reward.correct_at on
    reason: str = ""  # why the reward is not 1, for a person
    parts: Mapping[str, float] = MappingProxyType({})  # components of the reward, by name


Verifier = Callable[[str, VerifierRow], Score]
Find = Callable[[str], str | None]  # a response's text -> the answer in it; None: it has none


@dataclass(frozen=True)
class Entry:
    """Properties of a verifier that are known without loading it."""

    load: Callable[[], Verifier]  # called in a worker process, which imports the libraries
    find: Find  # called in the trainer: linear in the text, executes nothing
    check_row: Callable[[VerifierRow, str], None]  # raises UserError naming `where` (file:row) and what is missing
    max_chars: int = 4096  # a longer answer scores 0 unseen
    executes: bool = False  # It runs programs of the model, which needs a sandbox or reward.unsandboxed.
    accepts_reference: bool = False  # It accepts the reference answer of every correct row.
    foreign: bool = False  # A custom function: rewards may be negative, and a reference may not be a whole response.
