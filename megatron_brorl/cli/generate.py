"""`brorl generate`: sample responses of a model to a prompt, with the built-in engine."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from megatron_brorl.data.chat import has_chat_template
from megatron_brorl.data.hub import model_directory
from megatron_brorl.rollout_log import printable

_MAX_TOKENS = 256


def add_command(commands: Any) -> None:
    """Add the command to the parser of `brorl`."""
    text = "sample responses of a model to a prompt"
    command = commands.add_parser("generate", help=text, description=text)
    command.add_argument(
        "model", metavar="MODEL", help="Hugging Face directory, such as the `model` of a run, or a name on the hub"
    )
    command.add_argument("prompt", metavar="PROMPT")
    command.add_argument("-n", type=int, default=1, help="number of responses (%(default)s)")
    text = f"maximum tokens of a response (default: {_MAX_TOKENS}, or half of the model's context if that is less)"
    command.add_argument("--max-tokens", type=int, help=text)
    command.add_argument("--temperature", type=float, default=1.0, help="0 is greedy decoding (%(default)s)")
    command.add_argument("--seed", type=int, default=0, help="seed of the random numbers (%(default)s)")
    command.add_argument("--raw", action="store_true", help="do not apply the model's chat template")
    command.set_defaults(command=_generate)


def _generate(args: argparse.Namespace) -> int:
    from megatron_brorl.parallel import cpu_bridge

    cpu_bridge.disable_compiler()
    from megatron_brorl.api.engine import Engine
    from megatron_brorl.families.shape import read_shape

    directory = model_directory(args.model, "MODEL")
    max_tokens = args.max_tokens
    if max_tokens is None:
        max_tokens = min(_MAX_TOKENS, read_shape(directory, "MODEL").context // 2)
    chat = not args.raw and has_chat_template(directory)
    if chat:
        print("the prompt is a user message in the model's chat template; --raw leaves it out", file=sys.stderr)
    prompt = [{"role": "user", "content": args.prompt}] if chat else args.prompt

    with Engine.from_pretrained(directory) as engine:
        [samples] = engine.sample([prompt], args.n, max_tokens=max_tokens, temperature=args.temperature, seed=args.seed)
    for i, sample in enumerate(samples):
        ended = "cut off" if sample.finish == "length" else "ended by itself"
        print(f"--- {i}, {len(sample.token_ids)} tokens, {ended}\n{printable(sample.text)}")
    return 0
