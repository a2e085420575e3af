"""Verifier `reasoning_gym`, and the reasoning-gym tasks that are safe to train on.

A scorer must not execute the text of a response, spend minutes or gigabytes on it, or accept a wrong answer. For the
version below, the source of every `score_answer` was read, and each one was tested with hostile and with almost correct
answers. Other versions are refused. Some allowed scorers call eval or sympy.parse_expr. Their answers must match a
pattern that allows only literals, brackets and arithmetic without powers.
"""

from __future__ import annotations

import decimal
import difflib
import functools
import json
import re
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any, cast

from megatron_brorl.errors import UserError
from megatron_brorl.rewards.verifier import Score, Verifier, VerifierRow

PARTIAL_CREDIT_CAP = 0.98  # see verify
CHECKED_VERSION = "0.1.25"  # of reasoning-gym

_REASONS = {
    "its scorer executes the answer as Python code, and nested powers never return": (
        "intermediate_integration simple_integration"
    ),
    "its scorer does not ask for the numbers of the item: any four that make 24 score 1.0": "puzzle24",
    "its scorer takes numbers that are off by one": "number_sorting",
    "a short answer such as 1e99999999 makes its scorer work for minutes or fill the memory": (
        "coin_flip propositional_logic rubiks_cube rush_hour"
    ),
    "its scorer gives 1.0 to the answer nan": "complex_arithmetic",
    "its scorer gives 1.0 for ten matching letters, however long the word is": "figlet_font",
    "its scorer gives 1.0 to any answer at all where the truth is True": "game_of_life_halting",
    "its scorer ignores whatever follows the right words": "letter_jumble word_sorting",
    "its scorer reads every R, L, U and D as a move, and an echoed question can score 1.0": "sokoban",
    "making its items reseeds NumPy's global random generator": "pool_matrix",
    "its scorer compares with Python tuples, which do not survive JSON": "arc_agi rearc",
    "its items depend on Python's string hashing, which differs between processes": (
        "isomorphic_strings knight_swap polynomial_multiplication ransom_note"
    ),
    "its items are a finite list made in advance, not an endless stream": (
        "acre gsm_symbolic list_functions word_ladder"
    ),
    "it is a mixture: list its parts as separate tasks with weights": "composite",
}
REFUSED = {name: reason for reason, names in _REASONS.items() for name in names.split()}

_LISTED = r"(?:-?\d{1,9}(?!\d)|[\s,\[\]])*"  # a list of integers, or a list of such lists

# Tasks whose scorers execute the answer, with the maximum length and the pattern of an answer. Other text scores 0.
EXECUTING: Mapping[str, tuple[int, re.Pattern[str]]] = {
    "binary_matrix": (4096, re.compile(_LISTED)),
    "spiral_matrix": (4096, re.compile(_LISTED)),
    "n_queens": (4096, re.compile(r"[_Q\s,\[\]\"']*")),
    "string_insertion": (1024, re.compile(r"[A-E\s,\[\]\"']*")),
    "countdown": (200, re.compile(r"(?:\d{1,6}(?!\d)|\*(?!\s*\*)|[\s+\-/()])*")),
    "bitwise_arithmetic": (64, re.compile(r"\s*-?0x[0-9a-f]{1,32}\s*", re.IGNORECASE)),
}

# The scorer of bitwise_arithmetic also executes the problem of the item.
_BITS = re.compile(r"(?:0x[0-9a-f]{1,16}|<<|>>|\*(?!\s*\*)|[\s+\-()&|^~])*")


def load() -> Verifier:
    """Return the verifier. Imports reasoning-gym first, which takes a second."""
    allowed()
    return verify


def verify(answer: str, row: VerifierRow) -> Score:
    """Return the library's score for the item metadata["entry"] of the task metadata["source_dataset"].

    Partial credit is capped. In the library, one wrong cell in a hundred scores 0.99, which could pass for correct.
    """
    metadata = row["metadata"]
    task = metadata["source_dataset"]
    config = metadata.get("config") or {}
    if not harmless(task, answer):
        return Score(0.0, f"the answer does not match the format of task {task}")
    scorer = _scorer(task, json.dumps(config, sort_keys=True))
    with decimal.localcontext(decimal.DefaultContext):  # some tasks change the precision
        value = scorer(answer, metadata["entry"])
    if value == 1:
        return Score(1.0)
    capped = PARTIAL_CREDIT_CAP if PARTIAL_CREDIT_CAP < value < 1 else value
    return Score(capped, "wrong" if value == 0 else f"partial credit from task {task}")


