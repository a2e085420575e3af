"""What an unknown key was meant to be: a typo, a key of another section, or another trainer's name for it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from megatron_brorl.config.describe import keys
from megatron_brorl.config.foreign import known_elsewhere

_MOST = 3  # proposals in a message


def suggestion(path: str, value: Any = None) -> str:
    """Answer an unknown key or section with the key that was meant: "did you mean rollout.n?"; "" if none is similar.

    path: section.key; tables in lists as data.tasks[].name. value: of the key, whose own keys are looked at where it is
    a table.
    """
    # Another trainer's, or a whole section of another trainer's.
    for name in (path, *_inner(value)):
        if answer := known_elsewhere(name):
            return answer

    # A typo here, the same name in another section, a typo there.
    known = [key.path for key in keys()]
    section, _, last = path.rpartition(".")
    here = (
        [key for key in known if key.rpartition(".")[0] == section]
        if section
        else sorted({k.split(".")[0] for k in known})
    )
    if path in here:  # nothing is wrong with it
        return ""
    close = _close(path, here) or [key for key in known if key.rpartition(".")[2] == last] or _named_alike(last, known)
    return f"did you mean {' or '.join(close[:_MOST])}?" if close else ""


def _inner(value: Any) -> list[str]:
    """The keys of a table and of those in it."""
    if not isinstance(value, Mapping):
        return []
    return [name for key, inner in value.items() for name in (str(key), *_inner(inner))]


def _close(path: str, known: list[str]) -> list[str]:
    """By their last parts, for what they share would make everything alike."""
    by_last = {key.rpartition(".")[2]: key for key in known}
    return [by_last[name] for name in difflib.get_close_matches(path.rpartition(".")[2], by_last, n=_MOST, cutoff=0.6)]


def _named_alike(last: str, known: list[str]) -> list[str]:
    names = difflib.get_close_matches(last, {key.rpartition(".")[2] for key in known}, n=1, cutoff=0.75)
    return [key for key in known if key.rpartition(".")[2] in names]
