"""The check of verifiers that a command makes before it loads a model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_brorl.rewards.preflight import check_references
from megatron_brorl.types import Prompt

if TYPE_CHECKING:
    from megatron_brorl.cli.build import Session


def check(session: Session, prompts: Sequence[Prompt]) -> str:
    """What the verifiers make of reference answers, in words, on the main rank; warnings go to stderr. A collective.

    Raises UserError, on all ranks, where a verifier cannot judge them.
    """

    def look() -> str:
        if not session.is_main_rank:
            return ""
        found, warnings = check_references(session.pool, prompts, session.config.reward)
        for warning in warnings:
            print(f"warning: {warning}", file=sys.stderr, flush=True)
        return found

    return session.together(look)