@functools.lru_cache(maxsize=128)
def _scorer(name: str, config: str) -> Callable[[str, Mapping[str, Any]], float]:
    dataset = create(name, seed=0, config=json.loads(config), where="reward")
    return cast(Callable[[str, Mapping[str, Any]], float], dataset.score_answer)


def harmless(task: str, answer: str) -> bool:
    """Return whether the scorer of this task can safely run on this answer."""
    if task not in EXECUTING:
        return True
    longest, form = EXECUTING[task]
    return len(answer) <= longest and form.fullmatch(answer) is not None


def check_row(row: VerifierRow, where: str) -> None:
    """Raise UserError unless the metadata of a data row has an allowed task and one of its items."""
    metadata = row["metadata"]
    name, entry, config = metadata.get("source_dataset"), metadata.get("entry"), metadata.get("config", {})
    if not isinstance(name, str):
        raise UserError(f'{where}: verifier "reasoning_gym" needs metadata.source_dataset, the name of the task')
    check_task(name, where)
    if not isinstance(entry, dict) or not isinstance(entry.get("metadata"), dict) or "answer" not in entry:
        raise UserError(
            f'{where}: verifier "reasoning_gym" needs metadata.entry, the item with its question, answer and metadata'
        )
    inner = entry["metadata"].get("source_dataset", name)
    if inner != name:
        raise UserError(
            f"{where}: metadata.source_dataset is {name!r}, but the entry is of {inner!r}; correct one of them"
        )
    if not isinstance(config, dict):
        raise UserError(f"{where}: metadata.config must be an object, not {config!r}; leave it out for the defaults")
    problem = entry["metadata"].get("problem")
    if name == "bitwise_arithmetic" and not (isinstance(problem, str) and _BITS.fullmatch(problem)):
        raise UserError(
            f"{where}: metadata.entry.metadata.problem = {problem!r:.60} is not an expression; generate it again"
        )


def check_task(name: str, where: str) -> None:
    """Raise UserError unless the task is allowed. where: the key or row that names it."""
    if name in REFUSED:
        raise UserError(f"{where}: reasoning-gym task {name!r} is refused: {REFUSED[name]}; choose another task")
    known = allowed()
    if name not in known:
        close = difflib.get_close_matches(name, known, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(known)}"
        raise UserError(f"{where}: no checked reasoning-gym task is called {name!r}; {hint}")


@functools.cache
def allowed() -> list[str]:
    """Return the names of the allowed tasks. Raises UserError for an unchecked version of the library."""
    installed = metadata.version("reasoning-gym")
    if installed != CHECKED_VERSION:
        raise UserError(
            f"reasoning-gym {installed} is installed, but only the scorers of {CHECKED_VERSION} were checked; "
            f"pip install reasoning-gym=={CHECKED_VERSION}"
        )
    from reasoning_gym.factory import DATASETS  # takes a second

    return sorted(DATASETS.keys() - REFUSED.keys())


def create(name: str, seed: int, config: Mapping[str, Any], where: str) -> Any:
    """Return the reasoning-gym dataset of an allowed task. where: the key that names the task, for errors."""
    check_task(name, where)
    if reserved := config.keys() & {"seed", "size"}:
        raise UserError(
            f"{where}: task {name!r}: {min(reserved)} is set by this program; remove it from the task's config"
        )
    from reasoning_gym.factory import DATASETS

    dataset_class, config_class = DATASETS[name]
    try:
        built = config_class(seed=seed, **config)  # raises TypeError for unknown keys
        if hasattr(built, "validate"):
            built.validate()  # raises AssertionError
        return dataset_class(config=built)
    except (TypeError, ValueError, AssertionError, KeyError) as e:
        reason = " ".join(str(e).split()) or type(e).__name__
        raise UserError(f"{where}: task {name!r} does not accept its config {dict(config)!r}: {reason}") from None
