"""Conversations as prompts, and the variables and dates of chat templates."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_brorl.config.schema import CALL_END, DataConfig
from megatron_brorl.errors import UserError
from megatron_brorl.files import read_object

# {"role": str, "content": str}; the assistant may add "tool_calls", and a tool its "name" and "tool_call_id".
Message = dict[str, Any]
Variables = Mapping[str, Any]  # of a chat template
NONE: Variables = MappingProxyType({})

# A macro replaces strftime_now, which templates call for today's date. transformers' function reads the clock, and it
# accepts no function as a variable of a template. Jinja removes the line break after the macro.
DATE = "strftime_now"
_DATES = "strftime_dates"
_MACRO = (
    f"{{%- macro {DATE}(form) -%}}{{{{ {_DATES}[form] if form in {_DATES} else "
    f"raise_exception('{DATE} needs a literal format') }}}}{{%- endmacro %}}\n"
)
_DATE_CALL = re.compile(rf"\b{DATE}\(\s*(['\"])(.*?)\1\s*\)")

_ROLES = ("system", "user", "assistant", "tool")


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
    messages, turns = check_conversation(prompt, where)
    if turns:
        raise UserError(f"{where}: the last message of a prompt must be the user's")
    return messages


def check_conversation(prompt: Sequence[Any], where: str) -> tuple[list[Message], list[Message]]:
    """Return the messages up to the last one of the user, and those after it. Raises UserError for the first mistake.

    After the last message of the user, turns of the assistant alternate with one or more results of tools.
    """
    messages = [_check_message(raw, f"{where}: prompt[{i}]") for i, raw in enumerate(prompt)]
    roles = "".join(message["role"][0] for message in messages)  # first letters: s, u, a, t
    end = roles.rfind("u") + 1
    if (misplaced := roles.rfind("s")) > 0:
        raise UserError(f"{where}: prompt[{misplaced}]: a system message may only come first")
    if not end or not messages[end - 1]["content"].strip():
        raise UserError(f"{where}: prompt must be a string or a list with a message of the user that is not empty")
    if not re.fullmatch("(a(t+a)*)?", roles[end:]):
        raise UserError(
            f"{where}: prompt[{end}] and later: after the last message of the user, messages of the assistant and "
            "results of tools must alternate, and the last one must be the assistant's"
        )
    return messages[:end], messages[end:]


def _check_message(raw: Any, name: str) -> Message:
    # Parquet adds the keys of all other objects, with null.
    message = {k: v for k, v in raw.items() if v is not None} if isinstance(raw, dict) else {}
    role = message.get("role")
    if isinstance(role, str) and role not in _ROLES:
        raise UserError(f"{name}: unknown role {role!r}; known: {', '.join(_ROLES)}")
    calls = message.pop("tool_calls", []) if role == "assistant" else []
    if calls:
        message.setdefault("content", "")
    optional = {"name", "tool_call_id"} if role == "tool" else set()
    keys = {"role", "content"}
    if not keys <= set(message) <= (keys | optional) or not all(isinstance(value, str) for value in message.values()):
        raise UserError(f'{name} must be {{"role": "...", "content": "..."}} with strings and no other keys')
    return {**message, "tool_calls": _check_calls(calls, f"{name}.tool_calls")} if calls else message


def _check_calls(raw: Any, name: str) -> list[dict[str, Any]]:
    """Return tool calls in OpenAI's format, with their arguments as objects, which chat templates expect."""
    calls = []
    try:
        for function in (call["function"] for call in raw):
            function_name, arguments = function["name"], function["arguments"]
            if not isinstance(function_name, str):
                raise TypeError
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            calls.append({"type": "function", "function": {"name": function_name, "arguments": {**arguments}}})
    except (KeyError, TypeError, ValueError, RecursionError):
        form = '{"function": {"name": "...", "arguments": {...}}}'
        raise UserError(f"{name} must be a list of {form}; arguments may be a string with a JSON object") from None
    return calls


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


def plain_ids(messages: Sequence[Message], encode: Callable[[str], list[int]], eos_id: int) -> list[int]:
    """Return the ids of the concatenated texts of messages, for models without a chat template.

    The result of a tool is put between <result> tags. If the last turn is the assistant's and does not end with
    </call>, the EOS token follows.
    """
    texts = [f"<result>{m['content']}</result>" if m["role"] == "tool" else m["content"] for m in messages]
    needs_eos = messages[-1]["role"] == "assistant" and not texts[-1].endswith(CALL_END)
    return encode("".join(texts)) + ([eos_id] if needs_eos else [])
