"""Which reasoning-gym tasks may be trained on, and why the others may not.

A scorer runs on text that a policy under optimization wrote, so it must not execute that text, must not be driven
into minutes of work or gigabytes by it, and must not call a wrong answer right. Where a scorer executes the answer,
gym_grammar lets through what cannot do anything, and only that is scored. The source of every `score_answer`
of the version below was read, and each was tried with hostile and with almost right answers. Only what passed is
allowed; a task that a later version adds is refused until somebody has done the same for it.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from megatron_brorl.errors import UserError
from megatron_brorl.rewards import gym_grammar
from megatron_brorl.rewards.verifier import VerifierRow

CHECKED_VERSION = "0.1.25"

_EXECUTES = "its scorer executes the answer as Python code (eval or sympy.parse_expr)"
_WORK = "a short answer makes its scorer work for minutes or fill the memory"
_TUPLES = "its scorer compares with Python tuples, which do not survive JSON"
_FINITE = "its items are a finite list made in advance, not an endless stream"

REFUSED: Mapping[str, str] = {
    "intermediate_integration": f"{_EXECUTES}, and nested powers never return",
    "puzzle24": "its scorer does not ask for the numbers of the item: any four that make 24 score 1.0",
    "simple_integration": f"{_EXECUTES}, and nested powers never return",
    "number_sorting": "its scorer takes numbers that are off by one",
    "coin_flip": f"{_WORK} (1e99999999)",
    "propositional_logic": f"{_WORK} (a truth table over 30 made-up variables)",
    "rubiks_cube": f"{_WORK} (R99999999)",
    "rush_hour": f"{_WORK} (A+99999999999)",
    "complex_arithmetic": "its scorer gives 1.0 to the answer nan",
    "figlet_font": "its scorer gives 1.0 for ten matching letters, however long the word is",
    "game_of_life_halting": "its scorer gives 1.0 to any answer at all where the truth is True",
    "letter_jumble": "its scorer ignores whatever follows the right words",
    "sokoban": "its scorer reads every R, L, U and D of any text as a move, and an echoed question can score 1.0",
    "word_sorting": "its scorer ignores whatever follows the right words",
    "pool_matrix": "making its items reseeds NumPy's global random generator",
    "arc_agi": _TUPLES,
    "rearc": _TUPLES,
    "acre": _FINITE,
    "gsm_symbolic": _FINITE,
    "list_functions": _FINITE,
    "word_ladder": _FINITE,
    "composite": "it is a mixture: list its parts as separate tasks with weights",
}

HASH_DEPENDENT = frozenset(["isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note"])

# fmt: off
ALLOWED = HASH_DEPENDENT | gym_grammar.TASKS | {
    "ab", "advanced_geometry", "aiw", "arc_1d", "base_conversion",
    "basic_arithmetic", "bf", "binary_alternation", "boxnet", "caesar_cipher",
    "calendar_arithmetic", "chain_sum", "circuit_logic", "codeio", "color_cube_rotation",
    "count_bits", "count_primes", "course_schedule", "cryptarithm", "decimal_arithmetic",
    "decimal_chain_sum", "dice", "emoji_mystery", "family_relationships", "fraction_simplification",
    "futoshiki", "game_of_life", "gcd", "graph_color", "group_anagrams",
    "jugs", "kakurasu", "knights_knaves", "largest_island", "lcm",
    "leg_counting", "letter_counting", "mahjong_puzzle", "manipulate_matrix", "maze",
    "mini_sudoku", "modulo_grid", "needle_haystack", "number_filtering", "number_format",
    "number_sequence", "palindrome_generation", "palindrome_partitioning", "path_star", "polynomial_equations",
    "power_function", "prime_factorization", "products", "quantum_lock",
    "rectangle_count", "rotate_matrix", "rotten_oranges", "self_reference", "sentence_reordering",
    "shortest_path", "simple_equations", "simple_geometry", "spell_backward", "string_manipulation",
    "string_splitting", "string_synthesis", "sudoku", "survo", "syllogism",
    "time_intervals", "tower_of_hanoi", "tsumego", "word_sequence_reversal", "zebra_puzzles",
}
# fmt: on


def check_task(name: str, where: str) -> None:
    """Raise UserError unless the task may be used; `where` says in which key or row it was named."""
    if name in REFUSED:
        raise UserError(f"{where}: reasoning-gym task {name!r} is refused: {REFUSED[name]}; choose another task")
    if name not in ALLOWED:
        close = difflib.get_close_matches(name, sorted(ALLOWED), n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(sorted(ALLOWED))}"
        raise UserError(f"{where}: no checked reasoning-gym task is called {name!r}; {hint}")
    if name in HASH_DEPENDENT and not os.environ.get("PYTHONHASHSEED", "").isdigit():
        raise UserError(
            f"{where}: the items of reasoning-gym task {name!r} depend on Python's string hashing; "
            "start with PYTHONHASHSEED=0 in the environment of every process, or choose another task"
        )


def check_row(row: VerifierRow, where: str) -> None:
    """Raise UserError unless the metadata of a data row name one allowed task and hold its item."""
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
        raise UserError(f"{where}: metadata.source_dataset is {name!r} but the entry is of {inner!r}; make them agree")
    problem = gym_grammar.row_problem(name, entry)
    if problem:
        raise UserError(f"{where}: {problem}; make the row again")
    if not isinstance(config, dict):
        raise UserError(f"{where}: metadata.config must be an object, not {config!r}; leave it out for the defaults")


def create(name: str, seed: int, config: Mapping[str, Any], where: str) -> Any:
    """The reasoning-gym data set of an allowed task."""
    check_task(name, where)

    # What was checked is one version's source.
    installed = metadata.version("reasoning-gym")
    if installed != CHECKED_VERSION:
        raise UserError(
            f"{where}: reasoning-gym {installed} is installed, but only the scorers of {CHECKED_VERSION} were checked; "
            f"pip install reasoning-gym=={CHECKED_VERSION}"
        )

    from reasoning_gym.factory import DATASETS  # a second of imports that runs on files never need

    # The stream decides how its items are drawn (data.generate).
    reserved = [key for key in ("seed", "size") if key in config]
    if reserved:
        raise UserError(
            f"{where}: task {name!r}: {reserved[0]} is set by this program; remove it from the task's config"
        )

    # Some configs check themselves in validate alone.
    dataset_class, config_class = DATASETS[name]
    try:
        built = config_class(seed=seed, **config)  # a TypeError for keys that it does not know
        if hasattr(built, "validate"):
            built.validate()  # by assertions
        return dataset_class(config=built)
    except (TypeError, ValueError, AssertionError, KeyError) as e:
        # The user gets one line, and assertions have none or many.
        reason = " ".join(str(e).split()) or type(e).__name__
        raise UserError(f"{where}: task {name!r} does not accept its config {dict(config)!r}: {reason}") from None
