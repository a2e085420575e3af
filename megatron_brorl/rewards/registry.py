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
from megatron_brorl.rewards import custom, extract, group
from megatron_brorl.rewards.verifier import Entry, Judge, Score, Verifier, VerifierRow, score_of
from megatron_brorl.rewards.verifiers import choice, code, exact, format, gym, ifeval, math, none, short_answer
from megatron_brorl.user_functions import is_function

ENVIRONMENT = "environment"  # the verifier of rows whose rollouts the environment scores

ENTRIES: dict[str, Entry] = {
    "choice": Entry(load=lambda: choice.verify, find=choice.find, check_row=choice.check_row, accepts_reference=True),
    "code": Entry(load=code.load, find=code.find, check_row=code.check_row, max_chars=1 << 16, executes=True),
    ENVIRONMENT: Entry(load=lambda: none.verify, find=extract.full, check_row=none.check_row),
    "exact": Entry(
        load=lambda: exact.verify,
        find=extract.full,
        check_row=exact.check_row,
        max_chars=1 << 16,
        accepts_reference=True,
    ),
    "format": Entry(load=lambda: format.verify, find=format.skeleton, check_row=format.check_row),
    "ifeval": Entry(load=ifeval.load, find=ifeval.find, check_row=ifeval.check_row, max_chars=1 << 16),
    "math": Entry(load=math.load, find=math.find, check_row=math.check_row, accepts_reference=True),
    "none": Entry(load=lambda: none.verify, find=extract.full, check_row=none.check_row),
    "reasoning_gym": Entry(load=gym.load, find=extract.answer_tag, check_row=gym.check_row, accepts_reference=True),
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
        found = ENTRIES[name]
    elif is_function(name):
        found = custom.entry(name)
    else:
        close = difflib.get_close_matches(name, sorted(ENTRIES), n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(sorted(ENTRIES))}."
        raise UserError(f'{where}: no verifier is called {name!r}; {hint} A function of your own is "file.py:function"')
    if config.extract == "verifier":
        return found
    return dataclasses.replace(found, find=extract.FINDERS[config.extract])


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
