"""Data rows as verifiers receive them."""

from __future__ import annotations

from typing import Any

from megatron_brorl.rewards.verifier import VerifierRow


def row(answer: str | None = None, prompt: str = "?", **metadata: Any) -> VerifierRow:
    return VerifierRow(id="r", prompt=prompt, answer=answer, metadata=metadata)
