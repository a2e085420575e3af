"""Rollout logs: what the diagnostics and the advisor read, from this trainer or any other system.

JSON Lines, UTF-8, one object per line. Either one rollout per line:

    {"prompt_id": "gsm8k/17", "answer": "42", "reward": 1.0}

    prompt_id      string or integer; rollouts with equal ids are siblings
    reward         number; true and false are 1 and 0
    answer         string, the final answer: what counts as the same outcome. Or, in its place or beside it,
    token_ids      list of integers, the whole response
    log_probs      optional: list of one number per token of token_ids, natural logarithms
    step           optional integer: rollouts of one prompt at different steps, under different weights, are two groups;
                   those at one step are one, also where the step took the prompt twice
    tokens         optional integer: length of the response, where token_ids is not there to count

or one group per line, with lists under the plural names "rewards", "answers", "responses" (lists of token ids) and
"lengths":

    {"prompt_id": "gsm8k/17", "rewards": [1.0, 0.0], "answers": ["42", "41"], "lengths": [310, 522]}

Unknown keys are ignored, so that a system's own log can be used as it is. A row needs neither answer nor token_ids for
what depends on rewards only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_brorl.errors import UserError, shown

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_LARGEST, _LARGEST_INT = 1e30, 2**63 - 1  # of a number; of a whole one
_GROUP_KEYS = {"rewards": "reward", "answers": "answer", "responses": "token_ids", "lengths": "tokens"}


@dataclass(frozen=True)
class LoggedGroup:
    """The siblings of one prompt at one step."""

    prompt_id: str
    step: int | None
    rewards: Floats  # [N]
    outcomes: Ints | None  # [N]; equal numbers are equal answers (or responses); None: not logged
    tokens: Floats | None  # [N] response lengths; None: not logged
    responses: Ints | None  # [N] the same of whole responses; None: token_ids not logged
    log_probs: Floats | None  # [N] of whole responses, in nats; None: not logged

    @property
    def n(self) -> int:
        """Number of siblings."""
        return len(self.rewards)


def read_log(path: Path) -> list[LoggedGroup]:
    """The groups of a log in the order of their first rows. Raises UserError that names the row."""
    # Siblings stand anywhere in the file.
    rows: dict[tuple[str, int | None], list[dict[str, Any]]] = {}
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    for row in _rollouts(_object(line, f"{path}:{number}"), f"{path}:{number}"):
                        rows.setdefault((row["prompt_id"], row["step"]), []).append(row)
    except FileNotFoundError:
        raise UserError(
            f"{path.absolute()}: no such rollout log; `brorl train` writes run.dir/rollouts.jsonl where "
            "theory.log_rollouts = true"
        ) from None
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror}; give a rollout log in JSON Lines") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text; give a rollout log in JSON Lines") from None

    # Nothing to advise on.
    if not rows:
        raise UserError(f"{path}: holds no rollouts")
    return [_group(key, members, path) for key, members in rows.items()]


def log_row(prompt_id: str, step: int, rewards: Ints | Floats, answers: Ints, lengths: Ints) -> dict[str, Any]:
    """The line of a group of this trainer: rewards, codes of the final answers and response lengths, all [N].

    A code stands for an answer: what advice depends on is which answers are equal.
    """
    return {
        "prompt_id": prompt_id,
        "step": step,
        # The shortest digits that name each float32: 0.9, which a threshold of 0.9 finds, and not 0.8999999761581421.
        "rewards": [float(str(reward)) for reward in rewards],
        "answers": [f"{code:x}" for code in answers.tolist()],
        "lengths": lengths.tolist(),
    }


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise UserError(f"{where}: not JSON: {shown(e)}") from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: a row must be a JSON object")
    return row


def _rollouts(row: dict[str, Any], where: str) -> Iterator[dict[str, Any]]:
    """One checked dictionary per rollout of a row of either form."""
    if "rewards" not in row:
        yield _rollout(row, where)
        return

    # Lists of a group, as many of each as it has rewards.
    lists = {single: row[plural] for plural, single in _GROUP_KEYS.items() if plural in row}
    for plural, single in _GROUP_KEYS.items():
        if single in lists and not isinstance(lists[single], list):
            raise UserError(f'{where}: "{plural}" must be a list')
        if single in lists and len(lists[single]) != len(row["rewards"]):
            raise UserError(f'{where}: {len(lists[single])} "{plural}" for {len(row["rewards"])} "rewards"')
    if not row["rewards"]:
        raise UserError(f'{where}: an empty group: "rewards" holds nothing; drop the row')

    common = {key: row[key] for key in ("prompt_id", "step") if key in row}
    for values in zip(*lists.values(), strict=True):
        yield _rollout(common | dict(zip(lists, values, strict=True)), where)


def _rollout(row: dict[str, Any], where: str) -> dict[str, Any]:
    """One rollout, checked: its keys as in the log, outcome and response as values that compare."""
    # A null is as good as no value.
    for key in ("prompt_id", "reward"):
        if row.get(key) is None:
            raise UserError(f'{where}: no "{key}"; every rollout needs one')

    # Who it belongs to, and what it was worth.
    prompt, reward, step = row["prompt_id"], row["reward"], row.get("step")
    if not isinstance(prompt, (str, int)):
        raise UserError(f'{where}: "prompt_id" must be a string or an integer')
    if not isinstance(reward, (int, float)) or not abs(reward) <= _LARGEST:  # NaN is no reward
        raise UserError(f'{where}: "reward" must be a finite number, not {shown(reward)}')
    # type(), not isinstance: to Python true and false are integers.
    if step is not None and not (type(step) is int and abs(step) <= _LARGEST_INT):
        raise UserError(f'{where}: "step" must be an integer of 64 bits')

    # What it said: an answer, a response, or neither.
    ids, answer = row.get("token_ids"), row.get("answer")  # either may be missing
    if ids is not None and not (isinstance(ids, list) and all(type(i) is int and abs(i) <= _LARGEST_INT for i in ids)):
        raise UserError(f'{where}: "token_ids" must be a list of integers of 64 bits')
    if answer is not None and not isinstance(answer, str):
        raise UserError(f'{where}: "answer" must be a string')

    length = row.get("tokens", None if ids is None else len(ids))  # given, or counted
    if length is not None and not (type(length) is int and 0 <= length <= _LARGEST_INT):
        raise UserError(f"{where}: the number of tokens must be an integer that is not negative")

    # An answer counts before the tokens it was written in.
    outcome = answer if answer is not None else None if ids is None else tuple(ids)

    return {
        "prompt_id": str(prompt),
        "step": step,
        "reward": float(reward),
        "outcome": outcome,
        "response": None if ids is None else tuple(ids),
        "tokens": length,
        "log_prob": _log_prob(row.get("log_probs"), ids, where),
    }


def _log_prob(values: Any, ids: list[int] | None, where: str) -> float | None:
    if values is None:
        return None
    numbers = isinstance(values, list) and all(isinstance(v, (int, float)) and -_LARGEST <= v <= 0 for v in values)
    if not numbers or ids is None or len(values) != len(ids):
        raise UserError(f'{where}: "log_probs" must be a list with one number, at most 0, per entry of "token_ids"')
    return float(sum(values))


def _group(key: tuple[str, int | None], rows: list[dict[str, Any]], path: Path) -> LoggedGroup:
    name = f"prompt {key[0]!r}" + ("" if key[1] is None else f" at step {key[1]}")  # for messages

    # Every figure compares siblings: one alone says nothing.
    if len(rows) == 1:
        raise UserError(f"{path}: {name} has a single rollout; a group needs at least 2")

    # A column that some rows have and others lack means nothing.
    columns: dict[str, list[Any]] = {k: [row[k] for row in rows] for k in ("outcome", "response", "tokens", "log_prob")}
    for field, values in columns.items():
        if any(v is None for v in values) and not all(v is None for v in values):
            # In the words of the log's format.
            what = {"outcome": "an answer or token_ids", "response": "token_ids", "tokens": "a length"}
            what["log_prob"] = "log_probs"
            raise UserError(f"{path}: {name}: some of its rollouts have {what[field]} and some do not")

    kinds = {type(v) for v in columns["outcome"]}  # an answer never equals a response
    if len(kinds) > 1:
        raise UserError(f"{path}: {name}: some of its rollouts have an answer and some have token_ids only")

    # Equal values become equal numbers, in the order in which they came.
    def codes(field: str) -> Ints | None:
        seen: dict[Any, int] = {}
        values = [seen.setdefault(v, len(seen)) for v in columns[field]]  # insertion order
        return None if columns[field][0] is None else np.array(values, dtype=np.int64)

    def numbers(field: str) -> Floats | None:
        return None if columns[field][0] is None else np.array(columns[field], dtype=np.float64)

    # Entry i of every field is of the i-th row that the file has of this group.
    return LoggedGroup(
        prompt_id=key[0],
        step=key[1],
        rewards=np.array([row["reward"] for row in rows], dtype=np.float64),
        outcomes=codes("outcome"),
        responses=codes("response"),
        tokens=numbers("tokens"),
        log_probs=numbers("log_prob"),
    )
