"""Prompts as conversations: what a row may say, and what a chat template is applied to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_brorl.config.schema import DataConfig
from megatron_brorl.errors import UserError

Message = dict[str, str]  # {"role": ..., "content": ...}

_ROLES = ("system", "user", "assistant")


def check_messages(prompt: Sequence[Any], where: str) -> list[Message]:
    """The messages of a row, well formed. Raises UserError naming the first that is not.

    At most one system message, which comes first; the last is the user's, for the response is to answer it.
    """
    if not prompt:
        raise UserError(f"{where}: prompt must be a string or a list of messages that is not empty")
    messages = []
    for i, raw in enumerate(prompt):
        name = f"{where}: prompt[{i}]"

        # Parquet gives every object the keys of all others, as null.
        message = {k: v for k, v in raw.items() if v is not None} if isinstance(raw, dict) else {}
        if set(message) != {"role", "content"} or not all(isinstance(v, str) for v in message.values()):
            raise UserError(f'{name} must be {{"role": "...", "content": "..."}} with strings and no other keys')

        # Roles that a template knows, in an order that it can frame.
        role = message["role"]
        if role not in _ROLES:
            raise UserError(f"{name}: unknown role {role!r}; known: {', '.join(_ROLES)}")
        if role == "system" and i:
            raise UserError(f"{name}: a system message may only come first")
        messages.append(message)

    last = messages[-1]
    if last["role"] != "user" or not last["content"].strip():
        raise UserError(f"{where}: the last message of a prompt must be the user's, and not empty")
    return messages


def split_answer(prompt: Sequence[Any]) -> tuple[Sequence[Any], Any]:
    """A conversation without the assistant's message at its end, and what that says; None where there is none."""
    last = prompt[-1] if prompt else None
    if isinstance(last, dict) and last.get("role") == "assistant":
        return prompt[:-1], last.get("content")
    return prompt, None


def spoken(prompt: str | Sequence[Message]) -> str:
    """What a prompt says, without its frame."""
    return prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)


def conversation(prompt: str | Sequence[Message], config: DataConfig, where: str) -> list[Message]:
    """The messages that the chat template is applied to; data.template goes around the last one.

    Raises UserError where data.system_prompt would be a second system message.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    *earlier, last = messages
    framed = {**last, "content": config.template.replace("{prompt}", last["content"], 1)}
    if not config.system_prompt:
        return [*earlier, framed]
    if messages[0]["role"] == "system":
        raise UserError(f"{where}: has a system message of its own; leave out data.system_prompt, or that message")
    return [{"role": "system", "content": config.system_prompt}, *earlier, framed]
