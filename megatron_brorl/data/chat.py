"""Prompts as conversations, and the variables and dates of the chat templates that frame them."""

from __future__ import annotations

import datetime
import re
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta
from jinja2.defaults import DEFAULT_NAMESPACE

from megatron_brorl.config.schema import DataConfig
from megatron_brorl.errors import UserError

Message = dict[str, str]  # {"role": ..., "content": ...}

_KEY = "data.chat_template_kwargs"
# transformers has a tag for the assistant's text, which jinja2 does not know.
_GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")

# A macro replaces strftime_now, with which templates write today's date, because transformers' function reads the clock
# and no function can be passed to a template. Its line break is removed, as at the beginning of a template.
DATE = "strftime_now"
_PARTS = "strftime_parts"
_MACRO = (
    f"{{%- macro {DATE}(form) -%}}{{%- set at = namespace(mark='') -%}}{{%- for c in form -%}}"
    "{%- if at.mark -%}{%- set at.mark = at.mark + c -%}"
    f"{{%- if at.mark in {_PARTS} -%}}{{{{ {_PARTS}[at.mark] }}}}{{%- set at.mark = '' -%}}{{%- endif -%}}"
    "{%- elif c == '%' -%}{%- set at.mark = c -%}{%- else -%}{{ c }}{%- endif -%}"
    "{%- endfor -%}{{ at.mark }}{%- endmacro %}\n"
)

_RESERVED = {"messages", "add_generation_prompt", "raise_exception", DATE, *DEFAULT_NAMESPACE}

_ROLES = ("system", "user", "assistant")


def check_messages(prompt: Sequence[Any], where: str) -> list[Message]:
    """Return the messages of a row. Raises UserError naming the first that is malformed.

    At most one system message may come first, and the last message is the user's.
    """
    if not prompt:
        raise UserError(f"{where}: prompt must be a string or a list of messages that is not empty")
    messages = []
    for i, raw in enumerate(prompt):
        name = f"{where}: prompt[{i}]"

        # Parquet gives every object the keys of all others, with null.
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
    """Return a conversation without the assistant's last message, and its text, or None."""
    last = prompt[-1] if prompt else None
    if isinstance(last, dict) and last.get("role") == "assistant":
        return prompt[:-1], last.get("content")
    return prompt, None


def spoken(prompt: str | Sequence[Message]) -> str:
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


def default_template(template: object, directory: Path) -> str:
    """Return the text of a tokenizer's chat template. Raises UserError if it has another type."""
    if isinstance(template, dict):  # several by name
        template = template.get("default")
    if not isinstance(template, str):
        raise UserError(
            f"{directory}/tokenizer_config.json: chat_template must be one text, not {type(template).__name__}; "
            "keep the default one"
        )
    return template


def dated(template: str, date: datetime.date) -> dict[str, Any]:
    """Return arguments of apply_chat_template with which the template writes this date as today's, at 0:00."""
    begin = datetime.datetime.combine(date, datetime.time())
    directives = [flag + letter for flag in ("", *"-_0^#") for letter in string.ascii_letters + "%"]
    parts = {f"%{directive}": begin.strftime(f"%{directive}") for directive in directives}
    # An unknown directive comes back as it was.
    return {"chat_template": _MACRO + template, _PARTS: {key: text for key, text in parts.items() if key != text}}


def check_variables(template: str, variables: Mapping[str, Any], directory: Path) -> None:
    """Raise UserError for a variable that the template does not read, because it would change nothing."""
    plain = _GENERATION.sub(lambda m: f"{{%{m[1]} {'endif' if m[2] else 'if true'} {m[3]}%}}", template)
    try:
        parsed = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)
    except jinja2.TemplateSyntaxError:
        return  # Rendering the template reports it.
    known = sorted(meta.find_undeclared_variables(parsed) - _RESERVED)
    for name in variables:
        if name not in known:
            raise UserError(
                f"{_KEY}.{name}: the chat template of {directory} reads no such variable; it reads: "
                f"{', '.join(known) or 'none'}; correct or remove the name"
            )
