"""Chat templates are programs: each is tried in another process first, and its variables are checked."""

from __future__ import annotations

import datetime
import json
import re
import string
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta
from jinja2.defaults import DEFAULT_NAMESPACE

from megatron_brorl.data.chat import Message
from megatron_brorl.errors import UserError

SECONDS = 5.0
_MEMORY = 2 << 30  # bytes of address space
_KEY = "data.chat_template_kwargs"
# transformers marks the assistant's text by a tag of its own, which plain jinja2 does not know.
_GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")

# strftime_now, by which templates write today's date, as a macro: transformers' function asks the clock, and it passes
# no functions to templates. The line break ends the line, as before the first character of a template.
DATE = "strftime_now"
_PARTS = "strftime_parts"
_MACRO = (
    f"{{%- macro {DATE}(form) -%}}{{%- set at = namespace(mark='') -%}}{{%- for c in form -%}}"
    "{%- if at.mark -%}{%- set at.mark = at.mark + c -%}"
    f"{{%- if at.mark in {_PARTS} -%}}{{{{ {_PARTS}[at.mark] }}}}{{%- set at.mark = '' -%}}{{%- endif -%}}"
    "{%- elif c == '%' -%}{%- set at.mark = c -%}{%- else -%}{{ c }}{%- endif -%}"
    "{%- endfor -%}{{ at.mark }}{%- endmacro %}\n"
)

# Names in a template that are not the user's variables.
_RESERVED = {"messages", "add_generation_prompt", "raise_exception", DATE, *DEFAULT_NAMESPACE}

# As transformers renders it, and with nothing else: it imports in a tenth of a second.
_TRIAL = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2)
from jinja2.sandbox import ImmutableSandboxedEnvironment
template, messages, variables = json.load(sys.stdin)
loops = ["jinja2.ext.loopcontrols"]
environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=loops)
environment.globals["strftime_now"] = lambda form: form
environment.from_string(template).render(messages=messages, add_generation_prompt=True, **variables)
"""


def default_template(template: object, directory: Path) -> str:
    """Return the text of a tokenizer's chat template. Raises UserError where it is none."""
    if isinstance(template, dict):  # several by name
        template = template.get("default")
    if not isinstance(template, str):
        raise UserError(
            f"{_file(directory)}: chat_template must be one text, not {type(template).__name__}; keep the default one"
        )
    return template


def dated(template: str, date: datetime.date) -> dict[str, Any]:
    """Return arguments of apply_chat_template with which the template writes this date as today's, at 0:00."""
    begin = datetime.datetime.combine(date, datetime.time())
    directives = [flag + letter for flag in ("", *"-_0^#") for letter in string.ascii_letters + "%"]
    parts = {f"%{directive}": begin.strftime(f"%{directive}") for directive in directives}
    # An unknown directive comes back as it was.
    return {"chat_template": _MACRO + template, _PARTS: {key: text for key, text in parts.items() if key != text}}


def check_template(template: str, messages: Sequence[Message], variables: Mapping[str, Any], directory: Path) -> None:
    """Raise UserError where the template does not end for these messages, or reads no such variable.

    Whether it refuses the messages shows when it is rendered.
    """
    plain = _GENERATION.sub(lambda m: f"{{%{m[1]} {'endif' if m[2] else 'if true'} {m[3]}%}}", template)
    _check_variables(plain, variables, directory)

    # A loop without end, or one that fills the memory, ends there and not here.
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _TRIAL, str(_MEMORY)],
            input=json.dumps([plain, list(messages), dict(variables)]),
            text=True,
            capture_output=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"{_file(directory)}: the chat template does not end within {SECONDS:g} s; fix it") from None
    if "MemoryError" in done.stderr:
        raise UserError(f"{_file(directory)}: the chat template wants more than {_MEMORY >> 30} GiB of memory; fix it")


def _check_variables(template: str, variables: Mapping[str, Any], directory: Path) -> None:
    """Raise UserError for a variable that the template does not read: a misspelt one would change nothing."""
    try:
        parsed = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except jinja2.TemplateSyntaxError:
        return  # transformers says what is wrong when it renders the template
    known = sorted(meta.find_undeclared_variables(parsed) - _RESERVED)
    for name in variables:
        if name not in known:
            raise UserError(
                f"{_KEY}.{name}: the chat template of {directory} reads no such variable; it reads: "
                f"{', '.join(known) or 'none'}; correct the name, or leave it out"
            )


def _file(directory: Path) -> str:
    return f"{directory}/tokenizer_config.json"
