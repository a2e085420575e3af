"""The verifiers by name: those of this package, combinations of a configuration, services, and a user's own.

A verifier of this package is an entry in ENTRIES. Nothing is imported on the way to an entry but what finds answers and
checks rows; a verifier itself is loaded in a scoring process.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
from collections.abc import Iterable, Sequence
from importlib import metadata

from megatron_brorl.config.schema import CombinationConfig, PartConfig, RewardConfig
from megatron_brorl.errors import UserError
from megatron_brorl.rewards import (
    choice_verifier,
    code,
    combination,
    exact,
    extract,
    format,
    gym_tasks,
    math_verifier,
    own,
    service,
    short_answer_verifier,
)
from megatron_brorl.rewards.verifier import Entry, Verifier
from megatron_brorl.rewards.verifiers import ifeval

GROUP = "megatron_brorl.verifiers"  # entry points of installed packages: NAME = "package.module:function"
_CONFIGURED = "configured:"  # before the JSON of what workers get in place of a name


def _reasoning_gym() -> Verifier:
    from megatron_brorl.rewards import gym_verifier  # only the workers pay for the import

    return gym_verifier.score


ENTRIES: dict[str, Entry] = {
    "choice": Entry(
        about="multiple choice: one letter in any dress, or the text of its option",
        load=lambda: choice_verifier.verify,
        find=choice_verifier.find,
        check_row=choice_verifier.check_row,
        accepts_reference=True,
    ),
    "code": Entry(
        about="the share of its tests that a Python program passes, in a sandbox",
        load=code.load,
        find=code.find,
        check_row=code.check_row,
        max_chars=1 << 16,
        executes=True,
    ),
    "exact": Entry(
        about="the response is the answer, character by character",
        load=lambda: exact.exact,
        find=extract.full,
        check_row=exact.check_row,
        accepts_reference=True,
        max_chars=1 << 16,
    ),
    "format": Entry(
        about="tags such as <think> and <answer>, in order and with nothing beside them",
        load=lambda: format.format_,
        find=format.skeleton,
        check_row=format.check_row,
    ),
    "ifeval": Entry(
        about="the share of the row's instructions that the response follows, as IFEval checks them",
        load=ifeval.load,
        find=ifeval.find,
        check_row=ifeval.check_row,
        max_chars=1 << 16,
    ),
    "math": Entry(
        about="numbers exactly, other mathematics by sympy",
        load=math_verifier.load,
        find=math_verifier.find,
        check_row=math_verifier.check_row,
        accepts_reference=True,
    ),
    "reasoning_gym": Entry(
        about="the scorer of the row's reasoning-gym task",
        load=_reasoning_gym,
        find=extract.answer_tag,
        check_row=gym_tasks.check_row,
        accepts_reference=True,
    ),
    "short_answer": Entry(
        about="a few words, or a quantity with its unit",
        load=lambda: short_answer_verifier.verify,
        find=short_answer_verifier.find,
        check_row=short_answer_verifier.check_row,
        accepts_reference=True,
    ),
}


def entry(name: str, where: str, config: RewardConfig = RewardConfig()) -> Entry:  # noqa: B008  (frozen)
    """The entry of a verifier, its answers found as reward.extract says. Raises UserError if there is none.

    where: the file and row, or the key, that names it.
    """
    found = _combined(name, config) or _single(name, where, config.timeout_s, [c.name for c in config.combination])
    if config.extract != "verifier":
        found = dataclasses.replace(found, find=extract.FINDERS[config.extract])
    return dataclasses.replace(found, max_chars=min(found.max_chars, config.max_chars))


def check_combinations(combinations: Sequence[CombinationConfig]) -> None:
    """Raise UserError naming the first key of [[reward.combination]] that cannot be."""
    names: set[str] = set()
    for i, each in enumerate(combinations):
        where = f"reward.combination[{i}]"
        combination.check(each, where)
        if each.name in ENTRIES or each.name in names:
            raise UserError(f"{where}.name = {each.name!r}: there is a verifier of that name; choose another")
        names.add(each.name)
        for j, part in enumerate(each.parts):
            _single(part.verifier, f"{where}.parts[{j}].verifier", 1.0)


def for_workers(names: Iterable[str], config: RewardConfig) -> dict[str, str]:
    """What workers are told in place of those names that mean nothing without the configuration."""
    combined = {c.name: [dataclasses.asdict(c)] for c in config.combination}
    told = {name: combined.get(name, []) for name in names if name in combined or service.is_service(name)}
    limits = [config.max_chars, config.timeout_s]
    return {name: _CONFIGURED + json.dumps([name, tables, *limits]) for name, tables in told.items()}


def verifier(name: str) -> Verifier:
    """The verifier of that name, or of what stands for one in for_workers, its library imported."""
    if not name.startswith(_CONFIGURED):
        return entry(name, "verifier").load()
    name, tables, max_chars, timeout_s = json.loads(name.removeprefix(_CONFIGURED))
    combined = tuple(
        CombinationConfig(each["name"], each["how"], tuple(PartConfig(**part) for part in each["parts"]))
        for each in tables
    )
    config = RewardConfig(max_chars=max_chars, timeout_s=timeout_s, combination=combined)
    return entry(name, "verifier", config).load()


def services(names: Iterable[str], config: RewardConfig) -> list[str]:
    """The addresses among these verifiers and their parts."""
    return [name for name in _singles(names, config) if service.is_service(name)]


def own_names(names: Iterable[str], config: RewardConfig) -> dict[str, str]:
    """The users' own of these verifiers and their parts: name -> "place:function", for which installed names stand."""
    singles = [name for name in _singles(names, config) if name not in ENTRIES and not service.is_service(name)]
    installed = _installed() if singles else {}
    return {name: installed.get(name, name) for name in singles}


def _singles(names: Iterable[str], config: RewardConfig) -> list[str]:
    """The verifiers and, in place of combinations, their parts."""
    parts = {c.name: [part.verifier for part in c.parts] for c in config.combination}
    return sorted({single for name in names for single in parts.get(name, [name])})


def _combined(name: str, config: RewardConfig) -> Entry | None:
    each = next((c for c in config.combination if c.name == name), None)
    if each is None:
        return None
    entries = [_single(part.verifier, "reward.combination", config.timeout_s) for part in each.parts]
    return combination.combine(each, entries, config.max_chars)


def _single(name: str, where: str, timeout_s: float, others: Sequence[str] = ()) -> Entry:
    """The entry of what is no combination; others: names that a message may propose."""
    # From what is written here to what is looked up.
    if name in ENTRIES:
        return ENTRIES[name]
    if service.is_service(name):
        return service.entry(name, timeout_s)
    if own.is_own(name):
        return own.entry(name, "your own function")
    installed = _installed()
    if name in installed:
        return own.entry(installed[name], f"of an installed package: {installed[name]}")

    # A mistake, most often of one letter.
    known = sorted({*ENTRIES, *installed, *others})
    close = difflib.get_close_matches(name, known, n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(known)}"
    raise UserError(f'{where}: no verifier is called {name!r}; {hint} A function of your own is "file.py:function"')


@functools.cache
def _installed() -> dict[str, str]:
    """Verifiers of installed packages, name -> "package.module:function"; looked up without importing them."""
    return {point.name: point.value for point in metadata.entry_points(group=GROUP)}
