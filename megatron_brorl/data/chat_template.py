"""Chat templates are programs of whoever made a tokenizer: one is tried in another process before it runs in ours."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_brorl.data.chat import Message
from megatron_brorl.errors import UserError

SECONDS = 5.0
_MEMORY = 2 << 30  # bytes of address space

# As transformers renders it, and with nothing else: it imports in a tenth of a second.
_TRIAL = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2)
from jinja2.sandbox import ImmutableSandboxedEnvironment
template, messages = json.load(sys.stdin)
loops = ["jinja2.ext.loopcontrols"]
environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=loops)
environment.from_string(template).render(messages=messages, add_generation_prompt=True)
"""


def template_ends(template: object, messages: Sequence[Message], directory: Path) -> None:
    """Raise UserError where the template is no text, or does not end for these messages.

    What it says of them, and whether it refuses them, is seen where it is used.
    """
    where = f"{directory}/tokenizer_config.json"
    if isinstance(template, dict):  # several by name
        template = template.get("default")
    if not isinstance(template, str):
        raise UserError(f"{where}: chat_template must be one text, not {type(template).__name__}; keep the default one")
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _TRIAL, str(_MEMORY)],
            input=json.dumps([template, list(messages)]),
            text=True,
            capture_output=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"{where}: the chat template does not end within {SECONDS:g} s; mend it") from None
    if "MemoryError" in done.stderr:
        raise UserError(f"{where}: the chat template wants more than {_MEMORY >> 30} GiB of memory; mend it")
