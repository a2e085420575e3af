"""Section [environment]."""

from __future__ import annotations

from megatron_brorl.config.section import key, section

CALL_END = "</call>"  # ends a tool call in the plain format


@section
class EnvironmentConfig:
    """A rollout of several turns: the model calls tools, or answers observations of an environment.

    Tool calls have the format of the chat template with data.chat, and else a plain format with tags.
    """

    factory: str = key(
        "",
        'Class of the environment, "my_env.py:Calculator" or "package.module:Calculator". Each rollout has an object '
        'of it, which also gives the reward. "" samples single turns, which verifiers score.',
    )
    max_turns: int = key(8, "Maximum number of turns of the model.", ge=1)
    max_tool_seconds: float = key(10.0, "Seconds per call of an environment. After that, it is lost.", gt=0)
