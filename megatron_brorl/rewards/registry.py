"""The verifiers by name. A verifier maps (answer, reference, metadata of the prompt) to a reward in [0, 1]."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron_brorl.errors import UserError

Verifier = Callable[[str, str | None, Mapping[str, Any]], float]


def exact(answer: str, reference: str | None, metadata: Mapping[str, Any]) -> float:
    """1 if the answer is the reference, white space at the ends aside."""
    return float(reference is not None and answer.strip() == reference.strip())


def _reasoning_gym() -> Verifier:
    from megatron_brorl.rewards import gym_verifier  # only the workers pay for the import

    return gym_verifier.score


_VERIFIERS: Mapping[str, Callable[[], Verifier]] = {"exact": lambda: exact, "reasoning_gym": _reasoning_gym}
NAMES = tuple(_VERIFIERS)


def check_verifier(name: str, where: str) -> None:
    """Raise UserError unless there is a verifier of that name."""
    if name not in _VERIFIERS:
        raise UserError(f"{where}: no verifier is called {name!r}; known: {', '.join(NAMES)}")


def verifier(name: str) -> Verifier:
    """The verifier of that name, its library imported."""
    check_verifier(name, "verifier")
    return _VERIFIERS[name]()
