"""Section [agent]."""

from __future__ import annotations

from typing import Literal

from megatron_brorl.config.section import key, section


@section
class AgentConfig:
    """A rollout is a run of a function of yours, which calls the policy through an OpenAI-compatible endpoint."""

    function: str = key(
        "",
        'Function that solves a row, "my_agent.py:solve" or "package.module:solve". Each rollout is a call of it. "" '
        "samples responses or environments.",
    )
    history: Literal["keep", "template"] = key(
        "keep",
        '"keep": a call that repeats an earlier one and its reply continues its tokens. "template": it does so only if '
        "the chat template, which may drop thoughts of earlier turns, gives the same tokens.",
    )
    max_calls: int = key(64, "Maximum number of calls of a rollout.", ge=1)
    max_seconds: float = key(300.0, "Seconds that a rollout may take. After that, it scores 0.", gt=0)
