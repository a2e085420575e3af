"""Conversations as prompts, and the variables and dates of chat templates."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_brorl.config.schema import DataConfig
from megatron_brorl.errors import UserError
from megatron_brorl.files import read_object

Message = dict[str, str]  # {"role": ..., "content": ...}

# A macro replaces strftime_now, which templates call for today's date. transformers' function reads the clock, and it
# accepts no function as a variable of a template. Jinja removes the line break after the macro.
DATE = "strftime_now"
_DATES = "strftime_dates"
_MACRO = (
    f"{{%- macro {DATE}(form) -%}}{{{{ {_DATES}[form] if form in {_DATES} else "
    f"raise_exception('{DATE} needs a literal format') }}}}{{%- endmacro %}}\n"
)
_DATE_CALL = re.compile(rf"\b{DATE}\(\s*(['\"])(.*?)\1\s*\)")

_ROLES = ("system", "user", "assistant")


def has_chat_template(model: Path) -> bool:
    """Return whether a model directory has a chat template, as transformers stores it."""
    if (model / "chat_template.jinja").is_file():
        return True
    config = model / "tokenizer_config.json"
    return config.is_file() and bool(read_object(config).get("chat_template"))


def check_messages(prompt: Sequence[Any], where: str) -> list[Message]:
    """Return the messages of a row. Raises UserError naming the first that is malformed.

    At most one system message may come first, and the last message is the user's.
    """
    if not prompt:
        raise UserError(f"{where}: prompt must be a string or a list of messages that is not empty")
    messages = []
    for i, raw in enumerate(prompt):
        name = f"{where}: prompt[{i}]"

        # Parquet adds the keys of all other objects, with null.
        message = {k: v for k, v in raw.items() if v is not None} if isinstance(raw, dict) else {}
        if set(message) != {"role", "content"} or not all(isinstance(v, str) for v in message.values()):
            raise UserError(f'{name} must be {{"role": "...", "content": "..."}} with strings and no other keys')
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
    """Split off a final message of the assistant. Return the other messages and its text, or None."""
    last = prompt[-1] if prompt else None
    if isinstance(last, dict) and last.get("role") == "assistant":
        return prompt[:-1], last.get("content")
    return prompt, None


def prompt_text(prompt: str | Sequence[Message]) -> str:
    """Return the text of a prompt without roles."""
    return prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)


def conversation(prompt: str | Sequence[Message], config: DataConfig, where: str) -> list[Message]:
    """Return the messages for the chat template, with data.template around the last one.

    Raises UserError if data.system_prompt would be a second system message.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    *earlier, last = messages
    framed = {**last, "content": config.template.replace("{prompt}", last["content"], 1)}
    if not config.system_prompt:
        return [*earlier, framed]
    if messages[0]["role"] == "system":
        raise UserError(f"{where}: has a system message of its own; remove data.system_prompt or that message")
    return [{"role": "system", "content": config.system_prompt}, *earlier, framed]


def date_variables(template: str, date: datetime.date) -> dict[str, Any]:
    """Return arguments of apply_chat_template with which the template writes this date as today's, at 0:00."""
    midnight = datetime.datetime.combine(date, datetime.time())
    dates = {form: midnight.strftime(form) for _, form in _DATE_CALL.findall(template)}
    return {"chat_template": _MACRO + template, _DATES: dates}


def plain_text(messages: Sequence[Message]) -> str:
    """Return the text that follows a turn without a chat template: results of tools in tags, or an observation."""
    return "".join(f"<result>{m['content']}</result>" if m["role"] == "tool" else m["content"] for m in messages)


def mentions(template: str, variable: str) -> bool:
    """Return whether a template mentions a variable."""
    return re.search(rf"\b{re.escape(variable)}\b", template) is not None


def check_variables(template: str, variables: Mapping[str, Any], directory: Path) -> None:
    """Raise UserError for a variable that the template does not mention, because it would change nothing."""
    for name in variables:
        if not mentions(template, name):
            raise UserError(
                f"data.chat_template_kwargs.{name}: the chat template of {directory} reads no such variable; correct "
                "or remove the name"
            )
