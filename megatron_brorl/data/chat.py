"""Conversations as prompts, and the variables and dates of chat templates."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_brorl.config.schema import DataConfig
from megatron_brorl.errors import UserError, shown
from megatron_brorl.files import read_object

# {"role": str, "content": str}; the assistant may add "tool_calls", and a tool its "name" and "tool_call_id".
Message = dict[str, Any]

# A macro replaces strftime_now, which templates call for today's date. transformers' function reads the clock, and it
# accepts no function as a variable of a template. Jinja removes the line break after the macro.
DATE = "strftime_now"
_DATES = "strftime_dates"
_MACRO = (
    f"{{%- macro {DATE}(form) -%}}{{{{ {_DATES}[form] if form in {_DATES} else "
    f"raise_exception('{DATE} needs a literal format') }}}}{{%- endmacro %}}\n"
)
_DATE_CALL = re.compile(rf"\b{DATE}\(\s*(['\"])(.*?)\1\s*\)")

_KEYS = {
    "system": {"role", "content"},
    "user": {"role", "content"},
    "assistant": {"role", "content", "tool_calls"},
    "tool": {"role", "content", "name", "tool_call_id"},
}  # of a message, by role


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
    messages = [_check_message(raw, f"{where}: prompt[{i}]", i == 0) for i, raw in enumerate(prompt)]
    last = messages[-1]
    if last["role"] != "user" or not last["content"].strip():
        raise UserError(f"{where}: the last message of a prompt must be the user's, and not empty")
    return messages


def check_turns(turns: Sequence[Any], where: str, first: int) -> list[Message]:
    """Return the messages after the last one of the user, from prompt[first] on. Raises UserError if one is malformed.

    The assistant's messages alternate with one or more tool results, and the last message is the assistant's.
    """
    messages = [_check_message(raw, f"{where}: prompt[{first + i}]", False) for i, raw in enumerate(turns)]
    if messages and not re.fullmatch("a(t+a)*", "".join(message["role"][0] for message in messages)):
        raise UserError(
            f"{where}: prompt[{first}] and later: after the last message of the user, messages of the assistant and "
            "tool results must alternate, and the last one must be the assistant's"
        )
    return messages


def _check_message(raw: Any, name: str, is_first: bool) -> Message:
    # Parquet adds the keys of all other objects, with null.
    message = _without_nulls(raw)
    role = message.get("role")
    if isinstance(role, str) and role not in _KEYS:
        raise UserError(f"{name}: unknown role {role!r}; known: {', '.join(_KEYS)}")
    if role == "system" and not is_first:
        raise UserError(f"{name}: a system message may only come first")

    calls = message.pop("tool_calls", []) if role == "assistant" else []
    if calls:
        message.setdefault("content", "")
    keys = set(message)
    if not {"role", "content"} <= keys <= _KEYS.get(str(role), set()) or not all(
        isinstance(value, str) for value in message.values()
    ):
        raise UserError(f'{name} must be {{"role": "...", "content": "..."}} with strings and no other keys')
    if not isinstance(calls, list):
        raise UserError(f"{name}.tool_calls must be a list")
    if calls:
        message["tool_calls"] = [_check_call(call, f"{name}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return message


def _check_call(raw: Any, name: str) -> dict[str, Any]:
    """Return a tool call in OpenAI's format, with its arguments as an object, which chat templates expect."""
    function = _without_nulls(_without_nulls(raw).get("function"))
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as e:
            raise UserError(f"{name}.function.arguments: not valid JSON: {shown(e)}") from None
    if not isinstance(function.get("name"), str) or not isinstance(arguments, dict):
        raise UserError(f'{name} must be {{"function": {{"name": "...", "arguments": {{...}}}}}}')
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _without_nulls(raw: Any) -> dict[str, Any]:
    return {k: v for k, v in raw.items() if v is not None} if isinstance(raw, dict) else {}


def split_turns(prompt: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Split a conversation after the last message of the user."""
    users = [i for i, raw in enumerate(prompt) if isinstance(raw, dict) and raw.get("role") == "user"]
    end = users[-1] + 1 if users else len(prompt)
    return prompt[:end], prompt[end:]


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
