"""Verifiers by name: the verifiers of this package, and functions that users write.

Each verifier of this package has an entry in ENTRIES. This module imports only the code that finds answers and checks
rows. A worker process loads the verifier itself.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Callable
from typing import Any

from megatron_brorl.config.schema import RewardConfig
from megatron_brorl.errors import UserError
from megatron_brorl.rewards import extract, group
from megatron_brorl.rewards.verifier import Entry, Judge, Score, Verifier, VerifierRow, score_of
from megatron_brorl.rewards.verifiers import choice, code, format, gym, ifeval, math, short_answer
from megatron_brorl.user_functions import import_function, is_function

ENVIRONMENT = "environment"  # the verifier of rows whose rollouts the environment scores


def _equals_reference(answer: str, row: VerifierRow) -> Score:
    """Return 1 if the answer equals the reference, apart from white space at both ends."""
    reference = row["answer"]
    if reference is not None and answer.strip() == reference.strip():
        return Score(1.0)
    return Score(0.0, "not the reference answer")


def _needs_reference(row: VerifierRow, where: str) -> None:
    if row["answer"] is None:
        raise UserError(f'{where}: verifier "exact" needs a reference; add "answer"')


def _not_scored(answer: str, row: VerifierRow) -> Score:
    return Score(0.0, "not scored")


ENTRIES: dict[str, Entry] = {
    "choice": Entry(load=lambda: choice.verify, find=choice.find, check_row=choice.check_row, accepts_reference=True),
    "code": Entry(load=code.load, find=code.find, check_row=code.check_row, max_chars=1 << 16, executes=True),
    ENVIRONMENT: Entry(load=lambda: _not_scored),
    "exact": Entry(
        load=lambda: _equals_reference, check_row=_needs_reference, max_chars=1 << 16, accepts_reference=True
    ),
    "format": Entry(load=lambda: format.verify, find=format.skeleton, check_row=format.check_row),
    "ifeval": Entry(load=ifeval.load, find=ifeval.find, check_row=ifeval.check_row, max_chars=1 << 16),
    "math": Entry(load=math.load, find=math.find, check_row=math.check_row, accepts_reference=True),
    "none": Entry(load=lambda: _not_scored),
    "reasoning_gym": Entry(
        load=gym.load, find=extract.FINDERS["answer_tag"], check_row=gym.check_row, accepts_reference=True
    ),
    "short_answer": Entry(
        load=lambda: short_answer.verify,
        find=short_answer.find,
        check_row=short_answer.check_row,
        accepts_reference=True,
    ),
}


def entry(name: str, where: str, config: RewardConfig = RewardConfig()) -> Entry:  # noqa: B008  (frozen)
    """Return the entry of a verifier, with reward.extract applied.

    where: the file and row, or the key, that names the verifier. Raises UserError for an unknown name.
    """
    if name in ENTRIES:
        verifier = ENTRIES[name]
    elif is_function(name):
        verifier = Entry(load=lambda: import_function(name, "verifier")[0], max_chars=1 << 16, is_custom=True)
    else:
        close = difflib.get_close_matches(name, sorted(ENTRIES), n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(sorted(ENTRIES))}."
        raise UserError(f'{where}: no verifier is called {name!r}; {hint} A function of your own is "file.py:function"')
    if config.extract == "verifier":
        return verifier
    return dataclasses.replace(verifier, find=extract.FINDERS[config.extract])


def judge(name: str) -> Callable[..., list[Any]]:
    """Load a verifier or group function with the libraries that it needs, as an object of a worker process."""
    return group.judge(name.removeprefix(group.PREFIX)) if name.startswith(group.PREFIX) else Judge(_load(name))


def verify(name: str, response: str, row: VerifierRow) -> Score:
    """Return the score that a verifier gives to a whole response, for reward functions that combine verifiers.

    A response without an answer scores 0.
    """
    verifier = entry(name, "verifier")
    answer, why = extract.extract(response, verifier.find, verifier.max_chars)
    return Score(0.0, why) if answer is None else score_of(_load(name)(answer, row))


@functools.cache
def _load(name: str) -> Verifier:
    return entry(name, "verifier").load()
